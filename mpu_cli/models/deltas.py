"""A delta on the model that it belongs to, so that a client can look at what it is about to return."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from mpu_cli.checkpoint.reader import Checkpoint, listed, open_checkpoint
from mpu_cli.errors import MpuError
from mpu_cli.manifest import LEFT, RIGHT, delta_manifest, read_copy_manifest
from mpu_cli.models.memory import in_memory
from mpu_cli.models.source import Model


def open_delta(source: Model, path: Path) -> Checkpoint:
    """The delta in ``path``, a file or a sharded directory; MpuError if it is not one of ``source``."""
    held = open_checkpoint(path, links=False)
    delta = delta_manifest(held.metadata, path)
    copy = read_copy_manifest(source.folder, source.checkpoint.metadata)
    if copy and delta.inverted:
        raise MpuError(f"{path}: inverted, so it is a change of the base", "pass the base instead of a copy")
    if copy and (delta.origin is None or delta.origin.copy_id != copy.copy_id):
        raise MpuError(f"{path}: not a delta of {source.source}", "pass the copy that it was made from")
    return held


@torch.no_grad()
def add_delta(model: PreTrainedModel, source: Model, held: Checkpoint) -> None:
    """Add an opened delta to the weights of ``model``, loaded from ``source``; the product of LoRA's factors.

    Raises MpuError if it does not fit.
    """
    left = dict.fromkeys(held.tensors)
    for stored, view in in_memory(model, source.checkpoint.tensors).items():
        if stored in held.tensors:
            change = held.tensor(stored).to(view.device)
            left.pop(stored)
        elif stored + LEFT in held.tensors and stored + RIGHT in held.tensors:
            change = held.tensor(stored + LEFT).to(view.device) @ held.tensor(stored + RIGHT).to(view.device)
            left.pop(stored + LEFT)
            left.pop(stored + RIGHT)
        else:
            continue
        if change.shape != view.shape:
            raise MpuError(f"{held.path}: {stored!r} has shape {list(change.shape)}, expected {list(view.shape)}")
        view.copy_((view.to(change.dtype) + change).to(view.dtype))
    if left:
        raise MpuError(f"{held.path}: contains {listed(left)}, which {source.source} does not have")
