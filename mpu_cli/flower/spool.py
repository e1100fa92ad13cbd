"""The folder through which the data owner's Flower app and ``mpu watch`` work together.

    SPOOL/in/RUN/round_R/copy_K/               a copy, moved here once it is whole
    SPOOL/out/RUN/round_R/copy_K.safetensors   its delta (a directory if it is large)
    SPOOL/out/RUN/round_R/copy_K.failed        in its place, if unlearning failed; says nothing else
    SPOOL/arriving/RUN/round_R/copy_K/         what the Flower app has of a copy so far

The Flower app runs code that the model's owner may have sent, so it sees this folder only. Records, logs, checkpoints
and reference files are elsewhere. Neither side trusts what the other left here: names are checked before they become
paths, paths are walked from one handle without following links, and copies are taken out before anything reads them.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import BLOCK, copy_bounded, private_folder, random_name
from mpu_cli.files.folder import Folder
from mpu_cli.files.manifest import MANIFEST_NAME, CopyManifest
from mpu_cli.files.reader import INDEX_NAME, WEIGHTS_NAME
from mpu_cli.files.visible import visible
from mpu_cli.model.source import SIDE_FILES

COPY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}/round_[0-9]{1,6}/copy_[0-9]{1,6}")
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,199})?")
SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
COPY_FILES = frozenset({WEIGHTS_NAME, INDEX_NAME, MANIFEST_NAME, "config.json", *SIDE_FILES})
DELTA, FAILED = ".safetensors", ".failed"
SHARED = 0o2770  # of a spool: its group's, and what is made inside is the group's, too
SPARE = 1 << 30  # bytes of the disk that a copy may not fill

Sizes = dict[str, int]


@dataclass(frozen=True)
class Spool:
    """One data owner's spool; ``copy`` is RUN/round_R/copy_K throughout. ValueError for a name that is not one."""

    root: Path

    @cached_property
    def _folder(self) -> Folder:
        self.root.mkdir(parents=True, exist_ok=True)
        return Folder(self.root)

    def prepare(self, group: str | None = None) -> None:
        """Make the folders that both sides use; the spool itself, if it is missing, for ``group`` and nobody else."""
        if group is not None:
            self._check_shared(group)
        for name in ("in", "out"):
            try:
                self._folder.make(name)
            except OSError as error:
                raise MpuError(f"{self.root / name}: {error.strerror}", "remove it") from error

    def _check_shared(self, group: str) -> None:
        try:
            number = grp.getgrnam(group).gr_gid
        except KeyError as error:
            raise MpuError(f"--spool-group {group}: no such group here", f"groupadd {group} makes it") from error
        command = f"chgrp {group} {self.root} && chmod {SHARED:o} {self.root}"
        try:
            if not self.root.exists():
                self.root.mkdir(mode=0o700)
                os.chown(self.root, -1, number)
                self.root.chmod(SHARED)
        except OSError as error:
            raise MpuError(f"{self.root}: {error.strerror}", f"let root make it: mkdir -p, then {command}") from error
        facts = self.root.stat()
        if facts.st_gid != number or facts.st_mode & SHARED != SHARED:
            raise MpuError(f"{self.root}: group {group} cannot write everything that is made there", command)

    def copies(self) -> Iterator[str]:
        """Copies that have arrived, in order. Entries with other names, and those that are not folders, are passed."""
        names = []
        for run in self._folder.names("in"):
            for round_ in self._folder.names(f"in/{run}"):
                for copy in self._folder.names(f"in/{run}/{round_}"):
                    names.append(f"{run}/{round_}/{copy}")
        named = [name for name in names if is_name(name, COPY)]
        for name in sorted(named, key=_natural):
            if self._folder.kind(f"in/{name}") == "folder":
                yield name

    def state(self, copy: str) -> str:
        """ "arriving", "waiting" for its delta, "done" or "failed"."""
        delta, failed, arrived = _delta(copy), _failure_path(copy), _inbox_path(copy)
        if self._folder.kind(delta) in ("file", "folder"):
            return "done"
        if self._folder.kind(failed) == "file":
            return "failed"
        return "waiting" if self._folder.kind(arrived) == "folder" else "arriving"

    def received_sizes(self, copy: str) -> Sizes:
        """Bytes that are here of each file of a copy that is arriving."""
        folder = _arriving(copy)
        files = [name for name in self._folder.names(folder) if self._folder.kind(f"{folder}/{name}") == "file"]
        return {name: self._folder.size(f"{folder}/{name}") for name in files}

    def put(self, copy: str, name: str, offset: int, data: bytes) -> None:
        """Write a piece where it belongs; the same piece may come again."""
        path = f"{_arriving(copy)}/{validate_name(name, FILE)}"
        if "/" in name or self._folder.kind(_inbox_path(copy)) is not None:
            return
        if not 0 <= offset <= self._folder.size(path):
            return  # a piece before it is missing: the sender asks which bytes are here
        self._folder.write_at(path, offset, data)

    def complete(self, copy: str, digests: Mapping[str, str]) -> list[str]:
        """Move a copy to where ``mpu watch`` finds it. Returns the files that are not those of ``digests``: they are
        removed, and have to come again."""
        folder, target = _arriving(copy), _inbox_path(copy)
        if self._folder.kind(target) is not None:
            return []
        wrong = [name for name in digests if self._digest(f"{folder}/{validate_name(name, FILE)}") != digests[name]]
        for name in self._folder.names(folder):
            if name in wrong or name not in digests:
                self._folder.remove(f"{folder}/{name}")
        if not wrong:
            self._folder.move(folder, target)
        return wrong

    def take(self, copy: str, target: Path) -> Path:
        """Copy what has arrived into the new private folder ``target``: from then on, nobody can change it.

        Only regular files with names that copies have. Raises MpuError for anything else under such a name, and if
        there is not enough room.
        """
        folder = _inbox_path(copy)
        private_folder(target)
        free_bytes = shutil.disk_usage(target).free - SPARE
        for name in self._folder.names(folder):
            if name not in COPY_FILES and not SHARD.fullmatch(name):
                continue
            size = self._folder.size(f"{folder}/{name}")
            if size > free_bytes:
                raise MpuError(f"{copy}: {name} has {size:,} bytes, and {max(0, free_bytes):,} are free", "make room")
            with self._folder.open(f"{folder}/{name}") as file:
                free_bytes -= copy_bounded(file, target / name, free_bytes)
        return target

    def hand_over(self, copy: str, delta: Path) -> Path:
        """Copy a finished delta to where the Flower app finds it, in one step, in place of whatever has its name."""
        target = _delta(copy)
        kind = self._folder.kind(target)
        if kind == "folder" or (kind == "file" and delta.is_dir()):
            self._folder.remove(target)
        if not delta.is_dir():
            with delta.open("rb") as source, self._folder.create(target) as file:
                shutil.copyfileobj(source, file, BLOCK)
            return self.root / target
        parent, _, name = target.rpartition("/")
        fresh = f"{parent}/{random_name(name)}"
        try:
            for path in files_of(delta):
                with path.open("rb") as source, self._folder.create(f"{fresh}/{path.name}") as file:
                    shutil.copyfileobj(source, file, BLOCK)
            if kind == "other":
                self._folder.remove(target)
            self._folder.move(fresh, target)
        except BaseException:
            self._folder.remove(fresh)
            raise
        return self.root / target

    def fail(self, copy: str) -> None:
        """Leave the mark of a failure, which says nothing else."""
        path = _failure_path(copy)
        if self._folder.kind(path) == "folder":  # moved, not removed: it may be nested as deep as it likes
            parent, _, name = path.rpartition("/")
            self._folder.move(path, f"{parent}/{random_name(name)}")
        with self._folder.create(path):
            pass

    def delta_files(self, copy: str) -> tuple[list[str], list[int], list[str]]:
        """The files of a delta: their names, relative to its parent, bytes, and SHA-256 in hexadecimal."""
        names, parent = self._files_of_delta(copy), _delta(copy).rpartition("/")[0]
        paths = [f"{parent}/{name}" for name in names]
        return names, [self._folder.size(path) for path in paths], [self._digest(path) for path in paths]

    def read(self, copy: str, name: str, offset: int, count: int) -> bytes:
        """A piece of one of the files that ``delta_files`` names."""
        if validate_name(name, FILE) not in self._files_of_delta(copy):
            raise ValueError(f"not a file of the delta of {copy}: {name}")
        with self._folder.open(f"{_delta(copy).rpartition('/')[0]}/{name}") as file:
            file.seek(offset)
            return file.read(count)

    def again(self, copy: str) -> None:
        """Have the delta made anew."""
        for path in (_delta(copy), _failure_path(copy)):
            self._folder.remove(path)

    def forget(self, copy: str) -> None:
        """Remove a copy and its delta: the round is over."""
        for path in (_arriving(copy), _inbox_path(copy), _delta(copy)):
            self._folder.remove(path)

    def _files_of_delta(self, copy: str) -> list[str]:
        delta = _delta(copy)
        name, kind = delta.rpartition("/")[2], self._folder.kind(delta)
        if kind == "file":
            return [name]
        if kind != "folder":
            return []
        paths = [f"{name}/{file}" for file in self._folder.names(delta)]
        return [path for path in paths if is_name(path, FILE)]

    def _digest(self, path: str) -> str:
        if self._folder.kind(path) != "file":
            return ""
        with self._folder.open(path) as file:
            return _digest(file)


