"""LoRA through peft: low-rank factors instead of the change of every weight.

The delta holds two factors for each adapted tensor W, as W is stored: ``W.lora_B`` (rows of W, r) and ``W.lora_A``
(r, columns of W), with the change being their product. peft's scaling is in the first.

A does not begin at random but at the directions that W itself reads most of (PiSSA's choice, Meng et al. 2024; W stays
whole here): they turn with the coordinates of a copy, so all copies train in one subspace, and noise cancels over them.
At random, each copy would train in a subspace of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mpu_cli.checkpoint.dtypes import NAME, all_finite
from mpu_cli.checkpoint.reader import open_checkpoint
from mpu_cli.checkpoint.writer import Plan
from mpu_cli.client.training import whole_parameters
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.manifest import LEFT, RIGHT


@dataclass(frozen=True)
class Lora:
    """Rank r, scaling alpha/r, and endings of names of the modules to adapt (none: all linear layers but the head)."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()


def adapted(model: PreTrainedModel, lora: Lora) -> dict[str, torch.nn.Module]:
    """The modules that ``lora`` adapts, by name. Raises UsageError for a target that matches nothing."""
    head = model.get_output_embeddings()
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    }
    if not lora.targets:
        return linear
    for target in lora.targets:
        if not any(name == target or name.endswith("." + target) for name in linear):
            known = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise UsageError(
                f"--lora-targets {target}: matches no linear layer of this model (it has {', '.join(known)})"
            )
    return {n: m for n, m in linear.items() if any(n == t or n.endswith("." + t) for t in lora.targets)}


def plan(names: dict[str, str], lora: Lora, model: PreTrainedModel) -> Plan:
    """The tensors that the delta of ``lora`` will hold."""
    wide = NAME[torch.promote_types(model.dtype, torch.float32)]
    tensors = {}
    for name, module in adapted(model, lora).items():
        stored = names[f"{name}.weight"]
        rows, columns = module.weight.shape
        tensors[stored + LEFT] = (wide, (rows, lora.rank))
        tensors[stored + RIGHT] = (wide, (lora.rank, columns))
    return tensors


def wrap(model: PreTrainedModel, lora: Lora) -> torch.nn.Module:
    """``model`` with adapters in the place of its trained weights (float32, or float64 where the model is).

    Raises MpuError for weights that are no numbers.
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
                    f"{name.removeprefix('base_model.model.')}: its weights hold NaN or Inf; fetch the copy again"
                )
            begin = principal_inputs(weight.T if module.fan_in_fan_out else weight, lora.rank)
            module.lora_A["default"].weight.data.copy_(begin)
    return wrapped


def principal_inputs(weight: torch.Tensor, rank: int) -> torch.Tensor:
    """The first ``rank`` right singular vectors of ``weight``, (outputs, inputs), as rows: (rank, inputs).

    They are as long as peft's random rows are, 1/√3; there are no more than the smaller side of ``weight``, then zeros.
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
    """Of the ``count`` largest eigenvalues, as columns: (n, count), or (n, n) if there are no more."""
    if gram.device.type != "cpu":
        return torch.linalg.eigh(gram).eigenvectors[:, -count:]
    from scipy.linalg import eigh  # on a CPU three times as fast as torch's, which finds all of them

    first = max(0, len(gram) - count)
    return torch.from_numpy(eigh(gram.numpy(), subset_by_index=[first, len(gram) - 1])[1])


def product_norm(delta: Path) -> float:
    """‖BA‖ over all the factors in a delta: what the change of the weights is, whatever A began with."""
    held = open_checkpoint(delta)
    square = 0.0
    for name in held.tensors:
        if name.endswith(LEFT):
            b, a = held.tensor(name).double(), held.tensor(name.removesuffix(LEFT) + RIGHT).double()
            square += float(((b.T @ b) * (a @ a.T)).sum())
    return math.sqrt(max(0.0, square))


def factors(trained: torch.nn.Module, names: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The factors of every adapted tensor as the delta holds them."""
    parameters = dict(whole_parameters(trained, lambda name: ".lora_" in name))
    for name, module in trained.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        stored = names[name.removeprefix("base_model.model.") + ".weight"]
        a = parameters[f"{name}.lora_A.default.weight"].detach().cpu()  # (r, inputs)
        b = parameters[f"{name}.lora_B.default.weight"].detach().cpu() * module.scaling["default"]  # (outputs, r)
        left, right = (a.T, b.T) if module.fan_in_fan_out else (b, a)  # Conv1D stores the transpose
        yield stored + LEFT, left
        yield stored + RIGHT, right
