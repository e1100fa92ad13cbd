"""Writes figures as PNG, SVG, or an HTML page with the figure and its numbers."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.errors import MpuError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

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
    figure: Figure, path: Path, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], force: bool
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
    return wide(drawn.getvalue()[drawn.getvalue().index("<svg") :])


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
    numeric = [
        all(_NUMBER.fullmatch(_BOLD.sub("", cell)) or cell in ("", "–") for cell in column)
        for column in zip(*rows, strict=True)
    ]

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="number"' if right else "" for right in numeric]
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    lines = [line("th", [html.escape(cell) for cell in header]), *(line("td", [clean(c) for c in row]) for row in rows)]
    return wide(f"<table>{''.join(f'<tr>{cells}</tr>' for cells in lines)}</table>")


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
