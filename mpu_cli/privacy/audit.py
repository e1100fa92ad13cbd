"""What a client that keeps its copies can recover of the server's model, measured by doing it.

The attacks read the copies, the public reference and the α that the paper publishes; the base is read only to say how
near they came, and the keys by nobody. An attacker without a reference ends up in the coordinates of one copy, in
which the model computes the same: there the base is aligned to what was recovered before they are compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mpu_cli.architectures.layout import Layout, TensorLayout, layout_of
from mpu_cli.checkpoint.dtypes import all_finite
from mpu_cli.checkpoint.source import Model
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.privacy.align import layer_maps, model_maps, residual_map, undo
from mpu_cli.server.noise import EXTRAPOLATE, Scheme
from mpu_cli.symmetry.axis import AxisMap

FAST = 3  # layers that --fast looks at: the first, the middle, the last
ATTACKS = {
    "one copy": "one copy, no reference: the noise is all that hides the weights",
    "one copy, reference": "one copy, aligned to the public reference",
    "two copies": "two of the copies, aligned and extrapolated to no noise: they hold multiples of one draw",
    "all copies": "all copies aligned to the first, averaged so that the noise cancels",
    "all copies, smallest": "the same, with the weights that make the average smallest (factors unknown, no reference)",
    "all copies, reference": "all copies aligned to the reference, averaged so that the noise cancels",
    "all copies, factors unknown": "the same, with the weights that bring the average nearest to the reference",
}


@dataclass
class Recovered:
    """What one attack recovered: squared errors by block.

    ``function``: up to the symmetries, under which the model computes the same; ``task``: as it stands, in the
    reference's coordinates, where the attack ends up in them.
    """

    seconds: float = 0.0
    function: dict[str, float] = field(default_factory=dict)
    task: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Audit:
    """Errors by attack and block; ``task`` and ``weights`` are the squared norms that they are relative to, by block;
    ``unmoved`` the share of weights that a copy holds as they are, by block."""

    attacks: dict[str, Recovered]
    task: dict[str, float]
    weights: dict[str, float]
    unmoved: dict[str, float]
    with_reference: bool

    def function_error(self, attack: str, block: str | None = None) -> float:
        """Relative to the weights, up to symmetries; in total or of a block."""
        return self._ratio(self.attacks[attack].function, self.weights, block)

    def change_error(self, attack: str) -> float:
        """``function_error`` in total, relative to the task vector (to the weights where there is no reference)."""
        return self._ratio(self.attacks[attack].function, self.task, None)

    def task_error(self, attack: str, block: str | None = None) -> float | None:
        """Relative to the task vector, in the reference's coordinates; None where the attack ends up in others."""
        errors = self.attacks[attack].task
        return self._ratio(errors, self.task, block) if errors else None

    def _ratio(self, errors: Mapping[str, float], norms: Mapping[str, float], block: str | None) -> float:
        blocks = [block] if block else list(norms)
        total = math.fsum(norms[b] for b in blocks)
        return math.sqrt(math.fsum(errors[b] for b in blocks) / total) if total else math.nan


def audit(
    copies: Sequence[Model],
    base: Model,
    reference: Model | None,
    *,
    noise: Scheme,
    symmetries: str,
    fast: bool,
    progress: Callable[[int], None] = lambda _: None,
) -> Audit:
    """Attack ``copies`` of ``base``, block by block, in float32.

    ``noise``, with a factor for each of ``copies``, and ``symmetries`` are what the attacker takes for granted. Raises
    MpuError for a model that is not of the base's shapes, UsageError for another number of factors than of copies.
    """
    if noise.copies != len(copies):
        raise UsageError(f"{noise.copies} factors of the noise for {len(copies)} copies; give one for each")
    layout = layout_of(base.checkpoint.tensors, base.config, base.source)
    names = {id(base): {t.name: t.name for t in layout.parameters}}
    for model in [*copies, *([reference] if reference else [])]:
        names[id(model)] = _names(model, base, layout)
    attack = _Attack(layout, copies, base, reference, noise, symmetries, names)
    blocks = _chosen(layout, fast)
    for block in blocks:
        attack.block(block, layout.blocks[block])
        progress(sum(base.checkpoint.tensors[t.name].nbytes for t in layout.blocks[block]))
    return Audit(attack.attacks, attack.task, attack.weights, attack.unmoved, reference is not None)


def _names(model: Model, base: Model, layout: Layout) -> dict[str, str]:
    """The base's names of tensors → the model's, which may leave out a prefix; MpuError for other shapes."""
    own = layout_of(model.checkpoint.tensors, model.config, model.source)
    pairs = {t.name: o.name for t, o in zip(layout.parameters, own.parameters, strict=False)}
    shapes = [base.checkpoint.tensors[name].shape for name in pairs]
    if len(layout.parameters) != len(own.parameters) or shapes != [
        model.checkpoint.tensors[name].shape for name in pairs.values()
    ]:
        raise MpuError(f"{model.source}: has not the base's tensors and shapes")
    return pairs


