"""Noise schemes: how the noise of a publication's copies is related, so that their deltas can be combined without it.

*Zero-sum* (paper section 3, appendix A.1): ε⁰ = √(m/(m−1))·Hᵀg with H the (m−1)×m Helmert matrix, whose rows are
orthonormal and orthogonal to 1, and g of m−1 independent N(0, σ²): then Σ_k ε⁰_k = 0, every ε⁰_k is N(0, σ²), and the
covariance between copies is −σ²/(m−1). Copy k gets ε_k = α_k ε⁰_k. Weights w_k ∝ 1/α_k cancel the first order.

*Extrapolated*: copy k gets c_k z, multiples of one draw z ~ N(0, σ²). The deltas are then values of one function of c,
and the Lagrange weights at zero, w_k = Π_{j≠k} c_j/(c_j − c_k), evaluate the polynomial through them where there is no
noise: Σ w_k = 1 and Σ w_k c_k^i = 0 for i = 1 … m−1, so all orders below m cancel (Richardson extrapolation). Two
copies at (α₁, −α₂) are the zero-sum scheme.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.boundary import Count, Scale, Word
from mpu_cli.files.randomness import DOUBLE_REACH, Randomness, standard_normals
from mpu_cli.options.publishing import CalibrationOptions, Copies

NODE_DISTANCE = 0.5  # distance between neighbouring nodes on one side: see Extrapolated.default
DEFAULT_COPIES, MOST_COPIES = 3, 100
MOST_WEIGHT = 1e6  # Σ|w_k| at which float32 deltas would lose every digit

Norm = Callable[[torch.Tensor], float]


def _distances(weights: torch.Tensor, norm: Norm) -> list[float]:
    """The distance of each delta from their sum with these ``weights``."""
    return [norm(weights - basis_vector) for basis_vector in torch.eye(len(weights), dtype=torch.float64)]


@dataclass(frozen=True)
class Remainder:
    """Norms, in units of the deltas: what the weights are expected to leave of the noise; what cancelling one order
    less would leave, a rough upper bound; and the change for noise of scale 1, to first order."""

    expected: float
    one_order_lower: float
    first_order: float


@dataclass(frozen=True)
class Scheme(ABC):
    """The noise of m copies, from their ``factors``: α_k or c_k."""

    kind: ClassVar[str]
    one_draw: ClassVar[bool]  # whether all copies have multiples of the same noise

    factors: tuple[float, ...]

    @property
    def copies(self) -> int:
        return len(self.factors)

    @property
    def name(self) -> str:
        """The kind, or "permanent" for one copy, in which nothing cancels."""
        return "permanent" if len(self.factors) == 1 else self.kind

    @property
    def scales(self) -> tuple[float, ...]:
        """The noise of each copy, as a multiple of σ."""
        return tuple(map(abs, self.factors))

    @property
    def variance_factor(self) -> float:
        """Σ w_k²: the variance left of random differences between the copies, relative to that of one copy."""
        return float(self.weights.square().sum())

    @property
    def fitted_weights(self) -> torch.Tensor:
        """The smallest weights, float64 (copies,), that sum to 1 and cancel the noise."""
        return self.weights

    @property
    @abstractmethod
    def mixing(self) -> torch.Tensor:
        """The matrix from independent N(0, σ²) to the noise of the copies: float64 (copies, draws)."""

    @property
    @abstractmethod
    def weights(self) -> torch.Tensor:
        """w_k, which sum to 1: float64 (copies,)."""

    @property
    @abstractmethod
    def order(self) -> int:
        """The lowest order of the noise that the weights do not cancel."""

    @property
    @abstractmethod
    def remainder(self) -> float:
        """|Σ w_k ε_k^order| for noise of scale 1."""

    @abstractmethod
    def remaining(self, norm: Norm) -> Remainder:
        """The noise that is left, judged by the deltas: ``norm(x)`` is ‖Σ_k x_k Δ_k‖ for x of shape (copies,)."""

    @classmethod
    @abstractmethod
    def default(cls, copies: int) -> Scheme:
        """The scheme for so many copies when no factors are given."""

    @classmethod
    @abstractmethod
    def from_factors(cls, factors: Iterable[float]) -> Scheme:
        """The scheme with these factors."""


class ZeroSum(Scheme):
    """The paper's: independent draws that sum to zero, times α_k."""

    kind, one_draw = "zero-sum", False

    @property
    def mixing(self) -> torch.Tensor:
        return torch.tensor(self.factors, dtype=torch.float64)[:, None] * mixing_matrix(self.copies)

    @property
    def weights(self) -> torch.Tensor:
        inverse = 1 / torch.tensor(self.factors, dtype=torch.float64)
        return inverse / inverse.sum()

    @property
    def order(self) -> int:
        return 2

    @property
    def remainder(self) -> float:
        """Σα_k / Σα_k⁻¹."""
        return math.fsum(self.factors) / math.fsum(1 / alpha for alpha in self.factors)

    def remaining(self, norm: Norm) -> Remainder:
        apart = _distances(self.weights, norm)
        # The change for noise of scale 1; for two copies exactly ‖a₁‖.
        slope = math.sqrt(math.fsum(d * d for d in apart) / math.fsum(s * s for s in self.scales))
        aggregate_norm = norm(self.weights)
        return Remainder(self.remainder * slope**2 / aggregate_norm, slope * min(self.scales), slope)

    @classmethod
    def default(cls, copies: int) -> ZeroSum:
        """α_k = 1 + (k−1)/(m−1), from 1 to 2 (as in the paper); 1 for a single copy."""
        return cls(tuple(1 + k / max(1, copies - 1) for k in range(copies)))

    @classmethod
    def from_factors(cls, factors: Iterable[float]) -> ZeroSum:
        alphas = tuple(map(float, factors))
        for alpha in alphas:
            if not (math.isfinite(alpha) and alpha > 0 and math.isfinite(1 / alpha)):
                raise UsageError(f"--noise zero-sum: {alpha} is not a positive, finite number")
        return cls(alphas)


