"""Searching a learning rate and a number of epochs that forget most while a model keeps the rest.

Each trial is a training of its own, on one model: the base, or a copy, so that a client can search without the server.
Optuna's TPE sampler proposes, and learns from trials that went beyond the bound which side to stay on.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpu_cli.errors import Diverged, UsageError
from mpu_cli.model.source import Model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.unlearning import Unlearning
from mpu_cli.plugins import require
from mpu_cli.training.checks import check_options
from mpu_cli.training.data import Dataset
from mpu_cli.training.unlearn import UnlearningTask


@dataclass(frozen=True)
class Trial:
    """One training: how much the losses per answer token rose, in nats; ``within``: whether that is in bounds."""

    lr: float
    epochs: int
    forget_rise: float
    retain_rise: float
    within: bool
    seconds: float


def tune(
    model: Model,
    data: Dataset,
    options: Unlearning,
    *,
    trials: int,
    least_lr: float,
    most_lr: float,
    most_epochs: int,
    max_rise: float,
    observer: Observer = SILENT,
) -> tuple[Trial | None, list[Trial]]:
    """The trial in bounds that forgot most (None: there is none), and all trials in their order."""
    optuna = require("optuna", "mpu tune")
    warnings.filterwarnings("ignore", module="optuna")  # of what later versions will drop
    optuna.logging.set_verbosity(logging.ERROR)  # it warns of a trial that is refused with a traceback
    if not check_options(options).constants.alpha or not data.retain:
        raise UsageError(
            "a search needs records to keep, to measure what is lost", "use --retain, and --constants alpha above 0"
        )
    if least_lr > most_lr:
        raise UsageError(f"--least-lr {least_lr:g}: above --most-lr {most_lr:g}")
    done: list[Trial] = []

    def objective(proposed: Any) -> float:
        lr = proposed.suggest_float("lr", least_lr, most_lr, log=True)
        epochs = proposed.suggest_int("epochs", 1, most_epochs, log=True)
        last = _train(model, data, options, lr=lr, epochs=epochs, max_rise=max_rise)
        done.append(last)
        proposed.set_user_attr("beyond", last.retain_rise - max_rise)
        observer.advance(
            1, f"lr {lr:.2g}, {epochs} epochs: forget +{last.forget_rise:.2f}, retain +{last.retain_rise:.2f}"
        )
        return last.forget_rise

    sampler = optuna.samplers.TPESampler(
        seed=options.training.seed, constraints_func=lambda frozen: (frozen.user_attrs["beyond"],)
    )
    observer.stage("tune", trials, "trials")
    optuna.create_study(direction="maximize", sampler=sampler).optimize(objective, n_trials=trials)
    in_bounds = [trial for trial in done if trial.within]
    return max(in_bounds, key=lambda trial: trial.forget_rise, default=None), done


def _train(model: Model, data: Dataset, options: Unlearning, *, lr: float, epochs: int, max_rise: float) -> Trial:
    started = time.monotonic()
    tried = replace(options, epochs=epochs, training=replace(options.training, lr=lr))
    with tempfile.TemporaryDirectory(prefix="mpu-") as scratch:
        try:
            result = UnlearningTask(model, data, tried, target=Path(scratch) / "delta.safetensors").run()
        except Diverged:
            gained, lost = 0.0, 2 * max_rise
        else:
            before, after = result.before, result.after
            if before is None or after is None or before.retain is None or after.retain is None:
                raise UsageError("a search runs in one process")
            gained, lost = after.forget - before.forget, after.retain - before.retain
    return Trial(
        lr, epochs, forget_rise=gained, retain_rise=lost, within=lost <= max_rise,
        seconds=time.monotonic() - started,
    )  # fmt: skip
