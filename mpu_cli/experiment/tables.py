"""Markdown tables of a sweep: one per metric, with one axis of the grid as columns and the others as rows.

Axes that only repeat an experiment, with different noise or a different order of the records, are averaged over: a cell
is the mean of its runs ± half of its 95 % interval (Student's t). Next to the modes is the absolute distance of each
run from the clean run with the same options and order: in percent of clean's value, and of what clean changed. The
first alone says little of a metric that unlearning hardly changes, since the model before it is as near.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpu_cli.errors import UsageError

BEFORE = "before"  # of a line: the metrics of the model before unlearning; also how their column is called
RETAIN = "retain model"  # of a line: the metrics of the model that never saw the forget set; also their column
RELEARNING = "relearning"  # of a line: curves of models whose forgotten records are learned again
FIXED = ("name", "digest", "metrics", "smallest_pairwise_cosine", "lost_to_rounding", "noise_asked", "noise_survived",
         "error_estimate", "seconds", "evaluation_seconds", BEFORE, RETAIN, RELEARNING)  # fmt: skip
RESULTS = "results.jsonl"  # of a sweep's folder
PLANNED = "sweep.json"  # of a sweep's folder: the names of all experiments
PUBLISHED = "published"  # how the mode of what others measured begins
LITERATURE = "published.jsonl"  # of a sweep's folder: what others measured
COLLAPSES = "gradascent"  # destroys a model, clean or not: averages over algorithms leave it out, as the paper's do
REPEATS = ("secret_seed", "seed")  # draws of the noise, orders of the records
CONFIDENCE = 0.95
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
        return {name: [["", name], ["run", _text([_value(line, name) for line in lines])]] for name in metrics}
    across = across or ("mode" if "mode" in axes else axes[-1])
    down = [name for name in axes if name != across]
    heads = list(dict.fromkeys(line[across] for line in lines if across in line))
    compared = [head for head in heads if _clean_of(head) in heads] if across == "mode" else []
    places = list(dict.fromkeys(tuple(line.get(name) for name in down) for line in lines))
    # A place that omits an axis gets no row of its own if others fill it in.
    rows = [row for row in places if not any(_covers(row, other) for other in places)]
    same_columns = [name for name in (RETAIN, BEFORE) if any(line.get(name) for line in lines)]  # as for all modes
    changed = [head for head in compared if BEFORE in same_columns and not _is_published(head)]
    distances = [f"{head}: % from clean" for head in compared]
    distances += [f"{head}: % of clean's change" for head in changed]
    tables = {}
    for metric in metrics:
        table = [[*down, *same_columns, *map(str, heads), *distances]]
        for row in rows:
            where = dict(zip(down, row, strict=True))
            here = {head: [line for line in lines if line.get(across) == head and _fits(line, where)] for head in heads}
            row_lines = [line for column_lines in here.values() for line in column_lines]
            cells = [_text([*dict.fromkeys(_value(line, metric, name) for line in row_lines)]) for name in same_columns]
            cells += [_text([_value(line, metric) for line in here[head]]) for head in heads]
            apart = {h: _distances(here[h], here[_clean_of(h)], metric, repeats) for h in compared}
            cells += [_percents([each.percent for each in column_distances]) for column_distances in apart.values()]
            cells += [_percents([each.of_change for each in apart[head]]) for head in changed]
            table.append([*("–" if value is None else str(value) for value in row), *cells])
        tables[metric] = table
    return tables


@dataclass(frozen=True)
class Distance:
    """How far from clean: ``percent`` of clean's value, ``of_change``: in percent of how far clean is from the model
    before unlearning, None if that was not measured. ``count``: of how many algorithms it is the mean."""

    percent: float
    of_change: float | None = None
    count: int = 1


def degradation(lines: Sequence[Line], metrics: Sequence[str]) -> dict[str, dict[str, Distance]]:
    """How far each mode, others' and the model before unlearning, is from clean, by mode and metric.

    An algorithm counts with the mean of its runs, each compared with the clean run that it agrees with; gradient ascent
    does not count, unless it is the only one.
    """
    if {line.get("algo") for line in lines} - {COLLAPSES}:
        lines = [line for line in lines if line.get("algo") != COLLAPSES]
    clean = [line for line in lines if line.get("mode") == "clean"]
    # Doing nothing is a mode, too.
    lines = [*lines, *({**line, "mode": BEFORE, "metrics": line[BEFORE]} for line in clean if line.get(BEFORE))]
    mode_distances: dict[str, dict[str, Distance]] = {}
    modes = dict.fromkeys(str(line.get("mode", "clean")) for line in lines)
    for mode in (mode for mode in modes if _clean_of(mode) in modes):
        clean = [line for line in lines if line.get("mode") == _clean_of(mode)]
        for metric in metrics:
            means = []
            for algo in dict.fromkeys(line.get("algo") for line in lines):
                runs = [line for line in lines if line.get("mode") == mode and line.get("algo") == algo]
                distances = [d for line in runs for d in _distances([line], clean, metric, [*_axes(line)])]
                means += [_mean(distances)] if distances else []
            if means:
                mode_distances.setdefault(mode, {})[metric] = replace(_mean(means), count=len(means))
    return mode_distances


def _is_published(mode: object) -> bool:
    return str(mode).startswith(PUBLISHED)


def _clean_of(mode: object) -> str | None:
    """The mode that ``mode`` is compared with: clean, or that of the same source; None for clean itself."""
    aim = f"{str(mode).rpartition(' ')[0]} clean" if _is_published(mode) else "clean"
    return None if aim == mode else aim


def _mean(distances: Sequence[Distance]) -> Distance:
    shares = [each.of_change for each in distances if each.of_change is not None]
    return Distance(statistics.fmean(each.percent for each in distances), statistics.fmean(shares) if shares else None)


def sentences(distances: Mapping[str, Distance]) -> list[str]:
    """What ``degradation`` found of a mode, a sentence for each number of algorithms."""
    said = []
    for count in dict.fromkeys(distance.count for distance in distances.values()):
        parts = []
        for metric, distance in distances.items():
            if distance.count == count:
                share = "" if distance.of_change is None else f", {_percent(distance.of_change)} of clean's change"
                parts.append(f"{_percent(distance.percent)}{share} ({metric})")
        plural = "s" if count > 1 else ""
        said.append(f"average degradation (distance from clean) over {count} algorithm{plural}: {'; '.join(parts)}")
    return said


def _percent(value: float) -> str:
    return f"over {MEANINGLESS:,} %" if value > MEANINGLESS else f"{value:.2g} %" if value < 99.5 else f"{value:,.0f} %"


def _axes(line: Line) -> list[str]:
    return [name for name in line if name not in (*FIXED, "mode")]


def _fits(line: Line, where: Mapping[str, object]) -> bool:
    """Whether ``line`` agrees with ``where`` on every option that it has."""
    return all(name not in line or line[name] == value for name, value in where.items())


def _distances(lines: Sequence[Line], clean: Sequence[Line], metric: str, repeats: Sequence[str]) -> list[Distance]:
    """How far each of ``lines`` is from its clean run in ``metric``."""
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
    return row != other and all(mine in (None, theirs) for mine, theirs in zip(row, other, strict=True))


def _text(values: Sequence[float | None]) -> str:
    """The mean of ``values`` and, if there are several, half of its interval."""
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if not numbers:
        return "–"
    mean = f"{statistics.fmean(numbers):.4g}"
    return mean if len(numbers) < 2 else f"{mean} ± {half_interval(numbers):.2g}"


def _percents(values: Sequence[float | None]) -> str:
    """As ``_text``; a dash where a percentage says nothing, because it is of next to nothing."""
    return "–" if any(value is not None and value > MEANINGLESS for value in values) else _text(values)


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean of two or more ``values``, by Student's t."""
    from scipy import stats

    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)
    return float(quantile * statistics.stdev(values) / math.sqrt(len(values)))
