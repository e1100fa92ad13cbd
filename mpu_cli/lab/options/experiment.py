"""Both parties on one machine: the options of ``mpu run`` and of a sweep's cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpu_cli.options.declare import Fold, Options, group, option
from mpu_cli.options.publishing import Disguise, StepOptions, Stored
from mpu_cli.options.unlearning import Unlearning

PUBLISH = Fold("publish", "Other options of `mpu publish`.")
AGGREGATE = Fold("aggregate", "Options of `mpu aggregate`.")
UNLEARN = Fold("unlearn", "Other options of `mpu unlearn`, such as lora_rank=8,optim=sgd.", explained_by="unlearn")
USUAL = (
    "algo",
    "epochs",
    "forget",
    "retain",
    "lr",
    "batch_size",
    "device",
)  # options of `mpu unlearn` that stand apart

Mode = Literal["mpu", "clean", "clean-rounds", "noised"]


@dataclass(frozen=True, kw_only=True)
class Experiment(Options):
    """An unlearning request from the first round to the last."""

    base: str = option(..., "The server's model: file, directory or Hub id.", metavar="BASE", argument=True)
    mode: Mode = option(
        "mpu",
        "mpu: the protocol; clean: unlearning on the model itself, uninterrupted, for as many epochs as all rounds "
        "have; clean-rounds: the same in rounds, each with a new optimiser; noised: one copy with permanent noise.",
    )
    rounds: int | None = option(
        None,
        "Number of rounds, at most (default: 3 where training stops when it is done, else the paper's for the "
        "algorithm).",
        least=1,
    )
    launch: str | None = option(
        None,
        "Start each training with this command, on several processes: 'accelerate launch --num_processes 4 -m' or "
        "'torchrun --nproc-per-node=4 -m --'.",
        metavar="COMMAND",
        affects_result=False,
        in_files=False,
    )
    keep: bool = option(
        False,
        "Keep copies, deltas and the models between rounds; a run until it is a pass always does.",
        affects_result=False,
    )
    loss_reference: Literal["original", "round"] = option(
        "original",
        "Reference model of npo, dpo, undial and kl, for a number of epochs: the one before unlearning, or each "
        "round's own copy. A run until it is a pass has the latter.",
    )
    public: str | None = option(None, "Public model that BASE was fine-tuned from.", metavar="MODEL")
    secret_seed: int | None = option(
        None, "Seed of the server's secrets, for repeatable experiments only.", least=0, below=2**64
    )
    disguise: Disguise = group(Disguise, fold=PUBLISH, apart=("copies", "kappa", "permanent_noise"))
    stored: Stored = group(Stored, fold=PUBLISH)
    step_options: StepOptions = group(StepOptions, fold=AGGREGATE)
    unlearning: Unlearning = group(Unlearning, fold=UNLEARN, apart=USUAL)

    @property
    def stops_when_done(self) -> bool:
        """Whether each round trains until the records are forgotten, in place of a number of epochs."""
        fixed = self.unlearning.epochs is not None or self.unlearning.privacy.dp_epsilon is not None
        return self.mode == "mpu" and not self.launch and not fixed
