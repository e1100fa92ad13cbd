"""Lists, numbers and names in sentences."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from mpu_cli.errors import UsageError


def few(names: Sequence[str], limit: int = 4) -> str:
    """The first ``names``, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """``count`` things: "1 record", "2 records"; ``plural`` if it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def printable(text: str, spaces: str = "\n\t") -> str:
    """``text`` without control characters but ``spaces``: names in a hostile file must not act as terminal commands."""
    return "".join(c if c.isprintable() or c in spaces else repr(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """``text`` as one line of a table: a name in a hostile folder must not look like a line of its own."""
    return printable(text, spaces="")


def command_line(*words: str | Path) -> str:
    """A command to paste, quoted for the shell. A path below the current folder is written without that, and none is
    read as an option: another party chose the names of the files that it sent, and one that begins with a hyphen would
    decide how mpu runs."""
    here = f"{Path.cwd()}{os.sep}"
    texts = []
    for word in words:
        text = str(word)
        is_path = isinstance(word, Path) or text.startswith(here)
        text = text.removeprefix(here)
        texts.append(f"./{text}" if is_path and text.startswith("-") else text)
    return shlex.join(texts)


def names_in(text: str | None) -> tuple[str, ...]:
    """The names in ``text``, comma-separated."""
    return tuple(filter(None, map(str.strip, (text or "").split(","))))


def in_bytes(count: float) -> str:
    """A number of bytes for people: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", re.ASCII)


def bytes_of(text: str) -> float:
    """The number of bytes in text such as 24GB, 80 GiB or 512M."""
    match = _SIZE.fullmatch(text.strip())
    count = 0.0
    if match:
        step = 1024 if match[3] else 1000
        count = float(match[1]) * step ** " kMGT".index(match[2] or " ")
    if count < 1e6:  # such as 24, which is meant as something else
        raise UsageError(f"{text!r}: is not an amount of memory", "write it as 24GB or 80GiB")
    return count


def in_time(seconds: float) -> str:
    """A duration for people: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.2g} h"
