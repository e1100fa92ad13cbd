"""The model owner's courier: a Flower ServerApp that publishes, sends, collects and aggregates, round by round.

Everything that it has done is on disk, so that a run that was stopped goes on:

    STATE/identity.txt                          opens the keys
    STATE/round_R/OWNER/copies/copy_K, keys.bin, deltas/copy_K.safetensors (checked), rejected/
    STATE/round_R/model                         what the round made; the next one starts from it

The work is done by ``mpu publish`` and ``mpu aggregate``, each in a process of its own.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from mpu_cli.errors import MpuError
from mpu_cli.federation.exchange import Exchange, Job, Request, shown, table, word
from mpu_cli.federation.spool import COPY, DELTA, FILE, checked, digest_of, files_of, is_name
from mpu_cli.subprocesses import run_mpu

PIECE = 32 << 20  # bytes of files in a message
TRIES = 2  # a delta that fails its checks is asked for again once, a copy that arrives damaged is sent again once
LARGEST = 4  # times a copy's size: a delta in float64 of a copy in bfloat16
HEADERS = 64 << 20  # bytes, beside the weights of a delta
MOST_FILES = 1_000  # of a delta: shards of 5 GB
STATES = ("arriving", "waiting", "done", "failed")

OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")

app = ServerApp()


@dataclass(frozen=True)
class Settings:
    """The run's configuration (``flwr run --run-config``).

    ``base``: the model; ``state``: the folder for everything that is kept; ``publish`` and ``aggregate``: more
    arguments of those commands; ``poll``: seconds between questions, ``patience`` until one is sent again, ``limit``
    until an owner is given up.
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
    return Settings(
        base=str(config["base"]), state=Path(str(config["state"])).resolve(), owners=owners,
        rounds=int(config["rounds"]), publish=shlex.split(str(config["publish"])),
        aggregate=shlex.split(str(config["aggregate"])), poll=float(config["poll"]),
        patience=float(config["patience"]), limit=float(config["limit"]),
    )  # fmt: skip


def say(text: str) -> None:
    print(f"mpu: {text}", flush=True)


