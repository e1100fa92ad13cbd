"""Writing the copies of a publication: each block of the base is read once and written to every copy as a stream."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import torch

from mpu_cli.architectures.layout import TensorLayout
from mpu_cli.checkpoint.dtypes import NAME, WORD, all_finite, compute_dtype
from mpu_cli.checkpoint.reader import Checkpoint
from mpu_cli.checkpoint.writer import CheckpointWriter
from mpu_cli.errors import MpuError
from mpu_cli.observer import Observer
from mpu_cli.server.base_scan import BaseScan, BlockScale
from mpu_cli.server.noise import Noise, Scales
from mpu_cli.server.publication import Publication
from mpu_cli.server.register import SAME_SCALE
from mpu_cli.symmetry.transform import Transform, as_matrix, measured_slices, row_slices

# bytes of memory: slices in use and the interpreter; publish was measured at 204 (0.1B) to 320 MB (8B)
BUFFERS = 350e6


@dataclass(frozen=True)
class CopySurvival:
    """How much of one block's noise survives storage in one copy (root mean squares, and a share of weights).

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
    """The streaming part of ``publish``: a block is read once for its scale and fingerprint, then written out.

    ``scales``: the noise of each copy in multiples of σ; ``transforms`` and ``writers``: one for each copy;
    ``permanent_sigma``: of each block, if the scale of permanent noise is settled; ``sigma`` and ``shared_sigma``: the
    scales that the blocks got, of noise that cancels and of permanent noise.
    """

    scan: BaseScan
    publication: Publication
    noise: Noise
    scales: Sequence[float]
    transforms: Sequence[Transform]
    writers: Sequence[CheckpointWriter]
    pool: Executor
    observer: Observer
    full_names: Mapping[str, str]  # of tensors, in the base with all its layers
    permanent_sigma: Mapping[str, float] | None = None
    permanent_names: Mapping[str, str] = field(default_factory=dict)  # of tensors, where permanent noise is drawn
    sigma: dict[str, float] = field(default_factory=dict)
    shared_sigma: dict[str, float] = field(default_factory=dict)

    @property
    def base(self) -> Checkpoint:
        return self.scan.base

    def all_blocks(self, blocks: Mapping[str, list[TensorLayout]]) -> list[BlockReport]:
        """Write every block. While one is written, the next one is read for its scale, so that no core is idle."""
        waiting = list(blocks.items())
        reports = []
        for i, (block, tensors) in enumerate(waiting):
            self.scan.start(block, tensors)
            scale = self.scan.scale(block, tensors)
            constant = any(tensor.constant for tensor in tensors)
            writing = [] if constant else self._start(block, tensors, scale)
            if i + 1 < len(waiting):
                self.scan.start(*waiting[i + 1])
            reports.append(self._copy(block, tensors) if constant else self._finish(block, tensors, scale, writing))
        return reports

    def _weights(self, tensors: Sequence[TensorLayout]) -> int:
        return sum(self.base.tensors[tensor.name].elements for tensor in tensors)

    def _copy(self, block: str, tensors: Sequence[TensorLayout]) -> BlockReport:
        """Write a block of constants, which have no noise."""
        for tensor in tensors:
            matrix = as_matrix(self.base.tensor(tensor.name))
            for writer, transform in zip(self.writers, self.transforms, strict=True):
                mapping = transform.of(tensor)
                mapping.put(as_matrix(writer.tensor(tensor.name)), mapping.forward(matrix, 0), 0)
        return BlockReport(block, self._weights(tensors), 0.0, ())

    def _start(self, block: str, tensors: Sequence[TensorLayout], scale: BlockScale) -> list[list[Future]]:
        """Settle the noise of a block and start writing it."""
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
        return [self._write(tensor, scales) for tensor in tensors]

    def _finish(
        self, block: str, tensors: Sequence[TensorLayout], scale: BlockScale, writing: Sequence[list[Future]]
    ) -> BlockReport:
        """Wait until a block is written, and report how much of its noise survives."""
        scales = self.publication.scales(self.sigma[block], self.shared_sigma.get(block, 0.0))
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
            self._weights(tensors),
            scale.task,
            tuple(
                CopySurvival(
                    scales.of_copy(factor),
                    math.sqrt(squared / count),
                    unchanged / count,
                )
                for factor, (squared, unchanged) in zip(self.scales, measured.tolist(), strict=True)
            ),
            scale.weights,
        )

    def _write(self, tensor: TensorLayout, scales: Scales) -> list[Future]:
        """Start writing one tensor of every copy; each slice returns its sums for ``CopySurvival`` and the number of
        weights in them, or None if it was not measured."""
        weights = as_matrix(self.base.tensor(tensor.name))
        rows, columns = weights.shape
        names = [transform.name(tensor) for transform in self.transforms]
        targets = [as_matrix(writer.tensor(name)) for writer, name in zip(self.writers, names, strict=True)]
        maps = [transform.of(tensor) for transform in self.transforms]
        name = self.full_names[tensor.name]
        subkeys = self.noise.subkeys(name, scales, self.permanent_names.get(name))
        stored = targets[0].dtype
        dtype = compute_dtype(self.base.tensors[tensor.name].dtype, NAME[stored])
        if self.publication.calibration:
            dtype = torch.float64  # rounding the noise before adding it could leak the weight

        def work(start: int, stop: int, measured: bool) -> tuple[torch.Tensor, int] | None:
            clean = weights[start:stop].to(dtype)
            draws = self.noise.draws(subkeys, start * columns, stop * columns, dtype)
            noisy = self.noise.of_copies(draws, scales, clean.view(-1)) if subkeys else [clean] * len(maps)
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
