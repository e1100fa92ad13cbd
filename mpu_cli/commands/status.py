"""``mpu status``: what a working folder has of a request, and whose turn it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import AGE_HEADER, open_regular
from mpu_cli.files.manifest import (
    MANIFEST_NAME,
    REQUEST_FOLDER,
    CopyManifest,
    DeltaManifest,
    delta_path,
    keys_path,
    manifest_of,
    model_folder,
    resume_folder,
    round_folder,
)
from mpu_cli.files.visible import visible
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import Command, Report
from mpu_cli.options.declare import option
from mpu_cli.wording import command_line, counted, few, one_line

if TYPE_CHECKING:
    from mpu_cli.protocol.keys import Keys

MAX_ENTRIES = 1000  # entries that are looked at
SHOWN = 20  # names in a line
SUFFIXES = (".safetensors", ".bin", ".age")  # of files that may be weights or keys


@dataclass
class Round:
    """The files of a round, all paths relative to the folder."""

    run: str
    number: int
    copies: int  # in the publication
    made: dict[int, Path] = field(default_factory=dict)  # copies of the latest publication, by number
    copy_ids: dict[int, str] = field(default_factory=dict)
    deltas: dict[int, Path] = field(default_factory=dict)  # of the latest request, by copy
    model: Path | None = None
    # Verdicts of receipts, by file, the latest last: those that this machine signed as the client or the server, and
    # those of others, with their signers.
    verdicts: dict[str, str] = field(default_factory=dict)
    claims: dict[str, str] = field(default_factory=dict)
    signed: str | None = None  # the server that signed the latest verdict, a pass, in words; None if there is none

    def add_delta(self, copy: int, path: Path) -> None:
        """Add one that is later than those before: of a further request, it does not complete an earlier one."""
        self.deltas[copy] = path
        if self.request:
            self.deltas = {each: other for each, other in self.deltas.items() if other.parent == path.parent}

    @property
    def request(self) -> Path | None:
        """The folder of the deltas, if they are of a further request."""
        folders = {path.parent for path in self.deltas.values()}
        return next((folder for folder in folders if folder.name.startswith(REQUEST_FOLDER)), None)

    @property
    def label(self) -> str:
        return f"round {self.number} of run {self.run[:8]}…"

    def __str__(self) -> str:
        parts = []
        for what, paths in (("copies", self.made), ("deltas", self.deltas)):
            parts.append(f"{what} {few([*map(str, sorted(paths))], SHOWN) or 'none'} of {self.copies}")
        if self.request:
            parts[-1] += f" in {self.request}"
        if self.model:
            parts.append(f"model {self.model}")
        parts += [f"{file}: {verdict}" for file, verdict in (*self.verdicts.items(), *self.claims.items())]
        return "; ".join(parts)


@dataclass
class Account:
    """The contents of a folder: rounds in their order, and ``other`` files, which belong to none: names by kind."""

    folder: Path
    rounds: list[Round]
    keys: list[str]
    other: dict[str, list[str]]

    def __bool__(self) -> bool:
        return bool(self.rounds or self.keys or self.other)

    def lines(self) -> Iterator[tuple[str, str]]:
        """A label and a text for each round and each kind of other files, and for the next step of each run."""
        for round_ in self.rounds:
            yield round_.label, str(round_)
        if self.keys:
            yield "keys", few(self.keys, SHOWN)
        for kind, names in self.other.items():
            yield kind, few(names, SHOWN)
        if self.keys:
            yield from self._requests()
        if not self:
            yield "nothing yet", "no copies, deltas or keys of mpu's are here"
        for turn, step in self.next_steps():
            yield "next", f"{turn}: {step}"

    def _requests(self) -> Iterator[tuple[str, str]]:
        """The server's record of each run that has a round here: the update in its model, and the last verdict."""
        from mpu_cli.protocol.updates import CheckedUpdate, Update, read_updates

        entries = read_updates()
        for run in dict.fromkeys(round_.run for round_ in self.rounds):
            updates = [entry for entry in entries if isinstance(entry, Update) and entry.run == run]
            if not updates:
                continue
            last = updates[-1]
            digests = ", ".join(digest.removeprefix("blake3:")[:12] for digest in last.fingerprints)
            text = (
                f"{counted(len(updates), 'update')}, the last on {last.time}, of deltas {digests}, step {last.rate:g}"
            )
            checks = [entry for entry in entries if isinstance(entry, CheckedUpdate) and entry.checked_run == run]
            if checks:
                text += f"; checked on {checks[-1].time}: {checks[-1].verdict} ({checks[-1].receipt})"
            yield f"request {run}", text

    def next_steps(self) -> list[tuple[str, str]]:
        """The party whose turn it is, for each run, and its next step: a command, mostly."""
        if not (self.rounds or self.keys) and (sealed := self.other.get("sealed copies")):
            copies = [self.folder / name for name in sealed[:SHOWN]]
            unlearn = command_line("mpu", "unlearn", *copies, "--forget", "forget.jsonl", "--retain", "retain.jsonl")
            return [("client", unlearn)]
        if not (self.rounds or self.keys):
            begin = command_line("mpu", "publish", "MODEL", "--public", "PUBLIC_MODEL")
            return [("server", begin)]
        runs: dict[str, list[Round]] = {}
        for round_ in self.rounds:
            runs.setdefault(round_.run, []).append(round_)
        steps = []
        for rounds in runs.values():
            number = self._current(rounds)
            steps.append(self._after(rounds[number], rounds[number - 1] if number else None))
        return steps

    def _current(self, rounds: Sequence[Round]) -> int:
        """The number of the last round or, where a further request has left deltas or a model since, of its round."""
        current, later = len(rounds) - 1, 0
        for number, round_ in reversed([*enumerate(rounds)]):
            changed = self._changed(round_.model, *round_.deltas.values())
            if changed > later:
                current = number
            later = max(later, changed, self._changed(*round_.made.values()))
        return current

    def _changed(self, *paths: Path | None) -> int:
        """When the latest of these files was changed, in ns; 0 without any."""
        return max((_changed(self.folder / path) for path in paths if path), default=0)

    def _after(self, last: Round, earlier: Round | None) -> tuple[str, str]:
        folder = self.folder
        file, verdict = next(reversed(last.verdicts.items()), ("", ""))  # of the latest receipt
        if verdict.startswith("pass"):
            if last.signed:
                return "nobody", f"the records are forgotten, and the rest is kept; {last.signed}"
            if self.keys:  # both parties are here
                return "server", f"{self._countersign(file, last, earlier)}, which countersigns it"
            sent = command_line(folder / file)
            return "client", (
                f"send {sent} to the model's owner, who countersigns it, and by another way your public key, which "
                f"`{command_line('mpu', 'receipt', folder / file)}` prints"
            )
        claimed, claim = next(reversed(last.claims.items()), ("", ""))
        if claim.startswith("pass") and self.keys:
            sign = self._countersign(claimed, last, earlier, "--client-key", "PUBLIC_KEY")
            return "server", f"{sign}, with the public key that your client gave you, which countersigns it"
        if verdict and not last.deltas:
            return "client", f"{folder / file} says {verdict}: do what `mpu check` said is next"
        if last.model and self._changed(*last.deltas.values()) <= self._changed(last.model):
            return "server", self._publish(folder / last.model, last)
        # Of a million copies, which a file may claim, only a few are named.
        missing = [*islice((copy for copy in range(1, last.copies + 1) if copy not in last.deltas), SHOWN + 1)]
        if not missing and not self.keys:
            deltas_of = f" of {self.folder / last.request}" if last.request else ""
            return "client", f"return the deltas{deltas_of} to the model's owner"
        if not missing:
            deltas = next(iter(last.deltas.values())).parent
            # An earlier request's model may have the usual name.
            names = (folder / model_folder(number) for number in count(last.number))
            out = next(name for name in names if not name.exists())
            under = () if out.name == str(model_folder(last.number)) else ("--out", out)
            keys, _ = self._keys_of(last)
            return "server", command_line("mpu", "aggregate", folder / deltas, "--keys", keys, *under)
        todo = [folder / last.made[copy] for copy in sorted(last.made) if copy not in last.deltas]
        if not todo:
            listed = ", ".join(map(str, missing[:SHOWN])) + (", …" if len(missing) > SHOWN else "")
            return "client", f"wait for the deltas of {listed}"
        if earlier and earlier.made and not last.verdicts and not last.deltas:
            before = folder / earlier.made[min(earlier.made)]
            return "client", command_line("mpu", "check", todo[0], "--before", before)
        target = f"{folder / last.request if last.request else round_folder(folder / 'deltas', last.number)}/"
        records = ("--forget", "YOUR_RECORDS", "--retain", "RECORDS_TO_KEEP")
        unlearn = command_line("mpu", "unlearn", *todo, *records, "--out", target)
        if any(resume_folder(delta_path(target, str(copy), last.number)).is_dir() for copy in todo):
            return "client", f"{unlearn} --resume, with the records and options of the training that was interrupted"
        return "client", unlearn

    def _countersign(self, receipt: str, last: Round, earlier: Round | None, *options: str) -> str:
        """The command by which the server signs ``receipt`` of a copy of round ``last``."""
        base = self.folder / earlier.model if earlier and earlier.model else "MODEL"
        keys, _ = self._keys_of(last)
        return command_line("mpu", "receipt", self.folder / receipt, "--keys", keys, "--base", base, *options)

    def _publish(self, model: Path, last: Round) -> str:
        """The command that publishes ``model``, which was made in round ``last``, as the last publication was."""
        from mpu_cli.commands.publish import command_to_publish

        _, keys = self._keys_of(last)
        if keys is None:
            publish = command_line("mpu", "publish", model, "--public", "PUBLIC_MODEL")
            return f"{publish}, with the other options of the last one"
        return command_to_publish(model, keys)

    def _keys_of(self, last: Round) -> tuple[Path, Keys | None]:
        """The key file of this round, the latest if there are several, and its keys. Of files that this machine cannot
        open, or without asking for a passphrase, the one that has the name of such a file, else the first."""
        from mpu_cli.protocol.keys import needs_passphrase, open_keys

        closed = []
        for name in sorted(self.keys, key=lambda name: -_changed(self.folder / name)):
            path = self.folder / name
            try:
                keys = None if needs_passphrase(path) else open_keys(path)
            except MpuError:  # sealed for somebody else
                keys = None
            if keys is None:
                closed.append(name)
            elif (keys.run, keys.round) == (last.run, last.number):
                return path, keys
        usual = str(keys_path(last.number))
        return self.folder / (usual if usual in closed or not closed else min(closed)), None


