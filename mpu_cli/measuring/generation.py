"""Greedy answers, continued from where the scoring pass leaves off.

Scoring an answer already shows what the model would generate while it follows that answer: up to the first token that
is not the likeliest, plus the likeliest one there. A model that knows an answer by heart generates nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict

import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from mpu_cli.errors import MpuError
from mpu_cli.measuring.encoding import Item, encoder_of
from mpu_cli.measuring.scoring import ADVICE, Advance, TokenScores
from mpu_cli.model.device import memory_in_mind
from mpu_cli.model.load import limits_of, load, releasing_memory
from mpu_cli.model.source import Model
from mpu_cli.model.staging import add_delta, open_delta
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.unlearning import ChatTemplate, Prompts
from mpu_cli.records.forms import Record
from mpu_cli.records.tokens import decode

ROWS_PER_RECORD = 4  # times the batch size, because a step reads one token per row
PART = 16  # tokens after which rows that have ended leave a batch
CACHE = 2 << 30  # bytes of keys and values that are kept at once
# generation config entries that do not affect greedy generation, or that are set here
HARMLESS = {
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version",
    "_from_model_config", "do_sample", "num_beams", "temperature", "top_p", "top_k", "typical_p", "min_p", "max_length",
    "max_new_tokens", "use_cache", "cache_implementation", "num_return_sequences", "return_dict_in_generate",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "stop_strings", "max_time",
    "early_stopping",
}  # fmt: skip


def remark_on_generation(model: PreTrainedModel) -> str | None:
    """A remark on unused entries of the model's generation config that would end or choose its answers otherwise."""
    config = model.generation_config
    entries = {"num_beams": (config.num_beams or 1) > 1, "stop_strings": config.stop_strings}
    unused = " and ".join(name for name, value in entries.items() if value)
    return f"generation_config.json: answers are greedy, without its {unused}" if unused else None


@dataclass(frozen=True)
class Answer:
    """Texts without special tokens: the prompt, the true answer and the model's answer."""

    input: str
    ground_truth: str
    generation: str


class Served(Protocol):
    """A model that is served: it scores as a ``Scorer`` does, and answers as ``answer`` does."""

    @property
    def url(self) -> str: ...

    @property
    def name(self) -> str: ...

    def prepare(self, items: Sequence[Item]) -> None: ...

    def score(
        self,
        items: Sequence[Item],
        *,
        batch_size: int,
        loss_items: Sequence[Item],
        moments: bool = False,
        advance: Advance,
    ) -> list[TokenScores]: ...

    def answer(
        self,
        tokenizer: PreTrainedTokenizerBase,
        items: Sequence[Item],
        *,
        limit: int,
        stops: Sequence[str],
        batch_size: int,
        advance: Advance,
    ) -> list[Answer]: ...


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
    advance: Advance = SILENT.advance,
) -> list[Answer]:
    """The greedy answer of ``model`` to each prompt, at most ``limit`` tokens, cut at the first of ``stops``.

    ``drafts`` are the known first tokens of each answer; ``longest`` is how many tokens the model can read in total,
    None for no limit. Batches group prompts of similar length.
    """
    ends = _end_tokens(model, tokenizer, items)
    # A generation config may pick tokens other than the likeliest; OpenUnlearning allows it, and so do we.
    if set(model.generation_config.to_diff_dict()) - HARMLESS:
        drafts = [[] for _ in items]
    answers: list[list[int]] = [_until_end(draft, ends, limit) for draft in drafts]
    waiting = [i for i, tokens in enumerate(answers) if len(tokens) < limit and not (tokens and tokens[-1] in ends)]
    advance(len(items) - len(waiting))
    waiting.sort(key=lambda i: len(items[i].prompt) + len(answers[i]), reverse=True)
    prompts = {i: [*items[i].prompt, *answers[i]] for i in waiting}
    for i, [tokens] in _generate(
        model, tokenizer, items, prompts, limit=limit, longest=longest, stops=stops, ends=ends, batch_size=batch_size,
        advance=advance,
    ):  # fmt: skip
        answers[i] = _until_end([*answers[i], *tokens], ends, limit)
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
    stops: Sequence[str],
    batch_size: int,
    longest: int | None,
    advance: Advance,
) -> list[list[str]]:
    """``count`` answers to each prompt, drawn at temperature 1 from all tokens; the same ones on every call. For the
    rest, see ``answer``."""
    ends = _end_tokens(model, tokenizer, items)
    ordered = sorted(range(len(items)), key=lambda i: len(items[i].prompt), reverse=True)
    prompts = {i: [*items[i].prompt] for i in ordered}
    answers: dict[int, list[str]] = {}
    device = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(device):
        torch.manual_seed(0)
        for i, drawn in _generate(
            model, tokenizer, items, prompts, limit=limit, longest=longest, stops=stops, ends=ends,
            batch_size=batch_size, advance=advance, samples=count,
        ):  # fmt: skip
            texts = [_text(tokenizer, _until_end(tokens, ends, limit), items[i]) for tokens in drawn]
            answers[i] = [texts_of(tokenizer, items[i], text, stops).generation for text in texts]
    return [answers[i] for i in range(len(items))]


