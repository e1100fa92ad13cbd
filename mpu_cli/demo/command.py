"""``mpu demo``: the whole protocol on a small model trained on the spot."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import Command, Report
from mpu_cli.options.declare import option
from mpu_cli.options.unlearning import DEVICE

if TYPE_CHECKING:
    from mpu_cli.demo.show import Demonstration


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Teach a model facts about invented people, make it forget some by the protocol, and say what it still knows.

    With the small models that it makes itself, that takes a few minutes.

    Server and client each work in their own folder and call the same functions as the commands. Prints the paths of
    the unlearned model and of a report.
    """

    NAME = "demo"
    EXAMPLE = "mpu demo trial --seed 1"

    folder: Path = option(Path("mpu-demo"), "Working directory; must not exist yet.", metavar="DIR", argument=True)
    model: str | None = option(
        None,
        "Play it on this chat model: a folder or a Hub id (default: a small one, made on the spot).",
        metavar="MODEL",
    )
    seed: int = option(0, "Random seed for the people and their facts.", metavar="N", least=0, below=2**32)
    device: str = option("auto", DEVICE, metavar="DEVICE")

    def run(self, observer: Observer = SILENT) -> Demonstration:
        from mpu_cli.demo.show import run_demo

        return run_demo(self.folder, model=self.model, seed=self.seed, device=self.device, observer=observer)

    def report(self, shown: Demonstration, observer: Observer) -> Report:
        models = shown.metrics
        rows = []
        for name in dict.fromkeys(name for metrics in models.values() for name in metrics):
            rows.append([name, *(f"{metrics[name]:.4g}" if name in metrics else "–" for metrics in models.values())])
        observer.table("What each model knows", ["", *models], rows)
        for question, answers in shown.answers.items():
            observer.note("\n".join([question, *(f"  {who + ':':<13} {text}" for who, text in answers.items())]))
        folder = self.folder
        observer.note(
            f"Take a look: {folder}/mpu/client has no keys and no base model, {folder}/mpu/server has no records."
        )
        return Report([shown.model, shown.report], asdict(shown))
