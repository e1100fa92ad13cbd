"""A model of unknown origin: which of its tensors are which of a base's, and in which coordinates they are.

Coordinates are tried in the order of how sure they are: those of a copy whose order of the model dimension the suspect
has, the base's own, and those that aligning the suspect to the base finds (``auditing.align``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from scipy.optimize import linear_sum_assignment

from mpu_cli.architectures.layout import EMBEDDING, Layout, TensorLayout
from mpu_cli.auditing.align import layer_maps, model_maps, residual_map, undo
from mpu_cli.checkpoint.header import FLOATS
from mpu_cli.checkpoint.reader import Checkpoint, open_checkpoint
from mpu_cli.errors import MpuError
from mpu_cli.models.adapters import is_adapter
from mpu_cli.models.source import locate
from mpu_cli.symmetry.axis import AxisMap
from mpu_cli.symmetry.sampling import Maps
from mpu_cli.symmetry.transform import TensorMap, Transform, as_matrix, name_in_copy, row_slices, tensor_map

TAILS = 4.0  # times the RMS of the base's weights, beyond which those of a suspect are clipped to align them
ALIGNED = 0.5  # cosine with the base above which a matrix counts as lying in its coordinates
MODEL_AXES = (("model",), ("|model|",))


def open_suspect(source: str) -> Checkpoint:
    """The weights of a suspect: a file, a directory, a sharded index or a Hub id; its config is not read.

    Raises MpuError if there are none, or if it is an adapter without the model that it belongs to.
    """
    path = locate(source)
    if is_adapter(path):
        raise MpuError(f"{path}: a peft adapter, not a model", "merge it into its model with peft (merge_and_unload)")
    return open_checkpoint(path, links=False)


@dataclass(frozen=True)
class Suspect:
    """A checkpoint, and what it calls the tensors of a base: ``names``, by the base's names. Those that it lacks are
    missing."""

    source: str
    checkpoint: Checkpoint
    names: Mapping[str, str]

    def tensor(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The suspect's tensor for the base's ``name``, float32, to align it by: weights that are not finite, or far
        larger than those of the base's tensor, ``like``, are clipped, or they alone would decide. Raises KeyError if
        it lacks it."""
        bound = TAILS * float(like.float().square().mean().sqrt())
        return self.checkpoint.tensor(self.names[name]).float().nan_to_num(0.0, bound, -bound).clamp(-bound, bound)


def match_suspect(source: str, checkpoint: Checkpoint, base: Checkpoint, layout: Layout) -> Suspect:
    """The suspect with the names of the base's tensors, if both have as many layers; else see ``match_layers``.

    Raises MpuError if the architectures or vocabularies differ.
    """
    prefix = layout.family.prefix
    with_prefix = {name if name.startswith(prefix) else prefix + name: name for name in checkpoint.tensors}
    names = {}
    for tensor in layout.parameters:
        full = tensor.name if tensor.name.startswith(prefix) else prefix + tensor.name
        theirs = tensor.name if tensor.name in checkpoint.tensors else with_prefix.get(full)
        if theirs is None and tensor.axes[0] == ("vocab",):  # an embedding that is stored as the head tied to it
            heads = [head for head in layout.family.heads if head not in layout.tensors]
            theirs = next((head for head in heads if head in checkpoint.tensors), None)
        if theirs is None:
            continue
        shape, expected = checkpoint.tensors[theirs].shape, base.tensors[tensor.name].shape
        if checkpoint.tensors[theirs].dtype not in FLOATS:
            raise MpuError(
                f"{source}: {theirs!r} is stored as {checkpoint.tensors[theirs].dtype}", "dequantise the model first"
            )
        if shape != expected:
            raise MpuError(
                f"{source}: {theirs!r} has shape {list(shape)}, but {list(expected)} in {base.path}: another "
                "architecture or vocabulary"
            )
        names[tensor.name] = theirs
    if not any(layout.tensors[name].axes[0] in EMBEDDING for name in names) or len(names) < 2:
        raise MpuError(f"{source}: has none of the tensors of {base.path}, so it has another architecture")
    return Suspect(source, checkpoint, names)


