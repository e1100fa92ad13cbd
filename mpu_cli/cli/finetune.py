"""``mpu finetune``: target and retain models for experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note, progress, warn


def finetune(
    model: Annotated[str, typer.Argument(help="The model to begin with.", metavar="MODEL")],
    data: Annotated[list[str], typer.Option(help="Records to learn, as for unlearn (repeatable).", metavar="DATA")],
    epochs: Annotated[int, typer.Option(help="Passes over the records.")] = 5,
    out: Annotated[Path, typer.Option(help="Directory for the model.", metavar="DIR")] = Path("finetuned"),
    data_dir: Annotated[Path | None, typer.Option(help="Folder with tofu's or muse's files.", metavar="DIR")] = None,
    lr: Annotated[float, typer.Option(help="Learning rate, constant after warm-up.")] = 1e-5,
    batch_size: Annotated[int, typer.Option(help="Records in a step.")] = 32,
    micro_batch_size: Annotated[int | None, typer.Option(help="Records that go through the model at once.")] = None,
    optim: Annotated[options.Optimizer, typer.Option(help="Optimiser.")] = "adamw",
    precision: Annotated[
        Literal["float32", "bfloat16", "float64"], typer.Option(help="Dtype of training.")
    ] = "float32",
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.01,
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 0,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, more time.")
    ] = False,
    template: Annotated[Literal["chat", "plain"], typer.Option(help="How records become text.")] = "chat",
    system_prompt: Annotated[
        str, typer.Option(help="System turn of the chat template.")
    ] = "You are a helpful assistant.",
    date: Annotated[str, typer.Option(help="The day that a chat template prints, if it prints one.")] = "10 Apr 2025",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to train.")] = "auto",
    seed: Annotated[int, typer.Option(help="Order of the records.")] = 0,
    log: Annotated[Path | None, typer.Option(help="Append the loss of each step, JSON lines.", metavar="FILE")] = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Train MODEL on records: a target model on all of them, or a retain model on those that are not to be forgotten.

    Prints the path of the model.
    """
    from mpu_cli.client.records import read_records

    records = [record for name in data for record in read_records(name, data_dir)]

    from mpu_cli.checkpoint.source import open_model
    from mpu_cli.client.finetune import finetune as run_finetune
    from mpu_cli.client.training import Loop
    from mpu_cli.server.aggregate import LOST

    losses: list[float] = []
    with progress("finetune", epochs, "epochs") as advance:

        def show(step: object, steps: int) -> None:
            losses.append(step.loss)
            advance(epochs / steps, f"loss {step.loss:.3f}")

        lost = run_finetune(
            open_model(model), records, epochs=epochs, precision=precision, device=device, template=template,
            system_prompt=system_prompt, date=date, out=out, force=force, on_step=show,
            loop=Loop(
                optimizer=optim, lr=lr, weight_decay=weight_decay, warmup_steps=warmup_steps, batch_size=batch_size,
                micro_batch_size=micro_batch_size, gradient_checkpointing=gradient_checkpointing, seed=seed, log=log,
            ),
        )  # fmt: skip
    note(f"{len(losses)} steps; loss per answer token {losses[0]:.3f} → {losses[-1]:.3f} (first and last batch)")
    if lost > LOST:
        warn(f"storage in the model's own dtype rounds away {lost:.0%} of the change; a higher --lr outgrows that")
    emit([out], {"model": out, "lost_to_rounding": lost, "records": len(records), "losses": losses}, as_json)
