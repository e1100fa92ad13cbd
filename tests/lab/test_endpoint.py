"""``mpu eval --endpoint``, against a server process on the loopback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.endpoint import serving
from tests.helpers.models import DemoModel


@pytest.mark.slow
def test_numbers_are_those_of_the_weights(mpu: Callable, tmp_path: Path, demo: DemoModel) -> None:
    """Every metric that the endpoint allows has the value that it has on the files; with no echo, answers remain."""
    records = ["--benchmark", "qa", "--forget", demo.forget, "--retain", demo.retain, "--unseen", demo.retain]
    mpu("eval", demo.model, *records, "--out", tmp_path / "files.json")
    forms = json.loads((tmp_path / "files.json").read_text())["metrics"]
    with serving(demo.model) as url:
        evaluation = mpu("eval", demo.model, *records, "--endpoint", url, "--out", tmp_path / "served.json", "--json")
        document = json.loads((tmp_path / "served.json").read_text())
        assert set(forms) - set(evaluation.json["metrics"]) == {"mia_min_k_plus_plus", "mia_gradnorm"}
        for name, value in evaluation.json["metrics"].items():
            assert value == pytest.approx(forms[name]["agg_value"], rel=1e-3, abs=1e-4), name
        assert document["model"]["source"] == f"{url} small"
        assert document["model"]["fingerprint"] is None
        refused = mpu("eval", demo.model, *records, "--endpoint", url, "--metrics", "mia_gradnorm", "--out",
                      tmp_path / "x.json", check=False)  # fmt: skip
        assert refused.status == 2
        assert "cannot be computed from what --endpoint returns" in refused.err
    with serving(demo.model, "--no-echo") as url:
        mpu("eval", demo.model, *records, "--endpoint", url, "--out", tmp_path / "x.json", fails="no log-probabilities")
        rouge = next(name for name in forms if "ROUGE" in name)
        evaluation = mpu(
            "eval", demo.model, *records, "--endpoint", url, "--metrics", rouge, "--out", tmp_path / "y.json",
            "--json",
        )  # fmt: skip
        assert evaluation.json["metrics"][rouge] == pytest.approx(forms[rouge]["agg_value"], abs=1e-6)
    mpu("eval", demo.model, *records, "--endpoint", url, "--out", tmp_path / "z.json", refused="cannot be reached")
