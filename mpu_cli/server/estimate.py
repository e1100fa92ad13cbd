"""How far an aggregate is from the clean update, estimated from the differences between the deltas of its copies.

Deltas of copies at multiples c_k of one draw are values of Δ(c) = a₀ + a₁c + a₂c² + …, where a_i is of order κ^i, and
the aggregate of m of them is off by |Π c_k|·‖a_m‖ plus higher orders. a₀ … a_{m−1} are the coefficients of the
polynomial through the deltas. They yield two numbers: the difference from the aggregate with one copy fewer, as in the
embedded pairs of Runge–Kutta methods (Hairer, Nørsett and Wanner, section II.4), which is of order m−1 and therefore a
rough upper bound; and the next term if the series continues as it began, ‖a_m‖ ≈ ‖a_{m−1}‖·(‖a_{m−1}‖/‖a₀‖)^{1/(m−1)}.

Permanent noise is the same in every copy, so their differences say nothing of it. But it is drawn like the noise that
cancels, at κ_s in place of κ, and to first order a change is as large for one draw as for another: κ_s/κ·‖a₁‖.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpu_cli.server.noise import ZERO_SUM, Scheme

DIVERGED = 0.25  # estimated error above which too little of the noise cancels to trust the result
SAFETY = 1.5  # later terms fall off more slowly than the first: without this, estimates were 0.25 to 0.75 of the truth


@dataclass(frozen=True)
class ErrorEstimate:
    """Distances from the clean update, relative to the aggregate's norm; NaN if nothing was unlearned.

    ``relative``: the estimate; ``one_order_lower``: the difference from the result of one order less, a rough upper
    bound (for two copies at 1 and −1, half their difference); ``signal_to_noise``: ‖Δ̄‖² over
    Σ w_k²‖T_k⁻¹(Δ_k) − Δ̄‖², what would remain of the copies' differences if they were independent;
    ``variance_factor``: Σ w_k²; ``permanent``: what permanent noise adds, to first order, NaN if nothing shows it.
    """

    relative: float
    one_order_lower: float
    signal_to_noise: float
    variance_factor: float
    permanent: float = 0.0

    @property
    def warning(self) -> str | None:
        """The warning to show if the copies diverged too far, else None."""
        if not self.relative > DIVERGED:
            return None
        return (
            f"the copies diverged so far that the noise hardly cancels (estimated error {self.relative:.0%} of the "
            "update); publish with a smaller --kappa or more --copies, or train for fewer steps per round"
        )


def error_estimate(scheme: Scheme, gram: torch.Tensor, permanent: float = 0.0) -> ErrorEstimate:
    """The estimate from the inner products of the inverted deltas, float64 (m, m); ``permanent`` is κ_s/κ."""
    weights, m = scheme.weights, scheme.copies
    whole = _norm(weights, gram)
    apart = [_norm(weights - torch.eye(m, dtype=torch.float64)[k], gram) for k in range(m)]
    by_chance = math.fsum(w * w * d * d for w, d in zip(weights.tolist(), apart, strict=True))
    signal_to_noise = whole**2 / by_chance if by_chance else math.inf
    if m == 1 or not (math.isfinite(whole) and whole > 0):
        unknown = math.nan if permanent else 0.0
        return ErrorEstimate(math.nan, math.nan, signal_to_noise, scheme.variance_factor, unknown)
    if scheme.kind == ZERO_SUM:
        # The change per unit of noise; for two copies exactly ‖a₁‖.
        slope = math.sqrt(math.fsum(d * d for d in apart) / math.fsum(s * s for s in scheme.scales))
        lower, first = slope * min(scheme.scales), slope
        relative = SAFETY * scheme.remainder * (slope / whole) ** 2
    else:
        nodes = scheme.factors
        divided = [1 / math.prod(c - other for other in nodes[:k] + nodes[k + 1 :]) for k, c in enumerate(nodes)]
        highest = _norm(torch.tensor(divided, dtype=torch.float64), gram)  # Newton's divided difference
        lower = highest * math.prod(sorted(scheme.scales)[:-1])
        first = _norm(first_derivative(nodes), gram)
        relative = SAFETY * scheme.remainder * (highest / whole) ** (1 + 1 / (m - 1))
    added = permanent * first / whole if permanent else 0.0  # infinite over no noise: unknown
    added = added if math.isfinite(added) else math.nan
    return ErrorEstimate(relative, lower / whole, signal_to_noise, scheme.variance_factor, added)


def first_derivative(nodes: Sequence[float]) -> torch.Tensor:
    """The weights of values at ``nodes`` that give the derivative at 0 of the polynomial through them, (m,) float64."""
    powers = torch.tensor([[node**i for i in range(len(nodes))] for node in nodes], dtype=torch.float64)
    return torch.linalg.inv(powers)[1]


def _norm(combination: torch.Tensor, gram: torch.Tensor) -> float:
    """‖Σ_k x_k T_k⁻¹(Δ_k)‖."""
    return math.sqrt(max(0.0, float(combination @ gram @ combination)))