def _chosen(layout: Layout, fast: bool) -> list[str]:
    blocks = [block for block, tensors in layout.blocks.items() if not any(t.constant for t in tensors)]
    if not fast:
        return blocks
    layers = [block for block in blocks if layout.blocks[block][0].layer is not None]
    kept = {layers[round(i * (len(layers) - 1) / (FAST - 1))] for i in range(FAST)}
    return [block for block in blocks if block not in layers or block in kept]


class _Attack:
    def __init__(
        self, layout: Layout, copies: Sequence[Model], base: Model, reference: Model | None, noise: Scheme,
        symmetries: str, names: Mapping[int, Mapping[str, str]],
    ):  # fmt: skip
        self._tensor_names = names  # of each model, by its id
        self._layout, self._copies, self._base, self._reference = layout, copies, base, reference
        self._symmetries = symmetries
        self._noise = noise
        self._weights_of_copies = denoising_weights(noise)
        self.attacks = {name: Recovered() for name in self._names()}
        self.task: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self.unmoved: dict[str, float] = {}
        self._residual: dict[tuple[int, int, str], AxisMap] = {}
        self._own_gram = torch.zeros(len(copies), len(copies), dtype=torch.float64)
        self._gram = torch.zeros(
            len(copies), len(copies), dtype=torch.float64
        )  # of all blocks so far: α is one for all

    def _names(self) -> list[str]:
        several = len(self._copies) > 1
        return [
            name
            for name in ATTACKS
            if (several or name.startswith("one copy"))
            and (name != "two copies" or (self._noise.kind == EXTRAPOLATE and len(self._copies) > 2))
            and (self._reference or ("reference" not in name and "unknown" not in name))
        ]

    def _tensors(self, model: Model, tensors: Sequence[TensorLayout]) -> dict[str, torch.Tensor]:
        names = self._tensor_names[id(model)]
        held = {t.name: model.checkpoint.tensor(names[t.name]).float() for t in tensors}
        for name, weights in held.items():
            if not all_finite(weights):
                raise MpuError(f"{model.source}: {name!r} holds NaN or Inf; there is nothing to audit")
        return held

    def _order(self, model: Model, target: Model, symmetries: str | None = None) -> AxisMap:
        """The map of the model dimension from ``target`` to ``model``."""
        symmetries = symmetries or self._symmetries
        pair = (id(model), id(target), symmetries)
        if pair not in self._residual:
            outside = [t for t in self._layout.parameters if t.layer is None]
            held = [self._tensors(m, outside) for m in (model, target)]
            self._residual[pair] = residual_map(self._layout, *held, symmetries)
        return self._residual[pair]

    def _aligned(
        self, tensors: Sequence[TensorLayout], copy: Mapping[str, torch.Tensor], residual: AxisMap,
        towards: Mapping[str, torch.Tensor], symmetries: str | None = None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """``copy`` of a block in the coordinates of ``towards``; ``residual`` is the map of the model dimension."""
        symmetries = symmetries or self._symmetries
        copy = undo(self._layout, tensors, copy, model_maps(residual))
        if tensors[0].layer is None:
            return copy
        return undo(self._layout, tensors, copy, layer_maps(self._layout, tensors, copy, towards, symmetries))

    def block(self, block: str, tensors: Sequence[TensorLayout]) -> None:
        truth = self._tensors(self._base, tensors)
        copies = [self._tensors(copy, tensors) for copy in self._copies]
        public = self._tensors(self._reference, tensors) if self._reference else None
        self.weights[block] = _square(truth)
        self.task[block] = _square({n: w - public[n] for n, w in truth.items()}) if public else self.weights[block]
        count = sum(w.numel() for w in truth.values())
        self.unmoved[block] = sum(float((copies[0][n] == w).sum()) for n, w in truth.items()) / count
        together = None
        if len(copies) > 1:
            started = time.perf_counter()
            first = self._copies[0]
            lined = [copies[0]] + [
                self._aligned(tensors, copy, self._order(model, first), copies[0])
                for model, copy in zip(self._copies[1:], copies[1:], strict=True)
            ]
            together = self._mean(lined, self._weights_of_copies)
            mutual = time.perf_counter() - started
            if "two copies" in self.attacks:
                pair = self._mean(lined[:2], denoising_weights(Scheme(EXTRAPOLATE, self._noise.factors[:2])))
                self._score("two copies", block, tensors, first, pair, truth, mutual / (len(lined) - 1))
            self._own_gram += differences(lined, {name: torch.zeros(()) for name in truth})
            smallest = self._mean(lined, nearest(self._own_gram))
            self._score("all copies, smallest", block, tensors, first, smallest, truth, mutual)
            self._score("all copies", block, tensors, first, together, truth, mutual)
        if public is not None:
            started = time.perf_counter()
            lined = [
                self._aligned(tensors, copy, self._order(model, self._reference), public)
                for model, copy in zip(self._copies, copies, strict=True)
            ]
            seconds = time.perf_counter() - started
            self._score("one copy, reference", block, tensors, self._reference, lined[0], truth, seconds / len(lined))
            if together is not None:
                started = time.perf_counter()
                # Noise taken off before the reference is looked for, or after: what ends up more like it is kept.
                before = self._aligned(tensors, together, self._order(first, self._reference), public)
                estimates = [before, self._mean(lined, self._weights_of_copies)]
                estimate = max(estimates, key=lambda tensors: _cosine(tensors, public))
                seconds += mutual + time.perf_counter() - started
                self._score("all copies, reference", block, tensors, self._reference, estimate, truth, seconds)
                self._gram += differences(lined, public)
                estimate = self._mean(lined, nearest(self._gram))
                self._score("all copies, factors unknown", block, tensors, self._reference, estimate, truth, seconds)
        self._score("one copy", block, tensors, self._copies[0], copies[0], truth, 0.0)

    def _mean(self, lined: Sequence[Mapping[str, torch.Tensor]], weights: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: sum(float(w) * tensors[name] for w, tensors in zip(weights, lined, strict=True)) for name in lined[0]
        }

    def _score(
        self, attack: str, block: str, tensors: Sequence[TensorLayout], whose: Model,
        estimate: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor], seconds: float,
    ) -> None:  # fmt: skip
        """Count the errors of ``estimate``, in the coordinates of ``whose``: the first copy, or the reference."""
        told = self.attacks[attack]
        told.seconds += seconds
        first = self._copies[0]
        residual = self._order(first, self._base, "every")
        if whose is self._reference:
            told.task[block] = _distance(estimate, truth)
            # Whether the attack got the order of the model dimension right is no matter of what the model computes.
            residual = after_undoing(self._order(first, whose), residual)
        told.function[block] = _distance(self._aligned(tensors, estimate, residual, truth, "every"), truth)


