"""The figure of docs/protection.md, from the numbers in docs/overview.json: python examples/overview.py

Left: what noise hides of a real model from whoever holds a copy, and what unlearning on that copy costs the records
that are to be kept (docs/protection.md). Right: how fast what was forgotten is learned again (docs/results.md).
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.axes import Axes

from mpu_cli.evaluation.plots import draw_relearning
from mpu_cli.figures import PALETTE, legend_below, make_figure, write_figure

DOCS = Path(__file__).parents[1] / "docs"
MARKERS = {"npo": "o", "npo, α = 5": "s", "graddiff": "^"}


def main() -> None:
    numbers = json.loads((DOCS / "overview.json").read_text(encoding="utf-8"))

    def cost(axes: Axes) -> None:
        for i, (way, points) in enumerate(numbers["cost"].items()):
            hidden, kept = zip(*points, strict=True)
            axes.scatter(hidden, kept, color=PALETTE[i], marker=MARKERS[way], label=way)
        axes.axhline(numbers["before"], color=PALETTE[7], linewidth=0.8)
        axes.set_ylim(0)
        axes.set_xlabel("what fine-tuning changed: % hidden from whoever has the copy")
        axes.set_ylabel("loss on what is to be kept")
        axes.set_title("At equal forgetting (line: before unlearning)", fontsize=10)
        legend_below(axes, 3)

    curves = [(name, PALETTE[i], points) for i, (name, points) in enumerate(numbers["relearning"].items())]
    figure = make_figure([cost, lambda axes: draw_relearning(axes, curves)], None)
    write_figure(figure, DOCS / "overview.png", "Overview", [], [], force=True)


if __name__ == "__main__":
    main()
