"""Undoing secret coordinates without the keys, by aligning a copy with anything close to what it was made from.

Permutations are found by assignment on the similarity of rows, signs by that of the matched rows, and rotations in
closed form, per plane or by orthogonal Procrustes.
Every symmetry in the set assumed to have been used is searched for; if one was not used, the identity is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mpu_cli.architectures.axes import ATTENTION, OF_HEAD, OF_KEYS, OF_MIXED, OF_QUERIES
from mpu_cli.architectures.layout import EMBEDDING, Layout, TensorLayout
from mpu_cli.architectures.symmetries import (
    LATENTS,
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
from mpu_cli.auditing.axis_features import Tensors, features, places_of
from mpu_cli.auditing.matching import (
    cosines,
    match,
    match_rows,
    match_signed,
    plane_angles,
    procrustes,
    signed_permutation,
    subspace_overlap,
)
from mpu_cli.symmetry.axis import AxisMap
from mpu_cli.symmetry.sampling import Maps, plane_matrices, side_by_side, whole_heads
from mpu_cli.symmetry.transform import as_matrix, name_in_copy, tensor_map

ROWS = 8192  # rows of the embedding used to find the residual permutation


def residual_map(layout: Layout, copy: Tensors, target: Tensors, symmetries: str) -> AxisMap:
    """The map of the model dimension, from the columns of the embedding: the identity if the set has none."""
    permutations = [s for s in layout.symmetries(symmetries) if isinstance(s, Permutation)]
    if not permutations:
        return AxisMap(torch.arange(layout.sizes["model"]))
    # A narrow embedding has other columns; then those of the positions do.
    embeddings = [t for t in layout.parameters if t.axes[0] in EMBEDDING and t.axes[1:] == (("model",),)]
    [embedding] = [t for t in embeddings if t.name in copy][:1]
    rows = [tensors[embedding.name][:ROWS].float() for tensors in (copy, target)]
    if permutations[0].signed:
        ours, theirs = ((x - x.mean(0)).T for x in rows)
        return match_signed(ours, theirs)
    # Columns of an embedding have much in common; subtracting their mean leaves what distinguishes them.
    return AxisMap(match_rows(*((x - x.mean(1, keepdim=True)).T for x in rows)))


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
        t for t in layout.parameters if t.layer is None and t.axes[1:] == (("model",),) and "channel" in t.axes[0]
    ]
    aligned = undo(layout, [projection], copy, maps)
    places = places_of(layout, [projection], "channel")
    ours, theirs = (features(tensors, places) for tensors in (aligned, target))
    channel_map = match_signed(ours, theirs) if channels[0].signed else AxisMap(match_rows(ours, theirs))
    return maps | {"channel": channel_map, "|channel|": AxisMap(channel_map.order)}


def layer_maps(
    layout: Layout, tensors: Sequence[TensorLayout], copy: Tensors, target: Tensors, symmetries: str
) -> dict[str, AxisMap | tuple[AxisMap, ...]]:
    """The maps of one layer's own axes, for a ``copy`` whose model dimension is already aligned with the ``target``'s.

    ``symmetries`` is the set assumed to have been used: with fewer unknowns, less of the difference between copy and
    target is mistaken for a rotation.
    """
    layer = tensors[0].layer
    assert layer is not None
    chosen = layout.symmetries(symmetries, layer)
    sizes = layout.sizes_of(layer)

    def both(*axes: str, experts: tuple[int | None, int | None] = (None, None)) -> Pair:
        """Features of copy and target; ``experts``: in which expert of each, for axes inside experts."""
        pair = []
        for weights, expert in zip((copy, target), experts, strict=True):
            pair.append(features(weights, [p for axis in axes for p in places_of(layout, tensors, axis, expert)]))
        return pair[0], pair[1]

    maps: dict[str, AxisMap | tuple[AxisMap, ...]] = {}
    for permutation in chosen:
        if isinstance(permutation, Permutation) and permutation.name.endswith("ffn") and not permutation.per_expert:
            maps |= _neurons(permutation, both)
    maps |= _inner(layout, tensors, copy, target, chosen)
    maps |= _experts(chosen, sizes.get("experts", 0), both)
    if present := [axis for axis in ATTENTION if any(axis in group for tensor in tensors for group in tensor.axes)]:
        maps |= _heads(sizes, present, chosen, both)
    return maps


Pair = tuple[torch.Tensor, torch.Tensor]  # of copy and target


def _neurons(permutation: Permutation, features_of: Callable[..., Pair], **where: Any) -> dict[str, AxisMap]:
    """The maps of the axes of a feed-forward layer."""
    signed = permutation.signed
    if signed:
        unsigned = [axis for axis in permutation.axes if axis not in signed]
        axis_map = match_signed(
            features_of(*signed, **where)[0], features_of(*signed, **where)[1], features_of(*unsigned, **where)
        )
    else:
        axis_map = AxisMap(match_rows(*features_of(*permutation.axes, **where)))
    return {axis: axis_map if axis in signed else AxisMap(axis_map.order) for axis in permutation.axes}


OUTER_AXES = {"model", "|model|", "one", "taps"}  # axes that are aligned before those inside a layer


def _inner(
    layout: Layout, tensors: Sequence[TensorLayout], copy: Tensors, target: Tensors, chosen: Sequence[Symmetry]
) -> dict[str, AxisMap]:
    """The maps of axes inside state spaces and latent attention, one after the other: each is matched by the tensors
    whose other axes are aligned by then."""
    maps: dict[str, AxisMap] = {}
    in_place = {*LATENTS} - {symmetry.name for symmetry in chosen}

    def both(*axes: str) -> Pair:
        aligned_axes = OUTER_AXES | in_place | maps.keys()
        matchable = [
            t
            for t in tensors
            if all(axis in group or {*group} <= aligned_axes for group in t.axes for axis in axes[:1])
        ]
        places = [location for axis in axes for location in places_of(layout, matchable, axis)]
        return features(undo(layout, tensors, copy, maps), places), features(target, places)

    for symmetry in chosen:
        if isinstance(symmetry, GroupedHeads):
            for axis in (symmetry.per_head, symmetry.inner, symmetry.of_group):
                maps[axis] = AxisMap(match_rows(*both(axis)))
            if symmetry.common:
                inside = maps[symmetry.inner].order.view(len(maps[symmetry.per_head]), -1)
                maps[symmetry.common] = AxisMap((inside % inside.shape[1]).mode(0).values)
        elif isinstance(symmetry, Permutation) and symmetry.name in (*LATENTS, *ORDERED):
            signed, axis = symmetry.signed, symmetry.axes[0]
            axis_map = match_signed(*both(axis)) if signed else AxisMap(match_rows(*both(axis)))
            maps |= {each: axis_map if each in signed else AxisMap(axis_map.order) for each in symmetry.axes}
    for symmetry in chosen:
        if isinstance(symmetry, LatentHeads):
            maps |= _latent_heads(layout.sizes_of(tensors[0].layer), symmetry, both)
    return maps


def _latent_heads(
    sizes: Mapping[str, int], symmetry: LatentHeads, features_of: Callable[..., Pair]
) -> dict[str, AxisMap]:
    """The maps of the heads of latent attention, whose latents are aligned: which head is which, and the turns of its
    coordinates without RoPE, of its values and, the same for all, of those with RoPE."""
    heads, free = sizes["heads"], sizes["mla-free"]
    ours: dict[str, torch.Tensor] = {}
    theirs: dict[str, torch.Tensor] = {}
    for axis in ("mla-query", "mla-key-value", "mla-mixed"):
        for by_axis, axis_features in zip((ours, theirs), features_of(axis), strict=True):
            by_axis[axis] = axis_features.view(heads, -1, axis_features.shape[1])
    shared = features_of("mla-key")

    def parts(head_features: dict[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        query, keys = head_features["mla-query"], head_features["mla-key-value"]
        return {
            "free": [query[:, :free], keys[:, :free]], "values": [keys[:, free:], head_features["mla-mixed"]],
            "turned": [query[:, free:]],
        }  # fmt: skip

    copy, target = parts(ours), parts(theirs)
    order = torch.arange(heads)
    if symmetry.order:
        pairs = [(a, b) for name in ("free", "values") for a, b in zip(copy[name], target[name], strict=True)]
        order = match(sum((subspace_overlap(a, b) for a, b in pairs), torch.zeros(heads, heads)))

    def product(name: str) -> torch.Tensor:
        """X Yᵀ of each head of the target with the copy's head that is its."""
        summed = torch.zeros(())
        for mine, other in zip(copy[name], target[name], strict=True):
            moved = torch.empty_like(mine)
            moved[order] = mine
            summed = summed + torch.einsum("hif,hjf->hij", moved, other)
        return summed

    solve = signed_permutation if symmetry.turns else procrustes
    matrices = {name: torch.stack([solve(each) for each in product(name)]) for name in ("free", "values")}
    angles = plane_angles(product("turned").sum(0) + shared[0] @ shared[1].T, symmetry.planes)
    if symmetry.turns:
        angles = (angles / (torch.pi / 2)).round() * (torch.pi / 2)
    turned = plane_matrices(angles[None], symmetry.planes)
    turned = turned.round() if symmetry.turns else turned
    axis_matrices = {
        "mla-query": side_by_side(matrices["free"], turned.expand(heads, -1, -1)),
        "mla-key-value": side_by_side(matrices["free"], matrices["values"]),
        "mla-mixed": matrices["values"],
    }
    maps = {axis: AxisMap(whole_heads(order, each.shape[-1]), each) for axis, each in axis_matrices.items()}
    return maps | {"mla-key": AxisMap(torch.arange(turned.shape[-1]), turned)}


