"""``mpu doctor``: what this machine offers, and whether mpu works on it."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note, terminal
from mpu_cli.errors import MpuError
from mpu_cli.options.unlearning import DEVICE


def doctor(
    device: Annotated[str, typer.Option(help=DEVICE, metavar="DEVICE")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Only say what the machine offers.")] = False,
    as_json: options.Json = False,
) -> None:
    """Say what this machine offers, and try the whole path on it with a small model, which takes about a minute.

    For a bug report: nothing of yours is read or shown. Exits with status 1 if something does not work.
    """
    with terminal() as observer:
        observer.stage("look around", 1, "done")
        from mpu_cli.doctor.machine import facts
        from mpu_cli.doctor.trial import trials
        from mpu_cli.models.device import device_of

        torch_device = device_of(device)
        machine_facts = facts(torch_device)
        checks = []
        if not quick:
            with tempfile.TemporaryDirectory(prefix="mpu-doctor-") as folder:
                checks = list(trials(device, Path(folder), observer))
    lines = [f"{name}\t{value}" for name, value in machine_facts.items()]
    lines += [
        f"{'works' if check.ok else 'FAILS'}\t{check.name} on {torch_device} ({check.seconds:.1f} s): {check.said}"
        for check in checks
    ]
    document = {"machine": machine_facts, "device": str(torch_device), "checks": [asdict(check) for check in checks]}
    emit(lines, document, as_json)
    broken = [check.name for check in checks if not check.ok]
    if broken:
        raise MpuError(f"on {torch_device}, {', '.join(broken)} failed", "please report it with all of the above")
    if checks:
        note(f"everything that was tried works on {torch_device}")
