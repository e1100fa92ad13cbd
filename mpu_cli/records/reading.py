"""Reading records: local files, Hub datasets, and common benchmarks by name."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from glob import glob, has_magic
from itertools import chain
from pathlib import Path

from mpu_cli.errors import MpuError
from mpu_cli.records.record import Record, parse_record, renamed, unit_of

_BLANK_LINES = re.compile(r"\n[ \t\r]*\n")
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<config>[\w.-]+))?(:(?P<split>[\w.-]+))?\Z")
_BENCHMARK = re.compile(r"(?P<name>tofu|muse-news|muse-books|wmdp|wikitext):(?P<split>[\w.-]+)\Z")
_HUB_NAMES = {
    "tofu": "locuslab/TOFU", "muse-news": "muse-bench/MUSE-News", "muse-books": "muse-bench/MUSE-Books",
    "wmdp": "cais/wmdp-corpora", "wikitext": "Salesforce/wikitext",
}  # fmt: skip
GATED = {"bio-forget-corpus": "cais/wmdp-bio-forget-corpus"}  # a repository of its own, on request
SHORTEST = 50  # characters of a text of WMDP or WikiText: RMU's script leaves out shorter ones, headings mostly
DELIMITERS = ",;\t|"
TEXTS = (".txt", ".md")
READ = (*TEXTS, ".jsonl", ".json", ".csv", ".tsv", ".parquet")
PARAGRAPHS = "paragraphs"  # of --split
# Words in the names of columns by which a question and its answer are known, for a hint.


def read_records(
    source: str | Path,
    data_dir: Path | None = None,
    columns: Mapping[str, str] | None = None,
    unit: str | None = None,
    split: str = "file",
) -> list[Record]:
    """The records of ``source``, which may be several, one a line.

    A file of JSON lines, JSON (an array, or an object with one under "data"), CSV, TSV, Parquet or plain text; a folder
    of such files, or a pattern such as ``notes/*.txt``; ``tofu:SPLIT``, ``muse-news:SPLIT``, ``muse-books:SPLIT``,
    ``wmdp:CORPUS`` (bio-forget-corpus, …) or ``wikitext:SPLIT``, from the Hub or from the folder ``data_dir``; or a Hub
    dataset ``OWNER/NAME[@CONFIG][:SPLIT]``. ``columns`` maps our names of fields to the source's; ``unit`` names the
    field that says whose record it is; ``split``: whether a file of plain text is one record, "file", or one for each
    of its "paragraphs", which blank lines separate. Raises MpuError if a row is not a record, naming its place, or if
    there are no records.
    """
    rows = [row for each in str(source).splitlines() for row in source_rows(each, data_dir, columns, split)]
    if unit is None:
        return [parse_record(row, place) for place, row in rows]
    return [replace(parse_record(row, place), unit=unit_of(row, unit, place)) for place, row in rows]


def source_rows(
    source: str | Path,
    data_dir: Path | None = None,
    columns: Mapping[str, str] | None = None,
    split: str = "file",
) -> list[tuple[str, object]]:
    """The rows of one ``source``, as ``read_records`` takes it, each with its place."""
    path = Path(source)
    rows: Iterable[tuple[str, object]]
    if files := _files(path):
        rows = chain.from_iterable(file_rows(file, split) for file in files)
    elif match := _BENCHMARK.match(str(source)):
        config = "raw" if match["name"].startswith("muse") else None
        rows = benchmark_rows(match["name"], match["split"], data_dir, config)
    elif (match := _HUB.match(str(source))) and not path.suffix:
        rows = _rows_of_hub(match["name"], match["config"], match["split"])
    else:
        raise MpuError(f"{source}: no such file", "pass a file of records, such as JSON lines")
    named = [(place, renamed(row, columns or {}, place)) for place, row in rows]
    if not named:
        raise MpuError(f"{source}: contains no records")
    return named


def _files(path: Path) -> list[Path]:
    """The file at ``path``, those in it if it is a folder, or those that it is a pattern of. MpuError if a folder has
    none."""
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = sorted(file for file in path.iterdir() if file.suffix in READ and not file.name.startswith("."))
        if not inside:
            raise MpuError(f"{path}: no file of records in it", f"put some there: {', '.join(READ)}")
        return inside
    return [Path(name) for name in sorted(glob(str(path)))] if has_magic(str(path)) else []


def file_rows(path: Path, split: str = "file") -> Iterator[tuple[str, object]]:
    """Rows of a file of records, each with its place for messages; ``read_records`` lists the formats."""
    if path.suffix == ".parquet":
        yield from _through_datasets(str(path), "parquet", data_files=str(path), split="train")
        return
    if path.suffix in (".csv", ".tsv"):
        yield from _table(path)
        return
    values: list[object] | None = None
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise MpuError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MpuError(f"{path}: not a UTF-8 text file") from error
    if path.suffix in TEXTS:
        if split != PARAGRAPHS:
            yield str(path), {"text": text}
            return
        paragraphs = filter(None, map(str.strip, _BLANK_LINES.split(text)))
        yield from ((f"{path}, paragraph {number}", {"text": each}) for number, each in enumerate(paragraphs, 1))
        return
    if text.lstrip().startswith("[") or path.suffix == ".json":
        values = _array(text, path)
    if values is not None:
        yield from ((f"{path}, record {i}", value) for i, value in enumerate(values, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                yield place, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise MpuError(f"{place}: not JSON ({error})") from error


def _array(text: str, path: Path) -> list[object] | None:
    """The records of a JSON document: an array, or one under "data"; None for what may be JSON lines."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("{"):
            return None
        raise MpuError(f"{path}: not JSON ({error})") from error
    if isinstance(document, dict) and isinstance(document.get("data"), list):
        return document["data"]
    return document if isinstance(document, list) else None


def _table(path: Path) -> Iterator[tuple[str, object]]:
    """Rows of a CSV or TSV file, whose delimiter is found out."""
    csv.field_size_limit(sys.maxsize)  # a field may hold a whole text
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            delimiter = "\t" if path.suffix == ".tsv" else max(DELIMITERS, key=head.count)
            for number, row in enumerate(csv.DictReader(file, delimiter=delimiter, strict=True), 1):
                place = f"{path}, record {number}"
                if None in row or None in row.values():
                    raise MpuError(f"{place}: the number of fields differs from the header's")
                yield place, row
    except OSError as error:
        raise MpuError(f"{path}: cannot be read: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise MpuError(f"{path}: not a table ({error})") from error


def benchmark_rows(name: str, split: str, data_dir: Path | None, config: str | None = None) -> list[tuple[str, object]]:
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
    there = ", ".join(sorted(p.stem for p in folder.glob("*.json*"))) or "none"
    raise MpuError(f"{folder}: no split {split!r} of {name} (available: {there})")


def _benchmark_of_hub(name: str, split: str, config: str | None) -> Iterator[tuple[str, object]]:
    if name == "wikitext":
        return _rows_of_hub(_HUB_NAMES[name], "wikitext-2-raw-v1", split)
    if split in GATED:
        return _rows_of_hub(GATED[split], None, "train")
    if name not in _HUB_NAMES:
        raise MpuError(f"{name}: not on the Hub", "name its folder with --data-dir")
    return _rows_of_hub(_HUB_NAMES[name], config or split, split if config else "train")


def _long_enough(name: str, rows: Iterable[tuple[str, object]]) -> list[tuple[str, object]]:
    """``rows``, without the short texts of corpora that are lines of documents."""
    if name not in ("wmdp", "wikitext"):
        return list(rows)
    return [
        (place, row)
        for place, row in rows
        if not isinstance(row, dict) or not isinstance(row.get("text"), str) or len(row["text"]) >= SHORTEST
    ]


def _rows_of_hub(name: str, config: str | None, split: str | None) -> Iterator[tuple[str, object]]:
    yield from _through_datasets(name, name, name=config, split=split or "train")


def _through_datasets(source: str, loader: str, **arguments: object) -> Iterator[tuple[str, object]]:
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
            raise MpuError(
                f"{source}: cannot be loaded ({(str(error) or type(error).__name__).splitlines()[0]})", hint
            ) from error


def paragraphs_in(record: Record) -> int:
    """How many paragraphs a whole file of plain text has, which is one record; 1 for any other record."""
    if record.turns or Path(record.place).suffix not in TEXTS:
        return 1
    return sum(1 for each in _BLANK_LINES.split(record.answer) if each.strip())
