"""The copy that a model came from: evidence in its coordinates and in the noise that is left in it, with p-values.

A publication's seed is secret, so a model that was not made from its copies is independent of it. Two statistics
follow, whose distributions under that hypothesis do not depend on the model:

- *Coordinates.* The order and the signs in which the model has the base's model dimension, found by alignment, agree
  with a copy's secret ones in at least k places with a probability of at most 1/(2ᵏ·k!) (``suspect.log_chance``).
- *Noise.* r is what is left of the difference between the model and the base, a slice of weights after the other, once
  the base, permanent noise and the public model are regressed out of it and its tails are clipped. The noise n of a
  copy, or a publication's watermark, was drawn from independent standard normals, so z = Σ w⟨r, n⟩ / √(Σ w²‖r‖²‖t‖²) is
  standard normal given r, whatever r is; t is how n is mixed from its draws, and w = a/mean(r²) gives weights that were
  changed less more say. a is how much the slice has of the base's: whoever leaks a copy chooses its scale, so that
  shares of the noise are relative to it.

All tests together are corrected by Bonferroni's inequality. Models are read in slices, the base once more before, for
its fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from scipy import stats
from transformers import PreTrainedModel

from mpu_cli.errors import MpuError
from mpu_cli.files.reader import worker_pool
from mpu_cli.lab.endpoint import Endpoint
from mpu_cli.lab.suspect import (
    LARGEST,
    Frames,
    Suspect,
    count_agreements,
    equilibrated,
    find_residual,
    in_scale_of,
    log_chance,
    match_layers,
    match_suspect,
    open_suspect,
)
from mpu_cli.measuring.encoding import Item, TrainedEncoder
from mpu_cli.model.layout import Layout, TensorLayout
from mpu_cli.model.load import tokenizer_of
from mpu_cli.model.network import build, config_of
from mpu_cli.model.sampling import AxisMap
from mpu_cli.model.source import Model
from mpu_cli.model.tensors import in_memory, pieces_in_files
from mpu_cli.model.transform import TensorMap, as_matrix, row_slices
from mpu_cli.observer import SILENT, Observer
from mpu_cli.protocol.deltas import check_base
from mpu_cli.protocol.keys import Keys
from mpu_cli.protocol.noise import Noise, Scales
from mpu_cli.protocol.publication import matching
from mpu_cli.protocol.watermarks import clip, without
from mpu_cli.records.encode import Encoding
from mpu_cli.records.read import read_records

# The findings of a trace, for each publication and copy, and who is named by it.

LEVEL = 1e-6  # a copy is named if its p-value, corrected for all tests, is below this
LEAST_SHARE = 0.02  # of the noise in a mixture of fifty copies; a model with less is not said to be made from it
SAME_SHARE = 0.1  # relative difference of two shares up to which they count as equal
SAME_Z = 1 - 1e-6  # of another z, above which two noises are multiples of one draw


@dataclass(frozen=True)
class NoiseEvidence:
    """The correlation with one noise: ``z``, standard normal unless the model was made with it; ``share``: how much of
    the noise is in the model, 1 if all of it is; ``blocks``: z of each block. NaN where there was nothing to test."""

    z: float
    share: float
    blocks: Mapping[str, float]

    @property
    def log_p(self) -> float:
        """The logarithm of the one-sided p-value; 0, for 1, where there was nothing to test."""
        return 0.0 if math.isnan(self.z) else float(stats.norm.logsf(self.z))

    @property
    def log_p_as_source(self) -> float:
        """``log_p`` if there is as much of the noise as the model has of a copy that it was made from; else 0."""
        return 0.0 if self.share < LEAST_SHARE else self.log_p

    @property
    def log_p_of_size(self) -> float:
        """The logarithm of the two-sided p-value."""
        return 0.0 if math.isnan(self.z) else min(0.0, math.log(2) + float(stats.norm.logsf(abs(self.z))))


@dataclass(frozen=True)
class CopyEvidence:
    """The evidence that a model was made from one copy.

    ``agreements`` counts, of ``coordinates`` places of the model dimension, those at which the model has the copy's
    secret order and signs.
    """

    copy: int
    recipient: str | None  # whom the copy was sealed for, if the keys know that
    agreements: int | None = None  # None if the copy's coordinates are the base's
    coordinates: int = 0
    signed: bool = False
    noise: NoiseEvidence | None = None  # of the copy's noise that cancels; None if it has none

    @property
    def log_p_coordinates(self) -> float:
        return 0.0 if self.agreements is None else log_chance(self.agreements, signed=self.signed)


@dataclass(frozen=True)
class PublicationEvidence:
    """The evidence that a model was made from the copies of one publication. ``label``: its keys' name; ``watermark``:
    the evidence of the watermark, None if it has none."""

    label: str
    keys: Keys
    watermark: NoiseEvidence | None
    copies: tuple[CopyEvidence, ...]
    tensors: int
    total_tensors: int

    @cached_property
    def log_p_values(self) -> list[float]:
        values = [copy.log_p_coordinates for copy in self.copies if copy.agreements is not None]
        return values + [noise.log_p_as_source for noise in self.noises]

    @property
    def noises(self) -> list[NoiseEvidence]:
        """The evidence of the watermark, and of each copy's own noise."""
        return ([self.watermark] if self.watermark else []) + [copy.noise for copy in self.copies if copy.noise]