@dataclass(frozen=True, kw_only=True)
class Status(Command):
    """Say what FOLDER has of a request, round by round: copies, deltas, models, keys, receipts; and whose turn it is.

    Reads headers only, and changes nothing. Links are not followed. Prints a line for each round, and the next step.
    """

    NAME = "status"
    EXAMPLE = "mpu status"

    folder: Path = option(Path("."), "Where one of the parties works.", metavar="[FOLDER]", argument=True)

    def run(self, observer: Observer = SILENT) -> Account:  # noqa: ARG002 (as all commands have it)
        if not self.folder.is_dir():
            raise MpuError(f"{self.folder}: no such directory")
        account = account_of(self.folder)
        if not account and (self.folder / MANIFEST_NAME).exists():
            parent = self.folder.absolute().parent
            raise MpuError(
                f"{self.folder}: a copy or a model, not the folder that a party works in",
                f"name that folder: {command_line('mpu', 'status', parent)}",
            )
        return account

    def report(self, account: Account, observer: Observer) -> Report:  # noqa: ARG002 (as all commands have it)
        steps = account.next_steps()
        lines = [f"{one_line(label)}\t{one_line(text)}" for label, text in account.lines()]
        document = {
            "rounds": [asdict(round_) for round_ in account.rounds],
            "keys": account.keys,
            "other": account.other,
            "next": [{"turn": turn, "step": step} for turn, step in steps],
        }
        return Report(lines, document)


