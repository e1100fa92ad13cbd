"""The log of a retain model: an earlier result of ``mpu eval``, or the suite's own TOFU_EVAL.json or MUSE_EVAL.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpu_cli.checkpoint.reader import read_json_object
from mpu_cli.errors import MpuError


@dataclass(frozen=True)
class RetainLog:
    """Metrics of a model (as a retain log: one that never saw the forget set) in the suite's form; ``document`` is the
    whole result if mpu wrote it."""

    path: Path
    metrics: Mapping[str, Mapping]
    document: Mapping[str, object]

    def has(self, name: str) -> bool:
        return name in self.metrics

    def value(self, name: str) -> float | None:
        """Its aggregate, or None where it has none."""
        form = self.metrics.get(name, {})
        value = form.get("agg_value", form.get("auc"))
        return float(value) if isinstance(value, int | float) else None

    @property
    def auc(self) -> float:
        """AUC of min-k, for PrivLeak."""
        value = self.value("mia_min_k")
        if value is None:
            raise MpuError(f"{self.path}: has no mia_min_k, which privleak compares with; make it with that metric")
        return value

    def truth_ratios(self, questions: Sequence[str]) -> list[float]:
        """The truth ratio of each of ``questions``; MpuError if the log is of others."""
        rows = self.metrics["forget_truth_ratio"].get("value_by_index")
        try:
            ratios = [float(rows[str(i)]["score"]) for i in range(len(rows))]
        except (KeyError, TypeError, ValueError) as error:
            raise MpuError(f"{self.path}: its forget_truth_ratio has no score for each question") from error
        if len(ratios) != len(questions):
            raise MpuError(
                f"{self.path}: is of another forget split ({len(ratios)} questions, and there are {len(questions)})"
            )
        said = self.metrics.get("forget_Q_A_ROUGE", {}).get("value_by_index", {})
        for i, question in enumerate(questions):
            asked = said.get(str(i), {}).get("input")
            # A chat template may trim what it is given.
            if isinstance(asked, str) and question.strip() not in asked:
                raise MpuError(f"{self.path}: is of other questions (its number {i} is not {question.strip()!r})")
        return ratios


def read_retain_log(path: Path) -> RetainLog:
    """Open a log; MpuError for a file that is none."""
    document = read_json_object(path)
    table = document.get("metrics", document)
    if not isinstance(table, dict) or not all(isinstance(form, dict) for form in table.values()) or not table:
        raise MpuError(f"{path}: holds no metrics; a retain log is a result of mpu eval or of OpenUnlearning")
    return RetainLog(path, table, document if table is not document else {})
