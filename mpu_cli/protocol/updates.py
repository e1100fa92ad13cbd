"""The server's own record of the updates that it applied, and of what came of them.

    CONFIG/mpu/updates.jsonl    a line for each update, verdict and rehearsal, mode 0600

A request is a run. Its model is the base of its publication plus its last update, so an update takes the place of the
one before, and a request is withdrawn by aggregating the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mpu_cli.files.boundary import Above0, parse_document
from mpu_cli.files.resumption import alone_with_private, append_line, read_lines
from mpu_cli.files.sealing import default_identity_path
from mpu_cli.observer import Observer


@dataclass(frozen=True)
class Update:
    """An update, of deltas in the order of the copies."""

    run: str
    round: int
    deltas: list[str]
    fingerprints: list[str]  # of each delta
    keys: str  # the key file of their publication
    base: str  # what the update was added to
    model: str  # where the sum is
    rate: float  # the server's step
    dtype: str | None = None  # that the sum was stored in, by --dtype
    time: str = ""


@dataclass(frozen=True)
class CheckedUpdate:
    """A receipt that was countersigned, of a copy of round ``round``: what the updates before it left and kept."""

    checked_run: str
    round: int
    verdict: str
    receipt: str
    time: str = ""


@dataclass(frozen=True)
class RehearsedStep:
    """The step that a rehearsal found for the deltas of a publication."""

    rehearsed_run: str
    round: int
    base: str
    step: Above0
    time: str = ""


Entry = Update | CheckedUpdate | RehearsedStep


def default_updates_path() -> Path:
    """``mpu/updates.jsonl`` in the user's configuration directory."""
    return default_identity_path().with_name("updates.jsonl")


def write_update(entry: Entry, observer: Observer) -> None:
    """Add a line. A file that cannot be written is warned of: the work that the line is about is done."""
    path = default_updates_path()
    values: dict[str, Any] = asdict(entry)
    values["time"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        with alone_with_private(path):
            append_line(path, values)
    except OSError as error:
        observer.warn(f"{path}: {error.strerror}, so this is not in your record of updates")


def read_updates(path: Path | None = None) -> list[Entry]:
    """All entries, the last one last."""
    path = path or default_updates_path()
    hint = "put a backup in its place, or remove it: nothing but `mpu status`, rehearsed steps and warnings need it"
    entries: list[Entry] = []
    for line in read_lines(path, hint):
        kind: type[Entry] = Update
        if "checked_run" in line:
            kind = CheckedUpdate
        elif "rehearsed_run" in line:
            kind = RehearsedStep
        entries.append(parse_document(kind, line, f"{path}: damaged", hint))
    return entries


def rehearsed_step(entries: Sequence[Entry], run: str, round_: int, base: str) -> float | None:
    """The step of the last rehearsal of a publication of the model with the fingerprint ``base``; None without one."""
    steps = [
        entry.step
        for entry in entries
        if isinstance(entry, RehearsedStep) and (entry.rehearsed_run, entry.round, entry.base) == (run, round_, base)
    ]
    return steps[-1] if steps else None


def last_update(entries: Sequence[Entry], run: str, round_: int) -> Update | None:
    """The last update from the deltas of a publication; None if there was none."""
    updates = [entry for entry in entries if isinstance(entry, Update) and (entry.run, entry.round) == (run, round_)]
    return updates[-1] if updates else None


def update_that_replaced(entries: Sequence[Entry], run: str, round_: int, fingerprints: list[str]) -> Update | None:
    """The last update from a publication, if it is of other deltas than these, which were applied before; else None."""
    last = last_update(entries, run, round_)
    if last is None or last.fingerprints == fingerprints:
        return None
    applied = [entry.fingerprints for entry in entries if isinstance(entry, Update) and entry.run == run]
    return last if fingerprints in applied else None


def runs_in(model: str, entries: Sequence[Entry]) -> set[str]:
    """The runs whose updates were ever written to the path ``model``."""
    return {entry.run for entry in entries if isinstance(entry, Update) and entry.model == model}
