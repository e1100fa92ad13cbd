"""Finding the server's secrets: identity files, recipients, passphrases."""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.checkpoint.transaction import Transaction, remove_abandoned
from mpu_cli.cli.output import note, warn
from mpu_cli.errors import MpuError, UsageError

if TYPE_CHECKING:
    from pyrage.x25519 import Recipient

    from mpu_cli.server.keys import Keys


def sealer(
    recipients: list[str], passphrase: bool, passphrase_file: Path | None, identity: Path | None
) -> Callable[[Keys], bytes]:
    """A function that seals keys: for recipients, with a passphrase, or for one's own identity (made on first use)."""
    from mpu_cli.server import keys

    if sum([bool(recipients), passphrase or passphrase_file is not None, identity is not None]) > 1:
        raise UsageError(
            "--recipient, --passphrase and --identity are mutually exclusive", "choose one way to seal the keys"
        )
    secret = _passphrase(passphrase_file, new=True) if passphrase or passphrase_file else None
    return keys.sealer(recipients=recipients, passphrase=secret, identity=identity, note=note)


def recipients_of_copies(parts: Sequence[str], copies: int) -> list[Recipient]:
    """The public keys in ``--copy-recipients``, given as age1… or as files that contain one."""
    from mpu_cli import sealing

    option = "--copy-recipients"
    if len(parts) != copies:
        raise UsageError(f"{option}: {len(parts)} for {copies} copies", "give one for each copy")
    keys = []
    for part in parts:
        if part.startswith("age1"):
            keys.append(part)
            continue
        try:
            words = Path(part).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise MpuError(f"{option} {part}: neither an age public key (age1…) nor a file containing one") from error
        public_keys = sorted({word for word in words if word.startswith("age1")})
        if len(public_keys) != 1:
            raise MpuError(f"{part}: contains {len(public_keys)} age public keys, expected one")
        keys += public_keys
    return sealing.parse_recipients(keys, option)


@contextmanager
def opened_copy(copy: str, identity: Path | None, beside: Path) -> Iterator[str]:
    """Where to read ``copy``: itself or, if it is sealed, a directory next to ``beside`` that is removed afterwards."""
    from mpu_cli import sealing

    path = Path(copy)
    if not path.is_file() or not sealing.is_sealed(path):
        yield copy
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"{copy}: a sealed copy cannot be opened by several processes",
            f"open it before you start them: age -d -i IDENTITY {copy} | tar x",
        )
    identities = sealing.read_identities(identity or sealing.default_identity_path())
    for folder in remove_abandoned(beside.parent):
        warn(f"{folder}: removed; a stopped command had left an opened copy there")
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
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise MpuError(f"{file}: cannot read the passphrase") from error
        secret = lines[0] if lines else ""
    else:
        if sys.stdin is None or not sys.stdin.isatty():
            raise UsageError("cannot ask for the passphrase without a terminal", "use --passphrase-file")
        secret = getpass.getpass("Passphrase for the keys: ")
        if new and getpass.getpass("Confirm passphrase: ") != secret:
            raise MpuError("the two passphrases differ, so nothing was written")
    if not secret:
        raise MpuError("an empty passphrase protects nothing", "choose another")
    return secret
