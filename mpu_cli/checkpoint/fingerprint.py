"""Identifies a model by the names, shapes, dtypes and bytes of its tensors, however they are split into shards.

A tensor's digest is the hash of the hashes of its 4 MiB pieces, so pieces can be hashed in any order and on several
threads; the fingerprint is the hash of the sorted list of tensors with their digests. The hash is BLAKE3, which uses a
core's vector units; fingerprints in older files are SHA-256 and have no prefix.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any

from blake3 import blake3

from mpu_cli.checkpoint.header import TensorInfo
from mpu_cli.checkpoint.reader import Checkpoint

PIECE = 4 << 20  # bytes; part of the definition
NEWEST, OLDEST = "blake3", "sha256"
_HASHES: dict[str, Callable[..., Any]] = {NEWEST: blake3, OLDEST: hashlib.sha256}


def hash_of(fingerprint: str) -> str:
    """The name of the hash that ``fingerprint`` was made with."""
    return NEWEST if fingerprint.startswith(f"{NEWEST}:") else OLDEST


def pieces(info: TensorInfo) -> range:
    """The byte offsets at which a tensor's pieces begin."""
    return range(0, info.nbytes, PIECE)


def piece_digest(raw: memoryview, offset: int, hashed: str = NEWEST) -> bytes:
    return _HASHES[hashed](raw[offset : offset + PIECE]).digest()


def combine(tensors: Mapping[str, TensorInfo], digests: Mapping[str, list[bytes]], hashed: str = NEWEST) -> str:
    """The fingerprint, from the piece digests of every tensor: in hexadecimal, after the name of a newer hash."""
    new = _HASHES[hashed]
    table = [
        [name, tensors[name].dtype, list(tensors[name].shape), new(b"".join(digests[name])).hexdigest()]
        for name in sorted(tensors)
    ]
    digest = new(json.dumps(table, separators=(",", ":")).encode()).hexdigest()
    return digest if hashed == OLDEST else f"{hashed}:{digest}"


def piece_digests(checkpoint: Checkpoint, name: str, pool: Executor, hashed: str = NEWEST) -> Iterator[bytes]:
    """The piece digests of one tensor; the threads of ``pool`` start on them immediately."""
    raw = checkpoint.raw(name)
    return pool.map(lambda offset: piece_digest(raw, offset, hashed), pieces(checkpoint.tensors[name]))


def fingerprint(checkpoint: Checkpoint, pool: Executor, hashed: str = NEWEST) -> str:
    """The fingerprint of a whole checkpoint; reads all of it once, on the threads of ``pool``."""
    digests = {name: list(piece_digests(checkpoint, name, pool, hashed)) for name in checkpoint.tensors}
    return combine(checkpoint.tensors, digests, hashed)
