"""Unlearning on one copy: load it, train it on the private records, give back the change of its weights."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.checkpoint.dtypes import NAME
from mpu_cli.checkpoint.fingerprint import fingerprint
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.checkpoint.reader import Checkpoint, read_json_object
from mpu_cli.checkpoint.source import Model
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.checkpoint.writer import MAX_SHARD, CheckpointWriter, Plan, plan_bytes
from mpu_cli.client import lora
from mpu_cli.client.data import DEFAULT_SYSTEM_PROMPT, Encoding, Example
from mpu_cli.client.dates import DEFAULT_DATE, parse_date
from mpu_cli.client.frozen import Reference, freeze, load_references, save_references
from mpu_cli.client.loading import as_directory, load, memory_in_mind
from mpu_cli.client.losses import ALGORITHMS, RETAIN, Settings
from mpu_cli.client.optimizers import ELEMENTWISE
from mpu_cli.client.precision import as_wide_as
from mpu_cli.client.private import Privacy, train_privately
from mpu_cli.client.private import check as check_private_algorithm
from mpu_cli.client.records import Record
from mpu_cli.client.refusals import REFUSALS
from mpu_cli.client.tag import training_tag
from mpu_cli.client.training import ExampleSet, Loop, Losses, schedule, seeded, train, whole_parameters
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.manifest import CopyManifest, DeltaManifest, as_metadata, delta_facts, read_copy_manifest

ADVICE = (
    "lower --micro-batch-size, or use --gradient-checkpointing, --precision bfloat16, --optim adamw-blockwise or "
    "--lora-rank"
)
ROTATED = ("paper", "all")  # sets of symmetries whose coordinates are turned by more than signs
WITHOUT_EFFECT = (  # on what is trained, but for the last bits
    "micro_batch_size", "gradient_checkpointing", "deterministic", "log", "report_to", "resume", "checkpoint_steps",
)  # fmt: skip
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Options:
    """How to unlearn; the names and defaults are those of the command line."""

    algorithm: str
    epochs: int | None = None
    constants: dict[str, float] = field(default_factory=dict)  # entries of Settings that are not the algorithm's own
    retain_loss: str | None = None
    precision: str = "float32"
    attention: str = "sdpa"
    template: str = "chat"
    system_prompt: str = DEFAULT_SYSTEM_PROMPT
    date: str = DEFAULT_DATE
    reference_file: Path | None = None  # where the word of the model before unlearning is kept over the rounds
    few_shot: tuple[Record, ...] = ()
    alternates: tuple[str, ...] = REFUSALS
    lora: lora.Lora | None = None
    device: str = "auto"
    privacy: Privacy | None = None
    loop: Loop = field(default_factory=Loop)

    @property
    def retain_term(self) -> str:
        """The name of the retain term: the one that was given, or the algorithm's own."""
        return self.retain_loss or ALGORITHMS[self.algorithm].retain

    @property
    def settings(self) -> Settings:
        """The algorithm's constants, with those that were given in their place."""
        return replace(ALGORITHMS[self.algorithm].settings, **self.constants)


@dataclass(frozen=True)
class Result:
    """What ``unlearn`` made: the delta, the losses of the steps that this call took, the norm of what was written."""

    path: Path
    steps: list[Losses]
    norm: float
    first: bool  # whether this is the process that wrote it
    spent: dict[str, float] | None = None  # of the privacy budget, if there was one


def check_options(options: Options) -> None:
    """Raise UsageError for a number that is none or out of range, or a constant that the algorithm does not have."""
    known = {"gamma", "alpha", *ALGORITHMS[options.algorithm].constants}
    if RETAIN[options.retain_term][1] == "hidden":
        known.add("layer")
    if unknown := [name for name in options.constants if name not in known]:
        listed = ", ".join(f"--{name}" for name in sorted(known))
        raise UsageError(f"--{unknown[0]}: {options.algorithm} has no such constant (it has {listed})")
    _check_numbers(asdict(options.settings))
    if options.lora:
        _check_numbers({"lora_rank": options.lora.rank, "lora_alpha": options.lora.alpha})
    check_loop(options.loop, options.epochs, options.device)
    parse_date(options.date)
    if options.reference_file and not refers_back(options):
        raise UsageError(
            f"--reference-file: {options.algorithm} with --retain-loss {options.retain_term} compares with no "
            "probabilities, or with hidden states, which are in a copy's own coordinates; leave it out"
        )
    _check_libraries(options)
    if options.privacy:
        _check_privacy(options)


