"""Zero-sum noise for the copies of one publication (paper section 3, appendix A.1).

ε⁰ = √(m/(m−1))·Hᵀg with H the (m−1)×m Helmert matrix, whose rows are orthonormal and orthogonal to 1, and g
of m−1 independent N(0, σ²): then Σ_k ε⁰_k = 0, every ε⁰_k is N(0, σ²), and the covariance between copies is
−σ²/(m−1). Copy k gets ε_k = α_k ε⁰_k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mpu_cli.errors import UsageError
from mpu_cli.server.randomness import Randomness, standard_normals


def default_alphas(copies: int) -> tuple[float, ...]:
    """α_k = 1 + (k−1)/(m−1), from 1 to 2 (the paper's); of one copy alone 1."""
    return tuple(1 + k / max(1, copies - 1) for k in range(copies))


def random_alphas(randomness: Randomness, round_: int, copies: int) -> tuple[float, ...]:
    """α_k uniform in [1, 2), drawn from the seed: who does not know them has to estimate them."""
    return tuple((1 + randomness.stream("alphas", round_).uniform(copies)).tolist())


def check_alphas(alphas: Sequence[float], copies: int) -> tuple[float, ...]:
    """``alphas`` as a tuple; UsageError unless there is one positive, finite number for each copy."""
    if len(alphas) != copies:
        raise UsageError(f"--alphas: {len(alphas)} numbers for {copies} copies; give one for each copy")
    for alpha in alphas:
        if not (math.isfinite(alpha) and alpha > 0 and math.isfinite(1 / alpha)):
            raise UsageError(f"--alphas: {alpha} is not a positive, finite number")
    return tuple(map(float, alphas))


def mixing_matrix(copies: int) -> torch.Tensor:
    """√(m/(m−1))·Hᵀ, float64 (m, m−1): from independent draws to zero-sum noise.

    One copy alone, the baseline without protection of `mpu run --mode noised`, has one draw of its own: (1, 1).
    """
    if copies == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    helmert = torch.zeros(copies - 1, copies, dtype=torch.float64)
    for i in range(1, copies):
        helmert[i - 1, :i] = 1 / math.sqrt(i * (i + 1))
        helmert[i - 1, i] = -i / math.sqrt(i * (i + 1))
    return math.sqrt(copies / (copies - 1)) * helmert.T


class Noise:
    """The noise of the copies ``only`` (counted from 1; None for all) of a publication, for any slice of a tensor.

    ``double``: drawn in float64, for calibrated noise.
    """

    def __init__(
        self,
        randomness: Randomness,
        round_: int,
        alphas: Sequence[float],
        only: Sequence[int] | None = None,
        *,
        double: bool = False,
    ):
        self._randomness = randomness
        self._round = round_
        weights = torch.tensor(alphas, dtype=torch.float64)[:, None] * mixing_matrix(len(alphas))
        self._weights = weights if only is None else weights[[k - 1 for k in only]]
        self._double = double

    def keys(self, tensor: str, sigma: float, shared_sigma: float = 0.0) -> list[bytes]:
        """The keys of the streams that noise of these scales takes for one tensor: m−1, and one for shared noise."""
        purposes: list[tuple[str | int, ...]] = []
        if sigma:
            purposes += [("noise", self._round, tensor, i) for i in range(self._weights.shape[1])]
        if shared_sigma:
            purposes.append(("shared noise", self._round, tensor))
        return [self._randomness.key(*purpose) for purpose in purposes]

    def draws(self, keys: Sequence[bytes], start: int, stop: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Standard normals for elements ``start … stop`` of a tensor, (stop − start,) for each of its ``keys``."""
        return [standard_normals(key, start, stop, double=self._double).to(dtype) for key in keys]

    def of_copies(
        self, draws: Sequence[torch.Tensor], sigma: float, shared_sigma: float = 0.0, onto: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """ε_k of each copy, flat, from the ``draws`` for a tensor whose block has scale ``sigma``; added to ``onto``.

        Noise of scale ``shared_sigma`` is the same in every copy. The scales are those that the keys were made for.
        """
        first, *others = draws
        table = self._weights * sigma if sigma else self._weights[:, :0]
        if shared_sigma:
            table = torch.cat([table, torch.full((len(table), 1), shared_sigma, dtype=table.dtype)], 1)
        noisy = []
        for weights in table.to(first.dtype).tolist():  # rounded first, as what overflows is no error but infinite
            made = first * weights[0] if onto is None else torch.add(onto, first, alpha=weights[0])
            for draw, weight in zip(others, weights[1:], strict=True):
                made.add_(draw, alpha=weight)
            noisy.append(made)
        return noisy
