"""Unlearning on one copy: load it, train it on the private records, return the change in its weights."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from mpu_cli.boundary.files import private_umask
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.checkpoint.writer import CheckpointWriter
from mpu_cli.client.accounting import composed_epsilon
from mpu_cli.client.checkpoints import Checkpoints, step_of
from mpu_cli.client.checks import (
    PRECISIONS,
    epochs_of,
)
from mpu_cli.client.copycheck import Sign, against_others, against_public, refuse, traps
from mpu_cli.client.dataset import Dataset, texts_of
from mpu_cli.client.datasets import KeptReferences, encoded_sets, example_sets, records_digest
from mpu_cli.client.delta import write_changes
from mpu_cli.client.identity import (
    check_same_training,
    digest_of_training,
    entry_of,
    surroundings_of,
    tag_of,
)
from mpu_cli.client.job import LoadedCopy, TrainingJob, load_copy, prepare_job
from mpu_cli.client.ledger import LedgerEntry, read_ledger, write_down, write_losses
from mpu_cli.client.outcome import Measured, UnlearningResult, measure
from mpu_cli.client.precision import computing_in
from mpu_cli.client.private import Plan, train_privately
from mpu_cli.client.processes import from_first
from mpu_cli.client.rate import with_rate
from mpu_cli.client.schedule import ExampleSet, TrainingStep, schedule
from mpu_cli.client.tag import own_client_secret
from mpu_cli.client.trainer import Losses
from mpu_cli.client.training import (
    NO_LOGGING,
    seed_training,
    train,
)
from mpu_cli.errors import Diverged, MpuError
from mpu_cli.manifest import DeltaManifest, as_metadata, delta_facts
from mpu_cli.models.library_errors import memory_in_mind
from mpu_cli.models.loading import letting_go
from mpu_cli.models.source import Model, open_model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.declare import flat
from mpu_cli.options.unlearning import Checks, Logging, Privacy, Training, Unlearning
from mpu_cli.outputs import name_of_copy
from mpu_cli.records.encoding import Example

ADVICE = (
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
    """The records as the copy reads them: ``record_numbers`` of the examples in each set, the delta's ``tags``, and
    ``signs`` that the copy was built to carry records out."""

    sets: dict[str, ExampleSet]
    record_numbers: dict[str, list[int]]
    tags: dict[str, str] | None
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
    observer: Observer = SILENT,
) -> UnlearningResult:
    """Unlearn ``data`` on ``copy`` and write its change to ``target``: of every weight, or the factors of LoRA.

    ``copy`` may be any causal model; the delta of one that is not a copy belongs to no run. ``reference_file`` keeps
    the reference model's probabilities from round 1 for later rounds. ``secret`` gives the client's secret, for the tag
    from which the server sees whether copies were trained alike. A training is written down in ``ledger`` before any
    record meets the model. With ``checks``, the model is looked at for signs that it was built to carry records out.
    Under ``accelerate launch`` every process calls this, and the first writes.
    Raises UsageError for options that do not go together; MpuError if the model or its tokenizer cannot be used, or
    training diverged.
    """
    job = prepare_job(copy, data, options, target, logging, reference_file, secret, ledger, checks, observer)
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
        steps, training = _plan_steps(job, loaded, records)
        checkpoints, steps_done = _open_checkpoints(job, loaded, len(steps))
        to_train = loaded.change.wrap(loaded.model)
        observer.stage("measure", 1, "done")
        before = measure(to_train, records.sets, job.options) if job.is_alone else None
        checked = _inspect_copy(job, records.signs, registration, before)
        progress = _start_progress(job, steps_done / len(steps))
        spent, trained = None, to_train
        if loaded.private:
            spent = _train_privately(job, loaded.private, records, registration, to_train, training, progress)
        else:
            trained = train(
                to_train, steps, records.sets, job.objective, training, logging=logging, checkpoints=checkpoints,
                on_step=progress, on_memory=partial(_tell_memory, observer),
            )  # fmt: skip
        after = measure(trained, records.sets, job.options) if job.is_alone else None
        # Under DP a delta leaves whatever one record does to the loss: its absence would tell.
        if after and loaded.private is None and not math.isfinite(after.forget):
            raise Diverged("the loss on the records is")
        norm, rounding = _write_delta(job, loaded, trained, records.tags)
    if checkpoints and job.is_main_process:
        shutil.rmtree(checkpoints.folder)
    return UnlearningResult(
        target, progress.losses, norm, job.is_main_process, spent, before, after, rounding, len(registration.earlier),
        float(training.lr), steps_done, checked,
    )  # fmt: skip


def _register(job: TrainingJob, loaded: LoadedCopy) -> Registration:
    """Write the training down in the ledger, if there is one."""
    if not job.is_main_process or not job.ledger:
        return Registration()
    mechanism = loaded.private.mechanism if loaded.private else None
    entry = entry_of(job.copy, loaded.fingerprint, job.manifest, job.options, job.data, mechanism)
    trusted = job.checks is None or job.checks.trust_copy
    return Registration(*_written_down(job.ledger, entry, job.options.privacy, trusted, job.observer))


def _read_records(job: TrainingJob, loaded: LoadedCopy) -> PreparedRecords:
    """Encode the records, tag them, look at the copy, and get the reference model's outputs."""
    model, tokenizer, options, data = loaded.model, loaded.tokenizer, job.options, job.data
    encoded, record_numbers = encoded_sets(model, tokenizer, data, options, job.objective, job.observer)
    digest = records_digest(data)
    tags = None
    # Under DP there are none: a tag of records tells more than (ε, δ) allows.
    if job.is_main_process and job.secret and job.manifest and loaded.private is None:
        tags = tag_of(job.secret, job.manifest, options, digest, job.reference_file is not None, job.observer)
    examples = [example for set_examples, _ in encoded.values() for example in set_examples]
    signs = _signs(job, loaded, examples)
    printed = json.dumps([digest, flat(options.prompts)], default=str)
    references = KeptReferences(
        job.reference_file,
        job.read_reference,
        job.manifest,
        hashlib.sha256(printed.encode()).hexdigest(),
        surroundings_of(job.copy),
    )
    sets = example_sets(model, encoded, references, options, job.objective, job.observer)
    return PreparedRecords(sets, record_numbers, tags, signs)


