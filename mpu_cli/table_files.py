"""Tables in the formats that papers and spreadsheets take: LaTeX (booktabs), CSV, Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mpu_cli.checkpoint.transaction import Transaction

SUFFIXES = (".tex", ".csv", ".md")
Table = Sequence[Sequence[str]]
_LATEX = {"±": r"$\pm$", "–": "--", "→": r"$\to$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "κ": r"$\kappa$"}


def write_tables(tables: Mapping[str, Table], path: Path, *, force: bool = False) -> None:
    """Write ``tables``, by title, each with its header as the first row, in the format that ``path``'s suffix names.

    CSV has one table, whose first column is the title. Raises MpuError if ``path`` exists, unless ``force``.
    """
    text = {".tex": _latex, ".csv": _csv, ".md": _markdown}[path.suffix](tables)
    with Transaction(force=force) as transaction:
        transaction.add(path).write_text(text, encoding="utf-8")


def markdown_table(table: Table) -> list[str]:
    """The lines of a table whose first row is its header."""
    head, *rows = [f"| {' | '.join(cells)} |" for cells in table]
    return [head, "|" + "---|" * len(table[0]), *rows]


def _markdown(tables: Mapping[str, Table]) -> str:
    return "\n".join("\n".join([f"**{title}**", "", *markdown_table(table), ""]) for title, table in tables.items())


def _csv(tables: Mapping[str, Table]) -> str:
    import pandas

    frames = [pandas.DataFrame(rows, columns=list(head)).assign(table=title) for title, (head, *rows) in tables.items()]
    together = pandas.concat(frames)
    return together[["table", *together.columns.drop("table")]].to_csv(index=False)


def _latex(tables: Mapping[str, Table]) -> str:
    import pandas

    parts = ["% needs \\usepackage{booktabs}\n"]
    for title, (head, *rows) in tables.items():
        frame = pandas.DataFrame(rows, columns=list(head))
        parts.append(f"% {title}\n{frame.to_latex(index=False, escape=True)}")
    text = "\n".join(parts)
    for character, command in _LATEX.items():
        text = text.replace(character, command)
    return text
