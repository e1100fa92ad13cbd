"""Whether a model forgot records and kept others, in one verdict that the owner of the records can act on.

A model that never saw records gives their answers some probability all the same, so forgetting has a bar: the
probability of answers to records of the same kind that the model never saw. Keeping is judged against a model before
unlearning.
"""

from __future__ import annotations

from dataclasses import dataclass

MARGIN = 0.05  # of a mean probability
VERBATIM = 0.95  # ROUGE-L recall from which an answer counts as given word for word


@dataclass(frozen=True)
class SetScore:
    """Of one set of records: their number, the mean probability of their answers (geometric mean over tokens), and the
    share of answers that are generated word for word (None: not generated)."""

    records: int
    probability: float
    verbatim: float | None = None


@dataclass(frozen=True)
class Verdict:
    """Scores of the model on records to ``forget`` and to ``retain``, on ``unseen`` ones, and of the model ``before``
    on those to forget and to retain, as far as they were measured."""

    forget: SetScore
    retain: SetScore | None = None
    unseen: SetScore | None = None
    before_forget: SetScore | None = None
    before_retain: SetScore | None = None

    @property
    def is_forgotten(self) -> bool | None:
        """Whether the records to forget are at most as probable as unseen ones, give or take; None without those, or if
        the model did not know them before: it forgot nothing then, or its noise drowns what it knows."""
        if self.unseen is None or (self.before_forget and not self._was_known):
            return None
        return self.forget.probability <= self.unseen.probability + MARGIN

    @property
    def _was_known(self) -> bool:
        bar = self.unseen.probability if self.unseen else 0.0
        return self.before_forget is None or self.before_forget.probability > bar + MARGIN

    @property
    def is_retained(self) -> bool | None:
        """Whether the records to retain are as probable as before, give or take; None without either, or if the model
        did not know them before."""
        if self.retain is None or self.before_retain is None or self.before_retain.probability <= MARGIN:
            return None
        return self.retain.probability >= self.before_retain.probability - MARGIN

    @property
    def is_conspicuous(self) -> bool:
        """Whether records to forget are so much less probable than unseen ones that this shows what was forgotten."""
        return self.unseen is not None and self.forget.probability < self.unseen.probability - 2 * MARGIN

    @property
    def passes(self) -> bool:
        return self.is_forgotten is True and self.is_retained is True

    @property
    def sentence(self) -> str:
        """The verdict, for people."""
        needs = "needs --unseen" if self.unseen is None else "the records were not known before"
        forgetting = {True: "forgotten", False: "not forgotten", None: f"forgetting is undecided ({needs})"}
        needs = "needs --retain and --before" if not (self.retain and self.before_retain) else "it was not known before"
        keeping = {
            True: "the rest is kept",
            False: "the rest is not kept",
            None: f"keeping is undecided ({needs})",
        }
        failed = False in (self.is_forgotten, self.is_retained)
        verdict = "fail" if failed else "pass" if self.passes else "undecided"
        return f"{verdict}: {forgetting[self.is_forgotten]}, {keeping[self.is_retained]}"

    @property
    def request(self) -> str | None:
        """What to ask the server for; None if nothing."""
        if self.is_forgotten is False and self.is_retained is not False:
            return (
                "ask the server to apply more of the update (`mpu aggregate … --server-lr 2`), or unlearn on this copy "
                "as well and return that delta"
            )
        if self.is_retained is False:
            return "ask the server for a shorter step (`mpu aggregate … --server-lr 0.5`), or unlearn with a lower --lr"
        return None
