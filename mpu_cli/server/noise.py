"""Noise of a publication's copies, drawn from its seed: the same for any slice of a tensor, on any processor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpu_cli.randomness import Randomness, standard_normals
from mpu_cli.server.scheme import Scheme


@dataclass(frozen=True)
class Scales:
    """σ of a block's noise: of the part that cancels, before a copy's factor, of permanent noise and of the mark."""

    cancelling: float = 0.0
    permanent: float = 0.0
    mark: float = 0.0

    def of_copy(self, factor: float) -> float:
        """σ of all noise of a copy whose factor is ``factor``."""
        return math.hypot(factor * self.cancelling, self.permanent, self.mark)


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

    @property
    def cancelling_draws(self) -> int:
        """From how many draws the noise that cancels is mixed."""
        return int(self._weights.shape[1])

    def subkeys(self, tensor: str, scales: Scales, permanent_name: str | None = None) -> list[bytes]:
        """The stream keys for one tensor's noise of these scales: one per draw, one for permanent noise and one for the
        mark.

        ``permanent_name``: what the tensor is called where permanent noise is drawn, if not ``tensor``.
        """
        purposes: list[tuple[str | int, ...]] = []
        if scales.cancelling:
            purposes += [("noise", self._round, tensor, i) for i in range(self.cancelling_draws)]
        keys = [self._randomness.key(*purpose) for purpose in purposes]
        if scales.permanent and self._permanent:
            # Noise of another scale is another draw: from two multiples of one, anyone could compute it.
            keys.append(self._permanent.key("permanent noise", permanent_name or tensor, scales.permanent.hex()))
        elif scales.permanent:
            keys.append(self._randomness.key("shared noise", self._round, tensor))
        if scales.mark:
            keys.append(self._randomness.key("mark", self._round, tensor))
        return keys

    def draws(self, keys: Sequence[bytes], start: int, stop: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Standard normals for elements ``start … stop`` of a tensor, (stop − start,) for each of its ``keys``."""
        return [standard_normals(key, start, stop, double=self._double).to(dtype) for key in keys]

    def mixing(self, scales: Scales) -> torch.Tensor:
        """How each copy's noise is mixed from the draws that ``subkeys`` has keys for: float64 (copies, draws)."""
        table = self._weights * scales.cancelling if scales.cancelling else self._weights[:, :0]
        same_in_every_copy = [scale for scale in (scales.permanent, scales.mark) if scale]
        columns = [torch.full((len(table), 1), scale, dtype=table.dtype) for scale in same_in_every_copy]
        return torch.cat([table, *columns], 1)

    def of_copies(
        self, draws: Sequence[torch.Tensor], scales: Scales, onto: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """ε_k of each copy, flat, from the ``draws`` for a tensor whose block has these scales; added to ``onto``.

        The scales must be those the keys were made for.
        """
        head_draw, *tail_draws = draws
        noisy = []
        # cast first, so that overflow becomes inf instead of raising
        for weights in self.mixing(scales).to(head_draw.dtype).tolist():
            noise = head_draw * weights[0] if onto is None else torch.add(onto, head_draw, alpha=weights[0])
            for draw, weight in zip(tail_draws, weights[1:], strict=True):
                noise.add_(draw, alpha=weight)
            noisy.append(noise)
        return noisy
