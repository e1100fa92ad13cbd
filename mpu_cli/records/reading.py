"""Reading records: local files, Hub datasets, and common benchmarks by name."""

from __future__ import annotations

import csv
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from glob import glob, has_magic
from itertools import chain
from pathlib import Path

from mpu_cli.errors import MpuError, UsageError

Turn = tuple[str, str]  # role, content

_BLANK_LINES = re.compile(r"\n[ \t\r]*\n")
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<config>[\w.-]+))?(:(?P<split>[\w.-]+))?\Z")
_BENCHMARK = re.compile(r"(?P<name>tofu|muse-news|muse-books|wmdp|wikitext):(?P<split>[\w.-]+)\Z")
_HUB_NAMES = {
    "tofu": "locuslab/TOFU", "muse-news": "muse-bench/MUSE-News", "muse-books": "muse-bench/MUSE-Books",
    "wmdp": "cais/wmdp-corpora", "wikitext": "Salesforce/wikitext",
}  # fmt: skip
GATED = {"bio-forget-corpus": "cais/wmdp-bio-forget-corpus"}  # a repository of its own, on request
SHORTEST = 50  # characters of a text of WMDP or WikiText: RMU's script leaves out shorter ones, headings mostly
FORMS = "question/answer, prompt/completion, messages, conversations, or text"
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
DELIMITERS = ",;\t|"
TEXTS = (".txt", ".md")
READ = (*TEXTS, ".jsonl", ".json", ".csv", ".tsv", ".parquet")
PARAGRAPHS = "paragraphs"  # of --split
# Words in the names of columns by which a question and its answer are known, for a hint.
ASKS = ("question", "prompt", "instruction", "input", "query", "message", "customer", "user", "request", "ticket")
ANSWERS = ("answer", "response", "reply", "output", "completion", "agent", "resolution", "assistant", "solution")


@dataclass(frozen=True)
class Record:
    """Turns that lead to an answer or, without any turns, a text. ``alternate`` is an alternative answer (for DPO);
    ``place`` is where the record was read from, for messages; ``unit`` is whose record it is, if a field says so."""

    turns: tuple[Turn, ...]
    answer: str
    place: str
    alternate: str | None = None
    unit: str | None = None

    @property
    def question(self) -> str:
        """The last turn before the answer."""
        return self.turns[-1][1]


def question(text: str, answer: str, place: str = "", alternate: str | None = None) -> Record:
    """A record of one question and its answer."""
    return Record((("user", text),), answer, place, alternate)


def parse_columns(text: str | None) -> dict[str, str]:
    """``question=instruction,answer=response`` as our name → the column's name. Raises UsageError if it is not that."""
    columns = {}
    for part in filter(None, map(str.strip, (text or "").split(","))):
        ours, equals, theirs = (word.strip() for word in part.partition("="))
        if not (ours and equals and theirs):
            raise UsageError(f"--columns {part}: expected NAME=COLUMN, such as question=instruction,answer=response")
        columns[ours] = theirs
    return columns


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
    return [replace(parse_record(row, place), unit=_unit(row, unit, place)) for place, row in rows]


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


def renamed(row: object, columns: Mapping[str, str], place: str) -> object:
    """``row`` with the fields that ``columns`` names also under our names. MpuError if it has no such field."""
    if not columns or not isinstance(row, dict):
        return row
    if missing := [theirs for theirs in columns.values() if theirs not in row]:
        close = get_close_matches(missing[0].lower(), [name.lower() for name in map(str, row)], 1, 0.5)
        meant = next((name for name in map(str, row) if [name.lower()] == close), None)
        raise MpuError(
            f"{place}: no field {missing[0]!r} (its fields: {', '.join(map(str, row)) or 'none'})",
            f"did you mean {meant!r}?" if meant else None,
        )
    return row | {ours: row[theirs] for ours, theirs in columns.items()}


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


