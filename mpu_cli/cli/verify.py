"""``mpu verify``: is this copy what the keys say?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, progress, table
from mpu_cli.errors import MpuError


def verify(
    copy: Annotated[str, typer.Argument(help="A copy from `mpu publish`.", metavar="COPY")],
    keys: options.KeysFile = Path("keys.bin"),
    base: options.BaseAgain = None,
    config: options.Config = None,
    logits: Annotated[
        bool, typer.Option(help="Compare logits on random tokens too (holds the model in memory, in float32).")
    ] = True,
    identity: options.Identity = None,
    passphrase_file: options.PassphraseFile = None,
    as_json: options.Json = False,
) -> None:
    """Undo a copy with the keys and compare it with base plus noise, in weights and in logits.

    Exit status 1 if they differ by more than storage rounds.
    """
    from mpu_cli.checkpoint.source import open_model
    from mpu_cli.cli.secrets import open_keys
    from mpu_cli.server.aggregate import published_base
    from mpu_cli.server.verify import verify as run_verify

    opened = open_keys(keys, identity, passphrase_file)
    model = published_base(opened, base, config)
    with progress("verify", model.checkpoint.nbytes) as advance:
        result = run_verify(model, open_model(copy), opened, logits=logits, progress=advance)
    table(
        f"Copy {result.copy}, undone and made again",
        ["block", "σ asked", "survived", "largest difference", "other than made again"],
        [
            [
                b.block,
                f"{b.asked:.2e}",
                f"{b.survived:.2e}",
                f"{b.difference:.1e}",
                f"{b.changed:.2%}" + "!" * (not b.ok),
            ]
            for b in result.blocks
        ],
    )
    text = f"{copy}: {'right' if result.ok else 'WRONG'}"
    if result.function is not None:
        text += (
            f"; logits differ by {result.logits:.1e} of the largest, by {result.function:.1e} before storage rounded"
        )
    text += f"; noise {opened.noise.kind}, symmetries {opened.symmetries}"
    document = {
        "copy": copy,
        "noise": opened.noise.kind,
        "symmetries": opened.symmetries,
        "ok": result.ok,
        "function": result.function,
        "logits": result.logits,
    }
    emit([text], {**document, "blocks": [asdict(b) | {"ok": b.ok} for b in result.blocks]}, as_json)
    if not result.ok:
        raise MpuError(f"{copy}: is not what these keys say it is, or another base was given")
