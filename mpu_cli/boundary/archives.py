"""Unpacking a tar archive from another party: one folder of regular files with plain names, bounded, nothing else.

tarfile extracts nothing here: its own filters can be bypassed in some releases of Python (CVE-2025-4517 and others). It
only decodes headers, 512 bytes at a time; what a member holds is copied by this module.
"""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import BinaryIO

from mpu_cli.boundary.files import BLOCK, PRIVATE_FOLDER, create_private
from mpu_cli.errors import MpuError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
MOST_MEMBERS = 10_000
MOST_BYTES = 16 << 40  # far above any model: in practice, the disk is the limit


def unpack_folder(stream: BinaryIO, into: Path) -> Path:
    """Unpack the archive in ``stream`` into the private directory ``into``; returns its one folder.

    Refused are links, devices, sparse files, extended headers, names that are not plain or come twice, a second
    folder, folders in folders, and truncation. Files get mode 0600 and folders 0700, whatever the archive says.
    Raises MpuError.
    """
    root: Path | None = None
    room = MOST_BYTES
    for _ in range(MOST_MEMBERS):
        member = _header(stream)
        if member is None:
            if root is None:
                raise MpuError("the archive is empty")
            return root
        shown = repr(member.name[:80])
        parts = member.name.rstrip("/").split("/")
        if not all(map(NAME.fullmatch, parts)) or ".." in member.name:
            raise MpuError(f"the archive's member {shown} has a name that is refused")
        if root is None:
            root = into / parts[0]
            root.mkdir(PRIVATE_FOLDER)
        if parts[0] != root.name:
            raise MpuError(f"the archive's member {shown} is outside of its folder {root.name}")
        if member.type == tarfile.DIRTYPE and len(parts) == 1 and member.size == 0:
            continue
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or len(parts) != 2:
            raise MpuError(f"the archive's member {shown} is not a file in its folder")
        if member.size > room:
            raise MpuError(f"the archive holds more than {MOST_BYTES:,} bytes")
        room -= member.size
        try:
            _copy(stream, root / parts[1], member.size)
        except FileExistsError as error:
            raise MpuError(f"the archive's member {shown} comes twice") from error
    raise MpuError(f"the archive holds more than {MOST_MEMBERS:,} members")


def _header(stream: BinaryIO) -> tarfile.TarInfo | None:
    """The next member; None at the end of the archive."""
    raw = _exactly(stream, tarfile.BLOCKSIZE)
    if raw == tarfile.NUL * tarfile.BLOCKSIZE:
        return None
    try:
        member = tarfile.TarInfo.frombuf(raw, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeError) as error:
        raise MpuError(f"the archive has a damaged header ({error})") from error
    if member.size < 0:
        raise MpuError("the archive has a damaged header (negative size)")
    return member


def _copy(stream: BinaryIO, target: Path, size: int) -> None:
    with create_private(target) as file:
        for start in range(0, size, BLOCK):
            file.write(_exactly(stream, min(BLOCK, size - start)))
    _exactly(stream, -size % tarfile.BLOCKSIZE)


def _exactly(stream: BinaryIO, count: int) -> bytes:
    content = b""
    while len(content) < count:
        piece = stream.read(count - len(content))
        if not piece:
            raise MpuError("the archive is truncated")
        content += piece
    return content
