"""Unlearning on copies that know less than the model, on the shared checkpoints."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from tests.helpers.models import needs_shared
from tests.helpers.paths import SHARED, example

LEVEL = 2.5  # nats per answer token on the records to be forgotten: where the clean runs are at a step of about 0.9
TRAINING = ("--algo", "npo", "--epochs", 4, "--batch-size", 8, "--lr", "1e-4")


@needs_shared
@pytest.mark.slow
@pytest.mark.exhaustive
def test_at_equal_forgetting_a_lossy_copy_costs_less(mpu: Callable, tmp_path: Path) -> None:
    """Three draws of noise against three orders of the records on the model itself, NPO, full training."""
    tofu = SHARED / "data/tofu"
    sets = {name: tmp_path / f"{name}.jsonl" for name in ("forget", "retain", "kept")}
    for name, file, count in (("forget", "forget01", 40), ("retain", "retain99", 400), ("kept", "retain99", 40)):
        rows = itertools.islice((tofu / f"{file}.json").open(), count)
        sets[name].write_text("".join(json.dumps(json.loads(row)) + "\n" for row in rows))
    full, public = SHARED / "models/full", SHARED / "models/pretrained"
    records = ("--forget", sets["forget"], "--retain", sets["retain"])
    scored = example("protection").Scored(full, {"forget": sets["forget"], "retain": sets["kept"]})
    before = scored.losses("retain")["retain"]
    rises: dict[str, list[float]] = {}
    for name, draw in itertools.product(("clean", "lossy"), (1, 2, 3)):
        root = tmp_path / f"{name}_{draw}"
        root.mkdir()
        noise = (
            ("--permanent-noise", 0.5, "--seed", draw) if name == "lossy" else ("--kappa", 0, "--symmetries", "none")
        )
        seed = ("--seed", draw) if name == "clean" else ()
        mpu("publish", full, "--public", public, "--copies", 1, *noise, "--dtype", "float32", cwd=root)
        mpu("unlearn", "copy_1", *records, *TRAINING, *seed, cwd=root)
        mpu("aggregate", "deltas", "--keys", "keys.bin", "--dtype", "float32", cwd=root)
        scored.towards(root / "unlearned")
        step = scored.step_to(LEVEL)
        assert step is not None
        scored.go(step)
        assert scored.losses("forget")["forget"] == pytest.approx(LEVEL, rel=0.05)
        rises.setdefault(name, []).append(scored.losses("retain")["retain"] - before)
    assert fmean(rises["lossy"]) < 0.75 * fmean(rises["clean"]), rises
