"""Unlearning on one copy: load it, train it on the private records, return the change in its weights."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mpu_cli.errors import Diverged, MpuError
from mpu_cli.files.boundary import private_umask
from mpu_cli.files.manifest import DeltaManifest, as_metadata, delta_facts, name_of_copy
from mpu_cli.files.reader import LOST_TO_ROUNDING
from mpu_cli.files.transaction import Transaction
from mpu_cli.files.writer import CheckpointWriter
from mpu_cli.model.device import memory_in_mind
from mpu_cli.model.load import letting_go, load, vocabulary_size
from mpu_cli.model.network import Answers
from mpu_cli.model.source import Model, open_model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.declare import flat
from mpu_cli.options.unlearning import Checks, Logging, Training, Unlearning
from mpu_cli.records.encode import Example
from mpu_cli.training.copycheck import Sign, against_others, against_public, refuse, traps
from mpu_cli.training.data import Dataset, encoded_sets, example_sets, records_digest, texts_of
from mpu_cli.training.delta import own_client_secret, training_tag, write_changes
from mpu_cli.training.execution import Checkpoints, computing_in, from_first, step_of
from mpu_cli.training.job import (
    PRECISIONS,
    LoadedCopy,
    TrainingJob,
    check_same_training,
    decisive_options,
    digest_of_training,
    entry_of,
    epochs_of,
    load_copy,
    prepare_job,
    surroundings_of,
)
from mpu_cli.training.ledger import (
    Course,
    LedgerEntry,
    course_of_round,
    read_ledger,
    write_course,
    write_down,
    write_losses,
)
from mpu_cli.training.loop import NO_LOGGING, ExampleSet, Losses, TrainingStep, schedule, seed_training, train
from mpu_cli.training.losses import ALGORITHMS
from mpu_cli.training.private import Plan, composed_epsilon, train_privately
from mpu_cli.training.rates import scored_at_once, with_rate
from mpu_cli.training.stopping import Look, Scorer, Until, Watching, pulling_level
from mpu_cli.wording import counted

# What a training did: its losses before and after, and what they say.

MEASURED_RECORDS = 128  # records of a set whose loss is measured before and after: enough to tell what went wrong
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
    scores: Look | None = None  # at its end, of one that stopped when it was done
    course: Course | None = None  # what the other copies of its round follow

    def summary(self, name: str, algorithm: str) -> str:
        """One line: the steps of ``algorithm`` on the copy ``name``, and what they did to the losses."""
        steps = self.course.steps if self.course else self.resumed_after + len(self.steps)
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
            "course": asdict(self.course) if self.course else None,
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


def measure(model: PreTrainedModel, sets: Mapping[str, ExampleSet], options: Unlearning) -> Measured:
    """The mean losses of ``model`` on the first records of each set, MEASURED_RECORDS at most."""
    size = scored_at_once(options.training, model.device)
    training = model.training
    model.eval()
    forget = sets["forget"].examples[:MEASURED_RECORDS]
    retain = sets["retain"].examples[: len(forget)] if "retain" in sets else None
    measured = Measured(Answers(forget, size).loss(model), Answers(retain, size).loss(model) if retain else None)
    model.train(training)
    return measured


ADVICE = (  # if memory runs out
    "lower --micro-batch-size, or use --gradient-checkpointing, --precision bfloat16, --optim adamw-blockwise or "
    "--lora-rank"
)


@dataclass(frozen=True)
class Registration:
    """The training's line in the ledger, None if it has none, and the lines before it."""

    entry: LedgerEntry | None = None
    earlier: Sequence[LedgerEntry] = ()


