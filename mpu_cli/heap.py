"""The policy of glibc for memory that is freed: keep it for the next tensor, which is fast, or return it to the system.

By default, that depends on the largest block freed before. Elsewhere than on glibc these functions do nothing.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

LARGE_MODEL = 1 << 28  # bytes of weights; from this size on, saving memory is worth some time
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
LARGEST_CACHED_BLOCK = 31 << 20  # bytes of the largest block that is kept; glibc allows 32 MiB
RETURNED = 8 << 20  # bytes of the smallest block that is returned as soon as it is freed


def is_large(weights: int) -> bool:
    """Whether a model, or what is trained of it, is large: ``weights`` in bytes."""
    return weights >= LARGE_MODEL


def suit_heap_to(weights: int) -> None:
    """Return freed memory from now on if a model is large, keep it if it is small.

    For a large one, small blocks are only returned by the call itself, so call it again and again.
    """
    if is_large(weights):
        return_freed_memory()
    else:
        keep_freed_memory()


def keep_freed_memory() -> None:
    """From now on, keep freed blocks of bounded size, for work that needs the same few sizes again and again.

    Otherwise, an aggregation got new pages for every slice, which took as long as its computations.
    """
    if libc := _glibc():
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_CACHED_BLOCK)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * LARGEST_CACHED_BLOCK)


def return_freed_memory() -> None:
    """Return all freed memory, and from now on each large block when it is freed, for work that comes close to what
    there is: what was kept was a seventh of the memory of training the 0.1B shape."""
    if libc := _glibc():
        libc.mallopt(M_MMAP_THRESHOLD, RETURNED)
        libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    # musl, of Alpine Linux, has no malloc_trim.
    return libc if hasattr(libc, "malloc_trim") else None
