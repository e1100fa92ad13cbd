"""Logits of tokens, computed a chunk of tokens at a time from the states that the output head reads.

With a vocabulary of 128,000, the logits of a batch and what its backward pass needs are larger than a small model. Here
they never exist together: each chunk's are computed, used and dropped, and computed again in the backward pass. If they
are one chunk, they are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

CHUNK = 1 << 26  # logits that exist at once: 256 MiB in float32
ROWS = 64  # tokens whose softmax is summed at once
LARGE = 1024.0  # logits times this are capped by any cap

Head = torch.nn.Module  # from states (…, width) to logits (…, vocabulary); has a weight (vocabulary, width)


@dataclass(frozen=True)
class Logits:
    """The logits of some tokens, (tokens, vocabulary), in float32 or wider.

    ``head`` computes them from ``states``, (tokens, width), of any number of tokens; None: ``states`` are the logits.
    """

    states: torch.Tensor
    head: Head | None = None

    def __len__(self) -> int:
        return len(self.states)

    def whole(self) -> torch.Tensor:
        """All of them at once."""
        return _wide(self.states if self.head is None else self.head(self.states))

    def log_probs(self, targets: torch.Tensor) -> torch.Tensor:
        """log p of each token's target: (tokens,)."""
        if type(self.head) is torch.nn.Linear:
            return _LogProbs.apply(self.states, self.head.weight, self.head.bias, targets)
        return self.per_token(
            lambda logits, chunk_targets: -cross_entropy(logits, chunk_targets, reduction="none"), targets
        )

    def per_token(
        self, compute: Callable[..., torch.Tensor], *columns: torch.Tensor, frozen: Logits | None = None
    ) -> torch.Tensor:
        """``compute(logits, *columns, frozen_logits)`` for chunks of tokens, one row for each token.

        ``columns`` have a row for each token. No gradient goes through the logits of ``frozen``.
        """
        more = () if frozen is None else (frozen.states,)

        def part(states: torch.Tensor, *chunk_columns: torch.Tensor) -> torch.Tensor:
            if frozen is not None:
                with torch.no_grad():
                    chunk_columns = (*chunk_columns[:-1], Logits(chunk_columns[-1], frozen.head).whole())
            return compute(Logits(states, self.head).whole(), *chunk_columns)

        step = len(self) if self.head is None else chunk_of(vocabulary_of(self.head))
        if len(self) <= step:
            return part(self.states, *columns, *more)
        chunks = zip(*(column.split(step) for column in (self.states, *columns, *more)), strict=True)
        if not torch.is_grad_enabled():
            return torch.cat([part(*chunk) for chunk in chunks])
        return torch.cat(
            [
                checkpoint(part, *chunk, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
                for chunk in chunks
            ]
        )


def vocabulary_of(head: Head) -> int:
    return cast(torch.Tensor, head.weight).shape[0]


def chunk_of(vocabulary: int) -> int:
    """How many tokens' logits are one chunk."""
    return max(1, CHUNK // vocabulary)


class _LogProbs(torch.autograd.Function):
    """log softmax(W·states + b) at the targets. Its backward pass turns the logits into their gradient in place.

    torch's own cross-entropy keeps log-probabilities and gradients of all logits beside them. Logits are kept for the
    backward pass if they are one chunk, and computed again if they are more.
    """

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        ctx.step = chunk_of(weight.shape[0])
        target_logits, sums, logits = [], [], None
        for part, chunk_targets in zip(states.split(ctx.step), targets.split(ctx.step), strict=True):
            logits = None  # or two chunks exist while the next is computed
            logits = _wide(linear(part, weight, bias))
            sums += [rows.logsumexp(1) for rows in logits.split(ROWS)]  # in rows, for what it allocates
            target_logits.append(logits.gather(1, chunk_targets[:, None])[:, 0])
        normalisers = torch.cat(sums) if sums else states.new_zeros(0)
        ctx.chunk_logits = logits if len(target_logits) == 1 and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(states, weight, bias, targets, normalisers)
        return torch.cat(target_logits) - normalisers if target_logits else normalisers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias, targets, normalisers = ctx.saved_tensors
        of_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        of_weight = of_bias = None
        for start in range(0, len(states), ctx.step):
            part = slice(start, start + ctx.step)
            logits = None
            logits = _wide(linear(states[part], weight, bias)) if ctx.chunk_logits is None else ctx.chunk_logits
            ctx.chunk_logits = None
            rate, chunk_targets = gradient[part, None], targets[part, None]
            logits.sub_(normalisers[part, None]).exp_().mul_(-rate)
            # On a GPU, adding in place has no deterministic form; writing has.
            logits.scatter_(1, chunk_targets, logits.gather(1, chunk_targets) + rate)
            logits = logits.to(weight.dtype)
            if of_states is not None:
                of_states[part] = logits @ weight
            if ctx.needs_input_grad[1]:
                if of_weight is None:
                    of_weight = logits.T @ states[part]
                else:
                    of_weight.addmm_(logits.T, states[part])
            if ctx.needs_input_grad[2]:
                of_bias = logits.sum(0) + (0 if of_bias is None else of_bias)
        if of_weight is None and ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight)
        return of_states, of_weight, of_bias, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def separate_head(model: PreTrainedModel) -> Head | None:
    """The output head of ``model``, if it alone turns what it reads into logits; else None.

    Some models cap or scale their logits after the head, which shows if the head's output is made large. Weights that
    are split over processes are not tried: they are whole only within a pass of the model.
    """
    head = model.get_output_embeddings()
    if head is None or any(_is_shard(parameter) for parameter in head.parameters()):
        return None
    large: list[torch.Tensor] = []

    def inflate(_: torch.nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        large[:] = [output * LARGE]
        return large[0]

    hook = head.register_forward_hook(inflate)
    try:
        logits = model(input_ids=torch.arange(4, device=model.device)[None], use_cache=False).logits
    finally:
        hook.remove()
    head_is_last = large and large[0].shape == logits.shape and torch.equal(large[0].to(logits.dtype), logits)
    return head if head_is_last else None


@contextmanager
def input_of(head: Head | None) -> Iterator[list[torch.Tensor]]:
    """This thread's passes of the model inside it leave what ``head`` reads, (batch, length, width), in the list that
    this yields, and compute the logits of the first position only. Without a head, passes are as usual."""
    head_inputs: list[torch.Tensor] = []
    if head is None:
        yield head_inputs
        return
    thread = threading.get_ident()

    def keep(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        if threading.get_ident() != thread:
            return None
        head_inputs[:] = inputs
        return (inputs[0][:, :1],)

    hook = head.register_forward_pre_hook(keep)
    try:
        yield head_inputs
    finally:
        hook.remove()


def _is_shard(parameter: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")
