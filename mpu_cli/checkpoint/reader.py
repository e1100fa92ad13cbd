"""Memory-mapped reading of safetensors: a tensor, or a slice of its rows, without reading the rest."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from mpu_cli.boundary.documents import Document, read_document
from mpu_cli.boundary.files import open_regular
from mpu_cli.checkpoint.header import MAX_HEADER, TensorInfo, read_header, short
from mpu_cli.errors import MpuError

if TYPE_CHECKING:
    import torch

INDEX = ".index.json"  # how an index of shards ends
INDEX_NAME = f"model.safetensors{INDEX}"
WEIGHTS_NAME = "model.safetensors"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's
MARK = "mpu"  # of a file's metadata, what mpu says of it; other tools say what they like
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
SHARD = re.compile(r"-\d{5}-of-(?P<count>\d{5})\.safetensors\Z")
MOST_TENSORS, MOST_HEADERS = 200_000, 2 * MAX_HEADER  # tensors and bytes of headers, over all shards


class Checkpoint:
    """The tensors of one file or of several shards: names, dtypes and shapes up front, data on demand.

    ``links``: whether its files may be links, which only those of the user's own may be. ``parent``: the checkpoint
    that it is a part of, whose files are open already.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str], *, links: bool = True,
        parent: Checkpoint | None = None,
    ):  # fmt: skip
        self.path = path
        self.tensors = dict(tensors)
        self.metadata = dict(metadata)
        self._links = links
        self._parent = parent

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def shards(self) -> list[list[str]]:
        """The names of the tensors in each file, in the order of the files' names."""
        files = sorted({info.file for info in self.tensors.values()})
        return [[name for name, info in self.tensors.items() if info.file == file] for file in files]

    def tensor(self, name: str) -> torch.Tensor:
        """Tensor ``name`` as a view of the file, in its stored shape and dtype. Slicing it reads only that slice.

        The view is read-only by contract: torch does not raise on a write, the process faults.
        """
        import torch

        from mpu_cli.checkpoint.dtypes import TORCH

        info = self.tensors[name]
        if info.elements == 0:
            return torch.empty(info.shape, dtype=TORCH[info.dtype])
        flat = torch.frombuffer(self._maps[info.file], dtype=TORCH[info.dtype], count=info.elements, offset=info.start)
        return flat.view(info.shape)

    def raw(self, name: str) -> memoryview:
        """The bytes of tensor ``name`` as stored in the file."""
        info = self.tensors[name]
        return memoryview(self._maps[info.file])[info.start : info.start + info.nbytes]

    def forget_pages(self, name: str) -> None:
        """Drop the tensor's pages from this process (they stay in the page cache) to keep its memory use low."""
        info = self.tensors[name]
        drop_pages(self._maps[info.file], info.start, info.nbytes)

    def with_renamed_tensors(self, names: Mapping[str, str]) -> Checkpoint:
        """Only the tensors that are keys of ``names``, called as it says, in the same files."""
        tensors = {names[name]: info for name, info in self.tensors.items() if name in names}
        return Checkpoint(self.path, tensors, self.metadata, links=self._links, parent=self)

    @cached_property
    def _maps(self) -> dict[Path, mmap.mmap]:
        if self._parent:
            return self._parent._maps
        import warnings

        # torch warns that a read-only buffer must not be written to; that is the contract of tensor().
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        maps = {}
        needed: dict[Path, int] = {}
        for info in self.tensors.values():
            needed[info.file] = max(needed.get(info.file, 0), info.start + info.nbytes)
        for path, size in needed.items():
            with open_regular(path, links=self._links) as file:
                maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if len(maps[path]) != size:
                raise MpuError(f"{path}: changed while it was read", "let nothing else write there, and try again")
        return maps


def drop_pages(buffer: mmap.mmap, start: int, length: int) -> None:
    """Release the whole pages of ``buffer`` within ``start … start + length``."""
    begin = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + length) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > begin and hasattr(mmap, "MADV_DONTNEED"):
        buffer.madvise(mmap.MADV_DONTNEED, begin, last - begin)


