"""``mpu rehearse``: the server plays the client on records of its own, to know which step suits the real update."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.commands.secrets import opened_keys
from mpu_cli.commands.unlearn import Unlearn, UnlearnPlan
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.boundary import private_umask
from mpu_cli.files.manifest import read_copy_manifest, round_folder
from mpu_cli.lab.options.experiment import UNLEARN, USUAL
from mpu_cli.observer import SILENT, Observer, PrefixedObserver
from mpu_cli.options.command import BASE_AGAIN, KEYS, Command, Opening, Report, Table
from mpu_cli.options.declare import as_arguments, group, option
from mpu_cli.options.publishing import Aggregating
from mpu_cli.options.unlearning import Goal, Stopping, Unlearning
from mpu_cli.wording import command_line, counted

if TYPE_CHECKING:
    from mpu_cli.model.source import Model
    from mpu_cli.protocol.keys import Keys

# Both what is left and what is kept fall with the step, so that those which pass are next to each other.
TRIED_STEPS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2.0, 2.3, 2.6, 3.0)


@dataclass(frozen=True)
class TriedStep:
    """The outcome of a step along the update from BASE, as shares of what BASE knew: ``left`` of the records to forget,
    ``left_high`` two standard errors above, and ``kept`` of records that were held out. ``stands_out``: whether more
    records are known than chance and the limit allow, or one by half."""

    step: float
    left: float
    left_high: float
    kept: float
    stands_out: bool = False

    def passes(self, goal: Goal) -> bool:
        """Whether `mpu check` would pass it: not too much left, also of single records, nor so little that it shows."""
        from mpu_cli.measuring.verdict import INTERVAL_FACTOR

        forgotten = self.left <= goal.max_left and abs(self.left_high) <= INTERVAL_FACTOR * goal.max_left
        return forgotten and not self.stands_out and self.kept >= goal.min_kept


@dataclass(frozen=True)
class Rehearsal:
    """The steps that were ``tried`` for the publication of this ``round``; ``step``: the middle, as a ratio, of those
    that pass, None if none does."""

    tried: Sequence[TriedStep]
    goal: Goal
    round: int = 1

    @property
    def passing(self) -> list[float]:
        return [tried.step for tried in self.tried if tried.passes(self.goal)]

    @property
    def step(self) -> float | None:
        return round(math.sqrt(min(self.passing) * max(self.passing)), 2) if self.passing else None


@dataclass(frozen=True, kw_only=True)
class Rehearse(Command):
    """Play the client on records of your own, and find the step of `mpu aggregate` with which BASE forgets them.

    Trains each COPY on --forget and --retain, records that BASE knows, as `mpu unlearn` does, and tries the update on
    BASE, which the client cannot. How much of what a noisy copy forgets comes over depends on the model and its noise
    more than on the records. Prints the step, which `mpu aggregate` takes for deltas of this publication; nothing else
    is kept, and the client learns nothing. Exits with status 1 if no step passes.
    """

    NAME = "rehearse"
    EXAMPLE = "mpu rehearse copy_1 --keys keys.bin --forget known.jsonl --retain others.jsonl"
    ESSENTIAL = "--forget --retain --unseen --keys --base --goal --algo --device"

    copies: list[str] = option(..., "All copies of the publication, not sealed.", metavar="COPY…", argument=True)
    unlearning: Unlearning = group(Unlearning, fold=UNLEARN, apart=USUAL)
    goal: Goal = group(Goal)
    stopping: Stopping = group(Stopping, fold=UNLEARN)
    keys: Path = option(Path("keys.bin"), KEYS, metavar="FILE")
    base: str | None = option(None, BASE_AGAIN, metavar="MODEL")
    opening: Opening = group(Opening)

    def run(self, observer: Observer = SILENT) -> Rehearsal:
        """The steps that were tried."""
        from mpu_cli.model.source import open_model
        from mpu_cli.protocol.combine import aggregate, plan_aggregate
        from mpu_cli.protocol.deltas import owners_of
        from mpu_cli.protocol.keys import published_base
        from mpu_cli.protocol.updates import RehearsedStep, write_update

        keys = opened_keys(self.keys, self.opening, observer)
        base = published_base(keys, self.base)
        with private_umask(), tempfile.TemporaryDirectory(prefix="mpu-") as scratch:
            unlearn = Unlearn(
                copies=self.copies, unlearning=self.unlearning, goal=self.goal, stopping=self.stopping,
                out=f"{scratch}/deltas/", alone=True,
            )  # fmt: skip
            plan = unlearn.plan(observer)
            if plan.stopping_rule is None or not plan.data.held_out:
                raise UsageError(
                    "rehearse: needs a training until it is done, and records to hold out of it",
                    "leave out --epochs and --dp epsilon, and give --retain",
                )
            manifests = [read_copy_manifest(Path(copy)) for copy in plan.targets if Path(copy).is_dir()]
            if sorted(manifest.copy_id for manifest in manifests if manifest) != sorted(keys.copy_ids):
                raise MpuError(
                    f"{self.keys}: is of {counted(keys.copies, 'copy', 'copies')}, and not these",
                    "name all copies of its publication, as folders that are not sealed",
                )
            owners = owners_of(self._deltas(plan, observer), [keys])
            once = Aggregating(step=1.0, dtype="float32")
            update = plan_aggregate(base, owners, once, out=Path(scratch) / "model", trust_deltas=True)
            aggregate(update, observer=PrefixedObserver(observer, "aggregate"))
            updated = open_model(str(update.out))
            rehearsal = Rehearsal(_try_steps(base, updated, keys, plan, observer), self.goal, keys.round)
        if rehearsal.step is not None:
            write_update(RehearsedStep(keys.run, keys.round, keys.base.fingerprint, rehearsal.step), observer)
        return rehearsal

    def _deltas(self, plan: UnlearnPlan, observer: Observer) -> list[Path]:
        """Each copy's delta, in no ledger and without a tag."""
        from mpu_cli.model.source import open_model
        from mpu_cli.training.unlearn import UnlearningTask

        stopping_rule = plan.stopping_rule
        for copy, target in plan.targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            result = UnlearningTask(
                open_model(copy, links=False), plan.data, plan.options, target=target, stopping_rule=stopping_rule,
                observer=observer,
            ).run()  # fmt: skip
            if stopping_rule and stopping_rule.schedule is None:
                stopping_rule = replace(stopping_rule, schedule=result.schedule)
        return list(plan.targets.values())

    def tables(self, rehearsal: Rehearsal) -> Sequence[Table]:
        rows = [
            [f"{tried.step:g}", f"{tried.left:.1%}", f"{tried.kept:.1%}", "pass" if tried.passes(self.goal) else ""]
            for tried in rehearsal.tried
        ]
        return [Table("Of what BASE knew", ["step", "left of --forget", "kept of held-out --retain", ""], rows)]

    def report(self, rehearsal: Rehearsal, observer: Observer) -> Report:
        document = {"step": rehearsal.step, "steps": [asdict(tried) for tried in rehearsal.tried]}
        if rehearsal.step is None:
            observer.warn(
                "no step passes: less noise, more --retain records or another --algo may; a client's request would "
                "probably fail, too"
            )
            return Report([], document, status=1)
        deltas = round_folder(Path("deltas"), rehearsal.round)
        opening = [*(("--base", self.base) if self.base else ()), *as_arguments(self.opening)]
        aggregate = command_line("mpu", "aggregate", deltas, "--keys", self.keys, *opening)
        observer.note(f"next: `{aggregate}`, which takes this step")
        return Report([f"{rehearsal.step:g}"], document)


