"""The data owner's worker: unlearns on each copy that arrives in a spool, and leaves the delta there.

What deltas tell of the records grows with every training, and under DP-SGD every training draws new noise. So each
copy is trained on once: a delta that is asked for again is handed over again, as it was.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpu_cli.checkpoint.reader import open_checkpoint
from mpu_cli.client.dataset import Dataset
from mpu_cli.client.tag import client_secret, default_secret_path
from mpu_cli.client.unlearn import Result, check_options, refers_back, unlearn
from mpu_cli.errors import MpuError
from mpu_cli.federation.spool import DELTA, Spool
from mpu_cli.manifest import CopyManifest, delta_manifest, read_copy_manifest
from mpu_cli.models.source import open_model
from mpu_cli.observer import Observer, Within
from mpu_cli.options.unlearning import Logging, Unlearning
from mpu_cli.resumption import alone_in, append_line, read_lines


@dataclass(frozen=True)
class Watching:
    """What is unlearned, and where: ``work`` is private, only finished deltas go to the spool."""

    spool: Spool
    work: Path
    data: Dataset
    options: Unlearning
    observer: Observer
    on_delta: Callable[[str, Path, Result | None], None]
    most: int | None = None  # deltas that leave in all

    def watch(self, poll: float, once: bool) -> bool:
        """Work on what arrives, for ever or ``once``. Returns whether every copy that was there has its delta.

        Raises MpuError if another process works in the same folder, UsageError for options that do not go together.
        """
        check_options(self.options)
        for folder in (self.spool.root / "in", self.spool.root / "out", self.work):
            folder.mkdir(parents=True, exist_ok=True)
        with alone_in(self.work, "watch", "--work"):
            while True:
                there = list(self.spool.copies())
                self._clear(there)
                waiting = [copy for copy in there if self.spool.state(copy) == "waiting"]
                for copy in waiting:
                    self._answer(copy)
                if once:
                    return all(self.spool.state(copy) == "done" for copy in self.spool.copies())
                if not waiting:
                    time.sleep(poll)

    def _answer(self, copy: str) -> None:
        """Unlearn on a copy; a failure is told here, and to the other party only that it happened."""
        delta, out = self._delta(copy), self.spool.delta(copy)
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            origin = self._manifest(copy)
            result = None if delta.exists() else self._unlearn(copy, origin, delta)
            if delta_manifest(open_checkpoint(delta).metadata, delta).origin != origin:
                raise MpuError(f"{copy}: another copy of this name was answered before")
            if copy not in self._answered():
                append_line(self._ledger, {"copy": copy, "copy_id": origin.copy_id})
            handed = out.with_name(f".{out.name}.partial")
            (shutil.copytree if delta.is_dir() else shutil.copyfile)(delta, handed)
            os.replace(handed, out)
            self.on_delta(copy, out, result)
        except MpuError as error:
            self.observer.warn(f"{copy}: {error.problem}" + (f"; {error.hint}" if error.hint else ""))
            self.spool.failed(copy).touch()

    @property
    def _ledger(self) -> Path:
        return self.work / "answered.jsonl"

    def _answered(self) -> list[str]:
        return [line["copy"] for line in read_lines(self._ledger, "choose another --work")]

    def _delta(self, copy: str) -> Path:
        return self.work / "deltas" / (copy + DELTA)

    def _clear(self, there: list[str]) -> None:
        """Remove kept deltas of copies that the other party no longer has here."""
        for copy in set(self._answered()).difference(there):
            delta = self._delta(copy)
            shutil.rmtree(delta) if delta.is_dir() else delta.unlink(missing_ok=True)

    def _manifest(self, copy: str) -> CopyManifest:
        folder = self.spool.arrived(copy)
        manifest = read_copy_manifest(folder, open_model(str(folder)).checkpoint.metadata)
        if manifest is None or copy != f"{manifest.run}/round_{manifest.round}/copy_{manifest.copy}":
            raise MpuError(f"{folder}: does not hold the copy that its name says")
        return manifest

    def _unlearn(self, copy: str, manifest: CopyManifest, delta: Path) -> Result:
        answered = self._answered()
        if copy in answered:
            raise MpuError(f"{copy}: was answered before, and its round is over")
        if self.most is not None and len(answered) >= self.most:
            raise MpuError(f"{copy}: {len(answered)} deltas have left, which --max-deltas allows")
        model = open_model(str(self.spool.arrived(copy)))
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
