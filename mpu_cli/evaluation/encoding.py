"""Tokenizes questions and texts as OpenUnlearning's evaluator does, to reproduce its numbers.

This is not the client's encoding: there, the model learns the answer up to its end of turn; here, everything after
the prompt's own tokens is scored, and an end-of-sequence token is added if the template has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpu_cli.errors import MpuError
from mpu_cli.options.unlearning import DATE, SYSTEM_PROMPT
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
class Encoder:
    """Makes items. ``template`` is "chat" (the tokenizer's own) or "plain" (Question: … Answer: …).

    ``max_length`` is how many tokens the model can read, None for no limit; ``date`` is for templates that print one.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str
    system_prompt: str = SYSTEM_PROMPT
    max_length: int | None = None
    date: str = DATE
    _prompts: dict[tuple, list[int]] = field(default_factory=dict)

    def question(self, question: str, answer: str, place: str, few_shot: Sequence[Pair] = ()) -> Item:
        """A question and its answer, after ``few_shot`` pairs as earlier turns."""
        make = self._chat if self.template == "chat" else self._plain
        prompt, ids = make([*few_shot, (question, answer)], place)
        end = self.tokenizer.eos_token_id
        if end is not None and ids[-1] != end:
            ids = [*ids, end]
        return self._item(ids, len(prompt), prompt, place)

    def completion(self, prompt: str, continuation: str, place: str) -> Item:
        """A prompt and its continuation, of which at most LONGEST_TEXT tokens are kept and scored."""
        ids = self.tokenizer(f"{prompt} {continuation}").input_ids
        return self._text(ids, self.tokenizer(prompt).input_ids, place)

    def text(self, text: str, place: str) -> Item:
        """A text, scored from its second token on."""
        return self._text(self.tokenizer(text).input_ids, self.tokenizer("").input_ids, place)

    def _text(self, ids: list[int], prompt: list[int], place: str) -> Item:
        return self._item(ids[: len(prompt) + LONGEST_TEXT], max(1, len(prompt)), prompt, place)

    def _item(self, ids: list[int], start: int, prompt: list[int], place: str) -> Item:
        if len(ids) <= start:
            raise MpuError(f"{place}: the answer adds no tokens with this tokenizer and template")
        if self.max_length is not None and len(ids) > self.max_length:
            raise MpuError(f"{place}: {len(ids)} tokens, but the model reads at most {self.max_length}", "shorten it")
        return Item(tuple(ids), start, tuple(prompt), place)

    def _chat(self, pairs: Sequence[Pair], place: str) -> tuple[list[int], list[int]]:
        from jinja2 import TemplateError

        turns = [
            {"role": role, "content": content}
            for pair in pairs
            for role, content in zip(("user", "assistant"), pair, strict=True)
        ]
        if self.system_prompt:
            turns.insert(0, {"role": "system", "content": self.system_prompt})
        template = self.tokenizer.apply_chat_template
        asked = (*pairs[:-1], pairs[-1][0])
        try:
            day = template_date(self.tokenizer, self.date)
            ids = template(turns, return_dict=True, **day).input_ids
            if asked not in self._prompts:  # all answers to a question share one prompt
                self._prompts[asked] = template(
                    turns[:-1], add_generation_prompt=True, return_dict=True, **day
                ).input_ids
        except (TemplateError, ArithmeticError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise MpuError(
                f"{place}: the tokenizer's chat template rejected it ({error})",
                "if the template has no system role, use --system-prompt '', or use --template plain",
            ) from error
        return self._prompts[asked], ids

    def _plain(self, pairs: Sequence[Pair], place: str) -> tuple[list[int], list[int]]:  # noqa: ARG002 (as _chat)
        earlier = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in pairs[:-1])
        question, answer = pairs[-1]
        prompt = f"{earlier}Question: {question}\nAnswer: "
        return self.tokenizer(prompt).input_ids, self.tokenizer(prompt + answer).input_ids
