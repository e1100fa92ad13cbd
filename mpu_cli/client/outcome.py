"""What a training did: its losses before and after, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from mpu_cli.client.schedule import ExampleSet
from mpu_cli.client.trainer import Losses
from mpu_cli.models.answers import Answers
from mpu_cli.options.unlearning import Unlearning

MEASURED = 128  # records of a set whose loss is measured before and after: enough to tell what went wrong
HARDLY = 0.1  # rise of the forget loss, in nats per answer token, below which little was forgotten
UNKNOWN = 3.0  # forget loss before training above which a model hardly knew the records
RUINED = 1.0  # rise of the retain loss above which the model lost much of what it should keep


@dataclass(frozen=True)
class Measured:
    """Mean losses per answer token of one model, on records to forget and on as many to keep (None: none read)."""

    forget: float
    retain: float | None


@dataclass(frozen=True)
class UnlearningResult:
    """The result of ``unlearn``: the delta, the losses of the steps taken by this call, the norm of what was written.

    ``before`` and ``after`` are measured on the same records; None if several processes trained together.
    """

    path: Path
    steps: list[Losses]
    norm: float
    is_main_process: bool  # whether this is the process that wrote it
    spent: dict[str, float] | None = None  # of the privacy budget, if there was one
    before: Measured | None = None
    after: Measured | None = None
    rounding: float = 0.0  # ‖Δ as written − Δ‖ / ‖Δ‖
    earlier: int = 0  # trainings in the ledger before this one
    rate: float = 0.0  # the learning rate
    resumed_after: int = 0  # steps that were taken by earlier calls
    checked: str | None = None  # what the checks of the copy came to, if they found nothing

    def summary(self, name: str, algorithm: str) -> str:
        """One line: the steps of ``algorithm`` on the copy ``name``, and what they did to the losses."""
        steps = self.resumed_after + len(self.steps)
        text = f"{name}: {algorithm}, {steps} step{'s' * (steps != 1)}"
        if self.before and self.after:
            text += f"; loss per answer token on the forget set {self.before.forget:.3f} → {self.after.forget:.3f}"
            if self.before.retain is not None:
                text += f", on the retain set {self.before.retain:.3f} → {self.after.retain:.3f}"
        elif self.steps:
            first_loss, last_loss = self.steps[0].forget, self.steps[-1].forget
            text += f"; loss per answer token {first_loss:.3f} → {last_loss:.3f} (first and last batch)"
        return f"{text}; ‖Δ‖ {self.norm:.3g}"

    def warnings(self) -> list[str]:
        """What is probably wrong with the training, and what to change; empty if nothing is."""
        before, after = self.before, self.after
        if before is None or after is None:
            return []
        problems = []
        if before.forget > UNKNOWN:
            problems.append(
                f"the copy hardly knew the records before (loss per answer token {before.forget:.3f}): are these the "
                "records that it learned, in the chat template that it learned them with?"
            )
        if after.forget - before.forget < HARDLY:
            problems.append(
                f"the records were hardly forgotten (loss per answer token {before.forget:.3f} → {after.forget:.3f}); "
                f"raise --lr (it was {self.rate:.2g}) or --epochs, or lower --batch-size for more steps; `mpu tune` "
                "finds what forgets"
            )
        if before.retain is not None and after.retain is not None and after.retain - before.retain > RUINED:
            problems.append(
                "the model lost much of what it should keep (loss per answer token on the retain set "
                f"{before.retain:.3f} → {after.retain:.3f}); lower --lr or --epochs"
            )
        return problems


def measure(model: PreTrainedModel, sets: Mapping[str, ExampleSet], options: Unlearning) -> Measured:
    """The mean losses of ``model`` on the first records of each set, MEASURED at most."""
    size = options.training.micro_batch_size or options.training.batch_size
    training = model.training
    model.eval()
    forget = sets["forget"].examples[:MEASURED]
    retain = sets["retain"].examples[: len(forget)] if "retain" in sets else None
    measured = Measured(Answers(forget, size).loss(model), Answers(retain, size).loss(model) if retain else None)
    model.train(training)
    return measured
