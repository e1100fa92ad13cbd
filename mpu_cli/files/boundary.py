"""Files that another party may have made: opened if they are regular files, read up to a limit, copied into private
folders.

What a user names on the command line is trusted to be what was meant, links included. What lies inside a folder is not:
a name in there could lead anywhere on this machine.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, TypeVar

import msgspec
from msgspec import Meta, ValidationError

from mpu_cli.errors import MpuError, first_line
from mpu_cli.toml import read_toml

MAX_SMALL_FILE = 4 << 20  # bytes of a config or a manifest: a thousand times a real one
LARGEST_TOKENIZER = 64 << 20  # bytes of a file that tokenizers parses
AGE_HEADER = b"age-encryption.org/v1\n"  # first bytes of a sealed file
BLOCK = 1 << 20
LONGEST_STEM = 200  # bytes of a name in a longer one
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
GET_IT_AGAIN = "get it again, as files and folders without links"


def open_regular(path: Path, *, links: bool = True) -> BinaryIO:
    """Open ``path`` for reading if it is a regular file; without ``links``, only if it is not a link either.

    Links of the Hub's cache, from a snapshot to its blobs, count as files. Never waits for a FIFO or a device.
    Raises MpuError.
    """
    if links:
        return _open(path, path, 0)
    path = _blob(path) or path
    return _open(path, path, os.O_NOFOLLOW)


def open_inside(folder: int, name: str, where: Path) -> BinaryIO:
    """``open_regular`` for the entry ``name`` of an open directory; ``where`` is what messages call it."""
    return _open(name, where, os.O_NOFOLLOW, folder)


def unreadable(path: Path, error: OSError) -> MpuError:
    """The error for a file that could not be opened."""
    if error.errno == errno.ELOOP:
        return MpuError(f"{path}: is a link, which could lead to any file here, so it is not followed", GET_IT_AGAIN)
    return MpuError(f"{path}: cannot be read: {error.strerror}")


def _open(name: str | Path, where: Path, flags: int, folder: int | None = None) -> BinaryIO:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=folder)
    except OSError as error:
        raise unreadable(where, error) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # Python names a folder by its descriptor, and leaves it open
        os.close(descriptor)
        raise MpuError(f"{where}: not a regular file", GET_IT_AGAIN)
    return os.fdopen(descriptor, "rb")


def _blob(path: Path) -> Path | None:
    """The target of a link of the Hub's cache (``…/snapshots/REVISION/NAME``), if that is a blob of its repository."""
    parents = path.absolute().parents
    snapshots = next((parent for parent in parents if parent.name == "snapshots"), None)
    if snapshots is None or not path.is_symlink():
        return None
    blobs = snapshots.parent / "blobs"
    if blobs.is_symlink() or snapshots.is_symlink():
        return None  # the cache makes neither a link: somebody else did
    blob = path.resolve()
    return blob if blob.parent == blobs.resolve() else None


def read_bounded(path: Path, limit: int, *, links: bool = True) -> bytes:
    """The bytes of a regular file."""
    with open_regular(path, links=links) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise MpuError(f"{path}: larger than {limit:,} bytes, the most that mpu reads of such a file")
    return content


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to errors of the system that name no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def copy_bounded(source: BinaryIO, target: Path, limit: int) -> int:
    """Copy an open file to the new private file ``target``; the number of bytes."""
    copied = 0
    with naming(target), create_private(target) as written:
        while block := source.read(BLOCK):
            copied += len(block)
            if copied > limit:
                raise MpuError(f"{target.name}: larger than {limit:,} bytes, the most that is accepted here")
            written.write(block)
    return copied


def create_private(path: Path) -> BinaryIO:
    """A new file that only its owner may read, open for writing. FileExistsError if there is anything of that name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, PRIVATE_FILE)
    os.fchmod(descriptor, PRIVATE_FILE)  # whatever the umask left out
    return os.fdopen(descriptor, "wb")


def private_folder(path: Path) -> Path:
    """``path`` as a directory that only its owner may enter; missing parents are made so, too."""
    # mkdir(parents=True) would give the mode to the last folder only.
    for folder in reversed([path, *path.parents]):
        with contextlib.suppress(FileExistsError):
            if not folder.exists():
                folder.mkdir(mode=PRIVATE_FOLDER)
    status = path.stat(follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid():
        raise MpuError(f"{path}: must be a folder of your own, not a link or another user's", "choose another folder")
    path.chmod(PRIVATE_FOLDER)
    return path


@contextmanager
def private_scratch() -> Iterator[Path]:
    """A new private folder among the system's temporary files, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="mpu-") as scratch:
        yield Path(scratch)


@contextmanager
def private_umask() -> Iterator[None]:
    """Whatever is created inside, also by libraries, is for its owner only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def current_umask() -> int:
    # No call reads it without setting it.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync_folder(path: Path) -> None:
    """Flush the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def short_name(name: str) -> str:
    """``name`` with room for what is put around it: file systems allow 255 bytes. Of a long one its beginning, and a
    digest of all."""
    content = os.fsencode(name)
    if len(content) <= LONGEST_STEM:
        return name
    beginning = content[: LONGEST_STEM - 17].decode(errors="ignore")
    return f"{beginning}-{hashlib.sha256(content).hexdigest()[:16]}"


def random_name(name: str) -> str:
    """A hidden name that nobody can have prepared, for writing what becomes ``name``."""
    return f".{short_name(name)}.{secrets.token_hex(8)}.partial"


