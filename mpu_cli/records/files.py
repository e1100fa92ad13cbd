"""Files of records: which of a folder are read, and their rows."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from glob import glob, has_magic
from pathlib import Path
from typing import IO, Any

from mpu_cli.errors import MpuError, first_line

DELIMITERS = ",;\t|"
TEXT_SUFFIXES = (".txt", ".md")
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".csv", ".tsv")
PARQUET_SUFFIX = ".parquet"
RECORD_SUFFIXES = (*TEXT_SUFFIXES, *JSON_LINES_SUFFIXES, ".json", *TABLE_SUFFIXES, PARQUET_SUFFIX)
COMPRESSED: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
PARAGRAPHS = "paragraphs"  # of --split
# Files that come with a data set and hold none of its records, by their names without the last suffix.
DOCUMENTATION = re.compile(r"(readme|licen[cs]e|copying|notice|citation|changelog)([-_.][a-z0-9.]{1,12})?", re.I)
# What save_to_disk of datasets writes beside its tables, and what old versions of push_to_hub did.
DATASET_DICT, DATASET_STATE = "dataset_dict.json", "state.json"
DATASET_FILES = ("dataset_info.json", "dataset_infos.json")

_BLANK_LINES = re.compile(r"\n[ \t\r]*\n")
Rows = Iterator[tuple[str, object]]  # each row with its location


def suffix_of(path: Path) -> str:
    """The suffix that says what a file holds, in lower case and without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def files_at(path: Path) -> list[Path]:
    """The file at ``path``, or those that it is a pattern of; none if there are none.

    Raises MpuError for a file of a pattern that does not hold records by its name.
    """
    if path.is_file():
        return [path]
    if not has_magic(str(path)):
        return []
    files = [Path(name) for name in sorted(glob(str(path))) if Path(name).is_file()]
    if unreadable := [file for file in files if suffix_of(file) not in RECORD_SUFFIXES]:
        raise MpuError(
            f"{unreadable[0]}: not a file of records", f"name files that end in {', '.join(RECORD_SUFFIXES)}"
        )
    return files


def files_of_folder(folder: Path, split: str | None = None) -> list[Path]:
    """The files of records in ``folder``, those that ``datasets.load_dataset`` would read of its ``split``.

    Files of text alone are all read. Raises MpuError if the folder has several splits and none is named, if something
    in it would not be read, or if there are no records.
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
    splits = _splits_of(folder)
    if split is None and len(splits) > 1:
        raise MpuError(
            f"{folder}: has the splits {', '.join(splits)}", f"choose one, such as {folder}:{next(iter(splits))}"
        )
    if split is not None and split not in splits:
        raise MpuError(f"{folder}: no split {split!r} (available: {', '.join(splits) or 'none'})")
    of_splits = {file for paths in splits.values() for file in paths}
    path_of = {file: folder.resolve() / file.relative_to(folder) for file in files}  # links to files stay links
    if unread := [file for file in files if path_of[file] not in of_splits]:
        names = ", ".join(str(file.relative_to(folder)) for file in unread[:3]) + (", …" if len(unread) > 3 else "")
        raise MpuError(
            f"{folder}: {_number_of_files(unread)} would not be read: {names}",
            "name the files themselves, or keep other files elsewhere",
        )
    chosen = splits[split] if split is not None else next(iter(splits.values()))
    return [file for file in files if path_of[file] in chosen]


def _number_of_files(files: list[Path]) -> str:
    return "a file" if len(files) == 1 else f"{len(files)} files"


def _is_beside_the_data(file: Path, folder: Path) -> bool:
    """Whether a file is hidden, or documents a data set rather than holding its records."""
    if any(part.startswith((".", "__")) for part in file.relative_to(folder).parts) or file.name in DATASET_FILES:
        return True
    structured = {*RECORD_SUFFIXES} - {*TEXT_SUFFIXES}
    return bool(DOCUMENTATION.fullmatch(file.stem)) and suffix_of(file) not in structured


def _splits_of(folder: Path) -> dict[str, set[Path]]:
    """The files of each split of a folder, as datasets reads them. Raises MpuError if it cannot."""
    import tempfile
    from zipfile import BadZipFile

    import datasets
    from yaml import YAMLError

    with tempfile.TemporaryDirectory(prefix="mpu-") as cache:
        try:
            files = datasets.load_dataset_builder(str(folder.resolve()), cache_dir=cache).config.data_files
        except (OSError, ValueError, YAMLError, BadZipFile, datasets.exceptions.DatasetsError) as error:
            raise MpuError(f"{folder}: {first_line(error)}", "name the files themselves") from error
    return {str(name): {Path(file) for file in paths} for name, paths in (files or {}).items()}


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``folder`` was written by ``save_to_disk`` of datasets."""
    return (folder / DATASET_DICT).is_file() or (folder / DATASET_STATE).is_file()


