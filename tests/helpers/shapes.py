"""Synthetic checkpoints of real models' shapes, for timing: ``python -m tests.helpers.shapes 1b DIR``."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from mpu_cli.files.writer import CheckpointWriter

_COMMON = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
SHAPES = {
    "0.1b": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8,
             "head_dim": 64, "tie_word_embeddings": True},
    "0.5b": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 22, "num_attention_heads": 16,
             "head_dim": 64, "tie_word_embeddings": True},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "head_dim": 64, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "head_dim": 128, "tie_word_embeddings": False},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "head_dim": 128, "tie_word_embeddings": False},
    "30b-moe": {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
                "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
                "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False},
}  # fmt: skip


def whole_config(shape: str) -> dict:
    return {**_COMMON, **SHAPES[shape]}


def tensors_of(config: dict, stacked: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama or a Qwen 3 mixture with this config, its experts ``stacked`` or a matrix each."""
    d, ffn, q = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "input_layernorm": (d,), "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q), "post_attention_layernorm": (d,),
        "mlp.gate_proj": (ffn, d), "mlp.up_proj": (ffn, d), "mlp.down_proj": (d, ffn),
    }  # fmt: skip
    if experts := config.get("num_experts", 0):
        n = config["moe_intermediate_size"]
        layer = {name: shape for name, shape in layer.items() if not name.startswith("mlp.")}
        layer |= {"self_attn.q_norm": (config["head_dim"],), "self_attn.k_norm": (config["head_dim"],)}
        layer |= {"mlp.gate": (experts, d)}
        if not stacked:
            for e in range(experts):
                expert_shapes = {"gate_proj": (n, d), "up_proj": (n, d), "down_proj": (d, n)}
                layer |= {f"mlp.experts.{e}.{name}": shape for name, shape in expert_shapes.items()}
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        if stacked:
            shapes[f"model.layers.{i}.mlp.experts.gate_up_proj"] = (experts, 2 * n, d)
            shapes[f"model.layers.{i}.mlp.experts.down_proj"] = (experts, d, n)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    return shapes


def make(shape: str, folder: Path, dtype: str = "BF16", stacked: bool = False, **entries: object) -> Path:
    """A checkpoint of ``shape``, with other ``entries`` in its config, of normal weights (σ 0.02) in ``folder``."""
    folder.mkdir(parents=True)
    config = whole_config(shape) | entries
    (folder / "config.json").write_text(json.dumps(config))
    plan = {name: (dtype, size) for name, size in tensors_of(config, stacked).items()}
    noise = (torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    with CheckpointWriter(folder, plan, {}) as writer, ThreadPoolExecutor(2) as pool:

        def fill(number: int, name: str) -> None:
            flat = writer.tensor(name).view(-1)
            for start in range(0, len(flat), 1 << 20):
                part = flat[start : start + (1 << 20)]
                shift = (start + number * 7919) % (1 << 21)
                part.copy_(noise[shift : shift + len(part)])

        list(pool.map(fill, range(len(plan)), plan))
    return folder


if __name__ == "__main__":
    print(make(sys.argv[1], Path(sys.argv[2])))
