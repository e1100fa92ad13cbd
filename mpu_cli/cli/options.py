"""Options of several commands that no group in ``mpu_cli.options`` declares: files, secrets, output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of paths.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check everything, print what would be read and written, and stop."),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing outputs.")]
KeysFile = Annotated[Path, typer.Option("--keys", help="The key file of the publication.", metavar="FILE")]
Identity = Annotated[
    Path | None,
    typer.Option(help="age identity file (default: mpu/identity.txt in your configuration directory).", metavar="FILE"),
]
PassphraseFile = Annotated[
    Path | None, typer.Option(help="Read the passphrase from the first line of FILE.", metavar="FILE")
]
TrustKeys = Annotated[
    bool,
    typer.Option("--trust-keys", help="Use keys that were not sealed with this server's secret: of an older mpu, or "
                 "made on another machine."),
]  # fmt: skip
ModelConfig = Annotated[
    Path | None,
    typer.Option("--model-config", help="The base's config.json, if it is not next to the weights.", metavar="FILE"),
]
BaseAgain = Annotated[
    str | None,
    typer.Option("--base", help="The published model (default: the location recorded in the keys).", metavar="MODEL"),
]
