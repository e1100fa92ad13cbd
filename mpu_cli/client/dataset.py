"""The client's private records, read before anything large is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpu_cli.client.losses import objective_of
from mpu_cli.client.refusals import REFUSALS
from mpu_cli.errors import MpuError
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.unlearning import Records, Unlearning
from mpu_cli.records.reading import paragraphs_in, read_named
from mpu_cli.records.record import Record


@dataclass(frozen=True)
class Dataset:
    """What to forget and what to keep.

    ``few_shot`` are shown before each record as earlier turns; ``alternates`` are answers for DPO to prefer where a
    record has none of its own.
    """

    forget: Sequence[Record]
    retain: Sequence[Record] = ()
    few_shot: Sequence[Record] = ()
    alternates: Sequence[str] = REFUSALS

    def warnings(self) -> list[str]:
        """What is probably not as intended, a sentence each."""
        return [
            f"{records[0].location}: one record, of {paragraphs_in(records[0])} paragraphs; --split paragraphs makes a "
            "record of each"
            for records in (self.forget, self.retain)
            if len(records) == 1 and paragraphs_in(records[0]) > 1
        ]


def texts_of(data: Dataset) -> list[str]:
    """The texts of all records: turns and answers, as the client has them."""
    records = (*data.forget, *data.retain, *data.few_shot)
    return [text for record in records for text in (*(turn.content for turn in record.turns), record.answer) if text]


def read_dataset(options: Unlearning, observer: Observer = SILENT) -> Dataset:
    """The records that ``options`` name; no retain records if the algorithm reads none.

    What is read of which file is reported to ``observer``.

    Raises MpuError, naming the place, for records that cannot be read.
    """
    records, unit = options.records, options.privacy.dp_unit
    return Dataset(
        read_named(records.forget, records.reading, unit=unit, observer=observer),
        _retain(options, observer) if objective_of(options.algo, options.loss).constants.alpha else (),
        read_named(records.few_shot, records.reading, observer=observer) if records.few_shot else (),
        _lines(records.alternates) if records.alternates else REFUSALS,
    )


def _retain(options: Unlearning, observer: Observer) -> list[Record]:
    retain, default = options.records.retain, Records().retain
    try:
        return read_named(retain, options.records.reading, unit=options.privacy.dp_unit, observer=observer)
    except MpuError as error:
        if retain == default and not Path(retain).exists():
            raise MpuError(
                f"{retain}: no such file, and {options.algo} needs records to keep", "name them with --retain"
            ) from error
        raise


def _lines(path: Path) -> tuple[str, ...]:
    try:
        lines = tuple(line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise MpuError(f"{path}: cannot read the alternates") from error
    if not lines:
        raise MpuError(f"{path}: contains no alternates")
    return lines
