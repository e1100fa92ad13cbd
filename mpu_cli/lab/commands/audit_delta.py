"""``mpu audit-delta``: what a delta tells of the records, before it is sent."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import IDENTITY, Command, Report
from mpu_cli.options.declare import as_arguments, flat, from_flat, group, option
from mpu_cli.options.unlearning import Prompts, Records
from mpu_cli.wording import command_line

if TYPE_CHECKING:
    from mpu_cli.lab.leakage import LeakageReading


@dataclass(frozen=True, kw_only=True)
class AuditDelta(Command):
    """Show what a server reads off DELTA about the --forget and --retain records: tokens, which of a list of candidates
    were forgotten, the longest record, experts.

    Without options for records, these are those of your request that DELTA came of, if it was on this machine.

    Plays the best readings that are known, and says how well each does on your records. That none of them does well is
    no proof that nothing can be read: only `mpu surrogate` and --dp epsilon bound that. Prints a line for each reading.
    """

    NAME = "audit-delta"
    EXAMPLE = "mpu audit-delta copy_1 deltas/copy_1.safetensors"

    copy: str = option(..., "The copy that the delta was made from.", metavar="COPY", argument=True)
    delta: Path = option(..., "The delta, before it is sent.", metavar="DELTA", argument=True)
    records: Records = group(Records)
    prompts: Prompts = group(Prompts)
    identity: Path | None = option(None, IDENTITY, metavar="FILE")

    def run(self, observer: Observer = SILENT) -> list[LeakageReading]:
        """The findings of each reading."""
        from mpu_cli.files.sealing import opened_copy
        from mpu_cli.lab.leakage import audit
        from mpu_cli.records.read import read_records

        records, prompts = self.records, self.prompts
        if records == Records():
            records, prompts = self._noted(observer)
        forget = read_records(records.forget, records.reading, observer=observer)
        named = records.named_retain
        retain = read_records(named, records.reading, observer=observer) if named else []
        with opened_copy(self.copy, self.identity, observer) as opened:
            return audit(opened, self.delta, forget, retain, prompts)

    def _noted(self, observer: Observer) -> tuple[Records, Prompts]:
        """The records of the request that the delta came of, and the way to read them; what was given, if there is no
        such request."""
        from mpu_cli.files.reader import fingerprint, open_checkpoint
        from mpu_cli.training.requests import default_requests_path, noted_options, request_of

        request = None
        if default_requests_path().exists():  # else the delta need not be read for it
            request = request_of(fingerprint(open_checkpoint(self.delta, links=False)))
        if request is None:
            return self.records, self.prompts
        noted = noted_options(request)
        records = from_flat(Records, {name: value for name, value in noted.items() if name in flat(self.records)})
        of_prompts = {name: value for name, value in noted.items() if name in flat(Prompts())}
        prompts = from_flat(Prompts, of_prompts) if self.prompts == Prompts() else self.prompts
        shown = command_line(*as_arguments(records), *as_arguments(prompts))
        observer.note(f"from your request on copy {request.copy} of run {request.run}: {shown}")
        return records, prompts

    def report(self, readings: list[LeakageReading], observer: Observer) -> Report:
        rows = []
        for reading in readings:
            tensor = reading.tensor if len(reading.tensor) < 60 else reading.tensor[:57] + "…"
            numbers = [_share(value) for value in (reading.auc, reading.precision, reading.recall)]
            rows.append([tensor, reading.rule, *numbers, reading.fact or ""])
        columns = ["tensor", "rule", "forget vs keep", "precision", "recall", ""]
        observer.table("What a server reads off this delta", columns, rows)
        observer.note(
            "forget vs keep: how often a reading ranks a record to forget above one to keep (AUC; 0.5: it cannot "
            "tell); precision and recall: of the tokens that it lists"
        )
        if telling := sum(reading.tells for reading in readings):
            observer.warn(f"{telling} of {len(readings)} readings tell something about the records")
            observer.note(
                "LoRA without --train-embeddings tells fewest tokens; only `mpu surrogate` and --dp epsilon give a "
                "bound (docs/protection.md)"
            )
        else:
            observer.note(f"none of the {len(readings)} readings tells anything about these records")
        observer.note(
            "not tested: a crafted copy, which reads more (`mpu unlearn` looks for one), and several deltas together"
        )
        lines = [f"{r.tensor}\t{r.rule}\t{_share(r.auc)}\t{r.fact or ''}" for r in readings]
        return Report(lines, [{**asdict(reading), "tells": reading.tells} for reading in readings])


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
