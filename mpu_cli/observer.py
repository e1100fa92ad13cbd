"""The reports of a long operation while it runs, to one object that the operation is given."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.errors import MpuWarning

if TYPE_CHECKING:
    from tqdm import tqdm

PACKAGE = str(Path(__file__).parent)


class Observer:
    """Receives stages, progress, notes and warnings; this one ignores them. The command line shows them."""

    def stage(self, label: str, total: float, unit: str = "bytes") -> None:
        """A stage begins: ``total`` is what ``advance`` will have added up to at its end."""

    def advance(self, amount: float, detail: str = "") -> None:
        """``amount`` more of the stage is done; ``detail`` is what to show beside it."""

    def note(self, text: str) -> None:
        """Something worth knowing."""

    def warn(self, text: str) -> None:
        """Something that is probably not as intended."""

    def table(self, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
        """Numbers worth knowing: text in the first column."""

    def show(self, text: str) -> None:
        """Text that was asked for, such as answers."""

    def pause(self) -> None:
        """Something is asked for on the terminal: nothing may be drawn there until the next stage."""

    def result(self, line: object) -> None:
        """A result that is there before others are."""

    @property
    def width(self) -> int | None:
        """The number of columns for tables; None if any line fits."""
        return None


SILENT = Observer()


class PythonObserver(Observer):
    """The default observer of functions: stages are tqdm's bars, warnings go through ``warnings``."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def stage(self, label: str, total: float, unit: str = "bytes") -> None:
        from tqdm.auto import tqdm

        self.pause()
        in_bytes = unit == "bytes"
        unit = "B" if in_bytes else f" {unit}"
        self._bar = tqdm(desc=label, total=total, unit=unit, unit_scale=in_bytes, leave=False)

    def advance(self, amount: float, detail: str = "") -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(detail, refresh=False)
            self._bar.update(amount)

    def warn(self, text: str) -> None:
        level, frame = 1, sys._getframe()
        while frame.f_back and frame.f_code.co_filename.startswith(PACKAGE):  # up to the line that called the function
            level, frame = level + 1, frame.f_back
        warnings.warn(text, MpuWarning, stacklevel=level)

    def pause(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class PrefixedObserver(Observer):
    """An observer of one part of a longer operation: puts the part's name before stages, notes and warnings.

    Without ``notes``, it drops notes.
    """

    def __init__(self, outer: Observer, part: str, *, notes: bool = True):
        self._outer, self._part, self._notes = outer, part, notes

    def stage(self, label: str, total: float, unit: str = "bytes") -> None:
        self._outer.stage(f"{self._part}: {label}", total, unit)

    def advance(self, amount: float, detail: str = "") -> None:
        self._outer.advance(amount, detail)

    def note(self, text: str) -> None:
        if self._notes:
            self._outer.note(f"{self._part}: {text}")

    def warn(self, text: str) -> None:
        self._outer.warn(f"{self._part}: {text}")
