"""How the server's secrets are found: identity files, recipients, passphrases."""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.cli.output import note
from mpu_cli.errors import MpuError, UsageError

if TYPE_CHECKING:
    from pyrage.x25519 import Recipient

    from mpu_cli.server.keys import Keys


def sealer(
    recipients: list[str], passphrase: bool, passphrase_file: Path | None, identity: Path | None
) -> Callable[[Keys], bytes]:
    """What seals the keys: for recipients, with a passphrase, or for the own identity (made on first use)."""
    from mpu_cli import sealing
    from mpu_cli.server import keys

    if sum([bool(recipients), passphrase or passphrase_file is not None, identity is not None]) > 1:
        raise UsageError("--recipient, --passphrase and --identity exclude each other; choose one way to seal the keys")
    if recipients:
        parsed = sealing.parse_recipients(recipients)
        return lambda document: keys.seal(document, parsed)
    if passphrase or passphrase_file:
        secret = _passphrase(passphrase_file, new=True)
        return lambda document: keys.seal(document, passphrase=secret)
    path = identity or sealing.default_identity_path()
    if identity is not None or path.exists():
        own = [known.to_public() for known in sealing.read_identities(path)]
        return lambda document: keys.seal(document, own)

    def with_new_identity(document: Keys) -> bytes:
        recipient = sealing.make_identity(path)
        note(f"made your identity {path} (public key {recipient}); keep it safe: without it the keys cannot be opened")
        return keys.seal(document, sealing.parse_recipients([recipient]))

    return with_new_identity


def recipients_of_copies(text: str, copies: int) -> list[Recipient]:
    """The public keys of ``--copy-recipients``: age1… themselves, or files that hold one."""
    from mpu_cli import sealing

    option = "--copy-recipients"
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != copies:
        raise UsageError(f"{option}: {len(parts)} for {copies} copies; give one for each copy")
    keys = []
    for part in parts:
        if part.startswith("age1"):
            keys.append(part)
            continue
        try:
            words = Path(part).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise MpuError(f"{option} {part}: no age public key (age1…), and no file that holds one") from error
        found = sorted({word for word in words if word.startswith("age1")})
        if len(found) != 1:
            raise MpuError(f"{part}: holds {len(found)} age public keys, and one is wanted")
        keys += found
    return sealing.parse_recipients(keys, option)


@contextmanager
def opened_copy(copy: str, identity: Path | None, beside: Path) -> Iterator[str]:
    """Where to read ``copy``: itself or, if it is sealed, a directory next to ``beside`` that goes with the block."""
    from mpu_cli import sealing

    path = Path(copy)
    if not path.is_file() or not sealing.is_sealed(path):
        yield copy
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(f"{copy}: open it before you start several processes: age -d -i IDENTITY {copy} | tar x")
    identities = sealing.read_identities(identity or sealing.default_identity_path())
    with Transaction() as transaction:
        yield str(sealing.open_folder(path, identities, transaction.scratch(beside.parent)))


def open_keys(path: Path, identity: Path | None, passphrase_file: Path | None) -> Keys:
    """The keys in ``path``, opened with the passphrase that sealed them or with an identity."""
    from mpu_cli import sealing
    from mpu_cli.server import keys

    if keys.needs_passphrase(path):
        return keys.unseal(path, passphrase=_passphrase(passphrase_file, new=False))
    return keys.unseal(path, sealing.read_identities(identity or sealing.default_identity_path()))


def _passphrase(file: Path | None, *, new: bool) -> str:
    if file is not None:
        try:
            secret = file.read_text(encoding="utf-8").splitlines()[:1]
        except (OSError, UnicodeDecodeError) as error:
            raise MpuError(f"{file}: the passphrase cannot be read from it") from error
        secret = secret[0] if secret else ""
    else:
        if sys.stdin is None or not sys.stdin.isatty():
            raise UsageError("the passphrase is asked for at a terminal, and there is none; use --passphrase-file")
        secret = getpass.getpass("Passphrase for the keys: ")
        if new and getpass.getpass("The same again: ") != secret:
            raise MpuError("the two passphrases differ; nothing was made")
    if not secret:
        raise MpuError("an empty passphrase protects nothing; give another")
    return secret
