"""Greedy answers, continued from where the scoring pass leaves off.

Scoring an answer already shows what the model would generate while it follows that answer: up to the first token that
is not the likeliest, plus the likeliest one there. A model that knows an answer by heart generates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)

from mpu_cli.errors import MpuError
from mpu_cli.evaluation.encoding import Item
from mpu_cli.evaluation.scoring import ADVICE
from mpu_cli.models.library_errors import memory_in_mind
from mpu_cli.records.tokens import decode

ROWS = 4  # times the batch size, because a step reads one token per row
CACHE = 2 << 30  # bytes of keys and values that are kept at once
# generation config entries that do not affect greedy generation, or that are set here
HARMLESS = {
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version",
    "_from_model_config", "do_sample", "num_beams", "temperature", "top_p", "top_k", "typical_p", "min_p", "max_length",
    "max_new_tokens", "use_cache", "cache_implementation", "num_return_sequences", "return_dict_in_generate",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "stop_strings", "max_time",
    "early_stopping",
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """Texts without special tokens: the prompt, the true answer and the model's answer."""

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
    """The greedy answer of ``model`` to each prompt, at most ``limit`` tokens, cut at the first of ``stops``.

    ``drafts`` are the known first tokens of each answer; ``longest`` is how many tokens the model can read in total,
    None for no limit. Batches group prompts of similar length.
    """
    ends = _end_tokens(model, tokenizer) | {item.end_token for item in items if item.end_token is not None}
    if _takes_other_tokens(model):
        drafts = [[] for _ in items]
    answers: list[list[int]] = [_until_end(draft, ends, limit) for draft in drafts]
    waiting = [i for i, tokens in enumerate(answers) if len(tokens) < limit and not (tokens and tokens[-1] in ends)]
    advance(len(items) - len(waiting))
    waiting.sort(key=lambda i: len(items[i].prompt) + len(answers[i]), reverse=True)
    prompts = {i: [*items[i].prompt, *answers[i]] for i in waiting}
    rooms = {i: limit if longest is None else longest - len(prompts[i]) for i in waiting}
    budgets = {i: min(limit - len(answers[i]), rooms[i]) for i in waiting}
    at_once = _tokens_at_once(model)
    for batch in _batches(waiting, prompts, budgets, rooms, ROWS * batch_size, at_once):
        most = max(budgets[i] for i in batch)
        if most < 1:
            advance(len(batch))
            continue
        with memory_in_mind(ADVICE):
            fresh = _generate(
                model, tokenizer, [prompts[i] for i in batch], most, stops, [items[i].location for i in batch], ends
            )
        for i, tokens in zip(batch, fresh, strict=True):
            answers[i] = _until_end([*answers[i], *tokens], ends, limit)
        advance(len(batch))
    return [
        texts_of(tokenizer, item, _text(tokenizer, tokens, item), stops)
        for item, tokens in zip(items, answers, strict=True)
    ]


