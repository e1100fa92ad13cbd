"""Copies of a base: the facts that a publication needs of it, then the copies themselves, with noise and changes of
coordinates, block by block.

Scales of blocks, fingerprint and content are computed from one reading of the base. The *fingerprint* identifies the
files' tensors to the bit. The *content* identifies the trained weights whatever dtype they are stored in and whatever
lies beside them: it is what permanent noise is drawn for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from blake3 import blake3

from mpu_cli.errors import MpuError
from mpu_cli.files.reader import (
    ITEM_SIZE,
    NAME,
    PIECE,
    WORD,
    Checkpoint,
    all_finite,
    compute_dtype,
    fingerprint_of,
    piece_digest,
    piece_digests,
    piece_offsets,
)
from mpu_cli.files.writer import CheckpointWriter
from mpu_cli.model.layout import Layout, TensorLayout
from mpu_cli.model.transform import Transform, as_matrix, measured_slices, row_slices
from mpu_cli.observer import Observer
from mpu_cli.protocol.noise import Noise, Scales
from mpu_cli.protocol.publication import Publication
from mpu_cli.protocol.register import SAME_SCALE

CONTENT_PIECE = PIECE // 8  # weights that are hashed together: a whole number of them in a piece of every dtype
_SUM = 1 << 16  # elements summed in the compute dtype before the sum continues in double


@dataclass(frozen=True)
class BlockScale:
    """RMS of a block's task vector, base − pretrained (the weights without a pretrained model), and of its weights."""

    task: float
    weights: float


class PieceScan(NamedTuple):
    """One piece of a tensor: its hash, the hashes of its content, and sums of squares as in ``BlockScale``."""

    digest: bytes
    content: bytes
    task: float
    weights: float


