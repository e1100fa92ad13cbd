"""Attention on accelerators: which of torch's kernels transformers' call leads to."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from transformers.integrations import sdpa_attention

HALVES = (torch.float16, torch.bfloat16)
GroupsOf = Callable[..., bool]


def _only_where_fast(original: GroupsOf) -> GroupsOf:
    """Whether keys and values may stay one for several query heads, as ``original`` says, and fast kernels take them
    so.

    Outside of half precision only CUDA's kernel that keeps all attention scores does: 15.6 instead of 7.0 GB a record
    of 2,048 tokens at 1B. So they are repeated there.
    """

    @wraps(original)
    def use_gqa(attention_mask: torch.Tensor | None, key: torch.Tensor, *args: torch.Tensor) -> bool:
        return original(attention_mask, key, *args) and (key.device.type == "cpu" or key.dtype in HALVES)

    return use_gqa


def repeat_keys_where_faster() -> None:
    """Replace transformers' own decision, once."""
    if not hasattr(sdpa_attention.use_gqa_in_sdpa, "__wrapped__"):
        sdpa_attention.use_gqa_in_sdpa = _only_where_fast(sdpa_attention.use_gqa_in_sdpa)
