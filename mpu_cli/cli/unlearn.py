"""``mpu unlearn``: the client's side of the protocol."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import grouped
from mpu_cli.cli.output import emit, in_time, note, paths_from, show_answers, terminal, warn
from mpu_cli.errors import MpuError, Stopped, UsageError
from mpu_cli.options.unlearning import Checks, Logging, Records, Unlearning
from mpu_cli.outputs import SUFFIX, delta_path, name_of_copy, round_of_copy

if TYPE_CHECKING:
    from mpu_cli.client.dataset import Dataset
    from mpu_cli.client.outcome import Result
    from mpu_cli.evaluation.answers import Shown
    from mpu_cli.observer import Observer


@grouped
def unlearn(
    copies: Annotated[
        list[str],
        typer.Argument(
            help="Copies from `mpu publish` (sealed or not), any model directories or Hub ids, or - for names on "
            "standard input.",
            metavar="COPY…",
        ),
    ],
    unlearning: Unlearning,
    checks: Checks,
    logging: Logging,
    out: Annotated[
        str | None,
        typer.Option(
            help="The delta to write, or the directory for it (default: deltas/COPY.safetensors; after round 1, "
            "deltas/round_R/COPY.safetensors). Of several copies, the directory.",
            metavar="FILE",
        ),
    ] = None,
    reference_file: Annotated[
        Path | None,
        typer.Option(
            help="The reference model's probabilities: written in round 1, read in later rounds. For npo, dpo, "
            "undial and --retain-loss kl. Of several copies, a directory with a file for each.",
            metavar="FILE",
            rich_help_panel=Records.PANEL,
        ),
    ] = None,
    show: Annotated[
        int,
        typer.Option(help="Print answers to the first N questions to forget, before and after.", metavar="N", min=0),
    ] = 0,
    dry_run: options.DryRun = False,
    identity: options.Identity = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Unlearn the --forget records on each COPY and write the change in its weights, which is all that goes back.

    All copies of a round need the same options, or the noise does not cancel. Prints the path of each delta. With
    --resume, copies that have one already are passed over.
    """
    from mpu_cli.client.dataset import read_dataset

    # Read the records first, so that problems with them are found before anything large is loaded.
    data = read_dataset(unlearning)
    for warning in data.warnings():
        warn(warning)
    tasks = _tasks([str(path) for path in paths_from(copies)], out, reference_file)
    told: list[tuple[_Task, Result | None, list[Shown]]] = []

    with terminal() as observer:
        from mpu_cli.cli.secrets import opened_copy
        from mpu_cli.client.checks import check_logging, check_options
        from mpu_cli.models.source import open_model

        check_options(unlearning)  # before a sealed copy is opened
        check_logging(logging, unlearning.privacy)
        if dry_run:
            _preview(tasks, data, unlearning, force, as_json)
            return
        for task in tasks:
            with opened_copy(task.copy, identity, task.target) as source:
                if len(tasks) > 1 and logging.resume and not force and _has_delta(task, Path(source)):
                    observer.note(f"{name_of_copy(task.copy)}: {task.target} is there already")
                    told.append((task, None, []))
                    continue
                result = _run(source, task, data, unlearning, checks, logging, force, observer)
                answers = []
                if show and result.first:
                    from mpu_cli.evaluation.answers import answers_before_and_after

                    prompts = unlearning.prompts
                    answers = answers_before_and_after(
                        open_model(source, links=False), task.target, data.forget[:show], prompts, prompts.template,
                        unlearning.training.device,
                    )  # fmt: skip
            if result.first:
                _tell(task.copy, unlearning, result)
                show_answers(answers)
            told.append((task, result, answers))
            gc.collect()  # the model, which the next one needs room for
    if any(result and not result.first for _, result, _ in told):
        return
    documents = [
        {"copy": task.copy, "delta": task.target, **(_document(unlearning, result, answers) if result else {})}
        for task, result, answers in told
    ]
    emit([task.target for task in tasks], documents[0] if len(tasks) == 1 else {"deltas": documents}, as_json)


