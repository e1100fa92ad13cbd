"""Measures a model: the passes that a benchmark's metrics need, then the metrics, written as one result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.boundary import private_umask, short_name
from mpu_cli.files.transaction import Transaction
from mpu_cli.measuring.benchmarks.base import Benchmark, Items, Split
from mpu_cli.measuring.encoding import Item, encoder_of
from mpu_cli.measuring.generation import Served, Shown, reading, remark_on_generation
from mpu_cli.measuring.metrics import (
    GRADIENTS,
    REFERENCE,
    SIDES,
    MetricResult,
    MetricTable,
    attack_key,
    gradient_norms,
    imported_metric,
)
from mpu_cli.measuring.results import Findings, Subject, digest_of, facts_of, read_findings
from mpu_cli.measuring.retain import FORMAT, RetainLog, read_retain_log
from mpu_cli.measuring.run import Run, load_subject, loaded_for
from mpu_cli.measuring.scoring import Advance, Scorer
from mpu_cli.model.device import device_of
from mpu_cli.model.load import limits_of, longest_input, releasing_memory
from mpu_cli.model.source import TOKENIZER_FILES, Model, open_model
from mpu_cli.model.staging import open_delta, remark_on_ties
from mpu_cli.model.tensors import check_bitsandbytes
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.evaluation import Measuring
from mpu_cli.plugins import extension, require
from mpu_cli.records.tokens import decode
from mpu_cli.wording import few

# The passes over a model that a benchmark's metrics need: what each finds, on which records, and how.

SCORED_PARTS = ("answer", "paraphrased", "perturbed")  # parts of a record that one pass scores


def before_key(count: int) -> str:
    """Key of the first ``count`` answers of a model without its delta."""
    return f"before:{count}"


def harness_key(tasks: Sequence[str]) -> str:
    """Key of the results of the harness's tasks."""
    return f"lm_eval:{','.join(tasks)}"


@dataclass(frozen=True)
class Pass:
    """A pass over the model: ``find`` returns the findings that ``keys`` name, from the records of ``splits``."""

    keys: tuple[str, ...]
    splits: tuple[Split, ...]
    find: Callable[[Run, Advance], Mapping[str, object]]
    what: str  # for the progress bar
    records: int  # of progress that ``find`` reports in all
    parts: tuple[str, ...] = ("answer",)  # of the records, encoded and checked before any pass
    with_delta: bool = True  # over the model with its delta, or without it
    alters: bool = False  # the model's weights

    def items(self, run: Run) -> dict[str, Items]:
        """The items of each part of its records, by the key of findings on it."""
        return {f"{split.name}.{part}": run.encoded_items(split, part) for split in self.splits for part in self.parts}


def passes_for(
    needs: Collection[str], benchmark: Benchmark, tasks: Sequence[str], shown_split: Split | None, show: int
) -> Iterator[Pass]:
    """The passes that find what ``needs`` names, in the order in which they are carried out.

    ``tasks`` are the harness's; ``shown_split`` is the split of which ``show`` answers are shown.
    """
    sides = tuple(benchmark.splits[name] for name in SIDES if name in benchmark.splits)
    if shown_split and before_key(show) in needs:
        find = partial(_before, shown_split, show)
        yield Pass((before_key(show),), (shown_split,), find, "answers before", show, with_delta=False)
    for split in benchmark.splits.values():
        rows = len(split.rows) if any(key.startswith(f"{split.name}.") for key in needs) else 0
        if parts := tuple(part for part in SCORED_PARTS if f"{split.name}.{part}" in needs):
            keys = tuple(f"{split.name}.{part}" for part in parts)
            find = partial(_score, split, parts, split in sides)
            yield Pass(keys, (split,), find, split.source, rows * len(parts), parts=parts)
        if f"{split.name}.text" in needs:
            yield Pass((f"{split.name}.text",), (split,), partial(_say, split), f"{split.source}, answers", rows)
    if GRADIENTS in needs and len(sides) == len(SIDES):
        yield Pass((GRADIENTS,), sides, partial(_gradients, sides), "gradients", sum(len(s.rows) for s in sides))
    if tasks:
        yield Pass((harness_key(tasks),), (), partial(_harness, tasks), "harness", 0)
    for name in benchmark.attacks:  # those that alter weights are the last of them
        if (key := attack_key(name)) in needs:
            attack = extension("attacks").ATTACKS[name]
            read = tuple(benchmark.splits[name] for name in attack.reads if name in benchmark.splits)
            find = partial(_run_attack, key, attack, read)
            yield Pass((key,), read, find, name, len(read[0].rows), alters=attack.alters)
    if REFERENCE in needs and len(sides) == len(SIDES):  # last, because it takes the model's place
        count = sum(len(split.rows) for split in sides)
        find = partial(_reference, sides)
        yield Pass((REFERENCE,), sides, find, "reference model", count, with_delta=False, alters=True)


