"""The client's step: ``unlearn``, and the plan of what it will read and write."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.api.paths import PathLike
from mpu_cli.api.sealed import opened_copy
from mpu_cli.checkpoint.reader import INDEX, open_checkpoint
from mpu_cli.client.checkpoints import last_checkpoint
from mpu_cli.client.checks import check_logging, check_options
from mpu_cli.client.dataset import Dataset, read_dataset
from mpu_cli.client.ledger import default_ledger_path
from mpu_cli.client.outcome import UnlearningResult
from mpu_cli.client.tag import client_secret, default_secret_path
from mpu_cli.client.unlearn import unlearn as run_unlearn
from mpu_cli.errors import MpuError, Stopped, UsageError
from mpu_cli.evaluation.answers import Shown, answers_before_and_after
from mpu_cli.manifest import delta_manifest, read_copy_manifest
from mpu_cli.models.source import Model, open_model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.declare import declared_options, with_keywords
from mpu_cli.options.unlearning import Checks, Logging, Unlearning
from mpu_cli.outputs import SUFFIX, delta_path, name_of_copy, round_of_copy
from mpu_cli.records.files import RECORD_SUFFIXES

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpu_cli.options.keywords import UnlearnKeywords


@dataclass(frozen=True)
class UnlearningTask:
    """A copy, where its delta goes, and the file of its reference probabilities."""

    copy: str
    target: Path
    reference_file: Path | None


@dataclass(frozen=True)
class UnlearnPlan:
    """``tasks``, one after the other; the records, ``data``; how they are trained on, ``options``, with ``checks`` of
    the copies and ``logging``; ``identity`` opens sealed copies; ``force`` replaces what is there."""

    tasks: Sequence[UnlearningTask]
    data: Dataset
    options: Unlearning
    checks: Checks
    logging: Logging
    identity: Path | None
    force: bool

    @property
    def warnings(self) -> list[str]:
        """What is probably wrong with the records."""
        return self.data.warnings()

    def most_signal(self, copy: Model) -> float:
        """The most that the records can move ``copy`` under --dp-epsilon, over what the noise moves it."""
        from mpu_cli.client.delta import delta_specs
        from mpu_cli.client.job import plan_privately
        from mpu_cli.client.losses import objective_of
        from mpu_cli.client.private import most_signal

        planned = plan_privately(self.data, self.options, objective_of(self.options.algo, self.options.loss))
        return most_signal(planned, sum(math.prod(shape) for _, shape in delta_specs(copy, self.options).values()))


@dataclass(frozen=True)
class Unlearned:
    """What came of one task. ``result``: None if its delta was there already; ``record_warnings``: what is probably
    wrong with the records that it was trained on."""

    task: UnlearningTask
    result: UnlearningResult | None
    answers: Sequence[Shown] = ()
    record_warnings: Sequence[str] = ()

    @property
    def warnings(self) -> list[str]:
        """What is probably wrong with the records, and with the training on them."""
        return [*self.record_warnings, *(self.result.warnings() if self.result else ())]


def plan_unlearn(
    copies: PathLike | Iterable[PathLike],
    *,
    out: PathLike | None = None,
    reference_file: PathLike | None = None,
    identity: PathLike | None = None,
    force: bool = False,
    options: Unlearning | None = None,
    checks: Checks | None = None,
    logging: Logging | None = None,
    observer: Observer = SILENT,
    **keywords: Unpack[UnlearnKeywords],
) -> UnlearnPlan:
    """What ``mpu unlearn`` with the same arguments will do: the records are read, and no model is.

    ``options``, ``checks`` and ``logging`` are groups of options; ``keywords`` are single ones, which win over the
    groups. The plan's ``warnings`` say what is probably wrong with the records.

    Raises UsageError for options that do not go together, and if one file would be that of several copies; MpuError for
    records that cannot be used.
    """
    single = dict(keywords)
    for_logging, for_checks = (
        {name: single.pop(name) for name in declared_options(group) if name in single} for group in (Logging, Checks)
    )
    logging = with_keywords(Logging, logging, for_logging)
    checks = with_keywords(Checks, checks, for_checks)
    how = with_keywords(Unlearning, options, single)
    data = read_dataset(how, observer)
    named = [str(copies)] if isinstance(copies, str | Path) else [str(copy) for copy in copies]
    tasks = _tasks(named, None if out is None else str(out), Path(reference_file) if reference_file else None)
    check_options(how)
    check_logging(logging, how.privacy)
    if how.privacy.dp_epsilon is not None:
        from mpu_cli.client.private import check_opacus  # imports torch

        check_opacus()
    return UnlearnPlan(tasks, data, how, checks, logging, Path(identity) if identity else None, force)


def unlearn(
    copy: PathLike,
    *,
    out: PathLike | None = None,
    reference_file: PathLike | None = None,
    force: bool = False,
    options: Unlearning | None = None,
    checks: Checks | None = None,
    logging: Logging | None = None,
    observer: Observer = SILENT,
    **keywords: Unpack[UnlearnKeywords],
) -> UnlearningResult:
    """``mpu unlearn``: train a copy to forget records, and write the change of its weights.

    Args:
        copy: a copy from ``publish``, any model directory, or a Hub id.
        out: the delta to write (default: deltas/COPY.safetensors; after round 1, deltas/round_R/COPY.safetensors).
        reference_file: the reference model's probabilities, written in round 1 and read in later rounds.
        force: replace a delta that exists.
        options: how to train, with names and ranges as on the command line; likewise ``checks`` and ``logging``.
        observer: hears of progress and of warnings about the records.
        keywords: single options, such as ``algo="npo"`` or ``forget="forget.jsonl"``, which win over the groups.

    Raises MpuError for a copy or records that cannot be used, UsageError for options that do not go together.
    """
    plan = plan_unlearn(
        copy, out=out, reference_file=reference_file, force=force, options=options, checks=checks, logging=logging,
        observer=observer, **keywords,
    )  # fmt: skip
    for warning in plan.warnings:
        observer.warn(warning)
    [task] = plan.tasks
    return _train(str(copy), task, plan, observer)


def unlearn_all(plan: UnlearnPlan, *, show: int = 0, observer: Observer = SILENT) -> Iterator[Unlearned]:
    """What comes of each task of ``plan``, as soon as it is done; with answers to the first ``show`` questions.

    With ``resume``, copies that have their delta are passed over. Sealed copies are opened beside their deltas while
    they are trained on.
    """
    for task in plan.tasks:
        with opened_copy(task.copy, task.target.parent, plan.identity, observer) as source:
            if plan.logging.resume and not plan.force and _has_delta(task, Path(source)):
                observer.note(f"{name_of_copy(task.copy)}: {task.target} is there already")
                yield Unlearned(task, None, record_warnings=plan.warnings)
                continue
            result = _train(source, task, plan, observer)
            answers: Sequence[Shown] = ()
            if show and result.is_main_process:
                answers = answers_before_and_after(
                    open_model(source, links=False), task.target, plan.data.forget[:show], plan.options.prompts,
                    plan.options.prompts.template, plan.options.training.device,
                )  # fmt: skip
        yield Unlearned(task, result, answers, plan.warnings)


def _train(source: str, task: UnlearningTask, plan: UnlearnPlan, observer: Observer) -> UnlearningResult:
    if task.reference_file:
        task.reference_file.parent.mkdir(parents=True, exist_ok=True)
    try:
        return run_unlearn(
            open_model(source, links=False), plan.data, plan.options, target=task.target, force=plan.force,
            logging=plan.logging, reference_file=task.reference_file,
            secret=lambda: client_secret(default_secret_path()), ledger=default_ledger_path(), checks=plan.checks,
            observer=observer,
        )  # fmt: skip
    except (KeyboardInterrupt, Stopped):
        resume_folder = task.target.with_name(f"{task.target.name}.resume")
        if plan.logging.resume and last_checkpoint(resume_folder):
            observer.note(f"checkpoints are kept in {resume_folder}: the same command goes on from the last one")
        elif plan.logging.resume:
            observer.note("there was no checkpoint yet: the same command starts over")
        else:
            observer.note(
                "nothing of this training is kept: with --resume, checkpoints are, and the same command goes on"
            )
        raise


def _tasks(copies: Sequence[str], out: str | None, reference_file: Path | None) -> list[UnlearningTask]:
    several = len(copies) > 1
    if several and out is not None and Path(out).suffix == SUFFIX:
        raise UsageError(f"--out {out}: one file for {len(copies)} deltas", "name a directory")
    tasks = []
    for copy in copies:
        if Path(copy).suffix in RECORD_SUFFIXES and not copy.endswith(INDEX):
            raise UsageError(f"{copy}: holds records and is no copy", "repeat --forget or --retain for several files")
        target = delta_path(f"{out}{os.sep}" if several and out is not None else out, copy, round_of_copy(Path(copy)))
        copy_reference_file = reference_file
        if reference_file is not None and several:
            if reference_file.is_file() or reference_file.suffix == SUFFIX:
                raise UsageError(f"--reference-file {reference_file}: one file for {len(copies)} copies",
                                 "name a directory")  # fmt: skip
            copy_reference_file = reference_file / (name_of_copy(copy) + SUFFIX)
        tasks.append(UnlearningTask(copy, target, copy_reference_file))
    if twice := sorted({str(t.target) for t in tasks if [o.target for o in tasks].count(t.target) > 1}):
        raise UsageError(f"{twice[0]}: would be the delta of two copies", "unlearn on them one after the other")
    return tasks


def _has_delta(task: UnlearningTask, opened: Path) -> bool:
    """Whether the delta of a copy, ``opened``, lies at its target. Raises MpuError if that of something else does."""
    if not task.target.exists():
        return False
    origin = read_copy_manifest(opened) if opened.is_dir() else None
    if origin is None or delta_manifest(open_checkpoint(task.target).metadata, task.target).origin != origin:
        raise MpuError(
            f"{task.target}: already exists, and is not the delta of {task.copy}", "use --force to replace it"
        )
    return True
