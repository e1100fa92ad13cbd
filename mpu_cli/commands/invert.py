"""``mpu invert``: a delta back in the base's coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.commands.secrets import opened_keys
from mpu_cli.files.transaction import Transaction
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import BASE_AGAIN, FORCE, KEYS, Command, Opening, Preview, Report, paths_from
from mpu_cli.options.declare import group, option

if TYPE_CHECKING:
    from mpu_cli.protocol.deltas import Delta
    from mpu_cli.protocol.keys import Keys


@dataclass(frozen=True, kw_only=True)
class Invert(Command):
    """Undo the secret coordinates of each DELTA. `mpu aggregate` does this itself; use invert to examine one delta.

    Prints the path of each inverted delta.
    """

    NAME = "invert"
    EXAMPLE = "mpu invert deltas/copy_1.safetensors --keys keys.bin"

    deltas: list[str] = option(
        ..., "Deltas, directories of them, or - for standard input.", metavar="DELTA…", argument=True
    )
    keys: Path = option(Path("keys.bin"), KEYS, metavar="FILE")
    base: str | None = option(None, BASE_AGAIN, metavar="MODEL")
    out: Path = option(Path("inverted"), "Directory for the inverted deltas.", metavar="DIR")
    opening: Opening = group(Opening)
    force: bool = option(False, FORCE, in_files=False)

    def _opened(self, observer: Observer) -> tuple[Keys, list[Delta]]:
        from mpu_cli.protocol.deltas import open_deltas

        # First: at the end of a pipe, the command that writes the keys may still be running.
        paths = paths_from(self.deltas)
        keys = opened_keys(self.keys, self.opening, observer)
        return keys, open_deltas(paths, keys)

    def preview(self, observer: Observer) -> Preview:
        from mpu_cli.protocol.copies import BUFFERS

        _, deltas = self._opened(observer)
        return Preview(
            reads=[(delta.checkpoint.path, delta.checkpoint.nbytes) for delta in deltas],
            writes=[(self._target(delta), delta.checkpoint.nbytes) for delta in deltas],
            memory=BUFFERS,
        )

    def run(self, observer: Observer = SILENT) -> list[Path]:
        """The paths of the inverted deltas."""
        import torch

        from mpu_cli.protocol.deltas import InverseMaps, invert
        from mpu_cli.protocol.keys import published_base
        from mpu_cli.protocol.watermarks import PLANTED, fingerprints, noise_in

        keys, deltas = self._opened(observer)
        model = published_base(keys, self.base)
        with Transaction(force=self.force) as transaction:
            observer.stage("invert", sum(delta.checkpoint.nbytes for delta in deltas))
            for delta in deltas:
                invert(model, delta, target=self._target(delta), transaction=transaction, observer=observer)
            watermarks = fingerprints(model, [keys], watermarks_only=True)
            for delta in deltas:
                planted = noise_in(InverseMaps([delta], model.layout), torch.ones(1), watermarks)
                if planted.z >= PLANTED:
                    observer.warn(
                        f"{delta.path}: has the watermark of the copies of {planted.publication} (z = {planted.z:.1f}),"
                        " as if such a copy had been added; `mpu aggregate` takes it out, adding this to a model does "
                        "not"
                    )
        return [self._target(delta) for delta in deltas]

    def report(self, inverted: list[Path], observer: Observer) -> Report:  # noqa: ARG002 (as all commands have it)
        return Report(inverted, {"inverted": inverted})

    def _target(self, delta: Delta) -> Path:
        return self.out / f"copy_{delta.copy}.safetensors"
