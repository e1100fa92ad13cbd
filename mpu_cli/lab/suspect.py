"""A model of unknown origin: which of its tensors are which of a base's, and in which coordinates they are.

A turn of the residual stream, another order of the tokens, and added tokens, neurons or coordinates are undone first.
Coordinates are tried, the surest first: those of a copy whose order of the model dimension the suspect has, the base's
own, and those that aligning the suspect to the base finds (``lab.alignment``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import torch
from scipy.optimize import linear_sum_assignment

from mpu_cli.errors import MpuError
from mpu_cli.files.reader import FLOATS, Checkpoint, TensorInfo, open_checkpoint
from mpu_cli.lab.alignment import (
    MODEL,
    VOCABULARY,
    cosines,
    embedding_of,
    layer_maps,
    model_maps,
    procrustes,
    residual_map,
    signs_of,
    undo,
)
from mpu_cli.model.family import FFN_AXES, UNION
from mpu_cli.model.layout import EMBEDDING, Layout, TensorLayout
from mpu_cli.model.sampling import AxisMap, Maps
from mpu_cli.model.source import locate
from mpu_cli.model.staging import is_adapter
from mpu_cli.model.transform import TensorMap, Transform, as_matrix, name_in_copy, row_slices, tensor_map
from mpu_cli.protocol.watermarks import clip, median_size

# A suspect whose weights were changed for nothing: turned, its tokens reordered, tokens or neurons added.
#
# A model computes the same in any orthogonal basis of its residual stream once the gains of its norms are multiplied
# into what reads them, with its vocabulary in any order (and a tokenizer that knows it), and with neurons that
# nothing reads. All of that is undone here by comparison with the base alone, so what is found says nothing of a
# publication's secrets and z stays standard normal for a model that was made from none.
#
# Turn and order are found together: principal axes of both embeddings, with signs by their third moments, give a
# first match of the tokens; then tokens are matched by nearest neighbours and the turn by orthogonal Procrustes, in
# turns.

FITS, SUREST = 0.5, 0.9  # median cosine of the embedding's rows with the base's from which a turn counts as found
LOUD = 3.0  # times the median length, from which a row is left out of what is fitted to all of them
REFITS, UNLIKE = 2, 0.5  # fits without the rows whose cosine is below this share of the median one
ALIGNED_ENTRY = 0.9  # entry of a turn from which a coordinate counts as one of the base's
PRINCIPAL, PASSES, SAMPLE = 16, 6, 4096  # axes of the first match; passes, each over so many tokens
NEIGHBOUR_ROWS = 1024  # rows whose nearest neighbours are looked for at once
NEURONS = {*FFN_AXES, *(f"s-{axis}" for axis in FFN_AXES)}


@dataclass
class StraightenedCheckpoint:
    """The tensors of a suspect in the shapes and the basis of a base, made anew each time one is requested.

    ``could_be`` says for which tensors that is possible.
    """

    suspect: Checkpoint
    base: Checkpoint
    names: Mapping[str, TensorLayout]  # layouts of the base's tensors, by their names in the suspect
    turn: torch.Tensor | None  # (suspect's model dimension, base's); None for the identity
    # each base token's number in the suspect, −1 if it is missing; None if all have their places
    tokens: torch.Tensor | None
    # the same for axes of FFNs, by layer and axis
    neurons: dict[tuple[int | None, str], torch.Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.suspect.tensors

    def forget_pages(self, name: str) -> None:
        self.suspect.forget_pages(name)

    def tensor(self, name: str) -> torch.Tensor:
        """The suspect's tensor ``name``, float32, in the shape of the base's. Where the residual stream was turned, the
        gains of norms lie in what reads them: its columns get the base's norms, and the gains are the base's."""
        layout = self.names[name]
        base = self.base.tensor(layout.name)
        if self.turn is not None and base.ndim == 1 and "model" in layout.axes[0][0]:
            return base.float()
        x = self._in_shape(name, layout, base)
        for dimension, axis in enumerate(layout.axes):
            if axis == MODEL and self.turn is not None and VOCABULARY not in layout.axes:
                x = x * _norms_over(base.float(), dimension) / _norms_over(x, dimension).clamp(min=1e-30)
        return x

    def could_be(self, name: str) -> bool:
        """Whether tensor ``name`` has the base's shape once all is undone."""
        layout = self.names[name]
        shape, expected = self.suspect.tensors[name].shape, self.base.tensors[layout.name].shape
        return len(shape) == len(expected) and all(
            length == wanted or self._is_undone(layout, axis)
            for length, wanted, axis in zip(shape, expected, layout.axes, strict=True)
        )

    def _is_undone(self, layout: TensorLayout, axis: tuple[str, ...]) -> bool:
        if axis == MODEL:
            return self.turn is not None
        if axis == VOCABULARY:
            return self.tokens is not None
        return len(axis) == 1 and (layout.layer, axis[0]) in self.neurons

    def _in_shape(self, name: str, layout: TensorLayout, base: torch.Tensor) -> torch.Tensor:
        x = self.suspect.tensor(name).float().nan_to_num(0.0, 0.0, 0.0)
        for dimension, axis in enumerate(layout.axes):
            if axis == MODEL and self.turn is not None:
                x = torch.tensordot(x, self.turn, ([dimension], [0])).movedim(-1, dimension)
        for dimension, axis in enumerate(layout.axes):
            chosen = self.tokens if axis == VOCABULARY else self.neurons.get((layout.layer, axis[0]))
            if chosen is not None:
                x = x.index_select(dimension, chosen.clamp(min=0))
                missing = (chosen < 0).nonzero()[:, 0]
                if len(missing) and x.shape == base.shape:
                    x = x.index_copy(dimension, missing, base.index_select(dimension, missing).to(x.dtype))
        return x


