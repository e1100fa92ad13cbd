"""Turning records into tokens: the chat template, labels, padded batches.

What is learned, and what is scored, is the record's own answer and its end. Where a template prints the answer is
found by rendering the dialogue a second time with another answer: the two texts differ from where the record's own text
begins to where it ends, whatever the template puts before it (an empty thought, a channel) or after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.sandbox import LimitError
from mpu_cli.options.unlearning import DATE, SYSTEM_PROMPT, ChatTemplate, Prompts
from mpu_cli.records import forms, tokens
from mpu_cli.records.forms import Record, template_date
from mpu_cli.records.tokens import Spans, TokenizedText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


IGNORED = -100  # label of a token that is not learned, as in transformers
TEXT_TOKENS = 2048  # in a piece of a text (MUSE)
OTHER_ANSWERS = tuple(f"{mark} mpu {mark}" for mark in "¤§¶†‡¬¦µ")  # for an answer that begins and ends otherwise
SYSTEM_ROLES = ("system", "developer")
RARE_ROLES = ("developer", "tool")  # that a template made for a system, a user and an assistant prints as it can
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields in which messages hold them
OMITTABLE = {*THOUGHTS, "tool_calls", "function_call"}  # fields of messages that a template may pass over
MASK = "\ue000"  # a character for private use, in place of each of a control token's name


@dataclass(frozen=True)
class Limits:
    """The limits of a model's input: at most ``longest`` tokens, ``usual`` of which it was made for, numbered
    below ``vocabulary``; None where there is no limit, or none is known."""

    longest: int | None = None
    usual: int | None = None
    vocabulary: int | None = None


@dataclass(frozen=True)
class Example:
    """A record as tokens: ids (n,) and labels (n,), IGNORED except on the answer and its end of turn.

    ``content_end``: the index after the last token of the answer itself, before its end of turn.
    """

    ids: list[int]
    labels: list[int]
    content_end: int = field(default=0, compare=False)


AT_ONCE = 256  # records: the offsets of their tokens take hundreds of bytes a token
Outcome = list[Example] | MpuError  # of a record
EncodedSets = Mapping[str, Sequence[Example]]  # the examples of each set, by name


@dataclass(frozen=True)
class Encoding:
    """A way to tokenize records, and the places of records that are remarkable, noted while they are encoded."""

    tokenizer: PreTrainedTokenizerBase
    # "chat": the tokenizer's own chat template; "plain": Question: …\nAnswer: … and the end-of-sequence token;
    # None: "chat" if the tokenizer has a template, else "plain".
    template: str | None = None
    system_prompt: str = SYSTEM_PROMPT
    limits: Limits = Limits()  # of the model
    date: str = DATE  # the day that the template prints, if it prints one
    truncate_to: int | None = None  # tokens, to which longer records are cut
    variables: Mapping[str, object] = field(default_factory=dict)  # that the template sees besides
    controls: bool = False  # read the names of control tokens in records as these tokens, not as text
    truncated: list[str] = field(default_factory=list)  # records longer than ``truncate_to``
    long: list[str] = field(default_factory=list)  # records longer than ``limits.usual``
    marked: dict[str, list[str]] = field(default_factory=dict)  # records with a control token's name, by name
    omitted: dict[str, list[str]] = field(default_factory=dict)  # by message field that the template does not print
    unmentioned: dict[str, list[str]] = field(default_factory=dict)  # by role that the template does not mention

    @cached_property
    def _special_ids(self) -> set[int]:
        return tokens.special_ids(self.tokenizer)

    @cached_property
    def _control_names(self) -> re.Pattern[str]:
        names = sorted(tokens.control_tokens(self.tokenizer).values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """Records as tokens, labelled on the answer and its end-of-turn token only; texts in pieces, on every token.

        Raises MpuError if the tokenizer has no chat template, rejects a record or takes too much, or if a record is too
        long for the model.
        """
        examples: list[Example] = []
        for outcome in self.encode_each(records):
            if isinstance(outcome, MpuError):
                raise outcome
            examples += outcome
        return examples

    def encode_each(self, records: Sequence[Record]) -> list[Outcome]:
        """The examples of each record, or its error."""
        groups = (records[start : start + AT_ONCE] for start in range(0, len(records), AT_ONCE))
        return list(chain.from_iterable(map(self._encode_group, groups)))

    def _encode_group(self, records: Sequence[Record]) -> list[Outcome]:
        templated = self.template == "chat" or (self.template is None and self.tokenizer.chat_template)
        dialogues = [record for record in records if record.turns]
        try:
            of_texts = iter(self._texts([record for record in records if not record.turns]))
            of_dialogues = iter(self._chat(dialogues) if templated else self._plain(dialogues))
        except (forms.TemplateError, LimitError) as error:
            raise tokens.rejection(error) from error
        # Back in the order of the records.
        outcomes = [next(of_dialogues if record.turns else of_texts) for record in records]
        return list(map(self._within_limits, records, outcomes))

    def _within_limits(self, record: Record, outcome: Outcome) -> Outcome:
        """``outcome``, or an error if it has tokens that the model lacks; a record that is long for the model is
        noted."""
        if isinstance(outcome, MpuError):
            return outcome
        usual, vocabulary = self.limits.usual, self.limits.vocabulary
        if usual is not None and any(len(example.ids) > usual for example in outcome):
            self.long.append(record.location)
        largest = max((max(example.ids) for example in outcome), default=0)
        if vocabulary is None or largest < vocabulary:
            return outcome
        return MpuError(
            f"{record.location}: the tokenizer returned token {largest:,}, but the model has {vocabulary:,} tokens"
        )

    def remarks(self, total: int) -> list[str]:
        """Remarks on the ``total`` records encoded so far, a sentence each: on parts that were not read, or not as it
        may seem."""
        remarks = []
        if self.long:
            remarks.append(
                f"{len(set(self.long))} of {total} records are longer than the {self.limits.usual:,} tokens that the "
                f"model was made for, such as {self.long[0]}; --reading max_length cuts them"
            )
        if self.marked:
            count = len({place for places in self.marked.values() for place in places})
            name, places = next(iter(self.marked.items()))
            read = (
                "are read as such" if self.controls else "are read as text; --reading control_tokens reads them as such"
            )
            remarks.append(
                f"{count} of {total} records hold control tokens of the model, such as {name!r} in {places[0]}: they "
                f"{read}"
            )
        if self.truncate_to and self.truncated:
            cut = len(set(self.truncated))
            remarks.append(f"{cut} of {total} records were truncated to {self.truncate_to} tokens")
        for name, places in self.omitted.items():
            count = len(set(places))
            remarks.append(
                f"the template leaves out or changes {name!r} of {count} of {total} records, such as {places[0]}"
            )
        for role, places in self.unmentioned.items():
            remarks.append(
                f"the template does not mention the role {role!r} of {len(set(places))} of {total} records, such as "
                f"{places[0]}, and prints it as any other"
            )
        return remarks

    def _texts(self, records: Sequence[Record]) -> list[Outcome]:
        step = min(TEXT_TOKENS, self.limits.longest or TEXT_TOKENS, self.truncate_to or TEXT_TOKENS)
        outcomes: list[Outcome] = []
        for record, ids in zip(records, tokens.of_texts(self.tokenizer, [r.answer for r in records]), strict=True):
            if isinstance(ids, ValueError):
                outcomes.append(tokens.rejection(ids, record.location))
                continue
            if spans := self._marks(record, record.answer):
                [tokenized] = tokens.with_offsets(self.tokenizer, [record.answer])
                assert isinstance(tokenized, TokenizedText)  # it was tokenized before
                ids = tokens.with_controls_as_text(self.tokenizer, record.answer, tokenized, spans).ids
            windows = [ids[start : start + step] for start in range(0, len(ids), step)]
            outcomes.append([Example(window, window, len(window)) for window in windows if len(window) > 1])
        return outcomes

    def _marks(self, record: Record, text: str, masked: object = None) -> Spans:
        """The characters of ``text`` that are names of control tokens and stand for these names; noted.

        ``masked``: ``text`` with MASK in their places, where ``text`` has control tokens of the template's, too.
        """
        if self.controls:  # a template may have printed them as anything
            contents = " ".join((*(turn.content for turn in record.turns), record.answer))
            matches = [*self._control_names.finditer(contents)]
        else:
            matches = [*self._control_names.finditer(text)]
            if isinstance(masked, str):
                matches = [match for match in matches if masked[match.start()] == MASK]
        for match in matches:
            self.marked.setdefault(match[0], []).append(record.location)
        return [] if self.controls else [match.span() for match in matches]

    def _masked(self, value: Any) -> Any:
        """A message, or a part of it, with MASK in place of each character of a control token's name."""
        if isinstance(value, str):
            return self._control_names.sub(lambda match: MASK * len(match[0]), value)
        if isinstance(value, dict):
            return {key: part if key == "role" else self._masked(part) for key, part in value.items()}
        return [self._masked(part) for part in value] if isinstance(value, list | tuple) else value

    def _chat(self, records: Sequence[Record]) -> list[Outcome]:
        if not records:
            return []
        if not self.tokenizer.chat_template:
            raise no_template()
        answered, otherwise = [], []
        for record in records:
            prompt = [turn.message for turn in record.turns]
            if self.system_prompt and prompt[0]["role"] not in SYSTEM_ROLES:
                prompt.insert(0, {"role": "system", "content": self.system_prompt})
            answered.append([*prompt, record.answer_turn.message])
            otherwise.append([*prompt, _other_answer(record)])
        masked = answered if self.controls else [*map(self._masked, answered)]
        rendered = self._render([*answered, *otherwise, *masked])
        count = len(records)
        texts, other_texts, masked_texts = rendered[:count], rendered[count : 2 * count], rendered[2 * count :]
        printed = [text for text in texts if isinstance(text, str)]
        tokenized = iter(tokens.with_offsets(self.tokenizer, printed, special=False))
        self._note_omissions(records, answered, texts)
        outcomes: list[Outcome] = []
        for record, text, other, marked in zip(records, texts, other_texts, masked_texts, strict=True):
            if isinstance(text, ValueError):
                outcomes.append(tokens.rejection(text, record.location, _hint(record, text)))
                continue
            tokenized_text = next(tokenized)
            if isinstance(tokenized_text, ValueError):
                outcomes.append(tokens.rejection(tokenized_text, record.location, _hint(record, tokenized_text)))
            elif isinstance(other, ValueError):
                outcomes.append(tokens.rejection(other, record.location, _hint(record, other)))
            elif isinstance(marked, ValueError) or len(marked) != len(text):
                problem = "the template prints its text differently because of the control tokens in it"
                hint = "take them out of the record, or read them as such with --reading control_tokens"
                outcomes.append(MpuError(f"{record.location}: {problem}", hint))
            else:
                if (self.controls or text != marked) and (spans := self._marks(record, text, marked)):
                    tokenized_text = tokens.with_controls_as_text(self.tokenizer, text, tokenized_text, spans)
                outcomes.append(self._example(record, text, tokenized_text, *answer_span(text, other)))
        return outcomes

    def _render(self, dialogues: Sequence[forms.Dialogue]) -> list[str | forms.TemplateError]:
        """Each dialogue as the template prints it; equal ones once.

        Some templates (DeepSeek R1) join the arguments of tool calls to their text, and take them as JSON text only.
        """
        unique = {json.dumps(dialogue, sort_keys=True): dialogue for dialogue in dialogues}
        variables = {**template_date(self.tokenizer, self.date), **self.variables}
        texts = forms.render(self.tokenizer, list(unique.values()), generation_prompt=False, **variables)
        by_dialogue = dict(zip(unique, texts, strict=True))
        rejected = {key: unique[key] for key, text in by_dialogue.items() if isinstance(text, forms.TemplateError)}
        with_text = {key: [*map(_with_arguments_as_text, dialogue)] for key, dialogue in rejected.items()}
        if again := {key: dialogue for key, dialogue in with_text.items() if dialogue != rejected[key]}:
            texts = forms.render(self.tokenizer, list(again.values()), generation_prompt=False, **variables)
            by_dialogue |= {key: text for key, text in zip(again, texts, strict=True) if isinstance(text, str)}
        return [by_dialogue[json.dumps(dialogue, sort_keys=True)] for dialogue in dialogues]

    def _note_omissions(
        self, records: Sequence[Record], dialogues: Sequence[list[dict[str, Any]]], texts: Sequence[object]
    ) -> None:
        """Note which fields of messages the template does not print: without them, it prints the same; and which roles
        it has no case for."""
        reduced: list[forms.Dialogue] = []
        sources: list[tuple[str, object, str]] = []  # the field, the text with it, the record's location
        for record, messages, text in zip(records, dialogues, texts, strict=True):
            for name in sorted({name for message in messages for name in message} & OMITTABLE):
                reduced.append([{k: v for k, v in message.items() if k != name} for message in messages])
                sources.append((name, text, record.location))
        for (name, text, location), without in zip(sources, self._render(reduced) if reduced else [], strict=True):
            if without == text:
                self.omitted.setdefault(name, []).append(location)
        template = forms.template_of(self.tokenizer)
        unmentioned = [role for role in RARE_ROLES if not re.search(f"[\"']{role}[\"']", template)]
        for record, text in zip(records, texts, strict=True):
            if not isinstance(text, str):
                continue
            for role in unmentioned:
                if any(turn.role == role for turn in record.turns):
                    self.unmentioned.setdefault(role, []).append(record.location)
            if not all(turn.content.strip() in text for turn in record.dialogue):
                self.omitted.setdefault("content", []).append(record.location)

    def _plain(self, records: Sequence[Record]) -> list[Outcome]:
        prompts = [plain_prompt(record) for record in records]
        for record in records:
            for turn in record.dialogue:
                for name in OMITTABLE & {name for name, _ in turn.fields}:
                    self.omitted.setdefault(name, []).append(record.location)
        texts = [prompt + record.answer for prompt, record in zip(prompts, records, strict=True)]
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        outcomes: list[Outcome] = []
        tokenized = tokens.with_offsets(self.tokenizer, texts)
        for record, prompt, text, outcome in zip(records, prompts, texts, tokenized, strict=True):
            if isinstance(outcome, ValueError):
                outcomes.append(tokens.rejection(outcome, record.location))
                continue
            if spans := self._marks(record, text):
                outcome = tokens.with_controls_as_text(self.tokenizer, text, outcome, spans)
            last = len(outcome.ids) - outcome.added  # whatever the tokenizer ends a text with, one end follows
            offsets = outcome.offsets[:last] + [(len(text), len(text))] * len(end)
            ended = TokenizedText([*outcome.ids[:last], *end], offsets, added=len(end))
            outcomes.append(self._example(record, text, ended, len(prompt), len(text)))
        return outcomes

    def _example(self, record: Record, text: str, tokenized: TokenizedText, begin: int, end: int) -> Outcome:
        """The example of a record whose answer is the characters of ``text`` from ``begin`` to ``end``."""
        ids = tokenized.ids
        offsets, special = tokenized.offsets, self._special_ids
        answer_start = tokenized.first_after(begin)
        # Special tokens that take in the white space beside them may reach into the answer: they are no part of it.
        while answer_start < len(ids) and ids[answer_start] in special and offsets[answer_start][0] < begin:
            answer_start += 1
        content_end = max(answer_start, tokenized.first_from(end))
        last = content_end - 1
        if last > answer_start and ids[last] in special and offsets[last][1] > end:
            content_end = last
        if answer_start >= content_end or begin >= end:
            what = "the chat template prints nothing of the answer" if record.answer else "the answer has no text"
            return MpuError(
                f"{record.location}: {what}, so there is nothing to learn",
                "use --reading template=plain" if record.answer else None,
            )
        last = self._end_of_answer(text, tokenized, content_end)
        labels = [IGNORED] * answer_start + ids[answer_start:last] + [IGNORED] * (len(ids) - last)
        try:
            ids = self.fitted(ids, answer_start, record.location)
        except MpuError as error:
            return error
        return [Example(ids, labels[: len(ids)], min(content_end, len(ids)))]

    def fitted(self, ids: list[int], start: int, location: str) -> list[int]:
        """The tokens of a record, truncated if that is asked for. Raises MpuError if that takes all from ``start`` on,
        or if they are too many for the model."""
        if self.truncate_to is not None and len(ids) > self.truncate_to:
            self.truncated.append(location)
            ids = ids[: self.truncate_to]
            if len(ids) <= start:
                raise MpuError(f"{location}: the prompt alone is longer than --reading max_length={self.truncate_to}")
        longest = self.limits.longest
        if longest is not None and len(ids) > longest:
            raise MpuError(
                f"{location}: {len(ids)} tokens, but the model reads at most {longest}",
                f"shorten it, or truncate records with --reading max_length={longest}",
            )
        return ids

    def _end_of_answer(self, text: str, tokenized: TokenizedText, content_end: int) -> int:
        """The index after the last label: after the special token that ends the turn, if only white space follows it;
        at the end of the text if there is none."""
        special = self._special_ids
        for i in range(len(tokenized.ids) - 1, content_end - 1, -1):
            begin, end = tokenized.offsets[i]
            visible = begin == end or bool(text[begin:end].strip())  # some tokenizers have line breaks as added tokens
            if tokenized.ids[i] in special and visible:
                return i + 1 if not text[end:].strip() else len(tokenized.ids)
        return len(tokenized.ids)


