"""In which precision a model computes: float64 throughout, float32 with rounded matrix products, bfloat16 layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

_CASTS = (torch.Tensor.to, torch.Tensor.type)
_SOFTMAXES = (
    torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax,
    torch.log_softmax, torch.Tensor.log_softmax, torch.nn.functional.log_softmax,
)  # fmt: skip


class _KeepFloat64(TorchFunctionMode):
    """Models compute norms and softmaxes in float32, whatever their own dtype. This ignores casts of float64 tensors to
    float32, and keeps their softmaxes in float64."""

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func in _CASTS or func in _SOFTMAXES:
                args = tuple(torch.float64 if value is torch.float32 else value for value in args)
                kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


@contextmanager
def as_wide_as(dtype: torch.dtype) -> Iterator[None]:
    """Inside it, norms and softmaxes of a float64 model are in float64 too; any other ``dtype`` changes nothing."""
    if dtype != torch.float64:
        yield
        return
    with _KeepFloat64():
        yield


@contextmanager
def computing_in(precision: str, dtype: torch.dtype) -> Iterator[None]:
    """Inside it, CUDA computes products of float32 matrices as ``precision``, of ``--precision``, says, and float64
    models as ``as_wide_as`` does."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        with as_wide_as(dtype):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def in_precision(model: PreTrainedModel, precision: str) -> PreTrainedModel:
    """``model``, whose layers compute in bfloat16 if ``precision`` is "mixed"; its weights stay as they are."""
    if precision == "mixed":
        for module in model.modules():
            if hasattr(module, "compute_dtype"):  # a layer in 4 bits, which autocast does not know
                module.compute_dtype = torch.bfloat16
        model.forward = torch.autocast(model.device.type, torch.bfloat16)(model.forward)
    return model
