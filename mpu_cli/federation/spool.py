"""The folder through which the data owner's courier and ``mpu watch`` work together.

    SPOOL/in/RUN/round_R/copy_K/               a copy, moved here once it is whole
    SPOOL/out/RUN/round_R/copy_K.safetensors   its delta (a directory if it is large)
    SPOOL/out/RUN/round_R/copy_K.failed        in its place, if unlearning failed; says nothing else
    SPOOL/arriving/RUN/round_R/copy_K/         what the courier has of a copy so far

The courier runs code that the model's owner may have sent, so it sees this folder only. Records, logs, checkpoints and
reference files are elsewhere. Names that arrive from outside are checked before they become paths.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

COPY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/round_[0-9]+/copy_[0-9]+")
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?")
DELTA, FAILED = ".safetensors", ".failed"
BLOCK = 1 << 20  # bytes read at once for a digest

Sizes = dict[str, int]


@dataclass(frozen=True)
class Spool:
    """One data owner's spool; ``copy`` is RUN/round_R/copy_K throughout. ValueError for a name that is not one."""

    root: Path

    def arriving(self, copy: str) -> Path:
        return self.root / "arriving" / checked(copy, COPY)

    def arrived(self, copy: str) -> Path:
        return self.root / "in" / checked(copy, COPY)

    def delta(self, copy: str) -> Path:
        return self.root / "out" / (checked(copy, COPY) + DELTA)

    def failed(self, copy: str) -> Path:
        return self.root / "out" / (checked(copy, COPY) + FAILED)

    def copies(self) -> Iterator[str]:
        """Copies that have arrived, in order."""
        inbox = self.root / "in"
        found = sorted(inbox.glob("*/round_*/copy_*"), key=lambda path: [*map(_natural, path.parts)])
        for path in found:
            name = path.relative_to(inbox).as_posix()
            if COPY.fullmatch(name) and path.is_dir():
                yield name

    def state(self, copy: str) -> str:
        """ "arriving", "waiting" for its delta, "done" or "failed"."""
        if self.delta(copy).exists():
            return "done"
        if self.failed(copy).exists():
            return "failed"
        return "waiting" if self.arrived(copy).exists() else "arriving"

    def held(self, copy: str) -> Sizes:
        """Bytes that are here of each file of a copy that is arriving."""
        folder = self.arriving(copy)
        return {path.name: path.stat().st_size for path in folder.iterdir()} if folder.is_dir() else {}

    def put(self, copy: str, name: str, offset: int, data: bytes) -> None:
        """Write a piece where it belongs; the same piece may come again."""
        path = self.arriving(copy) / checked(name, FILE)
        if self.arrived(copy).exists() or "/" in name:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if offset > (path.stat().st_size if path.exists() else 0):
            return  # a piece before it is missing: the sender asks what is held
        with path.open("r+b" if path.exists() else "wb") as file:
            file.seek(offset)
            file.write(data)

    def complete(self, copy: str, digests: Mapping[str, str]) -> list[str]:
        """Move a copy to where ``mpu watch`` finds it. Returns the files that are not those of ``digests``: they are
        removed, and have to come again."""
        folder, target = self.arriving(copy), self.arrived(copy)
        if target.exists():
            return []
        wrong = [name for name in digests if digest_of(folder / checked(name, FILE)) != digests[name]]
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name in wrong or path.name not in digests:
                path.unlink()
        if not wrong:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder, target)
        return wrong

    def made(self, copy: str) -> dict[str, str]:
        """The files of a delta, relative to its parent, and their digests."""
        return {
            path.relative_to(self.delta(copy).parent).as_posix(): digest_of(path) for path in files_of(self.delta(copy))
        }

    def read(self, copy: str, name: str, offset: int, count: int) -> bytes:
        """A piece of one of the files that ``made`` names."""
        path = self.delta(copy).parent / checked(name, FILE)
        if path not in files_of(self.delta(copy)):
            raise ValueError(f"not a file of the delta of {copy}: {name}")
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(count)

    def again(self, copy: str) -> None:
        """Have the delta made anew."""
        _remove(self.delta(copy))
        self.failed(copy).unlink(missing_ok=True)

    def forget(self, copy: str) -> None:
        """Remove a copy and its delta: the round is over."""
        for path in (self.arriving(copy), self.arrived(copy), self.delta(copy)):
            _remove(path)


def checked(name: str, pattern: re.Pattern[str]) -> str:
    """``name``; ValueError unless it has the form of a name here, which none that leads elsewhere has."""
    if not pattern.fullmatch(name) or ".." in name:
        raise ValueError(f"not a name that can be used here: {name[:80]!r}")
    return name


def files_of(path: Path) -> list[Path]:
    """``path`` if it is a file, the files in it if it is a directory; none if there is nothing."""
    return [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []


def digest_of(path: Path) -> str:
    """SHA-256 in hexadecimal; empty if there is no such file."""
    if not path.is_file():
        return ""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _natural(part: str) -> tuple[str, int]:
    """round_2 before round_10."""
    name, _, number = part.rpartition("_")
    return (name, int(number)) if number.isdigit() else (part, 0)
