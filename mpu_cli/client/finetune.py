"""Fine-tuning a model to know records: descends the loss that unlearning climbs, with the same trainer."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mpu_cli.checkpoint.dtypes import TORCH, all_finite
from mpu_cli.checkpoint.reader import Checkpoint
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.client.checks import PRECISIONS, check_training
from mpu_cli.client.frozen import Reference
from mpu_cli.client.losses import Algorithm, Constants, Objective
from mpu_cli.client.precision import computing_in, in_precision
from mpu_cli.client.rate import with_finetuning_rate
from mpu_cli.client.schedule import ExampleSet, schedule
from mpu_cli.client.trainer import Losses
from mpu_cli.client.training import NO_LOGGING, seeded, train
from mpu_cli.client.unlearn import ADVICE
from mpu_cli.errors import Diverged, MpuError, UsageError
from mpu_cli.manifest import MANIFEST_NAME
from mpu_cli.models.limits import longest_input, vocabulary_size
from mpu_cli.models.loading import letting_go, load, memory_in_mind
from mpu_cli.models.source import Model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.unlearning import Logging, Prompts, Training
from mpu_cli.records.encoding import Encoding, encoding_of
from mpu_cli.records.record import Record

# Learning records means descending the loss that gradient ascent climbs.
_ONLY = Algorithm(lambda learned, _alternate, _constants: learned.scores.cross_entropy, Constants(alpha=0))
MEMORISE = Objective(_ONLY, _ONLY.constants, "nll")


def memorise(
    model: torch.nn.Module,
    encoding: Encoding,
    records: Sequence[Record],
    *,
    epochs: int,
    training: Training,
    logging: Logging = NO_LOGGING,
    on_step: Callable[[Losses, int], None],
) -> None:
    """Train ``model`` in place on the answers to ``records``. Raises MpuError if there is nothing to learn."""
    examples = encoding.encode(records)
    if not examples:
        raise MpuError("no record has two tokens or more, so there is nothing to learn from")
    steps = schedule(len(examples), 0, epochs=epochs, batch_size=training.batch_size, seed=training.seed)
    sets = {"forget": ExampleSet(examples, Reference())}
    training = with_finetuning_rate(training, sum(p.numel() for p in model.parameters() if p.requires_grad))
    train(model, steps, sets, MEMORISE, training, logging=logging, on_step=on_step)


@dataclass(frozen=True)
class Finetuned:
    """What ``finetune`` made: the model, the loss of each step, and the share of the change's norm that storage in the
    model's own dtype rounded away."""

    path: Path
    losses: list[float]
    lost_to_rounding: float


@letting_go
def finetune(
    model: Model,
    records: Sequence[Record],
    training: Training,
    prompts: Prompts,
    *,
    epochs: int,
    out: Path,
    force: bool = False,
    logging: Logging = NO_LOGGING,
    observer: Observer = SILENT,
) -> Finetuned:
    """Train ``model`` on ``records`` and save it, in its own dtype, in ``out``.

    Raises MpuError for records or a model that cannot be used, and if training diverged.
    """
    if epochs < 1:
        raise UsageError(f"--epochs {epochs}: must be at least 1")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("finetune works in one process", "start it without torchrun or accelerate launch")
    check_training(training, prompts.date)
    losses: list[float] = []

    def record(step: Losses, total: int) -> None:
        losses.append(step.loss)
        observer.advance(epochs / total, f"loss {step.loss:.3f}")

    dtype = PRECISIONS[training.precision]
    with (
        memory_in_mind(ADVICE), seeded(training), computing_in(training.precision, dtype),
        Transaction(force=force) as transaction,
    ):  # fmt: skip
        target = transaction.add(out, directory=True)
        loaded, tokenizer = load(model, dtype, training.device, training.attention)
        in_precision(loaded, training.precision)
        encoding = encoding_of(
            tokenizer, prompts, prompts.template, longest_input(loaded), vocabulary=vocabulary_size(loaded)
        )
        observer.stage("finetune", epochs, "epochs")
        memorise(loaded, encoding, records, epochs=epochs, training=training, logging=logging, on_step=record)
        for remark in encoding.remarks(len(records)):
            observer.note(remark)
        if not all(all_finite(p.detach()) for p in loaded.parameters()):
            raise Diverged("weights are")
        largest = max(model.checkpoint.tensors.values(), key=lambda info: info.nbytes)
        stored = TORCH[largest.dtype]
        lost = _rounded_away(loaded, stored, model.checkpoint)
        loaded.to("cpu", stored).save_pretrained(target)
        tokenizer.save_pretrained(target)
        (target / MANIFEST_NAME).write_text(json.dumps({"format": "mpu-model"}) + "\n", encoding="utf-8")
    return Finetuned(out, losses, lost)


def _rounded_away(trained: PreTrainedModel, stored: torch.dtype, before: Checkpoint) -> float:
    """‖stored − trained‖ / ‖trained − before‖ over the parameters that are stored in the files by name."""
    lost = moved = 0.0
    for name, parameter in trained.named_parameters():
        held = name if name in before.tensors else name.removeprefix(f"{trained.base_model_prefix}.")
        if held in before.tensors:
            after = parameter.detach().cpu().double()
            lost += float((after.to(stored) - after).square().sum())
            moved += float((after - before.tensor(held)).square().sum())
    return math.sqrt(lost / moved) if moved else 0.0
