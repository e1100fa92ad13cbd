"""The client's step: ``unlearn``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpu_cli.api.paths import PathLike
from mpu_cli.client.dataset import read_dataset
from mpu_cli.client.ledger import default_ledger_path
from mpu_cli.client.outcome import Result
from mpu_cli.client.tag import client_secret, default_secret_path
from mpu_cli.client.unlearn import unlearn as _unlearn
from mpu_cli.models.source import open_model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.declare import declared, from_flat
from mpu_cli.options.unlearning import Checks, Logging, Unlearning
from mpu_cli.outputs import delta_path, round_of_copy


def unlearn(
    copy: PathLike,
    *,
    out: PathLike | None = None,
    reference_file: PathLike | None = None,
    force: bool = False,
    observer: Observer = SILENT,
    **options: Any,
) -> Result:
    """``mpu unlearn``: train ``copy`` to forget, and write the change of its weights to ``out`` (default:
    deltas/COPY.safetensors; after round 1, deltas/round_R/COPY.safetensors).

    ``options`` are those of ``Unlearning``, ``Checks`` and ``Logging``: algo, forget, retain, lr, batch_size, like,
    lora_rank, resume, ….
    """
    for_logging = {name: options.pop(name) for name in declared(Logging) if name in options}
    for_checks = {name: options.pop(name) for name in declared(Checks) if name in options}
    how = from_flat(Unlearning, options)
    return _unlearn(
        open_model(str(copy), links=False),
        read_dataset(how),
        how,
        target=delta_path(str(out) if out else None, str(copy), round_of_copy(Path(copy))),
        force=force,
        logging=from_flat(Logging, for_logging),
        reference_file=Path(reference_file) if reference_file else None,
        secret=lambda: client_secret(default_secret_path()),
        ledger=default_ledger_path(),
        checks=from_flat(Checks, for_checks),
        observer=observer,
    )
