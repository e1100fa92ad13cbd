"""Unlearning on one copy: load it, train it on the private records, return the change in its weights."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.boundary.files import private_umask
from mpu_cli.checkpoint.dtypes import NAME, OPTION
from mpu_cli.checkpoint.fingerprint import fingerprint
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.checkpoint.reader import Checkpoint, read_json_object
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.checkpoint.writer import MAX_SHARD, CheckpointWriter, TensorSpecs, nbytes_of
from mpu_cli.client import lora
from mpu_cli.client.copycheck import Sign, against_others, against_public, refuse, traps
from mpu_cli.client.dataset import Dataset
from mpu_cli.client.frozen import Reference, freeze, load_references, save_references
from mpu_cli.client.ledger import Entry, Mechanism, composed, read_ledger, write_down, write_losses
from mpu_cli.client.losses import ALGORITHMS, Objective, objective_of
from mpu_cli.client.optimizers import ELEMENTWISE
from mpu_cli.client.precision import as_wide_as
from mpu_cli.client.private import check_objective, check_opacus, check_private, plan, train_privately
from mpu_cli.client.processes import from_first
from mpu_cli.client.tag import training_tag
from mpu_cli.client.training import (
    NO_LOGGING,
    ExampleSet,
    Losses,
    last_checkpoint,
    schedule,
    seeded,
    step_of,
    train,
    whole_parameters,
)
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.manifest import CopyManifest, DeltaManifest, as_metadata, delta_facts, read_copy_manifest
from mpu_cli.models.answers import Answers
from mpu_cli.models.device import device_of, tell_accelerate
from mpu_cli.models.loading import load, load_once_per_host, memory_in_mind, skeleton
from mpu_cli.models.memory import Names, is_trained, pieces_in_files
from mpu_cli.models.source import Model, open_model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.declare import check_ranges, declared, flat
from mpu_cli.options.unlearning import Checks, Logging, Lora, Privacy, Records, Training, Unlearning
from mpu_cli.records.dates import parse_date
from mpu_cli.records.encoding import Encoding, Example, no_template
from mpu_cli.records.reading import Record
from mpu_cli.resumption import write_atomically

ADVICE = (
    "lower --micro-batch-size, or use --gradient-checkpointing, --precision bfloat16, --optim adamw-blockwise or "
    "--lora-rank"
)
ROTATED = ("paper", "all")  # sets of symmetries that do more than permute coordinates and change their signs
MEASURED = 128  # records of a set whose loss is measured before and after: enough to tell what went wrong
HARDLY = 0.1  # rise of the forget loss, in nats per answer token, below which little was forgotten
RUINED = 1.0  # rise of the retain loss above which the model lost much of what it should keep
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Measured:
    """Mean losses per answer token of one model, on records to forget and on as many to keep (None: none read)."""

    forget: float
    retain: float | None


@dataclass(frozen=True)
class Result:
    """The result of ``unlearn``: the delta, the losses of the steps taken by this call, the norm of what was written.

    ``before`` and ``after`` are measured on the same records; None if several processes trained together.
    """

    path: Path
    steps: list[Losses]
    norm: float
    first: bool  # whether this is the process that wrote it
    spent: dict[str, float] | None = None  # of the privacy budget, if there was one
    before: Measured | None = None
    after: Measured | None = None
    rounding: float = 0.0  # ‖Δ as written − Δ‖ / ‖Δ‖
    earlier: int = 0  # trainings in the ledger before this one

    def warnings(self) -> list[str]:
        """What is probably wrong with the training, and what to change; empty if nothing is."""
        before, after = self.before, self.after
        if before is None or after is None:
            return []
        problems = []
        if after.forget - before.forget < HARDLY:
            problems.append(
                f"the records were hardly forgotten (loss per answer token {before.forget:.3f} → {after.forget:.3f}); "
                "raise --lr or --epochs, or lower --batch-size for more steps"
            )
        if before.retain is not None and after.retain is not None and after.retain - before.retain > RUINED:
            problems.append(
                "the model lost much of what it should keep (loss per answer token on the retain set "
                f"{before.retain:.3f} → {after.retain:.3f}); lower --lr or --epochs"
            )
        return problems


def epochs_of(options: Unlearning) -> int:
    """The epochs that were asked for, or the paper's for a round of the algorithm."""
    return ALGORITHMS[options.algo].epochs if options.epochs is None else options.epochs