def carry_out(
    todo: Sequence[Pass], subject: Subject, options: Measuring, findings: Findings, observer: Observer
) -> None:
    """Carry out passes in their order; findings are kept after each."""
    model, scored = subject.model, findings.facts["options"]["scored"]
    loaded, tokenizer = load_subject(subject, findings.facts)
    template = str(findings.facts["options"]["template"])
    if template == "chat" and not tokenizer.chat_template:
        raise MpuError("the model's tokenizer has no chat template", "use --reading template=plain")
    if not any(path.name in TOKENIZER_FILES for path in model.side_files) or not tokenizer("a b").input_ids:
        raise MpuError(f"{model.source}: no tokenizer found", "put its tokenizer files next to the weights")
    encoder = encoder_of(tokenizer, options.prompts, template, limits_of(loaded), scored)
    run = Run(subject, options, tokenizer=tokenizer, encoder=encoder, findings=findings, _model=loaded)
    del loaded  # or ``run.release()`` would free nothing
    if subject.adapter and (remark := remark_on_ties(run.model)):
        observer.warn(remark)
    observer.stage("evaluate", sum(pass_.records for pass_ in todo), "records")
    to_score: list[Item] = []
    for pass_ in todo:
        for key, items in pass_.items(run).items():
            check_ids(items, run.model, subject.model.source)
            if key in pass_.keys:
                to_score += _flat(items)
    splits = {id(split): split for pass_ in todo for split in pass_.splits}.values()
    for remark in run.encoder.encoding.remarks(sum(len(split.rows) for split in splits)):
        observer.warn(remark)
    asks = any(key.endswith(".text") for pass_ in todo for key in pass_.keys)
    if asks and not subject.endpoint and (remark := remark_on_generation(run.model)):
        observer.note(remark)
    if run.follows_suite and (hidden_token := token_hidden_by_the_suite(run, todo)) is not None:
        observer.note(
            f"OpenUnlearning's own numbers of this model differ: it hides {hidden_token!r} from the model wherever it "
            "stands, because it is also the padding (docs/measuring.md)"
        )
    run.reader.prepare(to_score)
    for pass_ in todo:
        if pass_.with_delta:
            run.add_delta()
        findings.keep(pass_.find(run, partial(observer.advance, detail=pass_.what)))
        if pass_.alters:
            run.release()


def token_hidden_by_the_suite(run: Run, todo: Sequence[Pass]) -> str | None:
    """The token that OpenUnlearning pads with (the end of the text if the tokenizer names none), or None if no prompt
    holds it. Its collator masks it everywhere, for instance the ends of turns of ChatML if these are the padding."""
    tokenizer = run.tokenizer
    token, number = tokenizer.pad_token, tokenizer.pad_token_id
    if number is None:
        token, number = tokenizer.eos_token, tokenizer.eos_token_id
    if number is None:
        return None
    for pass_ in todo:
        for items in pass_.items(run).values():
            # The first item stands for all: what holds the token is their template.
            for item in _flat(items)[:1]:
                if number in item.ids[: item.start]:
                    return token
    return None


def check_ids(items: Items, model: PreTrainedModel, source: str) -> None:
    """Raises MpuError, with the place, if ``model`` has no embedding for a token or an item is too long for it."""
    rows, longest = model.get_input_embeddings().weight.shape[0], longest_input(model)
    for item in _flat(items):
        if max(item.ids) >= rows:
            raise MpuError(
                f"{item.location}: {source} has {rows} tokens, but its tokenizer returned token id {max(item.ids)}"
            )
        if longest is not None and len(item.ids) > longest:
            raise MpuError(f"{item.location}: {len(item.ids)} tokens, but {source} reads at most {longest}")