def _try_steps(base: Model, updated: Model, keys: Keys, plan: UnlearnPlan, observer: Observer) -> list[TriedStep]:
    """The shares that each of TRIED_STEPS from ``base`` towards ``updated`` leaves and keeps.

    Where the keys name the public model, it stands for a model that never saw the records, unless there are unseen
    records. Holds one model in float32; two, while the public one is scored.
    """
    import torch

    from mpu_cli.model.load import load
    from mpu_cli.protocol.step import steps_between
    from mpu_cli.training.examples import encoded_sets
    from mpu_cli.training.rates import scored_at_once
    from mpu_cli.training.stopping import Scorer
    from mpu_cli.training.unlearn import probabilities_under

    options, device = plan.options, plan.options.training.device
    model, tokenizer = load(base, torch.float32, device)
    examples, _ = encoded_sets(model, tokenizer, plan.data, options)
    at_once, public = scored_at_once(options.training, model.device), None
    if keys.reference is not None and "unseen" not in examples:
        public = probabilities_under(keys.reference, examples, at_once, device)
    scorer = Scorer(model, examples, at_once, public, plan.command.goal.max_left)
    go_to = steps_between(base, updated, model)
    observer.stage("try steps", len(TRIED_STEPS), "tried")
    tried = []
    for step in TRIED_STEPS:
        go_to(step)
        scores = scorer.score(model, 0)
        assert scores.kept is not None  # there are records held out
        if not math.isfinite(scores.left):
            raise MpuError(
                f"{base.source}: knows the records to forget no better than a model that never saw them, so nothing "
                "says when they are forgotten",
                "take records that only fine-tuning taught it, or compare with others by --unseen",
            )
        tried.append(TriedStep(step, scores.left, scores.left_high, scores.kept, scores.stands_out))
        observer.advance(1)
    return tried
