"""A sweep as one HTML page: tables, forgetting against utility, a curve for each numeric axis. The tables alone as
LaTeX, CSV or Markdown; the figures alone as PDF.

Modes differ by marker and line as well as by colour, so that the page can be printed in black and white.
"""

from __future__ import annotations

import html
import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpu_cli.boundary.documents import read_json_object
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.evaluation.plots import draw_relearning
from mpu_cli.evaluation.results import distinct_best, goal, main_metrics
from mpu_cli.experiment.tables import (
    BEFORE,
    FIXED,
    LITERATURE,
    MEANINGLESS,
    PLANNED,
    RELEARNING,
    REPEATS,
    RESULTS,
    Line,
    degradation,
    half_interval,
    pivot,
    sentences,
)
from mpu_cli.figures import PALETTE, html_table, legend_below, make_figure, page, plain, svg
from mpu_cli.resumption import read_lines
from mpu_cli.table_files import SUFFIXES, write_tables
from mpu_cli.wording import few

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORGETTING = ("forget_truth_ratio", "forget_quality", "extraction_strength", "forget_Q_A_Prob", "forget_Q_A_ROUGE")
UTILITY = ("model_utility", "retain_Q_A_Prob", "retain_Q_A_ROUGE", "retain_knowmem_ROUGE")
MARKERS, LINES = "osD^vPX*h", ("-", "--", ":", "-.")
MODES = {"clean": ("#000000", "full"), "clean-rounds": ("#777777", "full"), "noised": ("#D55E00", "none"),
         "mpu": ("#0072B2", "full")}  # fmt: skip


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The lines of a sweep, by mode: with several jobs they stand as they were finished.

    Raises MpuError if ``folder`` holds none.
    """
    lines = read_lines(folder / RESULTS, "run the sweep again")
    if not lines:
        raise MpuError(f"{folder}: has no {RESULTS}, or an empty one", "pass the folder of a sweep")
    try:
        latest = {str(line["name"]): line for line in lines}
        evaluated_lines = [line for line in latest.values() if isinstance(line["metrics"], dict)]
        return sorted(evaluated_lines, key=lambda line: [*MODES, line.get("mode")].index(line.get("mode")))
    except (KeyError, TypeError) as error:
        raise MpuError(f"{folder / RESULTS}: is not what a sweep writes", "run the sweep again") from error


def read_sweeps(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The lines of all sweeps; of several, each line also has the name of its folder, as the axis ``sweep``."""
    if len(folders) == 1:
        return read_results(folders[0])
    return [
        {"sweep": folder.resolve().name, **line, "name": f"{folder.resolve().name}/{line['name']}"}
        for folder in folders
        for line in read_results(folder)
    ]


