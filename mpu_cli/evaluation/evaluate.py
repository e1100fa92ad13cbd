"""Running a benchmark on a model: passes in order, kept as they are made, then the metrics."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli import __version__
from mpu_cli.checkpoint.dtypes import OPTION, TORCH, WORD
from mpu_cli.checkpoint.fingerprint import fingerprint
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.checkpoint.reader import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_json_object
from mpu_cli.checkpoint.source import TOKENIZER_FILES, Model
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.client.dates import DEFAULT_DATE
from mpu_cli.client.loading import as_directory, load, with_adapter
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.evaluation.attacks import gradient_norms
from mpu_cli.evaluation.benchmarks import Benchmark, Split
from mpu_cli.evaluation.encoding import SYSTEM_PROMPT, Encoder, Item
from mpu_cli.evaluation.generation import answer
from mpu_cli.evaluation.harness import check as check_harness
from mpu_cli.evaluation.harness import run_tasks
from mpu_cli.evaluation.metrics import Form, Metric, import_statistics, reading
from mpu_cli.evaluation.scoring import score

FORMAT = {"format": "mpu-eval", "version": 1}
VERSIONS = ("torch", "transformers", "tokenizers", "rouge-score", "scipy", "scikit-learn", "numpy")
HARNESS = "lm_eval:"  # and its tasks, as a key of findings
SCORED = ("answer", "paraphrased", "perturbed")  # parts of a record that one pass scores


@dataclass(frozen=True)
class Settings:
    """How to evaluate; names and defaults are those of the command line."""

    metrics: tuple[str, ...] = ()  # all that there are
    dtype: str | None = None  # float32 on a CPU, the model's own on a GPU
    device: str = "auto"
    batch_size: int = 32
    template: str | None = None  # the tokenizer's chat template if it has one
    system_prompt: str = SYSTEM_PROMPT
    date: str = DEFAULT_DATE


@dataclass(frozen=True)
class Result:
    """``forms``: each metric in the suite's form."""

    path: Path
    forms: dict[str, Form]


