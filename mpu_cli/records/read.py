"""Reading records: local files and folders, Hub datasets, and common benchmarks by name."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import glob, has_magic
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from mpu_cli.errors import MpuError, UsageError, first_line
from mpu_cli.files.boundary import (
    Document,
    RepeatedName,
    Word,
    once_each,
    parse_document,
    private_scratch,
    read_bounded,
    repeated,
)
from mpu_cli.files.manifest import MANIFEST_NAME
from mpu_cli.files.visible import is_hidden, visible
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.unlearning import RecordFormat, Records
from mpu_cli.records.excel import ERROR_VALUE, CellError, UnformattedCell, excel_rows
from mpu_cli.records.forms import (
    Record,
    context_only_answers,
    form_of,
    other_forms,
    parse_columns,
    parse_record,
    records_of_turns,
    rename_columns,
    renamed_roles,
    unit_of,
    unread_fields,
    unread_marks,
)
from mpu_cli.text import BYTE_ORDER_MARK, BYTE_ORDER_MARKS, encoding_of
from mpu_cli.wording import counted

# Files of records: which of a folder are read, and their rows.

DELIMITERS = ",;\t|"
SAMPLED_ROWS = 200  # by which a table's delimiter is recognised
TEXT_SUFFIXES = (".txt", ".md")
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".csv", ".tsv")
PARQUET_SUFFIX, EXCEL_SUFFIX = ".parquet", ".xlsx"
RECORD_SUFFIXES = (*TEXT_SUFFIXES, *JSON_LINES_SUFFIXES, ".json", *TABLE_SUFFIXES, PARQUET_SUFFIX, EXCEL_SUFFIX)
# Files in which offices keep records, and which are not read here.
OFFICE_FILES = {
    ".doc": "a Word document", ".docx": "a Word document", ".odt": "a text document", ".pdf": "a PDF",
    ".rtf": "a text document", ".ods": "a spreadsheet", ".xls": "an old Excel file",
}  # fmt: skip
SHEETS = (".ods", ".xls")
COMPRESSED: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
MOST_EXPANDED, SMALL = 100, 1 << 20  # times the size of a compressed file and this many bytes: text is 3 to 20 times
PARAGRAPHS = "paragraphs"  # of --reading split
# Files that come with a data set and hold none of its records, by their names without the last suffix.
DOCUMENTATION = re.compile(r"readme|licen[cs]e|copying|notice|citation|changelog", re.I)
# Files that save_to_disk of datasets writes beside its tables, and that old versions of push_to_hub wrote.
DATASET_DICT, DATASET_STATE = "dataset_dict.json", "state.json"
DATASET_FILES = ("dataset_info.json", "dataset_infos.json")

_BLANK_LINES = re.compile(r"\n[ \t\r]*\n")
Row = tuple[str, object]  # its place, for messages, and what it holds
Rows = Iterator[Row]


def _numbered(place: str | Path, rows: Iterable[object]) -> Rows:
    """``rows`` of ``place`` with their places."""
    return ((f"{place}, record {number}", row) for number, row in enumerate(rows, 1))


def suffix_of(path: Path) -> str:
    """The suffix for the contents of a file, in lower case and without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def files_at(path: Path) -> list[Path]:
    """The file or pipe at ``path``, or the files that it is a pattern of; none if there are none."""
    if path.is_file() or path.is_fifo():
        return [path]
    if not has_magic(str(path)):
        return []
    files = [Path(name) for name in sorted(glob(str(path), recursive=True)) if Path(name).is_file()]
    if unreadable := [file for file in files if suffix_of(file) not in RECORD_SUFFIXES]:
        raise MpuError(
            f"{unreadable[0]}: not a file of records", f"name files that end in {', '.join(RECORD_SUFFIXES)}"
        )
    return files