def read_others(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """What the sweeps showed beside their own results, each once. Raises MpuError if it is damaged."""
    lines = [line for folder in folders for line in read_lines(folder / LITERATURE, "run the sweep again")]
    return list({json.dumps(line | {"name": ""}, sort_keys=True): line for line in lines}.values())


def missing_experiments(folders: Sequence[Path], lines: Sequence[Line]) -> list[str]:
    """The names of experiments that the sweeps in ``folders`` have no result of, as far as the folders say."""
    done = {str(line["name"]) for line in lines}
    missing: list[str] = []
    for folder in folders:
        if (folder / PLANNED).is_file():
            prefix = "" if len(folders) == 1 else f"{folder.resolve().name}/"
            planned = read_json_object(folder / PLANNED).get("experiments")
            names = [f"{prefix}{name}" for name in planned] if isinstance(planned, list) else []
            missing += [name for name in names if name not in done]
    return missing


def write_report(
    lines: Sequence[Line],
    target: Path,
    title: str,
    metrics: Sequence[str] | None = None,
    over: Sequence[str] | None = None,
    *,
    published: Sequence[Line] = (),
    missing: Sequence[str] = (),
    force: bool = False,
) -> None:
    """Write the report in the format that the suffix of ``target`` names; ``published`` are lines of what others
    measured, which stand beside, ``missing`` the names of experiments without a result.

    Raises MpuError if ``target`` exists and may not be replaced, UsageError for unknown axes and suffixes.
    """
    if target.suffix not in (*SUFFIXES, ".html", ".pdf"):
        raise UsageError(f"--out {target}: must end in .html, .pdf, {', '.join(SUFFIXES)}")
    had = list(dict.fromkeys(name for line in lines for name in line["metrics"]))
    names = list(metrics or main_metrics(had))
    repeats = [name for name in REPEATS if any(name in line for line in lines)] if over is None else list(over)
    beside = [*lines, *published]
    tables = pivot(beside, names, None, over)
    if target.suffix in SUFFIXES:
        write_tables(tables, target, force=force)
        return
    figures = _figures(lines, had, names, repeats)
    if target.suffix == ".pdf":
        _write_pdf(figures, target, force)
        return
    parts = [f"<p>{html.escape(_summary(lines, missing))}</p>"]
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
    """How much was done, what is missing, and what bold and ± mean."""
    minutes, evaluation = (
        sum(line.get(name) or 0 for line in lines) / 60 for name in ("seconds", "evaluation_seconds")
    )
    times = f"{minutes:.0f} minutes of both parties' work, {evaluation:.0f} of evaluation"
    lacking = f" Without a result: {few(missing)}." if missing else ""
    return (
        f"{len(lines)} experiments, {times}.{lacking} Where runs are averaged, ± is half of the 95 % interval; the "
        "best of a row is bold if its interval overlaps no other. A dash: not measured, or a percentage above "
        f"{MEANINGLESS}."
    )


def _figures(
    lines: Sequence[Line], had: Sequence[str], names: Sequence[str], repeats: Sequence[str]
) -> list[tuple[str, Figure]]:
    """What the report draws, with headings."""
    figures: list[tuple[str, Figure]] = []
    forgetting = next((name for name in FORGETTING if name in had), None)
    utility = next((name for name in UTILITY if name in had), None)
    if forgetting and utility:
        figure = make_figure([lambda axes: _plane(axes, lines, utility, forgetting)], None)
        figures.append(("Forgetting against utility", figure))
    if curves := _relearning(lines):
        figure = make_figure([lambda axes: draw_relearning(axes, curves)], None)
        figures.append(("Learning again what was forgotten", figure))
    for axis in _numeric_axes(lines, repeats):
        figures.append((axis, make_figure([_curves(lines, axis, name, repeats) for name in names], None)))
    return figures


def _write_pdf(figures: Sequence[tuple[str, Figure]], target: Path, force: bool) -> None:
    """A page for each figure. Raises MpuError if there is none."""
    from matplotlib.backends.backend_pdf import PdfPages

    if not figures:
        raise MpuError(f"{target}: the sweep has nothing to draw", "write the tables: --out report.tex")
    with Transaction(force=force) as transaction, PdfPages(transaction.add(target)) as pages:
        for heading, figure in figures:
            figure.suptitle(plain(heading), fontsize=11)
            pages.savefig(figure)


def _relearning(lines: Sequence[Line]) -> list[tuple[str, str, Sequence[Mapping[str, Any]]]]:
    """Labels, colours and points: of each line of the sweep, and of the models that are the same for all."""
    curves: list[tuple[str, str, Sequence[Mapping[str, Any]]]] = []
    same: dict[str, Sequence[Mapping[str, Any]]] = {}
    for line in lines:
        line_curves = dict(line.get(RELEARNING) or {})
        if after := line_curves.pop("after", None):
            label = " ".join(str(value) for name, value in line.items() if name not in FIXED) or str(line["name"])
            curves.append((label, PALETTE[len(curves) % len(PALETTE)], after))
        same |= line_curves
    return [*curves, *((label, "#000000" if label == BEFORE else "#777777", curve) for label, curve in same.items())]


def _html_row(head: Sequence[str], row: Sequence[str], metric: str) -> list[str]:
    """``row`` as HTML, with a value in bold if it is certainly the best; axes and distances do not compete."""
    values: list[float | None] = []
    intervals: list[tuple[float, float] | None] = []
    for name, cell in zip(head, row, strict=True):
        mean, _, half = cell.partition(" ± ")
        value, width = (_number(mean), _number(half)) if name in MODES else (None, None)
        values.append(value)
        # A mode with one run beside averaged ones ignores what is repeated: it has no spread.
        width = 0.0 if width is None and any(" ± " in cell for cell in row) else width
        intervals.append(None if value is None or width is None else (value - width, value + width))
    marked = distinct_best(values, intervals, goal(metric))
    return [f"<b>{html.escape(cell)}</b>" if i in marked else html.escape(cell) for i, cell in enumerate(row)]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _mean(lines: Sequence[Line], metric: str) -> tuple[float, float] | None:
    """The mean of a metric and half of its 95 % interval (0 for a single run); None if no run has it."""
    values = [line["metrics"].get(metric) for line in lines]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if not numbers:
        return None
    return statistics.fmean(numbers), half_interval(numbers) if len(numbers) > 1 else 0.0


def _plane(axes: Axes, lines: Sequence[Line], utility: str, forgetting: str) -> None:
    """A point for each algorithm and mode: the marker says which algorithm, colour and filling which mode."""
    algorithms = list(dict.fromkeys(str(line.get("algo", "")) for line in lines))
    modes = list(dict.fromkeys(str(line.get("mode", "mpu")) for line in lines))
    for (i, algo), mode in itertools.product(enumerate(algorithms), modes):
        runs = [line for line in lines if line.get("algo", "") == algo and line.get("mode", "mpu") == mode]
        x, y = _mean(runs, utility), _mean(runs, forgetting)
        if x and y:
            colour, filled = MODES.get(mode, (PALETTE[3], "full"))
            axes.errorbar(
                x[0], y[0], xerr=x[1] or None, yerr=y[1] or None, marker=MARKERS[i % len(MARKERS)], color=colour,
                fillstyle=filled, linestyle="", markersize=8, label=f"{algo} {mode}".strip(), capsize=2,
            )  # fmt: skip
    axes.set_xlabel(utility)
    axes.set_ylabel(forgetting)
    legend_below(axes, min(3, len(modes)))


def _numeric_axes(lines: Sequence[Line], repeats: Sequence[str]) -> list[str]:
    """Options with numbers for values, of which the sweep has several."""
    names = dict.fromkeys(name for line in lines for name in line if name not in (*FIXED, *repeats))
    values = {name: {line[name] for line in lines if isinstance(line.get(name), int | float)} for name in names}
    return [name for name, numbers in values.items() if len(numbers) > 1]


def _curves(lines: Sequence[Line], axis: str, metric: str, repeats: Sequence[str]) -> Callable[[Axes], None]:
    """A panel with a line for each combination of the other options; what ignores the axis is level."""

    def group(line: Line) -> tuple[tuple[str, str], ...]:
        return tuple((k, str(v)) for k, v in line.items() if k not in (*FIXED, *repeats, axis))

    groups: dict[tuple[tuple[str, str], ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(group(line), []).append(line)

    def draw(axes: Axes) -> None:
        for i, (names, group_lines) in enumerate(groups.items()):
            facts: Mapping[str, str] = dict(names)
            label = " ".join(value for value in facts.values() if value != "default")
            colour, filled = MODES.get(facts.get("mode", ""), (PALETTE[i % len(PALETTE)], "full"))
            style: dict[str, Any] = {"color": colour, "linestyle": LINES[i % len(LINES)], "label": label}
            places = sorted({line[axis] for line in group_lines if isinstance(line.get(axis), int | float)})
            points = [
                (x, mean) for x in places if (mean := _mean([c for c in group_lines if c.get(axis) == x], metric))
            ]
            if points:
                axes.errorbar(
                    [x for x, _ in points], [y for _, (y, _) in points], yerr=[half for _, (_, half) in points],
                    marker=MARKERS[i % len(MARKERS)], fillstyle=filled, capsize=2, **style,
                )  # fmt: skip
            elif mean := _mean(group_lines, metric):
                axes.axhline(mean[0], **style)
        axes.set_xlabel(axis)
        axes.set_ylabel(metric)
        if axis == "kappa":
            axes.set_xscale("symlog", linthresh=1e-3)
        legend_below(axes, 2)

    return draw
