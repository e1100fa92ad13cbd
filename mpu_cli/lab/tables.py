"""Tables in the formats that papers and spreadsheets take: LaTeX (booktabs), CSV, Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpu_cli.errors import MpuError
from mpu_cli.files.transaction import Transaction

SUFFIXES = (".tex", ".csv", ".md")
MISSING = "–"  # in place of a value
Table = Sequence[Sequence[str]]
_BOLD = re.compile(r"\*\*(.+?)\*\*")
_LATEX = {
    "±": r"$\pm$", "–": "--", "→": r"$\to$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "≥": r"$\geq$", "≤": r"$\leq$",
    "κ": r"$\kappa$", "ε": r"$\varepsilon$", "δ": r"$\delta$", "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$",
}  # fmt: skip


def write_tables(tables: Mapping[str, Table], path: Path, *, notes: Sequence[str] = (), force: bool = False) -> None:
    """Write ``tables``, by title, each with its header as the first row, in the format that ``path``'s suffix names.

    Below them stand ``notes``, in LaTeX as comments and in CSV not at all. CSV has one table, whose first column is the
    title, and empty fields for missing values. Text between ** is bold, except in CSV.
    """
    if not tables:
        raise MpuError(f"{path}: there is nothing to write", "choose results that have metrics")
    text = {".tex": _latex, ".csv": _csv, ".md": _markdown}[path.suffix](tables)
    if path.suffix != ".csv":
        mark = "% " if path.suffix == ".tex" else ""
        for note in notes:
            text += f"\n{mark}{note}\n"
    with Transaction(force=force) as transaction:
        transaction.add(path).write_text(text, encoding="utf-8")


def markdown_table(table: Table) -> list[str]:
    """The lines of a table whose first row is its header."""
    head, *rows = [f"| {' | '.join(map(_markdown_cell, cells))} |" for cells in table]
    return [head, "|" + "---|" * len(table[0]), *rows]


def _markdown(tables: Mapping[str, Table]) -> str:
    lines: list[str] = []
    for title, table in tables.items():
        lines += [f"**{title}**", "", *markdown_table(table), ""]
    return "\n".join(lines)


def _markdown_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _csv(tables: Mapping[str, Table]) -> str:
    import pandas

    frames = []
    for title, (head, *rows) in tables.items():
        plain_rows = [["" if cell == MISSING else _BOLD.sub(r"\1", cell) for cell in row] for row in rows]
        frames.append(pandas.DataFrame(plain_rows, columns=list(head)).assign(table=title))
    together = pandas.concat(frames)
    return together[["table", *together.columns.drop("table")]].to_csv(index=False)


def _latex(tables: Mapping[str, Table]) -> str:
    import pandas

    parts = ["% needs \\usepackage{booktabs}\n"]
    for title, (head, *rows) in tables.items():
        frame = pandas.DataFrame(rows, columns=list(head))
        parts.append(f"% {title}\n{frame.to_latex(index=False, escape=True)}")
    text = _BOLD.sub(r"\\textbf{\1}", "\n".join(parts))
    for character, command in _LATEX.items():
        text = text.replace(character, command)
    return text
