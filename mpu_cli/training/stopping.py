"""Training until the records are forgotten and the others kept, in place of a number of epochs.

Every few steps the model is scored on records to forget, on retain records that were left out of the training, and on
records that it never saw. Nothing is generated: the score of a record is the geometric mean of its answer tokens'
probabilities. On a copy with permanent noise the scores are those of the copy. The server's model, to which the change
is applied, keeps more and forgets less, so the level of the ``hinge`` loss is lower there (``level_at``). On a copy
without, the training may have noise of its own (``training_noise``); the scores are of what it changed, without it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mpu_cli.model.network import Answers
from mpu_cli.observer import Observer
from mpu_cli.options.unlearning import Goal, Stopping
from mpu_cli.records.encode import Example
from mpu_cli.records.forms import digest_of_record
from mpu_cli.records.knowledge import error_of_share_left, share_kept, share_left
from mpu_cli.training.data import Dataset
from mpu_cli.training.ledger import Course

# Noise that a client puts on the weights while it trains them, and that is not in its delta (``--training-noise``).
#
# Gradient steps that make an answer improbable also damage what is near it. A change that works with noise on all
# weights does not depend on their exact values: without the noise it forgets less than it seemed to, and keeps nearly
# all. A copy with permanent noise brings that along. On one without, whose scores are those of the server's model, the
# client may add its own, and scores what the change does without it.


class TrainingNoise:
    """Normal noise on matrices ``before``, the weights by their names, of ``share`` of each one's root mean square.

    ``seed`` and the name of a matrix fix its draw, so that it need not be stored; copies in different coordinates
    get unrelated noise.
    """

    def __init__(self, before: Mapping[str, torch.Tensor], seed: int, share: float):
        self._before, self._seed, self.share = before, seed, share

    def start(self, name: str) -> torch.Tensor:
        """The weights of this name from which the training starts, in the dtype of ``before``."""
        before = self._before[name]
        if before.dim() < 2:
            return before
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=7).digest()
        normal = torch.randn(before.shape, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")))
        scale = self.share * float(before.double().square().mean().sqrt())
        return (before + scale * normal.to(before.device)).to(before.dtype)


LEAST_HELD_OUT = 16
SCORED_RECORDS = 128  # records of a set at most: the standard error of a mean probability is then below 0.05
FAITHFUL_NOISE = 0.01  # permanent noise, as a share of the weights, up to which a copy's scores are the model's
HALVINGS = 3  # of the upper half of the change, in which the share that suffices is sought
LARGEST_SCALE = 1.5  # of a change that was found with noise, which forgets less without it

# What permanent noise costs a copy shows what becomes of a change without it. The client cannot take the noise off, but
# it can put as much on again and see by how many nats, on average, that makes the answers to forget less probable.
# Where that is next to nothing (0.003 on a model of 5 M), 0.85 of the fall of their log-probability came over to the
# server's model, and the change is returned in part; where it is much (SmolLM2 with noise of 8 %), 0.2 to 0.4 of it
# did, and 1.1 times the change passes in seven of eight runs, more than of any other multiple (docs/algorithms.md).
QUIET, LOUD = 0.005, 0.05  # nats
LOUD_SCALE = 1.1
QUIET_SHARE = 0.2  # of what may be left, as much as a quiet copy may have: the server's model has about twice that
EVERY = 10  # steps between looks, each of which takes as long as one to three steps
MIN_KEPT_RISE = 0.01  # of what is kept, in PLATEAU_LOOKS looks, below which it is said not to rise any more
PLATEAU_LOOKS = {True: 5, False: 2}  # by whether the scores are the server's model's, which may still reach the goal
# Of what `check` lets be left, and of twice that for the end of the interval, which more would endanger.
TARGET_SHARE = 0.8
LEVEL_MARGIN = 1.0  # nats above the level, on average over records, from which the loss hardly pulls any more
STEPS, PASSES = 180, 20  # where no limit is given: so many steps, or passes over the records to forget if they are more

# A record that has reached the level goes on falling for some steps, by about one nat where the noise is small.
UNKNOWN_LEVEL, LOWEST_LEVEL, HIGHEST_LEVEL = -3.0, -9.0, -0.5
# Times the noise under which it is trained, as a share of the weights: by which multiple of itself the level is lower
# there. 35 nats times the noise where a stranger guesses nothing, and less where there is less to forget.
NOISE_MARGIN = 35.0 / 3.0


@dataclass(frozen=True)
class Until:
    """Until when to train. ``course``: what the first copy of a round settled, which all others follow, or None."""

    goal: Goal
    stopping: Stopping
    course: Course | None = None

    def facts(self) -> dict[str, object]:
        """What decides the training, for tags and digests; not what is read from files."""
        goal = self.goal
        return {**asdict(self.stopping), "goal": [goal.max_left, goal.min_kept, goal.held_out]}

    def limit(self, records: int, batch_size: int) -> int:
        """The number of steps at most, for so many ``records`` to forget."""
        if self.course:
            return self.course.steps
        return self.stopping.max_steps or max(STEPS, PASSES * -(-records // batch_size))


@dataclass(frozen=True)
class Look:
    """Scores at a step. ``left`` and ``kept`` are shares of what the copy knew, ``kept`` None without held-out records;
    ``left_high``: two standard errors above ``left``; ``above``: by how much records exceed the level, in nats, on
    average."""

    step: int
    left: float
    left_high: float
    kept: float | None
    above: float

    def __str__(self) -> str:
        left = "it knew too little to say what is left"
        if math.isfinite(self.left):
            left = f"{max(0.0, self.left):.0%} left"
        return left if self.kept is None else f"{left}, {self.kept:.0%} kept"


def hold_out(data: Dataset, share: float) -> Dataset:
    """``data`` with ``share`` of its retain records held out of training, LEAST_HELD_OUT at least and SCORED_RECORDS at
    most.

    They are chosen by their digests, so that they are the same for every copy. Of fewer than twice LEAST_HELD_OUT
    records, half is held out; with a share of 0, none.
    """
    if not share:
        return data
    count = min(max(LEAST_HELD_OUT, round(share * len(data.retain))), SCORED_RECORDS, len(data.retain) // 2)
    chosen = {id(record) for record in sorted(data.retain, key=digest_of_record)[:count]}
    return replace(
        data,
        retain=[record for record in data.retain if id(record) not in chosen],
        held_out=[record for record in data.retain if id(record) in chosen],
    )


def pulling_level(level: float, loss: float) -> float:
    """``level`` or, if answers of this ``loss`` per token are less probable than that already, a whole number of nats
    one or two below them: where nothing pulls, Adam makes an update of rounding errors, a different one on each copy.
    """
    if -loss > level:
        return level
    return math.floor(-loss) - 1.0


class Scorer:
    """Scores a model on records to forget, held-out and unseen ones, relative to what it knew ``before``.

    ``public``: the probabilities of the records to forget under a model that never saw them, record by record.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sets: Mapping[str, Sequence[Example]],
        at_once: int,
        public: Sequence[float] | None,
    ):
        names = [name for name in ("forget", "held_out", "unseen") if name in sets]
        chosen = {name: _spread(len(sets[name])) for name in names}
        self._answers = {name: Answers([sets[name][number] for number in chosen[name]], at_once) for name in names}
        self._public = None if public is None else [public[number] for number in chosen["forget"]]
        self.before = self._probabilities(model)
        self.level = math.nan  # set once the level is settled

    def level_at(self, noise: float) -> float:
        """The level of the hinge loss, in nats per token, which pulls at what the copy knew.

        It is how probable answers are that a model does not know: those of the same records under the public model,
        else of unseen ones. ``noise``: permanent, as a share of the weights. Of what the answers fall under noise, a
        part comes over to the server's model, so they have to fall so many times as far there.
        """
        level = UNKNOWN_LEVEL
        unknown = self._public or self.before.get("unseen")
        if unknown:
            level = max(level, math.log(max(fmean(unknown), 1e-9)))
        level *= 1 + NOISE_MARGIN * noise
        level = round(min(max(level, LOWEST_LEVEL), HIGHEST_LEVEL), 1)  # in tenths
        known = fmean(math.log(max(p, 1e-30)) for p in self.before["forget"])
        return pulling_level(level, -known)

    def cost_of_noise(self, model: PreTrainedModel, share: float, seed: int) -> float:
        """By how many nats a token noise of ``share``, as a copy has, makes the answers to forget less probable; QUIET
        where the copy's own weights are not trained."""
        before = _copy_weights(model, torch.device("cpu"))
        if any("lora_" in name for name in before):  # factors are not weights of the copy
            return QUIET
        _set_weights(model, before, TrainingNoise(before, seed, share).start)
        noisy = self._probabilities(model)["forget"]
        _set_weights(model, before, before.__getitem__)
        falls = []
        for before_noise, with_noise in zip(self.before["forget"], noisy, strict=True):
            falls.append(math.log(max(before_noise, 1e-30) / max(with_noise, 1e-30)))
        return fmean(falls)

    def look(self, model: PreTrainedModel, step: int) -> Look:
        now = self._probabilities(model)
        kept = share_kept(now["held_out"], self.before["held_out"]) if "held_out" in now else None
        columns = now["forget"], self.before["forget"], now.get("unseen"), self.before.get("unseen"), self._public
        left, error = share_left(*columns), error_of_share_left(*columns)
        above = fmean(max(0.0, math.log(max(p, 1e-30)) - self.level) for p in now["forget"])
        return Look(step, left, left + 2 * error, kept, above)

    def _probabilities(self, model: PreTrainedModel) -> dict[str, list[float]]:
        training = model.training
        model.eval()
        values = {name: [math.exp(-loss) for loss in answers.losses(model)] for name, answers in self._answers.items()}
        model.train(training)
        return values


