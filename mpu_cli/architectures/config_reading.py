"""What a config says of a model: its family, its sizes, and what decides the symmetries of each layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mpu_cli.architectures.axes import names_of
from mpu_cli.architectures.family import Config, Family, SizeSource, Tensor, variants_of
from mpu_cli.architectures.symmetries import (
    GROUPED,
    LATENTS,
    ORDERED,
    Ffn,
    Structure,
)
from mpu_cli.architectures.wrappers import REFUSED, family_of, supported_families
from mpu_cli.errors import MpuError

OPTIONAL = ("head_dim", "experts", "expert_ffn", "shared_ffn", "channels")  # sizes that a config may lack


def tensor_exists(tensor: Tensor, config: Config, layer: int) -> bool:
    if tensor.when is None:
        return True
    return bool(config.get(tensor.when) if isinstance(tensor.when, str) else tensor.when(config, layer))


def with_defaults(family: Family, config: Mapping[str, object]) -> dict[str, object]:
    """``config`` with the family's defaults, and with what newer configs keep under rope_parameters."""
    entries = {name: value for name, value in config.items() if value is not None}
    if family.text_config and isinstance(text := config.get(family.text_config), dict):
        text_entries = {
            name: value for name, value in text.items() if value is not None and name != "tie_word_embeddings"
        }
        entries = {**entries, **text_entries, "model_type": config["model_type"]}
    rope = entries.get("rope_parameters")
    inner = (
        {name: value for name, value in rope.items() if not isinstance(value, dict)} if isinstance(rope, dict) else {}
    )
    return {**family.defaults, **inner, **entries}


def structure_of(family: Family, config: Config, sizes: Mapping[str, int], layer: int, where: str) -> Structure:
    d = sizes["head_dim"]
    planes = family.planes
    rotary = (
        0 if planes is None else d if family.rotary is None else int(family.rotary({**config, "head_dim": d}, layer))
    )
    if not 0 <= rotary <= d or rotary % 2:
        raise MpuError(
            f"{where}: RoPE over {rotary} of a head's {d} coordinates does not divide into planes (config.json)"
        )
    norm = value_of(family.qk_norm, config, layer)
    movable = value_of(family.movable_heads, config, layer)
    ffns: list[Ffn] = []
    groups = 0
    mixture = family.experts is not None and bool(family.experts(config, layer))
    axes = {
        name
        for tensor in family.layer_tensors
        if tensor_exists(tensor, config, layer)
        for axis in tensor.axes
        for name in names_of(axis)
    }
    if "ffn" in axes:
        ffns.append(Ffn("", family.gated))
    if "s-ffn" in axes:
        ffns.append(Ffn("s-", family.gated))
    if mixture:
        ffns.append(Ffn("e-", family.gated))
        groups = int(config.get(family.groups) or 1) if isinstance(family.groups, str) else family.groups
    return Structure(
        planes,
        rotary,
        norm,
        bool(movable),
        tuple(ffns),
        groups,
        attention="query" in axes,
        elementwise="|mixed|" in axes,
        keys_are_values=bool(value_of(family.keys_are_values, config, layer)),
        reads=value_of(family.reads, config, layer),
        latent=value_of(family.latent, config, layer) if "mla-query" in axes else None,
        latents=tuple(axis for axis in LATENTS if axis in axes),
        grouped=tuple(heads for heads in GROUPED if heads.inner in axes),
        ordered=tuple(axis for axis in ORDERED if axis in axes),
    )


def value_of(rule: Any, config: Config, layer: int) -> Any:
    return rule(config, layer) if callable(rule) else rule


def supported_family(config: Mapping[str, object], where: str) -> Family:
    model_type, text = config.get("model_type"), config.get("text_config")
    text_type = text.get("model_type") if isinstance(text, dict) else None
    family = family_of(model_type, text_type)
    if family is None and (reason := REFUSED.get(str(model_type))):
        raise MpuError(f"{where}: architecture {model_type!r} is not supported: {reason}")
    if family is None:
        inside = f" around {text_type!r}" if str(model_type) in supported_families() else ""
        raise MpuError(
            f"{where}: architecture {model_type!r}{inside} is not supported "
            f"(supported: {', '.join(supported_families())}), and mpu does not guess: a transform "
            "that does not fit would change what the model computes"
        )
    if config.get("quantization_config") is not None:
        raise MpuError(
            f"{where}: is quantised (quantization_config in config.json)",
            "use the weights as trained, or dequantise them: from_pretrained(…, dtype=torch.bfloat16) and "
            "save_pretrained",
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for key, value in family.unless.items():
        actual = config.get(key, rope.get(key, value) if isinstance(rope, dict) else value)
        if actual != value:
            raise MpuError(f"{where}: {model_type} with {key} = {actual!r} is not supported (only {value!r})")
    return family


def named_as(family: Family, tensors: Collection[str]) -> Family:
    """``family`` by the names in these files: those that files usually have, or those of the model in memory."""
    return max(variants_of(family), key=lambda variant: sum(tensor.name in tensors for tensor in variant.tensors))


def sizes_of_model(family: Family, config: Config, where: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for size, source in family.sizes.items():
        if (value := size_of(size, source, config, sizes, 0, where)) is not None:
            sizes[size] = value
    if "head_dim" not in sizes:
        if sizes["model"] % sizes["heads"]:
            raise MpuError(f"{where}: {sizes['heads']} heads do not divide a width of {sizes['model']} (config.json)")
        sizes["head_dim"] = sizes["model"] // sizes["heads"]
    check_heads(family, sizes, where)
    return sizes


def sizes_of_layer(family: Family, config: Config, sizes: dict[str, int], layer: int, where: str) -> Mapping[str, int]:
    """``sizes`` with those that are a layer's own."""
    if not family.layer_sizes:
        return sizes
    overrides = {
        name: size_of(name, source, config, sizes, layer, where) for name, source in family.layer_sizes.items()
    }
    layer_sizes = sizes | {name: value for name, value in overrides.items() if value is not None}
    check_heads(family, layer_sizes, where)
    return layer_sizes


def size_of(
    size: str, source: SizeSource, config: Config, sizes: Mapping[str, int], layer: int, where: str
) -> int | None:
    """A size, from its source; None if the model has no such thing."""
    if callable(source):
        key, value = size, source({**config, **{f"size:{name}": n for name, n in sizes.items()}}, layer)
    elif isinstance(source, int):
        key, value = size, source
    else:
        keys = (source,) if isinstance(source, str) else tuple(source)
        key = next((name for name in keys if config.get(name) is not None), keys[0])
        value = config.get(key)
    if value is None and size == "kv_heads":
        value = sizes["heads"]
    if value is None and key == "n_inner":
        value = 4 * sizes["model"]
    if value is None and (size in OPTIONAL or callable(source)):
        return None
    if type(value) is not int or value < 1:
        raise MpuError(f"{where}: {key} in config.json is {value!r}, not a positive integer")
    return value


def check_heads(family: Family, sizes: Mapping[str, int], where: str) -> None:
    if sizes["heads"] % sizes["kv_heads"]:
        raise MpuError(f"{where}: {sizes['kv_heads']} KV heads do not divide {sizes['heads']} heads (config.json)")
    if family.planes and family.rotary is None and sizes["head_dim"] % 2:
        raise MpuError(f"{where}: head size {sizes['head_dim']} does not divide into RoPE planes (config.json)")
