"""Products of float32 matrices by oneDNN, on processors where it is as exact as MKL and faster.

MKL leaves half of what AMD's processors can do unused. torch gives a product to oneDNN instead where its rounding to
bfloat16 is allowed, which oneDNN does only where it has an instruction for it: elsewhere it computes in float32.
Attention stays with MKL, which is faster for small matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from threading import Lock
from typing import Any

import torch
from torch.autograd.function import once_differentiable

LEAST_MULTIPLICATIONS = 1 << 21  # in a product; smaller ones are faster by MKL
PROBE_SIZE = 256  # of the matrices that are tried
LARGEST_ERROR = 1e-5  # relative; rounding to bfloat16 gives 3e-3

_linear = torch.nn.functional.linear


@contextmanager
def faster_product(a: torch.Tensor, b: torch.Tensor) -> Iterator[None]:
    """Inside it, torch computes the product of the matrices ``a`` and ``b`` as fast as it can in their dtype."""
    is_large = a.numel() * b.shape[-1] >= LEAST_MULTIPLICATIONS
    if is_large and a.device.type == "cpu" and a.dtype == b.dtype == torch.float32 and onednn_is_exact():
        with _onednn():
            yield
    else:
        yield


@cache
def onednn_is_exact() -> bool:
    """Whether oneDNN computes in float32 here, although it may round to bfloat16."""
    if not hasattr(torch.backends.mkldnn, "matmul") or not torch.backends.mkldnn.is_available():  # torch before 2.9
        return False
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, PROBE_SIZE, PROBE_SIZE, generator=random)
    with _onednn():
        product = a @ b
    exact = a.double() @ b.double()
    return float((product - exact).norm() / exact.norm()) < LARGEST_ERROR


_lock = Lock()  # the setting is the process's
_inside = 0  # threads that need it
_before = "none"


@contextmanager
def _onednn() -> Iterator[None]:
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined] # not in torch 2.6
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = settings.fp32_precision
            settings.fp32_precision = "bf16"
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                settings.fp32_precision = _before


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # As rows: torch would expand the weights for inputs of three dimensions that are not contiguous.
        rows = inputs.reshape(-1, inputs.shape[-1])
        with faster_product(rows, weight.T):
            return _linear(rows, weight, bias).view(*inputs.shape[:-1], len(weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, _: torch.Tensor) -> None:
        values, weight, _bias = inputs
        ctx.save_for_backward(values if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_inputs = of_weight = of_bias = None
        if weight is not None:
            with faster_product(rows, weight):
                of_inputs = (rows @ weight).view(*gradient.shape[:-1], weight.shape[1])
        if inputs is not None:
            inputs = inputs.reshape(-1, inputs.shape[-1])
            with faster_product(rows.T, inputs):
                of_weight = rows.T @ inputs
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_inputs, of_weight, of_bias


def multiply_where_faster() -> None:
    """Replace, once, torch's ``linear``, which linear layers call, by one with faster products."""
    if torch.nn.functional.linear is not _linear or not onednn_is_exact():
        return

    @wraps(_linear)
    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        is_plain = input.dtype == weight.dtype == torch.float32 and type(weight) in (torch.Tensor, torch.nn.Parameter)
        is_small = input.numel() * len(weight) < LEAST_MULTIPLICATIONS
        if is_small or not is_plain or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
            return _linear(input, weight, bias)
        return _Linear.apply(input, weight, bias)

    torch.nn.functional.linear = linear
