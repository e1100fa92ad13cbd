"""Work that can be interrupted and resumed: files that are whole or not there, and whether the work is the same.

Commands that resume keep the facts of their work in a JSON document beside it. What is found is used again only if
those facts are equal.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpu_cli.errors import MpuError

SHOWN = 60  # characters of a difference that are shown


@contextmanager
def alone_in(folder: Path, command: str, option: str) -> Iterator[None]:
    """Keep other processes of ``command`` out of ``folder``, its ``option``. Raises MpuError if one is there."""
    with (folder / f"{command}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MpuError(
                f"{folder}: in use by another mpu {command}", f"wait for it, stop it, or choose another {option}"
            ) from error
        yield


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that a reader finds all of it or what was there before, whenever this is killed."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def differences(before: Mapping[str, object], now: Mapping[str, object], place: str = "") -> Iterator[str]:
    """What differs between two tables of facts, such as ``experiment.kappa 0.01 → 0.02``."""
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{place}{name}.")
        elif old != new:
            change = f" {old} → {new}"
            yield place + name + (change if len(change) <= SHOWN else "")


def read_lines(path: Path, hint: str) -> list[dict[str, Any]]:
    """The JSON lines of ``path``, none if there is no file. A last line that was never finished is removed.

    Raises MpuError with ``hint`` if the file is not JSON lines.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        write_atomically(path, text)
    try:
        return [json.loads(line) for line in text.splitlines()]
    except ValueError as error:
        raise MpuError(f"{path}: damaged ({error})", hint) from error


def append_line(path: Path, values: Mapping[str, object]) -> None:
    """Add a line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
