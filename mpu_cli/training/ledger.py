"""The client's own list of all that it made of its records, and of the privacy that this spends together.

    CONFIG/mpu/ledger.jsonl    a line for each training on a copy and each release of terms, mode 0600

What a server says of its copies and rounds bounds nothing: it can publish as often as it likes. So budgets are composed
over what this file holds, and a training is written down before any record meets the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import Above0, Count, Document, Scale, parse_document
from mpu_cli.files.resumption import alone_with_private, append_line, read_lines
from mpu_cli.files.sealing import default_identity_path, own_secret
from mpu_cli.plugins import extension

LOSSES_OF, SCHEDULE_OF = "losses_of", "schedule_of"  # names of identities in lines that add to an earlier one


@dataclass(frozen=True)
class Mechanism:
    """DP-SGD of one training: ``steps`` of the subsampled Gaussian mechanism."""

    noise_multiplier: Scale
    sample_rate: Scale
    steps: int


@dataclass(frozen=True)
class Release:
    """A release with a bound of its own, such as that of the terms for surrogate records."""

    epsilon: Scale
    delta: Scale
    neighbours: str = "left-out"

    def between(self, neighbours: str) -> Release:
        """Its bound for other neighbours. Replacing a record is leaving it out and adding another: (2ε, (1 + e^ε)·δ),
        by group privacy (Dwork and Roth 2014, theorem 2.2). Leaving one out costs at most what replacing it does."""
        if neighbours == "left-out" or self.neighbours == neighbours:
            return self
        return Release(2 * self.epsilon, (1 + math.exp(self.epsilon)) * self.delta, neighbours)


Spending = Mechanism | Release | None  # None: a training without a bound


@dataclass(frozen=True)
class RoundSchedule:
    """The schedule that all copies of a round have to share for the noise to cancel, as the first one settled it."""

    steps: Count
    planned_steps: Count  # the most that the first copy might have taken, by which the rate goes
    level: Annotated[float, Meta(ge=-1e300, lt=0)]  # of the hinge loss, in nats per token
    scale: Above0  # the share of the change that is returned
    alpha: Scale  # the weight of the retain term


@dataclass(frozen=True)
class LedgerEntry:
    """One training, or one release of terms."""

    identity: str  # the same after an interrupted training was resumed
    run: str
    round: int
    copy: int
    weights: str  # fingerprint of what was trained, which its owner cannot choose as it can the names of a copy
    algorithm: str  # or the command that released terms
    records: int
    forget: float | None = None  # loss per answer token before the training; so is ``retain``
    retain: float | None = None
    mechanism: Mechanism | None = None  # the bound of a training
    data: str = ""  # digest of the records
    reading_context: str = ""  # digest of tokenizer, template and config, the same for all copies of a round
    release: Release | None = None  # the bound of a release
    public: bool = False  # the records were public or surrogates, so nothing is spent
    unit: str | None = None  # the field that names the persons that the bound is for, None if it is for records
    training: str = ""  # digest of everything that decides the training but the copy, equal for the copies of a round
    schedule: RoundSchedule | None = None  # of a training that stopped when it was done
    tags: tuple[str, ...] = ()  # of the records, where there is a bound

    def may_bound(self, tags: Collection[str]) -> bool:
        """Whether it has a bound that was for one of the records with these ``tags``; without tags of its own, it may
        have been."""
        return bool(self.mechanism or self.release) and (not self.tags or not set(self.tags).isdisjoint(tags))

    def spendings(self, unit: str | None) -> list[Spending]:
        """The privacy that it spends of each ``unit``, a field that names persons or None for a record: nothing, one
        bound, or None in place of a bound. Protecting persons protects their records, and not the other way round."""
        if self.public:
            return []
        if unit not in (None, self.unit):
            return [None]
        return [self.release or self.mechanism]


class _Losses(Document):
    """A later line, with the losses of the training ``losses_of``, an identity."""

    losses_of: str
    forget: float | None
    retain: float | None


class _Schedule(Document):
    """A later line, with the schedule of the training ``schedule_of``, an identity."""

    schedule_of: str
    schedule: RoundSchedule


ADDITIONS: dict[str, type[Document]] = {LOSSES_OF: _Losses, SCHEDULE_OF: _Schedule}


def default_secret_path() -> Path:
    """``mpu/client.key`` in the user's configuration directory."""
    return default_identity_path().with_name("client.key")


def client_secret(path: Path) -> bytes:
    """The client's secret in ``path``, created on first use with mode 0600."""
    return own_secret(path, "the client's secret", "remove it to create a new one")


def own_client_secret() -> bytes:
    """The secret in the client's configuration directory."""
    return client_secret(default_secret_path())


def default_ledger_path() -> Path:
    """``mpu/ledger.jsonl`` in the user's configuration directory."""
    return default_identity_path().with_name("ledger.jsonl")


