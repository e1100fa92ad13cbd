"""The server's end of the wire: requests to several nodes at once, sent again until they are answered.

Flower delivers a message once: a node that is killed, or stopped and started, loses what it had received. Every request
can therefore be repeated, and is, when an error comes back or nothing for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from mpu_cli.errors import MpuError
from mpu_cli.federation.messages import Value, about, packed, pieces

LOOK = 0.3  # seconds between looks for replies
CARRYING = 2  # messages with pieces under way at once: the SuperLink holds them in memory
PAUSE = 5.0  # seconds before a request that failed is sent again
RAISED, ENOUGH = 2, 5  # Flower's code for an exception in the ClientApp, and after how many of them to stop

Result = TypeVar("Result")


@dataclass(frozen=True)
class Request:
    """One request about a copy; ``after`` is how many seconds to wait before it is sent."""

    kind: str
    copy: str
    values: Mapping[str, Value] = field(default_factory=dict)
    data: tuple[bytes, ...] = ()
    after: float = 0.0


@dataclass(frozen=True)
class Reply:
    values: Mapping[str, Value]
    data: list[bytes]


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
    is given up with an MpuError.
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
        """Play all jobs, each with its owner, at the same time; their results in order."""
        results: dict[int, Result] = {}
        running: dict[int, _Running] = {}
        for number, (owner, job) in enumerate(jobs):
            self._advance(number, job, owner, None, running, results)
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
                    why = f"error {message.error.code}: {message.error.reason}"
                    each.raised += message.error.code == RAISED
                    if each.raised == ENOUGH:
                        raise MpuError(f"{each.owner}: its courier cannot answer ({why})", "see its SuperNode's output")
                    self._repeat(each, why)
                    continue
                reply = Reply(about(message.content), pieces(message.content))
                self._advance(number, each.job, each.owner, reply, running, results)
            for each in running.values():
                if each.message is not None and time.monotonic() - each.asked_at > self.patience:
                    self._repeat(each, f"no reply for {self.patience:g} s")
                if time.monotonic() - each.answered_at > self.limit + each.request.after:
                    raise MpuError(f"{each.owner}: no reply for {self.limit:g} s", "start its SuperNode and run again")
            time.sleep(LOOK)
        return [results[number] for number in sorted(results)]

    @staticmethod
    def _advance(
        number: int, job: Job, owner: str, reply: Reply | None, running: dict[int, _Running], results: dict
    ) -> None:
        """Give a job its reply and note its next request, or its result."""
        try:
            request = next(job) if reply is None else job.send(reply)
        except StopIteration as end:
            running.pop(number, None)
            results[number] = end.value
            return
        running[number] = _Running(job, owner, request, time.monotonic() + request.after)

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