@dataclass(frozen=True)
class PreparedRecords:
    """The records as the copy reads them: ``record_numbers`` of the examples in each set, and ``signs`` that the copy
    was built to carry records out."""

    sets: dict[str, ExampleSet]
    record_numbers: dict[str, list[int]]
    signs: list[Sign]


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
    until: Until | None = None,
    observer: Observer = SILENT,
) -> UnlearningResult:
    """Unlearn ``data`` on ``copy`` and write its change to ``target``: of every weight, or the factors of LoRA.

    ``copy`` may be any causal model; the delta of one that is not a copy belongs to no run. ``reference_file`` keeps
    the reference model's probabilities from round 1 for later rounds. ``secret`` gives the client's secret, for the tag
    from which the server sees whether copies were trained alike. A training is written down in ``ledger`` before any
    record meets the model. With ``checks``, the model is looked at for signs that it was built to carry records out.
    ``until`` goes on until the records are forgotten and the others kept, in place of a number of epochs.
    Under ``accelerate launch`` every process calls this, and the first writes.
    Raises UsageError for options that do not go together; MpuError if the model or its tokenizer cannot be used, or
    training diverged.
    """
    job = prepare_job(copy, data, options, target, logging, reference_file, secret, ledger, checks, until, observer)
    training = job.options.training
    with (
        private_umask(),
        memory_in_mind(ADVICE),
        seed_training(training),
        computing_in(training.precision, PRECISIONS[training.precision]),
        Transaction(force=force) as transaction,
    ):
        loaded = load_copy(job, transaction)
        registration = _register(job, loaded)  # before any record meets the model: what fails on one tells about it
        records = _read_records(job, loaded)
        job = _follow_round(job, registration)
        steps, training = _plan_steps(job, loaded, records)  # the job's options keep --lr auto, as they identify it
        checkpoints, steps_done = _open_checkpoints(job, loaded, len(steps))
        to_train = loaded.change.wrap(loaded.model)
        observer.stage("measure", 1, "done")
        before = measure(to_train, records.sets, job.options) if job.is_alone else None
        _inspect_copy(job, records.signs, registration, before)
        job = _with_level(job, before)
        watching, job = _watch(job, to_train, records)
        observer.stage(f"unlearn {name_of_copy(copy.source)}", len(steps), "steps")
        observer.advance(steps_done)
        progress = _Progress(observer)
        spent, trained = None, to_train
        if loaded.private:
            spent = _train_privately(job, loaded.private, records, registration, to_train, training, progress)
        else:
            trained = train(
                to_train, steps, records.sets, job.objective, training, logging=logging, checkpoints=checkpoints,
                on_step=progress, warn=observer.warn, watching=watching,
            )  # fmt: skip
        scores, course = _finish(job, watching, trained, registration, steps_done + len(progress.losses))
        observer.stage("measure again", 1, "done")
        after = measure(trained, records.sets, job.options) if job.is_alone else None
        # Under DP a delta leaves whatever one record does to the loss: its absence would tell.
        if after and loaded.private is None and not math.isfinite(after.forget):
            raise Diverged("the loss on the records is")
        observer.stage("write the delta", 1, "done")
        norm, rounding = _write_delta(job, loaded, trained, _tags(job, loaded, course))
    if checkpoints and job.is_main_process:
        shutil.rmtree(checkpoints.folder)
    return UnlearningResult(
        path=target, steps=progress.losses, norm=norm, is_main_process=job.is_main_process, spent=spent, before=before,
        after=after, rounding=rounding, earlier=len(registration.earlier), rate=float(training.lr),
        resumed_after=steps_done, scores=scores, course=course,
    )  # fmt: skip


def _register(job: TrainingJob, loaded: LoadedCopy) -> Registration:
    """Write the training down in the ledger, if there is one; without it, no training has a budget."""
    if not job.is_main_process or not job.ledger:
        return Registration()
    entry = entry_of(job, loaded)
    privacy = job.options.privacy
    try:
        earlier = write_down(
            job.ledger, entry, delta=privacy.dp_delta, budget=privacy.dp_budget, neighbours=privacy.dp_neighbours,
            trusted=job.checks is None or job.checks.trust_copy,
        )  # fmt: skip
    except OSError as error:
        if privacy.dp_epsilon is not None:
            raise MpuError(f"{job.ledger}: cannot be written: {error.strerror}, so no budget holds") from error
        job.observer.warn(f"{job.ledger}: {error.strerror}; this training is not in your ledger")
        return Registration()
    return Registration(entry, earlier)


def _read_records(job: TrainingJob, loaded: LoadedCopy) -> PreparedRecords:
    """Encode the records, look at the copy, and get the reference model's outputs."""
    model, tokenizer, options, data = loaded.model, loaded.tokenizer, job.options, job.data
    encoded, record_numbers = encoded_sets(model, tokenizer, data, options, job.objective, job.observer)
    examples = [example for set_examples, _ in encoded.values() for example in set_examples]
    signs = _signs(job, loaded, examples)
    # Of the records and of what prints them, not of their tokens, which the copy's tokenizer makes: see records_digest.
    texts = json.dumps([records_digest(data), flat(options.prompts)], default=str)
    origin = job.manifest
    facts = {
        "run": origin.run if origin else None,
        "copy": origin.copy if origin else None,
        "records": hashlib.sha256(texts.encode()).hexdigest(),
        "surroundings": surroundings_of(job.copy),
    }
    if not job.read_reference or (origin and origin.round == 1):  # later rounds have other copies
        facts["copy_id"] = origin.copy_id if origin else None
    sets = example_sets(
        model, encoded, options, job.objective, job.observer,
        file=job.reference_file, read=job.read_reference, facts=facts,
    )  # fmt: skip
    return PreparedRecords(sets, record_numbers, signs)