def _flat(encoded: Items) -> list[Item]:
    return [*chain(*_item_groups(encoded))]


def _item_groups(encoded: Items) -> list[list[Item]]:
    return [items if isinstance(items, list) else [items] for items in encoded]


def _score(split: Split, parts: Sequence[str], moments: bool, run: Run, advance: Advance) -> dict[str, object]:
    """One pass over all ``parts`` of a split's records."""
    groups = {part: _item_groups(run.encoded_items(split, part)) for part in parts}
    flat = {part: _flat(groups[part]) for part in parts}
    answers = flat.get("answer", [])
    loss_items = [item for part in parts if part != "answer" for item in flat[part]]
    # Progress counts a record once for each part, however many wrong answers it has.
    share = len(parts) * len(split.rows) / (len(answers) + len(loss_items))
    scored = iter(
        run.reader.score(
            answers,
            loss_items=loss_items,
            batch_size=run.batch_size,
            moments=moments,
            advance=lambda n: advance(n * share),
        )
    )
    entries: dict[str, object] = {}
    for part in parts:
        scores = [[next(scored) for _ in group] for group in groups[part]]
        if part == "answer":
            texts = decode(run.tokenizer, [list(item.labels) for [item] in groups[part]])
            entries[f"{split.name}.answer"] = [
                reading(item, score, text) for [item], [score], text in zip(groups[part], scores, texts, strict=True)
            ]
        elif part == "paraphrased":
            entries[f"{split.name}.paraphrased"] = [score.loss for [score] in scores]
        else:
            entries[f"{split.name}.perturbed"] = [[score.loss for score in group] for group in scores]
    return entries


def _say(split: Split, run: Run, advance: Advance) -> dict[str, object]:
    """The model's answers, begun with the tokens that its scores on the true answers already show, if any."""
    items = run.encoded_items(split)
    readings = run.findings.entries.get(f"{split.name}.answer", [{}] * len(items))
    drafts = []
    for item, read in zip(items, readings, strict=True):
        # Where tokens merge across the boundary, the scored tokens do not continue the prompt for generation.
        follows_prompt = item.ids[: item.start] == item.prompt
        drafts.append(read.get("says", []) if follows_prompt else [])
    return {f"{split.name}.text": [asdict(answer) for answer in run.answers(split, items, drafts, advance)]}


def _before(split: Split, count: int, run: Run, advance: Advance) -> dict[str, object]:
    items = run.encoded_items(split)[:count]
    return {before_key(count): [asdict(answer) for answer in run.answers(split, items, [[]] * len(items), advance)]}


def _run_attack(key: str, attack: Any, splits: Sequence[Split], run: Run, advance: Advance) -> dict[str, object]:
    return {key: attack.find(run, splits, advance)}


def _gradients(sides: Sequence[Split], run: Run, advance: Advance) -> dict[str, object]:
    scores = [gradient_norms(run.model, run.encoded_items(split), advance) for split in sides]
    return {GRADIENTS: dict(zip(SIDES, scores, strict=True))}


def _harness(tasks: Sequence[str], run: Run, _: Advance) -> dict[str, object]:
    return {harness_key(tasks): extension("harness").run_tasks(run.model, run.tokenizer, list(tasks), run.batch_size)}


def _reference(sides: Sequence[Split], run: Run, advance: Advance) -> dict[str, object]:
    """Losses of the reference model, which takes the place of the measured one."""
    source = run.subject.reference
    assert source is not None
    items, vocabulary = [run.encoded_items(split) for split in sides], run.tokenizer.get_vocab()
    run.release()  # one model at a time
    other, its_tokenizer = loaded_for(source, run.findings.facts)
    if its_tokenizer.get_vocab() != vocabulary:
        raise MpuError(f"{source.source}: vocabulary differs from the model's", "use one with the same vocabulary")
    for side in items:
        check_ids(side, other, source.source)
    scorer, losses = Scorer(other, follows_suite=run.follows_suite), {}
    for name, side in zip(SIDES, items, strict=True):  # apart, as the model's: batches of other records round otherwise
        scored = scorer.score(side, loss_items=[], batch_size=run.batch_size, advance=advance)
        losses[name] = [score.loss for score in scored]
    return {REFERENCE: losses}


