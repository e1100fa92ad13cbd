"""Plot of an audit: the error of each attack, block by block."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.lab.audit import ATTACKS, Audit
from mpu_cli.lab.trace import NoiseEvidence, Trace
from mpu_cli.measuring.plots import PALETTE, log_ticks, make_figure, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LEAST = 1e-6  # relative error below which the plot shows no difference


def draw(audit: Audit, path: Path, *, title: str, force: bool) -> None:
    """Plot relative errors by block, one line per attack: of the weights and, next to it, of the task vector."""
    blocks = list(audit.weights)
    with_task = [name for name in audit.attacks if audit.task_error(name) is not None]

    def panel(task: bool) -> Callable[[Axes], None]:
        def lines(axes: Axes) -> None:
            for i, name in enumerate(ATTACKS):
                if name in (with_task if task else audit.attacks):
                    errors = [audit.task_error(name, b) if task else audit.function_error(name, b) for b in blocks]
                    clipped = [max(LEAST, error or 0.0) for error in errors]
                    # overlapping lines stay visible, as later ones are thinner
                    axes.plot(range(len(blocks)), clipped, color=PALETTE[i], linewidth=7 - i, alpha=0.8, label=name)
            axes.axhline(1, color="#bbb", linestyle=":", linewidth=1)
            step = -(-len(blocks) // 20)
            names = [block.removeprefix("model.").removesuffix(".weight") for block in blocks[::step]]
            axes.set_xticks(range(0, len(blocks), step), names, rotation=90, fontsize=7)
            axes.set_yscale("log")
            log_ticks(axes.yaxis)
            axes.set_ylabel("relative error", fontsize=9)
            axes.set_title("Task vector" if task else "Weights, up to symmetries", fontsize=10)

        return lines

    rows = [
        [block, *(f"{audit.function_error(name, block):.3g}" for name in audit.attacks)]
        + [f"{audit.task_error(name, block):.3g}" for name in with_task]
        for block in blocks
    ]
    header = ["block", *(f"weights: {name}" for name in audit.attacks), *(f"task vector: {name}" for name in with_task)]
    figure = make_figure([panel(False)] + ([panel(True)] if with_task else []), title)
    # One legend for both panels: the one for weights has every attack.
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8,
                  frameon=False)  # fmt: skip
    write_figure(figure, path, title, header, rows, force)


# Plot of a trace: z of each noise, block by block.


def draw_trace(trace: Trace, path: Path, *, force: bool) -> None:
    """Plot z of each block, a line for every mark and for every copy's noise."""
    evidence: dict[str, NoiseEvidence] = {}
    for publication in trace.publications:
        if publication.mark:
            evidence[f"{publication.label}: mark"] = publication.mark
        evidence |= {f"{publication.label}: copy {each.copy}": each.noise for each in publication.copies if each.noise}
    blocks = list(dict.fromkeys(block for noise in evidence.values() for block in noise.blocks))

    def panel(axes: Axes) -> None:
        for i, (label, noise) in enumerate(evidence.items()):
            values = [noise.blocks.get(block, math.nan) for block in blocks]
            axes.plot(range(len(blocks)), values, marker=".", color=PALETTE[i % len(PALETTE)], label=label)
        axes.axhspan(-3, 3, color="#ddd", zorder=0)  # where z lies without a relation, with 99.7 %
        step = max(1, -(-len(blocks) // 20))
        names = [block.removeprefix("model.").removesuffix(".weight") for block in blocks[::step]]
        axes.set_xticks(range(0, len(blocks), step), names, rotation=90, fontsize=7)
        axes.set_ylabel("z", fontsize=9)
        axes.legend(fontsize=8, frameon=False)

    rows = [[block, *(f"{noise.blocks.get(block, math.nan):.2f}" for noise in evidence.values())] for block in blocks]
    title = f"Noise of the copies in {trace.suspect}"
    write_figure(make_figure([panel], title), path, title, ["block", *evidence], rows, force)
