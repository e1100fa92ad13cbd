"""Mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from mpu_cli.model.families.layernorm import COHERE2, LAYER_NORMS
from mpu_cli.model.families.llama import ERNIE4_5, EXAONE4, HUNYUAN, LLAMA, MISTRAL, QWEN3
from mpu_cli.model.families.parts import (
    CORRECTION,
    EXPERTS,
    INPUT_NORMS,
    NORM_AFTER_ROPE,
    OUTPUT_NORMS,
    ROUTER,
    SHARED_NORM,
    SIZES,
    WHOLE_NORM,
    after_dense,
    after_num_dense,
    attention,
    both,
    ends,
    experts,
    gated_ffn,
    granite_experts,
    has_rope_theta,
    is_listed_or_after_dense,
    is_listed_or_after_first,
    is_rope_layer,
    is_sparse,
    layer_norm,
    layer_type_is,
    linear,
    negate,
    only_if,
    renamed_parts,
    rms_norm,
    share_of_head,
    share_or_rotary_dim,
    shared_width,
    sparse_by_type,
    sparse_ffn,
    where_rope,
)
from mpu_cli.model.family import Config, Fused, Tensor

MIXTRAL = replace(
    MISTRAL,
    model_types=("mixtral",),
    sizes={**SIZES, "experts": "num_local_experts", "expert_ffn": "intermediate_size"},
    layer_tensors=(
        *INPUT_NORMS, *attention(False),
        Tensor("mlp.gate.weight", ("expert", "model"), parts=("block_sparse_moe.gate.weight",)),
        *experts(names=("w1", "w3", "w2"), split="block_sparse_moe"),
    ),
    defaults={"num_key_value_heads": 8, "num_local_experts": 8},
)  # fmt: skip

PHIMOE = replace(
    MIXTRAL,
    model_types=("phimoe",),
    tensors=ends("model.embed_tokens", *layer_norm("model.norm"), bias="lm_head_bias"),
    layer_tensors=(
        *LAYER_NORMS, *attention(),
        Tensor("mlp.router.weight", ("expert", "model"), parts=("block_sparse_moe.gate.weight",)),
        *experts(names=("w1", "w3", "w2"), split="block_sparse_moe"),
    ),
    rms_norm=False,
    defaults={"num_key_value_heads": 8, "num_local_experts": 16},
)  # fmt: skip

MINIMAX_M2 = replace(
    MIXTRAL,
    model_types=("minimax_m2",),
    layer_tensors=(
        *MIXTRAL.layer_tensors, *WHOLE_NORM,
        Tensor("mlp.e_score_correction_bias", ("expert",), None, ("block_sparse_moe.e_score_correction_bias",), False),
    ),
    rotary=share_or_rotary_dim,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256},
    unless={},
    note="in bfloat16; the published weights are quantised",
)  # fmt: skip

QWEN3_MOE = replace(
    QWEN3,
    model_types=("qwen3_moe",),
    sizes={**SIZES, **EXPERTS},
    layer_tensors=(*INPUT_NORMS, *attention(), *SHARED_NORM, *sparse_ffn(is_sparse, (), shared="")),
    defaults={"num_key_value_heads": 4},
)  # fmt: skip

QWEN2_MOE = replace(
    QWEN3_MOE,
    model_types=("qwen2_moe",),
    sizes={**SIZES, **EXPERTS, "shared_ffn": "shared_expert_intermediate_size", "one": 1},
    layer_tensors=(
        *INPUT_NORMS, *attention("qkv_bias", False), *sparse_ffn(is_sparse, (), shared="mlp.shared_expert"),
        Tensor("mlp.shared_expert_gate.weight", ("one", "model"), is_sparse),
    ),
    unless={},
    defaults={"qkv_bias": True, "num_key_value_heads": 16},
    note="a shared expert beside the others",
)  # fmt: skip

HUNYUAN_MOE = replace(
    HUNYUAN,
    model_types=("hunyuan_v1_moe",),
    sizes={**SIZES, **EXPERTS, "expert_ffn": "intermediate_size", "shared_ffn": "intermediate_size"},
    layer_tensors=(
        *INPUT_NORMS, *attention(), *NORM_AFTER_ROPE, Tensor("mlp.gate.wg.weight", ("expert", "model")), *experts(),
        *gated_ffn(name="mlp.shared_mlp", prefix="s-"),
    ),
)  # fmt: skip


def is_ernie_mixture(config: Config, layer: int) -> bool:
    """Whether a layer of Ernie 4.5 has experts."""
    start, last = int(config["moe_layer_start_index"]), int(config["moe_layer_end_index"])
    in_range = start <= layer and (last == -1 or layer <= last)
    return in_range and (layer + 1) % int(config["moe_layer_interval"] or 1) == 0


ERNIE4_5_MOE = replace(
    ERNIE4_5,
    model_types=("ernie4_5_moe",),
    sizes={
        **SIZES, "one": 1, "experts": ("moe_num_experts", "num_experts"), "expert_ffn": "moe_intermediate_size",
        "shared_ffn": shared_width("moe_num_shared_experts"),
    },
    tensors=(*ERNIE4_5.tensors, Tensor("lm_head.bias", ("vocab",), "use_bias")),
    layer_tensors=(
        *INPUT_NORMS, *attention("use_bias"),
        *sparse_ffn(is_ernie_mixture, (), "use_bias", shared=""),
        Tensor("mlp.gate.moe_statics.e_score_correction_bias", ("one", "expert"), is_ernie_mixture,
               ("mlp.moe_statics.e_score_correction_bias",), trained=False),
        *gated_ffn("use_bias", "mlp.shared_experts", "s-", when=both(is_ernie_mixture, "moe_num_shared_experts")),
    ),
    dead=("*mtp*",),
    defaults={
        "tie_word_embeddings": True, "num_key_value_heads": 4, "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
    },
)  # fmt: skip


AFMOE = replace(
    QWEN3_MOE,
    model_types=("afmoe",),
    sizes={**SIZES, **EXPERTS, "shared_ffn": shared_width("num_shared_experts")},
    layer_tensors=(
        *INPUT_NORMS, *rms_norm("pre_mlp_layernorm"), *rms_norm("post_mlp_layernorm"), *attention(), *SHARED_NORM,
        Tensor("self_attn.gate_proj.weight", ("|mixed|", "model")),
        *gated_ffn(when=negate(after_num_dense)),
        Tensor("mlp.router.gate.weight", ("expert", "model"), after_num_dense),
        Tensor("mlp.expert_bias", ("expert",), after_num_dense, trained=False),
        *experts(after_num_dense), *gated_ffn(name="mlp.shared_experts", prefix="s-", when=after_num_dense),
    ),
    rotary=where_rope(layer_type_is("sliding_attention", "global_attn_every_n_layers")),
    defaults={"head_dim": 128, "moe_intermediate_size": 1408, "num_dense_layers": 1, "num_shared_experts": 2},
)  # fmt: skip

OLMOE = replace(
    MIXTRAL,
    model_types=("olmoe",),
    sizes={**SIZES, **EXPERTS, "expert_ffn": "intermediate_size"},
    layer_tensors=(*INPUT_NORMS, *attention(), *WHOLE_NORM, ROUTER, *experts()),
    unless={"clip_qkv": None},
    defaults={},
    note="without `clip_qkv`",
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
)  # fmt: skip

GRANITEMOE_SWA = replace(
    GRANITEMOE,
    model_types=("granitemoe_swa",),
    layer_tensors=(
        *INPUT_NORMS, *attention(), Tensor("self_attn.sinks", ("head",)),
        *(replace(tensor, parts=()) for tensor in granite_experts()),
        *(tensor for tensor in GRANITEMOE.layer_tensors if tensor.name.startswith("shared_mlp.")),
    ),
    rotary=where_rope(has_rope_theta),
)  # fmt: skip

GLM4_MOE = replace(
    LLAMA,
    model_types=("glm4_moe",),
    sizes={
        **SIZES,
        "experts": ("n_routed_experts", "num_local_experts"), "expert_ffn": "moe_intermediate_size",
        "shared_ffn": shared_width("n_shared_experts"),
    },
    layer_tensors=(
        *INPUT_NORMS, *attention("attention_bias", False),
        *only_if("use_qk_norm", *SHARED_NORM),
        *sparse_ffn(after_dense),
    ),
    rotary=share_of_head("partial_rotary_factor"),
    dead=("*.eh_proj.weight", "*.shared_head.*", "*.enorm.weight", "*.hnorm.weight"),
    defaults={"partial_rotary_factor": 0.5, "num_key_value_heads": 8, "first_k_dense_replace": 1},
    unless={},
)  # fmt: skip

DOTS1 = replace(
    GLM4_MOE,
    model_types=("dots1",),
    layer_tensors=(*INPUT_NORMS, *attention(), *SHARED_NORM, *sparse_ffn(after_dense)),
    rotary=None,
    defaults={"num_key_value_heads": 32, "first_k_dense_replace": 0},
)  # fmt: skip


def is_mixture(config: Config, layer: int) -> bool:
    """Whether a layer of Llama 4 has experts."""
    listed = config.get("moe_layers")
    step = int(config.get("interleave_moe_layer_step") or 1)
    return layer in listed if listed is not None else (layer + 1) % step == 0


# Queries and keys are normed after RoPE and without a weight, which every angle passes. Stacks hold inputs first.
LLAMA4 = replace(
    LLAMA,
    model_types=("llama4_text",),
    renamed=(("language_model.", ""),),
    sizes={
        **SIZES, "ffn": "intermediate_size_mlp", "expert_ffn": "intermediate_size", "shared_ffn": "intermediate_size",
        "experts": ("num_local_experts", "num_experts"),
    },
    layer_tensors=(
        *INPUT_NORMS, *attention(), *gated_ffn(name="feed_forward", when=negate(is_mixture)),
        Tensor("feed_forward.router.weight", ("expert", "model"), is_mixture),
        Tensor("feed_forward.experts.gate_up_proj", ("expert", "model", ("e-gate", "e-up")), is_mixture),
        Tensor("feed_forward.experts.down_proj", ("expert", "e-ffn", "model"), is_mixture),
        *gated_ffn(name="feed_forward.shared_expert", prefix="s-", when=is_mixture),
    ),
    planes="neighbours",
    rotary=where_rope(is_rope_layer),
    unless={},
    defaults={"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16, "intermediate_size_mlp": 16384},
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
    unless={},
    defaults={"attention_bias": True, "head_dim": 64, "num_key_value_heads": 8},
    note="in bfloat16; the published weights are quantised",
)  # fmt: skip

FLEX_OLMO = replace(
    OLMOE,
    model_types=("flex_olmo",),
    layer_tensors=(*attention(), *WHOLE_NORM, *OUTPUT_NORMS, ROUTER, *experts()),
    unless={},
    note="",
)

SOLAR_OPEN = replace(
    GLM4_MOE,
    model_types=("solar_open",),
    sizes={size: source for size, source in GLM4_MOE.sizes.items() if size != "ffn"},
    layer_tensors=(
        *INPUT_NORMS, *attention("attention_bias", False), ROUTER,
        CORRECTION,
        *experts(), *gated_ffn(name="mlp.shared_experts", prefix="s-"),
    ),
    rotary=None,
    dead=(),
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    unless={"partial_rotary_factor": 1.0},
)  # fmt: skip

is_listed_or_sparse = sparse_by_type(lambda *_: True)

MELLUM = replace(
    QWEN3_MOE,
    model_types=("mellum",),
    layer_tensors=(*INPUT_NORMS, *attention(), *SHARED_NORM, *sparse_ffn(is_listed_or_sparse, (), shared="")),
    dead=("mtp.*",),
    defaults={"num_key_value_heads": 4, "head_dim": 128},
)  # fmt: skip

EXAONE_MOE = replace(
    EXAONE4,
    model_types=("exaone_moe",),
    sizes={**SIZES, **EXPERTS, "shared_ffn": shared_width("num_shared_experts")},
    layer_tensors=(
        *INPUT_NORMS, *attention(False), *SHARED_NORM,
        *sparse_ffn(is_listed_or_after_dense, (replace(CORRECTION, parts=("mlp.e_score_correction_bias",)),)),
    ),
    rotary=where_rope(layer_type_is("sliding_attention")),
    dead=("mtp.*",),
    defaults={**EXAONE4.defaults, "num_shared_experts": 1, "first_k_dense_replace": 1},
)  # fmt: skip

_HY_PARTS = renamed_parts(
    is_listed_or_after_first,
    {
        "mlp.router.gate.": "mlp.gate.", "mlp.expert_bias": "mlp.e_score_correction_bias",
        "mlp.shared_mlp.": "mlp.shared_experts.",
    },
    ROUTER, Tensor("mlp.e_score_correction_bias", ("expert",), trained=False),
    *gated_ffn(name="mlp.shared_experts", prefix="s-"),
)  # fmt: skip

HY_V3 = replace(
    QWEN3_MOE,
    model_types=("hy_v3",),
    sizes={**SIZES, **EXPERTS, "shared_ffn": shared_width("num_shared_experts")},
    layer_tensors=(
        *INPUT_NORMS, *attention(), *SHARED_NORM, *gated_ffn(when=negate(is_listed_or_after_first)), *_HY_PARTS,
        *experts(is_listed_or_after_first),
    ),
    dead=("model.layers.80.*",),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "num_shared_experts": 1},
    unless={"mlp_bias": False},
    note="a shared expert beside the others",
)  # fmt: skip


def rotary_of_layer_type(config: Config, layer: int) -> int:
    """RoPE turns the share of a head's coordinates that ``rope_parameters`` has for the layer's type."""
    kind = (config.get("layer_types") or {layer: "full_attention"})[layer]
    shares = {"full_attention": {"partial_rotary_factor": 0.5}}  # what transformers assumes
    rope = (config.get("rope_parameters") or shares).get(kind, {})
    return int(config["head_dim"] * float(rope.get("partial_rotary_factor", 1.0)))


def gates_elements(config: Config, _: int) -> bool:
    return config["gating"] not in (True, "per-head")


_LAGUNA_PARTS = renamed_parts(
    is_listed_or_after_first,
    {
        "mlp.experts.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared_expert.": "mlp.shared_experts.",
    },
    CORRECTION,
    *gated_ffn(name="mlp.shared_experts", prefix="s-"),
)  # fmt: skip


def heads_of_layer(config: Config, layer: int) -> int:
    """The number of a layer's query heads, which may be listed for each."""
    listed = config.get("num_attention_heads_per_layer")
    return listed[layer] if listed else config["num_attention_heads"]


