"""Fine-tuning a model to know records: descends the loss that unlearning climbs, with the same trainer."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mpu_cli.errors import Diverged, MpuError, UsageError
from mpu_cli.files.manifest import MANIFEST_NAME, read_model_manifest
from mpu_cli.files.reader import Checkpoint, all_finite, quoted_list
from mpu_cli.files.transaction import Transaction
from mpu_cli.files.writer import CheckpointWriter
from mpu_cli.model.device import memory_in_mind
from mpu_cli.model.load import limits_of, load, releasing_memory
from mpu_cli.model.source import Model, carry_small_files
from mpu_cli.model.tensors import check_stored, in_memory
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.unlearning import Logging, Prompts, Training
from mpu_cli.records.encode import Encoding, encoding_of
from mpu_cli.records.forms import Record
from mpu_cli.subprocesses import process_count
from mpu_cli.training.checks import PRECISIONS, check_training
from mpu_cli.training.execution import computing_in, in_precision
from mpu_cli.training.loop import NO_LOGGING, Losses, schedule, seed_training, train
from mpu_cli.training.losses import Algorithm, Constants, Objective
from mpu_cli.training.rates import with_finetuning_rate, with_precision
from mpu_cli.training.reference import ExampleSet
from mpu_cli.training.unlearn import ADVICE

# Learning records means descending the loss that gradient ascent climbs.
_DESCENT = Algorithm(lambda learned, _alternate, _constants: learned.cross_entropy, Constants(alpha=0))
MEMORISE = Objective(_DESCENT, _DESCENT.constants, "nll")


def memorise(
    model: torch.nn.Module,
    encoding: Encoding,
    records: Sequence[Record],
    *,
    epochs: int,
    training: Training,
    logging: Logging = NO_LOGGING,
    on_step: Callable[[Losses, int], None],
    warn: Callable[[str], None] = lambda _: None,
) -> None:
    """Train ``model`` in place on the answers to ``records``."""
    examples = encoding.encode(records)
    if not examples:
        raise MpuError("no record has two tokens or more, so there is nothing to learn from")
    steps = schedule(len(examples), 0, epochs=epochs, batch_size=training.batch_size, seed=training.seed)
    sets = {"forget": ExampleSet(examples)}
    training = with_finetuning_rate(training, sum(p.numel() for p in model.parameters() if p.requires_grad))
    train(model, steps, sets, MEMORISE, training, logging=logging, on_step=on_step, warn=warn)


@dataclass(frozen=True)
class Finetuned:
    """The result of ``finetune``: the model, the loss of each step, and the share of the change's norm that storage in
    the tensors' own dtypes rounded away."""

    path: Path
    losses: list[float]
    lost_to_rounding: float


@releasing_memory
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
    """Train ``model`` on ``records`` and save it in ``out``: each tensor in its own dtype, and the files beside it."""
    if epochs < 1:
        raise UsageError(f"--epochs {epochs}: must be at least 1")
    if process_count() > 1:
        raise UsageError("finetune works in one process", "start it without torchrun or accelerate launch")
    check_training(training, prompts.date)
    losses: list[float] = []

    def record(step: Losses, total: int) -> None:
        losses.append(step.loss)
        observer.advance(epochs / total, f"loss {step.loss:.3f}")

    training = with_precision(training, model)
    dtype = PRECISIONS[training.precision]
    with (
        memory_in_mind(ADVICE), seed_training(training), computing_in(training.precision, dtype),
        Transaction(force=force) as transaction,
    ):  # fmt: skip
        target = transaction.add(out, directory=True)
        loaded, tokenizer = load(model, dtype, training.device, training.attention)
        check_stored(loaded, model.checkpoint)
        in_precision(loaded, training.precision)
        encoding = encoding_of(tokenizer, prompts, prompts.template, limits_of(loaded))
        observer.stage("finetune", epochs, "epochs")
        memorise(
            loaded, encoding, records, epochs=epochs, training=training, logging=logging, on_step=record,
            warn=observer.warn,
        )  # fmt: skip
        for remark in encoding.remarks(len(records)):
            observer.warn(remark)
        if not all(all_finite(p.detach()) for p in loaded.parameters()):
            raise Diverged("weights are")
        lost = _write(loaded, model.checkpoint, target)
        if behind := carry_small_files(model, target):
            observer.note(f"{model.folder}: the result does not get {quoted_list(behind)}")
        if read_model_manifest(model.folder):  # the model of a round, repaired, is still that round's
            shutil.copyfile(model.folder / MANIFEST_NAME, target / MANIFEST_NAME)
        else:
            (target / MANIFEST_NAME).write_text(json.dumps({"format": "mpu-model"}) + "\n", encoding="utf-8")
    return Finetuned(out, losses, lost)


def _write(trained: PreTrainedModel, before: Checkpoint, folder: Path) -> float:
    """Save ``trained`` in ``folder`` as ``before`` is stored: names, shards, and the dtype of each tensor. Tensors that
    are not parameters are copied. Returns ‖stored − trained‖ / ‖trained − before‖ over the parameters."""
    views = in_memory(trained, before.tensors)
    specs = {name: (info.dtype, info.shape) for name, info in before.tensors.items()}
    lost = moved = 0.0
    with CheckpointWriter(folder, specs, {}, like=before) as writer:
        for name in specs:
            old, target = before.tensor(name), writer.tensor(name)
            if name not in views:
                target.copy_(old)
                continue
            after = views[name].detach().cpu().double()
            target.copy_(after)
            lost += float((target - after).square().sum())
            moved += float((after - old).square().sum())
    return math.sqrt(lost / moved) if moved else 0.0
