"""Options from elsewhere than the command line: a file for ``--config``, and environment variables.

The command line comes before a variable, a variable before the file.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpu_cli.errors import UsageError
from mpu_cli.options.command import Command
from mpu_cli.options.declare import RECORDS, check_in_files, declared_options, folds_of, nearest, unfold
from mpu_cli.toml import read_toml

FLAG, VARIABLE = "--config", "MPU_CONFIG"
OF_NO_COMMAND = (VARIABLE, "MPU_DEBUG", "MPU_PROFILE", "MPU_QUIET", "MPU_ENDPOINT_KEY")
OF_TESTS = "MPU_TEST_"
Commands = Mapping[str, Any]  # by name, as click has them


def global_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of every command, which work in any position before ``--``, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--debug", "--quiet", "--profile"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument(FLAG)
    try:
        return parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        problem = "needs a file" if error.argument_name == FLAG else "takes no value"
        raise UsageError(f"{error.argument_name}: {problem}") from error


def defaults_from(path: Path, commands: Commands, classes: Mapping[str, type[Command]]) -> dict[str, dict[str, object]]:
    """The options that ``path`` sets, as ``{command: {parameter: value}}``: a table for each command, with its options
    by name."""
    hint = "give it on the command line, or as a variable"
    defaults: dict[str, dict[str, object]] = {}
    for name, table in read_toml(path).items():
        if name not in commands or not isinstance(table, dict):
            tables = ", ".join(f"[{command}]" for command in commands)
            raise UsageError(f"{path}: {name}: not a command", f"put options into a table: {tables}")
        parameters = {_option_name(parameter): parameter for parameter in commands[name].params}
        declarations = declared_options(classes[name])
        folds = {fold.name: fold for fold in folds_of(declarations)}
        defaults[name] = {}
        for option, value in table.items():
            parameter = parameters.get(option.replace("-", "_"))
            if parameter is None:
                near = nearest(option.replace("-", "_"), parameters)
                meant = f"did you mean {near}?" if near else None
                raise UsageError(f"{path}: [{name}] {option}: no such option", meant)
            takes_several = getattr(parameter, "multiple", False) or parameter.nargs == -1
            if parameter.name in folds:
                if not isinstance(value, str | dict):
                    raise UsageError(f"{path}: [{name}] {option}: must be text, NAME=VALUE,…, or a table")
                value = value if isinstance(value, str) else json.dumps(value, default=str)
                of_fold = unfold(folds[parameter.name], [value], declarations)
                check_in_files(declarations, of_fold, f"{path}: [{name}] ", hint)
            elif not takes_several:
                if isinstance(value, list) and all(isinstance(entry, str | int | float) for entry in value):
                    value = ("\n" if parameter.metavar == RECORDS else ",").join(map(str, value))
            elif not isinstance(value, list):
                value = [value]
            defaults[name][parameter.name] = value
        check_in_files(declarations, defaults[name], f"{path}: [{name}] ", hint)
    return defaults


def name_variables(commands: Commands) -> None:
    """Give every option its variable: MPU_PUBLISH_KAPPA for ``publish --kappa``. Flags show no type in the help."""
    for name, command in commands.items():
        for parameter in command.params:
            if parameter.param_type_name == "option":
                parameter.envvar = _variable(name, _option_name(parameter))
                if parameter.is_flag:
                    parameter.metavar = parameter.metavar or ""
                parameter.show_envvar = False  # explained once, in mpu's help; repeated everywhere, it drowns the rest


def unknown_variables(environment: Iterable[str], commands: Commands) -> Iterator[str]:
    """A sentence for each MPU_… in the environment that sets nothing."""
    parameters = [parameter for command in commands.values() for parameter in command.params]
    variables = {*OF_NO_COMMAND, *(parameter.envvar for parameter in parameters if parameter.envvar)}
    for name in sorted(environment):
        if name.startswith("MPU_") and name not in variables and not name.startswith(OF_TESTS):
            near = difflib.get_close_matches(name, variables, 1)
            yield f"{name}: no option has this variable" + (f"; did you mean {near[0]}?" if near else "")


def naming_variables(text: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """``text`` with each option that ``environment`` sets, and not ``arguments``, under the name of its variable."""
    flags = {argument.partition("=")[0] for argument in arguments}
    for flag in {*re.findall(r"--[a-z][a-z0-9-]*", text)} - flags:
        variable = _variable(arguments[0], flag.removeprefix("--")) if arguments else ""
        if variable in environment:
            text = re.sub(rf"{flag}(?![a-z0-9-])", variable, text)
    return text


def _variable(command: str, option: str) -> str:
    return f"MPU_{command}_{option}".replace("-", "_").upper()


def _option_name(parameter: Any) -> str:
    """``batch_size`` for ``--batch-size``; the name of an argument."""
    longest = max(parameter.opts, key=len)
    return longest.removeprefix("--").replace("-", "_").lower()
