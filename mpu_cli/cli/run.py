"""``mpu run``: both parties on one machine, for as many rounds as it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note, stages, warn

SERVER, CLIENT, CONSTANTS = "The server's", "The client's", "Constants of the algorithm"


def run(
    base: Annotated[str, typer.Argument(help="The server's model: file, directory or Hub id.", metavar="BASE")],
    reference: Annotated[
        str | None,
        typer.Option(help="Public model that BASE was fine-tuned from.", metavar="MODEL", rich_help_panel=SERVER),
    ] = None,
    algo: Annotated[
        Literal["gradascent", "graddiff", "npo", "dpo", "simnpo", "undial", "satimp", "wga", "rmu"],
        typer.Option(help="Unlearning algorithm.", rich_help_panel=CLIENT),
    ] = "npo",
    forget: Annotated[
        str, typer.Option(help="Records to forget, as for unlearn.", metavar="DATA", rich_help_panel=CLIENT)
    ] = "forget.jsonl",
    retain: Annotated[
        str, typer.Option(help="Records to keep.", metavar="DATA", rich_help_panel=CLIENT)
    ] = "retain.jsonl",
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder with tofu's or muse's files.", metavar="DIR", rich_help_panel=CLIENT),
    ] = None,
    mode: Annotated[
        Literal["mpu", "clean", "noised"],
        typer.Option(
            help="The protocol; the model itself handed over; or one copy with noise and nothing that undoes it."
        ),
    ] = "mpu",
    copies: Annotated[
        int | None,
        typer.Option(
            help="How many copies, m ≥ 2 (default: 3, or as many as --nodes or --alphas).",
            metavar="M",
            rich_help_panel=SERVER,
        ),
    ] = None,
    kappa: Annotated[float, typer.Option(help="Noise scale.", rich_help_panel=SERVER)] = 0.01,
    shared_noise: Annotated[
        float, typer.Option(help="κ_s, noise that all copies share.", metavar="KAPPA", rich_help_panel=SERVER)
    ] = 0.0,
    noise: Annotated[
        options.Noise | None, typer.Option(help="Kind of noise, as for publish.", rich_help_panel=SERVER)
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(help="extrapolate: multiple of each copy.", rich_help_panel=SERVER)
    ] = None,
    alphas: Annotated[
        str | None, typer.Option(help="zero-sum: factor of each copy (default: 1 to 2).", rich_help_panel=SERVER)
    ] = None,
    symmetries: Annotated[
        options.Symmetries, typer.Option(help="Changes of coordinates.", rich_help_panel=SERVER)
    ] = "signed",
    server_lr: Annotated[float, typer.Option(help="η: how much of the update to apply.", rich_help_panel=SERVER)] = 1.0,
    dtype: Annotated[
        options.StoredDtype | None,
        typer.Option(help="Store copies and models in this dtype.", rich_help_panel=SERVER),
    ] = None,
    secret_seed: Annotated[
        int | None,
        typer.Option(help="Seed of the server's secrets, for repeatable experiments only.", rich_help_panel=SERVER),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds (default: the paper's for ALGO).")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs in each round (default: the paper's for ALGO).")] = None,
    lr: Annotated[float, typer.Option(help="Learning rate.", rich_help_panel=CLIENT)] = 1e-5,
    batch_size: Annotated[int, typer.Option(help="Forget records in a step.", rich_help_panel=CLIENT)] = 32,
    micro_batch_size: Annotated[
        int | None, typer.Option(help="Records that go through the model at once.", rich_help_panel=CLIENT)
    ] = None,
    optim: Annotated[
        options.Optimizer,
        typer.Option(help="Optimiser.", rich_help_panel=CLIENT),
    ] = "adamw",
    precision: Annotated[
        Literal["float32", "bfloat16", "float64"], typer.Option(help="Dtype of training.", rich_help_panel=CLIENT)
    ] = "float32",
    weight_decay: Annotated[float, typer.Option(help="Weight decay.", rich_help_panel=CLIENT)] = 0.01,
    max_grad_norm: Annotated[float, typer.Option(help="Clip the gradient's norm.", rich_help_panel=CLIENT)] = 1.0,
    warmup_steps: Annotated[int, typer.Option(help="Steps of warm-up.", rich_help_panel=CLIENT)] = 0,
    template: Annotated[
        Literal["chat", "plain"], typer.Option(help="How records become text.", rich_help_panel=CLIENT)
    ] = "chat",
    system_prompt: Annotated[
        str, typer.Option(help="System turn of the chat template.", rich_help_panel=CLIENT)
    ] = "You are a helpful assistant.",
    date: Annotated[
        str, typer.Option(help="The day that a chat template prints, if it prints one.", rich_help_panel=CLIENT)
    ] = "10 Apr 2025",
    loss_reference: Annotated[
        Literal["original", "round"],
        typer.Option(
            help="Reference model of npo, dpo, undial and kl: the one before unlearning, or each round's own.",
            rich_help_panel=CLIENT,
        ),
    ] = "original",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to train.", rich_help_panel=CLIENT)
    ] = "auto",
    deterministic: Annotated[
        bool, typer.Option(help="On a GPU: the same bits for the same seed.", rich_help_panel=CLIENT)
    ] = True,
    seed: Annotated[int, typer.Option(help="Order of the records.", rich_help_panel=CLIENT)] = 0,
    retain_loss: Annotated[
        Literal["nll", "kl", "hidden"] | None, typer.Option(help="Retain term.", rich_help_panel=CONSTANTS)
    ] = None,
    gamma: Annotated[float | None, typer.Option(help="γ.", rich_help_panel=CONSTANTS)] = None,
    alpha: Annotated[float | None, typer.Option(help="α.", rich_help_panel=CONSTANTS)] = None,
    beta: Annotated[float | None, typer.Option(help="β.", rich_help_panel=CONSTANTS)] = None,
    beta1: Annotated[float | None, typer.Option(help="β₁.", rich_help_panel=CONSTANTS)] = None,
    beta2: Annotated[float | None, typer.Option(help="β₂.", rich_help_panel=CONSTANTS)] = None,
    delta: Annotated[float | None, typer.Option(help="δ.", rich_help_panel=CONSTANTS)] = None,
    layer: Annotated[int | None, typer.Option(help="Layer of rmu.", rich_help_panel=CONSTANTS)] = None,
    coefficient: Annotated[float | None, typer.Option(help="c of rmu.", rich_help_panel=CONSTANTS)] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep copies, deltas and the models between rounds.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for both parties' folders.", metavar="DIR")] = Path("run"),
    as_json: options.Json = False,
) -> None:
    """Rehearse an unlearning request: server and client on one machine, each in a folder of its own, for all rounds.

    A run that was stopped goes on where it was. DIR/log.jsonl says what each step did. Prints the path of the last
    round's model.
    """
    values = {name: value for name, value in locals().items() if name not in ("out", "as_json")}
    values["data_dir"] = str(data_dir) if data_dir else None

    from mpu_cli.experiment.rounds import run as run_rounds
    from mpu_cli.experiment.settings import plan

    made = plan(values)
    with stages() as bar:
        outcome = run_rounds(made.experiment, made.forget, made.retain, out, bar=bar, tell=note, warn=warn)
    emit([outcome.model], {"model": outcome.model, "log": outcome.log}, as_json)
