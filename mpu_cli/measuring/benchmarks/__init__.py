"""The benchmarks, by their names on the command line."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.measuring import metrics
from mpu_cli.measuring.benchmarks import muse, own, tofu, wmdp
from mpu_cli.measuring.benchmarks.base import Benchmark, Row, Split
from mpu_cli.measuring.metrics import Metric
from mpu_cli.measuring.retain import RetainLog
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.evaluation import Measuring
from mpu_cli.options.names import ATTACKS

__all__ = ["BENCHMARKS", "Benchmark", "Row", "Split", "benchmark_of", "known_metrics"]

# Each has ``of_options(options, retain_log)``, and ``example()``: with every metric that it can have, of no records.
BENCHMARKS: dict[str, Any] = {"tofu": tofu, "muse": muse, "qa": own, "wmdp": wmdp}
ATTACKED = ("tofu", "qa")  # the benchmarks that --attacks works on


@cache
def known_metrics() -> dict[str, Metric]:
    """Every metric of every benchmark, by name; no records are read."""
    table: dict[str, Metric] = {}
    for module in BENCHMARKS.values():
        benchmark = replace(module.example(), attacks=ATTACKS)
        table |= {**benchmark.metrics, **benchmark.attack_metrics}
    # Only its goal and definition are read here, so the retain model's ratios may be empty: ``tuple()``.
    return table | {"forget_quality": metrics.forget_quality(tuple)}


def benchmark_of(options: Measuring, log: RetainLog | None, observer: Observer = SILENT) -> Benchmark:
    """The benchmark that --benchmark names, with the attacks that --attacks names; reports to ``observer`` what is read
    from each file.

    Raises UsageError for records or attacks that do not go with it.
    """
    named, attacks = options.benchmark, options.recovery.attacks
    chosen = named.chosen
    if unknown := [name for name in attacks if name not in ATTACKS]:
        raise UsageError(f"--attacks {unknown[0]}: must be one of {', '.join(ATTACKS)}")
    if attacks and chosen not in ATTACKED:
        raise UsageError(f"--attacks: not for --benchmark {chosen}, only for {' and '.join(ATTACKED)}")
    data_dir = named.reading.data_dir
    if data_dir and not data_dir.is_dir():
        raise MpuError(f"--reading data_dir {data_dir}: no such directory")
    if chosen == "qa":
        benchmark = own.of_options(options, log, observer)
    elif named.names_records:
        raise UsageError("--forget, --retain and --unseen require --benchmark qa")
    else:
        benchmark = BENCHMARKS[chosen].of_options(options, log)
    if attacks and any(split.has_texts for split in benchmark.splits.values()):
        raise UsageError(f"--attacks {attacks[0]}: {own.ASKS_NOTHING}, and attacks are judged by answers")
    return replace(benchmark, attacks=tuple(name for name in ATTACKS if name in attacks))
