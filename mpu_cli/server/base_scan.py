"""What a publication needs to know of its base before it is written: scales of blocks, fingerprint and content.

All of it is computed from one reading of the base. The *fingerprint* identifies the files' tensors to the bit. The
*content* identifies the trained weights whatever dtype they are stored in and whatever lies beside them: it is what
permanent noise is drawn for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import torch
from blake3 import blake3

from mpu_cli.architectures.layout import Layout, TensorLayout
from mpu_cli.checkpoint.dtypes import compute_dtype
from mpu_cli.checkpoint.fingerprint import NEWEST, PIECE, combine, piece_digest, piece_digests, pieces
from mpu_cli.checkpoint.header import ITEM_SIZE
from mpu_cli.checkpoint.reader import Checkpoint
from mpu_cli.errors import MpuError
from mpu_cli.models.source import Model

CONTENT_PIECE = PIECE // 8  # weights that are hashed together: a whole number of them in a piece of every dtype
_SUM = 1 << 16  # elements summed in the compute dtype before the sum continues in double


@dataclass(frozen=True)
class BlockScale:
    """RMS of a block's task vector, base − pretrained (the weights without a pretrained model), and of its weights."""

    task: float
    weights: float


@dataclass
class BaseScan:
    """One reading of ``base``, the part of the model that copies have, block by block.

    ``pretrained``: by the base's names; ``hash_name``: the hash of the fingerprint; ``with_content``: whether the
    content will be asked for, which costs a rounding and a second hash of every weight.
    """

    base: Checkpoint
    layout: Layout
    pretrained: Mapping[str, torch.Tensor] | None
    pool: Executor
    hash_name: str = NEWEST
    with_content: bool = False
    _scales: dict[str, BlockScale] = field(default_factory=dict)
    _digests: dict[str, list[bytes]] = field(default_factory=dict)
    _content: dict[str, bytes] = field(default_factory=dict)
    _pending: dict[str, list[list[Future]]] = field(default_factory=dict)

    def start(self, block: str, tensors: Sequence[TensorLayout]) -> None:
        """Start reading a block on the threads of the pool, unless it was read before."""
        if block not in self._scales and block not in self._pending:
            self._pending[block] = [self._read(tensor) for tensor in tensors]

    def scale(self, block: str, tensors: Sequence[TensorLayout]) -> BlockScale:
        """The scale of a block, once it is read. Raises MpuError if it contains NaN or Inf."""
        self.start(block, tensors)
        if block in self._scales:
            return self._scales[block]
        task, weights = [], []
        for tensor, futures in zip(tensors, self._pending.pop(block), strict=True):
            results = [future.result() for future in futures]
            self._digests[tensor.name] = [digest for digest, _, _, _ in results]
            if self.with_content and not tensor.constant:
                self._content[tensor.name] = blake3(b"".join(content for _, content, _, _ in results)).digest()
            task.append(math.fsum(squares for _, _, squares, _ in results))
            weights.append(math.fsum(squares for _, _, _, squares in results))
        count = sum(self.base.tensors[tensor.name].elements for tensor in tensors)
        if not math.isfinite(math.fsum(task)):
            which = "base − pretrained" if self.pretrained else "the base"
            raise MpuError(f"{self.base.path}: {which} contains NaN or Inf in block {block}, so it cannot be published")
        self._scales[block] = BlockScale(math.sqrt(math.fsum(task) / count), math.sqrt(math.fsum(weights) / count))
        return self._scales[block]

    def scales(self) -> dict[str, BlockScale]:
        """The scale of every block without constants: reads all of the base."""
        blocks = list(self.layout.blocks.items())
        scales = {}
        for i, (block, tensors) in enumerate(blocks):
            self.start(block, tensors)
            if i + 1 < len(blocks):
                self.start(*blocks[i + 1])
            scale = self.scale(block, tensors)
            for tensor in tensors:
                self.base.forget_pages(tensor.name)
            if not any(tensor.constant for tensor in tensors):
                scales[block] = scale
        return scales

    def fingerprint(self, full_base: Model) -> str:
        """The fingerprint of ``full_base``, after every block was read.

        What belongs to no block, the alias and layers that the copies leave out, is read for it.
        """
        ours = {info: name for name, info in self.base.tensors.items()}
        digests = {}
        for name, info in full_base.checkpoint.tensors.items():
            cached_digests = self._digests.get(ours.get(info, ""))
            digests[name] = cached_digests or list(piece_digests(full_base.checkpoint, name, self.pool, self.hash_name))
        return combine(full_base.checkpoint.tensors, digests, self.hash_name)

    def content(self, full_base: Model, layout: Layout, names: Mapping[str, str]) -> str:
        """The content of ``full_base``, which has this ``layout``, after every block was read.

        ``names``: what the tensors of the base are called in ``full_base``. Equal for models whose trained weights
        have equal names and shapes and are equal in bfloat16.
        """
        digests = {names[name]: digest for name, digest in self._content.items()}
        table = []
        for tensor in layout.parameters:
            digest = digests.get(tensor.name) or self._content_of(full_base.checkpoint.tensor(tensor.name))
            full_base.checkpoint.forget_pages(tensor.name)
            shape = list(full_base.checkpoint.tensors[tensor.name].shape)
            table.append([layout.full_name(tensor.name), shape, digest.hex()])
        return blake3(json.dumps(sorted(table), separators=(",", ":")).encode()).hexdigest()

    def _content_of(self, weights: torch.Tensor) -> bytes:
        digests = self.pool.map(content_digest, weights.reshape(-1).split(CONTENT_PIECE))
        return blake3(b"".join(digests)).digest()

    def _read(self, tensor: TensorLayout) -> list[Future]:
        """Start summing squares over one tensor; its pieces are hashed on the way, while they are in the cache."""
        info = self.base.tensors[tensor.name]
        raw, weights = self.base.raw(tensor.name), self.base.tensor(tensor.name).view(-1)
        other = self.pretrained[tensor.name].view(-1) if self.pretrained and not tensor.constant else None
        dtype = compute_dtype(info.dtype)

        def squares(x: torch.Tensor) -> float:
            return math.fsum(float(torch.dot(part, part)) for part in x.split(_SUM))

        def piece(offset: int) -> tuple[bytes, bytes, float, float]:
            digest = piece_digest(raw, offset, self.hash_name)
            if tensor.constant:
                return digest, b"", 0.0, 0.0
            part = slice(offset // ITEM_SIZE[info.dtype], (offset + PIECE) // ITEM_SIZE[info.dtype])
            content = b""
            if self.with_content:
                content = b"".join(content_digest(chunk) for chunk in weights[part].split(CONTENT_PIECE))
            values = weights[part].to(dtype)
            of_weights = of_task = squares(values)
            if other is not None:
                of_task = squares(values - other[part].to(dtype))
            return digest, content, of_task, of_weights

        return [self.pool.submit(piece, offset) for offset in pieces(info)]


def content_digest(weights: torch.Tensor) -> bytes:
    """The hash of flat ``weights`` in bfloat16."""
    return blake3(weights.to(torch.bfloat16).view(torch.uint8).numpy().data).digest()
