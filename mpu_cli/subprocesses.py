"""mpu in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# How lines begin that say why mpu failed, what to do, and what it warns of.
ERROR, HINT, WARNING = "mpu: error: ", "mpu: hint: ", "warning: "


@dataclass(frozen=True)
class Ended:
    """What a process of mpu left: its exit status, and all that it wrote."""

    status: int
    stdout: str
    stderr: str

    @property
    def warnings(self) -> list[str]:
        """What it warned of."""
        return [line.removeprefix(WARNING) for line in self.stderr.splitlines() if line.startswith(WARNING)]

    @property
    def reason(self) -> str:
        """Why it failed: its own error and hint; else the last line that it wrote, or its exit status."""
        errors, hints = (
            [line.split(mark, 1)[1] for line in self.stderr.splitlines() if mark in line] for mark in (ERROR, HINT)
        )
        if errors:
            return errors[0] + (f" ({hints[0]})" if hints else "")
        return next(filter(None, reversed(self.stderr.strip().splitlines())), f"exit status {self.status}")


def run_mpu(
    arguments: Sequence[str],
    *,
    launcher: Sequence[str] = (sys.executable, "-m"),
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run ``mpu`` with ``arguments``, started by ``launcher``, until it ends; ``environment`` is added to this one.

    Raises OSError if the launcher cannot be started.
    """
    done = subprocess.run(
        [*launcher, "mpu_cli", *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)
