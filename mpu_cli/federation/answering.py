"""A process of its own that unlearns on copies: a copy that crashes, hangs or fills it stops neither ``mpu watch`` nor
the copies after it.

It is given one copy at a time, in a private folder, and kept for the next one as long as it answers. What it reports on
the way goes to the observer of the process that started it.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from mpu_cli.checkpoint.reader import open_checkpoint
from mpu_cli.checkpoint.transaction import STOPPING
from mpu_cli.client.checks import check_options, refers_back
from mpu_cli.client.dataset import Dataset
from mpu_cli.client.ledger import default_ledger_path
from mpu_cli.client.outcome import UnlearningResult
from mpu_cli.client.tag import client_secret, default_secret_path
from mpu_cli.client.unlearn import unlearn
from mpu_cli.errors import MpuError, Stopped, first_line
from mpu_cli.manifest import CopyManifest, delta_manifest, read_copy_manifest
from mpu_cli.models.device import device_of
from mpu_cli.models.source import open_model
from mpu_cli.observer import Observer, Within
from mpu_cli.options.unlearning import Checks, Logging, Unlearning
from mpu_cli.subprocesses import python_command, safe_environment

LOOK = 0.5  # seconds between looks at a process that reports nothing
ENDING = 10.0  # seconds that a process has to clean up before it is killed


@dataclass(frozen=True)
class CopyTask:
    """A copy by its name in the spool, where it lies, and where its delta and reference probabilities belong."""

    copy: str
    arrived: Path
    delta: Path
    references: Path


@dataclass(frozen=True)
class Answered:
    """Which copy it was, and the training; None if its delta was there already."""

    origin: CopyManifest
    result: UnlearningResult | None


class Answering:
    """The process, started with the first task. ``seconds`` is how long one may take."""

    def __init__(self, data: Dataset, options: Unlearning, checks: Checks, observer: Observer, seconds: float):
        self._training = data, options, checks
        self._observer, self._seconds = observer, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def answer(self, task: CopyTask) -> Answered:
        """Unlearn on a copy. Raises MpuError if that fails, whatever the reason."""
        pipe = self._connect_process()
        ends = time.monotonic() + self._seconds
        observer = Within(self._observer, task.copy)
        try:
            pipe.send(task)
            while True:
                if time.monotonic() > ends:
                    raise MpuError(f"not done after {self._seconds:,.0f} s", "raise --copy-timeout if it needs longer")
                if not pipe.poll(LOOK):
                    continue
                kind, values = pipe.recv()
                if kind == "done":
                    return values
                if kind == "failed":
                    raise MpuError(*values)
                getattr(observer, kind)(*values)
        except (EOFError, OSError) as error:
            raise MpuError(f"the process that trained on it ended ({self._end()})") from error
        except MpuError:
            if time.monotonic() > ends:
                self.stop()
            raise
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the process: asked first, so that it leaves nothing half-written."""
        if self._process is not None:
            self._process.terminate()
            self._end()

    def _end(self) -> str:
        process, self._process = self._process, None
        if process is None:
            return "stopped"
        assert process.stdin is not None
        process.stdin.close()
        try:
            code = process.wait(ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return signal.strsignal(-code) or "killed" if code < 0 else f"status {code}"

    def _connect_process(self) -> Connection:
        if self._process is None or self._pipe is None or self._process.poll() is not None:
            # Not multiprocessing's own way: its processes import from the current folder, which may be the spool.
            self._pipe, other = Pipe()
            command = python_command("mpu_cli.federation.answering", "serve", str(other.fileno()))
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[other.fileno()], env=safe_environment()
            )
            other.close()
            self._pipe.send(self._training)
        return self._pipe


class _Reporting(Observer):
    """Sends what an operation reports to the other process."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe

    def stage(self, label: str, total: float, unit: str = "bytes") -> None:
        self._pipe.send(("stage", (label, total, unit)))

    def advance(self, amount: float, detail: str = "") -> None:
        self._pipe.send(("advance", (amount, detail)))

    def note(self, text: str) -> None:
        self._pipe.send(("note", (text,)))

    def warn(self, text: str) -> None:
        self._pipe.send(("warn", (text,)))


def serve() -> None:
    """The process: a task at a time until its parent ends. Its argument is the number of the pipe's descriptor."""
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))

    def stop(number: int, _: object) -> None:
        raise Stopped(number)

    for number in STOPPING:
        signal.signal(number, stop)
    os.umask(0o077)
    try:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        data, options, checks = pipe.recv()
        if device_of(options.training.device).type == "cpu":  # drivers of accelerators reserve more than there is
            _limit_memory()
        sys.stdout = sys.stderr  # results are the parent's to print
        while True:
            task: CopyTask = pipe.recv()
            try:
                pipe.send(("done", _answer(task, data, options, checks, _Reporting(pipe))))
            except MpuError as error:
                pipe.send(("failed", (error.problem, error.hint)))
            except Exception as error:  # whatever a hostile copy makes a library raise
                pipe.send(("failed", (f"unexpected {type(error).__name__}: {first_line(error)[:300]}", None)))
    except (EOFError, OSError, Stopped):
        pass
    finally:
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)  # it is ending


def _answer(task: CopyTask, data: Dataset, options: Unlearning, checks: Checks, observer: Observer) -> Answered:
    model = open_model(str(task.arrived), links=False)
    origin = read_copy_manifest(task.arrived, model.checkpoint.metadata)
    if origin is None or task.copy != f"{origin.run}/round_{origin.round}/copy_{origin.copy}":
        raise MpuError(f"{task.copy}: does not hold the copy that its name says")
    result = None
    if not task.delta.exists():
        reference = None
        if refers_back(check_options(options)):
            reference = task.references / origin.run / f"copy_{origin.copy}.safetensors"
            reference.parent.mkdir(parents=True, exist_ok=True)
        task.delta.parent.mkdir(parents=True, exist_ok=True)
        result = unlearn(
            model, data, options, target=task.delta, force=True, reference_file=reference,
            logging=Logging(resume=options.privacy.dp_epsilon is None),
            secret=lambda: client_secret(default_secret_path()), ledger=default_ledger_path(),
            checks=checks, observer=observer,
        )  # fmt: skip
    if delta_manifest(open_checkpoint(task.delta).metadata, task.delta).origin != origin:
        raise MpuError(f"{task.copy}: another copy of this name was answered before")
    return Answered(origin, result)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()  # nothing is written there: it ends when the parent does
    os.kill(os.getpid(), signal.SIGTERM)


def _limit_memory() -> None:
    """At most what the machine has: beyond that, the system would end a process of its own choice."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = physical if most == resource.RLIM_INFINITY else min(physical, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
