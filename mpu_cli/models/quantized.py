"""Models whose linear layers are held in 4 bits (NF4; QLoRA, Dettmers et al. 2023), by bitsandbytes through
transformers.

NF4 rounds 64 weights in a row of the file to 16 levels of their largest magnitude. Embeddings, output head, vectors and
stacks of experts keep their dtype.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from mpu_cli.errors import MpuError, UsageError

BLOCK = 64  # weights that share a scale
BYTES = 0.5 + 4 / BLOCK  # of a weight with its share of the scale, in float32
COMPARED = 4  # blocks of a matrix that are compared with its file


def check_bitsandbytes() -> None:
    """Raises MpuError if bitsandbytes is not installed."""
    if not find_spec("bitsandbytes"):
        raise MpuError("--quantize needs bitsandbytes", "install it with pip install bitsandbytes")


def in_4_bits(bare: PreTrainedModel, dtype: torch.dtype) -> BitsAndBytesConfig:
    """How transformers loads the model that ``bare`` is a skeleton of, with products computed in ``dtype``.

    Raises UsageError if it has no layer that can be held in 4 bits.
    """
    check_bitsandbytes()
    linear = linear_layers(bare)
    if not linear:
        raise UsageError("--quantize nf4: this model has no linear layers that can be held in 4 bits")
    skipped_modules = [
        name for name, module in bare.named_modules() if hasattr(module, "weight") and name not in linear
    ]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=skipped_modules,
    )


def linear_layers(bare: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """The layers of the model that ``bare`` is a skeleton of whose weights can be held in 4 bits, by name."""
    head = bare.get_output_embeddings()
    modules = bare.named_modules()
    return {name: module for name, module in modules if type(module) is torch.nn.Linear and module is not head}


def is_quantized(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` is held in 4 bits."""
    return getattr(parameter, "quant_state", None) is not None


def shape_of(parameter: torch.Tensor) -> torch.Size:
    """The shape of ``parameter``, however it is held."""
    return torch.Size(parameter.quant_state.shape) if is_quantized(parameter) else parameter.shape  # type: ignore[attr-defined]


def dequantized_weight(parameter: torch.Tensor) -> torch.Tensor:
    """``parameter`` as the model computes with it: itself, or the matrix that its 4 bits stand for."""
    if not is_quantized(parameter):
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.detach(), parameter.quant_state)  # type: ignore[attr-defined]


def scales(parameter: torch.Tensor) -> torch.Tensor:
    """The numbers of ``parameter`` that could be NaN or infinite."""
    return parameter.quant_state.absmax if is_quantized(parameter) else parameter.detach()  # type: ignore[attr-defined]


def is_rounding_of(parameter: Any, file_tensor: torch.Tensor, draw: torch.Generator) -> bool:
    """Whether ``parameter`` is NF4 of ``file_tensor``, by ``COMPARED`` blocks of it at places that ``draw`` chooses."""
    from bitsandbytes.functional import quantize_4bit

    state, blocks = parameter.quant_state, file_tensor.numel() // BLOCK
    numbers = torch.randint(blocks, (min(COMPARED, blocks),), generator=draw)
    part = file_tensor.reshape(-1)[: blocks * BLOCK].view(blocks, BLOCK)[numbers].to(state.dtype)
    expected, of_part = quantize_4bit(part.reshape(-1), blocksize=BLOCK, quant_type="nf4")
    packed = parameter.detach().reshape(-1)[: blocks * BLOCK // 2].view(blocks, -1)[numbers.to(parameter.device)].cpu()
    absmax = state.absmax[numbers.to(state.absmax.device)].cpu()
    return torch.equal(packed.reshape(-1), expected.reshape(-1)) and torch.equal(absmax, of_part.absmax)


def settle(model: PreTrainedModel) -> None:
    """Keep CPUs from repacking weights for products in bfloat16 once the model is evaluated: what training and its
    reference compute would differ."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def share_in_4_bits(model: PreTrainedModel) -> float:
    """The share of the weights of ``model`` that is held in 4 bits."""
    sizes = {True: 0, False: 0}
    for parameter in model.parameters():
        sizes[is_quantized(parameter)] += shape_of(parameter).numel()
    return sizes[True] / max(1, sum(sizes.values()))
