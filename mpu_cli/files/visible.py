"""The entries of a folder to read: none that are hidden, nor what archives and disks of macOS put beside files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def is_hidden(name: str) -> bool:
    """Whether a name is that of a hidden entry, such as ``._copy_1.safetensors``, or of ``__MACOSX`` and its kind."""
    return name.startswith((".", "__"))


def visible(paths: Iterable[Path]) -> list[Path]:
    """``paths`` without the hidden ones, sorted."""
    return sorted(path for path in paths if not is_hidden(path.name))
