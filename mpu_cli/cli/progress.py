"""A bar of progress, as narrow terminals need it."""

from __future__ import annotations

from rich.progress import BarColumn, DownloadColumn, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column


def progress_columns(label: str, unit: str) -> tuple[ProgressColumn, ...]:
    """The parts of a bar. Where the terminal is narrow, the bar and the detail give way; the times never do."""

    def one_line() -> Column:
        return Column(no_wrap=True)

    amount = "{task.completed:.1f}/{task.total} " + unit
    return (
        TextColumn(label, table_column=one_line()),
        BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
        DownloadColumn(table_column=one_line()) if unit == "bytes" else TextColumn(amount, table_column=one_line()),
        TimeElapsedColumn(table_column=one_line()),
        TextColumn("left", table_column=one_line()),
        TimeRemainingColumn(table_column=one_line()),
        TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=2)),
    )