def _follow_round(job: TrainingJob, registration: Registration) -> TrainingJob:
    """``job`` with the course of the first copy of its round, if the ledger has one."""
    if job.until is None or job.until.course or not registration.entry:
        return job
    course = course_of_round(registration.entry, registration.earlier)
    return replace(job, until=replace(job.until, course=course)) if course else job


def _with_level(job: TrainingJob, before: Measured | None) -> TrainingJob:
    """``job``, if it trains for a number of epochs, with a level of its loss that pulls even where the copy does not
    know the records (``pulling_level``). Not under DP, where the level would leak what it knows."""
    has_level = "level" in job.objective.algorithm.constant_names and job.options.loss.level is None
    if job.until or not (has_level and before) or job.options.privacy.dp_epsilon is not None:
        return job
    level = pulling_level(job.objective.constants.level, before.forget)
    return replace(job, objective=replace(job.objective, constants=replace(job.objective.constants, level=level)))


def _watch(
    job: TrainingJob, to_train: PreTrainedModel, records: PreparedRecords
) -> tuple[Watching | None, TrainingJob]:
    """What ends the training once it is done, None for one of a number of epochs; ``job`` with the level of its loss.

    The level comes from how probable answers are that a model does not know, and from the noise of the copy.
    """
    if job.until is None:
        return None, job
    at_once, public = scored_at_once(job.options.training, to_train.device), None
    examples = {name: each.examples for name, each in records.sets.items()}
    if job.public is not None:
        job.observer.stage("score the public model", 1, "done")
        public = probabilities_under(job.public, examples["forget"], at_once, job.options.training.device)
    scorer = Scorer(to_train, examples, at_once, public)
    noise = job.manifest.noise if job.manifest else 0.0
    watching = Watching(
        to_train, scorer, job.until, noise, level=job.options.loss.level,
        training_noise=job.until.stopping.training_noise,
        seed=job.options.training.seed, observer=job.observer,
    )  # fmt: skip
    algorithm, constants = job.objective.algorithm, job.objective.constants
    if "level" in algorithm.constant_names:
        constants = replace(constants, level=watching.level)
    if watching.is_faithful and algorithm.faithful_alpha is not None and job.options.loss.alpha is None:
        constants = replace(constants, alpha=algorithm.faithful_alpha)
    return watching, replace(job, objective=replace(job.objective, constants=constants))


def probabilities_under(public: str, examples: Sequence[Example], at_once: int, device: str) -> list[float]:
    """How probable the model at ``public`` makes the answers, record by record. Raises MpuError if it lacks tokens."""
    model, _ = load(open_model(public), torch.float32, device)
    if max(max(example.ids) for example in examples) >= vocabulary_size(model):
        raise MpuError(f"{public}: has fewer tokens than the model", "name the model that the server's came from")
    return [math.exp(-loss) for loss in Answers(examples, at_once).losses(model)]


def _finish(
    job: TrainingJob, watching: Watching | None, trained: torch.nn.Module, registration: Registration, steps: int
) -> tuple[Look | None, Course | None]:
    """Go back to the best weights and write down the training's course, which the other copies of its round follow; the
    scores of those weights, and the course. None for both after a number of epochs."""
    if job.until is None or watching is None:
        return None, None
    look, course = watching.finish(trained, steps)
    if job.ledger and registration.entry and not job.until.course:
        try:
            write_course(job.ledger, registration.entry.identity, course)
        except OSError as error:
            job.observer.warn(f"{job.ledger}: {error.strerror}; train all copies in one call, for as many steps each")
    return look, course


def _tags(job: TrainingJob, loaded: LoadedCopy, course: Course | None) -> dict[str, str] | None:
    """The delta's tags, equal for copies of a round that are trained identically: on the same records and, if the
    training stopped when it was done (``course``), for as long. None if the client's secret cannot be read or kept, and
    under DP: a tag of records tells more than (ε, δ) allows."""
    if not (job.is_main_process and job.secret and job.manifest and loaded.private is None):
        return None
    manifest = job.manifest
    decided = decisive_options(job.options)
    decided |= {"reference_file": job.reference_file is not None and manifest.round > 1}
    if course:
        decided |= asdict(course)
    versions = {name: version(name) for name in ("torch", "transformers")}
    facts = {"records": records_digest(job.data), "options": decided, "versions": versions}
    try:
        return training_tag(job.secret(), manifest.run, manifest.round, facts)
    except OSError as error:
        job.observer.warn(
            f"{error.filename}: {error.strerror}; the server cannot check that copies were trained identically"
        )
        return None


