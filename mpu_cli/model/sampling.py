"""Random symmetries: the map of each axis, drawn uniformly from the group that the architecture allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mpu_cli.files.randomness import Stream
from mpu_cli.model.family import (
    OF_HEAD,
    OF_KEYS,
    OF_MIXED,
    OF_QUERIES,
    ExpertPermutation,
    GroupedHeads,
    HeadPermutation,
    LatentHeads,
    Permutation,
    QuarterTurns,
    Rotation,
    Symmetry,
)
from mpu_cli.model.layout import KV_HEADS, QUERY_HEADS, axis_length

# The effect of a transform on one axis of a tensor: rotate heads or flip signs, then reorder the coordinates.


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
        """The number of coordinates that belong together: a slice of rows must begin and end at a multiple of this."""
        return 1 if self.rotation is None else self.rotation.shape[-1]

    @property
    def turns(self) -> bool:
        """Whether R differs from the identity."""
        return self.rotation is not None or self.signs is not None

    @property
    def places(self) -> torch.Tensor:
        """The new place of each coordinate: y[places[j]] = (R x)[j]."""
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
        x = x.index_select(1, axis.places)
    if axis.rotation is not None:
        rotation = axis.rotation.to(x.dtype)
        heads = x.view(len(x), -1, axis.unit).transpose(0, 1)
        turned = torch.bmm(heads, rotation if inverse else rotation.mT)  # a row times Rᵀ applies R to its coordinates
        x = turned.transpose(0, 1).reshape(x.shape)
    return x if inverse else x.index_select(1, axis.order)


def joined_axis_map(parts: Sequence[AxisMap | None], lengths: Sequence[int], chunks: int = 1) -> AxisMap | None:
    """The map of a fused axis whose parts, of the given lengths, are mapped by ``parts`` (None: unchanged).

    The parts follow one another or, in ``chunks`` chunks, each chunk has its share of each.
    """
    if all(part is None for part in parts):
        return None
    if len(parts) == 1:
        return parts[0]
    part_maps = [AxisMap(torch.arange(n)) if part is None else part for part, n in zip(parts, lengths, strict=True)]
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    order = torch.cat([start + part.order for start, part in zip(starts, part_maps, strict=True)])
    unit = max(part.unit for part in part_maps)
    have_signs = any(part.signs is not None for part in part_maps)
    if unit > 1 and (have_signs or any(part.unit not in (1, unit) or len(part) % unit for part in part_maps)):
        return AxisMap(order, _one_matrix(part_maps)[None])
    rotation = signs = None
    if unit > 1:
        eye = torch.eye(unit, dtype=torch.float64)
        rotation = torch.cat(
            [eye.expand(len(p) // unit, -1, -1) if p.rotation is None else p.rotation for p in part_maps]
        )
    if have_signs:
        signs = torch.cat([torch.ones(len(part)) if part.signs is None else part.signs for part in part_maps])
    if chunks > 1:
        # From a place in the file to one in the parts, by the map, and back to a place in the file.
        places = coordinates(lengths, chunks)
        order = AxisMap(places).places[order[places]]
        rotation = None if rotation is None else rotation[places[::unit] // unit]  # rotated heads lie in one piece
        signs = None if signs is None else signs[places]
    return AxisMap(order, rotation, signs)


MOST_IN_A_BLOCK = 8192  # coordinates, whose matrix takes 512 MB


def _one_matrix(parts: Sequence[AxisMap]) -> torch.Tensor:
    """The rotations of parts, one after the other, whose heads have different sizes, or of which some have signs and
    others rotations. Raises ValueError if it would be large."""
    n = sum(map(len, parts))
    if n > MOST_IN_A_BLOCK:
        raise ValueError(f"a fused axis of {n} coordinates mixes rotations of different sizes")
    blocks: list[torch.Tensor] = []
    for part in parts:
        if part.signs is not None:
            blocks.append(torch.diag(part.signs.double()))
        elif part.rotation is not None:
            blocks += part.rotation
        else:
            blocks.append(torch.eye(len(part), dtype=torch.float64))
    return torch.block_diag(*blocks)


def coordinates(lengths: Sequence[int], chunks: int) -> torch.Tensor:
    """The places of the coordinates of a fused axis: of the i-th in the file, its place if the parts followed one
    another.

    int64 (sum of lengths,).
    """
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
    parts = [start + torch.arange(n).view(chunks, -1) for start, n in zip(starts, lengths, strict=True)]
    return torch.cat(parts, 1).flatten()


def in_blocks(maps: Sequence[AxisMap | None], rows: int, order: torch.Tensor | None) -> AxisMap | None:
    """The map of blocks of ``rows`` coordinates, each with its own map, that change places by ``order``."""
    inside = joined_axis_map(maps, [rows] * len(maps))
    if order is None:
        return inside
    moved = whole_heads(order, rows)
    return AxisMap(moved) if inside is None else AxisMap(inside.order[moved], signs=inside.signs)


OF_AXIS = {"query": OF_QUERIES, "key": OF_KEYS, "mixed": OF_MIXED}  # weights of a norm, which have no signs

Maps = Mapping[str, AxisMap | tuple[AxisMap, ...]]  # for an axis inside experts, one for each expert


def sample(symmetries: Iterable[Symmetry], sizes: Mapping[str, int], draws: Callable[[str], Stream]) -> Maps:
    """A random element of the product of ``symmetries``, as one map for each axis that it changes.

    ``draws(name)`` is the source for the symmetry of that name.
    """
    maps: dict[str, AxisMap | tuple[AxisMap, ...]] = {}
    for symmetry in symmetries:
        source = draws(symmetry.name)
        match symmetry:
            case Permutation(per_expert=True):
                drawn = [_permutation(symmetry, source, sizes) for _ in range(sizes["experts"])]
                maps |= {axis: tuple(of_expert[axis] for of_expert in drawn) for axis in symmetry.axes}
            case Permutation():
                maps |= _permutation(symmetry, source, sizes)
            case Rotation():
                matrices = _rotations(source, sizes["kv_heads"], sizes["head_dim"], symmetry)
                for axis in symmetry.axes:
                    rotation = matrices.repeat_interleave(_per_kv_head(axis, sizes), dim=0)
                    maps[axis] = AxisMap(torch.arange(axis_length(sizes, axis)), rotation)
            case QuarterTurns():
                maps |= _turned_heads(symmetry, source, sizes)
            case HeadPermutation():
                kv_order = source.permutation(sizes["kv_heads"])
                query_order = _within_groups(source, kv_order, sizes["heads"] // sizes["kv_heads"])
                maps["head"] = AxisMap(query_order)
                for axes, order in ((QUERY_HEADS, query_order), (KV_HEADS, kv_order)):
                    moved = whole_heads(order, sizes["head_dim"])
                    for axis in axes:  # which may have a map of each head, from before
                        before = maps.get(axis)
                        in_heads = before if isinstance(before, AxisMap) else AxisMap(torch.arange(len(moved)))
                        maps[axis] = replace(in_heads, order=in_heads.order[moved])
            case ExpertPermutation():
                size = sizes["experts"] // symmetry.groups
                # The members' orders are drawn first, unlike in _within_groups.
                among = torch.stack([source.permutation(size) for _ in range(symmetry.groups)])
                maps["expert"] = AxisMap((source.permutation(symmetry.groups)[:, None] * size + among).flatten())
            case LatentHeads():
                maps |= _latent_heads(symmetry, source, sizes)
            case GroupedHeads():
                maps |= _grouped_heads(symmetry, source, sizes)
    return maps


def _permutation(symmetry: Permutation, source: Stream, sizes: Mapping[str, int]) -> dict[str, AxisMap]:
    n = axis_length(sizes, symmetry.axes[0])
    order = source.permutation(n)
    signs = _signs(source, n) if symmetry.signed else None
    return {axis: AxisMap(order, signs=signs if axis in symmetry.signed else None) for axis in symmetry.axes}


def _turned_heads(symmetry: QuarterTurns, source: Stream, sizes: Mapping[str, int]) -> dict[str, AxisMap]:
    orders, signs = _quarter_turns(source, sizes["kv_heads"], sizes["head_dim"], symmetry)
    maps: dict[str, AxisMap] = {}
    for axis in symmetry.axes:
        repeats = _per_kv_head(axis, sizes)
        of_heads = orders.repeat_interleave(repeats, dim=0)
        order = (of_heads + sizes["head_dim"] * torch.arange(len(of_heads))[:, None]).flatten()
        maps[axis] = AxisMap(order, signs=signs.repeat_interleave(repeats, dim=0).flatten())
        if axis == "mixed" or (axis in OF_AXIS and symmetry.norm == "whole"):
            maps[OF_AXIS[axis]] = AxisMap(order)
    if symmetry.norm == "shared":
        maps[OF_HEAD] = AxisMap(orders[0])
    return maps


def _latent_heads(symmetry: LatentHeads, source: Stream, sizes: Mapping[str, int]) -> dict[str, AxisMap]:
    heads = sizes["heads"]
    free, turned, values = (sizes[name] for name in ("mla-free", "mla-key", "mla-value"))
    kinds = [("free", heads, free, None), ("turned", 1, turned, symmetry.planes), ("values", heads, values, None)]
    order = source.permutation(heads) if symmetry.order else torch.arange(heads)
    drawn = {}
    for name, count, d, planes in kinds:
        if symmetry.turns:
            drawn[name] = _as_matrices(*_quarter_turns(source, count, d, QuarterTurns(name, (), planes)))
        else:
            drawn[name] = _rotations(source, count, d, Rotation(name, (), planes))
    matrices = {
        "mla-query": side_by_side(drawn["free"], drawn["turned"].expand(heads, -1, -1)),
        "mla-key-value": side_by_side(drawn["free"], drawn["values"]),
        "mla-mixed": drawn["values"],
        "mla-key": drawn["turned"],
    }
    maps = {}
    for axis, of_heads in matrices.items():
        moved = whole_heads(order if len(of_heads) == heads else torch.arange(1), of_heads.shape[-1])
        maps[axis] = as_signs(of_heads, moved) if symmetry.turns else AxisMap(moved, of_heads)
    return maps


def _grouped_heads(symmetry: GroupedHeads, source: Stream, sizes: Mapping[str, int]) -> dict[str, AxisMap]:
    groups, heads = sizes[symmetry.groups], axis_length(sizes, symmetry.per_head)
    width, count = axis_length(sizes, symmetry.inner) // heads, axis_length(sizes, symmetry.of_group) // groups
    order = source.permutation(groups)
    head_order = _within_groups(source, order, heads // groups)
    inside = torch.stack([source.permutation(width) for _ in range(1 if symmetry.common else heads)]).expand(heads, -1)
    of_group = torch.stack([source.permutation(count) for _ in range(groups)])
    maps = {
        symmetry.per_head: AxisMap(head_order),
        symmetry.inner: AxisMap((head_order[:, None] * width + inside[head_order]).flatten()),
        symmetry.of_group: AxisMap((order[:, None] * count + of_group[order]).flatten()),
    }
    if symmetry.common:
        maps[symmetry.common] = AxisMap(inside[0])
    return maps


def _per_kv_head(axis: str, sizes: Mapping[str, int]) -> int:
    return axis_length(sizes, axis) // sizes["head_dim"] // sizes["kv_heads"]


def _within_groups(source: Stream, order: torch.Tensor, size: int) -> torch.Tensor:
    """The order of the members of groups of ``size`` that are put in ``order``, each in an order of its own."""
    among = torch.stack([source.permutation(size) for _ in range(len(order))])
    return (order[:, None] * size + among).flatten()


def _as_matrices(orders: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """The signed permutations y[i] = signs[order[i]]·x[order[i]] of heads as matrices, (heads, d, d)."""
    return torch.eye(orders.shape[1], dtype=torch.float64)[orders] * signs[:, None]


def as_signs(matrices: torch.Tensor, moved: torch.Tensor) -> AxisMap:
    """Matrices of heads that are signed permutations, and an order of whole heads after them, as order and signs."""
    heads, d, _ = matrices.shape
    inside = (matrices.abs().argmax(2) + d * torch.arange(heads)[:, None]).flatten()
    signs = torch.ones(heads * d)
    signs[inside] = matrices.sum(2).flatten().float()
    return AxisMap(inside[moved], signs=signs)


def side_by_side(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Block-diagonal matrices of ``upper``, (heads, a, a), and ``lower``, (heads, b, b): (heads, a + b, a + b)."""
    a, b = upper.shape[-1], lower.shape[-1]
    matrices = torch.zeros(len(upper), a + b, a + b, dtype=torch.float64)
    matrices[:, :a, :a], matrices[:, a:, a:] = upper, lower
    return matrices


