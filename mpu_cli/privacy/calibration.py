"""Noise for (ε, δ) differential privacy of the weights, by the Gaussian mechanism, and what it holds against.

What is protected is which of two models the server published, where their weights are at most S apart (L2 norm over
all weights). A copy is T_k(θ + α_k ε⁰_k + s). T_k does not depend on θ, so applying it tells nothing.

* One copy in a client's hands: Gaussian noise of α_k²σ² + σ_s² in every weight.
* All copies together: Σ_k w_k ε_k = 0 for the weights w of the aggregate, so they amount to θ + s and differences that
  do not depend on θ. What protects is s alone, the noise that all copies share.

σ must be the same in every block and may not depend on the weights, as κ·RMS(v_ℓ) does. R rounds publish θ plus
what the answers of earlier rounds made of it, with new noise: together one Gaussian mechanism of sensitivity √R·S
(Dong, Roth and Su, "Gaussian Differential Privacy", 2022, Corollary 2).
"""

from __future__ import annotations

import math

from scipy.stats import norm

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.server.keys import Calibration
from mpu_cli.server.randomness import DOUBLE_REACH

ADVERSARIES = {
    "one-copy": "a client that sees one copy of a round, and does not pool it with others",
    "all-copies": "a client that sees every copy, or clients that pool theirs",
}
TAIL = 1e-3  # share of δ that what lies beyond the reach of our normal numbers may take


def calibrate(
    epsilon: float,
    delta: float,
    sensitivity: float,
    *,
    adversary: str,
    bound: str,
    rounds: int,
    smallest_alpha: float,
) -> Calibration:
    """The least noise for (``epsilon``, ``delta``) over ``rounds`` rounds of a run.

    ``bound``: "analytic" is exact (Balle and Wang, 2018, through dp-accounting); "classical" is σ = S√(2 ln(1.25/δ))/ε
    (Dwork and Roth, 2014, Theorem A.1), a larger one, valid for ε ≤ 1. Raises UsageError for numbers out of range,
    MpuError where dp-accounting is not installed.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise UsageError(f"--epsilon {epsilon}: must be a finite number above 0")
    if not 0 < delta < 1:
        raise UsageError(f"--delta {delta}: must be between 0 and 1")
    if not (math.isfinite(sensitivity) and sensitivity > 0):
        raise UsageError(f"--sensitivity {sensitivity}: must be a finite number above 0")
    if rounds < 1:
        raise UsageError(f"--budget-rounds {rounds}: must be at least 1")
    if bound == "classical":
        if epsilon > 1:
            raise UsageError(f"--bound classical holds for ε ≤ 1, not {epsilon:g}; use --bound analytic")
        multiplier = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    else:
        multiplier = _analytic(epsilon, delta)
    if norm.sf(DOUBLE_REACH - 1 / multiplier) > TAIL * delta:
        raise UsageError(
            f"--epsilon {epsilon:g} at --delta {delta:g}: asks for so little noise that the ends of our normals, "
            f"{DOUBLE_REACH:.1f} σ, would show; ask for a smaller ε, or a larger δ"
        )
    needed = multiplier * math.sqrt(rounds) * sensitivity
    if not math.isfinite(needed):
        raise UsageError(f"--epsilon {epsilon:g} at --delta {delta:g}: no finite noise gives that")
    own, shared = (needed / smallest_alpha, 0.0) if adversary == "one-copy" else (0.0, needed)
    return Calibration(epsilon, delta, sensitivity, adversary, bound, rounds, own, shared)


def statement(found: Calibration) -> str:
    """What the noise holds against, and what that takes for granted, in words."""
    rounds = "one round" if found.rounds == 1 else f"{found.rounds} rounds together"
    noise = (
        f"σ = {found.sigma:.4g} times the factor of copy k in every weight of it"
        if found.sigma
        else f"σ = {found.shared_sigma:.4g} in every weight, the same noise in every copy"
    )
    return (
        f"privacy: ε = {found.epsilon:g}, δ = {found.delta:g} over {rounds} against {ADVERSARIES[found.adversary]}: "
        f"{noise} ({found.bound} Gaussian mechanism). It hides which of two models at most {found.sensitivity:g} apart "
        "(L2 norm of all weights; your word) was published. Computational, not unconditional: the noise is AES-256-CTR "
        "output, drawn and stored in floating point"
    )


def _analytic(epsilon: float, delta: float) -> float:
    try:
        from dp_accounting.gaussian_mechanism import get_sigma_gaussian
    except ImportError as error:
        raise MpuError("--epsilon needs dp-accounting; install it with pip install dp-accounting") from error
    return float(get_sigma_gaussian(epsilon, delta))
