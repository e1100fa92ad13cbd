"""The decoder layers of a model, and what one of them reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The layers of ``model``, which may be wrapped; of one that reads images, those of its language model."""
    unwrapped_model: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    depth = unwrapped_model.config.get_text_config().num_hidden_layers
    lists = (module for module in unwrapped_model.get_decoder().modules() if isinstance(module, torch.nn.ModuleList))
    return next(layers for layers in lists if len(layers) == depth and any(layers[0].children()))


@contextmanager
def output_of_layer(model: torch.nn.Module, layer: int | None) -> Iterator[list[torch.Tensor]]:
    """Passes of ``model`` inside it leave the output of ``layer``, counted from 0 and not the last, in the list that
    this yields, (batch, length, width). The layers above read it detached: nothing of theirs is kept for a backward
    pass. Without a layer, passes are as usual."""
    layer_outputs: list[torch.Tensor] = []
    if layer is None:
        yield layer_outputs
        return

    def keep(_: torch.nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        states = inputs[0] if inputs else named["hidden_states"]
        layer_outputs[:] = [states]
        if inputs:
            return (states.detach(), *inputs[1:]), named
        return inputs, named | {"hidden_states": states.detach()}

    hook = decoder_layers(model)[layer + 1].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield layer_outputs
    finally:
        hook.remove()
