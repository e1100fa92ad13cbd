"""``mpu audit``: what a client that keeps its copies can recover."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.commands.secrets import opened_keys
from mpu_cli.errors import MpuError
from mpu_cli.files.manifest import read_copy_manifest
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import Command, Opening, Report, paths_from
from mpu_cli.options.declare import group, option
from mpu_cli.options.names import SYMMETRIES
from mpu_cli.wording import few

if TYPE_CHECKING:
    from mpu_cli.lab.attacks import Audit as Result
    from mpu_cli.protocol.publication import Publication

ANOTHER_MODEL = 0.3  # relative error of the weights from which BASE is probably not what was published
UNMOVED = 0.5  # share of a block's weights unchanged in a copy, above which this is reported


@dataclass(frozen=True, kw_only=True)
class Audit(Command):
    """Play a client that keeps its copies: undo the coordinates without the keys, remove the noise, compare with BASE.

    "weights" is the error up to symmetries, under which the model computes the same function; "of the change" is the
    same error relative to base − pretrained, what fine-tuning changed, and decides the verdict; "task vector" is the
    error of base − pretrained itself, in the pretrained model's coordinates. Each is that of the best estimate of a
    change in noise: as it is, scaled down, or by its singular values. Prints a verdict.
    """

    NAME = "audit"
    EXAMPLE = "mpu audit copy_1 --base my-model --public meta-llama/Llama-3.2-1B-Instruct"

    copies: list[str] = option(
        ...,
        "Copies of BASE, also of several publications, or - for standard input.",
        metavar="COPY…",
        argument=True,
    )
    base: str = option(..., "The published model, to score the attacks with.", metavar="MODEL")
    public: str | None = option(
        None, "Public model that BASE was fine-tuned from, which an attacker also has.", metavar="MODEL"
    )
    noise: str | None = option(
        None,
        "Kind of noise that the attacker assumes, extrapolate or zero-sum, with its factors after a colon as for "
        "publish (default: try both kinds).",
        metavar="KIND",
    )
    symmetries: str | None = option(
        None, "Symmetries that the attacker assumes (default: as stated in the copies, else try each).",
        choices=tuple(name for name in SYMMETRIES if name != "none"),
    )  # fmt: skip
    keys: Path | None = option(
        None,
        "Keys of the publication, to check that the copies belong to it and report κ; no attack reads them.",
        metavar="FILE",
    )
    fast: bool = option(False, "Examine only three layers.")
    opening: Opening = group(Opening)

    def run(self, observer: Observer = SILENT) -> tuple[Result, Publication | None]:
        """The audit, and the publication of the keys."""
        from mpu_cli.lab.attacks import audit_as_believed
        from mpu_cli.model.source import open_model
        from mpu_cli.protocol.deltas import check_base

        keys = opened_keys(self.keys, self.opening, observer) if self.keys else None
        copies = [open_model(str(path), links=False) for path in paths_from(self.copies)]
        base = open_model(self.base)
        if keys:
            check_base(base, keys)
            for copy in copies:
                manifest = read_copy_manifest(copy.folder, copy.checkpoint.metadata)
                if manifest is None or manifest.copy_id not in keys.copy_ids:
                    raise MpuError(f"{copy.source}: was not published with these keys")
        public = open_model(self.public) if self.public else None
        result = audit_as_believed(
            copies, base, public, noise=self.noise, symmetries=self.symmetries, fast=self.fast, observer=observer
        )
        return result, keys.publication if keys else None

    def report(self, outcome: tuple[Result, Publication | None], observer: Observer) -> Report:
        from mpu_cli.lab.attacks import ATTACKS

        result, published = outcome
        rows = []
        for name in result.attacks:
            task = result.task_error(name)
            rows.append(
                [
                    ATTACKS[name].description,
                    f"{result.function_error(name):.2%}",
                    *([f"{result.change_error(name):.2%}"] if result.with_reference else []),
                    "–" if task is None else f"{task:.2%}",
                    result.method(name),
                ]
            )
        of_change = ["of the change"] if result.with_reference else []
        columns = ["attack", "weights", *of_change, "task vector", "the change is"]
        observer.table("Relative error of what is recovered", columns, rows)
        if unmoved := [block for block, share in result.unmoved.items() if share > UNMOVED]:
            observer.note(f"unchanged in copy 1 (no symmetry moves them, no noise survives): {few(unmoved)}")
        if self.fast:
            observer.note("--fast: three layers only; errors of all layers differ from these")
        if max(map(result.change_error, result.attacks)) > 1:
            observer.note("above 100 %: further off than the public model itself, which changes nothing")
        if (off := result.function_error(result.best)) > ANOTHER_MODEL:
            observer.warn(
                f"every attack is at least {off:.0%} off the weights of {self.base}: was this the model that was "
                "published? --keys checks it"
            )
        document = {
            "verdict": result.verdict,
            "attacks": result.document(),
            "unmoved": result.unmoved,
            "settings": {
                "noise": {"kind": result.noise.kind, "factors": result.noise.factors},
                "symmetries": result.symmetries,
                "fast": self.fast,
            },
            "published": {"kappa": published.kappa, "symmetries": published.symmetries} if published else None,
        }
        return Report([result.verdict], document)