@dataclass(frozen=True)
class Trace:
    """All evidence. A copy or a publication is *named* if a test of it has a corrected p-value below ``LEVEL``, which
    happens to a model that was made from none with at most that probability."""

    suspect: str
    publications: tuple[PublicationEvidence, ...]

    @cached_property
    def tests(self) -> int:
        return sum(len(publication.log_p_values) for publication in self.publications)

    def log10_p(self, log_p: float) -> float:
        """log₁₀ of a p-value, corrected for all tests."""
        return min(0.0, log_p + math.log(max(1, self.tests))) / math.log(10)

    def is_significant(self, log_p: float) -> bool:
        return self.log10_p(log_p) < math.log10(LEVEL)

    def is_named(self, publication: PublicationEvidence) -> bool:
        return any(self.is_significant(log_p) for log_p in publication.log_p_values)

    def unexplained(self, publication: PublicationEvidence) -> NoiseEvidence | None:
        """The surest noise that chance does not explain in a model not said to be made from this publication."""
        surest = min(publication.noises, key=lambda noise: noise.log_p_of_size, default=None)
        if surest is None or self.is_named(publication) or not self.is_significant(surest.log_p_of_size):
            return None
        return surest

    def named_copies(self, publication: PublicationEvidence) -> list[CopyEvidence]:
        """The copies whose coordinates the model has; else the copy whose noise it has, to the right amount.

        The noise of several copies may be multiples of one draw. It is the copy's if there is as much of it as of the
        watermark, which all copies have alike; where no amount is known, all of these copies are named. Empty if only
        the watermark is found, or if a mixture of other copies could have as much: of three and more multiples of one
        draw it can.
        """
        if len(publication.copies) == 1 and self.is_named(publication):
            return [publication.copies[0]]
        by_coordinates = [copy for copy in publication.copies if self.is_significant(copy.log_p_coordinates)]
        if by_coordinates:
            return by_coordinates
        if publication.keys.publication.scheme.one_draw and len(publication.copies) > 2:
            return []
        by_noise = [
            (copy, copy.noise)
            for copy in publication.copies
            if copy.noise and self.is_significant(copy.noise.log_p_as_source)
        ]
        if not by_noise:
            return []
        if any(math.isnan(noise.share) for _, noise in by_noise):
            largest = max(noise.z for _, noise in by_noise)
            return [copy for copy, noise in by_noise if noise.z > SAME_Z * largest]
        watermark = publication.watermark
        if watermark and not self.is_significant(watermark.log_p_as_source):
            watermark = None
        expected = watermark.share if watermark else 1.0
        deviations = [(abs(noise.share / expected - 1), copy) for copy, noise in by_noise]
        smallest = min(deviation for deviation, _ in deviations)
        if watermark and smallest >= SAME_SHARE:
            return []
        return [copy for deviation, copy in deviations if deviation == smallest]


# The noise of a publication as a trace looks for it, and the sums from which z follows.


