"""``mpu sweep``: a grid of experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import chosen_metrics, emit, names_in, terminal
from mpu_cli.errors import MpuError

MAIN = ("forget_quality", "forget_truth_ratio", "model_utility", "privleak")


def sweep(
    file: Annotated[
        Path,
        typer.Argument(help="TOML: options of run, with lists for axes; see docs/experiments.md.", metavar="FILE"),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results (default: FILE's name).", metavar="DIR")
    ] = None,
    metrics: Annotated[str | None, typer.Option(help="Metrics to print, comma-separated.", metavar="NAMES")] = None,
    across: Annotated[
        str | None, typer.Option(help="Axis to use as columns (default: mode).", metavar="OPTION")
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(
            help="Axes to average over, comma-separated: means with 95 % intervals (default: secret_seed and seed, "
            "if they vary).",
            metavar="OPTIONS",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Run and evaluate every experiment of a grid. Print a Markdown table for each metric, with distances from clean.

    An interrupted sweep resumes where it left off; results are lines of DIR/results.jsonl.
    """
    from mpu_cli.experiment.sweep import measured, read_sweep
    from mpu_cli.experiment.sweep import sweep as run_sweep
    from mpu_cli.experiment.tables import markdown, pivot

    cells = read_sweep(file)
    if metrics is not None:
        chosen_metrics(metrics, measured(cells))  # before hours of training
    with terminal() as observer:
        lines, failed = run_sweep(cells, out or Path(file.stem), observer)
    had = list(dict.fromkeys(name for line in lines for name in line["metrics"]))
    names = [name for name in MAIN if name in had] or had
    if metrics is not None and had:
        names = chosen_metrics(metrics, had)
    printed: list[str] = []
    axes = None if over is None else list(names_in(over))
    for name, table in pivot(lines, names, across, axes).items():
        printed += [f"**{name}**", "", *markdown(table), ""]
    emit(printed[:-1], lines, as_json)
    if failed:
        name, first = next(iter(failed.items()))
        counts = f"{len(failed)} of {len(cells)} experiments failed"
        raise MpuError(f"{counts}, the first being {name}: {first.problem}", first.hint)
