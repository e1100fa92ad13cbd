"""Records as items to score: the way they are trained, or as OpenUnlearning's evaluator does, for its numbers.

The two differ. What is trained is a record's answer and its end of turn (``records.encode``). OpenUnlearning scores
everything after the tokens of the prompt for generation, and adds an end-of-sequence token if the template has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from mpu_cli.errors import MpuError
from mpu_cli.files.sandbox import LimitError
from mpu_cli.options.unlearning import ChatTemplate
from mpu_cli.records import forms, tokens
from mpu_cli.records.encode import Encoding, Example, Limits, encoding_of, plain_prompt
from mpu_cli.records.forms import Record, template_date
from mpu_cli.records.tokens import decode, special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LONGEST_TEXT = 2048  # labelled tokens of a MUSE text

Scored = Literal["as trained", "as OpenUnlearning does"]


@dataclass(frozen=True)
class Item:
    """The tokens that a model reads, ``ids``; those from ``start`` on are scored."""

    ids: tuple[int, ...]
    start: int
    prompt: tuple[int, ...]  # for generation; differs from ids[:start] if tokens merge across the boundary
    location: str  # for messages
    # The number of scored tokens of the answer itself, before its end; None for OpenUnlearning's convention, all but
    # the last.
    content: int | None = None
    answer: str | None = None  # its text, None if only the tokens are known
    end_token: int | None = None  # the special token that ends the answer, None if there is none

    @property
    def labels(self) -> tuple[int, ...]:
        return self.ids[self.start :]

    @property
    def content_tokens(self) -> int:
        """The number of scored tokens without the answer's end."""
        return len(self.labels) - 1 if self.content is None else self.content


@dataclass(frozen=True)
class TrainedEncoder:
    """Makes items of what ``encoding`` labels: what the client trains is what is scored, and generation begins with the
    tokens that training saw."""

    encoding: Encoding

    def questions(self, records: Sequence[Record]) -> list[Item]:
        """Items of records, tokenized together: of a question its answer is scored, of a text all but its first."""
        special = sorted(special_ids(self.encoding.tokenizer))
        texts = decode(self.encoding.tokenizer, [[token] for token in special], skip_special=False)
        ends = {token for token, text in zip(special, texts, strict=True) if text.strip()}
        items = []
        for record, outcome in zip(records, self.encoding.encode_each(records), strict=True):
            if isinstance(outcome, MpuError):
                raise outcome
            if len(outcome) != 1:
                raise MpuError(
                    f"{record.location}: a text of {len(outcome) or 'no'} pieces, and one is scored",
                    "cut it up with --reading split=paragraphs" if outcome else "leave it out",
                )
            items.append(_trained_item(outcome[0], record, ends))
        return items


def _trained_item(example: Example, record: Record, ends: set[int]) -> Item:
    labelled = [i for i, label in enumerate(example.labels) if label >= 0]
    start, end = max(1, labelled[0]), labelled[-1] + 1  # a text's first token is predicted from nothing
    ids = tuple(example.ids[:end])
    content = min(example.content_end, end) - start
    end_token = next((token for token in ids[start + content :] if token in ends), None)
    return Item(ids, start, ids[:start], record.location, content=content, answer=record.answer, end_token=end_token)


