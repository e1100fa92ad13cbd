"""Which files, and which pieces of them, go over the network next."""

from __future__ import annotations

from pathlib import Path

from mpu_cli.checkpoint.reader import INDEX_NAME
from mpu_cli.federation.exchange import printable_excerpt
from mpu_cli.federation.spool import SHARD
from mpu_cli.manifest import MANIFEST_NAME

PIECE = 32 << 20  # bytes of files in a message
MAX_FILES = 1_000  # of a delta: shards of 5 GB


def odd_files(sizes: dict[str, int], name: str) -> str:
    """What is odd about the declared files of a delta that is called ``name``; nothing if they can be one."""
    if len(sizes) > MAX_FILES:
        return f"sent {len(sizes):,} files"
    inside = [file.removeprefix(f"{name}/") for file in sizes if file.startswith(f"{name}/")]
    if not sizes or (name in sizes and inside):
        return "sent a file and a folder of one name" if sizes else "sent no delta"
    other = [file for file in sizes if file != name and not file.startswith(f"{name}/")]
    other += [file for file in inside if file not in (INDEX_NAME, MANIFEST_NAME) and not SHARD.fullmatch(file)]
    if other:
        return f"sent a file of another name, {printable_excerpt(other[0])}"
    empty = [file for file, size in sizes.items() if size < 1]
    return f"sent an empty file, {printable_excerpt(empty[0])}" if empty else ""


def next_pieces_to_fetch(sizes: dict[str, int], received_sizes: dict[str, int]) -> dict[str, int]:
    """How many bytes to ask for next of which files: PIECE at most, small files together."""
    counts: dict[str, int] = {}
    for file, size in sizes.items():
        if count := min(size - received_sizes[file], PIECE - sum(counts.values())):
            counts[file] = count
    return counts


def missing_files(files: dict[str, Path], received_sizes: dict[str, int]) -> dict[Path, int]:
    """The files that are not whole yet, and where they go on."""
    return {
        path: received_sizes.get(name, 0)
        for name, path in files.items()
        if name not in received_sizes or received_sizes[name] < path.stat().st_size
    }


def next_pieces_to_send(missing: dict[Path, int]) -> tuple[list[str], list[int], tuple[bytes, ...]]:
    """Pieces of the first of ``missing`` files, PIECE bytes at most: small files go together."""
    names, offsets, data, room = [], [], [], PIECE
    for path, offset in missing.items():
        with path.open("rb") as file:
            file.seek(offset)
            piece = file.read(room)
        names.append(path.name)
        offsets.append(offset)
        data.append(piece)
        room -= len(piece)
        if room <= 0:
            break
    return names, offsets, tuple(data)
