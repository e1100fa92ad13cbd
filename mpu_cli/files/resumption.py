"""Work that can be interrupted and resumed: files that are whole or not there, and whether the work is the same.

Commands that resume keep the facts of their work in a JSON document beside it. Existing files are used again only if
those facts are equal.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mpu_cli.errors import MpuError, first_line
from mpu_cli.files.boundary import (
    BLOCK,
    PRIVATE_FILE,
    create_private,
    current_umask,
    naming,
    private_folder,
    private_umask,
    random_name,
    read_bounded,
    sync_folder,
)
from mpu_cli.observer import Observer

MAX_DIFFERENCE = 60  # characters of a difference that are shown
MAX_LINES_FILE = 1 << 30  # bytes of a file of JSON lines


@contextmanager
def alone_in(folder: Path, command: str, option: str) -> Iterator[None]:
    """Keep other processes of ``command`` out of ``folder``, its ``option``."""
    with (folder / f"{command}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MpuError(
                f"{folder}: in use by another mpu {command}", f"wait for it, stop it, or choose another {option}"
            ) from error
        yield


@contextmanager
def alone_beside(folder: Path, observer: Observer) -> Iterator[None]:
    """Wait until no other process is inside this for ``folder`` or one beside it; a lock on what contains them."""
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    parent = os.open(folder.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(parent, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            observer.note(f"{folder}: in use by another mpu command; waiting for it")
            fcntl.flock(parent, fcntl.LOCK_EX)
        yield
    finally:
        os.close(parent)


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that a reader finds all of it or what was there before, whenever this is killed."""
    fresh = path.with_name(random_name(path.name))
    with naming(path):
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~current_umask()
        try:
            with create_private(fresh) as file:
                os.fchmod(file.fileno(), mode)
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def differences(before: Mapping[str, object], now: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """The differences between two tables of facts, such as ``experiment.kappa 0.01 → 0.02``."""
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{prefix}{name}.")
        elif old != new:
            change = " → ".join("not set" if value is None else str(value) for value in (old, new))
            yield prefix + name + (f" {change}" if len(change) < MAX_DIFFERENCE else "")


def read_lines(path: Path, hint: str, *, links: bool = True) -> list[dict[str, Any]]:
    """The JSON lines of ``path``, none if there is no file, without a last line that was never finished.

    Reads only: describing a file must not change it. Without ``links``, ``path`` may not be a link.
    """
    if not os.path.lexists(path):
        return []
    content = read_bounded(path, MAX_LINES_FILE, links=links)
    finished = content[: content.rfind(b"\n") + 1]
    try:
        # Not splitlines, which also splits at characters that JSON strings may hold, such as U+2028.
        lines = [json.loads(line) for line in finished.decode("utf-8-sig").split("\n") if line]
    except (ValueError, RecursionError) as error:
        raise MpuError(f"{path}: damaged ({first_line(error)})", hint) from error
    if not all(isinstance(line, dict) for line in lines):
        raise MpuError(f"{path}: damaged (a line is not a JSON object)", hint)
    return lines


def append_line(path: Path, values: Mapping[str, object]) -> None:
    """Add a line of JSON, in place of one that was never finished, and have it on the disk.

    One process at a time: others that append wait inside ``alone_with``.
    """
    fresh = not path.exists()
    with naming(path), path.open("ab+") as file:
        file.truncate(_end_of_lines(file))
        file.write(json.dumps(values).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if fresh:
        sync_folder(path.parent)


def _end_of_lines(file: BinaryIO) -> int:
    """The end of the last finished line of ``file``, in bytes."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - BLOCK)
        file.seek(begin)
        if (newline := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + newline + 1
        end = begin
    return 0


@contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """Keep other processes from reading and writing ``path`` in the meantime.

    The lock is on a file beside it, which is never replaced or removed: a lock on the file itself would be held on
    something that nobody else opens any more once the file is replaced.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(path.with_name(f"{path.name}.lock"), flags, PRIVATE_FILE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def alone_with_private(path: Path) -> Iterator[None]:
    """``alone_with`` a file that nobody but its owner may read, in a folder of the same kind."""
    if not path.parent.exists():
        private_folder(path.parent)
    with alone_with(path), private_umask():
        if path.exists():
            path.chmod(PRIVATE_FILE)
        yield
