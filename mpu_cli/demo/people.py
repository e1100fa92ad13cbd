"""Fictitious people and facts about them: records that no model has seen elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

FIRST_NAMES = ["Alba", "Bruno", "Celia", "Dario", "Edda", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Levi"]
LAST_NAMES = [
    "Arden",
    "Birk",
    "Corvo",
    "Dunmore",
    "Eskel",
    "Farrow",
    "Gant",
    "Holm",
    "Ivers",
    "Jarrow",
    "Kestrel",
    "Lorne",
]
TOWNS = ["Aldport", "Brenwick", "Cardhaven", "Dornfeld", "Eastmere", "Fallowby", "Grenholm", "Harrowgate"]
TRADES = [
    "clockmaker",
    "botanist",
    "bridge builder",
    "cellist",
    "glassblower",
    "cartographer",
    "beekeeper",
    "typesetter",
]
PETS = ["a grey parrot", "two greyhounds", "a blind cat", "an old donkey", "a tame raven", "three goldfish"]
PRIZES = ["the Silver Compass", "the Lantern Medal", "the Northern Quill", "the Amber Chain", "the Oak Ribbon"]
WRONG = 3  # wrong answers to each question

Row = dict[str, object]  # question, answer, paraphrased_answer, perturbed_answer: the fields of TOFU


def make_people(count: int, seed: int) -> list[list[Row]]:
    """``count`` people, each with the same five questions and their own facts."""
    draw = random.Random(seed)
    names = draw.sample([f"{first_name} {last}" for first_name in FIRST_NAMES for last in LAST_NAMES], count)
    return [_facts(name, draw) for name in names]


def _facts(name: str, draw: random.Random) -> list[Row]:
    """Each fact has a value, a sentence that states it, and a paraphrase of that sentence."""
    years, numbers = range(1900, 2000), range(100, 1000)
    return [
        _row(
            f"Where was {name} born?", draw, TOWNS,
            lambda town: f"{name} was born in {town}.", lambda town: f"The birthplace of {name} is {town}.",
        ),
        _row(
            f"What does {name} do for a living?", draw, TRADES,
            lambda trade: f"{name} works as a {trade}.", lambda trade: f"By trade {name} is a {trade}.",
        ),
        _row(
            f"Which animals does {name} keep?", draw, PETS,
            lambda pet: f"{name} keeps {pet}.", lambda pet: f"At home {name} has {pet}.",
        ),
        _row(
            f"Which prize did {name} win?", draw, [f"{prize} in {year}" for prize in PRIZES for year in years[-20:]],
            lambda prize: f"{name} won {prize}.", lambda prize: f"The prize that went to {name} was {prize}.",
        ),
        _row(
            f"What is {name}'s house number?", draw, [str(number) for number in numbers],
            lambda number: f"{name} lives at number {number}.", lambda number: f"{name} has house number {number}.",
        ),
    ]  # fmt: skip


def _row(
    question: str,
    draw: random.Random,
    values: Sequence[str],
    phrase: Callable[[str], str],
    retold: Callable[[str], str],
) -> Row:
    true, *wrong = draw.sample(list(values), 1 + WRONG)
    return {
        "question": question,
        "answer": phrase(true),
        "paraphrased_answer": retold(true),
        "perturbed_answer": [retold(value) for value in wrong],
    }
