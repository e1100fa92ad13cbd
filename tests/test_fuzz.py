"""A few hundred mutations of real files; ``python -m tests.benchmarks.fuzz`` plays many more."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzzing import TARGETS, Report, make_seeds, play

HEAVY = ("config, built", "tokenizer", "tokenizer config")  # libraries are called


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory):
    return make_seeds(tmp_path_factory.mktemp("seeds"))


@pytest.mark.parametrize("target", TARGETS)
def test_an_error_of_ours_or_a_result(target: str, seeds, tmp_path_factory: pytest.TempPathFactory) -> None:
    scratch = tmp_path_factory.mktemp("scratch")

    @settings(max_examples=15 if target in HEAVY else 60, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.integers(0, 2**32))
    def run(seed: int) -> None:
        report = Report()
        play(target, seeds, scratch, seed, report)
        assert report.problems == []

    run()
