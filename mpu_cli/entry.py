"""The command's entry point: installs signal handlers before anything slow is imported."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

from mpu_cli.errors import Stopped
from mpu_cli.files.transaction import STOPPING, Transaction

GC_THRESHOLD = 10_000  # new objects; with Python's 700, a tenth of the time of importing transformers is collection


def stop(number: int, _frame: FrameType | None) -> None:
    """Exit: immediately if nothing is at stake, through the open transactions otherwise.

    An exception while a library is being loaded can crash the interpreter.
    """
    if Transaction.open_ones:
        raise Stopped(number)
    os.write(2, b"mpu: error: stopped\n")
    os._exit(128 + number)


def main() -> None:
    """The console script ``mpu``."""
    gc.set_threshold(GC_THRESHOLD)
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # respect nohup
            signal.signal(number, stop)
    from mpu_cli.cli.main import main as run
    from mpu_cli.subprocesses import import_nothing_from_here

    import_nothing_from_here()
    status: Any = 0
    try:
        run(sys.argv[1:])
    except SystemExit as end:
        status = end.code
    finally:
        for transaction in list(Transaction.open_ones):
            transaction.clean_up()
    leave(int(status or 0))


def leave(status: int) -> None:
    """End the process as the interpreter does, but without tearing down torch, which wastes tenths of a second."""
    if "WORLD_SIZE" in os.environ:  # processes of a distributed run shut down in order
        distributed = sys.modules.get("torch.distributed")
        if status == 0 and distributed is not None and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
        sys.exit(status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed or missing
            stream.flush()
    os._exit(status)
