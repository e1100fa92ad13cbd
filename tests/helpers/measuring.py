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
        peak = max(peak, anonymous_bytes(process.pid))
        time.sleep(POLL)
    if process.wait():
        raise SystemExit(f"{' '.join(map(str, command))}: exit status {process.returncode}")
    return time.perf_counter() - started, peak / 2**20


def anonymous_bytes(process: int) -> int:
    """Anonymous resident memory of a running process; 0 of one that has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)