def refers_back(options: Options) -> bool:
    """Whether a loss compares with probabilities of the model before unlearning.

    Hidden states (rmu) are in the coordinates of their own copy, which change from round to round.
    """
    asked = {ALGORITHMS[options.algorithm].asks}
    if options.settings.alpha:
        asked.add(RETAIN[options.retain_term][1])
    return bool(asked & {"log_probs", "logits"}) and not asked & {"hidden", "direction"}


def check_loop(loop: Loop, epochs: int | None, device: str) -> None:
    """Raise UsageError for numbers that make no training, or a device that is not there."""
    _check_numbers({**asdict(loop), "epochs": epochs})
    if not 0 <= loop.seed < 2**32:
        raise UsageError(f"--seed {loop.seed}: must be 0 or more, and below 2³²")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu")


def _check_libraries(options: Options) -> None:
    """Raise UsageError or MpuError for what libraries cannot do here, before anything large is loaded."""
    if options.attention == "flash_attention_2":
        if options.precision != "bfloat16" or options.device == "cpu" or not torch.cuda.is_available():
            raise UsageError("--attention flash_attention_2: works in --precision bfloat16 on a CUDA device")
        # Looked for here: transformers would take a kernel, which is code, from the Hub in its place.
        if find_spec("flash_attn") is None:
            raise MpuError("--attention flash_attention_2 needs flash-attn; install it with pip install flash-attn")
    if (name := options.loop.report_to) and find_spec(name) is None:
        raise MpuError(f"--report-to {name} needs {name}; install it with pip install {name}")


def _check_numbers(numbers: Mapping[str, object]) -> None:
    positive = {"beta", "epochs", "batch_size", "micro_batch_size", "checkpoint_steps", "lora_rank", "lora_alpha"}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value) or (value <= 0 if name in positive else value < 0 and name != "delta"):
            least = "above 0" if name in positive else "0 or more"
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be a finite number, {least}")


def _check_privacy(options: Options) -> None:
    check_private_algorithm(options.algorithm, options.retain_term)
    p = options.privacy
    if not (math.isfinite(p.epsilon) and p.epsilon > 0 and 0 < p.delta < 1):
        raise UsageError(f"--dp-epsilon {p.epsilon} --dp-delta {p.delta}: ε must be above 0, δ between 0 and 1")
    if not (math.isfinite(p.max_grad_norm) and p.max_grad_norm > 0):
        raise UsageError(f"--dp-max-grad-norm {p.max_grad_norm}: must be a finite number above 0")
    loop = options.loop
    if (
        loop.resume
        or loop.log
        or loop.report_to
        or loop.warmup_steps
        or loop.gradient_checkpointing
        or options.few_shot
    ):
        raise UsageError(
            "--dp-epsilon goes with none of --resume, --log, --report-to, --warmup-steps, --gradient-checkpointing and "
            "--few-shot"
        )


