"""``mpu report``: a sweep's results as one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import FORCE, Command
from mpu_cli.options.command import Report as Printed
from mpu_cli.options.declare import option
from mpu_cli.wording import few, names_in


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """Write the tables and curves of sweeps as one HTML page that needs nothing else: forgetting against utility, and
    each numeric axis of the grid, with 95 % intervals. --out writes the tables or the figures alone, for a paper.

    Prints the path of what it wrote.
    """

    NAME = "report"
    EXAMPLE = "mpu report grid"

    folders: list[Path] = option(
        ...,
        "Folders of sweeps, with results.jsonl; of several, the folder's name is an axis.",
        metavar="DIR…",
        argument=True,
    )
    out: Path | None = option(
        None,
        "What to write: a page (.html), tables (.tex for booktabs, .csv, .md) or figures (.pdf; default: report.html "
        "in the first DIR).",
        metavar="FILE",
    )
    metrics: str | None = option(None, "Metrics to show, comma-separated (default: the main ones).", metavar="NAMES")
    over: str | None = option(
        None, "Axes to average over (default: secret_seed and seed, if they vary).", metavar="OPTIONS"
    )
    force: bool = option(False, FORCE, in_files=False)

    def run(self, observer: Observer = SILENT) -> dict[str, Any]:
        """The page, how many experiments it shows, and those that have no result."""
        from mpu_cli.lab.report import (
            metric_names,
            missing_experiments,
            provenance_of,
            read_others,
            read_sweeps,
            write_report,
        )
        from mpu_cli.measuring.results import chosen_metrics

        lines = read_sweeps(self.folders)
        names = None if self.metrics is None else chosen_metrics(self.metrics, metric_names(lines))
        target = self.out or self.folders[0] / "report.html"
        title = ", ".join(folder.resolve().name for folder in self.folders)
        missing = missing_experiments(self.folders, lines)
        if missing:
            observer.warn(f"without a result: {few(missing)}; `mpu sweep` resumes")
        write_report(
            lines, target, title, names, list(names_in(self.over)) if self.over else None,
            published=read_others(self.folders), missing=missing, provenance=provenance_of(self.folders),
            force=self.force,
        )  # fmt: skip
        return {"report": target, "experiments": len(lines), "missing": missing}

    def report(self, written: dict[str, Any], observer: Observer) -> Printed:  # noqa: ARG002 (as all commands have it)
        return Printed([written["report"]], written)