# Metrics that need whole distributions, gradients or a second model, which no endpoint gives.
UNSERVED_METRICS = ("mia_min_k_plus_plus", "mia_gradnorm", "mia_reference")
QUESTIONS = ("forget_knowmem", "forget")  # splits whose answers --show prints, if the benchmark asks them


@dataclass(frozen=True)
class Evaluation:
    """A measurement, in the file ``path``: ``forms``, each metric of the ``benchmark`` in OpenUnlearning's format, the
    retain model's ``log``, if there is one, and the answers that were asked for."""

    path: Path
    forms: dict[str, MetricResult]
    benchmark: str
    log: RetainLog | None = None
    shown: list[Shown] = field(default_factory=list)


def choose(benchmark: Benchmark, options: Measuring, served: bool = False) -> MetricTable:
    """The requested metrics (all available ones if none are), each preceded by the ones it depends on.

    Metrics of the benchmark's attacks are always among them. Of a model that is only ``served``, those that its
    endpoint allows; of one in 4 bits, those that take no gradients of its weights and leave them as they are.
    """
    names, with_reference = options.metrics, options.reference_model is not None
    table = dict(benchmark.metrics)
    in_4_bits = options.scoring.quantize is not None
    for name in benchmark.attacks:
        attack = extension("attacks").ATTACKS[name]
        if in_4_bits and attack.alters:
            raise UsageError(f"--attacks {name}: changes weights, which --scoring quantize keeps in 4 bits")
        if served and attack.weights:
            raise UsageError(f"--attacks {name}: needs the model's weights, which --endpoint does not give")
    for name, metric in benchmark.metrics.items():
        if in_4_bits and GRADIENTS in metric.needs:
            problem = "takes gradients of weights, which --scoring quantize keeps in 4 bits"
        elif served and name in UNSERVED_METRICS:
            problem = "cannot be computed from what --endpoint returns"
        else:
            continue
        if name in names:
            raise UsageError(f"--metrics {name}: {problem}")
        del table[name]
    table |= benchmark.attack_metrics
    if "forget_quality" in names and "forget_quality" not in table:
        raise UsageError("--metrics forget_quality: needs --retain-log with a result that has forget_truth_ratio")
    for name in names:
        if name not in table:
            metric = imported_metric(name, table, benchmark.splits)
            if unknown := [other for other in metric.dependencies if other not in table]:
                raise UsageError(f"--metrics {name}: computed from {unknown[0]}, which {benchmark.name} does not have")
            table[name] = metric
    for name in names:
        if REFERENCE in table[name].needs and not with_reference:
            raise UsageError(f"--metrics {name}: needs --reference-model")
    selected_names = set(names or table) | set(benchmark.attack_metrics)
    if not with_reference:
        selected_names.discard("mia_reference")
    while more := {part for name in selected_names for part in table[name].dependencies} - selected_names:
        selected_names |= more
    return {name: metric for name, metric in table.items() if name in selected_names}


