"""The model families that mpu supports. To add one, put its table here and its config in tests/models.py."""

from __future__ import annotations

from dataclasses import replace

from mpu_cli.architectures.family import Family, Tensor, symmetry_sets

LLAMA = Family(
    model_types=("llama",),
    sizes={
        "model": "hidden_size", "ffn": "intermediate_size", "vocab": "vocab_size", "layers": "num_hidden_layers",
        "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    },
    prefix="model.",
    layer="model.layers.{i}.",
    tensors=(
        Tensor("model.embed_tokens.weight", ("vocab", "model")),
        Tensor("model.norm.weight", ("|model|",)),
        Tensor("lm_head.weight", ("vocab", "model")),
    ),
    layer_tensors=(
        Tensor("input_layernorm.weight", ("|model|",)),
        Tensor("self_attn.q_proj.weight", ("query", "model")),
        Tensor("self_attn.q_proj.bias", ("query",), when="attention_bias"),
        Tensor("self_attn.k_proj.weight", ("key", "model")),
        Tensor("self_attn.k_proj.bias", ("key",), when="attention_bias"),
        Tensor("self_attn.v_proj.weight", ("value", "model")),
        Tensor("self_attn.v_proj.bias", ("value",), when="attention_bias"),
        Tensor("self_attn.o_proj.weight", ("model", "mixed")),
        Tensor("self_attn.o_proj.bias", ("model",), when="attention_bias"),
        Tensor("post_attention_layernorm.weight", ("|model|",)),
        Tensor("mlp.gate_proj.weight", ("gate", "model")),
        Tensor("mlp.gate_proj.bias", ("gate",), when="mlp_bias"),
        Tensor("mlp.up_proj.weight", ("up", "model")),
        Tensor("mlp.up_proj.bias", ("up",), when="mlp_bias"),
        Tensor("mlp.down_proj.weight", ("model", "ffn")),
        Tensor("mlp.down_proj.bias", ("model",), when="mlp_bias"),
    ),
    symmetries=symmetry_sets("halves", gated=True, rms_norm=True),
    defaults={"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
    unless={"partial_rotary_factor": 1.0},
    buffers=("rotary_emb.inv_freq",),
)  # fmt: skip

MISTRAL = replace(
    LLAMA,
    model_types=("mistral",),
    layer_tensors=tuple(t for t in LLAMA.layer_tensors if t.when is None),
    defaults={"tie_word_embeddings": False, "num_key_value_heads": 8},
)

# Its multipliers scale the residual stream, scores and logits by constants, which every symmetry passes through.
GRANITE = replace(LLAMA, model_types=("granite",))

_QWEN2_BIASES = {f"self_attn.{p}_proj.bias" for p in "qkv"}
QWEN2 = replace(
    LLAMA,
    model_types=("qwen2",),
    layer_tensors=tuple(
        replace(t, when=None) for t in LLAMA.layer_tensors if t.when is None or t.name in _QWEN2_BIASES
    ),
    defaults={"tie_word_embeddings": False, "num_key_value_heads": 32},
)

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
    symmetries=symmetry_sets(None, gated=False, rms_norm=False),
    defaults={"tie_word_embeddings": True, "n_inner": None},
    unless={"add_cross_attention": False},
    buffers=(".attn.bias", ".attn.masked_bias"),
    transposed=True,
)  # fmt: skip

FAMILIES = {
    model_type: family for family in (LLAMA, MISTRAL, QWEN2, GPT2, GRANITE) for model_type in family.model_types
}