def files_of_folder(folder: Path, split: str | None) -> list[Path]:
    """The files of records in ``folder``, those that ``datasets.load_dataset`` would read of its ``split``.

    Files of text alone are all read.
    """
    try:
        entries = sorted(folder.rglob("*"))
    except OSError as error:
        raise MpuError(f"{folder}: cannot be read: {error.strerror}") from error
    if linked := [entry for entry in entries if entry.is_symlink() and entry.is_dir()]:
        raise MpuError(f"{linked[0]}: a link to a folder, which is not followed", "name that folder, too")
    files = [file for file in entries if file.is_file() and not _is_beside_the_data(file, folder)]
    if not files:
        raise MpuError(f"{folder}: no file of records in it", f"put some there: {', '.join(RECORD_SUFFIXES)}")
    suffixes = {suffix_of(file) for file in files}
    if suffixes <= {*TEXT_SUFFIXES} and split is None:
        return files
    splits = _splits_of(folder, files)
    if split is None:
        split = next(iter(splits))
        if len(splits) > 1:
            raise MpuError(f"{folder}: has the splits {', '.join(splits)}", f"choose one, such as {folder}:{split}")
    elif split not in splits:
        raise MpuError(f"{folder}: no split {split!r} (available: {', '.join(splits) or 'none'})")
    of_splits = {file for paths in splits.values() for file in paths}
    path_of = {file: folder.resolve() / file.relative_to(folder) for file in files}  # links to files stay links
    if unread := [file for file in files if path_of[file] not in of_splits]:
        names = ", ".join(str(file.relative_to(folder)) for file in unread[:3]) + (", …" if len(unread) > 3 else "")
        raise MpuError(
            f"{folder}: {counted(len(unread), 'file')} would not be read: {names}",
            f"name a pattern, such as {_commonest_pattern(files)!r}, or keep other files elsewhere",
        )
    return [file for file in files if path_of[file] in splits[split]]


def _commonest_pattern(files: list[Path]) -> str:
    """``FOLDER/*.jsonl``, if more of ``files`` that may hold records match that than any other such pattern."""
    patterns: Counter[str] = Counter()
    for file in [file for file in files if suffix_of(file) in RECORD_SUFFIXES] or files:
        suffixes = file.suffixes[-2:] if file.suffix.lower() in COMPRESSED else file.suffixes[-1:]
        patterns[f"{file.parent}/*{''.join(suffixes)}"] += 1
    return patterns.most_common(1)[0][0]


def _is_beside_the_data(file: Path, folder: Path) -> bool:
    """Whether a file is hidden, or documents a data set rather than holding its records."""
    if any(map(is_hidden, file.relative_to(folder).parts)) or file.name in DATASET_FILES:
        return True
    structured = {*RECORD_SUFFIXES} - {*TEXT_SUFFIXES}
    return bool(DOCUMENTATION.fullmatch(file.stem)) and suffix_of(file) not in structured


def _splits_of(folder: Path, files: Sequence[Path]) -> dict[str, set[Path]]:
    """The ``files`` in a folder that belong to each split, as datasets reads it.

    datasets sees links to these files, in a folder of ours, and of the README only which of them are of which split:
    it would read from whatever address stands there.
    """
    from zipfile import BadZipFile

    import datasets

    root = folder.resolve()
    with private_scratch() as scratch:
        staged, cache = scratch / root.name, scratch / "cache"
        for file in files:
            link = staged / file.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(root / file.relative_to(folder))
        if card := _card_of(folder):
            (staged / CARD).write_text(card, encoding="utf-8")
        try:
            of_splits = datasets.load_dataset_builder(str(staged), cache_dir=str(cache)).config.data_files
        except (OSError, ValueError, BadZipFile, datasets.exceptions.DatasetsError) as error:
            reason = first_line(error).replace(str(staged), str(root))
            raise MpuError(f"{folder}: {reason}", "name the files themselves") from error
        staged = staged.resolve()
        return {
            str(name): {root / Path(file).relative_to(staged) for file in paths}
            for name, paths in (of_splits or {}).items()
        }


