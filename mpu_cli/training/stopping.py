"""Training until the records are forgotten and the others kept, in place of a number of epochs.

Every few steps the model is scored on records to forget, on retain records that were left out of the training, and on
records that it never saw. Nothing is generated: the score of a record is the geometric mean of its answer tokens'
probabilities. The training ends a multiple of the steps after which the records are forgotten.

A copy without permanent noise answers as the server's model: its scores decide how much of the change is returned. On
one with, the change is fitted to the noise under which it was found, and forgets less on the server's model than on the
copy, however the copy is scored. So the level of the ``hinge`` loss is lower there (``level_at``). Where noise hardly
changes answers, a share of the change that is enough under further noise says how much to return (``SHARE_MARGIN``).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mpu_cli.errors import no_space
from mpu_cli.model.network import Answers
from mpu_cli.observer import Observer
from mpu_cli.options.unlearning import Goal, Stopping
from mpu_cli.records.encode import Example
from mpu_cli.records.forms import digest_of_record
from mpu_cli.records.knowledge import LEAST_KNOWN, Probabilities, error_of_share_left, share_kept, share_left, tail_of
from mpu_cli.training.data import Dataset
from mpu_cli.training.execution import give_up
from mpu_cli.training.ledger import RoundSchedule
from mpu_cli.wording import counted

Value = TypeVar("Value")


class ProbeNoise:
    """Normal noise on matrices ``before``, the weights by their names, of ``share`` of each one's root mean square.

    ``seed`` and the name of a matrix fix its draw, so that it need not be stored; copies in different coordinates
    get unrelated noise.
    """

    def __init__(self, before: Mapping[str, torch.Tensor], seed: int, share: float):
        self._before, self._seed, self.share = before, seed, share

    def noisy(self, name: str) -> torch.Tensor:
        """The weights of this name with the noise, in the dtype of ``before``."""
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
PRECISION = 0.05  # to which the share of the change that suffices is sought, relative to it

# Noise of the copy's size, once more, may take this share of what the answers have to fall off them, in nats, where the
# copy's answers are said to be the model's.
UNFELT_SHARE = 0.1
# Times the share of a change that suffices on the copy, under fresh noise if that is not felt: what is returned under
# permanent noise. The change is fitted to the copy's own noise, so it does as much there as 1.1 times it and more do to
# the server's model (docs/stopping.md).
SHARE_MARGIN = 1.15
# Times the steps after which a copy has forgotten. What was lost of others comes back, also of those that the client
# has no records of and cannot score; where the scores are not the model's, the model goes on forgetting
# (docs/stopping.md).
TRAINED_ON = 3
BEST_WEIGHTS, HISTORY = "mpu-best.safetensors", "mpu-history.json"  # in a checkpoint
EVAL_STEPS = 10  # steps between evaluations, each of which takes as long as one to three steps
MIN_KEPT_RISE = 0.01  # of what is kept, in PLATEAU_EVALUATIONS evaluations, below which it is said not to rise any more
PLATEAU_EVALUATIONS = 5
# Of what `check` lets be left, and of twice that for the end of the interval, which more would endanger.
TARGET_SHARE = 0.8
LEVEL_MARGIN = 1.0  # nats above the level, on average over records, from which the loss hardly pulls any more
USUAL_STEPS = "30 to 60"  # of a request of 20 to 40 records where permanent noise is felt (docs/stopping.md)
STEPS, PASSES = 180, 40  # where no limit is given: so many steps, or passes over the records to forget if they are more

# A record that has reached the level goes on falling for some steps, by about one nat where the noise is small.
UNKNOWN_LEVEL, LOWEST_LEVEL, HIGHEST_LEVEL = -3.0, -9.0, -0.5
# Times the noise under which it is trained, as a share of the weights: by which multiple of itself the level is lower
# there. 35 nats times the noise where the baseline is 0, and less where there is less to forget.
NOISE_MARGIN = 35.0 / 3.0


@dataclass(frozen=True)
class StoppingRule:
    """When to end a training. ``schedule``: of the first copy of a round, which all others follow."""

    goal: Goal
    stopping: Stopping
    schedule: RoundSchedule | None = None

    def facts(self) -> dict[str, object]:
        """The options that decide the training, for a digest; not the contents of files."""
        goal = self.goal
        return {**asdict(self.stopping), "goal": [goal.max_left, goal.min_kept, goal.held_out]}

    def limit(self, records: int, batch_size: int) -> int:
        """The number of steps that a training plans for so many ``records`` to forget, of which it takes fewer if it is
        done before: the same for all copies of a round, as the rate goes by it."""
        if self.schedule:
            return self.schedule.planned_steps
        return self.stopping.max_steps or max(STEPS, PASSES * -(-records // batch_size))


@dataclass(frozen=True)
class StepScores:
    """Scores at a step. ``left`` and ``kept`` are shares of what the copy knew, ``kept`` None without held-out records;
    ``left_high``: two standard errors above ``left``; ``above``: by how much records exceed the level, in nats, on
    average; ``stands_out``: whether more records are known than chance and the limit allow, or one by half."""

    step: int
    left: float
    left_high: float
    kept: float | None
    above: float
    stands_out: bool = False

    def __str__(self) -> str:
        left = "it knew too little to say what is left"
        if math.isfinite(self.left):
            left = f"{max(0.0, self.left):.0%} left{', some records known' if self.stands_out else ''}"
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

    ``public``: the probabilities of the scored records under a model that never saw them, by set;
    ``max_left``: the share that may be left; ``forget``: the probabilities of the scored records to forget under
    ``model``, where they are known.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sets: Mapping[str, Sequence[Example]],
        at_once: int,
        public: Mapping[str, Sequence[float]] | None,
        max_left: float,
        forget: Sequence[float] | None = None,
    ):
        names = [name for name in ("forget", "held_out", "unseen") if name in sets]
        self._answers = {name: Answers(spread(sets[name]), at_once) for name in names}
        self._public = None if public is None else Probabilities.of(public["forget"], public.get("unseen"))
        self._max_left = max_left
        known = {} if forget is None else {"forget": list(forget)}
        self.before = known | self._probabilities(model, [name for name in names if name not in known])
        self.level = math.nan  # set once the level is settled

    def level_at(self, noise: float) -> float:
        """The level of the hinge loss, in nats per token, which pulls at what the copy knew.

        It is how probable answers are that a model does not know: those of the same records under the public model,
        else of unseen ones. ``noise``: permanent, as a share of the weights. Of what the answers fall under noise, a
        part comes over to the server's model, so they have to fall so many times as far there; where all of it does,
        a share of a change that went too far keeps more than one that stopped at the level.
        """
        level = self._unknown * (1 + NOISE_MARGIN * noise)
        level = round(min(max(level, LOWEST_LEVEL), HIGHEST_LEVEL), 1)  # in tenths
        return pulling_level(level, -self._known)

    def aim(self, error: float) -> float:
        """The share left to aim at, in the middle of those with which `check` passes: ``max_left`` above the lowest of
        them, half of it at most. The lowest has an interval, of its standard ``error``, that ends twice ``max_left``
        below the baseline; or nothing at all is left. Record by record, that is 0."""
        unseen = self.before.get("unseen")
        if not unseen or self._public is not None:
            return self._max_left / 2
        guessed = fmean(unseen)
        known = max(fmean(self.before["forget"]) - guessed, LEAST_KNOWN)
        lowest = -min(2 * (self._max_left + error), guessed / known)
        return min(self._max_left / 2, self._max_left + lowest)

    @property
    def required_fall(self) -> float:
        """By how many nats a token the answers have to fall until they are those of a model that does not know them."""
        return max(0.0, self._known - self._unknown)

    @property
    def _known(self) -> float:
        """The mean log-probability of a token of the answers to forget, before the training."""
        return fmean(math.log(max(p, 1e-30)) for p in self.before["forget"])

    @property
    def _unknown(self) -> float:
        """The same for a model that does not know them."""
        unknown = self._public.forget if self._public else self.before.get("unseen")
        return UNKNOWN_LEVEL if unknown is None else max(UNKNOWN_LEVEL, math.log(max(fmean(unknown), 1e-9)))

    def adopt_if_unfelt(self, model: PreTrainedModel, noise: ProbeNoise) -> bool:
        """Whether ``noise`` takes next to nothing off the log-probability of the answers to forget, and of no single
        one half of what it has to fall: that one would count as forgotten by what the noise does. If so, models are
        scored under it from now on, and compared with what was known under it."""
        before = _copy_weights(model, torch.device("cpu"))
        _set_weights(model, before, noise.noisy)
        noisy = self._probabilities(model, self._answers)
        _set_weights(model, before, before.__getitem__)
        falls = []
        for before_noise, with_noise in zip(self.before["forget"], noisy["forget"], strict=True):
            falls.append(math.log(max(before_noise, 1e-30) / max(with_noise, 1e-30)))
        unfelt = fmean(falls) < UNFELT_SHARE * self.required_fall and max(falls) < self.required_fall / 2
        if unfelt:
            self.before = noisy
        return unfelt

    def score(self, model: PreTrainedModel, step: int) -> StepScores:
        now = self._probabilities(model, self._answers)
        kept = share_kept(now["held_out"], self.before["held_out"]) if "held_out" in now else None
        after = Probabilities.of(now["forget"], now.get("unseen"))
        before = Probabilities.of(self.before["forget"], self.before.get("unseen"))
        left, error = share_left(after, before, self._public), error_of_share_left(after, before, self._public)
        tail = tail_of(after, before, self._public, self._max_left)
        above = fmean(max(0.0, math.log(max(p, 1e-30)) - self.level) for p in now["forget"])
        return StepScores(step, left, left + 2 * error, kept, above, tail is not None and not tail.is_allowed)

    def _probabilities(self, model: PreTrainedModel, names: Iterable[str]) -> dict[str, list[float]]:
        training = model.training
        model.eval()
        values = {name: [math.exp(-loss) for loss in self._answers[name].losses(model)] for name in names}
        model.train(training)
        return values


def spread(values: Sequence[Value]) -> list[Value]:
    """SCORED_RECORDS of ``values`` at equal distances; all of them if there are fewer."""
    count = min(len(values), SCORED_RECORDS)
    return [values[number * len(values) // count] for number in range(count)]


class EarlyStopping(TrainerCallback):
    """Scores the model every few steps, ends the training once the goal is reached, and keeps the best weights.

    A training that follows the schedule of another copy is scored once, at its end. ``noise``: of the copy, permanent,
    as a share of the weights. Where there is next to none, the copy ``is_faithful``: its scores are those of the
    server's model. Where noise is not felt, the weights are scored with as much again, drawn from ``seed``. Either
    way only as much of the change is returned as suffices (``is_scaled``), and α is ``faithful_alpha``. ``level`` and
    ``alpha``: None and the algorithm's own, or what was asked for. Checkpoints hold what this has kept (``on_save``,
    ``resume``).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scorer: Scorer,
        stopping_rule: StoppingRule,
        noise: float,
        *,
        level: float | None,
        alpha: float,
        faithful_alpha: float | None,
        seed: int,
        observer: Observer,
    ):
        self._scorer, self._observer = scorer, observer
        self._goal, self._round_schedule = stopping_rule.goal, stopping_rule.schedule
        self.is_faithful = noise <= FAITHFUL_NOISE
        self.history: list[StepScores] = []
        self._place = _place_for_copies(model)
        # Kept here, and not when the training begins: one that resumes begins with the weights of a checkpoint.
        self._initial = _copy_weights(model, self._place)
        self._further = ProbeNoise(self._initial, seed + 1, 0.0)  # what the change has to work under
        is_lora = any("lora_" in name for name in self._initial)  # factors are not weights of the copy
        self._is_lengthened = not (self.is_faithful or is_lora)  # factors' product does not grow as they do
        if self._is_lengthened and not self._round_schedule:
            further = ProbeNoise(self._initial, seed + 1, noise)
            if scorer.adopt_if_unfelt(model, further):
                self._further = further
        self.is_scaled = self.is_faithful or self._further.share > 0  # back to what suffices
        self._best: tuple[StepScores, float, dict[str, torch.Tensor]] | None = None  # with the share of the change
        self.alpha = float(faithful_alpha if self.is_scaled and faithful_alpha is not None else alpha)
        if self._round_schedule:  # a copy may feel noise that another does not, and both have to be trained alike
            self.level, self.alpha = self._round_schedule.level, self._round_schedule.alpha
        elif level is not None:
            self.level = level
        else:
            self.level = scorer.level_at(noise)
        scorer.level = self.level

    def expectation(self, limit: int) -> str:
        """A sentence on the number of steps, of which there are at most ``limit``."""
        if self._round_schedule:
            return f"trains for the {counted(limit, 'step')} of the round's first copy"
        usual = f"; usually {USUAL_STEPS}" if self._is_lengthened and not self.is_scaled and limit >= STEPS else ""
        return f"trains until the records are forgotten, for {counted(limit, 'step')} at most{usual}"

    def on_step_end(self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **values: Any) -> None:
        last = state.global_step >= state.max_steps
        if self._round_schedule or not (last or state.global_step % EVAL_STEPS == 0):
            return
        model = values["model"]
        trained = _copy_weights(model, self._place)
        scores, scale = self._scores_of_share(model, trained, 1.0, state.global_step), 1.0
        if self.is_faithful:
            scores, scale = self._scaled_back(model, trained, scores)
        self.history.append(scores)
        self._observer.advance(0, str(scores))
        if self._best is None or self._rank(scores) >= self._rank(self._best[0]):
            self._best = scores, scale, trained
        if self._is_done():
            control.should_training_stop = True
        _set_weights(model, trained, trained.__getitem__)

    def on_save(self, arguments: TrainingArguments, state: TrainerState, _: TrainerControl, **__: Any) -> None:
        """Put the scores so far, and the best weights, into the checkpoint that was just written."""
        folder = Path(arguments.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if self._best is None or not folder.is_dir():  # there was no room for it
            return
        scores, scale, weights = self._best
        document = {"history": [asdict(entry) for entry in self.history], "best": asdict(scores), "scale": scale}
        try:
            save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / BEST_WEIGHTS)
            (folder / HISTORY).write_text(json.dumps(document), encoding="utf-8")
        except (OSError, SafetensorError) as error:
            if not no_space(error):
                raise
            # Without these, a training that resumes from it would be another one.
            give_up(folder, sum(weight.nbytes for weight in weights.values()), self._observer.warn)

    def resume(self, checkpoint: Path) -> None:
        """Take up what ``on_save`` put into a checkpoint, which is sealed."""
        if not (checkpoint / HISTORY).exists():
            return
        document = json.loads((checkpoint / HISTORY).read_text(encoding="utf-8"))
        self.history = [StepScores(**entry) for entry in document["history"]]
        weights = load_file(checkpoint / BEST_WEIGHTS, device=str(self._place))
        self._best = StepScores(**document["best"]), document["scale"], weights

    def finish(self, model: PreTrainedModel, steps: int, planned_steps: int) -> tuple[StepScores, RoundSchedule]:
        """Put the weights of the best scores back into ``model``, or as much of the change as the round's first copy
        returned; the scores then, and the schedule of the training, which took so many ``steps``."""
        if self._round_schedule or self._best is None:
            weights = _copy_weights(model, self._place)
            scale = self._round_schedule.scale if self._round_schedule else 1.0
            scores = self._scores_of_share(model, weights, scale, steps)
        else:
            scores, scale, weights = self._best
        if not self._round_schedule and math.isfinite(scores.left) and not self._is_enough(scores):
            self._observer.warn(
                f"the training ends after {counted(steps, 'step')}, before the records are forgotten as far as it "
                "aims: raise --max-steps or --lr"
            )
        if self._best is not None and not self._round_schedule:
            if self._further.share:  # the level is lower there, so that half of a change may be too much
                _, least = self._scaled_back(model, weights, scores, low=0.25)
                scale = min(1.0, SHARE_MARGIN * least)
                scores = self._scores_of_share(model, weights, scale, scores.step)
            elif self._is_lengthened:
                scale = SHARE_MARGIN
                scores = self._scores_of_share(model, weights, scale, scores.step)
        self._set_share(model, weights, scale)
        return scores, RoundSchedule(scores.step, planned_steps, self.level, scale, self.alpha)

    def _scaled_back(
        self,
        model: PreTrainedModel,
        weights: Mapping[str, torch.Tensor],
        scores: StepScores,
        low: float = 0.5,
    ) -> tuple[StepScores, float]:
        """The smallest share of the change to ``weights``, from ``low`` on, that is enough, and its scores;
        ``scores`` are those of all of it, which stay where that has not forgotten.

        A share of a change that went further keeps more than a change that stopped there, and records that are less
        known than the baseline show what was forgotten.
        """
        high = 1.0
        if not self._is_forgotten(scores):
            return scores, high
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            tried = self._scores_of_share(model, weights, middle, scores.step)
            if self._is_enough(tried):
                scores, high = tried, middle
            else:
                low = middle
        return scores, high

    def _scores_of_share(
        self, model: PreTrainedModel, weights: Mapping[str, torch.Tensor], scale: float, step: int
    ) -> StepScores:
        """The scores of that share of the change to ``weights``, under the noise that it has to work under."""
        self._set_share(model, weights, scale)
        if self._further.share:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name in weights:
                        parameter.add_(self._further.noisy(name) - self._initial[name])
        return self._scorer.score(model, step)

    def _set_share(self, model: torch.nn.Module, weights: Mapping[str, torch.Tensor], scale: float) -> None:
        """Give ``model`` the first weights plus ``scale`` times the change to ``weights``."""
        if scale == 1:
            _set_weights(model, weights, weights.__getitem__)
        else:
            _set_weights(model, weights, lambda name: torch.lerp(self._initial[name], weights[name], scale))

    def _rank(self, scores: StepScores) -> tuple[bool, float]:
        """Higher is better: first what is forgotten, and then what is kept, in percent: of equals, the later keeps more
        of what is not scored."""
        kept = 1.0 if scores.kept is None else min(1.0, round(scores.kept, 2))
        if self._is_enough(scores):
            return True, kept
        return False, kept - max(0.0, scores.left)

    def _is_forgotten(self, scores: StepScores) -> bool:
        """Whether at most half of what may be left is left, on too many records for that to be chance, and none stands
        out; under further noise, whether it is in the middle of what passes (``Scorer.aim``); on a copy whose scores
        are not the model's, whether the loss hardly pulls any more."""
        aim = self._goal.max_left / 2
        if self._further.share:
            aim = self._scorer.aim((scores.left_high - scores.left) / 2)
        little_left = scores.left <= aim and scores.left_high <= self._goal.max_left
        hardly_pulls = self.is_scaled or scores.above <= LEVEL_MARGIN
        return little_left and not scores.stands_out and hardly_pulls

    def _is_enough(self, scores: StepScores) -> bool:
        """Whether no more of the change needs to be returned: it is forgotten, or what is left is further below its
        limit than what is kept is above its own, as shares of what the limits allow."""
        if self._is_forgotten(scores):
            return True
        if scores.kept is None or scores.stands_out or not self.is_faithful:
            return False
        goal = self._goal
        left_margin = goal.max_left - max(0.0, scores.left)
        kept_margin = scores.kept - goal.min_kept
        near = scores.left <= TARGET_SHARE * goal.max_left and scores.left_high <= 2 * TARGET_SHARE * goal.max_left
        # left_margin / max_left >= kept_margin / (1 - min_kept), multiplied out, as either denominator may be 0
        return near and left_margin * (1 - goal.min_kept) >= kept_margin * goal.max_left

    def _is_done(self) -> bool:
        """Whether the last evaluation is at TRAINED_ON times the steps after which it was enough; on a copy whose
        scores are the model's, whether it also is halfway within the goal, or what is kept no longer rises."""
        scores = self.history[-1]
        if not self._is_enough(scores):
            return False
        first = next(entry.step for entry in self.history if self._is_enough(entry))
        if not self.is_scaled or scores.step < TRAINED_ON * first:
            return scores.step >= TRAINED_ON * first
        if scores.kept is None or scores.kept >= (1 + self._goal.min_kept) / 2:
            return True
        earlier = [entry.kept for entry in self.history[-1 - PLATEAU_EVALUATIONS : -1] if entry.kept is not None]
        return (
            len(earlier) == PLATEAU_EVALUATIONS
            and max(*earlier, scores.kept) - min(*earlier, scores.kept) <= MIN_KEPT_RISE
        )


COPIES = 6  # of the trained weights: those before, the best, those that are scored, and what computing them takes


def _place_for_copies(model: torch.nn.Module) -> torch.device:
    """The device for copies of the trained weights: their GPU, if it has room for COPIES of them, else the CPU."""
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
