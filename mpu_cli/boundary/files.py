"""Files that another party may have made: opened if they are regular files, read up to a limit, copied into private
folders.

What a user names on the command line is trusted to be what was meant, links included. What lies inside a folder is not:
a name in there could lead anywhere on this machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mpu_cli.errors import MpuError

SMALL = 4 << 20  # bytes of a config or a manifest: a thousand times a real one
LARGEST_TOKENIZER = 64 << 20  # bytes of a file that tokenizers parses
BLOCK = 1 << 20
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
GET_IT_AGAIN = "get it again, as files and folders without links"


def open_regular(path: Path, *, links: bool = True) -> BinaryIO:
    """Open ``path`` for reading if it is a regular file; without ``links``, only if it is not a link either.

    Links of the Hub's cache, from a snapshot to its blobs, count as files. Never waits for a FIFO or a device.
    Raises MpuError.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    if not links:
        path = _blob(path) or path
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise unreadable(path, error) from error
    return _regular(descriptor, path)


def open_inside(folder: int, name: str, where: Path) -> BinaryIO:
    """``open_regular`` for the entry ``name`` of an open directory; ``where`` is what messages call it."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        raise unreadable(where, error) from error
    return _regular(descriptor, where)


def unreadable(path: Path, error: OSError) -> MpuError:
    """What to say of a file that could not be opened."""
    if error.errno == errno.ELOOP:
        return MpuError(f"{path}: is a link, which could lead to any file here, so it is not followed", GET_IT_AGAIN)
    return MpuError(f"{path}: cannot be read: {error.strerror}")


def _regular(descriptor: int, path: Path) -> BinaryIO:
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise MpuError(f"{path}: not a regular file", GET_IT_AGAIN)
    return file


def _blob(path: Path) -> Path | None:
    """Where a link of the Hub's cache (``…/snapshots/REVISION/NAME``) leads, if that is a blob of its repository."""
    parents = path.absolute().parents
    snapshots = next((parent for parent in parents if parent.name == "snapshots"), None)
    if snapshots is None or not path.is_symlink():
        return None
    blobs = snapshots.parent / "blobs"
    if blobs.is_symlink() or snapshots.is_symlink():
        return None  # the cache makes neither a link: somebody else did
    blob = path.resolve()
    return blob if blob.parent == blobs.resolve() else None


def read_bounded(path: Path, limit: int = SMALL, *, links: bool = True) -> bytes:
    """The bytes of a regular file. Raises MpuError if there are more than ``limit``."""
    with open_regular(path, links=links) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise MpuError(f"{path}: larger than {limit:,} bytes, the most that mpu reads of such a file")
    return content


def copy_bounded(source: BinaryIO, target: Path, limit: int) -> int:
    """Copy an open file to the new private file ``target``; the number of bytes. Raises MpuError above ``limit``."""
    copied = 0
    with create_private(target) as written:
        while block := source.read(BLOCK):
            copied += len(block)
            if copied > limit:
                raise MpuError(f"{target.name}: larger than {limit:,} bytes, the most that is accepted here")
            written.write(block)
    return copied


def create_private(path: Path) -> BinaryIO:
    """A new file that only its owner may read, open for writing. FileExistsError if there is anything of that name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, PRIVATE_FILE)
    os.fchmod(descriptor, PRIVATE_FILE)  # whatever the umask left out
    return os.fdopen(descriptor, "wb")


def private_folder(path: Path) -> Path:
    """``path`` as a directory that only its owner may enter; missing parents are made so, too.

    Raises MpuError if it is a link, or belongs to somebody else.
    """
    for folder in reversed([path, *path.parents]):
        with contextlib.suppress(FileExistsError):
            if not folder.exists():
                folder.mkdir(mode=PRIVATE_FOLDER)
    status = path.stat(follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid():
        raise MpuError(f"{path}: must be a folder of your own, not a link or another user's", "choose another folder")
    path.chmod(PRIVATE_FOLDER)
    return path


@contextmanager
def private_scratch(parent: Path | None = None) -> Iterator[Path]:
    """A new private folder, in ``parent`` or among the system's temporary files, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="mpu-", dir=parent) as scratch:
        yield Path(scratch)


@contextmanager
def private_umask() -> Iterator[None]:
    """Whatever is created inside, also by libraries, is for its owner only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync_folder(path: Path) -> None:
    """Have the names in a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def random_name(name: str) -> str:
    """A hidden name that nobody can have prepared, for writing what becomes ``name``."""
    return f".{name}.{secrets.token_hex(8)}.partial"