CARD = "README.md"  # with a data set's facts as YAML in front, between lines of "---"
LARGEST_CARD = 1 << 20  # bytes
_IN_THE_FOLDER = r"\A(?![/~])(?!(.*/)?\.\.(/|\Z))[^:\\\x00-\x1f]{1,500}\Z"  # no address, nothing outside

Pattern = Annotated[str, Meta(pattern=_IN_THE_FOLDER)]
Patterns = Pattern | Annotated[list[Pattern], Meta(max_length=1000)]


class _SplitOfCard(Document):
    split: Word
    path: Patterns


class _ConfigOfCard(Document, omit_defaults=True):
    config_name: Word  # which datasets asks for
    data_files: (
        Pattern | Annotated[list[Pattern | _SplitOfCard], Meta(max_length=1000)] | dict[Word, Patterns] | None
    ) = None
    data_dir: Pattern | None = None
    default: bool = False


class _Card(Document):
    configs: Annotated[list[_ConfigOfCard], Meta(max_length=100)]


def _card_of(folder: Path) -> str | None:
    """The lines about splits in the README in ``folder``, as a README of ours; None if it has none."""
    import yaml

    path = folder / CARD
    if not path.is_file():
        return None
    text = read_bounded(path, LARGEST_CARD).decode("utf-8", "replace").replace("\r\n", "\n")
    front = re.match(r"---\n(.*?)\n---[ \t]*(\n|\Z)", text, re.DOTALL)
    if front is None:
        return None
    where = f"{path}: its YAML"
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(front[1])):  # which can stand for gigabytes
            raise MpuError(f"{where} has aliases, which are not read", "name the files themselves")
        facts = yaml.safe_load(front[1])
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise MpuError(f"{where} cannot be read ({first_line(error)})", "name the files themselves") from error
    if not isinstance(facts, dict) or not facts.get("configs"):
        return None
    card = parse_document(_Card, {"configs": facts["configs"]}, where, "name the files themselves")
    entries = msgspec.to_builtins(card)
    return f"---\n{yaml.safe_dump(entries, sort_keys=False)}---\n"


