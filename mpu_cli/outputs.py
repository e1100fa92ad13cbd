"""Where outputs go if no option says: names that hold the round, so that the next one does not collide with it."""

from __future__ import annotations

import os
from pathlib import Path

from mpu_cli.errors import UsageError
from mpu_cli.manifest import read_copy_manifest, read_model_manifest

SUFFIX = ".safetensors"


def next_round(folder: Path) -> tuple[str | None, int]:
    """The run and round in which the model in ``folder`` is published: those after the one that made it."""
    manifest = read_model_manifest(folder)
    return (manifest.run, manifest.round + 1) if manifest else (None, 1)


def round_of_copy(copy: Path) -> int:
    """The round of the copy in a directory; 1 for anything else."""
    manifest = read_copy_manifest(copy) if copy.is_dir() else None
    return manifest.round if manifest else 1


def round_folder(parent: Path, number: int) -> Path:
    """``parent`` in round 1, ``parent/round_R`` after it."""
    return parent if number == 1 else parent / f"round_{number}"


def keys_path(base: Path, number: int | None) -> Path:
    """Where `mpu publish` puts the keys of round ``number`` (default: the one after that which made the model in
    ``base``)."""
    return round_folder(Path("."), next_round(base)[1] if number is None else number) / "keys.bin"


def model_folder(number: int) -> Path:
    """Where `mpu aggregate` puts the model of round ``number``: ``unlearned``, then ``unlearned_2`` …"""
    return Path("unlearned" if number == 1 else f"unlearned_{number}")


def name_of_copy(copy: str) -> str:
    """What a delta of the model at ``copy`` (a path or a Hub id) is called."""
    name = Path(copy).resolve().name if Path(copy).exists() else copy.rsplit("/", 1)[-1]
    return name.removesuffix(SUFFIX).removesuffix(".age")


def delta_path(out: str | None, copy: str, number: int) -> Path:
    """The delta of the model at ``copy`` in round ``number``: ``out``, or a file in it if it is a directory.

    A name without a suffix gets ``.safetensors``; UsageError for any other suffix.
    """
    name = name_of_copy(copy) + SUFFIX
    if out is None:
        return round_folder(Path("deltas"), number) / name
    path = Path(out)
    if out.endswith(os.sep) or (path.is_dir() and not list(path.glob("*.index.json"))):
        return path / name
    if path.suffix == SUFFIX:
        return path
    if path.suffix:
        raise UsageError(f"--out {out}: a delta is a {SUFFIX} file", f"use {path.with_suffix(SUFFIX)}")
    return path.with_name(path.name + SUFFIX)
