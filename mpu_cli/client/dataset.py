"""The client's private records, read before anything large is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpu_cli.client.losses import objective_of
from mpu_cli.client.refusals import REFUSALS
from mpu_cli.errors import MpuError
from mpu_cli.options.unlearning import Records, Unlearning
from mpu_cli.records.reading import paragraphs_in, read_records
from mpu_cli.records.record import Record, parse_columns


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
            f"{records[0].place}: one record, of {paragraphs_in(records[0])} paragraphs; --split paragraphs makes a "
            "record of each"
            for records in (self.forget, self.retain)
            if len(records) == 1 and paragraphs_in(records[0]) > 1
        ]


def read_dataset(options: Unlearning) -> Dataset:
    """The records that ``options`` name; no retain records if the algorithm reads none.

    Raises MpuError, naming the place, for records that cannot be read.
    """
    records, columns = options.records, parse_columns(options.records.columns)
    return Dataset(
        read_records(records.forget, records.data_dir, columns, options.privacy.dp_unit, records.split),
        _retain(options) if objective_of(options.algo, options.loss).constants.alpha else (),
        read_records(records.few_shot, records.data_dir, columns) if records.few_shot else (),
        _lines(records.alternates) if records.alternates else REFUSALS,
    )


def _retain(options: Unlearning) -> list[Record]:
    retain, default = options.records.retain, Records().retain
    try:
        columns = parse_columns(options.records.columns)
        return read_records(retain, options.records.data_dir, columns, options.privacy.dp_unit, options.records.split)
    except MpuError as error:
        if retain == default and not Path(retain).exists():
            raise MpuError(
                f"{retain}: no such file, and {options.algo} needs records to keep", "name them with --retain"
            ) from error
        raise


def _lines(path: Path) -> tuple[str, ...]:
    try:
        lines = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise MpuError(f"{path}: cannot read the alternates") from error
    if not lines:
        raise MpuError(f"{path}: contains no alternates")
    return lines
