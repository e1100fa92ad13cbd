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

import torch

from mpu_cli.errors import MpuError
from mpu_cli.files.reader import INDEX_NAME, ITEM_SIZE, TORCH, WEIGHTS_NAME, Checkpoint, drop_pages, encode_header

_POPULATE_WRITE = 23  # Linux's MADV_POPULATE_WRITE
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None

MAX_SHARD = 5_000_000_000  # bytes of data, as in transformers' save_pretrained

TensorSpecs = Mapping[str, tuple[str, tuple[int, ...]]]  # name → dtype, shape


def nbytes_of(specs: TensorSpecs) -> int:
    return sum(math.prod(shape) * ITEM_SIZE[dtype] for dtype, shape in specs.values())


class CheckpointWriter:
    """Tensors to fill in, each a view of the file being written.

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
        self.dtype = {name: dtype for name, (dtype, _) in specs.items()}
        self._shape = {name: shape for name, (_, shape) in specs.items()}
        self._location: dict[str, tuple[mmap.mmap, int]] = {}
        self._maps: list[mmap.mmap] = []
        metadata = {"format": "pt", **metadata}
        if not path.is_dir():
            self._reserve(path, specs, metadata)
            return
        shards = [[name for name in names if name in specs] for names in like.shards] if like else []
        shards = list(filter(None, shards)) if len(shards) > 1 else list(_shards(specs, max_shard))
        if len(shards) == 1:
            self._reserve(path / WEIGHTS_NAME, specs, metadata)
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(shards, 1):
            file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            self._reserve(path / file, {name: specs[name] for name in names}, metadata)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": nbytes_of(specs)}, "weight_map": weight_map}
        (path / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def tensor(self, name: str) -> torch.Tensor:
        """Tensor ``name`` of the file, as a writable view."""
        dtype, shape = TORCH[self.dtype[name]], self._shape[name]
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=dtype)
        buffer, start = self._location[name]
        return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=start).view(shape)

    def populate(self, name: str) -> None:
        """Map all pages of the tensor at once, if the system can: cheaper than one fault per page."""
        buffer, start = self._location[name]
        begin = start // mmap.PAGESIZE * mmap.PAGESIZE
        length = start + math.prod(self._shape[name]) * ITEM_SIZE[self.dtype[name]] - begin
        if _madvise is not None and length:
            view = ctypes.c_char.from_buffer(buffer)
            # ctypes lets other threads run meanwhile. Kernels before 5.14 reject the call, which does no harm.
            _madvise(ctypes.c_void_p(ctypes.addressof(view) + begin), ctypes.c_size_t(length), _POPULATE_WRITE)

    def forget_pages(self, name: str) -> None:
        """Drop the pages of a finished tensor from this process (the system writes them to disk)."""
        buffer, start = self._location[name]
        drop_pages(buffer, start, math.prod(self._shape[name]) * ITEM_SIZE[self.dtype[name]])

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The maps close with their last view; from then on, the kernel treats the data like any other file write.
        self._maps.clear()
        self._location.clear()

    def _reserve(self, path: Path, specs: TensorSpecs, metadata: Mapping[str, str]) -> None:
        head, starts = encode_header(specs, metadata)
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
            buffer = mmap.mmap(file.fileno(), size)
        self._maps.append(buffer)
        self._location |= {name: (buffer, start) for name, start in starts.items()}


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
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    if shutil.disk_usage(descriptor).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(descriptor, size)
