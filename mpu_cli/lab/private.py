"""Training with differential privacy for the client's records: DP-SGD (Abadi et al., 2016) with Opacus.

The unit of protection is one record of the forget or the retain set or, where records name one, everything of one
person (``--dp unit``). Each step samples every unit independently (Poisson sampling), clips the gradient of each unit's
loss, and adds Gaussian noise. The delta reports the bound to the server; what was actually spent stays with the client,
because it depends on the number of records.

Noise and samples come from AES-256-CTR under a fresh 256-bit seed of the operating system
(``mpu_cli.files.randomness``), on every device: torch's generators keep 32 or 64 bits of a seed, and whoever finds it
takes the noise off.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from mpu_cli.errors import UsageError
from mpu_cli.files.randomness import Randomness, new_seed, standard_normals
from mpu_cli.lab.accounting import composed_epsilon, noise_multiplier_for
from mpu_cli.model.network import Head, input_of, separate_head
from mpu_cli.options.unlearning import Privacy, Training
from mpu_cli.plugins import require
from mpu_cli.records.encode import IGNORED, Example, pad
from mpu_cli.training.ledger import Mechanism
from mpu_cli.training.loop import Losses, outside_layers
from mpu_cli.training.losses import ALGORITHMS, Objective, score
from mpu_cli.training.optimizers import make_optimizer
from mpu_cli.training.reference import ExampleSet

NOISE_CHUNK = 1 << 20  # weights that get their noise at once

ExampleIndex = tuple[str, int]  # an example: its set, and its number there


def check_objective(algo: str, objective: Objective) -> None:
    """Raises UsageError if the losses are not computed record by record here."""
    if objective.algorithm.alternate or objective.algorithm.hidden or algo not in ALGORITHMS:
        raise UsageError(f"--dp epsilon does not work with {algo}: its loss is not a sum over single records")
    if objective.constants.dual_rate:
        raise UsageError(f"--dp epsilon does not work with {algo}: its α tells of the records without noise")
    if objective.retain_outputs == "hidden":
        raise UsageError(
            f"--dp epsilon does not work with --constants retain_loss={objective.retain_loss}", "use nll or kl"
        )


@dataclass(frozen=True)
class Unit:
    """A unit of protection: examples, and the probability that a step reads them."""

    indices: tuple[ExampleIndex, ...]
    rate: float


@dataclass(frozen=True)
class Plan:
    """A private training before it begins."""

    units: Sequence[Unit]
    mechanism: Mechanism

    def of_examples(self, record_numbers: Mapping[str, Sequence[int]]) -> Plan:
        """The plan for sets that hold the records of these numbers only: the others are drawn and add nothing."""
        renumbered: dict[ExampleIndex, ExampleIndex] = {}
        for name, records in record_numbers.items():
            for i, record in enumerate(records):
                renumbered[name, record] = name, i
        units = []
        for unit in self.units:
            indices = tuple(renumbered[index] for index in unit.indices if index in renumbered)
            units.append(replace(unit, indices=indices))
        return replace(self, units=units)


def plan(
    names: Mapping[str, Sequence[str | None]], training: Training, privacy: Privacy, *,
    epochs: int, noise_multiplier: float | None = None,
) -> Plan:  # fmt: skip
    """The plan that meets ``privacy``: the rates at which units are read, and the noise.

    ``names`` gives for each set the unit of each record, None for one of its own. Units with something to forget are
    read ``epochs`` times on average. ``noise_multiplier`` overrides the one that is computed. Raises UsageError if no
    noise is enough.
    """
    members: dict[object, list[ExampleIndex]] = {}
    for name, units_of in names.items():
        for number, unit in enumerate(units_of):
            members.setdefault((name, number) if unit is None else unit, []).append((name, number))
    forget_units: list[tuple[ExampleIndex, ...]] = []
    other_units: list[tuple[ExampleIndex, ...]] = []
    for indices in members.values():
        group = forget_units if any(name == "forget" for name, _ in indices) else other_units
        group.append(tuple(indices))
    units = []
    for group in (forget_units, other_units):
        group_rate = min(1.0, training.batch_size / max(1, len(group)))
        units += [Unit(indices, group_rate) for indices in group]
    # The accountant composes one rate: the highest bounds what any unit spends.
    rate = max(unit.rate for unit in units)
    steps = epochs * -(-len(forget_units) // training.batch_size)
    if noise_multiplier is None:
        assert privacy.dp_epsilon is not None
        noise_multiplier = noise_multiplier_for(
            privacy.dp_epsilon, privacy.dp_delta, sample_rate=rate, steps=steps, neighbours=privacy.dp_neighbours
        )
    return Plan(units, Mechanism(noise_multiplier, rate, steps))


def most_signal(planned: Plan, trained_weights: int) -> float:
    """The most that the records can move the weights, over what the noise moves them: if all pull the same way.

    Over T steps that read each of n units at rate q, their clipped gradients add up to q·n·T·C at most; the noise of
    scale σ·C in each of d weights has the norm σ·C·√(T·d).
    """
    units = sum(any(name == "forget" for name, _ in unit.indices) for unit in planned.units)
    mechanism = planned.mechanism
    noise = mechanism.noise_multiplier * math.sqrt(trained_weights)
    return mechanism.sample_rate * units * math.sqrt(mechanism.steps) / noise if noise else math.inf


def check_opacus() -> None:
    """Raises MpuError without Opacus and dp-accounting."""
    for package in ("dp-accounting", "opacus"):
        require(package, "--dp epsilon")


def train_privately(
    model: PreTrainedModel,
    sets: Mapping[str, ExampleSet],
    objective: Objective,
    training: Training,
    *,
    privacy: Privacy,
    planned: Plan,
    on_step: Callable[[Losses, int], None],
    seed: bytes | None = None,
) -> dict[str, float]:
    """Train ``model`` in place; returns the budget spent: epsilon, delta, noise_multiplier, sample_rate, steps.

    ``seed``, 32 bytes, is a new one unless a test gives it; it is never derived from ``training.seed``.
    """
    from opacus import GradSampleModule

    randomness = Randomness(seed or new_seed())
    sampler = randomness.stream("dp samples")
    model.train()
    # Embeddings have no differentiable input, and torch warns about that at every step.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    head = separate_head(model)
    if head and any(p.requires_grad for p in head.parameters()):
        head = None  # Opacus forms its gradients from what goes in and out of it
    wrapped = GradSampleModule(model, loss_reduction="sum")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer(
        model, trained, training, privacy=privacy, mechanism=planned.mechanism, randomness=randomness
    )
    # On average, a step samples up to batch_size units with something to forget, and as many others.
    size = training.micro_batch_size or 2 * training.batch_size
    for _ in range(planned.mechanism.steps):
        # Each unit with its own probability, independently; those without examples add nothing.
        draws = sampler.uniform(len(planned.units)).tolist()
        sampled = [unit for unit, draw in zip(planned.units, draws, strict=True) if draw < unit.rate and unit.indices]
        parts = _parts(sampled, size) or [[]]
        sums: dict[str, list[float]] = {}
        for i, part in enumerate(parts):
            optimizer.signal_skip_step(do_skip=i + 1 < len(parts))
            indices = [index for unit in part for index in unit.indices]
            _loss(wrapped, head, indices, sets=sets, objective=objective, sums=sums).backward()
            _check_rows(trained, len(indices) or 1)
            _add_within_units(trained, part)
            _drop_non_finite(trained)
            optimizer.step()
            optimizer.zero_grad()
        means = {name: sum(values) / max(1, len(values)) for name, values in sums.items()}
        forget_term, retain_term = means.get("forget_term", 0.0), means.get("retain_term")
        total = objective.constants.gamma * forget_term + objective.constants.alpha * (retain_term or 0.0)
        losses = Losses(total, forget_term, retain_term, means.get("forget", 0.0), means.get("retain"))
        on_step(losses, planned.mechanism.steps)
    wrapped.remove_hooks()
    return {
        "epsilon": composed_epsilon([planned.mechanism], privacy.dp_delta, privacy.dp_neighbours),
        "delta": privacy.dp_delta,
        "noise_multiplier": planned.mechanism.noise_multiplier,
        "max_grad_norm": privacy.dp_max_grad_norm,
        "sample_rate": planned.mechanism.sample_rate,
        "steps": planned.mechanism.steps,
    }


def _optimizer(
    model: PreTrainedModel, trained: list[torch.nn.Parameter], training: Training, *, privacy: Privacy,
    mechanism: Mechanism, randomness: Randomness,
) -> Any:  # fmt: skip
    """Opacus's optimiser, with noise from ``randomness``."""
    from opacus.optimizers import DPOptimizer

    class Optimizer(DPOptimizer):
        steps_taken = 0

        def add_noise(self) -> None:
            std = self.noise_multiplier * self.max_grad_norm
            for number, parameter in enumerate(self.params):
                key = randomness.key("dp noise", self.steps_taken, number)
                parameter.grad = with_noise(parameter.summed_grad, std, key).view_as(parameter)
                parameter.summed_grad._processed = True  # as Opacus marks it
            self.steps_taken += 1

    groups = [{"params": trained, "weight_decay": training.weight_decay}]
    return Optimizer(
        make_optimizer(training.optim, groups, float(training.lr), outside_layers(model)),
        noise_multiplier=mechanism.noise_multiplier,
        max_grad_norm=privacy.dp_max_grad_norm,
        expected_batch_size=training.batch_size,
        loss_reduction="mean",
    )


