"""How a server publishes: noise, coordinates, storage."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

from mpu_cli.errors import UsageError
from mpu_cli.options.declare import group, option

NoiseKind = Literal["extrapolate", "zero-sum"]
Symmetries = Literal["signed", "paper", "all", "none"]
StoredDtype = Literal["float64", "float32", "float16", "bfloat16"]
KAPPA = 0.01  # the paper's


@dataclass(frozen=True, kw_only=True)
class Copies:
    """How many copies there are and how much of which noise each gets."""

    PANEL: ClassVar[str] = "Noise and symmetries"

    copies: int | None = option(
        None, "Number of copies, m ≥ 2 (default: 3, or as many as --nodes or --alphas name).", metavar="M"
    )
    noise: NoiseKind | None = option(
        None,
        "extrapolate: multiples of one draw, of which all orders below m cancel (default). zero-sum: the paper's, of "
        "which the first order cancels.",
    )
    nodes: str | None = option(
        None,
        "extrapolate: the multiple for each copy, such as 1,-1,1.5 (default: 1, -1, 1.5, -1.5, …).",
        metavar="C1,C2,…",
    )
    alphas: str | None = option(
        None,
        "zero-sum: the factor for each copy, such as 1,2, or random: drawn secretly between 1 and 2 (default: evenly "
        "from 1 to 2).",
        metavar="A,B,…",
    )


@dataclass(frozen=True, kw_only=True)
class SharedNoise:
    """Noise that is the same in every copy."""

    PANEL: ClassVar[str] = "Noise and symmetries"

    shared_noise: float = option(
        0.0,
        "κ_s, scale of noise that is the same in every copy: no combination of copies removes it, and the update "
        "is affected to first order.",
        metavar="KAPPA",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class Disguise(SharedNoise, Copies):
    """What every copy of a publication is hidden in."""

    kappa: float = option(KAPPA, "Noise scale: σ of a block = κ · RMS of its task vector.", least=0)
    symmetries: Symmetries = option(
        "signed",
        "Function-preserving changes of coordinates that hide the weights. signed: permutations and signs, which plain "
        "AdamW follows and which round nothing; paper: as in the paper; all: rotations wherever the model allows them.",
    )


@dataclass(frozen=True, kw_only=True)
class Stored:
    """In which dtype copies and models are written."""

    dtype: StoredDtype | None = option(None, "Store weights in this dtype (default: each tensor's own).")


@dataclass(frozen=True, kw_only=True)
class ServerRate:
    """How much of the aggregated update becomes the next model."""

    server_lr: float = option(1.0, "η: how much of the update to apply.")


@dataclass(frozen=True, kw_only=True)
class Aggregating(ServerRate, Stored):
    """What ``mpu aggregate`` takes besides the files."""

    max_norm: float | None = option(
        None, "Refuse the round if the norm of a delta, or of the update, is above this.", metavar="NORM", above=0
    )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Noise calibrated to (ε, δ) differential privacy of the weights, in place of κ; off unless ε is given."""

    PANEL: ClassVar[str] = "Noise for differential privacy"

    epsilon: float | None = option(None, "ε to calibrate the noise to, in place of --kappa.", above=0)
    delta: float | None = option(None, "δ for --epsilon.", above=0, below=1)
    sensitivity: float | None = option(
        None, "L2 distance within which models must be indistinguishable, for --epsilon.", above=0
    )
    adversary: Literal["one-copy", "all-copies"] = option(
        "all-copies", "Adversary to protect against: a client that sees one copy, or one that sees all."
    )
    bound: Literal["analytic", "classical"] = option(
        "analytic", "analytic: exact; classical: the textbook bound, for ε ≤ 1."
    )
    budget_rounds: int = option(1, "Number of rounds that ε and δ cover.", metavar="R", least=1)


@dataclass(frozen=True, kw_only=True)
class Publishing:
    """What ``mpu publish`` takes besides the models and the files it writes."""

    disguise: Disguise = group(Disguise)
    calibration: Calibration = group(Calibration)
    stored: Stored = group(Stored)

    def check_scale(self, given: Collection[str]) -> None:
        """Raise UsageError if noise is scaled in two ways; ``given`` are the options that were set, by name."""
        if self.calibration.epsilon is not None and {"kappa", "shared_noise"} & set(given):
            raise UsageError(
                "--epsilon sets the same noise in every block; --kappa and --shared-noise would scale it to the "
                "weights and leak them",
                "leave out --kappa and --shared-noise",
            )
