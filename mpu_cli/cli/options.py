"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Symmetries = Literal["signed", "paper", "all", "none"]
Noise = Literal["extrapolate", "zero-sum"]
Optimizer = Literal["adamw", "adamw-blockwise", "sgd", "muon", "lion", "paged_adamw_32bit", "adamw_8bit"]
StoredDtype = Literal["float64", "float32", "float16", "bfloat16"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of paths.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what exists.")]
KeysFile = Annotated[Path, typer.Option("--keys", help="The key file of the publication.", metavar="FILE")]
Identity = Annotated[
    Path | None,
    typer.Option(help="age identity file (default: mpu/identity.txt in your configuration directory).", metavar="FILE"),
]
PassphraseFile = Annotated[
    Path | None, typer.Option(help="Read the passphrase from the first line of FILE.", metavar="FILE")
]
Config = Annotated[
    Path | None, typer.Option(help="The base's config.json, if it is not beside the weights.", metavar="FILE")
]
BaseAgain = Annotated[
    str | None,
    typer.Option("--base", help="The model that was published (default: where the keys say it was).", metavar="MODEL"),
]
Dtype = Annotated[StoredDtype | None, typer.Option(help="Store weights in this dtype (default: each tensor's own).")]
