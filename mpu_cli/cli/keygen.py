"""``mpu keygen``: an identity that opens key files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note


def keygen(
    out: Annotated[
        Path | None,
        typer.Option(
            help="The identity file (default: mpu/identity.txt in your configuration directory).", metavar="FILE"
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Make an age identity (mode 0600). It opens what is sealed for its public key, the printed line that begins with
    age1: copies (`publish --copy-recipients`), or keys (`publish --recipient`). Send that line, never the file.

    Prints the path of the identity; the public key goes to standard error.
    """
    from mpu_cli.sealing import default_identity_path, make_identity

    path = out or default_identity_path()
    recipient = make_identity(path)
    note(f"public key: {recipient}")
    emit([path], {"identity": path, "recipient": recipient}, as_json)
