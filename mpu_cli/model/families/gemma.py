"""Gemma and models built like it: norms around attention and feed-forward layers, and layers of several kinds."""

from __future__ import annotations

from dataclasses import replace

from mpu_cli.model.families.llama import LLAMA
from mpu_cli.model.families.parts import (
    INPUT_NORMS,
    SANDWICH,
    SHARED_NORM,
    SIZES,
    attention,
    both,
    entry,
    gated_ffn,
    layer_type_is,
    linear,
    negate,
    rms_norm,
    where_rope,
)
from mpu_cli.model.family import Config, Repeated, Rule, Tensor

# Norms multiply by 1 + w, which takes any order of w. Soft-capping, scales and windows pass through.
GEMMA = replace(
    LLAMA,
    model_types=("gemma",),
    layer_tensors=(*rms_norm("input_layernorm"), *attention(), *rms_norm("post_attention_layernorm"), *gated_ffn()),
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 16, "head_dim": 256},
)

GEMMA2 = replace(
    GEMMA,
    model_types=("gemma2",),
    layer_tensors=(*SANDWICH, *gated_ffn()),
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256},
)

GEMMA3 = replace(
    GEMMA2, model_types=("gemma3_text",), layer_tensors=(*SANDWICH, *SHARED_NORM, *gated_ffn()),
    unless={}, note="text only",
)  # fmt: skip


def is_full(config: Config, layer: int) -> bool:
    """Whether a layer of Gemma 4 attends to everything; the last one does, whatever the config says."""
    return layer == config["num_hidden_layers"] - 1 or layer_type_is("full_attention", every=6)(config, layer)


def of_full_layers(name: str, original: str, default: int | None = None) -> Rule:
    """A size that Gemma 4's full layers have of their own: as transformers saves it, or by its ``original`` entry."""

    def rule(config: Config, layer: int) -> int | None:
        saved = config.get("per_layer_config")
        if isinstance(saved, dict):
            by_layer = {int(number): entry for number, entry in saved.items()}  # transformers writes "05" beside "11"
            return by_layer.get(layer, {}).get(name, config.get(name))
        if is_full(config, layer):
            return config.get(original) or default or config.get(name)
        return config.get(name)

    return rule


def has_one_projection(config: Config, layer: int) -> bool:
    """Whether the keys of a layer of Gemma 4 are its values, too."""
    return bool(config.get("attention_k_eq_v")) and is_full(config, layer)


def kv_heads(config: Config, layer: int) -> int | None:
    """KV heads of a layer of Gemma 4; full layers whose keys are their values have a number of their own."""
    fewer = of_full_layers("num_key_value_heads", "num_global_key_value_heads")
    has_global_heads = "per_layer_config" in config or has_one_projection(config, layer)
    return fewer(config, layer) if has_global_heads else config["num_key_value_heads"]


def own_keys(config: Config) -> int:
    """The number of layers, the first ones, with keys and values of their own: the last ones may read others'."""
    return int(config["num_hidden_layers"]) - int(config.get("num_kv_shared_layers") or 0)


def makes_keys(config: Config, layer: int) -> bool:
    """Whether a layer has keys and values of its own."""
    return layer < own_keys(config)


def last_of_kind(full: Rule) -> Rule:
    """The layer whose keys and values a layer reads: of the last that make some, the one of its kind. None: its own."""

    def rule(config: Config, layer: int) -> int | None:
        if makes_keys(config, layer):
            return None
        return [i for i in range(own_keys(config)) if full(config, i) == full(config, layer)][-1]

    return rule


makes_values = both(makes_keys, negate(has_one_projection))

has_channels = entry("hidden_size_per_layer_input")


def ffn_of_layer(config: Config, layer: int) -> int:
    """Gemma 4's layers that read others' keys may have twice as many neurons."""
    return config["intermediate_size"] * (
        2 if config.get("use_double_wide_mlp") and not makes_keys(config, layer) else 1
    )


