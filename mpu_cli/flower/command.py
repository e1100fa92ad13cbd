"""``mpu watch``: the client's side of rounds that arrive one after another."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.errors import MpuError
from mpu_cli.files.manifest import read_copy_manifest
from mpu_cli.files.transaction import check_folder
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import Command, Report
from mpu_cli.options.declare import group, option
from mpu_cli.options.unlearning import Checks, Unlearning

if TYPE_CHECKING:
    from mpu_cli.flower.watch import TrainingReport


@dataclass(frozen=True, kw_only=True)
class Watch(Command):
    """Unlearn the --forget records on each copy that arrives in SPOOL, and leave its delta there.

    Copies come as SPOOL/in/RUN/round_R/copy_K, deltas go as SPOOL/out/RUN/round_R/copy_K.safetensors; a program, such
    as the Flower app, moves them. What was interrupted is resumed. Each copy is trained on once: a delta that is asked
    for again is handed over as it was. Prints the path of each delta.
    """

    NAME = "watch"
    EXAMPLE = "mpu watch /srv/data/spool --forget forget.jsonl --retain retain.jsonl --work /srv/private/work"
    ESSENTIAL = "--algo --forget --retain --lr --epochs --batch-size --columns --encoding --work --device"

    spool: Path = option(..., "The folder that the Flower app fills and empties.", metavar="SPOOL", argument=True)
    unlearning: Unlearning = group(Unlearning)
    checks: Checks = group(Checks)
    work: Path = option(
        Path("mpu-work"),
        "Private folder for checkpoints and reference files; the Flower app must not read it.",
        metavar="DIR",
    )
    spool_group: str | None = option(
        None,
        "Group of the Flower app's user: SPOOL is made for it if it is missing, and checked otherwise.",
        metavar="GROUP",
    )
    poll: float = option(5.0, "Seconds between looks at an empty spool.", metavar="SECONDS", least=0.1)
    max_deltas: int | None = option(
        None,
        "How many trainings may begin in all; what deltas and failures tell of the records grows with each (default: "
        "any).",
        metavar="N",
        least=1,
    )
    copy_timeout: float = option(
        86_400.0, "Seconds after which a copy is given up, and marked as failed.", metavar="SECONDS", least=1
    )
    once: bool = option(False, "Unlearn on what is there, and stop.")
    as_json: bool = option(False, "Print a line of JSON for each delta instead of its path.", flag="--json")

    def run(self, observer: Observer = SILENT) -> bool:
        """Whether every copy that arrived has its delta; each is a result of its own."""
        from mpu_cli.flower.spool import Spool, copy_name
        from mpu_cli.flower.watch import Worker
        from mpu_cli.training.data import read_dataset

        spool, work, privacy = self.spool, self.work, self.unlearning.privacy
        for folder in (spool, work):
            check_folder(folder)
        data = read_dataset(self.unlearning, observer)
        for warning in data.warnings(privacy):
            observer.warn(warning)
        if privacy.dp_epsilon is not None and self.max_deltas is None:
            observer.warn("--dp epsilon bounds one delta, and any number may leave: limit them with --max-deltas")

        def report_result(copy: str, delta: Path, report: TrainingReport | None) -> None:
            document: dict[str, object] = {"copy": copy, "delta": delta}
            if report:
                observer.note(report.summary)
                for warning in report.warnings:
                    observer.warn(f"{copy}: {warning}")
                document |= report.facts
            else:
                observer.note(f"{copy}: its delta was asked for again")
            observer.result(json.dumps(document, default=str) if self.as_json else delta)

        if work.resolve() == spool.resolve() or spool.resolve() in work.resolve().parents:
            raise MpuError(f"{work}: is in the spool, which the Flower app reads", "choose a --work outside it")
        Spool(spool).prepare(self.spool_group)
        for pattern in ("copy_*", "in/copy_*", "in/*/copy_*"):  # where nobody looks
            for path in sorted(spool.glob(pattern)):
                try:
                    manifest = read_copy_manifest(path)
                except MpuError:
                    continue
                if manifest:
                    observer.warn(f"{path}: a copy is expected at {spool / 'in' / copy_name(manifest)}")
        if not self.once:
            observer.note(f"waiting for copies at {spool / 'in' / 'RUN' / 'round_R' / 'copy_K'}; Ctrl-C stops")
        worker = Worker(
            spool=Spool(spool), work=work, data=data, options=self.unlearning, observer=observer,
            on_delta=report_result, most=self.max_deltas, seconds=self.copy_timeout, checks=self.checks,
        )  # fmt: skip
        return worker.watch(self.poll, self.once)

    def report(self, complete: bool, observer: Observer) -> Report:  # noqa: ARG002 (as all commands have it)
        failure = MpuError(
            "some copies have no delta", "see the warnings above; remove their .failed files to try again"
        )
        return Report([], None, failure=None if complete else failure)
