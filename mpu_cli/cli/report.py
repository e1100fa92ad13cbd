"""``mpu report``: a sweep's results as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import chosen_metrics, emit, names_in, warn
from mpu_cli.wording import few


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of sweeps, with results.jsonl; of several, the folder's name is an axis.", metavar="DIR…"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="What to write: a page (.html), tables (.tex for booktabs, .csv, .md) or figures (.pdf; default: "
            "report.html in the first DIR).",
            metavar="FILE",
        ),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="Metrics to show, comma-separated (default: the main ones).", metavar="NAMES")
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(help="Axes to average over (default: secret_seed and seed, if they vary).", metavar="OPTIONS"),
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Write the tables and curves of sweeps as one HTML page that needs nothing else: forgetting against utility, and
    each numeric axis of the grid, with 95 % intervals. --out writes the tables or the figures alone, for a paper.

    Prints the path of what it wrote.
    """
    from mpu_cli.experiment.report import missing_experiments, read_others, read_sweeps, write_report

    lines = read_sweeps(folders)
    had = list(dict.fromkeys(name for line in lines for name in line["metrics"]))
    names = chosen_metrics(metrics, had) if metrics is not None else None
    target = out or folders[0] / "report.html"
    title = ", ".join(folder.resolve().name for folder in folders)
    missing = missing_experiments(folders, lines)
    if missing:
        warn(f"without a result: {few(missing)}; `mpu sweep` resumes")
    write_report(lines, target, title, names, list(names_in(over)) if over else None,
                 published=read_others(folders), missing=missing, force=force)  # fmt: skip
    emit([target], {"report": target, "experiments": len(lines), "missing": missing}, as_json)
