"""The ``mpu`` command. Only what the command line itself needs is imported here; each command imports the rest."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import typer

from mpu_cli.cli.aggregate import aggregate
from mpu_cli.cli.audit import audit
from mpu_cli.cli.audit_delta import audit_delta
from mpu_cli.cli.check import check, receipt
from mpu_cli.cli.check_family import check_family
from mpu_cli.cli.compare import compare
from mpu_cli.cli.config import (
    VARIABLE,
    defaults_from,
    name_variables,
    unknown_variables,
    without_flag,
    without_switch,
)
from mpu_cli.cli.demo import demo
from mpu_cli.cli.doctor import doctor
from mpu_cli.cli.eval import eval_
from mpu_cli.cli.finetune import finetune
from mpu_cli.cli.inspect import inspect
from mpu_cli.cli.invert import invert
from mpu_cli.cli.keygen import keygen
from mpu_cli.cli.levels import in_two_levels
from mpu_cli.cli.output import QUIET, is_switched_on, printable, results_alone, warn
from mpu_cli.cli.plan import plan
from mpu_cli.cli.publish import publish
from mpu_cli.cli.report import report
from mpu_cli.cli.run import run
from mpu_cli.cli.surrogate import surrogate
from mpu_cli.cli.sweep import sweep
from mpu_cli.cli.trace import trace
from mpu_cli.cli.tune import tune
from mpu_cli.cli.unlearn import unlearn
from mpu_cli.cli.verify import verify
from mpu_cli.cli.watch import watch
from mpu_cli.errors import MpuError, Stopped
from mpu_cli.version import __version__

try:
    from typer.exceptions import TyperException
except ImportError:  # before 0.26, typer's errors are click's
    from click import ClickException as TyperException  # type: ignore[assignment]

app = typer.Typer(
    name="mpu",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

INTERRUPTED = 130  # what typer itself returns for an interrupt
SIGNALLED = 128  # exit statuses above this are signals, as in shells

TRY = "Try it"
SERVER, CLIENT, BOTH_PARTIES = "Server: owns the model", "Client: owns the records", "Both"
EXPERIMENTS = "Experiments: both parties on one machine"
ADVANCED = "Advanced"


def register(panel: str, function: Callable[..., None], name: str | None = None) -> None:
    """Make ``function`` a command. Help breaks lines where the terminal does, not where its docstring does."""
    paragraphs = cleandoc(function.__doc__ or "").split("\n\n")
    function.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(name, rich_help_panel=panel)(function)


register(TRY, demo)
register(SERVER, publish)
register(SERVER, aggregate)
register(SERVER, verify)
register(SERVER, audit)
register(SERVER, trace)
register(SERVER, keygen)
register(CLIENT, unlearn)
register(CLIENT, surrogate)
register(CLIENT, check)
register(CLIENT, watch)
register(CLIENT, audit_delta, "audit-delta")
register(BOTH_PARTIES, eval_, "eval")
register(BOTH_PARTIES, receipt)
register(BOTH_PARTIES, compare)
register(BOTH_PARTIES, tune)
register(BOTH_PARTIES, plan)
register(BOTH_PARTIES, inspect)
register(BOTH_PARTIES, doctor)
register(EXPERIMENTS, run)
register(EXPERIMENTS, sweep)
register(EXPERIMENTS, report)
register(EXPERIMENTS, finetune)
register(ADVANCED, invert)
register(ADVANCED, check_family, "check-family")


def print_version(requested: bool) -> None:
    if requested:
        print(f"mpu {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=print_version)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Show warnings and errors only, no notes and no progress.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
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
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about a kernel that is not used here
    # Options of every command, which should work in any position.
    arguments, debug = without_switch(arguments, "--debug")
    debug = debug or is_switched_on("MPU_DEBUG")
    arguments, quiet = without_switch(arguments, "--quiet")
    if quiet:
        os.environ[QUIET] = "1"
    try:
        arguments, file = without_flag(arguments)
        command: Any = typer.main.get_command(app)
        for each in command.commands.values():
            each.callback = results_alone()(each.callback)
        name_variables(command.commands)
        for sentence in unknown_variables(os.environ, command.commands):
            warn(sentence)
        file = file or os.environ.get(VARIABLE)
        defaults = defaults_from(Path(file), command.commands) if file else None
        arguments = in_two_levels(command.commands, arguments)
        status = (
            command.main(join_repeated_options(arguments), prog_name="mpu", standalone_mode=False, default_map=defaults)
            or 0
        )
    except TyperException as error:
        context = getattr(error, "ctx", None)
        status = error.exit_code
        if text := error.format_message():
            _fail(text.rstrip("."), debug, f"see '{context.command_path if context else 'mpu'} --help'")
    except MpuError as error:
        status = error.exit_status
        _fail(error.problem, debug, error.hint)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains on exit
        status = 1
    except OSError as error:
        status = 1
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", debug)
    except MemoryError:
        status = 1
        _fail("out of memory", debug)
    except (Stopped, KeyboardInterrupt, typer.Abort) as error:
        status = getattr(error, "status", INTERRUPTED)
    except SystemExit:
        raise
    except BaseException as error:  # panics of libraries in Rust are not Exceptions
        status = 1
        _fail(f"unexpected {type(error).__name__}: {error}", debug, "please report it with the output of --debug")
    if status > SIGNALLED:
        _fail("stopped, nothing was left half-written", debug)
    sys.exit(status)


REPEATED = ("--forget", "--retain", "--holdout")  # records, of which several sources can be named


def join_repeated_options(arguments: list[str]) -> list[str]:
    """``arguments`` in which records that are named several times are one option's, a source a line: of other options
    the last one counts, but records that were named and not read would be missed by nobody."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    remaining: list[str] = []
    sources: dict[str, list[str]] = {}
    waiting = iter(arguments[:end])
    for each in waiting:
        flag, equals, value = each.partition("=")
        if flag not in REPEATED:
            remaining.append(each)
            continue
        source = value if equals else next(waiting, None)
        if source is None:
            return arguments  # the option lacks its value, which typer says better
        sources.setdefault(flag, []).append(source)
    named_again = [text for flag, names in sources.items() for text in (flag, "\n".join(names))]
    return [*remaining, *named_again, *arguments[end:]]


def _fail(text: str, debug: bool, hint: str | None = None) -> None:
    if debug:
        traceback.print_exc()
    for kind, line in (("error", text), ("hint", hint)):
        if line:
            print(f"mpu: {kind}: " + printable(" ".join(line.split())), file=sys.stderr)
