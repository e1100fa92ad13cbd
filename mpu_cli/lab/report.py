"""A sweep as one HTML page: tables, forgetting against utility, a curve for each numeric axis. The tables alone as
LaTeX, CSV or Markdown; the figures alone as PDF.

Modes differ by marker and line as well as by colour, so that the page can be printed in black and white.
"""

from __future__ import annotations

import csv
import html
import io
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.boundary import Document, Text, parse_document, read_json_object
from mpu_cli.files.manifest import PLANNED, RESULTS
from mpu_cli.files.resumption import read_lines
from mpu_cli.files.transaction import Transaction
from mpu_cli.lab.options.experiment import Experiment
from mpu_cli.lab.plots import PALETTE, Curve, draw_relearning, html_table, legend_below, make_figure, page, plain, svg
from mpu_cli.lab.tables import SUFFIXES, write_tables
from mpu_cli.measuring.results import distinct_best, goal, half_interval, main_metrics
from mpu_cli.options.declare import declared_options
from mpu_cli.text import read_text
from mpu_cli.toml import read_toml
from mpu_cli.wording import counted, few

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Markdown tables of a sweep: one per metric, with one axis of the grid as columns and the others as rows.
#
# Axes that only repeat an experiment, with different noise or a different order of the records, are averaged over: a
# cell is the mean of its runs ± half of its 95 % interval (Student's t). Next to the modes is the absolute distance
# of each run from the clean run with the same options and order: in percent of clean's value, and of what clean
# changed. The first alone says little of a metric that unlearning hardly changes, since the model before it is as
# near.

BEFORE = "before"  # of a line: the metrics of the model before unlearning; also how their column is called
RETAIN = "retain model"  # of a line: the metrics of the model that never saw the forget set; also their column
RELEARNING = "relearning"  # of a line: curves of models whose forgotten records are learned again
FIXED = ("name", "digest", "metrics", "smallest_pairwise_cosine", "lost_to_rounding", "noise_asked", "noise_survived",
         "error_estimate", "seconds", "evaluation_seconds", BEFORE, RETAIN, RELEARNING)  # fmt: skip
PUBLISHED = "published"  # the beginning of the mode of others' results
LITERATURE = "published.jsonl"  # of a sweep's folder: others' results
COLLAPSES = "gradascent"  # destroys a model, clean or not: averages over algorithms leave it out, as the paper's do
REPEATS = ("secret_seed", "seed")  # draws of the noise, orders of the records
ALWAYS_TOLD = ("algo", "kappa", "permanent_noise", "copies", "lr", "epochs", "batch_size", "optim", "precision", "seed")
MEANINGLESS = 1000  # percent: clean's value, or what it changed, is next to nothing

Line = Mapping[str, Any]


