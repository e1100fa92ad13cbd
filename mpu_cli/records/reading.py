"""Reading records: local files and folders, Hub datasets, and common benchmarks by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from mpu_cli.errors import MpuError
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.unlearning import RecordFormat
from mpu_cli.records.files import (
    TEXT_SUFFIXES,
    file_rows,
    files_at,
    files_of_folder,
    is_saved_dataset,
    paragraph_count,
    rows_through_datasets,
    saved_dataset_rows,
    suffix_of,
)
from mpu_cli.records.forms import (
    form_of,
    other_forms,
    parse_columns,
    parse_record,
    rename_columns,
    unit_of,
    unread_fields,
)
from mpu_cli.records.record import Record, records_of_turns

HUB_PREFIX = "hub:"
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<config>[\w.-]+))?(:(?P<split>[\w.-]+))?\Z")
_BENCHMARK = re.compile(r"(?P<name>tofu|muse-news|muse-books|wmdp|wikitext):(?P<split>[\w.-]+)\Z")
_HUB_NAMES = {
    "tofu": "locuslab/TOFU", "muse-news": "muse-bench/MUSE-News", "muse-books": "muse-bench/MUSE-Books",
    "wmdp": "cais/wmdp-corpora", "wikitext": "Salesforce/wikitext",
}  # fmt: skip
GATED = {"bio-forget-corpus": "cais/wmdp-bio-forget-corpus"}  # a repository of its own, on request
SHORTEST = 50  # characters of a text of WMDP or WikiText: RMU's script leaves out shorter ones, headings mostly

Row = tuple[str, object]  # its place, for messages, and what it holds


def read_records(
    source: str | Path,
    data_dir: Path | None = None,
    columns: Mapping[str, str] | None = None,
    unit: str | None = None,
    split: str = "file",
    turns: str = "last",
    observer: Observer = SILENT,
    skip_bad: bool = False,
) -> list[Record]:
    """The records of ``source``, which may be several, one a line.

    A file of JSON lines, JSON (an array, one under "data", or one object), CSV, TSV, Parquet or plain text, perhaps
    compressed by gzip, bzip2 or xz; a pattern such as ``notes/*.txt``; a folder, of which ``datasets.load_dataset``
    chooses the files, or ``FOLDER:SPLIT``; ``tofu:SPLIT``, ``muse-news:SPLIT``, ``muse-books:SPLIT``, ``wmdp:CORPUS``
    (bio-forget-corpus, …) or ``wikitext:SPLIT``, from the Hub or from the folder ``data_dir``; or a dataset of the Hub,
    ``hub:OWNER/NAME[@CONFIG][:SPLIT]``. Nothing else is looked for on the Hub.

    ``columns`` maps our names of fields to the source's; ``unit`` names the field that says whose record it is;
    ``split``: whether a file of plain text is one record, "file", or one for each of its "paragraphs"; ``turns``:
    whether the answer of a dialogue is its "last" assistant turn, or each of "all". What is not read of the rows is
    reported to ``observer``, as are the rows that ``skip_bad`` skips because they are not records. Raises MpuError if a
    row is not a record, naming its place, or if there are no records.
    """
    records: list[Record] = []
    for name in str(source).splitlines():
        parsed = parsed_rows(name, data_dir, columns, split, observer, skip_bad=skip_bad)
        for (location, row), record in parsed:
            with_unit = record if unit is None else replace(record, unit=unit_of(row, unit, location))
            records += records_of_turns(with_unit, turns)
        report_rows(name, [row for row, _ in parsed], {unit} if unit else set(), observer)
    if turns == "last" and (count := sum(record.earlier_answers > 0 for record in records)):
        observer.note(
            f"{count} of {len(records)} dialogues have earlier answers, which are context only; --turns all takes each "
            "as a record"
        )
    return records


def read_named(
    source: str | Path, reading: RecordFormat, *, unit: str | None = None, observer: Observer = SILENT
) -> list[Record]:
    """``read_records`` with the options of a command."""
    columns = parse_columns(reading.columns)
    return read_records(
        source, reading.data_dir, columns, unit, reading.split, reading.turns, observer, reading.skip_bad
    )


def parsed_rows(
    source: str | Path,
    data_dir: Path | None = None,
    columns: Mapping[str, str] | None = None,
    split: str = "file",
    observer: Observer = SILENT,
    *,
    skip_bad: bool = False,
) -> list[tuple[Row, Record]]:
    """The rows of one ``source``, as ``read_records`` takes it, each with its place, its fields by our names, and the
    record that it is. Raises MpuError as ``read_records`` does."""
    parsed: list[tuple[Row, Record]] = []
    skipped: list[str] = []
    for location, stored in _rows_of_source(source, data_dir, split):
        try:
            row = rename_columns(stored, columns or {}, location)
            parsed.append(((location, row), parse_record(row, location)))
        except MpuError as error:
            if not skip_bad:
                raise
            skipped.append(error.problem)
    if skipped:
        total = len(parsed) + len(skipped)
        observer.warn(f"{source}: skipped {len(skipped)} of {total} rows, such as {skipped[0]}")
    if not parsed:
        raise MpuError(f"{source}: contains no records")
    return parsed


def _rows_of_source(source: str | Path, data_dir: Path | None, split: str) -> Iterable[Row]:
    path = Path(source)
    if path.is_dir():
        return _folder_rows(path, None, split)
    if files := files_at(path):
        return chain.from_iterable(file_rows(file, split) for file in files)
    if match := _BENCHMARK.match(str(source)):
        config = "raw" if match["name"].startswith("muse") else None
        return benchmark_rows(match["name"], match["split"], data_dir, config)
    name = str(source)
    if name.startswith(HUB_PREFIX):
        if match := _HUB.match(name.removeprefix(HUB_PREFIX)):
            return _rows_of_hub(match["name"], match["config"], match["split"])
        raise MpuError(f"{source}: not a dataset of the Hub", "name it hub:OWNER/NAME@CONFIG:SPLIT")
    folder, colon, of_folder = name.rpartition(":")
    if colon and Path(folder).is_dir():
        return _folder_rows(Path(folder), of_folder, split)
    raise MpuError(
        f"{source}: no such file",
        f"for a dataset of the Hub, write hub:{source}" if _HUB.match(name) and not path.suffix
        else "pass a file of records, such as JSON lines",
    )  # fmt: skip


def _folder_rows(folder: Path, of_folder: str | None, split: str) -> Iterable[Row]:
    if is_saved_dataset(folder):
        return saved_dataset_rows(folder, of_folder)
    return chain.from_iterable(file_rows(file, split) for file in files_of_folder(folder, of_folder))


def report_rows(source: str, rows: Sequence[Row], read_fields: set[str], observer: Observer) -> None:
    """Tell which files of ``source`` were read, with their numbers of records, and what in the rows no record has."""
    counts = Counter(_file_of(location) for location, _ in rows)
    if len(counts) > 1 or Path(source).is_dir():
        listed = [f"{file} ({count})" for file, count in counts.items()]
        shown = ", ".join(listed[:20]) + (f", and {len(listed) - 20} more files" if len(listed) > 20 else "")
        observer.note(f"{source}: {len(rows)} records from {shown}")
    fields: Counter[str] = Counter()
    for _, row in rows:
        fields.update(unread_fields(row) - read_fields)
    if fields:
        observer.note(f"{source}: fields that are not part of the records: {', '.join(sorted(fields))}")
    several = [row for _, row in rows if isinstance(row, dict) and other_forms(row)]
    if several:
        form = form_of(several[0])
        observer.note(
            f"{source}: {len(several)} of {len(rows)} records have both {form!r} and {other_forms(several[0])[0]!r}: "
            f"{form!r} is read; --columns chooses the other"
        )


def _file_of(location: str) -> str:
    """The file of a row's place, such as "a.jsonl" of "a.jsonl, line 3"."""
    return re.sub(r", (line|record|paragraph) \d+\Z", "", location)


def benchmark_rows(name: str, split: str, data_dir: Path | None, config: str | None = None) -> list[Row]:
    """The rows of one split of a benchmark, each with its place: ``DIR/SPLIT.json`` for TOFU, WMDP and WikiText,
    ``DIR/CONFIG/SPLIT.json`` for MUSE, JSON or JSON lines, or the same from the Hub.

    Raises MpuError if the split does not exist, listing those that do.
    """
    if data_dir and not data_dir.is_dir():
        raise MpuError(f"--data-dir {data_dir}: no such directory")
    if data_dir is None:
        return _long_enough(name, _benchmark_of_hub(name, split, config))
    folder = data_dir / config if config else data_dir
    for suffix in (".json", ".jsonl"):
        if (folder / f"{split}{suffix}").is_file():
            rows = _long_enough(name, file_rows(folder / f"{split}{suffix}"))
            if not rows:
                raise MpuError(f"{folder / split}{suffix}: contains no records")
            return rows
    available = ", ".join(sorted(p.stem for p in folder.glob("*.json*"))) or "none"
    raise MpuError(f"{folder}: no split {split!r} of {name} (available: {available})")


def _benchmark_of_hub(name: str, split: str, config: str | None) -> Iterator[Row]:
    if name == "wikitext":
        return _rows_of_hub(_HUB_NAMES[name], "wikitext-2-raw-v1", split)
    if split in GATED:
        return _rows_of_hub(GATED[split], None, "train")
    if name not in _HUB_NAMES:
        raise MpuError(f"{name}: not on the Hub", "name its folder with --data-dir")
    return _rows_of_hub(_HUB_NAMES[name], config or split, split if config else "train")


def _long_enough(name: str, rows: Iterable[Row]) -> list[Row]:
    """``rows``, without the short texts of corpora that are lines of documents."""
    if name not in ("wmdp", "wikitext"):
        return list(rows)
    return [
        (location, row)
        for location, row in rows
        if not isinstance(row, dict) or not isinstance(row.get("text"), str) or len(row["text"]) >= SHORTEST
    ]


def _rows_of_hub(name: str, config: str | None, split: str | None) -> Iterator[Row]:
    yield from rows_through_datasets(name, name, name=config, split=split or "train")


def paragraphs_in(record: Record) -> int:
    """How many paragraphs a whole file of plain text has, which is one record; 1 for any other record."""
    if record.turns or suffix_of(Path(record.location)) not in TEXT_SUFFIXES:
        return 1
    return paragraph_count(record.answer)
