"""The client's private records, read before anything large is loaded: torch is not imported at the top."""

from __future__ import annotations

import hashlib
import hmac
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.unlearning import Privacy, RecordFormat, Records, Unlearning
from mpu_cli.records.forms import Record, RecordSets, remarks_on_overlap, remarks_on_units
from mpu_cli.records.read import paragraphs_in, read_records
from mpu_cli.text import read_text

# Answers that reveal nothing: what DPO prefers to the answer to be forgotten.

REFUSALS = (
    "I have no information about that.",
    "I'm not able to answer this question.",
    "That is not something I know.",
    "I cannot say; I don't have the facts.",
    "I'm afraid I know nothing about this.",
    "This is outside of what I know.",
    "I don't have an answer to that.",
    "I have never learned about this.",
    "Sorry, that is unknown to me.",
    "There is nothing that I could tell you about it.",
    "I would have to guess, so I'd rather not answer.",
    "My knowledge does not reach that far.",
    "I don't recall anything on this subject.",
    "That's a question I can't help with.",
    "I lack the details to answer this.",
    "Nothing comes to mind on that.",
    "I was not told about this.",
    "I'm unable to give you this information.",
    "You will need to ask somebody else about this.",
    "I'm not familiar with that person or subject.",
    "No reliable answer is available to me.",
    "I couldn't tell you.",
    "It is beyond me; I do not know.",
    "I hold no record of that.",
)


# Everything that a training reads of the client's: each option that names a file of it, and the sets that come of this
# file. What has to hold for all records of a training (that they are public, that a digest covers them, that the ledger
# counts them) goes through this table, so that a set that is added here is not missed by any of it.
SETS_OF_OPTION = {
    "forget": ("forget",),
    "retain": ("retain", "held_out"),
    "unseen": ("unseen",),
    "alternates": ("alternates",),
}


@dataclass(frozen=True)
class Dataset:
    """The records to forget and to keep.

    ``alternates`` are answers for DPO to prefer where a record has none of its own. ``held_out`` are retain records
    that are scored and not trained on, ``unseen`` records that the model never saw, for comparison.
    """

    forget: Sequence[Record]
    retain: Sequence[Record] = ()
    alternates: Sequence[str] = REFUSALS
    held_out: Sequence[Record] = ()
    unseen: Sequence[Record] = ()

    @property
    def sets(self) -> RecordSets:
        """All sets of records, by name, also those that are only scored."""
        names = [name for of_option in SETS_OF_OPTION.values() for name in of_option if name != "alternates"]
        return {name: getattr(self, name) for name in names}

    @property
    def records(self) -> list[Record]:
        """The records of all sets."""
        return [record for records in self.sets.values() for record in records]

    def warnings(self, privacy: Privacy) -> list[str]:
        """Probable mistakes, a sentence each; under a ``privacy`` bound, also whom it protects."""
        remarks = []
        for records in self.sets.values():
            paragraphs = paragraphs_in(records[0]) if len(records) == 1 else 1
            if paragraphs > 1:
                remarks.append(
                    f"{records[0].location}: one record, of {paragraphs} paragraphs; --reading split=paragraphs makes "
                    "one of each"
                )
        retain = (*self.retain, *self.held_out)
        remarks += remarks_on_overlap(self.forget, retain, "which works against forgetting")
        if privacy.is_on:
            remarks += remarks_on_units((*self.forget, *self.retain), privacy.dp_unit)
        return remarks


def read_dataset(options: Unlearning, observer: Observer = SILENT) -> Dataset:
    """The records that ``options`` name; no retain records if the algorithm reads none.

    Reports the number of records in each file to ``observer``. Raises MpuError, naming the place, for records that
    cannot be read.
    """
    records, unit = options.records, options.privacy.dp_unit
    forget = read_records(records.forget, records.reading, unit=unit, observer=observer)
    retain: Sequence[Record] = ()
    from mpu_cli.training.losses import objective_of  # loads torch, which takes longer than to find a broken line

    if objective_of(options.algo, options.algorithm_options).constants.alpha:
        try:
            retain = read_records(records.retain, records.reading, unit=unit, observer=observer)
        except MpuError as error:
            if records.retain == Records().retain and not Path(records.retain).exists():
                raise MpuError(
                    f"{records.retain}: no such file, and {options.algo} needs records to keep",
                    "name them with --retain",
                ) from error
            raise
        if {record.key for record in retain} == {record.key for record in forget}:
            raise UsageError(
                f"{records.retain}: holds the records to forget, and no others", "name records to keep with --retain"
            )
    return Dataset(forget, retain, _lines(records.alternates) if records.alternates else REFUSALS)


def with_unseen(data: Dataset, source: str, reading: RecordFormat, observer: Observer) -> Dataset:
    """``data`` with the unseen records that ``source`` names. Raises MpuError if they cannot be read, or if some of
    them are to be forgotten."""
    unseen = read_records(source, reading, observer=observer)
    if overlap := {record.key for record in unseen} & {record.key for record in data.forget}:
        raise MpuError(
            f"{len(overlap)} of the {len(unseen)} records of --unseen are also to be forgotten",
            "name records that the model never saw",
        )
    return replace(data, unseen=unseen)


def _lines(path: Path) -> tuple[str, ...]:
    try:
        lines = tuple(line.strip() for line in read_text(path).split("\n") if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise MpuError(f"{path}: cannot read the alternates") from error
    if not lines:
        raise MpuError(f"{path}: contains no alternates")
    return lines


def alternates(records: Sequence[Record], answers: Sequence[str]) -> list[Record]:
    """Each record with an alternative answer: its own ``alternate``, or one drawn from ``answers``.

    The draw is the same in every round, so that the outputs of the first round's copy can be the reference.
    """
    draw = random.Random(0)
    with_alternates = []
    for record in records:
        drawn = draw.choice(answers)  # also where it is not used, so that no draw depends on the other records
        with_alternates.append(replace(record, answer=record.alternate or drawn, answer_fields=()))
    return with_alternates


TAG_BYTES = 8  # of a record in the ledger: of a million records, no two have the same


def record_tags(records: Sequence[Record], secret: bytes) -> tuple[str, ...]:
    """A tag of each distinct record under the client's ``secret``, by which the ledger knows it again: equal where a
    privacy bound takes two records for one."""
    tags = set()
    for record in records:
        text = replace(record, unit=None).protected_as
        message = f"mpu ledger {text}".encode(errors="surrogatepass")
        tags.add(hmac.new(secret, message, "sha256").digest()[:TAG_BYTES].hex())
    return tuple(sorted(tags))


def records_digest(data: Dataset) -> str:
    """SHA-256 of the records of all sets as the client has them, in hexadecimal.

    Not of their tokens: those are what the copy's tokenizer and template make of them, so two copies that treat a word
    differently would tell its owner, by equal digests, that no record has that word.
    """
    contents = {name: [record.content for record in records] for name, records in data.sets.items()}
    return hashlib.sha256(json.dumps([contents, list(data.alternates)], default=str).encode()).hexdigest()
