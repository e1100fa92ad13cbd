"""The model owner's Flower app: a Flower ServerApp that publishes, sends, collects and aggregates, round by round.

Everything that it has done is on disk, so that an interrupted run resumes where it left off:

    STATE/identity.txt                          opens the keys
    STATE/round_R/OWNER/copies/copy_K, keys.bin, deltas/copy_K.safetensors (checked), rejected/
    STATE/round_R/model                         what the round made; the next one starts from it
    STATE/round_R/left_out.json                 owners without whose deltas it was made, and why
    STATE/round_R/warnings.txt                  what aggregation warned of

The work is done by ``mpu publish`` and ``mpu aggregate``, each in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import private_folder
from mpu_cli.files.manifest import MANIFEST_NAME, delta_manifest
from mpu_cli.files.reader import INDEX_NAME, open_checkpoint
from mpu_cli.files.resumption import alone_in, write_atomically
from mpu_cli.flower.exchange import Exchange, Job, Reply, Request, printable_excerpt, state_of, table
from mpu_cli.flower.spool import COPY, DELTA, SHARD, copy_name, digest_of, files_of, validate_name
from mpu_cli.protocol.combine import CARD
from mpu_cli.subprocesses import run_mpu
from mpu_cli.wording import counted

# The configuration of a run over Flower, as ``flwr run --run-config`` gives it.

OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Settings:
    """The run's configuration (``flwr run --run-config``)."""

    base: str  # the model
    state: Path  # the folder for everything that is kept
    owners: tuple[str, ...]
    rounds: int
    publish: list[str]  # more arguments of `mpu publish`
    aggregate: list[str]  # more arguments of `mpu aggregate`
    poll: float  # seconds between questions
    patience: float  # seconds until a question is sent again
    limit: float  # seconds until an owner is given up
    leave_out: bool  # whether to continue without an owner that was given up, as long as ``quorum`` are left
    quorum: int


def settings_of(config: dict[str, str | int | float | bool]) -> Settings:
    """The settings in a run's configuration. Raises MpuError for those that are missing or invalid."""
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


# The pieces of files that go over the network next.

PIECE = 32 << 20  # bytes of files in a message
MAX_FILES = 1_000  # of a delta: shards of 5 GB


def odd_files(sizes: dict[str, int], name: str) -> str:
    """The problem with the declared files of a delta that is called ``name``; empty if they can be one."""
    if len(sizes) > MAX_FILES:
        return f"sent {len(sizes):,} files"
    inside = [file.removeprefix(f"{name}/") for file in sizes if file.startswith(f"{name}/")]
    if not sizes:
        return "sent no delta"
    if name in sizes and inside:
        return "sent a file and a folder of one name"
    other = [file for file in sizes if file != name and not file.startswith(f"{name}/")]
    other += [file for file in inside if file not in (INDEX_NAME, MANIFEST_NAME) and not SHARD.fullmatch(file)]
    if other:
        return f"sent a file of another name, {printable_excerpt(other[0])}"
    empty = [file for file, size in sizes.items() if size < 1]
    return f"sent an empty file, {printable_excerpt(empty[0])}" if empty else ""


def next_pieces_to_fetch(sizes: dict[str, int], received_sizes: dict[str, int]) -> dict[str, int]:
    """The number of bytes to request next of each file: PIECE at most, small files together."""
    counts: dict[str, int] = {}
    remaining_bytes = PIECE
    for file, size in sizes.items():
        count = min(size - received_sizes[file], remaining_bytes)
        if count:
            counts[file] = count
            remaining_bytes -= count
    return counts


def next_pieces_to_send(missing: dict[Path, int]) -> tuple[list[str], list[int], tuple[bytes, ...]]:
    """Pieces of the first of ``missing`` files, PIECE bytes at most: small files go together."""
    names, offsets, data, remaining_bytes = [], [], [], PIECE
    for path, offset in missing.items():
        with path.open("rb") as file:
            file.seek(offset)
            piece = file.read(remaining_bytes)
        names.append(path.name)
        offsets.append(offset)
        data.append(piece)
        remaining_bytes -= len(piece)
        if remaining_bytes <= 0:
            break
    return names, offsets, tuple(data)


# The rounds.

PARTS = 3  # of a delivery: sending a copy, unlearning on it, and fetching its delta
TRIES = 2  # a delta that fails its checks is requested again once, a copy that arrives damaged is sent again once
MAX_DELTA_RATIO = 4  # times a copy's size: a delta in float64 of a copy in bfloat16
HEADERS = 64 << 20  # bytes, beside the weights of a delta
LEFT_OUT = "left_out.json"

app = ServerApp()


def say(text: str) -> None:
    print(f"mpu: {text}", flush=True)


