"""A user's own questions and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpu_cli.errors import MpuError
from mpu_cli.measuring import metrics
from mpu_cli.measuring.benchmarks.base import (
    Benchmark,
    Split,
    forget_quality,
    forgetting,
    questions,
    truth_ratio,
    truth_ratio_name,
)
from mpu_cli.measuring.metrics import MetricTable
from mpu_cli.measuring.retain import RetainLog
from mpu_cli.measuring.words import is_cut_by_rouge
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.evaluation import Measuring
from mpu_cli.options.unlearning import RecordFormat, Records
from mpu_cli.records.forms import Record, Turn, records_of_turns, remarks_on_overlap
from mpu_cli.records.read import Row, parsed_rows, report_rows

SETS = ("forget", "retain", "holdout")  # as OpenUnlearning calls them
TRUTH_RATIO_FIELDS = ("paraphrased_answer", "perturbed_answer")

Question = tuple[Row, Record]  # a row and a record in it; a dialogue has several with --reading turns=all


def own_records(
    forget: Sequence[Question], retain: Sequence[Question], holdout: Sequence[Question], retain_log: RetainLog | None
) -> Benchmark:
    """A user's own questions and answers or texts, scored as they are trained, with paraphrased and wrong answers if
    the records of a set have them."""
    sets = {name: rows for name, rows in zip(SETS, (forget, retain, holdout), strict=True) if rows}
    if "forget" not in sets:
        raise MpuError("no records to forget", "specify them with --forget")
    if repeated := {record.key for _, record in forget} & {record.key for _, record in holdout}:
        raise MpuError(
            f"{len(repeated)} of the {len(holdout)} unseen records are also records to forget, so attacks would "
            "compare them with themselves",
            "name records that no model saw with --unseen",
        )
    splits = {name: _split(name, rows) for name, rows in sets.items()}
    table: MetricTable = {}
    warnings = remarks_on_overlap(
        [record for _, record in forget], [record for _, record in retain], "and their scores count in both"
    )
    for name in ("forget", "retain"):
        if name not in sets:
            continue
        table[f"{name}_Q_A_Prob"] = metrics.probability(name)
        table[f"{name}_Q_A_Prob_content"] = metrics.content_probability(name)
        if splits[name].has_texts:
            table[f"{name}_Q_A_ROUGE"] = metrics.unavailable(metrics.ASKS_NOTHING)
            continue
        table[f"{name}_Q_A_ROUGE"] = metrics.rouge(name, "rougeL_recall")
        if cut := [record for _, record in sets[name] if is_cut_by_rouge(record.answer)]:
            table[f"{name}_Q_A_ROUGE_any_script"] = metrics.rouge_of_any_script(name)
            warnings.append(
                f"{len(cut)} of {len(sets[name])} {name} answers have letters or signs that {name}_Q_A_ROUGE drops, "
                f"such as that of {cut[0].location}: read {name}_Q_A_ROUGE_any_script"
            )
        table |= _truth_ratio(name, [row for row, _ in sets[name]])
    table |= forgetting("forget", "qa", splits, retain_log)
    if retain_log and "forget_truth_ratio" in table and "forget_truth_ratio" in retain_log.metrics:
        table["forget_quality"] = metrics.unavailable("forget_truth_ratio has no value")
        if table["forget_truth_ratio"].dependencies:  # it is computed
            table["forget_quality"] = forget_quality("qa", splits["forget"], retain_log)
    return Benchmark("qa", splits, table, scored="as trained", warnings=tuple(warnings))


def _split(name: str, rows: Sequence[Question]) -> Split:
    # By identity: a row holds a dict, which has no hash.
    records = {id(row): record for row, record in rows}
    return Split(
        name, name, lambda: [row for row, _ in rows], questions, record=lambda row: records[id(row)],
        limit_follows_answers=True, has_texts=not all(record.turns for _, record in rows),
    )  # fmt: skip


def _truth_ratio(name: str, rows: Sequence[Row]) -> MetricTable:
    """The truth ratio of a set and the metrics behind it; without a value if some records lack the fields of others."""
    complete = [
        isinstance(fields, dict) and all(fields.get(field) for field in TRUTH_RATIO_FIELDS) for _, fields in rows
    ]
    if not any(complete):
        return {}
    if not all(complete):
        location = rows[complete.index(False)][0]
        reason = (
            f"{location} has no {' or no '.join(TRUTH_RATIO_FIELDS)}, as {complete.count(False)} of {len(rows)} records"
        )
        return {truth_ratio_name(name): metrics.unavailable(reason)}
    return truth_ratio(name)


def read_own(
    sources: Mapping[str, str | None], reading: RecordFormat, observer: Observer = SILENT
) -> list[list[Question]]:
    """Forget, retain and holdout records, of any form that training reads, from ``sources`` by the name of the set."""
    sets = []
    for name in SETS:
        questions: list[Question] = []
        for source in (sources[name] or "").splitlines():  # --forget, repeated, is a source a line
            parsed = parsed_rows(source, reading, observer)
            report_rows(source, [row for row, _ in parsed], set(), observer)
            for (_, fields), record in parsed:
                questions += [((part.location, fields), part) for part in records_of_turns(record, reading.turns)]
        sets.append(questions)
    return sets


def of_options(options: Measuring, log: RetainLog | None, observer: Observer) -> Benchmark:
    named = options.benchmark
    sources = {"forget": named.forget or Records().forget, "retain": named.retain, "holdout": named.unseen}
    forget, retain, holdout = read_own(sources, named.reading, observer)
    return own_records(forget, retain, holdout, log)


def example() -> Benchmark:
    row: Row = ("", {"paraphrased_answer": "", "perturbed_answer": [""]})
    # Answers with a sign that ROUGE drops, for the metric that reads it.
    forget, retain, holdout = ([(row, Record((Turn("user", ""),), f"{name} ✔", ""))] for name in SETS)
    return own_records(forget, retain, holdout, None)
