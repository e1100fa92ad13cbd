"""Threads for work that comes in pieces: torch's kernels release the GIL, so pieces are processed in parallel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from mpu_cli.heap import keep_freed_memory


@contextmanager
def worker_pool(workers: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """A pool of one thread per core, each of which computes on a single core; or of ``workers``, which share what
    torch may use.

    On an exception (including an interrupt), queued work is cancelled and running work is waited for.
    """
    import torch

    before = torch.get_num_threads()
    if workers is None:
        keep_freed_memory()
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        each = 1
    else:
        each = max(1, before // workers)
    torch.set_num_threads(each)
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(each,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)