def check_options(options: Unlearning) -> Objective:
    """The objective that ``options`` describe. Raises UsageError for options that do not go together or do not work
    here, and for a constant that the algorithm does not have."""
    check_ranges(options)
    objective = objective_of(options.algo, options.loss)
    check_training(options.training, options.prompts.date)
    if options.lora.lora_rank is None and options.lora != Lora():
        raise UsageError("--lora-alpha and --lora-targets need --lora-rank")
    if options.privacy.dp_epsilon is None and (options.privacy.dp_budget, options.privacy.dp_unit) != (None, None):
        raise UsageError("--dp-budget and --dp-unit need --dp-epsilon")
    if options.privacy.dp_epsilon is not None:
        check_objective(options.algo, objective)
        if options.training.warmup_steps or options.training.gradient_checkpointing:
            raise UsageError("--dp-epsilon does not work with --warmup-steps or --gradient-checkpointing")
    return objective


def refers_back(objective: Objective) -> bool:
    """Whether a loss compares with probabilities of the model before unlearning.

    Hidden states (rmu) are in the coordinates of their own copy, which change from round to round.
    """
    asked = {objective.algorithm.asks}
    if objective.constants.alpha:
        asked.add(objective.retain_asks)
    return bool(asked & {"log_probs", "logits"}) and not asked & {"hidden", "direction"}


def check_training(training: Training, date: str) -> None:
    """Raise UsageError or MpuError for what the device or the libraries cannot do here, before anything is loaded."""
    check_ranges(training)
    parse_date(date)
    device = device_of(training.device)
    tell_accelerate(device)
    if training.attention == "flash_attention_2":
        if training.precision != "bfloat16" or device.type != "cuda":
            raise UsageError("--attention flash_attention_2 requires --precision bfloat16 and a CUDA device")
        # Looked for here: transformers would fetch a kernel, which is code, from the Hub in its place.
        if find_spec("flash_attn") is None:
            raise MpuError("--attention flash_attention_2 needs flash-attn", "install it with pip install flash-attn")


def check_logging(logging: Logging, privacy: Privacy) -> None:
    """Raise UsageError for logs that would leak private records, MpuError for a library that is not installed."""
    check_ranges(logging)
    if privacy.dp_epsilon is not None and (logging.resume or logging.log or logging.report_to):
        raise UsageError("--dp-epsilon does not work with --resume, --log or --report-to")
    if (name := logging.report_to) and find_spec(name) is None:
        raise MpuError(f"--report-to {name} needs {name}", f"install it with pip install {name}")


def check_reference_file(path: Path, manifest: CopyManifest | None, options: Unlearning, objective: Objective) -> bool:
    """Whether the reference in ``path`` exists and is to be read. Raises UsageError if no loss would read it, MpuError
    if it is missing after round 1."""
    if not refers_back(objective):
        raise UsageError(
            f"--reference-file: {options.algo} with --retain-loss {objective.retain_loss} compares with no "
            "probabilities, or with hidden states, which are in a copy's own coordinates",
            "leave it out",
        )
    if not path.exists() and manifest and manifest.round > 1:
        raise MpuError(
            f"{path}: no such file, and this copy is of round {manifest.round}",
            f"give the file that copy {manifest.copy} of round 1 wrote, or leave out "
            "--reference-file to use this round's copy",
        )
    return path.exists()


