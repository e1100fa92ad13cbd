"""Memory-mapped reading of safetensors, which refuses damaged and hostile headers: a tensor, or a slice of its rows,
without reading the rest."""

from __future__ import annotations

import json
import math
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch
from blake3 import blake3
from msgspec import Meta

from mpu_cli.errors import MpuError, first_line
from mpu_cli.files.boundary import AGE_HEADER, Document, once_each, open_regular, parse_document, read_document
from mpu_cli.files.visible import visible
from mpu_cli.heap import keep_freed_memory
from mpu_cli.wording import few

# The safetensors header: its length in eight bytes, then a JSON table of tensors, followed by their data without
# gaps.
#
# Format: https://huggingface.co/docs/safetensors.

# Formats with less than a byte per element are rejected because their rows cannot be sliced.
TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
ITEM_SIZE = {name: dtype.itemsize for name, dtype in TORCH.items()}  # bytes per element
FLOATS = ("F64", "F32", "F16", "BF16")

MAX_DIMENSIONS = 16
MAX_SIZE = 2**62  # limit for dimensions, tensors and offsets: far above any real file, far below overflow
MAX_HEADER = 16 << 20  # bytes: 100,000 tensors. Reading a header takes up to 25 times its size in memory
BEGINNING = 64  # bytes of a file by which other formats are known


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor: row by row from byte ``start`` of ``file``; ``dtype`` by safetensors' name (F32, …)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * ITEM_SIZE[self.dtype]


Size = Annotated[int, Meta(ge=0, le=MAX_SIZE)]


class _Entry(Document):
    """A tensor, as a header describes it."""

    dtype: str
    shape: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[Size, Size]


# Other files that are often found in place of safetensors: how they begin, in lower case for text, what they are, and
# what to do.
OTHER_FORMATS = {
    (AGE_HEADER,): ("is sealed", "to open a copy, run age -d -i IDENTITY {path} | tar x"),
    (b"version https://git-lfs",): (
        "a pointer of Git LFS, not the weights that it stands for", "run git lfs pull in its folder",
    ),
    (b"GGUF",): (
        "a GGUF file, which llama.cpp reads; mpu reads safetensors",
        "get the model's safetensors, or make them of it: transformers' AutoModelForCausalLM.from_pretrained("
        "FOLDER, gguf_file={path.name!r}) and save_pretrained, with the gguf package",
    ),
    (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"): (
        "a PyTorch file (a pickle), which can run code when loaded",
        "get the model's safetensors, or convert it in an environment that you trust",
    ),
    (b"<!doctype html", b"<html"): ("a web page, as a download that failed leaves it", "get the file again"),
}  # fmt: skip