@dataclass
class _Run:
    """A model at work; ``kept`` are the findings, written to ``path`` after each pass."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    batch_size: int
    kept: dict[str, object]
    path: Path
    facts: dict[str, object]
    items: dict[tuple[str, str], list] = field(default_factory=dict)

    def encoded(self, split: Split, part: str) -> list:
        if (split.name, part) not in self.items:
            self.items[split.name, part] = [split.encode(self.encoder, part, row) for row in split.rows]
        return self.items[split.name, part]

    def keep(self, findings: Mapping[str, object]) -> None:
        self.kept.update(findings)
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text(json.dumps({"facts": self.facts, "findings": self.kept}), encoding="utf-8")
        os.replace(fresh, self.path)


def choose(benchmark: Benchmark, names: Sequence[str], with_reference: bool) -> dict[str, Metric]:
    """The metrics asked for (all that can be had, if none), and those that they are made of, in order."""
    table = benchmark.metrics
    if unknown := [name for name in names if name not in table]:
        raise UsageError(
            f"--metrics {unknown[0]}: {benchmark.name} has no such metric here (it has: {', '.join(table)})"
            + (
                "; forget_quality needs --retain-log, one with forget_truth_ratio"
                if "forget_quality" in unknown
                else ""
            )
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
    settings: Settings,
    *,
    adapter: Path | None = None,
    reference: Model | None = None,
    retain_log: Path | None = None,
    lm_eval: Sequence[str] = (),
    out: Path,
    force: bool = False,
    bar: Callable[[int], Callable[..., None]] = lambda _: lambda *_: None,
    tell: Callable[[str], None] = lambda _: None,
) -> Result:
    """Measure ``model`` and write the result to ``out``; a run that was stopped goes on from ``.NAME.partial``.

    ``adapter`` is a folder with a peft adapter to add to ``model``; ``lm_eval`` are tasks of the harness to run beside
    it. ``bar(total)`` gives what is told of progress (a number of items, what they are). Raises MpuError for records,
    models and logs that cannot be used, naming the place.
    """
    if settings.batch_size < 1:
        raise UsageError(f"--batch-size {settings.batch_size}: must be at least 1")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu")
    chosen = choose(benchmark, settings.metrics, reference is not None)
    for metric in chosen.values():
        metric.check()
    needs = {key for metric in chosen.values() for key in metric.needs}
    harness_key = f"{HARNESS}{','.join(lm_eval)}"
    if lm_eval:
        check_harness()
        needs.add(harness_key)
    used = [
        split
        for name, split in benchmark.splits.items()
        if any(key.startswith(f"{name}.") for key in needs)
        or (needs & {"gradnorm", "reference"} and name in (benchmark.members, benchmark.strangers))
    ]
    started = time.monotonic()
    with Transaction(force=force) as transaction:
        output = transaction.add(out)
        facts = _facts(model, adapter, benchmark, used, settings, reference)
        partial = out.with_name(f".{out.name}.partial")
        kept = _read_partial(partial, facts, {benchmark.members, benchmark.strangers})
        resumed = bool(kept)
        if resumed:
            tell(f"going on from {partial}, which holds {len(kept)} passes")
        if needs - set(kept):
            # What the metrics import takes seconds: it comes while the model is at work.
            threading.Thread(target=import_statistics, daemon=True).start()
            _passes(model, adapter, reference, benchmark, used, needs, facts, settings, kept, partial, bar)
        forms: dict[str, Form] = {}
        for name, metric in chosen.items():
            forms[name] = metric.make(kept, forms)
        forms |= kept[harness_key] if lm_eval else {}
        document = {
            **FORMAT,
            **facts,
            "retain_log": None if retain_log is None else {"path": str(retain_log), "sha256": _sha256(retain_log)},
            "seconds": round(time.monotonic() - started, 3),
            "resumed": resumed,
            "metrics": forms,
        }
        output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.unlink(missing_ok=True)
    return Result(out, forms)


def _passes(
    model: Model,
    adapter: Path | None,
    reference: Model | None,
    benchmark: Benchmark,
    used: Sequence[Split],
    needs: set[str],
    facts: dict[str, object],
    settings: Settings,
    kept: dict[str, object],
    partial: Path,
    bar: Callable[[int], Callable[..., None]],
) -> None:
    """Every pass that is needed and not yet in ``kept``."""
    dtype, device = TORCH[OPTION[facts["options"]["dtype"]]], str(facts["hardware"]["device"])
    loaded, tokenizer = _load(model, dtype, device)
    loaded = with_adapter(loaded, adapter) if adapter else loaded
    template = str(facts["options"]["template"])
    if template == "chat" and not tokenizer.chat_template:
        raise MpuError("the model's tokenizer has no chat template; use --template plain")
    if not any((model.folder / name).is_file() for name in TOKENIZER_FILES) or not tokenizer("a b").input_ids:
        raise MpuError(f"{model.source}: has no tokenizer in it; put its tokenizer files beside the weights")
    encoder = Encoder(tokenizer, template, settings.system_prompt, _longest(loaded), settings.date)
    run = _Run(loaded, tokenizer, encoder, settings.batch_size, kept, partial, facts)
    attacked = [split for split in used if split.name in (benchmark.members, benchmark.strangers)]
    todo = needs - set(kept)
    total = sum(len(split.rows) for split in used for key in todo if key.startswith(f"{split.name}."))
    total += sum(len(split.rows) for split in attacked) * len(todo & {"gradnorm", "reference"})
    advance = bar(total)

    for split in used:  # what is wrong with a record is known before any pass
        for part in SCORED:
            if f"{split.name}.{part}" in todo or (part == "answer" and f"{split.name}.text" in todo):
                _check_ids(run.encoded(split, part), loaded, model.source)
    for split in used:
        parts = [part for part in SCORED if f"{split.name}.{part}" in todo]
        if parts:
            moments = split in attacked and "answer" in parts
            run.keep(_score(run, split, parts, moments, lambda count, split=split: advance(count, split.source)))
        if f"{split.name}.text" in todo:
            said = _say(run, split, lambda count, split=split: advance(count, f"{split.source}, answers"))
            run.keep({f"{split.name}.text": said})
    sides = ("forget", "holdout")
    if "gradnorm" in todo:
        told = [
            gradient_norms(loaded, run.encoded(split, "answer"), lambda n: advance(n, "gradients"))
            for split in attacked
        ]
        run.keep({"gradnorm": dict(zip(sides, told, strict=True))})
    for key in sorted(key for key in todo if key.startswith(HARNESS)):
        tasks = key.removeprefix(HARNESS).split(",")
        run.keep({key: run_tasks(loaded, tokenizer, tasks, settings.batch_size)})
    if "reference" in todo:
        run.model = loaded = None  # one model at a time
        items = [run.encoded(split, "answer") for split in attacked]
        other, its_tokenizer = _load(reference, dtype, device)
        if its_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise MpuError(f"{reference.source}: has another vocabulary than the model; the attack needs the same")
        for side in items:
            _check_ids(side, other, reference.source)
        told = [
            [
                scores.loss
                for scores in score(
                    other, side, batch_size=settings.batch_size, advance=lambda n: advance(n, "reference model")
                )
            ]
            for side in items
        ]
        run.keep({"reference": dict(zip(sides, told, strict=True))})


def _longest(model: PreTrainedModel) -> int | None:
    """How many tokens the model reads; None for rotary positions, which go on past what a model was trained on."""
    config = model.config.get_text_config()
    return None if getattr(config, "rope_parameters", None) else getattr(config, "max_position_embeddings", None)


def _check_ids(items: Sequence[Item | list[Item]], model: PreTrainedModel, source: str) -> None:
    """MpuError, with the place, for a token that ``model`` has no embedding of, or more tokens than it reads."""
    rows, longest = model.get_input_embeddings().weight.shape[0], _longest(model)
    for made in items:
        for item in made if isinstance(made, list) else [made]:
            if max(item.ids) >= rows:
                raise MpuError(
                    f"{item.place}: {source} has {rows} tokens, and its tokenizer gives number {max(item.ids)}"
                )
            if longest is not None and len(item.ids) > longest:
                raise MpuError(f"{item.place}: is {len(item.ids)} tokens long, and {source} reads {longest}")


def _score(
    run: _Run, split: Split, parts: Sequence[str], moments: bool, advance: Callable[[int], None]
) -> dict[str, object]:
    """Findings of one pass over all ``parts`` of a split's records."""
    groups: dict[str, list[list[Item]]] = {
        part: [made if isinstance(made, list) else [made] for made in run.encoded(split, part)] for part in parts
    }
    flat = [item for part in parts for group in groups[part] for item in group]
    share = len(parts) * len(split.rows) / len(flat)
    told = iter(
        score(run.model, flat, batch_size=run.batch_size, moments=moments, advance=lambda n: advance(n * share))
    )
    found: dict[str, object] = {}
    for part in parts:
        scores = [[next(told) for _ in group] for group in groups[part]]
        if part == "answer":
            found[f"{split.name}.answer"] = [
                reading(item, each, run.tokenizer.decode(list(item.labels), skip_special_tokens=True))
                for [item], [each] in zip(groups[part], scores, strict=True)
            ]
        elif part == "paraphrased":
            found[f"{split.name}.paraphrased"] = [each.loss for [each] in scores]
        else:
            found[f"{split.name}.perturbed"] = [[each.loss for each in group] for group in scores]
    return found


