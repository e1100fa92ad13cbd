"""Options of trainings that tests of several commands run."""

from __future__ import annotations

from collections.abc import Sequence

from mpu_cli.commands.unlearn import Unlearn
from mpu_cli.lab.options.experiment import USUAL
from mpu_cli.options.declare import declared_options

BRIEF = (
    "--algo", "npo", "--epochs", 2, "--lr", 0.001, "--batch-size", 3,
    "--optim", "adamw-blockwise", "--reading", "template=plain",
)  # fmt: skip

FORGETTING = (
    "--algo", "npo", "--constants", "beta=2.0", "--lr", 0.0003, "--epochs", 10,
    "--batch-size", 5, "--optim", "adamw-blockwise",
)  # fmt: skip


def for_run(options: Sequence[object]) -> list[object]:
    """Options of `mpu unlearn`, each with its value, as `mpu run` takes them."""
    declared = declared_options(Unlearn)
    names = {each.flag: name for name, each in declared.items()}
    converted: list[object] = []
    for flag, value in zip(options[::2], options[1::2], strict=True):
        if f"{flag} {str(value).split('=')[0]}" in names:  # a part of an option of unlearn
            parts = [part.partition("=") for part in str(value).split(",")]
            texts = [f"{names[f'{flag} {key}']}={text or 'true'}" for key, _, text in parts]
            converted += ["--unlearn", ",".join(texts)]
        elif names[str(flag)] in USUAL:
            converted += [flag, value]
        else:
            converted += ["--unlearn", f"{names[str(flag)]}={value}"]
    return converted
