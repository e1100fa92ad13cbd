"""``mpu eval`` gives OpenUnlearning's numbers: golden/ has what its own evaluator says of tiny models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
CLOSE = 2e-6  # float32 on another machine
ATTACKS = ("auc", "forget", "holdout")


def rows_of(form: dict) -> dict[str, dict]:
    return form.get("value_by_index") or {}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("benchmark", ["TOFU", "MUSE"])
def test_numbers_are_the_suites(mpu: Callable, tmp_path: Path, architecture: str, benchmark: str) -> None:
    folder = GOLDEN / architecture
    golden = json.loads((folder / f"full.{benchmark}.json").read_text())
    out = tmp_path / "eval.json"
    options = {
        "TOFU": ("--benchmark", "tofu:forget01", "--reference-model", folder / "retain"),
        "MUSE": ("--benchmark", "muse", "--reading", "template=plain"),
    }[benchmark]
    data, log = GOLDEN / benchmark.lower(), folder / f"retain.{benchmark}.json"
    outcome = mpu("eval", folder / "full", *options, "--reading", f"data_dir={data}", "--retain-log", log, "--out", out)
    assert "OpenUnlearning's own numbers" not in outcome.err  # which would say that they differ
    metrics = json.loads(out.read_text())["metrics"]
    assert len(golden) >= {"TOFU": 31, "MUSE": 10}[benchmark]
    varied = set()
    for name, form in golden.items():
        value, actual = form["agg_value"], metrics[name]["agg_value"]
        assert actual == pytest.approx(value, abs=CLOSE * (100 if name == "privleak" else 1)), name
        varied.add(round(value, 6))
        sides = (
            [(form[side], metrics[name][side]) for side in ATTACKS[1:]] if "forget" in form else [(form, metrics[name])]
        )
        for theirs, ours in sides:
            assert rows_of(theirs).keys() == rows_of(ours).keys()
            for index, row in rows_of(theirs).items():
                for key, cell in row.items():
                    actual_cell = rows_of(ours)[index][key]
                    if isinstance(cell, str):
                        assert actual_cell == cell, (name, index, key)
                    elif cell is not None and not (isinstance(cell, float) and math.isnan(cell)):
                        assert actual_cell == pytest.approx(cell, abs=1e-5, rel=1e-5), (name, index, key)
    assert len(varied) > len(golden) / 2  # no metric is trivial on all of them
