"""Whether a model forgot records and kept others, in one verdict that the owner of the records can act on.

What is left and what is kept are shares of what was known before (``mpu_cli.records.knowledge``), with a bootstrap
interval over records. A mean alone would pass a few records that are known as before, so no more may stand out than of
records that nobody saw. Only what the verdict needs is kept, rounded: the numbers of a receipt would otherwise be an
oracle for guessed records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from mpu_cli.records.knowledge import (
    Probabilities,
    Tail,
    records_above,
    records_still_known,
    share_kept,
    share_left,
    tail_of,
)

CONFIDENCE = 0.95  # of the intervals
RESAMPLES = 2000
WIDEST = 10.0  # shares and ends of intervals are cut here, in both directions
MAX_STEP_FACTOR = 2.0  # times the step that was taken: what another step may be, the longest that was tried
SHORTER_STEP_FACTOR = 0.8  # times the step that was taken, after one that went too far
# Times the share that may be left: the upper end of its interval, and how far below the baseline is too far.
INTERVAL_FACTOR = 2.0


@dataclass(frozen=True)
class RecordScores:
    """A set of records under one model: the probability of each answer (geometric mean over its tokens), and whether
    each of its tokens is the model's likeliest, so that greedy decoding gives it word for word. Records with one number
    in ``clusters`` are drawn together, such as turns of a dialogue; None if each is one of its own."""

    probabilities: Sequence[float]
    verbatim: Sequence[bool]
    clusters: Sequence[int] | None = None


Scores = Mapping[str, RecordScores]  # of the sets forget, unseen, held_out and retain, as far as there are any


@dataclass(frozen=True)
class SetScore:
    """A set in two digits: the number of records up to the next power of two, their mean probability, and the share
    that is answered word for word."""

    records_at_most: int
    probability: float
    verbatim: float


@dataclass(frozen=True)
class Share:
    """A share of what was known, and the ends of its interval, in hundredths, cut at WIDEST."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.0%} ({self.low:.0%} to {self.high:.0%})"