def saved_dataset_rows(folder: Path, split: str | None) -> Rows:
    """Rows of a folder that ``save_to_disk`` wrote."""
    import datasets

    if split is None and (folder / DATASET_DICT).is_file():
        names = [path.name for path in visible(folder.iterdir()) if path.is_dir()]
        if len(names) != 1:
            raise MpuError(f"{folder}: has the splits {', '.join(names) or 'none'}", f"choose one: {folder}:SPLIT")
        [split] = names
    source = folder / split if split else folder
    try:
        yield from _numbered(source, datasets.load_from_disk(str(source)))
    except (OSError, ValueError, KeyError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise MpuError(f"{source}: not a data set that save_to_disk wrote ({first_line(error)})") from error


def file_rows(path: Path, split: str = "file", encoding: str | None = None) -> Rows:
    """Rows of a file of records, each with its location; ``read_records`` lists the formats.

    ``split``: whether a file of plain text is one record, "file", or one for each of its "paragraphs"; ``encoding``: of
    text, None for that of its byte order mark, and UTF-8 without one.
    """
    suffix = suffix_of(path)
    if suffix in OFFICE_FILES:
        way = "as a CSV file" if suffix in SHEETS else "as plain text (.txt), and see --reading split=paragraphs"
        raise MpuError(f"{path}: {OFFICE_FILES[suffix]}, which is not read", f"save it {way}")
    if suffix == PARQUET_SUFFIX:
        yield from _parquet_rows(path)
    elif suffix == EXCEL_SUFFIX:
        yield from _excel_rows(path)
    elif suffix in TABLE_SUFFIXES:
        yield from _table_rows(_read_text(path, encoding), path, suffix)
    else:
        text = _read_text(path, encoding).replace("\r\n", "\n").replace("\r", "\n")
        yield from _text_rows(text, path, split) if suffix in TEXT_SUFFIXES else _json_rows(text, path, suffix)


def _excel_rows(path: Path, sheet: str | None = None) -> Rows:
    """``excel_rows`` of a file that does not become too large: it is a compressed archive."""
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        if sum(member.file_size for member in archive.infolist()) > _most_expanded(path):
            raise _expands(path)
    return excel_rows(path, sheet)


def _read_text(path: Path, encoding: str | None) -> str:
    """The text of a file, its ends of lines as they are."""
    opener = COMPRESSED.get(path.suffix.lower())
    try:
        if path.is_fifo():
            content = _read_pipe(path)
        elif opener is None:
            content = path.read_bytes()
        else:
            most = _most_expanded(path)
            with opener(path, "rb") as file:
                content = file.read(most + 1)
            if len(content) > most:
                raise _expands(path)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise MpuError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if encoding is None or content.startswith((codecs.BOM_UTF8, *BYTE_ORDER_MARKS)):
        encoding = encoding_of(content)
    try:
        return content.decode(encoding).removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem, hint = f"not {encoding}", "--encoding has to name the file's encoding"
        if b"\0" in content:
            problem, hint = "not text, as UTF-8 is", "name a file of records; `mpu inspect` says what this one is"
        elif encoding == "utf-8":
            problem, hint = "not UTF-8", "name its encoding with --encoding, which on Windows often is cp1252"
        raise MpuError(f"{path}, line {line}: {problem}", hint) from error
    except (LookupError, ValueError) as error:  # ValueError: a name that no codec can have
        raise UsageError(f"--encoding {encoding}: not an encoding", "name one such as cp1252 or utf-16") from error


_PIPES: dict[tuple[int, int], bytes] = {}  # the contents of pipes, by device and number


def _read_pipe(path: Path) -> bytes:
    """The contents of a pipe: commands read some records twice, and a pipe gives them once."""
    status = path.stat()
    pipe = status.st_dev, status.st_ino
    if pipe not in _PIPES:
        _PIPES[pipe] = path.read_bytes()
    return _PIPES[pipe]


def _most_expanded(path: Path) -> int:
    """The most bytes that the contents of a compressed file may have."""
    return MOST_EXPANDED * (path.stat().st_size + SMALL)


def _expands(path: Path) -> MpuError:
    return MpuError(
        f"{path}: becomes more than {MOST_EXPANDED} times as large when it is read, which records do not",
        "if you trust it, expand it yourself, into JSON lines",
    )


def _parquet_rows(path: Path) -> Rows:
    """Rows of a table, read a few at a time: one value may stand in it a million times, and fill the memory."""
    from pyarrow import ArrowException, DictionaryArray, parquet

    budget, number = _most_expanded(path), 0
    try:
        with parquet.ParquetFile(path) as file:
            facts = file.metadata
            if sum(facts.row_group(i).total_byte_size for i in range(facts.num_row_groups)) > budget:
                raise _expands(path)
            for batch in file.iter_batches(batch_size=256):
                for column in batch.columns:
                    budget -= (column.dictionary_decode() if isinstance(column, DictionaryArray) else column).nbytes
                if budget < 0:
                    raise _expands(path)
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, record {number}", row
    except (ArrowException, OSError, ValueError) as error:
        raise MpuError(f"{path}: cannot be loaded ({first_line(error)})") from error


def _text_rows(text: str, path: Path, split: str) -> Rows:
    if split != PARAGRAPHS:
        yield str(path), {"text": text}
        return
    paragraphs = filter(None, map(str.strip, _BLANK_LINES.split(text)))
    yield from ((f"{path}, paragraph {number}", {"text": paragraph}) for number, paragraph in enumerate(paragraphs, 1))


def _json_rows(text: str, path: Path, suffix: str) -> Rows:
    if text.lstrip().startswith("[") or suffix not in JSON_LINES_SUFFIXES:
        records = _document_records(text, path)
        if records is not None:
            yield from _numbered(path, records)
            return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            location = f"{path}, line {number}"
            try:
                yield location, json.loads(line, object_pairs_hook=once_each)
            except (ValueError, RecursionError) as error:
                hint = "an object on several lines goes into a file of its own that ends in .json"
                raise MpuError(f"{location}: not JSON ({error})", hint if line.strip() in "{[" else None) from error


def _document_records(text: str, path: Path) -> list[object] | None:
    """The records of a JSON document: an array, one under "data", or a single object; None if it may be JSON
    lines."""
    try:
        document = json.loads(text, object_pairs_hook=once_each)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("{") and not isinstance(error, RepeatedName):
            return None
        raise MpuError(f"{path}: not JSON ({error})") from error
    if isinstance(document, list):
        return document
    if not isinstance(document, dict):
        raise MpuError(f"{path}: neither an object nor an array of records")
    if isinstance(document.get("data"), list):
        return list(document["data"])
    if lists := [name for name, value in document.items() if _is_list_of_records(value)]:
        raise MpuError(
            f"{path}: an object with records under {', '.join(map(repr, lists))}",
            "write an array of records, or put it under 'data'",
        )
    if document and all(isinstance(value, dict) for value in document.values()):
        raise MpuError(
            f"{path}: an object of columns, as pandas writes it", "write records: to_json(…, orient='records')"
        )
    return [document]


def _is_list_of_records(value: object) -> bool:
    """Whether ``value`` is a list of objects that are not the messages of one dialogue."""
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        return False
    return not any({"role", "from"} & entry.keys() for entry in value)


def _table_rows(text: str, path: Path, suffix: str) -> Rows:
    """Rows of a CSV or TSV file, without empty ones."""
    csv.field_size_limit(sys.maxsize)  # a field may hold a whole text
    try:
        file = io.StringIO(text, newline="")
        start, header = 0, file.readline()
        if header.lower().startswith("sep="):  # Excel's line, which names the delimiter
            start, header = file.tell(), file.readline()
        file.seek(start)
        delimiter = "\t" if suffix == ".tsv" else _delimiter(text[start:], header, path)
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        twice = repeated(name for name in reader.fieldnames or () if name)
        if twice is not None:
            raise MpuError(f"{path}: two columns are called {twice[:80]!r}", "rename one of them")
        for number, row in enumerate(reader, 1):
            location = f"{path}, record {number}"
            if None in row or None in row.values():
                raise MpuError(f"{location}: the number of fields differs from the header's")
            if any(row.values()):
                yield location, {name: _cell(text) for name, text in row.items()}
    except csv.Error as error:
        raise MpuError(f"{path}: not a table ({error})") from error


def _cell(text: str) -> str:
    """The text of a table's cell, with line breaks as in any other text, or the error value that it is."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return CellError(text) if ERROR_VALUE.fullmatch(text.strip()) else text


def _delimiter(table: str, header: str, path: Path) -> str:
    """The one of DELIMITERS that gives the header most columns, of those by which the first rows have as many as the
    header, if there are some."""
    counts = {mark: next(iter(_widths(header, mark)), 0) for mark in DELIMITERS}
    fitting = []
    for mark, count in counts.items():
        widths = {*_widths(table, mark)} if count > 1 else set()
        if widths and widths <= {0, count}:
            fitting.append(mark)
    marks = fitting or DELIMITERS
    most = max(counts[mark] for mark in marks)
    widest = [mark for mark in marks if counts[mark] == most]
    if fitting and len(widest) > 1:
        raise MpuError(
            f"{path}: its columns may be delimited by {' or by '.join(map(repr, widest))}",
            f"put a line above the header that says which, such as sep={widest[-1]}",
        )
    return widest[0]


def _widths(table: str, delimiter: str) -> list[int]:
    """The numbers of columns of the first rows; none if they are not delimited so."""
    reader = csv.reader(io.StringIO(table, newline=""), delimiter=delimiter, strict=True)
    try:
        return [len(row) for row in islice(reader, SAMPLED_ROWS)]
    except csv.Error:
        return []


def _rows_of_hub(name: str, config: str | None, split: str | None) -> Rows:
    """Rows read by Hugging Face datasets, with a temporary cache: records are private and must not be left behind."""
    import datasets

    datasets.disable_progress_bars()
    with private_scratch() as cache:
        try:
            yield from _numbered(
                name, datasets.load_dataset(name, name=config, split=split or "train", cache_dir=str(cache))
            )
        except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
            raise MpuError(
                f"{name}: cannot be loaded ({first_line(error)})",
                "if the Hub cannot be reached, pass a local folder with --reading data_dir",
            ) from error


HUB_PREFIX = "hub:"
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<config>[\w.-]+))?(:(?P<split>[\w.-]+))?\Z")
GATED = {"bio-forget-corpus": "cais/wmdp-bio-forget-corpus"}  # a repository of its own, on request
SHORTEST = 50  # characters of a text of WMDP or WikiText: RMU's script leaves out shorter ones, headings mostly


@dataclass(frozen=True)
class Corpus:
    """A benchmark's records on the Hub, which ``NAME:SPLIT`` stands for."""

    name: str
    repository: str
    config: str | None = None  # that has all splits there; None: a split is a config with a training set
    folder: str | None = None  # of a folder like the Hub's, where the splits of ``NAME:SPLIT`` are; also their config
    shortest: int = 0  # characters of a text: shorter ones are left out


CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus("tofu", "locuslab/TOFU"),
        Corpus("muse-news", "muse-bench/MUSE-News", folder="raw"),
        Corpus("muse-books", "muse-bench/MUSE-Books", folder="raw"),
        Corpus("wmdp", "cais/wmdp-corpora", shortest=SHORTEST),
        Corpus("wikitext", "Salesforce/wikitext", config="wikitext-2-raw-v1", shortest=SHORTEST),
    )
}


