"""The places of files' tensors in the model that transformers makes of them: names and arrangements can differ."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.reader import Checkpoint
from mpu_cli.model.family import Family, as_in_memory
from mpu_cli.model.layout import HEAD, Piece, pieces_of
from mpu_cli.model.wrappers import family_of

# Models whose linear layers are held in 4 bits (NF4; QLoRA, Dettmers et al. 2023), by bitsandbytes through
# transformers.
#
# NF4 rounds 64 weights in a row of the file to 16 levels of their largest magnitude. Embeddings, output head, vectors
# and stacks of experts keep their dtype.

BLOCK = 64  # weights that share a scale
BYTES = 0.5 + 4 / BLOCK  # of a weight with its share of the scale, in float32
COMPARED = 4  # blocks of a matrix that are compared with its file


def check_bitsandbytes() -> None:
    """Raises MpuError if bitsandbytes is not installed."""
    if not find_spec("bitsandbytes"):
        raise MpuError("--lora quantize needs bitsandbytes", "install it with pip install bitsandbytes")


def in_4_bits(empty_model: PreTrainedModel, dtype: torch.dtype) -> BitsAndBytesConfig:
    """The settings with which transformers loads the model of this skeleton in 4 bits; products are computed in
    ``dtype``."""
    check_bitsandbytes()
    linear = linear_layers(empty_model)
    if not linear:
        raise UsageError("--lora quantize=nf4: this model has no linear layers that can be held in 4 bits")
    skipped_modules = [
        name for name, module in empty_model.named_modules() if hasattr(module, "weight") and name not in linear
    ]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=skipped_modules,
    )


def linear_layers(empty_model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """The layers whose weights can be held in 4 bits, by name."""
    head = empty_model.get_output_embeddings()
    modules = empty_model.named_modules()
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
    if not blocks:  # less than one, as in toy models
        return True
    numbers = torch.randint(blocks, (min(COMPARED, blocks),), generator=draw)
    part = file_tensor.reshape(-1)[: blocks * BLOCK].view(blocks, BLOCK)[numbers].to(state.dtype)
    expected, of_part = quantize_4bit(part.reshape(-1), blocksize=BLOCK, quant_type="nf4")
    packed = parameter.detach().reshape(-1)[: blocks * BLOCK // 2].view(blocks, -1)[numbers.to(parameter.device)].cpu()
    absmax = state.absmax[numbers.to(state.absmax.device)].cpu()
    return torch.equal(packed.reshape(-1), expected.reshape(-1)) and torch.equal(absmax, of_part.absmax)


def settle(model: PreTrainedModel) -> None:
    """Keep CPUs from repacking weights for products in bfloat16 once the model is evaluated: otherwise training and its
    reference would compute differently."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def share_in_4_bits(model: PreTrainedModel) -> float:
    """The share of the weights of ``model`` that is held in 4 bits."""
    sizes = {True: 0, False: 0}
    for parameter in model.parameters():
        sizes[is_quantized(parameter)] += shape_of(parameter).numel()
    return sizes[True] / max(1, sum(sizes.values()))


def family_of_model(model: PreTrainedModel) -> Family | None:
    """The table of ``model``'s family; None if there is none."""
    return family_of(model.config.model_type, model.config.get_text_config().model_type)


Names = dict[str, list[Piece]]  # a model's parameters by name → their pieces in files


def pieces_in_files(name: str, shape: Sequence[int], files: Collection[str], model: PreTrainedModel) -> list[Piece]:
    """The tensors of ``files``, by name, that parameter ``name`` of ``model`` is read from; none if there are none.

    Files of a bare model lack a prefix, some call the output layer by another name, some hold an embedding under the
    name of the head that is tied to it, and those of a mixture may hold a matrix for each expert.
    """
    prefix = f"{model.base_model_prefix}."
    family = family_of_model(model)
    names = [name, *(target for target, source in model.all_tied_weights_keys.items() if source == name)]
    candidates = [[Piece(candidate, tuple(shape))] for candidate in names]
    if family:
        if HEAD in names:
            candidates += [[Piece(head, tuple(shape))] for head in family.heads]
        if pieces := pieces_of(family, name, shape):
            candidates.append(pieces)
        for in_file, in_memory in family.renamed:
            if any(candidate.startswith(in_memory) for candidate in names):
                candidates += [[piece.with_new_prefix(in_memory, in_file) for piece in pieces] for pieces in candidates]
    candidates += [[piece.with_new_prefix(prefix, "") for piece in pieces] for pieces in candidates]
    return next((pieces for pieces in candidates if all(piece.file_name in files for piece in pieces)), [])


def is_trained(piece: Piece, model: PreTrainedModel) -> bool:
    """Whether ``piece`` is part of what is published, trained and returned."""
    family = family_of_model(model)
    if family is None:
        return True
    frozen = [tensor for tensor in (*family.tensors, *family.layer_tensors) if not tensor.trained]
    constant = (part.name for tensor in frozen for part in (tensor, *tensor.in_files()))
    frozen_prefixes = (*family.frozen_prefixes, *as_in_memory(family).frozen_prefixes)
    return not piece.file_name.startswith(frozen_prefixes) and not piece.file_name.endswith(tuple(constant))


def check_stored(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Raises MpuError unless each parameter of ``model`` is in the files, in this shape."""
    for name, parameter in model.named_parameters():
        pieces = pieces_in_files(name, shape_of(parameter), checkpoint.tensors, model)
        if not pieces or any(checkpoint.tensors[piece.file_name].shape != piece.shape for piece in pieces):
            raise MpuError(
                f"{checkpoint.path}: transformers trains {name!r}, but these files have no such tensor of that shape"
            )


def in_memory(model: PreTrainedModel, files: Collection[str]) -> dict[str, torch.Tensor]:
    """Each of the tensors that ``files`` name, as a view of a parameter or buffer of ``model``; of what is tied, each
    of its names."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {
        piece.file_name: piece.of(tensor)
        for name, tensor in tensors.items()
        for piece in pieces_in_files(name, shape_of(tensor), files, model)
    }


def has_separate_heads(model: PreTrainedModel, checkpoint: Checkpoint) -> bool:
    """Whether the config of ``model`` ties tensors that the files hold with different values: transformers then leaves
    them apart."""
    files = checkpoint.tensors
    shapes = {name: shape_of(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)}
    for pair in model.all_tied_weights_keys.items():
        stored: set[str] = set()
        for name in pair:
            if name in shapes:
                stored |= {piece.file_name for piece in pieces_in_files(name, shapes[name], files, model)[:1]}
        if len(stored) == 2 and not torch.equal(*map(checkpoint.tensor, stored)):
            return True
    return False