def with_noise(x: torch.Tensor, std: float, key: bytes) -> torch.Tensor:
    """``x`` plus N(0, std²), the normals of ``key`` in order. Drawn and added in float64, on the CPU."""
    if not std:
        return x
    flat, noisy = x.reshape(-1), torch.empty_like(x).reshape(-1)
    for start in range(0, len(flat), NOISE_CHUNK):
        stop = min(start + NOISE_CHUNK, len(flat))
        normals = standard_normals(key, start, stop, double=True)
        noisy[start:stop] = (flat[start:stop].to("cpu", torch.float64) + std * normals).to(x.device, x.dtype)
    return noisy.view(x.shape)


def _parts(units: Sequence[Unit], size: int) -> list[list[Unit]]:
    """Units in parts of about ``size`` examples; none is divided, because its gradient is clipped as one."""
    parts: list[list[Unit]] = []
    part_size = size
    for unit in units:
        if part_size + len(unit.indices) > size and (not parts or parts[-1]):
            parts.append([])
            part_size = 0
        parts[-1].append(unit)
        part_size += len(unit.indices)
    return parts


def _check_rows(trained: Sequence[torch.nn.Parameter], examples: int) -> None:
    """Raises UsageError unless every gradient has a row for each example: layers that see positions as rows (OPT, some
    mixtures) give one for each token, and clipping those would protect tokens, not records."""
    for parameter in trained:
        rows: Any = getattr(parameter, "grad_sample", None)
        if not isinstance(rows, torch.Tensor) or len(rows) != examples:
            raise UsageError(
                "--dp epsilon: a layer of this model has no gradients for each record",
                "use --lora targets that leave it out, such as q_proj,v_proj",
            )


