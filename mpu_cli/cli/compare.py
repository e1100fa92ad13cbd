"""``mpu compare``: results of ``mpu eval`` side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import chosen_metrics, emit, paths_from, printable, warn

BEST = "**"


def compare(
    results: Annotated[
        list[str],
        typer.Argument(
            help="Results of mpu eval, or OpenUnlearning's …_EVAL.json, or - to read paths from standard input.",
            metavar="FILES",
        ),
    ],
    metrics: Annotated[
        str | None,
        typer.Option(help="Comma-separated metrics, or all (default: the main ones).", metavar="NAMES"),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the metrics (.png, .svg or .html).", metavar="FILE")] = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Print results as a Markdown table, one row each, with the best of each column in bold.

    Attacks (mia_…) are best near the retain model's value (0.5 if none is known), privleak near 0. A result that others
    used as --retain-log is the model to be like, so it gets no bold. Warns on standard error if results were produced
    differently.
    """
    from mpu_cli.evaluation.results import (
        best,
        differences,
        goal,
        main_metrics,
        one_retain_log,
        read_results,
        retain_value,
    )

    if plot:
        from mpu_cli.evaluation.plots import draw_comparison
        from mpu_cli.figures import check_target

        check_target(plot, force)
    read = read_results(paths_from(results))
    available = [name for result in read for name in result.log.metrics]
    if metrics == "all":
        names = list(dict.fromkeys(available))
    elif metrics is not None:
        names = chosen_metrics(metrics, available)
    else:
        names = main_metrics(available)
    columns = {name: [result.value(name) for result in read] for name in names}
    for sentence in differences(read):
        warn(f"not directly comparable: {sentence}")
    lines = ["| | " + " | ".join(map(_cell, names)) + " |", "|---|" + "---|" * len(names)]
    forms = {name: next(r.log.metrics[name] for r in read if r.log.has(name)) for name in names}
    competing = {name: [None if r.is_retain else r.value(name) for r in read] for name in names}
    marked = {
        name: best(values, goal(name, forms[name]), retain_value(read, name)) for name, values in competing.items()
    }
    if not one_retain_log(read):
        marked["privleak"] = set()  # measured against different retain models
    for i, result in enumerate(read):
        cells = []
        for name in names:
            value = columns[name][i]
            mark = BEST if i in marked[name] else ""
            cells.append("–" if value is None else f"{mark}{value:.4g}{mark}")
        lines.append(f"| {_cell(result.label)} | " + " | ".join(cells) + " |")
    if plot:
        draw_comparison([result.label for result in read], columns, plot, force=force)
    document = {result.label: {name: columns[name][i] for name in names} for i, result in enumerate(read)}
    emit(lines, document, as_json)


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|").replace("\n", " ")
