"""``mpu tune``: a learning rate and a number of epochs for `mpu unlearn`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import expand_option_groups
from mpu_cli.cli.output import emit, table, terminal, warn
from mpu_cli.errors import MpuError
from mpu_cli.options.declare import declared_options, flat
from mpu_cli.options.tuning import Search
from mpu_cli.options.unlearning import Records, Unlearning


@expand_option_groups
def tune(
    model: Annotated[str, typer.Argument(help="A copy, or any model directory or Hub id.", metavar="MODEL")],
    search: Search,
    unlearning: Unlearning,
    as_json: options.Json = False,
) -> None:
    """Search a learning rate and a number of epochs that forget most while the loss on records to keep stays in bounds.

    Trains MODEL anew for each trial and keeps nothing of it; --lr and --epochs are what is searched. Prints options for
    `mpu unlearn`, the same for every copy; all that were given here but for the records.
    """
    from mpu_cli.client.dataset import read_dataset

    with terminal() as observer:
        data = read_dataset(unlearning, observer)
        from mpu_cli.client.outcome import HARDLY
        from mpu_cli.experiment.tune import tune as run_search
        from mpu_cli.models.source import open_model

        best, trials = run_search(open_model(model, links=False), data, unlearning, search, observer)
    rows = [
        [f"{t.lr:.2g}", str(t.epochs), f"{t.forget_rise:+.3f}", f"{t.retain_rise:+.3f}", "" if t.within else "beyond",
         f"{t.seconds:.1f}"]
        for t in sorted(trials, key=lambda trial: trial.forget_rise)
    ]  # fmt: skip
    table("Rise of the loss per answer token", ["lr", "epochs", "forget", "retain", "bound", "seconds"], rows)
    if best is None:
        raise MpuError("no trial stayed in bounds", "lower --least-lr, or raise --max-retain-rise or --trials")
    if best.forget_rise < HARDLY:
        warn(
            f"nothing found that forgets: the loss rose by at most {best.forget_rise:.3f} nats; raise --most-epochs, "
            "--max-retain-rise or --trials, or lower --batch-size"
        )
    tuned_options = f"{_command_options(unlearning)} --lr {best.lr:.3g} --epochs {best.epochs}"
    emit(
        [tuned_options],
        {"options": tuned_options, "best": asdict(best), "trials": [asdict(trial) for trial in trials]},
        as_json,
    )


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
