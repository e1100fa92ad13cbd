"""All or nothing: a command's outputs appear under their names when they are complete, or not at all."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import ClassVar

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.boundary import current_umask, short_name, sync_folder

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ELSEWHERE = "choose another path"
OUTPUT_SIGNS = ("mpu.json", "adapter_config.json")  # mark a directory written by mpu, as does an index of shards


@contextmanager
def defer_signals(*, second_ends: bool = False) -> Iterator[list[int]]:
    """Defer termination signals until the block is done, then deliver them; yields those that have arrived. With
    ``second_ends``, for a block that takes long, says so, and delivers the second one at once."""
    pending: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pending
        return
    before = {int(number): signal.getsignal(number) for number in STOPPING}

    def defer(arrived: int, frame: FrameType | None) -> None:
        pending.append(arrived)
        handler = before[arrived]
        if second_ends and len(pending) == 1:
            os.write(2, b"\nstops after this step; a second signal stops at once\n")
        elif second_ends and callable(handler):
            handler(arrived, frame)

    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, defer)
    try:
        yield pending
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)
        for arrived in pending:
            signal.raise_signal(arrived)


def check_place(target: Path) -> None:
    """Raise MpuError if nothing can be written to ``target``, whether it exists or not. Raise UsageError for -, which
    other programs take for standard output."""
    if target.parts[:1] == ("-",):
        raise UsageError(f"{target}: outputs are files", "name one; --json prints a result on standard output")
    try:
        os.lstat(target)
    except FileNotFoundError:
        folder = next(parent for parent in target.absolute().parents if parent.exists())
        if not os.access(folder, os.W_OK | os.X_OK):
            raise MpuError(f"{target}: cannot be written: no permission to write to {folder}", ELSEWHERE) from None
    except OSError as error:  # a name that is too long, or below a file
        raise MpuError(f"{target}: cannot be written: {error.strerror}", ELSEWHERE) from error


def check_folder(folder: Path) -> None:
    """``check_place`` for a directory that may exist."""
    check_place(folder)
    if folder.exists() and not folder.is_dir():
        raise MpuError(f"{folder}: is a file, expected a directory", ELSEWHERE)


class Transaction:
    """Outputs written next to their targets under hidden names, and renamed together when the block succeeds.

    On an exception (including an interrupt), unfinished outputs are removed and existing targets are left unchanged.
    With ``force``, existing targets are replaced: old and new exchange their names in one step where the system can do
    that (Linux, macOS), so that there is always one of them under the name. The old content is deleted only after all
    new outputs are in place.
    """

    open_ones: ClassVar[list[Transaction]] = []

    def __init__(self, *, force: bool = False):
        self._force = force
        self._outputs: list[tuple[Path, Path, Path]] = []  # staging directory, output in it, target
        self._scratch: list[Path] = []
        self._locks: list[int] = []  # of these folders: while they are held, the folders are in use
        self._made_parents: list[Path] = []

    def add(self, target: Path, *, directory: bool = False) -> Path:
        """The path to write to for ``target``: an empty directory, or a file that does not exist yet."""
        here = target.absolute()
        for _, _, other in self._outputs:
            other_path = other.absolute()
            if here == other_path or here in other_path.parents or other_path in here.parents:
                raise MpuError(f"{target}: overlaps with {other}, another output of this command", "choose other names")
        restore(target)
        self.check(target, directory)
        with defer_signals():
            try:
                self._make_parents(target.parent)
                remove_abandoned(target.parent, target.name)
                staging = self._locked_folder(target.parent, f".{short_name(target.name)}.")
            except OSError as error:
                raise MpuError(f"{target}: cannot be written: {error.strerror}", ELSEWHERE) from error
            output = staging if directory else staging / target.name
            self._outputs.append((staging, output, target))
        if directory:
            os.chmod(staging, 0o777 & ~current_umask())
        return output

    def scratch(self, parent: Path) -> Path:
        """A directory in ``parent`` that only its owner may read, deleted when the transaction ends."""
        with defer_signals():
            try:
                self._make_parents(parent)
                folder = self._locked_folder(parent, f".{_SCRATCH}.")
            except OSError as error:
                raise MpuError(f"{parent}: cannot be written: {error.strerror}") from error
            self._scratch.append(folder)
        return folder

    def _locked_folder(self, parent: Path, prefix: str) -> Path:
        """A new folder in ``parent`` that shows that it is in use, for as long as this process lives."""
        while True:
            folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=".partial", dir=parent))
            lock = _lock_of(folder)
            if folder.exists():  # else another process took it for abandoned before it was locked
                break
            if lock is not None:
                os.close(lock)
        if lock is not None:
            self._locks.append(lock)
        return folder

    def __enter__(self) -> Transaction:
        Transaction.open_ones.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with defer_signals():
            try:
                if kind is None:
                    self._commit()
                elif isinstance(error, OSError) and not error.filename:  # as that of a full disk
                    error.filename = ", ".join(str(target) for _, _, target in self._outputs) or None
            finally:
                self.clean_up()

    def clean_up(self) -> None:
        """Remove unfinished outputs. Does nothing if the transaction has ended."""
        for staging in [*self._scratch, *(staging for staging, _, _ in self._outputs)]:
            shutil.rmtree(staging, ignore_errors=True)
        while self._locks:
            os.close(self._locks.pop())
        for parent in reversed(self._made_parents):
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        if self in Transaction.open_ones:
            Transaction.open_ones.remove(self)

    def check(self, target: Path, directory: bool) -> None:
        """Raise MpuError if ``target`` exists and may not be replaced, is of the other kind, or if another process is
        writing it, and what ``check_place`` raises."""
        check_place(target)
        self._check_existing(target, directory)
        if any(_is_locked(folder) for folder in _unfinished(target.parent, target.name)):
            raise MpuError(
                f"{target}: another mpu command is writing it", "wait for it, stop it, or choose another name"
            )

    def _check_existing(self, target: Path, directory: bool) -> None:
        if not os.path.lexists(target):
            return
        if not self._force:
            raise MpuError(f"{target}: already exists", "choose another name, or use --force to replace it")
        if directory and not target.is_dir():
            raise MpuError(f"{target}: is a file, expected a directory", "move it away")
        if not directory and target.is_dir():
            raise MpuError(f"{target}: is a directory, expected a file", "move it away")
        if not directory:
            return
        is_output = any((target / s).exists() for s in OUTPUT_SIGNS) or any(target.glob("*.index.json"))
        if not is_output and any(target.iterdir()):
            raise MpuError(f"{target}: not written by mpu, so --force does not replace it", "move it away")
        if Path.cwd().is_relative_to(target.resolve()):
            raise MpuError(f"{target}: is or contains the working directory, so it cannot be replaced")

    def _make_parents(self, parent: Path) -> None:
        missing = [p for p in (parent, *parent.parents) if not p.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)  # another command may create it too
            self._made_parents.append(path)

    def _commit(self) -> None:
        for _, output, _ in self._outputs:
            _sync(output)
        done: list[tuple[Path, Path, Path | None]] = []  # output, target, where its old content is (None: had none)
        try:
            for _, output, target in self._outputs:
                self._check_existing(target, output.is_dir())
                done.append((output, target, _put(output, target)))
        except BaseException:
            for output, target, old in reversed(done):
                _take_back(output, target, old)
            raise
        for _, _, old in done:
            if old is not None and old.parent.name.endswith(_OLD):
                shutil.rmtree(old.parent, ignore_errors=True)
        changed_folders = {target.parent for _, _, target in self._outputs}
        for parent in self._made_parents:
            changed_folders |= {parent, parent.parent}
        for folder in changed_folders:
            sync_folder(folder)


_SCRATCH, _OLD = "mpu", ".old"
_REPLACE_NOT, _EXCHANGE = 1, 2  # flags of Linux's renameat2
_SWAP, _EXCLUSIVE = 2, 4  # flags of macOS's renamex_np


def _put(output: Path, target: Path) -> Path | None:
    """Give ``output`` the name ``target``; returns the path of that name's old content, None if there was none."""
    if not os.path.lexists(target):
        if not _rename(output, target, exchange=False):
            output.rename(target)
        return None
    if _rename(output, target, exchange=True):
        return output
    backup = Path(tempfile.mkdtemp(prefix=f".{short_name(target.name)}.", suffix=_OLD, dir=target.parent)) / target.name
    if output.is_dir():
        target.rename(backup)  # for a moment, there is nothing under the name: ``restore`` looks for this
    else:
        os.link(target, backup, follow_symlinks=False)
    os.replace(output, target)
    return backup


