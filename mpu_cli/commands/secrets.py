"""Opening key files, and the passphrases that are asked for on a terminal."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.observer import Observer
from mpu_cli.options.command import Opening
from mpu_cli.text import read_text

if TYPE_CHECKING:
    from mpu_cli.protocol.keys import Keys


def opened_keys(path: Path, opening: Opening, observer: Observer) -> Keys:
    """The keys in ``path``, opened with the passphrase that sealed them or with an identity.

    Raises MpuError if they are not this server's own, unless ``opening`` trusts them.
    """
    from mpu_cli.protocol.keys import needs_passphrase, open_keys

    passphrase = None
    if needs_passphrase(path):
        passphrase = read_passphrase(opening.passphrase_file, observer, new=False)
    return open_keys(path, identity=opening.identity, passphrase=passphrase, trust_keys=opening.trust_keys)


def read_passphrase(file: Path | None, observer: Observer, *, new: bool) -> str:
    """The first line of ``file``, or what is typed on the terminal, twice if it is a ``new`` passphrase."""
    if file is not None:
        try:
            lines = read_text(file).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise MpuError(f"{file}: cannot read the passphrase") from error
        secret = lines[0] if lines else ""
    else:
        if sys.stdin is None or not sys.stdin.isatty():
            raise UsageError("cannot ask for the passphrase without a terminal", "use --passphrase-file")
        observer.pause()  # a bar would be drawn over the question
        secret = getpass.getpass("Passphrase for the keys: ")
        if new and getpass.getpass("Confirm passphrase: ") != secret:
            raise MpuError("the two passphrases differ, so nothing was written")
    if not secret:
        raise MpuError("an empty passphrase protects nothing", "choose another")
    return secret
