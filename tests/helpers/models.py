"""Models to test on: small random ones of every family, and the shared checkpoints if they are available."""

from __future__ import annotations

import json
import string
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from filelock import FileLock
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from mpu_cli.demo.model import make_model, make_people, make_tokenizer
from mpu_cli.model import load as loading
from mpu_cli.model.network import build
from mpu_cli.model.source import open_model
from mpu_cli.records.read import read_records
from tests.helpers.paths import SHARED

needs_shared = pytest.mark.skipif(
    not (SHARED / "models").is_dir(), reason="needs the shared checkpoints (MPU_TEST_SHARED)"
)

VOCABULARY = 96


def load(folder: Path, dtype: torch.dtype, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer in ``folder``, as commands load them."""
    return loading.load(open_model(str(folder)), dtype, device)


_LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

# Covers everything a family may have: tied and untied heads, biases, grouped heads, an explicit head size.
CONFIGS = {
    "llama": {"model_type": "llama", **_LLAMA, "tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE},
    "llama-biases": {
        "model_type": "llama", **_LLAMA, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
    },
    "mistral": {
        "model_type": "mistral", **_LLAMA, "head_dim": 16, "tie_word_embeddings": False, "sliding_window": 16,
    },
    "qwen2": {"model_type": "qwen2", **_LLAMA, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 128,
        "bos_token_id": 0, "eos_token_id": 1,
    },
    "granite": {
        "model_type": "granite", **_LLAMA, "tie_word_embeddings": True, "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 3.0,
    },
}  # fmt: skip

_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_LINES = {"num_hidden_layers": 4, "sliding_window": 8}  # windows shorter than the texts
_TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_GEMMA4 = {**_SMALL, **_LINES, "head_dim": 8, "global_head_dim": 16,
           "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_DELTA = {
    "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_proj_bias": True}
_MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 10, "attention_bias": True,
}  # fmt: skip
_INDEX = {"index_topk": 8, "index_head_dim": 6, "index_n_heads": 16}  # few heads would tie
_GROUPS = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 2, "n_group": 3,
    "topk_group": 2,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "temporal_patch_size": 1, "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip
_PIXTRAL = {"model_type": "pixtral", **_TOWER, "head_dim": 8, "image_size": 56}
_IMAGES = {"image_token_index": 5}
_QWEN_IMAGES = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "bos_token_id": 0,
        "eos_token_id": 1}  # fmt: skip

# The other families, each with what is particular to it; the first key names the configuration.
FAMILY_CONFIGS = {
    "ministral": {"model_type": "ministral", **_SMALL, "head_dim": 8, "sliding_window": 8},
    "ministral3": {"model_type": "ministral3", **_SMALL, "head_dim": 8},
    "smollm3": {"model_type": "smollm3", **_SMALL, "num_hidden_layers": 4},
    "gemma": {"model_type": "gemma", **_SMALL, "head_dim": 8},
    "gemma2": {"model_type": "gemma2", **_SMALL, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"model_type": "gemma3_text", **_SMALL, **_LINES, "head_dim": 8, "query_pre_attn_scalar": 8,
                    "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3": {"model_type": "gemma3", "text_config": {**_SMALL, **_LINES, "head_dim": 8, "query_pre_attn_scalar": 8,
                                                       "vocab_size": VOCABULARY + 3},
               "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                                 "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
               "mm_tokens_per_image": 4, "image_token_index": VOCABULARY, "boi_token_index": VOCABULARY + 1,
               "eoi_token_index": VOCABULARY + 2},
    "gemma4_text": {"model_type": "gemma4_text", **_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
                    "hidden_size_per_layer_input": 0},
    "gemma4_text-experts": {"model_type": "gemma4_text", **_GEMMA4, "enable_moe_block": True, "num_experts": 4,
                            "top_k_experts": 2, "moe_intermediate_size": 12, "hidden_size_per_layer_input": 0},
    "gemma4_text-channels": {"model_type": "gemma4_text", **_GEMMA4, "num_kv_shared_layers": 2,
                             "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCABULARY,
                             "use_double_wide_mlp": True},
    "gemma4": {"model_type": "gemma4", "text_config": {
        **_GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": VOCABULARY},
        "vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 32,
                          "patch_size": 4, "pooling_kernel_size": 2},
        "audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 12,
                         "subsampling_conv_channels": [8, 4]}, "image_token_id": 5, "audio_token_id": 6},
    "gemma4_unified_text": {"model_type": "gemma4_unified_text", **_GEMMA4},
    "gemma4_unified": {"model_type": "gemma4_unified", "text_config": {**_GEMMA4}, "vision_config": {
        "patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16, "pooling_kernel_size": 1},
        "audio_config": {"audio_embed_dim": 12}, "image_token_id": 5, "audio_token_id": 6},
    "qwen3": {"model_type": "qwen3", **_SMALL, "head_dim": 8, "tie_word_embeddings": True},
    "qwen3-biases": {"model_type": "qwen3", **_SMALL, "head_dim": 8, "attention_bias": True},
    "olmo": {"model_type": "olmo", **_SMALL},
    "olmo2": {"model_type": "olmo2", **_SMALL},
    "olmo3": {"model_type": "olmo3", **_SMALL, **_LINES},
    "exaone4": {"model_type": "exaone4", **_SMALL, **_LINES, "head_dim": 8},
    "phi3": {"model_type": "phi3", **_SMALL},
    "phi3-partial": {"model_type": "phi3", **_SMALL, "num_attention_heads": 2, "num_key_value_heads": 1,
                     "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    "phi": {"model_type": "phi", **_SMALL, "partial_rotary_factor": 0.5},
    "gpt_neox": {"model_type": "gpt_neox", **_SMALL, "rotary_pct": 0.5},
    "gpt_neox-serial": {"model_type": "gpt_neox", **_SMALL, "rotary_pct": 1.0, "use_parallel_residual": False},
    "stablelm": {"model_type": "stablelm", **_SMALL, "partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "stablelm-parallel": {"model_type": "stablelm", **_SMALL, "partial_rotary_factor": 0.5,
                          "use_parallel_residual": True},
    "starcoder2": {"model_type": "starcoder2", **_SMALL},
    "glm": {"model_type": "glm", **_SMALL, "head_dim": 8, "attention_bias": True},
    "glm4": {"model_type": "glm4", **_SMALL, "head_dim": 8, "attention_bias": True},
    "cohere": {"model_type": "cohere", **_SMALL},
    "cohere2": {"model_type": "cohere2", **_SMALL, **_LINES, "head_dim": 8},
    "falcon": {"model_type": "falcon", **_SMALL, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-7b": {"model_type": "falcon", **_SMALL},
    "falcon-alibi": {"model_type": "falcon", **_SMALL, "alibi": True, "multi_query": False, "parallel_attn": False,
                     "bias": True},
    "bloom": {"model_type": "bloom", **_GPT, "hidden_size": 32},
    "opt": {"model_type": "opt", **_SMALL, "ffn_dim": 40, "word_embed_proj_dim": 32},
    "gpt_neo": {"model_type": "gpt_neo", "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
                "attention_types": [[["global", "local"], 1]], "window_size": 8, "max_position_embeddings": 128,
                "bos_token_id": 0, "eos_token_id": 1},
    "gptj": {"model_type": "gptj", **_GPT, "rotary_dim": 4},
    "codegen": {"model_type": "codegen", **_GPT, "n_ctx": 128, "rotary_dim": 4},
    "gpt_bigcode": {"model_type": "gpt_bigcode", **_GPT},
    "gpt_bigcode-heads": {"model_type": "gpt_bigcode", **_GPT, "multi_query": False},
    "mixtral": {"model_type": "mixtral", **_SMALL, "num_local_experts": 4},
    "qwen2_moe": {"model_type": "qwen2_moe", **_SMALL, **_EXPERTS, "shared_expert_intermediate_size": 20,
                  "decoder_sparse_step": 1},
    "qwen3_moe": {"model_type": "qwen3_moe", **_SMALL, **_EXPERTS, "head_dim": 8, "mlp_only_layers": [0]},
    "olmoe": {"model_type": "olmoe", **_SMALL, **_EXPERTS},
    "qwen3_5_text": {"model_type": "qwen3_5_text", **_SMALL, **_DELTA},
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe_text", **_SMALL, **_DELTA, **_EXPERTS,
                         "shared_expert_intermediate_size": 20},
    "qwen3_5": {"model_type": "qwen3_5", "text_config": {**_SMALL, **_DELTA}, "vision_config": _VISION,
                **_QWEN_IMAGES},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe", "text_config": {
        **_SMALL, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 20}, "vision_config": _VISION,
        **_QWEN_IMAGES},
    "granitemoe": {"model_type": "granitemoe", **_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {"model_type": "granitemoeshared", **_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2,
                         "shared_intermediate_size": 20},
    "glm4_moe": {"model_type": "glm4_moe", **_SMALL, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
                 "moe_intermediate_size": 12, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    "glm4_moe-normed": {"model_type": "glm4_moe", **_SMALL, "n_routed_experts": 4, "num_experts_per_tok": 2,
                        "head_dim": 8, "moe_intermediate_size": 12, "use_qk_norm": True, "n_group": 2, "topk_group": 1},
    "mistral3": {"model_type": "mistral3", "text_config": {"model_type": "mistral", **_SMALL, "head_dim": 8},
                 "vision_config": _PIXTRAL, "tie_word_embeddings": False, **_IMAGES},
    "mistral3-ministral3": {"model_type": "mistral3", "text_config": {
        "model_type": "ministral3", **_SMALL, "head_dim": 8, "tie_word_embeddings": True},
        "vision_config": _PIXTRAL, "multimodal_projector_bias": True, "tie_word_embeddings": True, **_IMAGES},
    "mistral3-mistral4": {"model_type": "mistral3", "text_config": {
        "model_type": "mistral4", **_SMALL, **_MLA, **_GROUPS, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1}, "vision_config": _PIXTRAL, "tie_word_embeddings": False, **_IMAGES},
    "qwen2_vl": {"model_type": "qwen2_vl", "text_config": {**_SMALL, **_MROPE}, "vision_config": {
        **_VISION, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 1}, **_QWEN_IMAGES},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl", "text_config": {**_SMALL, **_MROPE}, "vision_config": {
        **_VISION, "fullatt_block_indexes": [0], "window_size": 8}, **_QWEN_IMAGES},
    "qwen3_vl": {"model_type": "qwen3_vl", "text_config": {**_SMALL, "head_dim": 8, **_MROPE}, "vision_config": {
        **_VISION, "depth": 2, "deepstack_visual_indexes": [0, 1]}, **_QWEN_IMAGES},
    "qwen3_vl_moe": {"model_type": "qwen3_vl_moe", "text_config": {**_SMALL, **_EXPERTS, "head_dim": 8, **_MROPE},
                     "vision_config": {**_VISION, "deepstack_visual_indexes": [0]}, **_QWEN_IMAGES},
    "llava": {"model_type": "llava", "text_config": {"model_type": "qwen2", **_SMALL}, "vision_config": {
        "model_type": "siglip_vision_model", **_TOWER}, "vision_feature_select_strategy": "full",
        "tie_word_embeddings": False, **_IMAGES},
    "smolvlm": {"model_type": "smolvlm", "text_config": {
        "model_type": "llama", **_SMALL, "attention_bias": True, "mlp_bias": True}, "vision_config": _TOWER,
        "image_token_id": 5},
    "muse_glimmer": {"model_type": "muse_glimmer", "text_config": {**_SMALL, **_LINES, "head_dim": 8},
        "vision_config": {**_TOWER, "patch_temporal": 1, "pos_emb_height": 4, "pos_emb_width": 4},
        "out_hidden_size": 64, "projector_hidden_size": 12, "image_token_id": 5, "video_token_id": 6},
    "llama4": {"model_type": "llama4", "text_config": {
        **_SMALL, "num_hidden_layers": 4, "head_dim": 8, "intermediate_size": 12, "intermediate_size_mlp": 40,
        "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 16},
        "vision_config": {**_TOWER, "intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16,
                          "projector_output_dim": 16, "pixel_shuffle_ratio": 0.5}, **_IMAGES},
    "deepseek_v3": {"model_type": "deepseek_v3", **_SMALL, **_MLA, **_GROUPS, "first_k_dense_replace": 1},
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **_SMALL, **_MLA, **_GROUPS, "num_hidden_layers": 3,
                      "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "deepseek_v2": {"model_type": "deepseek_v2", **_SMALL, **_MLA, **_GROUPS, "first_k_dense_replace": 1,
                    "topk_method": "group_limited_greedy", "mlp_bias": True},
    "deepseek_v2-lite": {"model_type": "deepseek_v2", **_SMALL, **_MLA, **_GROUPS, "q_lora_rank": None, "n_group": 1,
                         "topk_group": 1},
    "deepseek_v32": {"model_type": "deepseek_v32", **_SMALL, **_MLA, **_GROUPS, **_INDEX, "num_hidden_layers": 3,
                     "first_k_dense_replace": 1},
    "glm_moe_dsa": {"model_type": "glm_moe_dsa", **_SMALL, **_MLA, **_GROUPS, **_INDEX, "num_hidden_layers": 4,
                    "indexer_types": ["full", "full", "shared", "full"], "n_group": 1, "topk_group": 1,
                    "first_k_dense_replace": 1},
    "youtu": {"model_type": "youtu", **_SMALL, **_MLA, "pad_token_id": None},
    "minicpm3": {"model_type": "minicpm3", **_SMALL, **_MLA, "mlp_bias": True, "dim_model_base": 16},
    "llama4_text": {"model_type": "llama4_text", **_SMALL, "num_hidden_layers": 4, "head_dim": 8,
                    "intermediate_size": 12, "intermediate_size_mlp": 40, "num_local_experts": 4,
                    "num_experts_per_tok": 1,
                    "interleave_moe_layer_step": 2, "attention_chunk_size": 16},
    "gpt_oss": {"model_type": "gpt_oss", **_SMALL, **_LINES, "head_dim": 8, "num_local_experts": 4,
                "num_experts_per_tok": 2},
    "seed_oss": {"model_type": "seed_oss", **_SMALL, "head_dim": 8, "attention_out_bias": True, "mlp_bias": True},
    "iquestcoder": {"model_type": "iquestcoder", **_SMALL, "head_dim": 16},
    "ernie4_5": {"model_type": "ernie4_5", **_SMALL, "head_dim": 8, "use_bias": True},
    "ernie4_5_moe": {"model_type": "ernie4_5_moe", **_SMALL, "num_hidden_layers": 4, "moe_num_experts": 4, "moe_k": 2,
                     "moe_intermediate_size": 12, "moe_layer_interval": 2, "tie_word_embeddings": False},
    "ernie4_5_moe-biases": {"model_type": "ernie4_5_moe", **_SMALL, "moe_num_experts": 4, "moe_k": 2, "use_bias": True,
                            "moe_intermediate_size": 12, "tie_word_embeddings": True},
    "hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense", **_SMALL, "head_dim": 8, "attention_bias": True,
                         "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0,
                                             "alpha": 100.0}},
    "hunyuan_v1_moe": {"model_type": "hunyuan_v1_moe", **_SMALL, "head_dim": 8, "num_experts": 4, "moe_topk": [1, 2]},
    "apertus": {"model_type": "apertus", **_SMALL, "attention_bias": True},
    "minimax_m2": {"model_type": "minimax_m2", **_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2,
                   "head_dim": 8, "rotary_dim": 4, "router_jitter_noise": 0.1},
    "phimoe": {"model_type": "phimoe", **_SMALL, "num_local_experts": 4, "attention_bias": True, "lm_head_bias": True,
               "sliding_window": 8,
               "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
                                   "long_factor": [2.0] * 4, "short_mscale": 1.1, "long_mscale": 1.3, "factor": 4.0,
                                   "original_max_position_embeddings": 32}},
    "dots1": {"model_type": "dots1", **_SMALL, **_LINES, "n_routed_experts": 4, "num_experts_per_tok": 2,
              "moe_intermediate_size": 12, "n_shared_experts": 2, "n_group": 2, "first_k_dense_replace": 1,
              "max_window_layers": 2, "attention_bias": True},
    "afmoe": {"model_type": "afmoe", **_SMALL, **_LINES, **_EXPERTS, "head_dim": 8, "mup_enabled": True,
              "attention_bias": True},
    "granite_swa": {"model_type": "granite_swa", **_SMALL, **_LINES, "layer_rope_theta": [0, 10000.0, 500.0, 10000.0],
                    "attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.2},
    "granitemoe_swa": {"model_type": "granitemoe_swa", **_SMALL, **_LINES, "num_local_experts": 4,
                       "shared_intermediate_size": 20, "layer_rope_theta": [0, 10000.0, 500.0, 10000.0]},
    "jais2": {"model_type": "jais2", **_SMALL},
    "lfm2": {"model_type": "lfm2", **_SMALL, "num_hidden_layers": 4, "conv_bias": True, "block_multiple_of": 16,
             "full_attn_idxs": [1, 3]},
    "lfm2_moe": {"model_type": "lfm2_moe", **_SMALL, **_EXPERTS, "num_hidden_layers": 4, "num_dense_layers": 1,
                 "layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"model_type": "lfm3", **_SMALL, **_LINES, "head_dim": 8, "attention_bias": True, "conv_bias": True,
             "layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    "granitemoehybrid": {"model_type": "granitemoehybrid", **_SMALL, **_MAMBA, "num_hidden_layers": 4,
                         "num_local_experts": 4, "shared_intermediate_size": 20, "attention_bias": True,
                         "layer_types": ["linear_attention", "full_attention"] * 2},
    "granitemoehybrid-dense": {"model_type": "granitemoehybrid", **_SMALL, "num_local_experts": 0,
                               "mamba_n_heads": 2, "shared_intermediate_size": 20, "position_embedding_type": "rope",
                               "layer_types": ["attention"] * 2},
    "qwen3_next": {"model_type": "qwen3_next", **_SMALL, **_DELTA, **_EXPERTS, "mlp_only_layers": [0],
                   "shared_expert_intermediate_size": 20},
    "nemotron_h": {"model_type": "nemotron_h", **_SMALL, "head_dim": 8, "mlp_bias": True, "use_bias": True,
                   "layers_block_type": ["mlp", "linear_attention", "full_attention", "moe"], "mamba_num_heads": 4,
                   "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 4,
                   "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20},
    "nemotron_h-latent": {"model_type": "nemotron_h", **_SMALL, "head_dim": 8, "moe_latent_size": 16,
                          "layers_block_type": ["linear_attention", "moe", "full_attention"], "mamba_num_heads": 4,
                          "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 4,
                          "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20},
    "falcon_h1": {"model_type": "falcon_h1", **_SMALL, **_MAMBA, "mamba_d_ssm": 48, "attention_bias": True,
                  "mlp_bias": True, "projectors_bias": True, "mamba_rms_norm": True},
    "bamba": {"model_type": "bamba", **_SMALL, **_MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [0, 2],
              "attention_bias": True, "mlp_bias": True},
    "jamba": {"model_type": "jamba", **_SMALL, "num_hidden_layers": 4, "num_experts": 4, "attn_layer_period": 2,
              "attn_layer_offset": 1, "expert_layer_offset": 0, "mamba_d_state": 8, "mamba_proj_bias": True},
    "gemma3n_text": {"model_type": "gemma3n_text", **_SMALL, "num_hidden_layers": 6, "sliding_window": 8, "head_dim": 8,
                     "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
                     "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY - 10,
                     "laurel_rank": 6, "altup_num_inputs": 3, "attention_bias": True,
                     "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4},
    "arcee": {"model_type": "arcee", **_SMALL, "attention_bias": True, "mlp_bias": True},
    "cwm": {"model_type": "cwm", **_SMALL, **_LINES, "head_dim": 16, "mlp_bias": True},
    "helium": {"model_type": "helium", **_SMALL, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "nemotron": {"model_type": "nemotron", **_SMALL, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "nanochat": {"model_type": "nanochat", **_SMALL, "attention_bias": True},
    "vaultgemma": {"model_type": "vaultgemma", **_SMALL, "head_dim": 8, "sliding_window": 8,
                   "query_pre_attn_scalar": 8, "attention_bias": True},
    "exaone_moe": {"model_type": "exaone_moe", **_SMALL, **_LINES, **_EXPERTS, "head_dim": 8, "num_shared_experts": 2,
                   "n_group": 2, "topk_group": 1},
    "solar_open": {"model_type": "solar_open", **_SMALL, "head_dim": 16, "attention_bias": True, "n_routed_experts": 4,
                   "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 2},
    "flex_olmo": {"model_type": "flex_olmo", **_SMALL, "num_experts": 4, "num_experts_per_tok": 2,
                  "attention_bias": True},
    "internlm3": {"model_type": "internlm3", **_SMALL, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "bitnet": {"model_type": "bitnet", **_SMALL, "attention_bias": True},
    "biogpt": {"model_type": "biogpt", **_SMALL},
    "mpt": {"model_type": "mpt", "vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2,
            "max_seq_len": 128, "bos_token_id": 0, "eos_token_id": 1},
    "mellum": {"model_type": "mellum", **_SMALL, **_EXPERTS, "head_dim": 8, "attention_bias": True, "sliding_window": 8,
               "layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    "hy_v3": {"model_type": "hy_v3", **_SMALL, **_EXPERTS, "head_dim": 8, "attention_bias": True,
              "num_shared_experts": 2},
    "cohere2_moe": {"model_type": "cohere2_moe", **_SMALL, **_LINES, "head_dim": 8, "attention_bias": True,
                    "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 2, "first_k_dense_replace": 1,
                    "prefix_dense_intermediate_size": 24, "sliding_window_pattern": 3},
    "laguna": {"model_type": "laguna", **_SMALL, **_LINES, **_EXPERTS, "head_dim": 16,
               "layer_types": ["full_attention", "sliding_attention"] * 2, "num_attention_heads": 2,
               "num_attention_heads_per_layer": [2, 4, 4, 4], "attention_bias": True,
               "shared_expert_intermediate_size": 20},
    "laguna-elements": {"model_type": "laguna", **_SMALL, **_EXPERTS, "head_dim": 16, "gating": "per-element",
                        "shared_expert_intermediate_size": 20},
    "opt-350m": {"model_type": "opt", **_SMALL, "ffn_dim": 40, "word_embed_proj_dim": 16,
                 "do_layer_norm_before": False},
}  # fmt: skip
# Whose experts, or some other tensors, are saved in either arrangement.
FUSED = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v3", "ernie4_5_moe", "hunyuan_v1_moe",
    "minimax_m2", "phimoe", "dots1", "afmoe", "lfm2_moe", "lfm3", "granitemoe", "granitemoehybrid", "qwen3_next",
    "jamba", "exaone_moe", "solar_open", "flex_olmo", "mellum", "hy_v3", "cohere2_moe", "laguna", "laguna-elements",
)  # fmt: skip


def random_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **entries: object) -> PreTrainedModel:
    """A model with CONFIGS[family], overridden by ``entries``, whose biases and norms differ from their initial zeros
    and ones."""
    config = {**CONFIGS, **FAMILY_CONFIGS}[family] | entries
    kind = str(config["model_type"])
    from_one = kind.startswith(("gemma", "vaultgemma", "qwen3_5", "qwen3_next", "muse")) and not kind.startswith(
        "gemma3n"
    )  # 1 + w
    torch.manual_seed(seed)
    model = build(AutoConfig.for_model(config.pop("model_type"), **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = parameter.ndim == 1 and not name.endswith("bias") and not (from_one and "linear_attn" not in name)
            centre = 1 if scale else 0
            parameter.copy_(centre + torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
    return model.to(dtype).eval()


def read(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model in ``folder``, by the class of transformers' that its config names."""
    model_class = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    return model_class.from_pretrained(folder, dtype=dtype).eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Save ``model`` with a tokenizer over ``w3`` … ``w95``, one token per word, and a chat template."""
    model.save_pretrained(folder)
    # transformers reads every tokenizer of these families as byte-level BPE.
    by_bytes = model.config.model_type in ("qwen2", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
    return save_tokenizer(folder, by_bytes=by_bytes)


def save_random(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A random model of ``family``, or of ``FAMILY-fused`` with the arrangement of tensors that memory has."""
    model = random_model(family.removesuffix("-fused"), dtype=dtype)
    save(model, folder)
    if family.endswith("-fused"):
        model.save_pretrained(folder, save_original_format=False)
    return folder


def save_tokenizer(folder: Path, *, by_bytes: bool = False) -> Path:
    """Put the tokenizer of ``save`` in ``folder``."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    if by_bytes:
        symbols = [*special.values(), "Ġ", "Ċ", *string.ascii_letters, *string.digits, *"?:.<>/"]
        tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = (
        "{% for m in messages %}{{ '<s> ' if m['role'] == 'user' }}{{ m['content'] + ' ' }}"
        "{{ '</s>' if m['role'] == 'assistant' }}{% endfor %}"
    )
    fast.save_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)("w4 w5 w90").input_ids
    assert len(set(ids)) >= 3, f"the tokenizer in {folder} does not tell words apart: {ids}"
    return folder


# One family of each kind of wiring: norms, rotary positions, fused tensors, experts, latents, state spaces, images.
REPRESENTATIVES = {
    "llama", "llama-biases", "gpt2", "qwen3", "phi3-partial", "gpt_neox", "cohere2", "gemma2", "gemma3n_text", "olmo2",
    "falcon-7b", "mixtral", "mixtral-fused", "gpt_oss", "deepseek_v3", "mamba2", "nemotron_h", "qwen3_next",
    "falcon_h1", "lfm2", "llava", "llama4_text", "bloom", "mpt", "codegen", "opt",
}  # fmt: skip


def by_tier(
    families: Iterable[str], fast: Collection[str] = frozenset(REPRESENTATIVES), slow: Collection[str] | None = None
) -> list[Any]:
    """Parameters of a test: ``fast`` families in the fast tier, ``slow`` ones in the slow, all others by default, and
    those in neither, which are variants of these, in the exhaustive."""
    parameters = []
    for name in families:
        later = pytest.mark.slow if slow is None or name in slow else pytest.mark.exhaustive
        parameters.append(pytest.param(name, marks=() if name in fast else later))
    return parameters


@dataclass(frozen=True)
class DemoModel:
    """A model like the demo's that knows 10 people by heart, and files of questions and answers about them."""

    model: Path
    forget: Path
    retain: Path


def make_demo_model(folder: Path, family: str = "llama") -> DemoModel:
    """Make it in ``folder``, which takes seconds, unless it is there."""
    demo = DemoModel(folder / "model", folder / "forget.jsonl", folder / "retain.jsonl")
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            people = make_people(10, 0)
            for path, those in ((demo.forget, people[:2]), (demo.retain, people[2:])):
                path.parent.mkdir(exist_ok=True)
                path.write_text("".join(json.dumps(row) + "\n" for person in those for row in person))
            records = [record for path in (demo.forget, demo.retain) for record in read_records(path)]
            make_model(records, make_tokenizer(records), demo.model, epochs=60, seed=0, on_step=lambda *_: None,
                       family=family, rates=((1.0, 2e-3),))  # fmt: skip
            (folder / "done").touch()
    return demo


def write_records(path: Path, count: int, seed: int, words_each: int = 5) -> Path:
    """Questions and answers of about ``words_each`` random words from the tokenizer of ``save``."""
    generator = torch.Generator().manual_seed(seed)

    def words(n: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(3, VOCABULARY, (n,), generator=generator).tolist())

    rows = [{"question": words(words_each + 1), "answer": words(words_each)} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
