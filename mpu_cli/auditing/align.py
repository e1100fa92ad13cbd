"""Undoing secret coordinates without the keys, by aligning a copy with anything close to what it was made from.

Permutations are found by assignment on the similarity of rows, signs by that of the matched rows, and rotations in
closed form, per plane or by orthogonal Procrustes.
Every symmetry in the set assumed to have been used is searched for; if one was not used, the identity is found.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpu_cli.architectures.layout import EMBEDDING, Layout, TensorLayout
from mpu_cli.architectures.symmetries import Permutation
from mpu_cli.auditing.axis_features import Tensors, features, places_of, undo
from mpu_cli.auditing.layer_alignment import LayerAlignment, stage_of
from mpu_cli.auditing.matching import match_rows, match_signed
from mpu_cli.symmetry.axis import AxisMap

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
    alignment = LayerAlignment(layout, tensors, copy, target, symmetries)
    for symmetry in sorted(alignment.symmetries, key=stage_of):
        alignment.align(symmetry)
    return alignment.maps()
