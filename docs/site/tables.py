"""Write the tables of the pages from docs/data: python docs/site/tables.py

A page names a table, and everything between the two comments is written here:

    <!-- table: precision -->
    <!-- end of table -->

docs/data/precision.csv has its cells; docs/data/commands.toml has the command that measured them, if it is not named
in the page's text.
"""

from __future__ import annotations

import csv
import re
import sys
import textwrap
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs/data"
PAGES = ("docs", "examples", "tests/benchmarks")
LINE = 120  # characters
_PLACE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end of table -->", re.DOTALL)


def read_table(name: str) -> list[list[str]]:
    """The cells of docs/data/NAME.csv, the header first."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


@cache
def read_commands() -> dict[str, str]:
    """Table → the command that measured it."""
    sys.path.insert(0, str(ROOT))
    from mpu_cli.toml import read_toml

    return read_toml(DATA / "commands.toml")


def as_markdown(name: str, command: str | None) -> str:
    """The table, and the line with its command."""
    header, *rows = ([cell.replace("|", "\\|") for cell in row] for row in read_table(name))
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    if command:
        sentence = f"Measured with `{command}`."
        lines += ["", *textwrap.wrap(sentence, LINE, break_long_words=False, break_on_hyphens=False)]
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """The text of a page with its tables as they are in docs/data."""
    commands = read_commands()

    def table(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- table: {name} -->\n\n{as_markdown(name, commands.get(name))}\n\n<!-- end of table -->"

    return _PLACE.sub(table, page)


def pages_with_tables() -> dict[Path, list[str]]:
    """Page → the tables that it names."""
    pages = sorted(path for folder in PAGES for path in (ROOT / folder).rglob("*.md"))
    return {page: names for page in pages if (names := _PLACE.findall(page.read_text(encoding="utf-8")))}


if __name__ == "__main__":
    for path in pages_with_tables():
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
