"""The passes over a model that a benchmark's metrics need: what each finds, on which records, and how."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain

from transformers import PreTrainedModel

from mpu_cli.errors import MpuError
from mpu_cli.evaluation import relearning_attacks
from mpu_cli.evaluation.attack_metrics import attack_key
from mpu_cli.evaluation.benchmarks.base import SIDES, Benchmark, Split
from mpu_cli.evaluation.encoding import Item, TrainedEncoder, encoder_of
from mpu_cli.evaluation.findings import Findings
from mpu_cli.evaluation.harness import run_tasks
from mpu_cli.evaluation.membership import gradient_norms
from mpu_cli.evaluation.metrics import GRADIENTS, REFERENCE
from mpu_cli.evaluation.provenance import Subject
from mpu_cli.evaluation.readings import reading
from mpu_cli.evaluation.run import Advance, Run, load_subject, loaded_for
from mpu_cli.evaluation.scoring import Scorer
from mpu_cli.models.limits import longest_input
from mpu_cli.models.source import TOKENIZER_FILES
from mpu_cli.observer import Observer
from mpu_cli.options.evaluation import Measuring
from mpu_cli.records.tokens import decode

SCORED = ("answer", "paraphrased", "perturbed")  # parts of a record that one pass scores


def before_key(count: int) -> str:
    """Key of the first ``count`` answers of a model without its delta."""
    return f"before:{count}"


def harness_key(tasks: Sequence[str]) -> str:
    """Key of what tasks of the harness gave."""
    return f"lm_eval:{','.join(tasks)}"


@dataclass(frozen=True)
class Pass:
    """``find`` gives what ``keys`` name, from the records of ``splits``, and reports ``records`` of progress in all.

    ``parts``: of the records, encoded and checked before any pass. ``with_delta``: of the model with its delta;
    ``alters``: leaves other weights behind.
    """

    keys: tuple[str, ...]
    splits: tuple[Split, ...]
    find: Callable[[Run, Advance], Mapping[str, object]]
    what: str
    records: int
    parts: tuple[str, ...] = ("answer",)
    with_delta: bool = True
    alters: bool = False


def passes_for(
    needs: Collection[str], benchmark: Benchmark, tasks: Sequence[str], shown_split: Split | None, show: int
) -> list[Pass]:
    """The passes that find what ``needs`` names, in the order in which they are carried out.

    ``tasks`` are the harness's; ``shown_split`` is the split of which ``show`` answers are shown.
    """

    def needed_passes() -> Iterator[Pass]:
        if shown_split and before_key(show) in needs:
            yield Pass(
                (before_key(show),),
                (shown_split,),
                partial(_before, shown_split, show),
                "answers before",
                show,
                with_delta=False,
            )
        for split in benchmark.splits.values():
            rows = len(split.rows) if any(key.startswith(f"{split.name}.") for key in needs) else 0
            if parts := tuple(part for part in SCORED if f"{split.name}.{part}" in needs):
                keys = tuple(f"{split.name}.{part}" for part in parts)
                moments = split in sides
                find = partial(_score, split, parts, moments)
                yield Pass(keys, (split,), find, split.source, rows * len(parts), parts)
            if f"{split.name}.text" in needs:
                yield Pass((f"{split.name}.text",), (split,), partial(_say, split), f"{split.source}, answers", rows)
        if GRADIENTS in needs:
            yield Pass((GRADIENTS,), sides, partial(_gradients, sides), "gradients", sum(len(s.rows) for s in sides))
        if tasks:
            yield Pass((harness_key(tasks),), (), partial(_harness, tasks), "harness", 0)
        for name in benchmark.attacks:  # those that alter weights are the last of them
            if (key := attack_key(name)) in needs:
                attack = relearning_attacks.ATTACKS[name]
                read = tuple(benchmark.splits[each] for each in attack.reads if each in benchmark.splits)
                find = partial(_run_attack, key, attack, read)
                yield Pass((key,), read, find, name, len(read[0].rows), alters=attack.alters)
        if REFERENCE in needs:  # last, because it takes the model's place
            count = sum(len(split.rows) for split in sides)
            find = partial(_reference, sides)
            yield Pass((REFERENCE,), sides, find, "reference model", count, with_delta=False, alters=True)

    names = SIDES
    sides = tuple(benchmark.splits[name] for name in names if name in benchmark.splits)
    return list(needed_passes())


def carry_out(
    todo: Sequence[Pass], subject: Subject, options: Measuring, findings: Findings, observer: Observer
) -> None:
    """Carry out passes in their order; what they find is kept after each.

    Raises MpuError, before the first, for records that the model cannot read.
    """
    run = _open_run(subject, options, findings)
    observer.stage("evaluate", sum(each.records for each in todo), "records")
    for each in todo:
        for split in each.splits:
            for part in each.parts:
                check_ids(run.encoded_items(split, part), run.model, subject.model.source)
    if isinstance(run.encoder, TrainedEncoder):
        for remark in run.encoder.encoding.remarks(
            sum(len(s.rows) for s in {id(s): s for e in todo for s in e.splits}.values())
        ):
            observer.note(remark)
    elif is_masked_by_the_suite(run, todo):
        observer.note(
            f"OpenUnlearning's own numbers of this model differ: it hides {padding_of(run)[0]!r} from the model "
            "wherever it stands, because it is also the padding (docs/evaluation.md)"
        )
    scoring = [each for each in todo if {*each.keys} & {f"{s.name}.{part}" for s in each.splits for part in SCORED}]
    items = (run.encoded_items(split, part) for each in scoring for split in each.splits for part in each.parts)
    run.reader.prepare([*chain(*map(_flat, items))])
    for each in todo:
        if each.with_delta:
            run.add_delta()
        findings.keep(each.find(run, partial(_advance, observer, each.what)))
        if each.alters:
            run.release()


def padding_of(run: Run) -> tuple[str | None, int | None]:
    """The token that OpenUnlearning pads with, and its number: the end of the text, if the tokenizer names none."""
    tokenizer = run.tokenizer
    if tokenizer.pad_token_id is None:
        return tokenizer.eos_token, tokenizer.eos_token_id
    return tokenizer.pad_token, tokenizer.pad_token_id


def is_masked_by_the_suite(run: Run, todo: Sequence[Pass]) -> bool:
    """Whether prompts hold the token that is padded with: OpenUnlearning's collator masks it everywhere, for instance
    the ends of turns of ChatML if these are the padding."""
    _, pad = padding_of(run)
    parts = ((split, part) for each in todo for split in each.splits for part in each.parts)
    items = (item for split, part in parts for item in _flat(run.encoded_items(split, part))[:1])
    return pad is not None and any(pad in item.ids[: item.start] for item in items)


def _advance(observer: Observer, what: str, count: float) -> None:
    observer.advance(count, what)


def _open_run(subject: Subject, options: Measuring, findings: Findings) -> Run:
    model = subject.model
    loaded, tokenizer = load_subject(subject, findings.facts)
    template = str(findings.facts["options"]["template"])
    if template == "chat" and not tokenizer.chat_template:
        raise MpuError("the model's tokenizer has no chat template", "use --template plain")
    if not any(path.name in TOKENIZER_FILES for path in model.side_files) or not tokenizer("a b").input_ids:
        raise MpuError(f"{model.source}: no tokenizer found", "put its tokenizer files next to the weights")
    encoder = encoder_of(
        tokenizer, options.prompts, template, longest_input(loaded), findings.facts["options"]["scored"]
    )
    return Run(subject, options, tokenizer, encoder, findings, loaded)


def check_ids(items: Sequence[Item | list[Item]], model: PreTrainedModel, source: str) -> None:
    """Raises MpuError, with the place, if ``model`` has no embedding for a token or an item is too long for it."""
    rows, longest = model.get_input_embeddings().weight.shape[0], longest_input(model)
    for item in _flat(items):
        if max(item.ids) >= rows:
            raise MpuError(
                f"{item.location}: {source} has {rows} tokens, but its tokenizer returned token id {max(item.ids)}"
            )
        if longest is not None and len(item.ids) > longest:
            raise MpuError(f"{item.location}: {len(item.ids)} tokens, but {source} reads at most {longest}")


def _flat(encoded: Sequence[Item | list[Item]]) -> list[Item]:
    return [*chain(*_item_groups(encoded))]


def _item_groups(encoded: Sequence[Item | list[Item]]) -> list[list[Item]]:
    return [each if isinstance(each, list) else [each] for each in encoded]


def _score(split: Split, parts: Sequence[str], moments: bool, run: Run, advance: Advance) -> dict[str, object]:
    """One pass over all ``parts`` of a split's records."""
    groups = {part: _item_groups(run.encoded_items(split, part)) for part in parts}
    flat = {part: _flat(groups[part]) for part in parts}
    answers = flat.get("answer", [])
    loss_items = [item for part in parts if part != "answer" for item in flat[part]]
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
                reading(item, each, text) for [item], [each], text in zip(groups[part], scores, texts, strict=True)
            ]
        elif part == "paraphrased":
            entries[f"{split.name}.paraphrased"] = [each.loss for [each] in scores]
        else:
            entries[f"{split.name}.perturbed"] = [[each.loss for each in group] for group in scores]
    return entries


