"""LoRA with peft: low-rank factors instead of a change to every weight.

The delta holds two factors for each adapted tensor W, as W is stored: ``W.lora_B`` (rows of W, r) and ``W.lora_A``
(r, columns of W); the change is their product. peft's scaling is included in the first. A stack of experts' matrices,
(experts, rows, columns), has stacks of factors.

A starts not at random but at the input directions to which W responds most (PiSSA's choice, Meng et al. 2024; W itself
is left intact here): they rotate with the coordinates of a copy, so all copies train in the same subspace and the noise
cancels across them. From a random start, each copy would train in a subspace of its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.manifest import LEFT_FACTOR, RIGHT_FACTOR
from mpu_cli.files.reader import all_finite, open_checkpoint
from mpu_cli.model.load import has_weights
from mpu_cli.model.tensors import Names, dequantized_weight, family_of_model, is_quantized
from mpu_cli.options.unlearning import Lora
from mpu_cli.training.execution import whole_parameters


def adapted_parameters(model: PreTrainedModel, lora: Lora, among: Collection[str]) -> dict[str, torch.Tensor]:
    """The parameters ``among`` these that ``lora`` adapts, by name: of linear layers, and stacked experts' matrices."""
    head = model.get_output_embeddings()
    unlike = {id(head), *map(id, _read_by_kernels(model)), *map(id, _routers(model))}
    layers: dict[str, torch.Tensor] = {}  # by the name that a target has
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            if id(module) not in unlike and f"{name}.weight" in among:
                layers[name] = module.weight
        elif not isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d):  # whose weights may have three axes, too
            for parameter, value in module.named_parameters(recurse=False):
                if value.ndim == 3 and f"{name}.{parameter}" in among:
                    layers[f"{name}.{parameter}"] = value
    for target in lora.lora_targets:
        if not any(_matches(name, target) for name in layers):
            available_targets = sorted({name.rsplit(".", 1)[-1] for name in layers})
            raise UsageError(
                f"--lora targets={target}: matches no linear layer of this model (it has "
                f"{', '.join(available_targets)})"
            )
    adapted = {}
    for name, parameter in layers.items():
        if not lora.lora_targets or any(_matches(name, target) for target in lora.lora_targets):
            adapted[name if parameter.ndim == 3 else f"{name}.weight"] = parameter
    return adapted


def _routers(model: PreTrainedModel) -> Iterator[torch.nn.Module]:
    """Routers that are subclasses of Linear: their output may be more than a product."""
    family = family_of_model(model)
    names = tuple(t.name for t in family.layer_tensors if t.axes[0] == "expert") if family else ()
    for name, module in model.named_modules():
        is_subclass = isinstance(module, torch.nn.Linear) and type(module) is not torch.nn.Linear
        if is_subclass and not is_quantized(module.weight) and f"{name}.weight".endswith(names):
            yield module


def _read_by_kernels(model: PreTrainedModel) -> Iterator[torch.nn.Module]:
    """Output projections of Mamba: on GPUs, fused kernels read their weights, past any adapter."""
    for module in model.modules():
        if hasattr(module, "conv1d") and hasattr(module, "A_log") and hasattr(module, "out_proj"):
            yield module.out_proj


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