def match_layers(suspect: Suspect, base: Checkpoint, layout: Layout, residual: AxisMap) -> Suspect:
    """``suspect`` with each of its layers matched to the layer of the base that is most like it, if it has fewer.

    What is compared are the norms of all weights at each coordinate of the model dimension, which no symmetry inside a
    layer changes. ``residual``: the map of that dimension.
    """
    layers: dict[int, list[TensorLayout]] = {}
    for tensor in layout.parameters:
        if tensor.layer is not None:
            layers.setdefault(tensor.layer, []).append(tensor)
    complete = [i for i, tensors in layers.items() if all(tensor.name in suspect.names for tensor in tensors)]
    if not complete or len(complete) == len(layers):
        return suspect
    kinds: dict[object, tuple[list[int], list[int]]] = {}
    for i, tensors in layers.items():
        ours, theirs = kinds.setdefault(tuple(tensor.axes for tensor in tensors), ([], []))
        ours.append(i)
        theirs += [i] if i in complete else []
    names = {name: theirs for name, theirs in suspect.names.items() if layout.tensors[name].layer is None}
    for ours, theirs in kinds.values():
        for from_layer, to_layer in _likest(suspect, base, layers, residual, theirs, ours) if theirs else ():
            names |= {t.name: suspect.names[s.name] for s, t in zip(layers[from_layer], layers[to_layer], strict=True)}
    return Suspect(suspect.source, suspect.checkpoint, names)


def _likest(
    suspect: Suspect, base: Checkpoint, layers: Mapping[int, Sequence[TensorLayout]], residual: AxisMap,
    suspects: Sequence[int], bases: Sequence[int],
) -> list[tuple[int, int]]:  # fmt: skip
    """Pairs of a layer of the suspect and the base's that is most like it, all with the same axes."""
    ours = torch.stack([_profile([base.tensor(t.name) for t in layers[i]], layers[i], None) for i in bases])
    theirs = torch.stack(
        [
            _profile([suspect.tensor(t.name, base.tensor(t.name)) for t in layers[i]], layers[i], residual)
            for i in suspects
        ]
    )
    mean = ours.mean(0)
    similarity = torch.corrcoef(torch.cat([theirs - mean, ours - mean]))[: len(suspects), len(suspects) :]
    rows, columns = linear_sum_assignment(similarity.nan_to_num(-1).numpy(), maximize=True)
    return [(suspects[row], bases[column]) for row, column in zip(rows.tolist(), columns.tolist(), strict=True)]


def _profile(
    weights: Sequence[torch.Tensor], tensors: Sequence[TensorLayout], residual: AxisMap | None
) -> torch.Tensor:
    """The norm of a layer's weights at each coordinate of the model dimension, one tensor after the other."""
    parts = []
    for matrix, tensor in zip(weights, tensors, strict=True):
        for dimension, group in enumerate(tensor.axes):
            if group in MODEL_AXES:
                norms = matrix.float().movedim(dimension, 0).flatten(1 if matrix.ndim > 1 else 0)
                norms = torch.linalg.vector_norm(norms, dim=1) if matrix.ndim > 1 else norms.abs()
                parts.append(norms if residual is None else norms[residual.places])
    return torch.cat(parts)