def account_of(folder: Path) -> Account:
    """The contents of ``folder`` and of its folders for rounds and deltas and, of what mpu made only, of others two
    levels down."""
    from mpu_cli.files.reader import open_checkpoint

    rounds: dict[tuple[str, int], Round] = {}
    keys: list[str] = []
    other: defaultdict[str, list[str]] = defaultdict(list)
    models: list[tuple[tuple[str, int], Path]] = []

    def round_of(origin: CopyManifest) -> Round:
        key = origin.run, origin.round
        return rounds.setdefault(key, Round(origin.run, origin.round, origin.copies))

    folders = _folders_in(folder)
    entries = [path for place in (folder, *folders) for path in _entries(place)]
    paths = sorted({*entries} - {*folders})
    candidates = [path for path in paths if path.suffix in SUFFIXES or (path / "config.json").exists()]
    # Of several files for one thing, such as deltas of further requests or a repaired model, the latest counts.
    for path in sorted(candidates[:MAX_ENTRIES], key=_changed):
        relative = path.relative_to(folder)
        is_expected = len(relative.parts) == 1 or relative.parts[0].startswith(("round_", "deltas"))
        try:
            if path.is_file():
                with open_regular(path, links=False) as file:
                    sealed = file.read(len(AGE_HEADER)) == AGE_HEADER
                if sealed:
                    if path.suffix == ".bin":
                        keys.append(str(relative))
                    else:
                        other["sealed copies"].append(str(relative))
                    continue
            manifest = manifest_of(path, open_checkpoint(path, links=False).metadata)
            if isinstance(manifest, DeltaManifest):
                if origin := manifest.origin:
                    round_of(origin).add_delta(origin.copy, relative)
            elif isinstance(manifest, CopyManifest):
                round_of(manifest).made[manifest.copy] = relative
                round_of(manifest).copy_ids[manifest.copy] = manifest.copy_id
            elif manifest:
                models.append(((manifest.run, manifest.round), relative))
            elif path.is_dir() and is_expected:
                other["models"].append(str(relative))
        except MpuError as error:
            if is_expected:
                other["not readable"].append(f"{relative} ({error.problem})")
    for key, model in models:
        other["models"].append(str(model))
        if key in rounds:
            rounds[key].model = model
    _add_receipts(folder, paths, rounds, other)
    in_order = {kind: sorted(names) for kind, names in other.items()}
    return Account(folder, [rounds[key] for key in sorted(rounds)], sorted(keys), in_order)