# JSON documents that come from outside, read by a schema. What does not fit is refused, with an error of one line.
#
# A schema is a ``Document`` or a dataclass. Its fields say types and bounds, with the kinds of value below; a field
# that may be missing has a default. Entries without a field are ignored, as older and newer versions of mpu write
# others.
#
#     class Point(Document):
#         x: Count
#     parse_document(Point, {"x": 1}, "point.json")    gives Point(x=1)
#     parse_document(Point, {"x": "1"}, "point.json")  raises MpuError("point.json: x: expected int, got str")

MAX_FACTS = 20  # entries of a small table
MAX_LAYERS = 10_000
MAX_MESSAGE = 200  # characters of a message

Text = Annotated[str, Meta(max_length=10_000)]
Word = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]{1,80}\Z")]
Seed = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
# A run's name is printed: no control characters, line separators, changes of direction or unpaired surrogates.
RunName = Annotated[
    str, Meta(max_length=200, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]*\Z")
]
Count = Annotated[int, Meta(ge=1, le=10**6)]
Scale = Annotated[float, Meta(ge=0, le=1e300)]
Above0 = Annotated[float, Meta(gt=0, le=1e300)]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
Numbers = Annotated[dict[Word, Finite], Meta(max_length=MAX_FACTS)]
Words = Annotated[dict[Word, Word], Meta(max_length=MAX_FACTS)]


class Document(msgspec.Struct, kw_only=True):
    """The schema of a JSON object."""


Schema = TypeVar("Schema")


def parse_document(schema: type[Schema], value: object, where: object, hint: str = "get it again") -> Schema:
    """``value``, a part of a JSON document, by its schema."""
    try:
        return msgspec.convert(value, schema, strict=True)
    except (ValidationError, ValueError, RecursionError) as error:
        raise MpuError(f"{where}: {_in_words(error)}", hint) from error


def read_document(
    schema: type[Schema], path: Path, hint: str = "get it again", *, limit: int = MAX_SMALL_FILE, links: bool = True
) -> Schema:
    """The JSON object in a file of at most ``limit`` bytes, by its schema. Raises MpuError, also for what parsers read
    differently: an object that has a name twice, NaN and infinity."""
    value = read_json_object(path, limit, links=links, strict=True)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half a character, which could not be written again
        raise MpuError(f"{path}: holds text that is not Unicode", hint) from error
    return parse_document(schema, value, path, hint)


def read_json_object(
    path: Path, limit: int = MAX_SMALL_FILE, *, links: bool = True, strict: bool = False
) -> dict[str, object]:
    """The JSON object in a regular file of at most ``limit`` bytes."""
    content = read_bounded(path, limit, links=links)
    try:
        if strict:
            value = json.loads(content, object_pairs_hook=once_each, parse_constant=_no_number)
        else:
            value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MpuError(f"{path}: not JSON ({first_line(error)})") from error
    if not isinstance(value, dict):
        raise MpuError(f"{path}: not a JSON object")
    return value


class RepeatedName(ValueError):
    """A JSON object has one name twice."""


def once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The entries of a JSON object, as json's ``object_pairs_hook``. Raises RepeatedName: json alone would keep the
    last of two that have one name, and other parsers the first."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise RepeatedName(f"an object with {repeated([name for name, _ in pairs])!r} twice")
    return entries


def repeated(names: Iterable[str]) -> str | None:
    """The first of ``names`` that is there twice."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def as_entries(document: Document) -> dict[str, object]:
    """The inverse of ``parse_document``: its entries in JSON."""
    entries = msgspec.to_builtins(document)
    assert isinstance(entries, dict)
    return entries


def _in_words(error: Exception) -> str:
    """msgspec's message with the place first: "round: expected int, got str"."""
    reason, _, location = first_line(error).replace("`", "").partition(" - at ")
    location = re.sub(r"^(key in )?\$\.?", r"\1", location)
    reason = reason[:1].lower() + reason[1:]
    if " matching regex " in reason:  # which nobody can read
        reason = "not of the form that it must have"
    message = f"{location}: {reason}" if location else reason
    return "".join(character for character in message[:MAX_MESSAGE] if character.isprintable())


# The names that ``files.folder`` lets through, file by file.

NAMES = {table: frozenset(names.split()) for table, names in read_toml(Path(__file__).with_name("names.toml")).items()}


# Unpacking a tar archive from another party: one folder of regular files with plain names, bounded, nothing else.
#
# tarfile extracts nothing here: its own filters can be bypassed in some releases of Python (CVE-2025-4517 and
# others). It only decodes headers, 512 bytes at a time; what a member holds is copied by this module.

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
MOST_MEMBERS = 10_000
MOST_BYTES = 16 << 40  # far above any model: in practice, the disk is the limit


def unpack_folder(stream: BinaryIO, into: Path) -> Path:
    """Unpack the archive in ``stream`` into the private directory ``into``; returns its one folder.

    Refused are links, devices, sparse files, extended headers, names that are not plain or come twice, a second folder,
    folders in folders, and truncation. Files get mode 0600 and folders 0700, whatever the archive says.
    """
    root: Path | None = None
    remaining_bytes = MOST_BYTES
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
        if member.size > remaining_bytes:
            raise MpuError(f"the archive holds more than {MOST_BYTES:,} bytes")
        remaining_bytes -= member.size
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
    # Members are padded to whole blocks.
    _exactly(stream, -size % tarfile.BLOCKSIZE)


def _exactly(stream: BinaryIO, count: int) -> bytes:
    content = b""
    while len(content) < count:
        piece = stream.read(count - len(content))
        if not piece:
            raise MpuError("the archive is truncated")
        content += piece
    return content