@dataclass(frozen=True)
class PublicationKeys:
    """A publication to try: the name of its keys' file, the keys, and the model that was published."""

    label: str
    keys: Keys
    base: Model


# Of the watermark (row 0) and of each copy's noise: Σ w⟨r, n⟩, Σ w²‖r‖²‖t‖² and Σ w·‖t‖²·(number of weights), float64.
Sums = torch.Tensor


def noise_evidence(sums: Mapping[str, Sums], row: int) -> NoiseEvidence:
    """The evidence of one noise from the sums of each block."""
    total = sum((block_sums[row] for block_sums in sums.values()), torch.zeros(3, dtype=torch.float64))
    products, variance, gain = total.tolist()
    by_block = {block: _z(*block_sums[row, :2].tolist()) for block, block_sums in sums.items()}
    return NoiseEvidence(_z(products, variance), products / gain if gain else math.nan, by_block)


def _z(products: float, variance: float) -> float:
    return products / math.sqrt(variance) if variance > 0 else math.nan


def _evidence(
    publication: PublicationKeys, copies: Sequence[CopyEvidence], sums: Mapping[str, Sums], tensors: int
) -> PublicationEvidence:
    """The evidence of a publication: that of its copies' coordinates, and the noise that ``sums`` show."""
    keys = publication.keys
    if any(keys.sigma.values()):
        copies = [replace(copy, noise=noise_evidence(sums, copy.copy)) for copy in copies]
    watermark = noise_evidence(sums, 0) if keys.publication.watermark else None
    total = len(publication.base.layout.parameters)
    return PublicationEvidence(publication.label, keys, watermark, tuple(copies), tensors, total)


def noise_of(publication: PublicationKeys) -> Noise:
    """The noise of all copies of a publication."""
    values = publication.keys.publication
    return values.noise(range(1, values.copies + 1), publication.base.layout.full_name)


def templates_of(noise: Noise, scales: Scales) -> torch.Tensor:
    """The matrix from draws to the watermark (row 0) and the noise of each copy that cancels, float64 (noises, draws):
    the draws of what cancels come first, the watermark's last."""
    cancelling = noise.scaled_mixing(Scales(scales.cancelling)).double()
    templates = torch.zeros(len(cancelling) + 1, cancelling.shape[1] + 1, dtype=torch.float64)
    templates[1:, :-1], templates[0, -1] = cancelling, scales.watermark
    return templates


def sums_of(
    residual: torch.Tensor, draws: Sequence[torch.Tensor], templates: torch.Tensor, weight: float, unit: float = 1.0
) -> Sums:
    """The sums over some weights: ``residual``, float32 (n,), ``draws`` as ``templates`` mixes them; ``unit``: how much
    of the base there is, of which the noise is a share."""
    templates = unit * templates
    products = torch.stack([(residual * draw).double().sum() for draw in draws])
    square, norms = float(residual.double().square().sum()), templates.square().sum(1)
    parts = (weight * (templates @ products), weight**2 * square * norms, weight * residual.numel() * norms)
    return torch.stack(parts, 1)


RESCALED = 0.25  # of the squares that are left without scales, below which a slice counts as rescaled
LEAST_SCALED = 16  # rows and columns of a slice from which each may have a scale of its own


