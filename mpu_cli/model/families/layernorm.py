"""Families with LayerNorm, which subtracts the mean: no signs of the residual stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mpu_cli.model.families.llama import LLAMA
from mpu_cli.model.families.parts import (
    attention,
    either,
    ends,
    entry,
    gated_ffn,
    layer_norm,
    layer_type_is,
    linear,
    negate,
    plain_ffn,
    rms_norm,
    share_of_head,
    unless,
    where_rope,
)
from mpu_cli.model.family import Axis, Config, Family, Fused, Tensor

LAYER_NORMS = (*layer_norm("input_layernorm"), *layer_norm("post_attention_layernorm"))

STABLELM = replace(
    LLAMA,
    model_types=("stablelm",),
    tensors=ends("model.embed_tokens", *layer_norm("model.norm")),
    layer_tensors=(
        *layer_norm("input_layernorm"), *attention("use_qkv_bias", False), *gated_ffn(),
        *layer_norm("post_attention_layernorm", unless("use_parallel_residual")),
    ),
    rotary=share_of_head("partial_rotary_factor"),
    rms_norm=False,
    defaults={"partial_rotary_factor": 0.25, "num_key_value_heads": 32},
    unless={"qk_layernorm": False},
    note="without `qk_layernorm`",
)  # fmt: skip

STARCODER2 = replace(
    STABLELM,
    model_types=("starcoder2",),
    layer_tensors=(
        *LAYER_NORMS, *attention("use_bias"), *plain_ffn("mlp.c_fc", "mlp.c_proj", "use_bias"),
    ),
    rotary=None,
    defaults={"tie_word_embeddings": True, "use_bias": True, "num_key_value_heads": 2},
    unless={},
    note="",
)  # fmt: skip

JAIS2 = replace(
    STARCODER2,
    model_types=("jais2",),
    layer_tensors=(*LAYER_NORMS, *attention(), *plain_ffn(bias="mlp_bias")),
    defaults={"attention_bias": True, "mlp_bias": True},
)

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
    tensors=ends("model.embed_tokens", *layer_norm("model.final_layernorm"), bias=True),
    layer_tensors=(
        *layer_norm("input_layernorm"), *attention(True, out="dense"), *plain_ffn("mlp.fc1", "mlp.fc2", True),
    ),
    defaults={"partial_rotary_factor": 0.5},
    unless={"qk_layernorm": False},
)  # fmt: skip

GPT_NEOX = Family(
    model_types=("gpt_neox",),
    sizes={
        "model": "hidden_size", "ffn": "intermediate_size", "vocab": "vocab_size", "layers": "num_hidden_layers",
        "heads": "num_attention_heads", "kv_heads": "num_attention_heads",
    },
    prefix="gpt_neox.",
    layer="gpt_neox.layers.{i}.",
    tensors=ends("gpt_neox.embed_in", *layer_norm("gpt_neox.final_layer_norm"), head="embed_out"),
    layer_tensors=(
        *LAYER_NORMS,
        *linear("attention.query_key_value", Fused(("query", "key", "value"), "heads"), "model", bias="attention_bias"),
        *linear("attention.dense", "model", "mixed", bias="attention_bias"),
        *plain_ffn("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", True),
    ),
    rotary=share_of_head("rotary_pct", "partial_rotary_factor"),
    rms_norm=False,
    heads=("embed_out.weight", "lm_head.weight"),
    defaults={"attention_bias": True, "partial_rotary_factor": 0.25},
    buffers=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)  # fmt: skip


def conv1d(name: str, outputs: Axis, inputs: Axis) -> tuple[Tensor, ...]:
    """Conv1D stores a weight as (inputs, outputs), the transpose of a linear layer's."""
    return Tensor(f"{name}.weight", (inputs, outputs)), Tensor(f"{name}.bias", (outputs,))


GPT2 = Family(
    model_types=("gpt2",),
    sizes={
        "model": "n_embd", "ffn": "n_inner", "vocab": "vocab_size", "layers": "n_layer",
        "heads": "n_head", "kv_heads": "n_head", "position": "n_positions",
    },
    prefix="transformer.",
    layer="transformer.h.{i}.",
    tensors=ends(
        "transformer.wte", Tensor("transformer.wpe.weight", ("position", "model")), *layer_norm("transformer.ln_f"),
    ),
    layer_tensors=(
        *layer_norm("ln_1"), *layer_norm("ln_2"),
        *conv1d("attn.c_attn", ("query", "key", "value"), "model"), *conv1d("attn.c_proj", "model", "mixed"),
        *conv1d("mlp.c_fc", "ffn", "model"), *conv1d("mlp.c_proj", "model", "ffn"),
    ),
    planes=None,
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
        *plain_ffn("mlp.c_fc", "mlp.c_proj", True),
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
        *layer_norm("ln_1"), *layer_norm("ln_2"), *attention(False, True, "attn.attention", out="out_proj"),
        *plain_ffn("mlp.c_fc", "mlp.c_proj", True),
    ),
    unless={},
    buffers=("attn.attention.bias", "attn.attention.masked_bias"),
    transposed=False,
)  # fmt: skip

