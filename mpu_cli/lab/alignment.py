"""Undoing secret coordinates without the keys, by aligning a copy with anything close to what it was made from.

Permutations are found by assignment on the similarity of rows, signs by that of the matched rows, and rotations in
closed form, per plane or by orthogonal Procrustes.
Every symmetry in the set assumed to have been used is searched for; if one was not used, the identity is found.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, singledispatchmethod

import torch
from scipy.optimize import linear_sum_assignment
from torch.nn.functional import normalize

from mpu_cli.model.family import (
    ATTENTION,
    LATENTS,
    OF_HEAD,
    ORDERED,
    ExpertPermutation,
    GroupedHeads,
    HeadPermutation,
    LatentHeads,
    Permutation,
    QuarterTurns,
    Rotation,
    Symmetry,
)
from mpu_cli.model.layout import EMBEDDING, Layout, TensorLayout, axis_length
from mpu_cli.model.sampling import (
    OF_AXIS,
    AxisMap,
    Maps,
    as_signs,
    coordinates,
    plane_matrices,
    planes_of,
    side_by_side,
    whole_heads,
)
from mpu_cli.model.transform import as_matrix, name_in_copy, tensor_map

# The match of a copy's rows with the target's, and the rotations by which they were turned.

FEATURES = 512  # features of a row used in the first search for its partner
MARGIN = 6  # standard deviations of the cosine of FEATURES independent numbers


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
        similarity = cosines(copy[:, some], target[:, some])
        best = similarity.topk(min(2, len(similarity)), 1)
        nearest = best.indices[:, 0]
        margin = best.values[:, 0] - best.values[:, -1]
        if len(nearest.unique()) == len(nearest) and float(margin.min()) > MARGIN / math.sqrt(FEATURES):
            return nearest
    return match(cosines(copy, target))


def cosines(copy: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The cosine of each row of ``copy`` with each row of ``target``, (rows, rows)."""
    return normalize(copy, eps=1e-30) @ normalize(target, eps=1e-30).T


def match_signed(
    copy: torch.Tensor, target: torch.Tensor, plain: tuple[torch.Tensor, torch.Tensor] | None = None
) -> AxisMap:
    """The order and the signs in which the rows of ``target``, (n, features), appear in ``copy``.

    ``plain``: further features of the same rows in copy and target that signs do not affect.
    """
    similarity = cosines(copy, target)
    order = match(similarity.abs() + (cosines(*plain) if plain else 0))
    signs = torch.ones(len(order))
    signs[order] = torch.where(similarity[torch.arange(len(order)), order] < 0, -1.0, 1.0)
    return AxisMap(order, signs=signs)


def match_axis(copy: torch.Tensor, target: torch.Tensor, *, signed: bool) -> AxisMap:
    """The map of an axis that permutes the rows of ``target`` and, if it is ``signed``, changes their signs."""
    return match_signed(copy, target) if signed else AxisMap(match_rows(copy, target))