def after_undoing(one: AxisMap, other: AxisMap) -> AxisMap:
    """one⁻¹ ∘ other, of maps without rotations."""
    order = torch.empty_like(other.order)
    order[one.order] = other.order
    signs = torch.ones(len(order))
    for axis, places in ((one, one.order), (other, other.order)):
        if axis.signs is not None:
            signs[other.order] *= axis.signs[places]
    return AxisMap(order, signs=signs)


def denoising_weights(noise: Scheme) -> torch.Tensor:
    """Weights of aligned copies, float64 (copies,), that add up to 1 and under which the noise cancels.

    Copies at multiples c_k of one draw lie on a line, so of the many such weights those are taken that are smallest:
    the intercept of a least-squares fit, under which rounding of the copies averages out too.
    """
    if noise.kind != EXTRAPOLATE or noise.copies == 1:
        return noise.weights
    line = torch.stack(
        [torch.ones(noise.copies, dtype=torch.float64), torch.tensor(noise.factors, dtype=torch.float64)]
    )
    return torch.linalg.pinv(line)[:, 0]


def differences(lined: Sequence[Mapping[str, torch.Tensor]], public: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Inner products of the aligned copies' differences from ``public`` over a block: float64 (copies, copies)."""
    flat = [torch.cat([(t[name] - p).flatten() for name, p in public.items()]).double() for t in lined]
    return torch.stack([torch.stack([a @ b for b in flat]) for a in flat])


def nearest(gram: torch.Tensor) -> torch.Tensor:
    """Weights that add up to 1 and bring the copies' combination nearest to the reference: G⁻¹1, normalised.

    The task vector is in every combination alike, so what they make small is the noise.
    """
    if not float(gram.diagonal().mean()) > 0:  # the copies are the reference itself
        return torch.full((len(gram),), 1 / len(gram), dtype=gram.dtype)
    steadied = gram + 1e-9 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    weights = torch.linalg.solve(steadied, torch.ones(len(gram), dtype=gram.dtype))
    return weights / weights.sum()


def _square(tensors: Mapping[str, torch.Tensor]) -> float:
    return math.fsum(float(x.double().square().sum()) for x in tensors.values())


def _cosine(found: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    product = math.fsum(float(x.flatten() @ other[name].flatten()) for name, x in found.items())
    return product / math.sqrt(_square(found) * _square(other) or 1.0)


def _distance(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> float:
    return _square({name: found[name] - weights for name, weights in truth.items()})
