"""Training with differential privacy for the client's records: DP-SGD (Abadi et al., 2016) through Opacus.

The unit is a record of the forget or of the retain set. Each step takes every record with a chance of its own (Poisson
sampling), clips the gradient of each record's loss, and adds Gaussian noise. The server is told the bound
with the delta; what exactly was spent stays with the client, for it depends on how many records there are.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from mpu_cli.client.data import IGNORED, Example, pad
from mpu_cli.client.frozen import Reference
from mpu_cli.client.losses import ALGORITHMS, RETAIN, Algorithm, Frozen, Part, Settings, score
from mpu_cli.client.optimizers import make_optimizer
from mpu_cli.client.training import ExampleSet, Loop, Losses, outside_layers
from mpu_cli.errors import MpuError, UsageError

ACCOUNTANT = "rdp"


@dataclass(frozen=True)
class Privacy:
    """What was asked for: (ε, δ) for one delta, and the norm at which the gradient of a record is clipped."""

    epsilon: float
    delta: float
    max_grad_norm: float


def check(algorithm: str, retain_loss: str) -> None:
    """UsageError for losses that are not made here record by record."""
    chosen = ALGORITHMS[algorithm]
    if chosen.alternate or chosen.hidden:
        raise UsageError(f"--dp-epsilon does not work with {algorithm}: its loss is no sum over single records")
    if RETAIN[retain_loss][1] == "hidden":
        raise UsageError(f"--dp-epsilon does not work with --retain-loss {retain_loss}; use nll or kl")


def train_privately(
    model: PreTrainedModel,
    sets: Mapping[str, ExampleSet],
    *,
    algorithm: Algorithm,
    settings: Settings,
    retain_loss: str,
    epochs: int,
    loop: Loop,
    privacy: Privacy,
    on_step: Callable[[Losses, int], None],
    noise_multiplier: float | None = None,
) -> dict[str, float]:
    """Train ``model`` in place; returns the budget spent: epsilon, delta, noise_multiplier, sample_rate, steps.

    ``noise_multiplier`` overrides the one that meets ``privacy``. The generators of noise and samples are torch's,
    seeded by the operating system, never from ``loop.seed``: who knows the noise could take it off.
    """
    try:
        from opacus import GradSampleModule
        from opacus.accountants import create_accountant
        from opacus.accountants.utils import get_noise_multiplier
        from opacus.optimizers import DPOptimizer
    except ImportError as error:
        raise MpuError("--dp-epsilon needs Opacus; install it with pip install opacus") from error

    warnings.filterwarnings("ignore", message="Optimal order is the largest alpha")  # the bound holds, if not the best
    rates = {name: min(1.0, loop.batch_size / len(data.examples)) for name, data in sets.items()}
    rate = max(rates.values())
    steps = epochs * -(-len(sets["forget"].examples) // loop.batch_size)
    if noise_multiplier is None:
        try:
            noise_multiplier = get_noise_multiplier(
                target_epsilon=privacy.epsilon,
                target_delta=privacy.delta,
                sample_rate=rate,
                steps=steps,
                accountant=ACCOUNTANT,
            )
        except ValueError as error:
            raise UsageError(
                f"--dp-epsilon {privacy.epsilon:g} --dp-delta {privacy.delta:g}: no noise of a usable size gives that "
                f"in {steps} steps; raise them, or take fewer --epochs"
            ) from error
    generator = torch.Generator(model.device).manual_seed(secrets.randbits(63))
    sampler = torch.Generator().manual_seed(secrets.randbits(63))
    model.train()
    # Embeddings have no input to differentiate, and torch says so at every step.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    wrapped = GradSampleModule(model, loss_reduction="sum")
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained, "weight_decay": loop.weight_decay}]
    optimizer = DPOptimizer(
        make_optimizer(loop.optimizer, groups, loop.lr, outside_layers(model)),
        noise_multiplier=noise_multiplier,
        max_grad_norm=privacy.max_grad_norm,
        expected_batch_size=loop.batch_size,
        loss_reduction="mean",
        generator=generator,
    )
    accountant = create_accountant(ACCOUNTANT)
    size = loop.micro_batch_size or 2 * loop.batch_size
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
            loss = _loss(wrapped, part, sets, algorithm, settings, RETAIN[retain_loss][0], sums)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=rate)
        means = {name: sum(values) / max(1, len(values)) for name, values in sums.items()}
        terms = means.get("forget_term", 0.0), means.get("retain_term")
        total = settings.gamma * terms[0] + settings.alpha * (terms[1] or 0.0)
        on_step(Losses(total, *terms, means.get("forget", 0.0), means.get("retain")), steps)
    wrapped.remove_hooks()
    return {
        "epsilon": accountant.get_epsilon(privacy.delta) if noise_multiplier else float("inf"),
        "delta": privacy.delta,
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": privacy.max_grad_norm,
        "sample_rate": rate,
        "steps": steps,
    }


def _loss(
    model: torch.nn.Module,
    units: Sequence[tuple[str, int]],
    sets: Mapping[str, ExampleSet],
    algorithm: Algorithm,
    settings: Settings,
    retain_term: Callable[[Part], torch.Tensor],
    sums: dict[str, list[float]],
) -> torch.Tensor:
    """Σ over records of each one's own loss, from one pass of the model over all of them."""
    examples: list[Example] = [sets[name].examples[number] for name, number in units]
    batch = pad(examples or sets["forget"].examples[:1])
    if not units:  # a step may draw nobody; its noise is due all the same
        batch["labels"].fill_(IGNORED)
    device = next(model.parameters()).device
    batch = {name: value.to(device) for name, value in batch.items()}
    positions = torch.arange(batch["input_ids"].shape[1], device=device).expand_as(batch["input_ids"])
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=positions, use_cache=False
    ).logits
    loss = logits.sum() * 0.0
    for i, (name, number) in enumerate(units):
        scores = score(logits[i : i + 1], batch["labels"][i : i + 1])
        part = Part(scores, _frozen(sets[name].reference, number, device))
        forget = name == "forget"
        term = algorithm.forget(part, None, settings) if forget else retain_term(part)
        loss = loss + (settings.gamma if forget else settings.alpha) * term
        sums.setdefault(f"{name}_term", []).append(term.item())
        sums.setdefault(name, []).append(scores.cross_entropy.item())
    return loss


def _frozen(reference: Reference, number: int, device: torch.device) -> Frozen:
    kept = {name: value.to(device) for name, value in reference.collect([number], like=[number]).items()}
    return reference.frozen(kept)