def _tokens_at_once(model: PreTrainedModel) -> int:
    """The number of tokens whose keys and values take ``CACHE`` bytes, where each layer of ``model`` keeps them for
    each."""
    config: Any = model.config.get_text_config()
    layers = config.per_layer_config if config.is_heterogeneous else [config] * config.num_hidden_layers
    numbers = 0
    for layer in layers:
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        width = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        numbers += 2 * heads * width
    return CACHE // (numbers * model.dtype.itemsize)


def _batches(
    prompts: Mapping[int, Sequence[int]], budgets: Mapping[int, int], rooms: Mapping[int, int], rows: int, tokens: int,
    *, padded: bool,
) -> Iterator[list[int]]:  # fmt: skip
    """Batches of at most ``rows`` and ``tokens``, or of one row, in which none needs more new tokens than any other has
    room for; unless ``padded``, of prompts of one length."""
    batch: list[int] = []
    for i in prompts:
        candidate = [*batch, i]
        new_tokens = max(budgets[j] for j in candidate)
        length = max(len(prompts[j]) for j in candidate) + new_tokens
        too_large = len(candidate) > rows or (batch and length * len(candidate) > tokens)
        unlike = not padded and len(prompts[i]) != len(prompts[candidate[0]])
        if too_large or unlike or new_tokens > min(rooms[j] for j in candidate):
            yield batch
            candidate = [i]
        batch = candidate
    if batch:
        yield batch


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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, items: Sequence[Item], prompts: Mapping[int, list[int]],
    *, limit: int, longest: int | None, stops: Sequence[str], ends: set[int], batch_size: int,
    advance: Advance, samples: int | None = None,
) -> Iterator[tuple[int, list[list[int]]]]:  # fmt: skip
    """New tokens for each of ``prompts``, by the number of its item and in this order: the greedy ones, or ``samples``
    drawn sequences. A prompt is that of the item, perhaps with the first tokens of an answer of ``limit`` tokens."""
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    drawn = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}  # from all tokens
    drawing: dict[str, Any] = drawn if samples else greedy
    count = samples or 1
    rows, at_once = max(1, ROWS_PER_RECORD * batch_size // count), _tokens_at_once(model) // count
    rooms = {i: limit if longest is None else longest - len(prompt) for i, prompt in prompts.items()}
    # what is left of the limit after the first tokens, if there is room
    budgets = {i: min(limit - len(prompt) + len(items[i].prompt), rooms[i]) for i, prompt in prompts.items()}

    def has_ended(tokens: list[int]) -> bool:
        if ends.intersection(tokens) or not stops:
            return bool(ends.intersection(tokens))
        [text] = decode(tokenizer, [tokens])
        return any(stop in text for stop in stops)

    in_parts = not samples and _rows_can_leave(model)
    for batch in _batches(prompts, budgets, rooms, rows, at_once, padded=not _keeps_state(model)):
        width = max(len(prompts[i]) for i in batch)
        padded = [[0] * (width - len(prompts[i])) + prompts[i] for i in batch]
        mask = [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in batch]
        stopping = {"stopping_criteria": [_Stops(tokenizer, stops, width)]} if stops else {}
        most = max(budgets[i] for i in batch)
        fresh: list[list[int]] = [[] for _ in range(len(batch) * count)]
        waiting, cache = list(range(len(fresh))), None  # rows that have not ended, and their keys and values
        ids, attention = (torch.tensor(rows, device=model.device) for rows in (padded, mask))
        while waiting and most > 0:
            step = min(most, PART) if in_parts else most
            locations = [items[batch[row // count]].location for row in waiting]
            with memory_in_mind(ADVICE):
                generated = model.generate(
                    input_ids=ids, attention_mask=attention, past_key_values=cache, max_new_tokens=step, num_beams=1,
                    pad_token_id=tokenizer.eos_token_id, return_dict_in_generate=True, stop_strings=None, max_time=None,
                    eos_token_id=sorted(ends) or None, logits_processor=LogitsProcessorList([_Numbers(locations)]),
                    num_return_sequences=count, **drawing, **stopping,
                )  # fmt: skip
            new = generated.sequences[:, ids.shape[1] :]
            for row, tokens in zip(waiting, new.tolist(), strict=True):
                fresh[row] += tokens
            most -= step
            if most > 0:
                # Rows that have ended leave the batch, which would compute them until the last one has.
                places = [place for place, row in enumerate(waiting) if not has_ended(fresh[row])]
                going = torch.tensor(places, dtype=torch.long, device=model.device)
                cache = generated.past_key_values
                if cache is not None and len(places) < len(waiting):
                    cache.batch_select_indices(going)
                attention = torch.cat([attention, attention.new_ones(new.shape)], 1)[going]
                ids, waiting = generated.sequences[going], [waiting[place] for place in places]
        for place, i in enumerate(batch):
            yield i, fresh[place * count : (place + 1) * count]
        advance(len(batch))


def _keeps_state(model: PreTrainedModel) -> bool:
    """Whether layers keep a state that every token changes, padding too: what transformers computes of a prompt that is
    padded on the left is then off (by a percent and more in random models)."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=model.config).layers)


def _rows_can_leave(model: PreTrainedModel) -> bool:
    """Whether greedy generation can continue with some rows of a batch: nothing but keys and values knows of the
    others, and nothing in its generation config counts tokens from the beginning of a call."""
    if set(model.generation_config.to_diff_dict()) - HARMLESS or any(
        hasattr(m, "rope_deltas") for m in model.modules()
    ):
        return False
    return not _keeps_state(model)


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, items: Sequence[Item]) -> set[int]:
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    all_ends = (*ends, tokenizer.eos_token_id, *(item.end_token for item in items))
    return {end for end in all_ends if end is not None}


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


# Answers for people to read: of a copy, without and with the delta that was just made of it.

SHOWN_TOKENS = 64  # tokens of an answer that people read, at most
LONGEST_ANSWER = 128  # tokens of an answer that is trained on, at most
BATCH = 8  # answers at once, times ROWS_PER_RECORD


@dataclass(frozen=True)
class Shown:
    """One answer for people to read; ``before``: without the delta, if there is one."""

    question: str
    truth: str
    before: str | None
    answer: str

    def __str__(self) -> str:
        texts = {"truth": self.truth, "before": self.before, "answer" if self.before is None else "after": self.answer}
        lines = [f"  {who + ':':<8} {text}" for who, text in texts.items() if text is not None]
        return "\n".join([self.question.strip(), *lines])


class Respondent:
    """A copy that is ready to answer: loaded, with the encoder of its prompts."""

    def __init__(self, copy: Model, prompts: ChatTemplate, device: str):
        self._model, self._tokenizer = load(copy, torch.float32, device)
        template = prompts.template if isinstance(prompts, Prompts) else None
        self._encoder = encoder_of(self._tokenizer, prompts, template, limits_of(self._model), "as trained")

    def add(self, copy: Model, delta: Path) -> None:
        """Answer as ``copy`` does with ``delta`` from now on."""
        add_delta(self._model, copy, open_delta(copy, delta))

    def answers(self, records: Sequence[Record], limit: int = LONGEST_ANSWER, observer: Observer = SILENT) -> list[str]:
        """The greedy answer to the question of each record, at most ``limit`` tokens."""
        items = self._encoder.questions(records)
        if remark := remark_on_generation(self._model):
            observer.note(remark)
        observer.stage("answer", len(items), "answers")
        answers = answer(
            self._model, self._tokenizer, items, [[]] * len(items), limit=limit, batch_size=BATCH,
            longest=self._encoder.encoding.limits.longest, advance=observer.advance,
        )  # fmt: skip
        return [answer.generation for answer in answers]


@releasing_memory
def answers_before_and_after(
    copy: Model, delta: Path, records: Sequence[Record], prompts: ChatTemplate, device: str
) -> list[Shown]:
    """The answers of ``copy`` to the questions of ``records``, texts left out, without and with ``delta``."""
    questions = [record for record in records if record.turns]
    if not questions:
        return []
    respondent = Respondent(copy, prompts, device)
    before = respondent.answers(questions, SHOWN_TOKENS)
    respondent.add(copy, delta)
    after = respondent.answers(questions, SHOWN_TOKENS)
    return [
        Shown(record.question, record.answer, then, now)
        for record, then, now in zip(questions, before, after, strict=True)
    ]


# The reading of one answer's scores: all that metrics need, small enough to keep.

LEAST_VARIANCE = 1e-6
LOWEST = 0.4  # fraction of tokens that min-k uses


class AnswerReading(TypedDict, total=False):
    """The reading of one answer's scores: mean loss, memorisation, attack scores; ``content_loss``, the mean loss
    without the answer's end; and ``says``, the first tokens that the model itself would generate, as far as its scores
    on the true answer show them."""

    loss: float
    content_loss: float
    says: list[int]
    exact_memorization: float
    extraction_strength: float
    min_k: float
    min_k_plus_plus: float
    compressed: int


def reading(item: Item, scores: TokenScores, text: str) -> AnswerReading:
    """Everything the metrics need from one answer.

    ``text`` is the answer without special tokens. Only the loss includes the answer's end.
    """
    if scores.log_probs is None or scores.likeliest is None:
        raise ValueError("reading: only the losses of this answer were computed")
    agreed = scores.likeliest == torch.tensor(item.labels)
    right, count = int(agreed.long().cumprod(0).sum()), item.content_tokens
    read: AnswerReading = {
        "loss": scores.loss,
        "says": scores.likeliest[: right + 1].tolist(),
        "content_loss": float(scores.losses[:count].mean()) if count else scores.loss,
        "exact_memorization": float(agreed[:count].double().mean()) if count else 0.0,
        "extraction_strength": _extraction_strength(agreed[:count], least_one=item.content is None),
        "min_k": lowest_mean(scores.log_probs[:count]),
        "compressed": len(zlib.compress(text.encode())),
    }
    if scores.mean is not None and scores.variance is not None:
        deviation = scores.variance.clamp(min=LEAST_VARIANCE).sqrt()
        read["min_k_plus_plus"] = lowest_mean(((scores.log_probs - scores.mean) / deviation)[:count])
    return read


def _extraction_strength(agreed: torch.Tensor, *, least_one: bool) -> float:
    """1 − k/L, k the shortest prefix after which all tokens are right; ``least_one``: k is L − 1 at most, as
    OpenUnlearning has it, so that a model that knows nothing has 1/L, and 1 of an answer of one token."""
    if not len(agreed):
        return 0.0
    wrong = (~agreed).nonzero()
    prefix = int(wrong[-1]) + 1 if len(wrong) else 0
    return 1 - min(prefix, len(agreed) - least_one) / len(agreed)


def lowest_mean(values: torch.Tensor) -> float:
    """Minus the mean of the lowest 40 % of ``values`` (Shi et al., 2024), at least one of them; 0 if there are none."""
    if not len(values):
        return 0.0
    return -float(values.sort().values[: max(1, int(len(values) * LOWEST))].mean())
