"""JSON documents that come from outside, read by a schema: what has none of it is refused, in one line.

A schema is a ``Document`` or a dataclass. Its fields say types and bounds, with the kinds of value below; a field that
may be missing has a default. Entries without a field are ignored, as older and newer versions of mpu write others.

>>> class Point(Document):
...     x: Count
>>> parse_document(Point, {"x": 1}, "point.json")
Point(x=1)
>>> parse_document(Point, {"x": "1"}, "point.json")
Traceback (most recent call last):
mpu_cli.errors.MpuError: point.json: x: expected int, got str
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, ValidationError

from mpu_cli.boundary.files import SMALL, read_bounded
from mpu_cli.errors import MpuError

MAX_FACTS = 20  # entries of a small table
MAX_LAYERS = 10_000
SHOWN = 200  # characters of a message

Text = Annotated[str, Meta(max_length=10_000)]
Word = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]{1,80}\Z")]
Hexadecimal = Annotated[str, Meta(pattern=r"\A[0-9a-f]{2,128}\Z")]
Seed = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
RunName = Annotated[
    str, Meta(max_length=200, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]*\Z")
]
Count = Annotated[int, Meta(ge=1, le=10**6)]
LayerNumber = Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]
Scale = Annotated[float, Meta(ge=0, le=1e300)]
Above0 = Annotated[float, Meta(gt=0, le=1e300)]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
Layers = Annotated[list[LayerNumber], Meta(max_length=MAX_LAYERS)]
Numbers = Annotated[dict[Word, Finite], Meta(max_length=MAX_FACTS)]
Words = Annotated[dict[Word, Word], Meta(max_length=MAX_FACTS)]


class Document(msgspec.Struct, kw_only=True):
    """The schema of a JSON object."""


Schema = TypeVar("Schema")


def parse_document(schema: type[Schema], value: object, where: object, hint: str = "get it again") -> Schema:
    """``value``, a part of a JSON document, by its schema. Raises MpuError, with ``where``, if it does not fit."""
    try:
        return msgspec.convert(value, schema, strict=True)
    except (ValidationError, ValueError, RecursionError) as error:
        raise MpuError(f"{where}: {_in_words(error)}", hint) from error


def read_document(
    schema: type[Schema], path: Path, hint: str = "get it again", *, limit: int = SMALL, links: bool = True
) -> Schema:
    """The JSON object in a file of at most ``limit`` bytes, by its schema. Raises MpuError."""
    value = read_json_object(path, limit, links=links)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half a character, which could not be written again
        raise MpuError(f"{path}: holds text that is not Unicode", hint) from error
    return parse_document(schema, value, path, hint)


def read_json_object(path: Path, limit: int = SMALL, *, links: bool = True) -> dict[str, object]:
    """The JSON object in a regular file of at most ``limit`` bytes. Raises MpuError if there is none."""
    content = read_bounded(path, limit, links=links)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MpuError(f"{path}: not JSON ({(str(error) or type(error).__name__).splitlines()[0]})") from error
    if not isinstance(value, dict):
        raise MpuError(f"{path}: not a JSON object")
    return value


def as_entries(document: Document) -> dict[str, object]:
    """The inverse of ``parse_document``: what JSON has of it."""
    entries = msgspec.to_builtins(document)
    assert isinstance(entries, dict)
    return entries


def is_ascending(numbers: list[int]) -> bool:
    return numbers == sorted(set(numbers))


def _in_words(error: Exception) -> str:
    """msgspec's message with the place first: "round: expected int, got str"."""
    message = (str(error).splitlines() or [type(error).__name__])[0]
    reason, _, location = message.replace("`", "").partition(" - at ")
    location = re.sub(r"^(key in )?\$\.?", r"\1", location)
    reason = reason[:1].lower() + reason[1:]
    if " matching regex " in reason:  # which nobody can read
        reason = "not of the form that it must have"
    return "".join(c for c in (f"{location}: {reason}" if location else reason)[:SHOWN] if c.isprintable())
