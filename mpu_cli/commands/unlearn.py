"""``mpu unlearn``: the client's side of the protocol."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.errors import MpuError, Stopped, UsageError
from mpu_cli.files.manifest import (
    REQUEST_FOLDER,
    SUFFIX,
    CopyManifest,
    delta_manifest,
    delta_path,
    name_of_copy,
    read_copy_manifest,
    resume_folder,
    round_of_copy,
)
from mpu_cli.files.transaction import Transaction, check_place
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import FORCE, IDENTITY, Command, Preview, Report, paths_from
from mpu_cli.options.declare import flags_set, group, option
from mpu_cli.options.unlearning import Checks, Goal, Logging, Records, Stopping, Unlearning
from mpu_cli.plugins import extension
from mpu_cli.subprocesses import process_count
from mpu_cli.wording import command_line, counted, few, in_bytes

if TYPE_CHECKING:
    from mpu_cli.measuring.cost import Memory, Work
    from mpu_cli.measuring.generation import Shown
    from mpu_cli.training.data import Dataset
    from mpu_cli.training.ledger import RoundSchedule
    from mpu_cli.training.requests import Source
    from mpu_cli.training.stopping import StoppingRule
    from mpu_cli.training.unlearn import UnlearningResult


@dataclass(frozen=True)
class Unlearned:
    """The outcome for one copy. ``result``: None if its delta was there already; ``record_warnings``: about records
    that it was trained on and that are probably wrong."""

    copy: str
    delta: Path
    result: UnlearningResult | None
    answers: Sequence[Shown] = ()
    record_warnings: Sequence[str] = ()

    @property
    def warnings(self) -> list[str]:
        """Probable mistakes in the records, and in the training on them."""
        return [*self.record_warnings, *(self.result.warnings() if self.result else ())]


@dataclass(frozen=True)
class UnlearnPlan:
    """The trainings that ``command`` will carry out, one on each copy in turn."""

    command: Unlearn
    targets: Mapping[str, Path]  # of the deltas, by copy
    data: Dataset
    options: Unlearning
    stopping_rule: StoppingRule | None  # None for a number of epochs
    sources: Sequence[Source]  # of the records to forget: this request's, then earlier ones' on the same copies
    expected_weights: Mapping[str, str]  # by copy, the fingerprint that earlier requests noted
    notes: Path | None = None  # folder of the ledger and the note of requests, None for the user's configuration

    @property
    def warnings(self) -> list[str]:
        """Probable mistakes in the records."""
        return self.data.warnings(self.options.privacy)

    def _path(self, default: Path) -> Path:
        """The path of the client's ledger or note of requests."""
        return default if self.notes is None else self.notes / default.name

    def passes_over(self, copy: str, opened: Path) -> bool:
        """Whether --resume passes over ``copy``, which is ``opened``: its delta is there already."""
        from mpu_cli.files.reader import open_checkpoint

        target = self.targets[copy]
        if not self.command.logging.resume or self.command.force or not target.exists():
            return False
        origin = read_copy_manifest(opened)
        if origin is None or delta_manifest(open_checkpoint(target).metadata, target).origin != origin:
            raise MpuError(f"{target}: already exists, and is not the delta of {copy}", "use --force to replace it")
        return True

    def carry_out(self, observer: Observer = SILENT) -> list[Unlearned]:
        """The outcome for each copy, reported to ``observer`` as soon as it is there.

        With --resume, copies that have their delta are passed over.
        """
        from mpu_cli.files.sealing import opened_copy
        from mpu_cli.measuring.generation import answers_before_and_after
        from mpu_cli.model.source import open_model

        command = self.command
        for warning in self.warnings:
            observer.warn(warning)
        if not command.logging.resume and process_count() == 1:  # before the first training, not after it
            for target in self.targets.values():
                Transaction(force=command.force).check(target, target.is_dir())
        outcomes = []
        schedules: dict[tuple[str, int] | None, RoundSchedule] = {}  # by run and round, of the first copy
        for copy, target in self.targets.items():
            with opened_copy(copy, command.identity, observer) as source:
                if self.passes_over(copy, Path(source)):
                    observer.note(f"{name_of_copy(copy)}: {target} is there already")
                    shutil.rmtree(resume_folder(target), ignore_errors=True)  # left if it was killed before that
                    outcomes.append(Unlearned(copy, target, None, record_warnings=self.warnings))
                    continue
                manifest = read_copy_manifest(Path(source))
                round_id = (manifest.run, manifest.round) if manifest else None
                if manifest and not command.alone:
                    self._warn_of_requests_without_note(manifest, observer)
                note = partial(self._note, copy, manifest, observer)
                result = self._train(copy, source, observer, schedules.get(round_id), note)
                if round_id and result.schedule:
                    schedules.setdefault(round_id, result.schedule)
                answers: Sequence[Shown] = ()
                if command.show and result.is_main_process:
                    answers = answers_before_and_after(
                        open_model(source, links=False), target, self.data.forget[: command.show],
                        self.options.prompts, self.options.training.device,
                    )  # fmt: skip
            outcomes.append(Unlearned(copy, target, result, answers, self.warnings))
            if result.is_main_process:
                self._tell(copy, manifest, result, observer)
                for answer in answers:
                    observer.show(str(answer))
        return outcomes

    def _tell(self, copy: str, manifest: CopyManifest | None, result: UnlearningResult, observer: Observer) -> None:
        """The outcome of one copy."""
        if result.schedule and manifest and manifest.copies > len(self.targets):
            schedule = ":".join(map(str, astuple(result.schedule)))
            observer.note(
                f"other copies of this publication, if another machine trains them, take --round-schedule {schedule}"
            )
        dtype = self.options.delta_dtype
        rounded = f" ({result.rounding:.2%} of it lost to {dtype})" if dtype else ""
        observer.note(result.summary(name_of_copy(copy), self.options.algo) + rounded)
        for warning in result.warnings():
            observer.warn(warning)
        if result.spent:
            privacy, total = self.options.privacy, result.spent["epsilon_of_ledger"]
            together = "each further delta of these records spends more"
            if result.earlier:
                together = f"with the {result.earlier} trainings before it: ε = {total:.3g}"
                if math.isinf(total):
                    together = (
                        f"with the {result.earlier} trainings before it, no bound holds: some had no --dp epsilon"
                    )
            observer.note(
                f"privacy: this delta protects each {privacy.dp_unit or 'record'} with ε = "
                f"{result.spent['epsilon']:.3g} at δ = {privacy.dp_delta:g} (neighbours: {privacy.dp_neighbours}); "
                f"{together}"
            )

    def _note(
        self, copy: str, manifest: CopyManifest | None, observer: Observer, result: UnlearningResult, written: Path
    ) -> None:
        """Write the request down for the next one on the same copy, and for the check. Before the delta, still in the
        file ``written``, gets its name: a later training replaces it, and has to know what is in it."""
        from mpu_cli.files.reader import fingerprint, open_checkpoint
        from mpu_cli.training.requests import (
            Request,
            default_requests_path,
            options_to_note,
            read_requests,
            requests_alike,
            write_request,
        )

        if manifest is None or result.schedule is None or self.options.privacy.public_records:
            return
        command = self.command
        request = Request(
            run=manifest.run, round=manifest.round, copy=manifest.copy, copy_id=manifest.copy_id,
            copy_path=str(Path(copy).absolute()), weights=result.weights,
            change=fingerprint(open_checkpoint(written)), sources=[*self.sources],
            options=options_to_note(self.options, command.goal, command.checks),
        )  # fmt: skip
        path = self._path(default_requests_path())
        earlier = read_requests(path)
        if request in earlier:  # killed before the delta got its name
            return
        alike = [other for other in requests_alike(request, earlier) if other.copy == request.copy]
        if len(alike) > 1:
            observer.warn(
                f"delta {len(alike) + 1} of these records for run {request.run}: each tells the server more; ask why "
                "its model does not pass"
            )
        try:
            write_request(path, request)
        except OSError as error:
            observer.warn(f"{path}: {error.strerror}; a further request on this copy has to name these records again")

    def _warn_of_requests_without_note(self, manifest: CopyManifest, observer: Observer) -> None:
        """Warn of trainings on the copy that are in the ledger alone: the new delta takes the place of theirs."""
        from mpu_cli.training.data import records_digest
        from mpu_cli.training.ledger import default_ledger_path, read_ledger
        from mpu_cli.training.requests import default_requests_path, read_requests

        ledger, note = self._path(default_ledger_path()), self._path(default_requests_path())
        copy, records = (manifest.run, manifest.round, manifest.copy), records_digest(self.data)
        trainings = set()  # by their records: one that failed was repeated, perhaps at another rate
        for entry in read_ledger(ledger):
            if (entry.run, entry.round, entry.copy) == copy and entry.schedule and not entry.public:
                trainings.add(entry.data)
        count = len(trainings - {records})
        requests = sum((request.run, request.round, request.copy) == copy for request in read_requests(note))
        if count > requests:
            observer.warn(
                f"{ledger} has {counted(count, 'earlier request')} on this copy, {note} has {requests or 'none'}: "
                "name their records with --forget, too, as the new delta takes the place of the one that you sent"
            )

    def _train(
        self,
        copy: str,
        source: str,
        observer: Observer,
        schedule: RoundSchedule | None,
        on_written: Callable[[UnlearningResult, Path], None],
    ) -> UnlearningResult:
        """Train on ``copy``, which is opened at ``source``."""
        from mpu_cli.model.source import open_model
        from mpu_cli.training.execution import last_checkpoint
        from mpu_cli.training.ledger import default_ledger_path, own_client_secret
        from mpu_cli.training.unlearn import UnlearningTask

        command, target = self.command, self.targets[copy]
        stopping_rule = self.stopping_rule
        if stopping_rule and schedule:
            stopping_rule = replace(stopping_rule, schedule=schedule)
        reference_file = command.reference_file
        if reference_file and len(self.targets) > 1:
            reference_file = reference_file / (name_of_copy(copy) + SUFFIX)
        if reference_file:
            reference_file.parent.mkdir(parents=True, exist_ok=True)
        task = UnlearningTask(
            open_model(source, links=False), self.data, self.options, target=target, force=command.force,
            logging=command.logging, reference_file=reference_file, secret=own_client_secret,
            ledger=self._path(default_ledger_path()), checks=command.checks, stopping_rule=stopping_rule,
            expected_weights=self.expected_weights.get(copy), on_written=on_written, observer=observer,
        )  # fmt: skip
        try:
            return task.run()
        except (KeyboardInterrupt, Stopped):
            folder = resume_folder(target)
            if command.logging.resume and last_checkpoint(folder):
                observer.note(f"checkpoints are kept in {folder}: the same command goes on from the last one")
            elif command.logging.resume:
                observer.note("there was no checkpoint yet: the same command starts over")
            else:
                observer.note(
                    "nothing of this training is kept: with --resume, checkpoints are, and the same command goes on"
                )
            raise


