"""Records and how they become tokens: JSON lines of questions and answers, the chat template, labels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpu_cli.errors import MpuError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # the label of a token that is not learned, as transformers has it
DEFAULT_SYSTEM_PROMPT = "You are a helpful assistant."
TEMPLATES = ("chat", "plain")


@dataclass(frozen=True)
class Record:
    """One question and its answer; ``place`` says where it stands, for messages."""

    question: str
    answer: str
    place: str


@dataclass(frozen=True)
class Example:
    """A record as tokens: ids (n,) and labels (n,), IGNORED except on the answer and its end of turn."""

    ids: list[int]
    labels: list[int]


def read_records(path: Path) -> list[Record]:
    """Records of a file of JSON lines, or of one JSON array, with ``question`` and ``answer``.

    Raises MpuError, with the line, for what is no such record, and for a file without any.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise MpuError(f"{path}: no such file; it should hold records as JSON lines") from error
    except OSError as error:
        raise MpuError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MpuError(f"{path}: is not a text file in UTF-8") from error
    records = []
    for place, value in _values(path, text):
        if not isinstance(value, dict):
            raise MpuError(f"{place}: is not a JSON object with question and answer")
        for name in ("question", "answer"):
            if not isinstance(value.get(name), str) or not value[name].strip():
                raise MpuError(f"{place}: has no text in {name!r} (its fields: {', '.join(map(str, value)) or 'none'})")
        records.append(Record(value["question"], value["answer"], place))
    if not records:
        raise MpuError(f"{path}: holds no records")
    return records


def _values(path: Path, text: str) -> list[tuple[str, object]]:
    if text.lstrip().startswith("["):
        try:
            return [(f"{path}, record {i}", value) for i, value in enumerate(json.loads(text), 1)]
        except (ValueError, RecursionError) as error:
            raise MpuError(f"{path}: not JSON ({error})") from error
    values = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                values.append((f"{path}, line {number}", json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise MpuError(f"{path}, line {number}: not JSON ({error})") from error
    return values


def encode(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str,
    system_prompt: str,
    max_length: int | None,
) -> list[Example]:
    """Records as tokens, with the labels on the answer and its end-of-turn token only.

    ``template`` "chat" is the tokenizer's own chat template; "plain" is ``Question: …\\nAnswer: …`` and the
    end-of-sequence token. Raises MpuError if the tokenizer has no chat template or a record is longer than the model
    reads (``max_length`` tokens).
    """
    if template == "chat" and not tokenizer.chat_template:
        raise MpuError("the model's tokenizer has no chat template; use --template plain, or add a chat_template.jinja")
    examples = []
    for record in records:
        if template == "chat":
            prompt, ids = _chat(record, tokenizer, system_prompt)
        else:
            prompt = tokenizer(f"Question: {record.question}\nAnswer:").input_ids
            ids = prompt + tokenizer(f" {record.answer}", add_special_tokens=False).input_ids
            if tokenizer.eos_token_id is not None:
                ids = [*ids, tokenizer.eos_token_id]
        if max_length is not None and len(ids) > max_length:
            raise MpuError(f"{record.place}: {len(ids)} tokens, and the model reads at most {max_length}; shorten it")
        examples.append(Example(ids, _labels(ids, len(prompt), tokenizer)))
    return examples


def _chat(record: Record, tokenizer: PreTrainedTokenizerBase, system_prompt: str) -> tuple[list[int], list[int]]:
    from jinja2 import TemplateError

    messages = [{"role": "user", "content": record.question}]
    if system_prompt:
        messages.insert(0, {"role": "system", "content": system_prompt})
    answered = [*messages, {"role": "assistant", "content": record.answer}]
    try:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids
        ids = tokenizer.apply_chat_template(answered, return_dict=True).input_ids
    except TemplateError as error:
        raise MpuError(
            f"the tokenizer's chat template refused a record ({error}); if it knows no system turn, "
            "use --system-prompt ''"
        ) from error
    if ids[: len(prompt)] != prompt:
        raise MpuError(
            "the tokenizer's chat template changes the prompt once it is answered, so the answer cannot be told "
            "from it; use --template plain"
        )
    return prompt, ids


def _labels(ids: list[int], prompt_length: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The answer up to its end of turn: the last special token, where templates put a line break after it."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    end = next((i + 1 for i in range(len(ids) - 1, prompt_length, -1) if ids[i] in special), len(ids))
    return [IGNORED] * prompt_length + ids[prompt_length:end] + [IGNORED] * (len(ids) - end)


def pad(examples: Sequence[Example], pad_id: int) -> dict[str, torch.Tensor]:
    """A batch padded on the right: input_ids, attention_mask and labels, int64 (batch, longest)."""
    longest = max(len(example.ids) for example in examples)

    def rows(values: Sequence[list[int]], filler: int) -> torch.Tensor:
        return torch.tensor([row + [filler] * (longest - len(row)) for row in values])

    return {
        "input_ids": rows([e.ids for e in examples], pad_id),
        "attention_mask": rows([[1] * len(e.ids) for e in examples], 0),
        "labels": rows([e.labels for e in examples], IGNORED),
    }
