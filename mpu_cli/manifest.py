"""The facts stored with copies, deltas and models: ``mpu.json`` and the safetensors metadata.

They identify what belongs together and contain no secrets.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpu_cli.checkpoint.reader import read_json_object
from mpu_cli.errors import MpuError

VERSION = 2
READABLE = (1, 2)  # version 1 recorded neither a copy's symmetries nor how a delta was trained
KINDS = ("full", "lora")
LONGEST_RUN, MOST_FACTS, MOST_COPIES, MOST_LAYERS = 200, 20, 10**6, 10_000
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,80}")
LEFT, RIGHT = ".lora_B", ".lora_A"  # of a LoRA delta: W.lora_B (rows of W, r) times W.lora_A (r, columns of W)
MANIFEST_NAME = "mpu.json"
TAGS = {  # of a delta's training, in words
    "records": "records",
    "tokens": "records (or template, date, tokenizer)",  # of mpu before 0.2
    "options": "options or seed",
    "versions": "library versions",
}
VERSIONS = "versions"


@dataclass(frozen=True)
class CopyManifest:
    """Which copy of which publication a directory holds. ``copy`` counts from 1.

    ``symmetries`` is the set that its coordinates are drawn from. It is not a secret: the client's optimiser must suit
    it. ``omitted``: the base's layers that it lacks, counted from 0, which anyone who has the public model can tell.
    """

    run: str
    round: int
    copy: int
    copies: int
    copy_id: str
    symmetries: str | None = None
    omitted: tuple[int, ...] = ()

    def facts(self) -> dict[str, object]:
        facts = asdict(self)
        omitted = facts.pop("omitted")
        return facts | ({"omitted_layers": list(omitted)} if omitted else {})


@dataclass(frozen=True)
class ModelManifest:
    """The round that made a model, and its run; ``permanent``: whether noise that stays was in its copies."""

    run: str
    round: int
    permanent: bool = False


@dataclass(frozen=True)
class DeltaManifest:
    """Which model a delta changes; ``origin`` is None for a model that is not a copy (the clean baseline).

    ``privacy`` is the (epsilon, delta) that the client reports if it trained privately. ``trained``: tags of tokens,
    options and versions, equal for copies that were trained identically (``mpu_cli.client.tag``).
    """

    origin: CopyManifest | None
    algorithm: str
    kind: str = "full"
    inverted: bool = False
    privacy: dict[str, float] | None = None
    trained: dict[str, str] | None = None


def copy_facts(manifest: CopyManifest) -> dict[str, object]:
    """The content of a copy's ``mpu.json``."""
    return {"format": "mpu-copy", "version": VERSION, **manifest.facts()}


def delta_facts(manifest: DeltaManifest) -> dict[str, object]:
    """The content of a delta's metadata."""
    origin = manifest.origin.facts() if manifest.origin else {}
    more = {"privacy": manifest.privacy, "trained": manifest.trained}
    return {
        "format": "mpu-delta", "version": VERSION, "algorithm": manifest.algorithm, "kind": manifest.kind,
        "inverted": manifest.inverted, **origin, **{name: value for name, value in more.items() if value},
    }  # fmt: skip


def as_metadata(facts: Mapping[str, object]) -> dict[str, str]:
    """Facts as safetensors metadata, which maps strings to strings: one entry, ``mpu``, holds them as JSON."""
    return {"mpu": json.dumps(facts)}


