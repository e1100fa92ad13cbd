"""torch.compile for the layers of a model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mpu_cli.errors import MpuError
from mpu_cli.models.layers import decoder_layers

COMPILERS = (os.environ.get("CXX") or "g++", "clang++", "c++")


def check_compiler(device: torch.device) -> None:
    """Raise MpuError if layers cannot be compiled for ``device`` here."""
    if device.type == "cpu" and not any(map(shutil.which, COMPILERS)):
        raise MpuError("--compile needs a C++ compiler, and none was found", "install g++ or clang, or leave it out")


@contextmanager
def compiled_layers(model: torch.nn.Module) -> Iterator[None]:
    """Compile each layer of ``model`` at its first pass inside; the names of its parameters stay. Raises MpuError for
    layers that cannot be compiled."""
    from torch._dynamo.exc import TorchDynamoException

    for layer in decoder_layers(model):
        layer.compile(dynamic=True)  # batches differ in length
    try:
        yield
    except TorchDynamoException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if not line.startswith("backend=")), type(error).__name__)
        raise MpuError(f"--compile: {reason}", "leave it out") from error
