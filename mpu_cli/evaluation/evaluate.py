"""Measures a model: the passes that a benchmark's metrics need, then the metrics, written as one result."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from mpu_cli.boundary.files import PRIVATE_FILE, private_umask
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.errors import UsageError
from mpu_cli.evaluation import relearning_attacks
from mpu_cli.evaluation.answers import Shown
from mpu_cli.evaluation.benchmarks import Benchmark, Split
from mpu_cli.evaluation.endpoint import BEYOND, Endpoint
from mpu_cli.evaluation.findings import read_findings
from mpu_cli.evaluation.harness import check_installed
from mpu_cli.evaluation.metrics import GRADIENTS, Metric, MetricResult
from mpu_cli.evaluation.passes import before_key, carry_out, harness_key, passes_for
from mpu_cli.evaluation.provenance import Subject, digest_of, facts_of
from mpu_cli.evaluation.retain import read_retain_log
from mpu_cli.models.deltas import open_delta
from mpu_cli.models.device import device_of
from mpu_cli.models.loading import letting_go
from mpu_cli.models.quantized import check_bitsandbytes
from mpu_cli.models.source import Model, open_model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.evaluation import Measuring

FORMAT = {"format": "mpu-eval", "version": 1}
QUESTIONS = ("forget_knowmem", "forget")  # splits whose answers --show prints, if the benchmark asks them


@dataclass(frozen=True)
class EvalResult:
    """``forms``: each metric in OpenUnlearning's format."""

    path: Path
    forms: dict[str, MetricResult]
    shown: list[Shown] = field(default_factory=list)


def choose(benchmark: Benchmark, options: Measuring, served: bool = False) -> dict[str, Metric]:
    """The requested metrics (all available ones if none are), each preceded by the ones it depends on.

    Metrics of the benchmark's attacks are always among them. Of a model that is only ``served``, those that its
    endpoint allows; of one in 4 bits, those that take no gradients of its weights and leave them as they are.
    """
    names, with_reference = options.metrics, options.reference_model is not None
    in_4_bits = options.scoring.quantize is not None
    if in_4_bits and (needy := [name for name in benchmark.attacks if relearning_attacks.ATTACKS[name].alters]):
        raise UsageError(f"--attacks {needy[0]}: changes weights, which --quantize keeps in 4 bits")
    if in_4_bits and (
        needy := [name for name, metric in benchmark.metrics.items() if GRADIENTS in metric.needs and name in names]
    ):
        raise UsageError(f"--metrics {needy[0]}: takes gradients of weights, which --quantize keeps in 4 bits")
    if served and (needy := [name for name in benchmark.attacks if relearning_attacks.ATTACKS[name].weights]):
        raise UsageError(f"--attacks {needy[0]}: needs the model's weights, which --endpoint does not give")
    if served and (beyond := [name for name in names if name in BEYOND]):
        raise UsageError(f"--metrics {beyond[0]}: cannot be computed from what --endpoint returns")
    table = {name: metric for name, metric in benchmark.metrics.items() if not (served and name in BEYOND)}
    if in_4_bits:
        table = {name: metric for name, metric in table.items() if GRADIENTS not in metric.needs}
    table |= benchmark.attack_metrics
    if unknown := [name for name in names if name not in table]:
        needs_log = "forget_quality needs --retain-log with a result that has forget_truth_ratio"
        raise UsageError(
            f"--metrics {unknown[0]}: no such metric for {benchmark.name} here (available: {', '.join(table)})",
            needs_log if "forget_quality" in unknown else None,
        )
    if "mia_reference" in names and not with_reference:
        raise UsageError("--metrics mia_reference: needs --reference-model")
    selected_names = set(names or table) | set(benchmark.attack_metrics)
    if not with_reference:
        selected_names.discard("mia_reference")
    while more := {part for name in selected_names for part in table[name].dependencies} - selected_names:
        selected_names |= more
    chosen: dict[str, Metric] = {}

    def add(name: str) -> None:
        for part in table[name].dependencies:
            add(part)
        chosen.setdefault(name, table[name])

    for name in table:
        if name in selected_names:
            add(name)
    return chosen


@letting_go
def evaluate(
    model: Model,
    benchmark: Benchmark,
    options: Measuring,
    *,
    adapter: Path | None = None,
    delta: Path | None = None,
    show: int = 0,
    lm_eval: Sequence[str] = (),
    endpoint: Endpoint | None = None,
    out: Path,
    texts: bool = True,
    force: bool = False,
    observer: Observer = SILENT,
) -> EvalResult:
    """Measure ``model`` and write the result to ``out``; an interrupted run resumes from ``.NAME.partial``.

    ``adapter`` is a folder with a peft adapter to add to ``model``; ``lm_eval`` are tasks of the harness to run beside
    it. With an ``endpoint``, the model that it serves is measured, with the tokenizer of ``model``. Without ``texts``
    the result has no questions, answers and generations.
    Raises MpuError for records, models and logs that cannot be used, naming the place.
    """
    with private_umask():  # results hold questions, answers and generations
        return _evaluate(
            model, benchmark, options, adapter, delta, show, lm_eval, endpoint, out=out, texts=texts, force=force,
            observer=observer,
        )  # fmt: skip


