"""Unlearning on one copy: load it, train it on the private records, return the change in its weights."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.boundary.files import private_umask
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.checkpoint.writer import MAX_SHARD, CheckpointWriter, nbytes_of
from mpu_cli.client.change import change_of, stored_specs, write_changes
from mpu_cli.client.checkpoints import Checkpoints, step_of
from mpu_cli.client.checks import (
    PRECISIONS,
    ROTATED,
    check_finite,
    check_logging,
    check_options,
    check_reference_file,
    check_suits,
    epochs_of,
)
from mpu_cli.client.copycheck import Sign, against_others, against_public, refuse, traps
from mpu_cli.client.dataset import Dataset, texts_of
from mpu_cli.client.identity import (
    check_same_training,
    digest_of_training,
    entry_of,
    surroundings_of,
    tag_of,
    weights_of,
)
from mpu_cli.client.ledger import Entry, composed, read_ledger, write_down, write_losses
from mpu_cli.client.losses import Objective
from mpu_cli.client.optimizers import OPTIMIZERS
from mpu_cli.client.outcome import Result, measure
from mpu_cli.client.precision import computing_in, in_precision
from mpu_cli.client.private import Plan, check_opacus, check_private, plan, train_privately
from mpu_cli.client.processes import from_first
from mpu_cli.client.rate import with_epochs, with_rate
from mpu_cli.client.schedule import schedule
from mpu_cli.client.sets import KeptReferences, encoded_sets, example_sets, records_digest, sets_of
from mpu_cli.client.tag import own_client_secret
from mpu_cli.client.trainer import Losses
from mpu_cli.client.training import (
    NO_LOGGING,
    seeded,
    train,
)
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.manifest import CopyManifest, DeltaManifest, as_metadata, delta_facts, read_copy_manifest
from mpu_cli.models.device import device_of, processes_of
from mpu_cli.models.loading import letting_go, load, load_once_per_host, memory_in_mind
from mpu_cli.models.quantized import share_in_4_bits
from mpu_cli.models.source import Model, open_model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.declare import flat
from mpu_cli.options.unlearning import Checks, Logging, Privacy, Unlearning
from mpu_cli.outputs import name_of_copy
from mpu_cli.records.encoding import Example

ADVICE = (
    "lower --micro-batch-size, or use --gradient-checkpointing, --precision bfloat16, --optim adamw-blockwise or "
    "--lora-rank"
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
    options = with_epochs(options, len(data.forget))
    check_logging(logging, options.privacy)
    dtype = PRECISIONS[options.training.precision]
    load_once_per_host()
    state = _joined(options, data)
    first, alone = state.is_main_process, state.num_processes == 1  # several processes: the model is whole in none
    manifest = read_copy_manifest(copy.folder, copy.checkpoint.metadata)
    options = _of_round(options, manifest)
    _warn_of_misfits(manifest, data, options, observer)
    read_reference = reference_file is not None and check_reference_file(reference_file, manifest, options, objective)
    state.wait_for_everyone()  # all look for the reference file before the first one writes it
    with (
        private_umask(),
        memory_in_mind(ADVICE),
        seeded(options.training),
        computing_in(options.training.precision, dtype),
        ExitStack() as stack,
    ):
        # Find out before hours of training whether the delta can be written.
        transaction = stack.enter_context(Transaction(force=force))
        how, held = options.training, options.lora.quantize
        model, tokenizer = load(copy, dtype, how.device, how.attention, held)
        in_precision(model, how.precision)
        if held:
            observer.note(f"{share_in_4_bits(model):.0%} of the weights are held in 4 bits")
        change = change_of(options, model, copy.checkpoint, dtype)
        specs = stored_specs(change, model, options)
        weights_trained = sum(math.prod(shape) for _, shape in specs.values())
        if first:
            output = transaction.add(target, directory=nbytes_of(specs) > MAX_SHARD)
        if alone:
            check_finite(model, copy)
        check_suits(model, tokenizer, data, options, objective)
        if options.prompts.template is None and not tokenizer.chat_template:
            observer.note("the copy's tokenizer has no chat template: records are read as 'Question: … Answer: …'")
        planned = _privately(change.trained(model), data, options, objective)
        weights = weights_of(copy) if first and (ledger or logging.resume) else ""
        entry: Entry | None = None
        earlier: Sequence[Entry] = ()
        if first and ledger:  # before any record meets the model: what fails on one tells about it, too
            entry = entry_of(copy, weights, manifest, options, data, planned.mechanism if planned else None)
            trusted = checks is None or checks.trust_copy
            entry, earlier = _written_down(ledger, entry, options.privacy, trusted, observer)
        encoded, kept = encoded_sets(model, tokenizer, data, options, objective, observer)
        records = records_digest(data)
        tag = None
        if first and secret and manifest and planned is None:  # a tag of records tells more than (ε, δ) allows
            tag = tag_of(secret, manifest, options, records, reference_file is not None, observer)
        examples = [example for held, _ in encoded.values() for example in held]
        signs = _signs(copy, model, tokenizer, data, examples, checks, state, observer)
        printed = json.dumps([records, flat(options.prompts)], default=str)
        references = KeptReferences(
            reference_file,
            read_reference,
            manifest,
            hashlib.sha256(printed.encode()).hexdigest(),
            surroundings_of(copy),
        )
        sets = example_sets(model, encoded, references, options, objective, observer)
        steps = schedule(
            *(len(sets[name].examples) if name in sets else 0 for name in ("forget", "retain")),
            epochs=epochs_of(options), batch_size=options.training.batch_size, seed=options.training.seed,
        )  # fmt: skip
        # Under DP, of the steps that were planned: how many records the copy's template left says something of each.
        training = with_rate(options, weights_trained, planned.mechanism.steps if planned else len(steps))
        checkpoints = None
        if logging.resume:
            folder = target.with_name(f"{target.name}.resume")
            training_digest = digest_of_training(copy, weights, options, data, reference_file is not None)
            checkpoints = Checkpoints(folder, (secret or own_client_secret)(), from_first(lambda: training_digest))
            if first:
                check_same_training(checkpoints)
        last = from_first(checkpoints.last) if checkpoints else None
        done = step_of(last) if last else 0
        if last:
            observer.note(f"resuming after step {done} of {len(steps)}")
        to_train = change.wrap(model)
        observer.stage("measure", 1, "done")
        before = measure(to_train, sets, options) if alone else None
        if ledger and entry and before:
            write_losses(ledger, entry.identity, before.forget, before.retain)
            signs += against_others(entry, asdict(before), read_ledger(ledger)) if checks else []
        if checks:
            refuse(signs, copy.source, checks.trust_copy, observer)
        observer.stage(f"unlearn {name_of_copy(copy.source)}", epochs_of(options), "epochs")
        observer.advance(epochs_of(options) * done / len(steps))
        progress = _Progress(observer, epochs_of(options))
        spent, trained = None, to_train
        if planned:
            planned = planned.of_examples(kept)
            spent = train_privately(to_train, sets, objective, training, options.privacy, planned, on_step=progress)
            together = [*(each.mechanism for each in earlier), planned.mechanism]
            spent["epsilon_of_ledger"] = composed(together, options.privacy.dp_delta)
        else:
            trained = train(
                to_train, steps, sets, objective, training, logging=logging, checkpoints=checkpoints,
                on_step=progress, on_memory=partial(_tell_memory, observer),
            )  # fmt: skip
        after = measure(trained, sets, options) if alone else None
        norm = lost = 0.0
        if first:
            delta = DeltaManifest(manifest, options.algo, change.kind, privacy=_bound(options.privacy), trained=tag)
            with CheckpointWriter(output, specs, as_metadata(delta_facts(delta))) as writer:
                norm, lost = write_changes(change.tensors(trained), writer)
            norm = change.norm(norm, output)
        else:
            for _ in change.tensors(trained):  # gathering a shard needs all processes
                pass
    if checkpoints and first:
        shutil.rmtree(checkpoints.folder)
    return Result(
        target, progress.losses, norm, first, spent, before, after, lost, len(earlier), float(training.lr), done
    )


@dataclass
class _Progress:
    """Shows the steps of a training, and keeps their losses."""

    observer: Observer
    epochs: int
    losses: list[Losses] = field(default_factory=list)

    def __call__(self, step: Losses, total: int) -> None:
        self.losses.append(step)
        kept = "" if step.retain_term is None else f" retain {step.retain_term:.3f}"
        self.observer.advance(self.epochs / total, f"loss {step.loss:.3f} = forget {step.forget_term:.3f}{kept}")


def _tell_memory(observer: Observer, most: int) -> None:
    observer.warn(
        f"out of memory: from here on, {most} record{'s' * (most > 1)} at once; --micro-batch-size {most} begins so"
    )


def _privately(trained: Iterable[str], data: Dataset, options: Unlearning, objective: Objective) -> Plan | None:
    """How DP-SGD trains the parameters of these names on ``data``; None if it was not asked for."""
    if options.privacy.dp_epsilon is None:
        return None
    check_opacus()
    check_private(trained)
    units = {name: [record.unit for record in held] for name, held in sets_of(data, objective).items()}
    return plan(units, options.training, options.privacy, epochs=epochs_of(options))


def _signs(
    copy: Model, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Dataset, examples: Sequence[Example],
    checks: Checks | None, state: PartialState, observer: Observer,
) -> list[Sign]:  # fmt: skip
    """Signs in the copy itself that it was built to carry records out, as far as ``checks`` look for them."""
    found: list[Sign] = []
    if checks and state.num_processes == 1:
        observer.stage("check the copy", 1, "done")
        found += traps(copy, model, examples, len(data.forget) + len(data.retain))
    elif checks:
        found.append(Sign("several processes train it, so its units were not looked at for traps"))
    if checks and checks.like and state.is_main_process:
        found += against_public(copy, tokenizer, open_model(checks.like), texts_of(data))
    return found


def _joined(options: Unlearning, data: Dataset) -> PartialState:
    """The processes that train together. Raises MpuError if they cannot reach each other, UsageError for DP-SGD on
    several."""
    # Without a GPU, "auto" means the CPU for the processes' communication, too.
    state = processes_of(device_of(options.training.device))
    if int(os.environ.get("WORLD_SIZE", "1")) != state.num_processes:
        raise MpuError(
            f"started as one of {os.environ['WORLD_SIZE']} processes, which cannot reach each other "
            f"({state.num_processes} here)",
            "start them with torchrun or accelerate launch",
        )
    if options.privacy.dp_epsilon is not None and (data.few_shot or state.num_processes > 1):
        raise UsageError("--dp-epsilon does not work with --few-shot or several processes")
    return state


def _of_round(options: Unlearning, manifest: CopyManifest | None) -> Unlearning:
    """``options`` with a seed of the copy's round, so that each has another order of the records; the same for all its
    copies."""
    if manifest is None:
        return options
    seed = (options.training.seed + manifest.round - 1) % 2**32
    return replace(options, training=replace(options.training, seed=seed))


def _warn_of_misfits(manifest: CopyManifest | None, data: Dataset, options: Unlearning, observer: Observer) -> None:
    if manifest and manifest.symmetries in ROTATED and OPTIMIZERS[options.training.optim].elementwise:
        observer.warn(
            f"{options.training.optim} scales each coordinate separately, but this copy's coordinates are rotated "
            f"(symmetries {manifest.symmetries}): the aggregate will be off even without noise. Use --optim "
            "adamw-blockwise, or ask the server for copies with --symmetries signed"
        )
    if both := {r.identity for r in data.forget} & {r.identity for r in data.retain}:
        observer.warn(
            f"{len(both)} of the records to forget are also in the retain set, which works against forgetting"
        )


def _written_down(
    ledger: Path, entry: Entry, privacy: Privacy, trusted: bool, observer: Observer
) -> tuple[Entry | None, Sequence[Entry]]:
    """``entry`` once it is in the ledger, and those before it; None if it cannot be written and no budget needs it."""
    try:
        return entry, write_down(ledger, entry, delta=privacy.dp_delta, budget=privacy.dp_budget, trusted=trusted)
    except OSError as error:
        if privacy.dp_epsilon is not None:
            raise MpuError(f"{ledger}: cannot be written: {error.strerror}, so no budget holds") from error
        observer.warn(f"{ledger}: {error.strerror}; this training is not in your ledger")
        return None, ()


def _bound(privacy: Privacy) -> dict[str, float] | None:
    """What the delta says of its privacy: the bound that was asked for, and no more. The exact figure, the sampling
    rate and the number of steps would tell the server how many records there are."""
    return None if privacy.dp_epsilon is None else {"epsilon": privacy.dp_epsilon, "delta": privacy.dp_delta}