def pivot(
    lines: Sequence[Line], metrics: Sequence[str], across: str | None = None, over: Sequence[str] | None = None
) -> dict[str, list[list[str]]]:
    """For each metric, rows of cells; the first row is the header.

    ``across`` is an axis (default: mode, else the last), ``over`` are those to average over (default: those of REPEATS
    that vary). A mode that ignores an axis (such as clean and κ) has its one result in every row of that axis. Raises
    UsageError if an axis does not exist.
    """
    varied = list(dict.fromkeys(name for line in lines for name in line if name not in FIXED))
    repeats = [name for name in REPEATS if name in varied and name != across] if over is None else list(over)
    for option, names in (("--over", repeats), ("--across", [across] if across else [])):
        if unknown := set(names) - set(varied):
            raise UsageError(f"{option} {min(unknown)}: not an axis of the sweep ({', '.join(varied) or 'none'})")
    if across in repeats:
        raise UsageError(f"--across {across}: this axis is averaged over", "leave it out of --over")
    axes = [name for name in varied if name not in repeats]
    if not axes:
        return {name: [["", name], ["run", _text(_value(line, name) for line in lines)]] for name in metrics}
    across = across or ("mode" if "mode" in axes else axes[-1])
    down = [name for name in axes if name != across]
    heads = list(dict.fromkeys(line[across] for line in lines if across in line))
    compared = [head for head in heads if _clean_of(head) in heads] if across == "mode" else []
    combinations = list(dict.fromkeys(tuple(line.get(name) for name in down) for line in lines))
    # A combination that omits an axis gets no row of its own if others fill it in.
    rows = [row for row in combinations if not any(_covers(row, other) for other in combinations)]
    same_columns = [name for name in (RETAIN, BEFORE) if any(line.get(name) for line in lines)]  # as for all modes
    changed = [head for head in compared if BEFORE in same_columns and not _is_published(head)]
    distances = [f"{head}: % from clean" for head in compared]
    distances += [f"{head}: % of clean's change" for head in changed]
    row_cells = []  # the lines of each row's cells
    for row in rows:
        options = dict(zip(down, row, strict=True))
        fitting = [line for line in lines if _fits(line, options)]
        # A mode that ignores this axis has its one result under each of its values.
        row_cells.append({head: [line for line in fitting if line.get(across, head) == head] for head in heads})
    runs = {head: max(len(cells[head]) for cells in row_cells) for head in heads}  # of the cell that has most
    tables = {}
    for metric in metrics:
        table = [[*down, *same_columns, *map(str, heads), *distances]]
        for row, cells in zip(rows, row_cells, strict=True):
            row_lines = list(itertools.chain.from_iterable(cells.values()))
            texts = ["–" if value is None else str(value) for value in row]
            texts += [_text(dict.fromkeys(_value(line, metric, name) for line in row_lines)) for name in same_columns]
            texts += [_text((_value(line, metric) for line in cells[head]), runs[head]) for head in heads]
            apart = {head: _distances(cells[head], cells[_clean_of(head)], metric, repeats) for head in compared}
            texts += [_percents([distance.percent for distance in apart[head]]) for head in compared]
            texts += [_percents([distance.of_change for distance in apart[head]]) for head in changed]
            table.append(texts)
        tables[metric] = table
    return tables


@dataclass(frozen=True)
class Distance:
    """The distance from clean: ``percent`` of clean's value; ``of_change``, in percent of clean's own distance from the
    model before unlearning, None if that was not measured. ``count``: the number of algorithms averaged."""

    percent: float
    of_change: float | None = None
    count: int = 1


def degradation(lines: Sequence[Line], metrics: Sequence[str]) -> dict[str, dict[str, Distance]]:
    """The distances from clean of each mode, others' included, and of the model before unlearning, by mode and metric.

    An algorithm counts with the mean of its runs, each compared with the clean run that it agrees with; gradient ascent
    does not count, unless it is the only one.
    """
    if {line.get("algo") for line in lines} - {COLLAPSES}:
        lines = [line for line in lines if line.get("algo") != COLLAPSES]
    clean = [line for line in lines if line.get("mode") == "clean"]
    # Doing nothing is a mode, too.
    untrained = [{**line, "mode": BEFORE, "metrics": line[BEFORE]} for line in clean if line.get(BEFORE)]
    lines = [*lines, *untrained]
    mode_distances: dict[str, dict[str, Distance]] = {}
    modes = dict.fromkeys(str(line.get("mode", "clean")) for line in lines)
    for mode in modes:
        aim = _clean_of(mode)
        if aim not in modes:
            continue
        clean = [line for line in lines if line.get("mode") == aim]
        for metric in metrics:
            by_algorithm: dict[object, list[Distance]] = {}
            for line in lines:
                if line.get("mode") == mode:
                    options = [name for name in line if name not in (*FIXED, "mode")]
                    by_algorithm.setdefault(line.get("algo"), []).extend(_distances([line], clean, metric, options))
            means = [_mean_distance(distances) for distances in by_algorithm.values() if distances]
            if means:
                mode_distances.setdefault(mode, {})[metric] = replace(_mean_distance(means), count=len(means))
    return mode_distances


def _is_published(mode: object) -> bool:
    return str(mode).startswith(PUBLISHED)


def _clean_of(mode: object) -> str | None:
    """The mode that ``mode`` is compared with: clean, or that of the same source; None for clean itself."""
    aim = f"{str(mode).rpartition(' ')[0]} clean" if _is_published(mode) else "clean"
    return None if aim == mode else aim


def _mean_distance(distances: Sequence[Distance]) -> Distance:
    shares = [distance.of_change for distance in distances if distance.of_change is not None]
    percent = statistics.fmean(distance.percent for distance in distances)
    return Distance(percent, statistics.fmean(shares) if shares else None)