def _say(split: Split, run: Run, advance: Advance) -> dict[str, object]:
    """The model's answers, started from what its scores on the true answers already show, if there are any."""
    items = run.encoded_items(split)
    readings = run.findings.entries.get(f"{split.name}.answer", [{}] * len(items))
    drafts = [
        read.get("says", []) if item.ids[: item.start] == item.prompt else []  # tokens may merge across the boundary
        for item, read in zip(items, readings, strict=True)
    ]
    return {f"{split.name}.text": _answers(split, items, drafts, run, advance)}


def _before(split: Split, count: int, run: Run, advance: Advance) -> dict[str, object]:
    items = run.encoded_items(split)[:count]
    return {before_key(count): _answers(split, items, [[]] * len(items), run, advance)}


def _answers(
    split: Split, items: list[Item], drafts: list[list[int]], run: Run, advance: Advance
) -> list[dict[str, str]]:
    answers = run.reader.answer(
        run.tokenizer, items, drafts, limit=run.answer_limit(split, items), stops=split.stops,
        batch_size=run.batch_size, longest=run.encoder.max_length, advance=advance,
    )  # fmt: skip
    return [asdict(each) for each in answers]


def _run_attack(
    key: str, attack: relearning_attacks.RelearningAttack, splits: Sequence[Split], run: Run, advance: Advance
) -> dict[str, object]:
    return {key: attack.find(run, splits, advance)}


def _gradients(sides: Sequence[Split], run: Run, advance: Advance) -> dict[str, object]:
    scores = [gradient_norms(run.model, run.encoded_items(split), advance) for split in sides]
    return {GRADIENTS: dict(zip(SIDES, scores, strict=True))}


def _harness(tasks: Sequence[str], run: Run, _: Advance) -> dict[str, object]:
    return {harness_key(tasks): run_tasks(run.model, run.tokenizer, list(tasks), run.batch_size)}


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
    scorer, losses = Scorer(other), {}
    for name, side in zip(SIDES, items, strict=True):  # apart, as the model's: batches of other records round otherwise
        scored = scorer.score(side, loss_items=[], batch_size=run.batch_size, advance=advance)
        losses[name] = [each.loss for each in scored]
    return {REFERENCE: losses}
