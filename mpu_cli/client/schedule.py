"""The schedule of a training run, fixed in advance, and its micro-batches.

An item of the data loader is a micro-batch: the part of one loss term of one optimiser step that one process handles at
a time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from mpu_cli.client.reference_model import Reference
from mpu_cli.records.batches import answer_tokens, pad
from mpu_cli.records.encoding import IGNORED, Example


@dataclass(frozen=True)
class TrainingStep:
    """One optimiser step: its forget examples, by number, and the retain examples that go with them."""

    forget: list[int]
    retain: list[int]


@dataclass(frozen=True)
class ExampleSet:
    """Examples and the frozen copy's outputs on them."""

    examples: Sequence[Example]
    reference: Reference


def schedule(forget: int, retain: int, *, epochs: int, batch_size: int, seed: int) -> list[TrainingStep]:
    """All steps of a training run, fixed by ``seed``: noise cancels only if every copy of a round sees the same steps.

    Each epoch goes through the ``forget`` examples once, in a new order. Retain examples come from an endless sequence
    of shuffles of all ``retain`` (none if 0), as many per step as forget examples.
    """
    order = random.Random(seed)
    waiting: list[int] = []
    steps = []
    for _ in range(epochs):
        numbers = order.sample(range(forget), forget)
        for start in range(0, forget, batch_size):
            batch = numbers[start : start + batch_size]
            while retain and len(waiting) < len(batch):
                waiting += order.sample(range(retain), retain)
            steps.append(TrainingStep(batch, waiting[: len(batch)] if retain else []))
            waiting = waiting[len(batch) :]
    return steps


READ = {"forget": ("forget", "alternate"), "retain": ("retain",)}  # the sets that each term reads together


class MicroBatches(Dataset):
    """The schedule, with each step split into ``parts`` micro-batches for each of the ``terms`` of the loss.

    A micro-batch is for one term: what the backward pass needs for the forget set is freed before the retain set is
    read. Examples of one length go together, so that little is padded.
    """

    def __init__(self, steps: Sequence[TrainingStep], sets: Mapping[str, ExampleSet], terms: Sequence[str], parts: int):
        self._steps, self._sets, self._terms, self._parts = steps, sets, terms, parts

    def __len__(self) -> int:
        return len(self._steps) * len(self._terms) * self._parts

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The sets that one term reads, a batch each, and the ``number`` of the micro-batch."""
        names, numbers, mine = self._at(index)
        return {**self._batches(names, numbers, mine), "number": index}

    def records_of(self, index: int) -> int:
        """How many records a micro-batch has."""
        return len(self._at(index)[2])

    def pieces(self, index: int, most: int | None) -> Iterator[dict[str, Any]]:
        """A micro-batch in batches of at most ``most`` records, whose losses and gradients add up to its own."""
        names, numbers, mine = self._at(index)
        size = most or max(1, len(mine))
        for start in range(0, max(1, len(mine)), size):  # a filler is one
            yield self._batches(names, numbers, mine[start : start + size])

    def _at(self, index: int) -> tuple[list[str], list[int], list[int]]:
        """The sets of a micro-batch, the examples of its step by number, and those of its own."""
        index, part = divmod(index, self._parts)
        step, term = divmod(index, len(self._terms))
        numbers = getattr(self._steps[step], self._terms[term])
        names = [name for name in READ[self._terms[term]] if name in self._sets]
        return names, numbers, self._part_of(numbers, self._sets[names[0]].examples, part)

    def _batches(self, names: list[str], numbers: list[int], mine: list[int]) -> dict[str, Any]:
        return {name: self._batch(self._sets[name], numbers, mine) for name in names}

    def _part_of(self, numbers: list[int], examples: Sequence[Example], part: int) -> list[int]:
        """The examples of one micro-batch: an equal share of those sorted by length."""
        if self._parts == 1:
            return numbers
        by_length = sorted(numbers, key=lambda number: len(examples[number].ids))
        start, last = (len(numbers) * p // self._parts for p in (part, part + 1))
        return by_length[start:last]

    def _batch(self, data: ExampleSet, numbers: list[int], mine: list[int]) -> dict[str, Any]:
        batch: dict[str, Any] = pad([data.examples[i] for i in mine or numbers[:1]])
        if not mine:  # fewer examples than parts: this one is only a filler
            batch["labels"].fill_(IGNORED)
        return {
            **batch,
            **data.reference.collect(mine, like=numbers[:1]),
            "weights": torch.ones(len(batch["labels"])) * bool(mine),
            "step_tokens": sum(answer_tokens(data.examples[i]) for i in numbers),
            "step_examples": len(numbers),
        }
