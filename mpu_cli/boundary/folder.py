"""A folder that another party can write to as well: opened once, and walked from its handle without following links.

Paths are relative, with ``/``. Between looking at an entry and using it, anything may have been put in its place, so
every step goes through directory handles (``openat`` with ``O_NOFOLLOW``), never through a path.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mpu_cli.boundary.files import open_inside, random_name, unreadable
from mpu_cli.errors import MpuError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MOST_ENTRIES = 10_000  # of a folder that are looked at
DEEPEST = 8  # folders below one that is removed


class Folder:
    """The directory ``root``, which may itself be a link. Raises MpuError if it cannot be opened.

    What is made inside has the root's own mode (files: without execution), whatever the umask: who may use the root may
    use that.
    """

    def __init__(self, root: Path):
        self.root = root
        try:
            self._handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(root, error) from error
        self._mode = stat.S_IMODE(os.fstat(self._handle).st_mode)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._handle)

    @contextmanager
    def _open_folder(self, path: str, *, make: bool = False) -> Iterator[int]:
        """A handle of the folder ``path``; "" is the root. With ``make``, missing folders are made."""
        handle = os.dup(self._handle)
        try:
            for part in filter(None, path.split("/")):
                created = make and self._make_folder(part, handle)
                below = os.open(part, _DIRECTORY, dir_fd=handle)
                if created:
                    os.fchmod(below, self._mode)
                os.close(handle)
                handle = below
            yield handle
        finally:
            os.close(handle)

    @staticmethod
    def _make_folder(name: str, handle: int) -> bool:
        try:
            os.mkdir(name, dir_fd=handle)
        except FileExistsError:
            return False
        return True

    def names(self, path: str = "") -> list[str]:
        """The entries of a folder, sorted; none if it is missing or is not a folder. Raises MpuError if it holds more
        than MOST_ENTRIES."""
        try:
            with self._open_folder(path) as handle, os.scandir(handle) as entries:
                names = []
                for entry in entries:
                    names.append(entry.name)
                    if len(names) > MOST_ENTRIES:
                        raise MpuError(f"{self.root / path}: more than {MOST_ENTRIES:,} entries", "clear it")
                return sorted(names)
        except OSError:
            return []

    def kind(self, path: str) -> str | None:
        """ "file", "folder", "other" (a link, a FIFO, …), or None if there is nothing."""
        parent, _, name = path.rpartition("/")
        try:
            with self._open_folder(parent) as handle:
                mode = os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode
        except OSError:
            return None
        return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"

    def size(self, path: str) -> int:
        """The bytes of a regular file; 0 for anything else."""
        parent, _, name = path.rpartition("/")
        try:
            with self._open_folder(parent) as handle:
                status = os.stat(name, dir_fd=handle, follow_symlinks=False)
        except OSError:
            return 0
        return status.st_size if stat.S_ISREG(status.st_mode) else 0

    def open(self, path: str) -> BinaryIO:
        """A regular file, for reading. Raises MpuError."""
        parent, _, name = path.rpartition("/")
        try:
            with self._open_folder(parent) as handle:
                return open_inside(handle, name, self.root / path)
        except OSError as error:
            raise unreadable(self.root / path, error) from error

    def write_at(self, path: str, offset: int, data: bytes) -> None:
        """Write into a regular file, which is made if it is missing. OSError if it is anything else."""
        parent, _, name = path.rpartition("/")
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._open_folder(parent, make=True) as handle:
            descriptor = os.open(name, flags, 0o600, dir_fd=handle)
        with os.fdopen(descriptor, "wb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise MpuError(f"{self.root / path}: not a regular file", "remove it")
            if status.st_size == 0 and status.st_uid == os.geteuid():
                os.fchmod(descriptor, self._mode & 0o666)
            file.seek(offset)
            file.write(data)

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """A new file that appears as ``path``, in place of whatever is there, when the block ends; never half-written.

        It is written under a random hidden name, which nobody can have prepared.
        """
        parent, _, name = path.rpartition("/")
        fresh = random_name(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._open_folder(parent, make=True) as handle:
            try:
                with os.fdopen(os.open(fresh, flags, 0o600, dir_fd=handle), "wb") as file:
                    os.fchmod(file.fileno(), self._mode & 0o666)
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(fresh, name, src_dir_fd=handle, dst_dir_fd=handle)
                os.fsync(handle)
            except BaseException:
                with suppress(OSError):
                    os.unlink(fresh, dir_fd=handle)
                raise

    def make(self, path: str) -> None:
        """Make a folder, and those above it. OSError if something else has one of the names."""
        with self._open_folder(path, make=True):
            pass

    def move(self, source: str, target: str) -> None:
        """Rename an entry; the folders above ``target`` are made."""
        parent, _, name = source.rpartition("/")
        other, _, fresh = target.rpartition("/")
        with self._open_folder(parent) as here, self._open_folder(other, make=True) as target_handle:
            os.replace(name, fresh, src_dir_fd=here, dst_dir_fd=target_handle)
            os.fsync(target_handle)

    def remove(self, path: str) -> None:
        """Remove a file, a link (not what it leads to), or a folder with everything in it."""
        parent, _, name = path.rpartition("/")
        with suppress(FileNotFoundError, NotADirectoryError), self._open_folder(parent) as handle:
            _remove(name, handle, DEEPEST)


def _remove(name: str, parent: int, deeper: int) -> None:
    try:
        os.unlink(name, dir_fd=parent)
        return
    except (IsADirectoryError, PermissionError):  # the second on some systems
        pass
    if deeper == 0:
        raise MpuError(f"{name}: folders nested too deep to be removed", "remove them yourself")
    handle = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        with os.scandir(handle) as entries:
            for inner in [entry.name for entry in entries]:
                _remove(inner, handle, deeper - 1)
    finally:
        os.close(handle)
    os.rmdir(name, dir_fd=parent)
