"""What is read off the scores of one answer: all that metrics need, small enough to keep."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch

    from mpu_cli.evaluation.encoding import Item
    from mpu_cli.evaluation.scoring import TokenScores

LEAST_VARIANCE = 1e-6
LOWEST = 0.4  # fraction of tokens that min-k uses


class AnswerReading(TypedDict, total=False):
    """What one answer's scores gave: mean loss, memorisation, attack scores; ``content_loss``, the mean loss without
    the answer's end; and ``says``, the first tokens that the model itself would generate, as far as its scores on the
    true answer show them."""

    loss: float
    content_loss: float
    says: list[int]
    exact_memorization: float
    extraction_strength: float
    min_k: float
    min_k_plus_plus: float
    compressed: int


def reading(item: Item, scores: TokenScores, text: str) -> AnswerReading:
    """Everything the metrics need from one answer.

    ``text`` is the answer without special tokens. Only the loss includes the answer's end.
    """
    import torch  # here: `mpu compare` reads goals from this module, and needs no torch

    if scores.log_probs is None or scores.likeliest is None:
        raise ValueError("reading: only the losses of this answer were computed")
    agreed = scores.likeliest == torch.tensor(item.labels)
    right, count = int(agreed.long().cumprod(0).sum()), item.content_tokens
    read: AnswerReading = {
        "loss": scores.loss,
        "says": scores.likeliest[: right + 1].tolist(),
        "content_loss": float(scores.losses[:count].mean()) if count else scores.loss,
        "exact_memorization": _share(agreed[:count]),
        "extraction_strength": _extraction_strength(agreed[:count], least_one=item.content is None),
        "min_k": lowest_mean(scores.log_probs[:count]),
        "compressed": len(zlib.compress(text.encode())),
    }
    if scores.mean is not None and scores.variance is not None:
        deviation = scores.variance.clamp(min=LEAST_VARIANCE).sqrt()
        read["min_k_plus_plus"] = lowest_mean(((scores.log_probs - scores.mean) / deviation)[:count])
    return read


def _share(agreed: torch.Tensor) -> float:
    return float(agreed.double().mean()) if len(agreed) else 0.0


def _extraction_strength(agreed: torch.Tensor, *, least_one: bool) -> float:
    """1 − k/L, k the shortest prefix after which all tokens are right; ``least_one``: k is L − 1 at most, as
    OpenUnlearning has it, so that a model that knows nothing has 1/L, and 1 of an answer of one token."""
    if not len(agreed):
        return 0.0
    wrong = (~agreed).nonzero()
    prefix = int(wrong[-1]) + 1 if len(wrong) else 0
    return 1 - min(prefix, len(agreed) - least_one) / len(agreed)


def lowest_mean(values: torch.Tensor) -> float:
    """Minus the mean of the lowest 40 % of ``values`` (Shi et al., 2024), at least one of them; 0 if there are none."""
    if not len(values):
        return 0.0
    return -float(values.sort().values[: max(1, int(len(values) * LOWEST))].mean())