def _spread(count: int) -> list[int]:
    """SCORED_RECORDS numbers below ``count`` at equal distances; all of them if there are fewer."""
    chosen = min(count, SCORED_RECORDS)
    return [number * count // chosen for number in range(chosen)]


class Watching(TrainerCallback):
    """Looks at the model every few steps, ends the training once the goal is reached, and keeps the best weights.

    A training that follows the course of another copy is looked at once, at its end. ``noise``: of the copy, permanent;
    where there is next to none, the copy ``is_faithful``: its scores are those of the server's model, and the weights
    may get noise of the training's own from ``seed``, which is taken off them for each look. ``level``: None for what
    the scores and the noise call for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scorer: Scorer,
        until: Until,
        noise: float,
        *,
        level: float | None,
        seed: int,
        observer: Observer,
    ):
        self._scorer, self._goal, self._course, self._observer = scorer, until.goal, until.course, observer
        self.is_faithful = noise <= FAITHFUL_NOISE
        cost = 0.0 if self.is_faithful else scorer.cost_of_noise(model, noise, seed)
        self._is_quiet = not self.is_faithful and cost < QUIET
        self._is_loud = not self.is_faithful and cost >= LOUD
        self.looks: list[Look] = []
        self._place = _place_for_copies(model)
        # Without the first weights, no other share of the change can be returned than all of it. Kept here, and not
        # when the training begins: one that resumes begins with the weights of a checkpoint.
        is_scaled = self.is_faithful or self._is_quiet or self._is_loud or (until.course and until.course.scale != 1)
        self._initial = _copy_weights(model, self._place) if is_scaled else {}
        training_noise = until.stopping.training_noise  # a share of the weights
        self._noise = TrainingNoise(self._initial, seed, training_noise if self.is_faithful else 0.0)
        self._best: tuple[Look, float, dict[str, torch.Tensor]] | None = None  # with the share of the change
        if training_noise and not self.is_faithful:
            observer.warn("the copy has permanent noise, so --training-noise adds none")
        if self._noise.share:
            _set_weights(model, self._initial, self._noise.start)
        if self._course:
            self.level = self._course.level
        elif level is not None:
            self.level = level
        else:
            self.level = scorer.level_at(max(noise, self._noise.share))
        scorer.level = self.level

    def on_step_end(self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **values: Any) -> None:
        last = state.global_step >= state.max_steps
        if self._course or not (last or state.global_step % EVERY == 0):
            return
        model = values["model"]
        noisy = _copy_weights(model, self._place) if self._noise.share else {}
        self._take_noise_off(model, noisy)
        weights = _copy_weights(model, self._place)
        look, scale = self._scorer.look(model, state.global_step), 1.0
        if self.is_faithful:
            look, scale = self._scaled_back(model, weights, look)
        self.looks.append(look)
        self._observer.advance(0, str(look))
        if self._best is None or self._rank(look) >= self._rank(self._best[0]):
            self._best = look, scale, weights
        if self._is_done():
            control.should_training_stop = True
        _set_weights(model, weights, (noisy or weights).__getitem__)  # as they were before the look

    def finish(self, model: PreTrainedModel, steps: int) -> tuple[Look, Course]:
        """Put the weights of the best look back into ``model``, or as much of the change as the round's first copy
        returned; the scores then, and the course of the training.

        More than the change is returned if it was found with noise that costs much, or with the training's own and does
        not forget enough without it.
        """
        if self._course or self._best is None:
            if self._noise.share:
                self._take_noise_off(model, _copy_weights(model, self._place))
            scale = self._course.scale if self._course else 1.0
            self._set_share(model, _copy_weights(model, self._place), scale)
            look = self._scorer.look(model, steps)
            return look, Course(look.step, self.level, scale)
        look, scale, weights = self._best
        if self._is_quiet:
            look, scale = self._scaled_back(model, weights, look)
        elif self._is_loud:
            scale = LOUD_SCALE
            self._set_share(model, weights, scale)
            look = self._scorer.look(model, look.step)
        if self._noise.share and not self._is_enough(look):
            self._set_share(model, weights, LARGEST_SCALE)
            more = self._scorer.look(model, look.step)
            if self._is_forgotten(more):
                look, scale = self._scaled_back(model, weights, more, 1.0, LARGEST_SCALE)
        self._set_share(model, weights, scale)
        return look, Course(look.step, self.level, scale)

    def _scaled_back(
        self,
        model: torch.nn.Module,
        weights: Mapping[str, torch.Tensor],
        look: Look,
        low: float = 0.5,
        high: float = 1.0,
    ) -> tuple[Look, float]:
        """The smallest share between ``low`` and ``high`` of the change to ``weights`` that is enough, and the look at
        it; ``look`` is the one at ``high``, which stays where nothing is forgotten there.

        Where the copy's scores are those of the server's model, no more is returned than it takes (``_is_enough``), and
        hardly more where noise costs little. A share of a change that went further keeps more than a change that
        stopped there, and records that are less known than a stranger's show what was forgotten.
        """
        if not self._is_forgotten(look):
            return look, high
        suffices = self._is_enough if self.is_faithful else self._is_well_forgotten
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            self._set_share(model, weights, middle)
            tried = self._scorer.look(model, look.step)
            if suffices(tried):
                look, high = tried, middle
            else:
                low = middle
        return look, high

    def _take_noise_off(self, model: torch.nn.Module, noisy: Mapping[str, torch.Tensor]) -> None:
        """Give ``model`` the weights before the training plus what made ``noisy`` of them with the noise."""
        _set_weights(model, noisy, lambda name: self._initial[name] + (noisy[name] - self._noise.start(name)))

    def _set_share(self, model: torch.nn.Module, weights: Mapping[str, torch.Tensor], scale: float) -> None:
        """Give ``model`` the first weights plus ``scale`` times the change to ``weights``; ``weights`` as they are if
        the first ones were not kept."""
        before = self._initial or weights
        _set_weights(model, weights, lambda name: torch.lerp(before[name], weights[name], scale))

    def _rank(self, look: Look) -> tuple[bool, float]:
        """Higher is better: first what is forgotten, and then what is kept."""
        kept = 1.0 if look.kept is None else min(1.0, look.kept)
        if self._is_enough(look):
            return True, kept
        return False, kept - max(0.0, look.left)

    def _is_forgotten(self, look: Look) -> bool:
        """Whether at most half of what may be left is left, on too many records for that to be chance; on a noisy copy,
        also whether the loss hardly pulls any more."""
        little_left = look.left <= self._goal.max_left / 2 and look.left_high <= self._goal.max_left
        return little_left and (self.is_faithful or look.above <= LEVEL_MARGIN)

    def _is_well_forgotten(self, look: Look) -> bool:
        """Whether so little is left on a quiet copy that the server's model has forgotten, too."""
        limit = QUIET_SHARE * self._goal.max_left
        return look.left <= limit and look.left_high <= 2 * limit

    def _is_enough(self, look: Look) -> bool:
        """Whether no more of the change needs to be returned: it is forgotten, or what is left is further below its
        limit than what is kept is above its own, as shares of what the limits allow."""
        if self._is_forgotten(look):
            return True
        if look.kept is None or not self.is_faithful:
            return False
        goal = self._goal
        left_margin = goal.max_left - max(0.0, look.left)
        kept_margin = look.kept - goal.min_kept
        near = look.left <= TARGET_SHARE * goal.max_left and look.left_high <= 2 * TARGET_SHARE * goal.max_left
        # left_margin / max_left >= kept_margin / (1 - min_kept), multiplied out, as either denominator may be 0
        return near and left_margin * (1 - goal.min_kept) >= kept_margin * goal.max_left

    def _is_done(self) -> bool:
        """Whether the last look is halfway within the goal, or what is kept no longer rises.

        On a noisy copy, what is kept may never reach the goal, although it does on the server's model.
        """
        look = self.looks[-1]
        if not self._is_enough(look):
            return False
        if look.kept is None or look.kept >= (1 + self._goal.min_kept) / 2:
            return True
        plateau = PLATEAU_LOOKS[self.is_faithful]
        earlier = [each.kept for each in self.looks[-1 - plateau : -1] if each.kept is not None]
        return len(earlier) == plateau and max(*earlier, look.kept) - min(*earlier, look.kept) <= MIN_KEPT_RISE


COPIES = 6  # of the trained weights: those before, the best, those at a look, and what computing them takes


def _place_for_copies(model: torch.nn.Module) -> torch.device:
    """Where to keep copies of the trained weights: on their GPU, if it has room for COPIES of them, else on the CPU."""
    trained = [p for p in model.parameters() if p.requires_grad]
    device = trained[0].device
    if device.type != "cuda" or torch.cuda.mem_get_info(device)[0] < COPIES * sum(p.nbytes for p in trained):
        return torch.device("cpu")
    return device


def _copy_weights(model: torch.nn.Module, place: torch.device) -> dict[str, torch.Tensor]:
    """A copy of the weights that are trained, by name, on ``place``."""
    return {name: p.detach().to(place, copy=True) for name, p in model.named_parameters() if p.requires_grad}


def _set_weights(model: torch.nn.Module, names: Collection[str], weights_of: Callable[[str], torch.Tensor]) -> None:
    """Give ``model`` the weights of these names, one at a time."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.copy_(weights_of(name))
