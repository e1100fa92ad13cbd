"""``mpu demo``: all four steps on a small model made on the spot."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note, progress, table


def demo(
    folder: Annotated[Path, typer.Argument(help="Where to work; must not exist yet.", metavar="DIR")] = Path(
        "mpu-demo"
    ),
    seed: Annotated[int, typer.Option(help="Other people and facts for another number.", metavar="N")] = 0,
    as_json: options.Json = False,
) -> None:
    """Make a small model and records, then publish, unlearn, aggregate, and show what happened. Under two minutes.

    Server and client each work in a folder of their own, with the same functions as the commands. Prints the path
    of the unlearned model.
    """
    from mpu_cli.demo.show import run_demo

    shown = run_demo(folder, seed=seed, bar=lambda label, total: progress(label, total, "epochs"), tell=note)
    table(
        "Loss per answer token",
        ["", "before", "after"],
        [
            ["to forget", f"{shown.before.forget:.3f}", f"{shown.after.forget:.3f}"],
            ["to retain", f"{shown.before.retain:.3f}", f"{shown.after.retain:.3f}"],
        ],
    )
    answers = [(shown.before.forget_answer, shown.after.forget_answer)]
    answers.append((shown.before.retain_answer, shown.after.retain_answer))
    for question, (before, after) in zip(shown.questions, answers, strict=True):
        note(f"{question.question}\n  before: {before}\n  after:  {after}")
    note(f"Look around: {folder}/client holds no key and no base, {folder}/server no record.")
    emit([shown.unlearned], asdict(shown), as_json)
