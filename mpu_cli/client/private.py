"""Training with differential privacy for the client's records: DP-SGD (Abadi et al., 2016) with Opacus.

The unit of protection is one record of the forget or the retain set. Each step samples every record independently
(Poisson sampling), clips the gradient of each record's loss, and adds Gaussian noise. The delta reports the bound to
the server; what was actually spent stays with the client, because it depends on the number of records.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from mpu_cli.client.frozen import Reference
from mpu_cli.client.losses import Frozen, Objective, Part, score
from mpu_cli.client.optimizers import make_optimizer
from mpu_cli.client.training import ExampleSet, Losses, outside_layers
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.options.unlearning import Privacy, Training
from mpu_cli.records.encoding import IGNORED, Example, pad

ACCOUNTANT = "rdp"


def check_objective(algo: str, objective: Objective) -> None:
    """Raises UsageError if the losses are not computed record by record here."""
    if objective.algorithm.alternate or objective.algorithm.hidden:
        raise UsageError(f"--dp-epsilon does not work with {algo}: its loss is not a sum over single records")
    if objective.retain_asks == "hidden":
        raise UsageError(f"--dp-epsilon does not work with --retain-loss {objective.retain_loss}", "use nll or kl")


def train_privately(
    model: PreTrainedModel,
    sets: Mapping[str, ExampleSet],
    objective: Objective,
    training: Training,
    privacy: Privacy,
    *,
    epochs: int,
    on_step: Callable[[Losses, int], None],
    noise_multiplier: float | None = None,
    copies: int = 1,
) -> dict[str, float]:
    """Train ``model`` in place; returns the budget spent: epsilon, delta, noise_multiplier, sample_rate, steps, and
    what ``copies`` such trainings spend together at the same delta: they compose as their steps one after the other.

    ``noise_multiplier`` overrides the one that meets ``privacy``. The generators of noise and samples are torch's,
    seeded by the operating system, never from ``training.seed``: who knows the noise could take it off.
    """
    try:
        from opacus import GradSampleModule
        from opacus.accountants import create_accountant
        from opacus.accountants.utils import get_noise_multiplier
        from opacus.optimizers import DPOptimizer
    except ImportError as error:
        raise MpuError("--dp-epsilon needs Opacus", "install it with pip install opacus") from error

    warnings.filterwarnings("ignore", message="Optimal order is the largest alpha")  # still a bound, if not the best
    if any(p.requires_grad and ".experts." in name for name, p in model.named_parameters()):
        raise UsageError(
            "--dp-epsilon: experts have no gradients for each record",
            "use --lora-rank with --lora-targets that leave the experts out",
        )
    rates = {name: min(1.0, training.batch_size / len(data.examples)) for name, data in sets.items()}
    rate = max(rates.values())
    steps = epochs * -(-len(sets["forget"].examples) // training.batch_size)
    if noise_multiplier is None:
        try:
            noise_multiplier = get_noise_multiplier(
                target_epsilon=privacy.dp_epsilon,
                target_delta=privacy.dp_delta,
                sample_rate=rate,
                steps=steps,
                accountant=ACCOUNTANT,
            )
        except ValueError as error:
            raise UsageError(
                f"--dp-epsilon {privacy.dp_epsilon:g} --dp-delta {privacy.dp_delta:g}: no usable noise level achieves "
                f"this in {steps} steps",
                "raise them, or use fewer --epochs",
            ) from error
    generator = torch.Generator(model.device).manual_seed(secrets.randbits(63))
    sampler = torch.Generator().manual_seed(secrets.randbits(63))
    model.train()
    # Embeddings have no differentiable input, and torch warns about that at every step.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    wrapped = GradSampleModule(model, loss_reduction="sum")
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained, "weight_decay": training.weight_decay}]
    optimizer = DPOptimizer(
        make_optimizer(training.optim, groups, training.lr, outside_layers(model)),
        noise_multiplier=noise_multiplier,
        max_grad_norm=privacy.dp_max_grad_norm,
        expected_batch_size=training.batch_size,
        loss_reduction="mean",
        generator=generator,
    )
    accountant = create_accountant(ACCOUNTANT)
    size = training.micro_batch_size or 2 * training.batch_size
    for _ in range(steps):
        units = [
            (name, number)
            for name, data in sets.items()
            for number in torch.nonzero(torch.rand(len(data.examples), generator=sampler) < rates[name])[:, 0].tolist()
        ]
        parts = [units[start : start + size] for start in range(0, len(units), size)] or [[]]
        sums: dict[str, list[float]] = {}
        for i, part in enumerate(parts):
            optimizer.signal_skip_step(do_skip=i + 1 < len(parts))
            loss = _loss(wrapped, part, sets, objective, sums)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=rate)
        means = {name: sum(values) / max(1, len(values)) for name, values in sums.items()}
        terms = means.get("forget_term", 0.0), means.get("retain_term")
        total = objective.constants.gamma * terms[0] + objective.constants.alpha * (terms[1] or 0.0)
        on_step(Losses(total, *terms, means.get("forget", 0.0), means.get("retain")), steps)
    wrapped.remove_hooks()
    one = accountant.get_epsilon(privacy.dp_delta) if noise_multiplier else float("inf")
    accountant.history = [(noise_multiplier, rate, steps * copies)]
    return {
        "epsilon": one,
        "copies": copies,
        "epsilon_of_all_copies": accountant.get_epsilon(privacy.dp_delta) if noise_multiplier else float("inf"),
        "delta": privacy.dp_delta,
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": privacy.dp_max_grad_norm,
        "sample_rate": rate,
        "steps": steps,
    }


def _loss(
    model: torch.nn.Module,
    units: Sequence[tuple[str, int]],
    sets: Mapping[str, ExampleSet],
    objective: Objective,
    sums: dict[str, list[float]],
) -> torch.Tensor:
    """The sum of the individual records' losses, from one pass of the model over all of them."""
    examples: list[Example] = [sets[name].examples[number] for name, number in units]
    batch = pad(examples or sets["forget"].examples[:1])
    if not units:  # a step may sample no records, but must still add its noise
        batch["labels"].fill_(IGNORED)
    device = next(model.parameters()).device
    batch = {name: value.to(device) for name, value in batch.items()}
    positions = torch.arange(batch["input_ids"].shape[1], device=device).expand_as(batch["input_ids"])
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=positions, use_cache=False
    ).logits
    loss = logits.sum() * 0.0
    constants = objective.constants
    for i, (name, number) in enumerate(units):
        scores = score(logits[i : i + 1], batch["labels"][i : i + 1])
        part = Part(scores, _frozen(sets[name].reference, number, device))
        forget = name == "forget"
        term = objective.algorithm.forget(part, None, constants) if forget else objective.retain(part)
        loss = loss + (constants.gamma if forget else constants.alpha) * term
        sums.setdefault(f"{name}_term", []).append(term.item())
        sums.setdefault(name, []).append(scores.cross_entropy.item())
    return loss


def _frozen(reference: Reference, number: int, device: torch.device) -> Frozen:
    kept = {name: value.to(device) for name, value in reference.collect([number], like=[number]).items()}
    return reference.frozen(kept)
