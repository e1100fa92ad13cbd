"""Writes figures as PNG, SVG, or an HTML page with the figure and its numbers."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.errors import MpuError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".html")
# colour-blind-safe palette (Okabe and Ito)
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1.5em 0}td,th{padding:.2em .9em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child,.texts *{text-align:left}td{vertical-align:top}
.numbers td:not(:first-child){white-space:nowrap}svg{max-width:100%;height:auto}"""


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
        output.write_text(page(title, [svg(figure), html_table(header, rows)]), encoding="utf-8")


def plain(text: str) -> str:
    """``text`` escaped so that matplotlib does not render it as a formula."""
    return text.replace("$", r"\$")


def svg(figure: Figure) -> str:
    """``figure`` as an SVG element for an HTML page."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def html_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str = "numbers", escape: bool = True
) -> str:
    """A table of "numbers" or "texts"; the rows are escaped unless they are already HTML (``escape=False``)."""
    clean = html.escape if escape else str
    lines = [f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in header)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{clean(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f'<table class="{kind}">{"".join(lines)}</table>'


def page(title: str, parts: Sequence[str]) -> str:
    """A self-contained page; ``parts`` are HTML."""
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
        f"<h1>{name}</h1>{''.join(parts)}</html>\n"
    )
