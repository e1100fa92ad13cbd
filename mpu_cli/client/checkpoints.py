"""Checkpoints of a training: when they are written, and which one it resumes from."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mpu_cli.client.processes import from_first

KEPT_CHECKPOINTS = 2  # the previous one stays until the next is complete
SECONDS = 60.0  # between checkpoints at least, unless steps are given
SHARE = 0.05  # of the time at most that goes into writing them


class Saving(TrainerCallback):
    """Has the Trainer write a checkpoint once a minute, or every ``steps`` steps; none after the last, which the result
    follows. Large ones, which take long to write, are written less often."""

    def __init__(self, steps: int | None):
        self._steps, self._last, self._took = steps, time.monotonic(), 0.0

    def on_step_end(self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        if state.global_step >= state.max_steps:
            return
        control.should_save = from_first(lambda: self._is_due(state.global_step))  # processes write together
        self._began = time.monotonic()

    def on_save(self, *_: Any, **__: Any) -> None:
        self._last = time.monotonic()
        self._took = self._last - self._began

    def _is_due(self, step: int) -> bool:
        if self._steps is not None:
            return step % self._steps == 0
        return time.monotonic() - self._last >= max(SECONDS, self._took / SHARE)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of the Trainer in ``folder``; its state file is written last."""
    whole = [p for p in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if (p / "trainer_state.json").is_file()]
    return max(whole, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The number of steps that were done when ``checkpoint`` was written."""
    return int(checkpoint.name.rsplit("-", 1)[1])