@dataclass(frozen=True)
class _Task:
    """A copy, where its delta goes, and the file of its reference probabilities."""

    copy: str
    target: Path
    reference_file: Path | None


def _tasks(copies: Sequence[str], out: str | None, reference_file: Path | None) -> list[_Task]:
    """What is to be done. Raises UsageError if one file would be that of several copies."""
    several = len(copies) > 1
    if several and out is not None and Path(out).suffix == SUFFIX:
        raise UsageError(f"--out {out}: one file for {len(copies)} deltas", "name a directory")
    tasks = []
    for copy in copies:
        target = delta_path(f"{out}{os.sep}" if several and out is not None else out, copy, round_of_copy(Path(copy)))
        own = reference_file
        if reference_file is not None and several:
            if reference_file.is_file() or reference_file.suffix == SUFFIX:
                raise UsageError(f"--reference-file {reference_file}: one file for {len(copies)} copies",
                                 "name a directory")  # fmt: skip
            own = reference_file / (name_of_copy(copy) + SUFFIX)
        tasks.append(_Task(copy, target, own))
    if twice := sorted({str(t.target) for t in tasks if [o.target for o in tasks].count(t.target) > 1}):
        raise UsageError(f"{twice[0]}: would be the delta of two copies", "unlearn on them one after the other")
    return tasks


def _has_delta(task: _Task, opened: Path) -> bool:
    """Whether the delta of a copy, ``opened``, lies at its target. Raises MpuError if that of something else does."""
    from mpu_cli.checkpoint.reader import open_checkpoint
    from mpu_cli.manifest import delta_manifest, read_copy_manifest

    if not task.target.exists():
        return False
    origin = read_copy_manifest(opened) if opened.is_dir() else None
    if origin is None or delta_manifest(open_checkpoint(task.target).metadata, task.target).origin != origin:
        raise MpuError(
            f"{task.target}: already exists, and is not the delta of {task.copy}", "use --force to replace it"
        )
    return True


def _run(
    source: str, task: _Task, data: Dataset, unlearning: Unlearning, checks: Checks, logging: Logging, force: bool,
    observer: Observer,
) -> Result:  # fmt: skip
    from mpu_cli.client.ledger import default_ledger_path
    from mpu_cli.client.tag import client_secret, default_secret_path
    from mpu_cli.client.unlearn import unlearn as run_unlearn
    from mpu_cli.models.source import open_model

    if task.reference_file:
        task.reference_file.parent.mkdir(parents=True, exist_ok=True)
    try:
        return run_unlearn(
            open_model(source, links=False), data, unlearning, target=task.target, force=force, logging=logging,
            reference_file=task.reference_file, secret=lambda: client_secret(default_secret_path()),
            ledger=default_ledger_path(), checks=checks, observer=observer,
        )  # fmt: skip
    except (KeyboardInterrupt, Stopped):
        kept = task.target.with_name(f"{task.target.name}.resume")
        if logging.resume and kept.exists():
            note(f"checkpoints are kept in {kept}: the same command goes on from the last one")
        else:
            note("nothing of this training is kept: with --resume, checkpoints are, and the same command goes on")
        raise


def _tell(copy: str, unlearning: Unlearning, result: Result) -> None:
    """What came of one copy, on standard error."""
    rounded = f" ({result.rounding:.2%} of it lost to {unlearning.delta_dtype})" if unlearning.delta_dtype else ""
    note(result.summary(name_of_copy(copy), unlearning.algo) + rounded)
    for warning in result.warnings():
        warn(warning)
    if result.spent:
        unit = unlearning.privacy.dp_unit or "record"
        note(
            f"privacy: this delta protects each {unit} with ε = {result.spent['epsilon']:.3g} at δ = "
            f"{unlearning.privacy.dp_delta:g}; {_together(result.spent, result.earlier)}"
        )


