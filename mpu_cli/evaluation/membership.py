"""The attack that needs gradients; attacks that only need scores are in ``metrics``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.errors import MpuError
from mpu_cli.evaluation.encoding import Item
from mpu_cli.evaluation.scoring import ADVICE, logits_of, passes_at_once, weights_of
from mpu_cli.heap import suit_heap_to
from mpu_cli.models.library_errors import memory_in_mind

GRADIENTS = 1 << 30  # bytes of gradients at once
NormsOf = Callable[[torch.Tensor, Sequence[torch.Tensor]], list[torch.Tensor]]


def gradient_norms(
    model: PreTrainedModel, items: Sequence[Item], advance: Callable[[int], None] = lambda _: None
) -> list[float]:
    """For each item, the mean over parameters of the 2-norm of the gradient of its mean token loss.

    The answer's end is excluded, as OpenUnlearning does; an item with nothing else gives 0.
    """
    model.eval()
    parameters = [p.requires_grad_(True) for p in model.parameters()]
    weights = weights_of(model)
    suit_heap_to(weights)
    room = GRADIENTS // weights
    norms = []
    at_once = max(1, min(passes_at_once(model), room))
    norms_of = _norms_together if at_once > 1 else _norms_in_turn
    with memory_in_mind(ADVICE), worker_pool(at_once) as pool:
        for item, norm in zip(
            items, pool.map(partial(_gradient_norm, model, parameters, norms_of), items), strict=True
        ):
            if norm != norm:
                raise MpuError(f"{item.location}: the model's gradient is NaN")
            norms.append(norm)
            advance(1)
    return norms


@torch.enable_grad()
def _gradient_norm(model: PreTrainedModel, parameters: Sequence[torch.Tensor], norms_of: NormsOf, item: Item) -> float:
    count = item.content_tokens
    if not count:
        return 0.0
    log_p = logits_of(model, item)[:count].float().log_softmax(-1)
    targets = torch.tensor(item.labels[:count], device=log_p.device)
    loss = -log_p.gather(1, targets[:, None]).mean()
    return float(torch.stack(norms_of(loss, parameters)).mean())


def _norms_together(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [gradient.float().norm(2) for gradient in gradients if gradient is not None]


def _norms_in_turn(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same, with one parameter's gradient at a time; for one pass at once."""
    norms: list[torch.Tensor] = []

    def take(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        norms.append(parameter.grad.float().norm(2))
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in parameters]
    try:
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return norms