# A gate multiplies the values of each head or, "per-element", each coordinate.
LAGUNA = replace(
    QWEN3_MOE,
    model_types=("laguna",),
    sizes={**SIZES, **EXPERTS, "shared_ffn": "shared_expert_intermediate_size"},
    layer_sizes={"heads": heads_of_layer},
    layer_tensors=(
        *INPUT_NORMS, *attention(), *SHARED_NORM,
        *linear("self_attn.g_proj", "head", "model", when=negate(gates_elements)),
        *linear("self_attn.g_proj", "|mixed|", "model", when=gates_elements),
        *gated_ffn(when=negate(is_listed_or_after_first)), replace(ROUTER, when=is_listed_or_after_first),
        *_LAGUNA_PARTS, *experts(is_listed_or_after_first),
    ),
    rotary=rotary_of_layer_type,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "gating": True},
)  # fmt: skip


def ropes_or_dense(config: Config, layer: int) -> bool:
    """Whether a layer of Command's mixtures has RoPE: those with windows, and perhaps the dense ones."""
    dense_count, prefix = int(config["first_k_dense_replace"]), int(config["prefix_dense_sliding_window_pattern"])
    kinds = config.get("layer_types")
    if kinds:
        sliding = kinds[layer] == "sliding_attention"
    elif layer < dense_count:
        sliding = (layer + 1) % prefix != 0
    else:
        sliding = (layer - dense_count + 1) % int(config["sliding_window_pattern"]) != 0
    return sliding or (prefix == 1 and not is_listed_or_after_dense(config, layer))


COHERE2_MOE = replace(
    COHERE2,
    model_types=("cohere2_moe",),
    sizes={
        **SIZES, **EXPERTS, "ffn": ("prefix_dense_intermediate_size", "intermediate_size"),
        "expert_ffn": "intermediate_size",
        "shared_ffn": lambda config, _: config["intermediate_size"] * int(config["num_shared_experts"]) or None,
    },
    layer_tensors=(
        *rms_norm("input_layernorm"), *attention(), *sparse_ffn(is_listed_or_after_dense, (), shared=""),
        *gated_ffn(name="mlp.shared_experts", prefix="s-", when=both(is_listed_or_after_dense, "num_shared_experts")),
    ),
    rotary=where_rope(ropes_or_dense),
    defaults={
        "tie_word_embeddings": True, "head_dim": 128, "num_shared_experts": 0, "first_k_dense_replace": 0,
        "prefix_dense_sliding_window_pattern": 1, "sliding_window_pattern": 4,
    },
)  # fmt: skip