@dataclass(frozen=True, kw_only=True)
class Unlearn(Command):
    """Unlearn the --forget records on each COPY and write the change in its weights, which is all that goes back.

    Trains until the records are forgotten and the others kept, or for --epochs. All copies of a round need the same
    options, or the noise does not cancel; they take as many steps as the first one. Prints the path of each delta. With
    --resume, copies that have one already are passed over.

    A further request on a copy that you kept unlearns the records of the earlier ones, too, from the files that they
    were in, and the new delta takes the place of the earlier one.
    """

    NAME = "unlearn"
    EXAMPLE = "mpu unlearn copy_1 --forget forget.jsonl --retain retain.jsonl --unseen unseen.jsonl"
    ESSENTIAL = (
        "--algo --forget --retain --unseen --public --lr --epochs --batch-size --columns --encoding --out --show "
        "--resume --device"
    )

    copies: list[str] = option(
        ...,
        "Copies from `mpu publish` (sealed or not), any model directories or Hub ids, or - for names on standard "
        "input.",
        metavar="COPY…",
        argument=True,
    )
    unlearning: Unlearning = group(Unlearning)
    goal: Goal = group(Goal)
    stopping: Stopping = group(Stopping)
    checks: Checks = group(Checks)
    logging: Logging = group(Logging)
    out: str | None = option(
        None,
        "The delta to write, or the directory for it (default: deltas/COPY.safetensors; after round 1, "
        "deltas/round_R/COPY.safetensors). Of several copies, the directory.",
        metavar="FILE",
    )
    reference_file: Path | None = option(
        None,
        "The reference model's probabilities: written in round 1, read in later rounds. For npo, dpo, undial and "
        "--constants retain_loss=kl. Of several copies, a directory with a file for each.",
        metavar="FILE",
        panel=Records.PANEL,
    )
    alone: bool = option(
        False,
        "Leave out earlier requests on the same copy: the new delta does not take the place of the earlier one.",
        panel=Records.PANEL,
    )
    round_schedule: str | None = option(
        None,
        "What `unlearn` printed for the first copy of the publication, on another machine: its steps, of how many "
        "planned ones, level, share, α, which all copies have in common.",
        metavar="S:P:B:C:A",
        panel=Stopping.PANEL,
    )
    show: int = option(0, "Print answers to the first N questions to forget, before and after.", metavar="N", least=0)
    identity: Path | None = option(None, IDENTITY, metavar="FILE")
    force: bool = option(False, FORCE, in_files=False)

    def plan(self, observer: Observer = SILENT) -> UnlearnPlan:
        """The plan of the work: the records are read, and no model is.

        Trains until the goal is reached, unless a number of epochs or a privacy bound fixes the number of steps, or
        several processes share them.
        """
        from mpu_cli.training.data import read_dataset, with_unseen

        copies = [str(path) for path in paths_from(self.copies)]  # first: what writes them would find a closed pipe
        data = read_dataset(self.unlearning, observer)  # before the imports below, which take seconds
        from mpu_cli.training.checks import check_logging, check_options, in_float32_if_private
        from mpu_cli.training.requests import (
            default_requests_path,
            earlier_records,
            read_requests,
            requests_before,
            source_of,
        )
        from mpu_cli.training.stopping import StoppingRule, hold_out

        options = in_float32_if_private(self.unlearning, observer)
        stopping_rule = None
        if options.epochs is None and not options.privacy.is_on and process_count() == 1:
            schedule = _round_schedule(self.round_schedule) if self.round_schedule else None
            stopping_rule = StoppingRule(self.goal, self.stopping, schedule)
            data = hold_out(data, self.goal.held_out)
            if self.goal.unseen:
                data = with_unseen(data, self.goal.unseen, options.records.reading, observer)
        elif flags := [
            *flags_set(self, self.goal, self.stopping),
            *(["--round-schedule"] if self.round_schedule else []),
        ]:
            fixing = [flag for flag in flags_set(self, self.unlearning) if flag in ("--epochs", "--dp epsilon")]
            raise UsageError(
                f"{', '.join(flags)}: only for a training that stops when it is done",
                f"leave out {' and '.join(fixing)}" if fixing else "use one process",
            )
        targets = self._targets(copies)
        sources = [source_of(options, data.forget)]
        manifests = {copy: read_copy_manifest(Path(copy)) for copy in copies}
        # read in any case: damage shows before the training
        before = requests_before(sources[0], manifests, read_requests(default_requests_path()))
        expected_weights: Mapping[str, str] = {}
        if self.alone:
            before = {}
        if stopping_rule and not options.privacy.public_records:
            if earlier := earlier_records(before, copies, sources[0], observer):
                sources += earlier.sources
                data = replace(data, forget=[*data.forget, *earlier.records])
                expected_weights = earlier.weights
                if self.out is None:  # the earlier deltas stay
                    folder = f"{REQUEST_FOLDER}{earlier.number}"
                    targets = {copy: target.parent / folder / target.name for copy, target in targets.items()}
        elif before:
            observer.warn(
                "these copies have had earlier requests, which are only unlearned together with others by a training "
                "on private records that stops when it is done: on the server, this delta takes the place of theirs"
            )
        check_options(options, stopping_rule.goal if stopping_rule else None)
        check_logging(self.logging, options.privacy)
        if options.privacy.is_on:
            extension("private").check_opacus()
        return UnlearnPlan(
            command=self, targets=targets, data=data, options=options, stopping_rule=stopping_rule, sources=sources,
            expected_weights=expected_weights,
        )  # fmt: skip

    def run(self, observer: Observer = SILENT) -> list[Unlearned]:
        """The deltas of all copies; warnings go to ``observer``."""
        return self.plan(observer).carry_out(observer)

    def report(self, outcomes: list[Unlearned], observer: Observer) -> Report:
        if any(outcome.result and not outcome.result.is_main_process for outcome in outcomes):
            return Report([], None)  # the main process reports
        documents = [
            {
                "copy": outcome.copy,
                "delta": outcome.delta,
                **(outcome.result.facts(self.unlearning.algo) if outcome.result else {}),
                "answers": [asdict(answer) for answer in outcome.answers],
                "warnings": outcome.warnings,
            }
            for outcome in outcomes
        ]
        deltas = few([command_line(outcome.delta) for outcome in outcomes])
        copies = few([command_line(Path(outcome.copy)) for outcome in outcomes])
        audit = command_line("mpu", "audit-delta", Path(outcomes[0].copy), outcomes[0].delta)
        observer.note(
            f"next: send {deltas} to the model's owner (`{audit}` shows what it tells), and keep {copies} and your "
            "records: `mpu check` needs them, for the new model may forget less than the copy"
        )
        document = documents[0] if len(documents) == 1 else {"deltas": documents}
        return Report([outcome.delta for outcome in outcomes], document)

    def _targets(self, copies: Sequence[str]) -> dict[str, Path]:
        """The path of each copy's delta."""
        from mpu_cli.files.reader import INDEX
        from mpu_cli.records.read import RECORD_SUFFIXES

        several, out, references = len(copies) > 1, self.out, self.reference_file
        if out is not None:
            check_place(Path(out))
        if several and out is not None and Path(out).suffix == SUFFIX:
            raise UsageError(f"--out {out}: one file for {len(copies)} deltas", "name a directory")
        if several and references is not None and (references.is_file() or references.suffix == SUFFIX):
            raise UsageError(f"--reference-file {references}: one file for {len(copies)} copies", "name a directory")
        targets: dict[str, Path] = {}
        for copy in copies:
            # A shell's pattern may name them; the index of a sharded model is JSON, too.
            if Path(copy).suffix in RECORD_SUFFIXES and not copy.endswith(INDEX):
                raise UsageError(
                    f"{copy}: holds records and is no copy", "repeat --forget or --retain for several files"
                )
            # With a separator at its end, it is a directory.
            folder = f"{out}{os.sep}" if several and out is not None else out
            target = delta_path(folder, copy, round_of_copy(Path(copy)))
            if target in targets.values():
                raise UsageError(f"{target}: would be the delta of two copies", "unlearn on them one after the other")
            targets[copy] = target
        return targets

    def preview(self, observer: Observer) -> Preview | Report:
        """The number of steps assumes one example a record; copies that have their delta are left out."""
        from mpu_cli.files.sealing import is_sealed
        from mpu_cli.files.writer import nbytes_of
        from mpu_cli.measuring.cost import training_cost
        from mpu_cli.model.source import open_model
        from mpu_cli.training.checks import misfits, plan_privately
        from mpu_cli.training.delta import delta_specs
        from mpu_cli.training.execution import KEPT_CHECKPOINTS
        from mpu_cli.training.losses import objective_of
        from mpu_cli.training.rates import HARDLY_FORGETS, remarks_on_warmup

        plan = self.plan(observer)
        for warning in plan.warnings:
            observer.warn(warning)
        if sealed := [copy for copy in plan.targets if Path(copy).is_file() and is_sealed(Path(copy))]:
            raise MpuError(f"{sealed[0]}: sealed, so it has to be opened first", "run it without --dry-run")
        models = [open_model(copy, links=False) for copy in plan.targets]
        for model in models:
            for warning in misfits(read_copy_manifest(model.folder, model.checkpoint.metadata), plan.options):
                observer.warn(warning)
        # Copies of a round are alike, and trained one after the other: the largest is counted.
        largest = max(models, key=lambda model: model.checkpoint.nbytes)
        cost = training_cost(largest, plan.data, plan.options, plan.stopping_rule)
        for warning in remarks_on_warmup(plan.options.training, cost.steps):
            observer.warn(warning)
        batch = counted(plan.options.training.batch_size, "record")
        if cost.kept:
            batch += f" to forget and {cost.kept} to keep"
        steps = f"about {counted(cost.steps, 'step')}, {counted(cost.epochs, 'epoch')}"
        if plan.stopping_rule:
            steps = f"until it is done, {counted(cost.steps, 'step')} at most"
        notes = [
            f"{plan.options.algo}, {batch} a step: {steps} at a rate of {cost.rate:.2g}",
            f"memory at its peak: {memory_of(cost.memory, cost.work)}",
        ]
        if cost.usual_rate and cost.rate < HARDLY_FORGETS * cost.usual_rate:
            notes.append(
                f"so few steps at this rate hardly forget: --lr auto would be {cost.usual_rate:.2g}; `mpu tune` finds "
                "both"
            )
        if plan.options.privacy.is_on:
            planned = plan_privately(
                plan.data, plan.options, objective_of(plan.options.algo, plan.options.algorithm_options)
            )
            weights = sum(math.prod(shape) for _, shape in delta_specs(models[0], plan.options).values())
            signal = extension("private").most_signal(planned, weights)
            notes.append(
                f"privacy: the noise is at least {1 / signal:.2g} times what the records change, even if all of them "
                "pull the same way; `mpu surrogate` forgets what many records share at a smaller price"
            )
        checkpoints = KEPT_CHECKPOINTS * int(cost.memory.weights + cost.memory.state) if self.logging.resume else 0
        if checkpoints:
            notes.append(f"checkpoints of --resume take {in_bytes(checkpoints)} beside the delta while it trains")
        sets = {"to forget": plan.data.forget, "to keep": plan.data.retain}
        records = [(f"{counted(len(members), 'record')} {name}", None) for name, members in sets.items()]
        writes = []
        for (copy, target), model in zip(plan.targets.items(), models, strict=True):
            if not plan.passes_over(copy, Path(copy)):
                writes.append((target, nbytes_of(delta_specs(model, plan.options))))
        if not writes:
            return Report(["all deltas are there already"], {"reads": [], "writes": []})
        return Preview(
            reads=[*((model.source, model.checkpoint.nbytes) for model in models), *records],
            writes=writes,
            scratch=checkpoints,
            memory=cost.memory.total,
            notes=notes,
        )


def _round_schedule(text: str) -> RoundSchedule:
    """The schedule that ``unlearn`` printed."""
    import msgspec

    from mpu_cli.training.ledger import RoundSchedule

    names = [field.name for field in fields(RoundSchedule)]
    try:
        return msgspec.convert(dict(zip(names, text.split(":"), strict=True)), RoundSchedule, strict=False)
    except ValueError as error:
        raise UsageError(
            f"--round-schedule {text}: not a schedule", "give it as `mpu unlearn` printed it, such as 60:180:-6.5:1:10"
        ) from error


def memory_of(memory: Memory, work: Work) -> str:
    """The parts of a training's memory."""
    return (
        f"weights {in_bytes(memory.weights)}, gradients and the optimiser "
        f"{in_bytes(memory.gradients + memory.state + memory.fragments)}, "
        f"activations and logits of {counted(work.rows, 'record')} of {counted(work.length, 'token')} "
        f"{in_bytes(memory.activations + memory.logits)}"
    )
