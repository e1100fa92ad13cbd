"""The pretrained model's tensors by the names of the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mpu_cli.architectures.family import Stack
from mpu_cli.architectures.layout import Layout, layout_of
from mpu_cli.errors import MpuError
from mpu_cli.models.source import Model


def matching(base: Model, layout: Layout, pretrained: Model | None) -> dict[str, torch.Tensor] | None:
    """The pretrained model's tensors by the base's names. Raises MpuError if the architectures differ."""
    if pretrained is None:
        return None
    other = layout_of(pretrained.checkpoint.tensors, pretrained.config, pretrained.source)
    names = [tensor.name for tensor in layout.parameters]
    theirs = {tensor.name: pretrained.checkpoint.tensor(tensor.name) for tensor in other.parameters}
    if len(theirs) != len(names):
        apart = _with_matrices(theirs, other.family.stacks)
        theirs = {name: apart[name] for name in names if name in apart}
    if layout.family.model_types != other.family.model_types or len(names) != len(theirs):
        raise MpuError(
            f"{pretrained.source}: tensors differ from {base.source} (different architecture, different head, or "
            "experts in another arrangement)"
        )
    for name, (match, tensor) in zip(names, theirs.items(), strict=True):
        shape = base.checkpoint.tensors[name].shape
        if tuple(tensor.shape) != shape:
            raise MpuError(
                f"{pretrained.source}: {match!r} has shape {list(tensor.shape)}, but {list(shape)} in the base",
                "use a pretrained model with the base's shapes",
            )
    return dict(zip(names, theirs.values(), strict=True))


def _with_matrices(tensors: Mapping[str, torch.Tensor], stacks: Sequence[Stack]) -> dict[str, torch.Tensor]:
    """``tensors``, and what is stacked or renamed in memory by the names of files: of experts (experts, rows, columns)
    each one's matrices, as views."""
    matrices = dict(tensors)
    for name, tensor in tensors.items():
        for stack in stacks:
            if not name.endswith(f".{stack.name}"):
                continue
            prefix = name.removesuffix(stack.name)
            if "{e}" not in stack.parts[0]:
                matrices[prefix + stack.parts[0]] = tensor
                continue
            rows = tensor.shape[1] // len(stack.parts)
            for expert, matrix in enumerate(tensor):
                for part, piece in zip(stack.parts, matrix.split(rows), strict=True):
                    matrices[prefix + part.replace("{e}", str(expert))] = piece
    return matrices
