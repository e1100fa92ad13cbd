"""One record: who says what, and what is asked for; what files may hold it in."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from mpu_cli.errors import MpuError, UsageError

Turn = tuple[str, str]  # role, content
FORMS = "question/answer, prompt/completion, messages, conversations, or text"
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
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


def unit_of(row: object, field: str, place: str) -> str:
    """What ``field``, of --dp-unit, says of a row: whose it is. Raises MpuError if it says nothing."""
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
