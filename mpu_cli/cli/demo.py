"""``mpu demo``: the whole story on a small model made on the spot."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note, stages, table


def demo(
    folder: Annotated[Path, typer.Argument(help="Where to work; must not exist yet.", metavar="DIR")] = Path(
        "mpu-demo"
    ),
    seed: Annotated[
        int, typer.Option(help="Other people and facts for another number.", metavar="N", min=0, max=2**32 - 1)
    ] = 0,
    as_json: options.Json = False,
) -> None:
    """Make a small model, let it forget four people in three ways, and compare them. Under two minutes.

    Server and client each work in a folder of their own, with the same functions as the commands. Prints the paths of
    the unlearned model and of a report.
    """
    from mpu_cli.demo.show import run_demo

    with stages() as bar:
        shown = run_demo(folder, seed=seed, bar=bar, tell=note)
    names = dict.fromkeys(name for metrics in shown.metrics.values() for name in metrics)
    rows = [
        [name, *(f"{metrics[name]:.4g}" if name in metrics else "–" for metrics in shown.metrics.values())]
        for name in names
    ]
    table("What each model knows", ["", *shown.metrics], rows)
    for question, said in shown.answers.items():
        note("\n".join([question, *(f"  {who + ':':<13} {text}" for who, text in said.items())]))
    note(f"Look around: {folder}/mpu/client holds no key and no base, {folder}/mpu/server no record.")
    emit([shown.model, shown.report], asdict(shown), as_json)
