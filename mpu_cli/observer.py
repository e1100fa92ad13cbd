"""What a long operation reports while it runs, in one object that the operation is given."""

from __future__ import annotations


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


SILENT = Observer()


class Within(Observer):
    """An observer of one part of a longer operation: names the part wherever something is said."""

    def __init__(self, outer: Observer, part: str):
        self._outer, self._part = outer, part

    def stage(self, label: str, total: float, unit: str = "bytes") -> None:
        self._outer.stage(f"{self._part}: {label}", total, unit)

    def advance(self, amount: float, detail: str = "") -> None:
        self._outer.advance(amount, detail)

    def note(self, text: str) -> None:
        self._outer.note(f"{self._part}: {text}")

    def warn(self, text: str) -> None:
        self._outer.warn(f"{self._part}: {text}")


class WarningsOnly(Observer):
    """An observer that passes on warnings and progress, but no notes."""

    def __init__(self, outer: Observer):
        self._outer = outer

    def stage(self, label: str, total: float, unit: str = "bytes") -> None:
        self._outer.stage(label, total, unit)

    def advance(self, amount: float, detail: str = "") -> None:
        self._outer.advance(amount, detail)

    def warn(self, text: str) -> None:
        self._outer.warn(text)