def read_records(
    source: str | Path,
    reading: RecordFormat = RecordFormat(),
    *,
    unit: str | None = None,
    observer: Observer = SILENT,
) -> list[Record]:
    """The records of ``source``, which may be several, one a line.

    A file of JSON lines, JSON (an array, one under "data", or one object), CSV, TSV, Excel (``FILE.xlsx:SHEET`` for one
    of several sheets), Parquet or plain text, perhaps compressed by gzip, bzip2 or xz; a pattern such as
    ``notes/*.txt``; a folder, of which ``datasets.load_dataset`` chooses the files, or ``FOLDER:SPLIT``; a pipe of JSON
    or JSON lines; ``tofu:SPLIT``, ``muse-news:SPLIT``, ``muse-books:SPLIT``, ``wmdp:CORPUS`` (bio-forget-corpus, …) or
    ``wikitext:SPLIT``, from the Hub or from the folder ``reading.data_dir``; or a dataset of the Hub,
    ``hub:OWNER/NAME[@CONFIG][:SPLIT]``. Nothing else is looked for on the Hub.

    ``unit`` names the field that says whose record it is. What is not read of the rows is reported to ``observer``, as
    are the rows that ``reading.skip_bad`` skips because they are not records. Raises MpuError if a row is not a record,
    naming its place, or if there are no records; UsageError for invalid columns or an unknown encoding.
    """
    records: list[Record] = []
    for name in str(source).splitlines():
        parsed = parsed_rows(name, reading, observer)
        for (location, row), record in parsed:
            with_unit = record if unit is None else replace(record, unit=unit_of(row, unit, location))
            records += records_of_turns(with_unit, reading.turns)
        report_rows(name, [row for row, _ in parsed], {unit} if unit else set(), observer)
    with_context = [record for record in records if any(turn.role == "assistant" for turn in record.turns)]
    if reading.turns == "last" and with_context:
        observer.note(
            f"{len(with_context)} of {len(records)} dialogues have earlier answers, which are context only; "
            "--reading turns=all takes each as a record"
        )
    return records


