"""How an attacker estimates a change hidden in noise, better than by taking it as it is.

d = v + n is what a recovered model has on top of what is public, n white noise. Multiplied by ‖v‖²/(‖v‖² + ‖n‖²), the
best factor for a v that nothing is known of, its error is η/√(1 + η²) of v at noise of scale η, where d itself is off
by η. If v has low rank, as a change trained with LoRA has, singular values tell it from noise: those within the noise's
bulk are dropped, and the others lowered to what v contributes on average (Gavish and Donoho 2017, arXiv 1405.7511).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

AS_IT_IS, SCALED, SPECTRAL = "as it is", "scaled down", "singular values"

Tensors = Mapping[str, torch.Tensor]


def estimates(recovered: Tensors, public: Tensors, truth: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    """``recovered`` itself, and what shrinking its difference from ``public`` makes of it, by the name of the method.

    ``truth`` only gives the scale of the noise in each tensor, which an attacker who knows κ computes.
    """
    by_method: dict[str, dict[str, torch.Tensor]] = {AS_IT_IS: dict(recovered), SCALED: {}, SPECTRAL: {}}
    for name, tensor in recovered.items():
        change = tensor - public[name]
        noise = float((tensor - truth[name]).double().square().mean().sqrt())
        size = float(change.double().square().mean())
        factor = max(0.0, 1 - noise**2 / size) if size else 0.0
        by_method[SCALED][name] = public[name] + factor * change
        by_method[SPECTRAL][name] = public[name] + (spectral(change, noise) if change.ndim == 2 else factor * change)
    return by_method


def spectral(x: torch.Tensor, noise: float) -> torch.Tensor:
    """The matrix behind ``x``, float32 (rows, columns), which has white noise of this scale: singular values shrunk so
    that the squared error is least."""
    if not noise:
        return x
    wide = x if x.shape[0] <= x.shape[1] else x.T
    values, vectors = torch.linalg.eigh((wide @ wide.T).double())
    rows, columns = wide.shape
    unit = noise * math.sqrt(columns)
    ratio = rows / columns
    squares = (values.clamp(min=0) / unit**2).clamp(min=1e-30)  # of singular values, in units of the noise's
    inside = (squares - ratio - 1) ** 2 - 4 * ratio
    factors = torch.where(squares > (1 + math.sqrt(ratio)) ** 2, inside.clamp(min=0).sqrt() / squares, 0.0)
    vectors = vectors.to(x.dtype)
    shrunk = vectors @ (factors.to(x.dtype)[:, None] * (vectors.T @ wide))
    return shrunk if wide is x else shrunk.T