def _plan_steps(job: TrainingJob, loaded: LoadedCopy, records: PreparedRecords) -> tuple[list[TrainingStep], Training]:
    """The examples of each step, and the training's options with a learning rate."""
    forget = len(records.sets["forget"].examples)
    retain = len(records.sets["retain"].examples) if "retain" in records.sets else 0
    training = job.options.training
    epochs, limit = epochs_of(job.options), None
    if job.until:
        limit = job.until.limit(forget, training.batch_size)
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
    """The checkpoints of --resume, None without it, and how many steps were taken before."""
    if not job.logging.resume:
        return None, 0
    checkpoints = Checkpoints(
        folder=job.target.with_name(f"{job.target.name}.resume"),
        secret=(job.secret or own_client_secret)(),
        training=from_first(lambda: digest_of_training(job, loaded)),  # which alone has the weights' fingerprint
    )
    if job.is_main_process:
        check_same_training(checkpoints)
    last_checkpoint = from_first(checkpoints.last)
    steps_done = step_of(last_checkpoint) if last_checkpoint else 0
    if last_checkpoint:
        job.observer.note(f"resuming after step {steps_done} of {total_steps}")
    return checkpoints, steps_done


def _inspect_copy(job: TrainingJob, signs: Sequence[Sign], registration: Registration, before: Measured | None) -> None:
    """Write the losses down, and note if no check of the copy found anything. Raises MpuError for signs that it was
    built to carry records out."""
    signs = list(signs)
    if job.ledger and registration.entry and before:
        write_losses(job.ledger, registration.entry.identity, before.forget, before.retain)
        if job.checks and job.options.privacy.dp_epsilon is None:
            signs += against_others(registration.entry, asdict(before), read_ledger(job.ledger))
    if not job.checks:
        return
    refuse(signs, job.copy.source, job.checks.trust_copy, job.observer)
    if signs:
        return
    compared = f", and its structure is that of {job.public}" if job.public else ""
    job.observer.note(
        f"checked: nothing shows that {name_of_copy(job.copy.source)} was built to carry records out{compared} "
        "(docs/protection.md says what such checks miss)"
    )


def _train_privately(
    job: TrainingJob, private: Plan, records: PreparedRecords, registration: Registration, to_train: PreTrainedModel,
    training: Training, progress: _Progress,
) -> dict[str, float]:  # fmt: skip
    """Train with DP-SGD; what was spent of the privacy budget, and by all trainings of the ledger together."""
    private = private.of_examples(records.record_numbers)
    privacy = job.options.privacy
    spent = train_privately(to_train, records.sets, job.objective, training, privacy, private, on_step=progress)
    earlier = [spending for entry in registration.earlier for spending in entry.spendings(privacy.dp_unit)]
    spent["epsilon_of_ledger"] = composed_epsilon(
        [*earlier, private.mechanism], privacy.dp_delta, privacy.dp_neighbours
    )
    return spent


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
        job.manifest, algorithm, loaded.change.kind, privacy=bound, trained=tags, until_done=job.until is not None
    )
    with CheckpointWriter(loaded.output, loaded.specs, as_metadata(delta_facts(delta))) as writer:
        norm, rounding = write_changes(loaded.change.tensors(trained), writer)
    return loaded.change.norm(norm, loaded.output), rounding


@dataclass
class _Progress:
    """Shows the steps of a training, and keeps their losses."""

    observer: Observer
    losses: list[Losses] = field(default_factory=list)

    def __call__(self, step: Losses, _: int) -> None:
        self.losses.append(step)
        retain_text = "" if step.retain_term is None else f" retain {step.retain_term:.3f}"
        self.observer.advance(1, f"loss {step.loss:.3f} = forget {step.forget_term:.3f}{retain_text}")


def _signs(job: TrainingJob, loaded: LoadedCopy, examples: Sequence[Example]) -> list[Sign]:
    """Signs in the copy itself that it was built to carry records out, as far as the checks look for them."""
    signs: list[Sign] = []
    checks, data = job.checks, job.data
    if checks and job.is_alone:
        job.observer.stage("check the copy", 1, "done")
        # Under DP from the weights alone: whether the copy is refused would tell what the records hold.
        looked_at = None if loaded.private else examples
        signs += traps(job.copy, loaded.model, looked_at, len(data.forget) + len(data.retain))
    elif checks:
        signs.append(Sign("several processes train it, so its units were not looked at for traps"))
    if checks and job.public and job.is_main_process:
        signs += against_public(
            job.copy, loaded.tokenizer, open_model(job.public), [] if loaded.private else texts_of(data)
        )
    return signs
