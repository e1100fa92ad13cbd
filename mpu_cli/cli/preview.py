"""``--dry-run``: what a command would read and write, and the memory and disk it needs, after all its checks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.cli.output import emit, in_bytes, warn


@dataclass(frozen=True)
class Preview:
    """``reads`` and ``writes``: paths with their bytes (None: small); ``memory``: bytes, without activations."""

    reads: Sequence[tuple[object, int | None]]
    writes: Sequence[tuple[Path, int | None]]
    memory: float
    notes: Sequence[str] = ()


def show(preview: Preview, *, force: bool, as_json: bool) -> None:
    """Print ``preview``. Raises MpuError if an output exists and may not be replaced."""
    for path, _ in preview.writes:
        Transaction(force=force).check(path, path.is_dir())
    needed = sum(size or 0 for _, size in preview.writes)
    free = shutil.disk_usage(_existing(preview.writes[0][0])).free
    lines = [f"reads\t{path}{_of(size)}" for path, size in preview.reads]
    lines += [f"writes\t{path}{_of(size)}" for path, size in preview.writes]
    lines += [f"memory\tabout {in_bytes(preview.memory)}", f"disk\t{in_bytes(needed)} of {in_bytes(free)} free"]
    if needed > free:
        warn(f"{preview.writes[0][0].parent}: {in_bytes(needed)} are needed, {in_bytes(free)} are free")
    lines += [f"note\t{text}" for text in preview.notes]
    document = {
        "reads": [{"path": path, "bytes": size} for path, size in preview.reads],
        "writes": [{"path": path, "bytes": size} for path, size in preview.writes],
        "memory": preview.memory,
        "disk": {"needed": needed, "free": free},
        "notes": list(preview.notes),
    }
    emit(lines, document, as_json)


def _of(size: int | None) -> str:
    return "" if size is None else f"\t{in_bytes(size)}"


def _existing(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.exists())