def _experts(
    chosen: Sequence[Symmetry], count: int, features_of: Callable[..., Pair]
) -> dict[str, AxisMap | tuple[AxisMap, ...]]:
    """Which expert of the copy is which, by the rows of the router, and the maps of the axes inside each."""
    maps: dict[str, AxisMap | tuple[AxisMap, ...]] = {}
    order = torch.arange(count)
    if any(isinstance(s, ExpertPermutation) for s in chosen):
        ours, theirs = features_of("expert")
        # Stacks of matrices would outweigh the router, and are not comparable before their neurons are matched.
        order = match(cosines(ours, theirs))
        maps["expert"] = AxisMap(order)
    for permutation in chosen:
        if isinstance(permutation, Permutation) and permutation.per_expert:
            places = AxisMap(order).places
            each = [_neurons(permutation, features_of, experts=(int(places[e]), e)) for e in range(count)]
            maps |= {axis: tuple(expert_maps[axis] for expert_maps in each) for axis in permutation.axes}
    return maps


def _heads(
    sizes: Mapping[str, int], present: Sequence[str], chosen: Sequence[Symmetry], features_of: Callable[..., Pair]
) -> dict[str, AxisMap]:
    """The maps of the axes of attention that are ``present``: which head is which, and how each is turned."""
    d, heads, kv_heads = sizes["head_dim"], sizes["heads"], sizes["kv_heads"]
    group = heads // kv_heads
    by_head = {}  # axis → copy's and target's features, (heads, d, features)
    for axis in present:
        by_head[axis] = [x.view(-1, d, x.shape[1]) for x in features_of(axis)]
    kv_order, query_order = torch.arange(kv_heads), torch.arange(heads)
    rotations = [s for s in chosen if isinstance(s, Rotation | QuarterTurns)]
    if any(isinstance(s, HeadPermutation) for s in chosen):
        whose = [subspace_overlap(*by_head[axis]) for axis in ("key", "value") if axis in by_head]
        if not whose:  # a layer that reads another's: by its query heads
            whose = [subspace_overlap(*by_head["query"]).view(kv_heads, group, kv_heads, group).sum((1, 3))]
        kv_order = match(sum(whose[1:], whose[0]))
        for h, g in enumerate(kv_order.tolist()):
            mine, theirs = slice(h * group, (h + 1) * group), slice(g * group, (g + 1) * group)
            query_order[mine] = g * group + match(
                subspace_overlap(by_head["query"][0][mine], by_head["query"][1][theirs])
                + subspace_overlap(by_head["mixed"][0][mine], by_head["mixed"][1][theirs])
            )
    orders = {"query": query_order, "mixed": query_order, "key": kv_order, "value": kv_order}
    maps = {axis: AxisMap(whole_heads(order, d)) for axis, order in orders.items()}
    maps |= {OF_QUERIES: maps["query"], OF_KEYS: maps["key"], OF_MIXED: maps["mixed"], "head": AxisMap(query_order)}
    for rotation in rotations:
        # One matrix for each KV head of the target, from all the heads of all the axes that share it.
        products = torch.zeros(kv_heads, d, d)
        for axis in filter(by_head.__contains__, rotation.axes):
            moved = torch.empty_like(by_head[axis][0])
            moved[orders[axis]] = by_head[axis][0]
            each = torch.einsum("hif,hjf->hij", moved, by_head[axis][1])
            products += each.view(kv_heads, -1, d, d).sum(1)
        matrices = _rotation_matrices(products, rotation)
        for axis in rotation.axes:
            per_kv_head = len(orders[axis]) // kv_heads
            maps[axis] = AxisMap(maps[axis].order, matrices.repeat_interleave(per_kv_head, 0))
        if isinstance(rotation, QuarterTurns) and rotation.norm == "shared":
            maps[OF_HEAD] = AxisMap(matrices.abs().argmax(2).mode(0).values)
        if isinstance(rotation, QuarterTurns):
            maps |= {_UNSIGNED[axis]: _order(matrices, orders[axis], d) for axis in rotation.axes if axis in _UNSIGNED}
    return maps


