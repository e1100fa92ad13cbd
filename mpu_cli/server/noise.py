"""Noise for the copies of one publication, and how their deltas are combined so that it cancels.

*Zero-sum* (paper section 3, appendix A.1): ε⁰ = √(m/(m−1))·Hᵀg with H the (m−1)×m Helmert matrix, whose rows are
orthonormal and orthogonal to 1, and g of m−1 independent N(0, σ²): then Σ_k ε⁰_k = 0, every ε⁰_k is N(0, σ²), and the
covariance between copies is −σ²/(m−1). Copy k gets ε_k = α_k ε⁰_k. Weights w_k ∝ 1/α_k cancel the first order.

*Extrapolate*: copy k gets c_k z, multiples of one draw z ~ N(0, σ²). The deltas are then values of one function of c,
and w_k = Π_{j≠k} c_j/(c_j − c_k) evaluates the polynomial through them at c = 0, where there is no noise: Σ w_k = 1 and
Σ w_k c_k^i = 0 for i = 1 … m−1, so all orders below m cancel. Two copies at (α₁, −α₂) are the zero-sum scheme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpu_cli.errors import UsageError
from mpu_cli.options.publishing import RANDOM, Copies
from mpu_cli.randomness import Randomness, standard_normals

EXTRAPOLATE, ZERO_SUM = "extrapolate", "zero-sum"
SCHEMES = (EXTRAPOLATE, ZERO_SUM)
SPREAD = 0.5  # distance between neighbouring nodes on one side: see default_nodes
DEFAULT_COPIES, MOST_COPIES = 3, 100
MOST_WEIGHT = 1e6  # Σ|w_k| at which float32 deltas would lose every digit


@dataclass(frozen=True)
class Scheme:
    """How noise is assigned to the copies: ``kind``, one of SCHEMES, and α_k or c_k as ``factors``."""

    kind: str
    factors: tuple[float, ...]

    @property
    def copies(self) -> int:
        return len(self.factors)

    @property
    def scales(self) -> tuple[float, ...]:
        """The noise of each copy, as a multiple of σ."""
        return tuple(map(abs, self.factors))

    @property
    def mixing(self) -> torch.Tensor:
        """The matrix from independent N(0, σ²) to the noise of the copies: float64 (copies, draws)."""
        factors = torch.tensor(self.factors, dtype=torch.float64)[:, None]
        return factors if self.kind == EXTRAPOLATE else factors * mixing_matrix(self.copies)

    @property
    def weights(self) -> torch.Tensor:
        """w_k, which sum to 1: float64 (copies,)."""
        if self.kind == ZERO_SUM:
            inverse = 1 / torch.tensor(self.factors, dtype=torch.float64)
            return inverse / inverse.sum()
        nodes = self.factors
        weights = [math.prod(c / (c - node) for c in nodes[:k] + nodes[k + 1 :]) for k, node in enumerate(nodes)]
        return torch.tensor(weights, dtype=torch.float64)

    @property
    def fitted_weights(self) -> torch.Tensor:
        """The smallest weights, float64 (copies,), that sum to 1 and cancel the noise.

        Copies at multiples c_k of one draw lie on a line: the intercept of a least-squares fit, which also averages out
        the rounding of the copies. For other noise there is no choice.
        """
        if self.kind != EXTRAPOLATE or self.copies == 1:
            return self.weights
        line = torch.tensor([[1.0] * self.copies, self.factors], dtype=torch.float64)
        return torch.linalg.pinv(line)[:, 0]

    @property
    def order(self) -> int:
        """The lowest order of the noise that the weights do not cancel."""
        return self.copies if self.kind == EXTRAPOLATE else 2

    @property
    def remainder(self) -> float:
        """|Σ w_k ε_k^order| for noise of scale 1: |Π c_k|, or Σα_k / Σα_k⁻¹ for zero-sum noise."""
        if self.kind == EXTRAPOLATE:
            return math.prod(self.scales)
        return math.fsum(self.factors) / math.fsum(1 / alpha for alpha in self.factors)

    @property
    def variance_factor(self) -> float:
        """Σ w_k²: the variance left of random differences between the copies, relative to that of one copy."""
        return float(self.weights.square().sum())


def default_scheme(copies: int = DEFAULT_COPIES) -> Scheme:
    """The scheme that ``publish`` uses by default."""
    return Scheme(EXTRAPOLATE, default_nodes(copies))


def default_nodes(copies: int) -> tuple[float, ...]:
    """1, −1, 1.5, −1.5, 2, …: on both sides of 0, as near to it as noise of at least σ in each copy allows.

    The remainder is |Π c_k|·κ^m, so nodes near 0 are good; but nodes near each other give large weights, which amplify
    every difference between copies that is not due to the noise. Nodes on both sides give smaller weights than on one.
    """
    return tuple((1 + SPREAD * (k // 2)) * (-1) ** k for k in range(copies))


def default_alphas(copies: int) -> tuple[float, ...]:
    """α_k = 1 + (k−1)/(m−1), from 1 to 2 (as in the paper); 1 for a single copy."""
    return tuple(1 + k / max(1, copies - 1) for k in range(copies))


def default_factors(kind: str, copies: int) -> tuple[float, ...]:
    """``default_nodes`` or ``default_alphas``."""
    return default_nodes(copies) if kind == EXTRAPOLATE else default_alphas(copies)


def random_alphas(randomness: Randomness, round_: int, copies: int) -> tuple[float, ...]:
    """α_k uniform in [1, 2), drawn from the seed: whoever does not know them must estimate them."""
    return tuple((1 + randomness.stream("alphas", round_).uniform(copies)).tolist())


def scheme_of(options: Copies, secret: tuple[Randomness, int] | None = None) -> Scheme:
    """The scheme that --noise, --alphas, --nodes and --copies ask for.

    Without --copies there are as many as factors, or DEFAULT_COPIES. ``secret``: what random α are drawn from, and the
    round. Raises UsageError for numbers that do not make a scheme.
    """
    kind, alphas, nodes = options.noise, options.alphas, options.nodes
    given = nodes if alphas is None else alphas
    copies = DEFAULT_COPIES if options.count is None else options.count
    if copies < 1:
        raise UsageError(f"--copies {copies}: must be at least 1")
    if copies > MOST_COPIES:
        raise UsageError(f"--copies {copies}: must be at most {MOST_COPIES}")
    if alphas == RANDOM and nodes is None and kind != EXTRAPOLATE:
        if secret is None:
            raise UsageError("--alphas random: drawn only when publishing", "give numbers here")
        return Scheme(ZERO_SUM, random_alphas(*secret, copies))
    if given is not None:
        return given_factors(kind, alphas, nodes, copies)
    chosen = kind or EXTRAPOLATE
    factors = default_factors(chosen, copies)
    return Scheme(chosen, check_nodes(factors, copies) if chosen == EXTRAPOLATE else factors)


def given_factors(kind: str | None, alphas: str | None, nodes: str | None, copies: int) -> Scheme:
    """The scheme with the factors in ``alphas`` or ``nodes``. Raises UsageError if they do not form one."""
    if alphas is not None and (kind == EXTRAPOLATE or nodes is not None):
        raise UsageError("--alphas is only for --noise zero-sum", "use --nodes with --noise extrapolate")
    if nodes is not None and kind == ZERO_SUM:
        raise UsageError("--nodes is only for --noise extrapolate", "use --alphas with --noise zero-sum")
    if alphas is not None:
        return Scheme(ZERO_SUM, check_alphas(_numbers(alphas, "--alphas"), copies))
    return Scheme(EXTRAPOLATE, check_nodes(_numbers(nodes or "", "--nodes"), copies))


def _numbers(text: str, option: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: must be comma-separated numbers, such as 1,-1") from error


def check_alphas(alphas: Sequence[float], copies: int) -> tuple[float, ...]:
    """``alphas`` as a tuple. Raises UsageError unless there is one positive, finite number per copy."""
    _count("--alphas", alphas, copies)
    for alpha in alphas:
        if not (math.isfinite(alpha) and alpha > 0 and math.isfinite(1 / alpha)):
            raise UsageError(f"--alphas: {alpha} is not a positive, finite number")
    return tuple(map(float, alphas))


def check_nodes(nodes: Sequence[float], copies: int) -> tuple[float, ...]:
    """``nodes`` as a tuple. Raises UsageError unless there is one finite number per copy, none 0, no two too close."""
    _count("--nodes", nodes, copies)
    for node in nodes:
        if not math.isfinite(node) or node == 0:
            raise UsageError(
                f"--nodes: {node} is not a finite, nonzero number, so that copy would have no usable noise"
            )
    if len(set(nodes)) < len(nodes):
        raise UsageError("--nodes: two copies at the same node have the same noise, which does not cancel")
    scheme = Scheme(EXTRAPOLATE, tuple(map(float, nodes)))
    if not float(scheme.weights.abs().sum()) < MOST_WEIGHT:
        raise UsageError("--nodes: so close together that the weights amplify rounding beyond use", "spread them out")
    return scheme.factors


def _count(option: str, numbers: Sequence[float], copies: int) -> None:
    if len(numbers) != copies:
        raise UsageError(f"{option}: {len(numbers)} numbers for {copies} copies", "give one for each copy")


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


class Noise:
    """A publication's noise for the copies ``only`` (counted from 1; None for all), for any slice of a tensor.

    ``double``: draw in float64, for calibrated noise. ``permanent``: what the noise that all copies share is drawn
    from, if not from the publication's own seed.
    """

    def __init__(
        self,
        randomness: Randomness,
        round_: int,
        scheme: Scheme,
        only: Sequence[int] | None = None,
        *,
        double: bool = False,
        permanent: Randomness | None = None,
    ):
        self._randomness = randomness
        self._permanent = permanent
        self._round = round_
        weights = scheme.mixing
        self._weights = weights if only is None else weights[[k - 1 for k in only]]
        self._double = double

    def subkeys(self, tensor: str, sigma: float, shared_sigma: float = 0.0) -> list[bytes]:
        """The stream keys for one tensor's noise of these scales: one per draw, and one for shared noise."""
        purposes: list[tuple[str | int, ...]] = []
        if sigma:
            purposes += [("noise", self._round, tensor, i) for i in range(self._weights.shape[1])]
        keys = [self._randomness.key(*purpose) for purpose in purposes]
        if shared_sigma and self._permanent:
            # Noise of another scale is another draw: from two multiples of one, anyone could compute it.
            keys.append(self._permanent.key("permanent noise", tensor, shared_sigma.hex()))
        elif shared_sigma:
            keys.append(self._randomness.key("shared noise", self._round, tensor))
        return keys

    def draws(self, keys: Sequence[bytes], start: int, stop: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Standard normals for elements ``start … stop`` of a tensor, (stop − start,) for each of its ``keys``."""
        return [standard_normals(key, start, stop, double=self._double).to(dtype) for key in keys]

    def of_copies(
        self, draws: Sequence[torch.Tensor], sigma: float, shared_sigma: float = 0.0, onto: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """ε_k of each copy, flat, from the ``draws`` for a tensor whose block has scale ``sigma``; added to ``onto``.

        Noise of scale ``shared_sigma`` is the same in every copy. The scales must be those the keys were made for.
        """
        first, *others = draws
        table = self._weights * sigma if sigma else self._weights[:, :0]
        if shared_sigma:
            table = torch.cat([table, torch.full((len(table), 1), shared_sigma, dtype=table.dtype)], 1)
        noisy = []
        for weights in table.to(first.dtype).tolist():  # cast first, so that overflow becomes inf instead of raising
            noise = first * weights[0] if onto is None else torch.add(onto, first, alpha=weights[0])
            for draw, weight in zip(others, weights[1:], strict=True):
                noise.add_(draw, alpha=weight)
            noisy.append(noise)
        return noisy
