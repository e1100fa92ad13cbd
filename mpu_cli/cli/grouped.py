"""Options on the command line from their declarations in ``mpu_cli.options``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, is_dataclass
from typing import Annotated, Any, Literal, Optional, get_type_hints

import typer

from mpu_cli.options.declare import Declaration, declared, from_flat


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with each parameter that is a group of options replaced by the group's options.

    >>> @grouped
    ... def stir(pot: Pot, training: Training) -> None: ...

    takes what ``Training`` declares, one option each, and is called with a ``Training``.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += [_parameter(each) for each in declared(groups[parameter.name]).values()]
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def flattened(**values: object) -> None:
        made_groups = {}
        for name, group in groups.items():
            given = {option: values.pop(option) for option in declared(group)}
            own = {option: value for option, value in given.items() if value is not None}
            made_groups[name] = from_flat(group, own)
        command(**values, **made_groups)

    del flattened.__wrapped__  # typer reads the signature below, not the command's own
    flattened.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flattened.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flattened


def _parameter(of: Declaration) -> inspect.Parameter:
    kind: Any = of.kind
    if of.choices:
        kind = Literal[of.choices]
    elif of.kind is tuple or of.words:
        kind = str
    if of.optional or of.kind is tuple:
        kind = Optional[kind]  # noqa: UP045 (the kind is a value here)
    default: Any = inspect.Parameter.empty if of.default is MISSING else of.default
    if of.words:
        default = str(default)
    elif of.kind is tuple:
        default = None
    if of.argument:
        info: Any = typer.Argument(help=of.help, metavar=of.metavar)
    else:
        only_on = [of.flag] if of.kind is bool and not of.default else []  # no --no-… for what is off anyway
        names = only_on or ([] if of.flag == "--" + of.name.replace("_", "-") else [of.flag])
        if of.former:
            names = [of.flag, "--" + of.former.replace("_", "-")]
        info = typer.Option(*names, help=of.help, metavar=of.metavar, rich_help_panel=of.panel)
    return inspect.Parameter(of.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])
