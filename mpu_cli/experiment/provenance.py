"""What an experiment's folder says of it: enough to repeat the run, and to tell whether it may be resumed."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from mpu_cli.checkpoint.fingerprint import fingerprint
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.client.dataset import Dataset
from mpu_cli.client.identity import deciding
from mpu_cli.errors import MpuError
from mpu_cli.experiment.finished import LOG
from mpu_cli.experiment.modes import publication_in, rounds_of
from mpu_cli.models.source import Model, open_model
from mpu_cli.options.declare import declared_options, flat
from mpu_cli.options.experiment import Experiment
from mpu_cli.options.publishing import Copies
from mpu_cli.options.unlearning import Unlearning
from mpu_cli.records.record import Record
from mpu_cli.resumption import differences, write_atomically
from mpu_cli.server.keys import BaseIdentity
from mpu_cli.version import __version__


def begin(folder: Path, facts: Mapping[str, object]) -> None:
    """Make ``folder``, or find the same experiment, interrupted, in it."""
    document = folder / "run.json"
    text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
    if folder.exists() and any(folder.iterdir()):
        try:
            before = json.loads(document.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise MpuError(f"{folder}: already exists and holds no experiment", "choose another --out") from error
        if not (folder / LOG).exists() and not list(folder.glob("server/round_*")):
            # Nothing was done yet: a mistake may have been corrected.
            write_atomically(document, text)
            return
        if changed := list(differences(_decisive_facts(before), _decisive_facts(facts))):
            raise MpuError(
                f"{folder}: holds a different experiment ({', '.join(changed)})", "choose another --out, or remove it"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(document, text)


def _decisive_facts(facts: Mapping[str, object]) -> dict[str, object]:
    """What of a run's facts decides its result; a run may be resumed under others."""
    return {name: value for name, value in facts.items() if name not in ("hardware", "versions", "without_effect")}


def facts_of(experiment: Experiment, data: Dataset) -> dict[str, object]:
    """What is needed to repeat the run."""
    options = flat(replace(experiment, rounds=rounds_of(experiment)))
    # Of models and records the contents count, below; of the noise what it amounts to, in "published".
    elsewhere = {"base", "pretrained", *declared_options(Copies), *declared_options(Unlearning)}
    declarations = declared_options(Experiment)
    decided = {
        name: value for name, value in options.items() if declarations[name].affects_result and name not in elsewhere
    }
    decided |= deciding(experiment.unlearning) | {"micro_batch_size": experiment.unlearning.training.micro_batch_size}
    publication, pretrained = publication_in(experiment, seed=bytes(32)), experiment.pretrained
    published = {
        "noise": {"kind": publication.scheme.kind, "factors": publication.scheme.factors}, "kappa": publication.kappa,
        "shared_kappa": publication.shared_kappa, "symmetries": publication.symmetries, "omitted": publication.omitted,
    }  # fmt: skip

    def digest(records: Sequence[Record]) -> str:
        rows = [record.content for record in records]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()

    sets = {"forget": data.forget, "retain": data.retain, "few_shot": data.few_shot}
    return json.loads(
        json.dumps(
            {
                "mpu": __version__,
                "experiment": decided,
                "without_effect": {name: value for name, value in options.items() if name not in decided},
                "published": published,
                "base": identity_of(open_model(experiment.base)).fingerprint,
                "pretrained": identity_of(open_model(pretrained)).fingerprint if pretrained else None,
                "records": {
                    name: {"count": len(record_set), "sha256": digest(record_set)} for name, record_set in sets.items()
                }
                | {"alternates": hashlib.sha256(json.dumps(list(data.alternates)).encode()).hexdigest()},
                "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
                "hardware": {
                    "machine": platform.machine(),
                    "threads": torch.get_num_threads(),
                    "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                },
            },
            default=str,
        )
    )


def identity_of(model: Model) -> BaseIdentity:
    with worker_pool() as pool:
        digest = fingerprint(model.checkpoint, pool)
    return BaseIdentity(model.address, str(model.config_path.resolve()), digest)
