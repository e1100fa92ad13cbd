"""The forms that rows of files may have, and the record in each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.records.hints import columns_hint
from mpu_cli.records.record import Record, Turn

FORMS = "question/answer, prompt/completion, instruction/output, messages, conversations, or text"
# The first of these that a row has is its form; --columns chooses another.
MAIN_FIELDS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "question": ("question", "answer"),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
# Read beside the fields of a form, or by the evaluation.
OTHER_FIELDS = {"alternate", "system", "set", "paraphrased_answer", "perturbed_answer", "paraphrased_question"}
# ShareGPT's names of roles.
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
    "function": "tool", "observation": "tool",
}  # fmt: skip
MISTYPED = 0.75  # similarity from which a field is taken for the one that --columns meant


def parse_columns(text: str | None) -> dict[str, str]:
    """``question=instruction,answer=response`` as our name → the column's name. Raises UsageError if it is not that."""
    columns = {}
    for part in filter(None, map(str.strip, (text or "").split(","))):
        ours, equals, theirs = (word.strip() for word in part.partition("="))
        if not (ours and equals and theirs):
            raise UsageError(f"--columns {part}: expected NAME=COLUMN, such as question=instruction,answer=response")
        columns[ours] = theirs
    return columns


def rename_columns(row: object, columns: Mapping[str, str], location: str) -> object:
    """``row`` with the fields that ``columns`` names under our names, and without those of any other form.

    A row that has none of these fields, nor one of nearly that name, is of another file's form and stays as it is.
    Raises MpuError if it has some of them only, or if it has no form either.
    """
    if not columns or not isinstance(row, dict):
        return row
    if missing := [theirs for theirs in columns.values() if theirs not in row]:
        lowered = {name.lower(): name for name in map(str, row)}
        mistyped = any(get_close_matches(theirs.lower(), lowered, 1, MISTYPED) for theirs in missing)
        if len(missing) == len(columns) and not mistyped and _is_record(row, location):
            return row
        close = get_close_matches(missing[0].lower(), lowered, 1, 0.5)
        raise MpuError(
            f"{location}: no field {missing[0]!r} (its fields: {_names(row)})",
            f"did you mean {lowered[close[0]]!r}?" if close else None,
        )
    renamed = {ours: row[theirs] for ours, theirs in columns.items()}
    main = {field for fields in MAIN_FIELDS.values() for field in fields}
    dropped = {*columns.values(), *(main if main & renamed.keys() else ())}
    return {name: value for name, value in row.items() if name not in dropped} | renamed


def _is_record(row: Mapping[str, object], location: str) -> bool:
    try:
        parse_record(row, location)
    except MpuError:
        return False
    return True


def form_of(row: Mapping[str, object]) -> str | None:
    """The first field of the form that ``row`` has, None if it has none. A field that is null or empty is absent if
    another form is there."""
    named = [name for name in MAIN_FIELDS if row.get(name) is not None]
    return next((name for name in named if not _is_blank(row[name])), next(iter(named), None))


def _is_blank(value: object) -> bool:
    return value in (None, "", [], {}) or (isinstance(value, str) and not value.strip())


def other_forms(row: Mapping[str, object]) -> list[str]:
    """The complete forms that a row has besides the one that is read."""
    complete = [name for name, fields in MAIN_FIELDS.items() if all(not _is_blank(row.get(field)) for field in fields)]
    return [name for name in complete if name != form_of(row)]


def unread_fields(row: object) -> set[str]:
    """The fields of a row that no command reads: what they say is in no record."""
    if not isinstance(row, dict):
        return set()
    form = form_of(row)
    read = {*OTHER_FIELDS, *(["input"] if form == "instruction" else [])}
    for name in (form, *other_forms(row)):  # of other complete forms, the note on which one is read tells
        read |= {*MAIN_FIELDS.get(name or "", ())}
    if form in ("messages", "conversations") and _begins_with_system(row[form]):
        read -= {"system"}  # the dialogue's own is used
    return {str(name) for name, value in row.items() if name and name not in read and not _is_blank(value)}


def _begins_with_system(messages: object) -> bool:
    message = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(message, dict) and "system" in (message.get("role"), message.get("from"))


