"""``mpu compare``: results of ``mpu eval`` side by side."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import chosen_metrics, emit, paths_from, printable, warn
from mpu_cli.errors import UsageError
from mpu_cli.table_files import SUFFIXES, markdown_table, write_tables

if TYPE_CHECKING:
    from mpu_cli.evaluation.results import Evaluated

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
    plot: Annotated[
        Path | None, typer.Option(help="Plot the metrics (.png, .svg, .pdf or .html).", metavar="FILE")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write the table (.tex for booktabs, .csv or .md).", metavar="FILE")
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Print results as a Markdown table, one row each. The best of a column is bold if its 95 % interval overlaps no
    other.

    Attacks (mia_…) are best near the retain model's value (0.5 if none is known), privleak near 0. A result that others
    used as --retain-log is the model to be like, so it gets no bold. Warns on standard error if results were produced
    differently.
    """
    from mpu_cli.evaluation.results import (
        differences,
        distinct_best,
        goal,
        main_metrics,
        one_retain_log,
        read_results,
        retain_value,
    )

    if out and out.suffix not in SUFFIXES:
        raise UsageError(f"--out {out}: must end in {', '.join(SUFFIXES)}")
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
    forms = {name: next(r.log.metrics[name] for r in read if r.log.has(name)) for name in names}
    competing = {name: [None if r.is_retain else r.value(name) for r in read] for name in names}
    marked = {
        name: distinct_best(
            values, [_interval(result, name) for result in read], goal(name, forms[name]), retain_value(read, name)
        )
        for name, values in competing.items()
    }
    if not one_retain_log(read):
        marked["privleak"] = set()  # measured against different retain models
    rows = [["", *names]]
    for i, result in enumerate(read):
        cells = ["–" if (value := columns[name][i]) is None else f"{value:.4g}" for name in names]
        marks = [BEST if i in marked[name] else "" for name in names]
        rows.append([printable(result.label), *(f"{m}{cell}{m}" for m, cell in zip(marks, cells, strict=True))])
    if out:
        write_tables({"results": rows}, out, force=force)
    if plot:
        draw_comparison([result.label for result in read], columns, plot, force=force)
    document = {result.label: {name: columns[name][i] for name in names} for i, result in enumerate(read)}
    emit(markdown_table(rows), document, as_json)


def _interval(result: Evaluated, name: str) -> tuple[float, float] | None:
    """The 95 % interval of a metric, if the result has one or the values that it is the mean of."""
    from mpu_cli.experiment.tables import half_interval

    if not result.log.has(name):
        return None
    form = result.log.metrics[name]
    if interval := form.get("interval"):
        return tuple(interval)
    entries = [entry for entry in (form.get("value_by_index") or {}).values() if isinstance(entry, dict)]
    for name_of_value in entries[0] if len(entries) > 1 else ():
        values = [entry.get(name_of_value) for entry in entries]
        numbers = [value for value in values if isinstance(value, float)]
        mean = math.fsum(numbers) / len(entries)
        if len(numbers) == len(entries) and math.isclose(mean, form["agg_value"], rel_tol=1e-6, abs_tol=1e-9):
            return mean - (half := half_interval(numbers)), mean + half
    return None