def _arriving(copy: str) -> str:
    return f"arriving/{validate_name(copy, COPY)}"


def _inbox_path(copy: str) -> str:
    return f"in/{validate_name(copy, COPY)}"


def _delta(copy: str) -> str:
    return f"out/{validate_name(copy, COPY)}{DELTA}"


def _failure_path(copy: str) -> str:
    return f"out/{validate_name(copy, COPY)}{FAILED}"


def copy_name(manifest: CopyManifest) -> str:
    """A spool's name for the copy of ``manifest``: RUN/round_R/copy_K."""
    return f"{manifest.run}/round_{manifest.round}/copy_{manifest.copy}"


def is_name(name: object, pattern: re.Pattern[str]) -> bool:
    """Whether ``name`` has the form of a name here, which no path that leads elsewhere has."""
    return isinstance(name, str) and bool(pattern.fullmatch(name)) and ".." not in name


def validate_name(name: str, pattern: re.Pattern[str]) -> str:
    """``name``; ValueError unless it has the form of a name here."""
    if not is_name(name, pattern):
        raise ValueError(f"not a name that can be used here: {str(name)[:80]!r}")
    return name


def files_of(path: Path) -> list[Path]:
    """``path`` if it is a file, the files in it if it is a directory; none if there is nothing."""
    if path.is_file():
        return [path]
    return visible(path.iterdir()) if path.is_dir() else []


def digest_of(path: Path) -> str:
    """SHA-256 in hexadecimal; empty if there is no such file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return _digest(file)


def digest_of_folder(folder: Path) -> str:
    """SHA-256 of the names and contents of the files in it."""
    facts = [[path.name, digest_of(path)] for path in sorted(folder.iterdir())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _digest(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(BLOCK):
        digest.update(block)
    return digest.hexdigest()


def _natural(name: str) -> tuple[str, int, int]:
    """round_2 before round_10."""
    run, round_, copy = name.split("/")
    return run, int(round_.rpartition("_")[2]), int(copy.rpartition("_")[2])
