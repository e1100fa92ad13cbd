"""The model families that mpu supports. To add one, put its table here and its config in tests/models.py, and run
`mpu check-family` on a checkpoint of it.

What holds in which family was read from transformers' modelling code and is checked on small random models
(tests/test_families.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mpu_cli.architectures.family import Axis, Config, Family, Fused, Repeated, Rule, Sizes, Stack, Tensor

# Rules, from which tables are composed.


def entry(*names: str) -> Rule:
    """The first of these config entries that is there."""
    return lambda config, _: next((config[name] for name in names if config.get(name) is not None), None)


def unless(name: str) -> Rule:
    """Whether a config entry is off."""
    return lambda config, _: not config.get(name)


def share_of_head(*names: str) -> Rule:
    """RoPE turns this share of a head's coordinates: the first of these entries that is there."""
    return lambda config, _: int(config["head_dim"] * float(next(config[name] for name in names if name in config)))


def where_rope(rope: Rule) -> Rule:
    """RoPE turns all of a head's coordinates in layers for which ``rope`` holds, and none in others."""
    return lambda config, layer: config["head_dim"] if rope(config, layer) else 0


_OLDER = {"attention": "full_attention", "mamba": "linear_attention"}  # what older files call kinds of layers


def kind_of(config: Config, layer: int, *names: str) -> str | None:
    """The kind of a layer by ``layer_types``, or by the first of the lists ``names``; None without a list."""
    kinds = entry("layer_types", *names)(config, layer)
    return _OLDER.get(kinds[layer], kinds[layer]) if kinds else None


def layer_type_is(kind: str, pattern: str = "sliding_window_pattern", every: int = 4) -> Rule:
    """Whether a layer is of a kind: by ``layer_types``, or all but every n-th are sliding."""

    def rule(config: Config, layer: int) -> bool:
        listed = kind_of(config, layer)
        if listed:
            return listed == kind
        n = int(config.get(pattern) or every)
        return ("full_attention" if (layer + 1) % n == 0 else "sliding_attention") == kind

    return rule


def listed_or_every(name: str, interval: str, every: int) -> Rule:
    """The entry of a layer in the list ``name``; without one, 0 in every n-th layer."""

    def rule(config: Config, layer: int) -> int:
        table = config.get(name)
        return int(table[layer]) if table else int((layer + 1) % int(config.get(interval) or every) != 0)

    return rule


def listed(name: str) -> Rule:
    """The entry of a layer in the list ``name``; without one, 1."""
    return lambda config, layer: config[name][layer] if config.get(name) else 1


def sparse_by_type(otherwise: Rule) -> Rule:
    """Whether a layer has experts by ``mlp_layer_types``; without the list, by ``otherwise``."""

    def rule(config: Config, layer: int) -> bool:
        kinds = config.get("mlp_layer_types")
        return bool(kinds[layer] == "sparse" if kinds else otherwise(config, layer))

    return rule


def of_each_layer(name: str, otherwise: str) -> Rule:
    """The entry of a layer in the list ``name``; without one, the same entry for all layers."""
    return lambda config, layer: config[name][layer] if config.get(name) else config[otherwise]


def times(factor: int, name: str) -> Rule:
    """A size that is a multiple of another."""
    return lambda config, _: factor * int(config[name])


def either(*rules: Rule) -> Rule:
    return lambda config, layer: any(rule(config, layer) for rule in rules)


def both(*rules: str | Rule | None) -> Rule:
    """Whether all of these hold: rules, or config entries; None always does."""
    all_of = [entry(rule) if isinstance(rule, str) else rule for rule in rules if rule is not None]
    return lambda config, layer: all(rule(config, layer) for rule in all_of)


def negated(rule: Rule) -> Rule:
    return lambda config, layer: not rule(config, layer)


# Parts that tables share.


def linear(
    name: str, *axes: Axis, bias: str | Rule | bool = False, when: str | Rule | None = None
) -> tuple[Tensor, ...]:
    """A linear layer's weight, (outputs, inputs), and its bias if it has one. ``when`` is for both."""
    weight = Tensor(f"{name}.weight", axes, when)
    if bias is False:
        return (weight,)
    there = when if bias is True else bias if when is None else both(when, bias)
    return weight, Tensor(f"{name}.bias", axes[:1], there)


def layer_norm(name: str, when: str | Rule | None = None) -> tuple[Tensor, ...]:
    return Tensor(f"{name}.weight", ("|model|",), when), Tensor(f"{name}.bias", ("model",), when)


def rms_norm(name: str, when: str | Rule | None = None) -> tuple[Tensor, ...]:
    return (Tensor(f"{name}.weight", ("|model|",), when),)


def attention(
    bias: str | Rule | bool = "attention_bias",
    out_bias: str | Rule | bool | None = None,
    name: str = "self_attn",
    when: Rule | None = None,
) -> tuple[Tensor, ...]:
    """Llama's attention."""
    out = bias if out_bias is None else out_bias
    return (
        *linear(f"{name}.q_proj", "query", "model", bias=bias, when=when),
        *linear(f"{name}.k_proj", "key", "model", bias=bias, when=when),
        *linear(f"{name}.v_proj", "value", "model", bias=bias, when=when),
        *linear(f"{name}.o_proj", "model", "mixed", bias=out, when=when),
    )  # fmt: skip


def gated_ffn(
    bias: str | Rule | bool = False, name: str = "mlp", prefix: str = "", when: str | Rule | None = None
) -> tuple[Tensor, ...]:
    return (
        *linear(f"{name}.gate_proj", f"{prefix}gate", "model", bias=bias, when=when),
        *linear(f"{name}.up_proj", f"{prefix}up", "model", bias=bias, when=when),
        *linear(f"{name}.down_proj", "model", f"{prefix}ffn", bias=bias, when=when),
    )


def experts(when: str | Rule | None = None, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
            split: str = "mlp", fused: str = "mlp") -> tuple[Tensor, ...]:  # fmt: skip
    """The experts of a mixture: a matrix each in files from the Hub, stacked in files that hold what memory does."""
    gate, up, down = (f"{split}.experts.{{e}}.{name}.weight" for name in names)
    return (
        Tensor(gate, ("e-gate", "model"), when, "split"),
        Tensor(up, ("e-up", "model"), when, "split"),
        Tensor(down, ("model", "e-ffn"), when, "split"),
        Tensor(f"{fused}.experts.gate_up_proj", ("expert", ("e-gate", "e-up"), "model"), when, "fused"),
        Tensor(f"{fused}.experts.down_proj", ("expert", "model", "e-ffn"), when, "fused"),
    )


def stacks(
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), split: str = "mlp", fused: str = "mlp"
) -> tuple[Stack, ...]:
    gate, up, down = (f"{split}.experts.{{e}}.{name}.weight" for name in names)
    return Stack(f"{fused}.experts.gate_up_proj", (gate, up)), Stack(f"{fused}.experts.down_proj", (down,))


SHARED_NORM = (Tensor("self_attn.q_norm.weight", ("|head|",)), Tensor("self_attn.k_norm.weight", ("|head|",)))
WHOLE_NORM = (Tensor("self_attn.q_norm.weight", ("|query|",)), Tensor("self_attn.k_norm.weight", ("|key|",)))
INPUT_NORMS = (*rms_norm("input_layernorm"), *rms_norm("post_attention_layernorm"))
OUTPUT_NORMS = (*rms_norm("post_attention_layernorm"), *rms_norm("post_feedforward_layernorm"))
SIZES: Sizes = {
    "model": "hidden_size", "ffn": "intermediate_size", "vocab": "vocab_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
}  # fmt: skip

# Llama and its relatives.

LLAMA = Family(
    model_types=("llama",),
    sizes=SIZES,
    prefix="model.",
    layer="model.layers.{i}.",
    tensors=(
        Tensor("model.embed_tokens.weight", ("vocab", "model")),
        Tensor("model.norm.weight", ("|model|",)),
        Tensor("lm_head.weight", ("vocab", "model")),
    ),
    layer_tensors=(
        *rms_norm("input_layernorm"), *attention(), *rms_norm("post_attention_layernorm"), *gated_ffn("mlp_bias"),
    ),
    defaults={"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
    unless={"partial_rotary_factor": 1.0},
    buffers=("rotary_emb.inv_freq",),
)  # fmt: skip

_PLAIN = (*rms_norm("input_layernorm"), *attention(False), *rms_norm("post_attention_layernorm"), *gated_ffn())
MISTRAL = replace(
    LLAMA,
    model_types=("mistral", "ministral", "ministral3"),
    layer_tensors=_PLAIN,
    defaults={"tie_word_embeddings": False, "num_key_value_heads": 8},
)

# Its multipliers scale the residual stream, scores and logits by constants, which every symmetry passes through.
GRANITE = replace(LLAMA, model_types=("granite",), note="as Llama; its multipliers are constants")

QWEN2 = replace(
    LLAMA,
    model_types=("qwen2",),
    layer_tensors=(
        *rms_norm("input_layernorm"), *attention(True, False), *rms_norm("post_attention_layernorm"), *gated_ffn(),
    ),
    defaults={"tie_word_embeddings": False, "num_key_value_heads": 32},
)  # fmt: skip

QWEN3 = replace(
    LLAMA,
    model_types=("qwen3",),
    layer_tensors=(
        *rms_norm("input_layernorm"),
        *attention(),
        *SHARED_NORM,
        *rms_norm("post_attention_layernorm"),
        *gated_ffn(),
    ),
    qk_norm="shared",
    defaults={"tie_word_embeddings": False, "num_key_value_heads": 32, "head_dim": 128},
    unless={},
)

SEED_OSS = replace(
    LLAMA,
    model_types=("seed_oss",),
    layer_tensors=(
        *rms_norm("input_layernorm"), *attention("attention_bias", "attention_out_bias"),
        *rms_norm("post_attention_layernorm"), *gated_ffn("mlp_bias"),
    ),
    defaults={
        "tie_word_embeddings": False, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
        "num_key_value_heads": 8, "head_dim": 128,
    },
)  # fmt: skip
IQUESTCODER = replace(
    LLAMA,
    model_types=("iquestcoder",),
    defaults={**LLAMA.defaults, "num_key_value_heads": 8, "head_dim": 128},
    unless={**LLAMA.unless, "clip_qkv": None},
    note="without `clip_qkv`",
)
ERNIE4_5 = replace(
    LLAMA,
    model_types=("ernie4_5",),
    layer_tensors=(
        *rms_norm("input_layernorm"), *attention("use_bias"), *rms_norm("post_attention_layernorm"),
        *gated_ffn("use_bias"),
    ),
    planes="neighbours",
    defaults={"tie_word_embeddings": True, "use_bias": False, "num_key_value_heads": 2, "head_dim": 128},
)  # fmt: skip
# A sink for each head, as in gpt-oss; a layer whose base frequency is 0 has no RoPE.
GRANITE_SWA = replace(
    GRANITE,
    model_types=("granite_swa",),
    layer_tensors=(*GRANITE.layer_tensors, Tensor("self_attn.sinks", ("head",))),
    rotary=where_rope(listed("layer_rope_theta")),
    defaults={**GRANITE.defaults, "tie_word_embeddings": True, "num_key_value_heads": 4},
)

# Norms of queries and keys after RoPE: quarter turns pass through both.
_NORM_AFTER_ROPE = (
    Tensor("self_attn.query_layernorm.weight", ("|head|",)), Tensor("self_attn.key_layernorm.weight", ("|head|",)),
)  # fmt: skip
HUNYUAN = replace(
    QWEN3,
    model_types=("hunyuan_v1_dense",),
    layer_tensors=(*INPUT_NORMS, *attention(), *_NORM_AFTER_ROPE, *gated_ffn()),
    defaults={"tie_word_embeddings": False, "attention_bias": False},
)


def is_xielu(config: Config, _: int) -> bool:
    """Whether the activation has parameters."""
    return config["hidden_act"] == "xielu"


APERTUS = replace(
    QWEN3,
    model_types=("apertus",),
    sizes={**SIZES, "one": 1},
    layer_tensors=(
        *rms_norm("attention_layernorm"), *rms_norm("feedforward_layernorm"), *attention(), *SHARED_NORM,
        *linear("mlp.up_proj", "ffn", "model"), *linear("mlp.down_proj", "model", "ffn"),
        Tensor("mlp.act_fn.alpha_p", ("one",), is_xielu), Tensor("mlp.act_fn.alpha_n", ("one",), is_xielu),
    ),
    gated=False,
    defaults={"tie_word_embeddings": False, "attention_bias": False, "hidden_act": "xielu"},
    buffers=("rotary_emb.inv_freq", "act_fn.beta", "act_fn.eps"),
)  # fmt: skip

SMOLLM3 = replace(
    LLAMA,
    model_types=("smollm3",),
    rotary=where_rope(listed_or_every("no_rope_layers", "no_rope_layer_interval", 4)),
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 4},
)