def unlearn(
    copy: Model,
    data: Dataset,
    options: Unlearning,
    *,
    target: Path,
    force: bool = False,
    logging: Logging = NO_LOGGING,
    reference_file: Path | None = None,
    secret: Callable[[], bytes] | None = None,
    ledger: Path | None = None,
    checks: Checks | None = None,
    observer: Observer = SILENT,
) -> Result:
    """Unlearn ``data`` on ``copy`` and write its change to ``target``: of every weight, or the factors of LoRA.

    ``copy`` may be any causal model; the delta of one that is not a copy belongs to no run. ``reference_file`` keeps
    the reference model's probabilities from round 1 for later rounds. ``secret`` gives the client's secret, for the tag
    from which the server sees whether copies were trained alike. A training is written down in ``ledger`` before any
    record meets the model. With ``checks``, the model is looked at for signs that it was built to carry records out.
    Under ``accelerate launch`` every process calls this, and the first writes.
    Raises UsageError for options that do not go together; MpuError if the model or its tokenizer cannot be used, or
    training diverged.
    """
    objective = check_options(options)
    check_logging(logging, options.privacy)
    dtype = PRECISIONS[options.training.precision]
    load_once_per_host()
    # Without a GPU, "auto" means the CPU for the processes' communication, too.
    state = PartialState(cpu=device_of(options.training.device).type == "cpu")
    first = state.is_main_process
    if int(os.environ.get("WORLD_SIZE", "1")) != state.num_processes:
        raise MpuError(
            f"started as one of {os.environ['WORLD_SIZE']} processes, which cannot reach each other "
            f"({state.num_processes} here)",
            "start them with torchrun or accelerate launch",
        )
    if options.privacy.dp_epsilon is not None and (data.few_shot or state.num_processes > 1):
        raise UsageError("--dp-epsilon does not work with --few-shot or several processes")
    manifest = read_copy_manifest(copy.folder, copy.checkpoint.metadata)
    if manifest:  # a different order of the records in each round, the same for every copy of one
        seed = (options.training.seed + manifest.round - 1) % 2**32
        options = replace(options, training=replace(options.training, seed=seed))
    if manifest and manifest.symmetries in ROTATED and options.training.optim in ELEMENTWISE:
        observer.warn(
            f"{options.training.optim} scales each coordinate separately, but this copy's coordinates are rotated "
            f"(symmetries {manifest.symmetries}): the aggregate will be off even without noise. Use --optim "
            "adamw-blockwise, or ask the server for copies with --symmetries signed"
        )
    if both := {(r.turns, r.answer) for r in data.forget} & {(r.turns, r.answer) for r in data.retain}:
        observer.warn(
            f"{len(both)} of the records to forget are also in the retain set, which works against forgetting"
        )
    read_reference = reference_file is not None and check_reference_file(reference_file, manifest, options, objective)
    state.wait_for_everyone()  # all look for the reference file before the first one writes it
    with private_umask(), memory_in_mind(ADVICE), seeded(options.training), as_wide_as(dtype), ExitStack() as stack:
        # Find out before hours of training whether the delta can be written.
        transaction = stack.enter_context(Transaction(force=force))
        model, tokenizer = load(copy, dtype, options.training.device, options.training.attention)
        names = _names_in_files(model, copy.checkpoint, options.train_embeddings)
        low_rank = options.lora.lora_rank is not None
        specs = _delta_specs(names, model, options)
        if first:
            output = transaction.add(target, directory=nbytes_of(specs) > MAX_SHARD)

        alone = state.num_processes == 1  # a model that several processes share is not whole in any of them
        if alone:
            _check_finite(model, copy)
        _check_suits(model, tokenizer, data, options, objective)
        planned = None
        if options.privacy.dp_epsilon is not None:
            check_opacus()
            check_private(lora.adapted(model, options.lora) if low_rank else names)
            units = {name: [record.unit for record in held] for name, held in _read(data, objective).items()}
            planned = plan(units, options.training, options.privacy, epochs=epochs_of(options))
        earlier: Sequence[Entry] = ()
        entry = None
        weights = _weights_of(copy) if first and (ledger or logging.resume) else ""
        if first and ledger:  # before any record meets the model: what fails on one tells about it, too
            entry = _entry(copy, weights, manifest, options, data, planned.mechanism if planned else None)
            try:
                earlier = write_down(ledger, entry, delta=options.privacy.dp_delta, budget=options.privacy.dp_budget)
            except OSError as error:
                if options.privacy.dp_epsilon is not None:
                    raise MpuError(f"{ledger}: cannot be written: {error.strerror}, so no budget holds") from error
                observer.warn(f"{ledger}: {error.strerror}; this training is not in your ledger")
                entry = None
        encoded, kept = _encoded(model, tokenizer, data, options, objective, observer)
        tokens = _tokens_digest(encoded)
        tag = None
        if first and secret and manifest:
            try:
                tag = _tag(secret(), manifest, options, tokens, reference_file is not None)
            except OSError as error:
                observer.warn(
                    f"{error.filename}: {error.strerror}; the server cannot check that copies were trained identically"
                )
        signs: list[Sign] = []
        examples = [example for held, _ in encoded.values() for example in held]
        if checks and alone:
            observer.stage("check the copy", 1, "done")
            signs += traps(model, examples, observer)
        if checks and checks.like and first:
            signs += against_public(copy, tokenizer, open_model(checks.like), examples)
        sets = _example_sets(
            model, encoded, _References(reference_file, read_reference, manifest, tokens), options, objective, observer
        )
        steps = schedule(
            len(sets["forget"].examples),
            len(sets["retain"].examples) if "retain" in sets else 0,
            epochs=epochs_of(options),
            batch_size=options.training.batch_size,
            seed=options.training.seed,
        )
        checkpoints = target.with_name(f"{target.name}.resume") if logging.resume else None
        if checkpoints and first:
            _same_training(checkpoints, copy, weights, options, data, tokens, reference_file is not None)
        if checkpoints and (last := last_checkpoint(checkpoints)):
            observer.note(f"resuming after step {step_of(last)} of {len(steps)}")
        if low_rank:
            model = lora.wrap(model, options.lora)
        observer.stage("measure", 1, "done")
        before = _measure(model, sets, options) if alone else None
        if ledger and entry and before:
            write_losses(ledger, entry.identity, before.forget, before.retain)
            signs += against_others(entry, asdict(before), read_ledger(ledger)) if checks else []
        if checks:
            refuse(signs, copy.source, checks.trust_copy, observer)
        losses: list[Losses] = []
        observer.stage(f"unlearn {target.name.removesuffix('.safetensors')}", epochs_of(options), "epochs")

        def record(step: Losses, total: int) -> None:
            losses.append(step)
            kept = "" if step.retain_term is None else f" retain {step.retain_term:.3f}"
            observer.advance(epochs_of(options) / total, f"loss {step.loss:.3f} = forget {step.forget_term:.3f}{kept}")

        spent = None
        if planned:
            trained: torch.nn.Module = model
            planned = planned.of_examples(kept)
            spent = train_privately(model, sets, objective, options.training, options.privacy, planned, on_step=record)
            together = [*(each.mechanism for each in earlier), planned.mechanism]
            spent["epsilon_of_ledger"] = composed(together, options.privacy.dp_delta)
        else:
            trained = train(
                model, steps, sets, objective, options.training, logging=logging, checkpoints=checkpoints,
                on_step=record,
            )  # fmt: skip
        after = _measure(trained, sets, options) if alone else None
        change = lora.factors(trained, names) if low_rank else _changes(names, trained, copy.checkpoint, dtype)
        norm = lost = 0.0
        if first:
            delta = DeltaManifest(
                manifest, options.algo, "lora" if low_rank else "full", privacy=_bound(options.privacy), trained=tag
            )
            with CheckpointWriter(output, specs, as_metadata(delta_facts(delta))) as writer:
                norm, lost = _write(change, writer)
            if low_rank:
                norm = lora.product_norm(output)
        else:
            for _ in change:  # gathering a shard needs all processes
                pass
    if checkpoints and first:
        shutil.rmtree(checkpoints)
    return Result(target, losses, norm, first, spent, before, after, lost, len(earlier))


