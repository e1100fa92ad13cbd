"""What a benchmark is: its splits of records, how they prompt the model, and its table of metrics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from mpu_cli.errors import MpuError
from mpu_cli.evaluation import metrics
from mpu_cli.evaluation.encoding import Asked, Encoder, Item
from mpu_cli.evaluation.metrics import Metric
from mpu_cli.evaluation.recovered import recovered
from mpu_cli.evaluation.retain import RetainLog

Row = tuple[str, Any]  # its place (for messages) and its fields
SIDES = ("forget", "holdout")  # the splits that membership inference compares: members and non-members


@dataclass(frozen=True)
class Split:
    """Records that are evaluated together. ``encode(encoder, part, rows)`` returns an Item, or a list of them, for the
    parts "answer", "paraphrased" and "perturbed" of each row; ``limit`` and ``stops`` bound the generated answers."""

    name: str
    source: str
    read: Callable[[], Sequence[Row]]
    encode: Callable[[Encoder, str, Sequence[Row]], Sequence[Item | list[Item]]]
    limit: int = 200
    stops: tuple[str, ...] = ()
    shown: Callable[[], Sequence[Row]] = tuple  # few-shot records at the start of every prompt

    @cached_property
    def rows(self) -> Sequence[Row]:
        """Read on first use, because not every metric needs every split."""
        return self.read()

    @cached_property
    def sha256(self) -> str:
        """Digest of the contents of the records and of the few-shot records."""
        held = [row for _, row in (*self.rows, *self.shown())]
        return hashlib.sha256(json.dumps(held, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class Benchmark:
    """``tasks``: of EleutherAI's harness, for a benchmark that it measures. ``attacks``: names of those that try to
    bring back what was forgotten, whose metrics are in ``recovered``."""

    name: str
    splits: Mapping[str, Split]
    metrics: Mapping[str, Metric]
    tasks: tuple[str, ...] = ()
    attacks: tuple[str, ...] = ()

    @property
    def recovered(self) -> dict[str, Metric]:
        """The metrics of its attacks."""
        tables = [recovered(name, "retain" in self.splits) for name in self.attacks]
        return {name: metric for table in tables for name, metric in table.items()}


def text_of(row: Row, field: str) -> str:
    """The text in ``field``. Raises MpuError, with the place, if there is none."""
    place, values = row
    if not isinstance(values, dict) or not isinstance(values.get(field), str) or not values[field].strip():
        held = ", ".join(map(str, values)) if isinstance(values, dict) else "none"
        raise MpuError(f"{place}: no text in {field!r} (fields: {held or 'none'})")
    return _sound(place, values[field])


def texts_of(row: Row, field: str) -> list[str]:
    """The texts in ``field``. Raises MpuError, with the place, if there are none."""
    place, values = row
    texts = values.get(field) if isinstance(values, dict) else None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise MpuError(f"{place}: no list of texts in {field!r}")
    return [_sound(place, text) for text in texts]


def _sound(place: str, text: str) -> str:
    """``text``. Raises MpuError if it has a lone surrogate, which JSON allows but no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MpuError(f"{place}: text contains a lone surrogate ({error.reason})") from error
    return text


def questions(encoder: Encoder, part: str, rows: Sequence[Row]) -> Sequence[Item | list[Item]]:
    """TOFU records with their answers, the paraphrased answers, or the wrong answers."""
    if part != "perturbed":
        field = "answer" if part == "answer" else "paraphrased_answer"
        return encoder.questions([Asked(text_of(row, "question"), text_of(row, field), row[0]) for row in rows])
    asked = [
        [Asked(text_of(row, "question"), wrong, row[0]) for wrong in texts_of(row, "perturbed_answer")] for row in rows
    ]
    items = iter(encoder.questions([*chain(*asked)]))
    return [[next(items) for _ in each] for each in asked]


def forget_quality(benchmark: str, forget: Split, retain: RetainLog) -> Metric:
    def ratios() -> list[float]:
        retain.check_made_on(benchmark, {})
        ratios_of_retain = retain.truth_ratios([text_of(row, "question") for row in forget.rows])
        retain.check_made_on(benchmark, {"forget": forget.sha256})
        return ratios_of_retain

    return metrics.forget_quality(ratios)


def forgetting(
    memorised: str, benchmark: str, splits: Mapping[str, Split], retain: RetainLog | None
) -> dict[str, Metric]:
    """How much of the split ``memorised`` is known by heart and, if there is a split of unseen records, whether
    membership of the forget set shows."""

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
        table |= {**metrics.membership(*SIDES), "privleak": metrics.privleak(retain_auc)}
    return table
