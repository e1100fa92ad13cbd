"""What a trace found, for each publication and copy, and who is named by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from scipy import stats

from mpu_cli.server.keys import Keys
from mpu_cli.tracing.suspect import log_chance

LEVEL = 1e-6  # a copy is named if its p-value, corrected for all tests, is below this
SAME_SHARE = 0.1  # relative difference of two shares up to which they count as equal
SAME_Z = 1 - 1e-6  # of another z, above which two noises are multiples of one draw


@dataclass(frozen=True)
class NoiseEvidence:
    """The correlation with one noise: ``z``, standard normal unless the model was made with it; ``share``: how much of
    the noise is in the model, 1 if all of it is; ``blocks``: z of each block. NaN where there was nothing to test."""

    z: float
    share: float
    blocks: Mapping[str, float]

    @property
    def log_p(self) -> float:
        """The logarithm of the one-sided p-value."""
        return 0.0 if math.isnan(self.z) else float(stats.norm.logsf(self.z))


@dataclass(frozen=True)
class CopyEvidence:
    """What says that a model was made from one copy.

    ``agreements`` of ``coordinates``: places of the model dimension at which the model has the copy's secret order and
    signs; None if the copy's coordinates are the base's. ``noise``: that of the copy which cancels; None if it has
    none. ``recipient``: whom it was sealed for, if the keys know that.
    """

    copy: int
    recipient: str | None
    agreements: int | None
    coordinates: int
    signed: bool
    noise: NoiseEvidence | None

    @property
    def log_p_coordinates(self) -> float:
        return 0.0 if self.agreements is None else log_chance(self.agreements, signed=self.signed)


@dataclass(frozen=True)
class PublicationEvidence:
    """What says that a model was made from the copies of one publication. ``label``: its keys' name; ``mark``: the
    evidence of the mark, None if it has none; ``aligned``: how many tensors had to be aligned."""

    label: str
    keys: Keys
    mark: NoiseEvidence | None
    copies: tuple[CopyEvidence, ...]
    tensors: int
    total_tensors: int
    aligned: int

    @cached_property
    def log_p_values(self) -> list[float]:
        values = [copy.log_p_coordinates for copy in self.copies if copy.agreements is not None]
        values += [copy.noise.log_p for copy in self.copies if copy.noise]
        return values + ([self.mark.log_p] if self.mark else [])


@dataclass(frozen=True)
class Trace:
    """All evidence. A copy or a publication is *named* if a test of it has a corrected p-value below ``LEVEL``, which
    happens to a model that was made from none with at most that probability."""

    suspect: str
    publications: tuple[PublicationEvidence, ...]

    @cached_property
    def tests(self) -> int:
        return sum(len(publication.log_p_values) for publication in self.publications)

    def log10_p(self, log_p: float) -> float:
        """log₁₀ of a p-value, corrected for all tests."""
        return min(0.0, log_p + math.log(max(1, self.tests))) / math.log(10)

    def is_significant(self, log_p: float) -> bool:
        return self.log10_p(log_p) < math.log10(LEVEL)

    def is_named(self, publication: PublicationEvidence) -> bool:
        return any(self.is_significant(log_p) for log_p in publication.log_p_values)

    def named_copies(self, publication: PublicationEvidence) -> list[CopyEvidence]:
        """The copies whose coordinates the model has; else the copy whose noise it has, to the right amount.

        The noise of several copies may be multiples of one draw. It is the copy's if there is as much of it as of the
        mark, which all copies have alike; where no amount is known, all of these copies are named. Empty if only the
        mark is found, or if a mixture of other copies could have as much: of three and more multiples of one draw it
        can.
        """
        if len(publication.copies) == 1 and self.is_named(publication):
            return [publication.copies[0]]
        by_coordinates = [each for each in publication.copies if self.is_significant(each.log_p_coordinates)]
        if by_coordinates:
            return by_coordinates
        if publication.keys.publication.scheme.one_draw and len(publication.copies) > 2:
            return []
        by_noise = [(each, each.noise) for each in publication.copies if each.noise]
        by_noise = [(each, noise) for each, noise in by_noise if self.is_significant(noise.log_p)]
        if any(math.isnan(noise.share) for _, noise in by_noise):
            largest = max(noise.z for _, noise in by_noise)
            return [each for each, noise in by_noise if noise.z > SAME_Z * largest]
        marked = publication.mark is not None and self.is_significant(publication.mark.log_p)
        expected = publication.mark.share if publication.mark and marked else 1.0
        off = {each.copy: abs(noise.share / expected - 1) for each, noise in by_noise}
        nearest = [each for each, _ in by_noise if off[each.copy] == min(off.values())]
        return nearest if nearest and (not marked or off[nearest[0].copy] < SAME_SHARE) else []