def _add_within_units(trained: Sequence[torch.nn.Parameter], units: Sequence[Unit]) -> None:
    """Gradients of single examples become those of units: (examples, …) to (units, …)."""
    if all(len(unit.indices) == 1 for unit in units):
        return
    sizes = torch.tensor([len(unit.indices) for unit in units])
    for parameter in trained:
        rows: Any = parameter.grad_sample  # type: ignore[attr-defined]
        numbers = torch.repeat_interleave(torch.arange(len(units)), sizes).to(rows.device)
        parameter.grad_sample = rows.new_zeros(len(units), *rows.shape[1:]).index_add_(0, numbers, rows)  # type: ignore[attr-defined]


def _drop_non_finite(trained: Sequence[torch.nn.Parameter]) -> None:
    """Units whose gradients overflow add nothing: a model could be made so that one word spoils a sum."""
    rows: list[Any] = [parameter.grad_sample for parameter in trained]  # type: ignore[attr-defined]
    norms = torch.stack([gradients.flatten(1).norm(dim=1) for gradients in rows]).norm(dim=0)
    finite = norms.isfinite()
    if not finite.all():
        for gradients in rows:
            gradients[~finite] = 0.0


def _loss(
    model: torch.nn.Module,
    head: Head | None,
    indices: Sequence[ExampleIndex],
    *,
    sets: Mapping[str, ExampleSet],
    objective: Objective,
    sums: dict[str, list[float]],
) -> torch.Tensor:
    """The sum of the individual records' losses, from one pass of the model over all of them. With the ``head`` apart,
    logits are of one record's answer at a time."""
    examples: list[Example] = [sets[name].examples[number] for name, number in indices]
    batch = pad(examples or sets["forget"].examples[:1])
    if not indices:  # a step may sample no records, but must still add its noise
        batch["labels"].fill_(IGNORED)
    device = next(model.parameters()).device
    batch = {name: value.to(device) for name, value in batch.items()}
    positions = torch.arange(batch["input_ids"].shape[1], device=device).expand_as(batch["input_ids"])
    with input_of(head) as states:
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=positions,
            use_cache=False,
        ).logits  # fmt: skip
    read = states[0] if head else logits
    # Zero, but a function of the weights: a step that samples no records needs gradients to add its noise to.
    loss = read.sum() * 0.0
    constants = objective.constants
    for i, (name, number) in enumerate(indices):
        example_set = sets[name]
        outputs = {key: value.to(device) for key, value in example_set.collect([number], like=[number]).items()}
        reference = example_set.reference(outputs)
        scores = score(read[i : i + 1], batch["labels"][i : i + 1], head=head, reference=reference)
        forget = name == "forget"
        term = objective.algorithm.forget(scores, None, constants) if forget else objective.retain(scores)
        loss = loss + (constants.gamma if forget else constants.alpha) * term
        sums.setdefault(f"{name}_term", []).append(term.item())
        sums.setdefault(name, []).append(scores.cross_entropy.item())
    return loss
