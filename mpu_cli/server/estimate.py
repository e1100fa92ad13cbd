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
from dataclasses import dataclass

import torch

from mpu_cli.server.scheme import Scheme

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

    def norm(combination: torch.Tensor) -> float:
        return math.sqrt(max(0.0, float(combination @ gram @ combination)))

    weights, m = scheme.weights, scheme.copies
    aggregate_norm = norm(weights)
    apart = [norm(weights - basis_vector) for basis_vector in torch.eye(m, dtype=torch.float64)]
    by_chance = math.fsum(w * w * d * d for w, d in zip(weights.tolist(), apart, strict=True))
    signal_to_noise = aggregate_norm**2 / by_chance if by_chance else math.inf
    if m == 1 or not (math.isfinite(aggregate_norm) and aggregate_norm > 0):
        unknown = math.nan if permanent else 0.0
        return ErrorEstimate(math.nan, math.nan, signal_to_noise, scheme.variance_factor, unknown)
    remainder = scheme.remaining(norm)
    lower = remainder.one_order_lower / aggregate_norm
    relative = min(SAFETY * remainder.expected / aggregate_norm, lower)
    added = permanent * remainder.first_order / aggregate_norm if permanent else 0.0  # infinite over no noise: unknown
    added = added if math.isfinite(added) else math.nan
    return ErrorEstimate(relative, lower, signal_to_noise, scheme.variance_factor, added)
