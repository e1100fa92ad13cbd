"""The safetensors header: its length in eight bytes, then a JSON table of tensors, followed by their data without gaps.

Format: https://huggingface.co/docs/safetensors. Nothing here needs torch, so listing a file is quick.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpu_cli.boundary.files import open_regular
from mpu_cli.errors import MpuError

# Bytes per element. Formats with less than a byte per element are rejected because their rows cannot be sliced.
ITEM_SIZE = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")

MAX_DIMENSIONS = 16
MAX_SIZE = 2**62  # limit for dimensions, tensors and offsets: far above any real file, far below overflow
AGE_HEADER = b"age-encryption.org/v1\n"  # first bytes of a sealed file
MAX_HEADER = 16 << 20  # bytes: 100,000 tensors. Reading a header takes up to 25 times its size in memory


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is stored: row by row from byte ``start`` of ``file``; ``dtype`` by safetensors' name (F32, …)."""

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


def read_header(path: Path, *, links: bool = True) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors of one ``.safetensors`` file, in the order of their data, and its metadata.

    Raises MpuError unless the file is intact: a header within its limits, known dtypes, and data that covers the
    rest of the file exactly, without gaps or overlaps; without ``links``, also if ``path`` is a link.
    """
    try:
        with open_regular(path, links=links) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise MpuError(f"{path}: too short for a safetensors file ({size} bytes)", "get it again")
            if length > MAX_HEADER:
                file.seek(0)
                if file.read(len(AGE_HEADER)) == AGE_HEADER:
                    raise MpuError(f"{path}: is sealed", f"to open a copy, run age -d -i IDENTITY {path} | tar x")
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
        table = json.loads(raw, object_pairs_hook=no_repeats)
    except (ValueError, RecursionError) as error:
        raise MpuError(f"{path}: damaged safetensors header ({_first_line(error)})", "get it again") from error
    if not isinstance(table, dict):
        raise MpuError(f"{path}: damaged safetensors header (not a JSON object)", "get it again")
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise MpuError(f"{path}: damaged safetensors header (metadata does not map strings to strings)")

    spans = sorted((_entry(path, name, entry) for name, entry in table.items()), key=lambda s: (s[0], s[1]))
    tensors, position = {}, 0
    for begin, end, name, dtype, shape in spans:
        if begin != position:
            what = "overlaps the previous one" if begin < position else "has a gap before it"
            raise MpuError(f"{path}: damaged safetensors header (tensor {short(name)} {what})", "get it again")
        tensors[name] = TensorInfo(name, dtype, shape, path, 8 + length + begin)
        position = end
    if 8 + length + position != size:
        what = "truncated" if 8 + length + position > size else "too long"
        raise MpuError(
            f"{path}: {what} ({size:,} bytes, but its header describes {8 + length + position:,})", "get it again"
        )
    return tensors, metadata


def _entry(path: Path, name: str, entry: object) -> tuple[int, int, str, str, tuple[int, ...]]:
    def bad(what: str) -> MpuError:
        return MpuError(f"{path}: damaged safetensors header (tensor {short(name)}: {what})", "get it again")

    if not isinstance(entry, dict):
        raise bad("entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise MpuError(
            f"{path}: tensor {short(name)} has unsupported dtype {short(dtype)} (supported: {', '.join(ITEM_SIZE)})"
        )
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise bad(f"shape {short(shape)}")
    if math.prod(max(n, 1) for n in shape) > MAX_SIZE:
        raise bad(f"shape {short(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise bad(f"offsets {short(offsets)}")
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_SIZE[dtype]:
        raise bad(f"{end - begin:,} bytes for shape {shape} of {dtype}")
    return begin, end, name, dtype, tuple(shape)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_SIZE


def short(value: object) -> str:
    """``value`` shortened to fit in a message."""
    if isinstance(value, str | list):
        value = value[:80] if isinstance(value, str) else value[:8]
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("duplicate name")
    return table


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def encode_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The header bytes of a file that will hold ``tensors`` (name → dtype, shape), and each tensor's offset in it.

    Tensors with wider dtypes come first, as safetensors itself writes them, so that every tensor is aligned to its
    element size.
    """
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, position = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda t: (-ITEM_SIZE[t[1][0]], t[0])):
        end = position + math.prod(shape) * ITEM_SIZE[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        begins[name], position = position, end
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    head = len(raw).to_bytes(8, "little") + raw
    return head, {name: len(head) + begin for name, begin in begins.items()}
