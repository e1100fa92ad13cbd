"""Scores the tokens of many items, from one forward pass over each, which all metrics use.

What items have in common (a system prompt, a question with its answer, a paraphrase and five wrong ones, the beginning
of their sentences) is read once, where the model's attention allows it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.errors import MpuError
from mpu_cli.evaluation.encoding import Item
from mpu_cli.evaluation.packing import Pack, TreeAttention, attending_along_paths, attending_by, packs, takes_paths
from mpu_cli.heap import is_large, suit_heap_to
from mpu_cli.models.library_errors import memory_in_mind
from mpu_cli.models.logits import Head, chunk_of, input_of, separate_head, vocabulary_of

ADVICE = "lower --batch-size, or use --dtype bfloat16"  # if memory runs out
SHARE = 4  # of a chunk of logits at once: what is computed from them takes three times as much
CACHED = 1 << 20  # logits at once on a CPU, whose cache then holds them: 4 MiB
FEWEST = 80  # tokens at once nevertheless, for each of which the head is read
FEWEST_ITEMS = 8  # in a pack, if several are read at once
CPU_ROWS = 8  # items whose attention is computed at once: with more, more of it is padding
SAME = 1e-3  # nats by which a pack may differ from separate passes; rounding gives 1e-5 in float32


@dataclass(frozen=True)
class TokenScores:
    """For each scored token of one item, on the CPU, (tokens,): cross-entropy and, if requested, log-probability, the
    likeliest token, and mean and variance of log p under the model's own distribution at that position.

    ``losses`` equal −``log_probs`` up to rounding: OpenUnlearning computes the cross-entropy over a strided axis, where
    torch's float32 kernel is biased by about 1e-5, and published numbers include that bias.
    """

    losses: torch.Tensor
    log_probs: torch.Tensor | None = None
    likeliest: torch.Tensor | None = None
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

    def prepare(self, items: Sequence[Item]) -> None:
        """Find out whether ``items`` can share passes; ``score`` does so if need be.

        Raises MpuError if memory runs out.
        """
        unique = _unique(items)
        longest = max((len(item.ids) for item in unique), default=0)
        if self._packs and longest > self._tried and len(unique) > 1:
            with memory_in_mind(ADVICE):
                self._packs, self._tried = _can_pack(self._model, self._head, unique), longest

    @torch.inference_mode()
    def score(
        self,
        items: Sequence[Item],
        *,
        batch_size: int,
        loss_items: Sequence[Item] = (),
        moments: bool = False,
        advance: Callable[[int], None] = lambda _: None,
    ) -> list[TokenScores]:
        """Scores of ``items`` and then of ``loss_items``, of which nothing but losses is computed.

        They are computed ``batch_size`` items at a time, in float32 or wider; duplicates are read once. Of ``items``,
        mean and variance are included with ``moments``.
        Raises MpuError if scores are not finite (with the place) or if memory runs out.
        """
        scores_of: dict[_Key, TokenScores] = {}
        all_items = [*items, *loss_items]
        unique = _unique(all_items)
        request = _Wanted(frozenset(map(_key, items)), moments)
        self.prepare(unique)
        suit_heap_to(weights_of(self._model))
        with memory_in_mind(ADVICE):
            for read, batch_scores in self._read(unique, batch_size, request):
                for item, scores in zip(read, batch_scores, strict=True):
                    parts = (scores.losses, scores.log_probs, scores.mean, scores.variance)
                    if not all(bool(torch.isfinite(part).all()) for part in parts if part is not None):
                        raise MpuError(f"{item.location}: the model's logits are NaN or infinite")
                    scores_of[_key(item)] = scores
                advance(len(read))
        return [scores_of[_key(item)] for item in all_items]

    @cached_property
    def _head(self) -> Head | None:
        return separate_head(self._model)

    def _read(self, items: Sequence[Item], size: int, request: _Wanted) -> Iterator[_Scored]:
        read = _packed_scores if self._packs and len(items) > 1 else _padded_scores
        return read(self._model, self._head, items, size, request)


_Key = tuple[tuple[int, ...], int]  # what makes two items the same for a model
_Scored = tuple[Sequence[Item], list[TokenScores]]


def _key(item: Item) -> _Key:
    return item.ids, item.start


def _unique(items: Sequence[Item]) -> list[Item]:
    """The first of the ``items`` that are the same for a model."""
    return list({_key(item): item for item in reversed(items)}.values())


@dataclass(frozen=True)
class _Wanted:
    """The items of which more than losses is computed, and whether that includes mean and variance."""

    fully: frozenset[_Key]
    moments: bool = False


@dataclass(frozen=True)
class _Pass:
    """``rows``: for each item, those rows of ``states`` that its labels are predicted from. States are logits, or what
    the model's output head makes logits from: (rows, vocabulary or width)."""

    items: Sequence[Item]
    states: torch.Tensor
    rows: Sequence[Sequence[int]]

    def scores(self, head: Head | None, request: _Wanted) -> list[TokenScores]:
        """Scores of each item, computed a chunk of labels at a time, each label after a row once."""
        device = self.states.device
        vocabulary = self.states.shape[1] if head is None else vocabulary_of(head)
        sizes = [len(item.labels) for item in self.items]
        fully = [_key(item) in request.fully for item in self.items]
        of_items = torch.tensor([[*chain(*self.rows)], [*chain(*(item.labels for item in self.items))]]).T
        pairs, places = torch.unique(of_items, dim=0, return_inverse=True)  # (pairs, 2): rows and labels
        needed = torch.zeros(len(pairs), dtype=torch.bool)
        needed[places[torch.tensor(fully).repeat_interleave(torch.tensor(sizes))]] = True
        order = needed.logical_not().int().argsort(stable=True)  # those of which more than losses is needed come first
        rows, targets = pairs[order].to(device).unbind(1)
        places, count = order.argsort()[places], int(needed.sum())
        step = max(1, chunk_of(vocabulary) // SHARE)
        if device.type == "cpu":
            step = min(step, max(FEWEST, CACHED // vocabulary))
        losses, details = [], []
        for chunk in (*_chunks(0, count, step), *_chunks(count, len(pairs), step)):
            logits, target = _columns(head, self.states[rows[chunk]]), targets[chunk]
            # As OpenUnlearning does, along the vocabulary as a strided axis.
            losses.append(cross_entropy(logits[None], target[None], reduction="none")[0])
            if chunk.start < count:
                details.append(_details(logits.T.contiguous(), target, request.moments))
        loss, *detail_columns = (torch.cat([*column]).cpu() for column in (losses, *zip(*details, strict=True)))
        return [
            TokenScores(loss[indices], *(column[indices] for column in detail_columns if full))
            for indices, full in zip(places.split(sizes), fully, strict=True)
        ]


def _chunks(begin: int, end: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, end)) for start in range(begin, end, step))


def _columns(head: Head | None, states: torch.Tensor) -> torch.Tensor:
    """Logits with the vocabulary first: (vocabulary, tokens)."""
    if type(head) is torch.nn.Linear:
        logits = head.weight @ states.T
        logits = logits if head.bias is None else logits + head.bias[:, None]
    else:
        logits = (states if head is None else head(states)).T.contiguous()
    return logits if logits.dtype == torch.float64 else logits.float()


def _details(logits: torch.Tensor, targets: torch.Tensor, moments: bool) -> list[torch.Tensor]:
    """From (tokens, vocabulary) what TokenScores has beside losses."""
    log_p = logits.log_softmax(-1)
    details = [log_p.gather(1, targets[:, None])[:, 0], log_p.argmax(-1)]
    if moments:
        p = log_p.exp()
        mean = (p * log_p).sum(-1)
        details += [mean, (p * log_p.square()).sum(-1) - mean.square()]
    return details


def _packed_scores(
    model: PreTrainedModel, head: Head | None, items: Sequence[Item], size: int, request: _Wanted
) -> Iterator[_Scored]:
    """Scores from passes that read what items have in common once.

    Those of a small model are read several at once on a CPU, and have together ``size`` times the longest item: with
    all cores in one kernel, the cores wait for each other, and for what only one of them does.
    """
    workers = max(1, min(passes_at_once(model), size // FEWEST_ITEMS))
    rows = CPU_ROWS if model.device.type == "cpu" else size
    read = partial(_read_pack, model, head, rows=rows, request=request)
    with attending_along_paths(model), worker_pool(workers) as pool:
        yield from pool.map(read, packs(items, size // workers))


@torch.inference_mode()  # which holds for one thread
def _read_pack(model: PreTrainedModel, head: Head | None, pack: Pack, rows: int, request: _Wanted) -> _Scored:
    ids, depths = (torch.tensor([row], device=model.device) for row in (pack.ids, pack.depths))
    predictors = pack.predictors()
    places = {token_index: number for number, token_index in enumerate(sorted({*chain(*predictors)}))}
    predictor_indices = torch.tensor([*places], device=model.device)
    keep = {"logits_to_keep": predictor_indices} if head is None and _keeps_logits(model) else {}
    with attending_by(TreeAttention(pack, rows, model.device)), input_of(head) as read:
        output = model(input_ids=ids, position_ids=depths, use_cache=False, **keep)
    states = output.logits[0] if head is None else read[0][0]
    forward_pass = _Pass(
        pack.items,
        states if keep else states[predictor_indices],
        [[places[token_index] for token_index in row] for row in predictors],
    )
    return pack.items, forward_pass.scores(head, request)


def passes_at_once(model: PreTrainedModel) -> int:
    """How many passes to run, each on a thread of its own: one for each core of a CPU, if ``model`` is small.

    With a large one, kernels use all cores well. Rotary positions that keep the scale of the last pass allow one pass.
    """
    kinds = {str(getattr(module, "rope_type", None)) for module in model.modules()}
    keeps = any(name in kind for kind in kinds for name in ("dynamic", "longrope"))
    sequential = keeps or model.device.type != "cpu" or is_large(weights_of(model))
    return 1 if sequential else torch.get_num_threads()


def weights_of(model: PreTrainedModel) -> int:
    """Bytes of the weights of ``model``."""
    return sum(parameter.nbytes for parameter in model.parameters())


@torch.inference_mode()
def _can_pack(model: PreTrainedModel, head: Head | None, items: Sequence[Item]) -> bool:
    """Whether items can share a pass, tested on the longest and on those that have most in common with it.

    Models with recurrent states or an attention of their own cannot.
    """
    if not takes_paths(model):
        return False
    ordered = sorted(items, key=lambda item: item.ids)
    longest = max(range(len(ordered)), key=lambda i: len(ordered[i].ids))
    trial = ordered[max(0, longest - 2) : longest + 2]
    only_losses = _Wanted(frozenset())
    # Half precision rounds each pass differently; this check is for an attention that sees other tokens.
    slack = SAME if model.dtype in (torch.float32, torch.float64) else 100 * SAME
    try:
        [(read, together)] = _packed_scores(model, head, trial, len(trial), only_losses)
    except NotImplementedError:
        return False
    apart = _states_of(model, head, read).scores(head, only_losses)
    return all(
        (packed_scores.losses - other.losses).abs().mean() <= slack
        for packed_scores, other in zip(together, apart, strict=True)
    )


def _padded_scores(
    model: PreTrainedModel, head: Head | None, items: Sequence[Item], size: int, request: _Wanted
) -> Iterator[_Scored]:
    """Scores from passes of ``size`` items of similar length, longest first, so that running out of memory happens
    right away."""
    ordered = sorted(items, key=lambda item: len(item.ids), reverse=True)
    for start in range(0, len(ordered), size):
        part = ordered[start : start + size]
        yield part, _states_of(model, head, part).scores(head, request)


def logits_of(model: PreTrainedModel, item: Item) -> torch.Tensor:
    """Logits of the scored tokens of an item: (tokens, vocabulary)."""
    forward_pass = _states_of(model, None, [item])
    return forward_pass.states[forward_pass.rows[0][0] : forward_pass.rows[0][-1] + 1]


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
