"""``mpu verify``: check a copy against the keys."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, table, terminal, under_old_name
from mpu_cli.errors import MpuError


def verify(
    copy: Annotated[str, typer.Argument(help="A copy from `mpu publish`.", metavar="COPY")],
    keys: options.KeysFile = Path("keys.bin"),
    base: options.BaseAgain = None,
    config: options.ModelConfig = None,
    logits: Annotated[
        bool, typer.Option(help="Also compare logits on random tokens (holds the model in memory, in float32).")
    ] = True,
    identity: options.Identity = None,
    passphrase_file: options.PassphraseFile = None,
    trust_keys: options.TrustKeys = False,
    as_json: options.Json = False,
) -> None:
    """Undo a copy with the keys and compare it with base plus noise, in weights and in logits.

    Exits with status 1 if they differ by more than storage rounding.
    """
    from mpu_cli.cli.secrets import open_keys
    from mpu_cli.models.source import open_model
    from mpu_cli.server.keys import published_base
    from mpu_cli.server.verify import verify as run_verify

    opened = open_keys(keys, identity, passphrase_file, trust_keys)
    model = published_base(opened, base, config)
    with terminal() as observer:
        result = run_verify(model, open_model(copy, links=False), opened, logits=logits, observer=observer)
    table(
        f"Copy {result.copy}, undone and regenerated",
        ["block", "σ requested", "survived", "largest difference", "differs from the regenerated copy"],
        [
            [
                b.block,
                f"{b.requested:.2e}",
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
            f"; logits differ by {result.logits:.1e} of the largest, by {result.function:.1e} before storage rounding"
        )
    text += f"; noise {opened.publication.scheme.name}, symmetries {opened.publication.symmetries}"
    document = {
        "copy": copy,
        "noise": opened.publication.scheme.kind,
        "symmetries": opened.publication.symmetries,
        "ok": result.ok,
        "function": result.function,
        "logits": result.logits,
    }
    emit([text], {**document, "blocks": [under_old_name(asdict(b)) | {"ok": b.ok} for b in result.blocks]}, as_json)
    if not result.ok:
        raise MpuError(f"{copy}: does not match these keys, or the base is the wrong one")
