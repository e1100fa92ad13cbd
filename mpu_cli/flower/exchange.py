"""The server's end of the wire: requests to several nodes at once, sent again until they are answered.

Flower delivers a message once: a node that is killed, or stopped and started, loses what it had received. Every request
can therefore be repeated, and is, when an error comes back or nothing for a while.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from mpu_cli.errors import MpuError
from mpu_cli.files.manifest import MANIFEST_NAME
from mpu_cli.files.reader import INDEX_NAME
from mpu_cli.flower.spool import SHARD

# What the two Flower apps say to each other: requests and replies with plain values, and pieces of files.

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
            time.sleep(POLL_SECONDS)
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
            each.due = time.monotonic() + RETRY_SECONDS
            return
        content = message_content(
            {"kind": each.request.kind, "copy": each.request.copy, **each.request.values}, each.request.data
        )
        [message] = self.grid.push_messages([Message(content, dst_node_id=node, message_type="query")])
        if message is None:
            each.due = time.monotonic() + RETRY_SECONDS
            return
        each.messages.append(message)
        each.asked_at, each.pending = time.monotonic(), True
        each.sent += 1

    def _repeat(self, each: _Running, why: str) -> None:
        self.say(f"{each.owner}: {each.request.kind} of {each.request.copy} is sent again ({why})")
        each.pending, each.due = False, time.monotonic() + RETRY_SECONDS


# The configuration of a run over Flower, as ``flwr run --run-config`` gives it.

OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Settings:
    """The run's configuration (``flwr run --run-config``).

    ``base``: the model; ``state``: the folder for everything that is kept; ``publish`` and ``aggregate``: more
    arguments of those commands; ``poll``: seconds between questions, ``patience`` until one is sent again, ``limit``
    until an owner is given up; ``leave_out``: then go on without that owner, as long as ``quorum`` are left.
    """

    base: str
    state: Path
    owners: tuple[str, ...]
    rounds: int
    publish: list[str]
    aggregate: list[str]
    poll: float
    patience: float
    limit: float
    leave_out: bool
    quorum: int


def settings_of(config: dict[str, str | int | float | bool]) -> Settings:
    """Raises MpuError for what is missing."""
    owners = tuple(name.strip() for name in str(config["owners"]).split(",") if name.strip())
    if len(owners) > 1 and any(option.split("=")[0] == "--seed" for option in shlex.split(str(config["publish"]))):
        raise MpuError("publish: --seed would give all owners the same noise", "leave it out")
    for name in ("base", "state", "owners"):
        if not config[name]:
            raise MpuError(f"{name}: not set", f"give it with --run-config '{name}=\"…\"'")
    if len(set(owners)) < len(owners) or not all(OWNER.fullmatch(owner) and owner != "model" for owner in owners):
        raise MpuError(f"owners: {config['owners']!r} are not different names", "use the names of supernode register")
    if config["on_missing"] not in ("end", "leave-out"):
        raise MpuError(f"on_missing: {config['on_missing']!r} is neither 'end' nor 'leave-out'")
    return Settings(
        base=str(config["base"]), state=Path(str(config["state"])).resolve(), owners=owners,
        rounds=int(config["rounds"]), publish=shlex.split(str(config["publish"])),
        aggregate=shlex.split(str(config["aggregate"])), poll=float(config["poll"]),
        patience=float(config["patience"]), limit=float(config["limit"]),
        leave_out=config["on_missing"] == "leave-out", quorum=max(1, int(config["quorum"])),
    )  # fmt: skip


# Which files, and which pieces of them, go over the network next.

PIECE = 32 << 20  # bytes of files in a message
MAX_FILES = 1_000  # of a delta: shards of 5 GB


def odd_files(sizes: dict[str, int], name: str) -> str:
    """What is odd about the declared files of a delta that is called ``name``; nothing if they can be one."""
    if len(sizes) > MAX_FILES:
        return f"sent {len(sizes):,} files"
    inside = [file.removeprefix(f"{name}/") for file in sizes if file.startswith(f"{name}/")]
    if not sizes or (name in sizes and inside):
        return "sent a file and a folder of one name" if sizes else "sent no delta"
    other = [file for file in sizes if file != name and not file.startswith(f"{name}/")]
    other += [file for file in inside if file not in (INDEX_NAME, MANIFEST_NAME) and not SHARD.fullmatch(file)]
    if other:
        return f"sent a file of another name, {printable_excerpt(other[0])}"
    empty = [file for file, size in sizes.items() if size < 1]
    return f"sent an empty file, {printable_excerpt(empty[0])}" if empty else ""


def next_pieces_to_fetch(sizes: dict[str, int], received_sizes: dict[str, int]) -> dict[str, int]:
    """How many bytes to ask for next of which files: PIECE at most, small files together."""
    counts: dict[str, int] = {}
    for file, size in sizes.items():
        if count := min(size - received_sizes[file], PIECE - sum(counts.values())):
            counts[file] = count
    return counts


def missing_files(files: dict[str, Path], received_sizes: dict[str, int]) -> dict[Path, int]:
    """The files that are not whole yet, and where they go on."""
    return {
        path: received_sizes.get(name, 0)
        for name, path in files.items()
        if name not in received_sizes or received_sizes[name] < path.stat().st_size
    }


def next_pieces_to_send(missing: dict[Path, int]) -> tuple[list[str], list[int], tuple[bytes, ...]]:
    """Pieces of the first of ``missing`` files, PIECE bytes at most: small files go together."""
    names, offsets, data, room = [], [], [], PIECE
    for path, offset in missing.items():
        with path.open("rb") as file:
            file.seek(offset)
            piece = file.read(room)
        names.append(path.name)
        offsets.append(offset)
        data.append(piece)
        room -= len(piece)
        if room <= 0:
            break
    return names, offsets, tuple(data)
