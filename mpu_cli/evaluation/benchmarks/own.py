"""A user's own questions and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.evaluation import metrics
from mpu_cli.evaluation.benchmarks.base import (
    Benchmark,
    Row,
    Split,
    forget_quality,
    forgetting,
    questions,
)
from mpu_cli.evaluation.retain import RetainLog
from mpu_cli.options.evaluation import Measuring
from mpu_cli.options.unlearning import Records
from mpu_cli.records.reading import source_rows
from mpu_cli.records.record import parse_columns, parse_record


def own_records(
    forget: Sequence[Row], retain: Sequence[Row], holdout: Sequence[Row], retain_log: RetainLog | None
) -> Benchmark:
    """A user's own questions and answers, with paraphrased and wrong answers if every record of a set has them."""
    held = {"forget": forget, "retain": retain, "holdout": holdout}
    splits = {name: Split(name, name, partial(list, rows), questions) for name, rows in held.items() if rows}
    if "forget" not in splits:
        raise MpuError("no records to forget", "specify them with --forget")
    table = {}
    for name in ("forget", "retain"):
        if name not in splits:
            continue
        table[f"{name}_Q_A_Prob"] = metrics.probability(name)
        table[f"{name}_Q_A_ROUGE"] = metrics.rouge(name, "rougeL_recall")
        fields = ("paraphrased_answer", "perturbed_answer")
        if all(isinstance(row, dict) and all(field in row for field in fields) for _, row in held[name]):
            right, wrong = f"{name}_Q_A_PARA_Prob", f"{name}_Q_A_PERT_Prob"
            table[right] = metrics.paraphrased_probability(name)
            table[wrong] = metrics.perturbed_probability(name)
            ratio = "forget_truth_ratio" if name == "forget" else "retain_Truth_Ratio"
            table[ratio] = metrics.truth_ratio(right, wrong, forget=name == "forget")
    table |= forgetting("forget", "qa", splits, retain_log)
    if retain_log and "forget_truth_ratio" in table and retain_log.has("forget_truth_ratio"):
        table["forget_quality"] = forget_quality("qa", splits["forget"], retain_log)
    return Benchmark("qa", splits, table)


def _questions(rows: Sequence[Row]) -> list[Row]:
    """Rows of any form that training reads, with the fields question and answer. MpuError for texts and dialogues."""
    found = []
    for place, row in rows:
        if isinstance(row, dict) and {"question", "answer"} <= row.keys():
            found.append((place, row))
            continue
        record = parse_record(row, place)
        asked = [text for role, text in record.turns if role == "user"]
        if len(asked) != 1:
            raise MpuError(f"{place}: not one question and its answer", "evaluate records of that form")
        found.append((place, {**row, "question": asked[0], "answer": record.answer}))
    return found


def read_own(
    path: Path | None,
    forget: str | None,
    retain: str | None,
    holdout: str | None,
    columns: Mapping[str, str] | None = None,
) -> list[list[Row]]:
    """Forget, retain and holdout rows, from one file whose records have a ``set`` field, or from one file each."""
    if path is not None:
        sets: dict[str, list[Row]] = {"forget": [], "retain": [], "holdout": []}
        for place, row in _questions(source_rows(path, None, columns)):
            kind = row.get("set") if isinstance(row, dict) else None
            if not isinstance(kind, str) or kind not in sets:
                raise MpuError(f"{place}: 'set' must be forget, retain or holdout")
            sets[kind].append((place, row))
        return list(sets.values())
    files = [
        _questions([row for source in (names or "").splitlines() for row in source_rows(source, None, columns)])
        for names in (forget, retain, holdout)
    ]
    for name, rows in zip((forget, retain, holdout), files, strict=True):
        if name and not rows:
            raise MpuError(f"{name}: contains no records")
    return files


def of_options(options: Measuring, log: RetainLog | None, file: Path | None = None) -> Benchmark:
    """``file``: one that holds all records."""
    named = options.benchmark
    if file and (named.forget or named.retain or named.holdout):
        raise UsageError("FILE cannot be combined with --forget, --retain or --holdout")
    to_forget = named.forget or (None if file else Records().forget)
    columns = parse_columns(named.columns)
    forget, retain, holdout = read_own(file, to_forget, named.retain, named.holdout, columns)
    return own_records(forget, retain, holdout, log)


def example() -> Benchmark:
    rows = [("", {"paraphrased_answer": "", "perturbed_answer": [""]})]
    return own_records(rows, rows, rows, None)