@torch.inference_mode()
def sample_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
    count: int,
    *,
    limit: int,
    stops: Sequence[str] = (),
    batch_size: int,
    longest: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> list[list[str]]:
    """``count`` answers to each prompt, drawn at temperature 1 from all tokens; the same ones on every call. For the
    rest, see ``answer``."""
    ends = _end_tokens(model, tokenizer) | {item.end_token for item in items if item.end_token is not None}
    ordered = sorted(range(len(items)), key=lambda i: len(items[i].prompt), reverse=True)
    prompts = {i: [*items[i].prompt] for i in ordered}
    budgets, at_once = dict.fromkeys(ordered, limit), _tokens_at_once(model) // count
    rooms = {i: limit if longest is None else longest - len(items[i].prompt) for i in ordered}
    answers: dict[int, list[str]] = {}
    device = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(device):
        torch.manual_seed(0)
        for batch in _batches(ordered, prompts, budgets, rooms, max(1, ROWS * batch_size // count), at_once):
            most, batch_prompts = min(limit, *(rooms[i] for i in batch)), [prompts[i] for i in batch]
            with memory_in_mind(ADVICE):
                fresh = _generate(
                    model, tokenizer, batch_prompts, most, stops, [items[i].location for i in batch], ends, count
                )
            for row, i in enumerate(batch):
                drawn = fresh[row * count : (row + 1) * count]
                texts = [_text(tokenizer, _until_end(tokens, ends, limit), items[i]) for tokens in drawn]
                answers[i] = [texts_of(tokenizer, items[i], text, stops).generation for text in texts]
            advance(len(batch))
    return [answers[i] for i in range(len(items))]


def _tokens_at_once(model: PreTrainedModel) -> int:
    """How many tokens of ``model`` have keys and values of ``CACHE`` bytes, where each layer keeps them for each."""
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return CACHE // (2 * config.num_hidden_layers * heads * width * model.dtype.itemsize)


def _batches(
    waiting: Sequence[int], prompts: Mapping[int, Sequence[int]], budgets: Mapping[int, int], rooms: Mapping[int, int],
    rows: int, tokens: int,
) -> Iterator[list[int]]:  # fmt: skip
    """Batches of at most ``rows`` and ``tokens``, or of one row, in which none needs more new tokens than any other has
    room for."""
    batch: list[int] = []
    for i in waiting:
        more = [*batch, i]
        length = max(len(prompts[j]) for j in more) + max(budgets[j] for j in more)
        too_large = len(more) > rows or (batch and length * len(more) > tokens)
        if too_large or max(budgets[j] for j in more) > min(rooms[j] for j in more):
            yield batch
            more = [i]
        batch = more
    if batch:
        yield batch


def _takes_other_tokens(model: PreTrainedModel) -> bool:
    """Whether the generation config can pick tokens other than the likeliest; OpenUnlearning allows it, and so do
    we."""
    return bool(set(model.generation_config.to_diff_dict()) - HARMLESS)


class _Stops(StoppingCriteria):
    """Stops a row once its generated text contains one of ``stops``. transformers' own criterion reads the
    tokenizer's vocabulary and does not support every kind."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], begin: int):
        self._tokenizer, self._stops, self._begin = tokenizer, stops, begin

    def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        texts = decode(self._tokenizer, input_ids[:, self._begin :].tolist())
        return torch.tensor([any(stop in text for stop in self._stops) for text in texts], device=input_ids.device)


class _Numbers(LogitsProcessor):
    """Rejects NaN logits, which would otherwise look like an empty answer."""

    def __init__(self, places: Sequence[str]):
        self._places = places

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wrong = scores.isnan().any(1)
        if bool(wrong.any()):
            raise MpuError(f"{self._places[int(wrong.nonzero()[0])]}: the model's logits are NaN")
        return scores


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    limit: int,
    stops: Sequence[str],
    places: Sequence[str],
    ends: set[int],
    samples: int | None = None,
) -> list[list[int]]:
    """New tokens for each prompt: the greedy ones, or ``samples`` drawn sequences for each."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    stopping = {"stopping_criteria": [_Stops(tokenizer, stops, longest)]} if stops else {}
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    drawn = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}  # from all tokens
    drawing: dict[str, Any] = drawn if samples else greedy
    row_locations = [location for location in places for _ in range(samples or 1)]
    generated = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=limit, num_beams=1, pad_token_id=tokenizer.eos_token_id,
        return_dict_in_generate=False, stop_strings=None, max_time=None, eos_token_id=sorted(ends) or None,
        logits_processor=LogitsProcessorList([_Numbers(row_locations)]),
        num_return_sequences=samples or 1, **drawing, **stopping,
    )  # fmt: skip
    return generated[:, longest:].tolist()


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return {end for end in (*ends, tokenizer.eos_token_id) if end is not None}


def _until_end(tokens: list[int], ends: set[int], limit: int) -> list[int]:
    stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: min(stop, limit)]


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], item: Item) -> str:
    """``ids`` as text; OpenUnlearning takes spaces before punctuation away, the record's own text keeps them."""
    [text] = decode(tokenizer, [list(ids)], clean_up_tokenization_spaces=item.answer is None)
    return text


def texts_of(tokenizer: PreTrainedTokenizerBase, item: Item, generation: str, stops: Sequence[str]) -> Answer:
    """The texts of an item and of the answer that was generated for it, cut at the first of ``stops``."""
    prompt = _text(tokenizer, item.prompt, item)
    for stop in stops:
        generation = generation.split(stop)[0]
    answer = _text(tokenizer, item.ids, item).replace(prompt, "") if item.answer is None else item.answer
    return Answer(prompt, answer.strip(), generation.strip())
