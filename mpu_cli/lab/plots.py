"""Plots the distributions behind one result, and several results side by side."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.transaction import Transaction
from mpu_cli.measuring.metrics import RELEARNED, privleak_form

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


# Writes figures as PNG, SVG, or an HTML page with the figure and its numbers.

SUFFIXES = (".png", ".svg", ".pdf", ".html")
# colour-blind-safe palette (Okabe and Ito)
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STYLE = """:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse}td,th{padding:.2em .9em .2em 0;text-align:left;border-bottom:1px solid #ddd}
td{vertical-align:top}.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto;margin:1.5em 0}.wide svg{max-width:100%;min-width:36em;height:auto}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#161616}td,th{border-color:#444}
.wide svg{background:#fff}}"""
_NUMBER = re.compile(r"[-−]?\d[\d.,]*(e[-+]\d+)?%?( ± [\d.e+-]+)?( ★)?")
_BOLD = re.compile("</?b>")


def check_target(path: Path, force: bool) -> None:
    """Raises UsageError if the suffix is not supported, MpuError if ``path`` exists and may not be replaced."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot {path}: must end in {', '.join(SUFFIXES)}")
    if path.exists() and not force:
        raise MpuError(f"{path}: already exists", "choose another name, or use --force to replace it")


def make_figure(panels: Sequence[Callable[[Axes], None]], title: str | None) -> Figure:
    """A figure of ``panels``, each of which draws on its axes."""
    from matplotlib.figure import Figure

    across = min(2, len(panels)) if len(panels) < 5 else 3
    down = -(-len(panels) // across)
    figure = Figure(figsize=(5 * across, 3.8 * down), layout="constrained")
    if title:
        figure.suptitle(plain(title), fontsize=11)
    grid = list(figure.subplots(down, across, squeeze=False).flat)
    for axes, panel in zip(grid, panels, strict=False):
        axes.spines[["top", "right"]].set_visible(False)
        panel(axes)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    return figure


def write_figure(
    figure: Figure, path: Path, title: str, *, header: Sequence[str], rows: Sequence[Sequence[str]], force: bool
) -> None:
    """Write ``figure``; if ``path`` ends in .html, as a page with a table of ``header`` and ``rows``."""
    with Transaction(force=force) as transaction:
        output = transaction.add(path)
        if path.suffix != ".html":
            figure.savefig(output, dpi=150)
            return
        figure.suptitle("")  # the page has it as its heading
        output.write_text(page(title, [svg(figure), html_table(header, rows)]), encoding="utf-8")


def plain(text: str) -> str:
    """``text`` escaped so that matplotlib does not render it as a formula."""
    return text.replace("$", r"\$")


def svg(figure: Figure) -> str:
    """``figure`` as an SVG element for an HTML page."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    text = drawn.getvalue()
    return wide(text[text.index("<svg") :])  # without the XML header before it


def legend_below(axes: Axes, columns: int = 1) -> None:
    """A legend under the axes, where it hides nothing."""
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=columns, frameon=False)


