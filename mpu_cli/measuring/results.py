"""Reads results for comparison and checks whether they are comparable."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import platform
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpu_cli.errors import UsageError
from mpu_cli.files.boundary import LARGEST_TOKENIZER, read_bounded, read_json_object
from mpu_cli.files.reader import ADAPTER_CONFIG, ADAPTER_WEIGHTS, WORD, Checkpoint, fingerprint
from mpu_cli.files.resumption import write_atomically
from mpu_cli.measuring.benchmarks import Benchmark, Split, known_metrics
from mpu_cli.measuring.generation import Served
from mpu_cli.measuring.metrics import CHANCE, DOWN, RELEARNED, RETAIN, UP, ZERO
from mpu_cli.measuring.retain import RetainLog, read_retain_log
from mpu_cli.model.device import device_of, name_of
from mpu_cli.model.source import LARGEST_JSON, Model
from mpu_cli.options.evaluation import Measuring
from mpu_cli.version import __version__
from mpu_cli.wording import names_in

CONFIDENCE = 0.95  # of intervals of means
# metrics that every table shows by default, in this order, if the results have them
MAIN_METRICS = (
    "forget_quality", "forget_truth_ratio", "model_utility", "privleak", "extraction_strength", "forget_Q_A_Prob",
    "forget_Q_A_ROUGE", "forget_Q_A_ROUGE_any_script", RELEARNED, "retain_Q_A_Prob", "retain_Q_A_ROUGE",
    "retain_Q_A_ROUGE_any_script", "forget_verbmem_ROUGE", "forget_knowmem_ROUGE", "retain_knowmem_ROUGE",
)  # fmt: skip
HAZARDOUS = "lm_eval/wmdp"  # the harness counts right answers, which should become few
# facts that affect the numbers, as paths in a result
FACTS_THAT_MATTER = (
    ("benchmark",), ("data",), ("reference_model", "fingerprint"), ("retain_log", "sha256"), ("options", "dtype"),
    ("options", "batch_size"), ("options", "template"), ("options", "system_prompt"), ("options", "date"),
    ("options", "attacks"), ("options", "scored"), ("options", "template_option"), ("options", "quantize"),
    ("options", "max_length"), ("options", "control_tokens"),
    ("options", "max_new_tokens"), ("hardware", "device"),
    ("versions", "torch"), ("versions", "transformers"), ("versions", "rouge-score"), ("mpu",),
)  # fmt: skip
# those of which a missing one does not affect the numbers
OPTIONAL = (("reference_model", "fingerprint"), ("options", "date"), ("options", "attacks"))


@dataclass(frozen=True)
class Evaluated:
    """A result: its label in tables and its file; ``is_retain``: whether another result was measured against it."""

    label: str
    log: RetainLog
    is_retain: bool = False

    def value(self, name: str) -> float | None:
        """The metric's value; PrivLeak of the retain model is 0 by definition, whatever its own file says."""
        return 0.0 if self.is_retain and name == "privleak" else self.log.value(name)


def read_results(paths: Sequence[Path]) -> list[Evaluated]:
    """Read results and label them by file name, or by path if file names are not unique."""
    logs = [read_retain_log(path) for path in paths]
    labels = [path.name.removesuffix(".json") for path in paths]
    if len(set(labels)) < len(labels):
        labels = [str(path).removesuffix(".json") for path in paths]
    if len(set(labels)) < len(labels):  # one file, named twice
        labels = [f"{label} ({i})" for i, label in enumerate(labels, 1)]
    retain_digests = {_at(log.document, ("retain_log", "sha256")) for log in logs}
    return [
        Evaluated(label, log, digest_of(path) in retain_digests)
        for label, log, path in zip(labels, logs, paths, strict=True)
    ]


def retain_value(results: Sequence[Evaluated], name: str) -> float | None:
    """The retain model's value of a metric: its own result if that is among ``results``, else what the others say of
    it; None if nothing says it, or they were measured against different ones."""
    for result in results:
        if result.is_retain:
            return result.value(name)
    recorded_values = {_at(result.log.document, ("retain_log", "metrics", name)) for result in results}
    value = recorded_values.pop() if len(recorded_values) == 1 else None
    return value if isinstance(value, float) else None