def _measure(model: PreTrainedModel, sets: Mapping[str, ExampleSet], options: Unlearning) -> Measured:
    """The mean losses of ``model`` on the first records of each set, MEASURED at most."""
    size = options.training.micro_batch_size or options.training.batch_size
    training = model.training
    model.eval()
    forget = sets["forget"].examples[:MEASURED]
    retain = sets["retain"].examples[: len(forget)] if "retain" in sets else None
    measured = Measured(Answers(forget, size).loss(model), Answers(retain, size).loss(model) if retain else None)
    model.train(training)
    return measured


def _bound(privacy: Privacy) -> dict[str, float] | None:
    """What the delta says of its privacy: the bound that was asked for, and no more. The exact figure, the sampling
    rate and the number of steps would tell the server how many records there are."""
    return None if privacy.dp_epsilon is None else {"epsilon": privacy.dp_epsilon, "delta": privacy.dp_delta}


# For each set, its examples and what its loss needs from the frozen copy.
_Encoded = dict[str, tuple[list[Example], str | None]]


def _check_suits(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Dataset, options: Unlearning, objective: Objective
) -> None:
    """Raises UsageError or MpuError for options that do not suit the model, whatever the records say."""
    depth, layer = model.config.get_text_config().num_hidden_layers, objective.constants.layer
    if (objective.algorithm.hidden or objective.retain_asks == "hidden") and layer >= depth - 1:
        raise UsageError(
            f"--layer {layer}: the model has {depth} layers, counted from 0, and the last one's output is "
            "only available after the final norm",
            "choose a lower one",
        )
    texts = [record.place for record in data.forget if not record.turns]
    if objective.algorithm.alternate and texts:
        raise UsageError(f"--algo {options.algo}: needs answers to compare, but {texts[0]} is a text")
    if options.prompts.template == "chat" and not tokenizer.chat_template:
        raise no_template()


