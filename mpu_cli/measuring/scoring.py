"""Scores the tokens of many items, from one forward pass over each, which all metrics use.

What items have in common (a system prompt, a question with its answer, a paraphrase and five wrong ones, the beginning
of their sentences) is read once, where the model's attention allows it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, PreTrainedModel

from mpu_cli.errors import MpuError
from mpu_cli.files.reader import worker_pool
from mpu_cli.heap import is_large, suit_heap_to
from mpu_cli.measuring.encoding import Item
from mpu_cli.model.device import memory_in_mind
from mpu_cli.model.network import Head, chunk_of, input_of, separate_head, vocabulary_of
from mpu_cli.observer import SILENT
from mpu_cli.records.tokens import common_prefix_length

# Many items in one pass of a model that reads each token once, however many items begin with it.
#
# Items are sorted, so that those that begin alike follow each other. A pack is one row of tokens without padding: of
# each item, those that the item before it does not begin with. Only attention sees items: a token attends to the
# tokens before it in its item, wherever they are in the row (tree attention).

NAME = "mpu_paths"  # of the attention, in transformers' table
MASK = 1 << 24  # entries of attention masks at once
# what some models' attention has beside a mask and a window
UNPACKABLE_ARGUMENTS = ("softcap", "s_aux", "position_bias")
_attention: ContextVar[TreeAttention] = ContextVar(NAME)  # of the pack that a thread reads


@dataclass
class Pack:
    """Items as a prefix tree, flattened into one row of tokens.

    ``ids``: the distinct tokens, (tokens,); ``depths``: their positions in their items, (tokens,); ``paths[i]``: the
    places of item i's tokens in the row, of which the first ``prefix_lengths[i]`` are shared with item i − 1. The last
    token of an item is not among them: it is predicted, never read.
    """

    items: list[Item] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    prefix_lengths: list[int] = field(default_factory=list)

    def add(self, item: Item) -> None:
        ids = item.ids[:-1]
        path: list[int] = []
        if self.items:
            path = self.paths[-1][: common_prefix_length(ids, self.items[-1].ids[:-1])]
        self.items.append(item)
        self.prefix_lengths.append(len(path))
        self.depths += range(len(path), len(ids))
        path = [*path, *range(len(self.ids), len(self.ids) + len(ids) - len(path))]
        self.ids += ids[self.prefix_lengths[-1] :]
        self.paths.append(path)


def packs(items: Sequence[Item], size: int) -> Iterator[Pack]:
    """All ``items``, in packs of at most ``size`` times as many tokens as the longest has."""
    most_tokens = size * max(len(item.ids) for item in items)
    pack = Pack()
    for item in sorted(items, key=lambda item: item.ids):
        if pack.items and len(pack.ids) + len(item.ids) > most_tokens:
            yield pack
            pack = Pack()
        pack.add(item)
    yield pack


class TreeAttention:
    """The attention of one pack, as transformers calls it; ``rows`` items at once."""

    def __init__(self, pack: Pack, rows: int, device: torch.device):
        fresh = [i for i, path in enumerate(pack.paths) if len(path) > pack.prefix_lengths[i]]
        # Items with about as many new tokens go into one part, so that little of it is padding.
        fresh.sort(key=lambda i: (len(pack.paths[i]) - pack.prefix_lengths[i], len(pack.paths[i])))
        self._parts: list[_Part] = []
        order: list[torch.Tensor] = []  # of the tokens, as the parts give them back
        width = max(len(path) for path in pack.paths)
        while fresh:
            most = len(pack.paths[fresh[-1]]) - pack.prefix_lengths[fresh[-1]]
            count = max(1, min(rows, MASK // (most * width)))
            chosen, fresh = fresh[-count:], fresh[:-count]
            paths = [torch.tensor(pack.paths[i]) for i in chosen]
            queries = [path[pack.prefix_lengths[i] :] for i, path in zip(chosen, paths, strict=True)]
            self._parts.append(_Part(queries, paths, torch.tensor(pack.depths), device))
            order.append(pad_sequence(queries, batch_first=True, padding_value=len(pack.ids)).flatten())
        self._back = torch.cat(order).argsort()[: len(pack.ids)].to(device)  # padding comes last
        self._masks: dict[tuple[_Part, int | None], torch.Tensor] = {}  # kept from layer to layer, if there is room
        self._keeps = sum(part.entries for part in self._parts) <= MASK

    def __call__(
        self,
        module: torch.nn.Module,  # noqa: ARG002 (as transformers calls it)
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # noqa: ARG002
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        """``query``, ``key`` and ``value`` are (1, heads, tokens, width); returns (1, tokens, heads, width)."""
        if more := [name for name in UNPACKABLE_ARGUMENTS if kwargs.get(name) is not None]:
            raise NotImplementedError(more[0])
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        outputs = [part.attend(q, k, v, scaling, self._mask(part, sliding_window, q.dtype)) for part in self._parts]
        return torch.cat(outputs).index_select(0, self._back)[None], None

    def _mask(self, part: _Part, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        mask = self._masks.get((part, window))
        if mask is None:
            mask = part.mask(window, dtype)
            if self._keeps:
                self._masks[part, window] = mask
        return mask


class _Part:
    """Some items: their new tokens are queries, (items, queries), and all of theirs are keys, (items, keys), both as
    places in the pack."""

    def __init__(
        self, queries: list[torch.Tensor], keys: list[torch.Tensor], depths: torch.Tensor, device: torch.device
    ):
        self._queries = pad_sequence(queries, batch_first=True)
        self._keys = pad_sequence(keys, batch_first=True).to(device)
        self._depths = depths[self._queries].to(device)
        self._queries = self._queries.to(device)

    @property
    def entries(self) -> int:
        """The number of entries of its mask."""
        return self._queries.numel() * self._keys.shape[1]

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """The mask added to attention scores, (items, 1, queries, keys): the keys of an item are in their order."""
        keys = torch.arange(self._keys.shape[1], device=self._keys.device)
        depths = self._depths[:, None, :, None]
        visible = keys <= depths
        if window is not None:
            visible &= keys > depths - window
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, mask: torch.Tensor
    ) -> torch.Tensor:
        """From (tokens, heads, width) of a whole pack to (items × queries, heads, width), with padding."""
        q, k, v = (_rows(x, at) for x, at in ((query, self._queries), (key, self._keys), (value, self._keys)))
        grouped = q.device.type == "cpu"  # elsewhere, fast kernels that take a mask want a key head for each query head
        if not grouped:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)


def _rows(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The rows ``at`` (items, places) of (tokens, heads, width): (items, heads, places, width)."""
    return x.index_select(0, at.flatten()).unflatten(0, at.shape).transpose(1, 2)  # faster than x[at] on a CPU


