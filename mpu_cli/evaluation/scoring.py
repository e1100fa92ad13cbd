"""Scores the tokens of many items: one forward pass per item, which all metrics use.

Items that share a prompt (a question with its answer, a paraphrase and five wrong ones) share the pass over it: the
prompts of a batch, all of one length, are read once, and the answers continue from their keys and values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput

from mpu_cli.errors import MpuError
from mpu_cli.evaluation.encoding import Item
from mpu_cli.models.loading import memory_in_mind
from mpu_cli.models.logits import CHUNK, Head, chunk_of, input_of, separate_head

ADVICE = "lower --batch-size, or use --dtype bfloat16"  # if memory runs out
BLOCK = 16  # tokens in a block of a strided cross-entropy
SHARE = 4  # of a chunk of logits at once: what is computed from them takes three times as much
SAME = 1e-3  # nats by which a shared pass may differ from a separate one; rounding gives 1e-5 in float32


@dataclass(frozen=True)
class TokenScores:
    """For each scored token of one item, on the CPU, (tokens,): cross-entropy, log-probability, the likeliest token,
    and, if requested, mean and variance of log p under the model's own distribution at that position.

    ``losses`` equal −``log_probs`` up to rounding: the suite computes the cross-entropy over a strided axis, where
    torch's float32 kernel is biased by about 1e-5, and published numbers include that bias.
    """

    losses: torch.Tensor
    log_probs: torch.Tensor
    likeliest: torch.Tensor
    mean: torch.Tensor | None = None
    variance: torch.Tensor | None = None

    @property
    def loss(self) -> float:
        """Mean cross-entropy per token, in nats."""
        return float(self.losses.mean())


@torch.inference_mode()
def score(
    model: PreTrainedModel,
    items: Sequence[Item],
    *,
    batch_size: int,
    moments: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> list[TokenScores]:
    """Score ``items``, ``batch_size`` at a time, in float32 or wider; duplicates are read once.

    Raises MpuError if scores are not finite (with the place) or if memory runs out.
    """
    model.eval()
    scores_of: dict[tuple[tuple[int, ...], int], TokenScores] = {}
    first = {(item.ids, item.start): item for item in reversed(items)}
    unique = list(first.values())
    alone, shared = _split(unique)
    with memory_in_mind(ADVICE):
        head = separate_head(model)
        if shared and not _can_share(model, head, shared[0], batch_size):
            alone, shared = unique, []
        passes = ((batch, _states_of(model, head, batch)) for batch in _batches(alone, batch_size))
        for batch, states in chain(passes, _shared_passes(model, head, shared, batch_size)):
            for item, scores in zip(batch, _read(states, head, batch, moments), strict=True):
                parts = (scores.losses, scores.log_probs, scores.mean, scores.variance)
                if not all(bool(torch.isfinite(part).all()) for part in parts if part is not None):
                    raise MpuError(f"{item.place}: the model's logits are NaN or infinite")
                scores_of[item.ids, item.start] = scores
            advance(len(batch))
    return [scores_of[item.ids, item.start] for item in items]


def _split(items: Sequence[Item]) -> tuple[list[Item], list[list[Item]]]:
    """Items with a unique prompt, and groups of items that share one."""
    groups: dict[tuple[int, ...], list[Item]] = {}
    for item in items:
        groups.setdefault(item.ids[: item.start], []).append(item)
    alone = [group[0] for group in groups.values() if len(group) == 1]
    return alone, [group for group in groups.values() if len(group) > 1]


def _batches(items: Sequence[Item], size: int) -> Iterator[list[Item]]:
    """Batches of similar length, longest first, so that running out of memory happens right away."""
    ordered = sorted(items, key=lambda item: len(item.ids), reverse=True)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def logits_of(model: PreTrainedModel, items: Sequence[Item]) -> list[torch.Tensor]:
    """Logits of the scored tokens of each item: (tokens, vocabulary)."""
    return _states_of(model, None, items)


def _pass(model: PreTrainedModel, head: Head | None, **inputs: object) -> tuple[ModelOutput, torch.Tensor]:
    """The output of one pass, and its logits or, with the model's ``head`` apart, the states that they come from:
    (batch, length, width or vocabulary)."""
    with input_of(head) as states:
        output = model(**inputs)
    return output, output.logits if head is None else states[0]


def _states_of(model: PreTrainedModel, head: Head | None, items: Sequence[Item]) -> list[torch.Tensor]:
    """What ``_pass`` gives for the scored tokens of each item."""
    device = model.device
    ids = pad_sequence([torch.tensor(item.ids) for item in items], batch_first=True).to(device)
    lengths = torch.tensor([len(item.ids) for item in items], device=device)
    mask = (torch.arange(ids.shape[1], device=device) < lengths[:, None]).long()
    begin = min(item.start for item in items) - 1
    keep = {"logits_to_keep": ids.shape[1] - begin} if _keeps_logits(model) else {}
    _, states = _pass(model, head, input_ids=ids, attention_mask=mask, use_cache=False, **keep)
    offset = ids.shape[1] - states.shape[1] + 1
    return [row[item.start - offset : len(item.ids) - offset] for row, item in zip(states, items, strict=True)]


def _shared_passes(
    model: PreTrainedModel, head: Head | None, groups: Sequence[list[Item]], size: int
) -> Iterator[tuple[list[Item], list[torch.Tensor]]]:
    """Batches of items and what ``_pass`` gives for their scored tokens, for groups of items that share a prompt.

    Prompts of one length are read together, ``size`` at a time; their answers continue from copies of the cache, in
    batches of similar length.
    """
    by_length: dict[int, list[list[Item]]] = {}
    for group in groups:
        by_length.setdefault(group[0].start, []).append(group)
    for start, alike in sorted(by_length.items(), reverse=True):
        for begin in range(0, len(alike), size):
            yield from _answers_of(model, head, start, alike[begin : begin + size], size)


def _answers_of(
    model: PreTrainedModel, head: Head | None, start: int, groups: Sequence[list[Item]], size: int
) -> Iterator[tuple[list[Item], list[torch.Tensor]]]:
    device = model.device
    prompts = torch.tensor([group[0].ids[:start] for group in groups], device=device)
    keep = {"logits_to_keep": 1} if _keeps_logits(model) else {}
    output, states = _pass(model, head, input_ids=prompts, use_cache=True, **keep)
    first = states[:, -1]
    owned = [(item, number) for number, group in enumerate(groups) for item in group]
    owned.sort(key=lambda pair: len(pair[0].ids), reverse=True)
    for begin in range(0, len(owned), size):
        items, owners = map(list, zip(*owned[begin : begin + size], strict=True))
        rows = [first[number : number + 1] for number in owners]
        if len(items[0].labels) > 1:
            cache = DynamicCache()
            picked = torch.tensor(owners, device=device)
            for number, layer in enumerate(output.past_key_values.layers):
                cache.update(layer.keys[picked], layer.values[picked], number)
            # The last label is never read, only predicted.
            answers = pad_sequence([torch.tensor(item.labels[:-1]) for item in items], batch_first=True).to(device)
            lengths = torch.tensor([len(item.ids) - 1 for item in items], device=device)
            mask = (torch.arange(start + answers.shape[1], device=device) < lengths[:, None]).long()
            _, rest = _pass(model, head, input_ids=answers, attention_mask=mask, past_key_values=cache)
            rows = [
                torch.cat([row, more[: len(item.labels) - 1]])
                for row, more, item in zip(rows, rest, items, strict=True)
            ]
        yield items, rows


def _can_share(model: PreTrainedModel, head: Head | None, group: list[Item], batch_size: int) -> bool:
    """Whether answers can continue from a prompt's keys and values, tested on one group against separate passes.

    Models with recurrent states, sliding windows or no cache cannot, and get no shared passes.
    """
    output = model(input_ids=torch.tensor([group[0].ids[:2]], device=model.device), use_cache=True)
    if not isinstance(getattr(output, "past_key_values", None), DynamicCache):
        return False
    if any(getattr(layer, "is_sliding", True) for layer in output.past_key_values.layers):
        return False
    # Half precision rounds each pass differently; this check is for a cache that loses its position.
    slack = SAME if model.dtype in (torch.float32, torch.float64) else 100 * SAME
    for items, states in _answers_of(model, head, group[0].start, [group], batch_size):
        apart = _read(_states_of(model, head, items), head, items, False)
        for one, other in zip(apart, _read(states, head, items, False), strict=True):
            if (one.log_probs - other.log_probs).abs().mean() > slack:
                return False
    return True


def _keeps_logits(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _strided_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the vocabulary on a strided axis, (tokens,); in blocks, which torch processes in parallel."""
    whole = len(logits) // BLOCK * BLOCK
    return torch.cat(
        [
            cross_entropy(
                rows.unflatten(0, (-1, size)).transpose(1, 2), names.unflatten(0, (-1, size)), reduction="none"
            ).flatten()
            for rows, names, size in (
                (logits[:whole], targets[:whole], BLOCK),
                (logits[whole:], targets[whole:], len(logits) - whole),
            )
            if len(rows)
        ]
    )


