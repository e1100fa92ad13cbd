"""A delta on the model that it belongs to, so that a client can look at what it is about to return."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from mpu_cli.checkpoint.reader import Checkpoint, open_checkpoint, quoted_list
from mpu_cli.errors import MpuError
from mpu_cli.manifest import LEFT_FACTOR, RIGHT_FACTOR, delta_manifest, read_copy_manifest
from mpu_cli.models.source import Model
from mpu_cli.models.tensor_names import in_memory


def open_delta(source: Model, path: Path) -> Checkpoint:
    """The delta in ``path``, a file or a sharded directory; MpuError if it is not one of ``source``."""
    checkpoint = open_checkpoint(path, links=False)
    delta = delta_manifest(checkpoint.metadata, path)
    copy = read_copy_manifest(source.folder, source.checkpoint.metadata)
    if copy and delta.inverted:
        raise MpuError(f"{path}: inverted, so it is a change of the base", "pass the base instead of a copy")
    if copy and (delta.origin is None or delta.origin.copy_id != copy.copy_id):
        raise MpuError(f"{path}: not a delta of {source.source}", "pass the copy that it was made from")
    return checkpoint


@torch.no_grad()
def add_delta(model: PreTrainedModel, source: Model, delta: Checkpoint) -> None:
    """Add an opened delta to the weights of ``model``, loaded from ``source``; the product of LoRA's factors.

    Raises MpuError if it does not fit.
    """
    unmatched_names = dict.fromkeys(delta.tensors)
    for stored, view in in_memory(model, source.checkpoint.tensors).items():
        if stored in delta.tensors:
            change = delta.tensor(stored).to(view.device)
            unmatched_names.pop(stored)
        elif stored + LEFT_FACTOR in delta.tensors and stored + RIGHT_FACTOR in delta.tensors:
            change = delta.tensor(stored + LEFT_FACTOR).to(view.device) @ delta.tensor(stored + RIGHT_FACTOR).to(
                view.device
            )
            unmatched_names.pop(stored + LEFT_FACTOR)
            unmatched_names.pop(stored + RIGHT_FACTOR)
        else:
            continue
        if change.shape != view.shape:
            raise MpuError(f"{delta.path}: {stored!r} has shape {list(change.shape)}, expected {list(view.shape)}")
        view.copy_((view.to(change.dtype) + change).to(view.dtype))
    if unmatched_names:
        raise MpuError(f"{delta.path}: contains {quoted_list(unmatched_names)}, which {source.source} does not have")
