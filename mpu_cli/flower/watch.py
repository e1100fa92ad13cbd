"""The data owner's worker: unlearns on each copy that arrives in a spool, and leaves the delta there.

Deltas leak more of the records with every training, and under DP-SGD every training draws new noise. So each copy is
trained on once: a delta that is requested again is handed over again, as it was.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mpu_cli.errors import MpuError, Stopped, first_line
from mpu_cli.files.boundary import Document, Text, parse_document, private_folder, private_umask
from mpu_cli.files.manifest import delta_manifest, read_copy_manifest
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.files.resumption import alone_in, append_line, read_lines
from mpu_cli.files.transaction import STOPPING
from mpu_cli.flower.spool import COPY, DELTA, Spool, copy_name, digest_of_folder, is_name
from mpu_cli.model.device import device_of
from mpu_cli.model.source import open_model
from mpu_cli.observer import Observer, PrefixedObserver
from mpu_cli.options.unlearning import Checks, Logging, Unlearning
from mpu_cli.subprocesses import python_command, safe_environment
from mpu_cli.training.checks import check_options, refers_back
from mpu_cli.training.data import Dataset
from mpu_cli.training.ledger import default_ledger_path, own_client_secret
from mpu_cli.training.unlearn import UnlearningTask

# A process of its own that unlearns on copies: a copy that crashes, hangs or fills it stops neither ``mpu watch`` nor
# the copies after it.
#
# It is given one copy at a time, in a private folder, and kept for the next one as long as it answers. What it
# reports on the way goes to the observer of the process that started it, as JSON: it trains on what another party
# sent, so nothing that it says is unpickled, and no name that it gives is called.

LARGEST_MESSAGE = 64 << 20  # bytes; the report has the losses of each step
MAX_TEXT = 5000  # characters of a text in it
POLL_SECONDS = 0.5  # seconds between looks at a process that reports nothing
ENDING = 10.0  # seconds that a process has to clean up before it is killed


@dataclass(frozen=True)
class CopyTask:
    """A copy by its name in the spool, where it lies, and where its delta and reference probabilities belong."""

    copy: str
    arrived: Path
    delta: Path
    references: Path


class TrainingReport(Document):
    """The result of the training on a copy: in a sentence, what is probably wrong with it, and for JSON."""

    summary: Text
    warnings: list[Text]
    facts: dict[str, Any]


class Message(Document):
    """A message of the process: a stage begins (label, total, unit), some of it is done (amount, detail), a note or a
    warning (text), a failure (problem, hint), or it is done, with a report if there was a training."""

    kind: Literal["stage", "advance", "note", "warn", "failed", "done"]
    values: Annotated[list[float | Text | None], Meta(max_length=3)] = msgspec.field(default_factory=list)
    report: TrainingReport | None = None


class TrainingProcess:
    """The process, started with the first task. ``seconds`` is how long one may take."""

    def __init__(self, data: Dataset, options: Unlearning, checks: Checks, observer: Observer, seconds: float):
        self._training = data, options, checks
        self._observer, self._seconds = observer, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def answer(self, task: CopyTask) -> TrainingReport | None:
        """Unlearn on a copy; None if its delta was there already.

        Raises MpuError if that fails, whatever the reason.
        """
        pipe = self._connect_process()
        ends = time.monotonic() + self._seconds
        observer = PrefixedObserver(self._observer, task.copy)
        try:
            pipe.send(task)
            while (message := self._receive(pipe, ends)).kind not in ("done", "failed"):
                hand_on(message, observer)
        except (EOFError, OSError) as error:
            raise MpuError(f"the process that trained on it ended ({self._end()})") from error
        except BaseException:
            # Also after an invalid message: what the process says next would be taken for the next copy's.
            self.stop()
            raise
        match message.kind, message.values:
            case "failed", [str(problem), str() | None as hint]:
                raise MpuError(problem, hint)
            case "failed", _:
                raise MpuError("failed")
        return message.report

    def _receive(self, pipe: Connection, ends: float) -> Message:
        """The process's next message. Raises MpuError once it is later than ``ends``, and if it is invalid."""
        while time.monotonic() <= ends:
            if pipe.poll(POLL_SECONDS):
                return read_message(pipe.recv_bytes(LARGEST_MESSAGE))
        raise MpuError(f"not done after {self._seconds:,.0f} s", "raise --copy-timeout if it needs longer")

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
            command = python_command("mpu_cli.flower.watch", "serve", str(other.fileno()))
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[other.fileno()], env=safe_environment()
            )
            other.close()
            self._pipe.send(self._training)
        return self._pipe


