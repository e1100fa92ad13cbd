"""All or nothing: a command's outputs appear under their names when they are complete, or not at all."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from mpu_cli.errors import MpuError

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OUTPUT_SIGNS = ("mpu.json", "adapter_config.json")  # mark a directory written by mpu, as does an index of shards


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer termination signals until the block is done, then deliver them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = {number: signal.getsignal(number) for number in STOPPING}
    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, lambda arrived, _: held.append(arrived))
    try:
        yield
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)
        for arrived in held:
            signal.raise_signal(arrived)


class Transaction:
    """Outputs written next to their targets under hidden names, and renamed together when the block succeeds.

    On an exception (including an interrupt), unfinished outputs are removed and existing targets are left unchanged.
    With ``force``, existing targets are replaced; their old content is deleted only after all new outputs are in
    place.
    """

    open_ones: ClassVar[list[Transaction]] = []

    def __init__(self, *, force: bool = False):
        self._force = force
        self._outputs: list[tuple[Path, Path, Path]] = []  # staging directory, output in it, target
        self._scratch: list[Path] = []
        self._made_parents: list[Path] = []

    def add(self, target: Path, *, directory: bool = False) -> Path:
        """The path to write to for ``target``: an empty directory, or a file that does not exist yet.

        Raises MpuError if ``target`` exists and may not be replaced.
        """
        here = target.absolute()
        for _, _, other in self._outputs:
            there = other.absolute()
            if here == there or here in there.parents or there in here.parents:
                raise MpuError(f"{target}: overlaps with {other}, another output of this command", "choose other names")
        self.check(target, directory)
        with uninterrupted():
            try:
                self._make_parents(target.parent)
                staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
            except OSError as error:
                raise MpuError(f"{target}: cannot be written: {error.strerror}") from error
            output = staging if directory else staging / target.name
            self._outputs.append((staging, output, target))
        if directory:
            os.chmod(staging, 0o777 & ~_umask())
        return output

    def scratch(self, parent: Path) -> Path:
        """A directory in ``parent`` that only its owner may read, deleted when the transaction ends."""
        with uninterrupted():
            try:
                self._make_parents(parent)
                folder = Path(tempfile.mkdtemp(prefix=".mpu.", suffix=".partial", dir=parent))
            except OSError as error:
                raise MpuError(f"{parent}: cannot be written: {error.strerror}") from error
            self._scratch.append(folder)
        return folder

    def __enter__(self) -> Transaction:
        Transaction.open_ones.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            try:
                if kind is None:
                    self._commit()
            finally:
                self.clean_up()

    def clean_up(self) -> None:
        """Remove unfinished outputs. Does nothing if the transaction has ended."""
        for staging in [*self._scratch, *(staging for staging, _, _ in self._outputs)]:
            shutil.rmtree(staging, ignore_errors=True)
        for parent in reversed(self._made_parents):
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        if self in Transaction.open_ones:
            Transaction.open_ones.remove(self)

    def check(self, target: Path, directory: bool) -> None:
        """Raise MpuError if ``target`` exists and may not be replaced, or is of the other kind."""
        if not os.path.lexists(target):
            return
        if not self._force:
            raise MpuError(f"{target}: already exists", "choose another name, or use --force to replace it")
        if directory and not target.is_dir():
            raise MpuError(f"{target}: is a file, expected a directory", "move it away")
        if not directory and target.is_dir():
            raise MpuError(f"{target}: is a directory, expected a file", "move it away")
        ours = directory and (any((target / s).exists() for s in OUTPUT_SIGNS) or any(target.glob("*.index.json")))
        if directory and not ours and any(target.iterdir()):
            raise MpuError(f"{target}: not written by mpu, so --force does not replace it", "move it away")
        if directory and Path.cwd().is_relative_to(target.resolve()):
            raise MpuError(f"{target}: is or contains the working directory, so it cannot be replaced")

    def _make_parents(self, parent: Path) -> None:
        missing = [p for p in (parent, *parent.parents) if not p.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)  # another command may create it too
            self._made_parents.append(path)

    def _commit(self) -> None:
        for _, output, _ in self._outputs:
            _sync(output)
        kept: dict[Path, Path] = {}  # target → where its old content is kept until the commit is complete
        try:
            for _, output, target in self._outputs:
                self.check(target, output.is_dir())
                if target.exists() or target.is_symlink():
                    kept[target] = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
                    target.rename(kept[target] / target.name)
                output.rename(target)
        except BaseException:
            for _, output, target in reversed(self._outputs):
                if not output.exists():
                    target.rename(output)
                if target in kept and os.path.lexists(kept[target] / target.name):
                    (kept[target] / target.name).rename(target)
            raise
        finally:
            for target, directory in kept.items():
                if os.path.lexists(target):
                    shutil.rmtree(directory, ignore_errors=True)
        for directory in {target.parent for _, _, target in self._outputs}:
            _sync_directory(directory)


def _sync(path: Path) -> None:
    """Flush a file, or a directory with all files and directories below it, to disk."""
    for folder, _, files in os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]:
        for name in files:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        _sync_directory(Path(folder))


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