def _read(data: Dataset, objective: Objective) -> dict[str, Sequence[Record]]:
    """The sets that the algorithm reads."""
    sets: dict[str, Sequence[Record]] = {"forget": data.forget}
    if objective.constants.alpha:
        sets["retain"] = data.retain
    if objective.algorithm.alternate:
        sets["alternate"] = alternates(data.forget, data.alternates)
    return sets


def _encoded(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Dataset,
    options: Unlearning,
    objective: Objective,
    observer: Observer,
) -> tuple[_Encoded, dict[str, list[int]]]:
    """The sets that the algorithm reads, as tokens, and the numbers of the records that have some.

    Those are all of them, except under DP-SGD: there, a record that the tokenizer or its template rejects is left out,
    because a failure would tell the model's owner that it is there.
    """
    algorithm = objective.algorithm
    limit = getattr(model.config, "max_position_embeddings", None)
    prompts = options.prompts
    encoding = Encoding(
        tokenizer, prompts.template, prompts.system_prompt, limit, data.few_shot, prompts.date, prompts.max_length
    )
    private = options.privacy.dp_epsilon is not None
    encoded: _Encoded = {}
    kept: dict[str, list[int]] = {}
    records = _read(data, objective)
    for name, held in records.items():
        of_each: list[list[Example]] = []
        kept[name] = []
        problems = []
        for number, examples in enumerate(encoding.encode_each(held)):
            if not isinstance(examples, MpuError):
                of_each.append(examples)
                kept[name].append(number)
            elif private:
                problems.append(examples.problem)
            else:
                raise examples
        if problems:
            observer.warn(f"{len(problems)} of {len(held)} records of the {name} set are left out: {problems[0]}")
        if not (together := [example for own in of_each for example in own]):
            raise MpuError(f"the {name} set has no record of two tokens or more, so there is nothing to learn from")
        if private and any(len(own) != 1 for own in of_each):
            raise UsageError("--dp-epsilon protects records that are one example each, but texts are split into pieces")
        asks = objective.retain_asks if name == "retain" else algorithm.asks
        encoded[name] = together, asks
    if cut := len(set(encoding.truncated)):
        total = sum(map(len, records.values()))
        observer.note(f"{cut} of {total} records were truncated to {prompts.max_length} tokens")
    return encoded, kept


