"""The command ``mpu``. Only what the command line itself needs is imported here; each command loads its own."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import Annotated

import typer
from typer.exceptions import TyperException

from mpu_cli import __version__
from mpu_cli.cli.aggregate import aggregate
from mpu_cli.cli.demo import demo
from mpu_cli.cli.inspect import inspect
from mpu_cli.cli.invert import invert
from mpu_cli.cli.keygen import keygen
from mpu_cli.cli.publish import publish
from mpu_cli.cli.unlearn import unlearn
from mpu_cli.cli.verify import verify
from mpu_cli.errors import MpuError

app = typer.Typer(
    name="mpu",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "MPU"},
)

SERVER, CLIENT, BOTH = "Server: owns the model", "Client: owns the records", "Both"
app.command(rich_help_panel=SERVER)(publish)
app.command(rich_help_panel=CLIENT)(unlearn)
app.command(rich_help_panel=SERVER)(invert)
app.command(rich_help_panel=SERVER)(aggregate)
app.command(rich_help_panel=SERVER)(verify)
app.command(rich_help_panel=SERVER)(keygen)
app.command(rich_help_panel=BOTH)(inspect)
app.command(rich_help_panel=BOTH)(demo)

INTERRUPTED = 130  # 128 + SIGINT, as shells count
TERMINATED = 143  # 128 + SIGTERM


class Terminated(BaseException):
    """SIGTERM or SIGHUP, raised so that what is unfinished is removed on the way out."""


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"mpu {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=print_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
) -> None:
    """Unlearning without showing each other anything: the server publishes disguised copies of its model, the
    client unlearns on them and returns weight changes, the server undoes the disguise and combines them.

    Results go to standard output, everything else to standard error. Every option can be set by an environment
    variable: MPU_PUBLISH_KAPPA=0.01 for `publish --kappa 0.01`.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    debug = "--debug" in arguments or os.environ.get("MPU_DEBUG", "") not in ("", "0")
    # Where an option stands should not matter for one that is everybody's.
    arguments = [a for a in arguments if a != "--debug"]
    try:
        command = typer.main.get_command(app)
        for each in (command, *command.commands.values()):
            for parameter in each.params:
                parameter.show_envvar = False  # said once, above; beside every option it drowns the help
        status = command.main(arguments, prog_name="mpu", standalone_mode=False)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        status = error.exit_code
        if text := error.format_message():
            _fail(f"{text.rstrip('.')}; see '{context.command_path if context else 'mpu'} --help'", debug)
    except MpuError as error:
        status = error.exit_status
        _fail(str(error), debug)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains on its way out
        status = 1
    except OSError as error:
        status = 1
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", debug)
    except MemoryError:
        status = 1
        _fail("out of memory", debug)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except Terminated:
        status = TERMINATED
    except Exception as error:
        status = 1
        _fail(f"unexpected {type(error).__name__}: {error}; please report it with the output of --debug", debug)
    if status in (INTERRUPTED, TERMINATED):  # typer makes the first of an interrupt itself
        _fail("stopped; nothing was left half-written", debug)
    sys.exit(status)


def _fail(text: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print("mpu: error: " + " ".join(text.split()), file=sys.stderr)


def _terminate(*_: object) -> None:
    raise Terminated
