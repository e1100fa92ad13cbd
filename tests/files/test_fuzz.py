"""Whatever the bytes: a result or an MpuError of one line, in seconds and a gigabyte, and nothing outside touched.

A few thousand mutations of real files; ``python -m tests.benchmarks.fuzz`` plays many more.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.fuzzing import READERS, TARGETS, Report, judge, make_seeds, play
from tests.helpers.paths import ROOT

HEAVY = ("config, built", "tokenizer", "tokenizer config", "special tokens", "added tokens", "chat template")
PARSERS = re.compile(
    r"json\.loads?\(|read_json_object\(|read_document\(|parse_document\(|read_lines\(|tomllib\.|"
    r"pyrage\.(passphrase\.)?decrypt|yaml\.|pickle\."
)
PACKAGE = ROOT / "mpu_cli"
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=12), inner, max_size=5),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory):
    return make_seeds(tmp_path_factory.mktemp("seeds"))


def test_every_module_that_parses_is_played() -> None:
    """A new reader has to be added to the list, and so to what is mutated."""
    parsing = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if PARSERS.search(path.read_text(encoding="utf-8"))
    }
    assert parsing == READERS.keys()
    played = {target for targets in READERS.values() if isinstance(targets, tuple) for target in targets}
    assert played <= TARGETS.keys()


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_not_mutated_is_read(target: str, seeds: Path, tmp_path: Path) -> None:
    """Or the test below would find that everything is refused."""
    source, _, read = TARGETS[target]
    folder = shutil.copytree(seeds / source, tmp_path / "input")
    report = Report()
    judge(target, lambda: read(folder), report)
    assert (report.ran, report.refused, report.problems) == (1, 0, [])


@pytest.mark.slow
@pytest.mark.parametrize("target", [name for name, (_, mutate, _) in TARGETS.items() if hasattr(mutate, "document")])
def test_any_json(target: str, seeds: Path, tmp_path: Path) -> None:
    """A document of hypothesis' own in place of ours, or in place of one of its entries."""
    source, mutate, read = TARGETS[target]
    folder = shutil.copytree(seeds / source, tmp_path / "input")
    path = folder / mutate.document
    entries = json.loads(path.read_text())

    @settings(max_examples=10 if target in HEAVY else 100, deadline=None, database=None, derandomize=True)
    @given(ANY_JSON, st.sampled_from(["", *entries]))
    def run(value: object, entry: str) -> None:
        path.write_text(json.dumps({**entries, entry: value} if entry else value))
        report = Report()
        judge(f"{target}: {value!r}"[:500], lambda: read(folder), report)
        assert report.problems == []

    run()


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
