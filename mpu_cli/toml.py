"""Reading TOML files that people write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mpu_cli.errors import MpuError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_value(text: str) -> object:
    """``text`` as a TOML value; as it is if it is none, so that words need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def read_toml(path: Path) -> dict[str, Any]:
    """The document in ``path``. Raises MpuError if it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise MpuError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_toml(content, path)


def parse_toml(content: bytes, path: Path) -> dict[str, Any]:
    """The document that ``content``, of the file ``path``, is. Raises MpuError if it is not TOML."""
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MpuError(f"{path}: not TOML ({error})") from error
