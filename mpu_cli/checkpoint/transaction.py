"""All or nothing: what a command makes appears under its name when it is whole, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from mpu_cli.errors import MpuError


class Transaction:
    """Outputs written beside their targets under hidden names, and renamed together when the block ends well.

    On an exception (an interrupt too) the unfinished outputs are removed and what stood at the targets is as it
    was. With ``force`` an existing target is replaced; its old content is deleted only after all the new ones
    are in place.
    """

    def __init__(self, *, force: bool = False):
        self._force = force
        self._outputs: list[tuple[Path, Path, Path]] = []  # staging directory, output in it, target
        self._made_parents: list[Path] = []

    def add(self, target: Path, *, directory: bool = False) -> Path:
        """Where to write what shall become ``target``: an empty directory, or the name of a file to make.

        Raises MpuError if ``target`` exists and may not be replaced.
        """
        self._check(target)
        if directory and self._force and target.exists() and not target.is_dir():
            raise MpuError(f"{target}: is a file, and a directory shall be written there; move it away")
        if not directory and target.is_dir():
            raise MpuError(f"{target}: is a directory, and a file shall be written there; move it away")
        try:
            self._make_parents(target.parent)
            staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        except OSError as error:
            raise MpuError(f"{target}: cannot be written: {error.strerror}") from error
        if directory:
            os.chmod(staging, 0o777 & ~_umask())
        output = staging if directory else staging / target.name
        self._outputs.append((staging, output, target))
        return output

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            for staging, _, _ in self._outputs:
                shutil.rmtree(staging, ignore_errors=True)
            for parent in reversed(self._made_parents):
                if not any(parent.iterdir()):
                    parent.rmdir()

    def _check(self, target: Path) -> None:
        if not self._force and (target.exists() or target.is_symlink()):
            raise MpuError(f"{target}: exists already; choose another name, or replace it with --force")

    def _make_parents(self, parent: Path) -> None:
        missing = [p for p in (parent, *parent.parents) if not p.exists()]
        for path in reversed(missing):
            path.mkdir()
            self._made_parents.append(path)

    def _commit(self) -> None:
        for _, output, _ in self._outputs:
            _sync(output)
        kept: dict[Path, Path] = {}  # target → where its old content is kept until all is done
        try:
            for _, output, target in self._outputs:
                self._check(target)
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
    """Flush a file, or every file below a directory and the directories themselves, to the disk."""
    for folder, _, files in os.walk(path) if path.is_dir() else [(path.parent, [], [path.name])]:
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
