"""age (age-encryption.org/v1): identities, recipients, and copies sealed for their intended clients."""

from __future__ import annotations

import contextlib
import os
import secrets
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyrage

from mpu_cli.errors import MpuError, UsageError, first_line
from mpu_cli.files.boundary import (
    AGE_HEADER,
    create_private,
    open_regular,
    private_folder,
    random_name,
    sync_folder,
    unpack_folder,
)
from mpu_cli.files.transaction import ELSEWHERE, Transaction, check_place, remove_abandoned
from mpu_cli.observer import Observer
from mpu_cli.subprocesses import process_count
from mpu_cli.text import read_text
from mpu_cli.wording import command_line

_BUFFER = 1 << 20  # bytes
_FORMAT = tarfile.GNU_FORMAT  # no extended headers, not even for files of 8 GiB and more
MAX_HEADER = 8 << 10  # bytes of an age file before its payload: a recipient takes about 100
MAX_RECIPIENTS = 64
_END_OF_HEADER = b"\n--- "
SECRET_BYTES = 32


def default_identity_path() -> Path:
    """``mpu/identity.txt`` in the user's configuration directory."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "mpu" / "identity.txt"


def opened_copies_path() -> Path:
    """``mpu/opened`` in the user's cache directory, where sealed copies are while a command works on them. Not beside
    them, nor beside what is written: a share that carries either would see all weights in the clear."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpu" / "opened"


def make_identity(path: Path) -> str:
    """Write a new age identity to ``path`` (mode 0600, never replacing a file) and return its public recipient."""
    identity = pyrage.x25519.Identity.generate()
    recipient = str(identity.to_public())
    check_place(path)
    if os.path.lexists(path):
        raise MpuError(
            f"{path}: already exists, and mpu never replaces an identity",
            "its public key stands in its first line; or choose another name",
        )
    try:
        is_new = _write_secret(path, f"# public key: {recipient}\n{identity}\n")
    except OSError as error:
        raise MpuError(f"{path}: cannot be written: {error.strerror}", ELSEWHERE) from error
    if not is_new:
        raise MpuError(f"{path}: already exists, and mpu never replaces an identity", "choose another name")
    return recipient


