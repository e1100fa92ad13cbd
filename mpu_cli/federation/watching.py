"""The data owner's worker: unlearns on each copy that arrives in a spool, and leaves the delta there."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mpu_cli.client.dataset import Dataset
from mpu_cli.client.tag import client_secret, default_secret_path
from mpu_cli.client.unlearn import Result, check_options, refers_back, unlearn
from mpu_cli.errors import MpuError
from mpu_cli.federation.spool import DELTA, Spool
from mpu_cli.manifest import read_copy_manifest
from mpu_cli.models.source import open_model
from mpu_cli.observer import Observer, Within
from mpu_cli.options.unlearning import Logging, Unlearning


@dataclass(frozen=True)
class Watching:
    """What is unlearned, and where: ``work`` is private, only finished deltas go to the spool."""

    spool: Spool
    work: Path
    data: Dataset
    options: Unlearning
    observer: Observer
    on_delta: Callable[[str, Path, Result], None]

    def watch(self, poll: float, once: bool) -> bool:
        """Work on what arrives, for ever or ``once``. Returns whether every copy that was there has its delta.

        Raises MpuError if another process works in the same folder, UsageError for options that do not go together.
        """
        check_options(self.options)
        for folder in (self.spool.root / "in", self.spool.root / "out", self.work):
            folder.mkdir(parents=True, exist_ok=True)
        with _alone(self.work):
            while True:
                waiting = [copy for copy in self.spool.copies() if self.spool.state(copy) == "waiting"]
                for copy in waiting:
                    self._answer(copy)
                if once:
                    return all(self.spool.state(copy) == "done" for copy in self.spool.copies())
                if not waiting:
                    time.sleep(poll)

    def _answer(self, copy: str) -> None:
        """Unlearn on a copy; a failure is told here, and to the other party only that it happened."""
        delta, out = self.work / "deltas" / (copy + DELTA), self.spool.delta(copy)
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            result = self._unlearn(copy, delta)
            handed = out.with_name(f".{out.name}.partial")
            shutil.move(delta, handed)  # the spool may be on another file system
            os.replace(handed, out)
            self.on_delta(copy, out, result)
        except MpuError as error:
            self.observer.warn(f"{copy}: {error.problem}" + (f"; {error.hint}" if error.hint else ""))
            self.spool.failed(copy).touch()

    def _unlearn(self, copy: str, delta: Path) -> Result:
        folder = self.spool.arrived(copy)
        model = open_model(str(folder))
        manifest = read_copy_manifest(folder, model.checkpoint.metadata)
        if manifest is None or copy != f"{manifest.run}/round_{manifest.round}/copy_{manifest.copy}":
            raise MpuError(f"{folder}: does not hold the copy that its name says")
        delta.parent.mkdir(parents=True, exist_ok=True)
        reference = None
        if refers_back(check_options(self.options)):
            reference = self.work / "references" / manifest.run / f"copy_{manifest.copy}.safetensors"
            reference.parent.mkdir(parents=True, exist_ok=True)
        return unlearn(
            model, self.data, self.options, target=delta, force=True, reference_file=reference,
            logging=Logging(resume=self.options.privacy.dp_epsilon is None),
            secret=lambda: client_secret(default_secret_path()), observer=Within(self.observer, copy),
        )  # fmt: skip


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    with (work / "watch.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MpuError(f"{work}: in use by another mpu watch", "stop it, or choose another --work") from error
        yield
