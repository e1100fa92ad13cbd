"""Latent attention (MLA): queries, and keys with values, come out of latents, and all heads share the part of their
keys that RoPE turns."""

from __future__ import annotations

from dataclasses import replace

from mpu_cli.model.families.llama import LLAMA
from mpu_cli.model.families.mixtures import GLM4_MOE
from mpu_cli.model.families.parts import (
    INPUT_NORMS,
    SIZES,
    after_dense,
    entry,
    gated_ffn,
    is_listed_or_after_dense,
    is_listed_or_after_first,
    linear,
    negate,
    shared_width,
    sparse_ffn,
)
from mpu_cli.model.family import Config, Rule, Sizes, Tensor


def size_of_heads(*names: str) -> Rule:
    """The number of coordinates of all heads, each with the sum of these entries."""
    return lambda config, _: int(config["num_attention_heads"]) * sum(int(config[name]) for name in names)


has_q_latent = entry("q_lora_rank")

_MLA = (
    Tensor("self_attn.q_proj.weight", ("mla-query", "model"), negate(has_q_latent)),
    *linear("self_attn.q_a_proj", "q-latent", "model", bias="attention_bias", when=has_q_latent),
    Tensor("self_attn.q_a_layernorm.weight", ("|q-latent|",), has_q_latent),
    Tensor("self_attn.q_b_proj.weight", ("mla-query", "q-latent"), has_q_latent),
    *linear("self_attn.kv_a_proj_with_mqa", ("kv-latent", "mla-key"), "model", bias="attention_bias"),
    Tensor("self_attn.kv_a_layernorm.weight", ("|kv-latent|",)),
    Tensor("self_attn.kv_b_proj.weight", ("mla-key-value", "kv-latent")),
    *linear("self_attn.o_proj", "model", "mla-mixed", bias="attention_bias"),
)

_MLA_SIZES: Sizes = {
    **SIZES, "kv_heads": "num_attention_heads", "head_dim": "qk_rope_head_dim",
    "q-latent": lambda config, _: config.get("q_lora_rank") or None, "kv-latent": "kv_lora_rank",
    "mla-free": "qk_nope_head_dim", "mla-key": "qk_rope_head_dim", "mla-value": "v_head_dim",
    "mla-query": size_of_heads("qk_nope_head_dim", "qk_rope_head_dim"),
    "mla-key-value": size_of_heads("qk_nope_head_dim", "v_head_dim"), "mla-mixed": size_of_heads("v_head_dim"),
}  # fmt: skip


YOUTU = replace(
    LLAMA,
    model_types=("youtu",),
    sizes=_MLA_SIZES,
    layer_tensors=(*INPUT_NORMS, *_MLA, *gated_ffn()),
    planes=None,
    latent=lambda config, _: "neighbours" if config.get("rope_interleave", True) else "halves",  # which RoPE pairs
    defaults={"tie_word_embeddings": True},
    unless={"pad_token_id": None},  # transformers zeroes that row of the embedding whenever it loads the model
    note="latents keep order and signs; without `pad_token_id`",
)


def width_of_values(config: Config, _: int) -> int:
    """The number of coordinates of a value of MiniCPM 3."""
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
    defaults={"tie_word_embeddings": True, "scale_depth": 1.4},
    unless={},
    note="latents keep order and signs",
)

_MLA_MIXTURE: Sizes = {
    **_MLA_SIZES,
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"), "expert_ffn": "moe_intermediate_size",
    "shared_ffn": shared_width("n_shared_experts"),
}  # fmt: skip

DEEPSEEK_V3 = replace(
    YOUTU,
    model_types=("deepseek_v3",),
    sizes=_MLA_MIXTURE,
    layer_tensors=(*INPUT_NORMS, *_MLA, *sparse_ffn(after_dense)),
    dead=(*GLM4_MOE.dead, "*layers.61.*"),
    defaults={"first_k_dense_replace": 3, "n_group": 8},
    unless={},
    note="latents keep order and signs",
)

DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_types=("deepseek_v2",),
    layer_tensors=(*INPUT_NORMS, *_MLA, *sparse_ffn(after_dense, (), "mlp_bias")),
    dead=(),
    latent="neighbours",
    defaults={"n_shared_experts": 2},
)

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_types=("glm4_moe_lite",),
    layer_tensors=(*INPUT_NORMS, *_MLA, *sparse_ffn(is_listed_or_after_first)),
    dead=(*GLM4_MOE.dead, "*layers.47.*"),
    defaults={},
)


def has_indexer(config: Config, layer: int) -> bool:
    """Whether a layer of GLM 5 chooses keys itself; the others take the choice of the layer before."""
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds:
        return kinds[layer] in ("full", "F")
    step, offset = max(int(config.get("index_topk_freq", 1)), 1), int(config.get("index_skip_topk_offset", 2))
    return max(layer - offset + 1, 0) % step == 0


def indexer(when: Rule | None = None) -> tuple[Tensor, ...]:
    """The tensors that choose the keys that a query looks at."""
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
)  # fmt: skip

GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_types=("glm_moe_dsa",),
    layer_tensors=(*INPUT_NORMS, *_MLA, *indexer(has_indexer), *sparse_ffn(is_listed_or_after_dense)),
    dead=(*GLM4_MOE.dead, "*layers.78.*"),
    defaults={**DEEPSEEK_V3.defaults, "n_group": 1},
)

# Files hold stacks, as memory does.
MISTRAL4 = replace(
    DEEPSEEK_V3,
    model_types=("mistral4",),
    layer_tensors=tuple(replace(tensor, parts=()) for tensor in DEEPSEEK_V2.layer_tensors),
    dead=(),
    defaults={},
)