def parse_record(row: object, location: str) -> Record:
    """The record in a row. Raises MpuError, naming the location, if there is none."""
    if not isinstance(row, dict):
        raise MpuError(f"{location}: not a JSON object with {FORMS}")
    alternate = row.get("alternate") or None  # an empty cell of a table is no answer
    if alternate is not None:
        alternate = _text(row, "alternate", location)
    form = form_of(row)
    if form == "text":
        return Record((), _text(row, "text", location), location, alternate)
    if form == "messages":
        turns = _turns(row["messages"], location)
    elif form == "conversations":
        turns = _turns(_from_sharegpt(row["conversations"]), location)
    elif form == "instruction":
        extra = str(row.get("input") or "").strip()
        instruction = _text(row, "instruction", location) + (f"\n\n{extra}" if extra else "")
        turns = [Turn("user", instruction), Turn("assistant", _text(row, "output", location))]
    elif form == "prompt" and isinstance(row["prompt"], list):  # TRL's conversational form
        completion = row.get("completion")
        turns = _turns([*row["prompt"], *(completion if isinstance(completion, list) else [])], location)
    elif form is not None:
        prompt, answer = MAIN_FIELDS[form]
        turns = [Turn("user", _text(row, prompt, location)), Turn("assistant", _text(row, answer, location))]
    else:
        raise MpuError(f"{location}: none of {FORMS} found (its fields: {_names(row)})", columns_hint(row))
    if not _is_blank(row.get("system")) and turns[0].role != "system":
        turns.insert(0, Turn("system", _text(row, "system", location)))
    return _dialogue(turns, location, alternate)


def _dialogue(turns: list[Turn], location: str, alternate: str | None) -> Record:
    if len(turns) < 2:
        raise MpuError(f"{location}: messages need a question and an answer")
    *prompt, answer = turns
    if answer.role != "assistant":
        raise MpuError(f"{location}: the last message is not the assistant's, so there is no answer")
    return Record(tuple(prompt), answer.content, location, alternate, None, answer.fields)


def _from_sharegpt(messages: object) -> object:
    """Messages of {"from": …, "value": …} as {"role": …, "content": …}; anything else as it is."""
    if not isinstance(messages, list):
        return messages
    return [
        {
            "role": SHAREGPT_ROLES.get(str(message["from"]).lower(), message["from"]),
            "content": message.get("value"),
            **{name: value for name, value in message.items() if name not in ("from", "value")},
        }
        if isinstance(message, dict) and "from" in message
        else message
        for message in messages
    ]


def unit_of(row: object, field: str, location: str) -> str:
    """What ``field``, of --dp-unit, says of a row: whose it is. Raises MpuError if it says nothing."""
    value = row.get(field) if isinstance(row, dict) else None
    if not isinstance(value, str | int) or value == "":
        raise MpuError(f"{location}: no {field!r}, which --dp-unit names")
    return str(value)


def _text(row: Mapping[str, object], name: str, location: str) -> str:
    value = row.get(name)
    if isinstance(value, float) and math.isfinite(value):
        value = repr(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise MpuError(
            f"{location}: {name!r} is missing, empty or not a text (its fields: {_names(row)})", columns_hint(row, name)
        )
    return _sound(value, f"{location}: {name!r}")


def _sound(text: str, what: str) -> str:
    """``text``. Raises MpuError if it has a lone surrogate, which JSON allows but no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MpuError(f"{what} contains an unpaired surrogate, which is not valid text") from error
    return text


def _turns(messages: object, location: str) -> list[Turn]:
    """The turns of a dialogue. Content may be a text or parts of text; a message with tool calls needs none."""
    turns = []
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"].strip():
            raise MpuError(f"{location}: every message needs a role and content")
        content = _content(message.get("content"), location)
        extra = {str(name): value for name, value in message.items() if name not in ("role", "content")}
        extra = {name: value for name, value in extra.items() if value not in (None, "", [], {})}
        extra = json.loads(_sound(json.dumps(extra, ensure_ascii=False, default=str), f"{location}: a message"))
        if not content.strip() and not extra.keys() & {"tool_calls", "function_call"}:
            raise MpuError(f"{location}: every message needs a role and content")
        turns.append(Turn(_sound(message["role"], f"{location}: a role"), content, tuple(extra.items())))
    if len(turns) < 2:
        raise MpuError(f"{location}: messages need a question and an answer")
    return turns


def _content(content: object, location: str) -> str:
    if isinstance(content, list):
        return "".join(_parts(content, location))
    if content is None:
        return ""
    if not isinstance(content, str):
        raise MpuError(f"{location}: a message's content is not a text")
    return _sound(content, f"{location}: a message")


def _parts(parts: Iterable[Any], location: str) -> Iterable[str]:
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise MpuError(f"{location}: a message has content of type {kind!r}; only text can be read")
        yield _sound(part["text"], f"{location}: a message")


def _names(row: Mapping[str, object]) -> str:
    return ", ".join(map(str, row)) or "none"
