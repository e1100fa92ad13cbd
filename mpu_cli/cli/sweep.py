"""``mpu sweep``: a grid of experiments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import chosen_metrics, emit, in_bytes, in_time, names_in, note, table, terminal
from mpu_cli.errors import MpuError, UsageError

if TYPE_CHECKING:
    from mpu_cli.experiment.sweep import Cell


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
    like: Annotated[
        Path | None,
        typer.Option("--with", help="TOML whose options replace those of FILE; --set replaces both.", metavar="FILE"),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Replace an option of FILE, or eval.OPTION one of eval; may be repeated.",
            metavar="OPTION=VALUE",
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(help="Experiments at once, each on a GPU of its own if there are.", min=1, metavar="N")
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the experiments and what they cost.")] = False,
    cell: Annotated[str | None, typer.Option(hidden=True)] = None,
    as_json: options.Json = False,
) -> None:
    """Run and evaluate every experiment of a grid. Print a Markdown table for each metric, with distances from clean.

    An interrupted sweep resumes where it left off; results are lines of DIR/results.jsonl.
    """
    from mpu_cli.evaluation.results import main_metrics
    from mpu_cli.experiment.jobs import Jobs
    from mpu_cli.experiment.literature import published_results
    from mpu_cli.experiment.sweep import overrides_of, play, read_sweep, sweep_metric_names
    from mpu_cli.experiment.sweep import sweep as run_sweep
    from mpu_cli.experiment.tables import LITERATURE, degradation, pivot, sentences
    from mpu_cli.resumption import write_atomically
    from mpu_cli.table_files import markdown_table

    folder = out or Path(file.stem)
    overrides = {**(overrides_of(like) if like else {}), **_overrides(settings or [])}
    cells = read_sweep(file, overrides)
    known_numbers = published_results(file, sorted({cell.experiment.base for cell in cells}))
    if dry_run:
        _preview(cells, as_json)
        return
    if cell is not None:  # one of several jobs
        [selected_cell] = [each for each in cells if each.name == cell]
        with terminal() as observer:
            emit([json.dumps(play(selected_cell, folder, observer))], None, False)
        return
    if metrics is not None:
        chosen_metrics(metrics, sweep_metric_names(cells))  # before hours of training
    arguments = [str(file), "--out", str(folder), *(("--with", str(like)) if like else ())]
    arguments += [part for setting in settings or [] for part in ("--set", setting)]
    with terminal() as observer:
        at_once = Jobs(jobs, ["sweep", *arguments], folder) if jobs > 1 else None
        lines, failed = run_sweep(cells, folder, observer, at_once)
    field_names = {name for line in lines for name in line}
    algorithms = {str(each.experiment.unlearning.algo) for each in cells}
    published_lines = [
        {name: value for name, value in line.items() if name in field_names | {"mode"}}
        for line in known_numbers
        if line.get("algo") in algorithms
    ]
    if published_lines:
        write_atomically(folder / LITERATURE, "".join(json.dumps(line) + "\n" for line in published_lines))
    had = list(dict.fromkeys(name for line in lines for name in line["metrics"]))
    names = main_metrics(had)
    if metrics is not None and had:
        names = chosen_metrics(metrics, had)
    printed: list[str] = []
    axes = None if over is None else list(names_in(over))
    if published_lines and "mode" not in field_names:  # theirs is in their lines
        modes = {cell.name: cell.experiment.mode for cell in cells}
        lines = [{**line, "mode": modes[line["name"]]} for line in lines]
    for name, rows in pivot([*lines, *published_lines], names, across, axes).items():
        printed += [f"**{name}**", "", *markdown_table(rows), ""]
    for mode, distances in degradation([*lines, *published_lines], names).items():
        printed += [f"{mode}: {sentence}" for sentence in sentences(distances)]
    emit(printed if printed and printed[-1] else printed[:-1], lines, as_json)
    if failed:
        name, failure = next(iter(failed.items()))
        counts = f"{len(failed)} of {len(cells)} experiments failed"
        raise MpuError(f"{counts}, the first being {name}: {failure.problem}", failure.hint)


def _overrides(settings: Sequence[str]) -> dict[str, object]:
    """Options by name from OPTION=VALUE, values as in TOML, or text. Raises UsageError if there is no "="."""
    from mpu_cli.toml import parse_value

    values = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--set {setting}: not of the form OPTION=VALUE")
        values[name.strip()] = parse_value(value.strip())
    return values


def _preview(cells: Sequence[Cell], as_json: bool) -> None:
    """The experiments, what passes between the parties, and about how long training takes."""
    from mpu_cli.experiment.cost import costs_of

    costs = costs_of([cell.experiment for cell in cells])
    table(
        f"{len(cells)} experiments",
        ["", "sent to the client", "returned", "training, about"],
        [
            [cell.name, in_bytes(cost.sent), in_bytes(cost.returned), in_time(3600 * cost.hours)]
            if cost
            else [cell.name, "–", "–", "–"]
            for cell, cost in zip(cells, costs, strict=True)
        ],
    )
    known_costs = [cost for cost in costs if cost]
    if len(known_costs) < len(cells):
        note(
            f"{len(cells) - len(known_costs)} models or sets of records are not on this machine, so their "
            "cost is not known"
        )
    hours = sum(cost.hours for cost in known_costs)
    note(f"in all about {in_time(3600 * hours)} of training on this machine's processors; evaluation comes on top")
    document = [
        {"name": cell.name, **cell.varied, **(asdict(cost) if cost else {})}
        for cell, cost in zip(cells, costs, strict=True)
    ]
    emit([cell.name for cell in cells], document, as_json)