def subspace_overlap(copy: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The overlap of the spaces that two heads span, regardless of rotation: ‖A Bᵀ‖²/(‖A Aᵀ‖·‖B Bᵀ‖), (heads,
    heads)."""
    cross = torch.einsum("aif,bjf->abij", copy, target).square().sum((2, 3))
    norms = [torch.einsum("aif,ajf->aij", x, x).square().sum((1, 2)).sqrt() for x in (copy, target)]
    return cross / (norms[0][:, None] * norms[1][None, :]).clamp(min=1e-30)


def procrustes(product: torch.Tensor) -> torch.Tensor:
    """The orthogonal R nearest to X = R Y, from X Yᵀ (Schönemann, 1966)."""
    u, _, v = torch.linalg.svd(product.double(), full_matrices=False)
    return u @ v


def plane_angles(product: torch.Tensor, kind: str) -> torch.Tensor:
    """The angles (r/2,) of the rotation R in RoPE's planes nearest to X = R Y, from X Yᵀ, in closed form."""
    real, two = planes_of(kind, len(product))
    p = product.double()
    return torch.atan2(p[two, real] - p[real, two], p[real, real] + p[two, two])


def signed_permutation(product: torch.Tensor) -> torch.Tensor:
    """The signed permutation R nearest to X = R Y, from X Yᵀ."""
    order = match(product.abs())
    i = torch.arange(len(order))
    matrix = torch.zeros(len(order), len(order), dtype=torch.float64)
    matrix[i, order] = torch.where(product[i, order] < 0, -1.0, 1.0).double()
    return matrix


def head_matrices(products: torch.Tensor, planes: str | None, rotary: int | None, *, turns: bool) -> torch.Tensor:
    """The rotation of each head, (heads, d, d), from ``products``, X Yᵀ of copy and target.

    The first ``rotary`` coordinates (None: all of them) turn in ``planes``, the others freely; without ``planes`` all
    turn freely. ``turns``: by multiples of 90° only, so that the matrices are signed permutations.
    """
    d, in_planes = products.shape[-1], 0
    matrices = torch.zeros(products.shape, dtype=torch.float64)
    if planes is not None:
        in_planes = d if rotary is None else rotary
        angles = torch.stack([plane_angles(product[:in_planes, :in_planes], planes) for product in products])
        matrices[:, :in_planes, :in_planes] = plane_matrices(quarter(angles) if turns else angles, planes)
    if in_planes < d:
        solve = signed_permutation if turns else procrustes
        free_products = products[:, in_planes:, in_planes:]
        matrices[:, in_planes:, in_planes:] = torch.stack([solve(product) for product in free_products])
    return matrices.round() if turns else matrices


def quarter(angles: torch.Tensor) -> torch.Tensor:
    """``angles``, in radians, rounded to multiples of 90°."""
    return (angles / (torch.pi / 2)).round() * (torch.pi / 2)


# The places of an axis in the tensors of a layer, the weights there, and the tensors with the maps of axes undone.

Tensors = Mapping[str, torch.Tensor]  # float32, by name


@dataclass(frozen=True)
class Place:
    """A place of an axis: tensor, dimension, and the indices of that dimension that belong to it, in their order.

    ``expert``: the matrix of a stack that it occurs in, None if the tensor is not a stack, or the axis is in all of it.
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
            index = coordinates(lengths, tensor.chunks[dimension]).argsort().split(lengths)[group.index(axis)]
            places.append(Place(tensor.name, dimension, index, expert if tensor.expert is None else None))
    return places


def features(tensors: Tensors, places: Sequence[Place]) -> torch.Tensor:
    """The weights at each coordinate of an axis, all places side by side: (coordinates, features)."""
    parts = []
    for place in places:
        weights, dimension = tensors[place.tensor], place.dimension
        if place.expert is not None and weights.ndim > 1 and dimension > 0:
            weights, dimension = weights[place.expert], dimension - 1
        part = weights.index_select(dimension, place.index).movedim(dimension, 0)
        parts.append(part.reshape(len(place.index), -1))
    return torch.cat(parts, 1)


def signs_of(axis_map: AxisMap) -> torch.Tensor:
    """The sign of each coordinate, ±1, also of a map without signs."""
    return torch.ones(len(axis_map)) if axis_map.signs is None else axis_map.signs


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


# The secret coordinates of one layer, recovered symmetry by symmetry: the inverse of ``model.sampling``.

Pair = tuple[torch.Tensor, torch.Tensor]  # of copy and target
OUTER_AXES = {"model", "|model|", "one", "taps"}  # axes that are aligned before those inside a layer


def stage_of(symmetry: Symmetry) -> int:
    """The stage at which a symmetry is sought: after those that its features are read through."""
    if isinstance(symmetry, Permutation):
        return 2 if symmetry.per_expert else 0
    if isinstance(symmetry, GroupedHeads):
        return 0
    return 2 if isinstance(symmetry, Rotation | QuarterTurns) else 1


class LayerAlignment:
    """The maps of one layer's axes between a ``copy``, whose model dimension is aligned, and the ``target``.

    ``symmetries`` names the set assumed to have been used. ``align`` takes its members in the order of ``stage_of``.
    """

    def __init__(
        self, layout: Layout, tensors: Sequence[TensorLayout], copy: Tensors, target: Tensors, symmetries: str
    ):
        layer = tensors[0].layer
        assert layer is not None
        self.symmetries = layout.symmetries(symmetries, layer)
        self._layout, self._tensors, self._copy, self._target = layout, tensors, copy, target
        self._sizes = layout.sizes_of(layer)
        self._inner_maps: dict[str, AxisMap] = {}  # of state spaces and latent attention: each is read through others
        self._maps: dict[str, AxisMap | tuple[AxisMap, ...]] = {}
        self._expert_order = torch.arange(self._sizes.get("experts", 0))
        heads, kv_heads = torch.arange(self._sizes["heads"]), torch.arange(self._sizes["kv_heads"])
        self._head_orders = {"query": heads, "mixed": heads, "key": kv_heads, "value": kv_heads}

    def maps(self) -> Maps:
        """One map for each axis: the identity for axes of heads that no symmetry changed."""
        heads: dict[str, AxisMap] = {}  # those that only moved as a whole
        if self._by_head:
            for axis, order in self._head_orders.items():
                heads[axis] = AxisMap(whole_heads(order, self._sizes["head_dim"]))
            heads |= {norm: heads[axis] for axis, norm in OF_AXIS.items()}
            heads["head"] = AxisMap(self._head_orders["query"])
        return {**heads, **self._inner_maps, **self._maps}

    @singledispatchmethod
    def align(self, symmetry: Symmetry) -> None:
        """Find what ``symmetry`` did to its axes."""
        raise TypeError(f"{symmetry}: no symmetry")

    @align.register
    def _(self, symmetry: Permutation) -> None:
        if symmetry.per_expert:
            places = AxisMap(self._expert_order).places.tolist()
            maps = [self._neurons(symmetry, experts=(places[e], e)) for e in range(len(places))]
            self._maps |= {axis: tuple(expert_maps[axis] for expert_maps in maps) for axis in symmetry.axes}
        elif symmetry.name.endswith("ffn"):
            self._maps |= self._neurons(symmetry)
        elif symmetry.name in (*LATENTS, *ORDERED):
            axis_map = match_axis(*self._inner_features(symmetry.axes[0]), signed=bool(symmetry.signed))
            self._inner_maps |= _with_signs_of(symmetry, axis_map)

    @align.register
    def _(self, symmetry: GroupedHeads) -> None:
        for axis in (symmetry.per_head, symmetry.inner, symmetry.of_group):
            self._inner_maps[axis] = AxisMap(match_rows(*self._inner_features(axis)))
        if symmetry.common:
            inside = self._inner_maps[symmetry.inner].order.view(len(self._inner_maps[symmetry.per_head]), -1)
            self._inner_maps[symmetry.common] = AxisMap((inside % inside.shape[1]).mode(0).values)

    @align.register
    def _(self, symmetry: LatentHeads) -> None:
        """Match the heads, and find the turns of their coordinates without RoPE, of their values and, the same for all
        heads, of their coordinates with RoPE. The latents are aligned by now."""
        heads, free = self._sizes["heads"], self._sizes["mla-free"]
        copy, target = self._parts_of_latent_heads(heads, free)
        order = torch.arange(heads)
        if symmetry.order:
            pairs = [(a, b) for name in ("free", "values") for a, b in zip(copy[name], target[name], strict=True)]
            order = match(sum((subspace_overlap(a, b) for a, b in pairs), torch.zeros(heads, heads)))
        products = {name: _products(copy[name], target[name], order) for name in copy}
        solve = signed_permutation if symmetry.turns else procrustes
        matrices = {name: torch.stack([solve(head) for head in products[name]]) for name in ("free", "values")}
        shared = self._inner_features("mla-key")
        angles = plane_angles(products["turned"].sum(0) + shared[0] @ shared[1].T, symmetry.planes)
        turned = plane_matrices((quarter(angles) if symmetry.turns else angles)[None], symmetry.planes)
        turned = turned.round() if symmetry.turns else turned
        axis_matrices = {
            "mla-query": side_by_side(matrices["free"], turned.expand(heads, -1, -1)),
            "mla-key-value": side_by_side(matrices["free"], matrices["values"]),
            "mla-mixed": matrices["values"],
        }
        for axis, rotation in axis_matrices.items():
            self._inner_maps[axis] = AxisMap(whole_heads(order, rotation.shape[-1]), rotation)
        self._inner_maps["mla-key"] = AxisMap(torch.arange(turned.shape[-1]), turned)

    @align.register
    def _(self, symmetry: ExpertPermutation) -> None:  # noqa: ARG002 (its type decides)
        # By the router: stacks of matrices would outweigh it, and are not comparable before their neurons are matched.
        self._expert_order = match(cosines(*self._features("expert")))
        self._maps["expert"] = AxisMap(self._expert_order)

    @align.register
    def _(self, symmetry: HeadPermutation) -> None:  # noqa: ARG002 (its type decides)
        by_head, heads, kv_heads = self._by_head, self._sizes["heads"], self._sizes["kv_heads"]
        group = heads // kv_heads
        if not by_head:
            return
        overlaps = [subspace_overlap(*by_head[axis]) for axis in ("key", "value") if axis in by_head]
        if not overlaps:  # a layer that reads another's keys and values: by its query heads
            overlaps = [subspace_overlap(*by_head["query"]).view(kv_heads, group, kv_heads, group).sum((1, 3))]
        kv_order, query_order = match(sum(overlaps[1:], overlaps[0])), torch.arange(heads)
        for h, g in enumerate(kv_order.tolist()):
            copy_heads, target_heads = slice(h * group, (h + 1) * group), slice(g * group, (g + 1) * group)
            queries, mixed = (
                subspace_overlap(by_head[axis][0][copy_heads], by_head[axis][1][target_heads])
                for axis in ("query", "mixed")
            )
            query_order[copy_heads] = g * group + match(queries + mixed)
        self._head_orders = {"query": query_order, "mixed": query_order, "key": kv_order, "value": kv_order}

    @align.register(Rotation)
    @align.register(QuarterTurns)
    def _(self, symmetry: Rotation | QuarterTurns) -> None:
        if not self._by_head:
            return
        turns = isinstance(symmetry, QuarterTurns)
        matrices = head_matrices(self._products_of_heads(symmetry.axes), symmetry.planes, symmetry.rotary, turns=turns)
        for axis in symmetry.axes:
            order = self._head_orders[axis]
            of_axis = matrices.repeat_interleave(len(order) // len(matrices), 0)
            self._maps[axis] = AxisMap(whole_heads(order, matrices.shape[-1]), of_axis)
            if turns and axis in OF_AXIS:
                self._maps[OF_AXIS[axis]] = AxisMap(as_signs(of_axis, whole_heads(order, of_axis.shape[-1])).order)
        if isinstance(symmetry, QuarterTurns) and symmetry.norm == "shared":
            self._maps[OF_HEAD] = AxisMap(matrices.abs().argmax(2).mode(0).values)

    def _features(self, *axes: str, experts: tuple[int | None, int | None] = (None, None)) -> Pair:
        """Features of ``axes`` in copy and target; ``experts``: in which expert of each, for axes inside experts."""
        pair = []
        for weights, expert in zip((self._copy, self._target), experts, strict=True):
            places = [place for axis in axes for place in places_of(self._layout, self._tensors, axis, expert)]
            pair.append(features(weights, places))
        return pair[0], pair[1]

    def _inner_features(self, axis: str) -> Pair:
        """Features of an ``axis`` inside a state space or latent attention, from the tensors whose other axes are
        aligned by now."""
        unchanged = {*LATENTS} - {symmetry.name for symmetry in self.symmetries}
        aligned_axes = OUTER_AXES | unchanged | self._inner_maps.keys()
        matchable = [t for t in self._tensors if all(axis in group or {*group} <= aligned_axes for group in t.axes)]
        places = places_of(self._layout, matchable, axis)
        aligned = undo(self._layout, self._tensors, self._copy, self._inner_maps)
        return features(aligned, places), features(self._target, places)

    def _neurons(
        self, permutation: Permutation, experts: tuple[int | None, int | None] = (None, None)
    ) -> dict[str, AxisMap]:
        """The maps of the axes of a feed-forward layer, or of one expert."""
        if not permutation.signed:
            axis_map = AxisMap(match_rows(*self._features(*permutation.axes, experts=experts)))
        else:
            unsigned = [axis for axis in permutation.axes if axis not in permutation.signed]
            signed = self._features(*permutation.signed, experts=experts)
            axis_map = match_signed(*signed, self._features(*unsigned, experts=experts))
        return _with_signs_of(permutation, axis_map)

    @cached_property
    def _by_head(self) -> dict[str, Pair]:
        """Features of copy and target for each axis of attention in this layer: (heads, d, features)."""
        d = self._sizes["head_dim"]
        by_head = {}
        for axis in ATTENTION:
            if any(axis in group for tensor in self._tensors for group in tensor.axes):
                copy, target = self._features(axis)
                by_head[axis] = copy.view(-1, d, copy.shape[1]), target.view(-1, d, target.shape[1])
        return by_head

    def _products_of_heads(self, axes: Sequence[str]) -> torch.Tensor:
        """X Yᵀ for each KV head of the target, (KV heads, d, d), over the heads of all ``axes`` that share it."""
        d, kv_heads = self._sizes["head_dim"], self._sizes["kv_heads"]
        products = torch.zeros(kv_heads, d, d)
        for axis in axes:
            if axis in self._by_head:
                copy, target = self._by_head[axis]
                products += _products([copy], [target], self._head_orders[axis]).view(kv_heads, -1, d, d).sum(1)
        return products

    def _parts_of_latent_heads(self, heads: int, free: int) -> list[dict[str, list[torch.Tensor]]]:
        """Features of copy and target for each part of the heads of latent attention: (heads, coordinates, features).

        ``free``: coordinates without RoPE; ``values``; ``turned``: coordinates with RoPE.
        """
        pairs = [self._inner_features(axis) for axis in ("mla-query", "mla-key-value", "mla-mixed")]
        parts = []
        for side in (0, 1):
            query, keys, mixed = (pair[side].view(heads, -1, pair[side].shape[1]) for pair in pairs)
            parts.append(
                {
                    "free": [query[:, :free], keys[:, :free]],
                    "values": [keys[:, free:], mixed],
                    "turned": [query[:, free:]],
                }
            )
        return parts


def _with_signs_of(permutation: Permutation, axis_map: AxisMap) -> dict[str, AxisMap]:
    """``axis_map`` for every axis of ``permutation``, without signs where the axis takes none."""
    return {axis: axis_map if axis in permutation.signed else AxisMap(axis_map.order) for axis in permutation.axes}


def _products(copy: Sequence[torch.Tensor], target: Sequence[torch.Tensor], order: torch.Tensor) -> torch.Tensor:
    """X Yᵀ of each head of the target with the head of the copy that ``order`` gives it, summed over the tensors."""
    heads = order.argsort()
    return torch.stack([torch.einsum("hif,hjf->hij", x[heads], y) for x, y in zip(copy, target, strict=True)]).sum(0)


EMBEDDING_ROWS = 8192  # rows of the embedding used to find the residual permutation
VOCABULARY, MODEL = ("vocab",), ("model",)


def embedding_of(
    layout: Layout, names: Container[str], rows: Collection[tuple[str, ...]] = EMBEDDING
) -> TensorLayout | None:
    """The first embedding among ``names`` with columns of the model dimension: a narrow one of tokens has others, then
    that of the positions has them."""
    embeddings = (t for t in layout.parameters if t.axes[0] in rows and t.axes[1:] == (MODEL,))
    return next((t for t in embeddings if t.name in names), None)


def residual_map(layout: Layout, copy: Tensors, target: Tensors, symmetries: str) -> AxisMap:
    """The map of the model dimension, from the columns of the embedding: the identity if the set has none."""
    permutations = [s for s in layout.symmetries(symmetries) if isinstance(s, Permutation)]
    if not permutations:
        return AxisMap(torch.arange(layout.sizes["model"]))
    embedding = embedding_of(layout, copy)
    assert embedding is not None
    signed = bool(permutations[0].signed)
    # Columns of an embedding have much in common; subtracting their mean leaves what distinguishes them. Signs change
    # that mean; the mean of a column changes its sign with the column.
    rows = [tensors[embedding.name][:EMBEDDING_ROWS].float() for tensors in (copy, target)]
    copy_columns, target_columns = ((x - x.mean(0 if signed else 1, keepdim=True)).T for x in rows)
    return match_axis(copy_columns, target_columns, signed=signed)


def model_maps(
    layout: Layout, copy: Tensors, target: Tensors, symmetries: str, residual: AxisMap
) -> dict[str, AxisMap]:
    """The maps of the axes that all layers share: the model dimension, of which weights of norms keep their signs, and
    the channels of embeddings that layers read."""
    maps = {"model": residual, "|model|": AxisMap(residual.order)}
    channels = [s for s in layout.symmetries(symmetries) if isinstance(s, Permutation) and s.name == "channels"]
    if not channels:
        return maps
    [projection] = [
        t for t in layout.parameters if t.layer is None and t.axes[1:] == (MODEL,) and "channel" in t.axes[0]
    ]
    places = places_of(layout, [projection], "channel")
    pair = features(undo(layout, [projection], copy, maps), places), features(target, places)
    channel_map = match_axis(*pair, signed=bool(channels[0].signed))
    return maps | {"channel": channel_map, "|channel|": AxisMap(channel_map.order)}


def layer_maps(
    layout: Layout, tensors: Sequence[TensorLayout], copy: Tensors, target: Tensors, symmetries: str
) -> Maps:
    """The maps of one layer's own axes, for a ``copy`` whose model dimension is already aligned with the ``target``'s.

    ``symmetries`` is the set assumed to have been used: with fewer unknowns, less of the difference between copy and
    target is mistaken for a rotation.
    """
    alignment = LayerAlignment(layout, tensors, copy, target, symmetries)
    for symmetry in sorted(alignment.symmetries, key=stage_of):
        alignment.align(symmetry)
    return alignment.maps()
