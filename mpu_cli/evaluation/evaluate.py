"""Runs a benchmark on a model: the passes in order, each saved when it finishes, then the metrics."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.boundary.files import read_bounded
from mpu_cli.checkpoint.dtypes import OPTION, TORCH, WORD
from mpu_cli.checkpoint.fingerprint import fingerprint
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.checkpoint.reader import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Checkpoint, read_json_object
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.evaluation.attacks import gradient_norms
from mpu_cli.evaluation.benchmarks import Benchmark, Split
from mpu_cli.evaluation.encoding import Asked, Encoder, Item
from mpu_cli.evaluation.endpoint import BEYOND, Endpoint
from mpu_cli.evaluation.generation import answer
from mpu_cli.evaluation.harness import check_installed, run_tasks
from mpu_cli.evaluation.metrics import Form, Metric, import_statistics, reading
from mpu_cli.evaluation.retain import read_retain_log
from mpu_cli.evaluation.scoring import Scorer
from mpu_cli.models.deltas import add_delta, open_delta
from mpu_cli.models.device import device_of, name_of
from mpu_cli.models.loading import load, skeleton, tokenizer_of, with_adapter
from mpu_cli.models.source import LARGEST_JSON, LARGEST_TOKENIZER, TOKENIZER_FILES, Model, open_model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.declare import check_ranges
from mpu_cli.options.evaluation import Measuring
from mpu_cli.options.unlearning import ChatTemplate
from mpu_cli.records.reading import Record
from mpu_cli.resumption import write_atomically
from mpu_cli.version import __version__

FORMAT = {"format": "mpu-eval", "version": 1}
VERSIONS = ("torch", "transformers", "tokenizers", "rouge-score", "scipy", "scikit-learn", "numpy")
QUESTIONS = ("forget_knowmem", "forget")  # splits whose answers --show prints, if the benchmark asks them
BEFORE = "before:"  # and how many answers of the model without its delta, as a key of findings
HARNESS = "lm_eval:"  # followed by the tasks, a key of the findings
SHOWN = 64  # tokens at most of an answer that a client looks at after training
SCORED = ("answer", "paraphrased", "perturbed")  # parts of a record that one pass scores


@dataclass(frozen=True)
class Shown:
    """One answer for people to read; ``before``: without the delta, if there is one."""

    question: str
    truth: str
    before: str | None
    answer: str


@dataclass(frozen=True)
class Result:
    """``forms``: each metric in the suite's format."""

    path: Path
    forms: dict[str, Form]
    shown: list[Shown] = field(default_factory=list)


@dataclass(frozen=True)
class _Subject:
    """What is measured: a model, perhaps with an adapter or a delta, and the model that the reference attack uses. With
    an ``endpoint``, what that serves; of the model, tokenizer and config are used."""

    model: Model
    adapter: Path | None
    delta: Checkpoint | None
    reference: Model | None
    endpoint: Endpoint | None = None


@dataclass
class _Findings:
    """What the passes over a model found under these ``facts``, written to ``path`` after each pass."""

    facts: dict[str, Any]
    kept: dict[str, Any]
    path: Path

    def keep(self, findings: Mapping[str, object]) -> None:
        self.kept.update(findings)
        write_atomically(self.path, json.dumps({"facts": self.facts, "findings": self.kept}))


@dataclass
class _Run:
    """A model at work, and what was found so far."""

    model: PreTrainedModel
    scorer: Scorer | Endpoint
    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    batch_size: int
    findings: _Findings
    items: dict[tuple[str, str], list] = field(default_factory=dict)

    def encoded(self, split: Split, part: str) -> list:
        if (split.name, part) not in self.items:
            self.items[split.name, part] = list(split.encode(self.encoder, part, split.rows))
        return self.items[split.name, part]


