"""The ``mpu`` command. Only what the command line itself needs is imported here; each command imports the rest."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from mpu_cli.cli.config import (
    VARIABLE,
    defaults_from,
    global_options,
    name_variables,
    naming_variables,
    unknown_variables,
)
from mpu_cli.cli.driver import in_two_levels, typer_command
from mpu_cli.cli.output import PROFILE, QUIET_VARIABLE, is_switched_on, results_alone, warn
from mpu_cli.commands.aggregate import Aggregate
from mpu_cli.commands.ask import Ask
from mpu_cli.commands.check import Check
from mpu_cli.commands.check_family import CheckFamily
from mpu_cli.commands.evaluate import Evaluate
from mpu_cli.commands.inspect import Inspect
from mpu_cli.commands.invert import Invert
from mpu_cli.commands.keygen import Keygen
from mpu_cli.commands.plan import Plan
from mpu_cli.commands.publish import Publish
from mpu_cli.commands.receipt import Receipt
from mpu_cli.commands.status import Status
from mpu_cli.commands.unlearn import Unlearn
from mpu_cli.commands.verify import Verify
from mpu_cli.demo.command import Demo
from mpu_cli.demo.doctor import Doctor
from mpu_cli.errors import MpuError, Stopped, no_space
from mpu_cli.flower.command import Watch
from mpu_cli.lab.commands import PANELS as LAB
from mpu_cli.options.command import Command
from mpu_cli.options.declare import AGAIN, OTHER_NAMES, declared_options, folds_of, spelled_for
from mpu_cli.version import __version__
from mpu_cli.wording import printable

try:
    from typer.exceptions import TyperException
except ImportError:  # before 0.26, typer's errors are click's
    from click import ClickException as TyperException  # type: ignore[assignment]

INTERRUPTED = 130  # typer's own exit status for an interrupt
SIGNALLED = 128  # exit statuses above this are signals, as in shells

# The commands, in the order and under the headings of help. A new one is added here, or to the laboratory's table.
PANELS: dict[str, tuple[type[Command], ...]] = {
    "Try it": (Demo,),
    "The four steps: server, client, server, client; and whose turn it is": (
        Publish,
        Unlearn,
        Aggregate,
        Check,
        Status,
    ),
    "Server: owns the model": (),
    "Client: owns the records": (Watch,),
    "Both": (Ask, Receipt, Keygen, Evaluate),
    "If something is odd": (Doctor, Plan, Inspect, Verify),
    "Experiments: both parties on one machine": (),
    "Advanced": (Invert, CheckFamily),
}
PANELS = {panel: (*commands, *LAB.get(panel, ())) for panel, commands in PANELS.items()}
COMMANDS = {command.NAME: command for commands in PANELS.values() for command in commands}


def application(names: Collection[str] = COMMANDS.keys()) -> Any:
    """All commands, as click has them. Only those in ``names`` have their options: to declare all of them takes as long
    as printing help."""
    app = typer.Typer(
        name="mpu",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    for panel, commands in PANELS.items():
        for command in commands:
            example = f"Example: {command.EXAMPLE}" if command.EXAMPLE else None
            function = typer_command(command, with_options=command.NAME in names)
            app.command(command.NAME, rich_help_panel=panel, epilog=example)(function)
    return typer.main.get_command(app)


def print_version(requested: bool) -> None:
    if requested:
        print(f"mpu {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=print_version)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Show warnings and errors only, no notes and no progress.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Show at the end how long each stage took.")] = False,
    config: Annotated[
        str | None,
        typer.Option(
            "--config", help="TOML file with options: a table for each command, named after it.", metavar="FILE"
        ),
    ] = None,
) -> None:
    """Unlearning in which neither party sees the other's secrets: the server publishes disguised copies of its model,
    the client unlearns on them and returns weight changes, and the server undoes the disguise and combines them.

    Results go to standard output, everything else to standard error.

    Every option can be set by a variable, MPU_PUBLISH_KAPPA=0.01 for `publish --kappa 0.01`, or in a file (--config).
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # characters that a Latin-1 or ASCII terminal lacks
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about a kernel that is not used here
    debug = is_switched_on("MPU_DEBUG")
    try:
        switched, arguments = global_options(arguments)
        debug = debug or switched.debug
        for variable, is_on in ((QUIET_VARIABLE, switched.quiet), (PROFILE, switched.profile)):
            if is_on:
                os.environ[variable] = "1"
        file = switched.config or os.environ.get(VARIABLE)
        # Files and variables may set options of any command, and completion (_MPU_COMPLETE) reads them.
        needs_all = file or any("MPU_" in name for name in os.environ)
        command = application(COMMANDS.keys() if needs_all else arguments)
        for parsed in command.commands.values():
            parsed.callback = results_alone()(parsed.callback)
        name_variables(command.commands)
        for sentence in unknown_variables(os.environ, command.commands):
            warn(sentence)
        defaults = defaults_from(Path(file), command.commands, COMMANDS) if file else None
        arguments = in_two_levels(command.commands, COMMANDS, arguments)
        status = (
            command.main(join_repeated_options(arguments), prog_name="mpu", standalone_mode=False, default_map=defaults)
            or 0
        )
    except TyperException as error:
        context = getattr(error, "ctx", None)
        status = error.exit_code
        unknown = str(getattr(error, "option_name", "")).removeprefix("--").replace("-", "_")
        if context and context.command.name in COMMANDS and hasattr(error, "possibilities"):
            declared = declared_options(COMMANDS[context.command.name])
            meant = declared.get(OTHER_NAMES.get(unknown, unknown))
            if meant and not meant.argument:
                error.possibilities = [f"{meant.flag}={meant.metavar or 'VALUE'}" if meant.fold else meant.flag]
        if text := error.format_message():
            text = naming_variables(text.rstrip("."), arguments, os.environ)
            _fail(text, debug, f"see '{context.command_path if context else 'mpu'} --help'")
    except MpuError as error:
        status = error.exit_status
        problem, hint = error.problem, error.hint or ""
        if called := named_command(arguments):
            problem, hint = spelled_for(called, problem), spelled_for(called, hint)
        _fail(naming_variables(problem, arguments, os.environ), debug, hint)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains on exit
        status = 1
    except OSError as error:
        status = 1
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", debug, "make room, and run it again" if no_space(error) else None)
    except MemoryError:
        status = 1
        _fail("out of memory", debug)
    except (Stopped, KeyboardInterrupt, typer.Abort) as error:
        status = getattr(error, "status", INTERRUPTED)
    except SystemExit:
        raise
    except BaseException as error:  # panics of libraries in Rust are not Exceptions
        status = 1
        if no_space(error):
            _fail("no space left for a file that was being written", debug, "make room, and run it again")
        else:
            _fail(f"unexpected {type(error).__name__}: {error}", debug, "please report it with the output of --debug")
    if status > SIGNALLED:
        _fail("stopped, nothing was left half-written", debug)
    sys.exit(status)


