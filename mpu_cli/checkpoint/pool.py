"""Threads for streaming work: torch's kernels let go of the interpreter, so slices are worked on side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def worker_pool() -> Iterator[ThreadPoolExecutor]:
    """A pool of one thread for each core, each computing on its own core alone.

    On an exception (an interrupt too) what has not begun is dropped, and what has is waited for.
    """
    import torch

    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)
