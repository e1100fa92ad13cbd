"""Finding the server's secrets: identity files, recipients, passphrases."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.errors import MpuError, UsageError

if TYPE_CHECKING:
    from mpu_cli.server.keys import Keys


def new_passphrase(
    use_passphrase: bool, file: Path | None, recipients: Sequence[str] | None, identity: Path | None
) -> str | None:
    """The passphrase to seal keys with, from ``file`` or the terminal; None if none is ``use_passphrase`` for. Raises
    UsageError if there is another way to seal them, too."""
    from mpu_cli.server.keys import check_one_way

    check_one_way(recipients, use_passphrase or file, identity)
    return _passphrase(file, new=True) if use_passphrase or file else None


def open_keys(path: Path, identity: Path | None, passphrase_file: Path | None, trusted: bool = False) -> Keys:
    """The keys in ``path``, opened with the passphrase that sealed them or with an identity.

    Raises MpuError if they are not this server's own, unless they are ``trusted``.
    """
    from mpu_cli.api.server import open_keys as open_with
    from mpu_cli.server.keys import needs_passphrase

    passphrase = _passphrase(passphrase_file, new=False) if needs_passphrase(path) else None
    return open_with(path, identity=identity, passphrase=passphrase, trust_keys=trusted)


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