def whole_heads(order: torch.Tensor, d: int) -> torch.Tensor:
    """The coordinate order of an axis whose heads, of size ``d``, are put in ``order``."""
    return (order[:, None] * d + torch.arange(d)).flatten()


def planes_of(kind: str, rotary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two coordinates of each plane that RoPE turns: int64 (rotary/2,) each."""
    i = torch.arange(rotary // 2)
    return (i, i + rotary // 2) if kind == "halves" else (2 * i, 2 * i + 1)


def plane_matrices(angle: torch.Tensor, kind: str = "halves") -> torch.Tensor:
    """Matrices (heads, r, r) that rotate each plane by its ``angle``, shape (heads, r/2)."""
    heads, half = angle.shape
    x, y = planes_of(kind, 2 * half)
    matrices = torch.zeros(heads, 2 * half, 2 * half, dtype=angle.dtype)
    matrices[:, x, x] = matrices[:, y, y] = angle.cos()
    matrices[:, y, x] = angle.sin()
    matrices[:, x, y] = -angle.sin()
    return matrices


def _rotary_of(symmetry: Rotation | QuarterTurns, d: int) -> int:
    """The number of coordinates of a head of size ``d`` that RoPE turns."""
    if symmetry.planes is None:
        return 0
    return d if symmetry.rotary is None else symmetry.rotary


def _rotations(source: Stream, heads: int, d: int, rotation: Rotation) -> torch.Tensor:
    """Uniform angles in the planes of the first coordinates, O() on the rest: (heads, d, d)."""
    r = _rotary_of(rotation, d)
    matrices = torch.zeros(heads, d, d, dtype=torch.float64)
    if r:
        assert rotation.planes is not None
        angles = 2 * torch.pi * source.uniform(heads * (r // 2)).view(heads, r // 2)
        matrices[:, :r, :r] = plane_matrices(angles, rotation.planes)
    if r < d:
        matrices[:, r:, r:] = _orthogonal(source, heads, d - r)
    return matrices


def _signs(source: Stream, n: int) -> torch.Tensor:
    """n independent signs, float32 of ±1."""
    return torch.where(source.uniform(n) < 0.5, -1.0, 1.0).float()


def _quarter_turns(source: Stream, heads: int, d: int, turns: QuarterTurns) -> tuple[torch.Tensor, torch.Tensor]:
    """Order and signs of the coordinates of each head, (heads, d) each: a multiple of 90° in each plane, any signed
    permutation of the rest. Under a norm whose weights all heads share, all have the same order."""
    r = _rotary_of(turns, d)
    shared = turns.norm == "shared"
    orders, signs = torch.arange(d).repeat(heads, 1), torch.ones(heads, d)
    if r:
        assert turns.planes is not None
        quarters = (4 * source.uniform(heads * (r // 2))).long().view(heads, r // 2)
        if shared:  # whether a plane swaps its coordinates, the first head decides
            quarters = quarters - (quarters - quarters[:1]) % 2
        x, y = planes_of(turns.planes, r)
        odd = quarters % 2 == 1
        orders[:, x], orders[:, y] = torch.where(odd, y, x), torch.where(odd, x, y)
        # A turn by 90° takes (x, y) to (−y, x), one by 180° to (−x, −y), one by 270° to (y, −x).
        signs[:, x] = torch.where(quarters % 4 >= 2, -1.0, 1.0)
        signs[:, y] = torch.where((quarters % 4 == 1) | (quarters % 4 == 2), -1.0, 1.0)
    if r < d:
        rest = [source.permutation(d - r) for _ in range(1 if shared else heads)]
        orders[:, r:] = r + torch.stack(rest)
        signs[:, r:] = _signs(source, heads * (d - r)).view(heads, d - r)
    return orders, signs


def _orthogonal(source: Stream, heads: int, d: int) -> torch.Tensor:
    """Uniform (Haar) in O(d) for each head: QR of a normal matrix with the signs of R's diagonal made positive.

    Mezzadri, "How to generate random matrices from the classical compact groups" (2007).
    """
    q, r = torch.linalg.qr(source.normal(heads * d * d).view(heads, d, d))
    return q * torch.diagonal(r, dim1=-2, dim2=-1).sign()[:, None, :]
