"""Many items in one pass of a model that reads each token once, however many items begin with it.

Items are sorted, so that those that begin alike follow each other. A pack is one row of tokens without padding: of each
item, those that the item before it does not begin with. Only attention sees items: a token attends to the tokens before
it in its item, wherever they are in the row (tree attention).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, PreTrainedModel

from mpu_cli.evaluation.encoding import Item

NAME = "mpu_paths"  # of the attention, in transformers' table
MASK = 1 << 24  # entries of attention masks at once
UNKNOWN = ("softcap", "s_aux", "position_bias")  # what some models' attention has beside a mask and a window
_attention: ContextVar[TreeAttention] = ContextVar(NAME)  # of the pack that a thread reads


@dataclass
class Pack:
    """Items as a prefix tree, flattened into one row of tokens.

    ``ids``: the distinct tokens, (tokens,); ``depths``: their positions in their items, (tokens,); ``paths[i]``: the
    places of item i's tokens in the row, of which the first ``known[i]`` are shared with item i − 1. The last token of
    an item is not among them: it is predicted, never read.
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
            before = self.items[-1].ids[:-1]
            alike = zip(before, ids, strict=False)
            same = next((i for i, (a, b) in enumerate(alike) if a != b), min(len(before), len(ids)))
            path = self.paths[-1][:same]
        self.items.append(item)
        self.prefix_lengths.append(len(path))
        self.depths += range(len(path), len(ids))
        path = [*path, *range(len(self.ids), len(self.ids) + len(ids) - len(path))]
        self.ids += ids[self.prefix_lengths[-1] :]
        self.paths.append(path)

    def predictors(self) -> list[list[int]]:
        """Where the tokens are that each item's labels are predicted from."""
        return [path[item.start - 1 :] for item, path in zip(self.items, self.paths, strict=True)]


def packs(items: Sequence[Item], size: int) -> Iterator[Pack]:
    """All ``items``, in packs of at most ``size`` times as many tokens as the longest has."""
    room = size * max(len(item.ids) for item in items)
    pack = Pack()
    for item in sorted(items, key=lambda item: item.ids):
        if pack.items and len(pack.ids) + len(item.ids) > room:
            yield pack
            pack = Pack()
        pack.add(item)
    yield pack


class TreeAttention:
    """The attention of one pack, as transformers calls it; ``rows`` items at once."""

    def __init__(self, pack: Pack, rows: int, device: torch.device):
        fresh = [i for i, path in enumerate(pack.paths) if len(path) > pack.prefix_lengths[i]]
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
        if more := [name for name in UNKNOWN if kwargs.get(name) is not None]:
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
        """How many entries its mask has."""
        return self._queries.numel() * self._keys.shape[1]

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """What is added to attention scores, (items, 1, queries, keys): the keys of an item are in their order."""
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
    """From (tokens, heads, width) those ``at``, (items, places): (items, heads, places, width)."""
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


def takes_paths(model: PreTrainedModel) -> bool:
    """Whether the attention of ``model`` can be replaced: it uses torch's, through transformers' table, takes
    positions, and no indexer reads its mask to choose keys."""
    positions, text = "position_ids" in inspect.signature(model.forward).parameters, model.get_decoder()
    indexed = getattr(text.config, "index_topk", None) is not None
    replaceable = text.config._attn_implementation == "sdpa" and text._can_set_attn_implementation()
    return positions and not indexed and replaceable