def unlearn(
    copy: Model,
    forget: Sequence[Record],
    retain: Sequence[Record],
    options: Options,
    *,
    target: Path,
    force: bool,
    on_step: Callable[[Losses, int], None],
    tell: Callable[[str], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
    secret: Callable[[], bytes] | None = None,
) -> Result:
    """Unlearn ``forget`` on ``copy`` and write its change to ``target``: of every weight, or the factors of LoRA.

    ``copy`` may be any causal model; the delta of one that is no copy belongs to no run. ``retain`` may be empty
    if the algorithm reads none. ``on_step`` is told the losses of each step and how many steps there are, ``tell`` what
    is worth knowing, ``warn`` what is likely not as it was meant. ``secret`` gives the client's own, for the tag by
    which the server sees that copies were trained alike. Under ``accelerate launch`` every process calls this, and the
    first writes.
    Raises MpuError if the model or its tokenizer cannot be used, or training diverged.
    """
    check_options(options)
    algorithm, settings = ALGORITHMS[options.algorithm], options.settings
    dtype = PRECISIONS[options.precision]
    # Where there is no GPU, "auto" is the CPU for the processes' meeting, too.
    state = PartialState(cpu=options.device == "cpu" or not torch.cuda.is_available())
    first = state.is_main_process
    if int(os.environ.get("WORLD_SIZE", "1")) != state.num_processes:
        raise MpuError(
            f"started as one of {os.environ['WORLD_SIZE']} processes, which do not find each other "
            f"({state.num_processes} here); start them with torchrun or accelerate launch"
        )
    manifest = read_copy_manifest(copy.folder, copy.checkpoint.metadata)
    if manifest and manifest.symmetries in ROTATED and options.loop.optimizer in ELEMENTWISE:
        warn(
            f"{options.loop.optimizer} scales each coordinate by itself, and this copy's coordinates are rotated "
            f"(symmetries {manifest.symmetries}): the aggregate will be off even without noise. Use --optim "
            "adamw-blockwise, or ask the server for copies with --symmetries signed"
        )
    keeping = options.reference_file
    kept = keeping is not None and keeping.exists()
    if keeping and not kept and manifest and manifest.round > 1:
        raise MpuError(
            f"{keeping}: no such file; it is written when copy {manifest.copy} of round 1 is unlearned on, with this "
            "option. Without the option, this round's copy is the reference"
        )
    state.wait_for_everyone()  # all look before the first one writes
    with memory_in_mind(ADVICE), seeded(options.loop), as_wide_as(dtype), ExitStack() as stack:
        # A delta that cannot be written should be known before hours of training.
        transaction = stack.enter_context(Transaction(force=force))
        folder = stack.enter_context(as_directory(copy))
        model, tokenizer = load(folder, dtype, options.device, options.attention)
        names = _names_in_files(model, copy.checkpoint)
        plan = lora.plan(names, options.lora, model) if options.lora else _full_plan(names, model)
        if first:
            output = transaction.add(target, directory=plan_bytes(plan) > MAX_SHARD)

        encoded = _encoded(model, tokenizer, forget, retain, options)
        tokens = _tokens_digest(encoded)
        tag = None
        if first and secret and manifest:
            try:
                tag = _tag(secret(), manifest, options, tokens)
            except OSError as error:
                warn(f"{error.filename}: {error.strerror}; the server will not see whether copies were trained alike")
        sets = _example_sets(model, encoded, options, manifest, tokens, tell, kept=kept)
        steps = schedule(
            len(sets["forget"].examples),
            len(sets["retain"].examples) if "retain" in sets else 0,
            epochs=options.epochs or algorithm.epochs,
            batch_size=options.loop.batch_size,
            seed=options.loop.seed,
        )
        if options.loop.resume and first:
            _same_run(options.loop.resume, copy, options, forget, retain, tokens)
        if options.lora:
            model = lora.wrap(model, options.lora)
        losses: list[Losses] = []

        def record(step: Losses, total: int) -> None:
            losses.append(step)
            on_step(step, total)

        shared = {
            "algorithm": algorithm,
            "settings": settings,
            "retain_loss": options.retain_term,
            "loop": options.loop,
        }
        spent = None
        if options.privacy:
            if PartialState().num_processes > 1:
                raise UsageError("--dp-epsilon runs in one process")
            epochs = options.epochs or algorithm.epochs
            spent = train_privately(model, sets, epochs=epochs, privacy=options.privacy, on_step=record, **shared)
            trained = model
        else:
            trained = train(model, steps, sets, on_step=record, **shared)
        change = lora.factors(trained, names) if options.lora else _changes(names, trained, copy.checkpoint, dtype)
        kind = "lora" if options.lora else "full"
        norm = 0.0
        if first:
            # The bound that was asked for, and no more: the exact figure, the sampling rate and the number of steps
            # would tell the server how many records there are.
            bound = {"epsilon": options.privacy.epsilon, "delta": options.privacy.delta} if options.privacy else None
            facts = delta_facts(DeltaManifest(manifest, options.algorithm, kind, privacy=bound, trained=tag))
            with CheckpointWriter(output, plan, as_metadata(facts)) as writer:
                norm = _write(change, writer)
            if options.lora:
                norm = lora.product_norm(output)
        else:
            for _ in change:  # a shard is gathered by all processes together
                pass
    if options.loop.resume and first:
        shutil.rmtree(options.loop.resume)
    return Result(target, losses, norm, first, spent)


# A set as tokens, and what of the frozen copy its loss asks for.
_Encoded = dict[str, tuple[list[Example], str | None]]


def _encoded(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[Record],
    retain: Sequence[Record],
    options: Options,
) -> _Encoded:
    """The sets that the algorithm reads, as tokens."""
    algorithm, settings = ALGORITHMS[options.algorithm], options.settings
    retain_asks = RETAIN[options.retain_term][1]
    depth = model.config.get_text_config().num_hidden_layers
    if (algorithm.hidden or retain_asks == "hidden") and settings.layer >= depth - 1:
        raise UsageError(
            f"--layer {settings.layer}: the model has {depth} layers, counted from 0, and what the last one gives is "
            "not seen before the final norm; choose a lower one"
        )
    records = {"forget": (forget, algorithm.asks)}
    if settings.alpha:
        records["retain"] = (retain, retain_asks)
    if algorithm.alternate:
        if texts := [record.place for record in forget if not record.turns]:
            raise UsageError(f"--algo {options.algorithm}: prefers one answer to another, and {texts[0]} is a text")
        records["alternate"] = (alternates(forget, options.alternates), algorithm.asks)
    limit = getattr(model.config, "max_position_embeddings", None)
    encoding = Encoding(tokenizer, options.template, options.system_prompt, limit, options.few_shot, options.date)
    encoded: _Encoded = {}
    for name, (held, asks) in records.items():
        of_each = [encoding.encode([record]) for record in held]
        examples = [example for made in of_each for example in made]
        if not examples:
            raise MpuError(f"the {name} set has no record of two tokens or more; there is nothing to learn from it")
        if options.privacy and any(len(made) != 1 for made in of_each):
            raise UsageError("--dp-epsilon protects records that are one example each, and texts are cut in pieces")
        encoded[name] = examples, asks
    return encoded


def _tokens_digest(encoded: _Encoded) -> str:
    """SHA-256 of all tokens and labels, which depend on template, date and tokenizer. It stays with the client."""
    digest = hashlib.sha256()
    for name, (examples, _) in encoded.items():
        digest.update(json.dumps([name, [[e.ids, e.labels] for e in examples]]).encode())
    return digest.hexdigest()


def _example_sets(
    model: PreTrainedModel,
    encoded: _Encoded,
    options: Options,
    manifest: CopyManifest | None,
    tokens: str,
    tell: Callable[[str], None],
    *,
    kept: bool,
) -> dict[str, ExampleSet]:
    """Each set with what the frozen copy says of it: ``model``, or round 1's if the reference file was ``kept``."""
    asks = {name: asked for name, (_, asked) in encoded.items()}
    facts = {"run": manifest.run if manifest else None, "copy": manifest.copy if manifest else None}
    facts |= {"tokens": tokens, "asks": asks}
    if not kept or (manifest and manifest.round == 1):
        facts["copy_id"] = manifest.copy_id if manifest else None
    references: dict[str, Reference] = {}
    if kept:
        references = load_references(options.reference_file, asks, facts, model.device)
        tell(f"the reference model's word is read from {options.reference_file}")
    else:
        batch_size = options.loop.micro_batch_size or options.loop.batch_size
        for name, (examples, asked) in encoded.items():
            references[name] = freeze(
                model, examples, asked, layer=options.settings.layer, batch_size=batch_size, seed=options.loop.seed
            )
        if options.reference_file and PartialState().is_main_process:
            save_references(options.reference_file, references, facts)
    for name, reference in references.items():
        if reference.states:
            tell(f"the frozen copy's {asks[name]} on the {name} set take {reference.nbytes:,} bytes")
    return {name: ExampleSet(examples, references[name]) for name, (examples, _) in encoded.items()}


def _tag(secret: bytes, manifest: CopyManifest, options: Options, tokens: str) -> dict[str, str]:
    """The tag of this training: equal for copies of a round that are trained alike."""
    epochs = options.epochs or ALGORITHMS[options.algorithm].epochs
    told = asdict(replace(options, few_shot=(), alternates=(), epochs=epochs))  # of the former the tokens count
    del told["device"]
    told["reference_file"] = options.reference_file is not None and manifest.round > 1
    loop = {name: value for name, value in told.pop("loop").items() if name not in WITHOUT_EFFECT}
    versions = {name: version(name) for name in ("torch", "transformers")}
    return training_tag(
        secret, manifest.run, manifest.round, {"tokens": tokens, "options": [told, loop], "versions": versions}
    )


def alternates(records: Sequence[Record], answers: Sequence[str]) -> list[Record]:
    """Each record with another answer: its own ``alternate``, or one drawn from ``answers``.

    The draw is the same in every round, so that the reference can be what the first round's copy said of it.
    """
    draw = random.Random(0)
    drawn = [draw.choice(answers) for _ in records]  # one for each, so that a record's does not depend on the others
    return [replace(r, answer=r.alternate or other) for r, other in zip(records, drawn, strict=True)]


def _names_in_files(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, str]:
    """The trained parameters: the model's name for each → the name that the copy's files use."""
    prefix = model.base_model_prefix + "."
    names = {}
    for name, parameter in model.named_parameters():
        match = name if name in checkpoint.tensors else name.removeprefix(prefix)
        if match not in checkpoint.tensors or checkpoint.tensors[match].shape != tuple(parameter.shape):
            raise MpuError(f"{checkpoint.path}: transformers trains {name!r}, which these files do not hold as it is")
        names[name] = match
    return names


def _full_plan(names: dict[str, str], model: PreTrainedModel) -> Plan:
    wide = NAME[torch.promote_types(model.dtype, torch.float32)]
    return {names[name]: (wide, tuple(p.shape)) for name, p in model.named_parameters()}


def _changes(
    names: dict[str, str], trained: torch.nn.Module, before: Checkpoint, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """after − before of every parameter, one at a time; ``before`` is read from the copy's files again."""
    wide = torch.promote_types(dtype, torch.float32)
    for name, parameter in whole_parameters(trained):
        after = parameter.detach().cpu().to(wide)
        yield names[name], after - before.tensor(names[name]).to(dtype).to(wide)
        before.forget_pages(names[name])


def _write(changes: Iterator[tuple[str, torch.Tensor]], writer: CheckpointWriter) -> float:
    """Write the tensors as they come; returns the norm of them all."""
    square = 0.0
    for name, change in changes:
        part = math.fsum(float(piece.double().square().sum()) for piece in change.reshape(-1).split(1 << 20))
        if not math.isfinite(part):
            raise MpuError(f"training diverged: {name!r} is no longer finite; lower --lr, or use fewer --epochs")
        square += part
        writer.tensor(name).copy_(change)
        writer.forget_pages(name)
    return math.sqrt(square)


def _same_run(
    folder: Path, copy: Model, options: Options, forget: Sequence[Record], retain: Sequence[Record], tokens: str
) -> None:
    """Write down what is trained here; MpuError if the checkpoints in ``folder`` are of something else."""
    said = asdict(replace(options, loop=replace(options.loop, resume=None, log=None, report_to=None)))
    with worker_pool() as pool:
        weights = fingerprint(copy.checkpoint, pool)
    facts = [said, weights, copy.checkpoint.metadata, [asdict(r) | {"place": ""} for r in (*forget, *retain)]]
    facts.append(tokens)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "mpu-resume.json"
    if note.exists():
        if read_json_object(note).get("sha256") != digest:
            raise MpuError(f"{folder}: holds checkpoints of another copy, records or options; remove it to start anew")
        return
    fresh = note.with_name(f"{note.name}.new")  # never half a note, whenever this is killed
    fresh.write_text(json.dumps({"sha256": digest}))
    os.replace(fresh, note)