def _norms_over(x: torch.Tensor, dimension: int) -> torch.Tensor:
    """The norm of each slice across ``dimension`` with its tails clipped, shaped to multiply."""
    x = clip(x)
    others = [other for other in range(x.ndim) if other != dimension]
    return torch.linalg.vector_norm(x, dim=others, keepdim=True) if others else x.abs()


def straighten(
    suspect: Checkpoint, base: Checkpoint, layout: Layout, names: Mapping[str, str]
) -> StraightenedCheckpoint | None:
    """``suspect`` in the basis of ``base``, or None if the tokens of both do not fit in any basis.

    ``names``: of the suspect's tensors, by the base's names. A turn that is a signed permutation is left in, since it
    may be that of a copy.
    """
    embedding = embedding_of(layout, names, [VOCABULARY])
    if embedding is None:
        return None
    suspect_embedding = suspect.tensor(names[embedding.name]).float()
    base_embedding = base.tensor(embedding.name).float()
    fit = _turn_and_tokens(suspect_embedding.nan_to_num(0.0, 0.0, 0.0), base_embedding)
    if fit is None:
        return None
    turn, tokens = fit
    square = turn.shape[0] == turn.shape[1]
    is_signed_permutation = square and float((turn.abs().amax(1) > ALIGNED_ENTRY).float().mean()) > ALIGNED_ENTRY
    by_name = {names[t.name]: t for t in layout.parameters if t.name in names}
    straightened = StraightenedCheckpoint(suspect, base, by_name, turn, tokens)
    _find_neurons(straightened)
    if is_signed_permutation:
        straightened.turn = None
    return straightened


