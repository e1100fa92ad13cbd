"""What a folder in which somebody works holds: copies, keys, deltas, models, what belongs together, what is next."""

from __future__ import annotations

import shlex
from itertools import islice
from pathlib import Path
from typing import Any

from mpu_cli.errors import MpuError
from mpu_cli.outputs import round_folder

MAX_ENTRIES = 1000  # entries that are looked at


def workplace(folder: Path) -> dict[str, Any] | None:
    """A line for each thing in ``folder`` that mpu made, and the next step of each round; None if there is none."""
    from mpu_cli.boundary.files import open_regular
    from mpu_cli.checkpoint.reader import open_checkpoint
    from mpu_cli.manifest import CopyManifest, delta_manifest, facts_of, read_copy_manifest, read_model_manifest
    from mpu_cli.sealing import AGE_HEADER

    rounds: dict[tuple[str, int], dict[str, dict[int, Path]]] = {}
    copies_of: dict[tuple[str, int], int] = {}
    keys: list[str] = []
    other_entries: dict[str, list[str]] = {}
    models: dict[tuple[str, int], str] = {}  # that rounds made

    def note(origin: CopyManifest, what: str, path: Path) -> None:
        key = origin.run, origin.round
        copies_of[key] = origin.copies
        rounds.setdefault(key, {"copies": {}, "deltas": {}})[what][origin.copy] = path

    for path in sorted(_candidates(folder))[:MAX_ENTRIES]:
        name = str(path.relative_to(folder))
        try:
            if path.is_file():
                with open_regular(path, links=False) as file:
                    sealed = file.read(len(AGE_HEADER)) == AGE_HEADER
                if sealed:
                    (keys if path.suffix == ".bin" else other_entries.setdefault("sealed copies", [])).append(name)
                    continue
            checkpoint = open_checkpoint(path, links=False)
            kind = facts_of(checkpoint.metadata).get("format")
            if kind == "mpu-delta":
                if origin := delta_manifest(checkpoint.metadata, path).origin:
                    note(origin, "deltas", path)
            elif path.is_dir() and (origin := read_copy_manifest(path)):
                note(origin, "copies", path)
            elif path.is_dir():
                other_entries.setdefault("models", []).append(name)
                if model_manifest := read_model_manifest(path):
                    models[model_manifest.run, model_manifest.round] = name
        except MpuError as error:
            other_entries.setdefault("not readable", []).append(f"{name} ({error.problem})")
    if not rounds and not keys and not other_entries:
        return None
    facts: dict[str, Any] = {"kind": "folder"}
    for (run, number), paths in rounds.items():
        facts[f"round {number} of run {run[:8]}…"] = _state(
            folder, number, paths, copies_of[run, number], keys, models.get((run, number))
        )
    if keys:
        facts["keys"] = keys
    return facts | other_entries


def _entries(folder: Path) -> list[Path]:
    """The first entries of a folder that are not links, which could lead anywhere."""
    return [path for path in islice(folder.iterdir(), MAX_ENTRIES) if not path.is_symlink()]


def _candidates(folder: Path) -> list[Path]:
    """Entries of ``folder``, and of the folders for rounds and deltas in it."""
    inner = [path for path in _entries(folder) if path.is_dir() and path.name.startswith(("round_", "deltas"))]
    inner += [path for outer in inner for path in _entries(outer) if path.is_dir() and path.name.startswith("round_")]
    entries = [path for outer in (folder, *inner) for path in _entries(outer) if path not in inner]
    return [
        path for path in entries
        if path.suffix in (".safetensors", ".bin", ".age") or (path.is_dir() and (path / "config.json").exists())
    ]  # fmt: skip


def _state(
    folder: Path, number: int, paths: dict[str, dict[int, Path]], count: int, keys: list[str], model: str | None
) -> str:
    """Which copies and deltas of a round are there, and what to do next."""

    def progress_text(what: str) -> str:
        return f"{what} {', '.join(map(str, sorted(paths[what]))) or 'none'} of {count}"

    todo = [paths["copies"][copy] for copy in sorted(paths["copies"]) if copy not in paths["deltas"]]
    missing = [str(copy) for copy in range(1, count + 1) if copy not in paths["deltas"]]
    if model:
        step = f"measure {model} with mpu eval"
    elif todo:
        deltas_folder = round_folder(folder / "deltas", number)
        step = shlex.join(["mpu", "unlearn", *(str(path) for path in todo), "--out", f"{deltas_folder}/"])
    elif missing:
        step = f"wait for the deltas of {', '.join(missing)}"
    elif keys:
        deltas_folder = next(iter(paths["deltas"].values())).parent
        step = shlex.join(["mpu", "aggregate", str(deltas_folder), "--keys", str(folder / keys[0])])
    else:
        step = "return the deltas to the model's owner"
    return f"{progress_text('copies')}; {progress_text('deltas')}; next: {step}"
