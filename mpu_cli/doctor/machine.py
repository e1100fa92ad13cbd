"""What this machine offers: versions, devices, attention backends, packages that some options need."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.utils.benchmark import Timer

from mpu_cli.client.optimizers import OPTIMIZERS
from mpu_cli.version import __version__

NEEDED = ("torch", "transformers", "accelerate", "peft", "safetensors", "tokenizers", "datasets", "numpy", "scipy",
          "pyrage", "typer", "rich")  # fmt: skip
OF_BITSANDBYTES = [name for name, optimizer in OPTIMIZERS.items() if optimizer.package == "bitsandbytes"]
OPTIONAL = {
    "bitsandbytes": f"--optim {', '.join(OF_BITSANDBYTES)}", "opacus": "--dp-epsilon",
    "flash-attn": "--attention flash_attention_2", "lm-eval": "eval --benchmark wmdp, --lm-eval", "optuna": "tune",
    "deepspeed": "accelerate's ZeRO", "dp-accounting": "--dp-epsilon, --epsilon",
    "opendp": "surrogate",
}  # fmt: skip


def facts(device: torch.device) -> dict[str, str]:
    """Everything in words, by topic, in the order in which people want to read it; speed and room are of ``device``."""
    return {
        "mpu": f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "versions": ", ".join(f"{name} {_version(name) or 'MISSING'}" for name in NEEDED),
        **dict(_devices()),
        "speed": f"{device}: "
        + ", ".join(
            f"{rate / 1e9:,.0f} billion operations/s in {str(dtype).removeprefix('torch.')}"
            for dtype, rate in _speeds(device)
        ),
        "room": _room(device),
        "for some options": "; ".join(
            f"{name} {_version(name) or 'not installed'} ({use})" for name, use in OPTIONAL.items()
        ),
    }


def _speeds(device: torch.device) -> Iterator[tuple[torch.dtype, float]]:
    """Operations a second in products of large matrices, by dtype: the best of a few."""
    size = 1024 if device.type == "cpu" else 8192
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        measured = Timer("matrix @ matrix", globals={"matrix": matrix}).blocked_autorange(min_run_time=0.2)
        yield dtype, 2 * size**3 / min(measured.times)


def _room(device: torch.device) -> str:
    """How many weights a model may have whose weights, gradients and optimiser fill half of the memory; the rest is for
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


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


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