def facts_of_folder(folder: Path) -> dict[str, Any] | None:
    """The account of ``folder`` as `mpu inspect` shows it; None if there is nothing of mpu's in it."""
    account = account_of(folder)
    if not account:
        return None
    facts: dict[str, Any] = {"kind": "folder"}
    for round_ in account.rounds:
        facts[round_.label] = str(round_)
    if account.keys:
        facts["keys"] = account.keys
    if steps := account.next_steps():
        facts["next"] = [f"{turn}: {step}" for turn, step in steps]
    return facts | account.other


def _add_receipts(
    folder: Path, paths: list[Path], rounds: Mapping[tuple[str, int], Round], other: defaultdict[str, list[str]]
) -> None:
    """Give rounds the verdicts of the receipts among ``paths`` in ``folder``, and ``other`` those whose signatures are
    wrong, with the reason, and those of an earlier publication of the round."""
    from mpu_cli.measuring.receipt import check_signatures, public_key_of, read_receipt
    from mpu_cli.protocol import publication
    from mpu_cli.training import ledger

    secrets = {
        "client": (ledger.default_secret_path(), ledger.own_client_secret),
        "server": (publication.default_secret_path(), publication.server_secret),
    }
    keys_here = {}  # with which this machine signs, by party; None for a party that it never was
    for party, (secret_path, read) in secrets.items():
        keys_here[party] = public_key_of(party, read()) if secret_path.exists() else None
    receipts = []
    for path in paths:
        if path.suffix == ".json" and path.is_file():
            with suppress(MpuError):  # another file
                receipts.append((path, read_receipt(path)))
    for path, receipt in sorted(receipts, key=lambda entry: (entry[1].date, entry[0].stat().st_mtime_ns)):
        try:
            public_keys = check_signatures(receipt, path)
        except MpuError as error:
            other["receipts that prove nothing"].append(f"{path.relative_to(folder)} ({error.problem})")
            continue
        if not (round_ := rounds.get((receipt.copy.run, receipt.copy.round))):
            continue
        if round_.copy_ids.get(receipt.copy.copy, receipt.copy.copy_id) != receipt.copy.copy_id:
            other["receipts of earlier publications"].append(str(path.relative_to(folder)))
            continue
        name, client, server = str(path.relative_to(folder)), public_keys["client"], public_keys.get("server")
        client_is_here = client == keys_here["client"]
        server_is_here = server is not None and server == keys_here["server"]
        if not (client_is_here or server_is_here):  # anybody can have written it: it decides nothing
            round_.claims[name] = f"{receipt.verdict}, says a client with the public key {client}"
            continue
        round_.verdicts[name], round_.signed = receipt.verdict, None
        if receipt.verdict.startswith("pass") and server:
            round_.signed = f"the server that signed it has the public key {server}: is that yours?"
            if server_is_here:
                round_.signed = "you signed it"
            if not client_is_here:
                round_.signed += f", and a client with the public key {client}: is that yours?"


def _changed(path: Path) -> int:
    """When a file was changed, in ns; 0 if it has gone since."""
    with suppress(OSError):
        return path.lstat().st_mtime_ns
    return 0


def _entries(folder: Path) -> list[Path]:
    """The first entries of a folder, without hidden ones and links, which could lead anywhere."""
    return [path for path in visible(islice(folder.iterdir(), MAX_ENTRIES)) if not path.is_symlink()]


def _folders_in(folder: Path) -> list[Path]:
    """Folders two levels down that are not models."""

    def inside(outer: Path) -> list[Path]:
        folders = [path for path in _entries(outer) if path.is_dir()]
        return [path for path in folders if not (path / "config.json").exists()]

    outer_folders = inside(folder)
    return [*outer_folders, *(path for outer in outer_folders for path in inside(outer))][:MAX_ENTRIES]
