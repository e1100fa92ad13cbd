"""The steps as Python functions, with the command line's names and defaults: ``from mpu_cli import publish, unlearn``.

>>> copies = publish("model", kappa=0.01).copies                                   # doctest: +SKIP
>>> for copy in copies:                                                            # doctest: +SKIP
...     unlearn(copy, algo="npo", forget="forget.jsonl", retain="retain.jsonl")
>>> model = aggregate("deltas").path                                               # doctest: +SKIP

Keyword arguments that a function does not name are options of its command, by their names on the command line with
underscores; docs/commands.md lists them. All functions raise MpuError, or its subclass UsageError, where the command
would print an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpu_cli.api.checking import check
    from mpu_cli.api.client import unlearn
    from mpu_cli.api.measuring import audit, evaluate
    from mpu_cli.api.server import add, aggregate, invert, plan_aggregate, plan_publish, publish
    from mpu_cli.api.surrogates import surrogate

__all__ = [
    "add", "aggregate", "audit", "check", "evaluate", "invert", "plan_aggregate", "plan_publish", "publish",
    "surrogate", "unlearn",
]  # fmt: skip
_WHERE = {  # the others: server
    "unlearn": "client", "audit": "measuring", "evaluate": "measuring", "check": "checking", "surrogate": "surrogates",
}  # fmt: skip


def __getattr__(name: str) -> object:
    """The function, loaded on first use: the server's need no transformers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE.get(name, 'server')}"), name)
