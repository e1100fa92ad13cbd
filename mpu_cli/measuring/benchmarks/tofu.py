"""TOFU: questions about invented authors (Maini et al. 2024, arXiv 2401.06121)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mpu_cli.errors import UsageError
from mpu_cli.measuring import metrics
from mpu_cli.measuring.benchmarks.base import (
    Benchmark,
    Split,
    forget_quality,
    forgetting,
    questions,
    truth_ratio,
)
from mpu_cli.measuring.metrics import MetricTable
from mpu_cli.measuring.retain import RetainLog
from mpu_cli.observer import Observer
from mpu_cli.options.evaluation import Measuring
from mpu_cli.records.read import CORPORA, benchmark_rows

UTILITY = (
    "retain_Q_A_Prob", "retain_Q_A_ROUGE", "retain_Truth_Ratio",
    "ra_Q_A_Prob_normalised", "ra_Q_A_ROUGE", "ra_Truth_Ratio",
    "wf_Q_A_Prob_normalised", "wf_Q_A_ROUGE", "wf_Truth_Ratio",
)  # fmt: skip


def tofu(forget_split: str, data_dir: Path | None, retain: RetainLog | None) -> Benchmark:
    """TOFU (Maini et al., 2024), as OpenUnlearning measures it, on ``forget_split``, such as forget10."""
    if not forget_split.startswith("forget"):
        raise UsageError(f"--benchmark tofu:{forget_split}: must be one of tofu:forget01, tofu:forget05, tofu:forget10")
    names = {
        "forget": f"{forget_split}_perturbed",
        "retain": "retain_perturbed",
        "ra": "real_authors_perturbed",
        "wf": "world_facts_perturbed",
        "holdout": forget_split.replace("forget", "holdout"),
    }
    splits = {
        name: Split(name, source, partial(benchmark_rows, CORPORA["tofu"], source, data_dir), questions)
        for name, source in names.items()
    }
    table: MetricTable = {}
    for name in ("forget", "retain"):
        table |= {
            f"{name}_Q_A_Prob": metrics.probability(name),
            f"{name}_Q_A_ROUGE": metrics.rouge(name, "rougeL_recall"),
            **truth_ratio(name),
        }
    for general in ("ra", "wf"):
        right, wrong = f"{general}_Q_A_Prob", f"{general}_Q_A_PERT_Prob"
        table |= {
            right: metrics.probability(general),
            wrong: metrics.perturbed_probability(general),
            f"{general}_Q_A_Prob_normalised": metrics.normalised_probability(right, wrong),
            f"{general}_Q_A_ROUGE": metrics.rouge(general, "rougeL_recall"),
            f"{general}_Truth_Ratio": metrics.truth_ratio(right, wrong, forget=False),
        }
    table["model_utility"] = metrics.harmonic_mean(UTILITY)
    table |= forgetting("forget", "tofu", splits, retain)
    if retain and "forget_truth_ratio" in retain.metrics:
        table["forget_quality"] = forget_quality("tofu", splits["forget"], retain)
    return Benchmark("tofu", splits, table)


def of_options(options: Measuring, log: RetainLog | None, _: Observer) -> Benchmark:
    named = options.benchmark
    return tofu(named.part or "forget10", named.reading.data_dir, log)