def open_checkpoint(path: Path, *, links: bool = True) -> Checkpoint:
    """Open a ``.safetensors`` file, a ``….safetensors.index.json``, or a directory that contains either.

    Without ``links``, for what another party made, nothing inside a directory may be a link (except the Hub's cache's
    own); ``path`` itself may. Raises MpuError if it is missing, damaged, or stores its weights in another format
    (pickles are never read).
    """
    if path.is_dir():
        path = _weights_in(path)
    elif path.is_symlink():  # the user named it
        path = path.resolve()
    if not os.path.lexists(path):
        raise MpuError(f"{path}: no such file")
    if path.name.endswith(INDEX):
        return _open_shards(path, links)
    if path.suffix in PICKLES:
        raise MpuError(f"{path}: not a .safetensors file, the only weight format that mpu reads (never pickles)")
    return Checkpoint(path, *read_header(path, links=links), links=links)


def _weights_in(directory: Path) -> Path:
    for name in (WEIGHTS_NAME, INDEX_NAME):  # in the same order as transformers, so that both read the same file
        if os.path.lexists(directory / name):
            return directory / name
    indexes = sorted(directory.glob(f"*.safetensors{INDEX}"))
    files = sorted(directory.glob("*.safetensors"))
    for candidates in (indexes, files):
        if len(candidates) == 1:
            return candidates[0]
    if any(SHARD.search(file.name) for file in files):
        raise MpuError(
            f"{directory}: shards of a model without their index, {INDEX_NAME}",
            "get the index, too, or save the model again with transformers",
        )
    if files:
        raise MpuError(f"{directory}: {len(files)} .safetensors files but no {INDEX_NAME}", "specify which file to use")
    if pickles := sorted(p for p in directory.iterdir() if p.suffix in PICKLES):
        raise MpuError(
            f"{directory}: {pickles[0].name} is a pickle, which can run code when loaded",
            "convert it to safetensors in an environment you trust (transformers: save_pretrained) and try again",
        )
    raise MpuError(f"{directory}: no weights found ({WEIGHTS_NAME} or {INDEX_NAME})")


class _ShardIndex(Document):
    """``…safetensors.index.json``: the file of each tensor."""

    weight_map: Annotated[dict[str, str], Meta(min_length=1)]


def _open_shards(index: Path, links: bool) -> Checkpoint:
    weight_map = read_document(_ShardIndex, index, "download it again", limit=MAX_HEADER, links=links).weight_map
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] | None = None
    headers = 0
    for shard in sorted(set(weight_map.values())):
        if shard in ("", "..") or len(shard) > 255 or Path(shard).name != shard or "\\" in shard or "\0" in shard:
            raise MpuError(f"{index}: refused to read shard {short(shard)}, which is outside the index's directory")
        if not os.path.lexists(index.parent / shard):
            raise MpuError(f"{index}: shard {shard} is missing", "download it")
        shard_tensors, shard_metadata = read_header(index.parent / shard, links=links)
        if metadata is not None and shard_metadata.get(MARK) != metadata.get(MARK):
            raise MpuError(
                f"{index}: {shard} is not of the same publication, round or training as the earlier shards",
                "download all shards together",
            )
        metadata = shard_metadata if metadata is None else metadata
        for name in shard_tensors:
            if weight_map.get(name) != shard:
                where = weight_map.get(name, "no file")
                raise MpuError(f"{index}: {shard} holds tensor {short(name)}, but the index maps it to {short(where)}")
        tensors |= shard_tensors
        headers += min((info.start for info in shard_tensors.values()), default=0)
        if headers > MOST_HEADERS:
            raise MpuError(f"{index}: headers of more than {MOST_HEADERS:,} bytes")
        if len(tensors) > MOST_TENSORS:
            raise MpuError(f"{index}: more than {MOST_TENSORS:,} tensors")
    if lost := sorted(set(weight_map) - set(tensors)):
        raise MpuError(f"{index}: tensor {short(lost[0])} is not in {weight_map[lost[0]]}, to which the index maps it")
    return Checkpoint(index, {name: tensors[name] for name in weight_map}, metadata or {}, links=links)


def quoted_list(names: Iterable[str], limit: int = 3) -> str:
    """A few of ``names`` for an error message: ``'a', 'b', 'c' and 4 more``."""
    names = sorted(names)
    text = ", ".join(map(short, names[:limit]))
    return text + (f" and {len(names) - limit} more" if len(names) > limit else "")
