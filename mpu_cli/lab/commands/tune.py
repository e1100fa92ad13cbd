"""``mpu tune``: a learning rate and a number of epochs for `mpu unlearn`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

from mpu_cli.errors import MpuError
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import Command, Report
from mpu_cli.options.declare import declared_options, flat, group, option
from mpu_cli.options.tuning import Search
from mpu_cli.options.unlearning import Records, Unlearning

if TYPE_CHECKING:
    from mpu_cli.lab.tune import Trial


@dataclass(frozen=True, kw_only=True)
class Tune(Command):
    """Search a learning rate and a number of epochs that forget most while the loss on records to keep stays in bounds.

    Trains MODEL anew for each trial and keeps nothing of it; --lr and --epochs are what is searched. Prints options for
    `mpu unlearn`, the same for every copy; all that were given here but for the records.
    """

    NAME: ClassVar[str] = "tune"
    EXAMPLE: ClassVar[str] = "mpu tune copy_1 --algo npo --forget forget.jsonl --retain retain.jsonl"
    ESSENTIAL: ClassVar[str] = (
        "--algo --forget --retain --trials --max-rise --most-epochs --least-lr --batch-size --device"
    )

    model: str = option(..., "A copy, or any model directory or Hub id.", metavar="MODEL", argument=True)
    search: Search = group(Search)
    unlearning: Unlearning = group(Unlearning)

    def run(self, observer: Observer = SILENT) -> tuple[Trial | None, Sequence[Trial]]:
        """The best trial that stayed in bounds, and all of them."""
        from mpu_cli.lab.tune import tune
        from mpu_cli.model.source import open_model
        from mpu_cli.training.data import read_dataset

        data = read_dataset(self.unlearning, observer)
        return tune(open_model(self.model, links=False), data, self.unlearning, self.search, observer)

    def report(self, found: tuple[Trial | None, Sequence[Trial]], observer: Observer) -> Report:
        from mpu_cli.training.unlearn import HARDLY

        best, trials = found
        rows = []
        for each in sorted(trials, key=lambda trial: trial.forget_rise):
            rises = [f"{each.forget_rise:+.3f}", f"{each.retain_rise:+.3f}"]
            bound = "" if each.within else "beyond"
            rows.append([f"{each.lr:.2g}", str(each.epochs), *rises, bound, f"{each.seconds:.1f}"])
        columns = ["lr", "epochs", "forget", "retain", "bound", "seconds"]
        observer.table("Rise of the loss per answer token", columns, rows)
        if best is None:
            raise MpuError("no trial stayed in bounds", "lower --least-lr, or raise --max-rise or --trials")
        if best.forget_rise < HARDLY:
            observer.warn(
                f"nothing found that forgets: the loss rose by at most {best.forget_rise:.3f} nats; raise "
                "--most-epochs, --max-rise or --trials, or lower --batch-size"
            )
        options = f"{_command_options(self.unlearning)} --lr {best.lr:.3g} --epochs {best.epochs}"
        document = {"options": options, "best": asdict(best), "trials": [asdict(trial) for trial in trials]}
        return Report([options], document)


def _command_options(unlearning: Unlearning) -> str:
    """The options that were tuned with, as `mpu unlearn` takes them: the algorithm, and what differs from the defaults
    but for the records and what was searched."""
    defaults, declarations = flat(Unlearning()), declared_options(Unlearning)
    words = ["--algo", unlearning.algo]
    for name, value in flat(unlearning).items():
        if value == defaults[name] or name in ("algo", "lr", "epochs", *declared_options(Records)):
            continue
        if isinstance(value, tuple):
            value = ",".join(value)
        if isinstance(value, bool):
            words.append(declarations[name].flag if value else declarations[name].flag.replace("--", "--no-", 1))
        else:
            words += [declarations[name].flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)