def facts_of(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The inverse of ``as_metadata``; empty if the metadata is not mpu's."""
    try:
        facts = json.loads(metadata.get("mpu", "{}"))
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def read_copy_manifest(folder: Path, metadata: Mapping[str, str] | None = None) -> CopyManifest | None:
    """The manifest of the copy in ``folder``, or None if it is a model that mpu did not publish.

    If the ``metadata`` of the weights next to it is given, raises MpuError if they belong to a different copy.
    """
    path = folder / MANIFEST_NAME
    if not os.path.lexists(path):
        return None
    facts = read_json_object(path, links=False)
    if facts.get("format") != "mpu-copy":
        return None
    if metadata is not None and facts_of(metadata) != facts:
        raise MpuError(f"{path}: does not match the metadata of the weights next to it")
    return _copy_manifest(facts, path)


def read_model_manifest(folder: Path) -> ModelManifest | None:
    """The manifest of the model in ``folder``, or None if `mpu aggregate` did not make it."""
    path = folder / MANIFEST_NAME
    if not os.path.lexists(path):
        return None
    facts = read_json_object(path, links=False)
    if facts.get("format") != "mpu-model" or "run" not in facts:
        return None
    _check_version(facts, path)
    run, number = facts["run"], facts.get("round")
    if not isinstance(run, str) or type(number) is not int or number < 1:
        raise MpuError(f"{path}: run or round is invalid", "get it again")
    return ModelManifest(run, number, facts.get("permanent") is True)


def delta_manifest(metadata: Mapping[str, str], path: Path) -> DeltaManifest:
    """The manifest in a delta's metadata. Raises MpuError if ``path`` is not an mpu delta."""
    facts = facts_of(metadata)
    if facts.get("format") != "mpu-delta":
        raise MpuError(f"{path}: not a delta made by mpu (its metadata does not say so)")
    _check_version(facts, path)
    origin = _copy_manifest(facts, path) if "run" in facts else None
    kind, inverted = facts.get("kind"), facts.get("inverted")
    if kind not in KINDS or not isinstance(inverted, bool):
        raise MpuError(f"{path}: delta of unknown kind {str(kind)[:80]!r}", "update mpu")
    algorithm = facts.get("algorithm")
    if not isinstance(algorithm, str) or not _WORD.fullmatch(algorithm):
        raise MpuError(f"{path}: names no algorithm", "get it again")
    privacy, trained = facts.get("privacy"), facts.get("trained")
    if privacy is not None and not _is_table(privacy, int | float):
        raise MpuError(f"{path}: its privacy is not a table of numbers", "get it again")
    if trained is not None and not (_is_table(trained, str) and all(map(_WORD.fullmatch, trained.values()))):
        raise MpuError(f"{path}: its training tags are not words", "get it again")
    return DeltaManifest(origin, algorithm, kind, inverted, privacy, trained)


def _is_table(value: object, of: Any) -> bool:
    """Whether ``value`` is a small table of values of one type under plain names."""
    return (
        isinstance(value, dict)
        and len(value) <= MOST_FACTS
        and all(_WORD.fullmatch(name) for name in value)
        and all(isinstance(each, of) and not isinstance(each, bool) for each in value.values())
    )


def are_layers(value: object) -> bool:
    """Whether ``value`` lists numbers of layers, ascending."""
    if not isinstance(value, list) or len(value) > MOST_LAYERS or not all(type(n) is int and n >= 0 for n in value):
        return False
    return value == sorted(set(value))


def _check_version(facts: Mapping[str, object], path: Path) -> None:
    if facts.get("version") not in READABLE:
        raise MpuError(
            f"{path}: format version {str(facts.get('version'))[:80]} is not supported (this mpu reads 1 to {VERSION})",
            "update mpu",
        )


def _copy_manifest(facts: Mapping[str, Any], path: Path) -> CopyManifest:
    _check_version(facts, path)
    run, copy_id = facts.get("run"), facts.get("copy_id")
    numbers = [n for n in map(facts.get, ("round", "copy", "copies")) if type(n) is int and n > 0]
    if not isinstance(run, str) or not isinstance(copy_id, str) or not _WORD.fullmatch(copy_id) or len(numbers) < 3:
        raise MpuError(f"{path}: does not say which copy it belongs to", "get it again")
    if len(run) > LONGEST_RUN or not run.isprintable() or max(numbers) > MOST_COPIES:
        raise MpuError(f"{path}: its run, round or copy is not plausible", "get it again")
    round_, copy, copies = numbers
    if copy > copies:
        raise MpuError(f"{path}: claims to be copy {copy} of {copies}", "get it again")
    symmetries = facts.get("symmetries")
    omitted = facts.get("omitted_layers", [])
    if not are_layers(omitted):
        raise MpuError(f"{path}: the layers that it lacks are not ascending numbers", "get it again")
    return CopyManifest(
        run, round_, copy, copies, copy_id, symmetries if isinstance(symmetries, str) else None, tuple(omitted)
    )
