"""Reads results for comparison and checks whether they are comparable."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpu_cli.evaluation.attack_metrics import RELEARNED
from mpu_cli.evaluation.benchmarks import known_metrics
from mpu_cli.evaluation.metrics import CHANCE, DOWN, RETAIN, UP, ZERO
from mpu_cli.evaluation.retain import RetainLog, read_retain_log

# metrics that every table shows by default, in this order, if the results have them
MAIN = (
    "forget_quality", "forget_truth_ratio", "model_utility", "privleak", "extraction_strength", "forget_Q_A_Prob",
    "forget_Q_A_ROUGE", RELEARNED, "retain_Q_A_Prob", "retain_Q_A_ROUGE", "forget_verbmem_ROUGE",
    "forget_knowmem_ROUGE", "retain_knowmem_ROUGE",
)  # fmt: skip
HAZARDOUS = "lm_eval/wmdp"  # the harness counts right answers, which should become few
# facts that affect the numbers, as paths in a result
MATTERS = (
    ("benchmark",), ("data",), ("reference_model", "fingerprint"), ("retain_log", "sha256"), ("options", "dtype"),
    ("options", "batch_size"), ("options", "template"), ("options", "system_prompt"), ("options", "date"),
    ("options", "attacks"), ("options", "scored"), ("options", "template_option"),
    ("options", "max_new_tokens"), ("hardware", "device"),
    ("versions", "torch"), ("versions", "transformers"), ("versions", "rouge-score"), ("mpu",),
)  # fmt: skip
OPTIONAL = (
    ("reference_model", "fingerprint"),
    ("options", "date"),
    ("options", "attacks"),
)  # a missing one does not affect the numbers


@dataclass(frozen=True)
class Evaluated:
    """A result: its label in tables, its metrics, and the facts it was produced under ({} for OpenUnlearning's files).

    ``sha256`` is of its file; ``is_retain`` whether another result was measured against it.
    """

    label: str
    log: RetainLog
    facts: Mapping[str, object]
    sha256: str
    is_retain: bool = False

    def value(self, name: str) -> float | None:
        """The metric's value; PrivLeak of the retain model is 0 by definition, whatever its own file says."""
        return 0.0 if self.is_retain and name == "privleak" else self.log.value(name)


def read_results(paths: Sequence[Path]) -> list[Evaluated]:
    """Read results and label them by file name, or by path if file names are not unique."""
    read = [read_retain_log(path) for path in paths]
    for labels in ([path.name for path in paths], [str(path) for path in paths]):
        labels = [label.removesuffix(".json") for label in labels]
        if len(set(labels)) == len(labels):
            break
    else:
        labels = [f"{label} ({i})" for i, label in enumerate(labels, 1)]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    compared_with = {_at(log.document, ("retain_log", "sha256")) for log in read}
    return [
        Evaluated(label, log, log.document, digest, digest in compared_with)
        for label, log, digest in zip(labels, read, digests, strict=True)
    ]


def retain_value(results: Sequence[Evaluated], name: str) -> float | None:
    """The retain model's value of a metric: its own result if that is among ``results``, else what the others say of
    it; None if nothing says it, or they were measured against different ones."""
    for result in results:
        if result.is_retain:
            return result.value(name)
    recorded_values = {_at(result.facts, ("retain_log", "metrics", name)) for result in results}
    value = recorded_values.pop() if len(recorded_values) == 1 else None
    return value if isinstance(value, float) else None


def goal(name: str, form: Mapping[str, object] | None = None) -> str:
    """Which way a metric is better: "up", "down", "zero", or "retain" (an attack: near the retain model's value).

    ``form`` is the metric's form, where harness tasks state their own direction.
    """
    if name.startswith(HAZARDOUS):
        return DOWN
    if form and isinstance(form.get("higher_is_better"), bool):
        return "up" if form["higher_is_better"] else "down"
    metrics = known_metrics()
    return metrics[name].goal if name in metrics else DOWN if name.startswith("forget") else UP


def main_metrics(available: Iterable[str]) -> list[str]:
    """Those of ``available`` that are shown unless others are asked for; all of them if none is a main one."""
    names = list(dict.fromkeys(available))
    return [name for name in MAIN if name in names] or names


def best(values: Sequence[float | None], towards: str, retain: float | None = None) -> set[int]:
    """Indices of the best of ``values``; empty if no two values differ.

    ``retain`` is the retain model's value, which attacks should be near (None: chance).
    """
    target = {ZERO: 0.0, RETAIN: CHANCE if retain is None else retain}

    def merit(value: float) -> float:
        return value if towards == UP else -value if towards == DOWN else -abs(value - target[towards])

    merits = [None if value is None else merit(value) for value in values]
    valid_merits = [m for m in merits if m is not None]
    if len(set(valid_merits)) < 2:
        return set()
    return {i for i, m in enumerate(merits) if m == max(valid_merits)}


def distinct_best(
    values: Sequence[float | None],
    intervals: Sequence[tuple[float, float] | None],
    towards: str,
    retain: float | None = None,
) -> set[int]:
    """As ``best``, but empty unless every value has an interval and that of the best overlaps no other one's."""
    winners = best(values, towards, retain)
    competing = {i for i, value in enumerate(values) if value is not None}
    if len(winners) != 1 or any(intervals[i] is None for i in competing):
        return set()
    low, high = intervals[min(winners)] or (0.0, 0.0)
    rivals = [interval for i in competing - winners if (interval := intervals[i])]
    return winners if all(high < start or end < low for start, end in rivals) else set()


def differences(results: Sequence[Evaluated]) -> list[str]:
    """How the results differ in facts that affect the numbers, one phrase each."""
    sentences = [f"{r.label}: no record of how it was produced" for r in results if not r.facts.get("options")]
    for path in MATTERS:
        # The retain model itself is measured without a log.
        documented = [r for r in results if r.facts.get("options") and not (r.is_retain and path[0] == "retain_log")]
        values = [_at(r.facts, path) for r in documented]
        if path == ("data",):
            digests = [_data(value) for value in values]
            splits = sorted({split for each in digests for split in each})
            odd = [name for name in splits if len({each[name] for each in digests if name in each}) > 1]
            sentences += [f"different records in {split}" for split in odd]
        elif len({repr(value) for value in values} - ({repr(None)} if path in OPTIONAL else set())) > 1:
            named = "; ".join(f"{r.label}: {_short(value)}" for r, value in zip(documented, values, strict=True))
            what = "retain logs" if path[0] == "retain_log" else " ".join(path).replace("_", " ")
            sentences.append(f"different {what} ({named})")
    return sentences


def one_retain_log(results: Sequence[Evaluated]) -> bool:
    """Whether all, except the retain model itself, were measured against the same one, or all without one."""
    candidates = [result for result in results if not result.is_retain]
    return len({repr(_at(result.facts, ("retain_log", "sha256"))) for result in candidates}) < 2


def _at(facts: Mapping[str, object], path: Sequence[str]) -> object:
    value: object = facts
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 64 else f"{text[:12]}…"  # a digest


def _data(value: object) -> dict[str, object]:
    splits = value if isinstance(value, Mapping) else {}
    return {str(name): _at(split, ("sha256",)) for name, split in splits.items() if isinstance(split, Mapping)}
