"""WMDP and MMLU, what should be forgotten and what should not (Li et al. 2024, arXiv 2403.03218), by EleutherAI's
harness."""

from __future__ import annotations

from mpu_cli.measuring.benchmarks.base import Benchmark
from mpu_cli.measuring.retain import RetainLog
from mpu_cli.observer import Observer
from mpu_cli.options.evaluation import Measuring

TASKS = ("wmdp", "mmlu")


def of_options(_options: Measuring, _log: RetainLog | None, _observer: Observer) -> Benchmark:
    return Benchmark("wmdp", {}, {}, tasks=TASKS)