def _turn_and_tokens(
    embedding: torch.Tensor, base_embedding: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The turn of ``embedding`` that gives ``base_embedding``, and each token's row there; None for the rows if all
    tokens have their places. None if nothing fits."""
    both = min(len(embedding), len(base_embedding))
    turn = turn_between(embedding[:both], base_embedding[:both])
    if median_cosine(embedding[:both] @ turn, base_embedding[:both]) >= _enough(both, len(turn)):
        if len(embedding) == len(base_embedding):
            return turn, None
        return turn, torch.cat([torch.arange(both), torch.full((len(base_embedding) - both,), -1)])
    step = max(1, len(base_embedding) // SAMPLE)
    sample = base_embedding[::step]
    # Directions alone are another first match: of lengths, tokens that nothing uses may have any.
    for prepare in (torch.nn.Identity(), torch.nn.functional.normalize):
        tokens = _nearest(_principal(prepare(base_embedding))[::step], _principal(prepare(embedding)))
        for _ in range(PASSES):
            turn = turn_between(embedding[tokens], sample)
            tokens = _nearest(sample, embedding @ turn)
        if median_cosine((embedding @ turn)[tokens], sample) >= _enough(len(sample), len(turn)):
            return turn, _nearest(base_embedding, embedding @ turn)
    return None


def _enough(rows: int, width: int) -> float:
    """The median cosine from which a turn fitted to so many ``rows`` counts as found: FITS above that of unrelated
    ones, which is about √(width/rows)."""
    return min(FITS + math.sqrt(width / rows), SUREST)


def turn_between(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The matrix with orthonormal columns or rows that brings the rows of ``x``, (n, d), closest to those of ``y``.

    Rows that are far longer than others are left out, then those that fit far worse than most: tokens that nothing uses
    may be anything, and whoever changed a model chose them.
    """
    quiet = _quiet(x) & _quiet(y)
    x, y = x[quiet], y[quiet]
    turn = procrustes(x.T @ y).float()
    for _ in range(REFITS):
        fit = torch.nn.functional.cosine_similarity(x @ turn, y, dim=1)
        like = fit >= UNLIKE * fit.median()
        turn = procrustes(x[like].T @ y[like]).float()
    return turn


def median_cosine(x: torch.Tensor, y: torch.Tensor) -> float:
    """The median of the cosines between the rows of ``x`` and ``y``, less the mean of each, which all rows share."""
    x, y = (rows - rows[_quiet(rows)].mean(0) for rows in (x, y))
    return float(torch.nn.functional.cosine_similarity(x, y, dim=1).median())


def _quiet(rows: torch.Tensor) -> torch.Tensor:
    """A mask of the rows that are not far longer than most that are not 0."""
    lengths = torch.linalg.vector_norm(rows, dim=1)
    positive = lengths[lengths > 0]
    return lengths <= LOUD * positive.median() if len(positive) else lengths == 0


def _principal(embedding: torch.Tensor) -> torch.Tensor:
    """The rows' coordinates in their first principal axes, signed so that the third moment of each is positive."""
    quiet = _quiet(embedding)
    mean = embedding[quiet].mean(0)
    centred = embedding[quiet] - mean
    axes = torch.linalg.eigh((centred.T @ centred).double()).eigenvectors.flip(1)[:, :PRINCIPAL].float()
    return ((embedding - mean) @ axes) * (centred @ axes).pow(3).mean(0).sign()


def _nearest(rows: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """For each of ``rows`` the number of the row ``among`` with the largest cosine."""
    return torch.cat([cosines(part, among).argmax(1) for part in rows.split(NEIGHBOUR_ROWS)])


def _find_neurons(straightened: StraightenedCheckpoint) -> None:
    """Find for each of the base's neurons the suspect's that is most like it, where their numbers differ.

    Neurons are alike if their weights in all tensors of the layer are parallel, whatever their sizes.
    """
    similarities: dict[tuple[int | None, str], torch.Tensor] = {}
    for name, tensor in straightened.names.items():
        shape, expected = straightened.tensors[name].shape, straightened.base.tensors[tensor.name].shape
        if not len(shape) == len(expected) == 2:
            continue
        for dimension, axis in enumerate(tensor.axes):
            if len(axis) > 1 or axis[0] not in NEURONS or shape[dimension] == expected[dimension]:
                continue
            base = straightened.base.tensor(tensor.name).float()
            x = straightened._in_shape(name, tensor, base)
            similarity = cosines(base.movedim(dimension, 0), x.movedim(dimension, 0)).abs()
            similarities[tensor.layer, axis[0]] = similarities.get((tensor.layer, axis[0]), 0.0) + similarity
    for axis_of_layer, similarity in similarities.items():
        straightened.neurons[axis_of_layer] = similarity.argmax(1)


CLIP = 4.0  # times the RMS of the base's weights, beyond which those of a suspect are clipped to align them
LARGEST = 1000.0  # times that, beyond which nothing is a weight
EQUILIBRATIONS, COMPARED = 3, 4  # rounds of scaling rows and columns; slices of a matrix that are compared
ALIGNED = 0.5  # cosine with the base above which a matrix counts as lying in its coordinates
MIN_IMPROVEMENT = 0.1  # by which another turn than a signed permutation has to bring the tokens closer
MODEL_AXES = (MODEL, ("|model|",))


def open_suspect(source: str) -> Checkpoint:
    """The weights of a suspect: a file, a directory, a sharded index or a Hub id; its config is not read."""
    path = locate(source)
    if is_adapter(path):
        raise MpuError(f"{path}: a peft adapter, not a model", "merge it into its model with peft (merge_and_unload)")
    return open_checkpoint(path, links=False)


def in_scale_of(like: torch.Tensor, x: torch.Tensor, tails: float) -> torch.Tensor:
    """``x``, float32, with the median size of ``like``, and clipped beyond ``tails`` times the RMS of that."""
    size, wanted = median_size(x.nan_to_num(0.0, 0.0, 0.0)), median_size(like)
    if not size or not wanted:
        return x.nan_to_num(0.0, 0.0, 0.0)
    bound = tails * float(like.square().mean().sqrt())
    return (x * (wanted / size)).nan_to_num(0.0, bound, -bound).clamp(-bound, bound)


def equilibrated(x: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows, and then columns, have the same size, with its tails clipped: the same even if someone
    scaled what some neurons, heads or norms give, and what reads them by the inverse."""
    x = clip(x)
    for _ in range(EQUILIBRATIONS if min(x.shape) > 1 else 0):
        for dimension in (1, 0):
            x = x / _norms_over(x, 1 - dimension).clamp(min=1e-30)
    return x


@dataclass(frozen=True)
class Suspect:
    """A checkpoint, and its names for the tensors of a base: ``names``, by the base's names, without those that it
    lacks."""

    source: str
    checkpoint: Checkpoint | StraightenedCheckpoint
    names: Mapping[str, str]

    def tensor(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The suspect's tensor for the base's ``name``, float32, to align it by: as large as the base's tensor,
        ``like``, at the median, because a model may be rescaled block by block; weights that are not finite, or far
        larger, are clipped, or they alone would decide. Raises KeyError if it lacks it."""
        return in_scale_of(like.float(), self.checkpoint.tensor(self.names[name]).float(), CLIP)


def match_suspect(source: str, checkpoint: Checkpoint, base: Checkpoint, layout: Layout) -> Suspect:
    """The suspect with the names of the base's tensors, if both have as many layers; else see ``match_layers``."""
    prefix = layout.family.prefix
    without_prefix = {name.removeprefix(prefix): name for name in checkpoint.tensors}
    names = {}
    for tensor in layout.parameters:
        in_either_form = without_prefix.get(tensor.name.removeprefix(prefix))
        stored_name = tensor.name if tensor.name in checkpoint.tensors else in_either_form
        if stored_name is None and tensor.axes[0] == VOCABULARY:  # an embedding that is stored as the head tied to it
            heads = [head for head in layout.family.heads if head not in layout.tensors]
            stored_name = next((head for head in heads if head in checkpoint.tensors), None)
        if stored_name is None:
            continue
        dtype = checkpoint.tensors[stored_name].dtype
        if dtype not in FLOATS:
            raise MpuError(f"{source}: {stored_name!r} is stored as {dtype}", "dequantise the model first")
        names[tensor.name] = stored_name
    if not any(layout.tensors[name].axes[0] in EMBEDDING for name in names) or len(names) < 2:
        raise MpuError(f"{source}: has none of the tensors of {base.path}, so it has another architecture")
    return _straightened(Suspect(source, checkpoint, names), base, layout)


def _straightened(suspect: Suspect, base: Checkpoint, layout: Layout) -> Suspect:
    """``suspect`` in the basis of ``base`` if it is in another; without the tensors that cannot be brought there."""
    names, tensors = suspect.names, suspect.checkpoint.tensors
    unlike = [name for name, stored_name in names.items() if tensors[stored_name].shape != base.tensors[name].shape]
    if not unlike and _fits(suspect, base, layout):
        return suspect
    assert isinstance(suspect.checkpoint, Checkpoint)
    straightened = straighten(suspect.checkpoint, base, layout, names)
    if straightened is not None:
        within = {name: stored_name for name, stored_name in names.items() if straightened.could_be(stored_name)}
        return Suspect(suspect.source, straightened, within)
    if unlike:
        stored_name = names[unlike[0]]
        raise MpuError(
            f"{suspect.source}: {stored_name!r} has shape {list(tensors[stored_name].shape)}, but "
            f"{list(base.tensors[unlike[0]].shape)} in {base.path}, and its tokens are not the base's: another "
            "architecture or vocabulary"
        )
    return suspect


def _fits(suspect: Suspect, base: Checkpoint, layout: Layout) -> bool:
    """Whether the suspect's tokens are the base's up to the order and the signs of the model dimension, and no other
    turn brings them closer."""
    embedding = embedding_of(layout, suspect.names, [VOCABULARY])
    if embedding is None:
        return True
    base_embedding = base.tensor(embedding.name).float()
    suspect_embedding = suspect.tensor(embedding.name, base_embedding)
    maps: Maps = {"model": find_residual(suspect, base, layout)}
    undone = undo(layout, [embedding], {embedding.name: suspect_embedding}, maps)[embedding.name]
    fit = median_cosine(undone, base_embedding)
    if fit < FITS or fit + MIN_IMPROVEMENT >= 1:
        return fit >= FITS
    return median_cosine(undone @ turn_between(undone, base_embedding), base_embedding) < fit + MIN_IMPROVEMENT


def match_layers(suspect: Suspect, base: Checkpoint, layout: Layout, residual: AxisMap) -> Suspect:
    """``suspect`` with each of its layers matched to the layer of the base that is most like it, if it has fewer.

    It compares the norms of all weights at each coordinate of the model dimension, which no symmetry inside a layer
    changes. ``residual``: the map of that dimension.
    """
    layers: dict[int, list[TensorLayout]] = {}
    for tensor in layout.parameters:
        if tensor.layer is not None:
            layers.setdefault(tensor.layer, []).append(tensor)
    complete = [i for i, tensors in layers.items() if all(tensor.name in suspect.names for tensor in tensors)]
    if not complete or len(complete) == len(layers):
        return suspect
    kinds: dict[object, list[int]] = {}
    for i, tensors in layers.items():
        kinds.setdefault(tuple(tensor.axes for tensor in tensors), []).append(i)
    names = {name: stored_name for name, stored_name in suspect.names.items() if layout.tensors[name].layer is None}
    for bases in kinds.values():
        suspects = [i for i in bases if i in complete]
        pairs = _likest(suspect, base, layers, residual=residual, suspects=suspects, bases=bases) if suspects else []
        for from_layer, to_layer in pairs:
            names |= {t.name: suspect.names[s.name] for s, t in zip(layers[from_layer], layers[to_layer], strict=True)}
    return Suspect(suspect.source, suspect.checkpoint, names)


def _likest(
    suspect: Suspect, base: Checkpoint, layers: Mapping[int, Sequence[TensorLayout]], *, residual: AxisMap,
    suspects: Sequence[int], bases: Sequence[int],
) -> list[tuple[int, int]]:  # fmt: skip
    """Pairs of a layer of the suspect and the base's that is most like it, all with the same axes."""
    base_profiles = torch.stack([_profile([base.tensor(t.name) for t in layers[i]], layers[i]) for i in bases])
    of_suspects = []
    for i in suspects:
        weights = [suspect.tensor(t.name, base.tensor(t.name)) for t in layers[i]]
        of_suspects.append(_profile(weights, layers[i]).view(-1, len(residual))[:, residual.places].flatten())
    suspect_profiles = torch.stack(of_suspects)
    mean = base_profiles.mean(0)  # what all layers have in common
    profiles = torch.cat([suspect_profiles - mean, base_profiles - mean])
    similarity = torch.corrcoef(profiles)[: len(suspects), len(suspects) :]
    rows, columns = linear_sum_assignment(similarity.nan_to_num(-1).numpy(), maximize=True)
    return [(suspects[row], bases[column]) for row, column in zip(rows.tolist(), columns.tolist(), strict=True)]


def _profile(weights: Sequence[torch.Tensor], tensors: Sequence[TensorLayout]) -> torch.Tensor:
    """The norm of a layer's weights at each coordinate of the model dimension, one tensor after the other."""
    parts = []
    for matrix, tensor in zip(weights, tensors, strict=True):
        for dimension, group in enumerate(tensor.axes):
            if group in MODEL_AXES:
                rows = matrix.float().movedim(dimension, 0)
                parts.append(torch.linalg.vector_norm(rows.reshape(len(rows), -1), dim=1))
    return torch.cat(parts)


Frame = Mapping[str, tuple[str, TensorMap]]  # by the base's names: the name in the suspect, and the map to undo


@dataclass
class Frames:
    """The coordinates of a suspect, tensor by tensor, with respect to a ``base`` with this ``layout``."""

    suspect: Suspect
    base: Checkpoint
    layout: Layout
    residual: AxisMap
    transforms: Sequence[Transform]  # of the copies whose coordinates it may be in, likeliest first
    _outer: dict[str, AxisMap] = field(default_factory=dict)

    def of_block(self, tensors: Sequence[TensorLayout]) -> Frame:
        """The coordinates of those tensors of a block that the suspect has."""
        present = [tensor for tensor in tensors if tensor.name in self.suspect.names and not tensor.constant]
        if not present:
            return {}
        candidates = [self._by_transform(transform, present) for transform in self.transforms]
        candidates.append({t.name: (self.suspect.names[t.name], TensorMap(None, None)) for t in present})
        nearness, frame = max(((self._nearness(present, f), f) for f in candidates if f), key=itemgetter(0))
        complete = len(present) == len([tensor for tensor in tensors if not tensor.constant])
        if nearness < ALIGNED and complete:
            aligned = self._by_alignment(present)
            frame = aligned if self._nearness(present, aligned) >= nearness else frame
        return frame

    def _by_transform(self, transform: Transform, tensors: Sequence[TensorLayout]) -> Frame:
        maps = {}
        for tensor in tensors:
            moved_name = transform.name(tensor)  # an expert's matrices carry the number of its new place
            if moved_name in self.suspect.names:
                maps[tensor.name] = (self.suspect.names[moved_name], transform.of(tensor))
        return maps

    def _by_alignment(self, tensors: Sequence[TensorLayout]) -> Frame:
        def load(block: Sequence[TensorLayout]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
            base_weights = {t.name: self.base.tensor(t.name).float() for t in block}
            return {name: self.suspect.tensor(name, like) for name, like in base_weights.items()}, base_weights

        if not self._outer:
            outside = [t for t in self.layout.parameters if t.layer is None]
            if all(t.name in self.suspect.names for t in outside):
                self._outer = model_maps(self.layout, *load(outside), UNION, self.residual)
            else:
                self._outer = {"model": self.residual, "|model|": AxisMap(self.residual.order)}
        maps: Maps = dict(self._outer)
        if tensors[0].layer is not None:
            suspect_weights, base_weights = load(tensors)
            undone = undo(self.layout, tensors, suspect_weights, self._outer)
            maps = {**maps, **_permutations_only(layer_maps(self.layout, tensors, undone, base_weights, UNION))}
        return {t.name: (self.suspect.names[name_in_copy(t, maps)], tensor_map(self.layout, t, maps)) for t in tensors}

    def _nearness(self, tensors: Sequence[TensorLayout], frame: Frame) -> float:
        """The median of the matrices' cosines with the base's, in these coordinates; of some slices of each."""
        cosines = []
        for tensor in tensors:
            if tensor.name not in frame:
                continue
            name, mapping = frame[tensor.name]
            clean, other = as_matrix(self.base.tensor(tensor.name)), as_matrix(self.suspect.checkpoint.tensor(name))
            if clean.shape[1] == 1 and len(tensors) > 1:
                continue  # norms are much alike in any order
            slices = row_slices([mapping], *clean.shape)
            for start, stop in slices[:: max(1, len(slices) // COMPARED)]:
                y = clean[start:stop].float()
                rows = in_scale_of(y, mapping.take(other, start, stop).float(), LARGEST)
                x, y = equilibrated(mapping.backward(rows, start)).flatten(), equilibrated(y).flatten()
                cosines.append(float(torch.nn.functional.cosine_similarity(x, y, dim=0).nan_to_num(-1.0)))
        return statistics.median(cosines) if cosines else 1.0


def _permutations_only(maps: Maps) -> Maps:
    """``maps`` without those whose order is not a permutation: in a model that has nothing to do with the base, heads
    that share an order may not agree on one."""
    return {
        axis: axis_map
        for axis, axis_map in maps.items()
        if isinstance(axis_map, tuple) or torch.equal(axis_map.order.sort().values, torch.arange(len(axis_map)))
    }


def find_residual(suspect: Suspect, base: Checkpoint, layout: Layout) -> AxisMap:
    """The order and the signs in which the suspect has the base's model dimension."""
    embedding = embedding_of(layout, suspect.names)
    if embedding is None:
        raise MpuError(f"{suspect.source}: has no embedding, by which its coordinates could be found")
    base_weights = base.tensor(embedding.name)
    suspect_weights = suspect.tensor(embedding.name, base_weights)
    return residual_map(layout, {embedding.name: suspect_weights}, {embedding.name: base_weights}, UNION)


def count_agreements(actual: AxisMap, drawn: AxisMap) -> int:
    """The number of coordinates that two maps of one axis send to the same place with the same sign."""
    same_sign = signs_of(actual)[actual.order] == signs_of(drawn)[drawn.order]
    return int(((actual.order == drawn.order) & same_sign).sum())


def log_chance(agreements: int, *, signed: bool) -> float:
    """The logarithm of a bound on the probability that a uniform (signed) permutation agrees with a map that does not
    depend on it in at least so many places: each choice of k places agrees with probability (n − k)!/n!, halved for
    each sign, and there are n!/(k!·(n − k)!) of them, so the bound is 1/k!, or 1/(2ᵏ·k!)."""
    return -math.lgamma(agreements + 1) - (agreements * math.log(2) if signed else 0.0)