def parsed_rows(source: str | Path, reading: RecordFormat, observer: Observer) -> list[tuple[Row, Record]]:
    """The rows of one ``source``, as ``read_records`` takes it, each with its place, its fields by our names, and the
    record that it is."""
    columns = parse_columns(reading.columns)
    parsed: list[tuple[Row, Record]] = []
    skipped: list[str] = []
    for location, stored in _rows_of_source(source, reading):
        try:
            row = rename_columns(stored, columns, location)
            parsed.append(((location, row), parse_record(row, location)))
        except MpuError as error:
            if not reading.skip_bad:
                raise
            skipped.append(error.problem)
    if skipped:
        total = len(parsed) + len(skipped)
        observer.warn(f"{source}: skipped {len(skipped)} of {total} rows, such as {skipped[0]}")
    if not parsed:
        raise MpuError(f"{source}: contains no records")
    return parsed


def _rows_of_source(source: str | Path, reading: RecordFormat) -> Iterable[Row]:
    path = Path(source)
    if path.is_dir():
        if (path / MANIFEST_NAME).exists():
            raise MpuError(f"{source}: a copy of a model, or a model, not records", "name a file of records")
        return _folder_rows(path, None, reading)
    if files := files_at(path):
        return _rows_of_files(files, reading)
    name = str(source)
    corpus, _, of_corpus = name.partition(":")
    if corpus in CORPORA and re.fullmatch(r"[\w.-]+", of_corpus):
        return benchmark_rows(CORPORA[corpus], of_corpus, reading.data_dir, CORPORA[corpus].folder)
    if name.startswith(HUB_PREFIX):
        if match := _HUB.match(name.removeprefix(HUB_PREFIX)):
            return _rows_of_hub(match["name"], match["config"], match["split"])
        raise MpuError(f"{source}: not a dataset of the Hub", "name it hub:OWNER/NAME@CONFIG:SPLIT")
    folder, colon, of_folder = name.rpartition(":")
    if colon and Path(folder).is_dir():
        return _folder_rows(Path(folder), of_folder, reading)
    if colon and suffix_of(Path(folder)) == EXCEL_SUFFIX and Path(folder).is_file():
        return _excel_rows(Path(folder), of_folder)
    if name == Records().forget:
        raise MpuError("forget.jsonl: no such file", "name the records with --forget")
    hint = "pass a file of records, such as JSON lines"
    if _HUB.match(name) and not path.suffix:
        hint = f"for a dataset of the Hub, write {HUB_PREFIX}{source}"
    raise MpuError(f"{source}: no such file", hint)


