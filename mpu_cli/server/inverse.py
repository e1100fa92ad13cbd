"""T_k⁻¹ of deltas, slice by slice: what ``invert`` writes and ``aggregate`` adds up."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mpu_cli.architectures.depth import without_layers
from mpu_cli.architectures.layout import Layout, TensorLayout, layout_of
from mpu_cli.checkpoint.dtypes import NAME, compute_dtype
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.checkpoint.writer import MAX_SHARD, CheckpointWriter, TensorSpecs, nbytes_of
from mpu_cli.errors import MpuError
from mpu_cli.manifest import LEFT_FACTOR, RIGHT_FACTOR, as_metadata, delta_facts
from mpu_cli.models.source import Model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.server.deltas import Delta, check_delta, check_finite
from mpu_cli.server.keys import Keys
from mpu_cli.symmetry.transform import TensorMap, as_matrix, row_slices


@dataclass(frozen=True)
class Full:
    """One delta's change to one tensor, (rows, columns) in the copy's coordinates, inverted slice by slice."""

    mapping: TensorMap
    change: torch.Tensor

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.change.dtype,)

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows ``start … stop`` in the base's coordinates, in ``dtype`` if they were rotated, else in their own."""
        copy_rows = self.mapping.take(self.change, start, stop)
        return self.mapping.backward(copy_rows.to(dtype), start) if self.mapping.turns else copy_rows


class LowRank:
    """One delta's change to one tensor as a product of factors; only the requested slice is computed."""

    def __init__(self, mapping: TensorMap, left_factor: torch.Tensor, right: torch.Tensor):
        rank = left_factor.shape[-1]
        by_rows, by_columns = mapping.split(rank)
        self.mapping, self.dtypes = by_rows, (left_factor.dtype, right.dtype)
        self._left_factor = Full(by_rows, as_matrix(left_factor))
        right = as_matrix(right)
        wide = compute_dtype(*(NAME[dtype] for dtype in self.dtypes))
        starts = range(0, len(right), rank) if len(right) else [0]
        moved = [by_columns.backward(by_columns.take(right, i, i + rank).to(wide), i) for i in starts]
        self._right = torch.cat(moved)  # (r, columns), one below the other for a stack
        self._rank = rank

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows ``start … stop`` of the product, all of one matrix."""
        offset = 0 if self.mapping.block is None else start // self.mapping.block * self._rank
        return self._left_factor.rows(start, stop, dtype).to(dtype) @ self._right[offset : offset + self._rank].to(
            dtype
        )

    def factors(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both complete factors, in the base's coordinates; ``rows`` is the number of rows of the tensor."""
        return self._left_factor.rows(0, rows, self._right.dtype).to(self._right.dtype), self._right


Change = Full | LowRank


class Undoing:
    """Applies T_k⁻¹ to deltas, slice by slice; deltas that are already inverted are used as they are.

    ``layout`` is the base's; layers that the copies lack do not change.
    """

    def __init__(self, deltas: Sequence[Delta], keys: Keys, layout: Layout):
        self.deltas = deltas
        self._copies = without_layers(layout, keys.publication.omitted)
        copy_layout = self._copies.layout
        self._transforms = [
            None if d.manifest.inverted else keys.publication.transform(d.copy, copy_layout) for d in deltas
        ]

    def _there(self, tensor: TensorLayout) -> TensorLayout:
        """What the copies have of the base's ``tensor``, which must be one that they have."""
        return self._copies.layout.tensors[self._copies.names[tensor.name]]

    def maps(self, tensor: TensorLayout) -> list[TensorMap]:
        return [TensorMap(None, None) if t is None else t.of(self._there(tensor)) for t in self._transforms]

    def names(self, tensor: TensorLayout) -> list[str]:
        """What each delta calls ``tensor``: in a copy, experts change places."""
        return [tensor.name if t is None else t.name(self._there(tensor)) for t in self._transforms]

    def changes(self, tensor: TensorLayout) -> list[Change | None]:
        """Each delta's change to ``tensor``; None if it has none (a tensor that was not trained, or left out)."""
        if tensor.name not in self._copies.names:
            return [None] * len(self.deltas)
        changes: list[Change | None] = []
        for delta, mapping, name in zip(self.deltas, self.maps(tensor), self.names(tensor), strict=True):
            checkpoint = delta.checkpoint
            if name in checkpoint.tensors:
                changes.append(Full(mapping, as_matrix(checkpoint.tensor(name))))
            elif name + LEFT_FACTOR in checkpoint.tensors:
                factors = (checkpoint.tensor(name + end) for end in (LEFT_FACTOR, RIGHT_FACTOR))
                changes.append(LowRank(mapping, *factors))
            else:
                changes.append(None)
        return changes


