"""Plot of a trace: z of each noise, block by block."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.figures import PALETTE, make_figure, write_figure
from mpu_cli.tracing.evidence import NoiseEvidence, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
