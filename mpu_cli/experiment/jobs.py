"""Cells of a sweep side by side, each in a process of its own: one for each device, or with a share of the cores."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpu_cli.errors import MpuError
from mpu_cli.subprocesses import run_mpu

OUTPUT = "output.txt"  # in a cell's folder: what its process said


@dataclass(frozen=True)
class Jobs:
    """Up to ``count`` processes at once; ``command`` are the arguments of ``mpu`` that run one cell, but for its name,
    and print its line of results."""

    count: int
    command: Sequence[str]
    folder: Path
    _places: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        for slot in range(self.count):
            self._places.put(slot)

    def play(self, name: str) -> dict[str, Any]:
        """Run a cell; its line of results. Raises MpuError with what the process said if it fails."""
        slot = self._places.get()
        try:
            ended = run_mpu([*self.command, "--cell", name], environment=self._environment(slot))
        finally:
            self._places.put(slot)
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OUTPUT).write_text(ended.stderr, encoding="utf-8")
        try:
            return json.loads(ended.stdout)
        except ValueError:
            raise MpuError(ended.reason, f"{folder / OUTPUT} has all that it said") from None

    def _environment(self, slot: int) -> dict[str, str]:
        import torch

        if devices := torch.cuda.device_count():
            allowed = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices)))).split(",")
            return {"CUDA_VISIBLE_DEVICES": allowed[slot % devices]}
        return {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // self.count))}
