"""The beginning of a training on a copy: what is checked before anything is loaded, and the copy in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.checkpoint.writer import MAX_SHARD, TensorSpecs, nbytes_of
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
from mpu_cli.client.dataset import Dataset
from mpu_cli.client.datasets import sets_of
from mpu_cli.client.delta import Change, change_of, stored_specs
from mpu_cli.client.identity import (
    weights_of,
)
from mpu_cli.client.losses import Objective
from mpu_cli.client.optimizers import OPTIMIZERS
from mpu_cli.client.precision import in_precision
from mpu_cli.client.private import Plan, check_opacus, check_private, plan
from mpu_cli.client.rate import with_epochs
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.manifest import CopyManifest, read_copy_manifest
from mpu_cli.models.device import device_of, processes_of
from mpu_cli.models.loading import load, load_once_per_host
from mpu_cli.models.quantized import share_in_4_bits
from mpu_cli.models.source import Model
from mpu_cli.observer import Observer
from mpu_cli.options.unlearning import Checks, Logging, Unlearning


@dataclass(frozen=True)
class TrainingJob:
    """One training on a copy, before anything is loaded: what it is of, what was asked for, who takes part.

    ``options`` have the seed of the copy's round; ``read_reference``: whether the reference file exists and is read.
    """

    copy: Model
    manifest: CopyManifest | None
    data: Dataset
    options: Unlearning
    objective: Objective
    target: Path
    logging: Logging
    reference_file: Path | None
    read_reference: bool
    secret: Callable[[], bytes] | None
    ledger: Path | None
    checks: Checks | None
    observer: Observer
    processes: PartialState

    @property
    def is_main_process(self) -> bool:
        return self.processes.is_main_process

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process: of several, none has the whole model."""
        return self.processes.num_processes == 1


@dataclass(frozen=True)
class LoadedCopy:
    """The copy in memory, the change that is trained and where it goes (``output``, None but in the main process).

    ``fingerprint``: of the copy's weights, "" where nothing needs it; ``private``: how DP-SGD trains, None without it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    change: Change
    specs: TensorSpecs
    output: Path | None
    fingerprint: str
    private: Plan | None


def prepare_job(
    copy: Model, data: Dataset, options: Unlearning, target: Path, logging: Logging, reference_file: Path | None,
    secret: Callable[[], bytes] | None, ledger: Path | None, checks: Checks | None, observer: Observer,
) -> TrainingJob:  # fmt: skip
    """Check what can be checked before the model is loaded."""
    objective = check_options(options)
    options = with_epochs(options, len(data.forget))
    check_logging(logging, options.privacy)
    load_once_per_host()
    processes = _join_processes(options, data)
    manifest = read_copy_manifest(copy.folder, copy.checkpoint.metadata)
    options = _of_round(options, manifest)
    _warn_of_misfits(manifest, data, options, observer)
    read_reference = reference_file is not None and check_reference_file(reference_file, manifest, options, objective)
    processes.wait_for_everyone()  # all look for the reference file before the first one writes it
    return TrainingJob(
        copy, manifest, data, options, objective, target, logging, reference_file, read_reference, secret, ledger,
        checks, observer, processes,
    )  # fmt: skip


def load_copy(job: TrainingJob, transaction: Transaction) -> LoadedCopy:
    """Load the copy and find out, before hours of training, whether its delta can be written."""
    copy, options, training = job.copy, job.options, job.options.training
    dtype = PRECISIONS[training.precision]
    model, tokenizer = load(copy, dtype, training.device, training.attention, options.lora.quantize)
    in_precision(model, training.precision)
    if options.lora.quantize:
        job.observer.note(f"{share_in_4_bits(model):.0%} of the weights are held in 4 bits")
    change = change_of(options, model, copy.checkpoint, dtype)
    specs = stored_specs(change, model, options)
    output = transaction.add(job.target, directory=nbytes_of(specs) > MAX_SHARD) if job.is_main_process else None
    if job.is_alone:
        check_finite(model, copy)
    check_suits(model, tokenizer, job.data, options, job.objective)
    if options.prompts.template is None and not tokenizer.chat_template:
        job.observer.note("the copy's tokenizer has no chat template: records are read as 'Question: … Answer: …'")
    private = _privately(change.trainable_names(model), job.data, options, job.objective)
    fingerprint = weights_of(copy) if job.is_main_process and (job.ledger or job.logging.resume) else ""
    return LoadedCopy(model, tokenizer, change, specs, output, fingerprint, private)


def _privately(trained: Iterable[str], data: Dataset, options: Unlearning, objective: Objective) -> Plan | None:
    """How DP-SGD trains the parameters of these names on ``data``; None if it was not asked for."""
    if options.privacy.dp_epsilon is None:
        return None
    check_opacus()
    check_private(trained)
    return plan_privately(data, options, objective)


def plan_privately(data: Dataset, options: Unlearning, objective: Objective) -> Plan:
    """How often DP-SGD reads each record or person, and its noise."""
    units = {name: [record.unit for record in records] for name, records in sets_of(data, objective).items()}
    return plan(units, options.training, options.privacy, epochs=epochs_of(options))


def _join_processes(options: Unlearning, data: Dataset) -> PartialState:
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
    if overlap := {r.identity for r in data.forget} & {r.identity for r in data.retain}:
        observer.warn(
            f"{len(overlap)} of the records to forget are also in the retain set, which works against forgetting"
        )