def _take_back(output: Path, target: Path, old: Path | None) -> None:
    if old is None:
        target.rename(output)
    elif not _rename(old, target, exchange=True):
        if target.is_dir():
            target.rename(output)
        os.replace(old, target)
        shutil.rmtree(old.parent, ignore_errors=True)


def _rename(source: Path, target: Path, *, exchange: bool) -> bool:
    """Exchange two names in one step, or rename only if there is no ``target``. False if the system cannot.

    Raises FileExistsError if there is a ``target`` after all.
    """
    import ctypes

    names = os.fsencode(source), os.fsencode(target)
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux" and hasattr(libc, "renameat2"):
        here = -100  # AT_FDCWD
        failed = libc.renameat2(here, names[0], here, names[1], _EXCHANGE if exchange else _REPLACE_NOT)
    elif sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(*names, _SWAP if exchange else _EXCLUSIVE)
    else:
        return False
    number = ctypes.get_errno()
    if not failed:
        return True
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):  # an old kernel, or a file system that cannot
        return False
    raise OSError(number, os.strerror(number), str(target))


def restore(target: Path) -> None:
    """Give ``target`` back the content that it had before an exchange in two steps was cut off between them."""
    if os.path.lexists(target):
        return
    for folder in target.parent.glob(f".{glob.escape(short_name(target.name))}.*{_OLD}"):
        backup = folder / target.name
        if os.path.lexists(backup):
            backup.rename(target)
            folder.rmdir()
            return


def _lock_of(folder: Path) -> int | None:
    """A lock on ``folder`` that the system releases when this process ends, however it does; None if another process
    has it, or where folders cannot be locked (some network drives)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _is_locked(folder: Path) -> bool:
    """Whether a process has the lock on ``folder``; False where folders cannot be locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _unfinished(parent: Path, name: str) -> list[Path]:
    """The folders in ``parent`` in which the output ``name`` is, or was, being written."""
    if not parent.is_dir():
        return []
    staging = re.compile(rf"\.{re.escape(short_name(name))}\.[a-z0-9_]{{8}}\.partial")  # as mkdtemp names them
    return [Path(entry.path) for entry in os.scandir(parent) if staging.fullmatch(entry.name)]


def remove_abandoned(parent: Path, name: str = _SCRATCH) -> list[Path]:
    """Remove what killed processes left in ``parent`` on the way to its output ``name``; returns which folders."""
    removed: list[Path] = []
    for folder in _unfinished(parent, name):
        if (lock := _lock_of(folder)) is None:
            continue  # its process is still at work
        try:
            if folder.stat().st_uid == os.geteuid():
                shutil.rmtree(folder)
                removed.append(folder)
        except OSError:
            pass
        finally:
            os.close(lock)
    return removed


def _sync(path: Path) -> None:
    """Flush a file, or a directory with all files and directories below it, to disk."""
    for folder, _, files in os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]:
        for name in files:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(folder))
