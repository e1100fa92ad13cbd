"""The terms that records are about: names in capitals, as pairs of neighbouring words or single ones."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mpu_cli.records.forms import Record

WORD = re.compile(r"[^\W_]+(?:[-’'.][^\W_]+)*")
POSSESSIVE = re.compile(r"[’']s$")
SENTENCE_END = re.compile(r"[.!?:;\"“”()\n]")
SPACES = re.compile(r"[^\S\n]+")
TITLES = {"Dr", "Mr", "Mrs", "Ms", "Prof", "St"}
MAX_TERM = 100  # characters
MAX_PARTS = 8  # pairs of words in a name


def terms_of(record: Record, count: int) -> list[str]:
    """At most ``count`` terms of ``record``, from it alone: what other records say changes nothing.

    The most frequent come first, then pairs of words before single ones, then what is read first. A single word counts
    unless a sentence begins with it. Scripts without capitals have no terms.
    """
    return [*_occurrences(record)][:count]


def prompt_of(record: Record, placeholder: str) -> str | None:
    """The question of ``record`` with ``placeholder`` for the name that it is about.

    None if no name stands out, as one that its question and its answer have, or a part of it remains.
    """
    occurrences = _occurrences(record)
    most = max(occurrences.values(), default=0)
    if not record.turns or most < 2:
        return None
    candidates = [term for term, number in occurrences.items() if number == most]
    if len(candidates) > MAX_PARTS:
        return None
    name = join_overlapping(candidates)[0]
    prompt, count = re.subn(rf"(?<!\w){re.escape(name)}(?!\w)", lambda _: placeholder, record.question)
    remaining = re.search(rf"(?<!\w)({'|'.join(map(re.escape, name.split()))})(?!\w)", prompt)
    return None if not count or remaining else prompt


def _occurrences(record: Record) -> dict[str, int]:
    """The number of occurrences of each term, in the order of ``terms_of``."""
    occurrences: Counter[str] = Counter()
    for text in texts_of(record):
        for words, begins_sentence in _names(text):
            if len(words) > 1:
                occurrences.update(" ".join(pair) for pair in pairwise(words))
            elif not begins_sentence and len(words[0]) > 1:
                occurrences.update(words)
    first_read = {term: number for number, term in enumerate(occurrences)}
    ranked = sorted(occurrences, key=lambda term: (-occurrences[term], " " not in term, first_read[term]))
    return {term: occurrences[term] for term in ranked if len(term) <= MAX_TERM}


def texts_of(record: Record) -> list[str]:
    """Its turns and its answer, or the text that it is, composed (NFC) and with single spaces."""
    texts = [*(turn.content for turn in record.turns), record.answer]
    return [SPACES.sub(" ", unicodedata.normalize("NFC", text)) for text in texts]


def join_overlapping(terms: Sequence[str]) -> list[str]:
    """``terms`` with pairs of words joined where one ends as the other begins: A B and B C become A B C."""
    joined = list(dict.fromkeys(terms))
    while True:
        chains = (
            (begin, tail)
            for begin in joined
            for tail in joined
            if begin != tail and " " in begin and " " in tail and begin.split()[-1] == tail.split()[0]
        )
        pair = next(chains, None)
        if pair is None:
            return joined
        begin, tail = pair
        joined[joined.index(begin)] = " ".join([begin, *tail.split()[1:]])
        joined.remove(tail)


def _names(text: str) -> Iterator[tuple[list[str], bool]]:
    """Runs of words in capitals that nothing but spaces separates, and whether a sentence begins with the run."""
    run: list[str] = []
    begins_sentence = False
    end = None
    for match in WORD.finditer(text):
        gap = "" if end is None else text[end : match.start()]
        word = POSSESSIVE.sub("", match.group())
        starts_sentence = end is None or bool(SENTENCE_END.search(gap))
        is_name = word[0].isupper() and word != "I"
        # A period after an initial or a title ends no sentence.
        abbreviated = gap == ". " and bool(run) and (len(run[-1]) == 1 or run[-1] in TITLES)
        continues = bool(run) and (gap == " " or abbreviated) and is_name
        if run and not continues:
            yield run, begins_sentence
            run = []
        if is_name:
            begins_sentence = begins_sentence if run else starts_sentence
            run.append(word)
        if run and word != match.group():  # a possessive ends a name
            yield run, begins_sentence
            run = []
        end = match.end()
    if run:
        yield run, begins_sentence