@dataclass
class BaseScan:
    """One reading of ``base``, the part of the model that copies have, block by block."""

    base: Checkpoint
    layout: Layout
    pretrained: Mapping[str, torch.Tensor] | None  # by the base's names
    pool: Executor
    # whether the content will be requested, which costs a rounding and a second hash of every weight
    with_content: bool
    _scales: dict[str, BlockScale] = field(default_factory=dict)
    _digests: dict[str, list[bytes]] = field(default_factory=dict)
    _content: dict[str, bytes] = field(default_factory=dict)
    _pending: dict[str, list[list[Future]]] = field(default_factory=dict)

    def blocks(self) -> Iterator[tuple[str, list[TensorLayout], BlockScale]]:
        """Each block with its scale, while the next one is read, so that no core is idle."""
        blocks = list(self.layout.blocks.items())
        for i, (block, tensors) in enumerate(blocks):
            for name, of_block in blocks[i : i + 2]:
                if name not in self._scales and name not in self._pending:
                    self._pending[name] = [self._read(tensor) for tensor in of_block]
            yield block, tensors, self._scale(block, tensors)

    def _scale(self, block: str, tensors: Sequence[TensorLayout]) -> BlockScale:
        """The scale of a block, once it is read."""
        if block in self._scales:
            return self._scales[block]
        task, weights = [], []
        for tensor, futures in zip(tensors, self._pending.pop(block), strict=True):
            scans = [future.result() for future in futures]
            self._digests[tensor.name] = [piece.digest for piece in scans]
            if self.with_content and not tensor.constant:
                self._content[tensor.name] = blake3(b"".join(piece.content for piece in scans)).digest()
            task.append(math.fsum(piece.task for piece in scans))
            weights.append(math.fsum(piece.weights for piece in scans))
        count = sum(self.base.tensors[tensor.name].elements for tensor in tensors)
        if not math.isfinite(math.fsum(task)):
            which = "base − pretrained" if self.pretrained else "the base"
            raise MpuError(f"{self.base.path}: {which} contains NaN or Inf in block {block}, so it cannot be published")
        self._scales[block] = BlockScale(math.sqrt(math.fsum(task) / count), math.sqrt(math.fsum(weights) / count))
        return self._scales[block]

    def scales(self) -> dict[str, BlockScale]:
        """The scale of every block without constants: reads all of the base."""
        scales = {}
        for block, tensors, scale in self.blocks():
            for tensor in tensors:
                self.base.forget_pages(tensor.name)
            if not any(tensor.constant for tensor in tensors):
                scales[block] = scale
        return scales

    def fingerprint(self) -> str:
        """The fingerprint of the base, after every block was read; the alias, which is in none, is read for it."""
        digests = {}
        for name in self.base.tensors:
            digests[name] = self._digests.get(name) or list(piece_digests(self.base, name, self.pool))
        return fingerprint_of(self.base.tensors, digests)

    def content(self) -> str:
        """The content of the base, after every block was read: equal for models whose trained weights have equal names
        and shapes and are equal in bfloat16."""
        table = []
        for tensor in self.layout.parameters:
            shape = list(self.base.tensors[tensor.name].shape)
            table.append([self.layout.full_name(tensor.name), shape, self._content[tensor.name].hex()])
        return blake3(json.dumps(sorted(table), separators=(",", ":")).encode()).hexdigest()

    def _read(self, tensor: TensorLayout) -> list[Future]:
        """Start summing squares over one tensor; its pieces are hashed on the way, while they are in the cache."""
        info = self.base.tensors[tensor.name]
        raw, weights = self.base.raw(tensor.name), self.base.tensor(tensor.name).view(-1)
        other = self.pretrained[tensor.name].view(-1) if self.pretrained and not tensor.constant else None
        dtype = compute_dtype(weights.dtype)

        def squares(x: torch.Tensor) -> float:
            return math.fsum(float(torch.dot(part, part)) for part in x.split(_SUM))

        def piece(offset: int) -> PieceScan:
            digest = piece_digest(raw, offset)
            if tensor.constant:
                return PieceScan(digest, b"", task=0.0, weights=0.0)
            part = slice(offset // ITEM_SIZE[info.dtype], (offset + PIECE) // ITEM_SIZE[info.dtype])
            content = b""
            if self.with_content:
                content = b"".join(content_digest(chunk) for chunk in weights[part].split(CONTENT_PIECE))
            values = weights[part].to(dtype)
            of_weights = of_task = squares(values)
            if other is not None:
                of_task = squares(values - other[part].to(dtype))
            return PieceScan(digest, content, task=of_task, weights=of_weights)

        return [self.pool.submit(piece, offset) for offset in piece_offsets(info)]


def content_digest(weights: torch.Tensor) -> bytes:
    """The hash of flat ``weights`` in bfloat16."""
    return blake3(weights.to(torch.bfloat16).view(torch.uint8).numpy().data).digest()


# Writing the copies of a publication: each block of the base is read once and written to every copy as a stream.

# bytes of memory: slices in use and the interpreter; publish was measured at 204 (0.1B) to 320 MB (8B)
BUFFERS = 350e6


@dataclass(frozen=True)
class CopySurvival:
    """The noise of one block that survives storage in one copy (root mean squares, and a share of weights).

    Measured on a slice or two of each tensor.
    """

    requested: float
    survived: float
    unchanged: float


@dataclass(frozen=True)
class BlockReport:
    """One block: its number of weights, the RMS of its task vector, how much of each copy's noise survives, and the RMS
    of the weights."""

    block: str
    weights: int
    rms: float
    copies: tuple[CopySurvival, ...]
    weights_rms: float = 0.0


@dataclass
class CopyWriter:
    """The streaming part of ``publish``: a block is read once for its scale and fingerprint, then written out."""

    scan: BaseScan
    publication: Publication
    noise: Noise
    scales: Sequence[float]  # the noise of each copy, in multiples of σ
    transforms: Sequence[Transform]  # one for each copy
    writers: Sequence[CheckpointWriter]  # one for each copy
    observer: Observer
    permanent_sigma: Mapping[str, float] | None  # of each block, if the scale of permanent noise is settled
    sigma: dict[str, float] = field(default_factory=dict)  # by block, the scale of the noise that cancels
    shared_sigma: dict[str, float] = field(default_factory=dict)  # by block, the scale of permanent noise

    @property
    def base(self) -> Checkpoint:
        return self.scan.base

    def all_blocks(self) -> list[BlockReport]:
        """Write every block."""
        reports = []
        for block, tensors, scale in self.scan.blocks():
            if any(tensor.constant for tensor in tensors):
                reports.append(self._copy(block, tensors))
            else:
                reports.append(self._add_noise(block, tensors, scale))
        return reports

    def _weight_count(self, tensors: Sequence[TensorLayout]) -> int:
        return sum(self.base.tensors[tensor.name].elements for tensor in tensors)

    def _copy(self, block: str, tensors: Sequence[TensorLayout]) -> BlockReport:
        """Write a block of constants, which have no noise."""
        for tensor in tensors:
            matrix = as_matrix(self.base.tensor(tensor.name))
            for writer, transform in zip(self.writers, self.transforms, strict=True):
                mapping = transform.of(tensor)
                mapping.put(as_matrix(writer.tensor(tensor.name)), mapping.forward(matrix, 0), 0)
        return BlockReport(block, self._weight_count(tensors), 0.0, ())

    def _add_noise(self, block: str, tensors: Sequence[TensorLayout], scale: BlockScale) -> BlockReport:
        """Write a block with its noise, and report how much of that survives."""
        sigma, permanent = self.publication.sigmas(scale.task, scale.weights)
        if self.permanent_sigma is not None:
            settled = self.permanent_sigma.get(block, 0.0)
            if not math.isclose(permanent, settled, rel_tol=SAME_SCALE):
                raise MpuError(
                    f"{block}: permanent noise of scale {permanent:.3g}, where the keys have {settled:.3g}",
                    "use the options and the pretrained model of the publication's other copies",
                )
            permanent = settled
        self.sigma[block] = sigma
        if permanent:
            self.shared_sigma[block] = permanent
        scales = self.publication.scales(sigma, permanent)
        writing = [self._write(tensor, scales) for tensor in tensors]
        measured = torch.zeros(len(self.writers), 2, dtype=torch.float64)
        count = 0
        for tensor, futures in zip(tensors, writing, strict=True):
            for future in futures:
                sums_and_count = future.result()
                if sums_and_count is not None:  # None for slices that were not measured
                    measured += sums_and_count[0]
                    count += sums_and_count[1]
            for writer in self.writers:
                writer.forget_pages(tensor.name)
            self.base.forget_pages(tensor.name)
            self.observer.advance(self.base.tensors[tensor.name].nbytes)
        copies = []
        for factor, (squared, unchanged) in zip(self.scales, measured.tolist(), strict=True):
            copies.append(CopySurvival(scales.of_copy(factor), math.sqrt(squared / count), unchanged / count))
        return BlockReport(block, self._weight_count(tensors), scale.task, tuple(copies), scale.weights)

    def _write(self, tensor: TensorLayout, scales: Scales) -> list[Future]:
        """Start writing one tensor of every copy; each slice returns its sums for ``CopySurvival`` and the number of
        weights in them, or None if it was not measured."""
        weights = as_matrix(self.base.tensor(tensor.name))
        rows, columns = weights.shape
        names = [transform.name(tensor) for transform in self.transforms]
        targets = [as_matrix(writer.tensor(name)) for writer, name in zip(self.writers, names, strict=True)]
        maps = [transform.of(tensor) for transform in self.transforms]
        subkeys = self.noise.subkeys(tensor.name, scales)
        stored = targets[0].dtype
        dtype = compute_dtype(weights.dtype, stored)
        if self.publication.calibration:
            dtype = torch.float64  # rounding the noise before adding it could leak the weight

        def work(start: int, stop: int, measured: bool) -> tuple[torch.Tensor, int] | None:
            clean = weights[start:stop].to(dtype)
            sums = torch.zeros(len(maps), 2, dtype=torch.float64)
            copies = self.noise.added_to(clean, subkeys, scales, start)
            for k, (noisy, mapping, target) in enumerate(zip(copies, maps, targets, strict=True)):
                written = mapping.forward(noisy, start).to(stored)
                if not all_finite(written):
                    raise MpuError(
                        f"{self.base.path}: {tensor.name!r} overflows {WORD[NAME[stored]]} with its noise",
                        "choose a wider --dtype or a smaller --kappa",
                    )
                mapping.put(target, written, start)
                if measured:
                    without = mapping.forward(clean, start)
                    survived = (written.to(dtype) - without).view(-1)
                    sums[k, 0] = torch.dot(survived, survived)
                    sums[k, 1] = written.numel() - torch.count_nonzero(written != without.to(stored))
            return (sums, clean.numel()) if measured else None

        for writer in self.writers:
            self.scan.pool.submit(writer.populate, tensor.name)
        slices = row_slices(maps, rows, columns)
        looked_at = measured_slices(len(slices))
        return [self.scan.pool.submit(work, *bounds, i in looked_at) for i, bounds in enumerate(slices)]
