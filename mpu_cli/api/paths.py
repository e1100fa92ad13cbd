"""What the functions take for a file."""

from pathlib import Path

PathLike = str | Path
