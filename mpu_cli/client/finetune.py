"""Making a model that knows records: the descent of the loss that unlearning climbs, with the same trainer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mpu_cli.checkpoint.dtypes import TORCH, all_finite
from mpu_cli.checkpoint.reader import Checkpoint
from mpu_cli.checkpoint.source import Model
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.client.data import Encoding
from mpu_cli.client.dates import parse_date
from mpu_cli.client.frozen import Reference
from mpu_cli.client.loading import as_directory, load, memory_in_mind
from mpu_cli.client.losses import Algorithm, Settings
from mpu_cli.client.precision import as_wide_as
from mpu_cli.client.records import Record
from mpu_cli.client.training import ExampleSet, Loop, Losses, schedule, seeded, train
from mpu_cli.client.unlearn import ADVICE, PRECISIONS, check_loop
from mpu_cli.errors import MpuError
from mpu_cli.manifest import MANIFEST_NAME

# Learning records is the descent of the loss that gradient ascent climbs.
MEMORISE = Algorithm(lambda learned, _alternate, _settings: learned.scores.cross_entropy, Settings(alpha=0))


def memorise(
    model: torch.nn.Module,
    encoding: Encoding,
    records: Sequence[Record],
    *,
    epochs: int,
    loop: Loop,
    on_step: Callable[[Losses, int], None],
) -> None:
    """Train ``model`` in place on the answers to ``records``. Raises MpuError if there is nothing to learn."""
    examples = encoding.encode(records)
    if not examples:
        raise MpuError("no record of two tokens or more; there is nothing to learn from them")
    steps = schedule(len(examples), 0, epochs=epochs, batch_size=loop.batch_size, seed=loop.seed)
    train(
        model, steps, {"forget": ExampleSet(examples, Reference())}, algorithm=MEMORISE, settings=MEMORISE.settings,
        retain_loss="nll", loop=loop, on_step=on_step,
    )  # fmt: skip


def finetune(
    model: Model,
    records: Sequence[Record],
    *,
    epochs: int,
    loop: Loop,
    precision: str,
    device: str,
    template: str,
    system_prompt: str,
    date: str,
    out: Path,
    force: bool,
    on_step: Callable[[Losses, int], None],
) -> float:
    """Train ``model`` on ``records`` and save it, in its own dtype, in ``out``.

    Returns the share of the change's norm that storage rounded away. Raises MpuError for records or a model that
    cannot be used, and if training diverged.
    """
    check_loop(loop, epochs, device)
    parse_date(date)
    own = replace(loop, resume=None, deterministic=False)
    with (
        memory_in_mind(ADVICE), seeded(own), as_wide_as(PRECISIONS[precision]), Transaction(force=force) as transaction,
        as_directory(model) as folder,
    ):  # fmt: skip
        target = transaction.add(out, directory=True)
        loaded, tokenizer = load(folder, PRECISIONS[precision], device)
        limit = getattr(loaded.config, "max_position_embeddings", None)
        memorise(
            loaded, Encoding(tokenizer, template, system_prompt, limit, date=date), records, epochs=epochs, loop=own,
            on_step=on_step,
        )  # fmt: skip
        if not all(all_finite(p.detach()) for p in loaded.parameters()):
            raise MpuError("training diverged: weights are no longer finite; lower --lr, or use fewer --epochs")
        largest = max(model.checkpoint.tensors.values(), key=lambda info: info.nbytes)
        stored = TORCH[largest.dtype]
        lost = _rounded_away(loaded, stored, model.checkpoint)
        loaded.to(stored).save_pretrained(target)
        tokenizer.save_pretrained(target)
        (target / MANIFEST_NAME).write_text(json.dumps({"format": "mpu-model"}) + "\n", encoding="utf-8")
    return lost


def _rounded_away(trained: PreTrainedModel, stored: torch.dtype, before: Checkpoint) -> float:
    """‖stored − trained‖ / ‖trained − before‖ over the parameters that the files hold under their names."""
    lost = moved = 0.0
    for name, parameter in trained.named_parameters():
        held = name if name in before.tensors else name.removeprefix(f"{trained.base_model_prefix}.")
        if held in before.tensors:
            after = parameter.detach().cpu().double()
            lost += float((after.to(stored) - after).square().sum())
            moved += float((after - before.tensor(held)).square().sum())
    return math.sqrt(lost / moved) if moved else 0.0
