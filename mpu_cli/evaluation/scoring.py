"""Scores the tokens of many items, from one forward pass over each, which all metrics use.

What items have in common (a system prompt, a question with its answer, a paraphrase and five wrong ones, the beginning
of their sentences) is read once, where the model's attention allows it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from mpu_cli.errors import MpuError
from mpu_cli.evaluation.encoding import Item
from mpu_cli.evaluation.packing import PathAttention, attending_along, packs, takes_paths
from mpu_cli.models.loading import memory_in_mind
from mpu_cli.models.logits import Head, chunk_of, input_of, separate_head, vocabulary_of

ADVICE = "lower --batch-size, or use --dtype bfloat16"  # if memory runs out
BLOCK = 16  # tokens in a block of a strided cross-entropy
SHARE = 4  # of a chunk of logits at once: what is computed from them takes three times as much
CACHED = 1 << 21  # logits at once on a CPU, whose cache then holds them: 8 MiB
FEWEST = 64  # tokens at once nevertheless, for each of which the head is read
SAME = 1e-3  # nats by which a pack may differ from separate passes; rounding gives 1e-5 in float32


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


class Scorer:
    """Scores items with one model."""

    def __init__(self, model: PreTrainedModel):
        self._model = model.eval()
        self._tried = 0  # tokens of the longest item that packing was tested on
        self._packs = True

    @torch.inference_mode()
    def score(
        self,
        items: Sequence[Item],
        *,
        batch_size: int,
        moments: bool = False,
        advance: Callable[[int], None] = lambda _: None,
    ) -> list[TokenScores]:
        """Score ``items``, ``batch_size`` at a time, in float32 or wider; duplicates are read once.

        Raises MpuError if scores are not finite (with the place) or if memory runs out.
        """
        scores_of: dict[tuple[tuple[int, ...], int], TokenScores] = {}
        unique = list({(item.ids, item.start): item for item in reversed(items)}.values())
        with memory_in_mind(ADVICE):
            for found in self._passes(unique, batch_size):
                for item, scores in zip(found.items, found.scores(self._head, moments), strict=True):
                    parts = (scores.losses, scores.log_probs, scores.mean, scores.variance)
                    if not all(bool(torch.isfinite(part).all()) for part in parts if part is not None):
                        raise MpuError(f"{item.place}: the model's logits are NaN or infinite")
                    scores_of[item.ids, item.start] = scores
                advance(len(found.items))
        return [scores_of[item.ids, item.start] for item in items]

    @cached_property
    def _head(self) -> Head | None:
        return separate_head(self._model)

    def _passes(self, items: Sequence[Item], size: int) -> Iterator[_Pass]:
        longest = max(len(item.ids) for item in items)
        if self._packs and longest > self._tried and len(items) > 1:
            self._packs, self._tried = _can_pack(self._model, self._head, items), longest
        passes = _packed if self._packs and len(items) > 1 else _padded
        return passes(self._model, self._head, items, size)


@dataclass(frozen=True)
class _Pass:
    """``rows``: for each item, those rows of ``states`` that its labels are predicted from. States are logits, or what
    the model's output head makes logits from: (rows, vocabulary or width)."""

    items: Sequence[Item]
    states: torch.Tensor
    rows: Sequence[Sequence[int]]

    def scores(self, head: Head | None, moments: bool) -> list[TokenScores]:
        """Log-probabilities and the other scores, a chunk of labels at a time, each label after a row once."""
        device = self.states.device
        vocabulary = self.states.shape[1] if head is None else vocabulary_of(head)
        labels = torch.tensor([*chain(*(item.labels for item in self.items))])
        pairs = torch.tensor([*chain(*self.rows)]) * vocabulary + labels
        pairs, places = (each.to(device) for each in torch.unique(pairs, return_inverse=True))
        rows, targets = pairs // vocabulary, pairs % vocabulary
        parts: list[tuple[torch.Tensor, ...]] = []
        step = max(1, chunk_of(vocabulary) // SHARE)
        if device.type == "cpu":
            step = min(step, max(FEWEST, CACHED // vocabulary))
        for begin in range(0, len(rows), step):
            part = self.states[rows[begin : begin + step]]
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
        sizes = [len(item.labels) for item in self.items]
        columns = [torch.cat(column)[places].cpu().split(sizes) for column in zip(*parts, strict=True)]
        return [TokenScores(*values) for values in zip(*columns, strict=True)]


def _packed(model: PreTrainedModel, head: Head | None, items: Sequence[Item], size: int) -> Iterator[_Pass]:
    """Passes that read what items have in common once."""
    for pack in packs(items, size):
        ids, depths = (torch.tensor([row], device=model.device) for row in (pack.ids, pack.depths))
        attention, predictors = PathAttention(pack, size, model.device), pack.predictors()
        places = {place: number for number, place in enumerate(sorted({*chain(*predictors)}))}
        kept = torch.tensor([*places], device=model.device)
        keep = {"logits_to_keep": kept} if head is None and _keeps_logits(model) else {}
        with attending_along(model, attention), input_of(head) as read:
            output = model(input_ids=ids, position_ids=depths, use_cache=False, **keep)
        states = output.logits[0] if head is None else read[0][0]
        yield _Pass(
            pack.items, states if keep else states[kept], [[places[place] for place in row] for row in predictors]
        )


def _can_pack(model: PreTrainedModel, head: Head | None, items: Sequence[Item]) -> bool:
    """Whether items can share a pass, tested on the longest and on those that have most in common with it.

    Models with recurrent states or an attention of their own cannot.
    """
    if not takes_paths(model):
        return False
    ordered = sorted(items, key=lambda item: item.ids)
    longest = max(range(len(ordered)), key=lambda i: len(ordered[i].ids))
    trial = ordered[max(0, longest - 2) : longest + 2]
    # Half precision rounds each pass differently; this check is for an attention that sees other tokens.
    slack = SAME if model.dtype in (torch.float32, torch.float64) else 100 * SAME
    try:
        [together] = _packed(model, head, trial, len(trial))
    except NotImplementedError:
        return False
    apart = _states_of(model, head, together.items)
    return all(
        (one.log_probs - other.log_probs).abs().mean() <= slack
        for one, other in zip(together.scores(head, False), apart.scores(head, False), strict=True)
    )


def _padded(model: PreTrainedModel, head: Head | None, items: Sequence[Item], size: int) -> Iterator[_Pass]:
    """Passes of ``size`` items of similar length, longest first, so that running out of memory happens right away."""
    ordered = sorted(items, key=lambda item: len(item.ids), reverse=True)
    for start in range(0, len(ordered), size):
        yield _states_of(model, head, ordered[start : start + size])


def logits_of(model: PreTrainedModel, item: Item) -> torch.Tensor:
    """Logits of the scored tokens of an item: (tokens, vocabulary)."""
    found = _states_of(model, None, [item])
    return found.states[found.rows[0][0] : found.rows[0][-1] + 1]


def _states_of(model: PreTrainedModel, head: Head | None, items: Sequence[Item]) -> _Pass:
    """One pass over a batch of items, each in a row of its own."""
    device = model.device
    ids = pad_sequence([torch.tensor(item.ids) for item in items], batch_first=True).to(device)
    lengths = torch.tensor([len(item.ids) for item in items], device=device)
    mask = (torch.arange(ids.shape[1], device=device) < lengths[:, None]).long()
    begin = min(item.start for item in items) - 1
    keep = {"logits_to_keep": ids.shape[1] - begin} if _keeps_logits(model) else {}
    with input_of(head) as read:
        output = model(input_ids=ids, attention_mask=mask, use_cache=False, **keep)
    states = output.logits if head is None else read[0]
    length = states.shape[1]
    left_out = ids.shape[1] - length
    rows = [
        range(i * length + item.start - 1 - left_out, i * length + len(item.ids) - 1 - left_out)
        for i, item in enumerate(items)
    ]
    return _Pass(items, states.flatten(0, 1), rows)


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