@dataclass(frozen=True)
class Verdict:
    """The shares of the records to forget that are left and of the others that are kept, against their limits.

    Shares are rounded against the model, up for what is left and down for what is kept; None where one cannot be
    computed.
    """

    left: Share | None
    kept: Share | None  # of records that the training did not see
    kept_trained: Share | None  # of records that the training saw
    max_left: float  # the limits that were asked for
    min_kept: float
    scores: dict[str, SetScore]  # of the sets, by name, for people
    same_reading_context: bool = True  # the model reads records as the one before did; else nothing is decided
    has_baseline: bool = True  # unseen records or a public model show the guesses of a model that never saw the records
    tail: Tail | None = None  # the number of records that stand out, None without a baseline

    @property
    def stands_out(self) -> bool:
        """Whether more records stand out than chance and the limit allow, or one is still known."""
        return self.tail is not None and not self.tail.is_allowed

    @property
    def is_forgotten(self) -> bool | None:
        """Whether at most ``max_left`` is left, with an interval that ends below twice that, and too few records to
        count stand out; None if nothing says, or if more is left and may be what a model guesses that never saw the
        records (not ``has_baseline``)."""
        if self.left is None or (not self.has_baseline and self.left.estimate > self.max_left):
            return None
        little_left = self.left.estimate <= self.max_left and self.left.high <= INTERVAL_FACTOR * self.max_left
        return little_left and not self.stands_out

    @property
    def is_unsure(self) -> bool:
        """Whether the share left would do, but too few records say so."""
        if self.left is None or self.stands_out:
            return False
        return self.left.estimate <= self.max_left < self.left.high / INTERVAL_FACTOR

    @property
    def is_too_far(self) -> bool:
        """Whether the records are known less than the baseline, which shows what was forgotten."""
        return self.left is not None and self.left.high < -INTERVAL_FACTOR * self.max_left

    @property
    def is_kept(self) -> bool | None:
        return None if self.kept is None else self.kept.estimate >= self.min_kept

    @property
    def passes(self) -> bool:
        forgotten = self.is_forgotten is True and not self.is_too_far
        return self.same_reading_context and forgotten and self.is_kept is True

    @property
    def sentence(self) -> str:
        """The verdict, for people."""
        if self.is_too_far:
            forgetting = "forgotten beyond the baseline"
        elif self.is_forgotten is None:
            forgetting = f"forgetting is undecided ({self._lacking_of_left})"
        elif self.is_forgotten:
            forgetting = "forgotten"
        elif self.is_unsure:
            forgetting = "too few records to say"
        else:
            in_the_mean = self.left is not None and self.left.estimate <= self.max_left
            forgetting = "some records are not forgotten" if in_the_mean and self.stands_out else "not forgotten"
        if self.is_kept is None:
            keeping = f"keeping is undecided ({self._lacking_of_kept})"
        else:
            keeping = "the rest is kept" if self.is_kept else "the rest is not kept"
        if not self.same_reading_context:
            return f"undecided: {forgetting}, {keeping}, by a copy that reads records otherwise"
        decisions = (self.is_forgotten, self.is_kept)
        verdict = "pass" if self.passes else "fail"
        if None in decisions and False not in decisions:
            verdict = "undecided"
        return f"{verdict}: {forgetting}, {keeping}"

    @property
    def _lacking_of_left(self) -> str:
        if self.left is not None:
            return "needs --unseen or --public"
        return "the records were hardly known before" if "forget before" in self.scores else "needs --before"

    @property
    def _lacking_of_kept(self) -> str:
        is_given = {"--retain": {"retain", "held_out"} & self.scores.keys(), "--before": "forget before" in self.scores}
        lacking = [name for name, given in is_given.items() if not given]
        return f"needs {' and '.join(lacking)}" if lacking else "the records were hardly known before"

    @property
    def request(self) -> str | None:
        """The next step and the party that takes it; None if nothing is to be done. Never less of an update that forgot
        too little."""
        again = "unlearn again on this copy and return its delta: `mpu unlearn` as before, on the copy that you checked"
        if self.step is not None:
            return (
                f"the server multiplies the step that `mpu aggregate` printed by {self.step:g}, gives that as "
                "--step, and publishes the model that it gets for another check"
            )
        if self.is_forgotten is None and self.left is not None:
            return "check with --unseen records or with --public: without, what anybody guesses counts as left"
        if self.needs_another_round:
            return again
        if self.is_unsure:
            return "check with more --unseen records, or with --public: the interval is wide because records are few"
        if self.is_kept is False:
            return (
                "start over from copies of the model before, with more --retain records: to train on from here loses "
                "more of those that it does not see"
            )
        return None

    @property
    def step(self) -> float | None:
        """The multiple of the server's step that would probably pass; None if no other step is to be tried.

        Along one update the logarithm of what is left falls about as the square of the step, or faster
        (``python -m tests.benchmarks.outcome`` prints both). What is lost of the rest grows at least in proportion.
        """
        if self.left is None or self.is_kept is False:
            return None
        if self.is_too_far:
            return SHORTER_STEP_FACTOR
        if self.is_forgotten is not False or self.is_unsure or self.kept is None:
            return None
        if not self.max_left < self.left.estimate < 1:  # what stands out says nothing of the step
            return None
        if not self.max_left:  # which no step reaches
            return None
        # The step for which left^(step²) is max_left, in tenths.
        step = math.ceil(10 * math.sqrt(math.log(self.max_left) / math.log(self.left.estimate))) / 10
        would_be_kept = 1 - step * (1 - self.kept.estimate)
        return step if step <= MAX_STEP_FACTOR and would_be_kept >= self.min_kept else None

    @property
    def needs_another_round(self) -> bool:
        """Whether another round can make it a pass: what was not forgotten can be, what was lost does not come back."""
        return self.is_forgotten is False and not self.is_unsure


def judge(
    after: Scores,
    before: Scores,
    *,
    public: Scores | None = None,
    max_left: float,
    min_kept: float,
    same_reading_context: bool = True,
) -> Verdict:
    """The verdict on a model from scores ``after`` and ``before``, and from those of forget and unseen under a model
    that never saw them, ``public``."""
    scores = {name: _set_score(of_set) for name, of_set in after.items()}
    scores |= {f"{name} before": _set_score(of_set) for name, of_set in before.items()}
    kept, trained = (_kept(after, before, name) for name in ("held_out", "retain"))
    if kept is None:  # without held-out records, those that were trained on decide
        kept, trained = trained, None
    return Verdict(
        left=_left(after, before, public), kept=kept, kept_trained=trained, max_left=max_left, min_kept=min_kept,
        scores=scores, same_reading_context=same_reading_context,
        has_baseline="unseen" in after or public is not None, tail=_tail(after, before, public, max_left),
    )  # fmt: skip