def _evaluate(
    model: Model,
    benchmark: Benchmark,
    options: Measuring,
    adapter: Path | None,
    delta: Path | None,
    show: int,
    lm_eval: Sequence[str],
    endpoint: Endpoint | None,
    *,
    out: Path,
    texts: bool,
    force: bool,
    observer: Observer,
) -> EvalResult:
    reference = open_model(options.reference_model) if options.reference_model else None
    device_of(options.scoring.device)
    if endpoint and (adapter or delta or reference or lm_eval or benchmark.tasks):
        raise UsageError("--endpoint does not work with an adapter, --delta, --reference-model or harness tasks")
    if options.scoring.quantize:
        check_bitsandbytes()
        if endpoint or delta:
            raise UsageError("--quantize does not work with --endpoint, or --delta, which changes weights")
    chosen = choose(benchmark, options, served=endpoint is not None)
    for metric in chosen.values():
        metric.check()
    needs = {key for metric in chosen.values() for key in metric.needs}
    lm_eval = (*benchmark.tasks, *lm_eval)
    shown_split = next((split for name, split in benchmark.splits.items() if name in QUESTIONS), None)
    if show and shown_split:
        needs |= {f"{shown_split.name}.text"} | ({before_key(show)} if delta else set())
    if lm_eval:
        check_installed()
        needs.add(harness_key(lm_eval))
    passes = passes_for(needs, benchmark, lm_eval, shown_split, show)
    for warning in benchmark.warnings:
        observer.warn(warning)
    used = [split for split in benchmark.splits.values() if any(split in each.splits for each in passes)]
    log, started = options.retain_log, time.monotonic()
    with Transaction(force=force) as transaction:
        output = transaction.add(out)
        subject = Subject(model, adapter, open_delta(model, delta) if delta else None, reference, endpoint)
        facts = facts_of(subject, benchmark, used, options)
        unfinished = out.with_name(f".{out.name}.partial")
        if unfinished.is_file():
            unfinished.chmod(PRIVATE_FILE)  # of an mpu that did not make it so
        splits = {key: [split.name for split in each.splits] for each in passes for key in each.keys}
        findings = read_findings(unfinished, facts, splits)
        resumed = bool(findings.entries)
        if resumed:
            observer.note(f"resuming from {unfinished} (passes already done: {len(findings.entries)})")
        if todo := [each for each in passes if not findings.entries.keys() >= {*each.keys}]:
            carry_out(todo, subject, options, findings, observer)
        entries = findings.entries
        forms: dict[str, MetricResult] = {}
        for name, metric in chosen.items():
            forms[name] = metric.make(entries, forms)
        if lm_eval:
            forms |= entries[harness_key(lm_eval)]
        document = {
            **FORMAT,
            **facts,
            "retain_log": None if log is None else {"path": str(log), "sha256": digest_of(log), **_values(log, forms)},
            "seconds": round(time.monotonic() - started, 3),
            "resumed": resumed,
            "metrics": forms if texts else {name: _without_texts(form) for name, form in forms.items()},
        }
        output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    unfinished.unlink(missing_ok=True)
    return EvalResult(out, forms, _answers_to_show(entries, shown_split, show) if shown_split else [])


def _without_texts(form: MetricResult) -> MetricResult:
    """``form`` without what each record's entry holds as text."""
    by_index = form.get("value_by_index")
    if not isinstance(by_index, dict):
        return form
    entries = {
        index: {name: value for name, value in entry.items() if not isinstance(value, str)}
        if isinstance(entry, dict)
        else entry
        for index, entry in by_index.items()
    }
    return cast(MetricResult, {**form, "value_by_index": entries})


def _answers_to_show(entries: Mapping[str, Any], split: Split, count: int) -> list[Shown]:
    answers = entries.get(f"{split.name}.text", [])[:count]
    before = entries.get(before_key(count)) or [{"generation": None}] * count
    return [
        Shown(record.question, now["ground_truth"], then["generation"], now["generation"])
        for record, now, then in zip(split.records, answers, before, strict=False)
    ]


def _values(log: Path, forms: Mapping[str, MetricResult]) -> dict[str, object]:
    """What the retain model has in these metrics, so that a table can say which result is nearest to it."""
    retain = read_retain_log(log)
    return {"metrics": {name: value for name in forms if (value := retain.value(name)) is not None}}