def read_message(text: bytes) -> Message:
    """A message of the process."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MpuError("the process that trained on it sent no JSON") from error
    return parse_document(Message, value, "the process that trained on it")


def hand_on(message: Message, observer: Observer) -> None:
    """Report to ``observer`` what a progress message says. Raises MpuError if it is not one."""
    values = message.values
    match message.kind, values:
        case "stage", [str(label), float(total), str(unit)]:
            observer.stage(label, total, unit)
        case "advance", [float(amount), str(detail)]:
            observer.advance(amount, detail)
        case "note", [str(text)]:
            observer.note(text)
        case "warn", [str(text)]:
            observer.warn(text)
        case _:
            raise MpuError("the process that trained on it sent a message of no known form")


class _Reporting(Observer):
    """Sends what an operation reports to the other process."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe

    def say(self, kind: str, *values: float | str | None, report: object = None) -> None:
        short = [value[:MAX_TEXT] if isinstance(value, str) else value for value in values]
        self._pipe.send_bytes(json.dumps({"kind": kind, "values": short, "report": report}, default=str).encode())

    def stage(self, label: str, total: float, unit: str = "bytes") -> None:
        self.say("stage", label, total, unit)

    def advance(self, amount: float, detail: str = "") -> None:
        self.say("advance", amount, detail)

    def note(self, text: str) -> None:
        self.say("note", text)

    def warn(self, text: str) -> None:
        self.say("warn", text)


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
            # At most what the machine has: beyond that, the system would end a process of its own choice.
            physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            _, most = resource.getrlimit(resource.RLIMIT_DATA)
            limit = physical if most == resource.RLIM_INFINITY else min(physical, most)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
        sys.stdout = sys.stderr  # results are the parent's to print
        while True:
            task: CopyTask = pipe.recv()  # from the process that started this one
            reporting = _Reporting(pipe)
            try:
                reporting.say("done", report=_answer(task, data, options, checks, reporting))
            except MpuError as error:
                reporting.say("failed", error.problem, error.hint)
            except Exception as error:  # whatever a hostile copy makes a library raise
                reporting.say("failed", f"unexpected {type(error).__name__}: {first_line(error)[:300]}", None)
    except (EOFError, OSError, Stopped):
        pass
    finally:
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)  # it is ending


def _answer(
    task: CopyTask, data: Dataset, options: Unlearning, checks: Checks, observer: Observer
) -> dict[str, object] | None:
    """The entries of a TrainingReport, None if there was no training."""
    model = open_model(str(task.arrived), links=False)
    origin = read_copy_manifest(task.arrived, model.checkpoint.metadata)
    if origin is None or task.copy != copy_name(origin):
        raise MpuError(f"{task.copy}: does not hold the copy that its name says")
    result = None
    if not task.delta.exists():
        reference = None
        if refers_back(check_options(options)):
            reference = task.references / origin.run / f"copy_{origin.copy}.safetensors"
            reference.parent.mkdir(parents=True, exist_ok=True)
        task.delta.parent.mkdir(parents=True, exist_ok=True)
        training = UnlearningTask(
            model, data, options, target=task.delta, force=True, reference_file=reference,
            logging=Logging(resume=options.privacy.dp_epsilon is None),
            secret=own_client_secret, ledger=default_ledger_path(), checks=checks, observer=observer,
        )  # fmt: skip
        result = training.run()
    if delta_manifest(open_checkpoint(task.delta).metadata, task.delta).origin != origin:
        raise MpuError(f"{task.copy}: another copy of this name was answered before")
    if result is None:
        return None
    summary = result.summary(task.copy, options.algo)
    return {"summary": summary, "warnings": result.warnings(), "facts": result.facts(options.algo)}


def _end_with_parent() -> None:
    sys.stdin.buffer.read()  # nothing is written there: it ends when the parent does
    os.kill(os.getpid(), signal.SIGTERM)


# what becomes of a copy, in the worker's own file
BEGUN, ANSWERED, FAILED = "begun", "answered", "failed"


class AnsweredCopy(Document):
    """A line of the worker's own file: what became of a copy."""

    copy: Text
    state: Literal["begun", "answered", "failed"]
    digest: Text = ""


def read_answers(path: Path) -> list[AnsweredCopy]:
    """The worker's answers to copies so far, in order."""
    hint = "choose another --work"
    answers: list[AnsweredCopy] = []
    for line in read_lines(path, hint):
        answer = parse_document(AnsweredCopy, line, f"{path}: damaged", hint)
        if is_name(answer.copy, COPY):
            answers.append(answer)
    return answers


