"""Measured numbers stand once, in docs/data, and the pages and pictures are made from there."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from scipy.stats import binom

from tests.benchmarks import price
from tests.helpers.paths import ROOT

DATA = ROOT / "docs/data"
DECIMAL = re.compile(r"(?<![\w.,])\d+\.\d+(?![\w.])")


def site_module(name: str) -> ModuleType:
    """A script of docs/site as a module."""
    sys.path.insert(0, str(ROOT / "docs/site"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


tables = site_module("tables")


def numbers(text: str) -> set[float]:
    return {float(number) for number in DECIMAL.findall(text)}


def test_every_page_has_the_tables_of_the_data_files() -> None:
    """Cell by cell, by a reader of our own; a table stands on one page, and each data file is on one."""
    named = Counter(name for names in tables.pages_with_tables().values() for name in names)
    assert set(named.values()) == {1}
    assert set(named) | {"relearning_curve"} == {path.stem for path in DATA.glob("*.csv")}
    assert set(tables.read_commands()) <= set(named)
    for page, names in tables.pages_with_tables().items():
        text = page.read_text(encoding="utf-8")
        for name in names:
            block = text.split(f"<!-- table: {name} -->")[1].split("<!-- end of table -->")[0]
            lines = [line for line in block.splitlines() if line.startswith("|")]
            cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines[:1] + lines[2:]]
            with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
                assert [[cell.strip().replace("\\|", "|") for cell in row] for row in cells] == [*csv.reader(file)], (
                    name
                )
        assert text == tables.with_tables(text), f"{page}: run python docs/site/tables.py"


@pytest.mark.parametrize("path", sorted(DATA.glob("*.csv")), ids=lambda path: path.stem)
def test_data_files_are_tables(path: Path) -> None:
    header, *rows = tables.read_table(path.stem)
    assert len(set(header)) == len(header)
    assert all(header)
    assert rows
    assert all(len(row) == len(header) for row in rows)


def test_numbers_in_the_text_of_the_results_are_in_its_tables() -> None:
    """With a decimal point; others are settings, such as steps and percentages."""
    text = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    prose = re.sub(r"<!-- table: .*?<!-- end of table -->|`[^`]*`", "", text, flags=re.DOTALL)
    cells = " ".join(cell for path in DATA.glob("*.csv") for row in tables.read_table(path.stem) for cell in row)
    assert numbers(prose)
    assert numbers(prose) <= numbers(cells)


@pytest.mark.slow
def test_the_price_is_what_the_benchmark_computes() -> None:
    """Of the smallest model; the others take minutes."""
    rows = [row for row in tables.read_table("price") if row[0] == "model" or row[0].startswith("1B")]
    assert rows == [price.HEADER, *price.rows_of("1b")]


def test_the_curve_and_the_table_of_relearning_agree() -> None:
    """Both have the probability after 0, 5 and 20 steps, written by two programs."""
    rows = tables.read_table("relearning")[1:]
    curve = {(model, steps): float(value) for model, steps, value, *_ in tables.read_table("relearning_curve")[1:]}
    names = {"*before*": "before", "*never saw the records*": "never saw them"}
    compared = 0
    for row in rows:
        model = names.get(row[0], row[0].strip("`"))
        for steps, value in zip(("0", "5", "20"), row[-1].split(" → "), strict=True):
            if (model, steps) in curve:
                assert curve[model, steps] == pytest.approx(float(value), abs=6e-4)
                compared += 1
    assert compared == 18


def test_the_pictures_are_drawn_from_the_data(tmp_path: Path) -> None:
    """Redrawn, the coordinates are those of the pictures in docs/."""
    site_module("pictures").main(tmp_path)
    for name in ("frontier.svg", "relearning.svg"):
        drawn, published = (
            [
                float(number)
                for number in re.findall(r"-?\d+\.?\d*", re.sub(r"<defs>.*?</defs>", "", picture, flags=re.S))
            ]
            for picture in (path.read_text(encoding="utf-8") for path in (tmp_path / name, ROOT / "docs" / name))
        )
        assert drawn == pytest.approx(published, abs=0.01), f"{name}: run python docs/site/pictures.py"


def test_the_picture_of_a_terminal_has_the_steps_of_the_readme() -> None:
    """.ci/run compares what they print, too."""
    terminal = site_module("terminal")
    picture = (ROOT / "docs/terminal.svg").read_text(encoding="utf-8")
    steps = terminal.read_steps((ROOT / "README.md").read_text(encoding="utf-8"))
    commands = [f"{party}$ {command}" for party, command in steps if command.startswith("mpu ")]
    assert len(commands) == 5
    described = picture.split("<desc>")[1].split("</desc>")[0].splitlines()
    assert [line for line in described if re.match(r"(server|client)\$ ", line)] == commands


def test_the_example_of_bounds_prints_its_page() -> None:
    """The table that it makes of the rows beside the page is the page's, cell by cell."""
    specification = importlib.util.spec_from_file_location("bounds", ROOT / "examples/bounds.py")
    assert specification
    assert specification.loader
    bounds = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(bounds)
    rows = [json.loads(line) for line in (ROOT / "docs/bounds.jsonl").read_text(encoding="utf-8").splitlines()]
    header, _, *lines = [line.strip("| ").split(" | ") for line in bounds.table(rows)]
    with (DATA / "bounds.csv").open(encoding="utf-8", newline="") as file:
        expected_header, *expected = csv.reader(file)
    assert header == expected_header

    def as_numbers(row: list[str]) -> list[object]:
        return [float(cell) if re.fullmatch(r"[\d.e-]+", cell) else cell for cell in row]

    assert sorted(map(as_numbers, lines), key=str) == sorted(map(as_numbers, expected), key=str)


def test_the_count_of_runs_that_passed_is_that_of_the_tables() -> None:
    """In README and on the page. A row passes if its own numbers do; then 1 is among its steps that pass."""
    page, readme = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split()) for name in ("docs/outcome.md", "README.md")
    )
    for table in ("outcome", "outcome_earlier"):
        with (DATA / f"{table}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            left, kept = (float(row[name].removesuffix(" %")) for name in ("left", "kept"))
            passes = left <= 5 and kept >= 95
            if table == "outcome":  # earlier rows are judged by means alone
                in_tail, records = map(int, row["in the tail"].split(" of "))
                passes = passes and in_tail <= binom.ppf(0.95, records, 0.05)
            assert row["pass"] == ("yes" if passes else "no")
            steps = [float(step) for step in re.findall(r"[\d.]+", row["steps that pass"])]
            if table == "outcome":  # an earlier range is that in which both runs of a request pass
                assert (row["pass"] == "yes") == bool(steps and min(steps) <= 1 <= max(steps))
        passed = [row for row in rows if row["pass"] == "yes"]
        count = f"{len(passed)} of {len(rows)}"
        assert f"**At once, {count} runs passed" in page
        assert f"{count} runs" in readme
        if table == "outcome_earlier":
            for noise, kind in (("permanent", "permanent noise"), ("κ", "noise that cancels")):
                of_kind = [row for row in rows if row["noise"].startswith(noise)]
                assert f"{len([row for row in of_kind if row in passed])} of {len(of_kind)} with {kind}" in page
            assert len([row for row in rows if row["steps that pass"] == "none"]) == 2  # "All but two of the others"
