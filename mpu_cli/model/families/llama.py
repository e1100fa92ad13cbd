"""Llama and its relatives: RMS norms, gated feed-forward layers, or something close to that."""

from __future__ import annotations

from dataclasses import replace

from mpu_cli.model.families.parts import (
    INPUT_NORMS,
    NORM_AFTER_ROPE,
    OUTPUT_NORMS,
    SHARED_NORM,
    SIZES,
    WHOLE_NORM,
    attention,
    either,
    ends,
    entry,
    gated_ffn,
    has_rope_theta,
    is_rope_layer,
    layer_type_is,
    plain_ffn,
    rms_norm,
    share_of_head,
    unless,
    where_rope,
)
from mpu_cli.model.family import Config, Family, Tensor

LLAMA = Family(
    model_types=("llama",),
    sizes=SIZES,
    prefix="model.",
    layer="model.layers.{i}.",
    tensors=ends("model.embed_tokens", *rms_norm("model.norm")),
    layer_tensors=(*INPUT_NORMS, *attention(), *gated_ffn("mlp_bias")),
    unless={"partial_rotary_factor": 1.0},
    buffers=("rotary_emb.inv_freq",),
)

MISTRAL = replace(
    LLAMA,
    model_types=("mistral", "ministral", "ministral3"),
    layer_tensors=(*INPUT_NORMS, *attention(False), *gated_ffn()),
    defaults={"num_key_value_heads": 8},
)

# Its multipliers scale the residual stream, scores and logits by constants, which every symmetry passes through.
GRANITE = replace(LLAMA, model_types=("granite",), note="as Llama; its multipliers are constants")

QWEN2 = replace(
    LLAMA,
    model_types=("qwen2",),
    layer_tensors=(*INPUT_NORMS, *attention(True, False), *gated_ffn()),
    defaults={"num_key_value_heads": 32},
)

QWEN3 = replace(
    LLAMA,
    model_types=("qwen3",),
    layer_tensors=(*INPUT_NORMS, *attention(), *SHARED_NORM, *gated_ffn()),
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    unless={},
)

SEED_OSS = replace(
    LLAMA,
    model_types=("seed_oss",),
    layer_tensors=(*INPUT_NORMS, *attention("attention_bias", "attention_out_bias"), *gated_ffn("mlp_bias")),
    defaults={"attention_bias": True, "num_key_value_heads": 8, "head_dim": 128},
)

IQUESTCODER = replace(
    LLAMA,
    model_types=("iquestcoder",),
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    unless={**LLAMA.unless, "clip_qkv": None},
    note="without `clip_qkv`",
)

ERNIE4_5 = replace(
    LLAMA,
    model_types=("ernie4_5",),
    layer_tensors=(*INPUT_NORMS, *attention("use_bias"), *gated_ffn("use_bias")),
    planes="neighbours",
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 128},
)

# A sink for each head, as in gpt-oss; a layer whose base frequency is 0 has no RoPE.
GRANITE_SWA = replace(
    GRANITE,
    model_types=("granite_swa",),
    layer_tensors=(*GRANITE.layer_tensors, Tensor("self_attn.sinks", ("head",))),
    rotary=where_rope(has_rope_theta),
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 4},
)

HUNYUAN = replace(
    QWEN3,
    model_types=("hunyuan_v1_dense",),
    layer_tensors=(*INPUT_NORMS, *attention(), *NORM_AFTER_ROPE, *gated_ffn()),
    defaults={},
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
        *plain_ffn(),
        Tensor("mlp.act_fn.alpha_p", ("one",), is_xielu), Tensor("mlp.act_fn.alpha_n", ("one",), is_xielu),
    ),
    defaults={"hidden_act": "xielu"},
    buffers=("rotary_emb.inv_freq", "act_fn.beta", "act_fn.eps"),
)  # fmt: skip

SMOLLM3 = replace(
    LLAMA,
    model_types=("smollm3",),
    rotary=where_rope(is_rope_layer),
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 4},
)

OLMO2 = replace(
    LLAMA,
    model_types=("olmo2", "olmo3"),
    layer_tensors=(*attention(), *WHOLE_NORM, *OUTPUT_NORMS, *gated_ffn()),
    unless={},
)

EXAONE4 = replace(
    LLAMA,
    model_types=("exaone4",),
    layer_tensors=(*attention(False), *SHARED_NORM, *OUTPUT_NORMS, *gated_ffn()),
    rotary=where_rope(either(unless("sliding_window"), layer_type_is("sliding_attention"))),
    defaults={"num_key_value_heads": 32},
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
    defaults={"partial_rotary_factor": 1.0},
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
    defaults={"attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 128, "num_key_value_heads": 2},
)

GLM4 = replace(
    GLM,
    model_types=("glm4",),
    layer_tensors=(*GLM.layer_tensors, *rms_norm("post_self_attn_layernorm"), *rms_norm("post_mlp_layernorm")),
)

ARCEE = replace(
    LLAMA,
    model_types=("arcee",),
    layer_tensors=(*INPUT_NORMS, *attention(), *plain_ffn(bias="mlp_bias")),
)

CWM = replace(
    LLAMA,
    model_types=("cwm",),
    layer_tensors=(*INPUT_NORMS, *attention(False), *gated_ffn("mlp_bias")),
    defaults={"num_key_value_heads": 8, "head_dim": 128},
)

HELIUM = replace(
    LLAMA,
    model_types=("helium",),
    layer_tensors=(*INPUT_NORMS, *attention("attention_bias", False), *gated_ffn("mlp_bias")),
    planes="neighbours",
    defaults={"num_key_value_heads": 20, "head_dim": 128},
)

# No norm has a weight, and queries and keys are normed after RoPE, which every angle passes.
NANOCHAT = replace(
    LLAMA,
    model_types=("nanochat",),
    tensors=tuple(t for t in LLAMA.tensors if "norm" not in t.name),
    layer_tensors=(*attention(), *plain_ffn("mlp.fc1", "mlp.fc2")),
)

INTERNLM3 = replace(
    LLAMA,
    model_types=("internlm3",),
    layer_tensors=(
        *INPUT_NORMS, *attention(entry("attention_bias", "qkv_bias")), *gated_ffn(entry("mlp_bias", "bias")),
    ),
    defaults={"num_key_value_heads": 2, "head_dim": 128},
)  # fmt: skip

# Norms within attention and FFN: the first leaves values order and signs, the second has no signs, like "gate".
BITNET = replace(
    LLAMA,
    model_types=("bitnet",),
    layer_tensors=(
        *INPUT_NORMS, *attention(), *gated_ffn(),
        Tensor("self_attn.attn_sub_norm.weight", ("|mixed|",)), Tensor("mlp.ffn_sub_norm.weight", ("gate",)),
    ),
    defaults={"num_key_value_heads": 5},
    note="weights that are not quantised, also not while loading",
)  # fmt: skip
