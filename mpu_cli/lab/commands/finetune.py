"""``mpu finetune``: target and retain models for experiments, and the repair of an unlearned one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import FORCE, Command, Preview, Report
from mpu_cli.options.declare import group, option
from mpu_cli.options.unlearning import Logging, Prompts, RecordFormat, Training
from mpu_cli.wording import counted

if TYPE_CHECKING:
    from mpu_cli.lab.finetune import Finetuned
    from mpu_cli.records.forms import Record


@dataclass(frozen=True, kw_only=True)
class Finetune(Command):
    """Train MODEL on records: a target model on all of them, a retain model on those not to be forgotten, or an
    unlearned model on records of yours that it should know again.

    Prints the path of the model.
    """

    NAME = "finetune"
    EXAMPLE = "mpu finetune public-model --data forget.jsonl --data retain.jsonl --epochs 8 --lr 1e-4 --out my-model"
    ESSENTIAL = "--data --epochs --lr --batch-size --optim --out --device"

    model: str = option(..., "The model to start from.", metavar="MODEL", argument=True)
    training: Training = group(Training)
    prompts: Prompts = group(Prompts)
    reading: RecordFormat = group(RecordFormat)
    data: list[str] = option(..., "Records to learn, as for unlearn (repeatable).", metavar="DATA")
    epochs: int = option(5, "Passes over the records.", least=1)
    out: Path = option(Path("finetuned"), "Directory for the model.", metavar="DIR")
    log: Path | None = option(None, "Append the loss of each step as JSON lines.", metavar="FILE")
    force: bool = option(False, FORCE, in_files=False)

    def _records(self, observer: Observer) -> list[Record]:
        from mpu_cli.records.read import read_records

        return [record for name in self.data for record in read_records(name, self.reading, observer=observer)]

    def preview(self, observer: Observer) -> Preview:
        from mpu_cli.measuring.cost import training_memory
        from mpu_cli.model.source import open_model
        from mpu_cli.training.rates import remarks_on_warmup

        records, batch = len(self._records(observer)), self.training.batch_size
        opened = open_model(self.model)
        weights = sum(info.elements for info in opened.checkpoint.tensors.values())
        steps = self.epochs * -(-records // batch)
        for warning in remarks_on_warmup(self.training, steps):
            observer.warn(warning)
        return Preview(
            reads=[(opened.source, opened.checkpoint.nbytes), (counted(records, "record"), None)],
            writes=[(self.out, opened.checkpoint.nbytes)],
            folders=[self.out],
            memory=training_memory(weights, self.training.optim),
            notes=[
                f"{counted(self.epochs, 'epoch')} of {counted(batch, 'record')} a step: about "
                f"{counted(steps, 'step')}; activations need memory on top"
            ],
        )

    def run(self, observer: Observer = SILENT) -> tuple[int, Finetuned]:
        """The number of records that were learned, and the result."""
        from mpu_cli.lab.finetune import finetune
        from mpu_cli.model.source import open_model

        records = self._records(observer)
        return len(records), finetune(
            open_model(self.model), records, self.training, self.prompts, epochs=self.epochs, out=self.out,
            force=self.force, logging=Logging(log=self.log), observer=observer,
        )  # fmt: skip

    def report(self, finetuned: tuple[int, Finetuned], observer: Observer) -> Report:
        from mpu_cli.files.reader import LOST_TO_ROUNDING

        records, result = finetuned
        losses, lost = result.losses, result.lost_to_rounding
        observer.note(
            f"{counted(len(losses), 'step')}; loss per answer token {losses[0]:.3f} → {losses[-1]:.3f} (first and last "
            "batch)"
        )
        if lost > LOST_TO_ROUNDING:
            observer.warn(
                f"storage in the model's own dtype rounds away {lost:.0%} of the change; a higher --lr avoids that"
            )
        return Report([self.out], {"model": self.out, "lost_to_rounding": lost, "records": records, "losses": losses})