class LoraChange:
    """Low-rank factors of the change of some matrices, which are trained in place of ``delta.FullChange``.

    They are float32, or float64 if the model is. ``wide_inputs``: they read their inputs in that dtype, and not in the
    model's.
    """

    kind = "lora"

    def __init__(self, names: Names, options: Lora, *, wide_inputs: bool):
        self._names, self._options, self._wide_inputs = names, options, wide_inputs

    def trainable_names(self, model: PreTrainedModel) -> Collection[str]:
        return adapted_parameters(model, self._options, self._names)

    def shapes(self, model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for name in adapted_parameters(model, self._options, self._names):
            for piece in self._names[name]:
                *stack, rows, columns = piece.shape
                shapes[piece.file_name + LEFT_FACTOR] = (*stack, rows, self._options.rank)
                shapes[piece.file_name + RIGHT_FACTOR] = (*stack, self._options.rank, columns)
        return shapes

    def wrap(self, model: PreTrainedModel) -> torch.nn.Module:
        """``model`` with adapters to train instead of its weights."""
        from peft import LoraConfig, get_peft_model

        # Saving a checkpoint, peft looks for the vocabulary's size in a folder that is gone, and need not know it.
        warnings.filterwarnings("ignore", message="Could not find a config file")
        rank, targets = self._options.rank, adapted_parameters(model, self._options, self._names)
        config = LoraConfig(
            r=rank,
            lora_alpha=self._options.alpha,
            target_modules=[name.removesuffix(".weight") for name, weight in targets.items() if weight.ndim == 2],
            target_parameters=[name for name, weight in targets.items() if weight.ndim == 3] or None,
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        )
        with _taking_names_as_they_are():
            wrapped = get_peft_model(model, config)
        wide = torch.promote_types(model.dtype, torch.float32)
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(wide)
        if not self._wide_inputs:
            # The factors stay in float32 and are multiplied in the model's dtype: peft's cast of every input would be
            # kept for the backward pass, beside the input itself.
            for adapter in _adapters(wrapped):
                adapter.module.cast_input_dtype_enabled = False
                if model.dtype in (torch.bfloat16, torch.float16):
                    for factor in (adapter.module.lora_A["default"], adapter.module.lora_B["default"]):
                        factor.forward = torch.autocast(model.device.type, model.dtype)(factor.forward)
        if not has_weights():  # the first process sends its factors to the others
            return wrapped
        for adapter in _adapters(wrapped):
            weight = dequantized_weight(targets[adapter.parameter])
            if not all_finite(weight):
                raise MpuError(f"{adapter.parameter}: weights contain NaN or Inf", "get the copy again")
            if adapter.inputs_first:
                weight = weight.transpose(-2, -1)
            matrices = weight if weight.ndim == 3 else weight[None]
            rows = [principal_inputs(matrix.to(wide), rank) for matrix in matrices]
            adapter.module.lora_A["default"].weight.data.copy_(torch.cat(rows))
        return wrapped

    def tensors(self, trained: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The factors of every adapted tensor, as stored in the delta."""
        parameters = dict(whole_parameters(trained, lambda name: ".lora_" in name))
        for adapter in _adapters(trained):
            a = parameters[f"{adapter.name}.lora_A.default.weight"].detach().cpu()  # (r, inputs)
            b = parameters[f"{adapter.name}.lora_B.default.weight"].detach().cpu()  # (outputs, r)
            if experts := getattr(adapter.module, "num_experts", 0):  # (experts · r, inputs), (outputs, r · experts)
                a, b = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
            b = b * adapter.module.scaling["default"]
            left_factor, right = (a.mT, b.mT) if adapter.inputs_first else (b, a)
            for piece in self._names[adapter.parameter]:
                yield piece.file_name + LEFT_FACTOR, piece.of(left_factor)
                yield piece.file_name + RIGHT_FACTOR, right if piece.expert is None else right[piece.expert]

    def norm(self, _: float, delta: Path) -> float:
        """‖BA‖ over all factors in a delta: the norm of the weight change, whatever A started from."""
        checkpoint = open_checkpoint(delta)
        square = 0.0
        for name in checkpoint.tensors:
            if name.endswith(LEFT_FACTOR):
                b = checkpoint.tensor(name).double()
                a = checkpoint.tensor(name.removesuffix(LEFT_FACTOR) + RIGHT_FACTOR).double()
                # ‖BA‖² = tr(BᵀB·AAᵀ), of two (r, r) matrices: BA is as large as the weight.
                square += float(((b.mT @ b) * (a @ a.mT)).sum())
        return math.sqrt(max(0.0, square))


@contextmanager
def _taking_names_as_they_are() -> Iterator[None]:
    """Keep peft from reading names such as gate_proj as those of experts in older versions of transformers: in some
    mixtures, dense layers and shared experts have them."""
    from peft.utils import transformers_weight_conversion as conversion

    original = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = original


@dataclass(frozen=True)
class _Adapter:
    """A layer of peft's, the parameter that it adapts, and whether this has its inputs first."""

    name: str
    module: Any
    parameter: str
    inputs_first: bool


def _adapters(trained: torch.nn.Module) -> Iterator[_Adapter]:
    for name, module in trained.named_modules():
        if hasattr(module, "lora_A"):
            # Two stacks of one module are adapted by layers around each other.
            adapted = name.removeprefix("base_model.model.").replace(".base_layer", "")
            if hasattr(module, "parameter_name"):
                inputs_first = getattr(module.get_base_layer(), "is_transposed", False)
                yield _Adapter(name, module, f"{adapted}.{module.parameter_name}", inputs_first)
            else:
                yield _Adapter(name, module, f"{adapted}.weight", module.fan_in_fan_out)


def principal_inputs(weight: torch.Tensor, rank: int) -> torch.Tensor:
    """The first ``rank`` right singular vectors of ``weight``, (outputs, inputs), as rows: (rank, inputs).

    They have the length of peft's random rows, 1/√3; rows beyond the smaller dimension of ``weight`` are zero.
    """
    # From the smaller of the Gram matrices: if u is an eigenvector of WWᵀ, Wᵀu is one of WᵀW.
    outputs, inputs = weight.shape
    if outputs < inputs:
        rows = _last_eigenvectors(weight @ weight.T, rank).T @ weight
    else:
        rows = _last_eigenvectors(weight.T @ weight, rank).T
    begin = weight.new_zeros(rank, inputs)
    begin[: len(rows)] = torch.nn.functional.normalize(rows, dim=1) / math.sqrt(3)
    return begin


def _last_eigenvectors(gram: torch.Tensor, count: int) -> torch.Tensor:
    """The eigenvectors of the ``count`` largest eigenvalues, as columns: (n, count), or (n, n) if there are no more."""
    if gram.device.type != "cpu":
        return torch.linalg.eigh(gram).eigenvectors[:, -count:]
    from scipy.linalg import eigh  # on a CPU three times as fast as torch's, which computes all of them

    start = max(0, len(gram) - count)
    return torch.from_numpy(eigh(gram.numpy(), subset_by_index=[start, len(gram) - 1])[1])
