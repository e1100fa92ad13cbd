"""The share of the server's model that a client can recover from copies that it keeps, measured by attacking it.

The attacks read the copies, the public reference and the α published in the paper; the base is read only to score
them, and the keys not at all. An attacker without a reference ends up in the coordinates of one copy, in which the
model computes the same function; in that case the base is aligned to what was recovered before the two are compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import torch

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.manifest import CopyManifest, read_copy_manifest
from mpu_cli.files.reader import all_finite
from mpu_cli.lab.alignment import layer_maps, model_maps, residual_map, signs_of, undo
from mpu_cli.model.family import SETS, UNION
from mpu_cli.model.layout import TensorLayout
from mpu_cli.model.sampling import AxisMap, Maps
from mpu_cli.model.source import Model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.protocol.noise import SCHEMES, Extrapolated, Scheme, parse_noise
from mpu_cli.protocol.publication import matching

# An attacker's estimates of a change hidden in noise, better than taking it as it is.
#
# d = v + n is what a recovered model has on top of what is public, n white noise. Multiplied by ‖v‖²/(‖v‖² + ‖n‖²),
# the best factor for a v that nothing is known of, its error is η/√(1 + η²) of v at noise of scale η, where d itself
# is off by η. If v has low rank, as a change trained with LoRA has, singular values tell it from noise: those within
# the noise's bulk are dropped, and the others lowered to what v contributes on average (Gavish and Donoho 2017, arXiv
# 1405.7511).

AS_IT_IS, SCALED, SPECTRAL = "as it is", "scaled down", "singular values"

Tensors = Mapping[str, torch.Tensor]


def estimates(recovered: Tensors, public: Tensors, truth: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    """``recovered`` itself, and with its difference from ``public`` shrunk, by the name of the method.

    ``truth`` only gives the scale of the noise in each tensor, which an attacker who knows κ computes.
    """
    by_method: dict[str, dict[str, torch.Tensor]] = {AS_IT_IS: dict(recovered), SCALED: {}, SPECTRAL: {}}
    for name, tensor in recovered.items():
        change = tensor - public[name]
        noise = float((tensor - truth[name]).double().square().mean().sqrt())
        size = float(change.double().square().mean())
        factor = max(0.0, 1 - noise**2 / size) if size else 0.0
        by_method[SCALED][name] = public[name] + factor * change
        by_method[SPECTRAL][name] = public[name] + (spectral(change, noise) if change.ndim == 2 else factor * change)
    return by_method


def spectral(x: torch.Tensor, noise: float) -> torch.Tensor:
    """The matrix behind ``x``, float32 (rows, columns), which has white noise of this scale: singular values shrunk so
    that the squared error is least."""
    if not noise:
        return x
    wide = x if x.shape[0] <= x.shape[1] else x.T
    values, vectors = torch.linalg.eigh((wide @ wide.T).double())
    rows, columns = wide.shape
    unit = noise * math.sqrt(columns)
    ratio = rows / columns
    squares = (values.clamp(min=0) / unit**2).clamp(min=1e-30)  # of singular values, in units of the noise's
    # The best shrinker for squared error takes y to √((y² − β − 1)² − 4β)/y; the factor is that over y.
    inside = (squares - ratio - 1) ** 2 - 4 * ratio
    factors = torch.where(squares > (1 + math.sqrt(ratio)) ** 2, inside.clamp(min=0).sqrt() / squares, 0.0)
    vectors = vectors.to(x.dtype)
    shrunk = vectors @ (factors.to(x.dtype)[:, None] * (vectors.T @ wide))
    return shrunk if wide is x else shrunk.T


# The attacks by name, and what they recovered.

# relative error of the task vector, or without a pretrained model of the weights, that is a recovery
RECOVERY_ERROR = 0.1


@dataclass(frozen=True)
class Attack:
    """One way to recover the weights."""

    description: str
    several: bool = False  # needs more than one copy
    reference: bool = False  # uses the public reference
    # works only on copies at multiples of one draw of the noise, of which there are more than two
    one_draw: bool = False
    believes: bool = False  # removes the noise as the attacker believes it to be


ONE_COPY, ONE_COPY_REFERENCE, TWO_COPIES = "one copy", "one copy, reference", "two copies"
ALL_COPIES, ALL_SMALLEST = "all copies", "all copies, smallest"
ALL_REFERENCE, ALL_UNKNOWN = "all copies, reference", "all copies, factors unknown"
ATTACKS = {
    ONE_COPY: Attack("one copy, no reference: only the noise hides the weights"),
    ONE_COPY_REFERENCE: Attack("one copy, aligned to the public reference", reference=True),
    TWO_COPIES: Attack(
        "two of the copies, aligned and extrapolated to zero noise: they hold multiples of one draw",
        several=True, one_draw=True, believes=True,
    ),
    ALL_COPIES: Attack(
        "all copies aligned to the first, averaged so that the noise cancels", several=True, believes=True
    ),
    ALL_SMALLEST: Attack(
        "the same, with the weights that make the average smallest (factors unknown, no reference)", several=True
    ),
    ALL_REFERENCE: Attack(
        "all copies aligned to the reference, averaged so that the noise cancels",
        several=True, reference=True, believes=True,
    ),
    ALL_UNKNOWN: Attack(
        "all copies aligned to the reference, weighted to bring the average nearest to it", several=True, reference=True
    ),
}  # fmt: skip


@dataclass
class Recovered:
    """The errors of one attack: squared, by method of estimating the change and block.

    ``function``: up to the symmetries, under which the model computes the same function; ``task``: as recovered, in
    the reference's coordinates, if the attack ends up in them.
    """

    function: dict[str, dict[str, float]] = field(default_factory=dict)
    task: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Audit:
    """Errors by attack and block; ``task`` and ``weights`` are the squared norms that they are relative to, by block;
    ``unmoved`` is the share of weights that are unchanged in a copy, by block. ``noise`` and ``symmetries`` are the
    attacker's assumptions."""

    noise: Scheme
    symmetries: str
    with_reference: bool
    attacks: dict[str, Recovered]
    task: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    unmoved: dict[str, float] = field(default_factory=dict)

    def method(self, attack: str) -> str:
        """The method of estimating the change with which the attack's error is smallest in total."""
        errors = self.attacks[attack].function
        return min(errors, key=lambda method: math.fsum(errors[method].values()))

    def function_error(self, attack: str, block: str | None = None) -> float:
        """Error relative to the weights, up to symmetries, in total or for one block, with the best method."""
        return self._ratio(self.attacks[attack].function[self.method(attack)], self.weights, block)

    def plain_error(self, attack: str) -> float:
        """``function_error`` in total of what was recovered, as it is."""
        return self._ratio(self.attacks[attack].function[AS_IT_IS], self.weights, None)

    def change_error(self, attack: str) -> float:
        """``function_error`` in total, relative to the task vector (to the weights if there is no reference)."""
        return self._ratio(self.attacks[attack].function[self.method(attack)], self.task, None)

    def task_error(self, attack: str, block: str | None = None) -> float | None:
        """Error relative to the task vector, in the reference's coordinates, with the method that makes it smallest;
        None if the attack ends up in others."""
        errors = self.attacks[attack].task
        if not errors:
            return None
        return self._ratio(
            min(errors.values(), key=lambda block_errors: math.fsum(block_errors.values())), self.task, block
        )

    @property
    def best(self) -> str:
        """The attack that comes nearest to the weights."""
        return min(self.attacks, key=self.function_error)

    @property
    def verdict(self) -> str:
        """One sentence: whether the best attack recovered what fine-tuning changed; or, without a reference, all."""
        off, share = self.function_error(self.best), self.change_error(self.best)
        attack = f"the best of these attacks, {ATTACKS[self.best].description},"
        if not self.with_reference:
            outcome = "recovered" if share < RECOVERY_ERROR else "not recovered"
            return f"{outcome}: {attack} is off by {off:.2%} of the weights"
        # Relative errors of 1 and more are those of the public model itself, which knows nothing of the change.
        outcome = "in part recovered" if share < 1 else "not recovered"
        if share < RECOVERY_ERROR:
            outcome = "recovered"
        return (
            f"{outcome}: {attack} gives {max(0.0, 1 - share):.0%} of what fine-tuning changed (it is off by "
            f"{share:.2%} of that, and by {off:.2%} of the weights)"
        )

    def document(self) -> dict[str, object]:
        """Everything that was measured, for JSON."""
        return {
            name: {
                "weights": self.function_error(name),
                "task_vector": self.task_error(name),
                "of_change": self.change_error(name),
                "method": self.method(name),
                "blocks": {
                    block: {"weights": self.function_error(name, block), "task_vector": self.task_error(name, block)}
                    for block in self.weights
                },
            }
            for name, recovered in self.attacks.items()
        }

    def _ratio(self, errors: Mapping[str, float], norms: Mapping[str, float], block: str | None) -> float:
        blocks = [block] if block else list(norms)
        total = math.fsum(norms[b] for b in blocks)
        return math.sqrt(math.fsum(errors[b] for b in blocks) / total) if total else math.nan


