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

from mpu_cli.errors import UsageError
from mpu_cli.options.publishing import RANDOM, Copies
from mpu_cli.randomness import Randomness

SPREAD = 0.5  # distance between neighbouring nodes on one side: see Extrapolated.default
DEFAULT_COPIES, MOST_COPIES = 3, 100
MOST_WEIGHT = 1e6  # Σ|w_k| at which float32 deltas would lose every digit

Norm = Callable[[torch.Tensor], float]


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
        """What is left of the noise, judged by the deltas: ``norm(x)`` is ‖Σ_k x_k Δ_k‖ for x of shape (copies,)."""

    @classmethod
    @abstractmethod
    def default(cls, copies: int) -> Scheme:
        """The scheme for so many copies when no factors are given."""

    @classmethod
    @abstractmethod
    def from_factors(cls, factors: Iterable[float]) -> Scheme:
        """The scheme with these factors. Raises UsageError if they do not form one."""


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
        each = torch.eye(self.copies, dtype=torch.float64)
        apart = [norm(self.weights - basis_vector) for basis_vector in each]
        # The change for noise of scale 1; for two copies exactly ‖a₁‖.
        slope = math.sqrt(math.fsum(d * d for d in apart) / math.fsum(s * s for s in self.scales))
        aggregate_norm = norm(self.weights)
        return Remainder(self.remainder * slope**2 / aggregate_norm, slope * min(self.scales), slope)

    @classmethod
    def default(cls, copies: int) -> ZeroSum:
        """α_k = 1 + (k−1)/(m−1), from 1 to 2 (as in the paper); 1 for a single copy."""
        return cls(tuple(1 + k / max(1, copies - 1) for k in range(copies)))

    @classmethod
    def from_randomness(cls, randomness: Randomness, round_: int, copies: int) -> ZeroSum:
        """α_k uniform in [1, 2), drawn from the seed: whoever does not know them must estimate them."""
        return cls(tuple((1 + randomness.stream("alphas", round_).uniform(copies)).tolist()))

    @classmethod
    def from_factors(cls, factors: Iterable[float]) -> ZeroSum:
        alphas = tuple(map(float, factors))
        for alpha in alphas:
            if not (math.isfinite(alpha) and alpha > 0 and math.isfinite(1 / alpha)):
                raise UsageError(f"--alphas: {alpha} is not a positive, finite number")
        return cls(alphas)


class Extrapolated(Scheme):
    """Multiples c_k, the nodes, of one draw: deltas are extrapolated to c = 0."""

    kind, one_draw = "extrapolate", True

    @property
    def mixing(self) -> torch.Tensor:
        return torch.tensor(self.factors, dtype=torch.float64)[:, None]

    @property
    def weights(self) -> torch.Tensor:
        nodes = self.factors
        weights = [math.prod(c / (c - node) for c in nodes[:k] + nodes[k + 1 :]) for k, node in enumerate(nodes)]
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
        nodes = self.factors
        divided = [1 / math.prod(c - other for other in nodes[:k] + nodes[k + 1 :]) for k, c in enumerate(nodes)]
        highest = norm(torch.tensor(divided, dtype=torch.float64))  # Newton's divided difference
        aggregate_norm = norm(self.weights)
        expected = self.remainder * aggregate_norm * (highest / aggregate_norm) ** (1 + 1 / (self.copies - 1))
        lower = highest * math.prod(sorted(self.scales)[:-1])
        return Remainder(expected, lower, norm(first_derivative(nodes)))

    @classmethod
    def default(cls, copies: int) -> Extrapolated:
        """Nodes 1, −1, 1.5, −1.5, 2, …: on both sides of 0, as near to it as noise of at least σ in each copy allows.

        The remainder is |Π c_k|·κ^m, so nodes near 0 are good; but nodes near each other give large weights, which
        amplify every difference between copies that is not due to the noise. Nodes on both sides give smaller weights
        than on one. Raises UsageError for so many copies that the weights are beyond use.
        """
        return cls.from_factors((1 + SPREAD * (k // 2)) * (-1) ** k for k in range(copies))

    @classmethod
    def from_factors(cls, factors: Iterable[float]) -> Extrapolated:
        nodes = tuple(map(float, factors))
        for node in nodes:
            if not math.isfinite(node) or node == 0:
                raise UsageError(
                    f"--nodes: {node} is not a finite, nonzero number, so that copy would have no usable noise"
                )
        if len(set(nodes)) < len(nodes):
            raise UsageError("--nodes: two copies at the same node have the same noise, which does not cancel")
        scheme = cls(nodes)
        if not float(scheme.weights.abs().sum()) < MOST_WEIGHT:
            raise UsageError(
                "--nodes: so close together that the weights amplify rounding beyond use", "spread them out"
            )
        return scheme


SCHEMES: dict[str, type[Scheme]] = {scheme.kind: scheme for scheme in (Extrapolated, ZeroSum)}


def default_scheme(copies: int = DEFAULT_COPIES) -> Scheme:
    """The scheme that ``publish`` uses by default."""
    return Extrapolated.default(copies)


def scheme_of(options: Copies, secret: tuple[Randomness, int] | None = None) -> Scheme:
    """The scheme that --noise, --alphas, --nodes and --copies ask for.

    Without --copies there are as many as factors, or DEFAULT_COPIES. ``secret``: what random α are drawn from, and the
    round. Raises UsageError for numbers that do not make a scheme.
    """
    kind, alphas, nodes = options.noise, options.alphas, options.nodes
    copies = DEFAULT_COPIES if options.count is None else options.count
    if copies < 1:
        raise UsageError(f"--copies {copies}: must be at least 1")
    if copies > MOST_COPIES:
        raise UsageError(f"--copies {copies}: must be at most {MOST_COPIES}")
    if alphas == RANDOM and nodes is None and kind != Extrapolated.kind:
        if secret is None:
            raise UsageError("--alphas random: drawn only when publishing", "give numbers here")
        return ZeroSum.from_randomness(*secret, copies)
    if alphas is not None or nodes is not None:
        return given_factors(kind, alphas, nodes, copies)
    return (SCHEMES[kind] if kind else Extrapolated).default(copies)


def given_factors(kind: str | None, alphas: str | None, nodes: str | None, copies: int) -> Scheme:
    """The scheme with the factors in ``alphas`` or ``nodes``. Raises UsageError if they do not form one."""
    if alphas is not None and (kind == Extrapolated.kind or nodes is not None):
        raise UsageError("--alphas is only for --noise zero-sum", "use --nodes with --noise extrapolate")
    if nodes is not None and kind == ZeroSum.kind:
        raise UsageError("--nodes is only for --noise extrapolate", "use --alphas with --noise zero-sum")
    if alphas is not None:
        return ZeroSum.from_factors(_numbers(alphas, "--alphas", copies))
    return Extrapolated.from_factors(_numbers(nodes or "", "--nodes", copies))


def _numbers(text: str, option: str, copies: int) -> Sequence[float]:
    """One number for each copy. Raises UsageError."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: must be comma-separated numbers, such as 1,-1") from error
    if len(numbers) != copies:
        raise UsageError(f"{option}: {len(numbers)} numbers for {copies} copies", "give one for each copy")
    return numbers


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


def first_derivative(nodes: Sequence[float]) -> torch.Tensor:
    """The weights of values at ``nodes`` that give the derivative at 0 of the polynomial through them, (m,) float64."""
    powers = torch.tensor([[node**i for i in range(len(nodes))] for node in nodes], dtype=torch.float64)
    return torch.linalg.inv(powers)[1]