# Norms multiply by 1 + w, which takes any order of w. Soft-capping, scales and windows pass through.
GEMMA = replace(
    LLAMA,
    model_types=("gemma",),
    layer_tensors=(*rms_norm("input_layernorm"), *attention(), *rms_norm("post_attention_layernorm"), *gated_ffn()),
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 16, "head_dim": 256},
)
_SANDWICH = (
    *INPUT_NORMS, *rms_norm("pre_feedforward_layernorm"), *rms_norm("post_feedforward_layernorm"), *attention(),
)  # fmt: skip
GEMMA2 = replace(
    GEMMA,
    model_types=("gemma2",),
    layer_tensors=(*_SANDWICH, *gated_ffn()),
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256},
)
GEMMA3 = replace(
    GEMMA2, model_types=("gemma3_text",), layer_tensors=(*_SANDWICH, *SHARED_NORM, *gated_ffn()), qk_norm="shared",
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
            return saved.get(str(layer), {}).get(name, config.get(name))
        return (config.get(original) or default or config.get(name)) if is_full(config, layer) else config.get(name)

    return rule


def has_one_projection(config: Config, layer: int) -> bool:
    """Whether the keys of a layer of Gemma 4 are its values, too."""
    return bool(config.get("attention_k_eq_v")) and is_full(config, layer)


def kv_heads(config: Config, layer: int) -> int | None:
    """KV heads of a layer of Gemma 4: of their own in full layers whose keys are their values."""
    fewer = of_full_layers("num_key_value_heads", "num_global_key_value_heads")
    own = "per_layer_config" in config or has_one_projection(config, layer)
    return fewer(config, layer) if own else config["num_key_value_heads"]


def last_of_kind(full: Rule) -> Rule:
    """The layer whose keys and values a layer reads: of the last that make some, the one of its kind. None: its own."""

    def rule(config: Config, layer: int) -> int | None:
        first = int(config["num_hidden_layers"]) - int(config.get("num_kv_shared_layers") or 0)
        if layer < first:
            return None
        return [i for i in range(first) if full(config, i) == full(config, layer)][-1]

    return rule


def makes_keys(config: Config, layer: int) -> bool:
    """Whether a layer has keys and values of its own: the last ones may read others'."""
    return layer < int(config["num_hidden_layers"]) - int(config.get("num_kv_shared_layers") or 0)


makes_values = both(makes_keys, negated(has_one_projection))
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
        *linear(
            "self_attn.v_proj", "value", "model", bias="attention_bias", when=makes_values
        ),
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
        *(
            tensor
            for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
            for tensor in rms_norm(name, "enable_moe_block")
        ),
    ),
    rotary=lambda config, _: config["head_dim"],
    qk_norm="shared",
    experts=entry("enable_moe_block"),
    keys_are_values=has_one_projection,
    reads=last_of_kind(is_full),
    dead=("*.layers.*.self_attn.[kv]_*",),
    buffers=("rotary_emb.inv_freq", ".layer_scalar"),
    defaults={
        "tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
    },
    unless={},
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
    experts=None,
    keys_are_values=None,
    reads=last_of_kind(layer_type_is("full_attention", every=5)),
    defaults={
        "tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 256, "attention_bias": False,
        "intermediate_size": 16384, "num_hidden_layers": 35, "num_kv_shared_layers": 15, "laurel_rank": 64,
        "altup_num_inputs": 4, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
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
    layer_tensors=(*_SANDWICH, *linear("self_attn.gate_proj", "|mixed|", "model"), *gated_ffn()),
    rotary=where_rope(muse_rope),
    defaults={"tie_word_embeddings": False, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": False},
    unless={},
)

OLMO2 = replace(
    LLAMA,
    model_types=("olmo2", "olmo3"),
    layer_tensors=(*attention(), *WHOLE_NORM, *OUTPUT_NORMS, *gated_ffn()),
    qk_norm="whole",
    unless={},
    defaults={"tie_word_embeddings": False},
)
EXAONE4 = replace(
    LLAMA,
    model_types=("exaone4",),
    layer_tensors=(*attention(False), *SHARED_NORM, *OUTPUT_NORMS, *gated_ffn()),
    qk_norm="shared",
    rotary=where_rope(either(unless("sliding_window"), layer_type_is("sliding_attention"))),
    defaults={"tie_word_embeddings": False, "num_key_value_heads": 32},
    unless={},
)

# LayerNorms without weight or bias: no norm tensors, and no signs of the residual stream.
OLMO = replace(
    LLAMA,
    model_types=("olmo",),
    tensors=tuple(t for t in LLAMA.tensors if "norm" not in t.name),
    layer_tensors=(*attention(), *gated_ffn()),
    rms_norm=False,
    unless={"clip_qkv": None, "partial_rotary_factor": 1.0},
    note="without `clip_qkv`",
)

PHI3 = replace(
    LLAMA,
    model_types=("phi3",),
    layer_tensors=(
        *INPUT_NORMS,
        Tensor("self_attn.qkv_proj.weight", (("query", "key", "value"), "model")),
        Tensor("self_attn.o_proj.weight", ("model", "mixed")),
        Tensor("mlp.gate_up_proj.weight", (("gate", "up"), "model")),
        Tensor("mlp.down_proj.weight", ("model", "ffn")),
    ),
    rotary=share_of_head("partial_rotary_factor"),
    unless={},
    defaults={"tie_word_embeddings": False, "partial_rotary_factor": 1.0},
    note="fused projections",
)

GLM = replace(
    LLAMA,
    model_types=("glm",),
    layer_tensors=(
        *INPUT_NORMS,
        *attention("attention_bias", False),
        Tensor("mlp.gate_up_proj.weight", (("gate", "up"), "model")),
        Tensor("mlp.down_proj.weight", ("model", "ffn")),
    ),
    planes="neighbours",
    rotary=share_of_head("partial_rotary_factor"),
    unless={},
    defaults={
        "tie_word_embeddings": False, "attention_bias": False, "partial_rotary_factor": 0.5, "head_dim": 128,
        "num_key_value_heads": 2,
    },
)  # fmt: skip
GLM4 = replace(
    GLM,
    model_types=("glm4",),
    layer_tensors=(
        *GLM.layer_tensors, *rms_norm("post_self_attn_layernorm"), *rms_norm("post_mlp_layernorm"),
    ),
)  # fmt: skip

# Families with LayerNorm, which subtracts the mean: no signs of the residual stream.

_NORMED = tuple(t for t in LLAMA.tensors if "norm" not in t.name)
STABLELM = replace(
    LLAMA,
    model_types=("stablelm",),
    tensors=(*_NORMED[:1], *layer_norm("model.norm"), *_NORMED[1:]),
    layer_tensors=(
        *layer_norm("input_layernorm"), *attention("use_qkv_bias", False), *gated_ffn(),
        *layer_norm("post_attention_layernorm", unless("use_parallel_residual")),
    ),
    rotary=share_of_head("partial_rotary_factor"),
    rms_norm=False,
    defaults={
        "tie_word_embeddings": False, "use_qkv_bias": False, "partial_rotary_factor": 0.25, "num_key_value_heads": 32,
    },
    unless={"qk_layernorm": False},
    note="without `qk_layernorm`",
)  # fmt: skip
STARCODER2 = replace(
    STABLELM,
    model_types=("starcoder2",),
    layer_tensors=(
        *layer_norm("input_layernorm"), *layer_norm("post_attention_layernorm"), *attention("use_bias"),
        *linear("mlp.c_fc", "ffn", "model", bias="use_bias"), *linear("mlp.c_proj", "model", "ffn", bias="use_bias"),
    ),
    rotary=None,
    gated=False,
    defaults={"tie_word_embeddings": True, "use_bias": True, "num_key_value_heads": 2},
    unless={},
    note="",
)  # fmt: skip
JAIS2 = replace(
    STARCODER2,
    model_types=("jais2",),
    layer_tensors=(
        *layer_norm("input_layernorm"), *layer_norm("post_attention_layernorm"), *attention(),
        *linear("mlp.up_proj", "ffn", "model", bias="mlp_bias"),
        *linear("mlp.down_proj", "model", "ffn", bias="mlp_bias"),
    ),
    defaults={"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
)  # fmt: skip
COHERE = replace(
    LLAMA,
    model_types=("cohere",),
    layer_tensors=(*rms_norm("input_layernorm"), *attention(), *gated_ffn()),
    planes="neighbours",
    rms_norm=False,
    defaults={"tie_word_embeddings": True},
    unless={"use_qk_norm": False},
    note="without `use_qk_norm`",
)
COHERE2 = replace(
    COHERE, model_types=("cohere2",), rotary=where_rope(layer_type_is("sliding_attention")), unless={}, note="",
)  # fmt: skip
PHI = replace(
    STABLELM,
    model_types=("phi",),
    tensors=(
        Tensor("model.embed_tokens.weight", ("vocab", "model")), *layer_norm("model.final_layernorm"),
        Tensor("lm_head.weight", ("vocab", "model")), Tensor("lm_head.bias", ("vocab",)),
    ),
    layer_tensors=(
        *layer_norm("input_layernorm"),
        *linear("self_attn.q_proj", "query", "model", bias=True),
        *linear("self_attn.k_proj", "key", "model", bias=True),
        *linear("self_attn.v_proj", "value", "model", bias=True),
        *linear("self_attn.dense", "model", "mixed", bias=True),
        *linear("mlp.fc1", "ffn", "model", bias=True),
        *linear("mlp.fc2", "model", "ffn", bias=True),
    ),
    gated=False,
    defaults={"tie_word_embeddings": False, "partial_rotary_factor": 0.5},
    unless={"qk_layernorm": False},
)  # fmt: skip

_NEOX: Sizes = {
    "model": "hidden_size", "ffn": "intermediate_size", "vocab": "vocab_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_attention_heads",
}  # fmt: skip
GPT_NEOX = Family(
    model_types=("gpt_neox",),
    sizes=_NEOX,
    prefix="gpt_neox.",
    layer="gpt_neox.layers.{i}.",
    tensors=(
        Tensor("gpt_neox.embed_in.weight", ("vocab", "model")), *layer_norm("gpt_neox.final_layer_norm"),
        Tensor("embed_out.weight", ("vocab", "model")),
    ),
    layer_tensors=(
        *layer_norm("input_layernorm"), *layer_norm("post_attention_layernorm"),
        *linear("attention.query_key_value", Fused(("query", "key", "value"), "heads"), "model", bias="attention_bias"),
        *linear("attention.dense", "model", "mixed", bias="attention_bias"),
        *linear("mlp.dense_h_to_4h", "ffn", "model", bias=True),
        *linear("mlp.dense_4h_to_h", "model", "ffn", bias=True),
    ),
    rotary=share_of_head("rotary_pct", "partial_rotary_factor"),
    gated=False,
    rms_norm=False,
    heads=("embed_out.weight", "lm_head.weight"),
    defaults={"tie_word_embeddings": False, "attention_bias": True, "partial_rotary_factor": 0.25},
    buffers=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)  # fmt: skip

# Conv1D stores a weight as (inputs, outputs), the transpose of a linear layer's.
GPT2 = Family(
    model_types=("gpt2",),
    sizes={
        "model": "n_embd", "ffn": "n_inner", "vocab": "vocab_size", "layers": "n_layer",
        "heads": "n_head", "kv_heads": "n_head", "position": "n_positions",
    },
    prefix="transformer.",
    layer="transformer.h.{i}.",
    tensors=(
        Tensor("transformer.wte.weight", ("vocab", "model")),
        Tensor("transformer.wpe.weight", ("position", "model")),
        Tensor("transformer.ln_f.weight", ("model",)),
        Tensor("transformer.ln_f.bias", ("model",)),
        Tensor("lm_head.weight", ("vocab", "model")),
    ),
    layer_tensors=(
        Tensor("ln_1.weight", ("model",)),
        Tensor("ln_1.bias", ("model",)),
        Tensor("attn.c_attn.weight", ("model", ("query", "key", "value"))),
        Tensor("attn.c_attn.bias", (("query", "key", "value"),)),
        Tensor("attn.c_proj.weight", ("mixed", "model")),
        Tensor("attn.c_proj.bias", ("model",)),
        Tensor("ln_2.weight", ("model",)),
        Tensor("ln_2.bias", ("model",)),
        Tensor("mlp.c_fc.weight", ("model", "ffn")),
        Tensor("mlp.c_fc.bias", ("ffn",)),
        Tensor("mlp.c_proj.weight", ("ffn", "model")),
        Tensor("mlp.c_proj.bias", ("model",)),
    ),
    planes=None,
    gated=False,
    rms_norm=False,
    defaults={"tie_word_embeddings": True},
    unless={"add_cross_attention": False},
    buffers=(".attn.bias", ".attn.masked_bias"),
    transposed=True,
)  # fmt: skip

_FUSED = Fused(("query", "key", "value"), "kv_heads")  # per KV head: its query heads, then its key, then its value
GPT_BIGCODE = replace(
    GPT2,
    model_types=("gpt_bigcode",),
    sizes={**GPT2.sizes, "kv_heads": lambda config, _: 1 if config["multi_query"] else config["n_head"]},
    layer_tensors=(
        *layer_norm("ln_1"), *layer_norm("ln_2"),
        *linear("attn.c_attn", _FUSED, "model", bias=True), *linear("attn.c_proj", "model", "mixed", bias=True),
        *linear("mlp.c_fc", "ffn", "model", bias=True), *linear("mlp.c_proj", "model", "ffn", bias=True),
    ),
    defaults={"tie_word_embeddings": True, "multi_query": True},
    transposed=False,
)  # fmt: skip
GPT_NEO = replace(
    GPT2,
    model_types=("gpt_neo",),
    sizes={
        "model": "hidden_size", "ffn": lambda config, _: config.get("intermediate_size") or 4 * config["hidden_size"],
        "vocab": "vocab_size", "layers": "num_layers", "heads": "num_heads", "kv_heads": "num_heads",
        "position": "max_position_embeddings",
    },
    layer_tensors=(
        *layer_norm("ln_1"), *layer_norm("ln_2"),
        *linear("attn.attention.q_proj", "query", "model"), *linear("attn.attention.k_proj", "key", "model"),
        *linear("attn.attention.v_proj", "value", "model"),
        *linear("attn.attention.out_proj", "model", "mixed", bias=True),
        *linear("mlp.c_fc", "ffn", "model", bias=True), *linear("mlp.c_proj", "model", "ffn", bias=True),
    ),
    unless={},
    buffers=("attn.attention.bias", "attn.attention.masked_bias"),
    transposed=False,
)  # fmt: skip
GPTJ = replace(
    GPT2,
    model_types=("gptj",),
    sizes={key: value for key, value in GPT2.sizes.items() if key != "position"},
    tensors=(
        Tensor("transformer.wte.weight", ("vocab", "model")), *layer_norm("transformer.ln_f"),
        Tensor("lm_head.weight", ("vocab", "model")), Tensor("lm_head.bias", ("vocab",)),
    ),
    layer_tensors=(
        *layer_norm("ln_1"),
        *linear("attn.q_proj", "query", "model"), *linear("attn.k_proj", "key", "model"),
        *linear("attn.v_proj", "value", "model"), *linear("attn.out_proj", "model", "mixed"),
        *linear("mlp.fc_in", "ffn", "model", bias=True), *linear("mlp.fc_out", "model", "ffn", bias=True),
    ),
    planes="neighbours",
    rotary=entry("rotary_dim", "head_dim"),
    defaults={"tie_word_embeddings": False, "rotary_dim": 64},
    unless={},
    buffers=("attn.bias", "attn.masked_bias", "attn.embed_positions", "attn.causal_mask"),
    transposed=False,
)  # fmt: skip
CODEGEN = replace(
    GPTJ,
    model_types=("codegen",),
    layer_tensors=(
        *layer_norm("ln_1"),
        # four blocks, of which each holds queries, values and keys of a quarter of the heads
        Tensor("attn.qkv_proj.weight", (Fused(("query", "value", "key"), 4), "model")),
        *linear("attn.out_proj", "model", "mixed"),
        *linear("mlp.fc_in", "ffn", "model", bias=True), *linear("mlp.fc_out", "model", "ffn", bias=True),
    ),
)  # fmt: skip


def is_narrow(config: Config, _: int) -> bool:
    """Whether OPT's embedding is narrower than the model, as in 350m, with projections between them."""
    return config.get("word_embed_proj_dim", config["hidden_size"]) != config["hidden_size"]


def has_last_norm(config: Config, _: int) -> bool:
    """Whether a norm follows OPT's last layer: not if each layer ends in one, as in 350m."""
    return bool(config["do_layer_norm_before"]) and not config.get("_remove_final_layer_norm")


OPT = Family(
    model_types=("opt",),
    sizes={
        "model": "hidden_size", "ffn": "ffn_dim", "vocab": "vocab_size", "layers": "num_hidden_layers",
        "heads": "num_attention_heads", "kv_heads": "num_attention_heads",
        "position": lambda config, _: config["max_position_embeddings"] + 2,  # from the third row on
        "embed": lambda config, _: config.get("word_embed_proj_dim") or config["hidden_size"],
    },
    prefix="model.",
    layer="model.decoder.layers.{i}.",
    tensors=(
        Tensor("model.decoder.embed_tokens.weight", ("vocab", "model"), negated(is_narrow)),
        Tensor("model.decoder.embed_tokens.weight", ("vocab", "embed"), is_narrow),
        Tensor("model.decoder.project_in.weight", ("model", "embed"), is_narrow),
        Tensor("model.decoder.project_out.weight", ("embed", "model"), is_narrow),
        Tensor("model.decoder.embed_positions.weight", ("position", "model")),
        *layer_norm("model.decoder.final_layer_norm", has_last_norm),
        Tensor("lm_head.weight", ("vocab", "model"), negated(is_narrow)),
        Tensor("lm_head.weight", ("vocab", "embed"), is_narrow),
    ),
    layer_tensors=(
        *layer_norm("self_attn_layer_norm"), *layer_norm("final_layer_norm"),
        *linear("self_attn.q_proj", "query", "model", bias="enable_bias"),
        *linear("self_attn.k_proj", "key", "model", bias="enable_bias"),
        *linear("self_attn.v_proj", "value", "model", bias="enable_bias"),
        *linear("self_attn.out_proj", "model", "mixed", bias="enable_bias"),
        *linear("fc1", "ffn", "model", bias="enable_bias"), *linear("fc2", "model", "ffn", bias="enable_bias"),
    ),
    planes=None,
    gated=False,
    rms_norm=False,
    defaults={"tie_word_embeddings": True, "enable_bias": True, "do_layer_norm_before": True},
    unless={"layer_norm_elementwise_affine": True},
    note="the inner coordinates of 350m's narrow embedding stay",
)  # fmt: skip

BLOOM = Family(
    model_types=("bloom",),
    sizes={
        "model": ("hidden_size", "n_embed"),
        "ffn": lambda config, _: 4 * (config.get("hidden_size") or config["n_embed"]),
        "vocab": "vocab_size", "layers": ("n_layer", "num_hidden_layers"), "heads": ("n_head", "num_attention_heads"),
        "kv_heads": ("n_head", "num_attention_heads"),
    },
    prefix="transformer.",
    layer="transformer.h.{i}.",
    tensors=(
        Tensor("transformer.word_embeddings.weight", ("vocab", "model")),
        *layer_norm("transformer.word_embeddings_layernorm"), *layer_norm("transformer.ln_f"),
        Tensor("lm_head.weight", ("vocab", "model")),
    ),
    layer_tensors=(
        *layer_norm("input_layernorm"), *layer_norm("post_attention_layernorm"),
        *linear("self_attention.query_key_value", _FUSED, "model", bias=True),
        *linear("self_attention.dense", "model", "mixed", bias=True),
        *linear("mlp.dense_h_to_4h", "ffn", "model", bias=True),
        *linear("mlp.dense_4h_to_h", "model", "ffn", bias=True),
    ),
    planes=None,
    movable_heads=False,  # under ALiBi, a head's slope depends on its number
    gated=False,
    rms_norm=False,
    defaults={"tie_word_embeddings": True},
)  # fmt: skip


def has_two_norms(config: Config, _: int) -> bool:
    """Whether a layer of Falcon has a norm each for attention and FFN, which run in parallel."""
    return bool(config["new_decoder_architecture"]) and config.get("num_ln_in_parallel_attn") != 1


is_parallel = either(entry("new_decoder_architecture"), entry("parallel_attn"))  # attention and FFN
FALCON = replace(
    BLOOM,
    model_types=("falcon",),
    sizes={
        **BLOOM.sizes,
        "layers": ("num_hidden_layers", "n_layer"),
        "heads": ("num_attention_heads", "n_head"),
        "kv_heads": lambda config, _: (
            (config.get("num_kv_heads") or config["num_attention_heads"]) if config["new_decoder_architecture"]
            else 1 if config["multi_query"] else config["num_attention_heads"]
        ),
        "ffn": lambda config, _: config.get("ffn_hidden_size") or 4 * config["hidden_size"],
    },
    tensors=(
        Tensor("transformer.word_embeddings.weight", ("vocab", "model")), *layer_norm("transformer.ln_f"),
        Tensor("lm_head.weight", ("vocab", "model")),
    ),
    layer_tensors=(
        *layer_norm("ln_attn", has_two_norms), *layer_norm("ln_mlp", has_two_norms),
        *layer_norm("input_layernorm", negated(has_two_norms)),
        *layer_norm("post_attention_layernorm", negated(is_parallel)),
        *linear("self_attention.query_key_value", _FUSED, "model", bias="bias"),
        *linear("self_attention.dense", "model", "mixed", bias="bias"),
        *linear("mlp.dense_h_to_4h", "ffn", "model", bias="bias"),
        *linear("mlp.dense_4h_to_h", "model", "ffn", bias="bias"),
    ),
    planes="halves",
    rotary=where_rope(unless("alibi")),
    movable_heads=unless("alibi"),
    defaults={
        "tie_word_embeddings": True, "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True,
        "bias": False, "alibi": False,
    },
    buffers=("rotary_emb.inv_freq",),
)  # fmt: skip

# Layers of attention, whose output is gated, among layers of a gated delta net, whose inner coordinates are left alone.
is_attention, is_delta_net = layer_type_is("full_attention"), layer_type_is("linear_attention")
_ATTENTION3_5 = tuple(
    replace(tensor, when=is_attention)
    for tensor in (
        Tensor("self_attn.q_proj.weight", (Fused(("query", "|mixed|"), "heads"), "model")),
        Tensor("self_attn.k_proj.weight", ("key", "model")),
        Tensor("self_attn.v_proj.weight", ("value", "model")),
        Tensor("self_attn.o_proj.weight", ("model", "mixed")),
        *SHARED_NORM,
    )
)
_DELTA_NET = tuple(
    replace(tensor, when=is_delta_net)
    for tensor in (
        Tensor("linear_attn.A_log", ("delta-head",)),
        Tensor("linear_attn.dt_bias", ("delta-head",)),
        Tensor("linear_attn.conv1d.weight", (("delta-key", "delta-key", "delta-value"), "one", "taps")),
        Tensor("linear_attn.in_proj_qkv.weight", (("delta-key", "delta-key", "delta-value"), "model")),
        Tensor("linear_attn.in_proj_z.weight", ("delta-value", "model")),
        Tensor("linear_attn.in_proj_a.weight", ("delta-head", "model")),
        Tensor("linear_attn.in_proj_b.weight", ("delta-head", "model")),
        Tensor("linear_attn.norm.weight", ("|delta|",)),
        Tensor("linear_attn.out_proj.weight", ("model", "delta-value")),
    )
)
_SIZES3_5: Sizes = {
    **SIZES, "one": 1, "taps": "linear_conv_kernel_dim", "delta-head": "linear_num_value_heads",
    "|delta|": "linear_value_head_dim", "delta-groups": "linear_num_key_heads",
    "delta-value": lambda config, _: config["linear_num_value_heads"] * config["linear_value_head_dim"],
    "delta-key": lambda config, _: config["linear_num_key_heads"] * config["linear_key_head_dim"],
}  # fmt: skip
QWEN3_5 = replace(
    QWEN3,
    model_types=("qwen3_5_text",),
    sizes=_SIZES3_5,
    layer_tensors=(*INPUT_NORMS, *_ATTENTION3_5, *_DELTA_NET, *gated_ffn()),
    rotary=share_of_head("partial_rotary_factor"),
    defaults={
        "tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    },
    unless={"attention_bias": False},
    dead=("mtp.*",),
    note="inside delta nets, order only",
)  # fmt: skip


# Mixtures of experts.


def is_sparse(config: Config, layer: int) -> bool:
    """Whether a layer of Qwen's mixtures has experts."""
    step = int(config.get("decoder_sparse_step") or 1)
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


_EXPERTS: Sizes = {"experts": ("num_experts", "num_local_experts"), "expert_ffn": "moe_intermediate_size"}
_ROUTER = Tensor("mlp.gate.weight", ("expert", "model"))
MIXTRAL = replace(
    MISTRAL,
    model_types=("mixtral",),
    sizes={**SIZES, "experts": "num_local_experts", "expert_ffn": "intermediate_size"},
    layer_tensors=(
        *INPUT_NORMS, *attention(False),
        Tensor("block_sparse_moe.gate.weight", ("expert", "model"), layout="split"),
        Tensor("mlp.gate.weight", ("expert", "model"), layout="fused"),
        *experts(names=("w1", "w3", "w2"), split="block_sparse_moe"),
    ),
    experts=lambda *_: True,
    stacks=(
        *stacks(("w1", "w3", "w2"), "block_sparse_moe"), Stack("mlp.gate.weight", ("block_sparse_moe.gate.weight",)),
    ),
    defaults={"tie_word_embeddings": False, "num_key_value_heads": 8, "num_local_experts": 8},
)  # fmt: skip
PHIMOE = replace(
    MIXTRAL,
    model_types=("phimoe",),
    tensors=(
        Tensor("model.embed_tokens.weight", ("vocab", "model")), *layer_norm("model.norm"),
        Tensor("lm_head.weight", ("vocab", "model")), Tensor("lm_head.bias", ("vocab",), "lm_head_bias"),
    ),
    layer_tensors=(
        *layer_norm("input_layernorm"), *layer_norm("post_attention_layernorm"), *attention(),
        Tensor("block_sparse_moe.gate.weight", ("expert", "model"), layout="split"),
        Tensor("mlp.router.weight", ("expert", "model"), layout="fused"),
        *experts(names=("w1", "w3", "w2"), split="block_sparse_moe"),
    ),
    rms_norm=False,
    stacks=(
        *stacks(("w1", "w3", "w2"), "block_sparse_moe"), Stack("mlp.router.weight", ("block_sparse_moe.gate.weight",)),
    ),
    defaults={
        "tie_word_embeddings": False, "attention_bias": False, "lm_head_bias": False, "num_key_value_heads": 8,
        "num_local_experts": 16,
    },
)  # fmt: skip


def share_or_rotary_dim(config: Config, _: int) -> int:
    """How many coordinates RoPE turns, as a share of a head in files that transformers saved, else as a number."""
    share = config.get("partial_rotary_factor")
    return int(config.get("rotary_dim", config["head_dim"]) if share is None else config["head_dim"] * share)


MINIMAX_M2 = replace(
    MIXTRAL,
    model_types=("minimax_m2",),
    layer_tensors=(
        *MIXTRAL.layer_tensors, *WHOLE_NORM,
        Tensor("block_sparse_moe.e_score_correction_bias", ("expert",), layout="split", trained=False),
        Tensor("mlp.e_score_correction_bias", ("expert",), layout="fused", trained=False),
    ),
    rotary=share_or_rotary_dim,
    qk_norm="whole",
    stacks=(
        *MIXTRAL.stacks, Stack("mlp.e_score_correction_bias", ("block_sparse_moe.e_score_correction_bias",)),
    ),
    defaults={
        "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256,
    },
    unless={},
    note="in bfloat16; the published weights are quantised",
)  # fmt: skip
QWEN3_MOE = replace(
    QWEN3,
    model_types=("qwen3_moe",),
    sizes={**SIZES, **_EXPERTS},
    layer_tensors=(
        *INPUT_NORMS, *attention(), *SHARED_NORM, *gated_ffn(when=negated(is_sparse)),
        replace(_ROUTER, when=is_sparse), *experts(is_sparse),
    ),
    experts=is_sparse,
    stacks=stacks(),
    defaults={"tie_word_embeddings": False, "num_key_value_heads": 4},
)  # fmt: skip
QWEN2_MOE = replace(
    QWEN3_MOE,
    model_types=("qwen2_moe",),
    sizes={**SIZES, **_EXPERTS, "shared_ffn": "shared_expert_intermediate_size", "one": 1},
    layer_tensors=(
        *INPUT_NORMS, *attention("qkv_bias", False), *gated_ffn(when=negated(is_sparse)),
        replace(_ROUTER, when=is_sparse), *experts(is_sparse),
        *gated_ffn(name="mlp.shared_expert", prefix="s-", when=is_sparse),
        Tensor("mlp.shared_expert_gate.weight", ("one", "model"), is_sparse),
    ),
    qk_norm=None,
    unless={},
    defaults={"tie_word_embeddings": False, "qkv_bias": True, "num_key_value_heads": 16},
    note="a shared expert beside the others",
)  # fmt: skip
QWEN3_5_MOE = replace(
    QWEN3_5,
    model_types=("qwen3_5_moe_text",),
    sizes={
        **{size: source for size, source in _SIZES3_5.items() if size != "ffn"}, **_EXPERTS,
        "shared_ffn": "shared_expert_intermediate_size",
    },
    layer_tensors=(
        *INPUT_NORMS, *_ATTENTION3_5, *_DELTA_NET, _ROUTER, *experts(),
        *gated_ffn(name="mlp.shared_expert", prefix="s-"),
        Tensor("mlp.shared_expert_gate.weight", ("one", "model")),
    ),
    experts=lambda *_: True,
    stacks=stacks(),
    defaults={**QWEN3_5.defaults, "num_key_value_heads": 2},
)  # fmt: skip
HUNYUAN_MOE = replace(
    HUNYUAN,
    model_types=("hunyuan_v1_moe",),
    sizes={
        **SIZES, "experts": ("num_experts", "num_local_experts"), "expert_ffn": "intermediate_size",
        "shared_ffn": "intermediate_size",
    },
    layer_tensors=(
        *INPUT_NORMS, *attention(), *_NORM_AFTER_ROPE, Tensor("mlp.gate.wg.weight", ("expert", "model")), *experts(),
        *gated_ffn(name="mlp.shared_mlp", prefix="s-"),
    ),
    experts=lambda *_: True,
    stacks=stacks(),
)  # fmt: skip


def is_ernie_mixture(config: Config, layer: int) -> bool:
    """Whether a layer of Ernie 4.5 has experts."""
    first, last = int(config["moe_layer_start_index"]), int(config["moe_layer_end_index"])
    there = first <= layer and (last == -1 or layer <= last)
    return there and (layer + 1) % int(config["moe_layer_interval"] or 1) == 0


def has_shared_experts(config: Config, layer: int) -> bool:
    """Whether a layer of Ernie 4.5 has experts that all tokens share."""
    return is_ernie_mixture(config, layer) and int(config["moe_num_shared_experts"]) > 0


ERNIE4_5_MOE = replace(
    ERNIE4_5,
    model_types=("ernie4_5_moe",),
    sizes={
        **SIZES, "one": 1, "experts": ("moe_num_experts", "num_experts"), "expert_ffn": "moe_intermediate_size",
        "shared_ffn": lambda config, _: config["moe_intermediate_size"] * (config["moe_num_shared_experts"] or 1),
    },
    tensors=(*ERNIE4_5.tensors, Tensor("lm_head.bias", ("vocab",), "use_bias")),
    layer_tensors=(
        *INPUT_NORMS, *attention("use_bias"),
        *gated_ffn("use_bias", when=negated(is_ernie_mixture)),
        replace(_ROUTER, when=is_ernie_mixture), *experts(is_ernie_mixture),
        Tensor("mlp.moe_statics.e_score_correction_bias", ("one", "expert"), is_ernie_mixture, "split", trained=False),
        Tensor(
            "mlp.gate.moe_statics.e_score_correction_bias", ("one", "expert"), is_ernie_mixture, "fused", trained=False
        ),
        *gated_ffn(
            "use_bias", "mlp.shared_experts", "s-", when=has_shared_experts
        ),
    ),
    experts=is_ernie_mixture,
    stacks=(
        *stacks(),
        Stack("mlp.gate.moe_statics.e_score_correction_bias", ("mlp.moe_statics.e_score_correction_bias",)),
    ),
    dead=("*mtp*",),
    defaults={
        "tie_word_embeddings": True, "use_bias": False, "num_key_value_heads": 4, "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
    },
)  # fmt: skip


def after_first_dense(config: Config, layer: int) -> bool:
    return layer >= int(config["num_dense_layers"])


AFMOE = replace(
    QWEN3_MOE,
    model_types=("afmoe",),
    sizes={
        **SIZES, **_EXPERTS,
        "shared_ffn": lambda config, _: config["moe_intermediate_size"] * config["num_shared_experts"],
    },
    layer_tensors=(
        *INPUT_NORMS, *rms_norm("pre_mlp_layernorm"), *rms_norm("post_mlp_layernorm"), *attention(), *SHARED_NORM,
        Tensor("self_attn.gate_proj.weight", ("|mixed|", "model")),
        *gated_ffn(when=negated(after_first_dense)),
        Tensor("mlp.router.gate.weight", ("expert", "model"), after_first_dense),
        Tensor("mlp.expert_bias", ("expert",), after_first_dense, trained=False),
        *experts(after_first_dense), *gated_ffn(name="mlp.shared_experts", prefix="s-", when=after_first_dense),
    ),
    rotary=where_rope(layer_type_is("sliding_attention", "global_attn_every_n_layers")),
    experts=after_first_dense,
    defaults={
        "tie_word_embeddings": False, "attention_bias": False, "head_dim": 128, "moe_intermediate_size": 1408,
        "num_dense_layers": 1, "num_shared_experts": 2,
    },
)  # fmt: skip
QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    model_types=("qwen3_next",),
    sizes={**QWEN3_5_MOE.sizes, "ffn": "intermediate_size"},
    layer_tensors=(
        *INPUT_NORMS, *_ATTENTION3_5, *(tensor for tensor in _DELTA_NET if ".in_proj_" not in tensor.name),
        Tensor(
            "linear_attn.in_proj_qkvz.weight",
            (Fused(("delta-key", "delta-key", "delta-value", "delta-value"), "delta-groups"), "model"), is_delta_net,
        ),
        Tensor(
            "linear_attn.in_proj_ba.weight",
            (Fused(("delta-head", "delta-head"), "delta-groups"), "model"), is_delta_net,
        ),
        *gated_ffn(when=negated(is_sparse)), replace(_ROUTER, when=is_sparse), *experts(is_sparse),
        *gated_ffn(name="mlp.shared_expert", prefix="s-", when=is_sparse),
        Tensor("mlp.shared_expert_gate.weight", ("one", "model"), is_sparse),
    ),
    experts=is_sparse,
    renamed=(),
)  # fmt: skip
OLMOE = replace(
    MIXTRAL,
    model_types=("olmoe",),
    sizes={**SIZES, "experts": ("num_experts", "num_local_experts"), "expert_ffn": "intermediate_size"},
    layer_tensors=(*INPUT_NORMS, *attention(), *WHOLE_NORM, _ROUTER, *experts()),
    qk_norm="whole",
    stacks=stacks(),
    unless={"clip_qkv": None},
    defaults={"tie_word_embeddings": False},
    note="without `clip_qkv`",
)


def granite_experts(when: str | None = None) -> tuple[Tensor, ...]:
    """Stacked in files from the Hub too, under other names than in memory."""
    router, gate_up, down = ("expert", "model"), ("expert", ("e-gate", "e-up"), "model"), ("expert", "model", "e-ffn")
    return (
        Tensor("block_sparse_moe.router.layer.weight", router, when, "hub"),
        Tensor("block_sparse_moe.input_linear.weight", gate_up, when, "hub"),
        Tensor("block_sparse_moe.output_linear.weight", down, when, "hub"),
        Tensor("block_sparse_moe.router.weight", router, when, "memory"),
        Tensor("block_sparse_moe.experts.gate_up_proj", gate_up, when, "memory"),
        Tensor("block_sparse_moe.experts.down_proj", down, when, "memory"),
    )


GRANITEMOE = replace(
    LLAMA,
    model_types=("granitemoe", "granitemoeshared"),
    sizes={
        **SIZES,
        "experts": "num_local_experts", "expert_ffn": "intermediate_size",
        "shared_ffn": lambda config, _: config.get("shared_intermediate_size") or None,  # 0: no shared experts
    },
    layer_tensors=(
        *INPUT_NORMS, *attention(), *granite_experts(),
        Tensor("shared_mlp.input_linear.weight", (("s-gate", "s-up"), "model"), "shared_intermediate_size"),
        Tensor("shared_mlp.output_linear.weight", ("model", "s-ffn"), "shared_intermediate_size"),
    ),
    experts=lambda *_: True,
    stacks=(
        Stack("block_sparse_moe.router.weight", ("block_sparse_moe.router.layer.weight",)),
        Stack("block_sparse_moe.experts.gate_up_proj", ("block_sparse_moe.input_linear.weight",)),
        Stack("block_sparse_moe.experts.down_proj", ("block_sparse_moe.output_linear.weight",)),
    ),
)  # fmt: skip

GRANITEMOE_SWA = replace(
    GRANITEMOE,
    model_types=("granitemoe_swa",),
    layer_tensors=(
        *INPUT_NORMS, *attention(), Tensor("self_attn.sinks", ("head",)),
        Tensor("block_sparse_moe.router.weight", ("expert", "model")),
        Tensor("block_sparse_moe.experts.gate_up_proj", ("expert", ("e-gate", "e-up"), "model")),
        Tensor("block_sparse_moe.experts.down_proj", ("expert", "model", "e-ffn")),
        *(tensor for tensor in GRANITEMOE.layer_tensors if tensor.name.startswith("shared_mlp.")),
    ),
    rotary=where_rope(listed("layer_rope_theta")),
    stacks=(),
)  # fmt: skip


def after_dense(config: Config, layer: int) -> bool:
    return layer >= int(config.get("first_k_dense_replace") or 0)


_AFTER_DENSE = (
    *gated_ffn(when=negated(after_dense)),
    replace(_ROUTER, when=after_dense),
    Tensor("mlp.gate.e_score_correction_bias", ("expert",), after_dense, trained=False),
    *experts(after_dense),
    *gated_ffn(name="mlp.shared_experts", prefix="s-", when=after_dense),
)  # fmt: skip
GLM4_MOE = replace(
    LLAMA,
    model_types=("glm4_moe",),
    sizes={
        **SIZES,
        "experts": ("n_routed_experts", "num_local_experts"), "expert_ffn": "moe_intermediate_size",
        "shared_ffn": lambda config, _: config["moe_intermediate_size"] * (config.get("n_shared_experts") or 1),
    },
    layer_tensors=(
        *INPUT_NORMS, *attention("attention_bias", False),
        Tensor("self_attn.q_norm.weight", ("|head|",), "use_qk_norm"),
        Tensor("self_attn.k_norm.weight", ("|head|",), "use_qk_norm"),
        *_AFTER_DENSE,
    ),
    rotary=share_of_head("partial_rotary_factor"),
    qk_norm=lambda config, _: "shared" if config.get("use_qk_norm") else None,
    experts=after_dense,
    groups="n_group",
    stacks=stacks(),
    dead=("*.eh_proj.weight", "*.shared_head.*", "*.enorm.weight", "*.hnorm.weight"),
    defaults={
        "tie_word_embeddings": False, "attention_bias": False, "use_qk_norm": False, "partial_rotary_factor": 0.5,
        "num_key_value_heads": 8, "first_k_dense_replace": 1,
    },
    unless={},
)  # fmt: skip

DOTS1 = replace(
    GLM4_MOE,
    model_types=("dots1",),
    layer_tensors=(*INPUT_NORMS, *attention(), *SHARED_NORM, *_AFTER_DENSE),
    rotary=None,
    qk_norm="shared",
    defaults={
        "tie_word_embeddings": False, "attention_bias": False, "num_key_value_heads": 32, "first_k_dense_replace": 0,
    },
)  # fmt: skip
# Latent attention (MLA): queries, and keys with values, come out of latents, and all heads share the part of their keys
# that RoPE turns.


def size_of_heads(*names: str) -> Rule:
    """In each head as many coordinates as these entries say together."""
    return lambda config, _: int(config["num_attention_heads"]) * sum(int(config[name]) for name in names)


has_q_latent = entry("q_lora_rank")
_MLA = (
    Tensor("self_attn.q_proj.weight", ("mla-query", "model"), negated(has_q_latent)),
    *linear("self_attn.q_a_proj", "q-latent", "model", bias="attention_bias", when=has_q_latent),
    Tensor("self_attn.q_a_layernorm.weight", ("|q-latent|",), has_q_latent),
    Tensor("self_attn.q_b_proj.weight", ("mla-query", "q-latent"), has_q_latent),
    *linear("self_attn.kv_a_proj_with_mqa", ("kv-latent", "mla-key"), "model", bias="attention_bias"),
    Tensor("self_attn.kv_a_layernorm.weight", ("|kv-latent|",)),
    Tensor("self_attn.kv_b_proj.weight", ("mla-key-value", "kv-latent")),
    *linear("self_attn.o_proj", "model", "mla-mixed", bias="attention_bias"),
)
_MLA_SIZES: Sizes = {
    "model": "hidden_size", "ffn": "intermediate_size", "vocab": "vocab_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_attention_heads", "head_dim": "qk_rope_head_dim",
    "q-latent": lambda config, _: config.get("q_lora_rank") or None, "kv-latent": "kv_lora_rank",
    "mla-free": "qk_nope_head_dim", "mla-key": "qk_rope_head_dim", "mla-value": "v_head_dim",
    "mla-query": size_of_heads("qk_nope_head_dim", "qk_rope_head_dim"),
    "mla-key-value": size_of_heads("qk_nope_head_dim", "v_head_dim"), "mla-mixed": size_of_heads("v_head_dim"),
}  # fmt: skip


def planes_by_config(config: Config, _: int) -> str:
    """Which coordinates DeepSeek's RoPE pairs."""
    return "neighbours" if config.get("rope_interleave", True) else "halves"


YOUTU = replace(
    LLAMA,
    model_types=("youtu",),
    sizes=_MLA_SIZES,
    layer_tensors=(*INPUT_NORMS, *_MLA, *gated_ffn()),
    planes=None,
    latent=planes_by_config,
    defaults={"tie_word_embeddings": True, "attention_bias": False},
    unless={"pad_token_id": None},  # transformers zeroes that row of the embedding whenever it loads the model
    note="latents keep order and signs; without `pad_token_id`",
)


def width_of_values(config: Config, _: int) -> int:
    """How many coordinates a value of MiniCPM 3 has."""
    return int(config.get("v_head_dim") or config["hidden_size"] // config["num_attention_heads"])


# Its multipliers are constants, as Granite's.
MINICPM3 = replace(
    YOUTU,
    model_types=("minicpm3",),
    sizes={
        **_MLA_SIZES,
        "mla-value": width_of_values,
        "mla-mixed": lambda config, _: config["num_attention_heads"] * width_of_values(config, 0),
        "mla-key-value": lambda config, _: (
            config["num_attention_heads"] * (config["qk_nope_head_dim"] + width_of_values(config, 0))
        ),
    },
    latent="halves",
    layer_tensors=(*INPUT_NORMS, *_MLA, *gated_ffn("mlp_bias")),
    defaults={"tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "scale_depth": 1.4},
    unless={},
    note="latents keep order and signs",
)
_MLA_MIXTURE: Sizes = {
    **_MLA_SIZES,
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"), "expert_ffn": "moe_intermediate_size",
    "shared_ffn": lambda config, _: config["moe_intermediate_size"] * (config.get("n_shared_experts") or 1),
}  # fmt: skip
_CORRECTION = Tensor("mlp.gate.e_score_correction_bias", ("expert",), trained=False)


def sparse_ffn(
    when: Rule, correction: tuple[Tensor, ...] = (_CORRECTION,), bias: str | bool = False
) -> tuple[Tensor, ...]:
    """DeepSeek's feed-forward layers: dense ones, or experts in groups with shared experts beside them."""
    return (
        *gated_ffn(bias, when=negated(when)),
        *(replace(tensor, when=when) for tensor in (_ROUTER, *correction)),
        *experts(when),
        *gated_ffn(bias, name="mlp.shared_experts", prefix="s-", when=when),
    )


DEEPSEEK_V3 = replace(
    YOUTU,
    model_types=("deepseek_v3",),
    sizes=_MLA_MIXTURE,
    layer_tensors=(*INPUT_NORMS, *_MLA, *sparse_ffn(after_dense)),
    experts=after_dense,
    groups="n_group",
    stacks=stacks(),
    dead=(*GLM4_MOE.dead, "*layers.61.*"),
    defaults={"tie_word_embeddings": False, "attention_bias": False, "first_k_dense_replace": 3, "n_group": 8},
    unless={},
    note="latents keep order and signs",
)
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_types=("deepseek_v2",),
    layer_tensors=(*INPUT_NORMS, *_MLA, *sparse_ffn(after_dense, (), "mlp_bias")),
    dead=(),
    latent="neighbours",
    defaults={"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "n_shared_experts": 2},
)


def listed_as_sparse(default: Rule) -> Rule:
    """Whether ``mlp_layer_types`` says that a layer has experts; without that list, ``default`` says it."""

    def rule(config: Config, layer: int) -> bool:
        kinds = config.get("mlp_layer_types")
        return bool(kinds[layer] == "sparse" if kinds else default(config, layer))

    return rule


is_listed_or_after_first, is_listed_or_after_dense = (
    listed_as_sparse(lambda _, layer: layer > 0),
    listed_as_sparse(after_dense),
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_types=("glm4_moe_lite",),
    layer_tensors=(*INPUT_NORMS, *_MLA, *sparse_ffn(is_listed_or_after_first)),
    experts=is_listed_or_after_first,
    dead=(*GLM4_MOE.dead, "*layers.47.*"),
    defaults={"tie_word_embeddings": False, "attention_bias": False},
)


def has_indexer(config: Config, layer: int) -> bool:
    """Whether a layer of GLM 5 chooses keys itself; the others take the choice of the layer before."""
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds:
        return kinds[layer] in ("full", "F")
    step, offset = max(int(config.get("index_topk_freq", 1)), 1), int(config.get("index_skip_topk_offset", 2))
    return max(layer - offset + 1, 0) % step == 0


def indexer(when: Rule | None = None) -> tuple[Tensor, ...]:
    """What chooses the keys that a query looks at."""
    return (
        Tensor("self_attn.indexer.wq_b.weight", ("index_query", "q-latent"), when),
        Tensor("self_attn.indexer.wk.weight", ("index_key", "model"), when),
        Tensor("self_attn.indexer.k_norm.weight", ("index_key",), when),
        Tensor("self_attn.indexer.k_norm.bias", ("index_key",), when),
        Tensor("self_attn.indexer.weights_proj.weight", ("index_head", "model"), when),
    )


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_types=("deepseek_v32",),
    sizes={
        **_MLA_MIXTURE, "index_head": "index_n_heads", "index_key": "index_head_dim",
        "index_query": lambda config, _: config["index_n_heads"] * config["index_head_dim"],
    },
    layer_tensors=(*INPUT_NORMS, *_MLA, *indexer(), *sparse_ffn(is_listed_or_after_dense)),
    experts=is_listed_or_after_dense,
)  # fmt: skip
GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_types=("glm_moe_dsa",),
    layer_tensors=(*INPUT_NORMS, *_MLA, *indexer(has_indexer), *sparse_ffn(is_listed_or_after_dense)),
    dead=(*GLM4_MOE.dead, "*layers.78.*"),
    defaults={**DEEPSEEK_V3.defaults, "n_group": 1},
)


def is_mixture(config: Config, layer: int) -> bool:
    """Whether a layer of Llama 4 has experts."""
    listed = config.get("moe_layers")
    step = int(config.get("interleave_moe_layer_step") or 1)
    return layer in listed if listed is not None else (layer + 1) % step == 0


# Queries and keys are normed after RoPE and without a weight, which every angle passes. Stacks hold inputs first.
LLAMA4 = replace(
    LLAMA,
    model_types=("llama4_text",),
    sizes={
        **SIZES, "ffn": "intermediate_size_mlp", "expert_ffn": "intermediate_size", "shared_ffn": "intermediate_size",
        "experts": ("num_local_experts", "num_experts"),
    },
    layer_tensors=(
        *INPUT_NORMS, *attention(), *gated_ffn(name="feed_forward", when=negated(is_mixture)),
        Tensor("feed_forward.router.weight", ("expert", "model"), is_mixture),
        Tensor("feed_forward.experts.gate_up_proj", ("expert", "model", ("e-gate", "e-up")), is_mixture),
        Tensor("feed_forward.experts.down_proj", ("expert", "e-ffn", "model"), is_mixture),
        *gated_ffn(name="feed_forward.shared_expert", prefix="s-", when=is_mixture),
    ),
    planes="neighbours",
    rotary=where_rope(listed_or_every("no_rope_layers", "no_rope_layer_interval", 4)),
    experts=is_mixture,
    unless={},
    defaults={
        "tie_word_embeddings": False, "attention_bias": False, "num_key_value_heads": 8, "head_dim": 128,
        "num_local_experts": 16, "intermediate_size_mlp": 16384,
    },
    note="text only",
)  # fmt: skip
# Constants are added to up, so signs do not cancel; sinks go with their heads. Files store inputs first.
GPT_OSS = replace(
    LLAMA,
    model_types=("gpt_oss",),
    sizes={**SIZES, "experts": ("num_local_experts", "num_experts"), "expert_ffn": "intermediate_size"},
    layer_tensors=(
        *INPUT_NORMS, *attention(), Tensor("self_attn.sinks", ("head",)),
        Tensor("mlp.router.weight", ("expert", "model")), Tensor("mlp.router.bias", ("expert",)),
        Tensor("mlp.experts.gate_up_proj", ("expert", "model", Fused(("e-gate", "e-up"), "expert_ffn"))),
        Tensor("mlp.experts.gate_up_proj_bias", ("expert", Fused(("e-gate", "e-up"), "expert_ffn"))),
        Tensor("mlp.experts.down_proj", ("expert", "e-ffn", "model")),
        Tensor("mlp.experts.down_proj_bias", ("expert", "model")),
    ),
    gated=False,
    experts=lambda *_: True,
    unless={},
    defaults={"tie_word_embeddings": False, "attention_bias": True, "head_dim": 64, "num_key_value_heads": 8},
    note="in bfloat16; the published weights are quantised",
)  # fmt: skip

# Layers of attention among gated short convolutions. A convolution works on each channel alone and has no activation,
# so it is a gated feed-forward layer whose neurons see earlier tokens: gate · conv(gate · up).


def is_convolution(config: Config, layer: int) -> bool:
    """Whether a layer of LFM2 is a short convolution; without any list, none is."""
    kind, attends = kind_of(config, layer), config.get("full_attn_idxs")
    return kind == "conv" if kind else attends is not None and layer not in attends


def is_convolution3(config: Config, layer: int) -> bool:
    """The same of LFM3: without a list, attention is in every second layer but the first."""
    kind = kind_of(config, layer)
    return kind == "conv" if kind else layer % 2 == 1 or layer == 0


def short_convolution(when: Rule) -> tuple[Tensor, ...]:
    return (
        *linear("conv.in_proj", ("s-gate", "s-gate", "s-up"), "model", bias="conv_bias", when=when),
        Tensor("conv.conv.weight", ("s-gate", "one", "taps"), when),
        Tensor("conv.conv.bias", ("s-up",), both(when, "conv_bias")),
        *linear("conv.out_proj", "model", "s-ffn", bias="conv_bias", when=when),
    )  # fmt: skip


def numbered_ffn(when: Rule | None = None) -> tuple[Tensor, ...]:
    return (
        *linear("feed_forward.w1", "gate", "model", when=when), *linear("feed_forward.w3", "up", "model", when=when),
        *linear("feed_forward.w2", "model", "ffn", when=when),
    )  # fmt: skip


def adjusted_ffn(config: Config, _: int) -> int:
    """LFM2's feed-forward size, which it adjusts by default: two thirds, times a factor, rounded up."""
    size = int(config.get("block_ff_dim") or config["intermediate_size"])
    if not config["block_auto_adjust_ff_dim"]:
        return size
    unit, factor = int(config["block_multiple_of"]), float(config["block_ffn_dim_multiplier"])
    return -(-int(factor * int(2 * size / 3)) // unit) * unit


_CONVOLUTION: Sizes = {**SIZES, "shared_ffn": "hidden_size", "one": 1, "taps": "conv_L_cache"}
LFM2 = replace(
    LLAMA,
    model_types=("lfm2",),
    sizes={**_CONVOLUTION, "ffn": adjusted_ffn},
    tensors=(
        Tensor("model.embed_tokens.weight", ("vocab", "model")), *rms_norm("model.embedding_norm"),
        Tensor("lm_head.weight", ("vocab", "model")),
    ),
    layer_tensors=(
        *rms_norm("operator_norm"), *rms_norm("ffn_norm"), *numbered_ffn(), *short_convolution(is_convolution),
        *linear("self_attn.q_proj", "query", "model", when=negated(is_convolution)),
        *linear("self_attn.k_proj", "key", "model", when=negated(is_convolution)),
        *linear("self_attn.v_proj", "value", "model", when=negated(is_convolution)),
        *linear("self_attn.out_proj", "model", "mixed", when=negated(is_convolution)),
        Tensor("self_attn.q_layernorm.weight", ("|head|",), negated(is_convolution)),
        Tensor("self_attn.k_layernorm.weight", ("|head|",), negated(is_convolution)),
    ),
    qk_norm="shared",
    defaults={
        "tie_word_embeddings": True, "num_key_value_heads": 8, "conv_bias": False, "conv_L_cache": 3,
        "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
    },
    unless={"tie_embedding": True},  # which transformers reads in place of tie_word_embeddings
    note="convolutions move like feed-forward layers",
)  # fmt: skip


def after_dense_layers(config: Config, layer: int) -> bool:
    return layer >= int(config["num_dense_layers"])


LFM2_MOE = replace(
    LFM2,
    model_types=("lfm2_moe",),
    sizes={**_CONVOLUTION, **_EXPERTS},
    layer_tensors=(
        *(tensor for tensor in LFM2.layer_tensors if not tensor.name.startswith("feed_forward.")),
        *numbered_ffn(negated(after_dense_layers)),
        Tensor("feed_forward.gate.weight", ("expert", "model"), after_dense_layers),
        Tensor("feed_forward.expert_bias", ("expert",), both(after_dense_layers, "use_expert_bias"),
               trained=False),
        *experts(after_dense_layers, ("w1", "w3", "w2"), "feed_forward", "feed_forward"),
    ),
    experts=after_dense_layers,
    stacks=stacks(("w1", "w3", "w2"), "feed_forward", "feed_forward"),
    defaults={
        "tie_word_embeddings": True, "num_key_value_heads": 8, "conv_bias": False, "conv_L_cache": 3,
        "num_dense_layers": 2, "use_expert_bias": True, "num_experts": 32, "moe_intermediate_size": 1792,
    },
)  # fmt: skip
# A gate for each head. Where RoPE is "proportional" it turns the first planes of the whole head, and others by 0.
_GATE_OF_HEADS = both(negated(is_convolution3), "use_attention_gate")
LFM3 = replace(
    LFM2,
    model_types=("lfm3",),
    sizes=_CONVOLUTION,
    layer_tensors=(
        *rms_norm("operator_norm"), *rms_norm("ffn_norm"),
        *rms_norm("post_operator_norm", "use_sandwich_norm"), *rms_norm("post_ffn_norm", "use_sandwich_norm"),
        *numbered_ffn(), *short_convolution(is_convolution3),
        *attention(when=negated(is_convolution3)),
        Tensor("self_attn.q_norm.weight", ("|head|",), negated(is_convolution3)),
        Tensor("self_attn.k_norm.weight", ("|head|",), negated(is_convolution3)),
        Tensor("self_attn.gate_proj.weight", ("head", "model"), _GATE_OF_HEADS, "hub"),
        Tensor("self_attn.g_proj.weight", ("head", "model"), _GATE_OF_HEADS, "memory"),
    ),
    stacks=(Stack("self_attn.g_proj.weight", ("self_attn.gate_proj.weight",)),),
    defaults={
        "tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 128, "attention_bias": False,
        "conv_bias": False, "conv_L_cache": 7, "use_sandwich_norm": True, "use_attention_gate": True,
    },
    unless={},
)  # fmt: skip

# Layers of attention among layers of Mamba2, or both side by side.


def mamba2(
    name: str, bias: str, out_bias: str, conv_bias: str, when: Rule | None = None, norm: str | Rule | None = None
) -> tuple[Tensor, ...]:
    """``norm``: whether there is one, if that is not the same as ``when``."""
    convolved = ("ssm", "ssm-state", "ssm-state")  # x, B and C
    return (
        *(Tensor(f"{name}.{each}", ("ssm-head",), when) for each in ("A_log", "D", "dt_bias")),
        *linear(f"{name}.in_proj", ("ssm", *convolved, "ssm-head"), "model", bias=bias, when=when),
        Tensor(f"{name}.conv1d.weight", (convolved, "one", "taps"), when),
        Tensor(f"{name}.conv1d.bias", (convolved,), both(when, conv_bias)),
        Tensor(f"{name}.norm.weight", ("ssm",), norm or when),
        *linear(f"{name}.out_proj", "model", "ssm", bias=out_bias, when=when),
    )


def mamba2_sizes(heads: str, inner: str | Rule, groups: str, state: str, taps: str) -> Sizes:
    """``inner``: how wide the output of all heads is. Besides it there are B and C of each group."""
    return {
        "one": 1, "ssm-head": heads, "ssm": inner, "taps": taps, "ssm-groups": groups,
        "ssm-state": lambda config, _: config[groups] * config[state],
    }  # fmt: skip


_MAMBA: Sizes = mamba2_sizes(
    "mamba_n_heads", lambda config, _: config["mamba_expand"] * config["hidden_size"], "mamba_n_groups",
    "mamba_d_state", "mamba_d_conv",
)  # fmt: skip
_MAMBA_DEFAULTS = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip


def attends(config: Config, layer: int) -> bool:
    """Whether a layer has attention; without a list, none has."""
    return kind_of(config, layer, "layers_block_type") == "full_attention"


GRANITEMOEHYBRID = replace(
    GRANITEMOE,
    model_types=("granitemoehybrid",),
    sizes={**GRANITEMOE.sizes, **_MAMBA, "experts": lambda config, _: config["num_local_experts"] or None},
    layer_tensors=(
        *INPUT_NORMS, *attention(when=attends),
        *mamba2("mamba", "mamba_proj_bias", "mamba_proj_bias", "mamba_conv_bias", negated(attends)),
        *granite_experts("num_local_experts"),
        Tensor("shared_mlp.input_linear.weight", (("s-gate", "s-up"), "model")),
        Tensor("shared_mlp.output_linear.weight", ("model", "s-ffn")),
    ),
    rotary=where_rope(lambda config, _: config.get("position_embedding_type") == "rope"),
    experts=entry("num_local_experts"),
    defaults={
        "tie_word_embeddings": False, "attention_bias": False, "num_local_experts": 8, "shared_intermediate_size": 1024,
        **_MAMBA_DEFAULTS,
    },
    note="inside Mamba layers only the residual stream moves",
)  # fmt: skip


def is_listed(config: Config, layer: int) -> bool:
    """Whether a layer of Bamba has attention."""
    return layer in (config.get("attn_layer_indices") or ())


BAMBA = replace(
    LLAMA,
    model_types=("bamba",),
    sizes={**SIZES, **_MAMBA},
    tensors=(
        Tensor("model.embed_tokens.weight", ("vocab", "model")), *rms_norm("model.final_layernorm"),
        Tensor("lm_head.weight", ("vocab", "model")),
    ),
    layer_tensors=(
        *rms_norm("input_layernorm"), *rms_norm("pre_ff_layernorm"), *attention(when=is_listed),
        *mamba2("mamba", "mamba_proj_bias", "mamba_proj_bias", "mamba_conv_bias", negated(is_listed)),
        *gated_ffn("mlp_bias", "feed_forward"),
    ),
    rotary=share_of_head("partial_rotary_factor"),
    defaults={
        "tie_word_embeddings": False, "num_key_value_heads": 8, "attention_bias": False, "mlp_bias": False,
        "partial_rotary_factor": 0.5, **_MAMBA_DEFAULTS,
    },
    unless={},
    note="inside Mamba layers only the residual stream moves",
)  # fmt: skip


def every(period: str, offset: str) -> Rule:
    """Whether a layer is the one at ``offset`` in its period."""
    return lambda config, layer: layer % int(config[period]) == config[offset]


has_attention = every("attn_layer_period", "attn_layer_offset")
has_experts = both(every("expert_layer_period", "expert_layer_offset"), lambda config, _: config["num_experts"] > 1)
JAMBA = replace(
    BAMBA,
    model_types=("jamba",),
    sizes={
        **SIZES, **_EXPERTS, "expert_ffn": "intermediate_size", "one": 1, "taps": "mamba_d_conv",
        "m-state": "mamba_d_state", "m-inner": _MAMBA["ssm"],
        "m-rank": lambda config, _: (
            -(-config["hidden_size"] // 16) if config["mamba_dt_rank"] == "auto" else config["mamba_dt_rank"]
        ),
    },
    layer_tensors=(
        *rms_norm("input_layernorm"), *rms_norm("pre_ff_layernorm"), *attention(False, when=has_attention),
        *(
            replace(tensor, when=both(negated(has_attention), tensor.when))
            for tensor in (
                *linear("mamba.in_proj", ("m-inner", "m-inner"), "model", bias="mamba_proj_bias"),
                Tensor("mamba.conv1d.weight", ("m-inner", "one", "taps")),
                Tensor("mamba.conv1d.bias", ("m-inner",), "mamba_conv_bias"),
                *linear("mamba.x_proj", ("m-rank", "m-state", "m-state"), "m-inner"),
                *linear("mamba.dt_proj", "m-inner", "m-rank", bias=True),
                Tensor("mamba.A_log", ("m-inner", "m-state")), Tensor("mamba.D", ("m-inner",)),
                Tensor("mamba.dt_layernorm.weight", ("m-rank",)),
                Tensor("mamba.b_layernorm.weight", ("m-state",)),
                Tensor("mamba.c_layernorm.weight", ("m-state",)),
                *linear("mamba.out_proj", "model", "m-inner", bias="mamba_proj_bias"),
            )
        ),
        *gated_ffn(name="feed_forward", when=negated(has_experts)),
        Tensor("feed_forward.router.weight", ("expert", "model"), has_experts),
        *experts(has_experts, split="feed_forward", fused="feed_forward"),
    ),
    planes=None,
    rotary=None,
    experts=has_experts,
    stacks=stacks(split="feed_forward", fused="feed_forward"),
    defaults={
        "tie_word_embeddings": False, "num_key_value_heads": 8, "num_experts": 16, "expert_layer_period": 2,
        "expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto", "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
)  # fmt: skip
FALCON_H1 = replace(
    BAMBA,
    model_types=("falcon_h1",),
    sizes={
        **SIZES, **mamba2_sizes("mamba_n_heads", "mamba_d_ssm", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    },
    layer_tensors=(
        *rms_norm("input_layernorm"), *rms_norm("pre_ff_layernorm"), *attention(),
        *mamba2("mamba", "mamba_proj_bias", "projectors_bias", "mamba_conv_bias", norm="mamba_rms_norm"),
        *gated_ffn("mlp_bias", "feed_forward"),
    ),
    rotary=None,
    defaults={
        "tie_word_embeddings": False, "num_key_value_heads": 8, "attention_bias": False, "mlp_bias": False,
        "projectors_bias": False, "mamba_rms_norm": False, "mamba_d_ssm": 1024, **_MAMBA_DEFAULTS,
    },
    unless=LLAMA.unless,
    note="inside Mamba parts only the residual stream moves",
)  # fmt: skip


_NEMOTRON_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def nemotron_kinds(config: Config) -> list[str]:
    """The kind of each layer of Nemotron-H; older files have a letter for each."""
    given = config.get("layers_block_type") or config.get("layer_types")
    if given:
        return [_OLDER.get(kind, kind) for kind in given]
    return [_NEMOTRON_LETTERS[letter] for letter in config["hybrid_override_pattern"]]


def nemotron_is(kind: str) -> Rule:
    return lambda config, layer: nemotron_kinds(config)[layer] == kind


is_moe, is_mlp = nemotron_is("moe"), nemotron_is("mlp")
is_latent = both(is_moe, "moe_latent_size")  # experts read and write fewer coordinates than the residual stream
is_direct = both(is_moe, unless("moe_latent_size"))


def ungated_experts(width: str, when: Rule) -> tuple[Tensor, ...]:
    return (
        Tensor("mixer.experts.{e}.up_proj.weight", ("e-up", width), when, "split"),
        Tensor("mixer.experts.{e}.down_proj.weight", (width, "e-ffn"), when, "split"),
        Tensor("mixer.experts.up_proj", ("expert", "e-up", width), when, "fused"),
        Tensor("mixer.experts.down_proj", ("expert", width, "e-ffn"), when, "fused"),
    )


NEMOTRON_H = replace(
    LLAMA,
    model_types=("nemotron_h",),
    sizes={
        **SIZES,
        "layers": lambda config, _: len(nemotron_kinds(config)),
        "experts": ("n_routed_experts", "num_local_experts"), "expert_ffn": "moe_intermediate_size",
        "shared_ffn": "moe_shared_expert_intermediate_size",
        "moe_latent": lambda config, _: config.get("moe_latent_size") or 1,
        **mamba2_sizes(
            "mamba_num_heads", lambda config, _: config["mamba_num_heads"] * config["mamba_head_dim"], "n_groups",
            "ssm_state_size", "conv_kernel",
        ),
    },
    prefix="backbone.",
    layer="backbone.layers.{i}.",
    tensors=(
        Tensor("backbone.embeddings.weight", ("vocab", "model")), *rms_norm("backbone.norm_f"),
        Tensor("lm_head.weight", ("vocab", "model")),
    ),
    layer_tensors=(
        *rms_norm("norm"),
        *attention(False, name="mixer", when=nemotron_is("full_attention")),
        *mamba2("mixer", "use_bias", "use_bias", "use_conv_bias", nemotron_is("linear_attention")),
        *linear("mixer.up_proj", "up", "model", bias="mlp_bias", when=is_mlp),
        *linear("mixer.down_proj", "model", "ffn", bias="mlp_bias", when=is_mlp),
        Tensor("mixer.gate.weight", ("expert", "model"), is_moe),
        Tensor("mixer.gate.e_score_correction_bias", ("expert",), is_moe, trained=False),
        *ungated_experts("model", is_direct), *ungated_experts("moe_latent", is_latent),
        *linear("mixer.fc1_latent_proj", "moe_latent", "model", bias="mlp_bias", when=is_latent),
        *linear("mixer.fc2_latent_proj", "model", "moe_latent", bias="mlp_bias", when=is_latent),
        *linear("mixer.shared_experts.up_proj", "s-up", "model", bias="mlp_bias", when=is_moe),
        *linear("mixer.shared_experts.down_proj", "model", "s-ffn", bias="mlp_bias", when=is_moe),
    ),
    planes=None,
    gated=False,
    experts=is_moe,
    groups="n_group",
    stacks=(
        Stack("mixer.experts.up_proj", ("mixer.experts.{e}.up_proj.weight",)),
        Stack("mixer.experts.down_proj", ("mixer.experts.{e}.down_proj.weight",)),
    ),
    dead=("mtp.*", "backbone.mtp.*"),
    renamed=(("backbone.", "model."),),
    defaults={
        "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504,
        "mlp_bias": False, "use_bias": False, "use_conv_bias": True, "hybrid_override_pattern": "ME*-",
        "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
        "n_routed_experts": 8, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
    },
    unless={},
    note="inside Mamba layers only the residual stream moves",
)  # fmt: skip

# Further relatives.
ARCEE = replace(
    LLAMA,
    model_types=("arcee",),
    layer_tensors=(
        *INPUT_NORMS, *attention(),
        *linear("mlp.up_proj", "ffn", "model", bias="mlp_bias"),
        *linear("mlp.down_proj", "model", "ffn", bias="mlp_bias"),
    ),
    gated=False,
)  # fmt: skip
CWM = replace(
    LLAMA,
    model_types=("cwm",),
    layer_tensors=(*INPUT_NORMS, *attention(False), *gated_ffn("mlp_bias")),
    defaults={"tie_word_embeddings": False, "mlp_bias": False, "num_key_value_heads": 8, "head_dim": 128},
)
HELIUM = replace(
    LLAMA,
    model_types=("helium",),
    layer_tensors=(*INPUT_NORMS, *attention("attention_bias", False), *gated_ffn("mlp_bias")),
    planes="neighbours",
    defaults={**LLAMA.defaults, "num_key_value_heads": 20, "head_dim": 128},
)
# No norm has a weight, and queries and keys are normed after RoPE, which every angle passes.
NANOCHAT = replace(
    LLAMA,
    model_types=("nanochat",),
    tensors=tuple(t for t in LLAMA.tensors if "norm" not in t.name),
    layer_tensors=(*attention(), *linear("mlp.fc1", "ffn", "model"), *linear("mlp.fc2", "model", "ffn")),
    gated=False,
    defaults={"tie_word_embeddings": False, "attention_bias": False},
)
INTERNLM3 = replace(
    LLAMA,
    model_types=("internlm3",),
    layer_tensors=(
        *INPUT_NORMS,
        *attention(entry("attention_bias", "qkv_bias")),
        *gated_ffn(entry("mlp_bias", "bias")),
    ),
    defaults={"tie_word_embeddings": False, "num_key_value_heads": 2, "head_dim": 128},
)
# Norms within attention and FFN: the first leaves values order and signs, the second has no signs, like "gate".
BITNET = replace(
    LLAMA,
    model_types=("bitnet",),
    layer_tensors=(
        *INPUT_NORMS, *attention(), *gated_ffn(),
        Tensor("self_attn.attn_sub_norm.weight", ("|mixed|",)), Tensor("mlp.ffn_sub_norm.weight", ("gate",)),
    ),
    defaults={"tie_word_embeddings": False, "attention_bias": False, "num_key_value_heads": 5},
    note="weights that are not quantised, also not while loading",
)  # fmt: skip
VAULTGEMMA = replace(
    GEMMA2,
    model_types=("vaultgemma",),
    layer_tensors=(
        *rms_norm("input_layernorm"), *rms_norm("pre_feedforward_layernorm"), *attention(), *gated_ffn(),
    ),
)  # fmt: skip
# Norms multiply by 1 + w.
NEMOTRON = replace(
    STABLELM,
    model_types=("nemotron",),
    layer_tensors=(
        *layer_norm("input_layernorm"), *layer_norm("post_attention_layernorm"), *attention(),
        *linear("mlp.up_proj", "ffn", "model", bias="mlp_bias"),
        *linear("mlp.down_proj", "model", "ffn", bias="mlp_bias"),
    ),
    gated=False,
    defaults={
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 0.5,
    },
    unless={},
    note="",
)  # fmt: skip
BIOGPT = replace(
    OPT,
    model_types=("biogpt",),
    sizes={**{size: source for size, source in OPT.sizes.items() if size != "embed"}, "ffn": "intermediate_size"},
    prefix="biogpt.",
    layer="biogpt.layers.{i}.",
    tensors=(
        Tensor("biogpt.embed_tokens.weight", ("vocab", "model")),
        Tensor("biogpt.embed_positions.weight", ("position", "model")),
        *layer_norm("biogpt.layer_norm"),
        Tensor("output_projection.weight", ("vocab", "model")),
    ),
    heads=("output_projection.weight",),
    unless={},
    note="",
)


def heads_without_clipping(config: Config, _: int) -> Any:
    """The number of MPT's heads. Clipping, which is elementwise, would leave fewer symmetries."""
    if (config.get("attn_config") or {}).get("clip_qkv"):
        raise ValueError("clip_qkv is not supported")
    return entry("n_heads", "num_attention_heads")(config, 0)


MPT = replace(
    BLOOM,
    model_types=("mpt",),
    sizes={
        "model": ("d_model", "hidden_size"), "ffn": lambda config, _: 4 * entry("d_model", "hidden_size")(config, 0),
        "vocab": "vocab_size", "layers": ("n_layers", "num_hidden_layers"), "heads": heads_without_clipping,
        "kv_heads": heads_without_clipping,
    },
    layer="transformer.blocks.{i}.",
    tensors=(
        Tensor("transformer.wte.weight", ("vocab", "model")), *rms_norm("transformer.norm_f"),
        Tensor("lm_head.weight", ("vocab", "model")),
    ),
    layer_tensors=(
        *rms_norm("norm_1"), *rms_norm("norm_2"),  # layer norms without a bias
        *linear("attn.Wqkv", ("query", "key", "value"), "model"), *linear("attn.out_proj", "model", "mixed"),
        *linear("ffn.up_proj", "ffn", "model"), *linear("ffn.down_proj", "model", "ffn"),
    ),
    note="without `clip_qkv`",
)  # fmt: skip
FLEX_OLMO = replace(
    OLMOE,
    model_types=("flex_olmo",),
    layer_tensors=(*attention(), *WHOLE_NORM, *OUTPUT_NORMS, _ROUTER, *experts()),
    unless={},
    note="",
)
SOLAR_OPEN = replace(
    GLM4_MOE,
    model_types=("solar_open",),
    sizes={size: source for size, source in GLM4_MOE.sizes.items() if size != "ffn"},
    layer_tensors=(
        *INPUT_NORMS, *attention("attention_bias", False), _ROUTER,
        Tensor("mlp.gate.e_score_correction_bias", ("expert",), trained=False),
        *experts(), *gated_ffn(name="mlp.shared_experts", prefix="s-"),
    ),
    rotary=None,
    qk_norm=None,
    experts=lambda *_: True,
    dead=(),
    defaults={"tie_word_embeddings": False, "attention_bias": False, "num_key_value_heads": 8, "head_dim": 128},
    unless={"partial_rotary_factor": 1.0},
)  # fmt: skip
_sparse_unless_listed = sparse_by_type(lambda *_: True)
MELLUM = replace(
    QWEN3_MOE,
    model_types=("mellum",),
    layer_tensors=(
        *INPUT_NORMS, *attention(), *SHARED_NORM, *gated_ffn(when=negated(_sparse_unless_listed)),
        replace(_ROUTER, when=_sparse_unless_listed), *experts(_sparse_unless_listed),
    ),
    experts=_sparse_unless_listed,
    dead=("mtp.*",),
    defaults={"tie_word_embeddings": False, "attention_bias": False, "num_key_value_heads": 4, "head_dim": 128},
)  # fmt: skip
_has_experts = sparse_by_type(after_dense)
EXAONE_MOE = replace(
    EXAONE4,
    model_types=("exaone_moe",),
    sizes={
        **SIZES, **_EXPERTS,
        "shared_ffn": lambda config, _: config["moe_intermediate_size"] * int(config["num_shared_experts"]),
    },
    layer_tensors=(
        *INPUT_NORMS, *attention(False), *SHARED_NORM, *gated_ffn(when=negated(_has_experts)),
        replace(_ROUTER, when=_has_experts),
        Tensor("mlp.e_score_correction_bias", ("expert",), _has_experts, "split", trained=False),
        Tensor("mlp.gate.e_score_correction_bias", ("expert",), _has_experts, "fused", trained=False),
        *experts(_has_experts),
        *gated_ffn(name="mlp.shared_experts", prefix="s-", when=_has_experts),
    ),
    rotary=where_rope(layer_type_is("sliding_attention")),
    experts=_has_experts,
    groups="n_group",
    stacks=(*stacks(), Stack("mlp.gate.e_score_correction_bias", ("mlp.e_score_correction_bias",))),
    dead=("mtp.*",),
    defaults={**EXAONE4.defaults, "num_shared_experts": 1, "first_k_dense_replace": 1},
)  # fmt: skip


def renamed_parts(when: Rule, names: dict[str, str], *tensors: Tensor) -> tuple[Tensor, ...]:
    """``tensors`` of a mixture under the names that they have in memory, and under those that the Hub's files have."""

    def in_file(name: str) -> str:
        return next((old + name.removeprefix(new) for old, new in names.items() if name.startswith(new)), name)

    return tuple(
        replace(tensor, name=name, when=when, layout=layout)
        for tensor in tensors
        for name, layout in ((in_file(tensor.name), "split"), (tensor.name, "fused"))
    )


def renamed_stacks(tensors: tuple[Tensor, ...]) -> tuple[Stack, ...]:
    """What ``renamed_parts`` lists, for writing parameters under the names in files."""
    return tuple(Stack(new.name, (old.name,)) for old, new in zip(tensors[::2], tensors[1::2], strict=True))


_after_first = sparse_by_type(lambda _, layer: layer > 0)
_HY_PARTS = renamed_parts(
    _after_first,
    {
        "mlp.router.gate.": "mlp.gate.", "mlp.expert_bias": "mlp.e_score_correction_bias",
        "mlp.shared_mlp.": "mlp.shared_experts.",
    },
    _ROUTER, Tensor("mlp.e_score_correction_bias", ("expert",), trained=False),
    *gated_ffn(name="mlp.shared_experts", prefix="s-"),
)  # fmt: skip
HY_V3 = replace(
    QWEN3_MOE,
    model_types=("hy_v3",),
    sizes={
        **SIZES, **_EXPERTS,
        "shared_ffn": lambda config, _: config["moe_intermediate_size"] * int(config["num_shared_experts"]),
    },
    layer_tensors=(
        *INPUT_NORMS, *attention(), *SHARED_NORM, *gated_ffn(when=negated(_after_first)), *_HY_PARTS,
        *experts(_after_first),
    ),
    experts=_after_first,
    stacks=(*stacks(), *renamed_stacks(_HY_PARTS)),
    dead=("model.layers.80.*",),
    defaults={
        "tie_word_embeddings": False, "attention_bias": False, "num_key_value_heads": 8, "head_dim": 128,
        "num_shared_experts": 1,
    },
    unless={"mlp_bias": False},
    note="a shared expert beside the others",
)  # fmt: skip


def rotary_of_layer_type(config: Config, layer: int) -> int:
    """RoPE turns the share of a head's coordinates that ``rope_parameters`` has for the layer's type."""
    kind = (config.get("layer_types") or {layer: "full_attention"})[layer]
    shares = {"full_attention": {"partial_rotary_factor": 0.5}}  # what transformers assumes
    own = (config.get("rope_parameters") or shares).get(kind, {})
    return int(config["head_dim"] * float(own.get("partial_rotary_factor", 1.0)))


def gates_elements(config: Config, _: int) -> bool:
    return config["gating"] not in (True, "per-head")


_LAGUNA_PARTS = renamed_parts(
    _after_first,
    {
        "mlp.experts.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared_expert.": "mlp.shared_experts.",
    },
    Tensor("mlp.gate.e_score_correction_bias", ("expert",), trained=False),
    *gated_ffn(name="mlp.shared_experts", prefix="s-"),
)  # fmt: skip
# A gate multiplies the values of each head or, "per-element", each coordinate.
LAGUNA = replace(
    QWEN3_MOE,
    model_types=("laguna",),
    sizes={**SIZES, **_EXPERTS, "shared_ffn": "shared_expert_intermediate_size"},
    layer_sizes={"heads": of_each_layer("num_attention_heads_per_layer", "num_attention_heads")},
    layer_tensors=(
        *INPUT_NORMS, *attention(), *SHARED_NORM,
        *linear("self_attn.g_proj", "head", "model", when=negated(gates_elements)),
        *linear("self_attn.g_proj", "|mixed|", "model", when=gates_elements),
        *gated_ffn(when=negated(_after_first)), replace(_ROUTER, when=_after_first), *_LAGUNA_PARTS,
        *experts(_after_first),
    ),
    rotary=rotary_of_layer_type,
    experts=_after_first,
    stacks=(*stacks(), *renamed_stacks(_LAGUNA_PARTS)),
    defaults={
        "tie_word_embeddings": False, "attention_bias": False, "num_key_value_heads": 8, "head_dim": 128,
        "gating": True,
    },
)  # fmt: skip


def ropes_or_dense(config: Config, layer: int) -> bool:
    """Whether a layer of Command's mixtures has RoPE: those with windows, and perhaps the dense ones."""
    first, prefix = int(config["first_k_dense_replace"]), int(config["prefix_dense_sliding_window_pattern"])
    kinds = config.get("layer_types")
    if kinds:
        sliding = kinds[layer] == "sliding_attention"
    elif layer < first:
        sliding = (layer + 1) % prefix != 0
    else:
        sliding = (layer - first + 1) % int(config["sliding_window_pattern"]) != 0
    return sliding or (prefix == 1 and not _has_experts(config, layer))


COHERE2_MOE = replace(
    COHERE2,
    model_types=("cohere2_moe",),
    sizes={
        **SIZES, **_EXPERTS, "ffn": ("prefix_dense_intermediate_size", "intermediate_size"),
        "expert_ffn": "intermediate_size",
        "shared_ffn": lambda config, _: config["intermediate_size"] * int(config["num_shared_experts"]) or None,
    },
    layer_tensors=(
        *rms_norm("input_layernorm"), *attention(), *gated_ffn(when=negated(_has_experts)),
        replace(_ROUTER, when=_has_experts), *experts(_has_experts),
        *gated_ffn(name="mlp.shared_experts", prefix="s-", when=both(_has_experts, "num_shared_experts")),
    ),
    rotary=where_rope(ropes_or_dense),
    experts=_has_experts,
    stacks=stacks(),
    defaults={
        "tie_word_embeddings": True, "attention_bias": False, "head_dim": 128, "num_shared_experts": 0,
        "first_k_dense_replace": 0, "prefix_dense_sliding_window_pattern": 1, "sliding_window_pattern": 4,
    },
)  # fmt: skip

_ALL = (
    LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_5, GRANITE, GRANITE_SWA, SMOLLM3, GEMMA, GEMMA2, GEMMA3, GEMMA4,
    GEMMA4_UNIFIED, PHI, PHI3, OLMO, OLMO2, GPT_NEOX, MIXTRAL, QWEN2_MOE, QWEN3_MOE, QWEN3_5_MOE,
    OLMOE, GRANITEMOE, GRANITEMOE_SWA, GPT_OSS, GLM, GLM4, GLM4_MOE, LLAMA4, STABLELM, STARCODER2, COHERE, COHERE2,
    EXAONE4, SEED_OSS, ERNIE4_5, ERNIE4_5_MOE, HUNYUAN, HUNYUAN_MOE, APERTUS, MINIMAX_M2, PHIMOE, DOTS1, AFMOE,
    IQUESTCODER, JAIS2, LFM2, LFM2_MOE, LFM3, GRANITEMOEHYBRID, QWEN3_NEXT, NEMOTRON_H, FALCON_H1, GEMMA3N, BAMBA,
    JAMBA, DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, GLM4_MOE_LITE, GLM_MOE_DSA, MINICPM3, YOUTU, FALCON,
    BLOOM, OPT, GPT2, GPT_NEO, GPTJ, CODEGEN, GPT_BIGCODE,
    ARCEE, CWM, HELIUM, NEMOTRON, NANOCHAT, VAULTGEMMA, EXAONE_MOE, SOLAR_OPEN, FLEX_OLMO, INTERNLM3, BITNET, BIOGPT,
    MPT, MELLUM, HY_V3, COHERE2_MOE, LAGUNA,
)  # fmt: skip
FAMILIES = {model_type: family for family in _ALL for model_type in family.model_types}
