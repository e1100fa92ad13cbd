"""``mpu invert``: a delta back in the base's coordinates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, paths_from, progress


def invert(
    deltas: Annotated[list[str], typer.Argument(help="Deltas, directories of them, or - .", metavar="DELTA…")],
    keys: options.KeysFile = Path("keys.bin"),
    base: options.BaseAgain = None,
    config: options.Config = None,
    out: Annotated[Path, typer.Option(help="Directory for the inverted deltas.", metavar="DIR")] = Path("inverted"),
    identity: options.Identity = None,
    passphrase_file: options.PassphraseFile = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Undo the secret coordinates of each DELTA. `mpu aggregate` does this itself; use invert to look at one delta.

    Prints the path of each inverted delta.
    """
    from mpu_cli.checkpoint.transaction import Transaction
    from mpu_cli.cli.secrets import open_keys
    from mpu_cli.server.aggregate import invert as run_invert
    from mpu_cli.server.aggregate import open_deltas, published_base

    paths = paths_from(deltas)  # first: at the end of a pipe, what makes the keys may still be at work
    opened = open_keys(keys, identity, passphrase_file)
    found = open_deltas(paths, opened)
    model = published_base(opened, base, config)
    targets = [out / f"copy_{delta.copy}.safetensors" for delta in found]
    total = sum(delta.checkpoint.nbytes for delta in found)
    with Transaction(force=force) as transaction, progress("invert", total) as advance:
        for delta, target in zip(found, targets, strict=True):
            run_invert(model, delta, opened, target=target, transaction=transaction, progress=advance)
    emit(targets, {"inverted": targets}, as_json)
