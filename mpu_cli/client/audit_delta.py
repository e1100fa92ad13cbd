"""Reading a delta of one's own as its receiver would (``mpu audit-delta``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from mpu_cli.client.leakage import LeakageReading, candidates_reading, readings
from mpu_cli.errors import MpuError
from mpu_cli.models.answers import Answers
from mpu_cli.models.deltas import add_delta, open_delta
from mpu_cli.models.limits import longest_input, vocabulary_size
from mpu_cli.models.loading import load
from mpu_cli.models.source import open_model
from mpu_cli.options.unlearning import Prompts
from mpu_cli.records.encoding import encoding_of
from mpu_cli.records.record import Record


def audit(
    copy: str, delta: Path, forget: Sequence[Record], retain: Sequence[Record], prompts: Prompts
) -> list[LeakageReading]:
    """What the rules of ``leakage`` read off ``delta``, made from ``copy`` with these records.

    Raises MpuError if the delta is not the copy's, or nothing in it can be read by these rules.
    """
    model = open_model(copy, links=False)
    delta_checkpoint = open_delta(model, delta)
    loaded, tokenizer = load(model, torch.float32, "cpu")
    encoding = encoding_of(
        tokenizer, prompts, prompts.template, longest_input(loaded), vocabulary=vocabulary_size(loaded)
    )
    forget_examples, retain_examples = encoding.encode(forget), encoding.encode(retain)
    delta_readings = readings(loaded, model.checkpoint, delta_checkpoint, forget_examples, retain_examples)
    if not delta_readings:
        raise MpuError(f"{delta}: changes nothing that these readings look at")
    if retain_examples:
        answers = [Answers(forget_examples), Answers(retain_examples)]
        losses = [each.losses(loaded) for each in answers]
        add_delta(loaded, model, delta_checkpoint)
        changes = [
            [after - before for before, after in zip(losses_before, each.losses(loaded), strict=True)]
            for losses_before, each in zip(losses, answers, strict=True)
        ]
        delta_readings.append(candidates_reading(*changes))
    return delta_readings
