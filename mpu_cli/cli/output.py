"""The output streams: results to standard output, everything else to standard error."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mpu_cli.observer import Observer
from mpu_cli.wording import in_time, printable

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

LINE_EVERY = 10.0  # seconds between lines of progress where there is no bar
PROFILE = "MPU_PROFILE"  # variable: at the end, the seconds that each stage took
QUIET_VARIABLE = "MPU_QUIET"  # variable: warnings and errors only, also in the processes that this one starts
_results: TextIO | None = None  # the stream of results while libraries print elsewhere


@contextmanager
def results_alone() -> Iterator[None]:
    """Send everything printed in this context to standard error, except for ``emit``: some libraries print banners."""
    global _results
    _results = sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _results = None


def emit(lines: Iterable[object], document: object, as_json: bool) -> None:
    """Print the result of a command: lines (mostly paths) or one JSON document."""
    out = _results or sys.stdout
    if as_json:
        is_unicode = (getattr(out, "encoding", None) or "utf-8").lower().startswith("utf")
        text = json.dumps(_plain(document), indent=2, ensure_ascii=not is_unicode)
        # Names in files of others may hold what a terminal obeys; in JSON it can be written as an escape.
        print("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text), file=out)
    else:
        on_terminal = out is not None and out.isatty()
        for line in lines:
            print(printable(str(line)) if on_terminal else line, file=out)
    if out is not None:
        out.flush()


def _plain(value: object) -> object:
    """``value`` with the types that JSON lacks replaced: paths by strings, NaN and infinities by null."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _is_main_process() -> bool:
    """Whether this process reports: of several that train together, only one does."""
    return os.environ.get("RANK", "0") == "0"


def is_switched_on(variable: str) -> bool:
    """Whether a variable of the environment says yes."""
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "no")


def _reports() -> bool:
    """Whether notes, tables and progress are shown."""
    return _is_main_process() and not is_switched_on(QUIET_VARIABLE)


def warn(text: str) -> None:
    if _is_main_process():
        print(f"warning: {printable(text)}", file=sys.stderr)


def emit_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table that is the result of a command."""
    from rich.console import Console

    out = _results or sys.stdout
    if out is not None and _is_main_process():
        _draw(title, columns, rows, out, Console(file=out).width if out.isatty() else None)
        out.flush()


def _draw(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], file: TextIO, width: int | None) -> None:
    """A table: text in the first column, numbers in the others. Text is folded on a terminal that is too narrow for it;
    numbers never are, since one cut to "1.2…" is worse than a long line."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    drawn = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="right" if i else "left", no_wrap=bool(i) or width is None)
    for row in rows:
        drawn.add_row(*map(printable, row))
    console = Console(file=file, markup=False, highlight=False)
    needed = Measurement.get(console, console.options.update(width=10_000), drawn)
    console.width = needed.maximum if width is None else max(width, needed.minimum)
    console.print(drawn)


def progress_columns(label: str, unit: str) -> tuple[ProgressColumn, ...]:
    """The parts of a bar. Where the terminal is narrow, the bar and the detail give way; the times never do."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Column

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


class Terminal(Observer):
    """Shows the reports of an operation on standard error: notes, warnings, and a bar per stage or, if it is not a
    terminal, a line every few seconds."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._label, self._total, self._done = "", 0.0, 0.0
        self._last = time.monotonic()
        self._began: list[tuple[str, float]] = []  # each stage, and when it began

    def stage(self, label: str, total: float, unit: str = "bytes") -> None:
        self.close()
        self._began.append((label, time.monotonic()))
        self._label, self._total, self._done = label, total, 0.0
        if not sys.stderr.isatty() or not _reports():
            return
        from rich.console import Console
        from rich.progress import Progress

        columns = progress_columns(label, unit)
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, expand=True)
        self._bar.start()
        self._bar.add_task(label, total=total, text="")

    def advance(self, amount: float, detail: str = "") -> None:
        self._done += amount
        if self._bar:
            self._bar.update(self._bar.task_ids[0], advance=amount, text=detail)
        elif time.monotonic() - self._last > LINE_EVERY and self._total:
            self._last = time.monotonic()
            share = self._done / self._total
            parts = [f"{self._label}: {share:.0%}", *([detail] if detail else [])]
            if 0 < share < 1:  # a training that stops when it is done may be done earlier
                seconds = (self._last - self._began[-1][1]) * (1 / share - 1)
                parts.append(f"up to {in_time(seconds)} left")
            self.note(", ".join(parts))

    def note(self, text: str) -> None:
        if _reports():
            print(printable(text), file=sys.stderr)

    def warn(self, text: str) -> None:
        warn(text)

    def table(self, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
        self.close()  # a bar would be drawn into it
        if _reports():
            _draw(title, columns, rows, sys.stderr, self.width)

    def pause(self) -> None:
        self.close()

    def show(self, text: str) -> None:
        """Print text that was asked for, also where notes are not shown."""
        if _is_main_process():
            print(printable(text), file=sys.stderr)

    def result(self, line: object) -> None:
        emit([line], None, as_json=False)

    @property
    def width(self) -> int | None:
        from rich.console import Console

        return Console(stderr=True).width if sys.stderr.isatty() else None

    def seconds_by_stage(self) -> dict[str, float]:
        """The seconds that each stage took until the next one began; stages of one name together."""
        ends = [began for _, began in self._began[1:]] + [time.monotonic()]
        seconds: dict[str, float] = {}
        for (label, began), end in zip(self._began, ends, strict=True):
            seconds[label] = seconds.get(label, 0.0) + end - began
        return seconds

    def close(self) -> None:
        """Remove the bar."""
        if self._bar:
            self._bar.stop()
            self._bar = None


@contextmanager
def terminal() -> Iterator[Terminal]:
    """An observer for one command. Enter it before anything that takes seconds to import."""
    observer = Terminal()
    observer.stage("loading", 1, "done")
    try:
        yield observer
    finally:
        observer.close()
        if is_switched_on(PROFILE) and _is_main_process():
            for label, seconds in observer.seconds_by_stage().items():
                print(f"profile: {printable(label)}: {seconds:.2f} s", file=sys.stderr)
