"""``mpu verify``: check a copy against the keys."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.commands.secrets import opened_keys
from mpu_cli.errors import MpuError
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import BASE_AGAIN, KEYS, Command, Opening, Report
from mpu_cli.options.declare import group, option

if TYPE_CHECKING:
    from mpu_cli.protocol.publication import Publication
    from mpu_cli.protocol.verify import Verification


@dataclass(frozen=True, kw_only=True)
class Verify(Command):
    """Undo a copy with the keys and compare it with base plus noise, in weights and in logits.

    Exits with status 1 if they differ by more than storage rounding.
    """

    NAME = "verify"
    EXAMPLE = "mpu verify copy_1 --keys keys.bin"

    copy: str = option(..., "A copy from `mpu publish`.", metavar="COPY", argument=True)
    keys: Path = option(Path("keys.bin"), KEYS, metavar="FILE")
    base: str | None = option(None, BASE_AGAIN, metavar="MODEL")
    logits: bool = option(True, "Also compare logits on random tokens (holds the model in memory, in float32).")
    opening: Opening = group(Opening)

    def run(self, observer: Observer = SILENT) -> tuple[Verification, Publication]:
        """The differences, and the publication of the keys."""
        from mpu_cli.model.source import open_model
        from mpu_cli.protocol.keys import published_base
        from mpu_cli.protocol.verify import verify

        keys = opened_keys(self.keys, self.opening, observer)
        model = published_base(keys, self.base)
        copy = open_model(self.copy, links=False)
        return verify(model, copy, keys, logits=self.logits, observer=observer), keys.publication

    def report(self, verified: tuple[Verification, Publication], observer: Observer) -> Report:
        result, publication = verified
        rows = []
        for block in result.blocks:
            mark = "" if block.ok else "!"
            numbers = [f"{block.requested:.2e}", f"{block.survived:.2e}", f"{block.difference:.1e}"]
            rows.append([block.block, *numbers, f"{block.changed:.2%}{mark}"])
        columns = ["block", "σ requested", "survived", "largest difference", "differs from the regenerated copy"]
        observer.table(f"Copy {result.copy}, undone and regenerated", columns, rows)
        text = f"{self.copy}: {'right' if result.ok else 'WRONG'}"
        if result.function is not None:
            text += f"; logits differ by {result.logits:.1e} of the largest, by {result.function:.1e} before storage "
            text += "rounding"
        text += f"; noise {publication.scheme.name}, symmetries {publication.symmetries}"
        document = {
            "copy": self.copy,
            "noise": publication.scheme.kind,
            "symmetries": publication.symmetries,
            "ok": result.ok,
            "function": result.function,
            "logits": result.logits,
            "blocks": [asdict(block) | {"ok": block.ok} for block in result.blocks],
        }
        wrong = MpuError(f"{self.copy}: does not match these keys, or the base is the wrong one")
        return Report([text], document, failure=None if result.ok else wrong)
