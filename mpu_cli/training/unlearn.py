"""Unlearning on one copy: load it, train it on the private records, return the change in its weights."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from mpu_cli.errors import Diverged, MpuError
from mpu_cli.files.boundary import private_folder, private_umask, read_json_object
from mpu_cli.files.manifest import DeltaManifest, as_metadata, delta_facts, name_of_copy
from mpu_cli.files.reader import LOST_TO_ROUNDING, fingerprint, open_checkpoint
from mpu_cli.files.resumption import write_atomically
from mpu_cli.files.transaction import Transaction
from mpu_cli.files.writer import CheckpointWriter
from mpu_cli.model.device import memory_in_mind
from mpu_cli.model.load import letting_go, load, vocabulary_size
from mpu_cli.model.network import Answers
from mpu_cli.model.source import Model, open_model
from mpu_cli.model.tensors import in_memory
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.declare import flat
from mpu_cli.options.unlearning import Checks, Logging, Training, Unlearning
from mpu_cli.plugins import extension
from mpu_cli.records.encode import Example
from mpu_cli.training.copycheck import against_others, against_public, refuse, traps
from mpu_cli.training.data import Dataset, Encoded, encoded_sets, records_digest
from mpu_cli.training.delta import training_tag, write_changes
from mpu_cli.training.execution import Checkpoints, computing_in, from_first, step_of
from mpu_cli.training.job import (
    PRECISIONS,
    LoadedCopy,
    TrainingJob,
    decisive_options,
    digest_of_training,
    entry_of,
    epochs_of,
    load_copy,
    prepare_job,
    without_numbers,
)
from mpu_cli.training.ledger import (
    LedgerEntry,
    RoundSchedule,
    own_client_secret,
    read_ledger,
    schedule_of_round,
    write_down,
    write_losses,
    write_round_schedule,
)
from mpu_cli.training.loop import NO_LOGGING, ExampleSet, Losses, TrainingStep, schedule, seed_training, train
from mpu_cli.training.losses import ALGORITHMS
from mpu_cli.training.rates import scored_at_once, with_rate
from mpu_cli.training.reference import Reference, freeze, load_references, save_references
from mpu_cli.training.requests import Continuation
from mpu_cli.training.stopping import EarlyStopping, Scorer, StepScores, StoppingRule, pulling_level, spread
from mpu_cli.wording import counted

# What a training did: its losses before and after, and what they say.

MIN_FORGET_RISE = 0.1  # rise of the forget loss, in nats per answer token, below which little was forgotten
MAX_KNOWN_LOSS = 3.0  # forget loss before training above which a model hardly knew the records
MAX_RETAIN_RISE = 1.0  # rise of the retain loss above which the model lost much of what it should keep


@dataclass(frozen=True)
class Measured:
    """Mean losses per answer token of one model, on records to forget and on as many to keep (None: none read)."""

    forget: float
    retain: float | None


@dataclass(frozen=True)
class UnlearningResult:
    """The result of ``unlearn``: the delta, the losses of the steps taken by this call, the norm of what was written.

    ``before`` and ``after`` are measured on the same records; None if several processes trained together.
    """

    path: Path
    steps: list[Losses]
    norm: float
    is_main_process: bool  # whether this is the process that wrote it
    spent: dict[str, float] | None = None  # of the privacy budget, if there was one
    before: Measured | None = None
    after: Measured | None = None
    rounding: float = 0.0  # ‖Δ as written − Δ‖ / ‖Δ‖
    earlier: int = 0  # trainings in the ledger before this one
    rate: float = 0.0  # the learning rate
    resumed_after: int = 0  # steps that were taken by earlier calls
    scores: StepScores | None = None  # at its end, of one that stopped when it was done
    schedule: RoundSchedule | None = None  # what the other copies of its round follow
    weights: str = ""  # the fingerprint of the copy's, if it is in the ledger

    def summary(self, name: str, algorithm: str) -> str:
        """One line: the steps of ``algorithm`` on the copy ``name``, and what they did to the losses."""
        steps = self.schedule.steps if self.schedule else self.resumed_after + len(self.steps)
        text = f"{name}: {algorithm}, {counted(steps, 'step')}"
        if self.before and self.after:
            text += f"; loss per answer token on the forget set {self.before.forget:.3f} → {self.after.forget:.3f}"
            if self.before.retain is not None:
                text += f", on the retain set {self.before.retain:.3f} → {self.after.retain:.3f}"
        elif self.steps:
            first_loss, last_loss = self.steps[0].forget, self.steps[-1].forget
            text += f"; loss per answer token {first_loss:.3f} → {last_loss:.3f} (first and last batch)"
        if self.scores:
            text += f"; on the copy, {self.scores}"
        return f"{text}; ‖Δ‖ {self.norm:.3g}"

    def facts(self, algorithm: str) -> dict[str, object]:
        """What came of ``algorithm``, for JSON."""
        return {
            "algorithm": algorithm,
            "lr": self.rate,
            "norm": self.norm,
            "lost_to_rounding": self.rounding,
            "before": asdict(self.before) if self.before else None,
            "after": asdict(self.after) if self.after else None,
            "warnings": self.warnings(),
            "privacy": self.spent,
            "round_schedule": asdict(self.schedule) if self.schedule else None,
            "scores": asdict(self.scores) if self.scores else None,
            "steps": [asdict(step) for step in self.steps],
        }

    def warnings(self) -> list[str]:
        """What is probably wrong with the training, and what to change; empty if nothing is."""
        before, after = self.before, self.after
        problems = []
        if self.rounding > LOST_TO_ROUNDING:
            problems.append(f"--delta-dtype lost {self.rounding:.0%} of the change: leave it out, or use bfloat16")
        if before is None or after is None:
            return problems
        if before.forget > MAX_KNOWN_LOSS:
            problems.append(
                f"the copy hardly knew the records before (loss per answer token {before.forget:.3f}): are these the "
                "records that it learned, in the chat template that it learned them with?"
            )
        if after.forget - before.forget < MIN_FORGET_RISE:
            problems.append(
                f"the records were hardly forgotten (loss per answer token {before.forget:.3f} → {after.forget:.3f}); "
                f"raise --lr (it was {self.rate:.2g}) or --epochs, or lower --batch-size for more steps; `mpu tune` "
                "finds what forgets"
            )
        if before.retain is not None and after.retain is not None and after.retain - before.retain > MAX_RETAIN_RISE:
            problems.append(
                "the model lost much of what it should keep (loss per answer token on the retain set "
                f"{before.retain:.3f} → {after.retain:.3f}); lower --lr or --epochs"
            )
        return problems


def measure(
    model: PreTrainedModel, sets: Mapping[str, ExampleSet], options: Unlearning, *, is_frozen: bool = False
) -> tuple[Measured, list[float]]:
    """The mean losses of ``model`` on records to forget that are spread over all of them, and on as many to keep; how
    probable the answers of the former are, record by record. ``is_frozen``: the frozen outputs are of this model."""
    size = scored_at_once(options.training, model.device)
    training = model.training
    model.eval()
    scores = Answers(spread(sets["forget"].examples), size).scores(model)
    retain_loss = None
    if "retain" in sets:
        retain = sets["retain"].examples[: len(scores)]
        retain_loss = sets["retain"].reference.loss(retain) if is_frozen else None
        if retain_loss is None:
            retain_loss = Answers(retain, size).loss(model)
    model.train(training)
    loss = sum(score.loss for score in scores) / max(1, sum(score.tokens for score in scores))
    return Measured(loss, retain_loss), [math.exp(-score.loss / max(1, score.tokens)) for score in scores]


ADVICE = (  # if memory runs out
    "use --training micro_batch_size=1,gradient_checkpointing, --precision bfloat16, --optim adamw-blockwise or "
    "--lora rank=16"
)


@letting_go
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
    stopping_rule: StoppingRule | None = None,
    start: Continuation | None = None,
    observer: Observer = SILENT,
) -> UnlearningResult:
    """Unlearn ``data`` on ``copy`` and write its change to ``target``: of every weight, or the factors of LoRA.

    ``copy`` may be any causal model; the delta of one that is not a copy belongs to no run. ``reference_file`` keeps
    the reference model's probabilities from round 1 for later rounds. ``secret`` gives the client's secret, for the tag
    from which the server sees whether copies were trained alike. A training is written down in ``ledger`` before any
    record meets the model. With ``checks``, the model is looked at for signs that it was built to carry records out.
    ``stopping_rule`` trains until the records are forgotten and the others kept, in place of a number of epochs;
    ``start`` is an earlier change of the same copy, from which the training goes on. Under ``accelerate launch`` every
    process calls this, and the first writes. Raises UsageError for options that do not go together; MpuError if the
    model or its tokenizer cannot be used, or training diverged.
    """
    job = prepare_job(
        copy, data, options, target=target, logging=logging, reference_file=reference_file, secret=secret,
        ledger=ledger, checks=checks, stopping_rule=stopping_rule, start=start, observer=observer,
    )  # fmt: skip
    training, privacy = job.options.training, job.options.privacy
    losses: list[Losses] = []

    def record(step: Losses, _: int) -> None:
        losses.append(step)
        retain_text = "" if step.retain_term is None else f" retain {step.retain_term:.3f}"
        observer.advance(1, f"loss {step.loss:.3f} = forget {step.forget_term:.3f}{retain_text}")

    with (
        private_umask(),
        memory_in_mind(ADVICE),
        seed_training(training),
        computing_in(training.precision, PRECISIONS[training.precision]),
        Transaction(force=force) as transaction,
    ):
        loaded = load_copy(job, transaction)
        entry, earlier = _register(job, loaded)  # before any record meets the model: what fails on one tells about it
        model, tokenizer = loaded.model, loaded.tokenizer
        encoded, record_numbers = encoded_sets(model, tokenizer, data, job.options, observer=observer)
        signs = _signs(job, loaded, encoded)
        sets = _with_references(job, model, encoded)
        rule = job.stopping_rule
        if rule and not rule.schedule and entry:  # the first copy of a round leads, the others follow
            job = replace(job, stopping_rule=replace(rule, schedule=schedule_of_round(entry, earlier)))
        steps, training = _plan_steps(job, loaded, sets)  # the job's options keep --lr auto, as they identify it
        checkpoints, steps_done = _open_checkpoints(job, loaded, len(steps))
        to_train = loaded.change.wrap(model)
        observer.stage("measure", 1, "done")
        before, probabilities = None, None
        if job.is_alone:
            before, probabilities = measure(to_train, sets, job.options, is_frozen=not job.read_reference)
        _inspect_copy(job, signs, entry, before)
        early_stopping, job = _early_stopping(job, to_train, sets, before, probabilities)
        if start and start.delta:
            _go_on_from(start.delta, start, to_train)
        if early_stopping and checkpoints and steps_done:
            early_stopping.resume(checkpoints.of_step(steps_done))
        observer.stage(f"unlearn {name_of_copy(copy.source)}", len(steps), "steps")
        observer.advance(steps_done)
        spent, trained = None, to_train
        if loaded.private:
            private = loaded.private.of_examples(record_numbers)
            spent = extension("private").train_privately(
                to_train, sets, job.objective, training, privacy=privacy, planned=private, on_step=record
            )
            spendings = [spending for other in earlier for spending in other.spendings(privacy.dp_unit)]
            spendings.append(private.mechanism)
            spent["epsilon_of_ledger"] = extension("accounting").composed_epsilon(
                spendings, privacy.dp_delta, privacy.dp_neighbours
            )
        else:
            trained = train(
                to_train, steps, sets, job.objective, training, logging=logging, checkpoints=checkpoints,
                on_step=record, warn=observer.warn, early_stopping=early_stopping,
            )  # fmt: skip
        scores, round_schedule = _finish(job, early_stopping, trained, entry, steps_done + len(losses))
        observer.stage("measure again", 1, "done")
        after = measure(trained, sets, job.options)[0] if job.is_alone else None
        # Under DP a delta leaves whatever one record does to the loss: its absence would tell.
        if after and loaded.private is None and not math.isfinite(after.forget):
            raise Diverged("the loss on the records is")
        observer.stage("write the delta", 1, "done")
        norm, rounding = _write_delta(job, loaded, trained, _tags(job, loaded, round_schedule))
    if checkpoints and job.is_main_process:
        shutil.rmtree(checkpoints.folder)
    return UnlearningResult(
        path=target, steps=losses, norm=norm, is_main_process=job.is_main_process, spent=spent, before=before,
        after=after, rounding=rounding, earlier=len(earlier), rate=float(training.lr),
        resumed_after=steps_done, scores=scores, schedule=round_schedule, weights=loaded.fingerprint,
    )  # fmt: skip


def _register(job: TrainingJob, loaded: LoadedCopy) -> tuple[LedgerEntry | None, Sequence[LedgerEntry]]:
    """Write the training down in the ledger, if there is one; without it, no training has a budget. The training's
    entry, None if it has none, and those before it."""
    if not job.is_main_process or not job.ledger:
        return None, ()
    privacy = job.options.privacy
    try:
        entry = entry_of(job, loaded)
        earlier = write_down(
            job.ledger, entry, delta=privacy.dp_delta, budget=privacy.dp_budget, neighbours=privacy.dp_neighbours,
            trusted=job.checks is None or job.checks.trust_copy,
        )  # fmt: skip
    except OSError as error:
        if privacy.dp_epsilon is not None:
            raise MpuError(f"{job.ledger}: cannot be written: {error.strerror}, so no budget holds") from error
        job.observer.warn(f"{job.ledger}: {error.strerror}; this training is not in your ledger")
        return None, ()
    return entry, earlier


def _signs(job: TrainingJob, loaded: LoadedCopy, encoded: Encoded) -> list[str]:
    """Signs in the copy itself that it was built to carry records out, as far as the checks look for them."""
    signs: list[str] = []
    checks, data = job.checks, job.data
    if checks and job.is_alone:
        job.observer.stage("check the copy", 1, "done")
        # Under DP from the weights alone: whether the copy is refused would tell what the records hold.
        looked_at = None
        if not loaded.private:
            looked_at = [example for set_examples, _ in encoded.values() for example in set_examples]
        signs += traps(job.copy, loaded.model, looked_at, len(data.forget) + len(data.retain))
    elif checks:
        signs.append("several processes train it, so its units were not looked at for traps")
    if checks and job.public and job.is_main_process:
        texts = []
        if not loaded.private:
            for record in data.records:
                for turn in (*record.turns, record.answer_turn):
                    if turn.content:
                        texts.append(turn.content)
        signs += against_public(job.copy, loaded.tokenizer, open_model(job.public), texts)
    return signs


def _with_references(job: TrainingJob, model: PreTrainedModel, encoded: Encoded) -> dict[str, ExampleSet]:
    """Each set with what the frozen copy says of it.

    That is ``model`` or, if the job reads it, round 1's, from the reference file; else it is kept in that file, if
    there is one, for later rounds.
    """
    options, origin, file = job.options, job.manifest, job.reference_file
    reference_outputs = {name: output_kind for name, (_, output_kind) in encoded.items()}
    # Of the records and of what prints them, not of their tokens, which the copy's tokenizer makes: see records_digest.
    texts = json.dumps([records_digest(job.data), flat(options.prompts)], default=str)
    facts: dict[str, object] = {  # what has to be the same when the file is read again
        "run": origin.run if origin else None,
        "copy": origin.copy if origin else None,
        "records": hashlib.sha256(texts.encode()).hexdigest(),
        "reading_context": job.copy.reading_context,
    }
    if not job.read_reference or (origin and origin.round == 1):  # later rounds have other copies
        facts["copy_id"] = origin.copy_id if origin else None
    facts["asks"] = reference_outputs

    def make_references() -> dict[str, Reference]:
        if file and job.read_reference:
            loaded_references = load_references(file, reference_outputs, facts)
            job.observer.note(f"the reference model's probabilities are read from {file}")
            return loaded_references
        batch_size = scored_at_once(options.training, model.device)
        layer, seed = job.objective.constants.layer, options.training.seed
        references = {
            name: freeze(model, examples, output_kind, layer=layer, batch_size=batch_size, seed=seed)
            for name, (examples, output_kind) in encoded.items()
        }
        if file:
            save_references(file, references, facts)
        return references

    references = from_first(make_references)
    device = PartialState().device if PartialState().num_processes > 1 else model.device
    return {name: ExampleSet(examples, references[name].on(device)) for name, (examples, _) in encoded.items()}


def _plan_steps(
    job: TrainingJob, loaded: LoadedCopy, sets: Mapping[str, ExampleSet]
) -> tuple[list[TrainingStep], Training]:
    """The examples of each step, and the training's options with a learning rate."""
    forget = len(sets["forget"].examples)
    retain = len(sets["retain"].examples) if "retain" in sets else 0
    training = job.options.training
    epochs, limit = epochs_of(job.options), None
    if job.stopping_rule:
        limit = job.stopping_rule.limit(forget, training.batch_size)
        steps_per_epoch = -(-forget // training.batch_size)
        epochs = -(-limit // steps_per_epoch)
    steps = schedule(
        forget, retain, epochs=epochs, batch_size=training.batch_size, seed=training.seed,
        retain_per_forget=job.objective.algorithm.retain_per_forget,
    )[:limit]  # fmt: skip
    trained_weights = sum(math.prod(shape) for _, shape in loaded.specs.values())
    # Under DP the planned number: how many records the copy's template accepts would leak through the rate.
    count = loaded.private.mechanism.steps if loaded.private else len(steps)
    return steps, with_rate(job.options, trained_weights, count)


def _open_checkpoints(job: TrainingJob, loaded: LoadedCopy, total_steps: int) -> tuple[Checkpoints | None, int]:
    """The checkpoints of --resume, None without it, and how many steps were taken before. Raises MpuError if those that
    are there are of another training."""
    if not job.logging.resume:
        return None, 0
    checkpoints = Checkpoints(
        folder=job.target.with_name(f"{job.target.name}.resume"),
        secret=(job.secret or own_client_secret)(),
        training=from_first(lambda: digest_of_training(job, loaded)),  # which alone has the weights' fingerprint
    )
    if job.is_main_process:
        note = private_folder(checkpoints.folder.absolute()) / "mpu-resume.json"
        if not note.exists():
            write_atomically(note, json.dumps({"sha256": checkpoints.training}))
        elif read_json_object(note, links=False).get("sha256") != checkpoints.training:
            raise MpuError(
                f"{checkpoints.folder}: holds checkpoints of a different copy, records or options",
                "remove it to start over",
            )
    last_checkpoint = from_first(checkpoints.last)
    steps_done = step_of(last_checkpoint) if last_checkpoint else 0
    if last_checkpoint:
        job.observer.note(f"resuming after step {steps_done} of {total_steps}")
    return checkpoints, steps_done


def _inspect_copy(job: TrainingJob, signs: list[str], entry: LedgerEntry | None, before: Measured | None) -> None:
    """Write the losses down, and note if no check of the copy found anything. Raises MpuError for signs that it was
    built to carry records out, and for losses that are not finite, but not under DP: which records they are of would
    tell what those hold."""
    has_losses = before is not None and math.isfinite(before.forget + (before.retain or 0.0))
    if before and not has_losses and job.options.privacy.dp_epsilon is None:
        raise without_numbers(job.copy)
    if job.ledger and entry and before and has_losses:
        write_losses(job.ledger, entry.identity, before.forget, before.retain)
        if job.checks and job.options.privacy.dp_epsilon is None:
            signs = signs + against_others(entry, asdict(before), read_ledger(job.ledger))
    if not job.checks:
        return
    refuse(signs, job.copy.source, job.checks.trust_copy, job.observer)
    if not signs:
        compared = f", and its structure is that of {job.public}" if job.public else ""
        job.observer.note(
            f"checked: nothing shows that {name_of_copy(job.copy.source)} was built to carry records out{compared} "
            "(docs/protection.md says what such checks miss)"
        )


def _early_stopping(
    job: TrainingJob,
    to_train: PreTrainedModel,
    sets: Mapping[str, ExampleSet],
    before: Measured | None,
    probabilities: Sequence[float] | None,
) -> tuple[EarlyStopping | None, TrainingJob]:
    """What ends the training once it is done, None for one of a number of epochs; ``job`` with the level of its loss.

    The level comes from how probable answers are that a model does not know, and from the noise of the copy; for a
    number of epochs, it is the usual one or, where the copy does not know the records, one that pulls all the same.
    """
    options, algorithm, constants = job.options, job.objective.algorithm, job.objective.constants
    has_level = "level" in algorithm.constant_names
    early_stopping = None
    if job.stopping_rule:
        at_once = scored_at_once(options.training, to_train.device)
        public = None
        examples = {name: each.examples for name, each in sets.items()}
        if job.public is not None:
            job.observer.stage("score the public model", 1, "done")
            public = probabilities_under(job.public, examples["forget"], at_once, options.training.device)
        scorer = Scorer(to_train, examples, at_once, public, job.stopping_rule.goal.max_left, probabilities)
        noise = job.manifest.noise if job.manifest else 0.0
        early_stopping = EarlyStopping(
            to_train, scorer, job.stopping_rule, noise, level=options.loss.level, alpha=constants.alpha,
            faithful_alpha=algorithm.faithful_alpha if options.loss.alpha is None else None,
            seed=options.training.seed, observer=job.observer,
        )  # fmt: skip
        constants = replace(constants, alpha=early_stopping.alpha)
        if has_level:
            constants = replace(constants, level=early_stopping.level)
    # Not under DP, where the level would leak what the copy knows.
    elif has_level and before and options.loss.level is None and options.privacy.dp_epsilon is None:
        constants = replace(constants, level=pulling_level(constants.level, before.forget))
    return early_stopping, replace(job, objective=replace(job.objective, constants=constants))


def probabilities_under(public: str, examples: Sequence[Example], at_once: int, device: str) -> list[float]:
    """How probable the model at ``public`` makes the answers, record by record. Raises MpuError if it lacks tokens."""
    model, _ = load(open_model(public), torch.float32, device)
    if max(max(example.ids) for example in examples) >= vocabulary_size(model):
        raise MpuError(f"{public}: has fewer tokens than the model", "name the model that the server's came from")
    return [math.exp(-loss) for loss in Answers(examples, at_once).losses(model)]


def _go_on_from(path: Path, start: Continuation, model: PreTrainedModel) -> None:
    """Add an earlier change to ``model``, as long as it was before a share of it was returned."""
    delta = open_checkpoint(path, links=False)
    # Another one may be of another server's records, which this one is not to see: names of copies repeat.
    if fingerprint(delta) != start.change:
        raise MpuError(
            f"{path}: not the delta that the earlier request on this copy returned",
            "put that one back, remove it to start over, or use --alone",
        )
    parameters = in_memory(model, delta.tensors)
    if any(name not in parameters or parameters[name].shape != info.shape for name, info in delta.tensors.items()):
        raise MpuError(f"{path}: not a change of this copy", "use --alone, or remove it to start over")
    with torch.no_grad():
        for name in delta.tensors:
            change = delta.tensor(name).to(parameters[name].device, torch.float32)
            if not change.isfinite().all():
                raise MpuError(f"{path}: {name!r} holds NaN or Inf", "remove it to start over")
            parameters[name].add_(change / start.scale)


def _finish(
    job: TrainingJob,
    early_stopping: EarlyStopping | None,
    trained: torch.nn.Module,
    entry: LedgerEntry | None,
    steps: int,
) -> tuple[StepScores | None, RoundSchedule | None]:
    """Go back to the best weights and write down the training's schedule, which the other copies of its round follow;
    the scores of those weights, and the schedule. None for both after a number of epochs."""
    if job.stopping_rule is None or early_stopping is None:
        return None, None
    scores, round_schedule = early_stopping.finish(trained, steps)
    if job.ledger and entry and not job.stopping_rule.schedule:
        try:
            write_round_schedule(job.ledger, entry.identity, round_schedule)
        except OSError as error:
            job.observer.warn(f"{job.ledger}: {error.strerror}; train all copies in one call, for as many steps each")
    return scores, round_schedule


def _tags(job: TrainingJob, loaded: LoadedCopy, round_schedule: RoundSchedule | None) -> dict[str, str] | None:
    """The delta's tags, equal for copies of a round that are trained identically: on the same records and, if the
    training stopped when it was done (``schedule``), for as long. None if the client's secret cannot be read or
    kept, and under DP: a tag of records tells more than (ε, δ) allows."""
    if not (job.is_main_process and job.secret and job.manifest and loaded.private is None):
        return None
    manifest = job.manifest
    decided = decisive_options(job.options)
    decided |= {"reference_file": job.reference_file is not None and manifest.round > 1}
    if round_schedule:
        decided |= asdict(round_schedule)
    decided["continued"] = job.start is not None and job.start.delta is not None
    versions = {name: version(name) for name in ("torch", "transformers")}
    facts = {"records": records_digest(job.data), "options": decided, "versions": versions}
    try:
        return training_tag(job.secret(), manifest.run, manifest.round, facts)
    except OSError as error:
        job.observer.warn(
            f"{error.filename}: {error.strerror}; the server cannot check that copies were trained identically"
        )
        return None


def _write_delta(
    job: TrainingJob, loaded: LoadedCopy, trained: PreTrainedModel, tags: dict[str, str] | None
) -> tuple[float, float]:
    """Write the change of ``trained``; its norm, and the norm of what rounding took off it, relative to that."""
    if loaded.output is None:
        for _ in loaded.change.tensors(trained):  # gathering a shard needs all processes
            pass
        return 0.0, 0.0
    # Of its privacy the delta says the bound that was asked for, and no more. The exact figure, the sampling rate and
    # the number of steps would tell the server how many records there are.
    privacy = job.options.privacy
    bound = None if privacy.dp_epsilon is None else {"epsilon": privacy.dp_epsilon, "delta": privacy.dp_delta}
    # The name of a module would tell the server of the client's own code.
    algorithm = job.options.algo if job.options.algo in ALGORITHMS else "custom"
    delta = DeltaManifest(
        job.manifest,
        algorithm,
        loaded.change.kind,
        privacy=bound,
        trained=tags,
        until_done=job.stopping_rule is not None,
    )
    with CheckpointWriter(loaded.output, loaded.specs, as_metadata(delta_facts(delta))) as writer:
        norm, rounding = write_changes(loaded.change.tensors(trained), writer)
    return loaded.change.norm(norm, loaded.output), rounding