@contextmanager
def attending_along_paths(model: PreTrainedModel) -> Iterator[None]:
    """Passes inside it use the attention that their thread sets with ``attending_by``."""
    text = model.get_decoder()  # what surrounds a language model may allow less
    original_attention = text.config._attn_implementation
    AttentionInterface.register(NAME, lambda *args, **kwargs: _attention.get()(*args, **kwargs))
    text.set_attn_implementation(NAME)
    try:
        yield
    finally:
        text.set_attn_implementation(original_attention)


@contextmanager
def attending_by(attention: TreeAttention) -> Iterator[None]:
    """This thread's passes inside it read the pack of ``attention``."""
    before = _attention.set(attention)
    try:
        yield
    finally:
        _attention.reset(before)


ADVICE = "lower --batch-size, or use --dtype bfloat16"  # if memory runs out
CHUNK_SHARE = 4  # of a chunk of logits at once: what is computed from them takes three times as much
CACHED = 1 << 20  # logits at once on a CPU, whose cache then holds them: 4 MiB
MIN_TOKENS = 80  # tokens at once nevertheless, for each of which the head is read
FEWEST_ITEMS = 8  # in a pack, if several are read at once
CPU_ROWS = 8  # items whose attention is computed at once: with more, more of it is padding
MAX_PACK_DIFFERENCE = 1e-3  # nats by which a pack may differ from separate passes; rounding gives 1e-5 in float32