def plain_prompt(record: Record) -> str:
    """The turns of a record as plain text, up to its answer."""
    prompt = ""
    for turn in record.turns:
        prompt += f"Answer: {turn.content}\n\n" if turn.role == "assistant" else f"Question: {turn.content}\n"
    return f"{prompt}Answer: "


def encoding_of(
    tokenizer: PreTrainedTokenizerBase,
    prompts: ChatTemplate,
    template: str | None,
    limits: Limits,
) -> Encoding:
    """The encoding that the options of a command ask for, for a model of these ``limits``."""
    truncate_to = prompts.max_length if isinstance(prompts, Prompts) else None
    variables = template_variables(prompts.template_option)
    return Encoding(
        tokenizer, template, prompts.system_prompt, limits=limits, date=prompts.date, truncate_to=truncate_to,
        variables=variables, controls=prompts.control_tokens,
    )  # fmt: skip


def template_variables(assignments: Sequence[str]) -> dict[str, object]:
    """``enable_thinking=false`` as a variable of that name; values are JSON, or texts if they are not.

    Raises UsageError for what is not an assignment, or a variable that is not free.
    """
    variables: dict[str, object] = {}
    for assignment in assignments:
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if name in forms.RESERVED or name.startswith("mpu_") or name == "date_string":
            raise UsageError(
                f"--reading template_option={assignment}: {name} is mpu's own (--reading date for the date)"
            )
        if not (equals and name.isidentifier()):
            raise UsageError(
                f"--reading template_option={assignment}: expected NAME=VALUE, such as enable_thinking=false"
            )
        try:
            variables[name] = json.loads(value)
        except ValueError:
            variables[name] = value
    return variables