def mpu(*arguments: object) -> str:
    """Run an ``mpu`` command; its standard output. Raises MpuError with its own message if it fails."""
    ended = run_mpu([str(argument) for argument in arguments])
    if ended.status:
        raise MpuError(f"mpu {arguments[0]}: {ended.reason}")
    return ended.stdout


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
        return checked(f"{self._run_of(owner)}/{self.folder.name}/{copy.name}", COPY)

    def play(self) -> None:
        """Everything of the round that is not done yet."""
        if not self.identity.exists():
            self.identity.parent.mkdir(parents=True, exist_ok=True)
            mpu("keygen", "--out", self.identity)
        for owner in self.settings.owners:
            if not self.keys(owner).exists():
                self._publish(owner)
        pairs = [(owner, copy) for owner in self.settings.owners for copy in self.copies(owner)]
        self.exchange.run((owner, self._deliver(owner, copy)) for owner, copy in pairs)
        say(f"round {self.number}: all deltas are here")
        deltas = [self.folder / owner / "deltas" for owner in self.settings.owners]
        keys = [part for owner in self.settings.owners for part in ("--keys", self.keys(owner))]
        mpu("aggregate", *deltas, *keys, "--identity", self.identity, "--base", self.base, "--out", self.model,
            *self.settings.aggregate)  # fmt: skip

    def end(self) -> None:
        """Remove what the round no longer needs, here and at the owners."""
        pairs = [(owner, copy) for owner in self.settings.owners for copy in self.copies(owner)]
        self.exchange.run((owner, self._end(owner, copy)) for owner, copy in pairs)
        for _, copy in pairs:
            shutil.rmtree(copy)

    def _publish(self, owner: str) -> None:
        folder, first = self.folder / owner, self.settings.state / "round_1" / owner / "run"
        shutil.rmtree(folder, ignore_errors=True)  # of a publication that was interrupted
        folder.mkdir(parents=True)
        run = ["--run", first.read_text().strip()] if first.exists() else []
        mpu("publish", self.base, "--out", folder / "copies", "--keys", folder / "keys.partial", "--identity",
            self.identity, "--round", self.number, *run, *self.settings.publish)  # fmt: skip
        facts = json.loads((self.copies(owner)[0] / "mpu.json").read_text(encoding="utf-8"))
        (folder / "run").write_text(facts["run"] + "\n")
        (folder / "keys.partial").rename(self.keys(owner))
        say(f"round {self.number}: {len(self.copies(owner))} copies for {owner}")

    def _run_of(self, owner: str) -> str:
        return (self.folder / owner / "run").read_text().strip()

    def _deliver(self, owner: str, copy: Path) -> Job[None]:
        """Send a copy, wait for its delta, fetch and check it."""
        name, target = self.name(owner, copy), self.delta(owner, copy)
        for attempt in range(1, TRIES + 1):
            if target.exists():
                return
            yield from self._send(name, copy)
            state = yield from self._state_after_training(name)
            arrived = self.folder / owner / "arriving" / copy.name / target.name
            problem = "its owner could not unlearn on it"
            if state == "done":
                problem = (yield from self._fetch(name, arrived, copy)) or self._complaint(owner, arrived)
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
                raise MpuError(f"{owner}, {copy.name} of round {self.number}: {problem}", "nothing was aggregated")
            say(f"{owner}, {copy.name}: {problem}; it is asked for again")
            yield Request("again", name)

    def _state_after_training(self, name: str) -> Job[str]:
        """Ask for the state until it is no longer "waiting". Raises MpuError after ``limit`` seconds of that."""
        ends = time.monotonic() + self.settings.limit
        reply = yield Request("state", name)
        while word(reply, "state", STATES) == "waiting":
            if time.monotonic() > ends:
                raise MpuError(f"{name}: not unlearned within {self.settings.limit:g} s", "raise limit, and run again")
            reply = yield Request("state", name, after=self.settings.poll)
        return word(reply, "state", STATES)

    def _send(self, name: str, copy: Path) -> Job[None]:
        """Send what the owner does not hold, until the digests agree."""
        if word((yield Request("state", name)), "state", STATES) != "arriving":
            return
        files = {path.name: path for path in files_of(copy)}
        digests = {file: digest_of(path) for file, path in files.items()}
        for _ in range(TRIES):
            reply = yield Request("held", name)
            futile, most = 0, -1
            while missing := _missing(files, table(reply, "sizes", int)):
                held = sum(missing.get(path, path.stat().st_size) for path in files.values())
                futile, most = (0, held) if held > most else (futile + 1, most)
                if futile > TRIES:
                    raise MpuError(f"{name}: its owner keeps nothing of what is sent")
                names, offsets, data = _next_pieces(missing)
                reply = yield Request("put", name, {"names": names, "offsets": offsets}, data)
            told = {"names": list(digests), "digests": list(digests.values())}
            if not (yield Request("complete", name, told)).values["wrong"]:
                return
        raise MpuError(f"{name}: arrives damaged at its owner")

    def _fetch(self, name: str, arrived: Path, copy: Path) -> Job[str]:
        """Fetch a delta's files; what is wrong with them, or nothing."""
        digests = table((yield Request("made", name)), "digests", str)
        if len(digests) > MOST_FILES:
            return f"sent {len(digests):,} files"
        if len({"/" in file for file in digests}) > 1:
            return "sent a file and a folder of one name"
        room = HEADERS + LARGEST * sum(path.stat().st_size for path in files_of(copy))
        shutil.rmtree(arrived.parent, ignore_errors=True)
        arrived.parent.mkdir(parents=True)
        for file, digest in digests.items():
            if not is_name(file, FILE) or file.split("/")[0] != arrived.name:
                return f"sent a file of another name, {shown(file)}"
            path = arrived.parent / file
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as written:
                data = None
                while data is None or len(data) == PIECE:
                    asked = {"name": file, "offset": written.tell(), "count": PIECE}
                    [data] = (yield Request("get", name, asked)).data
                    room -= len(data)
                    if room < 0 or len(data) > PIECE:
                        return "is larger than any delta of its copy"
                    written.write(data)
            if digest_of(path) != digest:
                return f"{file} arrived damaged"
        return "" if arrived.exists() else "sent no delta"

    def _complaint(self, owner: str, delta: Path) -> str:
        """Why a delta cannot be aggregated; nothing if it can."""
        inverted = delta.parent / "inverted"
        try:
            mpu("invert", delta, "--keys", self.keys(owner), "--identity", self.identity, "--base", self.base,
                "--out", inverted)  # fmt: skip
        except MpuError as error:
            return error.problem
        finally:
            shutil.rmtree(inverted, ignore_errors=True)
        return ""

    def _end(self, owner: str, copy: Path) -> Job[None]:
        yield Request("forget", self.name(owner, copy))


def _missing(files: dict[str, Path], held: dict[str, int]) -> dict[Path, int]:
    """The files that are not whole yet, and where they go on."""
    return {
        path: held.get(name, 0) for name, path in files.items() if name not in held or held[name] < path.stat().st_size
    }


def _next_pieces(missing: dict[Path, int]) -> tuple[list[str], list[int], tuple[bytes, ...]]:
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


def play(grid: Grid, settings: Settings) -> Path:
    """All rounds that are not done; the last one's model."""
    exchange = Exchange(grid, settings.patience, settings.limit, say)
    base: Path | str = settings.base
    for number in range(1, settings.rounds + 1):
        current = Round(settings, exchange, number, base)
        if not current.model.exists():
            current.play()
        current.end()
        say(f"round {number} is done: {current.model}")
        base = current.model
    return Path(base)


@app.main()
def main(grid: Grid, context: Context) -> None:
    try:
        play(grid, settings_of(dict(context.run_config)))
    except MpuError as error:
        say(f"error: {error.problem}" + (f"; {error.hint}" if error.hint else ""))
        raise