def goal(name: str, form: Mapping[str, object] | None = None) -> str:
    """The better direction of a metric: "up", "down", "zero", or "retain" (an attack: near the retain model's value).

    ``form`` is the metric's form, where harness tasks and metrics of other packages state their own.
    """
    if name.startswith(HAZARDOUS):
        return DOWN
    if form and isinstance(form.get("higher_is_better"), bool):
        return UP if form["higher_is_better"] else DOWN
    metrics = known_metrics()
    if name in metrics:
        return metrics[name].goal
    if form and form.get("goal") in (UP, DOWN, ZERO, RETAIN):
        return str(form["goal"])
    return DOWN if name.startswith("forget") else UP


def main_metrics(available: Iterable[str]) -> list[str]:
    """The ``available`` metrics that are shown unless others are asked for; all of them if none is a main one."""
    names = list(dict.fromkeys(available))
    return [name for name in MAIN_METRICS if name in names] or names


def best(values: Sequence[float | None], towards: str, retain: float | None = None) -> set[int]:
    """Indices of the best of ``values``; empty if no two values differ.

    ``retain`` is the retain model's value, which attacks should be near (None: chance).
    """
    targets = {ZERO: 0.0, RETAIN: CHANCE if retain is None else retain}

    def merit(value: float) -> float:
        if towards == UP:
            return value
        if towards == DOWN:
            return -value
        return -abs(value - targets[towards])

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
    """The differences of the results in facts that affect the numbers, one phrase each."""
    recorded = [r for r in results if r.log.document.get("options")]
    sentences = [f"{r.label}: no record of how it was produced" for r in results if not r.log.document.get("options")]
    for path in FACTS_THAT_MATTER:
        # The retain model itself is measured without a log.
        documented = [r for r in recorded if not (r.is_retain and path[0] == "retain_log")]
        values = [_at(r.log.document, path) for r in documented]
        if path == ("data",):
            digests: dict[str, set[object]] = {}  # of each split
            for table in values:
                splits = table.items() if isinstance(table, Mapping) else ()
                for name, split in splits:
                    if isinstance(split, Mapping):
                        digests.setdefault(name, set()).add(split.get("sha256"))
            sentences += [f"different records in {name}" for name in sorted(digests) if len(digests[name]) > 1]
            continue
        distinct = {repr(value) for value in values}
        if path in OPTIONAL:
            distinct.discard(repr(None))
        if len(distinct) > 1:
            texts = [text if len(text) < 64 else f"{text[:12]}…" for text in map(str, values)]  # else a digest
            named = "; ".join(f"{r.label}: {text}" for r, text in zip(documented, texts, strict=True))
            what = "retain logs" if path[0] == "retain_log" else " ".join(path).replace("_", " ")
            sentences.append(f"different {what} ({named})")
    return sentences


def one_retain_log(results: Sequence[Evaluated]) -> bool:
    """Whether all, except the retain model itself, were measured against the same one, or all without one."""
    candidates = [result for result in results if not result.is_retain]
    return len({repr(_at(result.log.document, ("retain_log", "sha256"))) for result in candidates}) < 2


def _at(facts: Mapping[str, object], path: Sequence[str]) -> object:
    value: object = facts
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


# The subject of a measurement, and the facts that its numbers depend on.

VERSIONS = ("torch", "transformers", "tokenizers", "rouge-score", "scipy", "scikit-learn", "numpy")


@dataclass(frozen=True)
class Subject:
    """The subject of a measurement: a model, perhaps with an adapter or a delta, and the model that the reference
    attack uses. With an ``endpoint``, the model that it serves; of ``model``, tokenizer and config are used."""

    model: Model
    adapter: Path | None = None
    delta: Checkpoint | None = None
    reference: Model | None = None
    endpoint: Served | None = None


