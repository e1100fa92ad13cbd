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
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.boundary import (
    Count,
    Document,
    Numbers,
    RunName,
    Word,
    Words,
    parse_document,
    read_json_object,
)

VERSION = 2
# of a LoRA delta: W.lora_B (rows of W, r) times W.lora_A (r, columns of W)
LEFT_FACTOR, RIGHT_FACTOR = ".lora_B", ".lora_A"
_ROUND_FOLDER = re.compile(r"round_(\d{1,6})", re.ASCII)
# The files that `mpu sweep` leaves in its folder: the names of all experiments, and a line for each that is done.
PLANNED, RESULTS = "sweep.json", "results.jsonl"
MANIFEST_NAME = "mpu.json"
REQUEST_FOLDER = "request_"  # of the deltas of a further request on the same copies, before its number
TAGS = {  # of a delta's training, in words
    "records": "records",
    "options": "options or seed",
    "versions": "library versions",
}
VERSIONS = "versions"
NoiseShare = Annotated[float, Meta(ge=0, le=100)]


@dataclass(frozen=True)
class CopyManifest:
    """The copy that a directory holds: its number and its publication."""

    run: RunName
    round: Count
    copy: Count  # counts from 1
    copies: Count
    copy_id: Word
    # the set that its coordinates are drawn from; not a secret: the client's optimiser must suit it
    symmetries: Word | None = None
    # the RMS of its permanent noise as a share of that of its weights, from which the client knows how far to
    # unlearn; 0 if there is none
    noise: NoiseShare = 0.0

    def facts(self) -> dict[str, object]:
        """The facts in ``mpu.json``, and in the metadata of the weights and of deltas."""
        return {name: value for name, value in asdict(self).items() if value or name != "noise"}


@dataclass(frozen=True)
class ModelManifest:
    """The round that made a model, and its run; ``permanent``: whether its copies had permanent noise."""

    run: RunName
    round: Count
    permanent: bool = False


@dataclass(frozen=True)
class DeltaManifest:
    """The model that a delta changes, and how it was trained."""

    origin: CopyManifest | None  # None for a model that is not a copy (the clean baseline)
    algorithm: str
    kind: str = "full"
    inverted: bool = False
    privacy: dict[str, float] | None = None  # the (epsilon, delta) that the client reports if it trained privately
    # tags of records, options and versions, equal for copies that were trained identically
    # (``mpu_cli.training.delta``)
    trained: dict[str, str] | None = None
    # whether the copy was trained until it had forgotten the records, not for a number of epochs
    until_done: bool = False


class _DeltaFacts(Document):
    algorithm: Word
    kind: Literal["full", "lora"]
    inverted: bool
    privacy: Numbers | None = None
    trained: Words | None = None
    until_done: bool = False


def copy_facts(manifest: CopyManifest) -> dict[str, object]:
    """The content of a copy's ``mpu.json``."""
    return {"format": "mpu-copy", "version": VERSION, **manifest.facts()}


def delta_facts(manifest: DeltaManifest) -> dict[str, object]:
    """The content of a delta's metadata."""
    origin = manifest.origin.facts() if manifest.origin else {}
    more = {"privacy": manifest.privacy, "trained": manifest.trained, "until_done": manifest.until_done}
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
    """The manifest of the copy in ``folder``, or None if it is a model that mpu did not publish, or not a folder.

    If the ``metadata`` of the weights next to it is given, raises MpuError if they belong to a different copy.
    """
    path = folder / MANIFEST_NAME
    entries = _entries(path)
    if entries.get("format") != "mpu-copy":
        return None
    if metadata is not None and facts_of(metadata) != entries:
        raise MpuError(f"{path}: does not match the metadata of the weights next to it")
    return _copy_manifest(entries, path)


def read_model_manifest(folder: Path) -> ModelManifest | None:
    """The manifest of the model in ``folder``, or None if `mpu aggregate` did not make it."""
    path = folder / MANIFEST_NAME
    entries = _entries(path)
    is_of_round = entries.get("format") == "mpu-model" and "run" in entries
    return _parse(ModelManifest, entries, path) if is_of_round else None


