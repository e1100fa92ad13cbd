"""``mpu run``: both parties on one machine, for as many rounds as it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import grouped
from mpu_cli.cli.output import emit, note, terminal
from mpu_cli.options.experiment import Experiment


@grouped
def run(
    experiment: Experiment,
    out: Annotated[Path, typer.Option(help="Parent folder of both parties' folders.", metavar="DIR")] = Path("run"),
    as_json: options.Json = False,
) -> None:
    """Rehearse an unlearning request: server and client on one machine, each in a folder of its own, for all rounds.

    An interrupted run resumes where it left off. DIR/log.jsonl records what each step did. Prints the path of the last
    round's model.
    """
    from mpu_cli.experiment.finished import finished

    outcome = finished(out, experiment)
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
