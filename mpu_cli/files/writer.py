"""Writing safetensors as a stream: the header first, then the data in any order, from any thread."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import mmap
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from mpu_cli.errors import MpuError
from mpu_cli.files.reader import INDEX_NAME, ITEM_SIZE, WEIGHTS_NAME, Checkpoint, TensorInfo, encode_header, shard_name

_POPULATE_WRITE = 23  # Linux's MADV_POPULATE_WRITE
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None

MAX_SHARD = 5_000_000_000  # bytes of data, as in transformers' save_pretrained

TensorSpecs = Mapping[str, tuple[str, tuple[int, ...]]]  # name → dtype, shape


def nbytes_of(specs: TensorSpecs) -> int:
    return sum(math.prod(shape) * ITEM_SIZE[dtype] for dtype, shape in specs.values())


class CheckpointWriter(Checkpoint):
    """Tensors to fill in: each is a writable view of the file being written.

    Disk space for every file is reserved before anything is written, so a full disk is reported at once and leaves
    no half-written file. ``path`` is a file, or a directory for ``model.safetensors`` or for shards with their index:
    those of ``like`` if that has several, else of at most ``max_shard`` bytes. Use as a context manager, and keep no
    views beyond it: later writes may not be flushed.
    """

    def __init__(
        self,
        path: Path,
        specs: TensorSpecs,
        metadata: Mapping[str, str],
        max_shard: int = MAX_SHARD,
        like: Checkpoint | None = None,
    ):
        super().__init__(path, {}, {"format": "pt", **metadata})
        self._maps = {}
        if not path.is_dir():
            self._reserve(path, specs)
            return
        shards = like.shards if like else []
        if len(shards) > 1:
            shards = [[name for name in names if name in specs] for names in shards]
            shards = [names for names in shards if names]
        else:
            shards = list(_shards(specs, max_shard))
        if len(shards) == 1:
            self._reserve(path / WEIGHTS_NAME, specs)
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(shards, 1):
            file = shard_name(i, len(shards))
            self._reserve(path / file, {name: specs[name] for name in names})
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": nbytes_of(specs)}, "weight_map": weight_map}
        (path / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def populate(self, name: str) -> None:
        """Map all pages of the tensor at once, if the system can: cheaper than one fault per page."""
        info = self.tensors[name]
        begin = info.start // mmap.PAGESIZE * mmap.PAGESIZE
        length = info.start + info.nbytes - begin
        if _madvise is not None and length:
            view = ctypes.c_char.from_buffer(self._maps[info.file])
            # ctypes lets other threads run meanwhile. Kernels before 5.14 reject the call, which does no harm.
            _madvise(ctypes.c_void_p(ctypes.addressof(view) + begin), ctypes.c_size_t(length), _POPULATE_WRITE)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The maps close with their last view; from then on, the kernel treats the data like any other file write.
        self._maps.clear()

    def _reserve(self, path: Path, specs: TensorSpecs) -> None:
        head, starts = encode_header(specs, self.metadata)
        size = len(head) + nbytes_of(specs)
        with open(path, "xb+") as file:
            try:
                _allocate(file.fileno(), size)
            except OSError as error:
                free = shutil.disk_usage(path.parent).free
                raise MpuError(
                    f"{path.parent.parent}: cannot reserve {size:,} bytes ({error.strerror}, {free:,} bytes free)",
                    "make room or write elsewhere with --out",
                ) from error
            file.write(head)
            file.flush()
            self._maps[path] = mmap.mmap(file.fileno(), size)
        self.tensors |= {name: TensorInfo(name, *specs[name], path, start) for name, start in starts.items()}


def _shards(specs: TensorSpecs, max_shard: int) -> Iterable[list[str]]:
    names: list[str] = []
    filled = 0
    for name, (dtype, shape) in specs.items():
        nbytes = math.prod(shape) * ITEM_SIZE[dtype]
        if names and filled + nbytes > max_shard:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += nbytes
    yield names


def _allocate(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            # The file system cannot reserve space; which of these says so depends on the C library.
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    if shutil.disk_usage(descriptor).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(descriptor, size)
