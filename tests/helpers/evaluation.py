"""A model, and records in the form of TOFU's, for tests of `mpu eval`."""

from __future__ import annotations

import random

from mpu_cli.measuring.encoding import Item
from tests.helpers.models import VOCABULARY
from tests.helpers.paths import SHARED

TOFU = SHARED / "data" / "tofu"


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(3, VOCABULARY)}" for _ in range(count))


def tofu_row(rng: random.Random) -> dict:
    return {
        "question": words(rng, rng.randrange(4, 9)),
        "answer": words(rng, rng.randrange(3, 9)),
        "paraphrased_answer": words(rng, rng.randrange(3, 9)),
        "perturbed_answer": [words(rng, rng.randrange(3, 9)) for _ in range(3)],
    }


def items_of(rng: random.Random, prompts: int, answers: int) -> list[Item]:
    items = []
    for number in range(prompts):
        prompt = tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(18, 22)))
        for _ in range(answers):
            ids = prompt + tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 9)))
            items.append(Item(ids, len(prompt), prompt, f"item {number}"))
    return items
