"""``mpu unlearn``: the client's side of the protocol."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import grouped
from mpu_cli.cli.output import emit, note, terminal
from mpu_cli.options.unlearning import Logging, Records, Unlearning


@grouped
def unlearn(
    copy: Annotated[
        str,
        typer.Argument(
            help="A copy from `mpu publish` (sealed or not), or any model directory or Hub id.", metavar="COPY"
        ),
    ],
    unlearning: Unlearning,
    logging: Logging,
    out: Annotated[
        Path | None, typer.Option(help="The delta to write (default: deltas/COPY.safetensors).", metavar="FILE")
    ] = None,
    reference_file: Annotated[
        Path | None,
        typer.Option(
            help="The reference model's probabilities: written in round 1, read in later rounds. For npo, dpo, "
            "undial and --retain-loss kl.",
            metavar="FILE",
            rich_help_panel=Records.PANEL,
        ),
    ] = None,
    identity: options.Identity = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Unlearn the --forget records on COPY and write the change in its weights, which is all that goes back.

    Run it on every copy of the round with the same options, or the noise does not cancel. Prints the path of the
    delta.
    """
    from mpu_cli.client.dataset import read_dataset

    # Read the records first, so that problems with them are found before anything large is loaded.
    data = read_dataset(unlearning)
    name = Path(copy).resolve().name if Path(copy).exists() else copy.rsplit("/", 1)[-1]
    target = out or Path("deltas") / f"{name.removesuffix('.safetensors').removesuffix('.age')}.safetensors"

    from mpu_cli.cli.secrets import opened_copy
    from mpu_cli.client.tag import client_secret, default_secret_path
    from mpu_cli.client.unlearn import unlearn as run_unlearn
    from mpu_cli.models.source import open_model

    with opened_copy(copy, identity, target) as source, terminal() as observer:
        result = run_unlearn(
            open_model(source), data, unlearning, target=target, force=force, logging=logging,
            reference_file=reference_file, secret=lambda: client_secret(default_secret_path()), observer=observer,
        )  # fmt: skip
    if not result.first:
        return
    text = f"{name}: {unlearning.algo}"
    if result.steps:
        begin, end = result.steps[0], result.steps[-1]
        kept = "" if end.retain is None else f", on retain {begin.retain:.3f} → {end.retain:.3f}"
        text += (
            f", {len(result.steps)} steps; loss per answer token on forget {begin.forget:.3f} → {end.forget:.3f}{kept} "
            "(first and last batch)"
        )
    note(f"{text}; ‖Δ‖ {result.norm:.3g}")
    if result.spent:
        note(
            f"privacy: this delta protects each record with ε = {result.spent['epsilon']:.3g} at δ = "
            f"{unlearning.privacy.dp_delta:g}; the deltas of m copies together spend at most m times that"
        )
    emit(
        [target],
        {
            "delta": target,
            "algorithm": unlearning.algo,
            "norm": result.norm,
            "privacy": result.spent,
            "steps": [asdict(s) for s in result.steps],
        },
        as_json,
    )