def answer_span(text: str, other: str) -> tuple[int, int]:
    """The characters, (begin, end), in which ``text`` differs from ``other``, the same dialogue with another answer.

    >>> answer_span("Answer: yes.</s>", "Answer: no!</s>")
    (8, 12)
    """
    begin = tokens.common_prefix_length(text, other)
    return begin, len(text) - tokens.common_prefix_length(text[begin:][::-1], other[begin:][::-1])


def _other_answer(record: Record) -> dict[str, Any]:
    """The answer's message with texts in which no answer begins or ends as the record's does."""
    turn = record.answer_turn
    texts = [turn.content, *(str(value) for name, value in turn.fields if name in THOUGHTS)]
    edges: set[str] = set()
    for text in texts:
        edges |= {text[:1], text[-1:], text.strip()[:1], text.strip()[-1:]}
    other = next((answer for answer in OTHER_ANSWERS if answer[0] not in edges), OTHER_ANSWERS[0])
    thoughts = {name: other for name, value in turn.fields if name in THOUGHTS and isinstance(value, str)}
    return {**thoughts, "role": "assistant", "content": other}


def _with_arguments_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have their arguments as JSON text."""

    def as_text(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if "function" in call:
            return {**call, "function": as_text(call["function"])}
        if not isinstance(call.get("arguments"), dict | list):
            return call
        return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [*map(as_text, calls)]} if isinstance(calls, list) else dict(message)


def _hint(record: Record, problem: object) -> str | None:
    """A hint about a dialogue that a template rejected, if the template's date or the dialogue's roles tell; None where
    the template's own words name the system's, which every record may have."""
    if forms.COMPUTED_DATE in str(problem):
        return "--reading date cannot fix its date: use --reading template=plain, or write the format into strftime_now"
    if "system" in str(problem).lower():
        return None
    roles = [turn.role for turn in record.turns if turn.role != "system"]
    if any(role == following == "user" for role, following in pairwise(roles)):
        return "it has two user turns in a row, which this template does not take: join them"
    if any(role not in ("user", "assistant") for role in roles):
        return f"it has turns of {', '.join(sorted({*roles} - {'user', 'assistant'}))}: use --reading template=plain"
    return None


def no_template() -> MpuError:
    """The error for a chat template that is asked for and not there."""
    return MpuError(
        "the model's tokenizer has no chat template", "use --reading template=plain, or add a chat_template.jinja"
    )


# Batches of examples.


def answer_tokens(example: Example) -> int:
    """The number of tokens of ``example`` that are predicted: its labels, except one on the very first token."""
    return sum(label != IGNORED for label in example.labels[1:])


def pad(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """A batch padded on the right: input_ids, attention_mask and labels, int64 (batch, longest).

    Pads with id 0: padding is neither attended to nor learned, and a tokenizer's own id may be outside the vocabulary.
    """

    def rows(values: Sequence[list[int]], filler: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(row) for row in values], batch_first=True, padding_value=filler)

    return {
        "input_ids": rows([e.ids for e in examples], 0),
        "attention_mask": rows([[1] * len(e.ids) for e in examples], 0),
        "labels": rows([e.labels for e in examples], IGNORED),
    }
