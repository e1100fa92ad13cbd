"""Starting ``mpu`` in a process of its own and stopping it at a known point."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PATIENCE = 120  # seconds to wait for the point


def stop_when(
    arguments: Sequence[object],
    when: Callable[[], object],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    by: int = signal.SIGKILL,
) -> subprocess.CompletedProcess:
    """Run ``mpu ARGUMENTS`` and send it the signal ``by`` as soon as ``when()`` is true.

    Fails if it ends before that, or the point does not come. ``when`` should look for something that is there from
    then on: this process may be slow to look.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "mpu_cli", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # pytest's parent may ignore it
    )
    deadline = time.monotonic() + PATIENCE
    while not when() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    running = process.poll() is None
    process.send_signal(by)
    out, err = process.communicate(timeout=PATIENCE)
    assert running, f"ended before it was stopped: {err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