def _rotation_matrices(products: torch.Tensor, rotation: Rotation | QuarterTurns) -> torch.Tensor:
    """The matrix of each KV head, (heads, d, d), from X Yᵀ of copy and target."""
    d = products.shape[-1]
    r = 0 if rotation.planes is None else d if rotation.rotary is None else rotation.rotary
    turns = isinstance(rotation, QuarterTurns)
    matrices = torch.zeros(products.shape, dtype=torch.float64)
    if r:
        kind = str(rotation.planes)
        angles = torch.stack([plane_angles(product[:r, :r], kind) for product in products])
        if turns:
            angles = (angles / (torch.pi / 2)).round() * (torch.pi / 2)
        matrices[:, :r, :r] = plane_matrices(angles, kind)
    if r < d:
        solve = signed_permutation if turns else procrustes
        matrices[:, r:, r:] = torch.stack([solve(product[r:, r:]) for product in products])
    return matrices.round() if turns else matrices


_UNSIGNED = {"query": OF_QUERIES, "key": OF_KEYS, "mixed": OF_MIXED}


def _order(matrices: torch.Tensor, heads: torch.Tensor, d: int) -> AxisMap:
    """The order of an axis whose heads, put in the order ``heads``, are turned by signed permutations: for what takes
    no signs, such as the weights of norms."""
    inside = matrices.abs().argmax(2)  # (KV heads, d)
    each = inside.repeat_interleave(len(heads) // len(inside), 0)
    flat = (each + d * torch.arange(len(each))[:, None]).flatten()
    return AxisMap(flat[whole_heads(heads, d)])


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
