"""Undoing secret coordinates without the keys, by aligning a copy with anything close to what it was made from.

Permutations are found by assignment on the similarity of rows, signs by that of the matched rows, and rotations in
closed form, per plane or by orthogonal Procrustes.
Every symmetry in the set assumed to have been used is searched for; if one was not used, the identity is found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment

from mpu_cli.architectures.family import FFN_AXES, MODEL_AXES, HeadPermutation, Permutation, Rotation, Turns
from mpu_cli.architectures.layout import Layout, TensorLayout, axis_length
from mpu_cli.symmetry.axis import AxisMap
from mpu_cli.symmetry.sampling import plane_matrices, whole_heads
from mpu_cli.symmetry.transform import as_matrix, tensor_map

Tensors = Mapping[str, torch.Tensor]  # float32, by name
ROWS = 8192  # rows of the embedding used to find the residual permutation
FEATURES = 512  # features of a row used in the first search for its partner
MARGIN = 6  # standard deviations of the cosine of FEATURES independent numbers


@dataclass(frozen=True)
class Place:
    """Where an axis occurs: tensor, dimension, and the part of that dimension that belongs to it."""

    tensor: str
    dimension: int
    start: int
    stop: int


def places_of(layout: Layout, tensors: Sequence[TensorLayout], axis: str) -> list[Place]:
    """All places of ``axis`` in ``tensors``."""
    places = []
    for tensor in tensors:
        for dimension, group in enumerate(tensor.axes):
            start = 0
            for name in group:
                stop = start + axis_length(layout.sizes, name)
                if name == axis:
                    places.append(Place(tensor.name, dimension, start, stop))
                start = stop
    return places


def features(tensors: Tensors, places: Sequence[Place]) -> torch.Tensor:
    """The weights at each coordinate of an axis, all places side by side: (coordinates, features)."""
    parts = []
    for place in places:
        matrix = as_matrix(tensors[place.tensor])
        part = matrix[place.start : place.stop] if place.dimension == 0 else matrix[:, place.start : place.stop].T
        parts.append(part)
    return torch.cat(parts, 1)


def match(similarity: torch.Tensor) -> torch.Tensor:
    """The assignment with the largest total, int64: row i is matched with column ``match[i]``.

    If each row's best column has that row as its best, that is the answer; otherwise scipy's linear_sum_assignment.
    """
    columns = similarity.argmax(1)
    if bool((similarity.argmax(0)[columns] == torch.arange(len(similarity))).all()):
        return columns
    return torch.from_numpy(linear_sum_assignment(similarity.numpy(), maximize=True)[1])


def match_rows(copy: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The order in which the rows of ``target``, (n, features), appear in ``copy``, by cosine.

    A subset of the features is enough if each row's best partner stands out from all others by far more than the
    omitted features can make up for; otherwise all of them are used.
    """
    if copy.shape[1] > 2 * FEATURES:
        some = torch.randperm(copy.shape[1], generator=torch.Generator().manual_seed(0))[:FEATURES]
        similarity = _cosines(copy[:, some], target[:, some])
        best = similarity.topk(min(2, len(similarity)), 1)
        nearest = best.indices[:, 0]
        margin = best.values[:, 0] - best.values[:, -1]
        if len(nearest.unique()) == len(nearest) and float(margin.min()) > MARGIN / math.sqrt(FEATURES):
            return nearest
    return match(_cosines(copy, target))


def _cosines(copy: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp(min=1e-30) for x in (copy, target)]
    return (copy / norms[0]) @ (target / norms[1]).T


def match_signed(
    copy: torch.Tensor, target: torch.Tensor, plain: tuple[torch.Tensor, torch.Tensor] | None = None
) -> AxisMap:
    """The order and the signs in which the rows of ``target``, (n, features), appear in ``copy``.

    ``plain``: further features of the same rows in copy and target that signs do not affect.
    """
    cosines = _cosines(copy, target)
    order = match(cosines.abs() + (_cosines(*plain) if plain else 0))
    signs = torch.ones(len(order))
    signs[order] = torch.where(cosines[torch.arange(len(order)), order] < 0, -1.0, 1.0)
    return AxisMap(order, signs=signs)


def residual_map(layout: Layout, copy: Tensors, target: Tensors, symmetries: str) -> AxisMap:
    """The map of the model dimension, from the columns of the embedding: the identity if the set has none."""
    permutations = [s for s in layout.symmetries(symmetries) if isinstance(s, Permutation) and s.axes == MODEL_AXES]
    if not permutations:
        return AxisMap(torch.arange(layout.sizes["model"]))
    [embedding] = [t for t in layout.parameters if t.layer is None and t.axes == (("vocab",), ("model",))][:1]
    rows = [tensors[embedding.name][:ROWS].float() for tensors in (copy, target)]
    if permutations[0].signed:
        ours, theirs = ((x - x.mean(0)).T for x in rows)
        return match_signed(ours, theirs)
    # Columns of an embedding have much in common; subtracting their mean leaves what distinguishes them.
    return AxisMap(match_rows(*((x - x.mean(1, keepdim=True)).T for x in rows)))


def model_maps(residual: AxisMap) -> dict[str, AxisMap]:
    """The map of the model dimension for each of its axes: weights of norms keep their signs."""
    return {"model": residual, "|model|": AxisMap(residual.order)}


