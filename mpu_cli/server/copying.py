"""Writing the copies of a publication: each block of the base is read once and written to every copy as a stream."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import torch

from mpu_cli.architectures.layout import Layout, TensorLayout
from mpu_cli.checkpoint.dtypes import NAME, WORD, all_finite, compute_dtype
from mpu_cli.checkpoint.fingerprint import NEWEST, PIECE, combine, piece_digest, piece_digests, pieces
from mpu_cli.checkpoint.header import ITEM_SIZE
from mpu_cli.checkpoint.reader import Checkpoint
from mpu_cli.checkpoint.writer import CheckpointWriter
from mpu_cli.errors import MpuError
from mpu_cli.models.source import Model
from mpu_cli.observer import Observer
from mpu_cli.server.noise import Noise
from mpu_cli.server.publication import Publication
from mpu_cli.symmetry.transform import Transform, as_matrix, measured_slices, row_slices

# bytes of memory: slices in use and the interpreter; publish was measured at 204 (0.1B) to 320 MB (8B)
BUFFERS = 350e6
_SUM = 1 << 16  # elements summed in the compute dtype before the sum continues in double


@dataclass(frozen=True)
class CopySurvival:
    """How much of one block's noise survives storage in one copy (root mean squares, and a share of weights).

    Measured on a slice or two of each tensor.
    """

    asked: float
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
    """The streaming part of ``publish``: a block is read once for its scale and fingerprint, then written out.

    ``scales``: the noise of each copy in multiples of σ; ``transforms`` and ``writers``: one for each copy; ``hashed``:
    the hash of the fingerprint; ``sigma`` and ``shared_sigma``: of each block, of noise that cancels and that stays.
    """

    base: Checkpoint
    layout: Layout
    pretrained: Mapping[str, torch.Tensor] | None
    publication: Publication
    noise: Noise
    scales: Sequence[float]
    transforms: Sequence[Transform]
    writers: Sequence[CheckpointWriter]
    pool: Executor
    observer: Observer
    whole_names: Mapping[str, str]  # of tensors, in the base with all its layers
    hashed: str = NEWEST
    sigma: dict[str, float] = field(default_factory=dict)
    shared_sigma: dict[str, float] = field(default_factory=dict)
    size: dict[str, float] = field(default_factory=dict)  # block → RMS of its weights
    _digests: dict[str, list[bytes]] = field(default_factory=dict)

    def all_blocks(self, blocks: Mapping[str, list[TensorLayout]]) -> list[BlockReport]:
        """Write every block. While one is written, the next one is read for its scale, so that no core is idle."""
        waiting = list(blocks.items())
        reading = [self._read(tensor) for tensor in waiting[0][1]] if waiting else []
        reports = []
        for i, (block, tensors) in enumerate(waiting):
            both = [self._squares(tensor, futures) for tensor, futures in zip(tensors, reading, strict=True)]
            squares, of_weights = (math.fsum(each) for each in zip(*both, strict=True))
            sigma, report = self._scale(block, tensors, squares, of_weights)
            writing = [] if report else [self._write(tensor, sigma) for tensor in tensors]
            reading = [self._read(tensor) for tensor in waiting[i + 1][1]] if i + 1 < len(waiting) else []
            reports.append(report or self._finish(block, tensors, squares, sigma, writing))
        return reports

    def _scale(
        self, block: str, tensors: list[TensorLayout], squares: float, of_weights: float
    ) -> tuple[float, BlockReport | None]:
        """σ of a block, and its report if it consists of constants, which are written unchanged."""
        weights = sum(self.base.tensors[tensor.name].elements for tensor in tensors)
        if any(tensor.constant for tensor in tensors):
            for tensor in tensors:
                held = as_matrix(self.base.tensor(tensor.name))
                for writer, transform in zip(self.writers, self.transforms, strict=True):
                    mapping = transform.of(tensor)
                    mapping.put(as_matrix(writer.tensor(tensor.name)), mapping.forward(held, 0), 0)
            return 0.0, BlockReport(block, weights, 0.0, ())
        if not math.isfinite(squares):
            which = "base − pretrained" if self.pretrained else "the base"
            raise MpuError(f"{self.base.path}: {which} contains NaN or Inf in block {block}, so it cannot be published")
        self.size[block] = math.sqrt(of_weights / weights)
        sigma, shared = self.publication.sigmas(math.sqrt(squares / weights), self.size[block])
        self.sigma[block] = sigma
        if shared:
            self.shared_sigma[block] = shared
        return sigma, None

    def _finish(
        self, block: str, tensors: list[TensorLayout], squares: float, sigma: float,
        writing: list[list[Future]],
    ) -> BlockReport:  # fmt: skip
        """Wait until a block is written, and report how much of its noise survives."""
        weights = sum(self.base.tensors[tensor.name].elements for tensor in tensors)
        measured = torch.zeros(len(self.writers), 2, dtype=torch.float64)
        count = 0
        for tensor, futures in zip(tensors, writing, strict=True):
            for part, n in filter(None, [future.result() for future in futures]):
                measured += part
                count += n
            for writer in self.writers:
                writer.forget_pages(tensor.name)
            self.base.forget_pages(tensor.name)
            self.observer.advance(self.base.tensors[tensor.name].nbytes)
        return BlockReport(
            block,
            weights,
            math.sqrt(squares / weights),
            tuple(
                CopySurvival(
                    math.hypot(scale * sigma, self.shared_sigma.get(block, 0.0)),
                    math.sqrt(squared / count),
                    unchanged / count,
                )
                for scale, (squared, unchanged) in zip(self.scales, measured.tolist(), strict=True)
            ),
            self.size[block],
        )

    def fingerprint(self, whole: Model) -> str:
        """The fingerprint of the ``whole`` base, from the digests of the blocks and of what belongs to none: the alias
        and layers that are left out, which are read for it."""
        ours = {info: name for name, info in self.base.tensors.items()}
        digests = {}
        for name, info in whole.checkpoint.tensors.items():
            known = self._digests.get(ours.get(info, ""))
            digests[name] = known or list(piece_digests(whole.checkpoint, name, self.pool, self.hashed))
        return combine(whole.checkpoint.tensors, digests, self.hashed)

    def _read(self, tensor: TensorLayout) -> list[Future]:
        """Start summing v² over one tensor; its pieces are digested on the way, while they are in the cache."""
        info = self.base.tensors[tensor.name]
        raw, weights = self.base.raw(tensor.name), self.base.tensor(tensor.name).view(-1)
        other = self.pretrained[tensor.name].view(-1) if self.pretrained and not tensor.constant else None
        dtype = compute_dtype(info.dtype)

        def square(x: torch.Tensor) -> float:
            return math.fsum(float(torch.dot(p, p)) for p in x.split(_SUM))

        def piece(offset: int) -> tuple[bytes, float, float]:
            digest = piece_digest(raw, offset, self.hashed)
            if tensor.constant:
                return digest, 0.0, 0.0
            part = slice(offset // ITEM_SIZE[info.dtype], (offset + PIECE) // ITEM_SIZE[info.dtype])
            v = weights[part].to(dtype)
            of_weights = of_task = square(v)
            if other is not None:
                of_task = square(v - other[part].to(dtype))
            return digest, of_task, of_weights

        return [self.pool.submit(piece, offset) for offset in pieces(info)]

    def _squares(self, tensor: TensorLayout, futures: list[Future]) -> tuple[float, float]:
        """Σ v² and Σ θ² over one tensor, once it has been read."""
        results = [future.result() for future in futures]
        self._digests[tensor.name] = [digest for digest, _, _ in results]
        return math.fsum(task for _, task, _ in results), math.fsum(weights for _, _, weights in results)

    def _write(self, tensor: TensorLayout, sigma: float) -> list[Future]:
        """Start writing one tensor of every copy; each slice returns its sums for ``CopySurvival`` and the number of
        weights in them, or None if it was not measured."""
        weights = as_matrix(self.base.tensor(tensor.name))
        rows, columns = weights.shape
        names = [transform.name(tensor) for transform in self.transforms]
        targets = [as_matrix(writer.tensor(name)) for writer, name in zip(self.writers, names, strict=True)]
        maps = [transform.of(tensor) for transform in self.transforms]
        shared = self.shared_sigma.get(tensor.block, 0.0)
        subkeys = self.noise.subkeys(self.whole_names[tensor.name], sigma, shared)
        stored = targets[0].dtype
        dtype = compute_dtype(self.base.tensors[tensor.name].dtype, NAME[stored])
        if self.publication.calibration:
            dtype = torch.float64  # rounding the noise before adding it could leak the weight

        def work(start: int, stop: int, measured: bool) -> tuple[torch.Tensor, int] | None:
            clean = weights[start:stop].to(dtype)
            draws = self.noise.draws(subkeys, start * columns, stop * columns, dtype)
            noisy = self.noise.of_copies(draws, sigma, shared, clean.view(-1)) if subkeys else [clean] * len(maps)
            sums = torch.zeros(len(maps), 2, dtype=torch.float64)
            for k, (mapping, target) in enumerate(zip(maps, targets, strict=True)):
                turned = mapping.forward(noisy[k].view(clean.shape), start)
                written = turned.to(stored)
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
            self.pool.submit(writer.populate, tensor.name)
        slices = row_slices(maps, rows, columns)
        looked_at = measured_slices(len(slices))
        return [self.pool.submit(work, *bounds, i in looked_at) for i, bounds in enumerate(slices)]
