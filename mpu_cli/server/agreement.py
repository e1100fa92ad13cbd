"""What a round amounted to: how the copies agree, and what is probably wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mpu_cli.errors import MpuError
from mpu_cli.manifest import TAGS, DeltaManifest
from mpu_cli.server.deltas import trained_differently
from mpu_cli.server.estimate import ErrorEstimate, error_estimate
from mpu_cli.server.keys import Keys
from mpu_cli.server.server_lr import ServerStep

LOST = 0.3  # warn if rounding loses more than this share of the update's norm
DISAGREE = 0.5  # cosine between two copies' deltas below which something is probably wrong
UNEQUAL = 3.0  # times another copy's norm, above which a copy was probably trained differently
SHOWN = 3  # outliers named in warnings
WRONG = 1.0  # estimated error, relative to the update, at which the update is nothing but noise


@dataclass(frozen=True)
class Aggregation:
    """What ``aggregate`` made and how the copies agree.

    ``norms``: ‖T_k⁻¹(Δ_k)‖ by copy; ``cosines``: with Δ̄, by copy; ``pairwise``: the smallest cosine between two
    copies; ``norm``: ‖Δ̄‖; ``rounding``: ‖stored − θ − ηΔ̄‖ / ‖ηΔ̄‖, what the dtype of storage lost of the update, read
    off a slice or two of each tensor; ``error``: how far Δ̄ is from the clean update; ``outliers``: tensors of which one
    copy's change is far larger than the others', with the copy and by what factor; ``trained_differently``: two copies,
    and in what their training differed, by the tags in their deltas; ``step``: how the step was chosen, if it was.
    """

    path: Path
    norms: list[float]
    cosines: list[float]
    pairwise: float
    norm: float
    rounding: float
    error: ErrorEstimate
    outliers: tuple[tuple[str, int, float], ...] = ()
    trained_differently: tuple[tuple[int, int, str], ...] = ()
    algorithms: tuple[str, ...] = ()
    step: ServerStep | None = None

    def warnings(self) -> list[str]:
        """What is probably wrong with the round, a sentence each; empty if nothing is. Of causes only the first one:
        the others follow from it."""
        causes = [*self._causes()]
        error = [self.error.warning] if self.error.warning and not causes else []
        return [*causes[:1], *self._outliers(), *error, *self._losses()]

    def check(self, force: bool) -> None:
        """Raise MpuError, unless ``force``, if the update is nothing but noise."""
        if self.error.relative >= WRONG and not force:
            cause = next(self._causes(), None) or self.error.warning
            raise MpuError(f"nothing was written: {cause}", "--force writes the model all the same")

    def _causes(self) -> Iterator[str]:
        for earlier_copy, other, name in self.trained_differently:
            what = TAGS.get(name, name)
            yield f"copies {earlier_copy} and {other} were trained with different {what}; the noise does not cancel"
        if len(names := sorted(set(self.algorithms))) > 1:
            yield (
                f"the copies were trained with different algorithms ({', '.join(names)}); "
                "noise cancels only if all copies are trained identically"
            )
        if self.pairwise < DISAGREE:
            yield (
                f"the copies disagree (cosine {self.pairwise:.2f} between two of them): they were trained with "
                "different options or records, the noise is too large, or a delta was tampered with"
            )
        if max(self.norms) > UNEQUAL * min(self.norms):
            yield (
                f"one copy's change is {max(self.norms) / max(min(self.norms), 1e-30):.1f} times another's: they were "
                "trained with different options, or a delta was tampered with"
            )

    def _outliers(self) -> Iterator[str]:
        for name, copy, factor in self.outliers[:SHOWN]:
            much = (
                f"{factor:.0f} times as much as any other copy" if math.isfinite(factor) else "and no other copy does"
            )
            yield f"copy {copy} changes {name} {much}: it was trained differently or tampered with"
        if len(self.outliers) > SHOWN:
            yield f"and {len(self.outliers) - SHOWN} more tensors"

    def _losses(self) -> Iterator[str]:
        if self.norm == 0:
            yield "all deltas are zero: nothing was unlearned"
        if self.rounding > LOST:
            yield f"storage rounds away {self.rounding:.0%} of the update; --dtype float32 keeps it"


def agreement(path: Path, gram: torch.Tensor, keys: Keys, manifests: Mapping[int, DeltaManifest]) -> Aggregation:
    """How the copies agree, from the inner products of their undone deltas, float64 (m, m), and each one's manifest."""
    scheme = keys.publication.scheme
    weights = scheme.weights
    norms = gram.diagonal().sqrt()
    norm = float((weights @ gram @ weights).clamp(min=0).sqrt())
    cosines = gram / (norms[:, None] * norms[None, :])
    return Aggregation(
        path=path,
        norms=norms.tolist(),
        cosines=((gram @ weights) / (norms * norm)).tolist(),
        pairwise=float(cosines.nan_to_num(1.0).min()),
        norm=norm,
        rounding=0.0,
        error=error_estimate(scheme, gram, keys.publication.permanent),
        trained_differently=trained_differently({copy: m.trained for copy, m in manifests.items()}),
        algorithms=tuple(manifest.algorithm for manifest in manifests.values()),
    )
