"""WMDP and MMLU, what should be forgotten and what should not (Li et al. 2024, arXiv 2403.03218), by EleutherAI's
harness."""

from __future__ import annotations

from mpu_cli.measuring.benchmarks.base import Benchmark
from mpu_cli.measuring.retain import RetainLog
from mpu_cli.options.evaluation import Measuring

TASKS = ("wmdp", "mmlu")


def example() -> Benchmark:
    return Benchmark("wmdp", {}, {}, tasks=TASKS)


def of_options(options: Measuring, log: RetainLog | None) -> Benchmark:  # noqa: ARG001 (as the others have it)
    return example()
