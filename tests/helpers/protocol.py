"""Runs the protocol through the command line and measures the distance of its result from the clean update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from mpu_cli.files.reader import open_checkpoint

Tensors = Mapping[str, torch.Tensor]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.tensor(name).double() for name in checkpoint.tensors}


def distance(actual: Tensors, expected: Tensors, only: Callable[[str], bool] = lambda _: True) -> float:
    """‖found − expected‖ / ‖expected‖ over the tensors whose names ``only`` accepts."""
    names = [name for name in expected if only(name)]
    error = sum(float((actual[name] - expected[name]).square().sum()) for name in names)
    return (error / sum(float(expected[name].square().sum()) for name in names)) ** 0.5


def merge_factors(delta: Tensors) -> dict[str, torch.Tensor]:
    """A LoRA delta's change to each tensor that it adapts (the product of its factors); any other delta unchanged."""
    return {
        name.removesuffix(".lora_B"): tensor @ delta[name.removesuffix("B") + "A"]
        if name.endswith(".lora_B")
        else tensor
        for name, tensor in delta.items()
        if not name.endswith(".lora_A")
    }


def clean_update(mpu: Callable, base: Path, folder: Path, options: list[object]) -> dict[str, torch.Tensor]:
    """The update of a client that is given the base itself."""
    mpu("unlearn", base, "--out", folder / "clean.safetensors", *options)
    return merge_factors(tensors(folder / "clean.safetensors"))


def updates(
    mpu: Callable, base: Path, folder: Path, publish: list[object], unlearn: list[object], report: dict | None = None
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """The aggregate's update (float64) and each copy's own, inverted; all files go into ``folder``.

    The report of `mpu aggregate` is put into ``told``.
    """
    keys = folder / "keys.bin"
    copies = mpu("publish", base, "--dtype", "float64", "--out", folder, "--keys", keys, *publish).out.split()
    for copy in copies:
        mpu("unlearn", copy, "--out", folder / "deltas" / f"{Path(copy).name}.safetensors", *unlearn)
    result = mpu(
        "aggregate", folder / "deltas", "--keys", keys, "--dtype", "float64", "--out", folder / "unlearned", "--json"
    )
    if report is not None:
        report.update(result.json)
    inverted = mpu("invert", folder / "deltas", "--keys", keys, "--out", folder / "inverted").out.split()
    before, after = tensors(base), tensors(folder / "unlearned")
    return {name: after[name] - before[name] for name in before}, [
        merge_factors(tensors(Path(path))) for path in inverted
    ]
