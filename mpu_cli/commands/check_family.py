"""``mpu check-family``: whether the symmetries that mpu assumes hold for a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpu_cli.errors import MpuError
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import Command, Report
from mpu_cli.options.declare import option
from mpu_cli.wording import counted, few

if TYPE_CHECKING:
    from mpu_cli.protocol.verify import FamilyCheck


@dataclass(frozen=True, kw_only=True)
class CheckFamily(Command):
    """Apply each symmetry of the model's family to its weights, alone and with the others, and compare logits.

    For whoever adds a family, or publishes a model for the first time. Also takes random changes of copies back, as
    aggregate does. Checks the first layers, one of each kind and two at least, which it holds in memory in float64.
    Exits with status 1 if a symmetry changes what the model computes. Prints a verdict.
    """

    NAME = "check-family"
    EXAMPLE = "mpu check-family my-model"

    model: str = option(..., "A model directory, .safetensors file or Hub id.", metavar="MODEL", argument=True)

    def run(self, observer: Observer = SILENT) -> tuple[str, FamilyCheck]:
        """The model's type, and the check of its symmetries."""
        from mpu_cli.model.source import open_model
        from mpu_cli.protocol.verify import check_family

        opened = open_model(self.model)
        return str(opened.config["model_type"]), check_family(opened, observer)

    def report(self, checked: tuple[str, FamilyCheck], observer: Observer) -> Report:
        model_type, result = checked
        rows, documents = [], []
        for check in result.checks:
            # By dtype: float64, in which only a wrong symmetry differs, and float32.
            differences = {str(dtype).removeprefix("torch."): value for dtype, value in check.differences.items()}
            numbers = [f"{differences[name]:.1e}" for name in ("float64", "float32")]
            rows.append([check.set_name, check.symmetry, *numbers, "" if check.ok else "!"])
            documents.append({"set": check.set_name, "symmetry": check.symmetry, "ok": check.ok, **differences})
        observer.table("Largest difference of logits, relative", ["symmetries", "", "float64", "float32", ""], rows)
        back = max(result.returned.values(), default=0.0)
        observer.note(f"{counted(result.layers, 'layer')} checked; random changes come back within {back:.0e}")
        if result.unmoved:
            observer.note(f"no symmetry moves {few(result.unmoved)}")
        verdict = f"{model_type}: {'every symmetry holds' if result.ok else 'NOT what its table says'}"
        document = {
            "model_type": model_type,
            "ok": result.ok,
            "checks": documents,
            "unmoved": result.unmoved,
            "layers": result.layers,
            "returned": result.returned,
        }
        wrong = MpuError(f"{self.model}: symmetries change what this model computes", "correct the family's table")
        return Report([verdict], document, failure=None if result.ok else wrong)