def sentences(distances: Mapping[str, Distance]) -> list[str]:
    """The findings of ``degradation`` on a mode, a sentence for each number of algorithms."""
    texts = []
    for count in dict.fromkeys(distance.count for distance in distances.values()):
        parts = []
        for metric, distance in distances.items():
            if distance.count == count:
                share = "" if distance.of_change is None else f", {_percent(distance.of_change)} of clean's change"
                parts.append(f"{_percent(distance.percent)}{share} ({metric})")
        algorithms = counted(count, "algorithm")
        texts.append(f"average degradation (distance from clean) over {algorithms}: {'; '.join(parts)}")
    return texts


def _percent(value: float) -> str:
    if value > MEANINGLESS:
        return f"over {MEANINGLESS:,} %"
    # With two digits, 100 would be printed as 1e+02.
    return f"{value:.2g} %" if value < 99.5 else f"{value:,.0f} %"


def _fits(line: Line, options: Line) -> bool:
    """Whether ``line`` agrees with ``options`` on each of these that it has."""
    return all(name not in line or line[name] == value for name, value in options.items())


def _distances(lines: Sequence[Line], clean: Sequence[Line], metric: str, repeats: Sequence[str]) -> list[Distance]:
    """The distance of each of ``lines`` from its clean run in ``metric``."""
    distances = []
    for line in lines:
        aims = [other for other in clean if _fits(other, {name: line[name] for name in repeats if name in line})]
        value, aim = _value(line, metric), _value(aims[0], metric) if aims else None
        if value is not None and aim:
            before = _value(line, metric, BEFORE)
            share = None if before in (None, aim) else 100 * abs(value - aim) / abs(before - aim)
            distances.append(Distance(100 * abs(value / aim - 1), share))
    return distances


def _value(line: Line, metric: str, key: str = "metrics") -> float | None:
    value = (line.get(key) or {}).get(metric)
    return value if isinstance(value, int | float) else None


def _covers(row: Sequence[object], other: Sequence[object]) -> bool:
    """Whether ``other`` sets everything that ``row`` does, and more."""
    return row != other and all(value in (None, set_value) for value, set_value in zip(row, other, strict=True))


def _mean(values: Iterable[float | None]) -> tuple[float, float, int] | None:
    """The mean of the finite ``values``, half of its 95 % interval (0 for a single one) and their number; None if there
    is none."""
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if not numbers:
        return None
    return statistics.fmean(numbers), half_interval(numbers) if len(numbers) > 1 else 0.0, len(numbers)


def _text(values: Iterable[float | None], runs: int = 0) -> str:
    """The mean of ``values`` and, if there are several, half of its interval; how many there are, if other cells of the
    column have more ``runs``."""
    if (mean := _mean(values)) is None:
        return "–"
    value, half, count = mean
    interval = f" ± {half:.2g}" if count > 1 else ""
    return f"{value:.4g}{interval}" + (f" (n = {count})" if count < runs else "")


def _percents(values: Sequence[float | None]) -> str:
    """As ``_text``; a dash where a percentage says nothing, because it is of next to nothing."""
    return "–" if any(value is not None and value > MEANINGLESS for value in values) else _text(values)


FORGETTING = ("forget_truth_ratio", "forget_quality", "extraction_strength", "forget_Q_A_Prob", "forget_Q_A_ROUGE")
UTILITY = ("model_utility", "retain_Q_A_Prob", "retain_Q_A_ROUGE", "retain_knowmem_ROUGE")
MARKERS, LINES = "osD^vPX*h", ("-", "--", ":", "-.")
MODES = {"clean": ("#000000", "full"), "clean-rounds": ("#777777", "full"), "noised": ("#D55E00", "none"),
         "mpu": ("#0072B2", "full")}  # fmt: skip


def read_results(folder: Path) -> list[Line]:
    """The lines of a sweep, by mode: with several jobs they stand as they were finished."""
    lines = read_lines(folder / RESULTS, "run the sweep again")
    if not lines:
        raise MpuError(f"{folder}: has no {RESULTS}, or an empty one", "pass the folder of a sweep")
    try:
        latest = {str(line["name"]): line for line in lines}
        evaluated_lines = [line for line in latest.values() if isinstance(line["metrics"], dict)]
        # In the order of MODES; a line without a mode, or with another one, comes last.
        return sorted(evaluated_lines, key=lambda line: [*MODES, line.get("mode")].index(line.get("mode")))
    except (KeyError, TypeError) as error:
        raise MpuError(f"{folder / RESULTS}: is not what a sweep writes", "run the sweep again") from error


