"""The facts that copies, deltas and models carry with them: ``mpu.json`` and the safetensors metadata.

They name what belongs together and hold nothing secret.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mpu_cli.checkpoint.reader import read_json_object
from mpu_cli.errors import MpuError

VERSION = 2
READABLE = (1, 2)  # version 1 knew neither a copy's symmetries nor how a delta was trained
KINDS = ("full", "lora")
LEFT, RIGHT = ".lora_B", ".lora_A"  # of a LoRA delta: W.lora_B (rows of W, r) times W.lora_A (r, columns of W)
MANIFEST_NAME = "mpu.json"


@dataclass(frozen=True)
class CopyManifest:
    """Which copy of which publication a directory holds. ``copy`` counts from 1.

    ``symmetries`` is the set that its coordinates are drawn from, no secret: the client's optimiser has to suit it.
    """

    run: str
    round: int
    copy: int
    copies: int
    copy_id: str
    symmetries: str | None = None


@dataclass(frozen=True)
class DeltaManifest:
    """What a delta is the change of; ``origin`` is None for a model that is no copy (the clean baseline).

    ``privacy`` is the (epsilon, delta) within which the client says it trained, if it did so privately. ``trained``:
    tags of tokens, options and versions, equal for copies that were trained alike (``mpu_cli.client.tag``).
    """

    origin: CopyManifest | None
    algorithm: str
    kind: str = "full"
    inverted: bool = False
    privacy: dict[str, float] | None = None
    trained: dict[str, str] | None = None


def copy_facts(manifest: CopyManifest) -> dict[str, object]:
    """The content of a copy's ``mpu.json``."""
    return {"format": "mpu-copy", "version": VERSION, **asdict(manifest)}


def delta_facts(manifest: DeltaManifest) -> dict[str, object]:
    """What a delta's metadata says."""
    origin = asdict(manifest.origin) if manifest.origin else {}
    more = {"privacy": manifest.privacy, "trained": manifest.trained}
    return {
        "format": "mpu-delta", "version": VERSION, "algorithm": manifest.algorithm, "kind": manifest.kind,
        "inverted": manifest.inverted, **origin, **{name: value for name, value in more.items() if value},
    }  # fmt: skip


def as_metadata(facts: Mapping[str, object]) -> dict[str, str]:
    """Facts as safetensors metadata, which maps texts to texts: one entry, ``mpu``, of JSON."""
    return {"mpu": json.dumps(facts)}


def facts_of(metadata: Mapping[str, str]) -> dict[str, object]:
    """The inverse of ``as_metadata``; empty where the metadata is none of mpu's."""
    try:
        facts = json.loads(metadata.get("mpu", "{}"))
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def read_copy_manifest(folder: Path, metadata: Mapping[str, str] | None = None) -> CopyManifest | None:
    """The manifest of the copy in ``folder``, or None if it is a model that mpu did not publish.

    With the ``metadata`` of the weights beside it, raises MpuError if they are of another copy.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        return None
    facts = read_json_object(path)
    if facts.get("format") != "mpu-copy":
        return None
    if metadata is not None and facts_of(metadata) != facts:
        raise MpuError(f"{path}: does not belong to the weights beside it, which say otherwise of themselves")
    return _copy_manifest(facts, path)


def delta_manifest(metadata: Mapping[str, str], path: Path) -> DeltaManifest:
    """The manifest in a delta's metadata; MpuError if ``path`` is no delta of mpu's."""
    facts = facts_of(metadata)
    if facts.get("format") != "mpu-delta":
        raise MpuError(f"{path}: is not a delta of mpu (its metadata does not say so)")
    _check_version(facts, path)
    origin = _copy_manifest(facts, path) if "run" in facts else None
    kind, inverted = facts.get("kind"), facts.get("inverted")
    if kind not in KINDS or not isinstance(inverted, bool):
        raise MpuError(f"{path}: a delta of kind {kind!r}, which this mpu does not know; update mpu")
    privacy, trained = (
        facts.get(name) if isinstance(facts.get(name), dict) else None for name in ("privacy", "trained")
    )
    return DeltaManifest(origin, str(facts.get("algorithm")), kind, inverted, privacy, trained)


def _check_version(facts: Mapping[str, object], path: Path) -> None:
    if facts.get("version") not in READABLE:
        raise MpuError(
            f"{path}: made by another mpu (version {facts.get('version')!r}, this one reads 1 to {VERSION}); update mpu"
        )


def _copy_manifest(facts: Mapping[str, object], path: Path) -> CopyManifest:
    _check_version(facts, path)
    run, copy_id = facts.get("run"), facts.get("copy_id")
    numbers = [facts.get(name) for name in ("round", "copy", "copies")]
    if not isinstance(run, str) or not isinstance(copy_id, str) or not all(type(n) is int and n > 0 for n in numbers):
        raise MpuError(f"{path}: does not say which copy it belongs to; fetch it again")
    if numbers[1] > numbers[2]:
        raise MpuError(f"{path}: says that it is copy {numbers[1]} of {numbers[2]}; fetch it again")
    symmetries = facts.get("symmetries")
    return CopyManifest(run, *numbers, copy_id, symmetries if isinstance(symmetries, str) else None)
