"""Reading a delta of one's own as its receiver would (``mpu audit-delta``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from mpu_cli.client.leakage import LeakageReading, readings
from mpu_cli.errors import MpuError
from mpu_cli.models.deltas import open_delta
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
    delta_readings = readings(
        loaded, model.checkpoint, delta_checkpoint, encoding.encode(forget), encoding.encode(retain)
    )
    if not delta_readings:
        raise MpuError(f"{delta}: changes nothing that these readings look at")
    return delta_readings
