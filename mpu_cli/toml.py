"""Reading TOML files that people write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mpu_cli.errors import MpuError
from mpu_cli.text import read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_value(text: str) -> object:
    """``text`` as a TOML value, or unchanged if it is not one, so that words need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def read_toml(path: Path) -> dict[str, Any]:
    """The document in ``path``."""
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise MpuError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also a number of too many digits, and lists that are too deep
        raise MpuError(f"{path}: not TOML ({error})") from error