def _say(run: _Run, split: Split, advance: Callable[[int], None]) -> list[dict[str, str]]:
    """What the model answers; begun with what its scores on the true answers tell, where they are there."""
    items = run.encoded(split, "answer")
    readings = run.kept.get(f"{split.name}.answer", [{}] * len(items))
    drafts = [
        told.get("says", []) if item.ids[: item.start] == item.prompt else []  # tokens may join across the border
        for item, told in zip(items, readings, strict=True)
    ]
    answers = answer(
        run.model, run.tokenizer, items, drafts, limit=split.limit, stops=split.stops, batch_size=run.batch_size,
        longest=run.encoder.max_length,
        advance=advance,
    )  # fmt: skip
    return [asdict(each) for each in answers]


def _load(model: Model, dtype: torch.dtype, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with as_directory(model) as folder:
        return load(folder, dtype, device)


def _own_template(model: Model) -> str:
    """ "chat" if the model's tokenizer has a template, as its files say without loading it, else "plain"."""
    if any((model.folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return "chat"
    path = model.folder / "tokenizer_config.json"
    return "chat" if path.is_file() and read_json_object(path).get("chat_template") else "plain"


def _facts(
    model: Model,
    adapter: Path | None,
    benchmark: Benchmark,
    used: Sequence[Split],
    settings: Settings,
    reference: Model | None,
) -> dict[str, object]:
    """What the numbers depend on: model, data, options, versions, hardware."""
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    hardware = {
        "device": device,
        "name": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
    }
    own = max(model.checkpoint.tensors.values(), key=lambda info: info.nbytes).dtype
    template = settings.template or _own_template(model)
    return {
        "mpu": __version__,
        "benchmark": benchmark.name,
        "model": _identity(model),
        "adapter": _adapter_identity(adapter) if adapter else None,
        "reference_model": None if reference is None else _identity(reference),
        "data": {
            split.name: {"source": split.source, "records": len(split.rows), "sha256": split.sha256} for split in used
        },
        "options": {
            "dtype": settings.dtype or ("float32" if device == "cpu" else WORD.get(own, "float32")),
            "batch_size": settings.batch_size,
            "template": template,
            "system_prompt": settings.system_prompt if template == "chat" else None,
            "date": settings.date if template == "chat" else None,
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in VERSIONS},
        "hardware": hardware,
    }


def _identity(model: Model) -> dict[str, str]:
    with worker_pool() as pool:
        weights = fingerprint(model.checkpoint, pool)
    digest = hashlib.sha256(model.config_path.read_bytes())
    for path in model.side_files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return {"source": model.source, "fingerprint": weights, "config_and_tokenizer": digest.hexdigest()}


def _adapter_identity(folder: Path) -> dict[str, str]:
    names = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
    return {"source": str(folder)} | {name: _sha256(folder / name) for name in names}


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_partial(path: Path, facts: Mapping[str, object], attacked: set[str]) -> dict[str, object]:
    """The findings of a run with the same facts that was stopped, of the splits whose records are the same too; none
    if there are none, or they are damaged. ``attacked`` are the splits that findings of no split are of."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        document = json.loads(path.read_text(encoding="utf-8"))
        before, now = document["facts"], json.loads(json.dumps(facts))
        then, data = before.pop("data"), now.pop("data")
        same = {name for name in data if then.get(name) == data[name]}
        if before == now:
            return {
                key: found
                for key, found in document["findings"].items()
                if key.startswith(HARNESS) or ({key.split(".")[0]} if "." in key else attacked) <= same
            }
    return {}
