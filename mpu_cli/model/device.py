"""The device that ``--device`` names."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from mpu_cli.errors import MpuError, UsageError, first_line

if TYPE_CHECKING:
    from accelerate import PartialState


PROCESS_TIMEOUT = timedelta(days=1)  # of processes that wait, as for the first one's pass over the records
ACCELERATE = "ACCELERATE_TORCH_DEVICE"  # the variable that accelerate reads


def device_of(name: str) -> torch.device:
    """The torch device called ``name``; "auto" is CUDA if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "cpu":
            return device
        module = torch.get_device_module(device.type)
    except (RuntimeError, AttributeError) as error:
        raise UsageError(
            f"--device {name}: torch has no device of this name", "use auto, cpu, cuda, cuda:1, xpu, mps, …"
        ) from error
    if not module.is_available() or (device.index or 0) >= module.device_count():
        raise UsageError(f"--device {name}: torch finds no such device here", "use --device cpu")
    return device


def tell_accelerate(device: torch.device) -> None:
    """Make accelerate, which looks for a device itself, use ``device``; before it is asked for anything.

    This replaces what an earlier training in this process set.
    """
    if device.type not in ("cpu", "cuda") or device.index is not None:
        os.environ[ACCELERATE] = str(device)
    else:
        os.environ.pop(ACCELERATE, None)


def processes_of(device: torch.device) -> PartialState:
    """accelerate's state of the processes that work together, for computing on ``device``.

    It is made once and keeps its device: what an earlier training on another kind of device left is forgotten.
    """
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    on_cpu = device.type == "cpu"
    if PartialState._shared_state and PartialState().num_processes == 1 and PartialState()._cpu != on_cpu:
        AcceleratorState._reset_state(reset_partial_state=True)
    return PartialState(cpu=on_cpu, timeout=PROCESS_TIMEOUT)


def name_of(device: torch.device) -> str:
    """The name of the hardware."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


# Exceptions of libraries that read another party's files or run out of memory, as errors of one line.

LONGEST_LINE = 400  # characters of what a library says


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Turn whatever a library raises while it reads ``what``, which is another party's, into an MpuError."""
    try:
        yield
    except MpuError:
        raise
    except BaseException as error:
        panicked = type(error).__name__ == "PanicException"  # of the tokenizers library; not an Exception
        if not panicked and (not isinstance(error, Exception) or out_of_memory(error)):
            raise
        reason = first_line(error)
        if reason.endswith(":"):  # what matters follows
            reason = " ".join(str(error).split())[:LONGEST_LINE]
        raise MpuError(f"{what} ({reason})") from error


@contextmanager
def memory_in_mind(advice: str) -> Iterator[None]:
    """Turn running out of memory, on a GPU or the CPU, into an MpuError with ``advice`` on what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise MpuError("out of memory", advice) from error


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on a GPU or the CPU."""
    # CUDA, cuBLAS and NCCL each word it differently
    signs = ("out of memory", "alloc_failed", "allocate memory")
    message = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in message for sign in signs)