def log_ticks(axis: Axis) -> None:
    """A logarithmic axis with plain numbers, as many as fit."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    least, most = axis.get_view_interval()
    subs = (1.0,) if most > 100 * least else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, escape: bool = True) -> str:
    """A table, numbers to the right; the rows are escaped unless they are already HTML (``escape=False``)."""
    clean = html.escape if escape else str
    numeric = []  # by column
    for column in zip(*rows, strict=True):
        numeric.append(all(cell in ("", "–") or _NUMBER.fullmatch(_BOLD.sub("", cell)) for cell in column))

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="number"' if right else "" for right in numeric]
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    lines = [line("th", [html.escape(cell) for cell in header])]
    for row in rows:
        lines.append(line("td", [clean(cell) for cell in row]))
    body = "".join(f"<tr>{cells}</tr>" for cells in lines)
    return wide(f"<table>{body}</table>")


def wide(element: str) -> str:
    """``element`` in a box that scrolls where the screen is narrower."""
    return f'<div class="wide">{element}</div>'


def page(title: str, parts: Sequence[str]) -> str:
    """A self-contained page; ``parts`` are HTML."""
    name = html.escape(title)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{name}</title><style>{STYLE}</style><h1>{name}</h1>{''.join(parts)}</html>\n"
    )


MODEL_COLOUR, RETAIN_COLOUR = PALETTE[0], PALETTE[2]
ATTACK_LABELS = {
    "mia_loss": "loss", "mia_zlib": "zlib", "mia_min_k": "min-k", "mia_min_k_plus_plus": "min-k++",
    "mia_gradnorm": "gradient norm", "mia_reference": "reference",
}  # fmt: skip
Forms = Mapping[str, Mapping]
Curve = tuple[str, str, Sequence[Mapping[str, Any]]]  # of relearning: label, colour and points


def check_drawable(names: Collection[str], path: Path) -> None:
    """Raises UsageError if ``draw`` has nothing to plot for metrics with these ``names``."""
    if not {"forget_truth_ratio", "forget_Q_A_Prob", RELEARNED, *ATTACK_LABELS} & set(names):
        raise UsageError(f"--plot {path}: the requested metrics have no distribution to plot")


def draw(forms: Forms, path: Path, *, title: str, retain: Forms | None, force: bool = False) -> None:
    """Plot one result: those that it has of truth ratios, attacks and probabilities.

    ``retain``: the metrics of the retain model, for comparison.
    """
    models = [("this model", MODEL_COLOUR, forms)]
    if retain:
        models.append(("retain model", RETAIN_COLOUR, retain))
    panels: list[Callable[[Axes], None]] = []
    curves = [
        (label, colour, model_forms[RELEARNED]["curve"])
        for label, colour, model_forms in models
        if RELEARNED in model_forms
    ]
    if RELEARNED in forms:
        panels.append(lambda axes: draw_relearning(axes, curves))
    if "value_by_index" in forms.get("forget_truth_ratio", {}):
        panels.append(lambda axes: _truth_ratios(axes, models))
    if any(name in forms for name in ATTACK_LABELS):
        panels.append(lambda axes: _roc(axes, forms))
    if "forget_Q_A_Prob" in forms:
        panels.append(lambda axes: _probabilities(axes, models))
    columns = {label: dict(model_forms) for label, _, model_forms in models}
    if retain and "mia_min_k" in retain:
        # The privleak in a file is relative to whichever retain model it was measured against, if any.
        retain_auc = _aggregate(retain, "mia_min_k")
        for column in columns.values():
            column["privleak"] = privleak_form(_aggregate(column, "mia_min_k"), retain_auc)
    rows = []
    for name in forms:
        rows.append([name, *(_text(column.get(name, {}).get("agg_value")) for column in columns.values())])
    write_figure(make_figure(panels, title), path, title, header=["metric", *columns], rows=rows, force=force)


def draw_comparison(
    labels: Sequence[str], columns: Mapping[str, Sequence[float | None]], path: Path, *, force: bool = False
) -> None:
    """Write the charts of ``comparison``."""
    rows = [[label, *(_text(columns[name][i]) for name in columns)] for i, label in enumerate(labels)]
    write_figure(comparison(labels, columns), path, "Comparison", header=["", *columns], rows=rows, force=force)


def comparison(labels: Sequence[str], columns: Mapping[str, Sequence[float | None]]) -> Figure:
    """A bar chart for each metric, one bar per result; ``columns`` maps a metric to its values."""

    def panel(name: str) -> Callable[[Axes], None]:
        def bars(axes: Axes) -> None:
            values = columns[name]
            colours = [PALETTE[i % len(PALETTE)] for i in range(len(labels))]
            drawn = axes.bar(range(len(labels)), [0 if v is None else v for v in values], color=colours)
            axes.bar_label(drawn, ["–" if v is None else f"{v:.3g}" for v in values], fontsize=8)
            axes.set_xticks(range(len(labels)), list(map(plain, labels)), rotation=20, ha="right", fontsize=8)
            axes.set_title(plain(name), fontsize=10)
            axes.margins(y=0.15)

        return bars

    return make_figure([panel(name) for name in columns], None)


def _column(forms: Forms, name: str, field: str) -> list[float]:
    rows = forms.get(name, {}).get("value_by_index", {})
    values = [row.get(field) for row in rows.values()]
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


def draw_relearning(axes: Axes, curves: Sequence[Curve]) -> None:
    """Plot how likely the true answers become while the other half of the forget set is learned again, with 95 %
    intervals."""
    for label, colour, curve in curves:
        steps, values = [point["steps"] for point in curve], [point["agg_value"] for point in curve]
        axes.plot(steps, values, color=colour, marker=".", label=label)
        if all(point.get("interval") for point in curve):
            low, high = zip(*(point["interval"] for point in curve), strict=True)
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("symlog", linthresh=1)
    ticks = sorted({point["steps"] for _, _, curve in curves for point in curve})
    axes.set_xticks(ticks, [str(steps) for steps in ticks])
    axes.set_ylim(0, 1)
    axes.set(xlabel="steps on the other half of the forget set", ylabel="probability of forgotten answers")
    axes.set_title("Relearning", fontsize=10)
    legend_below(axes, min(3, len(curves)))


def _truth_ratios(axes: Axes, models: Sequence[tuple[str, str, Forms]]) -> None:
    for label, colour, forms in models:
        if ratios := _column(forms, "forget_truth_ratio", "score"):
            axes.ecdf(ratios, color=colour, label=label)
    quality = models[0][2].get("forget_quality", {}).get("agg_value")
    axes.set_xscale("log")
    log_ticks(axes.xaxis)
    axes.set(xlabel="truth ratio (forget questions)", ylabel="share of questions")
    axes.set_title("Truth ratios" + ("" if quality is None else f" (forget quality: p = {quality:.3g})"), fontsize=10)
    legend_below(axes, len(models))


def _roc(axes: Axes, forms: Forms) -> None:
    from sklearn.metrics import roc_curve

    for (name, label), colour in zip(ATTACK_LABELS.items(), PALETTE, strict=False):
        if name not in forms:
            continue
        forget = [row["score"] for row in forms[name]["forget"]["value_by_index"].values()]
        holdout = [row["score"] for row in forms[name]["holdout"]["value_by_index"].values()]
        wrong, right, _ = roc_curve([0] * len(forget) + [1] * len(holdout), forget + holdout)
        axes.plot(wrong, right, color=colour, label=f"{label} {forms[name]['agg_value']:.2f}")
    axes.plot([0, 1], [0, 1], color="#bbb", linestyle=":", linewidth=1)
    axes.set(xlabel="forget records classified as unseen", ylabel="unseen records classified as unseen")
    axes.set_title("Attacks: does the model know the forget set? (AUC)", fontsize=10)
    legend_below(axes, 3)


def _probabilities(axes: Axes, models: Sequence[tuple[str, str, Forms]]) -> None:
    for label, colour, forms in models:
        for name, line in (("forget", "-"), ("retain", "--")):
            if values := _column(forms, f"{name}_Q_A_Prob", "prob"):
                axes.ecdf(values, color=colour, linestyle=line, label=f"{name}, {label}")
    axes.set_xscale("log")
    log_ticks(axes.xaxis)
    axes.set(xlabel="per-token probability of the true answer", ylabel="share of questions")
    axes.set_title("Probabilities", fontsize=10)
    legend_below(axes, len(models))


def _aggregate(forms: Forms, name: str) -> float:
    """The value of a metric, or NaN if a model has none, so that no bar is drawn."""
    value = forms.get(name, {}).get("agg_value")
    return float(value) if isinstance(value, int | float) else math.nan


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) and math.isfinite(value) else "–"
