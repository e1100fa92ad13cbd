"""A model's knowledge of records to forget and to keep, as shares of what it knew: from probabilities of answers.

A record's probability is the geometric mean over its answer tokens. A model that never saw a record gives its answer
some probability all the same, the *baseline*: that of unseen records under the same model or, record by record, that of
a public model. Only the excess over the baseline counts as known, and no record makes up for another: one below the
baseline counts 0, and one that is known better than before unlearning counts as before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_KNOWN = 0.02  # in probability; a share of less cannot be distinguished from the noise of a copy
TAIL = 0.95  # quantile of the baseline above which a record stands out
CHANCE = 0.95  # share of unseen sets in which no more records stand out than Tail allows
STILL_KNOWN = 0.5  # share of what was known of a record, above which it is still known


@dataclass(frozen=True)
class Probabilities:
    """The probabilities of records to forget and of unseen ones under one model, as arrays; ``unseen`` is None without
    any."""

    forget: np.ndarray
    unseen: np.ndarray | None = None

    @classmethod
    def of(cls, forget: Sequence[float], unseen: Sequence[float] | None = None) -> Probabilities:
        return cls(np.asarray(forget, float), np.asarray(unseen, float) if unseen else None)

    def drawn(self, forget: np.ndarray, unseen: np.ndarray) -> Probabilities:
        """The probabilities of the records with these numbers."""
        return Probabilities(self.forget[forget], None if self.unseen is None else self.unseen[unseen])


@dataclass(frozen=True)
class Tail:
    """The counts of ``records`` to forget that stand out, by a probability above the baseline's TAIL quantile, and that
    are given word for word; and how many of both are ``allowed``: by chance, or by the limit of what may be left. None
    of those that are ``still_known`` is allowed."""

    records: int
    above: int
    above_allowed: int
    verbatim: int
    verbatim_allowed: int
    still_known: int = 0

    @property
    def is_allowed(self) -> bool:
        few = self.above <= self.above_allowed and self.verbatim <= self.verbatim_allowed
        return few and not self.still_known


def share_left(after: Probabilities, before: Probabilities, public: Probabilities | None = None) -> float:
    """The share of what was known of records to forget that is left.

    The mean excess over the baseline, less that of the baseline itself by its scatter, as a share of that ``before``.
    Records that stand out and all others are two sums, of which neither makes up for the other. Where nothing exceeds
    the baseline, how far the mean is below it, a negative share. Infinite if next to nothing was known before
    (LEAST_KNOWN).
    """
    known = _signed(before, public)
    if known < LEAST_KNOWN:
        return math.inf
    excess, scatter = _excess(after, public)
    if scatter is None:
        exceeding = float(np.maximum(excess, 0).mean())
    else:
        limit = _quantile(scatter)
        exceeding = 0.0
        for records, unseen in ((excess > limit, scatter > limit), (excess <= limit, scatter <= limit)):
            part = (np.maximum(excess, 0) * records).mean() - (np.maximum(scatter, 0) * unseen).mean()
            exceeding += max(0.0, float(part))
    return (exceeding or min(0.0, _signed(after, public))) / known


def error_of_share_left(after: Probabilities, before: Probabilities, public: Probabilities | None = None) -> float:
    """The standard error of ``share_left`` over the draw of records, those that were known before taken as given: of
    what exceeds the baseline, because how far a record is below it is irrelevant to what is left."""
    known = _signed(before, public)
    if known < LEAST_KNOWN:
        return math.inf
    excess, scatter = _excess(after, public)
    variance = np.maximum(excess, 0).var() / len(excess)
    if scatter is not None:
        variance += np.maximum(scatter, 0).var() / len(scatter)
    return math.sqrt(variance) / known


def tail_of(
    after: Probabilities,
    before: Probabilities | None,
    public: Probabilities | None,
    max_left: float,
    *,
    verbatim: int = 0,
    verbatim_unseen: int = 0,
) -> Tail | None:
    """The records that stand out, and the ``verbatim`` ones; None without a baseline.

    ``verbatim_unseen``: how many records of the baseline are given word for word. The numbers allowed are quantiles of
    the beta-binomial distribution, which also has the chance in the unseen records that happened to be drawn.
    """
    from scipy.stats import betabinom

    standing_out = records_above(after, before, public, max_left)
    if standing_out is None:
        return None
    scatter = _scatter(after, public)
    assert scatter is not None
    records, drawn = len(after.forget), len(scatter)
    rank = int((scatter > _quantile(scatter)).sum()) + 1  # of the quantile, from above
    by_limit = math.floor(max_left * records + 1e-9)
    by_chance = betabinom.ppf(CHANCE, records, rank, drawn + 1 - rank)
    by_chance_verbatim = betabinom.ppf(CHANCE, records, verbatim_unseen + 1, drawn - verbatim_unseen + 1)
    return Tail(
        records, len(standing_out), max(by_limit, int(by_chance)), verbatim, max(by_limit, int(by_chance_verbatim)),
        still_known=len(records_still_known(after, before, public, max_left)),
    )  # fmt: skip


def records_still_known(
    after: Probabilities, before: Probabilities | None, public: Probabilities | None, max_left: float
) -> list[int]:
    """The numbers of the records to forget of which more than STILL_KNOWN, and ``max_left``, of what was known is left,
    and which no chance explains.

    Chance explains a record that is no more probable than the baseline's most probable one, or than one more of a
    normal distribution that its log-probabilities above their median fit (CHANCE for all records together; by
    Student's t, which also has the chance in the few that the fit is from). Records that anybody guesses are left out
    of both, where a ``public`` model names them. None where the baseline has a record as probable as one that is half
    known all the same: then ``Tail`` counts what chance allows.
    """
    from scipy.stats import t

    baseline = public.forget if after.unseen is None and public else after.unseen
    if before is None or baseline is None:
        return []
    excess, _ = _excess(after, public)
    known, _ = _excess(before, public)
    share = max(STILL_KNOWN, max_left)
    half_known = share * known.mean()
    can_be_judged = np.full(len(excess), True)
    if public:
        can_be_judged = public.forget <= half_known
        guesses = public.forget if after.unseen is None else public.unseen
        baseline = baseline if guesses is None else baseline[guesses <= half_known]
    if len(baseline) < 2 or baseline.max() - baseline.mean() > half_known:
        return []
    logs = np.log(np.maximum(baseline, 1e-30))
    median = np.median(logs)
    above = logs[logs >= median] - median  # how far the least probable ones are below is irrelevant
    deviations = t.ppf(1 - (1 - CHANCE) / len(excess), len(logs) - 1)
    limit = max(logs.max(), median + deviations * math.sqrt(np.square(above).mean()))
    is_unlikely = np.log(np.maximum(after.forget, 1e-30)) > limit
    is_known = excess > share * np.maximum(known, LEAST_KNOWN)
    return np.flatnonzero(can_be_judged & is_known & is_unlikely).tolist()


def records_above(
    after: Probabilities, before: Probabilities | None, public: Probabilities | None, max_left: float
) -> list[int] | None:
    """The numbers of the records to forget that stand out; None without a baseline. Where the baseline is next to
    nothing, more than ``max_left`` of what was known has to be left of a record."""
    scatter = _scatter(after, public)
    if scatter is None:
        return None
    excess, _ = _excess(after, public)
    known = max(0.0, _signed(before, public)) if before else 0.0
    return np.flatnonzero(excess > max(max_left * known, _quantile(scatter))).tolist()


def share_kept(after: Sequence[float] | np.ndarray, before: Sequence[float] | np.ndarray) -> float:
    """The mean probability of records to keep, each at most what it was before unlearning, as a share of that; infinite
    if that was 0."""
    earlier = np.asarray(before, float)
    total = float(earlier.sum())
    return float(np.minimum(np.asarray(after, float), earlier).sum()) / total if total > 0 else math.inf


def _excess(model: Probabilities, public: Probabilities | None) -> tuple[np.ndarray, np.ndarray | None]:
    """The excess of each record to forget over its baseline, and of each unseen one; None without unseen ones.

    A public model's probabilities are scaled by what training did to those of unseen records since.
    """
    if public is None:
        if model.unseen is None:
            return model.forget, None
        baseline = model.unseen.mean()
        return model.forget - baseline, model.unseen - baseline
    if model.unseen is None or public.unseen is None:
        return model.forget - public.forget, None
    scale = model.unseen.mean() / public.unseen.mean()
    return model.forget - scale * public.forget, model.unseen - scale * public.unseen


def _scatter(model: Probabilities, public: Probabilities | None) -> np.ndarray | None:
    """The scatter of unseen records around the baseline or, without any, that of the same records under the public
    model, around their mean."""
    _, scatter = _excess(model, public)
    if scatter is None and public is not None:
        scatter = public.forget - public.forget.mean()
    return scatter


def _signed(model: Probabilities, public: Probabilities | None) -> float:
    """The mean excess, in which records make up for each other."""
    return float(_excess(model, public)[0].mean())


def _quantile(scatter: np.ndarray) -> float:
    return float(np.quantile(scatter, TAIL, method="higher"))
