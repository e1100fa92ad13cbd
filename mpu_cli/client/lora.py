"""LoRA with peft: low-rank factors instead of a change to every weight.

The delta holds two factors for each adapted tensor W, as W is stored: ``W.lora_B`` (rows of W, r) and ``W.lora_A``
(r, columns of W); the change is their product. peft's scaling is included in the first.

A starts not at random but at the input directions to which W responds most (PiSSA's choice, Meng et al. 2024; W itself
is left intact here): they rotate with the coordinates of a copy, so all copies train in the same subspace and the noise
cancels across them. From a random start, each copy would train in a subspace of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mpu_cli.checkpoint.dtypes import NAME, all_finite
from mpu_cli.checkpoint.reader import open_checkpoint
from mpu_cli.checkpoint.writer import TensorSpecs
from mpu_cli.client.training import whole_parameters
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.manifest import LEFT, RIGHT
from mpu_cli.models.memory import Names
from mpu_cli.options.unlearning import Lora


def adapted(model: PreTrainedModel, lora: Lora) -> dict[str, torch.nn.Module]:
    """The modules that ``lora`` adapts, by name. Raises UsageError if a target matches nothing."""
    head = model.get_output_embeddings()
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head and module.weight.requires_grad
    }
    if not lora.lora_targets:
        return linear
    for target in lora.lora_targets:
        if not any(name == target or name.endswith("." + target) for name in linear):
            known = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise UsageError(
                f"--lora-targets {target}: matches no linear layer of this model (it has {', '.join(known)})"
            )
    return {n: m for n, m in linear.items() if any(n == t or n.endswith("." + t) for t in lora.lora_targets)}


def tensor_specs(names: Names, lora: Lora, model: PreTrainedModel) -> TensorSpecs:
    """The tensors that a delta trained with ``lora`` will hold."""
    wide = NAME[torch.promote_types(model.dtype, torch.float32)]
    tensors = {}
    for name, module in adapted(model, lora).items():
        [piece] = names[f"{name}.weight"]
        stored = piece.file_name
        weight: Any = module.weight
        rows, columns = weight.shape
        tensors[stored + LEFT] = (wide, (rows, lora.rank))
        tensors[stored + RIGHT] = (wide, (lora.rank, columns))
    return tensors


def wrap(model: PreTrainedModel, lora: Lora) -> torch.nn.Module:
    """``model`` with adapters to train instead of its weights (float32, or float64 if the model is).

    Raises MpuError if weights are NaN or Inf.
    """
    from peft import LoraConfig, get_peft_model

    targets = adapted(model, lora)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in targets.values()),
    )
    wrapped = get_peft_model(model, config)
    wide = torch.promote_types(model.dtype, torch.float32)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(wide)
    for name, module in wrapped.named_modules():
        if hasattr(module, "lora_A"):
            weight = module.base_layer.weight.detach().to(wide)
            if not all_finite(weight):
                raise MpuError(
                    f"{name.removeprefix('base_model.model.')}: weights contain NaN or Inf", "get the copy again"
                )
            begin = principal_inputs(weight.T if module.fan_in_fan_out else weight, lora.rank)
            module.lora_A["default"].weight.data.copy_(begin)
    return wrapped


def principal_inputs(weight: torch.Tensor, rank: int) -> torch.Tensor:
    """The first ``rank`` right singular vectors of ``weight``, (outputs, inputs), as rows: (rank, inputs).

    They have the length of peft's random rows, 1/√3; rows beyond the smaller dimension of ``weight`` are zero.
    """
    outputs, inputs = weight.shape
    if outputs < inputs:
        rows = _last_eigenvectors(weight @ weight.T, rank).T @ weight
    else:
        rows = _last_eigenvectors(weight.T @ weight, rank).T
    begin = weight.new_zeros(rank, inputs)
    begin[: len(rows)] = torch.nn.functional.normalize(rows, dim=1) / math.sqrt(3)
    return begin


def _last_eigenvectors(gram: torch.Tensor, count: int) -> torch.Tensor:
    """Those of the ``count`` largest eigenvalues, as columns: (n, count), or (n, n) if there are no more."""
    if gram.device.type != "cpu":
        return torch.linalg.eigh(gram).eigenvectors[:, -count:]
    from scipy.linalg import eigh  # on a CPU three times as fast as torch's, which computes all of them

    first = max(0, len(gram) - count)
    return torch.from_numpy(eigh(gram.numpy(), subset_by_index=[first, len(gram) - 1])[1])


def product_norm(delta: Path) -> float:
    """‖BA‖ over all factors in a delta: the norm of the weight change, whatever A started from."""
    held = open_checkpoint(delta)
    square = 0.0
    for name in held.tensors:
        if name.endswith(LEFT):
            b, a = held.tensor(name).double(), held.tensor(name.removesuffix(LEFT) + RIGHT).double()
            square += float(((b.T @ b) * (a @ a.T)).sum())
    return math.sqrt(max(0.0, square))


def factors(trained: torch.nn.Module, names: Names) -> Iterator[tuple[str, torch.Tensor]]:
    """The factors of every adapted tensor, as stored in the delta."""
    parameters = dict(whole_parameters(trained, lambda name: ".lora_" in name))
    for name, module in trained.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        [piece] = names[name.removeprefix("base_model.model.") + ".weight"]
        stored = piece.file_name
        a = parameters[f"{name}.lora_A.default.weight"].detach().cpu()  # (r, inputs)
        b = parameters[f"{name}.lora_B.default.weight"].detach().cpu() * module.scaling["default"]  # (outputs, r)
        left, right = (a.T, b.T) if module.fan_in_fan_out else (b, a)  # Conv1D stores the transpose
        yield stored + LEFT, left
        yield stored + RIGHT, right
