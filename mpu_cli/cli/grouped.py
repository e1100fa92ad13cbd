"""Options on the command line from their declarations in ``mpu_cli.options``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, is_dataclass
from typing import Annotated, Any, Literal, Optional, get_type_hints

import typer

from mpu_cli.options.declare import Declaration, declared_options, from_flat


def expand_option_groups(command: Callable[..., None]) -> Callable[..., None]:
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
            parameters += [_parameter(each) for each in declared_options(groups[parameter.name]).values()]
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def call_command(**values: object) -> None:
        made_groups = {}
        for name, group in groups.items():
            group_values = {option: values.pop(option) for option in declared_options(group)}
            specified = {option: value for option, value in group_values.items() if value is not None}
            made_groups[name] = from_flat(group, specified)
        command(**values, **made_groups)

    del call_command.__wrapped__  # typer reads the signature below, not the command's own
    call_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call_command


def _parameter(declaration: Declaration) -> inspect.Parameter:
    kind: Any = declaration.kind
    if declaration.choices:
        kind = Literal[declaration.choices]
    elif declaration.kind is tuple or declaration.words:
        kind = str
    if declaration.optional or declaration.kind is tuple:
        kind = Optional[kind]  # noqa: UP045 (the kind is a value here)
    default: Any = inspect.Parameter.empty if declaration.default is MISSING else declaration.default
    if declaration.words:
        default = str(default)
    elif declaration.kind is tuple:
        default = None
    if declaration.argument:
        info: Any = typer.Argument(help=declaration.help, metavar=declaration.metavar)
    else:
        only_on = (
            [declaration.flag] if declaration.kind is bool and not declaration.default else []
        )  # no --no-… for what is off anyway
        names = only_on or ([] if declaration.flag == "--" + declaration.name.replace("_", "-") else [declaration.flag])
        if declaration.former:
            names = [declaration.flag, "--" + declaration.former.replace("_", "-")]
        info = typer.Option(
            *names, help=declaration.help, metavar=declaration.metavar, rich_help_panel=declaration.panel
        )
    return inspect.Parameter(
        declaration.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )
