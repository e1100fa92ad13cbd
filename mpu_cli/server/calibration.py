"""Noise for (ε, δ) differential privacy of the weights, by the Gaussian mechanism, and whom it protects against.

It hides which of two models the server published, if their weights are at most S apart (L2 norm over all weights).
A copy is T_k(θ + α_k ε⁰_k + s). T_k does not depend on θ, so applying it leaks nothing.

* One copy in a client's hands: Gaussian noise of variance α_k²σ² + σ_s² in every weight.
* All copies together: Σ_k w_k ε_k = 0 for the weights w of the aggregate, so they amount to θ + s and differences that
  do not depend on θ. Only s, the noise that all copies share, protects θ.

σ must be the same in every block and must not depend on the weights, unlike κ·RMS(v_ℓ). R rounds publish θ plus
the updates from the answers of earlier rounds, with new noise: together one Gaussian mechanism of sensitivity √R·S
(Dong, Roth and Su, "Gaussian Differential Privacy", 2022, Corollary 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.options.publishing import CalibrationOptions
from mpu_cli.randomness import DOUBLE_REACH

ADVERSARIES = {
    "one-copy": "a client that sees one copy of a round and does not pool it with others",
    "all-copies": "a client that sees every copy, or clients that pool theirs",
}
TAIL = 1e-3  # share of δ allowed for the tails beyond the reach of our normals


@dataclass(frozen=True)
class Calibration:
    """Noise for (ε, δ): σ of each copy's own noise, before its factor α, and σ of the noise all copies share."""

    epsilon: float
    delta: float
    sensitivity: float
    adversary: str
    bound: str
    rounds: int
    sigma: float
    shared_sigma: float


def calibrate(options: CalibrationOptions, smallest_alpha: float) -> Calibration:
    """The least noise for ``--epsilon`` and ``--dp-delta`` over ``--budget-rounds`` rounds of a run.

    ``--bound`` "analytic" is exact (Balle and Wang, 2018, through dp-accounting); "classical" is σ = S√(2 ln(1.25/δ))/ε
    (Dwork and Roth, 2014, Theorem A.1), which is larger and valid for ε ≤ 1. Raises UsageError if a number is out of
    range, MpuError if dp-accounting is not installed.
    """
    from scipy.stats import norm  # takes a second, and only calibrated noise needs it

    epsilon, delta, sensitivity = options.epsilon, options.dp_delta, options.sensitivity
    if epsilon is None or delta is None or sensitivity is None:
        raise UsageError("--epsilon needs --dp-delta and --sensitivity")
    adversary, bound, rounds = options.adversary, options.bound, options.budget_rounds
    if bound == "classical":
        if epsilon > 1:
            raise UsageError(f"--bound classical is valid only for ε ≤ 1, not {epsilon:g}", "use --bound analytic")
        multiplier = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    else:
        multiplier = _analytic(epsilon, delta)
    if norm.sf(DOUBLE_REACH - 1 / multiplier) > TAIL * delta:
        raise UsageError(
            f"--epsilon {epsilon:g} at --dp-delta {delta:g}: needs so little noise that the cut-off of our normals, "
            f"at {DOUBLE_REACH:.1f} σ, would show",
            "choose a smaller ε or a larger δ",
        )
    needed = multiplier * math.sqrt(rounds) * sensitivity
    if not math.isfinite(needed):
        raise UsageError(f"--epsilon {epsilon:g} at --dp-delta {delta:g}: no finite noise achieves this")
    copy_sigma, shared = (needed / smallest_alpha, 0.0) if adversary == "one-copy" else (0.0, needed)
    return Calibration(epsilon, delta, sensitivity, adversary, bound, rounds, copy_sigma, shared)


def statement(calibration: Calibration) -> str:
    """What the noise protects against, and under which assumptions, in words."""
    rounds = "one round" if calibration.rounds == 1 else f"{calibration.rounds} rounds together"
    noise = (
        f"σ = {calibration.sigma:.4g} times the factor of copy k, in each of its weights"
        if calibration.sigma
        else f"σ = {calibration.shared_sigma:.4g} in every weight, the same noise in every copy"
    )
    return (
        f"privacy: ε = {calibration.epsilon:g}, δ = {calibration.delta:g} over {rounds} against "
        f"{ADVERSARIES[calibration.adversary]}: {noise} ({calibration.bound} Gaussian mechanism). It hides which of "
        f"two models at most {calibration.sensitivity:g} apart (L2 norm of all weights; as stated) was published. "
        "Computational, not unconditional: the noise is AES-256-CTR output, drawn and stored in floating point"
    )


def _analytic(epsilon: float, delta: float) -> float:
    try:
        from dp_accounting.gaussian_mechanism import get_sigma_gaussian
    except ImportError as error:
        raise MpuError("--epsilon needs dp-accounting", "install it with pip install dp-accounting") from error
    return float(get_sigma_gaussian(epsilon, delta))
