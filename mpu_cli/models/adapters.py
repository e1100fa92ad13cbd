"""LoRA adapters of peft's: which base they belong to, and a model with one added to its weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from transformers import (
    PreTrainedModel,
)

from mpu_cli.boundary.documents import read_json_object
from mpu_cli.checkpoint.header import short
from mpu_cli.checkpoint.reader import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    INDEX_NAME,
    WEIGHTS_NAME,
    open_checkpoint,
    quoted_list,
)
from mpu_cli.errors import MpuError
from mpu_cli.models.library_errors import blaming
from mpu_cli.models.quantized import is_quantized
from mpu_cli.models.source import cached_snapshot
from mpu_cli.models.staging import staged_adapter


def is_adapter(folder: Path) -> bool:
    """Whether ``folder`` holds a peft adapter and no model's weights; a model's config may lie beside it."""
    weights = (WEIGHTS_NAME, INDEX_NAME)
    return (folder / ADAPTER_CONFIG).is_file() and not any((folder / name).exists() for name in weights)


def adapter_base(folder: Path) -> str:
    """The base model of the peft adapter in ``folder``.

    Its config, which may be another party's, names a folder beside it or a model in the Hub's cache: no other file is
    opened and nothing is asked for because it says so. Raises MpuError for anything else.
    """
    path = folder / ADAPTER_CONFIG
    base = read_json_object(path, links=False).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise MpuError(f"{path}: base_model_name_or_path does not name the adapter's base model")
    beside = folder.resolve().parent / Path(base).name
    if base == beside.name and beside.is_dir():
        return str(beside)
    if snapshot := cached_snapshot(base):
        return str(snapshot)
    raise MpuError(f"{path}: its base is said to be {short(base)}, which is not beside it", "name it with --base")


def with_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """``model`` with the adapter in ``folder`` added to its weights.

    Raises MpuError if peft cannot read it, or if a tensor of it has no place in the model.
    """
    from peft import PeftModel, get_peft_model_state_dict

    with blaming(f"{folder}: peft cannot apply this adapter to the model"), staged_adapter(folder) as ours:
        names = {name.replace(".default", "") for name in open_checkpoint(ours / ADAPTER_WEIGHTS).tensors}
        adapted = PeftModel.from_pretrained(model, ours, local_files_only=True)
        if unused := names - get_peft_model_state_dict(adapted, save_embedding_layers=True).keys():
            raise MpuError(f"{folder}: the model has no place for this adapter's {quoted_list(unused)}")
        in_4_bits = any(map(is_quantized, model.parameters()))  # adding to those would round the adapter
        apart = in_4_bits or _is_on_tied(adapted)
        return adapted.get_base_model() if apart else adapted.merge_and_unload()


def _is_on_tied(adapted: torch.nn.Module) -> bool:
    """Whether an adapter changes a tensor that a layer without one has, too: merged, it would change that as well."""
    from peft.tuners.lora import LoraLayer

    names = Counter(id(p) for _, p in adapted.named_parameters(remove_duplicate=False))
    bases = (module.get_base_layer() for module in adapted.modules() if isinstance(module, LoraLayer))
    return any(names[id(p)] > 1 for base in bases for p in base.parameters(recurse=False))