Advance = Callable[[float], None]  # reports that so many more records are done


@dataclass(frozen=True)
class TokenScores:
    """For each scored token of one item, on the CPU, (tokens,): cross-entropy and, if requested, log-probability, the
    likeliest token, and mean and variance of log p under the model's own distribution at that position.

    ``losses`` equal −``log_probs`` up to rounding or, of a Scorer that ``follows_suite``, up to its bias.
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


Key = tuple[tuple[int, ...], int]  # equal for items that are the same for a model
_Scored = tuple[Sequence[Item], list[TokenScores]]


def _key(item: Item) -> Key:
    return item.ids, item.start


def _unique(items: Sequence[Item]) -> list[Item]:
    """The first of the ``items`` that are the same for a model."""
    return list({_key(item): item for item in reversed(items)}.values())


@dataclass(frozen=True)
class _Request:
    """The items of which more than losses is computed, and whether that includes mean and variance."""

    fully: frozenset[Key] = frozenset()
    moments: bool = False


@dataclass(frozen=True)
class _Pass:
    """A pass of the model. ``rows``: for each item, the rows of ``states`` that its labels are predicted from. States
    are logits, or what the model's output head makes logits from: (rows, vocabulary or width)."""

    items: Sequence[Item]
    states: torch.Tensor
    rows: Sequence[Sequence[int]]


