"""Greedy answers, begun where the scoring pass leaves off.

Scoring an answer word by word already tells what the model would say as long as it says the answer: up to the first
token that is not the likeliest, and the likeliest one there. A model that knows an answer by heart generates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from mpu_cli.evaluation.encoding import Item
from mpu_cli.evaluation.scoring import memory_in_mind

ROWS = 4  # times the batch size: a step reads one token a row


@dataclass(frozen=True)
class Answer:
    """Texts, without special tokens: what was asked, the true answer, and what the model said."""

    input: str
    ground_truth: str
    generation: str


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
    drafts: Sequence[list[int]],
    *,
    limit: int,
    stops: Sequence[str] = (),
    batch_size: int,
    longest: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> list[Answer]:
    """What ``model`` says greedily to each prompt, at most ``limit`` tokens, cut at the first of ``stops``.

    ``drafts`` are tokens that it is known to begin with; ``longest`` is how many tokens the model reads in all, None
    for no limit. Batches are of like length.
    """
    ends = _end_tokens(model, tokenizer)
    said: list[list[int]] = [_until_end(draft, ends, limit) for draft in drafts]
    waiting = [i for i, tokens in enumerate(said) if len(tokens) < limit and not (tokens and tokens[-1] in ends)]
    advance(len(items) - len(waiting))
    waiting.sort(key=lambda i: len(items[i].prompt) + len(said[i]), reverse=True)
    rows = ROWS * batch_size
    for start in range(0, len(waiting), rows):
        batch = waiting[start : start + rows]
        prompts = [[*items[i].prompt, *said[i]] for i in batch]
        wanted = max(limit - len(said[i]) for i in batch)
        room = wanted if longest is None else min(wanted, longest - max(map(len, prompts)))
        if room < 1:
            continue
        with memory_in_mind():
            fresh = _generate(model, tokenizer, prompts, room, stops)
        for i, tokens in zip(batch, fresh, strict=True):
            said[i] = _until_end([*said[i], *tokens], ends, limit)
        advance(len(batch))
    return [_texts(tokenizer, item, tokens, stops) for item, tokens in zip(items, said, strict=True)]


class _Stops(StoppingCriteria):
    """Stop a row once one of ``stops`` is in the text that it has added; transformers' own criterion reads the
    tokenizer's vocabulary, and not every kind of vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], begin: int):
        self._tokenizer, self._stops, self._begin = tokenizer, stops, begin

    def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        texts = self._tokenizer.batch_decode(input_ids[:, self._begin :], skip_special_tokens=True)
        return torch.tensor([any(stop in text for stop in self._stops) for text in texts], device=input_ids.device)


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    limit: int,
    stops: Sequence[str],
) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    stopping = {"stopping_criteria": [_Stops(tokenizer, stops, longest)]} if stops else {}
    said = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, num_beams=1,
        temperature=None, top_p=None, top_k=None, repetition_penalty=None, pad_token_id=tokenizer.eos_token_id,
        **stopping,
    )  # fmt: skip
    return said[:, longest:].tolist()


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return {end for end in (*ends, tokenizer.eos_token_id) if end is not None}


def _until_end(tokens: list[int], ends: set[int], limit: int) -> list[int]:
    stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: min(stop, limit)]


def _texts(tokenizer: PreTrainedTokenizerBase, item: Item, said: list[int], stops: Sequence[str]) -> Answer:
    def text(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=True)

    asked = text(item.prompt)
    generation = text(said)
    for stop in stops:
        generation = generation.split(stop)[0]
    return Answer(asked, text(item.ids).replace(asked, "").strip(), generation.strip())
