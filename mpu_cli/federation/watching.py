"""The data owner's worker: unlearns on each copy that arrives in a spool, and leaves the delta there.

What deltas tell of the records grows with every training, and under DP-SGD every training draws new noise. So each
copy is trained on once: a delta that is asked for again is handed over again, as it was.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mpu_cli.boundary.documents import Document, Text, parse_document
from mpu_cli.boundary.files import private_folder, private_umask
from mpu_cli.client.checks import check_options
from mpu_cli.client.dataset import Dataset
from mpu_cli.client.outcome import UnlearningResult
from mpu_cli.errors import MpuError, first_line
from mpu_cli.federation.answering import Answering, CopyTask
from mpu_cli.federation.spool import COPY, DELTA, Spool, digest_of_folder, is_name
from mpu_cli.observer import Observer
from mpu_cli.options.unlearning import Checks, Unlearning
from mpu_cli.resumption import alone_in, append_line, read_lines

DAY = 86_400.0  # seconds
# what becomes of a copy, in the worker's own file
BEGUN: Literal["begun"] = "begun"
ANSWERED: Literal["answered"] = "answered"
FAILED: Literal["failed"] = "failed"


class AnsweredCopy(Document):
    """A line of the worker's own file: what became of a copy. ``state`` is empty in lines of mpu before 0.2, which
    noted only deltas that left."""

    copy: Text
    state: Literal["begun", "answered", "failed", ""] = ""
    digest: Text = ""


def read_answers(path: Path) -> list[AnsweredCopy]:
    """What was done about copies so far, in order. Raises MpuError if the file is damaged."""
    hint = "choose another --work"
    answers: list[AnsweredCopy] = []
    for line in read_lines(path, hint):
        answer = parse_document(AnsweredCopy, line, f"{path}: damaged", hint)
        if is_name(answer.copy, COPY):
            states = [answer] if answer.state else [AnsweredCopy(copy=answer.copy, state=s) for s in (BEGUN, ANSWERED)]
            answers += states
    return answers


@dataclass(frozen=True)
class Watching:
    """What is unlearned, and where: ``work`` is private, only finished deltas go to the spool.

    ``seconds`` is how long a copy may take; ``most``, how many trainings may begin in all: one that fails tells the
    other party something, too.
    """

    spool: Spool
    work: Path
    data: Dataset
    options: Unlearning
    observer: Observer
    on_delta: Callable[[str, Path, UnlearningResult | None], None]
    most: int | None = None
    seconds: float = DAY
    checks: Checks = field(default_factory=Checks)
    # Copies that failed and could not be marked so: without this they would be trained on again at every look.
    _unmarked: set[str] = field(default_factory=set)

    def watch(self, poll: float, once: bool) -> bool:
        """Work on what arrives, for ever or ``once``. Returns whether every copy that was there has its delta.

        Raises MpuError if another process works in the same folder, UsageError for options that do not go together.
        """
        check_options(self.options)
        self.spool.prepare()
        answering = Answering(self.data, self.options, self.checks, self.observer, self.seconds)
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
                        self._answer(copy, answering)
                    if once:
                        return all(self.spool.state(copy) == "done" for copy in self.spool.copies())
                    if not waiting:
                        time.sleep(poll)
        finally:
            answering.stop()

    def _answer(self, copy: str, answering: Answering) -> None:
        """Unlearn on a copy; a failure is told here, and to the other party only that it happened."""
        delta = self._delta(copy)
        arrived = self.work / "arrived" / copy
        try:
            self._check_allowed(copy)
            shutil.rmtree(self.work / "arrived", ignore_errors=True)  # of a copy during which this was stopped
            self.spool.take(copy, arrived)
            if not delta.exists():
                self._begin(copy, digest_of_folder(arrived))
            answered = answering.answer(CopyTask(copy, arrived, delta, self.work / "references"))
            self._note(copy, ANSWERED)
            out = self.spool.hand_over(copy, delta)
            self.on_delta(copy, out, answered.result)
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

    def _check_allowed(self, copy: str) -> None:
        """Raises MpuError if the copy's round is over."""
        if self._delta(copy).exists():
            return  # it may leave again
        if ANSWERED in (answer.state for answer in self._answers(copy)):
            raise MpuError(f"{copy}: was answered before, and its round is over")

    def _begin(self, copy: str, digest: str) -> None:
        """Count a training before it begins, unless it was begun on the same files and stopped. Raises MpuError if
        there were as many as may be."""
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
        """What was done about each copy so far, or about one, in order."""
        return [answer for answer in read_answers(self._ledger) if copy in (None, answer.copy)]

    def _delta(self, copy: str) -> Path:
        return self.work / "deltas" / (copy + DELTA)

    def _clear(self, arrived_copies: list[str]) -> None:
        """Remove kept deltas of copies that the other party no longer has here."""
        for copy in {answer.copy for answer in self._answers()} - set(arrived_copies):
            delta = self._delta(copy)
            shutil.rmtree(delta) if delta.is_dir() else delta.unlink(missing_ok=True)
