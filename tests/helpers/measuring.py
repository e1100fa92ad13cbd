"""Seconds and memory of a command, and how fast this machine is."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from timeit import repeat
from typing import IO

import torch

MPU = (sys.executable, "-m", "mpu_cli")
POLL = 0.01  # seconds between looks at the process's memory


def run_measured(*command: object, stdout: IO[str] | int = subprocess.DEVNULL) -> tuple[float, float]:
    """Wall seconds of a command and its peak anonymous memory in MB."""
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(list(map(str, command)), stdout=stdout)
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


@dataclass(frozen=True)
class Machine:
    """Bytes copied in memory per second (read and written), and operations per second of products in float32."""

    bandwidth: float
    operations: float


def measure_machine() -> Machine:
    """Best of a few tries at copying 256 MB and at multiplying two matrices."""
    source, matrix = torch.ones(64 << 20), torch.ones(1024, 1024)
    target = torch.empty_like(source)
    copying = min(repeat(lambda: target.copy_(source), repeat=10, number=1))
    multiplying = min(repeat(lambda: matrix @ matrix, repeat=10, number=1))
    return Machine(2 * source.nbytes / copying, 2 * 1024**3 / multiplying)
