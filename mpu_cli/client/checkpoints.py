"""Checkpoints of a training: when they are written, and which one it resumes from."""

from __future__ import annotations

import hmac
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mpu_cli.boundary.documents import read_json_object
from mpu_cli.client.processes import from_first
from mpu_cli.errors import MpuError
from mpu_cli.resumption import write_atomically

KEPT_CHECKPOINTS = 2  # the previous one stays until the next is complete
SECONDS = 60.0  # between checkpoints at least, unless steps are given
SHARE = 0.05  # of the time at most that goes into writing them
SEAL = "mpu-seal.json"  # in a checkpoint: the MAC of its other files


@dataclass(frozen=True)
class Checkpoints:
    """Those of one training in ``folder``, under the client's ``secret``; ``training`` is a digest of what is trained.

    Each is sealed with a MAC of its files. One that lies there without was written by somebody else, or not finished:
    its weights would be trained on unseen, and three of its files are pickles.
    """

    folder: Path
    secret: bytes = field(repr=False)
    training: str

    def seal(self, step: int) -> None:
        """Seal the checkpoint of ``step``, which is complete."""
        checkpoint = self.folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        write_atomically(checkpoint / SEAL, json.dumps({"hmac-sha256": self._mac(checkpoint)}) + "\n")

    def last(self) -> Path | None:
        """The newest sealed checkpoint. Raises MpuError if the seal is not of its files, this training and client."""
        checkpoint = last_checkpoint(self.folder)
        if checkpoint is None:
            return None
        written = read_json_object(checkpoint / SEAL, links=False).get("hmac-sha256")
        if not isinstance(written, str) or not hmac.compare_digest(written.encode(), self._mac(checkpoint).encode()):
            raise MpuError(
                f"{checkpoint}: not a checkpoint that this mpu wrote for this training",
                f"remove {self.folder} to start over",
            )
        return checkpoint

    def _mac(self, checkpoint: Path) -> str:
        digests = []
        for path in sorted(checkpoint.rglob("*")):
            if path.is_symlink():
                raise MpuError(f"{path}: a link in a checkpoint", f"remove {self.folder} to start over")
            if path.is_file() and path.name != SEAL:
                hasher = blake3(max_threads=blake3.AUTO).update_mmap(path)
                digests.append([str(path.relative_to(checkpoint)), hasher.hexdigest()])
        message = json.dumps(["mpu checkpoint", self.training, digests]).encode()
        return hmac.new(self.secret, message, "sha256").hexdigest()


class Saving(TrainerCallback):
    """Has the Trainer write a checkpoint once a minute, or every ``steps`` steps; none after the last, which the result
    follows. Large ones, which take long to write, are written less often. Each is sealed once it is complete."""

    def __init__(self, steps: int | None, checkpoints: Checkpoints):
        self._steps, self._last, self._took, self._checkpoints = steps, time.monotonic(), 0.0, checkpoints

    def on_step_end(self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        if state.global_step >= state.max_steps:
            return
        control.should_save = from_first(lambda: self._is_due(state.global_step))  # processes write together
        self._began = time.monotonic()

    def on_save(self, _: TrainingArguments, state: TrainerState, __: TrainerControl, **___: Any) -> None:
        from_first(lambda: self._checkpoints.seal(state.global_step))
        self._last = time.monotonic()
        self._took = self._last - self._began

    def _is_due(self, step: int) -> bool:
        if self._steps is not None:
            return step % self._steps == 0
        return time.monotonic() - self._last >= max(SECONDS, self._took / SHARE)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of the Trainer in ``folder``: its seal is written last."""
    sealed = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if (path / SEAL).is_file()]
    return max((path for path in sealed if path.name.rpartition("-")[2].isdecimal()), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The number of steps that were done when ``checkpoint`` was written."""
    return int(checkpoint.name.rsplit("-", 1)[1])
