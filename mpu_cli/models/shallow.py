"""A model without some of its layers, as a view of its files: nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpu_cli.architectures.depth import without_layers
from mpu_cli.architectures.layout import Layout, layout_of
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.models.source import Model

# How the entries of configs end that are lists of one value for each layer.
PER_LAYER = ("layer_types", "rope_layers", "attention_layers", "block_type")


def shallow(model: Model, omitted: Sequence[int]) -> Model:
    """``model`` without the layers ``omitted``, counted from 0, and the others renumbered.

    Raises MpuError if its config decides by a layer's number what the layer computes in a way that cannot be carried
    over, UsageError if there is no such layer.
    """
    if not omitted:
        return model
    layout = layout_of(model.checkpoint.tensors, model.config, model.source)
    cut = without_layers(layout, omitted)
    alias = {layout.alias: layout.alias} if layout.alias else {}
    checkpoint = model.checkpoint.renamed({**cut.names, **alias})
    config = _config(model, layout, omitted)
    reason = (
        f"{model.source}: --omit-layers does not work with this model: what its layers compute depends on their number"
    )
    try:
        own = layout_of(checkpoint.tensors, config, model.source)
    except MpuError as error:
        raise MpuError(reason) from error
    if own.structures != cut.layout.structures or list(own.tensors) != list(cut.layout.tensors):
        raise MpuError(reason)
    return replace(model, checkpoint=checkpoint, config=config)


def _config(model: Model, layout: Layout, omitted: Sequence[int]) -> dict[str, object]:
    """The config with fewer layers, and the lists in it that have an entry for each layer with as many fewer."""
    count = len(layout.structures)
    inner = layout.family.text_config
    nested = bool(inner) and isinstance(model.config.get(inner), dict)
    source = layout.family.sizes["layers"]
    keys = (source,) if isinstance(source, str) else tuple(source) if isinstance(source, (list, tuple)) else ()

    def cut(values: Sequence[Any]) -> list[Any]:
        return [value for layer, value in enumerate(values) if layer not in omitted]

    def lists(config: Mapping[str, object]) -> dict[str, list[Any]]:
        held = _filled(config)
        held = getattr(held, inner) if nested and inner else held
        return {name: list(value) for name, value in vars(held).items() if name.endswith(PER_LAYER) and value}

    section: dict[str, object] = dict(model.config[inner] if nested else model.config)  # type: ignore[call-overload]
    named = [key for key in keys if section.get(key) == count]
    if not named:
        raise UsageError("--omit-layers: the model's config.json does not say how many layers it has")
    per_layer = {name: cut(values) for name, values in lists(model.config).items()}
    section |= {key: count - len(omitted) for key in named} | per_layer
    config = {**model.config, inner: section} if nested else section
    if lists(config) != per_layer:
        raise MpuError(f"{model.source}: --omit-layers does not work with a model whose layers differ by their number")
    return config


def _filled(config: Mapping[str, object]) -> Any:
    """What transformers makes of a config."""
    from transformers import AutoConfig

    own = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    return AutoConfig.for_model(**own)
