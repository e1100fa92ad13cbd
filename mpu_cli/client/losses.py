"""The algorithms: one function a forget term, and a table of what each needs.

All terms are functions of the labelled tokens' log-probabilities. Notation: y_i the answer of example i, p_i its
probability under the model being trained, p_ref,i under the frozen copy that training began from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, logsigmoid

from mpu_cli.client.data import IGNORED


@dataclass(frozen=True)
class Answers:
    """Scores of one batch. ``log_probs``: (tokens,) of every labelled token of the batch; ``sequence_log_probs``:
    (batch,), their sums by example."""

    log_probs: torch.Tensor
    sequence_log_probs: torch.Tensor

    @property
    def token_mean_loss(self) -> torch.Tensor:
        """Cross-entropy per labelled token, mean over the batch's tokens."""
        return -self.log_probs.mean()


def score(logits: torch.Tensor, labels: torch.Tensor) -> Answers:
    """Scores from logits (batch, length, vocabulary) and labels (batch, length); computed in float32 or wider."""
    targets = labels[:, 1:]
    rows, columns = (targets != IGNORED).nonzero(as_tuple=True)
    picked = logits[rows, columns]
    wide = picked if picked.dtype == torch.float64 else picked.float()
    log_probs = -cross_entropy(wide, targets[rows, columns], reduction="none")
    sums = torch.zeros(len(labels), dtype=log_probs.dtype, device=log_probs.device)
    return Answers(log_probs, sums.index_add(0, rows, log_probs))


@dataclass(frozen=True)
class Settings:
    """Constants of the losses."""

    beta: float = 0.1


def gradient_ascent(answers: Answers, reference: torch.Tensor | None, settings: Settings) -> torch.Tensor:  # noqa: ARG001
    """−(token mean cross-entropy): climb the loss (Jang et al., 2023)."""
    return -answers.token_mean_loss


def npo(answers: Answers, reference: torch.Tensor | None, settings: Settings) -> torch.Tensor:
    """−(2/β)·mean_i log σ(−β·(log p_i − log p_ref,i)) (Zhang et al., 2024); ``reference``: log p_ref, (batch,)."""
    ratio = answers.sequence_log_probs - reference
    return -(2 / settings.beta) * logsigmoid(-settings.beta * ratio).mean()


@dataclass(frozen=True)
class Algorithm:
    """An unlearning algorithm: loss = γ·forget + α·retain.

    ``alpha`` 0 means that it reads no retain set. ``reference``: whether the forget term needs log p_ref. ``epochs``
    is the paper's schedule for one round.
    """

    forget: Callable[[Answers, torch.Tensor | None, Settings], torch.Tensor]
    gamma: float
    alpha: float
    reference: bool
    epochs: int


ALGORITHMS = {
    "gradascent": Algorithm(gradient_ascent, gamma=1, alpha=0, reference=False, epochs=10),
    "graddiff": Algorithm(gradient_ascent, gamma=1, alpha=1, reference=False, epochs=10),
    "npo": Algorithm(npo, gamma=1, alpha=1, reference=True, epochs=5),
}
