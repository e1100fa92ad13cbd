"""MPU: privacy-preserving knowledge unlearning between a model owner and a data owner (arXiv 2602.23798).

The functions of ``mpu_cli.api`` can be imported from here; they, and torch with them, are loaded on first use.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from mpu_cli.version import __version__

# cuBLAS reads it when it is first used: deterministic training fails in a process that used it without.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# If this package is there, other libraries fetch kernels from the Hub while they are imported, and run them.
sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it says so, to everyone whose CPU would have had one

if TYPE_CHECKING:
    from mpu_cli.api import aggregate, audit, check, evaluate, invert, publish, surrogate, unlearn

__all__ = [
    "__version__", "aggregate", "audit", "check", "evaluate", "invert", "publish", "surrogate", "unlearn",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in __all__:
        from mpu_cli import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
