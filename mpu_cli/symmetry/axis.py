"""What a transform does to one axis of a tensor: rotate heads or flip signs, then reorder the coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AxisMap:
    """The orthogonal map y[i] = (R x)[order[i]] on an axis of n coordinates.

    ``order``: permutation, int64 (n,). R is the identity, or ``rotation``: float64 (n/d, d, d), the orthogonal matrix
    of each head of d consecutive coordinates, or ``signs``: float32 (n,) of ±1, which are exact in every dtype.
    If there is a rotation of several heads, ``order`` moves only whole heads.
    """

    order: torch.Tensor
    rotation: torch.Tensor | None = None
    signs: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.order)

    @property
    def unit(self) -> int:
        """How many coordinates belong together: a slice of rows must begin and end at a multiple of this."""
        return 1 if self.rotation is None else self.rotation.shape[-1]

    @property
    def turns(self) -> bool:
        """Whether R differs from the identity."""
        return self.rotation is not None or self.signs is not None

    @property
    def places(self) -> torch.Tensor:
        """Where each coordinate goes: y[places[j]] = (R x)[j]."""
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(len(self.order))
        return places


def turn_rows(x: torch.Tensor, axis: AxisMap, start: int, *, inverse: bool = False) -> torch.Tensor:
    """R x (or Rᵀ x) for rows ``start …`` of a matrix, passed as x of shape (rows, columns)."""
    if axis.signs is not None:
        return x * axis.signs[start : start + len(x), None].to(x.dtype)
    if axis.rotation is None:
        return x
    d = axis.unit
    heads = axis.rotation[start // d : (start + len(x)) // d].to(x.dtype)
    matrices = heads.mT if inverse else heads
    return torch.bmm(matrices, x.reshape(-1, d, x.shape[1])).view(x.shape)


def map_columns(x: torch.Tensor, axis: AxisMap, *, inverse: bool = False) -> torch.Tensor:
    """The whole map (or its inverse) applied to the columns of x, shape (rows, n)."""
    if axis.signs is not None:
        order, signs = (axis.places, axis.signs) if inverse else (axis.order, axis.signs[axis.order])
        return x.index_select(1, order).mul_(signs.to(x.dtype))
    if inverse:
        return _turn_columns(x.index_select(1, axis.places), axis, inverse=True)
    return _turn_columns(x, axis, inverse=False).index_select(1, axis.order)


def _turn_columns(x: torch.Tensor, axis: AxisMap, *, inverse: bool) -> torch.Tensor:
    if axis.rotation is None:
        return x
    rotation = axis.rotation.to(x.dtype)
    heads = x.view(len(x), -1, axis.unit).transpose(0, 1)
    turned = torch.bmm(heads, rotation if inverse else rotation.mT)  # a row times Rᵀ applies R to its coordinates
    return turned.transpose(0, 1).reshape(x.shape)


def joined_axis_map(parts: Sequence[AxisMap | None], lengths: Sequence[int], chunks: int = 1) -> AxisMap | None:
    """The map of a fused axis whose parts, of the given lengths, are mapped by ``parts`` (None: unchanged).

    The parts follow one another or, in ``chunks`` chunks, each chunk has its share of each.
    """
    if all(part is None for part in parts):
        return None
    if len(parts) == 1:
        return parts[0]
    part_maps = [AxisMap(torch.arange(n)) if part is None else part for part, n in zip(parts, lengths, strict=True)]
    unit = max(part.unit for part in part_maps)
    mixed = unit > 1 and any(part.signs is not None for part in part_maps)
    if mixed or any(part.unit not in (1, unit) or len(part) % unit for part in part_maps):
        return _in_one_block(part_maps)
    orders, rotations, signs, offset = [], [], [], 0
    for part, length in zip(part_maps, lengths, strict=True):
        orders.append(offset + part.order)
        eye = torch.eye(unit, dtype=torch.float64).expand(length // unit, unit, unit)
        rotations.append(eye if part.rotation is None else part.rotation)
        signs.append(torch.ones(length) if part.signs is None else part.signs)
        offset += length
    signed = any(part.signs is not None for part in part_maps)
    together = AxisMap(
        torch.cat(orders), torch.cat(rotations) if unit > 1 else None, torch.cat(signs) if signed else None
    )
    return together if chunks == 1 else _in_chunks(together, coordinates(lengths, chunks))


MOST_IN_A_BLOCK = 8192  # coordinates, whose matrix takes 512 MB


def _in_one_block(parts: Sequence[AxisMap]) -> AxisMap:
    """The map of parts, one after the other, whose heads have different sizes, or of which some have signs and others
    rotations: one matrix for all of them. Raises ValueError if it would be large."""
    n = sum(map(len, parts))
    if n > MOST_IN_A_BLOCK:
        raise ValueError(f"a fused axis of {n} coordinates mixes rotations of different sizes")
    rotation, orders, offset = torch.zeros(1, n, n, dtype=torch.float64), [], 0
    for part in parts:
        blocks = [torch.eye(len(part), dtype=torch.float64)] if part.rotation is None else list(part.rotation)
        if part.signs is not None:
            blocks = [torch.diag(part.signs.double())]
        rotation[0, offset : offset + len(part), offset : offset + len(part)] = torch.block_diag(*blocks)
        orders.append(offset + part.order)
        offset += len(part)
    return AxisMap(torch.cat(orders), rotation)


def coordinates(lengths: Sequence[int], chunks: int) -> torch.Tensor:
    """Where the coordinates of a fused axis lie: of the i-th in the file, its place if the parts followed one another.

    int64 (sum of lengths,).
    """
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
    parts = [start + torch.arange(n).view(chunks, -1) for start, n in zip(starts, lengths, strict=True)]
    return torch.cat(parts, 1).flatten()


def _in_chunks(axis: AxisMap, places: torch.Tensor) -> AxisMap:
    """``axis`` for coordinates that lie at ``places`` of it. Heads that it rotates lie in one piece."""
    inverse = torch.empty_like(places)
    inverse[places] = torch.arange(len(places))
    rotation = None if axis.rotation is None else axis.rotation[places[:: axis.unit] // axis.unit]
    return AxisMap(inverse[axis.order[places]], rotation, None if axis.signs is None else axis.signs[places])


def in_blocks(maps: Sequence[AxisMap | None], rows: int, order: torch.Tensor | None) -> AxisMap | None:
    """The map of blocks of ``rows`` coordinates, each with its own map, that change places by ``order``."""
    if order is None and all(each is None for each in maps):
        return None
    block_maps = [AxisMap(torch.arange(rows)) if each is None else each for each in maps]
    order = torch.arange(len(maps)) if order is None else order
    signed = any(each.signs is not None for each in block_maps)
    return AxisMap(
        torch.cat([block * rows + block_maps[block].order for block in order.tolist()]),
        None,
        torch.cat([torch.ones(rows) if each.signs is None else each.signs for each in block_maps]) if signed else None,
    )