def layer_maps(
    layout: Layout, tensors: Sequence[TensorLayout], copy: Tensors, target: Tensors, symmetries: str
) -> dict[str, AxisMap]:
    """The maps of one layer's own axes, for a ``copy`` whose model dimension is already aligned with the ``target``'s.

    ``symmetries`` is the set assumed to have been used: with fewer unknowns, less of the difference between copy and
    target is mistaken for a rotation.
    """
    sizes = layout.sizes
    d, heads, kv_heads = sizes["head_dim"], sizes["heads"], sizes["kv_heads"]
    group = heads // kv_heads

    def both(*axes: str) -> tuple[torch.Tensor, torch.Tensor]:
        where = [place for axis in axes for place in places_of(layout, tensors, axis)]
        return features(copy, where), features(target, where)

    chosen = layout.symmetries(symmetries)
    [ffn] = [s for s in chosen if isinstance(s, Permutation) and s.axes == FFN_AXES]
    if ffn.signed:
        neurons = match_signed(*both(*ffn.signed), both(*(axis for axis in FFN_AXES if axis not in ffn.signed)))
    else:
        neurons = AxisMap(match_rows(*both(*FFN_AXES)))
    maps = {axis: neurons if axis in ffn.signed else AxisMap(neurons.order) for axis in FFN_AXES}
    by_head = {}  # axis → copy's and target's features, (heads, d, features)
    for axis in ("query", "key", "value", "mixed"):
        by_head[axis] = [x.view(-1, d, x.shape[1]) for x in both(axis)]
    kv_order, query_order = torch.arange(kv_heads), torch.arange(heads)
    rotations = [s for s in chosen if isinstance(s, Rotation | Turns)]
    if any(isinstance(s, HeadPermutation) for s in chosen):
        kv_order = match(_overlap(*by_head["key"]) + _overlap(*by_head["value"]))
        for h, g in enumerate(kv_order.tolist()):
            mine, theirs = slice(h * group, (h + 1) * group), slice(g * group, (g + 1) * group)
            query_order[mine] = g * group + match(
                _overlap(by_head["query"][0][mine], by_head["query"][1][theirs])
                + _overlap(by_head["mixed"][0][mine], by_head["mixed"][1][theirs])
            )
    orders = {"query": query_order, "mixed": query_order, "key": kv_order, "value": kv_order}
    maps |= {axis: AxisMap(whole_heads(order, d)) for axis, order in orders.items()}
    for rotation in rotations:
        # One matrix for each KV head of the target, from all the heads of all the axes that share it.
        products = torch.zeros(kv_heads, d, d)
        for axis in rotation.axes:
            moved = torch.empty_like(by_head[axis][0])
            moved[orders[axis]] = by_head[axis][0]
            each = torch.einsum("hif,hjf->hij", moved, by_head[axis][1])
            products += each.view(kv_heads, -1, d, d).sum(1)
        solve = plane_rotation if rotation.planes else procrustes
        if isinstance(rotation, Turns):
            solve = quarter_turns if rotation.planes else signed_permutation
        matrices = torch.stack([solve(product) for product in products])
        for axis in rotation.axes:
            per_kv_head = len(orders[axis]) // kv_heads
            maps[axis] = AxisMap(maps[axis].order, matrices.repeat_interleave(per_kv_head, 0))
    return maps


def _overlap(copy: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How far two heads span the same space, regardless of rotation: ‖A Bᵀ‖²/(‖A Aᵀ‖·‖B Bᵀ‖), (heads, heads)."""
    cross = torch.einsum("aif,bjf->abij", copy, target).square().sum((2, 3))
    own = [torch.einsum("aif,ajf->aij", x, x).square().sum((1, 2)).sqrt() for x in (copy, target)]
    return cross / (own[0][:, None] * own[1][None, :]).clamp(min=1e-30)


def procrustes(product: torch.Tensor) -> torch.Tensor:
    """The orthogonal R nearest to X = R Y, from X Yᵀ (Schönemann, 1966)."""
    u, _, v = torch.linalg.svd(product.double())
    return u @ v


def plane_rotation(product: torch.Tensor) -> torch.Tensor:
    """The same if R only rotates the planes (i, i + d/2): an angle for each, in closed form."""
    half = len(product) // 2
    p = product.double()
    i = torch.arange(half)
    cos = p[i, i] + p[i + half, i + half]
    sin = p[i + half, i] - p[i, i + half]
    return plane_matrices(torch.atan2(sin, cos)[None])[0]


def quarter_turns(product: torch.Tensor) -> torch.Tensor:
    """``plane_rotation`` if every angle is a multiple of 90°."""
    half = len(product) // 2
    turned = plane_rotation(product)
    i = torch.arange(half)
    angle = torch.atan2(turned[i + half, i], turned[i, i])
    return plane_matrices((angle / (torch.pi / 2)).round()[None] * (torch.pi / 2))[0].round()


def signed_permutation(product: torch.Tensor) -> torch.Tensor:
    """The signed permutation R nearest to X = R Y, from X Yᵀ."""
    order = match(product.abs())
    i = torch.arange(len(order))
    matrix = torch.zeros(len(order), len(order), dtype=torch.float64)
    matrix[i, order] = torch.where(product[i, order] < 0, -1.0, 1.0).double()
    return matrix


def undo(
    layout: Layout, tensors: Sequence[TensorLayout], copy: Tensors, maps: Mapping[str, AxisMap]
) -> dict[str, torch.Tensor]:
    """``copy`` with ``maps`` undone: T⁻¹ as the attacker believes it to be."""
    undone = {}
    for tensor in tensors:
        mapping = tensor_map(layout, tensor, maps)
        matrix = as_matrix(copy[tensor.name])
        back = mapping.backward(mapping.take(matrix, 0, len(matrix)), 0)
        undone[tensor.name] = back.view(copy[tensor.name].shape)
    return undone
