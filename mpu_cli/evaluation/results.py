"""Results side by side: reading them, and whether they may be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpu_cli.evaluation.retain import RetainLog, read_retain_log

# what a table shows where nothing is asked for, in this order, of what the results have
MAIN = (
    "forget_quality", "forget_truth_ratio", "model_utility", "privleak", "extraction_strength", "forget_Q_A_ROUGE",
    "retain_Q_A_ROUGE", "forget_verbmem_ROUGE", "forget_knowmem_ROUGE", "retain_knowmem_ROUGE",
)  # fmt: skip
HIGHER = ("quality", "utility", "truth_ratio", "Truth_Ratio", "normalised")
# what changes numbers, as paths in a result
MATTERS = (
    ("benchmark",), ("data",), ("reference_model", "fingerprint"), ("retain_log", "sha256"), ("options", "dtype"),
    ("options", "batch_size"), ("options", "template"), ("options", "system_prompt"), ("options", "date"),
    ("hardware", "device"),
    ("versions", "torch"), ("versions", "transformers"), ("versions", "rouge-score"), ("mpu",),
)  # fmt: skip
OPTIONAL = (("reference_model", "fingerprint"), ("options", "date"))  # to have none changes no number


@dataclass(frozen=True)
class Evaluated:
    """A result: its name in tables, its metrics, and the facts that it was made under ({} for the suite's files)."""

    label: str
    log: RetainLog
    facts: Mapping[str, object]


def read_results(paths: Sequence[Path]) -> list[Evaluated]:
    """Read results, named by their files, or by as much of their paths as tells them apart."""
    read = [read_retain_log(path) for path in paths]
    for labels in ([path.name for path in paths], [str(path) for path in paths]):
        labels = [label.removesuffix(".json") for label in labels]
        if len(set(labels)) == len(labels):
            break
    else:
        labels = [f"{label} ({i})" for i, label in enumerate(labels, 1)]
    return [Evaluated(label, log, log.document) for label, log in zip(labels, read, strict=True)]


def goal(name: str, form: Mapping[str, object] | None = None) -> str:
    """Where a metric should go: "up", "down", "zero", or "retain" (an attack: near to 0.5).

    ``form`` is the metric's, in which a task of the harness says so itself.
    """
    if form and isinstance(form.get("higher_is_better"), bool):
        return "up" if form["higher_is_better"] else "down"
    if name == "privleak":
        return "zero"
    if name.startswith("mia_"):
        return "retain"
    if any(word in name for word in HIGHER) or name.startswith("lm_eval/"):
        return "up"
    forgets = name.startswith("forget") or name in ("extraction_strength", "exact_memorization") or "PERT" in name
    return "down" if forgets else "up"


def best(values: Sequence[float | None], towards: str) -> set[int]:
    """The places of the best of ``values``; none where there is nothing to choose between."""

    def merit(value: float) -> float:
        return {"up": value, "down": -value, "zero": -abs(value), "retain": -abs(value - 0.5)}[towards]

    merits = [None if value is None else merit(value) for value in values]
    known = [m for m in merits if m is not None]
    if len(set(known)) < 2:
        return set()
    return {i for i, m in enumerate(merits) if m == max(known)}


def differences(results: Sequence[Evaluated]) -> list[str]:
    """In what that matters the results were not made alike, a sentence each."""
    said = [f"{r.label}: does not say how it was made" for r in results if not r.facts.get("options")]
    told = [r for r in results if r.facts.get("options")]
    for path in MATTERS:
        values = [_at(r.facts, path) for r in told]
        if path == ("data",):
            values = [_data(value) for value in values]
            splits = sorted({split for value in values for split in value})
            odd = [name for name in splits if len({value[name] for value in values if name in value}) > 1]
            said += [f"other records in {split}" for split in odd]
        elif len({repr(value) for value in values} - ({repr(None)} if path in OPTIONAL else set())) > 1:
            named = "; ".join(f"{r.label}: {_short(value)}" for r, value in zip(told, values, strict=True))
            said.append(f"other {' '.join(path).replace('_', ' ')} ({named})")
    return said


def one_retain_log(results: Sequence[Evaluated]) -> bool:
    """Whether all were measured against the same retain model, or all against none."""
    return len({repr(_at(result.facts, ("retain_log", "sha256"))) for result in results}) < 2


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
