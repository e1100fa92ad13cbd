"""A command: one dataclass of its options that checks them, does the work, and reports the result.

The command line (``mpu_cli.cli.driver``), Python (``Publish.call(base, kappa=1)``) and the reference read the same
class. Its module imports inside its methods what loads torch, transformers, numpy or pyrage, or reads records, and
everything else at the top, so that ``mpu --help`` is fast.
"""

from __future__ import annotations

import inspect
import keyword
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.observer import SILENT, Observer, PythonObserver
from mpu_cli.options.declare import Fold, Options, declared_options, from_flat, option

Self = TypeVar("Self", bound="Command")


@dataclass(frozen=True)
class Table:
    """Numbers for people: text in the first column."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Report:
    """The output of a command: ``lines`` on standard output or, with --json, ``document`` in their place (None: the
    lines all the same); then it ends with ``failure``, or with the exit ``status``."""

    lines: Iterable[object]
    document: object
    status: int = 0
    failure: MpuError | None = None


@dataclass(frozen=True)
class Preview:
    """The files that a command would read and write, and the memory that it would take."""

    reads: Sequence[tuple[object, int | None]]  # paths with their bytes, None for small files; so are ``writes``
    writes: Sequence[tuple[Path, int | None]]
    memory: float  # bytes at the peak
    notes: Sequence[str] = ()
    scratch: int = 0  # bytes of files that exist only while the command works
    folders: Collection[Path] = ()  # directories among ``writes``


class Command(Options, ABC):
    """A command: options, and the work that they describe.

    ``NAME``: on the command line; ``EXAMPLE``: how it is called, which help ends with; ``ESSENTIAL``: of a command with
    many options, the flags that --help shows, where --help-all shows the others. The docstring is its help. A command
    that has ``preview(observer)`` has --dry-run, which shows the ``Preview`` or ``Report`` that this returns, and does
    nothing else.
    """

    NAME: ClassVar[str]
    EXAMPLE: ClassVar[str] = ""
    ESSENTIAL: ClassVar[str] = ""
    DRY_RUN: ClassVar[str] = "Check everything, print what would be read and written, and stop."

    @abstractmethod
    def run(self, observer: Observer = SILENT) -> Any:
        """Do it. Raises UsageError for options that do not go together, MpuError for all else."""

    def tables(self, result: Any) -> Sequence[Table]:  # noqa: ARG002 (most have none)
        """Tables that are the result: they come first, on standard output."""
        return ()

    @abstractmethod
    def report(self, result: Any, observer: Observer) -> Report:
        """The output for ``result``; tables and notes beside it go to ``observer``."""

    @classmethod
    def of(cls: type[Self], *arguments: object, **keywords: object) -> Self:
        """The command with these arguments, and options by their names."""
        declarations = declared_options(cls)
        # As on the command line, where the name of a field may not be used: run for run_name, with for with_file.
        by_flag = {declared.flag.removeprefix("--").replace("-", "_"): name for name, declared in declarations.items()}
        keywords = {by_flag.get(name, name): value for name, value in keywords.items() if value is not None}
        positional = [argument.name for argument in fields(cast(Any, cls)) if argument.metadata.get("argument")]
        if len(arguments) > len(positional):
            raise UsageError(f"{cls.NAME}: {len(arguments)} arguments, and at most {len(positional)} are known")
        values: dict[str, object] = dict(zip(positional, arguments, strict=False))
        if twice := values.keys() & keywords.keys():
            raise UsageError(f"{cls.NAME}: {min(twice)} is given twice")
        values |= keywords
        texts = {name: _text(value) for name, value in values.items()}
        # Lists, as Python users write them, for options that are one text on the command line.
        for name, value in texts.items():
            if isinstance(value, list) and name in declarations and declarations[name].kind is str:
                texts[name] = declarations[name].separator.join(map(str, value))
        return from_flat(cls, texts)

    @classmethod
    def call(cls, *arguments: object, observer: Observer | None = None, **keywords: object) -> Any:
        """The result of the command that ``of`` makes of the same arguments: the command as a function. Warnings go to
        ``observer`` (default: through ``warnings``, beside bars of progress)."""
        command, observer = cls.of(*arguments, **keywords), observer or PythonObserver()
        try:
            result = command.run(observer)
            command.report(result, observer)  # for its warnings
        finally:
            observer.pause()
        return result

    @classmethod
    def function(cls, name: str) -> Callable[..., Any]:
        """``call`` as a function of this name, with the command's help and signature."""

        @wraps(cls.call)
        def call(*arguments: object, **keywords: object) -> Any:
            return cls.call(*arguments, **keywords)  # type: ignore[arg-type]

        call.__name__ = call.__qualname__ = name
        call.__module__, call.__doc__ = "mpu_cli", cls.__doc__
        call.__signature__ = cls.signature()  # type: ignore[attr-defined]
        return call

    @classmethod
    def signature(cls) -> inspect.Signature:
        """The command's arguments, by position too, and its options as keywords."""
        parameters = []
        for declared in declared_options(cls).values():
            flag = declared.flag.split("/")[0].removeprefix("--").replace("-", "_")  # run for run_name
            parameters.append(
                inspect.Parameter(
                    declared.name if declared.argument or declared.fold or keyword.iskeyword(flag) else flag,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD if declared.argument else inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if declared.is_required else _text(declared.default),
                )
            )
        parameters.append(inspect.Parameter("observer", inspect.Parameter.KEYWORD_ONLY, default=None))
        parameters.sort(key=lambda parameter: parameter.kind)
        return inspect.Signature(parameters, return_annotation=inspect.signature(cls.run).return_annotation)


def _text(value: object) -> object:
    """``value`` with paths as text, as they are on the command line, and iterables as lists."""
    if isinstance(value, tuple):
        return tuple(map(_text, value))
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | dict):
        return list(map(_text, value))
    return str(value) if isinstance(value, Path) else value


ALLOW = Fold("allow", "Do what is refused otherwise.")
IDENTITY = "age identity file (default: mpu/identity.txt in your configuration directory)."
PASSPHRASE_FILE = "Read the passphrase from the first line of FILE."
FORCE = "Overwrite existing outputs."
KEYS = "The key file of the publication."
BASE_AGAIN = "The published model (default: the location recorded in the keys)."


@dataclass(frozen=True, kw_only=True)
class Opening(Options):
    """The options for opening sealed keys."""

    identity: Path | None = option(None, IDENTITY, metavar="FILE")
    passphrase_file: Path | None = option(None, PASSPHRASE_FILE, metavar="FILE")
    trust_keys: bool = option(
        False, "Use keys that were not sealed with this server's secret, such as keys made on another machine.",
        in_files=False,
    )  # fmt: skip


def paths_from(arguments: Iterable[str]) -> list[Path]:
    """Paths as given; ``-`` stands for the paths on standard input, one per line."""
    paths: list[Path] = []
    for argument in arguments:
        if argument == "-":
            if sys.stdin is None or sys.stdin.isatty():
                raise UsageError("'-' reads paths from standard input", "pipe them in")
            piped = [Path(line.rstrip("\n")) for line in sys.stdin if line.strip()]
            if not piped:
                raise UsageError("'-': there are no paths on standard input", "the command before it may have failed")
            paths += piped
        else:
            paths.append(Path(argument))
    return paths
