"""The learning rate, the number of epochs, the precision and the size of micro-batches where none are given.

Adam's steps are about as large as the rate in every weight, whatever the gradient, so that steps · rate is how far each
weight can go. How far unlearning has to go falls with the size of the model: on 5 M and 135 M parameters, and with the
paper's settings on 1 B, NPO forgets at steps · rate · √weights of 6 to 12.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mpu_cli.errors import UsageError
from mpu_cli.model.device import device_of
from mpu_cli.model.source import Model
from mpu_cli.options.unlearning import AUTO, Training, Unlearning
from mpu_cli.training.losses import algorithm_named
from mpu_cli.training.optimizers import OPTIMIZERS
from mpu_cli.wording import counted

ADAM_REACH = 8.0  # steps · rate · √weights
# rate · √weights in long trainings, as there is more to forget or to learn: 1e-5 at 1B, the paper's
LEAST_REACH_PER_STEP = 0.32
UNBOUNDED = 0.25  # times these, for losses that fall without end
LOW_RANK = 0.25  # times these, for factors, whose product moves further
LEAST_STEPS = 10  # fewer, larger steps damage what should stay
SCORED_TOGETHER = 64  # records, on an accelerator
LARGE_MODEL_WEIGHTS = 50_000_000  # weights, from which products take most of the time
HARDLY_FORGETS = 0.1  # of the usual rate, below which little is forgotten


def remarks_on_warmup(training: Training, steps: int) -> list[str]:
    """A sentence if a training of so many ``steps`` ends while its rate still rises."""
    if training.warmup_steps <= steps:
        return []
    length = counted(steps, "step")
    return [
        f"--training warmup_steps={training.warmup_steps}: the training has {length}, so its rate never gets to --lr"
    ]


def with_epochs(options: Unlearning, records: int) -> Unlearning:
    """``options`` with the paper's epochs, or as many more as it takes to LEAST_STEPS, if neither they nor a rate are
    given; ``records``: how many are to be forgotten."""
    if options.epochs is not None or options.training.lr != AUTO:
        return options
    per_epoch = max(1, -(-records // options.training.batch_size))
    return replace(options, epochs=max(algorithm_named(options.algo).epochs, -(-LEAST_STEPS // per_epoch)))


def usual_rate(options: Unlearning, weights: int, steps: int) -> float | None:
    """The rate for ``steps`` steps on ``weights`` trained weights; None for an optimiser whose steps are in proportion
    to gradients, which no rate suits in general."""
    if not OPTIMIZERS[options.training.optim].normalised:
        return None
    share = 1.0
    if not algorithm_named(options.algo).bounded:
        share *= UNBOUNDED
    if options.lora.is_on:
        share *= LOW_RANK
    reach_per_step = max(ADAM_REACH / max(LEAST_STEPS, steps), LEAST_REACH_PER_STEP)
    return _rounded_rate(share * reach_per_step, weights)


def with_rate(options: Unlearning, weights: int, steps: int) -> Training:
    """The options of training, with a number for the rate."""
    if options.training.lr != AUTO:
        return options.training
    usual = usual_rate(options, weights, steps)
    if usual is None:
        raise _needs_rate(options.training.optim)
    return replace(options.training, lr=usual)


def with_finetuning_rate(training: Training, weights: int) -> Training:
    """``training`` with a number for its rate, to learn records."""
    if training.lr != AUTO:
        return training
    if not OPTIMIZERS[training.optim].normalised:
        raise _needs_rate(training.optim)
    return replace(training, lr=_rounded_rate(LEAST_REACH_PER_STEP, weights))


def _needs_rate(optim: str) -> UsageError:
    return UsageError(f"--optim {optim}: needs a rate, as its steps depend on the size of gradients", "set --lr")


def with_precision(training: Training, model: Model) -> Training:
    """``training`` of ``model`` with a precision that its device has: where that is left open, mixed for a large model
    where products are faster in bfloat16."""
    if training.precision != AUTO:
        return training
    weights = sum(info.elements for info in model.checkpoint.tensors.values())
    pays = weights >= LARGE_MODEL_WEIGHTS and _computes_in_bfloat16(device_of(training.device))
    return replace(training, precision="mixed" if pays else "float32")


def records_at_once(training: Training, device: torch.device, of_step: int) -> int:
    """The number of a step's records, ``of_step``, that go through the model together: where that is left open, all on
    an accelerator, which one pass keeps busy, and a batch on a processor, to which it is all the same."""
    if training.micro_batch_size:
        return training.micro_batch_size
    return of_step if device.type != "cpu" else training.batch_size


def scored_at_once(training: Training, device: torch.device) -> int:
    """The number of records that are scored together, of which nothing is kept for a backward pass."""
    return training.micro_batch_size or max(training.batch_size, 1 if device.type == "cpu" else SCORED_TOGETHER)


def _computes_in_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    features = torch.cpu.get_capabilities()
    return device.type == "cpu" and bool(features.get("amx_bf16") or features.get("avx512_bf16"))


def _rounded_rate(distance: float, weights: int) -> float:
    return float(f"{distance / max(1, weights) ** 0.5:.2g}")
