"""One record: a dialogue that leads to an answer, or a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from mpu_cli.errors import UsageError
from mpu_cli.options.unlearning import ALL_TURNS, RecordFormat

Fields = tuple[tuple[str, Any], ...]  # what a message has besides role and content, such as tool_calls


class Turn(NamedTuple):
    """A message of a dialogue. ``fields`` are passed to the chat template as they are."""

    role: str
    content: str
    fields: Fields = ()

    @property
    def message(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        return {**dict(self.fields), "role": self.role, "content": self.content}


@dataclass(frozen=True)
class Record:
    """Turns that lead to an answer or, without any turns, a text.

    ``location`` is where the record was read from, for messages; ``alternate`` is an alternative answer (for DPO);
    ``unit`` is whose record it is, if a field says so; ``answer_fields`` is what the answer's message has besides its
    content, such as reasoning_content.
    """

    turns: tuple[Turn, ...]
    answer: str
    location: str
    alternate: str | None = None
    unit: str | None = None
    answer_fields: Fields = ()

    @property
    def question(self) -> str:
        """The user's last turn, or the last turn of any role if there is none of the user's."""
        users = [turn.content for turn in self.turns if turn.role == "user"]
        return users[-1] if users else self.turns[-1].content

    @property
    def identity(self) -> str:
        """What makes two records the same, wherever they were read: the dialogue and its answer."""
        return json.dumps([self.turns, self.answer, self.answer_fields], sort_keys=True)

    @property
    def content(self) -> dict[str, object]:
        """The record wherever it was read from, for digests: ``location`` is empty, and has the name that it had when
        the first digests were made."""
        entries = asdict(replace(self, location=""))
        return {"place" if name == "location" else name: value for name, value in entries.items()}

    @property
    def answer_turn(self) -> Turn:
        return Turn("assistant", self.answer, self.answer_fields)

    @property
    def earlier_answers(self) -> int:
        """How many assistant turns come before the answer, as its context."""
        return sum(turn.role == "assistant" for turn in self.turns)


def question(text: str, answer: str, location: str = "", alternate: str | None = None) -> Record:
    """A record of one question and its answer."""
    return Record((Turn("user", text),), answer, location, alternate)


def check_units(reading: RecordFormat, unit: str | None) -> None:
    """Raise UsageError if each turn of a dialogue would be protected alone: all have what precedes them."""
    if reading.turns == ALL_TURNS and unit is None:
        raise UsageError(
            "--turns all makes several records of a dialogue, and a bound would protect each of them alone",
            "name the field that all records of a dialogue share with --dp-unit, or leave out --turns",
        )


def records_of_turns(record: Record, turns: str) -> Iterator[Record]:
    """``record`` itself or, if ``turns`` is "all", one for each of its assistant turns, each after what precedes it."""
    if turns == ALL_TURNS:
        for number, turn in enumerate(record.turns):
            if turn.role == "assistant" and number:
                yield Record(
                    record.turns[:number], turn.content, f"{record.location}, turn {number + 1}", None, record.unit,
                    turn.fields,
                )  # fmt: skip
    yield record