def _tokens_digest(encoded: _Encoded) -> str:
    """SHA-256 of all tokens and labels, which depend on template, date and tokenizer. It stays with the client."""
    digest = hashlib.sha256()
    for name, (examples, _) in encoded.items():
        digest.update(json.dumps([name, [[e.ids, e.labels] for e in examples]]).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class _References:
    """Where the reference model's answers are kept (None: nowhere), whether they are read from there, and whose they
    are."""

    path: Path | None
    read: bool
    manifest: CopyManifest | None
    tokens: str

    def facts(self, asks: Mapping[str, str | None]) -> dict[str, object]:
        """What has to be the same when the file is read again; the copy itself only in round 1."""
        of = self.manifest
        facts: dict[str, object] = {"run": of.run if of else None, "copy": of.copy if of else None}
        facts |= {"tokens": self.tokens, "asks": dict(asks)}
        if not self.read or (of and of.round == 1):
            facts["copy_id"] = of.copy_id if of else None
        return facts


def _example_sets(
    model: PreTrainedModel,
    encoded: _Encoded,
    kept: _References,
    options: Unlearning,
    objective: Objective,
    observer: Observer,
) -> dict[str, ExampleSet]:
    """Each set with what the frozen copy says of it: ``model``, or round 1's if that was ``kept``."""
    asks = {name: asked for name, (_, asked) in encoded.items()}

    def ask() -> dict[str, Reference]:
        if kept.path and kept.read:
            held = load_references(kept.path, asks, kept.facts(asks))
            observer.note(f"the reference model's probabilities are read from {kept.path}")
            return held
        batch_size = options.training.micro_batch_size or options.training.batch_size
        layer, seed = objective.constants.layer, options.training.seed
        references = {
            name: freeze(model, examples, asked, layer=layer, batch_size=batch_size, seed=seed)
            for name, (examples, asked) in encoded.items()
        }
        if kept.path:
            save_references(kept.path, references, kept.facts(asks))
        return references

    references = from_first(ask)
    device = PartialState().device if PartialState().num_processes > 1 else model.device
    references = {name: reference.on(device) for name, reference in references.items()}
    for name, reference in references.items():
        if reference.states:
            observer.note(f"the frozen copy's {asks[name]} on the {name} set take {reference.nbytes:,} bytes")
    return {name: ExampleSet(examples, references[name]) for name, (examples, _) in encoded.items()}


def deciding(options: Unlearning) -> dict[str, object]:
    """The options that decide what is trained, however they were spelled: defaults resolved, groups that are off left
    out, and without records, which count by their contents."""
    values = flat(replace(options, epochs=epochs_of(options)))
    left_out = set(declared(Records))
    if options.lora.lora_rank is None:
        left_out |= declared(Lora).keys()
    else:
        values["lora_alpha"] = options.lora.alpha
    if options.privacy.dp_epsilon is None:
        left_out |= declared(Privacy).keys()
    known = declared(Unlearning)
    return {name: value for name, value in values.items() if known[name].affects_result and name not in left_out}


def _entry(
    copy: Model,
    weights: str,
    manifest: CopyManifest | None,
    options: Unlearning,
    data: Dataset,
    mechanism: Mechanism | None,
) -> Entry:
    """What the ledger keeps of a training on ``copy``, whose fingerprint is ``weights``."""
    small = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in copy.side_files}
    records = hashlib.sha256(json.dumps(_contents(data)).encode()).hexdigest()
    facts = [weights, copy.config, small, records, deciding(options)]
    of = (manifest.run, manifest.round, manifest.copy) if manifest else ("", 0, 0)
    return Entry(
        hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest(), *of, weights,
        options.algo, len(data.forget) + len(data.retain), mechanism=mechanism, data=records,
    )  # fmt: skip


def _weights_of(copy: Model) -> str:
    with worker_pool() as pool:
        return fingerprint(copy.checkpoint, pool)


def _contents(data: Dataset) -> list[dict[str, object]]:
    """The records, wherever they were read from."""
    return [asdict(record) | {"place": ""} for record in (*data.forget, *data.retain, *data.few_shot)]


def _check_finite(model: PreTrainedModel, copy: Model) -> None:
    """Raises MpuError for weights that are NaN or infinite: in the row of one token, they would tell whether a record
    has it."""
    for name, parameter in model.named_parameters():
        if parameter.numel() and not torch.stack(torch.aminmax(parameter.detach())).isfinite().all():
            raise MpuError(f"{copy.source}: {name!r} holds NaN or Inf", "ask its owner for a whole copy")


def _tag(
    secret: bytes, manifest: CopyManifest, options: Unlearning, tokens: str, with_reference_file: bool
) -> dict[str, str]:
    """The tag of this training run: equal for copies of a round that are trained identically."""
    decided = deciding(options) | {"reference_file": with_reference_file and manifest.round > 1}
    versions = {name: version(name) for name in ("torch", "transformers")}
    facts = {"tokens": tokens, "options": decided, "versions": versions}
    return training_tag(secret, manifest.run, manifest.round, facts)


def alternates(records: Sequence[Record], answers: Sequence[str]) -> list[Record]:
    """Each record with an alternative answer: its own ``alternate``, or one drawn from ``answers``.

    The draw is the same in every round, so that the outputs of the first round's copy can be the reference.
    """
    draw = random.Random(0)
    drawn = [draw.choice(answers) for _ in records]  # one per record, so that none depends on the others
    return [replace(r, answer=r.alternate or other) for r, other in zip(records, drawn, strict=True)]


