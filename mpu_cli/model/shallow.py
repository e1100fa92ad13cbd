"""A model without some of its layers, as a view of its files: nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpu_cli.errors import MpuError, UsageError, first_line
from mpu_cli.model.layout import Layout, layout_of, without_layers
from mpu_cli.model.source import Model

# How the entries of configs end that can be lists of one value for each layer.
PER_LAYER = ("layer_types", "rope_layers", "layer_rope_theta", "moe_topk", "heads_per_layer")
BY_LAYER = "per_layer_config"  # a table with the settings of some layers, by number
UNLIKE = "--omit-layers does not work with this model: what its layers compute depends on their number"
# entries that make what a layer computes depend on its number, or on how many there are
BY_NUMBER = ("scale_attn_by_inverse_layer_idx", "scale_depth")


def shallow(model: Model, omitted: Sequence[int]) -> Model:
    """``model`` without the layers ``omitted``, counted from 0, and the others renumbered.

    Raises MpuError if what its layers compute depends on their number in a way that the config cannot say, UsageError
    if there is no such layer.
    """
    if not omitted:
        return model
    layout = model.layout
    cut = without_layers(layout, omitted)
    alias = {layout.alias: layout.alias} if layout.alias else {}
    checkpoint = model.checkpoint.with_renamed_tensors({**cut.names, **alias})
    try:
        config = _config(model, layout, omitted)
        actual_layout = layout_of(checkpoint.tensors, config, model.source)
    except MpuError as error:
        raise MpuError(f"{model.source}: {UNLIKE}") from error
    if actual_layout.structures != cut.layout.structures or actual_layout.tensors != cut.layout.tensors:
        raise MpuError(f"{model.source}: {UNLIKE}")
    return replace(model, checkpoint=checkpoint, config=config)


def names_in_base(model: Model, omitted: Sequence[int]) -> dict[str, str]:
    """What the tensors of ``shallow(model, omitted)`` are called in ``model``."""
    layout = model.layout
    return {shallow_name: name for name, shallow_name in without_layers(layout, omitted).names.items()}


def _config(model: Model, layout: Layout, omitted: Sequence[int]) -> dict[str, object]:
    """The config with fewer layers, and the lists in it that have an entry for each layer with as many fewer."""
    count = len(layout.structures)
    model_config: Any = dict(model.config)
    inner = layout.family.text_config
    if inner is None or not isinstance(model_config.get(inner), dict):
        inner = None
    section = dict(model_config[inner]) if inner else model_config
    source = layout.family.sizes["layers"]
    names: tuple[str, ...] = ()
    if isinstance(source, str):
        names = (source,)
    elif isinstance(source, list | tuple):
        names = tuple(source)
    counts = {name: count - len(omitted) for name in names if section.get(name) == count}
    if not counts:
        raise UsageError("--omit-layers: the model's config.json does not say how many layers it has")
    if any(layout.config.get(name) for name in BY_NUMBER):
        raise MpuError(f"{model.source}: {UNLIKE}")
    lists = {
        name: [value for layer, value in enumerate(values) if layer not in omitted]
        for name, values in _of_layers(model_config, inner).items()
    }
    section |= counts | lists
    if isinstance(by_number := section.get(BY_LAYER), dict):
        remaining_layers = [layer for layer in range(count) if layer not in omitted]
        places = {str(layer): str(i) for i, layer in enumerate(remaining_layers)}
        section[BY_LAYER] = {places[layer]: entries for layer, entries in by_number.items() if layer in places}
    config = {**model_config, inner: section} if inner else section
    if _of_layers(config, inner) != lists:
        raise MpuError(f"{model.source}: {UNLIKE}")
    return config


def _of_layers(config: Mapping[str, Any], inner: str | None) -> dict[str, list[Any]]:
    """The entries with one value for each layer, as transformers fills them in."""
    from huggingface_hub.errors import StrictDataclassError

    from mpu_cli.model.network import config_of

    try:
        filled = config_of(config)
        filled.validate()
    except (StrictDataclassError, ValueError) as error:
        raise MpuError(f"transformers does not take the config ({first_line(error)})") from error
    lists: dict[str, list[Any]] = {}
    for name, value in vars(getattr(filled, inner) if inner else filled).items():
        if name.endswith(PER_LAYER) and isinstance(value, list | tuple) and value:
            lists[name] = list(value)
    return lists
