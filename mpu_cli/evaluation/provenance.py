"""What is measured, and what the numbers of a measurement depend on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mpu_cli.boundary.documents import read_json_object
from mpu_cli.boundary.files import LARGEST_TOKENIZER, read_bounded
from mpu_cli.checkpoint.dtypes import WORD
from mpu_cli.checkpoint.fingerprint import fingerprint
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.checkpoint.reader import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Checkpoint
from mpu_cli.evaluation.benchmarks import Benchmark, Split
from mpu_cli.evaluation.endpoint import Endpoint
from mpu_cli.models.device import device_of, name_of
from mpu_cli.models.source import LARGEST_JSON, Model
from mpu_cli.options.evaluation import Measuring
from mpu_cli.version import __version__

VERSIONS = ("torch", "transformers", "tokenizers", "rouge-score", "scipy", "scikit-learn", "numpy")


@dataclass(frozen=True)
class Subject:
    """What is measured: a model, perhaps with an adapter or a delta, and the model that the reference attack uses. With
    an ``endpoint``, what that serves; of the model, tokenizer and config are used."""

    model: Model
    adapter: Path | None = None
    delta: Checkpoint | None = None
    reference: Model | None = None
    endpoint: Endpoint | None = None


def facts_of(subject: Subject, benchmark: Benchmark, used: Sequence[Split], options: Measuring) -> dict[str, Any]:
    """What the numbers depend on: model, data, options, versions, hardware."""
    model, adapter, scoring, prompts = subject.model, subject.adapter, options.scoring, options.prompts
    torch_device = device_of(scoring.device)
    device = str(torch_device)
    stored_dtype = max(model.checkpoint.tensors.values(), key=lambda info: info.nbytes).dtype
    template = prompts.template or own_template(model)
    return {
        "mpu": __version__,
        "benchmark": benchmark.name,
        "model": _identity(model, subject.endpoint),
        "adapter": _adapter_identity(adapter) if adapter else None,
        **({"delta": _delta_identity(subject.delta)} if subject.delta else {}),
        "reference_model": None if subject.reference is None else _identity(subject.reference),
        "data": {
            split.name: {"source": split.source, "records": len(split.rows), "sha256": split.sha256} for split in used
        },
        "options": {
            "dtype": scoring.dtype or ("float32" if device == "cpu" else WORD.get(stored_dtype, "float32")),
            "batch_size": scoring.batch_size,
            **({"quantize": scoring.quantize} if scoring.quantize else {}),
            "template": template,
            "scored": benchmark.scored,
            **({"template_option": list(prompts.template_option)} if prompts.template_option else {}),
            **({"max_new_tokens": scoring.max_new_tokens} if scoring.max_new_tokens else {}),
            "system_prompt": prompts.system_prompt if template == "chat" else None,
            "date": prompts.date if template == "chat" else None,
            **({"attacks": asdict(options.recovery)} if benchmark.attacks else {}),
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in VERSIONS},
        "hardware": {"device": device, "name": name_of(torch_device), "threads": torch.get_num_threads()},
    }


def own_template(model: Model) -> str:
    """ "chat" if the tokenizer's files include a chat template (without loading it), else "plain"."""
    files = {path.name: path for path in model.side_files}
    if files.keys() & {"chat_template.jinja", "chat_template.json"}:
        return "chat"
    config = files.get("tokenizer_config.json")
    chat = config and read_json_object(config, LARGEST_JSON, links=model.links).get("chat_template")
    return "chat" if chat else "plain"


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _identity(model: Model, endpoint: Endpoint | None = None) -> dict[str, str | None]:
    weights = None
    if endpoint is None:
        with worker_pool() as pool:
            weights = fingerprint(model.checkpoint, pool)
    digest = hashlib.sha256(json.dumps(model.config, sort_keys=True).encode())
    for path in model.side_files:
        digest.update(path.name.encode() + b"\0" + read_bounded(path, LARGEST_TOKENIZER, links=model.links))
    source = model.source if endpoint is None else f"{endpoint.url} {endpoint.name}"
    return {"source": source, "fingerprint": weights, "config_and_tokenizer": digest.hexdigest()}


def _delta_identity(delta: Checkpoint) -> dict[str, str]:
    with worker_pool() as pool:
        return {"source": str(delta.path), "fingerprint": fingerprint(delta, pool)}


def _adapter_identity(folder: Path) -> dict[str, str]:
    return {"source": str(folder)} | {name: digest_of(folder / name) for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)}


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None
