"""The server's end of the wire: requests to several nodes at once, sent again until they are answered.

Flower delivers a message once: a node that is killed, or stopped and started, loses what it had received. Every request
can therefore be repeated, and is, when an error comes back or nothing for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from mpu_cli.errors import MpuError
from mpu_cli.federation.messages import Value, about, message_content, pieces

LOOK = 0.3  # seconds between looks for replies
CARRYING = 2  # messages with pieces under way at once: the SuperLink holds them in memory
PAUSE = 5.0  # seconds before a request that failed is sent again
RAISED, ENOUGH = 2, 5  # Flower's code for an exception in the ClientApp, and after how many of them to stop


def printable_excerpt(text: object) -> str:
    """What another party sent, as text for a log: one line, without control characters, cut."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text)[:300])


@dataclass(frozen=True)
class Request:
    """One request about ``copy``, RUN/round_R/copy_K: what is asked (``kind``), with named ``values`` and pieces of
    files."""

    kind: str
    copy: str
    values: Mapping[str, Value] = field(default_factory=dict)
    data: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What a Flower app answered: named ``values``, and pieces of files, at most as many as were asked for."""

    values: Mapping[str, Value]
    data: list[bytes]


def word(reply: Reply, name: str, allowed: Sequence[str]) -> str:
    """One of the ``allowed`` words. Raises MpuError for anything else."""
    value = reply.values.get(name)
    if value not in allowed:
        raise MpuError(
            f"a Flower app answered {printable_excerpt(value)!r} where one of {', '.join(allowed)} was expected"
        )
    return str(value)


def table(reply: Reply, name: str, kind: type) -> dict[str, Any]:
    """The lists ``names`` and ``name`` of a reply as one table. Raises MpuError unless they belong together."""
    names, values = reply.values.get("names"), reply.values.get(name)
    # An empty list has no type in Flower, and may come back as nothing.
    names, values = list(names or ()), list(values or ())
    fits = all(isinstance(each, str) for each in names) and all(type(each) is kind for each in values)
    if len(names) != len(values) or not fits:
        raise MpuError(f"a Flower app answered with {name} that do not belong to names")
    return dict(zip(names, values, strict=True))


Job = Generator[Request, Reply, Any]
Failures = list[tuple[str, MpuError]]  # each owner's, as they come


@dataclass
class _Running:
    """A job, the node it talks to, and its request on the way."""

    job: Job
    owner: str
    request: Request
    due: float
    asked_at: float = 0.0
    begun_at: float = field(default_factory=time.monotonic)
    sent: int = 0  # how often
    messages: list[str] = field(default_factory=list)  # as it was sent, and sent again: any of them may be answered
    pending: bool = False  # whether an answer to the last of them is waited for
    raised: int = 0  # how often the Flower app raised an exception on this request

    @property
    def carries(self) -> bool:
        """Whether its request, or the reply to it, has pieces of files."""
        return bool(self.request.data) or self.request.kind == "get"


@dataclass(frozen=True)
class Exchange:
    """Talks to ``owners``, by the names that their nodes are registered with.

    A request is sent again after ``patience`` seconds without a reply, then after twice as many, and so on: a piece
    that takes long is not sent for ever. After ``limit`` seconds from when it was first sent, the owner is given up.
    One owner's failure does not end what is under way with the others.
    """

    grid: Grid
    patience: float
    limit: float
    say: Callable[[str], None]
    _late: set[str] = field(default_factory=set)  # messages whose replies are pulled, so that they are not kept

    def node_of(self, owner: str) -> int | None:
        """The id of an owner's node, if it is online."""
        online = set(self.grid.get_node_ids())
        return next((n.node_id for n in self.grid.get_nodes() if n.name == owner and n.node_id in online), None)

    def run(self, jobs: Iterable[tuple[str, Job]]) -> dict[str, MpuError]:
        """Play all jobs, each with its owner, at the same time, to their ends; the first failure of each owner that
        has one."""
        running: dict[int, _Running] = {}
        failures: Failures = []
        for number, (owner, job) in enumerate(jobs):
            self._advance(number, job, owner, None, running, failures)
        while running:
            now = time.monotonic()
            for each in running.values():
                carrying = sum(other.carries and other.pending for other in running.values())
                if not each.pending and now >= each.due and not (each.carries and carrying >= CARRYING):
                    self._send(each)
            waiting = {sent: number for number, each in running.items() for sent in each.messages}
            for message in self.grid.pull_messages([*waiting, *self._late]) if waiting else ():
                sent = message.metadata.reply_to_message_id
                number = waiting.get(sent, -1)
                if number not in running or sent not in running[number].messages:
                    self._late.discard(sent)  # to a request that was answered meanwhile
                    continue
                each = running[number]
                each.messages.remove(sent)
                if message.has_error():
                    why = f"error {message.error.code}: {printable_excerpt(message.error.reason)}"
                    each.raised += message.error.code == RAISED
                    if each.raised == ENOUGH:
                        self._give_up(number, f"its Flower app cannot answer ({why})", running, failures)
                    else:
                        self._repeat(each, why)
                    continue
                try:
                    reply = Reply(about(message.content), pieces(message.content))
                except (KeyError, ValueError, TypeError, AttributeError) as error:
                    self._give_up(number, f"its reply cannot be read ({printable_excerpt(error)})", running, failures)
                    continue
                self._late.update(each.messages)
                self._advance(number, each.job, each.owner, reply, running, failures)
            for number, each in list(running.items()):
                patience = self.patience * 2 ** max(0, each.sent - 1)
                if each.pending and time.monotonic() - each.asked_at > patience:
                    self._repeat(each, f"no reply for {patience:g} s")
                if time.monotonic() - each.begun_at > self.limit:
                    self._late.update(each.messages)
                    self._give_up(number, f"no reply for {self.limit:g} s", running, failures)
            time.sleep(LOOK)
        return dict(reversed(failures))

    def _advance(
        self, number: int, job: Job, owner: str, reply: Reply | None, running: dict[int, _Running], failures: Failures
    ) -> None:
        """Give a job its reply and note its next request, or why it failed."""
        try:
            request = next(job) if reply is None else job.send(reply)
        except StopIteration:
            running.pop(number, None)
            return
        except MpuError as error:
            running.pop(number, None)
            failures.append((owner, error))
            self.say(f"{owner}: {printable_excerpt(error.problem)}")
            return
        except (KeyError, ValueError, TypeError, IndexError, AttributeError, OSError) as error:
            # What a Flower app answers is whatever its owner, or somebody who broke in there, wants.
            why = f"its reply cannot be used ({type(error).__name__}: {printable_excerpt(error)})"
            self._give_up(number, why, running, failures, owner)
            return
        running[number] = _Running(job, owner, request, time.monotonic())

    def _give_up(
        self, number: int, why: str, running: dict[int, _Running], failures: Failures, owner: str = ""
    ) -> None:
        each = running.pop(number, None)
        owner = each.owner if each else owner
        failures.append((owner, MpuError(f"{owner}: {why}", "see its SuperNode's output, and run again")))
        self.say(f"{owner}: {why}")

    def _send(self, each: _Running) -> None:
        node = self.node_of(each.owner)
        if node is None:
            each.due = time.monotonic() + PAUSE
            return
        content = message_content(
            {"kind": each.request.kind, "copy": each.request.copy, **each.request.values}, each.request.data
        )
        [message] = self.grid.push_messages([Message(content, dst_node_id=node, message_type="query")])
        if message is None:
            each.due = time.monotonic() + PAUSE
            return
        each.messages.append(message)
        each.asked_at, each.pending = time.monotonic(), True
        each.sent += 1

    def _repeat(self, each: _Running, why: str) -> None:
        self.say(f"{each.owner}: {each.request.kind} of {each.request.copy} is sent again ({why})")
        each.pending, each.due = False, time.monotonic() + PAUSE