def read_sweeps(folders: Sequence[Path]) -> list[Line]:
    """The lines of all sweeps; of several, each line also has the name of its folder, as the axis ``sweep``."""
    lines = {folder: read_results(folder) for folder in folders}
    beside = [*itertools.chain.from_iterable(lines.values()), *read_others(folders)]
    if any("mode" in line for line in beside):  # then those that all have one mode say which
        for folder, of_sweep in lines.items():
            mode = read_plan(folder).options.get("mode", "mpu")
            lines[folder] = [{"mode": mode, **line} for line in of_sweep]
    if len(folders) == 1:
        return lines[folders[0]]
    names = [folder.resolve().name for folder in folders]
    named = dict(zip(folders, names if len({*names}) == len(names) else map(str, folders), strict=True))
    return [
        {"sweep": named[folder], **line, "name": f"{named[folder]}/{line['name']}"}
        for folder, of_sweep in lines.items()
        for line in of_sweep
    ]


def read_others(folders: Sequence[Path]) -> list[Line]:
    """Others' results, which the sweeps showed beside their own, each once."""
    lines = [line for folder in folders for line in read_lines(folder / LITERATURE, "run the sweep again")]
    # Without their names, which only number them in each sweep.
    return list({json.dumps(line | {"name": ""}, sort_keys=True): line for line in lines}.values())


def metric_names(lines: Sequence[Line]) -> list[str]:
    """The names of all metrics that ``lines`` have, in order of first appearance."""
    return list(dict.fromkeys(name for line in lines for name in line["metrics"]))


class Plan(Document):
    """The experiments of a sweep, the options that all of them share, and the versions that made them."""

    experiments: list[Text] = msgspec.field(default_factory=list)
    options: dict[Text, Any] = msgspec.field(default_factory=dict)
    versions: dict[Text, Text] = msgspec.field(default_factory=dict)


def read_plan(folder: Path) -> Plan:
    """The plan of the sweep in ``folder``, an empty one if it has none."""
    path = folder / PLANNED
    return parse_document(Plan, read_json_object(path), path, "run the sweep again") if path.is_file() else Plan()


def missing_experiments(folders: Sequence[Path], lines: Sequence[Line]) -> list[str]:
    """The names of experiments that the sweeps in ``folders`` have no result of, as far as the folders say."""
    done = {str(line["name"]) for line in lines}
    planned = []
    for folder in folders:
        prefix = "" if len(folders) == 1 else f"{folder.resolve().name}/"
        planned += [f"{prefix}{name}" for name in read_plan(folder).experiments]
    return [name for name in planned if name not in done]


def provenance_of(folders: Sequence[Path]) -> list[str]:
    """A sentence for each sweep: the options and versions with which all of its experiments were made."""
    declared, paragraphs = declared_options(Experiment), []
    for folder in folders:
        plan = read_plan(folder)
        if not plan.versions:
            continue
        shown = []
        for name, value in plan.options.items():
            if name not in declared or value is None:
                continue
            if name in ALWAYS_TOLD or value != declared[name].default:
                shown.append(f"{name} = {value}")
        versions = ", ".join(f"{package} {number}" for package, number in plan.versions.items())
        prefix = "" if len(folders) == 1 else f"{folder.resolve().name}: "
        paragraphs.append(f"{prefix}All with {', '.join(shown)}; {versions}.")
    return paragraphs