def from_root(sources: str) -> str:
    """``sources``, which ``read_records`` takes, with the whole path of each file, folder or pattern."""

    def whole(name: str) -> str:
        corpus, folder = name.partition(":")[0], name.rpartition(":")[0]
        if corpus in CORPORA or name.startswith(HUB_PREFIX):
            return name
        is_path = Path(name).exists() or has_magic(name) or (folder and Path(folder).exists())
        return str(Path(name).absolute()) if is_path else name

    return "\n".join(map(whole, sources.splitlines()))


def _folder_rows(folder: Path, of_folder: str | None, reading: RecordFormat) -> Iterable[Row]:
    if (folder / DATASET_DICT).is_file() or (folder / DATASET_STATE).is_file():
        return saved_dataset_rows(folder, of_folder)
    return _rows_of_files(files_of_folder(folder, of_folder), reading)


def _rows_of_files(files: Iterable[Path], reading: RecordFormat) -> Iterable[Row]:
    return chain.from_iterable(file_rows(file, reading.split, reading.encoding) for file in files)


def report_rows(source: str, rows: Sequence[Row], read_fields: set[str], observer: Observer) -> None:
    """Report which files of ``source`` were read, with their numbers of records, and the unread parts of rows."""
    # The file of a row's place is what comes before the row's number.
    counts = Counter(re.sub(r", (line|record|paragraph) \d+\Z", "", location) for location, _ in rows)
    if len(counts) > 1 or Path(source).is_dir() or has_magic(str(source)):
        listed = [f"{file} ({count})" for file, count in counts.items()]
        shown = ", ".join(listed[:20]) + (f", and {len(listed) - 20} more files" if len(listed) > 20 else "")
        observer.note(f"{source}: {counted(len(rows), 'record')} from {shown}")
    fields: Counter[str] = Counter()
    roles: dict[str, str] = {}
    marks: set[str] = set()
    context_only = 0
    for _, row in rows:
        fields.update(unread_fields(row) - read_fields)
        roles |= renamed_roles(row)
        marks |= unread_marks(row)
        context_only += context_only_answers(row)
    if fields:
        observer.note(f"{source}: fields that are not part of the records: {', '.join(sorted(fields))}")
    if roles:
        observer.note(f"{source}: roles read as {', '.join(f'{role} ({name!r})' for name, role in roles.items())}")
    if unformatted := [
        f"{name!r} in {location.rpartition(', ')[2]} ({cell.number_format})"
        for location, row in rows
        for name, cell in (row.items() if isinstance(row, dict) else ())
        if isinstance(cell, UnformattedCell)
    ]:
        cells = ", ".join(unformatted[:3]) + (", …" if len(unformatted) > 3 else "")
        observer.warn(f"{source}: {counted(len(unformatted), 'cell')} not read in the sheet's number format: {cells}")
    if context_only:
        observer.note(
            f"{source}: context only: {counted(context_only, 'answer')} marked as not to be trained on, such as by "
            "'weight': 0"
        )
    if marks:
        observer.note(f"{source}: marks of training that are not read: {', '.join(sorted(marks))}")
    several = [row for _, row in rows if isinstance(row, dict) and other_forms(row)]
    if several:
        form = form_of(several[0])
        observer.note(
            f"{source}: {len(several)} of {len(rows)} records have both {form!r} and {other_forms(several[0])[0]!r}: "
            f"{form!r} is read; --columns chooses the other"
        )


