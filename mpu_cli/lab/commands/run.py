"""``mpu run``: both parties on one machine, for as many rounds as it takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.errors import UsageError
from mpu_cli.files.transaction import check_folder
from mpu_cli.lab.options.experiment import UNLEARN, Experiment
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import Command, Report
from mpu_cli.options.declare import flags_set, group, option
from mpu_cli.options.unlearning import Goal, Stopping
from mpu_cli.wording import counted, in_bytes

if TYPE_CHECKING:
    from mpu_cli.lab.rounds import Outcome
    from mpu_cli.lab.until_pass import PlayedRequest


@dataclass(frozen=True, kw_only=True)
class Run(Command):
    """Rehearse an unlearning request: server and client on one machine, each in a folder of its own, for all rounds.

    Trains until the records are forgotten, checks each round's model as the client would, and goes on from the checked
    copies until it is a pass; exits with status 1 without one. With --epochs, another --mode or --unlearn dp_epsilon,
    it plays a fixed number of rounds, and DIR/log.jsonl records what each step did. An interrupted run resumes where
    it left off. Prints the path of the last round's model.
    """

    NAME = "run"
    EXAMPLE = "mpu run my-model --public public-model --forget forget.jsonl --retain retain.jsonl"
    ESSENTIAL = "--algo --forget --retain --mode --rounds --public --kappa --copies --lr --epochs --batch-size --out"

    experiment: Experiment = group(Experiment)
    goal: Goal = group(Goal)
    stopping: Stopping = group(Stopping, fold=UNLEARN)
    out: Path = option(Path("run"), "Parent folder of both parties' folders.", metavar="DIR")

    def run(self, observer: Observer = SILENT) -> Outcome | PlayedRequest:
        """The last round's model, and the verdicts on the models of all rounds or the log of a fixed number of them."""
        self._check_options()
        if self.experiment.stops_when_done:
            from mpu_cli.lab.until_pass import run_until_pass

            return run_until_pass(self.experiment, self.goal, self.stopping, self.out, observer)
        from mpu_cli.lab.rounds import run
        from mpu_cli.training.data import read_dataset

        return run(self.experiment, read_dataset(self.experiment.unlearning), self.out, observer)

    def report(self, done: Outcome | PlayedRequest, observer: Observer) -> Report:
        if not self.experiment.stops_when_done:
            return Report([done.model], {"model": done.model, "log": done.log})  # type: ignore[union-attr]
        request: PlayedRequest = done  # type: ignore[assignment]
        verdicts = [{**asdict(verdict), "verdict": verdict.sentence} for verdict in request.verdicts]
        if not request.passed and (step := request.verdicts[-1].request):
            observer.note(f"next: {step}")
        document = {"model": request.model, "passed": request.passed, "verdicts": verdicts}
        return Report([request.model], document, status=0 if request.passed else 1)

    def _check_options(self) -> None:
        check_folder(self.out)
        flags = flags_set(self, self.goal, self.stopping)
        if flags and not self.experiment.stops_when_done:
            fixing = ("--epochs", "--mode", "--launch", "--unlearn dp_epsilon")
            given = [flag for flag in flags_set(self, self.experiment) if flag in fixing]
            raise UsageError(
                f"{', '.join(flags)}: only for a training that stops when it is done",
                f"leave out {' and '.join(given)}",
            )

    def preview(self, observer: Observer) -> Report:
        """The rounds, what passes between the parties, and how many steps are trained."""
        from mpu_cli.lab.rounds import costs_of, rounds_of, with_merged_rounds
        from mpu_cli.lab.until_pass import MOST_ROUNDS
        from mpu_cli.training.checks import check_options
        from mpu_cli.training.data import read_dataset
        from mpu_cli.training.stopping import StoppingRule

        self._check_options()
        experiment = self.experiment
        if experiment.stops_when_done:
            experiment = replace(experiment, rounds=experiment.rounds or MOST_ROUNDS)
        check_options(experiment.unlearning)
        for warning in read_dataset(experiment.unlearning).warnings(experiment.unlearning.privacy):
            observer.warn(warning)
        rounds = rounds_of(with_merged_rounds(experiment))
        [cost] = costs_of(
            [experiment], StoppingRule(self.goal, self.stopping) if self.experiment.stops_when_done else None
        )
        lines = [f"rounds\t{rounds}{' at most' if experiment.stops_when_done else ''}", f"writes\t{self.out}"]
        if cost:
            # A run until it is a pass also publishes the last model, for the check.
            sent = cost.sent * (rounds + 1) // rounds if experiment.stops_when_done else cost.sent
            lines += [
                f"sent\t{in_bytes(sent)} of copies",
                f"returned\t{in_bytes(cost.returned)} of deltas",
                f"training\t{counted(cost.steps, 'step')}{' at most' if self.experiment.stops_when_done else ''}",
            ]
        else:
            lines.append("cost\tnot known: the model or the records are not on this machine")
        return Report(lines, {"rounds": rounds, "writes": self.out, **(asdict(cost) if cost else {})})