def write_report(
    lines: Sequence[Line],
    target: Path,
    title: str,
    metrics: Sequence[str] | None = None,
    over: Sequence[str] | None = None,
    *,
    published: Sequence[Line] = (),
    missing: Sequence[str] = (),
    provenance: Sequence[str] = (),
    force: bool = False,
) -> None:
    """Write the report in the format that the suffix of ``target`` names; ``published`` are lines of others' results,
    which stand beside, ``missing`` the names of experiments without a result, ``provenance`` that of the sweeps."""
    if target.suffix not in (*SUFFIXES, ".html", ".pdf"):
        raise UsageError(f"--out {target}: must end in .html, .pdf, {', '.join(SUFFIXES)}")
    available = metric_names(lines)
    names = list(metrics or main_metrics(available))
    repeats = [name for name in REPEATS if any(name in line for line in lines)] if over is None else list(over)
    beside = [*lines, *published]
    tables = pivot(beside, names, None, over)
    if target.suffix in SUFFIXES:
        write_tables(tables, target, notes=provenance, force=force)
        return
    figures = _figures(lines, available, names, repeats)
    if target.suffix == ".pdf":
        from matplotlib.backends.backend_pdf import PdfPages

        if not figures:
            raise MpuError(f"{target}: the sweep has nothing to draw", "write the tables: --out report.tex")
        with Transaction(force=force) as transaction, PdfPages(transaction.add(target)) as pages:
            for heading, figure in figures:
                figure.suptitle(plain(heading), fontsize=11)
                pages.savefig(figure)
        return
    parts = [f"<p>{html.escape(text)}</p>" for text in (_summary(lines, missing), *provenance)]
    for mode, mode_distances in degradation(beside, names).items():
        parts += [f"<p><b>{html.escape(mode)}</b>: {html.escape(said)}.</p>" for said in sentences(mode_distances)]
    for name, (head, *rows) in tables.items():
        parts += [
            f"<h2>{html.escape(name)}</h2>",
            html_table(head, [_html_row(head, r, name) for r in rows], escape=False),
        ]
    for heading, figure in figures:
        parts += [f"<h2>{html.escape(heading)}</h2>", svg(figure)]
    with Transaction(force=force) as transaction:
        transaction.add(target).write_text(page(title, parts), encoding="utf-8")


def _summary(lines: Sequence[Line], missing: Sequence[str]) -> str:
    """A summary of how much was done, what is missing, and what bold and ± mean."""
    minutes = sum(line.get("seconds") or 0 for line in lines) / 60
    evaluation = sum(line.get("evaluation_seconds") or 0 for line in lines) / 60
    times = f"{minutes:.0f} minutes of both parties' work, {evaluation:.0f} of evaluation"
    lacking = f" Without a result: {few(missing)}." if missing else ""
    return (
        f"{len(lines)} experiments, {times}.{lacking} Where runs are averaged, ± is half of the 95 % interval; the "
        "best of a row is bold if its interval overlaps no other; n stands where a cell has fewer runs than others. A "
        f"dash: not measured, or a percentage above {MEANINGLESS}."
    )


def _figures(
    lines: Sequence[Line], available: Sequence[str], names: Sequence[str], repeats: Sequence[str]
) -> list[tuple[str, Figure]]:
    """The figures of the report, with headings."""
    figures: list[tuple[str, Figure]] = []
    forgetting = next((name for name in FORGETTING if name in available), None)
    utility = next((name for name in UTILITY if name in available), None)
    if forgetting and utility:
        figure = make_figure([lambda axes: _plane(axes, lines, utility, forgetting)], None)
        figures.append(("Forgetting against utility", figure))
    if curves := _relearning(lines):
        figure = make_figure([lambda axes: draw_relearning(axes, curves)], None)
        figures.append(("Learning again what was forgotten", figure))
    for axis in _numeric_axes(lines, repeats):
        figures.append((axis, make_figure([_curves(lines, axis, name, repeats) for name in names], None)))
    return figures


def _relearning(lines: Sequence[Line]) -> list[Curve]:
    """The curve of each line of the sweep, and those of the models that are the same for all."""
    curves: list[Curve] = []
    same: dict[str, Curve] = {}
    for line in lines:
        for model, points in (line.get(RELEARNING) or {}).items():
            if model == "after":
                label = " ".join(str(value) for name, value in line.items() if name not in FIXED) or str(line["name"])
                curves.append((label, PALETTE[len(curves) % len(PALETTE)], points))
            else:
                same[model] = (model, "#000000" if model == BEFORE else "#777777", points)
    return [*curves, *same.values()]


def _html_row(head: Sequence[str], row: Sequence[str], metric: str) -> list[str]:
    """``row`` as HTML, with a value in bold if it is certainly the best; axes and distances do not compete."""
    values: list[float | None] = []
    intervals: list[tuple[float, float] | None] = []
    averaged = any(" ± " in cell for cell in row)
    retain = None
    for name, cell in zip(head, row, strict=True):
        value = interval = None
        if name == RETAIN and cell != "–":
            retain = float(cell.partition(" ")[0])
        if name in MODES and cell != "–":
            # A mode with one run beside averaged ones ignores what is repeated: it has no spread.
            mean, *half = (float(number) for number in cell.partition(" (")[0].split(" ± "))
            value, width = mean, half[0] if half else 0.0
            interval = (mean - width, mean + width) if averaged else None
        values.append(value)
        intervals.append(interval)
    marked = distinct_best(values, intervals, goal(metric), retain)
    return [f"<b>{html.escape(cell)}</b>" if i in marked else html.escape(cell) for i, cell in enumerate(row)]