def read_header(path: Path, *, links: bool = True) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors of one ``.safetensors`` file, in the order of their data, and its metadata; hostile headers are
    refused.

    Raises MpuError unless the file is intact: a header within its limits, known dtypes, and data that covers the
    rest of the file exactly, without gaps or overlaps; without ``links``, also if ``path`` is a link.
    """
    try:
        with open_regular(path, links=links) as file:
            size = os.fstat(file.fileno()).st_size
            beginning = file.read(BEGINNING)
            length = int.from_bytes(beginning[:8], "little")
            file.seek(8)
            # A safetensors file may begin as some of the others do, but not with such a length.
            if length > min(MAX_HEADER, size):
                for beginnings, (what, hint) in OTHER_FORMATS.items():
                    if beginning.startswith(beginnings) or beginning.lstrip().lower().startswith(beginnings):
                        raise MpuError(f"{path}: {what}", hint.format(path=path))
            if size < 8:
                raise MpuError(f"{path}: too short for a safetensors file ({size} bytes)", "get it again")
            if length > MAX_HEADER:
                raise MpuError(f"{path}: not a safetensors file, or its header is longer than {MAX_HEADER:,} bytes")
            if length > size - 8:
                raise MpuError(
                    f"{path}: truncated within its header (the file has {size:,} bytes, the header {length:,})",
                    "get it again",
                )
            raw = file.read(length)
    except OSError as error:
        raise MpuError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        table = json.loads(raw, object_pairs_hook=once_each)
    except (ValueError, RecursionError) as error:
        raise MpuError(f"{path}: damaged safetensors header ({first_line(error)})", "get it again") from error
    if not isinstance(table, dict):
        raise MpuError(f"{path}: damaged safetensors header (not a JSON object)", "get it again")
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise MpuError(f"{path}: damaged safetensors header (metadata does not map strings to strings)")

    entries = {name: _entry(path, name, entry) for name, entry in table.items()}
    tensors, position = {}, 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = (8 + length + offset for offset in entry.data_offsets)
        if begin != position:
            what = "overlaps the previous one" if begin < position else "has a gap before it"
            raise MpuError(f"{path}: damaged safetensors header (tensor {short(name)} {what})", "get it again")
        tensors[name] = TensorInfo(name, entry.dtype, entry.shape, path, begin)
        position = end
    if position != size:
        what = "truncated" if position > size else "too long"
        raise MpuError(f"{path}: {what} ({size:,} bytes, but its header describes {position:,})", "get it again")
    return tensors, metadata


def _entry(path: Path, name: str, value: object) -> _Entry:
    where = f"{path}: damaged safetensors header (tensor {short(name)})"
    entry = parse_document(_Entry, value, where)
    dtype, shape, (begin, end) = entry.dtype, entry.shape, entry.data_offsets
    if dtype not in ITEM_SIZE:
        raise MpuError(
            f"{path}: tensor {short(name)} has unsupported dtype {short(dtype)} (supported: {', '.join(ITEM_SIZE)})"
        )
    # As if none were 0: the product would hide how large the others are.
    too_large = math.prod(max(n, 1) for n in shape) > MAX_SIZE
    if too_large or end - begin != math.prod(shape) * ITEM_SIZE[dtype]:
        raise MpuError(f"{where}: {end - begin:,} bytes for shape {short([*shape])} of {dtype}", "get it again")
    return entry


def short(value: object) -> str:
    """``value`` shortened to fit in a message."""
    if isinstance(value, str):
        value = value[:80]
    elif isinstance(value, list):
        value = value[:8]
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def encode_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The header bytes of a file that will hold ``tensors`` (name → dtype, shape), and each tensor's offset in it.

    Tensors with wider dtypes come first, as safetensors itself writes them, so that every tensor is aligned to its
    element size.
    """
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, position = {}, 0
    for name in sorted(tensors, key=lambda name: (-ITEM_SIZE[tensors[name][0]], name)):
        dtype, shape = tensors[name]
        end = position + math.prod(shape) * ITEM_SIZE[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        begins[name], position = position, end
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    head = len(raw).to_bytes(8, "little") + raw
    return head, {name: len(head) + begin for name, begin in begins.items()}


INDEX = ".index.json"  # how an index of shards ends
INDEX_NAME = f"model.safetensors{INDEX}"
WEIGHTS_NAME = "model.safetensors"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's
MPU_ENTRY = "mpu"  # of a file's metadata, mpu's own entry; other tools add what they like
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
SHARD = re.compile(r"-\d{5}-of-(?P<count>\d{5})\.safetensors\Z")
MOST_TENSORS, MOST_HEADERS = 200_000, 2 * MAX_HEADER  # tensors and bytes of headers, over all shards


def shard_name(number: int, count: int) -> str:
    """transformers' name for shard ``number``, counted from 1, of ``count``."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


@dataclass(eq=False, repr=False)
class Checkpoint:
    """The tensors of one file or of several shards: names, dtypes and shapes up front, data on demand.

    ``links``: whether its files may be links, which only those of the user's own may be.
    """

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    links: bool = True

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

        The view of an opened file is read-only by contract: torch does not raise on a write, the process faults.
        """
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
        """Drop the pages that hold nothing but this tensor from this process, to keep its memory use low. They stay in
        the page cache, from which the system writes those of a ``CheckpointWriter`` to disk."""
        info = self.tensors[name]
        begin = -(-info.start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (info.start + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[info.file].madvise(mmap.MADV_DONTNEED, begin, end - begin)

    @cached_property
    def _maps(self) -> dict[Path, mmap.mmap]:
        import warnings

        # torch warns that a read-only buffer must not be written to; that is the contract of tensor().
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        maps = {}
        needed: dict[Path, int] = {}
        for info in self.tensors.values():
            needed[info.file] = max(needed.get(info.file, 0), info.start + info.nbytes)
        for path, size in needed.items():
            with open_regular(path, links=self.links) as file:
                maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if len(maps[path]) != size:
                raise MpuError(f"{path}: changed while it was read", "let nothing else write there, and try again")
        return maps


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
    indexes = visible(directory.glob(f"*.safetensors{INDEX}"))
    files = visible(directory.glob("*.safetensors"))
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
    if pickles := [p for p in visible(directory.iterdir()) if p.suffix in PICKLES]:
        raise MpuError(
            f"{directory}: {pickles[0].name} is a pickle, which can run code when loaded",
            "convert it to safetensors in an environment you trust (transformers: save_pretrained) and try again",
        )
    for path in visible(directory.glob("*.gguf")):
        read_header(path)  # says what it is
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
        parts = re.split(r"[/\\]", shard)
        is_below = not {"", ".", ".."} & {*parts} and "\0" not in shard
        if not is_below or len(parts) > 1 or len(shard) > 255:
            where = "in a folder below" if is_below else "outside"
            raise MpuError(
                f"{index}: refused to read shard {short(shard)}, which is {where} the index's directory",
                "shards lie beside their index: move it there, and name it so in the index",
            )
        if not os.path.lexists(index.parent / shard):
            raise MpuError(f"{index}: shard {shard} is missing", "download it")
        shard_tensors, shard_metadata = read_header(index.parent / shard, links=links)
        if metadata is not None and shard_metadata.get(MPU_ENTRY) != metadata.get(MPU_ENTRY):
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


def quoted_list(names: Iterable[str]) -> str:
    """A few of ``names`` for an error message: ``'a', 'b', 'c' and 4 more``."""
    return few([short(name) for name in sorted(names)], limit=3)


# Dtype names in safetensors, in torch and on the command line; a check for NaN and Inf.

NAME = {dtype: name for name, dtype in TORCH.items()}
OPTION = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
WORD = {name: word for word, name in OPTION.items()}
LOST_TO_ROUNDING = 0.3  # warn if storing a change in its dtype loses more than this share of its norm


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 if any of the tensors is float64, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def all_finite(x: torch.Tensor) -> bool:
    """Whether ``x`` contains neither NaN nor Inf.

    Looks only at the minimum and maximum, to which NaN propagates; 20 times as fast as isfinite.
    """
    return x.numel() == 0 or all(math.isfinite(float(extreme)) for extreme in torch.aminmax(x))


# Threads for work that comes in pieces: torch's kernels release the GIL, so pieces are processed in parallel.


@contextmanager
def worker_pool(workers: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """A pool of one thread per core, each of which computes on a single core; or of ``workers``, which share what
    torch may use.

    On an exception (including an interrupt), queued work is cancelled and running work is waited for.
    """
    before = torch.get_num_threads()
    if workers is None:
        keep_freed_memory()
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        each = 1
    else:
        each = max(1, before // workers)
    torch.set_num_threads(each)
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(each,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


# Identifies a model by the names, shapes, dtypes and bytes of its tensors, however they are split into shards.
#
# A tensor's digest is the hash of the hashes of its 4 MiB pieces, so pieces can be hashed in any order and on several
# threads; the fingerprint is the hash of the sorted list of tensors with their digests. The hash is BLAKE3, which
# uses a core's vector units.

PIECE = 4 << 20  # bytes; part of the definition


def piece_offsets(info: TensorInfo) -> range:
    """The byte offsets at which a tensor's pieces begin."""
    return range(0, info.nbytes, PIECE)


def piece_digest(raw: memoryview, offset: int) -> bytes:
    return blake3(raw[offset : offset + PIECE]).digest()


def fingerprint_of(tensors: Mapping[str, TensorInfo], digests: Mapping[str, list[bytes]]) -> str:
    """The fingerprint, from the piece digests of every tensor: in hexadecimal, after the name of the hash."""
    table = [
        [name, tensors[name].dtype, list(tensors[name].shape), blake3(b"".join(digests[name])).hexdigest()]
        for name in sorted(tensors)
    ]
    return f"blake3:{blake3(json.dumps(table, separators=(',', ':')).encode()).hexdigest()}"


def piece_digests(checkpoint: Checkpoint, name: str, pool: Executor) -> Iterator[bytes]:
    """The piece digests of one tensor; the threads of ``pool`` start on them immediately."""
    raw = checkpoint.raw(name)
    return pool.map(lambda offset: piece_digest(raw, offset), piece_offsets(checkpoint.tensors[name]))


def fingerprint(checkpoint: Checkpoint) -> str:
    """The fingerprint of a whole checkpoint; reads all of it once, on all cores."""
    with worker_pool() as pool:
        digests = {name: list(piece_digests(checkpoint, name, pool)) for name in checkpoint.tensors}
    return fingerprint_of(checkpoint.tensors, digests)
