"""What goes where: results to standard output, everything else to standard error."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TextIO

from mpu_cli.errors import UsageError

_results: TextIO | None = None  # where results go while libraries print elsewhere


@contextmanager
def results_alone() -> Iterator[None]:
    """Within, what anybody prints goes to standard error, but for what ``emit`` writes: some libraries greet."""
    global _results
    _results = sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _results = None


def emit(lines: Iterable[object], document: object, as_json: bool) -> None:
    """The result of a command: lines, of paths mostly, or one JSON document."""
    out = _results or sys.stdout
    if as_json:
        print(json.dumps(_plain(document), indent=2, ensure_ascii=False), file=out)
    else:
        for line in lines:
            print(line, file=out)
    if out is not None:
        out.flush()


def _plain(value: object) -> object:
    """``value`` with what JSON has no word for made readable: paths as texts, NaN and infinities as null."""
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
    """``text`` without control characters: a hostile file's names must not reach the terminal as commands."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _first() -> bool:
    """Whether this process speaks: of several that train together, one does."""
    return os.environ.get("RANK", "0") == "0"


def note(text: str) -> None:
    if _first():
        print(printable(text), file=sys.stderr)


def warn(text: str) -> None:
    if _first():
        print(f"warning: {printable(text)}", file=sys.stderr)


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table on standard error, its first column text, the others numbers."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    drawn = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*map(printable, row))
    console = Console(stderr=True, markup=False, highlight=False)
    # A number cut to "1.2…" is worse than a long line.
    console.width = max(console.width, Measurement.get(console, console.options.update(width=10_000), drawn).maximum)
    console.print(drawn)


@contextmanager
def progress(label: str, total: float, unit: str = "bytes") -> Iterator[Callable[..., None]]:
    """A bar on standard error, if that is a terminal; yields what advances it (amount, text beside it)."""
    if not sys.stderr.isatty() or not _first():
        yield lambda _amount, _text="": None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    done = DownloadColumn() if unit == "bytes" else TextColumn("{task.completed:.1f}/{task.total} " + unit)
    columns = (TextColumn(label), BarColumn(), done, TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, text="")
        yield lambda amount, text="": bar.update(task, advance=amount, text=text)


@contextmanager
def stages() -> Iterator[Callable[[str, float], Callable[..., None]]]:
    """Bars for one thing after another; yields what begins the next: (label, total) → what advances it."""
    with ExitStack() as last:

        def begin(label: str, total: float) -> Callable[..., None]:
            last.close()
            return last.enter_context(progress(label, total, "done" if total <= 1 else "bytes"))

        yield begin


def chosen_metrics(text: str, there: Iterable[str]) -> list[str]:
    """The names in ``--metrics``; UsageError for none, and for one that is not ``there``."""
    names = list(filter(None, map(str.strip, text.split(","))))
    if not names:
        raise UsageError("--metrics: names none")
    if missing := set(names).difference(there):
        raise UsageError(f"--metrics {min(missing, key=names.index)}: none of the results has it")
    return names


def paths_from(arguments: Iterable[str]) -> list[Path]:
    """Paths as given; ``-`` stands for those on standard input, a line each."""
    paths: list[Path] = []
    for argument in arguments:
        if argument == "-":
            if sys.stdin is None or sys.stdin.isatty():
                raise UsageError("'-' reads paths from standard input; pipe them in")
            paths += [Path(line.rstrip("\n")) for line in sys.stdin if line.strip()]
        else:
            paths.append(Path(argument))
    return paths