def _write_secret(path: Path, text: str) -> bool:
    """Write a new private file, complete from the first moment; False if there is one already."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(random_name(path.name))
    try:
        write_private(fresh, text.encode())
        os.link(fresh, path)  # of two processes, one succeeds; a rename would replace what sealed the other's keys
        sync_folder(path.parent)
    except FileExistsError:
        return False
    else:
        return True
    finally:
        fresh.unlink(missing_ok=True)


def own_secret(path: Path, what: str, hint: str) -> bytes:
    """256 bits in ``path``, drawn on first use, mode 0600; ``what`` says what they are, and ``hint`` what to do if they
    are damaged, for messages."""
    if not path.exists():
        _write_secret(path, f"{secrets.token_hex(SECRET_BYTES)}\n")  # if another process was faster, use its secret
    try:
        secret = bytes.fromhex(read_text(path).strip())
    except (OSError, ValueError) as error:
        raise MpuError(f"{path}: cannot be read as {what}", hint) from error
    if len(secret) != SECRET_BYTES:
        raise MpuError(f"{path}: not {SECRET_BYTES} bytes in hexadecimal", hint)
    return secret


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner may read."""
    with create_private(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_identities(path: Path) -> list[pyrage.x25519.Identity]:
    """The identities in an age identity file (one per line, ``#`` starts a comment)."""
    try:
        lines = [line.strip() for line in read_text(path).splitlines()]
    except OSError as error:
        raise MpuError(
            f"{path}: cannot read the identity file: {error.strerror}", "specify yours with --identity"
        ) from error
    except UnicodeDecodeError as error:
        raise MpuError(f"{path}: not an age identity file") from error
    try:
        identities = [pyrage.x25519.Identity.from_str(line) for line in lines if line and not line.startswith("#")]
    except pyrage.IdentityError as error:
        raise MpuError(f"{path}: not an age identity file (a line is not an AGE-SECRET-KEY)") from error
    if not identities:
        raise MpuError(f"{path}: contains no identity")
    return identities


def parse_recipients(texts: Sequence[str], option: str = "--recipient") -> list[pyrage.x25519.Recipient]:
    """Public keys from ``age1…`` strings, or from files that contain one."""
    recipients = []
    if len(texts) > MAX_RECIPIENTS:
        raise MpuError(f"{option}: {len(texts)} recipients, and a file can have {MAX_RECIPIENTS}")
    for text in texts:
        text = text if text.startswith("age1") else _public_key_in(text, option)
        try:
            recipients.append(pyrage.x25519.Recipient.from_str(text))
        except pyrage.RecipientError as error:
            raise MpuError(f"{option} {text!r}: not an age public key (age1…)", "`mpu keygen` prints one") from error
    return recipients


def _public_key_in(path: str, option: str) -> str:
    try:
        words = read_text(Path(path)).split()
    except (OSError, UnicodeDecodeError) as error:
        raise MpuError(f"{option} {path}: neither an age public key (age1…) nor a file containing one") from error
    public_keys = sorted({word for word in words if word.startswith("age1")})
    if len(public_keys) != 1:
        raise MpuError(f"{path}: contains {len(public_keys)} age public keys, expected one")
    return public_keys[0]


def check_header(content: bytes, path: Path) -> None:
    """Raise MpuError if the header of an age file, which begins with ``content``, is longer than MAX_HEADER.

    rage reads a header in time that grows with the square of its length, and cannot be interrupted.
    """
    if _END_OF_HEADER not in content[:MAX_HEADER]:
        raise MpuError(f"{path}: not an age file, or its header is longer than {MAX_HEADER:,} bytes", "get it again")


def is_sealed(path: Path) -> bool:
    """Whether ``path`` is a file that begins with age's header."""
    try:
        with open(path, "rb") as file:
            return file.read(len(AGE_HEADER)) == AGE_HEADER
    except OSError:
        return False


def seal_folder(folder: Path, name: str, target: Path, recipient: pyrage.x25519.Recipient) -> None:
    """Archive ``folder`` under the name ``name``, encrypt it for ``recipient`` and write it to the new file ``target``.

    ``age -d -i IDENTITY TARGET | tar x`` opens it too. The archive leaks no user, group or time from the server.
    """

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    def write(end: BinaryIO) -> None:
        with tarfile.open(fileobj=end, mode="w|", bufsize=_BUFFER, format=_FORMAT) as archive:
            archive.add(folder, name, filter=anonymous)

    with _run_through_pipe(write) as archived, open(target, "xb") as sealed:
        pyrage.encrypt_io(archived, sealed, [recipient])


def open_folder(path: Path, identities: Sequence[pyrage.x25519.Identity], into: Path) -> Path:
    """Decrypt the output of ``seal_folder`` and unpack it ``into`` a private directory; returns the folder that was
    sealed."""
    unpacked: list[Path] = []
    with open_regular(path) as sealed:
        check_header(sealed.read(MAX_HEADER), path)

    def unpack(end: BinaryIO) -> None:
        try:
            unpacked.append(unpack_folder(end, into))
        finally:
            while end.read(_BUFFER):  # otherwise decryption would fail on a closed pipe and hide its own error
                pass

    try:
        with _run_through_pipe(unpack, reads=True) as plain, open_regular(path) as sealed:
            pyrage.decrypt_io(sealed, plain, list(identities))
    except pyrage.DecryptError as error:
        if "no matching keys" in str(error).lower():
            raise MpuError(f"{path}: sealed for another identity", "specify the right one with --identity") from error
        raise _damage_error(path, error) from error
    except MpuError as error:
        raise MpuError(
            f"{path}: decrypted, but contains no copy of a model ({error.problem}); `mpu inspect` says what it is"
        ) from error
    except OSError as error:
        if error.errno is None:  # a decryption error after decryption has started
            raise _damage_error(path, error) from error
        raise MpuError(
            f"{path}: cannot be unpacked into {into.parent}: {error.strerror}", "set XDG_CACHE_HOME to another folder"
        ) from error
    return unpacked[0]


def _damage_error(path: Path, error: Exception) -> MpuError:
    return MpuError(f"{path}: damaged or truncated ({first_line(error)})", "get it again")


@contextmanager
def _run_through_pipe(work: Callable[[BinaryIO], None], *, reads: bool = False) -> Iterator[BinaryIO]:
    """Run ``work`` in a thread on one end of a pipe (``reads``: the read end); the block gets the other end.

    An exception in ``work`` is raised after the block, unless the block raised one itself.
    """
    reading, writing = os.pipe()
    ends = os.fdopen(reading, "rb", _BUFFER), os.fdopen(writing, "wb", _BUFFER)
    worker_end, block_end = ends if reads else reversed(ends)

    def run() -> None:
        # A broken pipe: the block ended early, and its own exception says why.
        with contextlib.suppress(BrokenPipeError), worker_end:
            work(worker_end)

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(run)
        with block_end:
            yield block_end
    working.result()


@contextmanager
def opened_copy(copy: str, identity: Path | None, observer: Observer) -> Iterator[str]:
    """The path to read a copy from: itself or, if it is sealed, a private directory that is removed afterwards."""
    path = Path(copy)
    if not path.is_file() or not is_sealed(path):
        yield copy
        return
    if process_count() > 1:
        raise UsageError(
            f"{copy}: a sealed copy cannot be opened by several processes",
            f"open it before you start them: {command_line('age', '-d', '-i', 'IDENTITY', path)} | tar x",
        )
    identities = read_identities(identity or default_identity_path())
    opened = opened_copies_path()
    try:
        private_folder(opened)
    except OSError as error:
        raise MpuError(
            f"{opened}: cannot be made: {error.strerror}", "set XDG_CACHE_HOME to a folder of yours"
        ) from error
    for folder in remove_abandoned(opened):
        observer.warn(f"{folder}: removed; a stopped command had left an opened copy there")
    with Transaction() as transaction:
        yield str(open_folder(path, identities, transaction.scratch(opened)))
