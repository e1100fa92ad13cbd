"""``mpu plan``: what a round will cost."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note
from mpu_cli.errors import MpuError, UsageError


def plan(
    model: Annotated[str, typer.Argument(help="The server's model.", metavar="MODEL")],
    copies: Annotated[
        int | None,
        typer.Option(help="How many copies, m ≥ 2 (default: 3, or as many as --nodes or --alphas).", metavar="M"),
    ] = None,
    optim: Annotated[
        options.Optimizer,
        typer.Option(help="The client's optimiser, for its memory."),
    ] = "adamw",
    forget: Annotated[
        str | None, typer.Option(help="Records to forget, for the cost of training (as for unlearn).", metavar="DATA")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with tofu's or muse's files.", metavar="DIR")] = None,
    shared_noise: Annotated[
        float, typer.Option(help="κ_s of `publish --shared-noise`, to say what it costs.", metavar="KAPPA")
    ] = 0.0,
    noise: Annotated[options.Noise | None, typer.Option(help="Kind of noise, as for publish.")] = None,
    nodes: Annotated[str | None, typer.Option(help="extrapolate: multiple of each copy.", metavar="C1,C2,…")] = None,
    alphas: Annotated[str | None, typer.Option(help="zero-sum: factor of each copy.", metavar="A,B,…")] = None,
    epochs: Annotated[int, typer.Option(help="Epochs of a round, with as many retain as forget records.")] = 10,
    as_json: options.Json = False,
) -> None:
    """Say what one round of the protocol will cost: bytes written and sent, memory of each party, operations, time.

    Bandwidth and speed are measured on this machine. Activations of the training are not counted.
    """
    if not (math.isfinite(shared_noise) and shared_noise >= 0):
        raise UsageError(f"--shared-noise {shared_noise}: must be a finite number, 0 or more")
    if epochs < 1:
        raise UsageError(f"--epochs {epochs}: must be at least 1")

    from mpu_cli.checkpoint.source import open_model
    from mpu_cli.experiment.cost import cost, measure_machine
    from mpu_cli.server.noise import choose_scheme

    scheme = choose_scheme(noise, alphas, nodes, copies)
    opened = open_model(model)
    tokens = None
    if forget:
        tokens = 2 * epochs * _tokens(opened, forget, data_dir)
    machine = measure_machine()
    found = cost(opened, machine, copies=scheme.copies, optimizer=optim, tokens=tokens)
    lines = [
        f"model\t{found.weights:,} weights, {found.attention_weights:,} of them in attention",
        f"server writes and sends\t{_bytes(found.published)} in {scheme.copies} copies",
        f"client returns\t{_bytes(found.returned)} of float32 deltas",
        f"server memory\tabout {_bytes(found.server_memory)}, whatever the model",
        f"client memory\t{_bytes(found.client_memory)} for weights, gradient and {optim}'s state, plus activations",
        f"server, paper's model\t{_bytes(found.moved)} moved, {found.operations:.3g} operations "
        f"({found.intensity:.2f} a byte): {found.server_seconds:.3g} s at this machine's "
        f"{machine.bandwidth / 1e9:.1f} GB/s and {machine.operations / 1e9:.0f} billion operations/s",
    ]
    if found.training_operations is not None:
        lines.append(
            f"client trains\t{found.training_operations:.3g} operations on {tokens:,} tokens a copy: at least "
            f"{found.training_seconds:.3g} s on this machine's processor"
        )
    weights = scheme.weights
    lines.append(
        f"noise\t{scheme.kind} ({', '.join(f'{factor:g}' for factor in scheme.factors)}): cancels up to order "
        f"{scheme.order - 1} and leaves {scheme.remainder:.3g}·κ^{scheme.order}; what differs between copies for other "
        f"reasons is multiplied by up to {float(weights.abs().sum()):.3g} (its variance, if by chance, by "
        f"{scheme.variance_factor:.3g})"
    )
    if shared_noise:
        lines.append(
            f"shared noise\tnothing cancels it: every weight that the client trains on is off by {shared_noise:g} "
            "times the RMS of its block's task vector, and the aggregated update is off in proportion to that (first "
            f"order; noise of --kappa: order {scheme.order}). Rehearse with `mpu run --shared-noise`"
        )
    note("estimates of one round; measured numbers for whole rounds are in the log of `mpu run`")
    emit(lines, {
            **asdict(found), "machine": asdict(machine), "tokens": tokens,
            "noise": {**asdict(scheme), "weights": weights.tolist(), "order": scheme.order,
                      "remainder": scheme.remainder, "variance_factor": scheme.variance_factor},
        }, as_json)  # fmt: skip


def _tokens(opened: object, forget: str, data_dir: Path | None) -> int:
    """Tokens of all the records, as training makes them: with the chat template, if the tokenizer has one."""
    from transformers import AutoTokenizer

    from mpu_cli.client.data import Encoding
    from mpu_cli.client.records import read_records

    records = read_records(forget, data_dir)
    try:
        tokenizer = AutoTokenizer.from_pretrained(opened.folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise MpuError(f"{opened.source}: has no tokenizer in it, and --forget is counted in its tokens") from error
    encoding = Encoding(tokenizer, "chat" if tokenizer.chat_template else "plain")
    return sum(len(example.ids) for example in encoding.encode(records))


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