def had_permanent_noise(folder: Path) -> bool:
    """Whether the model in ``folder``, of one owner or several, was made with copies that had permanent noise."""
    entries = _entries(folder / MANIFEST_NAME)
    return entries.get("format") == "mpu-model" and entries.get("permanent") is True


def _entries(path: Path) -> dict[str, object]:
    return read_json_object(path, links=False) if os.path.lexists(path) else {}


def delta_manifest(metadata: Mapping[str, str], path: Path) -> DeltaManifest:
    """The manifest in a delta's metadata."""
    entries = facts_of(metadata)
    if entries.get("format") != "mpu-delta":
        raise MpuError(
            f"{path}: not a delta made by mpu (its metadata does not say so)", "name what `mpu unlearn` wrote"
        )
    facts = _parse(_DeltaFacts, entries, path)
    origin = _copy_manifest(entries, path) if "run" in entries else None
    return DeltaManifest(origin, **msgspec.structs.asdict(facts))


def manifest_of(path: Path, metadata: Mapping[str, str]) -> DeltaManifest | CopyManifest | ModelManifest | None:
    """The manifest of the delta, copy or model at ``path``, whose weights have this ``metadata``; None for weights that
    mpu did not make, and for those of a copy or a model without their folder."""
    if facts_of(metadata).get("format") == "mpu-delta":
        return delta_manifest(metadata, path)
    return read_copy_manifest(path) or read_model_manifest(path)


FactsOf = TypeVar("FactsOf")


def _parse(schema: type[FactsOf], entries: Mapping[str, object], path: Path) -> FactsOf:
    if entries.get("version") != VERSION:
        raise MpuError(
            f"{path}: format version {str(entries.get('version'))[:80]} is not supported "
            f"(this mpu reads version {VERSION})",
            "update mpu",
        )
    return parse_document(schema, entries, path)


def _copy_manifest(entries: Mapping[str, object], path: Path) -> CopyManifest:
    facts = _parse(CopyManifest, entries, path)
    if not facts.run.isprintable():
        raise MpuError(f"{path}: its run is not a name", "get it again")
    if facts.copy > facts.copies:
        raise MpuError(f"{path}: claims to be copy {facts.copy} of {facts.copies}", "get it again")
    return facts


# The default paths of outputs: names that hold the round, so that the next one does not collide with it.

SUFFIX = ".safetensors"


def next_round(folder: Path) -> tuple[str | None, int]:
    """The run and round in which the model in ``folder`` is published: those after the one that made it."""
    manifest = read_model_manifest(folder)
    return (manifest.run, manifest.round + 1) if manifest else (None, 1)


def round_of_copy(copy: Path) -> int:
    """The round of the copy in a directory; of a sealed one, whose manifest is not open, that of the folder that
    `mpu publish` puts it in; 1 for anything else."""
    if copy.suffix == ".age":
        named = _ROUND_FOLDER.fullmatch(copy.absolute().parent.name)
        return int(named[1]) if named else 1
    manifest = read_copy_manifest(copy)
    return manifest.round if manifest else 1


def round_folder(parent: Path, number: int) -> Path:
    """``parent`` in round 1, ``parent/round_R`` after it."""
    return parent if number == 1 else parent / f"round_{number}"


def keys_path(number: int) -> Path:
    """The key file of a round, as `mpu publish` names it: ``keys.bin``, then ``keys_2.bin`` … Not in the folder of the
    round, which is sent as a whole."""
    return Path("keys.bin" if number == 1 else f"keys_{number}.bin")


def model_folder(number: int) -> Path:
    """The folder in which `mpu aggregate` puts the model of round ``number``: ``unlearned``, then ``unlearned_2`` …"""
    return Path("unlearned" if number == 1 else f"unlearned_{number}")


def name_of_copy(copy: str) -> str:
    """The name of a delta of the model at ``copy`` (a path or a Hub id)."""
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


def resume_folder(delta: Path) -> Path:
    """The folder of the checkpoints of the training that will write ``delta``."""
    return delta.with_name(f"{delta.name}.resume")
