"""``mpu run`` until it is a pass: publish, unlearn, aggregate and check, and on from the checked copy.

DIR/server/round_R/keys.bin, deltas/, model
DIR/client/round_R/copy_K   of round R + 1, the copies on which the client checks the model of round R
DIR/run.json                what was requested
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mpu_cli.commands.aggregate import Aggregate
from mpu_cli.commands.check import Check
from mpu_cli.commands.publish import Publish
from mpu_cli.commands.unlearn import Unlearn
from mpu_cli.errors import UsageError
from mpu_cli.files.resumption import alone_in
from mpu_cli.lab.options.experiment import Experiment
from mpu_cli.lab.rounds import begin, facts_of, rounds_of
from mpu_cli.measuring.verdict import Verdict
from mpu_cli.observer import SILENT, Observer, PrefixedObserver
from mpu_cli.options.evaluation import Checking, Scoring
from mpu_cli.options.publishing import Aggregating, Publishing
from mpu_cli.options.unlearning import Checks, Goal, Logging, Stopping
from mpu_cli.training.data import read_dataset

MOST_ROUNDS = 3  # each of which is one more draw of the noise that hides the weights


@dataclass(frozen=True)
class PlayedRequest:
    """The result of a request: the last round's model, and the verdict on the model of each round."""

    model: Path
    verdicts: Sequence[Verdict]

    @property
    def passed(self) -> bool:
        return self.verdicts[-1].passes


def run_until_pass(
    experiment: Experiment, goal: Goal, stopping: Stopping, folder: Path, observer: Observer = SILENT
) -> PlayedRequest:
    """Play both parties, as their commands would, until the client's verdict is a pass, or one that another round makes
    no better, or for as many rounds as ``experiment`` has, MOST_ROUNDS by default. An interrupted run resumes.

    ``experiment``: one that ``stops_when_done``.
    """
    if experiment.loss_reference != "original":
        raise UsageError("--loss-reference: needs a fixed number of epochs", "add --epochs, or leave it out")
    experiment = replace(experiment, rounds=experiment.rounds or MOST_ROUNDS)
    experiment.step_options.check_step()
    facts = facts_of(experiment, read_dataset(experiment.unlearning))
    begin(folder, {**facts, "until": {**asdict(goal), **asdict(stopping)}})
    with alone_in(folder, "run", "--out"):
        return _Rounds(experiment, goal, stopping, folder, observer).play()


@dataclass(frozen=True)
class _Rounds:
    experiment: Experiment
    goal: Goal
    stopping: Stopping
    folder: Path
    observer: Observer

    def play(self) -> PlayedRequest:
        most = rounds_of(self.experiment)
        model, verdicts = Path(self.experiment.base), []
        self._publish(model, 1)
        for number in range(1, most + 1):
            observer = PrefixedObserver(self.observer, f"round {number}, of {most} at most")
            model = self._unlearn_and_aggregate(model, number, observer)
            self._publish(model, number + 1)
            verdict = self._check(number, observer)
            observer.note(f"{verdict.sentence} (left {verdict.left}, kept {verdict.kept})")
            verdicts.append(verdict)
            if not verdict.needs_another_round:
                break
        return PlayedRequest(model, verdicts)

    def _copies(self, number: int) -> Path:
        return self.folder / "client" / f"round_{number}"

    def _server(self, number: int) -> Path:
        return self.folder / "server" / f"round_{number}"

    def _publish(self, model: Path, number: int) -> None:
        if self._copies(number).exists():  # all of its copies: they get their names together
            return
        self._server(number).mkdir(parents=True, exist_ok=True)
        publish = Publish(
            base=str(model),
            public=self.experiment.public,
            out=self._copies(number),
            keys=self._server(number) / "keys.bin",
            seed=self.experiment.secret_seed,
            force=True,
            publishing=Publishing(disguise=self.experiment.disguise, stored=self.experiment.stored),
        )
        observer = PrefixedObserver(self.observer, f"round {number}")
        plan = publish.plan(observer)
        # Nobody receives these copies: they are not in the server's register, and have none of its permanent noise.
        played = replace(plan.publication, is_registered=False, derive_permanent_seed=False)
        publish.carry_out(replace(plan, publication=played), observer)

    def _unlearn_and_aggregate(self, base: Path, number: int, observer: Observer) -> Path:
        model, deltas = self._server(number) / "model", self._server(number) / "deltas"
        if model.exists():
            return model
        unlearn = Unlearn(
            copies=[str(copy) for copy in sorted(self._copies(number).glob("copy_*"))],
            out=f"{deltas}/",
            unlearning=self.experiment.unlearning,
            goal=self.goal,
            stopping=self.stopping,
            checks=Checks(public=self.experiment.public, trust_copy=True),  # they are the run's own
            logging=Logging(resume=True),
            alone=True,
        )
        # A rehearsal is none of the user's own trainings and requests.
        replace(unlearn.plan(observer), notes=self.folder / "client").carry_out(observer)
        aggregate = Aggregate(
            deltas=[str(deltas)],
            keys=[self._server(number) / "keys.bin"],
            base=str(base),
            out=model,
            aggregating=Aggregating(**vars(self.experiment.step_options), **vars(self.experiment.stored)),
        )
        aggregate.carry_out(aggregate.plan(observer), observer)
        return model

    def _check(self, number: int, observer: Observer) -> Verdict:
        """The client's verdict on the model of round ``number``: on the first copy of the next."""
        unlearning = self.experiment.unlearning
        how = Checking(
            forget=unlearning.records.forget,
            retain=unlearning.records.named_retain,
            public=self.experiment.public,
            goal=self.goal,
            reading=unlearning.records.reading,
            prompts=unlearning.prompts,
            scoring=Scoring(device=unlearning.training.device),
        )
        copies = self._copies(number + 1), self._copies(1)
        new, first = (sorted(folder.glob("copy_*"))[0] for folder in copies)
        return Check(copy=str(new), before=str(first), checking=how).run(observer).verdict
