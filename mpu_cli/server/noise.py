"""Noise of a publication's copies, drawn from its seed: the same for any slice of a tensor, on any processor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpu_cli.randomness import Randomness, standard_normals
from mpu_cli.server.scheme import Scheme


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

    def subkeys(
        self, tensor: str, sigma: float, shared_sigma: float = 0.0, permanent_name: str | None = None
    ) -> list[bytes]:
        """The stream keys for one tensor's noise of these scales: one per draw, and one for shared noise.

        ``permanent_name``: what the tensor is called where permanent noise is drawn, if not ``tensor``.
        """
        purposes: list[tuple[str | int, ...]] = []
        if sigma:
            purposes += [("noise", self._round, tensor, i) for i in range(self._weights.shape[1])]
        keys = [self._randomness.key(*purpose) for purpose in purposes]
        if shared_sigma and self._permanent:
            # Noise of another scale is another draw: from two multiples of one, anyone could compute it.
            keys.append(self._permanent.key("permanent noise", permanent_name or tensor, shared_sigma.hex()))
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
        head_draw, *tail_draws = draws
        table = self._weights * sigma if sigma else self._weights[:, :0]
        if shared_sigma:
            table = torch.cat([table, torch.full((len(table), 1), shared_sigma, dtype=table.dtype)], 1)
        noisy = []
        for weights in table.to(
            head_draw.dtype
        ).tolist():  # cast first, so that overflow becomes inf instead of raising
            noise = head_draw * weights[0] if onto is None else torch.add(onto, head_draw, alpha=weights[0])
            for draw, weight in zip(tail_draws, weights[1:], strict=True):
                noise.add_(draw, alpha=weight)
            noisy.append(noise)
        return noisy
