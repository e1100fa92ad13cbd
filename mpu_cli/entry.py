"""Where the command begins: signals are taken care of before anything that takes time is loaded."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from mpu_cli.checkpoint.transaction import STOPPING, Transaction
from mpu_cli.errors import Stopped


def stop(number: int, _frame: FrameType | None) -> None:
    """Leave: at once where nothing is at stake, through the open transactions where something is.

    An exception in the middle of loading a library can bring the interpreter down.
    """
    if Transaction.open_ones:
        raise Stopped(number)
    os.write(2, b"mpu: error: stopped\n")
    os._exit(128 + number)


def main() -> None:
    """The console script ``mpu``."""
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
            signal.signal(number, stop)
    from mpu_cli.cli.main import main as run

    try:
        run(sys.argv[1:])
    finally:
        for transaction in list(Transaction.open_ones):
            transaction.clean_up()
