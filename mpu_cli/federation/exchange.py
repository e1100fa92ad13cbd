"""The server's end of the wire: requests to several nodes at once, sent again until they are answered.

Flower delivers a message once: a node that is killed, or stopped and started, loses what it had received. Every request
can therefore be repeated, and is, when an error comes back or nothing for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from mpu_cli.errors import MpuError
from mpu_cli.federation.messages import Value, about, packed, pieces

LOOK = 0.3  # seconds between looks for replies
CARRYING = 2  # messages with pieces under way at once: the SuperLink holds them in memory
PAUSE = 5.0  # seconds before a request that failed is sent again
RAISED, ENOUGH = 2, 5  # Flower's code for an exception in the ClientApp, and after how many of them to stop

Result = TypeVar("Result")


def shown(text: object) -> str:
    """What another party sent, as text for a log: one line, without control characters, cut."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text)[:300])


@dataclass(frozen=True)
class Request:
    """One request about ``copy``, RUN/round_R/copy_K: what is asked (``kind``), with named ``values`` and pieces of
    files; sent ``after`` so many seconds."""

    kind: str
    copy: str
    values: Mapping[str, Value] = field(default_factory=dict)
    data: tuple[bytes, ...] = ()
    after: float = 0.0


@dataclass(frozen=True)
class Reply:
    """What a courier answered: named ``values``, and pieces of files, at most as many as were asked for."""

    values: Mapping[str, Value]
    data: list[bytes]


def word(reply: Reply, name: str, allowed: Sequence[str]) -> str:
    """One of the ``allowed`` words. Raises MpuError for anything else."""
    value = reply.values.get(name)
    if value not in allowed:
        raise MpuError(f"a courier answered {shown(value)!r} where one of {', '.join(allowed)} was expected")
    return str(value)


def table(reply: Reply, name: str, kind: type) -> dict[str, Any]:
    """The lists ``names`` and ``name`` of a reply as one table. Raises MpuError unless they belong together."""
    names, values = reply.values.get("names"), reply.values.get(name)
    # An empty list has no type in Flower, and may come back as nothing.
    names, values = list(names or ()), list(values or ())
    fits = all(isinstance(each, str) for each in names) and all(type(each) is kind for each in values)
    if len(names) != len(values) or not fits:
        raise MpuError(f"a courier answered with {name} that do not belong to names")
    return dict(zip(names, values, strict=True))


Job = Generator[Request, Reply, Result]


@dataclass
class _Running:
    """A job, the node it talks to, and its request on the way."""

    job: Job
    owner: str
    request: Request
    due: float
    asked_at: float = 0.0
    answered_at: float = field(default_factory=time.monotonic)
    message: str | None = None
    raised: int = 0  # how often the courier raised an exception on this request

    @property
    def carries(self) -> bool:
        """Whether its request, or the reply to it, has pieces of files."""
        return bool(self.request.data) or self.request.kind == "get"


@dataclass(frozen=True)
class Exchange:
    """Talks to ``owners``, by the names that their nodes are registered with.

    A request is sent again after ``patience`` seconds without a reply; after ``limit`` seconds without any, the owner
    is given up. One owner's failure does not end what is under way with the others.
    """

    grid: Grid
    patience: float
    limit: float
    say: Callable[[str], None]

    def node_of(self, owner: str) -> int | None:
        """The id of an owner's node, if it is online."""
        online = set(self.grid.get_node_ids())
        return next((n.node_id for n in self.grid.get_nodes() if n.name == owner and n.node_id in online), None)

    def run(self, jobs: Iterable[tuple[str, Job[Result]]]) -> list[Result]:
        """Play all jobs, each with its owner, at the same time; their results in order.

        Raises MpuError for the first that failed, once all others have ended.
        """
        results: dict[int, Result] = {}
        running: dict[int, _Running] = {}
        failures: list[MpuError] = []
        for number, (owner, job) in enumerate(jobs):
            self._advance(number, job, owner, None, running, results, failures)
        while running:
            now = time.monotonic()
            for each in running.values():
                carrying = sum(other.carries and other.message is not None for other in running.values())
                if each.message is None and now >= each.due and not (each.carries and carrying >= CARRYING):
                    self._send(each)
            waiting = {each.message: number for number, each in running.items() if each.message is not None}
            for message in self.grid.pull_messages(list(waiting)) if waiting else ():
                number = waiting[message.metadata.reply_to_message_id]
                each = running[number]
                if message.has_error():
                    why = f"error {message.error.code}: {shown(message.error.reason)}"
                    each.raised += message.error.code == RAISED
                    if each.raised == ENOUGH:
                        self._give_up(number, f"its courier cannot answer ({why})", running, failures)
                    else:
                        self._repeat(each, why)
                    continue
                try:
                    reply = Reply(about(message.content), pieces(message.content))
                except (KeyError, ValueError, TypeError, AttributeError) as error:
                    self._give_up(number, f"its reply cannot be read ({shown(error)})", running, failures)
                    continue
                self._advance(number, each.job, each.owner, reply, running, results, failures)
            for number, each in list(running.items()):
                if each.message is not None and time.monotonic() - each.asked_at > self.patience:
                    self._repeat(each, f"no reply for {self.patience:g} s")
                if time.monotonic() - each.answered_at > self.limit + each.request.after:
                    self._give_up(number, f"no reply for {self.limit:g} s", running, failures)
            time.sleep(LOOK)
        if failures:
            raise failures[0]
        return [results[number] for number in sorted(results)]

    def _advance(
        self, number: int, job: Job, owner: str, reply: Reply | None, running: dict[int, _Running],
        results: dict[int, Result], failures: list[MpuError],
    ) -> None:  # fmt: skip
        """Give a job its reply and note its next request, its result, or why it failed."""
        try:
            request = next(job) if reply is None else job.send(reply)
        except StopIteration as end:
            running.pop(number, None)
            results[number] = end.value
            return
        except MpuError as error:
            running.pop(number, None)
            failures.append(error)
            self.say(f"{owner}: {shown(error.problem)}")
            return
        except (KeyError, ValueError, TypeError, IndexError, AttributeError, OSError) as error:
            # What a courier answers is whatever its owner, or somebody who broke in there, wants.
            why = f"its reply cannot be used ({type(error).__name__}: {shown(error)})"
            self._give_up(number, why, running, failures, owner)
            return
        running[number] = _Running(job, owner, request, time.monotonic() + request.after)

    def _give_up(
        self, number: int, why: str, running: dict[int, _Running], failures: list[MpuError], owner: str = ""
    ) -> None:
        each = running.pop(number, None)
        owner = each.owner if each else owner
        failures.append(MpuError(f"{owner}: {why}", "see its SuperNode's output, and run again"))
        self.say(f"{owner}: {why}")

    def _send(self, each: _Running) -> None:
        node = self.node_of(each.owner)
        if node is None:
            each.due = time.monotonic() + PAUSE
            return
        content = packed(
            {"kind": each.request.kind, "copy": each.request.copy, **each.request.values}, each.request.data
        )
        [message] = self.grid.push_messages([Message(content, dst_node_id=node, message_type="query")])
        each.message, each.asked_at = message, time.monotonic()
        if message is None:
            each.due = time.monotonic() + PAUSE

    def _repeat(self, each: _Running, why: str) -> None:
        self.say(f"{each.owner}: {each.request.kind} of {each.request.copy} is sent again ({why})")
        each.message, each.due = None, time.monotonic() + PAUSE
