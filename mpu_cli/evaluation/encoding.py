"""Tokenizes questions and texts as OpenUnlearning's evaluator does, to reproduce its numbers.

This is not the client's encoding: there, the model learns the answer up to its end of turn; here, everything after
the prompt's own tokens is scored, and an end-of-sequence token is added if the template has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpu_cli.boundary.limited import LimitError
from mpu_cli.errors import MpuError
from mpu_cli.options.unlearning import DATE, SYSTEM_PROMPT
from mpu_cli.records import chat, tokens
from mpu_cli.records.dates import template_date

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_TEXT = 2048  # labelled tokens of a MUSE text

Pair = tuple[str, str]  # question, answer


@dataclass(frozen=True)
class Item:
    """The tokens that a model reads, ``ids``; those from ``start`` on are scored.

    ``prompt`` is the prompt for generation; it differs from ``ids[:start]`` if tokens merge across the boundary.
    ``place`` identifies the item in messages.
    """

    ids: tuple[int, ...]
    start: int
    prompt: tuple[int, ...]
    place: str

    @property
    def labels(self) -> tuple[int, ...]:
        return self.ids[self.start :]


@dataclass(frozen=True)
class Asked:
    """A question and its answer, after ``few_shot`` pairs as earlier turns; ``place`` identifies it in messages."""

    question: str
    answer: str
    place: str
    few_shot: tuple[Pair, ...] = ()

    @property
    def prompt(self) -> tuple[object, ...]:
        """What comes before the answer."""
        return self.few_shot, self.question


@dataclass(frozen=True)
class Encoder:
    """Makes items. ``template`` is "chat" (the tokenizer's own) or "plain" (Question: … Answer: …).

    ``max_length`` is how many tokens the model can read, None for no limit; ``date`` is for templates that print one.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str
    system_prompt: str = SYSTEM_PROMPT
    max_length: int | None = None
    date: str = DATE
    _prompts: dict[tuple[object, ...], list[int]] = field(default_factory=dict)

    def questions(self, asked: Sequence[Asked]) -> list[Item]:
        """Items of questions, tokenized together; answers to the same question share the tokens of their prompt.

        Raises MpuError if the template or the tokenizer rejects one or takes too much.
        """
        encode = self._chat if self.template == "chat" else self._plain
        fresh = {each.prompt: each for each in asked if each.prompt not in self._prompts}
        self._prompts.update(zip(fresh, encode([*fresh.values()], answered=False), strict=True))
        end = self.tokenizer.eos_token_id
        items = []
        for each, ids in zip(asked, encode(asked, answered=True), strict=True):
            prompt = self._prompts[each.prompt]
            more = [] if end is None or ids[-1:] == [end] else [end]
            items.append(self._item([*ids, *more], len(prompt), prompt, each.place))
        return items

    def completions(self, rows: Sequence[tuple[str, str, str]]) -> list[Item]:
        """Items of (prompt, continuation, place); of a continuation, LONGEST_TEXT tokens at most are kept and scored.

        Raises MpuError as ``questions`` does.
        """
        places = [place for _, _, place in rows]
        whole = self._tokens([f"{prompt} {continuation}" for prompt, continuation, _ in rows], places)
        prompts = self._tokens([prompt for prompt, _, _ in rows], places)
        return [self._text(*each) for each in zip(whole, prompts, places, strict=True)]

    def texts(self, rows: Sequence[tuple[str, str]]) -> list[Item]:
        """Items of (text, place), scored from the second token on. Raises MpuError as ``questions`` does."""
        places = [place for _, place in rows]
        [before] = self._tokens([""], places[:1] or [""])
        return [
            self._text(ids, before, place)
            for ids, place in zip(self._tokens([text for text, _ in rows], places), places, strict=True)
        ]

    def _tokens(self, texts: Sequence[str], places: Sequence[str]) -> list[list[int]]:
        try:
            outcomes = tokens.of_texts(self.tokenizer, texts)
        except LimitError as error:
            raise tokens.rejection(error) from error
        return _all(outcomes, places)

    def _text(self, ids: list[int], prompt: list[int], place: str) -> Item:
        return self._item(ids[: len(prompt) + LONGEST_TEXT], max(1, len(prompt)), prompt, place)

    def _item(self, ids: list[int], start: int, prompt: list[int], place: str) -> Item:
        if len(ids) <= start:
            raise MpuError(f"{place}: the answer adds no tokens with this tokenizer and template")
        if self.max_length is not None and len(ids) > self.max_length:
            raise MpuError(f"{place}: {len(ids)} tokens, but the model reads at most {self.max_length}", "shorten it")
        return Item(tuple(ids), start, tuple(prompt), place)

    def _chat(self, asked: Sequence[Asked], *, answered: bool) -> list[list[int]]:
        if not asked:
            return []
        dialogues = [self._turns(each) if answered else self._turns(each)[:-1] for each in asked]
        try:
            day = template_date(self.tokenizer, self.date)
            outcomes = tokens.of_dialogues(self.tokenizer, dialogues, generation_prompt=not answered, **day)
        except (chat.TemplateError, LimitError) as error:
            raise tokens.rejection(error) from error
        return _all(outcomes, [each.place for each in asked])

    def _turns(self, asked: Asked) -> list[dict[str, str]]:
        turns = [
            {"role": role, "content": content}
            for pair in (*asked.few_shot, (asked.question, asked.answer))
            for role, content in zip(("user", "assistant"), pair, strict=True)
        ]
        return [{"role": "system", "content": self.system_prompt}, *turns] if self.system_prompt else turns

    def _plain(self, asked: Sequence[Asked], *, answered: bool) -> list[list[int]]:
        if not asked:
            return []
        texts = []
        for each in asked:
            earlier = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in each.few_shot)
            texts.append(f"{earlier}Question: {each.question}\nAnswer: {each.answer if answered else ''}")
        return self._tokens(texts, [each.place for each in asked])


def _all(outcomes: Sequence[list[int] | ValueError], places: Sequence[str]) -> list[list[int]]:
    """What every text became. Raises MpuError for the first that became nothing."""
    found = []
    for outcome, place in zip(outcomes, places, strict=True):
        if isinstance(outcome, ValueError):
            raise tokens.rejection(outcome, place)
        found.append(outcome)
    return found
