"""Reading records: local files, Hub datasets, and common benchmarks by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mpu_cli.errors import MpuError

Turn = tuple[str, str]  # role, content

_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<config>[\w.-]+))?(:(?P<split>[\w.-]+))?\Z")
_BENCHMARK = re.compile(r"(?P<name>tofu|muse-news|muse-books):(?P<split>[\w.-]+)\Z")
_HUB_NAMES = {"tofu": "locuslab/TOFU", "muse-news": "muse-bench/MUSE-News", "muse-books": "muse-bench/MUSE-Books"}
FORMS = "question/answer, prompt/completion, messages, or text"


@dataclass(frozen=True)
class Record:
    """Turns that lead to an answer or, without any turns, a text. ``alternate`` is an alternative answer (for DPO);
    ``place`` is where the record was read from, for messages."""

    turns: tuple[Turn, ...]
    answer: str
    place: str
    alternate: str | None = None

    @property
    def question(self) -> str:
        """The last turn before the answer."""
        return self.turns[-1][1]


def question(text: str, answer: str, place: str = "", alternate: str | None = None) -> Record:
    """A record of one question and its answer."""
    return Record((("user", text),), answer, place, alternate)


def read_records(source: str | Path, data_dir: Path | None = None) -> list[Record]:
    """The records of ``source``.

    A file of JSON lines, one JSON array, CSV or Parquet; ``tofu:SPLIT``, ``muse-news:SPLIT``, ``muse-books:SPLIT``,
    from the Hub or from the folder ``data_dir``; or a Hub dataset ``OWNER/NAME[@CONFIG][:SPLIT]``. Raises MpuError
    if a row is not a record, naming its place, or if there are no records.
    """
    path = Path(source)
    rows: Iterable[tuple[str, object]]
    if path.is_file():
        rows = file_rows(path)
    elif match := _BENCHMARK.match(str(source)):
        config = None if match["name"] == "tofu" else "raw"
        rows = benchmark_rows(match["name"], match["split"], data_dir, config)
    elif (match := _HUB.match(str(source))) and not path.suffix:
        rows = _rows_of_hub(match["name"], match["config"], match["split"])
    else:
        raise MpuError(f"{source}: no such file\npass a file of records, such as JSON lines")
    records = [_record(row, place) for place, row in rows]
    if not records:
        raise MpuError(f"{source}: contains no records")
    return records


def file_rows(path: Path) -> Iterator[tuple[str, object]]:
    """Rows of a file of JSON lines, one JSON array, CSV or Parquet, each with its place for messages."""
    if path.suffix in (".csv", ".parquet"):
        yield from _through_datasets(str(path), path.suffix[1:], data_files=str(path), split="train")
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise MpuError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MpuError(f"{path}: not a UTF-8 text file") from error
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MpuError(f"{path}: not JSON ({error})") from error
        yield from ((f"{path}, record {i}", value) for i, value in enumerate(values, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                yield place, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise MpuError(f"{place}: not JSON ({error})") from error


def benchmark_rows(name: str, split: str, data_dir: Path | None, config: str | None = None) -> list[tuple[str, object]]:
    """The rows of one split of tofu, muse-news or muse-books, each with its place: ``DIR/SPLIT.json`` for TOFU,
    ``DIR/CONFIG/SPLIT.json`` for MUSE, JSON or JSON lines, or the same from the Hub.

    Raises MpuError if the split does not exist, listing those that do.
    """
    if data_dir is None:
        hub = _rows_of_hub(_HUB_NAMES[name], config or split, split if config else "train")
        return list(hub)
    folder = data_dir / config if config else data_dir
    for suffix in (".json", ".jsonl"):
        if (folder / f"{split}{suffix}").is_file():
            rows = list(file_rows(folder / f"{split}{suffix}"))
            if not rows:
                raise MpuError(f"{folder / split}{suffix}: contains no records")
            return rows
    there = ", ".join(sorted(p.stem for p in folder.glob("*.json*"))) or "none"
    raise MpuError(f"{folder}: no split {split!r} of {name} (available: {there})")


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
            offline = "; if the Hub cannot be reached, pass a local folder with --data-dir" if loader == source else ""
            raise MpuError(
                f"{source}: cannot be loaded ({(str(error) or type(error).__name__).splitlines()[0]}){offline}"
            ) from error


def _record(row: object, place: str) -> Record:
    if not isinstance(row, dict):
        raise MpuError(f"{place}: not a JSON object with {FORMS}")
    alternate = row.get("alternate")
    if alternate is not None and not isinstance(alternate, str):
        raise MpuError(f"{place}: 'alternate' is not a string")
    if "messages" in row:
        turns = _turns(row["messages"], place)
        if turns[-1][0] != "assistant":
            raise MpuError(f"{place}: the last message is not the assistant's, so there is no answer")
        return Record(tuple(turns[:-1]), turns[-1][1], place, alternate)
    for prompt, answer in (("question", "answer"), ("prompt", "completion")):
        if prompt in row:
            texts = _text(row, prompt, place), _text(row, answer, place)
            return Record((("user", texts[0]),), texts[1], place, alternate)
    if "text" in row:
        return Record((), _text(row, "text", place), place, alternate)
    raise MpuError(f"{place}: none of {FORMS} found (its fields: {', '.join(map(str, row)) or 'none'})")


def _text(row: dict, name: str, place: str) -> str:
    if not isinstance(row.get(name), str) or not row[name].strip():
        raise MpuError(
            f"{place}: {name!r} is missing, empty or not a string (its fields: {', '.join(map(str, row)) or 'none'})"
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