@dataclass(frozen=True)
class OpenUnlearningEncoder:
    """Makes items as OpenUnlearning does, with the tokenizer, template and limits of ``encoding``, which notes the
    locations of records that were cut and of long ones."""

    encoding: Encoding
    _prompts: dict[str, list[int]] = field(default_factory=dict)

    def questions(self, records: Sequence[Record]) -> list[Item]:
        """Items of records that have a question, tokenized together; answers to the same question share the tokens of
        their prompt."""
        encode = self._plain if self.encoding.template == "plain" else self._chat
        prompt_keys = [replace(record, answer="", answer_fields=()).identity for record in records]
        fresh = {key: record for key, record in zip(prompt_keys, records, strict=True) if key not in self._prompts}
        self._prompts.update(zip(fresh, encode([*fresh.values()], answered=False), strict=True))
        end = self.encoding.tokenizer.eos_token_id
        items = []
        for record, key, ids in zip(records, prompt_keys, encode(records, answered=True), strict=True):
            prompt = self._prompts[key]
            more = [] if end is None or ids[-1:] == [end] else [end]
            items.append(self._item([*ids, *more], len(prompt), prompt, record.location))
        return items

    def completions(self, rows: Sequence[tuple[str, str, str]]) -> list[Item]:
        """Items of (prompt, continuation, place); of a continuation, LONGEST_TEXT tokens at most are scored."""
        locations = [location for _, _, location in rows]
        full_ids = self._tokens([f"{prompt} {continuation}" for prompt, continuation, _ in rows], locations)
        prompts = self._tokens([prompt for prompt, _, _ in rows], locations)
        return list(map(self._text, full_ids, prompts, locations))

    def texts(self, rows: Sequence[tuple[str, str]]) -> list[Item]:
        """Items of (text, place), scored from the second token on."""
        locations = [location for _, location in rows]
        # The empty text has the tokens that the tokenizer puts before every text.
        [before] = self._tokens([""], locations[:1] or [""])
        return [
            self._text(ids, before, location)
            for ids, location in zip(self._tokens([text for text, _ in rows], locations), locations, strict=True)
        ]

    def _tokens(self, texts: Sequence[str], locations: Sequence[str]) -> list[list[int]]:
        try:
            outcomes = tokens.of_texts(self.encoding.tokenizer, texts)
        except LimitError as error:
            raise tokens.rejection(error) from error
        return _all(outcomes, locations)

    def _text(self, ids: list[int], prompt: list[int], location: str) -> Item:
        return self._item(ids[: len(prompt) + LONGEST_TEXT], max(1, len(prompt)), prompt, location)

    def _item(self, ids: list[int], start: int, prompt: list[int], location: str) -> Item:
        ids = self.encoding.fitted(ids, start, location)
        if len(ids) <= start:
            raise MpuError(f"{location}: the answer adds no tokens with this tokenizer and template")
        if self.encoding.limits.usual is not None and len(ids) > self.encoding.limits.usual:
            self.encoding.long.append(location)
        return Item(tuple(ids), start, tuple(prompt), location)

    def _chat(self, records: Sequence[Record], *, answered: bool) -> list[list[int]]:
        if not records:
            return []
        system_prompt = self.encoding.system_prompt
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        turns_of = [record.dialogue if answered else record.turns for record in records]
        dialogues = [[*system, *(turn.message for turn in turns)] for turns in turns_of]
        try:
            tokenizer = self.encoding.tokenizer
            variables = {**template_date(tokenizer, self.encoding.date), **self.encoding.variables}
            outcomes = tokens.of_dialogues(tokenizer, dialogues, generation_prompt=not answered, **variables)
        except (forms.TemplateError, LimitError) as error:
            raise tokens.rejection(error) from error
        return _all(outcomes, [record.location for record in records])

    def _plain(self, records: Sequence[Record], *, answered: bool) -> list[list[int]]:
        texts = [plain_prompt(record) + (record.answer if answered else "") for record in records]
        return self._tokens(texts, [record.location for record in records])


Encoder = TrainedEncoder | OpenUnlearningEncoder


def encoder_of(
    tokenizer: PreTrainedTokenizerBase, prompts: ChatTemplate, template: str | None, limits: Limits, scored: Scored
) -> Encoder:
    """The encoder that scores records in the way that ``scored`` names, with the options of a command."""
    encoding = encoding_of(tokenizer, prompts, template, limits)
    return TrainedEncoder(encoding) if scored == "as trained" else OpenUnlearningEncoder(encoding)


def _all(outcomes: Sequence[list[int] | ValueError], locations: Sequence[str]) -> list[list[int]]:
    """The tokens of every text."""
    encoded = []
    for outcome, location in zip(outcomes, locations, strict=True):
        if isinstance(outcome, ValueError):
            raise tokens.rejection(outcome, location)
        encoded.append(outcome)
    return encoded
