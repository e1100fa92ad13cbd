"""What others measured, read from a sweep file, to stand beside what is measured here.

[[published]]                        # one result: options, source, metrics
source = "OpenUnlearning"
algo = "npo"
metrics = { model_utility = 0.56 }

[[published]]                        # a table of many: a CSV file with a column for each option, "metric" and "value"
source = "paper"
file = "tables.csv"
table = "pum_main_comparison"        # the rows whose column "table" says so
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.experiment.recipes import read_recipe
from mpu_cli.experiment.tables import PUBLISHED

INTEGER_OPTIONS, DECIMAL_OPTIONS = ("copies", "rounds", "epochs"), ("kappa",)
NOT_OPTIONS = ("table", "model", "benchmark", "forget", "mode", "metric", "value")
HANDED_OUT = (
    1.5  # times κ is the noise of one copy as it is, of two with the paper's α; the paper lists that of the copy
)


def published_results(path: Path, bases: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Lines of results whose mode names the source; ``bases`` are those of the sweep, which a table's models may be.

    Raises UsageError for an entry of neither form, MpuError if its file cannot be read.
    """
    lines: list[dict[str, Any]] = []
    for entry in read_recipe(path).get("published", []):
        if isinstance(entry, dict) and {"source", "file", "table"} <= entry.keys():
            lines += _from_table(path.parent / str(entry["file"]), str(entry["table"]), str(entry["source"]), bases)
        elif isinstance(entry, dict) and isinstance(entry.get("metrics"), dict) and "source" in entry:
            options = {name: value for name, value in entry.items() if name != "source"}
            lines.append({"mode": f"{PUBLISHED}: {entry['source']}", **options})
        else:
            raise UsageError(
                f"{path}: [[published]]: needs a source, and metrics = {{ NAME = VALUE, … }} or a file and a table"
            )
    return [{"name": f"published-{number}", **line} for number, line in enumerate(lines)]


def _from_table(file: Path, table: str, source: str, bases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A line for each result in ``table``, which is several rows: one for each metric."""
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            rows = [row for row in csv.DictReader(opened) if row.get("table") == table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MpuError(f"{file}: cannot be read as a table ({error})") from error
    if not rows:
        raise UsageError(f"{file}: has no table {table}")
    results: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for row in rows:
        key = tuple((name, value) for name, value in row.items() if name not in ("metric", "value"))
        try:
            results.setdefault(key, {})[row["metric"]] = float(row["value"])
        except (KeyError, TypeError, ValueError) as error:
            raise MpuError(f"{file}: {table}: a row has no metric or no number for it") from error
    for key, metrics in results.items():
        yield _line(dict(key), metrics, source, bases)


def _line(row: Mapping[str, str], metrics: dict[str, float], source: str, bases: Sequence[str]) -> dict[str, Any]:
    model, mode = row.get("model", ""), row.get("mode", "mpu")
    matching_bases = [base for base in bases if model and model in base]
    label = source if matching_bases or not model else f"{source}, {model}"
    options: dict[str, Any] = {name: value for name, value in row.items() if name not in NOT_OPTIONS}
    options |= {name: int(value) for name, value in options.items() if name in INTEGER_OPTIONS}
    options |= {name: float(value) for name, value in options.items() if name in DECIMAL_OPTIONS}
    if mode == "noised":
        options["kappa"] = round(options["kappa"] / HANDED_OUT, 9)
    if mode in ("clean", "noised"):  # of one model or copy, whatever the number of copies
        options.pop("copies", None)
    if mode == "clean":  # uninterrupted, without noise
        options = {name: value for name, value in options.items() if name not in ("kappa", "rounds", "epochs")}
    if row.get("benchmark") == "tofu":
        options["forget"] = f"tofu:{row['forget']}"
    return (
        {"mode": f"{PUBLISHED}: {label} {mode}", "metrics": metrics}
        | options
        | ({"base": matching_bases[0]} if matching_bases else {})
    )
