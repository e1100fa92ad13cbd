"""Identifies a model by the names, shapes, dtypes and bytes of its tensors, however they are split into shards.

A tensor's digest is SHA-256 over the SHA-256 digests of its 4 MiB pieces, so pieces can be hashed in any order and
on several threads; the fingerprint is SHA-256 over the sorted list of tensors with their digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor

from mpu_cli.checkpoint.header import TensorInfo
from mpu_cli.checkpoint.reader import Checkpoint

PIECE = 4 << 20  # bytes; part of the definition


def pieces(info: TensorInfo) -> range:
    """The byte offsets at which a tensor's pieces begin."""
    return range(0, info.nbytes, PIECE)


def piece_digest(raw: memoryview, offset: int) -> bytes:
    return hashlib.sha256(raw[offset : offset + PIECE]).digest()


def combine(tensors: Mapping[str, TensorInfo], digests: Mapping[str, list[bytes]]) -> str:
    """The fingerprint in hexadecimal, from the piece digests of every tensor."""
    table = [
        [name, tensors[name].dtype, list(tensors[name].shape), hashlib.sha256(b"".join(digests[name])).hexdigest()]
        for name in sorted(tensors)
    ]
    return hashlib.sha256(json.dumps(table, separators=(",", ":")).encode()).hexdigest()


def piece_digests(checkpoint: Checkpoint, name: str, pool: Executor) -> Iterator[bytes]:
    """The piece digests of one tensor; the threads of ``pool`` start on them immediately."""
    raw = checkpoint.raw(name)
    return pool.map(lambda offset: piece_digest(raw, offset), pieces(checkpoint.tensors[name]))


def fingerprint(checkpoint: Checkpoint, pool: Executor) -> str:
    """The fingerprint of a whole checkpoint; reads all of it once, on the threads of ``pool``."""
    digests = {name: list(piece_digests(checkpoint, name, pool)) for name in checkpoint.tensors}
    return combine(checkpoint.tensors, digests)