@dataclass(frozen=True, kw_only=True)
class Worker:
    """The options and folders of a worker that unlearns on the copies in a spool."""

    spool: Spool
    work: Path  # private: only finished deltas go to the spool
    data: Dataset
    options: Unlearning
    observer: Observer
    on_delta: Callable[[str, Path, TrainingReport | None], None]
    most: int | None  # trainings that may begin in all, as one that fails tells the other party something, too
    seconds: float  # how long a copy may take
    checks: Checks
    # Copies that failed and could not be marked so: without this they would be trained on again at every look.
    _unmarked: set[str] = field(default_factory=set)

    def watch(self, poll: float, once: bool) -> bool:
        """Work on what arrives, for ever or ``once``. Returns whether every copy that was there has its delta."""
        check_options(self.options)
        self.spool.prepare()
        process = TrainingProcess(self.data, self.options, self.checks, self.observer, self.seconds)
        private_folder(self.work)
        try:
            with private_umask(), alone_in(self.work, "watch", "--work"):
                while True:
                    try:
                        arrived = list(self.spool.copies())
                    except MpuError as error:  # what is in the spool is the other party's, and must not end this
                        if once:
                            raise
                        self.observer.warn(str(error))
                        time.sleep(poll)
                        continue
                    self._clear(arrived)
                    for copy in sorted(self._unmarked):
                        self._mark_failed(copy)
                    waiting = [
                        copy for copy in arrived if self.spool.state(copy) == "waiting" and copy not in self._unmarked
                    ]
                    for copy in waiting:
                        self._answer(copy, process)
                    if once:
                        return all(self.spool.state(copy) == "done" for copy in self.spool.copies())
                    if not waiting:
                        time.sleep(poll)
        finally:
            process.stop()

    def _answer(self, copy: str, process: TrainingProcess) -> None:
        """Unlearn on a copy; a failure is reported here; the other party learns only that it happened."""
        delta = self._delta(copy)
        arrived = self.work / "arrived" / copy
        try:
            if not delta.exists() and any(answer.state == ANSWERED for answer in self._answers(copy)):
                raise MpuError(f"{copy}: was answered before, and its round is over")
            shutil.rmtree(self.work / "arrived", ignore_errors=True)  # of a copy during which this was stopped
            self.spool.take(copy, arrived)
            if not delta.exists():
                self._begin(copy, digest_of_folder(arrived))
            report = process.answer(CopyTask(copy, arrived, delta, self.work / "references"))
            self._note(copy, ANSWERED)
            out = self.spool.hand_over(copy, delta)
            self.on_delta(copy, out, report)
        except (MpuError, OSError, ValueError) as error:
            problem = error.problem if isinstance(error, MpuError) else str(error)
            hint = error.hint if isinstance(error, MpuError) else None
            self.observer.warn(f"{copy}: {problem.removeprefix(f'{copy}: ')}" + (f"; {hint}" if hint else ""))
            self._mark_failed(copy)
            if self._last(copy) == BEGUN:
                self._note(copy, FAILED)
        finally:
            shutil.rmtree(self.work / "arrived", ignore_errors=True)

    def _mark_failed(self, copy: str) -> None:
        """Leave the mark of a failure. What lies in its way is the other party's: it stops neither this nor others."""
        try:
            self.spool.fail(copy)
            self._unmarked.discard(copy)
        except (MpuError, OSError) as error:
            if copy not in self._unmarked:
                self.observer.warn(f"{copy}: cannot be marked as failed ({first_line(error)})")
            self._unmarked.add(copy)

    def _begin(self, copy: str, digest: str) -> None:
        """Count a training before it begins, unless it was begun on the same files and stopped. Raises MpuError if
        ``most`` have begun."""
        answers = self._answers(copy)
        if answers and (answers[-1].state, answers[-1].digest) == (BEGUN, digest):
            return
        begun = sum(answer.state == BEGUN for answer in self._answers())
        if self.most is not None and begun >= self.most:
            raise MpuError(f"{copy}: {begun} trainings were begun, and --max-deltas allows no more")
        append_line(self._ledger, {"copy": copy, "state": BEGUN, "digest": digest})

    @property
    def _ledger(self) -> Path:
        return self.work / "answered.jsonl"

    def _note(self, copy: str, state: str) -> None:
        if self._last(copy) != state:
            append_line(self._ledger, {"copy": copy, "state": state})

    def _last(self, copy: str) -> str:
        """The last state of a copy, "" if nothing was done about it."""
        answers = self._answers(copy)
        return answers[-1].state if answers else ""

    def _answers(self, copy: str | None = None) -> list[AnsweredCopy]:
        """The answers to all copies so far, or to one, in order."""
        return [answer for answer in read_answers(self._ledger) if copy in (None, answer.copy)]

    def _delta(self, copy: str) -> Path:
        return self.work / "deltas" / (copy + DELTA)

    def _clear(self, arrived_copies: list[str]) -> None:
        """Remove kept deltas of copies that the other party no longer has here."""
        for copy in {answer.copy for answer in self._answers()} - set(arrived_copies):
            delta = self._delta(copy)
            if delta.is_dir():
                shutil.rmtree(delta)
            else:
                delta.unlink(missing_ok=True)