def _plane(axes: Axes, lines: Sequence[Line], utility: str, forgetting: str) -> None:
    """A point for each algorithm and mode: the marker says which algorithm, colour and filling which mode."""
    algorithms = list(dict.fromkeys(str(line.get("algo", "")) for line in lines))
    modes = list(dict.fromkeys(str(line.get("mode", "mpu")) for line in lines))
    is_axis = any("mode" in line for line in lines)  # else the lines do not say which it was
    for (i, algo), mode in itertools.product(enumerate(algorithms), modes):
        runs = [line for line in lines if line.get("algo", "") == algo and line.get("mode", "mpu") == mode]
        x, y = (_mean(_value(line, metric) for line in runs) for metric in (utility, forgetting))
        if x and y:
            colour, filled = MODES.get(mode, (PALETTE[3], "full"))
            label = f"{algo} {mode}".strip() if is_axis else algo
            axes.errorbar(
                x[0], y[0], xerr=x[1] or None, yerr=y[1] or None, marker=MARKERS[i % len(MARKERS)], color=colour,
                fillstyle=filled, linestyle="", markersize=8, label=label, capsize=2,
            )  # fmt: skip
    axes.set_xlabel(utility)
    axes.set_ylabel(forgetting)
    legend_below(axes, min(3, len(modes)))


def _numeric_axes(lines: Sequence[Line], repeats: Sequence[str]) -> list[str]:
    """Options with numbers for values, of which the sweep has several."""
    axes = []
    for name in dict.fromkeys(name for line in lines for name in line if name not in (*FIXED, *repeats)):
        numbers = {line[name] for line in lines if isinstance(line.get(name), int | float)}
        if len(numbers) > 1:
            axes.append(name)
    return axes


def _curves(lines: Sequence[Line], axis: str, metric: str, repeats: Sequence[str]) -> Callable[[Axes], None]:
    """A panel with a line for each combination of the other options; what ignores the axis is level."""

    def options_of(line: Line) -> dict[str, str]:
        return {name: str(value) for name, value in line.items() if name not in (*FIXED, *repeats, axis)}

    groups: dict[object, list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(options_of(line).items()), []).append(line)

    def draw(axes: Axes) -> None:
        for i, group_lines in enumerate(groups.values()):
            options = options_of(group_lines[0])
            label = " ".join(value for value in options.values() if value != "default")
            colour, filled = MODES.get(options.get("mode", ""), (PALETTE[i % len(PALETTE)], "full"))
            style: dict[str, Any] = {"color": colour, "linestyle": LINES[i % len(LINES)], "label": label}
            points = {}
            for x in sorted({line[axis] for line in group_lines if isinstance(line.get(axis), int | float)}):
                if mean := _mean(_value(line, metric) for line in group_lines if line.get(axis) == x):
                    points[x] = mean
            if points:
                means, halves, _ = zip(*points.values(), strict=True)
                axes.errorbar(
                    [*points], means, yerr=halves, marker=MARKERS[i % len(MARKERS)], fillstyle=filled, capsize=2,
                    **style,
                )  # fmt: skip
            elif mean := _mean(_value(line, metric) for line in group_lines):
                axes.axhline(mean[0], **style)
        axes.set_xlabel(axis)
        axes.set_ylabel(metric)
        if axis == "kappa":
            axes.set_xscale("symlog", linthresh=1e-3)
        legend_below(axes, 2)

    return draw


# Reading a sweep file, which may extend another one.


