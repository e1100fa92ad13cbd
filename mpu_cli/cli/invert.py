"""``mpu invert``: a delta back in the base's coordinates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, paths_from, terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpu_cli.server.keys import Keys


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
    trust_keys: options.TrustKeys = False,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Undo the secret coordinates of each DELTA. `mpu aggregate` does this itself; use invert to examine one delta.

    Prints the path of each inverted delta.
    """
    from mpu_cli.api.server import invert as run_invert
    from mpu_cli.cli.secrets import open_keys

    paths = paths_from(deltas)  # first: at the end of a pipe, the command that writes the keys may still be running
    opened = open_keys(keys, identity, passphrase_file, trust_keys)
    if dry_run:
        _preview(paths, opened, out, force, as_json)
        return
    with terminal() as observer:
        targets = run_invert(paths, keys=opened, base=base, config=config, out=out, force=force, observer=observer)
    emit(targets, {"inverted": targets}, as_json)


def _preview(deltas: Sequence[Path], keys: Keys, out: Path, force: bool, as_json: bool) -> None:
    """What `mpu invert` would read and write."""
    from mpu_cli.cli.preview import Preview, show
    from mpu_cli.server.copying import BUFFERS
    from mpu_cli.server.deltas import open_deltas

    opened = open_deltas(deltas, keys)
    sizes = [delta.checkpoint.nbytes for delta in opened]
    preview = Preview(
        reads=[(delta.checkpoint.path, size) for delta, size in zip(opened, sizes, strict=True)],
        writes=[(out / f"copy_{delta.copy}.safetensors", size) for delta, size in zip(opened, sizes, strict=True)],
        memory=BUFFERS,
    )
    show(preview, force=force, as_json=as_json)
