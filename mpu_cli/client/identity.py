"""What identifies a training: to the client's ledger, to the server as a tag, to the checkpoints that it resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

from mpu_cli.boundary.documents import read_json_object
from mpu_cli.boundary.files import LARGEST_TOKENIZER, private_folder, read_bounded
from mpu_cli.checkpoint.fingerprint import fingerprint
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.client.accounting import Mechanism
from mpu_cli.client.checkpoints import Checkpoints
from mpu_cli.client.checks import epochs_of
from mpu_cli.client.dataset import Dataset
from mpu_cli.client.datasets import records_digest
from mpu_cli.client.ledger import LedgerEntry
from mpu_cli.client.tag import training_tag
from mpu_cli.errors import MpuError
from mpu_cli.manifest import CopyManifest
from mpu_cli.models.source import Model
from mpu_cli.observer import Observer
from mpu_cli.options.declare import declared_options, flat
from mpu_cli.options.unlearning import Lora, Privacy, Records, Unlearning
from mpu_cli.resumption import write_atomically


def deciding(options: Unlearning) -> dict[str, object]:
    """The options that decide what is trained, however they were spelled: defaults resolved, groups that are off left
    out, and without records, which count by their contents."""
    values = flat(replace(options, epochs=epochs_of(options)))
    left_out = set(declared_options(Records))
    if options.lora.lora_rank is None:
        left_out |= declared_options(Lora).keys()
    else:
        values["lora_alpha"] = options.lora.alpha
    if options.privacy.dp_epsilon is None:
        left_out |= declared_options(Privacy).keys()
    declarations = declared_options(Unlearning)
    return {name: value for name, value in values.items() if declarations[name].affects_result and name not in left_out}


def entry_of(
    copy: Model,
    weights: str,
    manifest: CopyManifest | None,
    options: Unlearning,
    data: Dataset,
    mechanism: Mechanism | None,
) -> LedgerEntry:
    """What the ledger keeps of a training on ``copy``, whose fingerprint is ``weights``."""
    surroundings, records = surroundings_of(copy), records_digest(data)
    facts = [weights, surroundings, records, deciding(options)]
    origin = (manifest.run, manifest.round, manifest.copy) if manifest else ("", 0, 0)
    return LedgerEntry(
        hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest(), *origin, weights,
        options.algo, len(data.forget) + len(data.retain), mechanism=mechanism, data=records,
        surroundings=surroundings, public=options.privacy.public_records, unit=options.privacy.dp_unit,
    )  # fmt: skip


def surroundings_of(copy: Model) -> str:
    """SHA-256 of a copy's config, tokenizer and template, which decide how records are read, in hexadecimal."""
    small = {
        path.name: hashlib.sha256(read_bounded(path, LARGEST_TOKENIZER, links=copy.links)).hexdigest()
        for path in copy.side_files
    }
    return hashlib.sha256(json.dumps([copy.config, small], sort_keys=True, default=str).encode()).hexdigest()


def weights_of(copy: Model) -> str:
    """The fingerprint of a copy's weights."""
    with worker_pool() as pool:
        return fingerprint(copy.checkpoint, pool)


def tag_of(
    secret: Callable[[], bytes],
    manifest: CopyManifest,
    options: Unlearning,
    records: str,
    with_reference_file: bool,
    observer: Observer,
) -> dict[str, str] | None:
    """The tag of this training run: equal for copies of a round that are trained identically on ``records``, a digest.
    None if the client's secret cannot be read or kept."""
    decided = deciding(options) | {"reference_file": with_reference_file and manifest.round > 1}
    versions = {name: version(name) for name in ("torch", "transformers")}
    try:
        facts = {"records": records, "options": decided, "versions": versions}
        return training_tag(secret(), manifest.run, manifest.round, facts)
    except OSError as error:
        observer.warn(
            f"{error.filename}: {error.strerror}; the server cannot check that copies were trained identically"
        )
        return None


def digest_of_training(copy: Model, weights: str, options: Unlearning, data: Dataset, with_reference_file: bool) -> str:
    """SHA-256 of everything that decides what a training does, in hexadecimal: only the same one may be resumed."""
    decided = deciding(options) | {"reference_file": with_reference_file}
    decided["micro_batch_size"] = options.training.micro_batch_size  # the Trainer counts them in its checkpoints
    facts = [decided, weights, copy.checkpoint.metadata, records_digest(data), surroundings_of(copy)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def check_same_training(checkpoints: Checkpoints) -> None:
    """Note what is trained with ``checkpoints``; MpuError if those that are there are of something else."""
    folder, digest = private_folder(checkpoints.folder.absolute()), checkpoints.training
    note = folder / "mpu-resume.json"
    if note.exists():
        if read_json_object(note, links=False).get("sha256") != digest:
            raise MpuError(
                f"{checkpoints.folder}: holds checkpoints of a different copy, records or options",
                "remove it to start over",
            )
        return
    write_atomically(note, json.dumps({"sha256": digest}))
