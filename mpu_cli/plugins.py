"""Other packages: those that are optional, and functions by ``module:function`` or by the name of an entry point."""

from __future__ import annotations

from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from importlib.metadata import entry_points
from traceback import extract_tb
from typing import Any, TypeVar

from mpu_cli import EXTENSIONS
from mpu_cli.errors import MpuError, UsageError

Result = TypeVar("Result")


def extension(name: str) -> Any:
    """The module of the laboratory that carries out an option of a command, by its name in ``EXTENSIONS``."""
    return import_module(f"mpu_cli.{EXTENSIONS[name]}")


def require(package: str, purpose: str) -> Any:
    """The module of an optional ``package``. Raises MpuError, which names the ``purpose``, if it is not installed."""
    try:
        return import_module(package.replace("-", "_"))
    except ImportError as error:
        raise MpuError(f"{purpose} needs {package}, which is not installed", f"pip install {package}") from error


def load_plugin(kind: str, name: str, flag: str, built_in: Collection[str]) -> object:
    """The object that ``name``, a value of the option ``flag``, stands for: an entry point in ``mpu.KINDs``, or
    ``module:function``."""
    installed = entry_points(group=f"mpu.{kind}s")
    module, _, attribute = name.partition(":")
    if not attribute and name not in installed.names:
        known = [*built_in, *installed.names]
        close = get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}, or write module:function"
        raise UsageError(f"{flag} {name}: no such {kind}", hint)
    try:
        return getattr(import_module(module), attribute) if attribute else installed[name].load()
    except (ImportError, ValueError, TypeError, SyntaxError) as error:
        raise UsageError(
            f"{flag} {name}: cannot be imported: {error}", "is its folder in PYTHONPATH? This one is not looked into"
        ) from error
    except AttributeError as error:
        raise UsageError(f"{flag} {name}: {error}", "name a function of that module") from error


def reporting_errors(label: str, function: Callable[..., Result], takes: str) -> Callable[..., Result]:
    """``function``, of somebody else's module, with whatever it raises as an MpuError that names ``label`` and the
    line or, if it has other parameters, those that it has to take; memory that ran out is raised as it is, because a
    smaller part may not need it."""

    @wraps(function)
    def call(*arguments: object) -> Result:
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:
            if isinstance(error, MpuError | MemoryError) or "memory" in str(error):
                raise
            _, *lines = extract_tb(error.__traceback__)
            code = getattr(function, "__code__", None)
            hint = f"it has to take ({takes})"
            if lines:
                hint = f"see {lines[-1].filename}, line {lines[-1].lineno}"
            elif code:
                hint += f": see {code.co_filename}, line {code.co_firstlineno}"
            raise MpuError(f"{label}: raised {type(error).__name__}: {error}", hint) from error

    return call
