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
from typing import TYPE_CHECKING

from mpu_cli.checkpoint.header import ITEM_SIZE, encode_header
from mpu_cli.checkpoint.reader import INDEX_NAME, WEIGHTS_NAME, drop_pages
from mpu_cli.errors import MpuError

if TYPE_CHECKING:
    import torch

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None

MAX_SHARD = 5_000_000_000  # bytes of data, as transformers' save_pretrained

Plan = Mapping[str, tuple[str, tuple[int, ...]]]  # name → dtype, shape


def plan_bytes(plan: Plan) -> int:
    return sum(math.prod(shape) * ITEM_SIZE[dtype] for dtype, shape in plan.values())


class CheckpointWriter:
    """Tensors to fill in, each a view of the file that is being made.

    The whole of every file is reserved on the disk before anything is written, so a full disk shows at once and
    not as a half-written file. ``path`` is a file, or a directory for ``model.safetensors`` or for shards of at
    most ``max_shard`` bytes with their index. Use as a context manager, and keep no view beyond it: what is written to
    one afterwards may come too late to be flushed.
    """

    def __init__(self, path: Path, plan: Plan, metadata: Mapping[str, str], max_shard: int = MAX_SHARD):
        self.dtype = {name: dtype for name, (dtype, _) in plan.items()}
        self._shape = {name: shape for name, (_, shape) in plan.items()}
        self._place: dict[str, tuple[mmap.mmap, int]] = {}
        self._maps: list[mmap.mmap] = []
        metadata = {"format": "pt", **metadata}
        if not path.is_dir():
            self._reserve(path, plan, metadata)
            return
        shards = list(_shards(plan, max_shard))
        if len(shards) == 1:
            self._reserve(path / WEIGHTS_NAME, plan, metadata)
            return
        weight_map = {}
        for i, names in enumerate(shards, 1):
            file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            self._reserve(path / file, {name: plan[name] for name in names}, metadata)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": plan_bytes(plan)}, "weight_map": weight_map}
        (path / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def tensor(self, name: str) -> torch.Tensor:
        """Tensor ``name`` of the file, to be written to."""
        import torch

        from mpu_cli.checkpoint.dtypes import TORCH

        dtype, shape = TORCH[self.dtype[name]], self._shape[name]
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=dtype)
        buffer, start = self._place[name]
        return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=start).view(shape)

    def populate(self, name: str) -> None:
        """Map all pages of the tensor at once, which costs less than a fault for each; where the system can."""
        buffer, start = self._place[name]
        begin = start // mmap.PAGESIZE * mmap.PAGESIZE
        length = start + math.prod(self._shape[name]) * ITEM_SIZE[self.dtype[name]] - begin
        if _madvise is not None and length:
            view = ctypes.c_char.from_buffer(buffer)
            # Through ctypes, which lets other threads run meanwhile. A kernel before 5.14 refuses, and nothing is lost.
            _madvise(ctypes.c_void_p(ctypes.addressof(view) + begin), ctypes.c_size_t(length), _POPULATE_WRITE)

    def forget_pages(self, name: str) -> None:
        """The tensor is done: take its pages out of this process (the system writes them to the disk)."""
        buffer, start = self._place[name]
        drop_pages(buffer, start, math.prod(self._shape[name]) * ITEM_SIZE[self.dtype[name]])

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The maps close when their last view goes; the kernel then holds the data like that of any written file.
        self._maps.clear()
        self._place.clear()

    def _reserve(self, path: Path, plan: Plan, metadata: Mapping[str, str]) -> None:
        head, starts = encode_header(plan, metadata)
        size = len(head) + plan_bytes(plan)
        with open(path, "xb+") as file:
            try:
                _allocate(file.fileno(), size)
            except OSError as error:
                free = shutil.disk_usage(path.parent).free
                raise MpuError(
                    f"{path.parent.parent}: cannot reserve {size:,} bytes ({error.strerror}; {free:,} bytes are free); "
                    "make room or write elsewhere with --out"
                ) from error
            file.write(head)
            file.flush()
            buffer = mmap.mmap(file.fileno(), size)
        self._maps.append(buffer)
        self._place |= {name: (buffer, start) for name, start in starts.items()}


def _shards(plan: Plan, max_shard: int) -> Iterable[list[str]]:
    names: list[str] = []
    filled = 0
    for name, (dtype, shape) in plan.items():
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
