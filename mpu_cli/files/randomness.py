"""All secret randomness, from one master seed: HKDF derives a key per purpose, AES-256 in counter mode expands it.

Streams are seekable and the same on every machine. Keys: RFC 5869 (HKDF-SHA256); stream: NIST SP 800-38A (CTR).
"""

from __future__ import annotations

import json
import math
import secrets

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SEED_BYTES = 32
CELL = 1024  # normals generated together; part of the definition of the noise
DOUBLE_REACH = math.sqrt(2 * 63 * math.log(2))  # the largest normal that 64-bit words can give

_BLOCK = 16  # bytes of an AES block
_ZEROS = memoryview(bytes(1 << 19))  # encrypted piece by piece to get the keystream itself


def new_seed() -> bytes:
    """A master seed from the operating system."""
    return secrets.token_bytes(SEED_BYTES)


def seed_from_number(number: int) -> bytes:
    """A master seed for repeatable experiments. It is only as secret as the number, that is, not at all."""
    return _hkdf(number.to_bytes(32, "little"), "mpu seed from number")


def _hkdf(key: bytes, info: str) -> bytes:
    return HKDF(SHA256(), length=SEED_BYTES, salt=None, info=info.encode()).derive(key)


class Stream:
    """The keystream of one purpose. Each draw continues where the previous one ended."""

    def __init__(self, key: bytes):
        self._key = key
        self._used = 0  # blocks

    def permutation(self, n: int) -> torch.Tensor:
        # Sort random 64-bit keys: ties, the only bias, have probability n²/2⁶⁵.
        return torch.from_numpy(np.argsort(self._words(n), kind="stable"))

    def uniform(self, n: int) -> torch.Tensor:
        # In [0, 1): the upper 53 bits, as many as a double represents exactly.
        return torch.from_numpy((self._words(n) >> np.uint64(11)) * 2.0**-53)

    def normal(self, n: int) -> torch.Tensor:
        # Box–Muller. 1 − u is never 0, unlike u.
        u = self.uniform(2 * n).view(2, n)
        return (-2 * (1 - u[0]).log()).sqrt() * (2 * torch.pi * u[1]).cos()

    def _words(self, n: int) -> np.ndarray:
        # Each draw begins with a new block, so whole blocks are used.
        nbytes = -(-8 * n // _BLOCK) * _BLOCK
        words = np.frombuffer(keystream(self._key, self._used * _BLOCK, nbytes), np.dtype("<u8"))[:n]
        self._used += nbytes // _BLOCK
        return words


class Randomness:
    """The tree of keys below one master seed (32 bytes)."""

    def __init__(self, seed: bytes):
        self._seed = seed

    def key(self, *purpose: str | int) -> bytes:
        """The 32-byte key for ``purpose``; different purposes give unrelated keys."""
        return _hkdf(self._seed, "mpu v1 " + json.dumps(purpose))

    def stream(self, *purpose: str | int) -> Stream:
        return Stream(self.key(*purpose))


def keystream(key: bytes, offset: int, nbytes: int) -> memoryview:
    """``nbytes`` of the AES-256-CTR keystream from byte ``offset``, a multiple of 16."""
    counter = (offset // _BLOCK).to_bytes(_BLOCK, "big")
    encryptor = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
    # update_into asks for room for all but a byte of one more block.
    out = memoryview(np.empty(nbytes + _BLOCK - 1, np.uint8).data)
    for start in range(0, nbytes, len(_ZEROS)):
        stop = min(start + len(_ZEROS), nbytes)
        encryptor.update_into(_ZEROS[: stop - start], out[start : stop + _BLOCK - 1])
    return out[:nbytes]


def standard_normals(key: bytes, start: int, stop: int, *, double: bool) -> torch.Tensor:
    """Elements ``start … stop`` (at least one) of an endless sequence of independent N(0, 1), fixed by ``key``.

    Box–Muller in cells of 1,024 elements: word i < 512 of a cell gives a radius, word i + 512 an angle, and together
    they give elements i and i + 512. Any slice can be found by seeking. float32 uses 32-bit words, with radii up to
    6.6; float64, a different sequence, uses 64-bit words, with radii up to ``DOUBLE_REACH``. The words are the same on
    every machine; the numbers may differ in their last bits, because math libraries do.
    """
    # numpy, because its logarithm, sine and cosine take a third of the time of torch's on a CPU.
    word, real = (np.dtype("<i8"), np.float64) if double else (np.dtype("<i4"), np.float32)
    largest = np.iinfo(word).max
    unit = 2.0 ** -(np.iinfo(word).bits - 1)
    first_cell, last = start // CELL, -(-stop // CELL)
    nbytes = CELL * word.itemsize
    bits = np.frombuffer(keystream(key, first_cell * nbytes, (last - first_cell) * nbytes), word).reshape(
        -1, 2, CELL // 2
    )
    # Without its sign, a word gives a uniform number in (0, 1], whose logarithm is finite, and √(−2 ln u) the radius.
    radius = np.bitwise_and(bits[:, 0], largest).astype(real)
    radius += 1
    radius *= unit
    np.log(radius, out=radius)
    radius *= -2
    np.sqrt(radius, out=radius)
    # With its sign, a word gives an angle in [−π, π).
    angle = bits[:, 1].astype(real)
    angle *= np.pi * unit
    out = np.empty(bits.shape, real)
    np.cos(angle, out=out[:, 0])
    np.sin(angle, out=out[:, 1])
    out *= radius[:, None]
    return torch.from_numpy(out.reshape(-1)[start - first_cell * CELL : stop - first_cell * CELL])