def choose(benchmark: Benchmark, names: Sequence[str], with_reference: bool, served: bool = False) -> dict[str, Metric]:
    """The requested metrics (all available ones if ``names`` is empty), each preceded by the ones it depends on.

    Of a model that is only ``served``, those that its endpoint allows.
    """
    if served and (beyond := [name for name in names if name in BEYOND]):
        raise UsageError(f"--metrics {beyond[0]}: cannot be computed from what --endpoint returns")
    table = {name: metric for name, metric in benchmark.metrics.items() if not (served and name in BEYOND)}
    if unknown := [name for name in names if name not in table]:
        needs_log = "forget_quality needs --retain-log with a result that has forget_truth_ratio"
        raise UsageError(
            f"--metrics {unknown[0]}: no such metric for {benchmark.name} here (available: {', '.join(table)})",
            needs_log if "forget_quality" in unknown else None,
        )
    if "mia_reference" in names and not with_reference:
        raise UsageError("--metrics mia_reference: needs --reference-model")
    wanted = set(names or table)
    if not with_reference:
        wanted.discard("mia_reference")
    while more := {part for name in wanted for part in table[name].of} - wanted:
        wanted |= more
    chosen: dict[str, Metric] = {}

    def add(name: str) -> None:
        for part in table[name].of:
            add(part)
        chosen.setdefault(name, table[name])

    for name in table:
        if name in wanted:
            add(name)
    return chosen


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
    force: bool = False,
    observer: Observer = SILENT,
) -> Result:
    """Measure ``model`` and write the result to ``out``; an interrupted run resumes from ``.NAME.partial``.

    ``adapter`` is a folder with a peft adapter to add to ``model``; ``lm_eval`` are tasks of the harness to run beside
    it. With an ``endpoint``, the model that it serves is measured, with the tokenizer of ``model``.
    Raises MpuError for records, models and logs that cannot be used, naming the place.
    """
    check_ranges(options)
    reference = open_model(options.reference_model) if options.reference_model else None
    device_of(options.scoring.device)
    if endpoint and (adapter or delta or reference or lm_eval or benchmark.tasks):
        raise UsageError("--endpoint does not work with an adapter, --delta, --reference-model or harness tasks")
    chosen = choose(benchmark, options.metrics, reference is not None, served=endpoint is not None)
    for metric in chosen.values():
        metric.check()
    needs = {key for metric in chosen.values() for key in metric.needs}
    lm_eval = (*benchmark.tasks, *lm_eval)
    harness_key = f"{HARNESS}{','.join(lm_eval)}"
    asked = next((split for name, split in benchmark.splits.items() if name in QUESTIONS), None)
    if show and asked:
        needs |= {f"{asked.name}.text"} | ({f"{BEFORE}{show}"} if delta else set())
    if lm_eval:
        check_installed()
        needs.add(harness_key)
    used = [
        split
        for name, split in benchmark.splits.items()
        if any(key.startswith(f"{name}.") for key in needs)
        or (needs & {"gradnorm", "reference"} and name in (benchmark.members, benchmark.strangers))
    ]
    log, started = options.retain_log, time.monotonic()
    with Transaction(force=force) as transaction:
        output = transaction.add(out)
        subject = _Subject(model, adapter, open_delta(model, delta) if delta else None, reference, endpoint)
        facts = _facts(subject, benchmark, used, options)
        unfinished = out.with_name(f".{out.name}.partial")
        kept = _read_partial(unfinished, facts, {benchmark.members, benchmark.strangers})
        resumed = bool(kept)
        if resumed:
            observer.note(f"resuming from {unfinished} (passes already done: {len(kept)})")
        if needs - set(kept):
            _passes(subject, benchmark, used, needs - set(kept), _Findings(facts, kept, unfinished), options, observer)
        forms: dict[str, Form] = {}
        for name, metric in chosen.items():
            forms[name] = metric.make(kept, forms)
        if lm_eval:
            forms |= kept[harness_key]
        document = {
            **FORMAT,
            **facts,
            "retain_log": None if log is None else {"path": str(log), "sha256": _sha256(log), **_values(log, forms)},
            "seconds": round(time.monotonic() - started, 3),
            "resumed": resumed,
            "metrics": forms,
        }
        output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    unfinished.unlink(missing_ok=True)
    return Result(out, forms, _shown(kept, asked, show) if asked else [])


def answers_before_and_after(
    copy: Model, delta: Path, records: Sequence[Record], prompts: ChatTemplate, template: str | None, device: str
) -> list[Shown]:
    """The answers of ``copy`` to the questions of ``records``, without and with ``delta``.

    Texts and dialogues of several turns are left out. ``template`` is "chat", "plain" or None for the tokenizer's own.
    """
    questions = [record for record in records if len([role for role, _ in record.turns if role == "user"]) == 1]
    if not questions:
        return []
    held = open_delta(copy, delta)
    loaded, tokenizer = load(copy, torch.float32, device)
    encoder = Encoder(tokenizer, template or _own_template(copy), prompts.system_prompt, _longest(loaded), prompts.date)
    items = encoder.questions([Asked(record.question, record.answer, record.place) for record in questions])
    ask = partial(answer, loaded, tokenizer, items, [[]] * len(items), limit=SHOWN, batch_size=len(items))
    before = ask()
    add_delta(loaded, copy, held)
    return [
        Shown(record.question, record.answer, then.generation, now.generation)
        for record, then, now in zip(questions, before, ask(), strict=True)
    ]


