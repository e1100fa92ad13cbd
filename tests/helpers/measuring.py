"""Seconds and memory of a command."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import IO

MPU = (sys.executable, "-m", "mpu_cli")
POLL = 0.01  # seconds between looks at the process's memory


def run_measured(*command: object, stdout: IO[str] | int = subprocess.DEVNULL) -> tuple[float, float]:
    """Wall seconds of a command and its peak anonymous memory in MB."""
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(list(map(str, command)), stdout=stdout, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        peak = max([peak, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))])
        time.sleep(POLL)
    if process.wait():
        raise SystemExit(f"{' '.join(map(str, command))}: exit status {process.returncode}")
    return time.perf_counter() - started, peak / 1024
