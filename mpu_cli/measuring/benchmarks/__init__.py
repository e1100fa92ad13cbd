"""The benchmarks, a module each, by their names on the command line."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.measuring import metrics
from mpu_cli.measuring.benchmarks.base import Benchmark, Split
from mpu_cli.measuring.metrics import MetricTable
from mpu_cli.measuring.retain import RetainLog
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.evaluation import Measuring
from mpu_cli.options.names import ATTACKS, BENCHMARKS

__all__ = ["Benchmark", "Split", "benchmark_of", "examples", "known_metrics"]

# Each has ``of_options(options, retain_log, observer)`` and, if that reads records, ``example()``, which reads none.
_MODULES = {name: import_module(f"{__name__}.{name}") for name in BENCHMARKS}


@cache
def examples() -> dict[str, Benchmark]:
    """Each benchmark with every metric that it can have; no records are read."""
    table: dict[str, Benchmark] = {}
    for name, module in _MODULES.items():
        of_none = getattr(module, "example", None)
        benchmark = of_none() if of_none else module.of_options(Measuring(), None, SILENT)
        table[name] = replace(benchmark, attacks=ATTACKS if benchmark.has_questions_to_forget else ())
    return table


@cache
def known_metrics() -> MetricTable:
    """Every metric of every benchmark, by name; no records are read."""
    table: MetricTable = {}
    for benchmark in examples().values():
        table |= {**benchmark.metrics, **benchmark.attack_metrics}
    # Only its goal and definition are read here, so the retain model's ratios may be empty: ``tuple()``.
    return table | {"forget_quality": metrics.forget_quality(tuple)}


def benchmark_of(options: Measuring, log: RetainLog | None, observer: Observer = SILENT) -> Benchmark:
    """The benchmark that --benchmark names, with the attacks that --attacks names; the files read are
    reported to ``observer``.

    Raises UsageError for records or attacks that do not go with it.
    """
    named, attacks = options.benchmark, options.recovery.names
    data_dir = named.reading.data_dir
    if data_dir and not data_dir.is_dir():
        raise MpuError(f"--reading data_dir={data_dir}: no such directory")
    if named.names_records and named.chosen != "qa":
        raise UsageError("--forget, --retain and --unseen require --benchmark qa")
    benchmark = _MODULES[named.chosen].of_options(options, log, observer)
    if attacks and not benchmark.has_questions_to_forget:
        raise UsageError(f"--attacks: not for --benchmark {named.chosen}, which has no questions to forget")
    if attacks and any(split.has_texts for split in benchmark.splits.values()):
        raise UsageError(f"--attacks {attacks[0]}: {metrics.ASKS_NOTHING}, and attacks are judged by answers")
    return replace(benchmark, attacks=tuple(name for name in ATTACKS if name in attacks))
