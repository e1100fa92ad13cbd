"""Draw docs/frontier.svg and docs/relearning.svg from docs/data: python docs/site/pictures.py [FOLDER]

Text and lines are grey, so that they show on light and on dark pages.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tables import read_table

DOCS = Path(__file__).resolve().parents[1]
GREY, BLUE, ORANGE = "#7d8590", "#0072B2", "#D55E00"
matplotlib.rcParams |= {"svg.hashsalt": "mpu", "font.size": 9} | {
    f"{part}.color": GREY for part in ("text", "xtick", "ytick")
}
ALGORITHMS = {"npo": "NPO", "npo, α = 5": "NPO, α = 5", "graddiff": "GradDiff"}
MODELS = {
    "the model itself": ("unlearned on the model itself", GREY),
    "permanent 10": ("unlearned on a copy that hides most of what fine-tuning changed", BLUE),
}
LABELS = {
    "before": ("before unlearning", GREY),
    "never saw them": ("a model that never saw them", GREY),
    "graddiff": ("GradDiff", BLUE),
    "npo": ("NPO", ORANGE),
    "undial": ("UNDIAL", "#009E73"),
    "simnpo": ("SimNPO", "#CC79A7"),
}


def new_figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_color(GREY)
    return figure, axes


def save(figure: Figure, target: Path) -> None:
    figure.savefig(target, transparent=True, metadata={"Date": None})


def draw_frontier(target: Path) -> None:
    """The loss of kept records by algorithm and by what the client trained on; a dot for each draw."""
    header, *rows = read_table("cost_real")
    table: list[dict[str, str]] = [dict(zip(header, row, strict=True)) for row in rows]
    figure, axes = new_figure(2.6)
    for line, algorithm in enumerate(reversed(ALGORITHMS)):
        for offset, (model, (label, colour)) in zip((0.14, -0.14), MODELS.items(), strict=True):
            losses = [
                float(row["kept: loss"])
                for row in table
                if row["algorithm"] == algorithm and row["the client gets"] == model
            ]
            axes.scatter(losses, [line + offset] * len(losses), color=colour, s=36)
            if algorithm == "npo":
                axes.text(max(losses) + 0.005, line + offset, label, color=colour, va="center")
    [before] = [float(row["loss of the copy"].split(" / ")[1]) for row in table if row["algorithm"] == ""][:1]
    axes.axvline(before, color=GREY, linewidth=0.8)
    axes.text(before - 0.004, 1, "before\nunlearning", color=GREY, ha="right", va="center")
    axes.set_yticks(range(len(ALGORITHMS)), reversed(ALGORITHMS.values()))
    axes.set_xlim(0, 0.36)
    axes.set_ylim(-0.5, len(ALGORITHMS) - 0.5)
    axes.set_xlabel("loss of the records to keep once the others are forgotten (lower is better)")
    axes.xaxis.label.set_color(GREY)
    save(figure, target)


def draw_relearning(target: Path) -> None:
    """How likely forgotten answers are after relearning the other half, with 95 % intervals and a name at each end."""
    _, *rows = read_table("relearning_curve")
    figure, axes = new_figure(3.2)
    for model, (label, colour) in LABELS.items():
        points = [[float(cell) for cell in row[1:]] for row in rows if row[0] == model]
        steps, values, low, high = zip(*points, strict=True)
        style: dict[str, Any] = {"linestyle": ":" if colour == GREY else "-"}
        axes.plot(steps, values, color=colour, **style)
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        nudge = {"never saw them": -0.012, "npo": 0.024, "graddiff": -0.024}.get(model, 0.0)
        axes.text(21, values[-1] + nudge, label, color=colour, va="center")
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks([0, 1, 2, 5, 10, 20], ["0", "1", "2", "5", "10", "20"])
    axes.set_xlim(0, 90)
    axes.spines["bottom"].set_bounds(0, 20)
    axes.set_ylim(0, 1)
    axes.set_xlabel("training steps on the other half of the forgotten records", loc="left")
    axes.set_ylabel("probability of the forgotten answers")
    axes.xaxis.label.set_color(GREY)
    axes.yaxis.label.set_color(GREY)
    save(figure, target)


def main(folder: Path) -> None:
    draw_frontier(folder / "frontier.svg")
    draw_relearning(folder / "relearning.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