@releasing_memory
@private_umask()  # results hold questions, answers and generations
def evaluate(
    model: Model,
    benchmark: Benchmark,
    options: Measuring,
    *,
    adapter: Path | None = None,
    delta: Path | None = None,
    show: int = 0,
    lm_eval: Sequence[str] = (),
    endpoint: Served | None = None,
    out: Path,
    texts: bool = True,
    force: bool = False,
    observer: Observer = SILENT,
) -> Evaluation:
    """Measure ``model`` and write the result to ``out``; an interrupted run resumes from ``.NAME.partial``.

    ``adapter`` is a folder with a peft adapter to add to ``model``; ``lm_eval`` are tasks of the harness to run beside
    it. With an ``endpoint``, the model that it serves is measured, with the tokenizer of ``model``. Without ``texts``
    the result has no questions, answers and generations.
    """
    reference = open_model(options.reference_model) if options.reference_model else None
    device_of(options.scoring.device)
    if endpoint and (adapter or delta or reference or lm_eval or benchmark.tasks):
        raise UsageError("--endpoint does not work with an adapter, --delta, --reference-model or harness tasks")
    if options.scoring.quantize:
        check_bitsandbytes()
        if endpoint or delta:
            raise UsageError("--scoring quantize does not work with --endpoint, or --delta, which changes weights")
    chosen = choose(benchmark, options, served=endpoint is not None)
    for metric in chosen.values():
        metric.check()
    needs = {key for metric in chosen.values() for key in metric.needs}
    lm_eval = (*benchmark.tasks, *lm_eval)
    asking = (split for name, split in benchmark.splits.items() if name in QUESTIONS and not split.has_texts)
    shown_split = next(asking, None)
    if show and shown_split:
        needs.add(f"{shown_split.name}.text")
        if delta:
            needs.add(before_key(show))
    if lm_eval:
        require("lm-eval", "--lm-eval")
        needs.add(harness_key(lm_eval))
    passes = list(passes_for(needs, benchmark, lm_eval, shown_split, show))
    if missing := needs - {key for pass_ in passes for key in pass_.keys}:  # of a metric of somebody else's
        raise UsageError(
            f"--metrics: {min(missing)!r} is needed, and cannot be measured on {benchmark.name}",
            f"its records are {few(list(benchmark.splits)) or 'those of the harness'}",
        )
    for warning in benchmark.warnings:
        observer.warn(warning)
    used = [split for split in benchmark.splits.values() if any(split in pass_.splits for pass_ in passes)]
    log = read_retain_log(options.retain_log) if options.retain_log else None
    started = time.monotonic()
    with Transaction(force=force) as transaction:
        output = transaction.add(out)
        subject = Subject(model, adapter, open_delta(model, delta) if delta else None, reference, endpoint)
        facts = facts_of(subject, benchmark, used, options)
        unfinished = out.with_name(f".{short_name(out.name)}.partial")
        splits_of_key = {key: [split.name for split in pass_.splits] for pass_ in passes for key in pass_.keys}
        findings = read_findings(unfinished, facts, splits_of_key)
        resumed = bool(findings.entries)
        if resumed:
            observer.note(f"resuming from {unfinished} (passes already done: {len(findings.entries)})")
        if todo := [pass_ for pass_ in passes if not findings.entries.keys() >= {*pass_.keys}]:
            carry_out(todo, subject, options, findings, observer)
        entries = findings.entries
        forms: dict[str, MetricResult] = {}
        for name, metric in chosen.items():
            forms[name] = metric.make(entries, forms)
        if lm_eval:
            forms |= entries[harness_key(lm_eval)]
        compared = None
        if log:  # with the retain model's own values, so that a table can say which result is nearest to it
            known = {name: value for name in forms if (value := log.value(name)) is not None}
            compared = {"path": str(log.path), "sha256": digest_of(log.path), "metrics": known}
        document = {
            **FORMAT,
            **facts,
            "retain_log": compared,
            "seconds": round(time.monotonic() - started, 3),
            "resumed": resumed,
            "metrics": forms if texts else {name: _without_texts(form) for name, form in forms.items()},
        }
        output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    unfinished.unlink(missing_ok=True)
    shown: list[Shown] = []
    if shown_split:
        answers = entries.get(f"{shown_split.name}.text", [])[:show]
        before = entries.get(before_key(show)) or [{"generation": None}] * len(answers)
        shown = [
            Shown(record.question, now["ground_truth"], then["generation"], now["generation"])
            for record, now, then in zip(shown_split.records, answers, before, strict=False)
        ]
    return Evaluation(out, forms, benchmark.name, log, shown)


def _without_texts(form: MetricResult) -> MetricResult:
    """``form`` without the texts in each record's entry."""
    if "value_by_index" not in form:
        return form
    entries = {}
    for index, entry in form["value_by_index"].items():
        entries[index] = {name: value for name, value in entry.items() if not isinstance(value, str)}
    return {**form, "value_by_index": entries}