def _read(states: Sequence[torch.Tensor], head: Head | None, items: Sequence[Item], moments: bool) -> list[TokenScores]:
    """Log-probabilities and the other scores, a chunk of tokens at a time."""
    sizes = [len(item.labels) for item in items]
    targets = torch.tensor([token for item in items for token in item.labels], device=states[0].device)
    rows = torch.cat(list(states))
    parts: list[tuple[torch.Tensor, ...]] = []
    step = max(1, (CHUNK // rows.shape[1] if head is None else chunk_of(head)) // SHARE)
    for begin in range(0, len(rows), step):
        part = rows[begin : begin + step]
        part = part if head is None else head(part)
        part = part if part.dtype == torch.float64 else part.float()
        target = targets[begin : begin + step]
        log_p = part.log_softmax(-1)
        columns = [
            _strided_cross_entropy(part, target),
            log_p.gather(1, target[:, None])[:, 0],
            log_p.argmax(-1),
        ]
        if moments:
            p = log_p.exp()
            mean = (p * log_p).sum(-1)
            columns += [mean, (p * log_p.square()).sum(-1) - mean.square()]
        parts.append(tuple(columns))
    columns = [torch.cat(column).cpu().split(sizes) for column in zip(*parts, strict=True)]
    return [TokenScores(*values) for values in zip(*columns, strict=True)]
