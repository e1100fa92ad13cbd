"""``mpu finetune``: target and retain models for experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import expand_option_groups
from mpu_cli.cli.output import emit, note, terminal, warn
from mpu_cli.options.unlearning import Logging, Prompts, RecordFormat, Training


@expand_option_groups
def finetune(
    model: Annotated[str, typer.Argument(help="The model to start from.", metavar="MODEL")],
    training: Training,
    prompts: Prompts,
    reading: RecordFormat,
    data: Annotated[list[str], typer.Option(help="Records to learn, as for unlearn (repeatable).", metavar="DATA")],
    epochs: Annotated[int, typer.Option(help="Passes over the records.")] = 5,
    out: Annotated[Path, typer.Option(help="Directory for the model.", metavar="DIR")] = Path("finetuned"),
    log: Annotated[
        Path | None, typer.Option(help="Append the loss of each step as JSON lines.", metavar="FILE")
    ] = None,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Train MODEL on records: a target model on all of them, or a retain model on those not to be forgotten.

    Prints the path of the model.
    """
    from mpu_cli.records.reading import read_named

    with terminal() as observer:
        records = [record for name in data for record in read_named(name, reading, observer=observer)]
    if dry_run:
        _preview(model, len(records), epochs, training, out, force, as_json)
        return
    with terminal() as observer:
        from mpu_cli.client.finetune import finetune as run_finetune
        from mpu_cli.models.source import open_model

        result = run_finetune(
            open_model(model), records, training, prompts, epochs=epochs, out=out, force=force,
            logging=Logging(log=log), observer=observer,
        )  # fmt: skip
    losses, lost = result.losses, result.lost_to_rounding
    note(f"{len(losses)} steps; loss per answer token {losses[0]:.3f} → {losses[-1]:.3f} (first and last batch)")
    from mpu_cli.server.agreement import LOST

    if lost > LOST:
        warn(f"storage in the model's own dtype rounds away {lost:.0%} of the change; a higher --lr avoids that")
    emit([out], {"model": out, "lost_to_rounding": lost, "records": len(records), "losses": losses}, as_json)


def _preview(model: str, records: int, epochs: int, training: Training, out: Path, force: bool, as_json: bool) -> None:
    """What `mpu finetune` would read and write."""
    from mpu_cli.cli.preview import Preview, show
    from mpu_cli.experiment.cost import training_memory
    from mpu_cli.models.source import open_model

    opened = open_model(model)
    weights = sum(info.elements for info in opened.checkpoint.tensors.values())
    steps = epochs * -(-records // training.batch_size)
    preview = Preview(
        reads=[(opened.source, opened.checkpoint.nbytes), (f"{records} records", None)],
        writes=[(out, opened.checkpoint.nbytes)],
        memory=training_memory(weights, training.optim),
        notes=[f"{epochs} epochs of {training.batch_size} records a step: about {steps} steps; activations need memory "
               "on top"],
    )  # fmt: skip
    show(preview, force=force, as_json=as_json)
