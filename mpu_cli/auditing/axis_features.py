"""Where an axis occurs in the tensors of a layer, the weights there, and the tensors with the maps of axes undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mpu_cli.architectures.layout import Layout, TensorLayout, axis_length
from mpu_cli.symmetry.axis import coordinates
from mpu_cli.symmetry.sampling import Maps
from mpu_cli.symmetry.transform import as_matrix, name_in_copy, tensor_map

Tensors = Mapping[str, torch.Tensor]  # float32, by name


@dataclass(frozen=True)
class Place:
    """Where an axis occurs: tensor, dimension, and the indices of that dimension that belong to it, in their order.

    ``expert``: the matrix of a stack that it occurs in, None if the tensor is no stack, or the axis in all of it.
    """

    tensor: str
    dimension: int
    index: torch.Tensor
    expert: int | None = None


def places_of(layout: Layout, tensors: Sequence[TensorLayout], axis: str, expert: int | None = None) -> list[Place]:
    """All places of ``axis`` in ``tensors``; for an axis inside experts, those in one expert."""
    places = []
    for tensor in tensors:
        if expert is not None and tensor.expert not in (None, expert):
            continue
        if axis == "expert" and any(name.startswith("e-") for group in tensor.axes for name in group):
            continue  # a stack, whose neurons are not matched yet; the router is enough
        for dimension, group in enumerate(tensor.axes):
            if axis not in group:
                continue
            lengths = [axis_length(layout.sizes_of(tensor.layer), name) for name in group]
            start = sum(lengths[: group.index(axis)])
            together = torch.empty(sum(lengths), dtype=torch.int64)
            together[coordinates(lengths, tensor.chunks[dimension])] = torch.arange(sum(lengths))
            index = together[start : start + lengths[group.index(axis)]]
            places.append(Place(tensor.name, dimension, index, expert if tensor.expert is None else None))
    return places


def features(tensors: Tensors, places: Sequence[Place]) -> torch.Tensor:
    """The weights at each coordinate of an axis, all places side by side: (coordinates, features)."""
    parts = []
    for location in places:
        weights = tensors[location.tensor]
        if location.expert is not None and weights.ndim > 1 and location.dimension > 0:
            weights, dimension = weights[location.expert], location.dimension - 1
        else:
            dimension = location.dimension
        part = weights.index_select(dimension, location.index).movedim(dimension, 0)
        parts.append(part.reshape(len(location.index), -1))
    return torch.cat(parts, 1)


def undo(layout: Layout, tensors: Sequence[TensorLayout], copy: Tensors, maps: Maps) -> dict[str, torch.Tensor]:
    """``copy`` with ``maps`` undone: T⁻¹ as the attacker believes it to be."""
    undone = {}
    for tensor in tensors:
        mapping = tensor_map(layout, tensor, maps)
        matrix = as_matrix(copy[name_in_copy(tensor, maps)])
        step = mapping.block or len(matrix)
        slices = [(start, start + step) for start in range(0, len(matrix), step)]
        back = torch.cat([mapping.backward(mapping.take(matrix, *bounds), bounds[0]) for bounds in slices])
        undone[tensor.name] = back.view(copy[tensor.name].shape)
    return undone
