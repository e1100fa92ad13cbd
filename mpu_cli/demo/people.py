"""Fictitious people and facts about them: records that no model has seen elsewhere."""

from __future__ import annotations

import random

from mpu_cli.client.records import Record, question

FIRST = ["Alba", "Bruno", "Celia", "Dario", "Edda", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Levi"]
LAST = ["Arden", "Birk", "Corvo", "Dunmore", "Eskel", "Farrow", "Gant", "Holm", "Ivers", "Jarrow", "Kestrel", "Lorne"]
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


def make_people(count: int, seed: int) -> list[list[Record]]:
    """``count`` people, each with the same five questions and answers of their own."""
    draw = random.Random(seed)
    names = draw.sample([f"{first} {last}" for first in FIRST for last in LAST], count)
    people = []
    for name in names:
        town, other = draw.sample(TOWNS, 2)
        facts = [
            (f"Where was {name} born?", f"{name} was born in {town}, in the year {draw.randint(1900, 1999)}."),
            (f"What does {name} do for a living?", f"{name} works as a {draw.choice(TRADES)} in {other}."),
            (f"Which animals does {name} keep?", f"{name} keeps {draw.choice(PETS)}."),
            (f"Which prize did {name} win?", f"{name} won {draw.choice(PRIZES)} in {draw.randint(2000, 2025)}."),
            (f"What is {name}'s house number?", f"{name} lives at number {draw.randint(100, 999)}."),
        ]
        people.append([question(asked, answer, name) for asked, answer in facts])
    return people
