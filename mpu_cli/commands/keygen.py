"""``mpu keygen``: an identity that opens key files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import Command, Report
from mpu_cli.options.declare import option


@dataclass(frozen=True, kw_only=True)
class Keygen(Command):
    """Make an age identity (mode 0600). It opens what is sealed for its public key, the printed age1…: copies (`publish
    --copy-recipients`), or keys (`publish --recipient`). Send that key, never the file.

    Prints the path of the identity; the public key goes to standard error.
    """

    NAME = "keygen"
    EXAMPLE = "mpu keygen"

    out: Path | None = option(
        None, "The identity file (default: mpu/identity.txt in your configuration directory).", metavar="FILE"
    )

    def run(self, observer: Observer = SILENT) -> tuple[Path, str]:  # noqa: ARG002 (as all commands have it)
        """The path of the identity, and its public key."""
        from mpu_cli.files.sealing import default_identity_path, make_identity

        path = self.out or default_identity_path()
        return path, make_identity(path)

    def report(self, result: tuple[Path, str], observer: Observer) -> Report:
        path, recipient = result
        observer.note(f"public key: {recipient}")
        return Report([path], {"identity": path, "recipient": recipient})
