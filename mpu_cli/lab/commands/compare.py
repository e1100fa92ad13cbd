"""``mpu compare``: results of ``mpu eval`` side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.errors import UsageError
from mpu_cli.lab.tables import MISSING, SUFFIXES, markdown_table, write_tables
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import FORCE, Command, Report, paths_from
from mpu_cli.options.declare import option
from mpu_cli.wording import printable

if TYPE_CHECKING:
    from mpu_cli.measuring.results import Evaluated

BEST_MARK = "**"


@dataclass(frozen=True)
class Comparison:
    """Values by metric and result, the ``labels`` of the results, and a ``table`` with the best ones marked."""

    labels: Sequence[str]
    values: Mapping[str, Sequence[float | None]]
    table: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Compare(Command):
    """Print results as a Markdown table, one row each. The best of a column is bold if its 95 % interval overlaps no
    other.

    Attacks (mia_…) are best near the retain model's value (0.5 if none is known), privleak near 0. A result that others
    used as --retain-log is the model to be like, so it gets no bold. Warns on standard error if results were produced
    differently.
    """

    NAME = "compare"
    EXAMPLE = "mpu compare before.json eval.json --plot side_by_side.svg"

    results: list[str] = option(
        ...,
        "Results of mpu eval, or OpenUnlearning's …_EVAL.json, or - to read paths from standard input.",
        metavar="FILES",
        argument=True,
    )
    metrics: str | None = option(
        None, "Comma-separated metrics, or all (default: the main ones and your own).", metavar="NAMES"
    )
    plot: Path | None = option(None, "Plot the metrics (.png, .svg, .pdf or .html).", metavar="FILE")
    out: Path | None = option(
        None, "Also write the table (.tex for booktabs, .md, or .csv with all digits).", metavar="FILE"
    )
    force: bool = option(False, FORCE, in_files=False)

    def run(self, observer: Observer = SILENT) -> Comparison:
        from mpu_cli.measuring.results import chosen_metrics, differences, main_metrics, read_results
        from mpu_cli.measuring.retain import sources_in

        if self.out and self.out.suffix not in SUFFIXES:
            raise UsageError(f"--out {self.out}: must end in {', '.join(SUFFIXES)}")
        if self.plot:
            from mpu_cli.lab.plots import check_target

            check_target(self.plot, self.force)
        read = read_results(paths_from(self.results))
        available = [name for result in read for name in result.log.metrics]
        if self.metrics == "all":
            names = list(dict.fromkeys(available))
        elif self.metrics is not None:
            names = chosen_metrics(self.metrics, available)
        else:
            # Metrics of other packages have their goal in the result; whoever asked for one wants to see it.
            imported = [name for result in read for name, form in result.log.metrics.items() if "goal" in form]
            names = list(dict.fromkeys([*main_metrics(available), *imported]))
        for sentence in differences(read):
            observer.warn(f"not directly comparable: {sentence}")
        deltas = [sources_in(result.log.document).get("delta", "none") for result in read]
        if len(set(deltas)) > 1:
            pairs = zip(read, deltas, strict=True)
            observer.note(f"different deltas ({'; '.join(f'{result.label}: {delta}' for result, delta in pairs)})")
        values = {name: [result.value(name) for result in read] for name in names}
        comparison = Comparison([result.label for result in read], values, _table(read, values))
        if self.out:
            table = _table(read, values, "") if self.out.suffix == ".csv" else comparison.table
            write_tables({"results": table}, self.out, force=self.force)
        if self.plot:
            from mpu_cli.lab.plots import draw_comparison

            draw_comparison(comparison.labels, values, self.plot, force=self.force)
        return comparison

    def report(self, comparison: Comparison, observer: Observer) -> Report:  # noqa: ARG002 (as all commands have it)
        document = {
            label: {name: values[i] for name, values in comparison.values.items()}
            for i, label in enumerate(comparison.labels)
        }
        return Report(markdown_table(comparison.table), document)


def _table(
    read: Sequence[Evaluated], values: Mapping[str, Sequence[float | None]], digits: str = ".4g"
) -> list[list[str]]:
    """Rows of text with a head, numbers with these ``digits`` ("": all), the best of each column marked."""
    from mpu_cli.measuring.results import distinct_best, goal, one_retain_log, retain_value

    marked = {}
    for name, column in values.items():
        form = next(result.log.metrics[name] for result in read if name in result.log.metrics)
        competing = [None if result.is_retain else value for result, value in zip(read, column, strict=True)]
        intervals = [_interval(result, name) for result in read]
        marked[name] = distinct_best(competing, intervals, goal(name, form), retain_value(read, name))
    if not one_retain_log(read):
        marked["privleak"] = set()  # measured against different retain models
    rows = [["", *values]]
    for i, result in enumerate(read):
        row = [printable(result.label)]
        for name, column in values.items():
            value, mark = column[i], BEST_MARK if i in marked[name] else ""
            row.append(mark + (MISSING if value is None else f"{value:{digits}}") + mark)
        rows.append(row)
    return rows


def _interval(result: Evaluated, name: str) -> tuple[float, float] | None:
    """The 95 % interval of a metric, if the result has one or the values that it is the mean of."""
    from mpu_cli.measuring.results import half_interval

    if name not in result.log.metrics:
        return None
    form = result.log.metrics[name]
    if interval := form.get("interval"):
        return tuple(interval)
    entries = [entry for entry in (form.get("value_by_index") or {}).values() if isinstance(entry, dict)]
    # A record may have several numbers: the metric's are those whose mean is its value.
    for name_of_value in entries[0] if len(entries) > 1 else ():
        values = [entry.get(name_of_value) for entry in entries]
        numbers = [value for value in values if isinstance(value, float)]
        mean = math.fsum(numbers) / len(entries)
        if len(numbers) == len(entries) and math.isclose(mean, form["agg_value"], rel_tol=1e-6, abs_tol=1e-9):
            half = half_interval(numbers)
            return mean - half, mean + half
    return None
