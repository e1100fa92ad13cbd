"""Copies that are sealed for a client, opened for as long as a command reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpu_cli.checkpoint.transaction import Transaction, remove_abandoned
from mpu_cli.errors import UsageError
from mpu_cli.observer import Observer
from mpu_cli.sealing import default_identity_path, is_sealed, open_folder, read_identities


@contextmanager
def opened_copy(copy: str, beside: Path, identity: Path | None, observer: Observer) -> Iterator[str]:
    """Where to read a copy: itself or, if it is sealed, a directory in ``beside`` that is removed afterwards.

    Raises UsageError in one of several processes, which would each open it; MpuError if ``identity`` does not open it.
    """
    path = Path(copy)
    if not path.is_file() or not is_sealed(path):
        yield copy
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"{copy}: a sealed copy cannot be opened by several processes",
            f"open it before you start them: age -d -i IDENTITY {copy} | tar x",
        )
    identities = read_identities(identity or default_identity_path())
    for folder in remove_abandoned(beside):
        observer.warn(f"{folder}: removed; a stopped command had left an opened copy there")
    with Transaction() as transaction:
        yield str(open_folder(path, identities, transaction.scratch(beside)))
