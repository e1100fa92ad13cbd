"""The log of a retain model: an earlier result of ``mpu eval``, or OpenUnlearning's own TOFU_EVAL.json or
MUSE_EVAL.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import read_json_object

FORMAT = {"format": "mpu-eval", "version": 1}  # of results
LARGEST_RESULT = 1 << 30  # bytes: per-example values of large splits


@dataclass(frozen=True)
class RetainLog:
    """Metrics of a model (for a retain log, one that never saw the forget set) in OpenUnlearning's format; ``document``
    is the whole result, with what it was produced under, if mpu wrote it, else {}."""

    path: Path
    metrics: Mapping[str, Mapping]
    document: Mapping[str, object]

    def value(self, name: str) -> float | None:
        """The metric's aggregate value, or None if it has none."""
        form = self.metrics.get(name, {})
        return _number(form.get("agg_value", form.get("auc")))

    def check_made_on(self, benchmark: str, digests: Mapping[str, str]) -> None:
        """Raises MpuError if mpu wrote the log for a different benchmark or for splits with different ``digests``."""
        if not self.document:
            return
        if self.document.get("benchmark") != benchmark:
            raise MpuError(f"{self.path}: result on {self.document.get('benchmark')}, not on {benchmark}")
        data = self.document.get("data")
        for name, digest in digests.items():
            split = data.get(name) if isinstance(data, Mapping) else None
            if isinstance(split, Mapping) and split.get("sha256") != digest:
                raise MpuError(f"{self.path}: made with different {name} records", "make it with the same ones")

    def auc(self, sizes: Mapping[str, int]) -> float:
        """AUC of min-k, for PrivLeak, between splits of these ``sizes``."""
        value = self.value("mia_min_k")
        if value is None:
            raise MpuError(f"{self.path}: has no mia_min_k, which privleak needs", "make it with that metric")
        for name, size in sizes.items():
            side = self.metrics["mia_min_k"].get(name)
            rows = side.get("value_by_index") if isinstance(side, Mapping) else None
            if isinstance(rows, Mapping) and len(rows) != size:
                raise MpuError(f"{self.path}: made with different {name} records ({len(rows)}, expected {size})")
        return value

    def truth_ratios(self, questions: Sequence[str]) -> list[float]:
        """The truth ratio of each of ``questions``."""
        rows = self.metrics["forget_truth_ratio"].get("value_by_index", {})
        ratios = [_number(rows.get(str(i), {}).get("score")) for i in range(len(rows))]
        valid_ratios = [ratio for ratio in ratios if ratio is not None]
        if not valid_ratios or len(valid_ratios) < len(ratios):
            raise MpuError(f"{self.path}: forget_truth_ratio does not have a score for every question")
        if len(ratios) != len(questions):
            raise MpuError(
                f"{self.path}: made with a different forget split ({len(ratios)} questions, expected {len(questions)})"
            )
        answers = self.metrics.get("forget_Q_A_ROUGE", {}).get("value_by_index", {})
        for i, question in enumerate(questions):
            prompt = answers.get(str(i), {}).get("input")
            # A chat template may strip whitespace.
            if isinstance(prompt, str) and question.strip() not in prompt:
                raise MpuError(f"{self.path}: made with different questions (number {i} is not {question.strip()!r})")
        return valid_ratios


def sources_in(document: Mapping[str, object]) -> dict[str, str]:
    """The sources of the model that a result measured and, if it had them, of its ``adapter`` and ``delta``."""
    sources = {}
    for name in ("model", "adapter", "delta"):
        entry = document.get(name)
        if isinstance(entry, Mapping) and isinstance(source := entry.get("source"), str):
            sources[name] = source
    return sources


def _number(value: object) -> float | None:
    """``value`` if it is a finite number, or None for anything else in JSON."""
    with suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def read_retain_log(path: Path) -> RetainLog:
    """Read a log."""
    if path.is_dir():
        raise MpuError(f"{path}: a folder, not a result of mpu eval", "name the JSON file that `mpu eval` wrote")
    document = read_json_object(path, LARGEST_RESULT)
    table = document.get("metrics", document)
    if not isinstance(table, dict) or not all(isinstance(form, dict) for form in table.values()) or not table:
        raise MpuError(f"{path}: contains no metrics", "use a result of mpu eval or of OpenUnlearning")
    for name, form in table.items():
        rows = form.get("value_by_index", {})
        if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
            raise MpuError(f"{path}: value_by_index of {name} is not a table of records")
    return RetainLog(path, table, document if table is not document else {})