def read_recipe(path: Path) -> dict[str, Any]:
    """The document in ``path``; with ``extends = "FILE"``, on top of the one in FILE beside it, which extends none.

    Of [eval], single options are replaced; of anything else, the whole entry.
    """
    document = read_toml(path)
    if "extends" not in document:
        return document
    name = document.pop("extends")
    if not isinstance(name, str) or Path(name).name != name:
        raise UsageError(f"{path}: extends = {name!r}: must name a file in the same folder")
    below = read_toml(path.parent / name)
    if "extends" in below:
        raise UsageError(f"{path.parent / name}: extends: {path.name} extends this file already")
    merged = {**below, **document}
    evaluation_below, evaluation = below.get("eval", {}), document.get("eval", {})
    if isinstance(evaluation_below, dict) and isinstance(evaluation, dict):
        evaluation = {**evaluation_below, **evaluation}
    if evaluation:
        merged["eval"] = evaluation
    return merged


# Others' results, read from a sweep file, to stand beside what is measured here.
#
#     [[published]]                        # one result: options, source, metrics
#     source = "OpenUnlearning"
#     algo = "npo"
#     metrics = { model_utility = 0.56 }
#
#     [[published]]                        # many: a CSV file with a column for each option, "metric" and "value"
#     source = "paper"
#     file = "tables.csv"
#     table = "pum_main_comparison"        # the rows whose column "table" says so

NUMBERS: dict[str, type] = {"copies": int, "rounds": int, "epochs": int, "kappa": float}
# A clean training is uninterrupted and without noise; it and a noised one are of one model, whatever the copies.
NOT_OF_MODE = {"clean": ("copies", "kappa", "rounds", "epochs"), "noised": ("copies",)}
NOT_OPTIONS = ("table", "model", "benchmark", "forget", "mode", "metric", "value")
# The mean |α_k| of the paper's two copies: the mode noised multiplies κ by it, and the paper lists the product.
MEAN_ALPHA = 1.5


def published_results(path: Path, bases: Sequence[str] = ()) -> list[Line]:
    """Lines of results whose mode names the source; ``bases`` are those of the sweep, which a table's models may be."""
    lines: list[Line] = []
    for entry in read_recipe(path).get("published", []):
        if isinstance(entry, dict) and {"source", "file", "table"} <= entry.keys():
            lines += _from_table(path.parent / str(entry["file"]), str(entry["table"]), str(entry["source"]), bases)
        elif isinstance(entry, dict) and isinstance(entry.get("metrics"), dict) and "source" in entry:
            options = {name: value for name, value in entry.items() if name != "source"}
            lines.append({"mode": f"{PUBLISHED}: {entry['source']}", **options})
        else:
            raise UsageError(
                f"{path}: [[published]]: needs a source, and metrics = {{ NAME = VALUE, … }} or a file and a table"
            )
    return [{"name": f"published-{number}", **line} for number, line in enumerate(lines)]


def _from_table(file: Path, table: str, source: str, bases: Sequence[str]) -> Iterator[Line]:
    """A line for each result in ``table``, which is several rows: one for each metric."""
    try:
        rows = [row for row in csv.DictReader(io.StringIO(read_text(file), newline="")) if row.get("table") == table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MpuError(f"{file}: cannot be read as a table ({error})") from error
    if not rows:
        raise UsageError(f"{file}: has no table {table}")
    results: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for row in rows:
        key = tuple((name, value) for name, value in row.items() if name not in ("metric", "value"))
        try:
            results.setdefault(key, {})[row["metric"]] = float(row["value"])
        except (KeyError, TypeError, ValueError) as error:
            raise MpuError(f"{file}: {table}: a row has no metric or no number for it") from error
    for key, metrics in results.items():
        yield _line(dict(key), metrics, source, bases)


def _line(row: Mapping[str, str], metrics: dict[str, float], source: str, bases: Sequence[str]) -> Line:
    model, mode = row.get("model", ""), row.get("mode", "mpu")
    matching_bases = [base for base in bases if model and model in base]
    label = source if matching_bases or not model else f"{source}, {model}"
    omitted = (*NOT_OPTIONS, *NOT_OF_MODE.get(mode, ()))
    options: dict[str, Any] = {name: NUMBERS.get(name, str)(row[name]) for name in row if name not in omitted}
    if mode == "noised":
        options["kappa"] = round(options["kappa"] / MEAN_ALPHA, 9)
    if row.get("benchmark") == "tofu":
        options["forget"] = f"tofu:{row['forget']}"
    if matching_bases:
        options["base"] = matching_bases[0]
    return {"mode": f"{PUBLISHED}: {label} {mode}", "metrics": metrics, **options}