def _passes(
    subject: _Subject,
    benchmark: Benchmark,
    used: Sequence[Split],
    todo: set[str],
    findings: _Findings,
    options: Measuring,
    observer: Observer,
) -> None:
    """Every pass that ``todo`` needs."""
    model, adapter, reference, facts = subject.model, subject.adapter, subject.reference, findings.facts
    batch_size, prompts = options.scoring.batch_size, options.prompts
    served = subject.endpoint is not None
    dtype, device = TORCH[OPTION[facts["options"]["dtype"]]], str(facts["hardware"]["device"])
    loaded, tokenizer = (skeleton(model), tokenizer_of(model)) if served else load(model, dtype, device)
    loaded = with_adapter(loaded, adapter) if adapter else loaded
    template = str(facts["options"]["template"])
    if template == "chat" and not tokenizer.chat_template:
        raise MpuError("the model's tokenizer has no chat template", "use --template plain")
    if not any(path.name in TOKENIZER_FILES for path in model.side_files) or not tokenizer("a b").input_ids:
        raise MpuError(f"{model.source}: no tokenizer found", "put its tokenizer files next to the weights")
    encoder = Encoder(tokenizer, template, prompts.system_prompt, _longest(loaded), prompts.date)
    run = _Run(loaded, subject.endpoint or Scorer(loaded), tokenizer, encoder, batch_size, findings)
    attacked = [split for split in used if split.name in (benchmark.members, benchmark.strangers)]
    total = sum(len(split.rows) for split in used for key in todo if key.startswith(f"{split.name}."))
    total += sum(len(split.rows) for split in attacked) * len(todo & {"gradnorm", "reference"})
    total += sum(int(key.removeprefix(BEFORE)) for key in todo if key.startswith(BEFORE))
    observer.stage("evaluate", total, "records")

    for split in used:  # report invalid records before any pass
        for part in SCORED:
            if f"{split.name}.{part}" in todo or (part == "answer" and f"{split.name}.text" in todo):
                _check_ids(run.encoded(split, part), loaded, model.source)
    scored = {split.name: [part for part in SCORED if f"{split.name}.{part}" in todo] for split in used}
    if isinstance(run.scorer, Scorer):
        encoded = [run.encoded(split, part) for split in used for part in scored[split.name]]
        run.scorer.prepare([*chain(*map(_flat, encoded))])
    largest = max(used, key=lambda split: len(split.rows), default=None)
    for key in sorted(key for key in todo if key.startswith(BEFORE)):
        split = next(split for split in used if split.name in QUESTIONS)
        first = run.encoded(split, "answer")[: int(key.removeprefix(BEFORE))]
        advance = partial(_advance, observer, "answers before")
        findings.keep({key: _answers(run, split, first, [[]] * len(first), advance)})
    if subject.delta:
        add_delta(loaded, model, subject.delta)
    for split in used:
        if split is largest:  # the metrics' imports take a second, best spent beside passes that keep all cores busy
            threading.Thread(target=import_statistics, daemon=True).start()
        if parts := scored[split.name]:
            moments = split in attacked and "answer" in parts and not served
            findings.keep(_score(run, split, parts, moments, partial(_advance, observer, split.source)))
        if f"{split.name}.text" in todo:
            answers = _say(run, split, partial(_advance, observer, f"{split.source}, answers"))
            findings.keep({f"{split.name}.text": answers})
    sides = ("forget", "holdout")
    if "gradnorm" in todo:
        scores_of_sides = [
            gradient_norms(loaded, run.encoded(split, "answer"), partial(_advance, observer, "gradients"))
            for split in attacked
        ]
        findings.keep({"gradnorm": dict(zip(sides, scores_of_sides, strict=True))})
    for key in sorted(key for key in todo if key.startswith(HARNESS)):
        tasks = key.removeprefix(HARNESS).split(",")
        findings.keep({key: run_tasks(loaded, tokenizer, tasks, batch_size)})
    if "reference" in todo and reference is not None:
        items = [run.encoded(split, "answer") for split in attacked]
        del run, loaded  # one model at a time
        other, its_tokenizer = load(reference, dtype, device)
        if its_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise MpuError(
                f"{reference.source}: vocabulary differs from the model's", "use one with the same vocabulary"
            )
        for side in items:
            _check_ids(side, other, reference.source)
        advance = partial(_advance, observer, "reference model")
        both = iter(Scorer(other).score([], others=[*chain(*items)], batch_size=batch_size, advance=advance))
        found = {name: [next(both).loss for _ in side] for name, side in zip(sides, items, strict=True)}
        findings.keep({"reference": found})


