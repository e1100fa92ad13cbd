"""``mpu run``: both parties on one machine, for as many rounds as it takes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import expand_option_groups
from mpu_cli.cli.output import emit, in_bytes, in_time, note, terminal
from mpu_cli.options.experiment import Experiment


@expand_option_groups
def run(
    experiment: Experiment,
    out: Annotated[Path, typer.Option(help="Parent folder of both parties' folders.", metavar="DIR")] = Path("run"),
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Rehearse an unlearning request: server and client on one machine, each in a folder of its own, for all rounds.

    An interrupted run resumes where it left off. DIR/log.jsonl records what each step did. Prints the path of the last
    round's model.
    """
    if dry_run:
        _preview(experiment, out, as_json)
        return
    from mpu_cli.experiment.finished import read_outcome

    outcome = read_outcome(out, experiment)
    if outcome:
        note(f"{out}: already finished, with these options and files")
    else:
        with terminal() as observer:
            from mpu_cli.client.dataset import read_dataset
            from mpu_cli.experiment.rounds import run as run_rounds

            data = read_dataset(experiment.unlearning)
            for warning in data.warnings():
                observer.warn(warning)
            outcome = run_rounds(experiment, data, out, observer)
    emit([outcome.model], {"model": outcome.model, "log": outcome.log}, as_json)


def _preview(experiment: Experiment, out: Path, as_json: bool) -> None:
    """The rounds, what passes between the parties, and about how long training takes."""
    from mpu_cli.client.checks import check_options
    from mpu_cli.client.dataset import read_dataset
    from mpu_cli.experiment.cost import costs_of
    from mpu_cli.experiment.modes import rounds_of, with_merged_rounds

    check_options(experiment.unlearning)
    read_dataset(experiment.unlearning)
    rounds = rounds_of(with_merged_rounds(experiment))
    [cost] = costs_of([experiment])
    lines = [f"rounds\t{rounds}", f"writes\t{out}"]
    if cost:
        lines += [
            f"sent\t{in_bytes(cost.sent)} of copies",
            f"returned\t{in_bytes(cost.returned)} of deltas",
            f"training\tabout {in_time(3600 * cost.hours)} on this machine's processors",
        ]
    else:
        lines.append("cost\tnot known: the model or the records are not on this machine")
    emit(lines, {"rounds": rounds, "writes": out, **(asdict(cost) if cost else {})}, as_json)
