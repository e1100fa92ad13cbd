"""``mpu unlearn``: the client's part."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note, progress
from mpu_cli.errors import MpuError


def unlearn(
    copy: Annotated[
        str, typer.Argument(help="A copy from `mpu publish`, or any model directory or Hub id.", metavar="COPY")
    ],
    algo: Annotated[Literal["gradascent", "graddiff", "npo"], typer.Option(help="Unlearning algorithm.")] = "npo",
    forget: Annotated[Path, typer.Option(help="Records to forget, JSON lines.", metavar="FILE")] = Path("forget.jsonl"),
    retain: Annotated[Path, typer.Option(help="Records to keep, for algorithms that use some.", metavar="FILE")] = Path(
        "retain.jsonl"
    ),
    out: Annotated[
        Path | None, typer.Option(help="The delta to write [default: deltas/COPY.safetensors].", metavar="FILE")
    ] = None,
    optim: Annotated[
        Literal["adamw", "adamw-blockwise", "sgd"],
        typer.Option(help="Optimiser; adamw-blockwise keeps the noise cancelling, adamw is the paper's."),
    ] = "adamw",
    lr: Annotated[float, typer.Option(help="Learning rate, constant.")] = 1e-5,
    epochs: Annotated[int | None, typer.Option(help="Passes over the forget set [default: the algorithm's].")] = None,
    batch_size: Annotated[int, typer.Option(help="Forget records in a step, with as many retain records.")] = 32,
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.01,
    max_grad_norm: Annotated[float, typer.Option(help="Clip the gradient's norm at this.")] = 1.0,
    beta: Annotated[float, typer.Option(help="β of npo.")] = 0.1,
    precision: Annotated[
        Literal["float32", "bfloat16", "float64"], typer.Option(help="Dtype of weights and training.")
    ] = "float32",
    system_prompt: Annotated[
        str, typer.Option(help="System turn of the chat template; '' for none.")
    ] = "You are a helpful assistant.",
    template: Annotated[
        Literal["chat", "plain"], typer.Option(help="The tokenizer's chat template, or Question: … Answer: ….")
    ] = "chat",
    seed: Annotated[int, typer.Option(help="Order of the records. Use the same for every copy of a round.")] = 0,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to train.")] = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Unlearn the records of --forget on COPY and write the change of its weights, which is all that goes back.

    Run it on every copy of the round with the same options: only then does the noise cancel. Prints the path of
    the delta.
    """
    from mpu_cli.client.data import read_records
    from mpu_cli.client.losses import ALGORITHMS, Settings

    # The records are read first: what is wrong with them is known before anything large is loaded.
    to_forget = read_records(forget)
    to_retain = []
    if ALGORITHMS[algo].alpha:
        if not retain.exists():
            raise MpuError(f"{retain}: no such file; {algo} needs records to keep, name them with --retain")
        to_retain = read_records(retain)
    name = Path(copy).resolve().name if Path(copy).exists() else copy.rsplit("/", 1)[-1]
    target = out or Path("deltas") / f"{name.removesuffix('.safetensors')}.safetensors"

    from mpu_cli.checkpoint.source import open_model
    from mpu_cli.client.unlearn import Options
    from mpu_cli.client.unlearn import unlearn as run_unlearn

    chosen = Options(
        algorithm=algo,
        epochs=epochs,
        lr=lr,
        batch_size=batch_size,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        optimizer=optim,
        precision=precision,
        settings=Settings(beta=beta),
        template=template,
        system_prompt=system_prompt,
        seed=seed,
        device=device,
    )
    epochs = epochs or ALGORITHMS[algo].epochs
    with progress(f"unlearn {name}", epochs, "epochs") as advance:
        result = run_unlearn(
            open_model(copy),
            to_forget,
            to_retain,
            chosen,
            target=target,
            force=force,
            on_step=lambda losses, steps: advance(epochs / steps, f"forget {losses.forget:.3f}"),
        )
    first, last = result.steps[0], result.steps[-1]
    kept = "" if last.retain is None else f", on retain {first.retain:.3f} → {last.retain:.3f}"
    note(
        f"{name}: {algo}, {len(result.steps)} steps; loss per answer token on forget {first.forget:.3f} → "
        f"{last.forget:.3f}{kept} (first and last batch); ‖Δ‖ {result.norm:.3g}"
    )
    emit(
        [result.path],
        {"delta": result.path, "algorithm": algo, "norm": result.norm, "steps": [asdict(s) for s in result.steps]},
        as_json,
    )
