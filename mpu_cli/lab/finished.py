"""Whether a run is already finished, answered without loading torch or reading a model.

A finished run leaves ``done.json``: its options, and the size and time of change of every file that it read. If both
are unchanged, its result is still that run's; if not, or if a source is not a local file, the contents are compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpu_cli.files.resumption import read_lines, write_atomically
from mpu_cli.options.declare import flat
from mpu_cli.options.experiment import Experiment
from mpu_cli.version import __version__

NAME, LOG = "done.json", "log.jsonl"
SOURCES = ("base", "pretrained", "forget", "retain", "alternates", "data_dir")  # options that name files


@dataclass(frozen=True)
class Outcome:
    """The last round's model, and the log's lines, one per step."""

    model: Path
    log: list[dict[str, Any]]


def remember(folder: Path, experiment: Experiment, model: Path) -> None:
    """Leave ``done.json`` in ``folder``, unless a source is somewhere else."""
    if (facts := _facts(experiment)) is not None:
        write_atomically(folder / NAME, json.dumps({**facts, "model": str(model.relative_to(folder))}, indent=1) + "\n")


def read_outcome(folder: Path, experiment: Experiment) -> Outcome | None:
    """The outcome of the same experiment, if ``folder`` holds it; None if that takes more than a look to find out."""
    try:
        done = json.loads((folder / NAME).read_text(encoding="utf-8"))
        model = folder / done.pop("model")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not model.is_dir() or done != _facts(experiment):
        return None
    return Outcome(model, read_lines(folder / LOG, "choose another --out"))


def _facts(experiment: Experiment) -> dict[str, object] | None:
    options = flat(experiment)
    files: dict[str, list[int]] = {}
    named = [(name, source) for name in SOURCES for source in str(options[name] or "").splitlines()]
    for name, source in named:
        path = Path(source)
        if not path.exists() and name in ("base", "pretrained", "forget"):
            if name in ("base", "pretrained") or options["data_dir"] is None:
                return None  # on the Hub, where it can change
            continue  # a split in the folder --data-dir
        for file in _files(path):
            stat = file.stat()
            files[str(file.resolve())] = [stat.st_size, stat.st_mtime_ns]
    return {"mpu": __version__, "options": {name: str(value) for name, value in options.items()}, "files": files}


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(file for file in path.rglob("*") if file.is_file())
    elif path.exists():
        yield path
        if path.suffix == ".safetensors":  # a model's weights: its config and tokenizer are read, too
            yield from sorted(file for file in path.parent.glob("*.json"))