def _scaled_to(x: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """``x`` with rows and columns as large as those of ``base``."""
    ratio = equilibrated(base)
    return equilibrated(x) * (base / torch.where(ratio == 0, 1.0, ratio))


def trace(
    source: str,
    publications: Sequence[PublicationKeys],
    pretrained: Model | None = None,
    *,
    observer: Observer = SILENT,
) -> Trace:
    """Look for every copy of ``publications`` in the model at ``source``.

    ``pretrained``: the public model, which makes models between it and a copy easier to trace.
    """
    checkpoint = open_suspect(source)
    observer.stage("trace", sum(publication.base.checkpoint.nbytes for publication in publications))
    results = []
    matched: dict[tuple[str, str], tuple[Suspect, AxisMap]] = {}  # by the base's address and fingerprint
    with worker_pool() as pool:
        for publication in publications:
            base = publication.base
            identity = base.address, publication.keys.base.fingerprint
            if identity not in matched:
                check_base(base, publication.keys)
                suspect = match_suspect(source, checkpoint, base.checkpoint, base.layout)
                order = find_residual(suspect, base.checkpoint, base.layout)
                matched[identity] = match_layers(suspect, base.checkpoint, base.layout, order), order
            tracer = _Tracer(publication, *matched[identity], matching(base, pretrained), pool)
            results.append(tracer.evidence(observer))
    return Trace(source, tuple(results))


@dataclass
class _Tracer:
    """One publication in the weights of one suspect."""

    publication: PublicationKeys
    suspect: Suspect
    order: AxisMap  # of the model dimension in the suspect
    public: Mapping[str, torch.Tensor] | None
    pool: Executor

    @cached_property
    def noise(self) -> Noise:
        return noise_of(self.publication)

    def evidence(self, observer: Observer) -> PublicationEvidence:
        keys, layout, base = self.publication.keys, self.publication.base.layout, self.publication.base.checkpoint
        copies, likely_transforms = [], []
        for number in range(1, keys.copies + 1):
            transform = keys.publication.transform(number, layout)
            copy = CopyEvidence(number, keys.recipients.get(str(number)), coordinates=len(self.order))
            secret_order = transform.maps(layout.parameters[0]).get("model")
            if isinstance(secret_order, AxisMap):
                agreements = count_agreements(self.order, secret_order)
                copy = replace(copy, agreements=agreements, signed=secret_order.signs is not None)
            if copy.log_p_coordinates < math.log(LEVEL):
                likely_transforms.append(transform)
            copies.append(copy)
        frames = Frames(self.suspect, base, layout, self.order, likely_transforms)
        sums: dict[str, Sums] = {}
        for block, tensors in layout.blocks.items():
            for tensor in tensors:
                observer.advance(base.tensors[tensor.name].nbytes)
            scales = keys.scales(block)
            block_frames = frames.of_block(tensors) if scales.cancelling or scales.watermark else {}
            for tensor in tensors:
                if tensor.name in block_frames:
                    name, mapping = block_frames[tensor.name]
                    for part in self._slice_sums(tensor, name, mapping, scales):
                        sums[block] = sums.get(block, 0.0) + part
                    self.suspect.checkpoint.forget_pages(name)
                base.forget_pages(tensor.name)
        return _evidence(self.publication, copies, sums, len(self.suspect.names))

    def _slice_sums(self, tensor: TensorLayout, name: str, mapping: TensorMap, scales: Scales) -> list[Sums]:
        """The sums of each slice of one tensor."""
        base = as_matrix(self.publication.base.checkpoint.tensor(tensor.name))
        suspect = as_matrix(self.suspect.checkpoint.tensor(name))
        public = None if self.public is None else as_matrix(self.public[tensor.name])
        columns = base.shape[1]
        keys, templates = self.noise.subkeys(tensor.name, scales), templates_of(self.noise, scales)
        cancelling = templates.shape[1] - 1

        def work(start: int, stop: int) -> Sums:
            base_rows = base[start:stop].float()
            reference = base_rows.flatten()
            # In the base's scale, since whoever leaks a copy chooses another, and without what would hide the rest.
            rows = in_scale_of(reference, mapping.take(suspect, start, stop).float(), LARGEST)
            undone = mapping.backward(rows, start)
            draws = self.noise.draws(keys, start * columns, stop * columns, torch.float32)
            regressors = [reference]
            if scales.permanent:
                regressors.append(draws[cancelling])
            if public is not None:
                regressors.append(public[start:stop].float().flatten())
            known = torch.stack(regressors)
            candidates = [undone.flatten()]
            if min(undone.shape) >= LEAST_SCALED:  # where each row and each column may have been scaled
                candidates.append(_scaled_to(undone, base_rows).flatten())
            residuals = [clip(without(clip(candidate - reference), known)) for candidate in candidates]
            squares = [float(residual.double().square().sum()) for residual in residuals]
            # Scales of all rows and columns also fit some of the noise; those of a rescaled model fit far more.
            best = len(squares) - 1 if squares[-1] < RESCALED * squares[0] else 0
            residual, square, bulk = residuals[best], squares[best], clip(reference)
            if not square > 0 or not math.isfinite(square):
                return torch.zeros(len(templates), 3, dtype=torch.float64)
            length = float(torch.dot(bulk, bulk))
            unit = float(torch.dot(clip(candidates[best]), bulk)) / length if length else 1.0
            watermark = draws[-1] if scales.watermark else torch.zeros_like(residual)
            return sums_of(residual, [*draws[:cancelling], watermark], templates, residual.numel() / square, unit)

        return list(self.pool.map(lambda bounds: work(*bounds), row_slices([mapping], *base.shape)))


def check_traceable(keys: Keys, label: str) -> None:
    """Raise MpuError if nothing distinguishes the copies of a publication from other models."""
    publication = keys.publication
    if not publication.watermark and not any(keys.sigma.values()) and publication.symmetries == "none":
        raise MpuError(f"{label}: its copies have no watermark, no noise of their own and no secret coordinates")


# The copy that a model came from, if it is only served: the noise of a copy changes what the model computes.
#
# Let s be the log-probabilities that the served model gives to the tokens of some texts, and c those of the base with
# the publication's permanent noise. If the model came from a copy, s − c is about J·n, with n the copy's own noise
# (what cancels, and the watermark) and J the derivative of c by the weights. So the gradient g of Σ (s − c)·c, with s −
# c fixed, is correlated with n. Given g, which does not depend on a secret that the model was made without, Σ⟨f(g), n⟩
# is normal with variance Σ‖f(g)‖²‖t‖², whatever the model, the texts and f are: the same exact statistic as for weights
# (``trace``). It takes one pass forward and backward over the texts for each publication, and no copy is made again. f,
# the square root with its sign, element by element, gives a few weights with large gradients less say; s − c is divided
# by −c, because tokens that the model is sure of vary less from copy to copy. Then each token's mean is taken off, as
# input and as the one that is predicted: it comes from a few directions of the embedding, in which g would be so large
# that the others did not count.

TEXTS_PER_REQUEST = 4  # texts in a request
SURE_TOKEN_LOSS = 1e-3  # nats of a token below which all count as equally sure
UNMOVED = TensorMap(None, None)


def trace_endpoint(
    endpoint: Endpoint,
    publications: Sequence[PublicationKeys],
    texts: Path,
    *,
    observer: Observer = SILENT,
) -> Trace:
    """Look for the noise of every copy of ``publications`` in what the model at ``endpoint`` gives to ``texts``.

    ``texts``: a file of records; every token after the first is scored.
    """
    records = read_records(texts)
    results = []
    served: dict[str, list[torch.Tensor]] = {}
    observer.stage("trace", len(publications) * len(records), "texts")
    with worker_pool() as pool:
        for publication in publications:
            check_base(publication.base, publication.keys)
            encoder = TrainedEncoder(Encoding(tokenizer_of(publication.base)))
            items = [replace(item, start=1) for item in encoder.questions(records)]
            vocabulary = repr(items)
            if vocabulary not in served:
                scores = endpoint.score(items, batch_size=TEXTS_PER_REQUEST)
                served[vocabulary] = [-score.losses for score in scores]  # the log-probabilities of its tokens
            network = _noisy_network(publication, pool)
            gradients = _gradients(network, items, served[vocabulary], publication.base.layout, observer)
            results.append(_evidence_in_gradients(publication, gradients, pool))
    return Trace(endpoint.url, tuple(results))


def _noisy_network(publication: PublicationKeys, pool: Executor) -> PreTrainedModel:
    """The base with the publication's permanent noise, which every copy has, in float32."""
    base, layout = publication.base, publication.base.layout
    network = build(config_of(base.config), dtype=torch.float32).eval()
    places = in_memory(network, layout.tensors)
    noise = noise_of(publication)

    def add_noise(weights: torch.Tensor, subkeys: Sequence[bytes], scale: float, bounds: tuple[int, int]) -> None:
        start, stop = bounds
        [draw] = noise.draws(subkeys, start * weights.shape[1], stop * weights.shape[1], torch.float32)
        weights[start:stop].add_(draw.view(stop - start, -1), alpha=scale)

    with torch.no_grad():
        for tensor in layout.tensors.values():
            if tensor.constant and not any(tensor.axes):
                continue
            weights = as_matrix(base.checkpoint.tensor(tensor.name).to(torch.float32, copy=True))
            permanent = publication.keys.scales(tensor.block).permanent
            if permanent and not tensor.constant:
                subkeys = noise.subkeys(tensor.name, Scales(permanent=permanent))
                list(pool.map(partial(add_noise, weights, subkeys, permanent), row_slices([UNMOVED], *weights.shape)))
            places[tensor.name].copy_(weights.view_as(places[tensor.name]))
    return network


def _log_probs(network: PreTrainedModel, item: Item) -> torch.Tensor:
    """The log-probability of each token of a text after the first, (n − 1,)."""
    ids = torch.tensor([item.ids])
    logits = network(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def _without_means(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """``values`` without the mean over the places of each token, which is shrunk towards 0 if these are few."""
    means = torch.bincount(tokens, weights=values) / (torch.bincount(tokens) + 1)
    return values - means[tokens]


def _gradients(
    network: PreTrainedModel, items: Sequence[Item], served: Sequence[torch.Tensor], layout: Layout, observer: Observer
) -> dict[str, torch.Tensor]:
    """The gradient of Σ (s − c)/(−c)·c by each tensor of the files, with the quotient fixed, clipped and without each
    token's means."""
    with torch.no_grad():
        base = torch.cat([_log_probs(network, item) for item in items])
    quotients = (torch.cat(list(served)).float() - base) / (-base).clamp(min=SURE_TOKEN_LOSS)
    weights = clip(quotients.nan_to_num()).double()
    for shift in (slice(None, -1), slice(1, None)):  # the inputs, and what they predict
        weights = _without_means(weights, torch.tensor([token for item in items for token in item.ids[shift]]))
    for parameter in network.parameters():
        parameter.requires_grad_(True)
    for item, part in zip(items, weights.float().split([len(item.ids) - 1 for item in items]), strict=True):
        (part * _log_probs(network, item)).sum().backward()
        observer.advance(1)
    gradients = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            for piece in pieces_in_files(name, parameter.shape, layout.tensors, network):
                gradients[piece.file_name] = piece.of(parameter.grad)
    return gradients


def _evidence_in_gradients(
    publication: PublicationKeys, gradients: Mapping[str, torch.Tensor], pool: Executor
) -> PublicationEvidence:
    keys, noise = publication.keys, noise_of(publication)
    sums: dict[str, Sums] = {}

    def work(
        gradient: torch.Tensor, subkeys: Sequence[bytes], templates: torch.Tensor, bounds: tuple[int, int]
    ) -> Sums:
        start, stop = bounds
        draws = noise.draws(subkeys, start * gradient.shape[1], stop * gradient.shape[1], torch.float32)
        signal = gradient[start:stop].flatten()
        signal = signal.sign() * signal.abs().sqrt()
        without_watermark = [torch.zeros_like(signal)] * (templates.shape[1] - len(draws))
        part = sums_of(signal, [*draws, *without_watermark], templates, 1.0)
        part[:, 2] = 0.0  # a gradient says nothing of how much of the noise there is
        return part

    for tensor in publication.base.layout.parameters:
        scales = keys.scales(tensor.block)
        copy_scales = Scales(scales.cancelling, watermark=scales.watermark)
        if tensor.name not in gradients or not (copy_scales.cancelling or copy_scales.watermark):
            continue
        gradient = as_matrix(gradients[tensor.name].contiguous())
        subkeys, templates = noise.subkeys(tensor.name, copy_scales), templates_of(noise, copy_scales)
        slices = row_slices([UNMOVED], *gradient.shape)
        for part in pool.map(partial(work, gradient, subkeys, templates), slices):
            sums[tensor.block] = sums.get(tensor.block, 0.0) + part
    copies = [CopyEvidence(number, keys.recipients.get(str(number))) for number in range(1, keys.copies + 1)]
    return _evidence(publication, copies, sums, len(gradients))
