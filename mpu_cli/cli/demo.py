"""``mpu demo``: the whole protocol on a small model trained on the spot."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note, table, terminal


def demo(
    folder: Annotated[Path, typer.Argument(help="Working directory; must not exist yet.", metavar="DIR")] = Path(
        "mpu-demo"
    ),
    model: Annotated[
        str | None,
        typer.Option(
            help="Play it on this chat model: a folder or a Hub id (default: a small one, made on the spot).",
            metavar="MODEL",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Random seed for the people and their facts.", metavar="N", min=0, max=2**32 - 1)
    ] = 0,
    as_json: options.Json = False,
) -> None:
    """Teach a model facts about invented people, make it forget some in three ways, and compare the results.

    With the small model that it makes itself, that takes about a minute.

    Server and client each work in their own folder and call the same functions as the commands. Prints the paths of
    the unlearned model and of a report.
    """
    from mpu_cli.demo.show import run_demo

    with terminal() as observer:
        shown = run_demo(folder, model=model, seed=seed, observer=observer)
    names = dict.fromkeys(name for metrics in shown.metrics.values() for name in metrics)
    rows = [
        [name, *(f"{metrics[name]:.4g}" if name in metrics else "–" for metrics in shown.metrics.values())]
        for name in names
    ]
    table("What each model knows", ["", *shown.metrics], rows)
    for question, answers in shown.answers.items():
        note("\n".join([question, *(f"  {who + ':':<13} {text}" for who, text in answers.items())]))
    note(f"Take a look: {folder}/mpu/client has no keys and no base model, {folder}/mpu/server has no records.")
    emit([shown.model, shown.report], asdict(shown), as_json)