def saved_dataset_rows(folder: Path, split: str | None) -> Rows:
    """Rows of a folder that ``save_to_disk`` wrote. Raises MpuError if it has splits and none is named."""
    import datasets

    if split is None and (folder / DATASET_DICT).is_file():
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        if len(names) != 1:
            raise MpuError(f"{folder}: has the splits {', '.join(names) or 'none'}", f"choose one: {folder}:SPLIT")
        [split] = names
    source = folder / split if split else folder
    try:
        rows = datasets.load_from_disk(str(source))
        yield from ((f"{source}, record {i}", row) for i, row in enumerate(rows, 1))
    except (OSError, ValueError, KeyError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise MpuError(f"{source}: not a data set that save_to_disk wrote ({first_line(error)})") from error


def file_rows(path: Path, split: str = "file") -> Rows:
    """Rows of a file of records, each with its location; ``read_records`` lists the formats.

    ``split``: whether a file of plain text is one record, "file", or one for each of its "paragraphs". Raises MpuError
    if the file cannot be read.
    """
    suffix = suffix_of(path)
    if suffix == PARQUET_SUFFIX:
        yield from rows_through_datasets(str(path), PARQUET_SUFFIX[1:], data_files=str(path), split="train")
    elif suffix in TABLE_SUFFIXES:
        yield from _table_rows(path, suffix)
    elif suffix in TEXT_SUFFIXES:
        yield from _text_rows(path, split)
    else:
        yield from _json_rows(path, suffix)


def _open_text(path: Path, **options: Any) -> IO[str]:
    opener = COMPRESSED.get(path.suffix.lower(), open)
    return opener(path, "rt", encoding="utf-8-sig", **options)  # type: ignore[no-any-return]


def _read_text(path: Path) -> str:
    try:
        with _open_text(path) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise MpuError(f"{path}: not a UTF-8 text file", "convert it, such as with iconv") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise MpuError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _text_rows(path: Path, split: str) -> Rows:
    text = _read_text(path)
    if split != PARAGRAPHS:
        yield str(path), {"text": text}
        return
    paragraphs = filter(None, map(str.strip, _BLANK_LINES.split(text)))
    yield from ((f"{path}, paragraph {number}", {"text": paragraph}) for number, paragraph in enumerate(paragraphs, 1))


def paragraph_count(text: str) -> int:
    """How many paragraphs a text has, which blank lines separate."""
    return sum(1 for paragraph in _BLANK_LINES.split(text) if paragraph.strip())


def _json_rows(path: Path, suffix: str) -> Rows:
    text = _read_text(path)
    if text.lstrip().startswith("[") or suffix not in JSON_LINES_SUFFIXES:
        records = _document_records(text, path)
        if records is not None:
            yield from ((f"{path}, record {i}", value) for i, value in enumerate(records, 1))
            return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            location = f"{path}, line {number}"
            try:
                yield location, json.loads(line)
            except (ValueError, RecursionError) as error:
                hint = "an object on several lines goes into a file of its own that ends in .json"
                raise MpuError(f"{location}: not JSON ({error})", hint if line.strip() in "{[" else None) from error


def _document_records(text: str, path: Path) -> list[object] | None:
    """The records of a JSON document: an array, one under "data", or a single object; None for what may be JSON
    lines."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("{"):
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


def _table_rows(path: Path, suffix: str) -> Rows:
    """Rows of a CSV or TSV file, without empty ones. Its delimiter is the one that gives the header most columns."""
    csv.field_size_limit(sys.maxsize)  # a field may hold a whole text
    try:
        with _open_text(path, newline="") as file:
            start, header = 0, file.readline()
            if header.lower().startswith("sep="):  # Excel's line, which names the delimiter
                start, header = file.tell(), file.readline()
            file.seek(start)
            delimiter = "\t" if suffix == ".tsv" else max(DELIMITERS, key=lambda mark: _column_count(header, mark))
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            names = [name for name in reader.fieldnames or () if name]
            if twice := {name for name in names if names.count(name) > 1}:
                raise MpuError(f"{path}: two columns are called {min(twice)!r}", "rename one of them")
            for number, row in enumerate(reader, 1):
                location = f"{path}, record {number}"
                if None in row or None in row.values():
                    raise MpuError(f"{location}: the number of fields differs from the header's")
                if any(row.values()):
                    yield location, row
    except UnicodeDecodeError as error:
        raise MpuError(f"{path}: not a UTF-8 table", "convert it, such as with iconv") from error
    except csv.Error as error:
        raise MpuError(f"{path}: not a table ({error})") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise MpuError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _column_count(header: str, delimiter: str) -> int:
    try:
        return len(next(csv.reader([header], delimiter=delimiter, strict=True), []))
    except csv.Error:
        return 0


def rows_through_datasets(source: str, loader: str, **arguments: object) -> Rows:
    """Rows read by Hugging Face datasets, with a temporary cache: records are private and must not be left behind."""
    import tempfile

    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="mpu-") as cache:
        try:
            rows = datasets.load_dataset(loader, cache_dir=cache, **arguments)
            yield from ((f"{source}, record {i}", row) for i, row in enumerate(rows, 1))
        except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
            hint = "if the Hub cannot be reached, pass a local folder with --data-dir" if loader == source else None
            raise MpuError(f"{source}: cannot be loaded ({first_line(error)})", hint) from error
