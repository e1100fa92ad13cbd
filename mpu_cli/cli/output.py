"""What goes where: results to standard output, everything else to standard error."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mpu_cli.errors import UsageError
from mpu_cli.observer import Observer

if TYPE_CHECKING:
    from rich.progress import Progress

    from mpu_cli.evaluation.answers import Shown

LINE_EVERY = 10.0  # seconds between lines of progress where there is no bar
QUIET = "MPU_QUIET"  # variable: warnings and errors only, also in the processes that this one starts
_results: TextIO | None = None  # where results go while libraries print elsewhere


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
        text = json.dumps(_plain(document), indent=2, ensure_ascii=False)
        # Names in files of others may hold what a terminal obeys; in JSON it can be written as an escape.
        print("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text), file=out)
    else:
        on_terminal = out is not None and out.isatty()
        for line in lines:
            print(printable(str(line)) if on_terminal else line, file=out)
    if out is not None:
        out.flush()


def _plain(value: object) -> object:
    """``value`` with what JSON cannot express replaced: paths by strings, NaN and infinities by null."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def printable(text: str) -> str:
    """``text`` without control characters: names in a hostile file must not act as terminal commands."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _first() -> bool:
    """Whether this process reports: of several that train together, only one does."""
    return os.environ.get("RANK", "0") == "0"


def is_switched_on(variable: str) -> bool:
    """Whether a variable of the environment says yes."""
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "no")


def _reports() -> bool:
    """Whether notes, tables and progress are shown."""
    return _first() and not is_switched_on(QUIET)


def note(text: str) -> None:
    if _reports():
        print(printable(text), file=sys.stderr)


def warn(text: str) -> None:
    if _first():
        print(f"warning: {printable(text)}", file=sys.stderr)


def show_answers(answers: Iterable[Shown]) -> None:
    """Print questions with their true answers and the model's, on standard error."""
    for shown in answers:
        after = "answer" if shown.before is None else "after"
        texts = {"truth": shown.truth, "before": shown.before, after: shown.answer}
        lines = [f"  {who + ':':<8} {text}" for who, text in texts.items() if text is not None]
        if _first():  # asked for by --show, so also where notes are not shown
            print(printable("\n".join([shown.question.strip(), *lines])), file=sys.stderr)


def terminal_width() -> int | None:
    """How many columns the terminal has; None if standard error is not one, which any line fits."""
    from rich.console import Console

    return Console(stderr=True).width if sys.stderr.isatty() else None


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table on standard error: text in the first column, numbers in the others. Text is folded on a terminal
    that is too narrow for it; numbers never are, since one cut to "1.2…" is worse than a long line."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    if not _reports():
        return
    width = terminal_width()
    drawn = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="right" if i else "left", no_wrap=bool(i) or width is None)
    for row in rows:
        drawn.add_row(*map(printable, row))
    console = Console(stderr=True, markup=False, highlight=False)
    needed = Measurement.get(console, console.options.update(width=10_000), drawn)
    console.width = needed.maximum if width is None else max(width, needed.minimum)
    console.print(drawn)


class Terminal(Observer):
    """Shows on standard error what an operation reports: notes, warnings, and a bar per stage or, if it is not a
    terminal, a line every few seconds."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._label, self._total, self._done = "", 0.0, 0.0
        self._last = time.monotonic()

    def stage(self, label: str, total: float, unit: str = "bytes") -> None:
        self.close()
        self._label, self._total, self._done = label, total, 0.0
        if not sys.stderr.isatty() or not _reports():
            return
        from rich.console import Console
        from rich.progress import Progress

        from mpu_cli.cli.progress import progress_columns

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
            note(f"{self._label}: {self._done / self._total:.0%}{f', {detail}' if detail else ''}")

    def note(self, text: str) -> None:
        note(text)

    def warn(self, text: str) -> None:
        warn(text)

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


def in_bytes(count: float) -> str:
    """A number of bytes for people: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", re.ASCII)


def bytes_of(text: str) -> float:
    """The number of bytes in text such as 24GB, 80 GiB or 512M. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise UsageError(f"{text!r}: is not an amount of memory", "write it as 24GB or 80GiB")
    return float(match[1]) * (1024 if match[3] else 1000) ** " kMGT".index(match[2] or " ")


def in_time(seconds: float) -> str:
    """A duration for people: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.2g} h"


def names_in(text: str | None) -> tuple[str, ...]:
    """The names in ``text``, comma-separated."""
    return tuple(filter(None, map(str.strip, (text or "").split(","))))


def chosen_metrics(text: str, available: Iterable[str]) -> list[str]:
    """The names in ``--metrics``; UsageError if there are none, and for one that is not ``available``."""
    names = list(names_in(text))
    if not names:
        raise UsageError("--metrics: no names given")
    if missing := set(names).difference(available):
        raise UsageError(f"--metrics {min(missing, key=names.index)}: not in any of the results")
    return names


def paths_from(arguments: Iterable[str]) -> list[Path]:
    """Paths as given; ``-`` stands for the paths on standard input, one per line."""
    paths: list[Path] = []
    for argument in arguments:
        if argument == "-":
            if sys.stdin is None or sys.stdin.isatty():
                raise UsageError("'-' reads paths from standard input", "pipe them in")
            paths += [Path(line.rstrip("\n")) for line in sys.stdin if line.strip()]
        else:
            paths.append(Path(argument))
    return paths


def under_old_name(noise: dict[str, object]) -> dict[str, object]:
    """``noise`` as JSON has it: its requested scale is called "asked" there."""
    return {"asked" if name == "requested" else name: value for name, value in noise.items()}
