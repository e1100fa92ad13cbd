"""The whole path on a small model, step by step, on one device, and what the machine offers."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from mpu_cli.commands.aggregate import Aggregate
from mpu_cli.commands.evaluate import Evaluate
from mpu_cli.commands.publish import Publish
from mpu_cli.commands.unlearn import Unlearn
from mpu_cli.demo.model import make_model, make_people, make_tokenizer
from mpu_cli.files.sealing import make_identity
from mpu_cli.measuring.results import version_of
from mpu_cli.observer import SILENT, Observer
from mpu_cli.records.forms import Record
from mpu_cli.records.read import read_records
from mpu_cli.training.optimizers import OPTIMIZERS
from mpu_cli.version import __version__
from mpu_cli.wording import counted

PEOPLE = 6


@dataclass(frozen=True)
class Check:
    """One step: its name, whether it worked, its seconds, and its result in words."""

    name: str
    ok: bool
    seconds: float
    said: str


def trials(device: str, folder: Path, observer: Observer) -> Iterator[Check]:
    """Publish, unlearn, aggregate and evaluate in ``folder``, up to the first step that fails."""
    transformers.utils.logging.disable_progress_bar()
    observer.stage("make a small model", 1, "done")
    sets = _make_model(folder)
    keys, identity = folder / "keys.bin", folder / "identity.txt"

    def publish() -> str:
        published = Publish.call(
            folder / "model", out=folder, keys=keys, seed=1, copies=2, identity=identity, observer=SILENT
        )
        return counted(len(published.copies), "copy", "copies")

    def unlearn() -> str:
        copies = [folder / "copy_1", folder / "copy_2"]
        done = Unlearn.call(copies, out=folder / "deltas", algo="npo", epochs=2, batch_size=4, lr=1e-4,
                            optim="adamw-blockwise", device=device, observer=SILENT, **sets)  # fmt: skip
        return ", ".join(f"‖Δ‖ {outcome.result.norm:.3g}" for outcome in done)

    def aggregate() -> str:
        result = Aggregate.call(
            folder / "deltas", keys=keys, out=folder / "unlearned", identity=identity, observer=SILENT
        )
        return f"cosine between copies {result.pairwise:.3f}"

    def evaluate() -> str:
        result = Evaluate.call(folder / "unlearned", out=folder / "eval.json", benchmark="qa", device=device,
                               metrics=("forget_Q_A_Prob", "forget_Q_A_ROUGE"), observer=SILENT, **sets)  # fmt: skip
        return f"forget_Q_A_Prob {result.forms['forget_Q_A_Prob']['agg_value']:.3g}"

    for step in (publish, unlearn, aggregate, evaluate):
        name = step.__name__
        observer.stage(name, 1, "done")
        started = time.monotonic()
        try:
            said, ok = step(), True
        except Exception as error:  # whatever it is, the user is to hear of it
            said, ok = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}", False
        yield Check(name, ok, time.monotonic() - started, said)
        if not ok:
            return


def _make_model(folder: Path) -> dict[str, Any]:
    """A small model in ``folder``, and the files of its records."""
    people = [row for person in make_people(PEOPLE, 0) for row in person]
    rows = {"forget": people[: len(people) // 2], "retain": people[len(people) // 2 :]}
    records: list[Record] = []
    sets = {}
    for name, of_set in rows.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in of_set))
        records += read_records(path)
        sets[name] = str(path)
    make_model(records, make_tokenizer(records), folder / "model", epochs=3, seed=0, on_step=lambda *_: None)
    make_identity(folder / "identity.txt")
    return sets


# The facts about this machine: versions, devices, attention backends, packages that some options need.

NEEDED = ("torch", "transformers", "accelerate", "peft", "safetensors", "tokenizers", "datasets", "numpy", "scipy",
          "pyrage", "typer", "rich")  # fmt: skip
OPTIONAL = {
    "bitsandbytes": "--lora quantize=nf4", "opacus": "unlearn --dp",
    "flash-attn": "--training attention=flash_attention_2", "lm-eval": "eval --benchmark wmdp, --lm-eval",
    "optuna": "tune", "dp-accounting": "--dp",
    "opendp": "surrogate",
}  # fmt: skip


def facts(device: torch.device) -> dict[str, str]:
    """Everything in words, by topic, in the order in which people want to read it; the room is of ``device``."""
    return {
        "mpu": f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "versions": ", ".join(f"{name} {version_of(name) or 'MISSING'}" for name in NEEDED),
        **dict(_devices()),
        "room": _room(device),
        "for some options": "; ".join(
            f"{name} {version_of(name) or 'not installed'} ({use})" for name, use in OPTIONAL.items()
        ),
    }


def _room(device: torch.device) -> str:
    """The number of weights of a model whose weights, gradients and optimiser fill half of the memory; the rest is for
    activations."""
    memory = _memory(device)
    full, low_rank = memory / 2 / (8 + OPTIMIZERS["adamw"].state_bytes), memory / 2 / 2
    size = f"{memory / 1e9:.0f} GB"
    return (
        f"{device}: half of {size} holds AdamW's training of {full / 1e9:.2g} billion weights in float32, or LoRA's on "
        f"{low_rank / 1e9:.2g} billion in bfloat16; `mpu plan MODEL --memory {size.replace(' ', '')}` counts it"
    )


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _devices() -> Iterator[tuple[str, str]]:
    memory = _memory(torch.device("cpu"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cpu", f"{cores} cores, {torch.get_num_threads()} threads for torch, {memory / 1e9:.0f} GB"
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        yield (
            f"cuda:{i}",
            f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, "
            f"capability {properties.major}.{properties.minor}, "
            f"bfloat16: {'yes' if torch.cuda.is_bf16_supported() else 'no'}",
        )
    if torch.cuda.is_available():
        backends = torch.backends.cuda
        enabled = {
            "flash": backends.flash_sdp_enabled(), "memory-efficient": backends.mem_efficient_sdp_enabled(),
            "cudnn": backends.cudnn_sdp_enabled(), "math": backends.math_sdp_enabled(),
        }  # fmt: skip
        yield "cuda", f"CUDA {torch.version.cuda}; sdpa: {', '.join(name for name, on in enabled.items() if on)}"
    elif (other := torch.accelerator.current_accelerator()) is not None:
        yield other.type, "seen by torch; use it with --device"
    else:
        yield "accelerator", "torch finds none: training uses the CPU"