def benchmark_rows(corpus: Corpus, split: str, data_dir: Path | None, config: str | None = None) -> list[Row]:
    """The rows of one split of a benchmark, each with its place: ``DIR/SPLIT.json`` or, in a ``config``,
    ``DIR/CONFIG/SPLIT.json``, JSON or JSON lines, or the same from the Hub."""
    if data_dir and not data_dir.is_dir():
        raise MpuError(f"--reading data_dir={data_dir}: no such directory")
    if data_dir is None:
        repository, config = GATED.get(split, corpus.repository), config or corpus.config
        if split in GATED:
            config, split = None, "train"
        elif config is None:
            config, split = split, "train"
        return _long_enough(corpus, _rows_of_hub(repository, config, split))
    folder = data_dir / config if config else data_dir
    for suffix in (".json", ".jsonl"):
        if (folder / f"{split}{suffix}").is_file():
            rows = _long_enough(corpus, file_rows(folder / f"{split}{suffix}"))
            if not rows:
                raise MpuError(f"{folder / split}{suffix}: contains no records")
            return rows
    available = ", ".join(path.stem for path in visible(folder.glob("*.json*"))) or "none"
    raise MpuError(f"{folder}: no split {split!r} of {corpus.name} (available: {available})")


def _long_enough(corpus: Corpus, rows: Iterable[Row]) -> list[Row]:
    """``rows``, without the short texts of corpora that are lines of documents."""
    long_rows = []
    for location, row in rows:
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str) or len(text) >= corpus.shortest:
            long_rows.append((location, row))
    return long_rows


def paragraphs_in(record: Record) -> int:
    """The number of paragraphs of a whole file of plain text, which is one record; 1 for any other record."""
    if record.turns or suffix_of(Path(record.location)) not in TEXT_SUFFIXES:
        return 1
    return sum(1 for paragraph in _BLANK_LINES.split(record.answer) if paragraph.strip())
