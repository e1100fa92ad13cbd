"""What to suggest for a row whose fields no form has."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

QUESTIONS = ("question", "prompt", "instruction", "input", "query", "message", "customer", "user", "request", "ticket")
ANSWERS = ("answer", "response", "reply", "output", "completion", "agent", "resolution", "assistant", "solution")
IDENTIFIERS = ("id", "idx", "index", "uuid", "url", "title", "source", "category", "split", "date")
LONGEST_NAME = 40  # characters of a column's name; longer ones are records of a table without header


def columns_hint(row: Mapping[str, object], missing: str | None = None) -> str | None:
    """How to name a question and its answer in a row of other fields, as far as their names tell; None if they do not.

    ``missing`` is a field that has no text: nothing is suggested if the row has it, in another type.
    """
    if {"chosen", "rejected"} <= row.keys():
        return (
            "a pair of preferences: say which answer is meant, such as --columns "
            "question=prompt,answer=rejected,alternate=chosen"
        )
    if missing is not None and missing in row:
        several = isinstance(row[missing], list)
        return f"{missing!r} is a list: choose one of its texts, or write a record for each" if several else None
    if structured := [
        name for name, value in row.items() if isinstance(value, list | dict) and _is_one_of(ANSWERS, name)
    ]:
        return f"{structured[0]!r} is a list or an object: write the answer as a text in a field of its own"
    names = [str(name) for name, value in row.items() if isinstance(value, str)]
    if any(len(name) > LONGEST_NAME or name.rstrip().endswith(("?", ".", "!")) for name in map(str, row)):
        return "the first line seems to be a record: put a line with the names of the columns above it"
    names = [name for name in names if name.lower() not in IDENTIFIERS]
    question, answer = (_first_match(words, names) for words in (QUESTIONS, ANSWERS))
    if len(names) == 2 and question is answer is None:
        question, answer = names
    if len(names) < 2:
        return None
    unclear = "name the fields of the question and of the answer: --columns question=FIELD,answer=FIELD"
    if question == answer:
        return unclear
    if question is None or answer is None:
        remaining = [name for name in names if name not in (question, answer)]
        if len(remaining) != 1:  # which of them is the other half would be a guess
            return unclear
        question, answer = question or remaining[0], answer or remaining[0]
    return f"name them: --columns {shlex.quote(f'question={question},answer={answer}')}"


def _is_one_of(words: tuple[str, ...], name: object) -> bool:
    return any(word in str(name).lower() for word in words)


def _first_match(words: tuple[str, ...], names: list[str]) -> str | None:
    return next((name for word in words for name in names if _is_one_of((word,), name)), None)