# The attacks, block by block.


def audit(
    copies: Sequence[Model],
    base: Model,
    reference: Model | None,
    *,
    noise: Scheme,
    symmetries: str,
    fast: bool,
    publications: Sequence[object],
    observer: Observer = SILENT,
) -> Audit:
    """Attack ``copies`` of ``base``, block by block, in float32.

    ``noise``, with a factor for each of ``copies``, and ``symmetries`` are what the attacker assumes; ``publications``
    says which each copy is of, where they are of several: noise cancels within each and is averaged over them.
    ``fast``: only the first, the middle and the last layer. Raises MpuError if a model's shapes differ from the base's,
    UsageError if there is not one factor per copy.
    """
    if noise.copies != len(copies):
        raise UsageError(f"{noise.copies} noise factors for {len(copies)} copies", "give one for each copy")
    layout = base.layout
    attacker = _Attacker(copies, base, reference, noise=noise, symmetries=symmetries, publications=publications)
    blocks = [block for block, tensors in layout.blocks.items() if not any(t.constant for t in tensors)]
    if fast:
        layers = [block for block in blocks if layout.blocks[block][0].layer is not None]
        sampled = {layers[0], layers[len(layers) // 2], layers[-1]}
        blocks = [block for block in blocks if block not in layers or block in sampled]
    observer.stage("audit", base.checkpoint.nbytes)
    for block in blocks:
        attacker.block(block, layout.blocks[block])
        observer.advance(sum(base.checkpoint.tensors[t.name].nbytes for t in layout.blocks[block]))
    return attacker.audit


def _matched(model: Model, base: Model) -> dict[str, torch.Tensor]:
    """The model's tensors by the base's names."""
    try:
        return matching(base, model) or {}
    except MpuError as error:
        raise MpuError(f"{model.source}: tensors or shapes do not match the base") from error


def _weights(noise: Scheme, publications: Sequence[object]) -> torch.Tensor:
    """The weights that cancel the noise of each publication and average over the publications, float64 (copies,)."""
    weights = torch.zeros(noise.copies, dtype=torch.float64)
    for publication in dict.fromkeys(publications):
        copy_indices = [i for i, other in enumerate(publications) if other == publication]
        weights[copy_indices] = replace(noise, factors=tuple(noise.factors[i] for i in copy_indices)).fitted_weights
    return weights / len(set(publications))


class _Attacker:
    def __init__(
        self, copies: Sequence[Model], base: Model, reference: Model | None, *, noise: Scheme, symmetries: str,
        publications: Sequence[object],
    ):  # fmt: skip
        models = [base, *copies, *([reference] if reference else [])]
        self._by_model = {id(model): _matched(model, base) for model in models}
        self._layout, self._copies, self._base, self._reference = base.layout, copies, base, reference
        self._symmetries = symmetries
        self._noise = noise
        self._several = len(set(publications)) > 1
        self._weights_of_copies = _weights(noise, publications)
        attacks = {name: Recovered() for name in self._names()}
        self.audit = Audit(noise, symmetries, reference is not None, attacks)
        self._outer_maps: dict[tuple[int, int, str], dict[str, AxisMap]] = {}
        # Over all blocks so far: they share the factors.
        self._own_gram = torch.zeros(len(copies), len(copies), dtype=torch.float64)
        self._gram = torch.zeros(len(copies), len(copies), dtype=torch.float64)

    def _names(self) -> list[str]:
        count = len(self._copies)
        names = []
        for name, attack in ATTACKS.items():
            possible = not attack.one_draw or (self._noise.one_draw and count > 2 and not self._several)
            if possible and (count > 1 or not attack.several) and (self._reference or not attack.reference):
                names.append(name)
        return names

    def _tensors(self, model: Model, tensors: Sequence[TensorLayout]) -> dict[str, torch.Tensor]:
        loaded = {t.name: self._by_model[id(model)][t.name].float() for t in tensors}
        for name, weights in loaded.items():
            if not all_finite(weights):
                raise MpuError(f"{model.source}: {name!r} contains NaN or Inf, so it cannot be audited")
        return loaded

    def _outer(self, model: Model, target: Model, symmetries: str | None = None) -> dict[str, AxisMap]:
        """The maps from ``target`` to ``model`` of the axes that all layers share."""
        symmetries = symmetries or self._symmetries
        pair = (id(model), id(target), symmetries)
        if pair not in self._outer_maps:
            outside = [t for t in self._layout.parameters if t.layer is None]
            weights = self._tensors(model, outside), self._tensors(target, outside)
            residual = residual_map(self._layout, *weights, symmetries)
            self._outer_maps[pair] = model_maps(self._layout, *weights, symmetries, residual)
        return self._outer_maps[pair]

    def _all_aligned(
        self, tensors: Sequence[TensorLayout], copies: Sequence[Tensors], outer: Maps,
        towards: Tensors, symmetries: str | None = None,
    ) -> list[dict[str, torch.Tensor]]:  # fmt: skip
        """A block of ``copies`` in the coordinates of ``towards``, all with the maps that align the first; ``outer``
        are the maps of the axes that all layers share."""
        symmetries = symmetries or self._symmetries
        undone = [undo(self._layout, tensors, copy, outer) for copy in copies]
        if tensors[0].layer is None:
            return undone
        maps = layer_maps(self._layout, tensors, undone[0], towards, symmetries)
        return [undo(self._layout, tensors, copy, maps) for copy in undone]

    def block(self, block: str, tensors: Sequence[TensorLayout]) -> None:
        truth = self._tensors(self._base, tensors)
        copies = [self._tensors(copy, tensors) for copy in self._copies]
        public = self._tensors(self._reference, tensors) if self._reference else None
        audit = self.audit
        audit.weights[block] = _square(truth)
        audit.task[block] = _square({n: w - public[n] for n, w in truth.items()}) if public else audit.weights[block]
        count = sum(w.numel() for w in truth.values())
        audit.unmoved[block] = sum(float((copies[0][n] == w).sum()) for n, w in truth.items()) / count
        score = partial(self._score, block=block, tensors=tensors, truth=truth)
        average = None
        if len(copies) > 1:
            first_copy = self._copies[0]
            aligned = [copies[0]]
            for model, copy in zip(self._copies[1:], copies[1:], strict=True):
                aligned += self._all_aligned(tensors, [copy], self._outer(model, first_copy), copies[0])
            average = weighted_mean(aligned, self._weights_of_copies)
            if TWO_COPIES in audit.attacks:
                pair = weighted_mean(aligned[:2], Extrapolated(self._noise.factors[:2]).fitted_weights)
                score(TWO_COPIES, first_copy, pair)
            self._own_gram += differences(aligned, {name: torch.zeros(()) for name in truth})
            score(ALL_SMALLEST, first_copy, weighted_mean(aligned, nearest(self._own_gram)))
            score(ALL_COPIES, first_copy, average)
        if self._reference is not None and public is not None:
            reference = self._reference
            aligned = []
            for model, copy in zip(self._copies, copies, strict=True):
                aligned += self._all_aligned(tensors, [copy], self._outer(model, reference), public)
            score(ONE_COPY_REFERENCE, reference, aligned[0])
            if average is not None:
                # Remove the noise before aligning to the reference, or after: keep what ends up more like it.
                [before] = self._all_aligned(tensors, [average], self._outer(first_copy, reference), public)
                after = weighted_mean(aligned, self._weights_of_copies)
                score(ALL_REFERENCE, reference, max(before, after, key=lambda tensors: _cosine(tensors, public)))
                self._gram += differences(aligned, public)
                score(ALL_UNKNOWN, reference, weighted_mean(aligned, nearest(self._gram)))
        score(ONE_COPY, self._copies[0], copies[0])

    def _score(
        self, attack: str, whose: Model, estimate: Tensors, *, block: str,
        tensors: Sequence[TensorLayout], truth: Tensors,
    ) -> None:  # fmt: skip
        """Add the errors of ``estimate``, in the coordinates of ``whose``: the first copy, or the reference. Changes
        are estimated relative to the reference, or to zero for the first copy."""
        recovered = self.audit.attacks[attack]
        first_copy = self._copies[0]
        outer = self._outer(first_copy, self._base, UNION)
        public = {name: torch.zeros_like(weights) for name, weights in truth.items()}
        if self._reference is not None and whose is self._reference:
            public = self._tensors(whose, tensors)
            for method, candidate in estimates(estimate, public, truth).items():
                recovered.task.setdefault(method, {})[block] = _distance(candidate, truth)
            # Whether the attack got the order of the model dimension right does not affect what the model computes.
            undone = self._outer(first_copy, whose)
            outer = {
                axis: after_undoing(undone.get(axis, AxisMap(torch.arange(len(other)))), other)
                for axis, other in outer.items()
            }
        aligned, beside = self._all_aligned(tensors, [estimate, public], outer, truth, UNION)
        for method, candidate in estimates(aligned, beside, truth).items():
            # In the reference's coordinates, leaving it where it is may be nearer than the alignment found.
            unmoved = recovered.task.get(method, {}).get(block, math.inf)
            recovered.function.setdefault(method, {})[block] = min(_distance(candidate, truth), unmoved)


def after_undoing(undone: AxisMap, other: AxisMap) -> AxisMap:
    """undone⁻¹ ∘ other, for maps without rotations."""
    signs = signs_of(other).clone()
    signs[other.order] *= signs_of(undone)[undone.order]
    return AxisMap(other.order[undone.places], signs=signs)


def weighted_mean(aligned: Sequence[Tensors], weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Σ w_k·W_k of each tensor, for ``weights`` that sum to 1."""
    return {
        name: torch.tensordot(weights.float(), torch.stack([tensors[name] for tensors in aligned]), 1)
        for name in aligned[0]
    }


def differences(aligned: Sequence[Tensors], public: Tensors) -> torch.Tensor:
    """Inner products of the ``aligned`` copies' differences from ``public`` over a block: float64 (copies, copies)."""
    gram = torch.zeros(len(aligned), len(aligned), dtype=torch.float64)
    for name, reference in public.items():  # one by one, because a block may be the embedding of a large vocabulary
        distances = torch.stack([(copy[name] - reference).flatten() for copy in aligned]).double()
        gram += distances @ distances.T
    return gram


def nearest(gram: torch.Tensor) -> torch.Tensor:
    """Weights that sum to 1 and bring the combination of the copies nearest to the reference: G⁻¹1, normalised.

    Every such combination contains the same task vector, so what they minimise is the noise.
    """
    if not float(gram.diagonal().mean()) > 0:  # the copies are the reference itself
        return torch.full((len(gram),), 1 / len(gram), dtype=gram.dtype)
    # A ridge: G may be singular, as for three and more multiples of one draw.
    steadied = gram + 1e-9 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    weights = torch.linalg.solve(steadied, torch.ones(len(gram), dtype=gram.dtype))
    return weights / weights.sum()


def _square(tensors: Tensors) -> float:
    return math.fsum(float(x.double().square().sum()) for x in tensors.values())


def _cosine(estimate: Tensors, other: Tensors) -> float:
    product = math.fsum(float(x.flatten() @ other[name].flatten()) for name, x in estimate.items())
    return product / math.sqrt(_square(estimate) * _square(other) or 1.0)


def _distance(estimate: Tensors, truth: Tensors) -> float:
    return _square({name: estimate[name] - weights for name, weights in truth.items()})


# An attacker's assumptions on the noise and the symmetries, where none are given: each in turn, until one
# explains the copies.

_Manifests = Sequence[CopyManifest | None]  # of the copies, None for a model without one

UNDONE = 0.5  # if an attack reduces the error of one copy to this share, the assumed noise explains the copies


def audit_as_believed(
    copies: Sequence[Model],
    base: Model,
    reference: Model | None,
    *,
    noise: str | None = None,
    symmetries: str | None = None,
    fast: bool = False,
    observer: Observer = SILENT,
) -> Audit:
    """Audit ``copies`` under what is given of noise and symmetries, else under what the copies say of themselves and
    the defaults of `mpu publish`, one after the other; the audit whose assumptions explain the copies best.

    Copies may be of several publications of the base.
    """
    models = list(copies)
    manifests = [read_copy_manifest(model.folder, model.checkpoint.metadata) for model in models]
    copy_ids = [manifest.copy_id for manifest in manifests if manifest is not None]
    if len(set(copy_ids)) < len(copy_ids):
        raise UsageError("the same copy is given twice")
    publications = _publications(manifests)
    if len(set(publications)) > 1 and ":" in (noise or ""):
        raise UsageError(
            f"--noise {noise}: factors are those of one publication", "leave them out, or audit one at a time"
        )
    schemes = _believed_noise(manifests, noise)
    audits: dict[float, Audit] = {}  # by the error of the best attack that removes the noise
    for believed, scheme in product(_believed_symmetries(manifests, symmetries), schemes):
        result = audit(models, base, reference, noise=scheme, symmetries=believed, fast=fast,
                      publications=publications, observer=observer)  # fmt: skip
        if reference and not sum(result.task.values()):
            raise UsageError(f"--public {reference.source}: has the same weights as --base", "leave it out")
        error = min((result.plain_error(name) for name in result.attacks if ATTACKS[name].believes), default=0.0)
        audits.setdefault(error, result)
        if error < UNDONE * result.plain_error(ONE_COPY):
            break
    return audits[min(audits)]


def _believed_noise(manifests: _Manifests, noise: str | None) -> list[Scheme]:
    """The schemes that the attacker tries, with a factor for each copy: those given, or the defaults."""
    count, kinds = len(manifests), list(SCHEMES.values())
    if noise:
        kind, given = parse_noise(noise, count)
        if given:
            return [kind.from_factors(given)]
        kinds = [kind]
    elif count == 1:
        kinds = kinds[:1]
    numbers = [(i, count) if m is None else (m.copy - 1, m.copies) for i, m in enumerate(manifests)]
    return [kind(tuple(kind.default(copies).factors[i] for i, copies in numbers)) for kind in kinds]


def _believed_symmetries(manifests: _Manifests, requested: str | None) -> list[str]:
    """The sets that the attacker tries: the one given, else the one stated in the copies, else each."""
    if requested:
        return [requested]
    tried = [name for name in SETS if name != "none"]
    named = manifests[0].symmetries if manifests[0] else None
    return [named] if named in tried else tried


def _publications(manifests: _Manifests) -> list[object]:
    """The publication of each copy; copies without a manifest are taken for those of one.

    A run and round may have been published more than once: two copies of one number are of two publications.
    """
    counts: Counter[tuple[str, int, int]] = Counter()
    publications: list[object] = []
    for manifest in manifests:
        if manifest is None:
            publications.append(None)
            continue
        publications.append((manifest.run, manifest.round, counts[manifest.run, manifest.round, manifest.copy]))
        counts[manifest.run, manifest.round, manifest.copy] += 1
    return publications
