"""Turning records into tokens: the chat template, labels, padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mpu_cli.boundary.limited import LimitError
from mpu_cli.errors import MpuError
from mpu_cli.options.unlearning import DATE, SYSTEM_PROMPT
from mpu_cli.records import chat, tokens
from mpu_cli.records.dates import template_date
from mpu_cli.records.record import Record, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # label of a token that is not learned, as in transformers
TEXT_TOKENS = 2048  # in a piece of a text (MUSE)


@dataclass(frozen=True)
class Example:
    """A record as tokens: ids (n,) and labels (n,), IGNORED except on the answer and its end of turn."""

    ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Encoding:
    """How to tokenize records.

    ``template`` "chat" is the tokenizer's own chat template; "plain" is ``Question: …\\nAnswer: …`` and the
    end-of-sequence token; None is "chat" if the tokenizer has a template. ``few_shot`` are records placed before each
    record as earlier turns. ``max_length`` is how many tokens the model accepts, None for no limit; ``date`` is the
    day that the template prints, if it prints one. Records longer than ``truncate_to`` tokens are cut, and their places
    are added to ``truncated``.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None
    system_prompt: str = SYSTEM_PROMPT
    max_length: int | None = None
    few_shot: Sequence[Record] = ()
    date: str = DATE
    truncate_to: int | None = None
    truncated: list[str] = field(default_factory=list)

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """Records as tokens, labelled on the answer and its end-of-turn token only; texts in pieces, on every token.

        Raises MpuError if the tokenizer has no chat template, rejects a record or takes too much, or if a record is too
        long for the model.
        """
        found = []
        for examples in self.encode_each(records):
            if isinstance(examples, MpuError):
                raise examples
            found += examples
        return found

    def encode_each(self, records: Sequence[Record]) -> list[list[Example] | MpuError]:
        """The examples of each record, or what is wrong with it. Raises MpuError for what concerns all of them."""
        templated = self.template == "chat" or (self.template is None and self.tokenizer.chat_template)
        asked = [record for record in records if record.turns]
        try:
            texts = iter(self._texts([record for record in records if not record.turns]))
            dialogues = iter(self._chat(asked) if templated else self._plain(asked))
        except (chat.TemplateError, LimitError) as error:
            raise tokens.rejection(error) from error
        return [next(dialogues if record.turns else texts) for record in records]

    def _texts(self, records: Sequence[Record]) -> list[list[Example] | MpuError]:
        step = min(TEXT_TOKENS, self.max_length or TEXT_TOKENS, self.truncate_to or TEXT_TOKENS)
        outcomes: list[list[Example] | MpuError] = []
        for record, ids in zip(records, tokens.of_texts(self.tokenizer, [r.answer for r in records]), strict=True):
            if isinstance(ids, ValueError):
                outcomes.append(tokens.rejection(ids, record.place))
                continue
            pieces = [ids[start : start + step] for start in range(0, len(ids), step)]
            outcomes.append([Example(piece, piece) for piece in pieces if len(piece) > 1])
        return outcomes

    def _turns(self, record: Record) -> list[Turn]:
        shots = [turn for shot in self.few_shot for turn in (*shot.turns, ("assistant", shot.answer))]
        return [*shots, *record.turns]

    def _chat(self, records: Sequence[Record]) -> list[list[Example] | MpuError]:
        if not records:
            return []
        if not self.tokenizer.chat_template:
            raise no_template()
        prompts = []
        for record in records:
            messages = [{"role": role, "content": content} for role, content in self._turns(record)]
            if self.system_prompt and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": self.system_prompt})
            prompts.append(messages)
        answered = [
            [*messages, {"role": "assistant", "content": record.answer}]
            for messages, record in zip(prompts, records, strict=True)
        ]
        day = template_date(self.tokenizer, self.date)
        asked = tokens.of_dialogues(self.tokenizer, prompts, generation_prompt=True, **day)
        whole = tokens.of_dialogues(self.tokenizer, answered, generation_prompt=False, **day)
        return [self._example(*each) for each in zip(records, asked, whole, strict=True)]

    def _plain(self, records: Sequence[Record]) -> list[list[Example] | MpuError]:
        prompts = [
            "".join(
                f"Answer: {text}\n\n" if role == "assistant" else f"Question: {text}\n"
                for role, text in self._turns(record)
            )
            + "Answer:"
            for record in records
        ]
        asked = tokens.of_texts(self.tokenizer, prompts)
        answers = tokens.of_texts(self.tokenizer, [f" {record.answer}" for record in records], special=False)
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        whole = [
            answer if isinstance(prompt, ValueError) or isinstance(answer, ValueError) else [*prompt, *answer, *end]
            for prompt, answer in zip(asked, answers, strict=True)
        ]
        return [self._example(*each) for each in zip(records, asked, whole, strict=True)]

    def _example(
        self, record: Record, prompt: list[int] | ValueError, ids: list[int] | ValueError
    ) -> list[Example] | MpuError:
        """The example of a record whose tokens are ``ids``, of which the first are those of ``prompt``."""
        if isinstance(prompt, ValueError):
            return tokens.rejection(prompt, record.place)
        if isinstance(ids, ValueError):
            return tokens.rejection(ids, record.place)
        if ids[: len(prompt)] != prompt:
            return MpuError(
                "the tokenizer's chat template changes the prompt once it is answered, so the answer cannot be "
                "separated from it",
                "use --template plain",
            )
        labels = self._labels(ids, len(prompt))
        if self.truncate_to is not None and len(ids) > self.truncate_to:
            ids, labels = ids[: self.truncate_to], labels[: self.truncate_to]
            self.truncated.append(record.place)
            if all(label == IGNORED for label in labels):
                return MpuError(f"{record.place}: the prompt alone is longer than --max-length {self.truncate_to}")
        if self.max_length is not None and len(ids) > self.max_length:
            return MpuError(
                f"{record.place}: {len(ids)} tokens, but the model accepts at most {self.max_length}",
                f"shorten it, or truncate records with --max-length {self.max_length}",
            )
        return [Example(ids, labels)]

    def _labels(self, ids: list[int], prompt_length: int) -> list[int]:
        """Labels for the answer up to its end of turn, the last special token: a line break may follow it."""
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        end = next((i + 1 for i in range(len(ids) - 1, prompt_length, -1) if ids[i] in special), len(ids))
        return [IGNORED] * prompt_length + ids[prompt_length:end] + [IGNORED] * (len(ids) - end)


def no_template() -> MpuError:
    """What to raise for a chat template that is asked for and not there."""
    return MpuError("the model's tokenizer has no chat template", "use --template plain, or add a chat_template.jinja")


def answer_tokens(example: Example) -> int:
    """The number of tokens of ``example`` that are predicted: its labels, except one on the very first token."""
    return sum(label != IGNORED for label in example.labels[1:])


def pad(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """A batch padded on the right: input_ids, attention_mask and labels, int64 (batch, longest).

    Pads with id 0: padding is neither attended to nor learned, and a tokenizer's own id may be outside the vocabulary.
    """
    longest = max(len(example.ids) for example in examples)

    def rows(values: Sequence[list[int]], filler: int) -> torch.Tensor:
        return torch.tensor([row + [filler] * (longest - len(row)) for row in values])

    return {
        "input_ids": rows([e.ids for e in examples], 0),
        "attention_mask": rows([[1] * len(e.ids) for e in examples], 0),
        "labels": rows([e.labels for e in examples], IGNORED),
    }