@dataclass
class Frames:
    """The coordinates of a suspect, tensor by tensor, with respect to a ``base`` with this ``layout``.

    ``transforms``: those of the copies whose coordinates it may be in, likeliest first; ``aligned``: how many tensors
    had to be aligned.
    """

    suspect: Suspect
    base: Checkpoint
    layout: Layout
    residual: AxisMap
    transforms: Sequence[Transform]
    aligned: int = 0
    _outer: dict[str, AxisMap] = field(default_factory=dict)

    def of_block(self, tensors: Sequence[TensorLayout]) -> dict[str, tuple[str, TensorMap]]:
        """For each tensor of a block that the suspect has: its name there in these coordinates, and the map to undo."""
        present = [tensor for tensor in tensors if tensor.name in self.suspect.names and not tensor.constant]
        if not present:
            return {}
        candidates = [self._by_transform(transform, present) for transform in self.transforms]
        candidates.append({t.name: (self.suspect.names[t.name], TensorMap(None, None)) for t in present})
        scored = [(self._nearness(present, candidate), candidate) for candidate in candidates if candidate]
        complete = len(present) == len([tensor for tensor in tensors if not tensor.constant])
        if max(map(_nearness_of, scored)) < ALIGNED and complete:
            aligned = self._by_alignment(present)
            scored.insert(0, (self._nearness(present, aligned), aligned))  # first: it wins a tie
            self.aligned += len(present) * (max(scored, key=_nearness_of)[1] is aligned)
        return max(scored, key=_nearness_of)[1]

    def _by_transform(self, transform: Transform, tensors: Sequence[TensorLayout]) -> dict[str, tuple[str, TensorMap]]:
        maps = {}
        for tensor in tensors:
            moved_name = transform.name(tensor)  # an expert's matrices carry the number of its new place
            if moved_name in self.suspect.names:
                maps[tensor.name] = (self.suspect.names[moved_name], transform.of(tensor))
        return maps

    def _by_alignment(self, tensors: Sequence[TensorLayout]) -> dict[str, tuple[str, TensorMap]]:
        def load(block: Sequence[TensorLayout]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
            theirs = {t.name: self.base.tensor(t.name).float() for t in block}
            return {name: self.suspect.tensor(name, like) for name, like in theirs.items()}, theirs

        if not self._outer:
            outside = [t for t in self.layout.parameters if t.layer is None]
            if all(t.name in self.suspect.names for t in outside):
                self._outer = model_maps(self.layout, *load(outside), "every", self.residual)
            else:
                self._outer = {"model": self.residual, "|model|": AxisMap(self.residual.order)}
        maps: Maps = dict(self._outer)
        if tensors[0].layer is not None:
            ours, theirs = load(tensors)
            undone = undo(self.layout, tensors, ours, self._outer)
            maps = {**maps, **_permutations_only(layer_maps(self.layout, tensors, undone, theirs, "every"))}
        return {t.name: (self.suspect.names[name_in_copy(t, maps)], tensor_map(self.layout, t, maps)) for t in tensors}

    def _nearness(self, tensors: Sequence[TensorLayout], maps: Mapping[str, tuple[str, TensorMap]]) -> float:
        """The median of the matrices' cosines with the base's, in these coordinates; of a slice of each."""
        cosines = []
        for tensor in tensors:
            if tensor.name not in maps:
                continue
            name, mapping = maps[tensor.name]
            clean, other = as_matrix(self.base.tensor(tensor.name)), as_matrix(self.suspect.checkpoint.tensor(name))
            if clean.shape[1] == 1 and len(tensors) > 1:
                continue  # norms are much alike in any order
            start, stop = row_slices([mapping], *clean.shape)[0]
            x = mapping.backward(mapping.take(other, start, stop).float().nan_to_num(0.0, 0.0, 0.0), start).flatten()
            y = clean[start:stop].float().flatten()
            norm = math.sqrt(float(x @ x) * float(y @ y))
            cosines.append(float(x @ y) / norm if norm else 0.0)
        return statistics.median(cosines) if cosines else 1.0


def _permutations_only(maps: Maps) -> Maps:
    """``maps`` without those whose order is none: of a model that has nothing to do with the base, the votes of heads
    on an order that they share may not agree on one."""
    return {
        axis: axis_map
        for axis, axis_map in maps.items()
        if isinstance(axis_map, tuple) or torch.equal(axis_map.order.sort().values, torch.arange(len(axis_map)))
    }


def _nearness_of(scored: tuple[float, object]) -> float:
    return scored[0] if not math.isnan(scored[0]) else -1.0


def find_residual(suspect: Suspect, base: Checkpoint, layout: Layout) -> AxisMap:
    """The order and the signs in which the suspect has the base's model dimension."""
    embeddings = [t for t in layout.parameters if t.axes[0] in EMBEDDING and t.axes[1:] == (("model",),)]
    tensors = [t for t in embeddings if t.name in suspect.names][:1]
    if not tensors:
        raise MpuError(f"{suspect.source}: has no embedding, by which its coordinates could be found")
    theirs = {t.name: base.tensor(t.name) for t in tensors}
    ours = {name: suspect.tensor(name, like) for name, like in theirs.items()}
    return residual_map(layout, ours, theirs, "every")


def count_agreements(actual: AxisMap, drawn: AxisMap) -> int:
    """How many coordinates two maps of one axis send to the same place with the same sign."""
    same = actual.order == drawn.order
    signs = [torch.ones(len(each)) if each.signs is None else each.signs for each in (actual, drawn)]
    return int((same & (signs[0][actual.order] == signs[1][drawn.order])).sum())


def log_chance(agreements: int, *, signed: bool) -> float:
    """The logarithm of a bound on the probability that a uniform (signed) permutation agrees with a map that does not
    depend on it in at least so many places: each choice of k places agrees with probability (n − k)!/n!, halved for
    each sign, and there are n!/(k!·(n − k)!) of them, so the bound is 1/k!, or 1/(2ᵏ·k!)."""
    return -math.lgamma(agreements + 1) - (agreements * math.log(2) if signed else 0.0)
