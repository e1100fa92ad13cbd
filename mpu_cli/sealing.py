"""age (age-encryption.org/v1): identities, recipients, and copies sealed for the client that each is meant for."""

from __future__ import annotations

import os
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyrage

from mpu_cli.checkpoint.header import AGE_HEADER
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.errors import MpuError

_BUFFER = 1 << 20  # bytes


def default_identity_path() -> Path:
    """``mpu/identity.txt`` in the user's configuration directory."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "mpu" / "identity.txt"


def make_identity(path: Path) -> str:
    """A new age identity in ``path``, mode 0600, never replacing one; returns its public recipient."""
    identity = pyrage.x25519.Identity.generate()
    recipient = str(identity.to_public())
    if os.path.lexists(path):
        raise MpuError(f"{path}: exists already; an identity is never replaced, choose another name")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with Transaction() as transaction:
        write_private(transaction.add(path), f"# public key: {recipient}\n{identity}\n".encode())
    return recipient


def write_private(path: Path, content: bytes) -> None:
    """A new file that only its owner may read."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)


def read_identities(path: Path) -> list[pyrage.x25519.Identity]:
    """The identities of an age identity file (one a line, ``#`` begins a comment)."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except OSError as error:
        raise MpuError(
            f"{path}: the identity file cannot be read: {error.strerror}; name yours with --identity"
        ) from error
    except UnicodeDecodeError as error:
        raise MpuError(f"{path}: is not an age identity file") from error
    try:
        found = [pyrage.x25519.Identity.from_str(line) for line in lines if line and not line.startswith("#")]
    except pyrage.IdentityError as error:
        raise MpuError(f"{path}: is not an age identity file (a line of it is no AGE-SECRET-KEY)") from error
    if not found:
        raise MpuError(f"{path}: holds no identity")
    return found


def parse_recipients(texts: Sequence[str], option: str = "--recipient") -> list[pyrage.x25519.Recipient]:
    """Public keys from ``age1…``; MpuError, which names ``option``, for a text that is none."""
    recipients = []
    for text in texts:
        try:
            recipients.append(pyrage.x25519.Recipient.from_str(text))
        except pyrage.RecipientError as error:
            raise MpuError(f"{option} {text!r}: is not an age public key (age1…)") from error
    return recipients


def is_sealed(path: Path) -> bool:
    """Whether ``path`` is a file that begins as age's do."""
    try:
        with open(path, "rb") as file:
            return file.read(len(AGE_HEADER)) == AGE_HEADER
    except OSError:
        return False


def seal_folder(folder: Path, name: str, target: Path, recipient: pyrage.x25519.Recipient) -> None:
    """Write ``folder`` as an archive with ``name`` at its top, encrypted for ``recipient``, to the new file ``target``.

    ``age -d -i IDENTITY TARGET | tar x`` opens it too. The archive names no user, group or time of the server's.
    """

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    def write(end: BinaryIO) -> None:
        with tarfile.open(fileobj=end, mode="w|", bufsize=_BUFFER) as archive:
            archive.add(folder, name, filter=anonymous)

    with _piped(write) as archived, open(target, "xb") as sealed:
        pyrage.encrypt_io(archived, sealed, [recipient])


def open_folder(path: Path, identities: Sequence[pyrage.x25519.Identity], into: Path) -> Path:
    """Decrypt what ``seal_folder`` made and unpack it ``into`` a directory; returns the folder that was sealed.

    Raises MpuError if it is sealed for somebody else, damaged, or no such archive; members and links
    that lead outside of ``into``, and devices, are refused.
    """

    def unpack(end: BinaryIO) -> None:
        try:
            with tarfile.open(fileobj=end, mode="r|", bufsize=_BUFFER) as archive:
                archive.extractall(into, filter="data")
        finally:
            while end.read(_BUFFER):  # else decryption would stop at a closed pipe and hide its own error
                pass

    try:
        with _piped(unpack, reads=True) as plain, open(path, "rb", _BUFFER) as sealed:
            pyrage.decrypt_io(sealed, plain, list(identities))
    except pyrage.DecryptError as error:
        if "no matching keys" in str(error).lower():
            raise MpuError(f"{path}: sealed for another identity; name the right one with --identity") from error
        raise _damaged(path, error) from error
    except tarfile.TarError as error:
        raise MpuError(f"{path}: opened, but it holds no copy of a model ({error})") from error
    except OSError as error:
        if error.errno is None:  # what decryption says once it has begun
            raise _damaged(path, error) from error
        raise MpuError(f"{path}: cannot be unpacked: {error.strerror}") from error
    folders = [found for found in into.iterdir() if found.is_dir()]
    if len(folders) != 1:
        raise MpuError(f"{path}: opened, but it holds no copy of a model")
    return folders[0]


def _damaged(path: Path, error: Exception) -> MpuError:
    return MpuError(f"{path}: is damaged or cut short ({error}); get it again")


@contextmanager
def _piped(work: Callable[[BinaryIO], None], *, reads: bool = False) -> Iterator[BinaryIO]:
    """Run ``work`` on one end of a pipe (``reads``: the one to read from) in a thread; the block has the other.

    An exception of ``work`` is raised when the block is done, if the block raised none.
    """
    reading, writing = os.pipe()
    ends = os.fdopen(reading, "rb", _BUFFER), os.fdopen(writing, "wb", _BUFFER)
    own, other = ends if reads else reversed(ends)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with own:
                work(own)
        except BrokenPipeError:
            pass  # the block ended early, and its own exception says why
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with other:
            yield other
    finally:
        thread.join()
    if failed:
        raise failed[0]