def _names_in_files(model: PreTrainedModel, checkpoint: Checkpoint, embeddings: bool) -> Names:
    """The trained parameters: the model's name for each → its pieces in the copy's files. Others are frozen; without
    ``embeddings``, those of tokens and positions and the output head are, too.

    Raises MpuError if the files lack one or hold it in another shape.
    """
    names = {}
    head = model.get_output_embeddings()
    per_token = [module for module in model.modules() if isinstance(module, torch.nn.Embedding) or module is head]
    frozen = set() if embeddings else {id(parameter) for module in per_token for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        pieces = pieces_in_files(name, parameter.shape, set(checkpoint.tensors), model)
        if not pieces or any(checkpoint.tensors[piece.file_name].shape != piece.shape for piece in pieces):
            raise MpuError(
                f"{checkpoint.path}: transformers trains {name!r}, but these files have no such tensor of that shape"
            )
        if is_trained(pieces[0], model) and id(parameter) not in frozen:
            names[name] = pieces
        else:
            parameter.requires_grad_(False)
    return names


def delta_specs(copy: Model, options: Unlearning) -> TensorSpecs:
    """The tensors that a delta of ``copy``, trained in float32, will hold; no weight is read."""
    model = skeleton(copy)
    names = _names_in_files(model, copy.checkpoint, options.train_embeddings)
    return _delta_specs(names, model, options)


def _delta_specs(names: Names, model: PreTrainedModel, options: Unlearning) -> TensorSpecs:
    low_rank = options.lora.lora_rank is not None
    specs = lora.tensor_specs(names, options.lora, model) if low_rank else _full_specs(names, model)
    if options.delta_dtype is None:
        return specs
    return {name: (OPTION[options.delta_dtype], shape) for name, (_, shape) in specs.items()}


def _full_specs(names: Names, model: PreTrainedModel) -> TensorSpecs:
    wide = NAME[torch.promote_types(model.dtype, torch.float32)]
    return {piece.file_name: (wide, piece.shape) for pieces in names.values() for piece in pieces}


def _changes(
    names: Names, trained: torch.nn.Module, before: Checkpoint, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """after − before of every parameter, one at a time; ``before`` is read again from the copy's files."""
    wide = torch.promote_types(dtype, torch.float32)
    for name, parameter in whole_parameters(trained):
        for piece in names.get(name, ()):
            after = piece.of(parameter.detach()).cpu().to(wide)
            yield piece.file_name, after - before.tensor(piece.file_name).to(dtype).to(wide)
            before.forget_pages(piece.file_name)


def _write(changes: Iterator[tuple[str, torch.Tensor]], writer: CheckpointWriter) -> tuple[float, float]:
    """Write the tensors as they arrive; returns the norm over all of them, and how much of it rounding lost."""
    square = lost = 0.0
    for name, change in changes:
        part = math.fsum(float(piece.double().square().sum()) for piece in change.reshape(-1).split(1 << 20))
        if not math.isfinite(part):
            raise MpuError(f"training diverged: {name!r} is no longer finite", "lower --lr, or use fewer --epochs")
        square += part
        target = writer.tensor(name)
        target.copy_(change)
        if target.dtype != change.dtype:
            pieces = zip(target.reshape(-1).split(1 << 20), change.reshape(-1).split(1 << 20), strict=True)
            error = math.fsum(float((after.double() - before.double()).square().sum()) for after, before in pieces)
            if not math.isfinite(error):
                raise MpuError(f"{name!r}: the change overflows --delta-dtype", "use bfloat16 or float32")
            lost += error
        writer.forget_pages(name)
    return math.sqrt(square), math.sqrt(lost / square) if square else 0.0


def _same_training(
    folder: Path, copy: Model, weights: str, options: Unlearning, data: Dataset, tokens: str, with_reference_file: bool
) -> None:
    """Note what is trained with checkpoints in ``folder``; MpuError if those that are there are of something else."""
    decided = deciding(options) | {"reference_file": with_reference_file}
    decided["micro_batch_size"] = options.training.micro_batch_size  # the Trainer counts them in its checkpoints
    facts = [decided, weights, copy.checkpoint.metadata, _contents(data), tokens]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "mpu-resume.json"
    if note.exists():
        if read_json_object(note).get("sha256") != digest:
            raise MpuError(
                f"{folder}: holds checkpoints of a different copy, records or options", "remove it to start over"
            )
        return
    write_atomically(note, json.dumps({"sha256": digest}))
