"""The server's end of the wire: requests to several nodes at once, sent again until they are answered.

Flower delivers a message once: a node that is killed, or stopped and started, loses what it had received. Every request
can therefore be repeated, and is, when an error comes back or nothing for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from mpu_cli.errors import MpuError

# The messages of the two Flower apps: requests and replies with plain values, and pieces of files.

Value = Any  # str, int, or a list of one of them
ABOUT, PIECES = "about", "pieces"


def message_content(about: Mapping[str, Value], pieces: Sequence[bytes] = ()) -> RecordDict:
    """A message's content. Pieces are arrays, which Flower streams; a value would be sent in one body."""
    content = RecordDict({ABOUT: ConfigRecord(dict(about))})
    if pieces:
        arrays = {str(i): Array("uint8", (len(piece),), "raw", piece) for i, piece in enumerate(pieces)}
        content[PIECES] = ArrayRecord(arrays)
    return content


def about(content: RecordDict) -> dict[str, Value]:
    return dict(content.config_records[ABOUT])


def pieces(content: RecordDict) -> list[bytes]:
    """The pieces, in their order; none if there are none."""
    record = content.array_records.get(PIECES)
    return [] if record is None else [record[str(i)].data for i in range(len(record))]


POLL_SECONDS = 0.3  # seconds between looks for replies
CARRYING = 2  # messages with pieces under way at once: the SuperLink holds them in memory
RETRY_SECONDS = 5.0  # seconds before a request that failed is sent again
RAISED, ENOUGH = 2, 5  # Flower's code for an exception in the ClientApp, and after how many of them to stop


def printable_excerpt(text: object) -> str:
    """Another party's text for a log: cut to one line without control characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text)[:300])


@dataclass(frozen=True)
class Request:
    """One request about ``copy``, RUN/round_R/copy_K: its ``kind``, with named ``values`` and pieces of files."""

    kind: str
    copy: str
    values: Mapping[str, Value] = field(default_factory=dict)
    data: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Reply:
    """A Flower app's answer: named ``values``, and pieces of files, at most as many as were requested."""

    values: Mapping[str, Value]
    data: list[bytes]


STATES = ("arriving", "waiting", "done", "failed")


def state_of(reply: Reply) -> str:
    """The state that a reply says a copy is in."""
    value = reply.values.get("state")
    if value not in STATES:
        raise MpuError(
            f"a Flower app answered {printable_excerpt(value)!r} where one of {', '.join(STATES)} was expected"
        )
    return str(value)


def table(reply: Reply, name: str, kind: type) -> dict[str, Any]:
    """The lists ``names`` and ``name`` of a reply as one table."""
    names, values = reply.values.get("names"), reply.values.get(name)
    # An empty list has no type in Flower, and may come back as nothing.
    names, values = list(names or ()), list(values or ())
    fits = all(isinstance(text, str) for text in names) and all(type(value) is kind for value in values)
    if len(names) != len(values) or not fits:
        raise MpuError(f"a Flower app answered with {name} that do not belong to names")
    return dict(zip(names, values, strict=True))


Job = Generator[Request, Reply, Any]


@dataclass
class ActiveJob:
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
    _running: dict[int, ActiveJob] = field(default_factory=dict)  # by number of the job
    _failures: list[tuple[str, MpuError]] = field(default_factory=list)  # each owner's, as they come

    def run(self, jobs: Iterable[tuple[str, Job]]) -> dict[str, MpuError]:
        """Play all jobs, each with its owner, at the same time, to their ends; the first failure of each owner that
        has one."""
        running = self._running
        running.clear()
        self._failures.clear()
        for number, (owner, job) in enumerate(jobs):
            self._advance(number, job, owner, None)
        while running:
            now = time.monotonic()
            for active in running.values():
                carrying = sum(other.carries and other.pending for other in running.values())
                if not active.pending and now >= active.due and not (active.carries and carrying >= CARRYING):
                    self._send(active)
            waiting = {sent: number for number, active in running.items() for sent in active.messages}
            for message in self.grid.pull_messages([*waiting, *self._late]) if waiting else ():
                sent = message.metadata.reply_to_message_id
                number = waiting.get(sent, -1)
                if number not in running or sent not in running[number].messages:
                    self._late.discard(sent)  # to a request that was answered meanwhile
                    continue
                active = running[number]
                active.messages.remove(sent)
                if message.has_error():
                    why = f"error {message.error.code}: {printable_excerpt(message.error.reason)}"
                    active.raised += message.error.code == RAISED
                    if active.raised == ENOUGH:
                        self._give_up(number, active.owner, f"its Flower app cannot answer ({why})")
                    else:
                        self._repeat(active, why)
                    continue
                try:
                    reply = Reply(about(message.content), pieces(message.content))
                except (KeyError, ValueError, TypeError, AttributeError) as error:
                    self._give_up(number, active.owner, f"its reply cannot be read ({printable_excerpt(error)})")
                    continue
                self._late.update(active.messages)
                self._advance(number, active.job, active.owner, reply)
            for number, active in list(running.items()):
                patience = self.patience * 2 ** max(0, active.sent - 1)
                if active.pending and time.monotonic() - active.asked_at > patience:
                    self._repeat(active, f"no reply for {patience:g} s")
                if time.monotonic() - active.begun_at > self.limit:
                    self._late.update(active.messages)
                    self._give_up(number, active.owner, f"no reply for {self.limit:g} s")
            time.sleep(POLL_SECONDS)
        # Of equal keys, a dict keeps the last: here each owner's first failure.
        return dict(reversed(self._failures))

    def _advance(self, number: int, job: Job, owner: str, reply: Reply | None) -> None:
        """Give a job its reply and note its next request, or why it failed."""
        try:
            request = next(job) if reply is None else job.send(reply)
        except StopIteration:
            self._running.pop(number, None)
        except MpuError as error:
            self._give_up(number, owner, printable_excerpt(error.problem), error)
        except (KeyError, ValueError, TypeError, IndexError, AttributeError, OSError) as error:
            # A Flower app answers whatever its owner, or somebody who broke in there, wants.
            why = f"its reply cannot be used ({type(error).__name__}: {printable_excerpt(error)})"
            self._give_up(number, owner, why)
        else:
            self._running[number] = ActiveJob(job, owner, request, time.monotonic())

    def _give_up(self, number: int, owner: str, why: str, error: MpuError | None = None) -> None:
        """End a job: say ``why``, and keep ``error``, by default one made of that."""
        self._running.pop(number, None)
        error = error or MpuError(f"{owner}: {why}", "see its SuperNode's output, and run again")
        self._failures.append((owner, error))
        self.say(f"{owner}: {why}")

    def _send(self, active: ActiveJob) -> None:
        online = set(self.grid.get_node_ids())
        nodes = (n.node_id for n in self.grid.get_nodes() if n.name == active.owner and n.node_id in online)
        node = next(nodes, None)
        if node is None:
            active.due = time.monotonic() + RETRY_SECONDS
            return
        content = message_content(
            {"kind": active.request.kind, "copy": active.request.copy, **active.request.values}, active.request.data
        )
        [message] = self.grid.push_messages([Message(content, dst_node_id=node, message_type="query")])
        if message is None:
            active.due = time.monotonic() + RETRY_SECONDS
            return
        active.messages.append(message)
        active.asked_at, active.pending = time.monotonic(), True
        active.sent += 1

    def _repeat(self, active: ActiveJob, why: str) -> None:
        self.say(f"{active.owner}: {active.request.kind} of {active.request.copy} is sent again ({why})")
        active.pending, active.due = False, time.monotonic() + RETRY_SECONDS
