"""One training of a run in processes of its own, started by accelerate's or torch's launcher."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.options.declare import declared_options, flat
from mpu_cli.options.unlearning import Unlearning
from mpu_cli.subprocesses import run_mpu


def launch_unlearning(
    command: str, options: Unlearning, copy: Path, target: Path, reference_file: Path | None
) -> dict[str, Any]:
    """Run ``mpu unlearn`` on ``copy`` with ``command`` in front of it; what it reports with --json.

    Raises MpuError with what the processes said if they fail, UsageError if ``command`` cannot be started.
    """
    resume = [] if options.privacy.dp_epsilon is not None else ["--resume"]
    reference_arguments = ["--reference-file", str(reference_file)] if reference_file else []
    # Several processes cannot look a copy over for traps; this one is the run's own.
    arguments = [
        "unlearn", str(copy), *as_arguments(options), *resume, *reference_arguments, "--trust-copy", "--out",
        str(target), "--force", "--json",
    ]  # fmt: skip
    try:
        ended = run_mpu(arguments, launcher=shlex.split(command))
    except (OSError, ValueError) as error:
        raise UsageError(f"--launch {command!r}: cannot be started ({error})") from error
    begin = ended.stdout.find("{")
    try:
        return json.loads(ended.stdout[begin:])
    except ValueError:
        raise MpuError(f"{copy}: {ended.reason}", f"started with --launch {command!r}") from None


def as_arguments(options: Unlearning) -> Iterator[str]:
    """The options that differ from their defaults, as they stand on the command line."""
    declarations = declared_options(Unlearning)
    for name, value in flat(options).items():
        option = declarations[name]
        if value is None or value == option.default:
            continue
        if option.kind is bool:
            yield option.flag if value else option.flag.replace("--", "--no-", 1)
        else:
            yield from (option.flag, ",".join(value) if isinstance(value, tuple) else str(value))
