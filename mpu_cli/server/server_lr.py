"""How far to go along an update: the largest step at which records of the server's own stay as likely as asked for.

An update found on a degraded copy is smaller than one found on the model itself, for the same forgetting
(docs/protection.md); then a step above 1 is right, and how far above is for records that must not suffer to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.errors import MpuError
from mpu_cli.models.source import Model, open_model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.publishing import AUTO, Aggregating, ServerRate
from mpu_cli.records.forms import parse_columns
from mpu_cli.records.reading import read_records

MAX_STEP = 8.0  # times the update
CLOSER = 5  # halvings of the interval in which the step lies, once it is known


@dataclass(frozen=True)
class ServerStep:
    """The step that was chosen, and the loss per answer token, in nats, at each that was tried (0: of the base)."""

    chosen: float
    max_rise: float
    losses: dict[float, float]

    @property
    def curve(self) -> list[tuple[float, float]]:
        return sorted(self.losses.items())


def settle_server_lr(
    base: Model,
    options: Aggregating,
    write: Callable[[Path, Aggregating], object],
    beside: Path,
    observer: Observer = SILENT,
) -> tuple[Aggregating, ServerStep | None]:
    """``options`` with a number for ``server_lr``, and how it was found if it was not given.

    ``write`` writes the model with the update times what the options say into a folder; the folder is made beside
    ``beside``. Raises MpuError if already the smallest step costs too much.
    """
    if options.server_lr != AUTO:
        return options, None
    assert options.probe is not None  # Aggregating checks it
    read_records(options.probe, columns=parse_columns(options.probe_columns))  # before the work
    with Transaction() as transaction:
        folder = transaction.scratch(beside.absolute().parent)
        write(folder, replace(options, server_lr=1.0, dtype="float32", max_norm=None))
        step = choose_step(base, open_model(str(folder)), options, observer)
    return replace(options, server_lr=step.chosen), step


def choose_step(base: Model, updated: Model, options: ServerRate, observer: Observer = SILENT) -> ServerStep:
    """The largest step from ``base`` through ``updated``, which is step 1, at which the loss on --probe has risen by
    at most --max-rise; at most MAX_STEP. Holds one model in float32. Raises MpuError if none is found."""
    from mpu_cli.models.answers import read_answers  # with transformers, which aggregate does not need otherwise
    from mpu_cli.models.loading import load
    from mpu_cli.models.tensor_names import in_memory

    model, tokenizer = load(base, torch.float32, "auto")
    probe, max_rise = options.probe, options.max_rise
    assert probe is not None
    answers = read_answers(probe, tokenizer, options.probe_columns)
    places = in_memory(model, base.checkpoint.tensors)
    losses = {0.0: answers.loss(model)}
    observer.stage("step", 4 + CLOSER, "tried")

    def costs_too_much(step: float) -> bool:
        for name, view in places.items():
            before, after = (
                source_model.checkpoint.tensor(name).to(view.device, view.dtype) for source_model in (base, updated)
            )
            view.copy_(torch.lerp(before, after, step))
        losses[step] = answers.loss(model)
        observer.advance(1)
        return not losses[step] - losses[0.0] <= max_rise  # NaN too

    with torch.no_grad():
        least, most = 0.0, 1.0
        while not costs_too_much(most):
            least, most = most, 2 * most
            if least >= MAX_STEP:
                return ServerStep(least, max_rise, losses)
        for _ in range(CLOSER):
            middle = (least + most) / 2
            least, most = (least, middle) if costs_too_much(middle) else (middle, most)
    if least == 0:
        raise MpuError(
            f"--server-lr auto: a step of {most:g} raises the loss on {probe} by {losses[most] - losses[0.0]:.3g}",
            "allow more with --max-rise, or name the step",
        )
    return ServerStep(least, max_rise, losses)
