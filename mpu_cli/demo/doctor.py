"""``mpu doctor``: what this machine offers, and whether mpu works on it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.errors import MpuError
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import Command, Report
from mpu_cli.options.declare import option
from mpu_cli.options.unlearning import DEVICE

if TYPE_CHECKING:
    from mpu_cli.demo.trials import Check


@dataclass(frozen=True)
class Diagnosis:
    """The facts about a machine, and the steps that were tried on its ``device``."""

    device: str
    machine: Mapping[str, object]
    trials: Sequence[Check]


@dataclass(frozen=True, kw_only=True)
class Doctor(Command):
    """Say what this machine offers, and try the whole path on it with a small model.

    For a bug report: nothing of yours is read or shown. Exits with status 1 if something does not work.
    """

    NAME = "doctor"
    EXAMPLE = "mpu doctor"

    device: str = option("auto", DEVICE, metavar="DEVICE")

    def run(self, observer: Observer = SILENT) -> Diagnosis:
        observer.stage("look around", 1, "done")
        from mpu_cli.demo.trials import facts, trials
        from mpu_cli.model.device import device_of

        device = device_of(self.device)
        machine = facts(device)
        with tempfile.TemporaryDirectory(prefix="mpu-doctor-") as folder:
            steps = list(trials(self.device, Path(folder), observer))
        return Diagnosis(str(device), machine, steps)

    def report(self, diagnosis: Diagnosis, observer: Observer) -> Report:
        device = diagnosis.device
        lines = [f"{name}\t{value}" for name, value in diagnosis.machine.items()]
        for trial in diagnosis.trials:
            verdict = "works" if trial.ok else "FAILS"
            lines.append(f"{verdict}\t{trial.name} on {device} ({trial.seconds:.1f} s): {trial.said}")
        broken = [trial.name for trial in diagnosis.trials if not trial.ok]
        if not broken:
            observer.note(f"everything that was tried works on {device}")
        document = {
            "machine": diagnosis.machine, "device": device, "checks": [asdict(trial) for trial in diagnosis.trials],
        }  # fmt: skip
        failure = MpuError(f"on {device}, {', '.join(broken)} failed", "please report it with all of the above")
        return Report(lines, document, failure=failure if broken else None)
