"""Threads for streaming work: torch's kernels release the GIL, so slices are processed in parallel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from mpu_cli.heap import keep_freed_memory


@contextmanager
def worker_pool() -> Iterator[ThreadPoolExecutor]:
    """A pool of one thread per core, each of which computes on a single core.

    On an exception (including an interrupt), queued work is cancelled and running work is waited for.
    """
    import torch

    keep_freed_memory()
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)
