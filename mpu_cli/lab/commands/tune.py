"""``mpu tune``: a learning rate and a number of epochs for `mpu unlearn`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from mpu_cli.errors import MpuError
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import Command, Report
from mpu_cli.options.declare import as_arguments, declared_options, group, option
from mpu_cli.options.unlearning import Records, Unlearning

if TYPE_CHECKING:
    from mpu_cli.lab.tune import Trial


@dataclass(frozen=True, kw_only=True)
class Tune(Command):
    """Search a learning rate and a number of epochs that forget most while the loss on records to keep stays in bounds.

    Trains MODEL anew for each trial and keeps nothing of it; --lr and --epochs are what is searched. Prints options for
    `mpu unlearn`, the same for every copy; all that were given here but for the records.
    """

    NAME = "tune"
    EXAMPLE = "mpu tune copy_1 --algo npo --forget forget.jsonl --retain retain.jsonl"
    ESSENTIAL = "--algo --forget --retain --trials --max-rise --most-epochs --least-lr --batch-size --device"

    model: str = option(..., "A copy, or any model directory or Hub id.", metavar="MODEL", argument=True)
    trials: int = option(15, "Number of trainings.", metavar="N", least=1)
    least_lr: float = option(1e-6, "Lowest learning rate to try.", above=0)
    most_lr: float = option(1e-3, "Highest learning rate to try.", above=0)
    most_epochs: int = option(20, "Most epochs to try.", least=1)
    max_rise: float = option(0.1, "How much the loss on records to keep may rise, in nats per answer token.", above=0)
    unlearning: Unlearning = group(Unlearning)

    def run(self, observer: Observer = SILENT) -> tuple[Trial | None, Sequence[Trial]]:
        """The best trial that stayed in bounds, and all of them."""
        from mpu_cli.lab.tune import tune
        from mpu_cli.model.source import open_model
        from mpu_cli.training.data import read_dataset

        data = read_dataset(self.unlearning, observer)
        return tune(
            open_model(self.model, links=False), data, self.unlearning, trials=self.trials, least_lr=self.least_lr,
            most_lr=self.most_lr, most_epochs=self.most_epochs, max_rise=self.max_rise, observer=observer,
        )  # fmt: skip

    def report(self, outcome: tuple[Trial | None, Sequence[Trial]], observer: Observer) -> Report:
        from mpu_cli.training.unlearn import MIN_FORGET_RISE

        best, trials = outcome
        rows = []
        for trial in sorted(trials, key=lambda trial: trial.forget_rise):
            rises = [f"{trial.forget_rise:+.3f}", f"{trial.retain_rise:+.3f}"]
            bound = "" if trial.within else "beyond"
            rows.append([f"{trial.lr:.2g}", str(trial.epochs), *rises, bound, f"{trial.seconds:.1f}"])
        columns = ["lr", "epochs", "forget", "retain", "bound", "seconds"]
        observer.table("Rise of the loss per answer token", columns, rows)
        if best is None:
            raise MpuError("no trial stayed in bounds", "lower --least-lr, or raise --max-rise or --trials")
        if best.forget_rise < MIN_FORGET_RISE:
            raise MpuError(
                f"nothing found that forgets: the loss rose by at most {best.forget_rise:.3f} nats",
                "raise --most-epochs, --max-rise or --trials, or lower --batch-size",
            )
        searched = {"algo", "lr", "epochs", *declared_options(Records)}
        words = ["--algo", self.unlearning.algo, *as_arguments(self.unlearning, searched)]
        options = shlex.join([*words, "--lr", f"{best.lr:.3g}", "--epochs", str(best.epochs)])
        document = {"options": options, "best": asdict(best), "trials": [asdict(trial) for trial in trials]}
        return Report([options], document)
