"""float64 that is float64 throughout: models compute norms and softmaxes in float32, whatever they are in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

_CASTS = (torch.Tensor.to, torch.Tensor.float, torch.Tensor.type)
_SOFTMAXES = (torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax)


class _KeepFloat64(TorchFunctionMode):
    """Casts of float64 tensors to float32 do nothing, and softmaxes of them stay as wide."""

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            narrow = torch.float32 in args[1:] or kwargs.get("dtype") == torch.float32
            if func in _CASTS and (narrow or func is torch.Tensor.float):
                return args[0]
            if func in _SOFTMAXES and narrow:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def as_wide_as(dtype: torch.dtype) -> Iterator[None]:
    """Within, a model in float64 computes in nothing less; for any other ``dtype``, all is as the model has it."""
    if dtype != torch.float64:
        yield
        return
    with _KeepFloat64():
        yield