def _plan_steps(job: TrainingJob, loaded: LoadedCopy, records: PreparedRecords) -> tuple[list[TrainingStep], Training]:
    """The examples of each step, and the training's options with a learning rate."""
    counts = [len(records.sets[name].examples) if name in records.sets else 0 for name in ("forget", "retain")]
    training = job.options.training
    steps = schedule(*counts, epochs=epochs_of(job.options), batch_size=training.batch_size, seed=training.seed)
    trained_weights = sum(math.prod(shape) for _, shape in loaded.specs.values())
    # Under DP, of the steps that were planned: how many records the copy's template left says something of each.
    count = loaded.private.mechanism.steps if loaded.private else len(steps)
    return steps, with_rate(job.options, trained_weights, count)


def _open_checkpoints(job: TrainingJob, loaded: LoadedCopy, total_steps: int) -> tuple[Checkpoints | None, int]:
    """The checkpoints of --resume, None without it, and how many steps were taken before."""
    if not job.logging.resume:
        return None, 0
    has_reference = job.reference_file is not None
    training_digest = digest_of_training(job.copy, loaded.fingerprint, job.options, job.data, has_reference)
    checkpoints = Checkpoints(
        job.target.with_name(f"{job.target.name}.resume"),
        (job.secret or own_client_secret)(),
        from_first(lambda: training_digest),
    )
    if job.is_main_process:
        check_same_training(checkpoints)
    last_checkpoint = from_first(checkpoints.last)
    steps_done = step_of(last_checkpoint) if last_checkpoint else 0
    if last_checkpoint:
        job.observer.note(f"resuming after step {steps_done} of {total_steps}")
    return checkpoints, steps_done