def read_ledger(path: Path) -> list[LedgerEntry]:
    """The trainings so far."""
    hint = "what it lost cannot be counted: put a backup in its place"
    entries: list[LedgerEntry] = []
    for line in read_lines(path, hint):
        values = {name: value for name, value in line.items() if name != "time"}
        name_of_identity = next((name for name in ADDITIONS if name in values), None)
        if name_of_identity is None:
            entries.append(parse_document(LedgerEntry, values, f"{path}: damaged", hint))
            continue
        added = msgspec.structs.asdict(parse_document(ADDITIONS[name_of_identity], values, f"{path}: damaged", hint))
        identity = added.pop(name_of_identity)
        entries = [replace(entry, **added) if entry.identity == identity else entry for entry in entries]
    return entries


def write_losses(path: Path, identity: str, forget: float, retain: float | None) -> None:
    """Add the losses before a training, once they are known, to its entry in the ledger."""
    with alone_with_private(path):
        append_line(path, {LOSSES_OF: identity, "forget": forget, "retain": retain})


def write_round_schedule(path: Path, identity: str, round_schedule: RoundSchedule) -> None:
    """Add the schedule that a training took to its entry in the ledger: the other copies of its round follow it."""
    with alone_with_private(path):
        append_line(path, {SCHEDULE_OF: identity, "schedule": asdict(round_schedule)})


def schedule_of_round(entry: LedgerEntry, earlier: Sequence[LedgerEntry]) -> RoundSchedule | None:
    """The schedule of the first training in ``earlier`` that a copy of the publication of ``entry`` had on the same
    records with the same options, or None."""
    schedule = None
    weights = {entry.copy: entry.weights}
    for other in reversed(earlier):
        if not entry.run or (other.run, other.round) != (entry.run, entry.round):
            continue
        if weights.setdefault(other.copy, other.weights) != other.weights:
            break  # of an earlier publication under the same name
        if other.training == entry.training and other.schedule:
            schedule = other.schedule
    return schedule


def write_down(
    path: Path,
    entry: LedgerEntry,
    *,
    delta: float,
    budget: float | None,
    neighbours: str = "left-out",
    trusted: bool = True,
) -> Sequence[LedgerEntry]:
    """Add a training that is about to begin; returns those before it. One that is resumed is not added again.

    Raises MpuError if all of them together would spend more than ``budget``, ε at ``delta``; and, unless the copy is
    ``trusted``, if another copy of its round had another tokenizer, template or config.
    """
    with alone_with_private(path):
        before = read_ledger(path)
        same_round = [other for other in before if entry.run and (other.run, other.round) == (entry.run, entry.round)]
        if not trusted and any(other.reading_context not in ("", entry.reading_context) for other in same_round):
            raise MpuError(
                f"copy {entry.copy} of round {entry.round}: its tokenizer, template or config is not that of another "
                "copy of the round that you trained on, so the two would show what each makes of your records",
                "nothing was read; ask its owner, or use --trust-copy if you know why",
            )
        # Each call of these draws fresh noise, so the same training or release spends its bound once more.
        spends_again = entry.mechanism is not None or entry.release is not None
        resumed = any((other.identity, other.public) == (entry.identity, entry.public) for other in before)
        if resumed and not spends_again:
            return [other for other in before if other.identity != entry.identity]
        if budget is not None:
            spent = epsilon_of([*before, entry], delta, neighbours, entry.unit)
            if spent > budget:
                reason = f" (some had no bound for this unit, or δ = {delta:g} is used up)" if math.isinf(spent) else ""
                raise MpuError(
                    f"--dp budget={budget:g}: with this one, the {len(before) + 1} in {path} would spend ε = "
                    f"{spent:.3g}{reason}",
                    "nothing was trained or released; a higher budget says more of your records",
                )
        append_line(path, {"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), **asdict(entry)})
        return before


def epsilon_of(
    entries: Sequence[LedgerEntry], delta: float, neighbours: str = "left-out", unit: str | None = None
) -> float:
    """ε at ``delta`` of all ``entries`` together, for each ``unit``; infinite if one has no bound."""
    spendings = [spending for entry in entries for spending in entry.spendings(unit)]
    return extension("accounting").composed_epsilon(spendings, delta, neighbours)


def summary(entries: Sequence[LedgerEntry]) -> Mapping[str, object]:
    """The contents of a ledger, for people."""
    trainings = [entry for entry in entries if entry.release is None]
    private = sum(entry.mechanism is not None for entry in trainings)
    public = sum(entry.public for entry in trainings)
    return {
        "trainings": len(trainings), "with --dp epsilon": private, "on --public-records": public,
        "without a bound": len(trainings) - private - public, "releases of terms": len(entries) - len(trainings),
        "runs": len({entry.run for entry in entries if entry.run}),
        "models": len({entry.weights for entry in entries if entry.weights}),
    }  # fmt: skip
