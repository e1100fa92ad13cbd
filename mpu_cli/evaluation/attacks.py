"""The attack that needs gradients; attacks that only need scores are in ``metrics``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from mpu_cli.errors import MpuError
from mpu_cli.evaluation.encoding import Item
from mpu_cli.evaluation.scoring import ADVICE, logits_of
from mpu_cli.models.loading import memory_in_mind


def gradient_norms(
    model: PreTrainedModel, items: Sequence[Item], advance: Callable[[int], None] = lambda _: None
) -> list[float]:
    """For each item, the mean over parameters of the 2-norm of the gradient of its mean token loss.

    The last label is excluded, as in the suite; an item with one label gives 0.
    """
    model.eval()
    parameters = [p.requires_grad_(True) for p in model.parameters()]
    norms = []
    for item in items:
        norm = 0.0
        if len(item.labels) > 1:
            with torch.enable_grad(), memory_in_mind(ADVICE):
                logits = logits_of(model, item)
                log_p = logits[:-1].float().log_softmax(-1)
                targets = torch.tensor(item.labels[:-1], device=log_p.device)
                loss = -log_p.gather(1, targets[:, None]).mean()
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            of_parameters = [g.float().norm(2) for g in gradients if g is not None]
            norm = float(torch.stack(of_parameters).mean())
        if norm != norm:
            raise MpuError(f"{item.place}: the model's gradient is NaN")
        norms.append(norm)
        advance(1)
    return norms
