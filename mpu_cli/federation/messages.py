"""What the two Flower apps say to each other: requests and replies with plain values, and pieces of files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

Value = Any  # str, int, or a list of one of them
ABOUT, PIECES = "about", "pieces"


def message_content(about: Mapping[str, Value], pieces: Sequence[bytes] = ()) -> RecordDict:
    """A message's content. Pieces are arrays, which Flower streams; a value would be sent in one body."""
    content = RecordDict({ABOUT: ConfigRecord(dict(about))})
    if pieces:
        arrays = {str(i): Array("uint8", (len(piece),), "raw", piece) for i, piece in enumerate(pieces)}
        content[PIECES] = ArrayRecord(arrays)
    return content


def about(content: RecordDict) -> dict[str, Value]:
    return dict(content.config_records[ABOUT])


def pieces(content: RecordDict) -> list[bytes]:
    """The pieces, in their order; none if there are none."""
    record = content.array_records.get(PIECES)
    return [] if record is None else [record[str(i)].data for i in range(len(record))]
