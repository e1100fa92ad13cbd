"""What a long operation reports while it runs, in one object that the operation is given."""

from __future__ import annotations

from collections.abc import Iterable


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
        """How many columns there are for tables; None if any line fits."""
        return None


SILENT = Observer()


class Within(Observer):
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