def records_that_stand_out(after: Scores, before: Scores, public: Scores | None, max_left: float) -> list[int]:
    """The numbers of the records to forget that stand out from the baseline, and of those that are still known, which
    may be hardly known on the whole; none without a baseline. For the client alone."""
    now, then, baseline = _probabilities(after), _known(before), _known(public)
    above = records_above(now, then, baseline, max_left) or []
    return sorted({*above, *records_still_known(now, then, baseline, max_left)})


def _tail(after: Scores, before: Scores, public: Scores | None, max_left: float) -> Tail | None:
    baseline = after.get("unseen") or (public["forget"] if public else None)
    if baseline is None:
        return None
    return tail_of(
        _probabilities(after), _known(before), _known(public), max_left,
        verbatim=sum(after["forget"].verbatim), verbatim_unseen=sum(baseline.verbatim),
    )  # fmt: skip


def _probabilities(scores: Scores) -> Probabilities:
    unseen = scores.get("unseen")
    return Probabilities.of(scores["forget"].probabilities, unseen.probabilities if unseen else None)


def _known(scores: Scores | None) -> Probabilities | None:
    """The probabilities under a model that may not have been measured; None then."""
    return _probabilities(scores) if scores and "forget" in scores else None


def _left(after: Scores, before: Scores, public: Scores | None) -> Share | None:
    now, then, baseline = _probabilities(after), _known(before), _known(public)
    if then is None:
        return None

    def left(forget: np.ndarray, unseen: np.ndarray) -> float:
        drawn_baseline = baseline.drawn(forget, unseen) if baseline else None
        return share_left(now.drawn(forget, unseen), then.drawn(forget, unseen), drawn_baseline)

    return _interval(left, [after["forget"], after.get("unseen")], _rounded_up)


def _kept(after: Scores, before: Scores, name: str) -> Share | None:
    if name not in after or name not in before:
        return None
    now, then = np.asarray(after[name].probabilities), np.asarray(before[name].probabilities)

    def kept(records: np.ndarray, _: np.ndarray) -> float:
        return share_kept(now[records], then[records])

    return _interval(kept, [after[name], None], _rounded_down)


def _cut(share: float) -> float:
    return min(max(share, -WIDEST), WIDEST)


def _rounded_up(share: float) -> float:
    """To hundredths, an error of floating point aside; never −0.0, whose sign would tell more."""
    return math.ceil(100 * share - 1e-6) / 100 + 0.0


def _rounded_down(share: float) -> float:
    return -_rounded_up(-share) + 0.0


def _interval(
    statistic: Callable[[np.ndarray, np.ndarray], float],
    sets: Sequence[RecordScores | None],
    round_share: Callable[[float], float],
) -> Share | None:
    """A percentile bootstrap over the clusters of a set's records and, independently, of another's; the same each time.
    A single cluster is all that the request is about, so only the other set's are drawn. None if the statistic is
    infinite."""
    clusters = [_clusters_of(scores) for scores in sets]
    estimate = statistic(*(np.sort(np.concatenate(groups)) for groups in clusters))
    if math.isinf(estimate):
        return None
    generator = np.random.default_rng(0)
    resampled = []
    for _ in range(RESAMPLES):
        drawn = []
        for groups in clusters:
            chosen = generator.integers(len(groups), size=len(groups))
            if isinstance(groups, np.ndarray):  # records that are clusters of their own
                drawn.append(groups[chosen, 0])
            else:
                drawn.append(np.concatenate([groups[number] for number in chosen]))
        resampled.append(_cut(statistic(*drawn)))
    ends = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    low, high = (round_share(float(end)) for end in ends)
    return Share(round_share(_cut(estimate)), low, high)


def _clusters_of(scores: RecordScores | None) -> list[np.ndarray] | np.ndarray:
    """The numbers of a set's records, an array for each cluster; one that is empty without a set."""
    if scores is None:
        return [np.arange(0)]
    numbers = np.arange(len(scores.probabilities))
    if scores.clusters is None:
        return numbers[:, None]
    clusters = np.asarray(scores.clusters)
    return [numbers[clusters == cluster] for cluster in np.unique(clusters)]


def _set_score(scores: RecordScores) -> SetScore:
    count = len(scores.probabilities)
    return SetScore(
        1 << max(0, count - 1).bit_length(),
        round(fmean(scores.probabilities), 2),
        round(fmean(map(float, scores.verbatim)), 2),
    )