def mpu(*arguments: object) -> dict[str, Any]:
    """Run an ``mpu`` command with --json; its document. Raises MpuError with its own message if it fails."""
    ended = run_mpu([*(str(argument) for argument in arguments), "--json"])
    if ended.status:
        raise MpuError(f"mpu {arguments[0]}: {ended.reason}")
    return cast(dict[str, Any], json.loads(ended.stdout))


@dataclass(frozen=True)
class Round:
    """One round with all owners. ``base`` is what it starts from."""

    settings: Settings
    exchange: Exchange
    number: int
    base: Path | str

    @property
    def folder(self) -> Path:
        return self.settings.state / f"round_{self.number}"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def identity(self) -> Path:
        return self.settings.state / "identity.txt"

    def keys(self, owner: str) -> Path:
        return self.folder / owner / "keys.bin"

    def copies(self, owner: str) -> list[Path]:
        return sorted((self.folder / owner / "copies").glob("copy_*"), key=lambda path: int(path.name.split("_")[1]))

    def delta(self, owner: str, copy: Path) -> Path:
        return self.folder / owner / "deltas" / f"{copy.name}{DELTA}"

    def name(self, owner: str, copy: Path) -> str:
        """RUN/round_R/copy_K, as in the owner's spool."""
        run = (self.folder / owner / "run").read_text().strip()
        return validate_name(f"{run}/{self.folder.name}/{copy.name}", COPY)

    @property
    def left_out(self) -> dict[str, str]:
        """Owners without whose deltas the model was made, and why."""
        path = self.folder / LEFT_OUT
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def play(self) -> None:
        """Everything of the round that is not done yet."""
        if not self.identity.exists():
            mpu("keygen", "--out", self.identity)
        for owner in self.settings.owners:
            if not self.keys(owner).exists():
                self._publish(owner)
        failures = self._collect(self.settings.owners)
        participants = [owner for owner in self.settings.owners if owner not in failures]
        if failures and not (self.settings.leave_out and len(participants) >= self.settings.quorum):
            raise next(iter(failures.values()))
        self._aggregate(participants, {owner: error.problem for owner, error in failures.items()})

    def ask_again(self) -> None:
        """Ask the owners that were left out once more; if deltas of all copies of one come, the model is made anew."""
        missing = []  # those whose deltas are all here were refused
        for owner in self.left_out:
            if not all(self.delta(owner, copy).exists() for copy in self.copies(owner)):
                missing.append(owner)
        failures = self._collect(missing) if missing else {}
        if came := set(missing) - failures.keys():
            say(f"round {self.number}: deltas of {', '.join(sorted(came))} came after all")
            participants = [owner for owner in self.settings.owners if owner not in failures]
            self._aggregate(participants, {owner: error.problem for owner, error in failures.items()})

    def end(self) -> None:
        """Remove what the round no longer needs, here and at the owners; of those that were left out, nothing."""
        done = {owner: self.copies(owner) for owner in self.settings.owners if owner not in self.left_out}
        jobs = []
        for owner, copies in done.items():
            if copies:
                jobs.append((owner, self._forget([self.name(owner, copy) for copy in copies])))
        failures = self.exchange.run(jobs)
        for owner, error in failures.items():  # the model is made: housekeeping at one owner stops nobody's next round
            say(f"warning: {owner} keeps the copies of round {self.number}: {error.problem}")
        for copy in chain(*done.values()):
            shutil.rmtree(copy)

    def _collect(self, owners: Sequence[str]) -> dict[str, MpuError]:
        """Get the deltas of ``owners``; the failure of each that lacks some."""
        pairs = [(owner, copy) for owner in owners for copy in self.copies(owner)]
        failures = self.exchange.run((owner, self._deliver(owner, copy)) for owner, copy in pairs)
        if not failures:
            say(f"round {self.number}: all deltas are here")
        return failures

    def _aggregate(self, owners: Sequence[str], left_out: dict[str, str]) -> None:
        """Make the model from the deltas of ``owners``, in place of one from fewer.

        An owner whose deltas would be refused alone, too, is left out if the settings allow that.
        """
        fresh = self.folder / "model.partial"
        try:
            warnings = self._combine(owners, fresh)
        except MpuError:
            if not self.settings.leave_out or len(owners) == 1:
                raise
            refused = self._refused_alone(owners)
            owners = [owner for owner in owners if owner not in refused]
            if not refused or len(owners) < self.settings.quorum:
                raise
            left_out = left_out | refused
            warnings = self._combine(owners, fresh)
        warnings += [f"{owner} was left out: {why}" for owner, why in left_out.items()]
        for warning in warnings:
            say(f"warning: {warning}")
        (self.folder / "warnings.txt").write_text(
            "".join(f"{printable_excerpt(warning)}\n" for warning in warnings), encoding="utf-8"
        )
        if left_out:
            with (fresh / CARD).open("a", encoding="utf-8") as card:
                card.write(f"\nLeft out of round {self.number}: {', '.join(left_out)}.\n")
        shutil.rmtree(self.model, ignore_errors=True)
        write_atomically(self.folder / LEFT_OUT, json.dumps(left_out))
        fresh.rename(self.model)

    def _combine(self, owners: Sequence[str], out: Path) -> list[str]:
        """Aggregate the deltas of ``owners`` into ``out``; what `mpu aggregate` warned of."""
        deltas = [self.folder / owner / "deltas" for owner in owners]
        keys = [part for owner in owners for part in ("--keys", self.keys(owner))]
        shutil.rmtree(out, ignore_errors=True)
        options = (*keys, "--identity", self.identity, "--base", self.base, "--out", out, *self.settings.aggregate)
        return cast(list[str], mpu("aggregate", *deltas, *options)["warnings"])

    def _refused_alone(self, owners: Sequence[str]) -> dict[str, str]:
        """The owners whose deltas cannot be aggregated even without the others', and why."""
        refused = {}
        scratch = self.folder / "alone.partial"
        for owner in owners:
            try:
                self._combine([owner], scratch)
            except MpuError as error:
                refused[owner] = error.problem
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        return refused

    def _publish(self, owner: str) -> None:
        folder, run_file = self.folder / owner, self.settings.state / "round_1" / owner / "run"
        shutil.rmtree(folder, ignore_errors=True)  # of a publication that was interrupted
        folder.mkdir(parents=True)
        # A run of its own, also where BASE is a model of another: that one's copies were answered before.
        run = run_file.read_text().strip() if run_file.exists() else secrets.token_hex(16)
        mpu("publish", self.base, "--out", folder / "copies", "--keys", folder / "keys.partial", "--identity",
            self.identity, "--run", f"{run}:{self.number}", *self.settings.publish)  # fmt: skip
        facts = json.loads((self.copies(owner)[0] / "mpu.json").read_text(encoding="utf-8"))
        (folder / "run").write_text(facts["run"] + "\n")
        (folder / "keys.partial").rename(self.keys(owner))
        say(f"round {self.number}: {counted(len(self.copies(owner)), 'copy', 'copies')} for {owner}")

    def _deliver(self, owner: str, copy: Path) -> Job:
        """Send a copy, wait for its delta, fetch and check it."""
        name, target = self.name(owner, copy), self.delta(owner, copy)
        ends = time.monotonic() + PARTS * self.settings.limit
        for attempt in range(1, TRIES + 1):
            if target.exists():
                return
            reply = yield from self._await_unlearning(name, copy, ends)
            arrived = self.folder / owner / "arriving" / copy.name / target.name
            problem = "its owner could not unlearn on it"
            if state_of(reply) == "done":
                problem = yield from self._fetch(name, arrived, copy, reply, ends)
                problem = problem or self._complaint(owner, name, arrived)
            if not problem:
                target.parent.mkdir(exist_ok=True)
                arrived.rename(target)
                shutil.rmtree(arrived.parent)
                say(f"round {self.number}: {owner} returned {target.name}")
                return
            if arrived.parent.exists():
                rejected = self.folder / owner / "rejected" / copy.name
                shutil.rmtree(rejected, ignore_errors=True)
                rejected.parent.mkdir(exist_ok=True)
                arrived.parent.rename(rejected)
            if attempt == TRIES:
                raise MpuError(
                    f"{owner}, {copy.name} of round {self.number}: {problem}", "nothing of it was aggregated"
                )
            say(f"{owner}, {copy.name}: {problem}; it is asked for again")
            yield Request("again", name)

    def _await_unlearning(self, name: str, copy: Path, ends: float) -> Job:
        """Send what the owner does not hold of a copy, and wait until it is "done" or "failed"; the last reply."""
        reply = yield Request("state", name)
        if state_of(reply) == "arriving":
            reply = yield from self._send(name, copy, reply, ends)
        unlearned = min(ends, time.monotonic() + self.settings.limit)
        while state_of(reply) == "waiting":
            if time.monotonic() > unlearned:
                raise MpuError(f"{name}: not unlearned within {self.settings.limit:g} s", "raise limit, and run again")
            reply = yield Request("state", name, {"wait": self.settings.poll})
        return reply

    def _send(self, name: str, copy: Path, reply: Reply, ends: float) -> Job:
        """Send what the owner does not hold, until the digests agree; the reply to that."""
        files = {path.name: path for path in files_of(copy)}
        digests = {file: digest_of(path) for file, path in files.items()}
        total_bytes = sum(path.stat().st_size for path in files.values())
        futile, most, damaged = 0, -1, 0
        while state_of(reply) == "arriving":
            self._check_time(name, ends)
            sizes = table(reply, "sizes", int)
            missing: dict[Path, int] = {}  # the files that are not whole yet, and where they go on
            received_bytes = 0
            for file, path in files.items():
                if sizes.get(file, -1) < path.stat().st_size:  # -1: an empty file has to be sent, too
                    missing[path] = sizes.get(file, 0)
                received_bytes += missing.get(path, path.stat().st_size)
            if received_bytes > most:
                futile, most = 0, received_bytes
            else:
                futile += 1
            if futile > TRIES:
                raise MpuError(f"{name}: its owner keeps nothing of what is sent")
            names, offsets, data = next_pieces_to_send(missing)
            values: dict[str, Any] = {"names": names, "offsets": offsets}
            if received_bytes + sum(map(len, data)) == total_bytes:
                values |= {"files": list(digests), "digests": list(digests.values())}
                damaged, most = damaged + 1, -1  # whatever is damaged is removed there
                if damaged > TRIES:
                    raise MpuError(f"{name}: arrives damaged at its owner")
            reply = yield Request("put", name, values, data)
        return reply

    def _fetch(self, name: str, arrived: Path, copy: Path, declared: Reply, ends: float) -> Job:
        """Fetch the files of a delta that its owner has ``declared``; the problem with them, or ""."""
        sizes, digests = table(declared, "sizes", int), table(declared, "digests", str)
        if problem := odd_files(sizes, arrived.name):
            return problem
        if sum(sizes.values()) > HEADERS + MAX_DELTA_RATIO * sum(path.stat().st_size for path in files_of(copy)):
            return "is larger than any delta of its copy"
        shutil.rmtree(arrived.parent, ignore_errors=True)
        arrived.parent.mkdir(parents=True)
        received_sizes = dict.fromkeys(sizes, 0)
        while counts := next_pieces_to_fetch(sizes, received_sizes):
            self._check_time(name, ends)
            values = {
                "names": list(counts),
                "offsets": [received_sizes[file] for file in counts],
                "counts": [*counts.values()],
            }
            pieces = (yield Request("get", name, values)).data
            if [len(piece) for piece in pieces] != list(counts.values()):
                return "sent other sizes than it had declared"
            for file, piece in zip(counts, pieces, strict=True):
                path = arrived.parent / file
                path.parent.mkdir(exist_ok=True)
                with path.open("ab") as written:
                    written.write(piece)
                received_sizes[file] += len(piece)
        damaged = [file for file in digests if digest_of(arrived.parent / file) != digests[file]]
        return f"{damaged[0]} arrived damaged" if damaged else ""

    def _check_time(self, name: str, ends: float) -> None:
        if time.monotonic() > ends:
            raise MpuError(
                f"{name}: not sent, unlearned and returned within {PARTS} times {self.settings.limit:g} s",
                "raise limit, and run again",
            )

    def _complaint(self, owner: str, name: str, delta: Path) -> str:
        """The reason why a delta cannot be aggregated as that of the copy ``name``; empty if it can."""
        inverted = delta.parent / "inverted"
        try:
            origin = delta_manifest(open_checkpoint(delta).metadata, delta).origin
            if origin is None or name != copy_name(origin):
                return "is the delta of another copy"
            mpu("invert", delta, "--keys", self.keys(owner), "--identity", self.identity, "--base", self.base,
                "--out", inverted)  # fmt: skip
        except MpuError as error:
            return error.problem
        finally:
            shutil.rmtree(inverted, ignore_errors=True)
        return ""

    def _forget(self, names: list[str]) -> Job:
        yield Request("forget", names[0], {"copies": names})


def play(grid: Grid, settings: Settings) -> Path:
    """All rounds that are not done; the last one's model."""
    os.umask(0o077)  # keys, copies and deltas are nobody else's, wherever the folder lies
    private_folder(settings.state)
    exchange = Exchange(grid, settings.patience, settings.limit, say)
    base: Path | str = settings.base
    with alone_in(settings.state, "flower", "state"):
        for number in range(1, settings.rounds + 1):
            current = Round(settings, exchange, number, base)
            if not current.model.exists():
                current.play()
            elif current.left_out and not (settings.state / f"round_{number + 1}").exists():
                current.ask_again()
            current.end()
            warnings = (current.folder / "warnings.txt").read_text(encoding="utf-8").splitlines()
            say(f"round {number} is done: {current.model}" + (f" ({'; '.join(warnings)})" if warnings else ""))
            base = current.model
    return Path(base)


@app.main()
def main(grid: Grid, context: Context) -> None:
    try:
        play(grid, settings_of(dict(context.run_config)))
    except MpuError as error:
        say(f"error: {error.problem}" + (f"; {error.hint}" if error.hint else ""))
        raise
