"""A benchmark: its splits of records, their prompts for the model, and its table of metrics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from mpu_cli.errors import MpuError
from mpu_cli.measuring import metrics
from mpu_cli.measuring.encoding import Encoder, Item, Scored
from mpu_cli.measuring.metrics import SIDES, Metric, MetricTable, recovery_metrics
from mpu_cli.measuring.retain import RetainLog
from mpu_cli.records.forms import Record, question, sound_text
from mpu_cli.records.read import Row

Items = Sequence[Item | list[Item]]  # of each record: one, or one for each of its wrong answers


def question_and_answer(row: Row) -> Record:
    """The record of a row with the fields question and answer."""
    return question(text_of(row, "question"), text_of(row, "answer"), row[0])


@dataclass(frozen=True)
class Split:
    """Records that are evaluated together; ``limit`` and ``stops`` bound the answers that are generated."""

    name: str
    source: str
    read: Callable[[], Sequence[Row]]
    # From the encoder, a part ("answer", "paraphrased" or "perturbed") and the split: an Item for each row, or a list.
    encode: Callable[[Encoder, str, Split], Items]
    limit: int = 200  # tokens
    stops: tuple[str, ...] = ()
    shown: Callable[[], Sequence[Row]] = tuple  # few-shot records at the start of every prompt
    record: Callable[[Row], Record] = question_and_answer  # of a row that has a question
    limit_follows_answers: bool = False  # the limit rises to the longest true answer's tokens, if those are more
    has_texts: bool = False  # some records are texts, which ask nothing

    @cached_property
    def rows(self) -> Sequence[Row]:
        """Read on first use, because not every metric needs every split."""
        return self.read()

    @cached_property
    def records(self) -> Sequence[Record]:
        """The record of each row."""
        return [self.record(row) for row in self.rows]

    @cached_property
    def sha256(self) -> str:
        """Digest of the contents of the records and of the few-shot records."""
        contents = [row for _, row in (*self.rows, *self.shown())]
        return hashlib.sha256(json.dumps(contents, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its splits, and the metrics that are computed of them."""

    name: str
    splits: Mapping[str, Split]
    metrics: Mapping[str, Metric]
    tasks: tuple[str, ...] = ()  # of EleutherAI's harness, for a benchmark that it measures
    attacks: tuple[str, ...] = ()  # that try to bring back what was forgotten; ``attack_metrics`` has their metrics
    scored: Scored = "as OpenUnlearning does"  # the tokens of a record that are scored
    warnings: tuple[str, ...] = ()  # about what is probably not as intended, a sentence each

    @property
    def has_questions_to_forget(self) -> bool:
        """Whether its forget set is questions, which attacks ask."""
        return "forget_Q_A_Prob" in self.metrics

    @property
    def attack_metrics(self) -> MetricTable:
        """The metrics of its attacks."""
        table: MetricTable = {}
        for name in self.attacks:
            table |= recovery_metrics(
                name, retain="retain" in self.splits, any_script="forget_Q_A_ROUGE_any_script" in self.metrics
            )
        return table


def text_of(row: Row, field: str) -> str:
    """The text in ``field``."""
    location, values = row
    if not isinstance(values, dict) or not isinstance(values.get(field), str) or not values[field].strip():
        fields = ", ".join(map(str, values)) if isinstance(values, dict) else "none"
        raise MpuError(f"{location}: no text in {field!r} (fields: {fields or 'none'})")
    return sound_text(values[field], f"{location}: {field!r}")


def texts_of(row: Row, field: str) -> list[str]:
    """The texts in ``field``."""
    location, values = row
    texts = values.get(field) if isinstance(values, dict) else None
    if isinstance(texts, str):  # a table's cell can hold a list as JSON only
        with suppress(ValueError):
            texts = json.loads(texts)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise MpuError(f"{location}: no list of texts in {field!r}")
    return [sound_text(text, f"{location}: {field!r}") for text in texts]


def questions(encoder: Encoder, part: str, split: Split) -> Items:
    """Items of a split's records with their answers, the paraphrased answers, or the wrong answers."""
    if part == "answer":
        return encoder.questions(split.records)
    if part == "paraphrased":
        paraphrases = [text_of(row, "paraphrased_answer") for row in split.rows]
        return encoder.questions([_with_answer(r, text) for r, text in zip(split.records, paraphrases, strict=True)])
    wrong_answers = [texts_of(row, "perturbed_answer") for row in split.rows]
    answered: list[Record] = []
    for record, texts in zip(split.records, wrong_answers, strict=True):
        answered += [_with_answer(record, wrong) for wrong in texts]
    items = iter(encoder.questions(answered))
    return [[next(items) for _ in texts] for texts in wrong_answers]


def _with_answer(record: Record, answer: str) -> Record:
    return replace(record, answer=answer, answer_fields=())


def truth_ratio(name: str) -> MetricTable:
    """The truth ratio of a set, and the metrics behind it."""
    right, wrong = f"{name}_Q_A_PARA_Prob", f"{name}_Q_A_PERT_Prob"
    return {
        right: metrics.paraphrased_probability(name),
        wrong: metrics.perturbed_probability(name),
        truth_ratio_name(name): metrics.truth_ratio(right, wrong, forget=name == "forget"),
    }


def truth_ratio_name(name: str) -> str:
    """OpenUnlearning's name of the truth ratio of a set."""
    return "forget_truth_ratio" if name == "forget" else f"{name}_Truth_Ratio"


def forget_quality(benchmark: str, forget: Split, retain: RetainLog) -> Metric:
    def ratios() -> list[float]:
        retain.check_made_on(benchmark, {})
        # Before the digest is compared: where the questions differ, this names the first one that does.
        retain_ratios = retain.truth_ratios([record.question for record in forget.records])
        retain.check_made_on(benchmark, {"forget": forget.sha256})
        return retain_ratios

    return metrics.forget_quality(ratios)


def forgetting(memorised: str, benchmark: str, splits: Mapping[str, Split], retain: RetainLog | None) -> MetricTable:
    """The metrics of how much of the split ``memorised`` is known by heart and, if there is a split of unseen records,
    whether membership of the forget set shows."""

    def retain_auc() -> float:
        if retain is None:
            return metrics.CHANCE
        retain.check_made_on(benchmark, {name: splits[name].sha256 for name in SIDES})
        return retain.auc({name: len(splits[name].rows) for name in SIDES})

    table = {
        "extraction_strength": metrics.extraction_strength(memorised),
        "exact_memorization": metrics.exact_memorization(memorised),
    }
    if set(SIDES) <= splits.keys():
        table |= {**metrics.membership(), "privleak": metrics.privleak(retain_auc)}
    return table
