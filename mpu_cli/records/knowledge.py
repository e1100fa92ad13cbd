"""What a model still knows of records to forget and to keep, as shares of what it knew: from probabilities of answers.

A record's probability is the geometric mean over its answer tokens. A model that never saw a record gives its answer
some probability all the same, so what is known of records is what exceeds that *reference*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pvariance

LEAST_KNOWN = 0.02  # in probability; a share of less cannot be distinguished from the noise of a copy


def share_left(
    after: Sequence[float],
    before: Sequence[float],
    unseen_after: Sequence[float] | None = None,
    unseen_before: Sequence[float] | None = None,
    public: Sequence[float] | None = None,
    public_unseen: Sequence[float] | None = None,
) -> float:
    """The share of what was known of records to forget that is left: (P − reference) / (P before − reference before).

    ``after`` and ``before``: of the records to forget, under the model and the one before unlearning. The reference is
    the mean probability of unseen records under the same model. Where ``public`` has the probabilities of the records
    to forget under a model that never saw them, the reference is theirs, times what training did to unseen records
    since (``public_unseen``: theirs under that model): records that are easier to guess have a higher one. 0 is what a
    stranger knows; below, the model gives the answers less probability than that. Infinite if next to nothing was
    known before (LEAST_KNOWN).
    """
    reference_after = _reference(unseen_after, public, public_unseen)
    reference_before = _reference(unseen_before, public, public_unseen)
    known = fmean(before) - reference_before
    return (fmean(after) - reference_after) / known if known >= LEAST_KNOWN else float("inf")


def error_of_share_left(
    after: Sequence[float],
    before: Sequence[float],
    unseen_after: Sequence[float] | None = None,
    unseen_before: Sequence[float] | None = None,
    public: Sequence[float] | None = None,
) -> float:
    """The standard error of ``share_left`` over the draw of records, those that were known before taken as given."""
    known = fmean(before) - _reference(unseen_before, public, None)
    excess = after if public is None else [p - q for p, q in zip(after, public, strict=True)]
    strangers = unseen_after if public is None and unseen_after else [0.0]
    variance = pvariance(excess) / len(excess) + pvariance(strangers) / len(strangers)
    return math.sqrt(variance) / known if known >= LEAST_KNOWN else float("inf")


def share_kept(after: Sequence[float], before: Sequence[float]) -> float:
    """The mean probability of records to keep, as a share of that before unlearning; infinite if that was 0."""
    earlier = fmean(before)
    return fmean(after) / earlier if earlier > 0 else float("inf")


def _reference(
    unseen: Sequence[float] | None, public: Sequence[float] | None, public_unseen: Sequence[float] | None
) -> float:
    if public is None:
        return fmean(unseen) if unseen else 0.0
    if not unseen or not public_unseen:
        return fmean(public)
    return fmean(public) * (fmean(unseen) / fmean(public_unseen))
