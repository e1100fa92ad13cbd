"""What tests of hostile files share: a copy, a training on it, and a change to one of its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

TRAINING = ["--algo", "npo", "--epochs", 1, "--batch-size", 3, "--lr", "1e-3"]


def publish_copy(mpu: Callable, root: Path, *options: object, base: str = "base") -> Path:
    """The first of two copies of a model in ``place``."""
    mpu("publish", base, "--copies", 2, "--seed", 1, "--force", *options, cwd=root)
    return root / "copy_1"


def unlearn_copy(mpu: Callable, root: Path, copy: Path, out: str, *options: object, **expected: object):
    return mpu("unlearn", copy, *TRAINING, "--out", f"{out}.safetensors", "--force", *options, **expected, cwd=root)


def edit(path: Path, *without: str, **entries: object) -> None:
    table = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in table.items() if name not in without} | entries))