# Values are normed without a weight, which every rotation passes. In full layers RoPE turns some planes only, which are
# halves of the whole head all the same.
GEMMA4 = replace(
    GEMMA2,
    model_types=("gemma4_text",),
    sizes={
        **SIZES, "experts": "num_experts", "expert_ffn": "moe_intermediate_size",
        "channels": lambda config, _: config.get("hidden_size_per_layer_input") or None,
        "channel-vocab": "vocab_size_per_layer_input",
    },
    layer_sizes={
        "head_dim": of_full_layers("head_dim", "global_head_dim", 512), "kv_heads": kv_heads, "ffn": ffn_of_layer,
    },
    tensors=(
        *LLAMA.tensors,
        Tensor("model.embed_tokens_per_layer.weight", ("channel-vocab", Repeated("channel", "layers")), has_channels),
        Tensor("model.per_layer_model_projection.weight", (Repeated("channel", "layers"), "model"), has_channels),
        Tensor("model.per_layer_projection_norm.weight", ("|channel|",), has_channels),
    ),
    layer_tensors=(
        *INPUT_NORMS, *rms_norm("pre_feedforward_layernorm"), *rms_norm("post_feedforward_layernorm"),
        *linear("self_attn.q_proj", "query", "model", bias="attention_bias"),
        *linear("self_attn.k_proj", "key", "model", bias="attention_bias", when=makes_keys),
        *linear("self_attn.v_proj", "value", "model", bias="attention_bias", when=makes_values),
        *linear("self_attn.o_proj", "model", "mixed", bias="attention_bias"),
        SHARED_NORM[0], replace(SHARED_NORM[1], when=makes_keys), *gated_ffn(),
        *linear("per_layer_input_gate", "|channel|", "model", when=has_channels),
        *linear("per_layer_projection", "model", "channel", when=has_channels),
        *rms_norm("post_per_layer_input_norm", has_channels),
        Tensor("router.scale", ("|model|",), "enable_moe_block"),
        Tensor("router.per_expert_scale", ("expert",), "enable_moe_block"),
        *linear("router.proj", "expert", "model", when="enable_moe_block"),
        Tensor("experts.gate_up_proj", ("expert", ("e-gate", "e-up"), "model"), "enable_moe_block"),
        Tensor("experts.down_proj", ("expert", "model", "e-ffn"), "enable_moe_block"),
        *rms_norm("post_feedforward_layernorm_1", "enable_moe_block"),
        *rms_norm("post_feedforward_layernorm_2", "enable_moe_block"),
        *rms_norm("pre_feedforward_layernorm_2", "enable_moe_block"),
    ),
    rotary=lambda config, _: config["head_dim"],
    reads=last_of_kind(is_full),
    dead=("*.layers.*.self_attn.[kv]_*",),
    buffers=("rotary_emb.inv_freq", ".layer_scalar"),
    defaults={
        "tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
    },
    unless={},
    note="where keys are values, those turn by 90°",
)  # fmt: skip

GEMMA4_UNIFIED = replace(
    GEMMA4,
    model_types=("gemma4_unified_text",),
    defaults={**GEMMA4.defaults, "hidden_size_per_layer_input": 0},
)


def one_width(config: Config, _: int) -> int:
    """The feed-forward size, which may be given for each layer."""
    size = config["intermediate_size"]
    widths = set(size) if isinstance(size, list) else {size}
    if len(widths) > 1:
        raise ValueError("intermediate_size differs between layers, which mpu does not support")
    return int(widths.pop())


def streams(name: str) -> tuple[Tensor, ...]:
    """Maps of the residual stream to the other streams of AltUp, or back."""

    def has(stream: int) -> Rule:
        return lambda config, _: stream < int(config["altup_num_inputs"])

    return tuple(Tensor(f"model.{name}.{k}.weight", ("model", "model"), has(k + 1)) for k in range(7))


# All streams of AltUp have the same coordinates. Laurel's two matrices are a feed-forward layer without activation.
GEMMA3N = replace(
    GEMMA4,
    model_types=("gemma3n_text",),
    renamed=(("model.language_model.", "model."),),
    sizes={
        **SIZES, "ffn": one_width, "shared_ffn": "laurel_rank", "altup": "altup_num_inputs",
        "altup2": lambda config, _: config["altup_num_inputs"] ** 2,
        "channels": "hidden_size_per_layer_input", "channel-vocab": "vocab_size_per_layer_input",
    },
    layer_sizes={},
    tensors=(*GEMMA4.tensors, *streams("altup_projections"), *streams("altup_unembed_projections")),
    layer_tensors=(
        *(
            tensor
            for tensor in GEMMA4.layer_tensors
            if tensor.when != "enable_moe_block" and "per_layer_projection" not in tensor.name
        ),
        *linear("per_layer_projection", "model", "channel"),
        *linear("laurel.linear_left", "s-up", "model"), *linear("laurel.linear_right", "model", "s-ffn"),
        *rms_norm("laurel.post_laurel_norm"), *rms_norm("altup.router_norm"),
        Tensor("altup.correct_output_scale", ("|model|",)), *linear("altup.modality_router", "altup", "model"),
        *linear("altup.correction_coefs", "altup", "altup"), *linear("altup.prediction_coefs", "altup2", "altup"),
    ),
    reads=last_of_kind(layer_type_is("full_attention", every=5)),
    defaults={
        "tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 16384,
        "num_hidden_layers": 35, "num_kv_shared_layers": 15, "laurel_rank": 64, "altup_num_inputs": 4,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
    },
    note="text only; AltUp's coefficients stay in place",
)  # fmt: skip


def muse_rope(config: Config, layer: int) -> bool:
    """Whether a layer of Muse Glimmer has RoPE: without a list, all but every fourth from the last."""
    listed = config.get("layer_rope_theta")
    return bool(listed[layer]) if listed else bool((config["num_hidden_layers"] - 1 - layer) % 4)


# Queries and keys are normed without a weight, before RoPE; a gate multiplies what attention reads.
MUSE = replace(
    GEMMA2,
    model_types=("muse_glimmer_text",),
    layer_tensors=(*SANDWICH, *linear("self_attn.gate_proj", "|mixed|", "model"), *gated_ffn()),
    rotary=where_rope(muse_rope),
    defaults={"num_key_value_heads": 2, "head_dim": 128},
    unless={},
)

VAULTGEMMA = replace(
    GEMMA2,
    model_types=("vaultgemma",),
    layer_tensors=(
        *rms_norm("input_layernorm"), *rms_norm("pre_feedforward_layernorm"), *attention(), *gated_ffn(),
    ),
)  # fmt: skip
