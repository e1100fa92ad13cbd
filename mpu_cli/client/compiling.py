"""torch.compile for the layers of a model."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mpu_cli.errors import MpuError
from mpu_cli.models.layers import decoder_layers

# What torch uses.
COMPILER = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def check_compiler(device: torch.device) -> None:
    """Raise MpuError if layers cannot be compiled for ``device`` here."""
    if device.type == "cpu" and shutil.which(COMPILER) is None:
        raise MpuError(
            f"--compile needs a C++ compiler, and there is no {COMPILER}",
            "install one, name another by CXX, or leave it out",
        )


@contextmanager
def compiled_layers(model: torch.nn.Module) -> Iterator[None]:
    """Compile each layer of ``model`` at its first pass inside; the names of its parameters stay. Raises MpuError for
    layers that cannot be compiled."""
    from torch._dynamo.exc import TorchDynamoException

    layers = list(decoder_layers(model))
    for layer in layers:
        layer.compile(dynamic=True)  # batches differ in length
    try:
        yield
    except TorchDynamoException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if not line.startswith("backend=")), type(error).__name__)
        raise MpuError(f"--compile: {reason}", "leave it out") from error
    finally:
        for layer in layers:
            layer._compiled_call_impl = None  # what Module.compile sets; measuring compiles nothing