def _shown(kept: Mapping[str, Any], split: Split, count: int) -> list[Shown]:
    answers = kept.get(f"{split.name}.text", [])[:count]
    before = kept.get(f"{BEFORE}{count}") or [{"generation": None}] * count
    return [
        Shown(row["question"], now["ground_truth"], then["generation"], now["generation"])
        for (_, row), now, then in zip(split.rows, answers, before, strict=False)
    ]


def _advance(observer: Observer, what: str, count: float) -> None:
    observer.advance(count, what)


def _longest(model: PreTrainedModel) -> int | None:
    """How many tokens the model can read; None for rotary positions, which extend beyond the training length."""
    config = model.config.get_text_config()
    return None if getattr(config, "rope_parameters", None) else getattr(config, "max_position_embeddings", None)


def _check_ids(items: Sequence[Item | list[Item]], model: PreTrainedModel, source: str) -> None:
    """Raises MpuError, with the place, if ``model`` has no embedding for a token or an item is too long for it."""
    rows, longest = model.get_input_embeddings().weight.shape[0], _longest(model)
    for item in _flat(items):
        if max(item.ids) >= rows:
            raise MpuError(
                f"{item.place}: {source} has {rows} tokens, but its tokenizer returned token id {max(item.ids)}"
            )
        if longest is not None and len(item.ids) > longest:
            raise MpuError(f"{item.place}: {len(item.ids)} tokens, but {source} reads at most {longest}")


def _flat(encoded: Sequence[Item | list[Item]]) -> list[Item]:
    return [*chain(*_grouped(encoded))]


def _grouped(encoded: Sequence[Item | list[Item]]) -> list[list[Item]]:
    return [each if isinstance(each, list) else [each] for each in encoded]


def _score(
    run: _Run, split: Split, parts: Sequence[str], moments: bool, advance: Callable[[float], None]
) -> dict[str, object]:
    """Findings of one pass over all ``parts`` of a split's records."""
    groups = {part: _grouped(run.encoded(split, part)) for part in parts}
    flat = {part: _flat(groups[part]) for part in parts}
    answers = flat.get("answer", [])
    others = [item for part in parts if part != "answer" for item in flat[part]]
    share = len(parts) * len(split.rows) / (len(answers) + len(others))
    ask = run.scorer.score if isinstance(run.scorer, Endpoint) else partial(run.scorer.score, moments=moments)
    scored = iter(ask(answers, others=others, batch_size=run.batch_size, advance=lambda n: advance(n * share)))
    findings: dict[str, object] = {}
    for part in parts:
        scores = [[next(scored) for _ in group] for group in groups[part]]
        if part == "answer":
            findings[f"{split.name}.answer"] = [
                reading(item, each, run.tokenizer.decode(list(item.labels), skip_special_tokens=True))
                for [item], [each] in zip(groups[part], scores, strict=True)
            ]
        elif part == "paraphrased":
            findings[f"{split.name}.paraphrased"] = [each.loss for [each] in scores]
        else:
            findings[f"{split.name}.perturbed"] = [[each.loss for each in group] for group in scores]
    return findings


def _say(run: _Run, split: Split, advance: Callable[[int], None]) -> list[dict[str, str]]:
    """The model's answers, started from what its scores on the true answers already show, if there are any."""
    items = run.encoded(split, "answer")
    readings = run.findings.kept.get(f"{split.name}.answer", [{}] * len(items))
    drafts = [
        reading.get("says", []) if item.ids[: item.start] == item.prompt else []  # tokens may merge across the boundary
        for item, reading in zip(items, readings, strict=True)
    ]
    return _answers(run, split, items, drafts, advance)


