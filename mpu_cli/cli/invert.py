"""``mpu invert``: a delta back in the base's coordinates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, paths_from, terminal


def invert(
    deltas: Annotated[
        list[str], typer.Argument(help="Deltas, directories of them, or - for standard input.", metavar="DELTA…")
    ],
    keys: options.KeysFile = Path("keys.bin"),
    base: options.BaseAgain = None,
    config: options.ModelConfig = None,
    out: Annotated[Path, typer.Option(help="Directory for the inverted deltas.", metavar="DIR")] = Path("inverted"),
    identity: options.Identity = None,
    passphrase_file: options.PassphraseFile = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Undo the secret coordinates of each DELTA. `mpu aggregate` does this itself; use invert to examine one delta.

    Prints the path of each inverted delta.
    """
    from mpu_cli.checkpoint.transaction import Transaction
    from mpu_cli.cli.secrets import open_keys
    from mpu_cli.server.deltas import open_deltas
    from mpu_cli.server.keys import published_base
    from mpu_cli.server.undo import invert as run_invert

    paths = paths_from(deltas)  # first: at the end of a pipe, the command that writes the keys may still be running
    opened = open_keys(keys, identity, passphrase_file)
    opened_deltas = open_deltas(paths, opened)
    model = published_base(opened, base, config)
    targets = [out / f"copy_{delta.copy}.safetensors" for delta in opened_deltas]
    with Transaction(force=force) as transaction, terminal() as observer:
        observer.stage("invert", sum(delta.checkpoint.nbytes for delta in opened_deltas))
        for delta, target in zip(opened_deltas, targets, strict=True):
            run_invert(model, delta, opened, target=target, transaction=transaction, observer=observer)
    emit(targets, {"inverted": targets}, as_json)
