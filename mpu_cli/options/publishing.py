"""The options for publishing: noise, coordinates, storage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mpu_cli.errors import UsageError
from mpu_cli.options.command import ALLOW
from mpu_cli.options.declare import Fold, Options, group, option
from mpu_cli.options.names import SYMMETRIES

DP = Fold("dp", "Noise calibrated to (ε, δ) differential privacy of the weights, in place of --kappa.")

StoredDtype = Literal["float64", "float32", "float16", "bfloat16"]
AUTO: Literal["auto"] = "auto"  # of --step
RESTORE: Literal["restore"] = "restore"  # of --step
KAPPA = 0.01  # the paper's
# What `publish` chooses where the public model is named and no scale is: docs/protection.md shows what it hides and
# costs. Both are in units of what fine-tuning changed (the RMS of a block's task vector).
HIDING_KAPPA, HIDING_PERMANENT = 1.0, 10.0
MOST_OF_WEIGHTS = 0.1  # of the RMS of a block's weights: with larger noise little comes over from a copy to the model
HIDING_WATERMARK = 0.1  # of the noise: changes its size by 0.5 %, and is found after all that was tried


@dataclass(frozen=True, kw_only=True)
class Copies(Options):
    """The number of copies, and the kinds and sizes of their noise."""

    PANEL = "Noise and symmetries"

    copies: int | None = option(
        None,
        "Number of copies, m (default: 3, or as many as --noise has factors for; 1 where --public chooses the noise, "
        "and --noise does not name its kind). With 1, nothing cancels: --permanent-noise alone.",
        metavar="M",
    )
    noise: str | None = option(
        None,
        "extrapolate: multiples of one draw, of which all orders below m cancel (default). zero-sum: the paper's, of "
        "which the first order cancels. With the factor of each copy after a colon: extrapolate:1,-1,1.5 (the default "
        "goes on with -1.5, 2, …), and zero-sum:1,2 the paper's alphas (default: evenly from 1 to 2).",
        metavar="KIND",
    )

    @property
    def count(self) -> int | None:
        """The number of copies that is asked for; None for the usual number."""
        factors = (self.noise or "").partition(":")[2]
        if self.copies is not None or not factors:
            return self.copies
        return factors.count(",") + 1


@dataclass(frozen=True, kw_only=True)
class Disguise(Copies):
    """The noise and the coordinates that hide every copy of a publication."""

    permanent_noise: float | None = option(
        None,
        "Scale of noise that is the same in every copy, in task vectors: no combination of copies removes it, and the "
        "update is affected to first order (default: 0, or what hides the task vector; see --kappa).",
        metavar="ETA",
        least=0,
    )
    watermark: float | None = option(
        None,
        "Size of the watermark by which `mpu trace` finds the publication that a model came from, as a share of a "
        f"copy's noise; 0 for none (default: {HIDING_WATERMARK:g} where --public chooses the noise, else 0).",
        metavar="SHARE",
        least=0,
    )
    kappa: float | None = option(
        None,
        "Scale of the noise that cancels: σ of a block = κ · RMS of its task vector. --public, with neither this "
        f"nor --permanent-noise, chooses both so that they hide the task vector (default otherwise: {KAPPA:g}).",
        least=0,
    )
    symmetries: str = option(
        "signed",
        "Function-preserving changes of coordinates that hide the weights. signed: permutations and signs, which plain "
        "AdamW follows and which round nothing; paper: as in the paper; all: rotations wherever the model allows them.",
        choices=SYMMETRIES,
    )
    max_noise: float | None = option(
        None,
        "Lower the noise of a block to at most this share of the RMS of its weights; a watermark comes on top "
        f"(default: {MOST_OF_WEIGHTS:g} where --public chooses the noise).",
        metavar="SHARE",
        above=0,
    )

    @property
    def sets_scale(self) -> bool:
        """Whether the noise has a scale of its own, and not the default one."""
        return self.kappa is not None or self.permanent_noise is not None

    def with_scale(self, *, with_pretrained: bool) -> Disguise:
        """These options with numbers for ``kappa`` and ``permanent_noise``.

        If neither is set, they hide the task vector where the public model is named, in one copy unless several are
        asked for: noise that cancels hides nothing from a client that has all copies.
        """
        if with_pretrained and not self.sets_scale:
            copies = 1 if (self.copies, self.noise) == (None, None) else self.copies
            hiding = replace(self, copies=copies)
            return replace(
                hiding,
                kappa=0.0 if hiding.count == 1 else HIDING_KAPPA,
                permanent_noise=HIDING_PERMANENT,
                watermark=HIDING_WATERMARK if self.watermark is None else self.watermark,
                max_noise=self.max_noise or MOST_OF_WEIGHTS,
            )
        if self.count == 1 and not self.sets_scale:
            raise UsageError(
                "--copies 1: its noise has to be permanent, because nothing cancels it",
                "give --permanent-noise, or --public to have it chosen",
            )
        if self.count == 1 and self.kappa:
            raise UsageError(
                "--copies 1: noise that only several copies cancel would stay in the update",
                "use --kappa 0 with --permanent-noise, or more copies",
            )
        default = 0.0 if self.count == 1 else KAPPA
        return replace(
            self,
            kappa=default if self.kappa is None else self.kappa,
            permanent_noise=self.permanent_noise or 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class Stored(Options):
    """The dtype in which copies and models are written."""

    dtype: StoredDtype | None = option(None, "Store weights in this dtype (default: each tensor's own).")


@dataclass(frozen=True, kw_only=True)
class StepOptions(Options):
    """The share of the aggregated update that becomes part of the next model."""

    step: float | Literal["auto", "restore"] = option(
        RESTORE,
        "How much of the update to add. restore: as a rehearsal found; without one, 1 for one copy; for several that "
        "were each trained until they had forgotten, up to 2, so that what their changes share is as long as each was; "
        "less if the records of --probe would lose more than --max-rise. auto: as much as these allow, also more.",
        metavar="STEP",
    )
    probe: Path | None = option(
        None,
        "Records of your own that the model is to keep: the step is shortened, or if --step names it the round "
        "refused, where their loss would rise by more than --max-rise.",
        metavar="FILE",
    )
    max_rise: float = option(0.05, "By how much the loss per answer token of --probe may rise, in nats.", above=0)

    @property
    def rate(self) -> float:
        """The step, once it is a number."""
        return float(self.step)

    def check_step(self) -> None:
        """Raise UsageError for a step or a bound that depends on records, without records."""
        if self.probe is None and (self.step == AUTO or self.max_rise != StepOptions.max_rise):
            option = "--step auto" if self.step == AUTO else "--max-rise"
            raise UsageError(f"{option}: needs records of your own that the model is to keep", "add --probe FILE")


@dataclass(frozen=True, kw_only=True)
class Aggregating(StepOptions, Stored):
    """The options of ``mpu aggregate`` besides the files."""

    max_norm: float | None = option(
        None, "Refuse the round if the norm of a delta, or of the update, is above this.", metavar="NORM", above=0
    )


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(Options):
    """Noise calibrated to (ε, δ) differential privacy of the weights, in place of κ; off unless ε is given."""

    FOLD = DP
    PANEL = "Noise and symmetries"

    epsilon: float | None = option(None, "ε to calibrate the noise to, in place of --kappa.", above=0)
    dp_delta: float | None = option(None, "δ for --dp epsilon.", above=0, below=1)
    sensitivity: float | None = option(
        None, "L2 distance within which models must be indistinguishable, for --dp epsilon.", above=0
    )
    adversary: Literal["one-copy", "all-copies"] = option(
        "all-copies", "Adversary to protect against: a client that sees one copy, or one that sees all."
    )
    bound: Literal["analytic", "classical"] = option(
        "analytic", "analytic: exact; classical: the textbook bound, for ε ≤ 1."
    )
    budget_rounds: int = option(1, "Number of rounds that ε and δ cover.", metavar="R", least=1)


@dataclass(frozen=True, kw_only=True)
class Publishing(Options):
    """The options of ``mpu publish`` besides the models and the files it writes."""

    PANEL = "Noise and symmetries"

    disguise: Disguise = group(Disguise)
    calibration: CalibrationOptions = group(CalibrationOptions)
    stored: Stored = group(Stored)
    publish_again: bool = option(
        False,
        "Publish although an earlier publication of the base had permanent noise of another scale, with which this one "
        "can be averaged, or spent ε that this one adds to.",
        in_files=False,
        fold=ALLOW,
    )

    def with_scale(self, *, with_pretrained: bool) -> Publishing:
        """These options with numbers for the noise that cancels and that stays, both 0 under --dp epsilon."""
        if self.calibration.epsilon is None:
            return replace(self, disguise=self.disguise.with_scale(with_pretrained=with_pretrained))
        if self.disguise.sets_scale:
            raise UsageError(
                "--dp epsilon sets the same noise in every block; --kappa and --permanent-noise would scale it to the "
                "weights and leak them",
                "leave out --kappa and --permanent-noise",
            )
        if self.disguise.max_noise is not None:
            raise UsageError("--dp epsilon needs all of its noise", "leave out --max-noise")
        return replace(self, disguise=replace(self.disguise, kappa=0.0, permanent_noise=0.0))