def _inspect_copy(
    job: TrainingJob, signs: Sequence[Sign], registration: Registration, before: Measured | None
) -> str | None:
    """What the checks of a copy came to, if they found nothing. Raises MpuError for signs that it was built to carry
    records out."""
    signs = list(signs)
    if job.ledger and registration.entry and before:
        write_losses(job.ledger, registration.entry.identity, before.forget, before.retain)
        if job.checks:
            signs += against_others(registration.entry, asdict(before), read_ledger(job.ledger))
    if not job.checks:
        return None
    refuse(signs, job.copy.source, job.checks.trust_copy, job.observer)
    if signs:
        return None
    compared = f", and its structure is that of {job.checks.like}" if job.checks.like else ""
    return (
        f"checked: nothing shows that {job.copy.source} was built to carry records out{compared} "
        "(docs/attacks.md says what such checks miss)"
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
    bound = _privacy_bound(job.options.privacy)
    delta = DeltaManifest(job.manifest, job.options.algo, loaded.change.kind, privacy=bound, trained=tags)
    with CheckpointWriter(loaded.output, loaded.specs, as_metadata(delta_facts(delta))) as writer:
        norm, rounding = write_changes(loaded.change.tensors(trained), writer)
    return loaded.change.norm(norm, loaded.output), rounding


@dataclass
class _Progress:
    """Shows the steps of a training, and keeps their losses."""

    observer: Observer
    epochs: int
    losses: list[Losses] = field(default_factory=list)

    def __call__(self, step: Losses, total: int) -> None:
        self.losses.append(step)
        retain_text = "" if step.retain_term is None else f" retain {step.retain_term:.3f}"
        self.observer.advance(self.epochs / total, f"loss {step.loss:.3f} = forget {step.forget_term:.3f}{retain_text}")


def _start_progress(job: TrainingJob, share_done: float) -> _Progress:
    epochs = epochs_of(job.options)
    job.observer.stage(f"unlearn {name_of_copy(job.copy.source)}", epochs, "epochs")
    job.observer.advance(epochs * share_done)
    return _Progress(job.observer, epochs)


def _tell_memory(observer: Observer, most: int) -> None:
    observer.warn(
        f"out of memory: from here on, {most} record{'s' * (most > 1)} at once; --micro-batch-size {most} begins so"
    )


def _signs(job: TrainingJob, loaded: LoadedCopy, examples: Sequence[Example]) -> list[Sign]:
    """Signs in the copy itself that it was built to carry records out, as far as the checks look for them."""
    signs: list[Sign] = []
    checks, data = job.checks, job.data
    if checks and job.is_alone:
        job.observer.stage("check the copy", 1, "done")
        signs += traps(job.copy, loaded.model, examples, len(data.forget) + len(data.retain))
    elif checks:
        signs.append(Sign("several processes train it, so its units were not looked at for traps"))
    if checks and checks.like and job.is_main_process:
        signs += against_public(job.copy, loaded.tokenizer, open_model(checks.like), texts_of(data))
    return signs


def _written_down(
    ledger: Path, entry: LedgerEntry, privacy: Privacy, trusted: bool, observer: Observer
) -> tuple[LedgerEntry | None, Sequence[LedgerEntry]]:
    """``entry`` once it is in the ledger, and those before it; None if it cannot be written and no budget needs it."""
    try:
        return entry, write_down(
            ledger, entry, delta=privacy.dp_delta, budget=privacy.dp_budget, neighbours=privacy.dp_neighbours,
            trusted=trusted,
        )  # fmt: skip
    except OSError as error:
        if privacy.dp_epsilon is not None:
            raise MpuError(f"{ledger}: cannot be written: {error.strerror}, so no budget holds") from error
        observer.warn(f"{ledger}: {error.strerror}; this training is not in your ledger")
        return None, ()


def _privacy_bound(privacy: Privacy) -> dict[str, float] | None:
    """What the delta says of its privacy: the bound that was asked for, and no more. The exact figure, the sampling
    rate and the number of steps would tell the server how many records there are."""
    return None if privacy.dp_epsilon is None else {"epsilon": privacy.dp_epsilon, "delta": privacy.dp_delta}
