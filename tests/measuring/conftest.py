"""A model and made-up records in the form of TOFU's."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.helpers.evaluation import tofu_row
from tests.helpers.models import random_model, save


@pytest.fixture
def tofu(tmp_path: Path) -> Path:
    """A folder with TOFU's splits, filled with made-up words."""
    folder = tmp_path / "tofu"
    folder.mkdir()
    rng = random.Random(0)
    splits = ("forget01_perturbed", "retain_perturbed", "real_authors_perturbed", "world_facts_perturbed", "holdout01")
    for split in splits:
        rows = [json.dumps(tofu_row(rng)) for _ in range(7)]
        (folder / f"{split}.json").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(random_model("llama"), tmp_path / "model")
