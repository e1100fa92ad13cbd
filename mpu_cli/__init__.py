"""MPU: privacy-preserving knowledge unlearning between a model owner and a data owner (arXiv 2602.23798).

The commands are functions, too, with the command line's names and defaults; torch is loaded when one is called:

>>> from mpu_cli import aggregate, publish, unlearn
>>> copies = publish("model", kappa=0.01).copies                                   # doctest: +SKIP
>>> done = unlearn(copies, algo="npo", forget="forget.jsonl")                      # doctest: +SKIP
>>> model = aggregate("deltas").path                                               # doctest: +SKIP
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module

from mpu_cli.version import __version__

# cuBLAS reads it when it is first used: deterministic training fails in a process that used it without.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# If this package is there, other libraries fetch kernels from the Hub while they are imported, and run them.
sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
# On CPUs for which there is such a kernel, bitsandbytes would warn that the package is missing.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

# The modules of the commands that can be called as functions, such as ``publish(base, kappa=1)``, by their names.
_COMMANDS = {
    "aggregate": "commands.aggregate", "ask": "commands.ask", "check": "commands.check",
    "evaluate": "commands.evaluate", "invert": "commands.invert", "publish": "commands.publish",
    "unlearn": "commands.unlearn", "verify": "commands.verify", "audit": "lab.commands.audit",
    "compare": "lab.commands.compare", "finetune": "lab.commands.finetune", "rehearse": "lab.commands.rehearse",
    "surrogate": "lab.commands.surrogate", "sweep": "lab.commands.sweep", "trace": "lab.commands.trace",
}  # fmt: skip
# The modules of the laboratory that carry out options of other commands, which import nothing of it.
EXTENSIONS = {
    "accounting": "lab.accounting", "attacks": "lab.relearning", "endpoint": "lab.endpoint", "harness": "lab.harness",
    "plots": "lab.plots", "private": "lab.private",
}  # fmt: skip
__all__ = ["__version__", "results", *_COMMANDS]


def __getattr__(name: str) -> object:
    """A command as a function, or ``results``, loaded on first use."""
    if name == "results":
        return import_module(f"{__name__}.lab.frame").results
    if name not in _COMMANDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_COMMANDS[name]}")
    function = globals()[name] = getattr(module, name.capitalize()).function(name)
    return function


def __dir__() -> list[str]:
    return __all__