REPEATED = ("--forget", "--retain", "--unseen")  # records, of which several sources can be named


def named_command(arguments: list[str]) -> type[Command] | None:
    return next((COMMANDS[argument] for argument in arguments if argument in COMMANDS), None)


def join_repeated_options(arguments: list[str]) -> list[str]:
    """``arguments`` with repeated options joined into one: records as lines, options of several parts with AGAIN
    between them. Of other options the last one counts, but nobody would notice records that were named and not read."""
    command = named_command(arguments)
    repeated = {*REPEATED, *(fold.flag for fold in folds_of(declared_options(command) if command else {}))}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    remaining: list[str] = []
    sources: dict[str, list[str]] = {}
    waiting = iter(arguments[:end])
    for argument in waiting:
        flag, equals, value = argument.partition("=")
        if flag not in repeated:
            remaining.append(argument)
            continue
        source = value if equals else next(waiting, None)
        if source is None:
            return arguments  # the option lacks its value, which typer says better
        sources.setdefault(flag, []).append(source)
    for flag, names in sources.items():
        remaining += [flag, ("\n" if flag in REPEATED else AGAIN).join(names)]
    return [*remaining, *arguments[end:]]


def _fail(text: str, debug: bool, hint: str | None = None) -> None:
    if debug:
        traceback.print_exc()
    for kind, line in (("error", text), ("hint", hint)):
        if line:
            print(f"mpu: {kind}: " + printable(" ".join(line.split())), file=sys.stderr)