def invert(
    base: Model, delta: Delta, keys: Keys, *, target: Path, transaction: Transaction, observer: Observer = SILENT
) -> None:
    """Write T_k⁻¹(Δ_k) to ``target`` in the delta's own dtypes, as part of ``transaction``.

    Raises MpuError if the delta is already inverted, does not fit the base, or contains NaN or Inf.
    """
    if delta.manifest.inverted:
        raise MpuError(f"{delta.path}: is already inverted", "pass it to `mpu aggregate` as it is")
    layout = layout_of(base.checkpoint.tensors, base.config, base.source)
    copies = without_layers(layout, keys.publication.omitted)
    check_delta(delta, base, layout, copies)
    undoing = Undoing([delta], keys, layout)
    held_of = {t.name: undoing.names(t)[0] for t in layout.parameters if t.name in copies.names}
    held_tensors = delta.checkpoint.tensors
    specs: TensorSpecs = {
        name + end: (held_tensors[delta_name + end].dtype, held_tensors[delta_name + end].shape)
        for name, delta_name in held_of.items()
        for end in ("", LEFT_FACTOR, RIGHT_FACTOR)
        if delta_name + end in held_tensors
    }
    output = transaction.add(target, directory=nbytes_of(specs) > MAX_SHARD)
    metadata = as_metadata(delta_facts(replace(delta.manifest, inverted=True)))
    with CheckpointWriter(output, specs, metadata) as writer, worker_pool() as pool:
        for tensor in layout.parameters:
            if tensor.name not in copies.names:
                continue
            [mapping], [delta_name] = undoing.maps(tensor), undoing.names(tensor)
            ends = [end for end in ("", LEFT_FACTOR, RIGHT_FACTOR) if delta_name + end in delta.checkpoint.tensors]
            rank = delta.checkpoint.tensors[delta_name + LEFT_FACTOR].shape[-1] if len(ends) > 1 else 0
            by_rows, by_columns = mapping.split(rank) if rank else (mapping, mapping)
            for end in ends:
                part = {"": mapping, LEFT_FACTOR: by_rows, RIGHT_FACTOR: by_columns}[end]
                _invert_tensor(pool, delta_name + end, tensor.name + end, delta, part, writer)
                delta.checkpoint.forget_pages(delta_name + end)
                writer.forget_pages(tensor.name + end)
                observer.advance(delta.checkpoint.tensors[delta_name + end].nbytes)


def _invert_tensor(
    pool: Executor, name: str, target_name: str, delta: Delta, mapping: TensorMap, writer: CheckpointWriter
) -> None:
    """Write the delta's tensor ``name``, mapped back, as ``target_name``."""
    change, target = as_matrix(delta.checkpoint.tensor(name)), as_matrix(writer.tensor(target_name))
    dtype = compute_dtype(delta.checkpoint.tensors[name].dtype)

    def work(bounds: tuple[int, int]) -> None:
        start, stop = bounds
        undone = Full(mapping, change).rows(start, stop, dtype)
        check_finite(undone, float(undone.square().sum()), delta, name)
        target[start:stop] = undone.to(target.dtype)

    list(pool.map(work, row_slices([mapping], *change.shape)))
