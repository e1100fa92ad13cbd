"""mpu in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Prefixes of the lines that say why mpu failed, and what to do.
ERROR, HINT = "mpu: error: ", "mpu: hint: "


@dataclass(frozen=True)
class Ended:
    """The exit status of a process of mpu, and all that it wrote."""

    status: int
    stdout: str
    stderr: str

    @property
    def reason(self) -> str:
        """The reason for its failure: its own error and hint; else the last line that it wrote, or its exit status."""
        lines = self.stderr.splitlines()
        errors = [line.split(ERROR, 1)[1] for line in lines if ERROR in line]
        hints = [line.split(HINT, 1)[1] for line in lines if HINT in line]
        if errors:
            return errors[0] + (f" ({hints[0]})" if hints else "")
        visible = self.stderr.strip().splitlines()
        return visible[-1] if visible else f"exit status {self.status}"


def python_command(module: str, function: str, *arguments: str) -> list[str]:
    """A command that runs ``function`` of ``module``, one of mpu's, in a Python of its own.

    Python puts the current folder on the path that modules are imported from, and that folder may be one in which
    somebody else leaves files, such as a spool. (Python 3.10 has no option against it.)
    """
    program = (
        f"import sys; sys.path[:] = [*filter(None, sys.path), {str(Path(__file__).parents[1])!r}]; "
        f"from {module} import {function}; {function}()"
    )
    return [sys.executable, "-c", program, *arguments]


def safe_environment(**more: str) -> dict[str, str]:
    """This process's environment for another one, which imports nothing from the current folder (Python 3.11), nor do
    those that it starts."""
    return {**os.environ, "PYTHONSAFEPATH": "1", **more}


def import_nothing_from_here() -> None:
    """Let the processes that libraries start for this one, such as submitit's jobs, import nothing from the current
    folder either (Python 3.11)."""
    os.environ |= safe_environment()


def process_count() -> int:
    """The number of processes that torchrun or accelerate launch started to work together, this one included."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def run_mpu(
    arguments: Sequence[str],
    *,
    launcher: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> Ended:
    """Run ``mpu`` with ``arguments`` until it ends, in ``folder``, as tasks of Ray do, or here.

    ``environment`` is added to this process's.

    ``launcher`` is a command that starts Python modules, such as ``accelerate launch -m``.

    Raises OSError if the launcher cannot be started.
    """
    started_by = [*launcher, "mpu_cli", *arguments] if launcher else python_command("mpu_cli.entry", "main", *arguments)
    process = subprocess.Popen(
        started_by, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", cwd=folder,
        env=safe_environment(**(environment or {})),
    )  # fmt: skip
    _RUNNING.add(process)
    try:
        with process:
            try:
                stdout, stderr = process.communicate()
            except BaseException:  # interrupted, or called off by a cluster: mpu would keep running
                process.terminate()
                raise
    finally:
        _RUNNING.discard(process)
    return Ended(process.returncode, stdout, stderr)


_RUNNING: set[subprocess.Popen[str]] = set()


def stop_running() -> None:
    """Ask every process that ``run_mpu`` waits for, in whatever thread, to stop."""
    for process in list(_RUNNING):
        process.terminate()