def _answers(
    run: _Run, split: Split, items: list[Item], drafts: list[list[int]], advance: Callable[[int], None]
) -> list[dict[str, str]]:
    ask = (
        run.scorer.answer
        if isinstance(run.scorer, Endpoint)
        else partial(answer, run.model, drafts=drafts, longest=run.encoder.max_length)
    )
    answers = ask(
        run.tokenizer, items, limit=split.limit, stops=split.stops, batch_size=run.batch_size, advance=advance
    )
    return [asdict(each) for each in answers]


def _own_template(model: Model) -> str:
    """ "chat" if the tokenizer's files include a chat template (without loading it), else "plain"."""
    files = {path.name: path for path in model.side_files}
    if files.keys() & {"chat_template.jinja", "chat_template.json"}:
        return "chat"
    config = files.get("tokenizer_config.json")
    chat = config and read_json_object(config, LARGEST_JSON, links=model.links).get("chat_template")
    return "chat" if chat else "plain"


def _facts(subject: _Subject, benchmark: Benchmark, used: Sequence[Split], options: Measuring) -> dict[str, Any]:
    """What the numbers depend on: model, data, options, versions, hardware."""
    model, adapter, scoring, prompts = subject.model, subject.adapter, options.scoring, options.prompts
    place = device_of(scoring.device)
    device = str(place)
    hardware = {
        "device": device,
        "name": name_of(place),
        "threads": torch.get_num_threads(),
    }
    own = max(model.checkpoint.tensors.values(), key=lambda info: info.nbytes).dtype
    template = prompts.template or _own_template(model)
    return {
        "mpu": __version__,
        "benchmark": benchmark.name,
        "model": _identity(model, subject.endpoint),
        "adapter": _adapter_identity(adapter) if adapter else None,
        **({"delta": _delta_identity(subject.delta)} if subject.delta else {}),
        "reference_model": None if subject.reference is None else _identity(subject.reference),
        "data": {
            split.name: {"source": split.source, "records": len(split.rows), "sha256": split.sha256} for split in used
        },
        "options": {
            "dtype": scoring.dtype or ("float32" if device == "cpu" else WORD.get(own, "float32")),
            "batch_size": scoring.batch_size,
            "template": template,
            "system_prompt": prompts.system_prompt if template == "chat" else None,
            "date": prompts.date if template == "chat" else None,
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in VERSIONS},
        "hardware": hardware,
    }


def _identity(model: Model, endpoint: Endpoint | None = None) -> dict[str, str | None]:
    weights = None
    if endpoint is None:
        with worker_pool() as pool:
            weights = fingerprint(model.checkpoint, pool)
    digest = hashlib.sha256(json.dumps(model.config, sort_keys=True).encode())
    for path in model.side_files:
        digest.update(path.name.encode() + b"\0" + read_bounded(path, LARGEST_TOKENIZER, links=model.links))
    source = model.source if endpoint is None else f"{endpoint.url} {endpoint.name}"
    return {"source": source, "fingerprint": weights, "config_and_tokenizer": digest.hexdigest()}


def _delta_identity(delta: Checkpoint) -> dict[str, str]:
    with worker_pool() as pool:
        return {"source": str(delta.path), "fingerprint": fingerprint(delta, pool)}


def _adapter_identity(folder: Path) -> dict[str, str]:
    names = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
    return {"source": str(folder)} | {name: _sha256(folder / name) for name in names}


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _values(log: Path, forms: Mapping[str, Form]) -> dict[str, object]:
    """What the retain model has in these metrics, so that a table can say which result is nearest to it."""
    retain = read_retain_log(log)
    return {"metrics": {name: value for name in forms if (value := retain.value(name)) is not None}}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_partial(path: Path, facts: Mapping[str, object], attacked: set[str]) -> dict[str, Any]:
    """Findings of an interrupted run with the same facts, for splits whose records have not changed; empty if there
    are none or the file is damaged. ``attacked`` are the splits behind findings that belong to no single split."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        document = json.loads(path.read_text(encoding="utf-8"))
        before, now = document["facts"], json.loads(json.dumps(facts))
        then, data = before.pop("data"), now.pop("data")
        same = {name for name in data if then.get(name) == data[name]}
        if before == now:
            return {
                key: finding
                for key, finding in document["findings"].items()
                if key.startswith(HARNESS) or ({key.split(".")[0]} if "." in key else attacked) <= same
            }
    return {}
