"""``mpu check-family``: whether the symmetries that mpu assumes hold for a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note, table, terminal
from mpu_cli.errors import MpuError
from mpu_cli.wording import few


def check_family(
    model: Annotated[str, typer.Argument(help="A model directory, .safetensors file or Hub id.", metavar="MODEL")],
    as_json: options.Json = False,
) -> None:
    """Apply each symmetry of the model's family to its weights, alone and with the others, and compare logits.

    For whoever adds a family, or publishes a model for the first time. Also takes random changes of copies back, as
    aggregate does. Checks one layer of each kind, and two at least, which it holds in memory in float64; all of them if
    what they compute depends on their number. Exits with status 1 if a symmetry changes what the model computes. Prints
    a verdict.
    """
    with terminal() as observer:
        import torch

        from mpu_cli.models.source import open_model
        from mpu_cli.server.symmetry_check import check_family as run_check

        opened = open_model(model)
        result = run_check(opened, observer)
    rows = [
        [
            c.set_name,
            c.symmetry,
            *(f"{c.differences[d]:.1e}" for d in (torch.float64, torch.float32)),
            "" if c.ok else "!",
        ]
        for c in result.checks
    ]
    table("Largest difference of logits, relative", ["symmetries", "", "float64", "float32", ""], rows)
    back = max(result.returned.values(), default=0.0)
    note(f"layers {few([*map(str, result.layers)], 9)} checked; random changes come back within {back:.0e}")
    if result.unmoved:
        note(f"no symmetry moves {few(result.unmoved)}")
    model_type = opened.config["model_type"]
    verdict = f"{model_type}: {'every symmetry holds' if result.ok else 'NOT what its table says'}"
    document = {
        "model_type": model_type,
        "ok": result.ok,
        "checks": [
            {"set": c.set_name, "symmetry": c.symmetry, "ok": c.ok}
            | {str(dtype).removeprefix("torch."): value for dtype, value in c.differences.items()}
            for c in result.checks
        ],
        "unmoved": result.unmoved,
        "layers": result.layers,
        "returned": result.returned,
    }
    emit([verdict], document, as_json)
    if not result.ok:
        raise MpuError(f"{model}: symmetries change what this model computes", "correct the family's table")