class Extrapolated(Scheme):
    """Multiples c_k, the nodes, of one draw: deltas are extrapolated to c = 0."""

    kind, one_draw = "extrapolate", True

    @property
    def mixing(self) -> torch.Tensor:
        return torch.tensor(self.factors, dtype=torch.float64)[:, None]

    @property
    def weights(self) -> torch.Tensor:
        weights = []
        for k, node in enumerate(self.factors):
            others = self.factors[:k] + self.factors[k + 1 :]
            weights.append(math.prod(other / (other - node) for other in others))
        return torch.tensor(weights, dtype=torch.float64)

    @property
    def fitted_weights(self) -> torch.Tensor:
        """The intercept of a least-squares line through the copies, which also averages out their rounding."""
        if self.copies == 1:
            return self.weights
        line = torch.tensor([[1.0] * self.copies, self.factors], dtype=torch.float64)
        return torch.linalg.pinv(line)[:, 0]

    @property
    def order(self) -> int:
        return self.copies

    @property
    def remainder(self) -> float:
        """|Π c_k|."""
        return math.prod(self.scales)

    def remaining(self, norm: Norm) -> Remainder:
        nodes = torch.tensor(self.factors, dtype=torch.float64)
        aggregate_norm = norm(self.weights)
        highest = norm(self.weights * nodes) / self.remainder  # Newton's divided difference
        # The next coefficient, if the series continues as it began: see ``error_estimate``.
        expected = self.remainder * aggregate_norm * (highest / aggregate_norm) ** (1 + 1 / (self.copies - 1))
        lower = highest * math.prod(sorted(self.scales)[:-1])
        # The weights that give the derivative at 0 of the polynomial through the values at the nodes.
        slope = torch.linalg.inv(torch.linalg.vander(nodes))[1]
        return Remainder(expected, lower, norm(slope))

    @classmethod
    def default(cls, copies: int) -> Extrapolated:
        """Nodes 1, −1, 1.5, −1.5, 2, …: on both sides of 0, as near to it as noise of at least σ in each copy allows.

        The remainder is |Π c_k|·κ^m, so nodes near 0 are good; but nodes near each other give large weights, which
        amplify every difference between copies that is not due to the noise. Nodes on both sides give smaller weights
        than on one.
        """
        return cls.from_factors((1 + NODE_DISTANCE * (k // 2)) * (-1) ** k for k in range(copies))

    @classmethod
    def from_factors(cls, factors: Iterable[float]) -> Extrapolated:
        nodes = tuple(map(float, factors))
        for node in nodes:
            if not math.isfinite(node) or node == 0:
                raise UsageError(
                    f"--noise extrapolate: {node} is not a finite, nonzero number, so that copy would have no noise"
                )
        if len(set(nodes)) < len(nodes):
            raise UsageError(
                "--noise extrapolate: copies with the same factor have the same noise, which does not cancel"
            )
        scheme = cls(nodes)
        if not float(scheme.weights.abs().sum()) < MOST_WEIGHT:
            raise UsageError(
                "--noise extrapolate: factors so close together that the weights amplify rounding beyond use",
                "spread them out",
            )
        return scheme


SCHEMES: dict[str, type[Scheme]] = {scheme.kind: scheme for scheme in (Extrapolated, ZeroSum)}


def scheme_of(options: Copies) -> Scheme:
    """The scheme that --noise and --copies ask for.

    Without --copies there are as many as factors, or DEFAULT_COPIES.
    """
    copies = DEFAULT_COPIES if options.count is None else options.count
    if copies < 1:
        raise UsageError(f"--copies {copies}: must be at least 1")
    if copies > MOST_COPIES:
        raise UsageError(f"--copies {copies}: must be at most {MOST_COPIES}")
    kind, factors = parse_noise(options.noise or Extrapolated.kind, copies)
    return kind.from_factors(factors) if factors else kind.default(copies)


def parse_noise(text: str, copies: int) -> tuple[type[Scheme], Sequence[float]]:
    """The kind that --noise KIND:FACTORS names, and a factor for each copy, if they are given."""
    kind, colon, factors = text.partition(":")
    if kind not in SCHEMES:
        raise UsageError(f"--noise {kind}: must be one of {', '.join(SCHEMES)}")
    try:
        numbers = [float(part) for part in factors.split(",")] if colon else []
    except ValueError as error:
        raise UsageError(f"--noise {text}: factors must be comma-separated numbers, such as {kind}:1,2") from error
    if colon and len(numbers) != copies:
        raise UsageError(f"--noise {text}: {len(numbers)} factors for {copies} copies", "give one for each copy")
    return SCHEMES[kind], numbers


def mixing_matrix(copies: int) -> torch.Tensor:
    """√(m/(m−1))·Hᵀ, float64 (m, m−1): maps independent draws to zero-sum noise.

    A single copy, the unprotected baseline `mpu run --mode noised`, has one draw of its own: (1, 1).
    """
    if copies == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    helmert = torch.zeros(copies - 1, copies, dtype=torch.float64)
    for i in range(1, copies):
        helmert[i - 1, :i] = 1 / math.sqrt(i * (i + 1))
        helmert[i - 1, i] = -i / math.sqrt(i * (i + 1))
    return math.sqrt(copies / (copies - 1)) * helmert.T


# Noise of a publication's copies, drawn from its seed: the same for any slice of a tensor, on any processor.


@dataclass(frozen=True)
class Scales:
    """σ of a block's noise: of what cancels, before a copy's factor, of permanent noise and of the watermark."""

    cancelling: float = 0.0
    permanent: float = 0.0
    watermark: float = 0.0

    def of_copy(self, factor: float) -> float:
        """σ of all noise of a copy whose factor is ``factor``."""
        return math.hypot(factor * self.cancelling, self.permanent, self.watermark)


@dataclass(frozen=True, eq=False)
class Noise:
    """A publication's noise for some of its copies, for any slice of a tensor."""

    randomness: Randomness
    round: int
    mixing: torch.Tensor  # the matrix from the draws of what cancels to each copy's noise, float64 (copies, draws)
    double: bool = False  # draw in float64, for calibrated noise
    # the source of the noise that all copies share; None for the publication's own seed
    permanent: Randomness | None = None
    # a tensor's name in the draws of permanent noise, the same for files with and without a prefix
    full_name: Callable[[str], str] = str

    def subkeys(self, tensor: str, scales: Scales) -> list[bytes]:
        """The stream keys for one tensor's noise of these scales: one per draw, one for permanent noise and one for the
        watermark."""
        keys: list[bytes] = []
        if scales.cancelling:
            keys += [self.randomness.key("noise", self.round, tensor, i) for i in range(self.mixing.shape[1])]
        if scales.permanent and self.permanent:
            # Noise of another scale is another draw: from two multiples of one, anyone could compute it.
            keys.append(self.permanent.key("permanent noise", self.full_name(tensor), scales.permanent.hex()))
        elif scales.permanent:
            keys.append(self.randomness.key("shared noise", self.round, tensor))
        if scales.watermark:
            keys.append(self.randomness.key("mark", self.round, tensor))
        return keys

    def draws(self, keys: Sequence[bytes], start: int, stop: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Standard normals for elements ``start … stop`` of a tensor, (stop − start,) for each of its ``keys``."""
        return [standard_normals(key, start, stop, double=self.double).to(dtype) for key in keys]

    def scaled_mixing(self, scales: Scales) -> torch.Tensor:
        """The matrix from the draws that ``subkeys`` has keys for to each copy's noise: float64 (copies, draws)."""
        table = self.mixing * scales.cancelling if scales.cancelling else self.mixing[:, :0]
        same_in_every_copy = [scale for scale in (scales.permanent, scales.watermark) if scale]
        columns = [torch.full((len(table), 1), scale, dtype=table.dtype) for scale in same_in_every_copy]
        return torch.cat([table, *columns], 1)

    def added_to(self, weights: torch.Tensor, keys: Sequence[bytes], scales: Scales, start: int) -> list[torch.Tensor]:
        """Rows ``start …`` of a tensor, (rows, columns), with the noise of each copy, from the ``keys`` that the tensor
        has for these ``scales``."""
        if not keys:
            return [weights] * len(self.mixing)
        first = start * weights.shape[1]
        draws = self.draws(keys, first, first + weights.numel(), weights.dtype)
        head_draw, *tail_draws = (draw.view_as(weights) for draw in draws)
        copies = []
        # cast first, so that overflow becomes inf instead of raising
        for factors in self.scaled_mixing(scales).to(weights.dtype).tolist():
            noisy = torch.add(weights, head_draw, alpha=factors[0])
            for draw, factor in zip(tail_draws, factors[1:], strict=True):
                noisy.add_(draw, alpha=factor)
            copies.append(noisy)
        return copies


# Noise for (ε, δ) differential privacy of the weights, by the Gaussian mechanism, and whom it protects against.
#
# It hides which of two models the server published, if their weights are at most S apart (L2 norm over all weights).
# A copy is T_k(θ + α_k ε⁰_k + s). T_k does not depend on θ, so applying it leaks nothing.
#
# * One copy in a client's hands: Gaussian noise of variance α_k²σ² + σ_s² in every weight.
# * All copies together: Σ_k w_k ε_k = 0 for the weights w of the aggregate, so they amount to θ + s and differences
#   that do not depend on θ. Only s, the noise that all copies share, protects θ.
#
# σ must be the same in every block and must not depend on the weights, unlike κ·RMS(v_ℓ). R rounds publish θ plus the
# updates from the answers of earlier rounds, with new noise: together one Gaussian mechanism of sensitivity √R·S
# (Dong, Roth and Su, "Gaussian Differential Privacy", 2022, Corollary 2).

ADVERSARIES = {
    "one-copy": "a client that sees one copy of a round and does not pool it with others",
    "all-copies": "a client that sees every copy, or clients that pool theirs",
}
TAIL = 1e-3  # share of δ allowed for the tails beyond the reach of our normals


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Noise for (ε, δ): σ of each copy's own noise, before its factor α, and σ of the noise all copies share."""

    epsilon: Scale
    delta: Scale
    sensitivity: Scale
    adversary: Word
    bound: Word
    rounds: Count
    sigma: Scale
    shared_sigma: Scale


def calibrate(options: CalibrationOptions, smallest_alpha: float) -> Calibration:
    """The least noise for ``--dp epsilon`` and ``--dp delta`` over ``--dp budget_rounds`` rounds of a run.

    ``--bound`` "analytic" is exact (Balle and Wang, 2018, through dp-accounting); "classical" is σ = S√(2 ln(1.25/δ))/ε
    (Dwork and Roth, 2014, Theorem A.1), which is larger and valid for ε ≤ 1.
    """
    from scipy.stats import norm  # takes a second, and only calibrated noise needs it

    epsilon, delta, sensitivity = options.epsilon, options.dp_delta, options.sensitivity
    if epsilon is None or delta is None or sensitivity is None:
        raise UsageError("--dp epsilon needs --dp delta and sensitivity")
    adversary, bound, rounds = options.adversary, options.bound, options.budget_rounds
    if bound == "classical":
        if epsilon > 1:
            raise UsageError(f"--dp bound=classical is valid only for ε ≤ 1, not {epsilon:g}", "use bound=analytic")
        multiplier = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    else:
        try:
            from dp_accounting.gaussian_mechanism import get_sigma_gaussian
        except ImportError as error:
            raise MpuError("--dp epsilon needs dp-accounting", "install it with pip install dp-accounting") from error
        multiplier = float(get_sigma_gaussian(epsilon, delta))
    if norm.sf(DOUBLE_REACH - 1 / multiplier) > TAIL * delta:
        raise UsageError(
            f"--dp epsilon={epsilon:g},delta={delta:g}: needs so little noise that the cut-off of our normals, "
            f"at {DOUBLE_REACH:.1f} σ, would show",
            "choose a smaller ε or a larger δ",
        )
    needed = multiplier * math.sqrt(rounds) * sensitivity
    if not math.isfinite(needed):
        raise UsageError(f"--dp epsilon={epsilon:g},delta={delta:g}: no finite noise achieves this")
    copy_sigma, shared = (needed / smallest_alpha, 0.0) if adversary == "one-copy" else (0.0, needed)
    return Calibration(
        epsilon=epsilon, delta=delta, sensitivity=sensitivity, adversary=adversary, bound=bound, rounds=rounds,
        sigma=copy_sigma, shared_sigma=shared,
    )  # fmt: skip


def statement(calibration: Calibration) -> str:
    """A statement of what the noise protects against, and under which assumptions."""
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


# The distance of an aggregate from the clean update, estimated from the differences between the deltas of its copies.
#
# Deltas of copies at multiples c_k of one draw are values of Δ(c) = a₀ + a₁c + a₂c² + …, where a_i is of order κ^i,
# and the aggregate of m of them is off by |Π c_k|·‖a_m‖ plus higher orders. a₀ … a_{m−1} are the coefficients of the
# polynomial through the deltas. They yield two numbers: the difference from the aggregate with one copy fewer, as in
# the embedded pairs of Runge–Kutta methods (Hairer, Nørsett and Wanner, section II.4), which is of order m−1 and
# therefore a rough upper bound; and the next term if the series continues as it began, ‖a_m‖ ≈
# ‖a_{m−1}‖·(‖a_{m−1}‖/‖a₀‖)^{1/(m−1)}.
#
# Permanent noise is the same in every copy, so their differences say nothing of it. But it is drawn like the noise
# that cancels, at κ_s in place of κ, and to first order a change is as large for one draw as for another: κ_s/κ·‖a₁‖.

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
    permanent: float

    @property
    def warning(self) -> str | None:
        """The warning to show if the copies diverged too far, else None."""
        if not self.relative > DIVERGED:
            return None
        return (
            f"the copies diverged so far that the noise hardly cancels (estimated error {self.relative:.0%} of the "
            "update); publish with a smaller --kappa or more --copies, or train for fewer steps per round"
        )


def error_estimate(scheme: Scheme, gram: torch.Tensor, permanent: float) -> ErrorEstimate:
    """The estimate from the inner products of the inverted deltas, float64 (m, m); ``permanent`` is κ_s/κ."""

    def norm(combination: torch.Tensor) -> float:
        return math.sqrt(max(0.0, float(combination @ gram @ combination)))

    weights, m = scheme.weights, scheme.copies
    aggregate_norm = norm(weights)
    by_chance = math.fsum((w * d) ** 2 for w, d in zip(weights.tolist(), _distances(weights, norm), strict=True))
    signal_to_noise = aggregate_norm**2 / by_chance if by_chance else math.inf
    if m == 1 or not (math.isfinite(aggregate_norm) and aggregate_norm > 0):
        unknown = math.nan if permanent else 0.0
        return ErrorEstimate(math.nan, math.nan, signal_to_noise, scheme.variance_factor, unknown)
    remainder = scheme.remaining(norm)
    lower = remainder.one_order_lower / aggregate_norm
    relative = min(SAFETY * remainder.expected / aggregate_norm, lower)
    added = 0.0
    if permanent:
        added = permanent * remainder.first_order / aggregate_norm
        if not math.isfinite(added):  # κ is 0: the copies do not show what noise does to a change
            added = math.nan
    return ErrorEstimate(relative, lower, signal_to_noise, scheme.variance_factor, added)