def _document(unlearning: Unlearning, result: Result, answers: Sequence[Shown]) -> dict[str, object]:
    """The same as JSON."""
    return {
        "algorithm": unlearning.algo,
        "lr": result.rate,
        "norm": result.norm,
        "lost_to_rounding": result.rounding,
        "before": asdict(result.before) if result.before else None,
        "after": asdict(result.after) if result.after else None,
        "warnings": result.warnings(),
        "privacy": result.spent,
        "answers": [asdict(answer) for answer in answers],
        "steps": [asdict(s) for s in result.steps],
    }


def _together(spent: Mapping[str, float], earlier: int) -> str:
    """What this delta spends together with those before it."""
    if not earlier:
        return "each further delta of these records spends more"
    total = spent["epsilon_of_ledger"]
    if math.isinf(total):
        return f"with the {earlier} trainings before it, no bound holds: some had no --dp-epsilon"
    return f"with the {earlier} trainings before it: ε = {total:.3g}"


def _preview(tasks: Sequence[_Task], data: Dataset, options: Unlearning, force: bool, as_json: bool) -> None:
    """What `mpu unlearn` would read and write. Steps are those of records that are one example each."""
    from mpu_cli.checkpoint.writer import nbytes_of
    from mpu_cli.cli.preview import Preview, show
    from mpu_cli.client.change import delta_specs
    from mpu_cli.client.checks import epochs_of
    from mpu_cli.client.rate import TOO_LITTLE, usual_rate, with_epochs, with_rate
    from mpu_cli.client.schedule import schedule
    from mpu_cli.experiment.cost import training_memory, training_seconds
    from mpu_cli.models.device import device_of
    from mpu_cli.models.source import open_model
    from mpu_cli.sealing import is_sealed

    options = with_epochs(options, len(data.forget))
    reads: list[tuple[object, int | None]] = []
    writes, memory = [], 0.0
    for task in tasks:
        if Path(task.copy).is_file() and is_sealed(Path(task.copy)):
            raise MpuError(f"{task.copy}: sealed, so it has to be opened first", "run it without --dry-run")
        model = open_model(task.copy, links=False)
        specs = delta_specs(model, options)
        reads.append((model.source, model.checkpoint.nbytes))
        writes.append((task.target, nbytes_of(specs)))
        trained = sum(info.elements for info in model.checkpoint.tensors.values())
        optimised = sum(math.prod(shape) for _, shape in specs.values())
        held = 4 * (trained - optimised if options.lora.lora_rank is None else trained)
        memory = max(memory, held + training_memory(optimised, options.training.optim))  # one after the other
    steps = len(
        schedule(
            len(data.forget), len(data.retain), epochs=epochs_of(options), batch_size=options.training.batch_size,
            seed=options.training.seed,
        )
    )  # fmt: skip
    training = with_rate(options, optimised, steps)
    notes = [
        f"{options.algo}, {epochs_of(options)} epochs of {training.batch_size} records a step: about {steps} steps at "
        f"a rate of {training.lr:.2g}; activations need memory on top"
    ]
    usual = usual_rate(options, optimised, steps)
    if usual and float(training.lr) < TOO_LITTLE * usual:
        notes.append(f"so few steps at this rate hardly forget: --lr auto would be {usual:.2g}; `mpu tune` finds both")
    if device_of(training.device).type == "cpu":
        seconds = training_seconds(open_model(tasks[0].copy, links=False), options, data.forget)
        notes.append(f"training takes about {in_time(len(tasks) * seconds)} on this machine's processors")
    show(
        Preview(
            reads=[*reads, (f"{len(data.forget)} records to forget", None),
                   (f"{len(data.retain)} records to keep", None)],
            writes=writes,
            memory=memory,
            notes=notes,
        ),
        force=force,
        as_json=as_json,
    )  # fmt: skip
