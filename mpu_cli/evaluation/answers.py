"""Answers for people to read: of a copy, without and with the delta that was just made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mpu_cli.evaluation.encoding import encoder_of
from mpu_cli.evaluation.generation import answer
from mpu_cli.models.deltas import add_delta, open_delta
from mpu_cli.models.limits import longest_input
from mpu_cli.models.loading import letting_go, load
from mpu_cli.models.source import Model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.unlearning import ChatTemplate
from mpu_cli.records.record import Record

SHOWN = 64  # tokens of an answer that people read, at most
LONGEST_ANSWER = 128  # tokens of an answer that is trained on, at most
BATCH = 8  # answers at once, times generation.ROWS


@dataclass(frozen=True)
class Shown:
    """One answer for people to read; ``before``: without the delta, if there is one."""

    question: str
    truth: str
    before: str | None
    answer: str


class Respondent:
    """A copy that is ready to answer: loaded, with the encoder of its prompts.

    Raises MpuError or UsageError for what does not work, before a question is known.
    """

    def __init__(self, copy: Model, prompts: ChatTemplate, device: str):
        self._model, self._tokenizer = load(copy, torch.float32, device)
        self._encoder = encoder_of(self._tokenizer, prompts, None, longest_input(self._model), "as trained")

    def answers(self, records: Sequence[Record], limit: int = LONGEST_ANSWER, observer: Observer = SILENT) -> list[str]:
        """The greedy answer to the question of each record, at most ``limit`` tokens."""
        items = self._encoder.questions(records)
        observer.stage("answer", len(items), "answers")
        answers = answer(
            self._model, self._tokenizer, items, [[]] * len(items), limit=limit, batch_size=BATCH,
            advance=observer.advance,
        )  # fmt: skip
        return [each.generation for each in answers]


@letting_go
def answers_before_and_after(
    copy: Model, delta: Path, records: Sequence[Record], prompts: ChatTemplate, template: str | None, device: str
) -> list[Shown]:
    """The answers of ``copy`` to the questions of ``records``, without and with ``delta``.

    Texts are left out. ``template`` is "chat", "plain" or None for the tokenizer's own.
    """
    questions = [record for record in records if record.turns]
    if not questions:
        return []
    delta_checkpoint = open_delta(copy, delta)
    loaded, tokenizer = load(copy, torch.float32, device)
    encoder = encoder_of(tokenizer, prompts, template, longest_input(loaded), "as trained")
    items = encoder.questions(questions)
    ask = partial(answer, loaded, tokenizer, items, [[]] * len(items), limit=SHOWN, batch_size=len(items))
    before = ask()
    add_delta(loaded, copy, delta_checkpoint)
    return [
        Shown(record.question, record.answer, then.generation, now.generation)
        for record, then, now in zip(questions, before, ask(), strict=True)
    ]