GPTJ = replace(
    GPT2,
    model_types=("gptj",),
    sizes={key: value for key, value in GPT2.sizes.items() if key != "position"},
    tensors=ends("transformer.wte", *layer_norm("transformer.ln_f"), bias=True),
    layer_tensors=(
        *layer_norm("ln_1"), *attention(False, name="attn", out="out_proj"),
        *plain_ffn("mlp.fc_in", "mlp.fc_out", True),
    ),
    planes="neighbours",
    rotary=entry("rotary_dim", "head_dim"),
    defaults={"rotary_dim": 64},
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
        *linear("attn.out_proj", "model", "mixed"), *plain_ffn("mlp.fc_in", "mlp.fc_out", True),
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
        Tensor("model.decoder.embed_tokens.weight", ("vocab", "model"), negate(is_narrow)),
        Tensor("model.decoder.embed_tokens.weight", ("vocab", "embed"), is_narrow),
        Tensor("model.decoder.project_in.weight", ("model", "embed"), is_narrow),
        Tensor("model.decoder.project_out.weight", ("embed", "model"), is_narrow),
        Tensor("model.decoder.embed_positions.weight", ("position", "model")),
        *layer_norm("model.decoder.final_layer_norm", has_last_norm),
        Tensor("lm_head.weight", ("vocab", "model"), negate(is_narrow)),
        Tensor("lm_head.weight", ("vocab", "embed"), is_narrow),
    ),
    layer_tensors=(
        *layer_norm("self_attn_layer_norm"), *layer_norm("final_layer_norm"),
        *attention("enable_bias", out="out_proj"), *plain_ffn("fc1", "fc2", "enable_bias"),
    ),
    planes=None,
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
    tensors=ends(
        "transformer.word_embeddings",
        *layer_norm("transformer.word_embeddings_layernorm"), *layer_norm("transformer.ln_f"),
    ),
    layer_tensors=(
        *LAYER_NORMS, *linear("self_attention.query_key_value", _FUSED, "model", bias=True),
        *linear("self_attention.dense", "model", "mixed", bias=True),
        *plain_ffn("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", True),
    ),
    planes=None,
    movable_heads=False,  # under ALiBi, a head's slope depends on its number
    rms_norm=False,
    defaults={"tie_word_embeddings": True},
)  # fmt: skip


def has_two_norms(config: Config, _: int) -> bool:
    """Whether a layer of Falcon has a norm each for attention and FFN, which run in parallel."""
    return bool(config.get("new_decoder_architecture")) and config.get("num_ln_in_parallel_attn") != 1


def kv_heads(config: Config, _: int) -> int:
    """KV heads of Falcon, whose older models have one for each query head or one for all."""
    if config.get("new_decoder_architecture"):
        return config.get("num_kv_heads") or config["num_attention_heads"]
    return 1 if config["multi_query"] else config["num_attention_heads"]


is_parallel = either(entry("new_decoder_architecture"), entry("parallel_attn"))  # attention and FFN

FALCON = replace(
    BLOOM,
    model_types=("falcon",),
    sizes={
        **BLOOM.sizes,
        "layers": ("num_hidden_layers", "n_layer"),
        "heads": ("num_attention_heads", "n_head"),
        "kv_heads": kv_heads,
        "ffn": lambda config, _: config.get("ffn_hidden_size") or 4 * config["hidden_size"],
    },
    tensors=ends("transformer.word_embeddings", *layer_norm("transformer.ln_f")),
    layer_tensors=(
        *layer_norm("ln_attn", has_two_norms), *layer_norm("ln_mlp", has_two_norms),
        *layer_norm("input_layernorm", negate(has_two_norms)),
        *layer_norm("post_attention_layernorm", negate(is_parallel)),
        *linear("self_attention.query_key_value", _FUSED, "model", bias="bias"),
        *linear("self_attention.dense", "model", "mixed", bias="bias"),
        *plain_ffn("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "bias"),
    ),
    planes="halves",
    rotary=where_rope(unless("alibi")),
    movable_heads=unless("alibi"),
    defaults={"tie_word_embeddings": True, "multi_query": True, "parallel_attn": True},
    buffers=("rotary_emb.inv_freq",),
)  # fmt: skip

# Norms multiply by 1 + w.
NEMOTRON = replace(
    STABLELM,
    model_types=("nemotron",),
    layer_tensors=(*LAYER_NORMS, *attention(), *plain_ffn(bias="mlp_bias")),
    defaults={"partial_rotary_factor": 0.5},
    unless={},
    note="",
)

BIOGPT = replace(
    OPT,
    model_types=("biogpt",),
    sizes={**{size: source for size, source in OPT.sizes.items() if size != "embed"}, "ffn": "intermediate_size"},
    prefix="biogpt.",
    layer="biogpt.layers.{i}.",
    tensors=ends(
        "biogpt.embed_tokens",
        Tensor("biogpt.embed_positions.weight", ("position", "model")),
        *layer_norm("biogpt.layer_norm"),
        head="output_projection",
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
    tensors=ends("transformer.wte", *rms_norm("transformer.norm_f")),
    layer_tensors=(
        *rms_norm("norm_1"), *rms_norm("norm_2"),  # layer norms without a bias
        *linear("attn.Wqkv", ("query", "key", "value"), "model"), *linear("attn.out_proj", "model", "mixed"),
        *plain_ffn("ffn.up_proj", "ffn.down_proj"),
    ),
    note="without `clip_qkv`",
)  # fmt: skip
