"""The step along the update: the one that restores what averaging lost, or the largest at which the server's own
records stay as likely as requested.

An update found on a degraded copy is smaller than one found on the model itself, for the same forgetting
(docs/protection.md); then a step above 1 is right, and records that must not suffer decide how far above.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpu_cli.errors import MpuError
from mpu_cli.files.reader import OPTION, TORCH
from mpu_cli.files.transaction import Transaction
from mpu_cli.model.source import Model, model_specs, open_model
from mpu_cli.model.transform import as_matrix, measured_slices, row_slices
from mpu_cli.observer import Observer
from mpu_cli.options.publishing import AUTO, RESTORE, Aggregating
from mpu_cli.protocol.deltas import InverseMaps, Owner
from mpu_cli.records.read import read_records

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_RESTORED = 2.0  # times the average; if changes agree less, a longer step is mostly their differences


def default_step(base: Model, owner: Owner) -> float:
    """The step for an owner's update ū = Σ_k w_k·u_k under --step restore: that of the rehearsal, else 1 or, if each
    copy was trained until it had forgotten and ū is shorter than the changes u_k, the one that makes what they share as
    long as they are, √(mean_k ‖u_k‖² / mean_k≠l ⟨u_k, u_l⟩), in hundredths, 1 to MOST_RESTORED.

    A change made its copy forget together with all that noise, or the course of the training, added to it. The average
    has the shared part whole, and of the rest a part of each copy's, so it forgets less (docs/stopping.md). Weights
    that extrapolate to no noise need not shorten anything. Reads a slice or two of each tensor.
    """
    if owner.rehearsed_step is not None:
        return owner.rehearsed_step
    deltas, weights = owner.deltas, owner.keys.publication.scheme.weights
    if len(deltas) < 2 or not owner.until_done:
        return 1.0
    inverse_maps = InverseMaps(deltas, base.layout)
    gram = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
    for tensor in base.layout.parameters:
        changes = inverse_maps.changes(tensor)
        if not changes:
            continue
        numbers = torch.tensor(list(changes))
        shape = as_matrix(base.checkpoint.tensor(tensor.name)).shape
        slices = row_slices([change.mapping for change in changes.values()], *shape)
        for i in measured_slices(len(slices)):
            rows = [change.rows(*slices[i], torch.float32).double().reshape(-1) for change in changes.values()]
            changed = torch.stack(rows)
            gram[numbers[:, None], numbers] += changed @ changed.T
        inverse_maps.forget_pages(tensor)
    mean_square, square = float(gram.diagonal().mean()), float(weights @ gram @ weights)
    if not 0 < square < mean_square < math.inf:  # what is not finite is refused once all is read
        return 1.0
    shared = float(gram[~torch.eye(len(deltas), dtype=torch.bool)].mean())
    return round(max(1.0, math.sqrt(mean_square / max(shared, mean_square / MOST_RESTORED**2))), 2)


MAX_STEP = 8.0  # times the update
BISECTIONS = 5  # halvings of the interval in which the step lies, once it is known


@dataclass(frozen=True)
class ProbedStep:
    """The step that was chosen, and the loss per answer token on --probe, in nats, at each that was tried (0: of the
    base)."""

    chosen: float
    max_rise: float
    losses: dict[float, float]

    @property
    def curve(self) -> list[tuple[float, float]]:
        return sorted(self.losses.items())

    @property
    def rise(self) -> float:
        """The rise of the loss at the chosen step."""
        return self.losses[self.chosen] - self.losses[0.0]


def settle_step(
    base: Model,
    options: Aggregating,
    write: Callable[[Path, Aggregating], object],
    beside: Path,
    observer: Observer,
) -> tuple[Aggregating, ProbedStep | None]:
    """``options`` with a number for ``step``, and how it was found if there are records to look at.

    ``write`` writes the model with the update times what the options say into a folder, which is made beside
    ``beside``. Raises MpuError if the step that was named, or already the smallest, costs too much.
    """
    if options.probe is None:
        return replace(options, step=1.0 if options.step == RESTORE else options.step), None
    read_records(options.probe)  # before the work
    with Transaction() as transaction:
        folder = transaction.scratch(beside.absolute().parent)
        # One whole update in float32, to go along; --max-norm is for what is written in the end.
        write(folder, replace(options, step=1.0, probe=None, dtype="float32", max_norm=None))
        step = choose_step(base, open_model(str(folder)), options, observer)
    return replace(options, step=step.chosen, probe=None), step


def choose_step(base: Model, updated: Model, options: Aggregating, observer: Observer) -> ProbedStep:
    """The largest step from ``base`` through ``updated``, which is step 1, at which the loss on --probe has risen by
    at most --max-rise: at most the one that --step names, 1 under restore, and MAX_STEP under auto.

    Holds one model in float32. Raises MpuError if none is found, or if a step that --step names costs more.
    """
    from mpu_cli.model.load import load
    from mpu_cli.model.network import read_answers  # with transformers, which aggregate does not need otherwise

    model, tokenizer = load(base, torch.float32, "auto")
    probe, max_rise = options.probe, options.max_rise
    assert probe is not None
    answers = read_answers(probe, tokenizer)
    go_to = steps_between(base, updated, model, options.dtype)
    losses = {0.0: answers.loss(model)}
    observer.stage("step", 4 + BISECTIONS, "tried")  # 1, 2, 4, 8 = MAX_STEP, and what is between

    def costs_too_much(step: float) -> bool:
        go_to(step)
        losses[step] = answers.loss(model)
        observer.advance(1)
        return not losses[step] - losses[0.0] <= max_rise  # NaN too

    named = options.step if isinstance(options.step, float) else None
    least, most = 0.0, 1.0 if named is None else named
    while not costs_too_much(most):
        least, most = most, 2 * most
        if options.step != AUTO or least >= MAX_STEP:
            return ProbedStep(least, max_rise, losses)
    for _ in range(BISECTIONS):
        middle = (least + most) / 2
        if costs_too_much(middle):
            most = middle
        else:
            least = middle
    if least == 0:
        raise MpuError(
            f"a step of {most:g} raises the loss on {probe} by {losses[most] - losses[0.0]:.3g}, and --max-rise allows "
            f"{max_rise:g}",
            "allow more with --max-rise, or ask the client for another delta",
        )
    if named is not None:
        raise MpuError(
            f"--step {named:g}: raises the loss on {probe} by {losses[named] - losses[0.0]:.3g}, and --max-rise "
            f"allows {max_rise:g}",
            f"--step {least:g} stays within it",
        )
    return ProbedStep(least, max_rise, losses)


def measure_written(written: Model, step: ProbedStep, probe: Path) -> ProbedStep:
    """``step`` with the loss of the model that was ``written`` at it, in place of the one that was predicted.

    Raises MpuError if that has risen by more than was allowed. Whoever knows the arithmetic can choose changes near the
    middle between two numbers of a dtype, so that what is tried and what is written are rounded apart.
    """
    from mpu_cli.model.load import load
    from mpu_cli.model.network import read_answers

    model, tokenizer = load(written, torch.float32, "auto")
    measured = replace(step, losses=step.losses | {step.chosen: read_answers(probe, tokenizer).loss(model)})
    if not measured.rise <= step.max_rise:  # NaN too
        raise MpuError(
            f"the loss on {probe} rises by {measured.rise:.3g} once the model is stored, and --max-rise allows "
            f"{step.max_rise:g}",
            "use --dtype float32, lower --step, or ask the client for another delta",
        )
    return measured


def steps_between(
    base: Model, updated: Model, model: PreTrainedModel, dtype: str | None = None
) -> Callable[[float], None]:
    """A function that gives ``model``, which was loaded from ``base``, the weights a step from there towards
    ``updated``, which is step 1; a tensor at a time. They are rounded as in a model stored in ``dtype`` (None: each
    tensor's own): a client can choose changes that do harm once they are rounded."""
    from mpu_cli.model.tensors import in_memory

    specs = model_specs(base.checkpoint, base.layout, OPTION[dtype] if dtype else None)
    places = in_memory(model, specs)

    @torch.no_grad()
    def go_to(step: float) -> None:
        for name, view in places.items():
            before = base.checkpoint.tensor(name).to(view.device, view.dtype)
            after = updated.checkpoint.tensor(name).to(view.device, view.dtype)
            stored_dtype, _ = specs[name]
            view.copy_(torch.lerp(before, after, step).to(TORCH[stored_dtype]))

    return go_to