def parse_record(row: object, place: str) -> Record:
    """The record in a row. Raises MpuError, naming the place, if there is none."""
    if not isinstance(row, dict):
        raise MpuError(f"{place}: not a JSON object with {FORMS}")
    alternate = row.get("alternate") or None  # an empty cell of a table is no answer
    if alternate is not None and not isinstance(alternate, str):
        raise MpuError(f"{place}: 'alternate' is not a string")
    if "messages" in row:
        turns = _turns(row["messages"], place)
        if turns[-1][0] != "assistant":
            raise MpuError(f"{place}: the last message is not the assistant's, so there is no answer")
        return Record(tuple(turns[:-1]), turns[-1][1], place, alternate)
    if "conversations" in row:
        turns = _turns(_from_sharegpt(row["conversations"]), place)
        if turns[-1][0] != "assistant":
            raise MpuError(f"{place}: the last message is not the assistant's, so there is no answer")
        return Record(tuple(turns[:-1]), turns[-1][1], place, alternate)
    for prompt, answer in (("question", "answer"), ("prompt", "completion")):
        if prompt in row:
            texts = _text(row, prompt, place), _text(row, answer, place)
            return Record((("user", texts[0]),), texts[1], place, alternate)
    if "text" in row:
        return Record((), _text(row, "text", place), place, alternate)
    raise MpuError(
        f"{place}: none of {FORMS} found (its fields: {', '.join(map(str, row)) or 'none'})", _columns_option(row)
    )


def _columns_option(row: Mapping[str, object]) -> str | None:
    """The option that names a question and its answer in a table of other fields, as far as their names tell."""
    names = [str(name) for name, value in row.items() if isinstance(value, str)]
    asked, answer = (
        next((name for word in words for name in names if word in name.lower()), None) for words in (ASKS, ANSWERS)
    )
    if len(names) == 2 and asked is answer is None:
        asked, answer = names
    if len(names) < 2 or asked == answer:
        return None
    asked, answer = asked or next(n for n in names if n != answer), answer or next(n for n in names if n != asked)
    return f"name them: --columns {shlex.quote(f'question={asked},answer={answer}')}"


def paragraphs_in(record: Record) -> int:
    """How many paragraphs a whole file of plain text has, which is one record; 1 for any other record."""
    if record.turns or Path(record.place).suffix not in TEXTS:
        return 1
    return sum(1 for each in _BLANK_LINES.split(record.answer) if each.strip())


def _from_sharegpt(messages: object) -> object:
    """Messages of {"from": …, "value": …} as {"role": …, "content": …}; anything else as it is."""
    if not isinstance(messages, list):
        return messages
    return [
        {"role": ROLES.get(str(message["from"]), message["from"]), "content": message.get("value")}
        if isinstance(message, dict) and "from" in message
        else message
        for message in messages
    ]


def _unit(row: object, field: str, place: str) -> str:
    value = row.get(field) if isinstance(row, dict) else None
    if not isinstance(value, str | int) or value == "":
        raise MpuError(f"{place}: no {field!r}, which --dp-unit names")
    return str(value)


def _text(row: dict, name: str, place: str) -> str:
    if not isinstance(row.get(name), str) or not row[name].strip():
        raise MpuError(
            f"{place}: {name!r} is missing, empty or not a string (its fields: {', '.join(map(str, row)) or 'none'})",
            None if name in row else _columns_option(row),
        )
    try:
        row[name].encode()
    except UnicodeEncodeError as error:
        raise MpuError(f"{place}: {name!r} contains an unpaired surrogate, which is not valid text") from error
    return row[name]


def _turns(messages: object, place: str) -> list[Turn]:
    turns = []
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise MpuError(f"{place}: every message needs a role and content")
        turns.append((_text(message, "role", place), _text(message, "content", place)))
    if len(turns) < 2:
        raise MpuError(f"{place}: messages need a question and an answer")
    return turns
