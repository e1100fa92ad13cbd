"""What publishing takes: seconds of work by step, summed over all threads, and memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# bytes of memory: slices in use and the interpreter; publish was measured at 204 (0.1B) to 320 MB (8B)
BUFFERS = 350e6


class Profile:
    """Adds up laps; ``begin()`` returns a clock for one thread's piece of work, and each call of it ends a lap."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def begin(self) -> Callable[[str], None]:
        last = time.perf_counter()

        def lap(name: str) -> None:
            nonlocal last
            now = time.perf_counter()
            with self._lock:
                self.seconds[name] = self.seconds.get(name, 0.0) + now - last
            last = now

        return lap


def no_clock() -> Callable[[str], None]:
    """A clock that records nothing, for when no profile is wanted."""
    return lambda _: None