def facts_of(subject: Subject, benchmark: Benchmark, used: Sequence[Split], options: Measuring) -> dict[str, Any]:
    """The facts that the numbers depend on: model, data, options, versions, hardware."""
    model, adapter, delta = subject.model, subject.adapter, subject.delta
    scoring, prompts = options.scoring, options.prompts
    torch_device = device_of(scoring.device)
    device = str(torch_device)
    stored_dtype = max(model.checkpoint.tensors.values(), key=lambda info: info.nbytes).dtype
    template = prompts.template or own_template(model)
    return {
        "mpu": __version__,
        "benchmark": benchmark.name,
        "model": _identity(model, subject.endpoint),
        "adapter": _adapter_identity(adapter) if adapter else None,
        **({"delta": {"source": str(delta.path), "fingerprint": fingerprint(delta)}} if delta else {}),
        "reference_model": None if subject.reference is None else _identity(subject.reference),
        "data": {
            split.name: {"source": split.source, "records": len(split.rows), "sha256": split.sha256} for split in used
        },
        "options": {
            "dtype": scoring.dtype or ("float32" if device == "cpu" else WORD.get(stored_dtype, "float32")),
            "batch_size": scoring.batch_size,
            **({"quantize": scoring.quantize} if scoring.quantize else {}),
            "template": template,
            "scored": benchmark.scored,
            **({"template_option": list(prompts.template_option)} if prompts.template_option else {}),
            **({"max_new_tokens": scoring.max_new_tokens} if scoring.max_new_tokens else {}),
            **({"max_length": prompts.max_length} if prompts.max_length else {}),
            **({"control_tokens": True} if prompts.control_tokens else {}),
            "system_prompt": prompts.system_prompt if template == "chat" else None,
            "date": prompts.date if template == "chat" else None,
            **({"attacks": options.recovery.document} if benchmark.attacks else {}),
        },
        "versions": {"python": platform.python_version()} | {name: version_of(name) for name in VERSIONS},
        "hardware": {"device": device, "name": name_of(torch_device), "threads": torch.get_num_threads()},
    }


def own_template(model: Model) -> str:
    """The template that the tokenizer's files imply, without loading it: "chat" if they include one, else "plain"."""
    files = {path.name: path for path in model.side_files}
    if files.keys() & {"chat_template.jinja", "chat_template.json"}:
        return "chat"
    config = files.get("tokenizer_config.json")
    chat = config and read_json_object(config, LARGEST_JSON, links=model.links).get("chat_template")
    return "chat" if chat else "plain"


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _identity(model: Model, endpoint: Served | None = None) -> dict[str, str | None]:
    weights = fingerprint(model.checkpoint) if endpoint is None else None
    digest = hashlib.sha256(json.dumps(model.config, sort_keys=True).encode())
    for path in model.side_files:
        digest.update(path.name.encode() + b"\0" + read_bounded(path, LARGEST_TOKENIZER, links=model.links))
    source = model.source if endpoint is None else f"{endpoint.url} {endpoint.name}"
    return {"source": source, "fingerprint": weights, "config_and_tokenizer": digest.hexdigest()}


def _adapter_identity(folder: Path) -> dict[str, str]:
    return {"source": str(folder)} | {name: digest_of(folder / name) for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)}


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not there."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


# The findings of the passes over a model, kept in a file after each pass, so that an interrupted run can resume.


@dataclass
class Findings:
    """The findings under ``facts``, by key; written to ``path`` after each pass."""

    facts: dict[str, Any]
    entries: dict[str, Any]
    path: Path

    def keep(self, entries: Mapping[str, object]) -> None:
        self.entries.update(entries)
        write_atomically(self.path, json.dumps({"facts": self.facts, "findings": self.entries}))


def read_findings(path: Path, facts: dict[str, Any], splits: Mapping[str, Collection[str]]) -> Findings:
    """Findings of an interrupted run with the same facts, as far as the records behind them have not changed; empty if
    there are none or the file is damaged. ``splits`` names the splits that each key was found on."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        document = json.loads(path.read_text(encoding="utf-8"))
        before, now = document["facts"], json.loads(json.dumps(facts))  # as the file has them: JSON has no tuples
        data_before, data = before.pop("data"), now.pop("data")
        unchanged = {name for name in data if data_before.get(name) == data[name]}
        if before == now:
            entries = {}
            for key, names in splits.items():
                if key in document["findings"] and unchanged.issuperset(names):
                    entries[key] = document["findings"][key]
            return Findings(facts, entries, path)
    return Findings(facts, {}, path)


def chosen_metrics(text: str, available: Iterable[str]) -> list[str]:
    """The names in ``--metrics``; UsageError if there are none, and for one that is not ``available``."""
    names = list(names_in(text))
    if not names:
        raise UsageError("--metrics: no names given")
    if missing := set(names).difference(available):
        raise UsageError(f"--metrics {min(missing, key=names.index)}: not in any of the results")
    return names


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean of two or more ``values``, by Student's t."""
    from scipy import stats

    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)
    return float(quantile * statistics.stdev(values) / math.sqrt(len(values)))
