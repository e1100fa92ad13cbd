"""Weights in parts on several processes: which optimisers can train them so, and gathering them again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast
from transformers import PreTrainedModel

from mpu_cli.client.optimizers import OPTIMIZERS
from mpu_cli.client.processes import from_first
from mpu_cli.errors import UsageError
from mpu_cli.models.logits import Head, separate_head


def split_weights(model: PreTrainedModel) -> None:
    """Send each tensor from the first process to all and keep a part of it in each, before the next one is sent."""
    import deepspeed

    settings = {"train_batch_size": PartialState().num_processes, "zero_optimization": {"stage": 3}}
    deepspeed.zero.Init(module=model, config_dict_or_path=settings, mem_efficient_linear=False)


def whole_head(model: PreTrainedModel) -> Head | None:
    """A copy of the output head, whole in every process, before the weights are split; None if it is trained, or does
    not alone turn what it reads into logits.

    With it, logits of a batch need not exist together. It is as large as the embeddings: 1 GB at 8B in bfloat16.
    """
    head = model.get_output_embeddings()
    if head is None or any(parameter.requires_grad for parameter in head.parameters()):
        return None
    if not from_first(lambda: separate_head(model) is not None):
        return None
    head_copy = copy.deepcopy(head)
    for tensor in (*head_copy.parameters(), *head_copy.buffers()):
        tensor.data = broadcast(tensor.data.to(PartialState().device), from_process=0)
    return head_copy


def check_sharding(accelerator: Accelerator, optimizer: str) -> None:
    """Raises UsageError if ``whole_parameters`` or the optimiser does not support how the weights are sharded."""
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None and fsdp.fsdp_version == 1:
        raise UsageError("FSDP 1 hides which shard belongs to which weight", "set accelerate's fsdp_version to 2")
    with_deepspeed = getattr(accelerator.state, "deepspeed_plugin", None) is not None
    if with_deepspeed and OPTIMIZERS[optimizer].granularity != "element":
        raise UsageError(
            f"DeepSpeed passes all weights to the optimiser as one tensor, but {optimizer} works on each tensor",
            "use FSDP 2 with --optim adamw-blockwise, or --optim adamw",
        )
    if fsdp is not None and OPTIMIZERS[optimizer].granularity == "matrix":
        raise UsageError(f"{optimizer} needs each matrix whole, but FSDP shards them", "use --optim adamw-blockwise")


def whole_parameters(
    trained: torch.nn.Module, chosen: Callable[[str], bool] = lambda _: True
) -> Iterator[tuple[str, torch.Tensor]]:
    """The ``chosen`` parameters by their own names, each gathered by all processes when its turn comes."""
    from accelerate.utils import extract_model_from_parallel
    from torch.distributed.tensor import DTensor

    for name, parameter in extract_model_from_parallel(trained).named_parameters():
        if not chosen(name):
            continue
        if hasattr(parameter, "ds_id"):  # DeepSpeed's ZeRO-3
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().clone()
        else:
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
