"""Markdown tables of a sweep: one for each metric, an axis of the grid across, the others down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpu_cli.errors import UsageError

FIXED = ("name", "digest", "metrics", "smallest_pairwise_cosine", "lost_to_rounding", "noise_asked", "noise_survived",
         "seconds")  # fmt: skip


def pivot(
    lines: Sequence[Mapping[str, object]], metrics: Sequence[str], across: str | None = None
) -> dict[str, list[list[str]]]:
    """For each metric rows of cells, the first row the head. ``across`` is an axis (default: mode, else the last).

    A mode that ignores an axis (clean and κ, say) has its one result in every row of that axis.
    """
    axes = list(dict.fromkeys(name for line in lines for name in line if name not in FIXED))
    if not axes:
        return {name: [["", name], ["run", _text(line["metrics"].get(name))]] for name in metrics for line in lines}
    across = across or ("mode" if "mode" in axes else axes[-1])
    if across not in axes:
        raise UsageError(f"--across {across}: the sweep varies {', '.join(axes)}")
    down = [name for name in axes if name != across]
    heads = list(dict.fromkeys(line[across] for line in lines if across in line))
    places = list(dict.fromkeys(tuple(line.get(name) for name in down) for line in lines))
    # A place that leaves out an axis is no row of its own where others fill it in.
    rows = [place for place in places if not any(_covers(place, other) for other in places)]
    tables = {}
    for metric in metrics:
        table = [[*down, *map(str, heads)]]
        for row in rows:
            cells = []
            for head in heads:
                found = [
                    line["metrics"].get(metric)
                    for line in lines
                    if line.get(across) == head
                    and all(name not in line or line[name] == value for name, value in zip(down, row, strict=True))
                ]
                cells.append(_text(found[0] if found else None))
            table.append([*("–" if value is None else str(value) for value in row), *cells])
        tables[metric] = table
    return tables


def _covers(place: Sequence[object], other: Sequence[object]) -> bool:
    """Whether ``other`` says all that ``place`` does, and more."""
    return place != other and all(mine in (None, theirs) for mine, theirs in zip(place, other, strict=True))


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def markdown(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose first row is its head."""
    head, *rows = [f"| {' | '.join(cells)} |" for cells in table]
    return [head, "|" + "---|" * len(table[0]), *rows]
