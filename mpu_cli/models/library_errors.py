"""What libraries raise while they read another party's files or run out of memory, as errors of one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mpu_cli.errors import MpuError

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
        if not isinstance(error, Exception) and not panicked:
            raise
        if isinstance(error, Exception) and out_of_memory(error):
            raise
        raise MpuError(f"{what} ({first_line_of(error)})") from error


@contextmanager
def memory_in_mind(advice: str) -> Iterator[None]:
    """Turn running out of memory, on a GPU or the CPU, into an MpuError with ``advice`` on what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise MpuError("out of memory", f"{advice}") from error


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on a GPU or the CPU."""
    # CUDA, cuBLAS and NCCL each word it differently
    signs = ("out of memory", "alloc_failed", "allocate memory")
    message = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in message for sign in signs)


def first_line_of(error: BaseException) -> str:
    """The first line of what ``error`` says or, if that ends in a colon, all of it, up to LONGEST_LINE characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(" ".join(lines).split())[:LONGEST_LINE] if lines[0].rstrip().endswith(":") else lines[0]