class Scorer:
    """Scores items with one model.

    ``follows_suite``: compute cross-entropies along the vocabulary as a strided axis, as OpenUnlearning does. torch's
    float32 kernel is biased by about 1e-5 there, and published numbers include that bias.
    """

    def __init__(self, model: PreTrainedModel, *, follows_suite: bool = False):
        self._model = model.eval()
        self._head = separate_head(self._model)
        self._follows_suite = follows_suite
        self._tried = 0  # tokens of the longest item that packing was tested on
        self._packs = True

    def prepare(self, items: Sequence[Item]) -> None:
        """Find out whether ``items`` can share passes; ``score`` does so if need be."""
        unique = _unique(items)
        longest = max((len(item.ids) for item in unique), default=0)
        if self._packs and longest > self._tried and len(unique) > 1:
            with memory_in_mind(ADVICE):
                self._packs, self._tried = self._can_pack(unique), longest

    @torch.inference_mode()
    def score(
        self,
        items: Sequence[Item],
        *,
        batch_size: int,
        loss_items: Sequence[Item] = (),
        moments: bool = False,
        advance: Advance = SILENT.advance,
    ) -> list[TokenScores]:
        """Scores of ``items`` and then of ``loss_items``, of which nothing but losses is computed.

        They are computed ``batch_size`` items at a time, in float32 or wider; duplicates are read once. Of ``items``,
        mean and variance are included with ``moments``.
        """
        scores_of: dict[Key, TokenScores] = {}
        all_items = [*items, *loss_items]
        unique = _unique(all_items)
        request = _Request(frozenset(map(_key, items)), moments)
        self.prepare(unique)
        suit_heap_to(weights_of(self._model))
        scores_in_passes = self._packed_scores if self._packs and len(unique) > 1 else self._padded_scores
        with memory_in_mind(ADVICE):
            for read, batch_scores in scores_in_passes(unique, batch_size, request):
                for item, scores in zip(read, batch_scores, strict=True):
                    parts = (scores.losses, scores.log_probs, scores.mean, scores.variance)
                    if not all(bool(torch.isfinite(part).all()) for part in parts if part is not None):
                        raise MpuError(f"{item.location}: the model's logits are NaN or infinite")
                    scores_of[_key(item)] = scores
                advance(len(read))
        return [scores_of[_key(item)] for item in all_items]

    def _scores(self, forward_pass: _Pass, request: _Request) -> list[TokenScores]:
        """Scores of each item of a pass, computed a chunk of labels at a time, each label after a row once."""
        items, states, head = forward_pass.items, forward_pass.states, self._head
        vocabulary = states.shape[1] if head is None else vocabulary_of(head)
        sizes = [len(item.labels) for item in items]
        fully = [_key(item) in request.fully for item in items]
        all_rows = [row for item_rows in forward_pass.rows for row in item_rows]
        all_labels = [label for item in items for label in item.labels]
        row_labels = torch.tensor([all_rows, all_labels]).T
        pairs, places = torch.unique(row_labels, dim=0, return_inverse=True)  # (pairs, 2): rows and labels
        needed = torch.zeros(len(pairs), dtype=torch.bool)
        needed[places[torch.tensor(fully).repeat_interleave(torch.tensor(sizes))]] = True
        order = needed.logical_not().int().argsort(stable=True)  # those of which more than losses is needed come first
        rows, targets = pairs[order].to(states.device).unbind(1)
        places, count = order.argsort()[places], int(needed.sum())
        step = max(1, chunk_of(vocabulary) // CHUNK_SHARE)
        if states.device.type == "cpu":
            step = min(step, max(MIN_TOKENS, CACHED // vocabulary))
        losses, details = [], []
        for chunk in (*_chunks(0, count, step), *_chunks(count, len(pairs), step)):
            logits, target = _columns(head, states[rows[chunk]]), targets[chunk]
            # The suite's losses come from the strided vocabulary axis; everything else from the contiguous one.
            if self._follows_suite:
                losses.append(cross_entropy(logits[None], target[None], reduction="none")[0])
            if chunk.start < count or not self._follows_suite:
                logits = logits.T.contiguous()
            if not self._follows_suite:
                losses.append(cross_entropy(logits, target, reduction="none"))
            if chunk.start < count:
                details.append(_details(logits, target, request.moments))
        loss = torch.cat(losses).cpu()
        detail_columns = [torch.cat(column).cpu() for column in zip(*details, strict=True)]
        scores = []
        for indices, full in zip(places.split(sizes), fully, strict=True):
            item_details = [column[indices] for column in detail_columns] if full else []
            scores.append(TokenScores(loss[indices], *item_details))
        return scores

    def _packed_scores(self, items: Sequence[Item], size: int, request: _Request) -> Iterator[_Scored]:
        """Scores from passes that read common beginnings of items once.

        Those of a small model are read several at once on a CPU, and have together ``size`` times the longest item:
        with all cores in one kernel, the cores wait for each other, and for what only one of them does.
        """
        workers = max(1, min(passes_at_once(self._model), size // FEWEST_ITEMS))
        rows = CPU_ROWS if self._model.device.type == "cpu" else size

        @torch.inference_mode()  # which holds for one thread
        def read(pack: Pack) -> _Scored:
            return pack.items, self._scores(self._read_pack(pack, rows), request)

        with attending_along_paths(self._model), worker_pool(workers) as pool:
            yield from pool.map(read, packs(items, size // workers))

    def _read_pack(self, pack: Pack, rows: int) -> _Pass:
        model, head = self._model, self._head
        ids, depths = (torch.tensor([row], device=model.device) for row in (pack.ids, pack.depths))
        # The places of the tokens that each item's labels are predicted from.
        predictors = [path[item.start - 1 :] for item, path in zip(pack.items, pack.paths, strict=True)]
        places = {token_index: number for number, token_index in enumerate(sorted({*chain(*predictors)}))}
        predictor_indices = torch.tensor([*places], device=model.device)
        keep = {"logits_to_keep": predictor_indices} if head is None and _keeps_logits(model) else {}
        with attending_by(TreeAttention(pack, rows, model.device)), input_of(head) as read:
            output = model(input_ids=ids, position_ids=depths, use_cache=False, **keep)
        states = output.logits[0] if head is None else read[0][0]
        return _Pass(
            pack.items,
            states if keep else states[predictor_indices],
            [[places[token_index] for token_index in row] for row in predictors],
        )

    def _padded_scores(self, items: Sequence[Item], size: int, request: _Request) -> Iterator[_Scored]:
        """Scores from passes of ``size`` items of similar length, longest first, so that running out of memory happens
        right away."""
        ordered = sorted(items, key=lambda item: len(item.ids), reverse=True)
        for start in range(0, len(ordered), size):
            part = ordered[start : start + size]
            yield part, self._scores(_padded_pass(self._model, self._head, part), request)

    @torch.inference_mode()
    def _can_pack(self, items: Sequence[Item]) -> bool:
        """Whether items can share a pass, tested on the longest and on those that have most in common with it.

        Models with recurrent states or an attention of their own cannot: it has to be torch's, through transformers'
        table, and take positions, and no indexer may read its mask to choose keys.
        """
        model, text = self._model, self._model.get_decoder()
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        has_indexer = getattr(text.config, "index_topk", None) is not None
        replaceable = text.config._attn_implementation == "sdpa" and text._can_set_attn_implementation()
        if has_indexer or not (takes_positions and replaceable):
            return False
        ordered = sorted(items, key=lambda item: item.ids)
        longest = max(range(len(ordered)), key=lambda i: len(ordered[i].ids))
        trial = ordered[max(0, longest - 2) : longest + 2]
        # Half precision rounds each pass differently; this check is for an attention that sees other tokens.
        slack = MAX_PACK_DIFFERENCE if model.dtype in (torch.float32, torch.float64) else 100 * MAX_PACK_DIFFERENCE
        try:
            [(read, together)] = self._packed_scores(trial, len(trial), _Request())
        except NotImplementedError:
            return False
        apart = self._scores(_padded_pass(model, self._head, read), _Request())
        return all(
            (packed_scores.losses - other.losses).abs().mean() <= slack
            for packed_scores, other in zip(together, apart, strict=True)
        )


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
    """The entries of TokenScores beside losses, from (tokens, vocabulary)."""
    log_p = logits.log_softmax(-1)
    details = [log_p.gather(1, targets[:, None])[:, 0], log_p.argmax(-1)]
    if moments:
        p = log_p.exp()
        mean = (p * log_p).sum(-1)
        details += [mean, (p * log_p.square()).sum(-1) - mean.square()]
    return details


def passes_at_once(model: PreTrainedModel) -> int:
    """The number of passes to run, each on a thread of its own: one for each core of a CPU, if ``model`` is small.

    With a large one, kernels use all cores well. Rotary positions that keep the scale of the last pass allow one pass.
    """
    kinds = {str(getattr(module, "rope_type", None)) for module in model.modules()}
    keeps = any(name in kind for kind in kinds for name in ("dynamic", "longrope"))
    sequential = keeps or model.device.type != "cpu" or is_large(weights_of(model))
    return 1 if sequential else torch.get_num_threads()


def weights_of(model: PreTrainedModel) -> int:
    """Bytes of the weights of ``model``."""
    return sum(parameter.nbytes for parameter in model.parameters())


def logits_of(model: PreTrainedModel, item: Item) -> torch.Tensor:
    """Logits of the scored tokens of an item: (tokens, vocabulary)."""
    forward_pass = _padded_pass(model, None, [item])
    return forward_pass.states[forward_pass.rows[0][0] : forward_pass.rows[0][-1] + 1]


def _padded_pass(model: PreTrainedModel, head: Head | None, items: Sequence[Item]) -> _Pass:
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
    rows = []
    for i, item in enumerate(items):
        first = i * length - left_out  # the row of the item's first token, if all were kept
        rows.append(range(first + item.start - 1, first + len(item.ids) - 1))
    return _Pass(items, states.flatten(0, 1), rows)


def _keeps_logits(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters
