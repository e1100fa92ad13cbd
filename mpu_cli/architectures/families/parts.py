"""Tensors that tables of families share."""

from __future__ import annotations

from dataclasses import replace

from mpu_cli.architectures.axes import Axis
from mpu_cli.architectures.families.rules import both, negate
from mpu_cli.architectures.family import Rule, Sizes, Stack, Tensor


def linear(
    name: str, *axes: Axis, bias: str | Rule | bool = False, when: str | Rule | None = None
) -> tuple[Tensor, ...]:
    """A linear layer's weight, (outputs, inputs), and its bias if it has one. ``when`` is for both."""
    weight = Tensor(f"{name}.weight", axes, when)
    if bias is False:
        return (weight,)
    bias_when = when if bias is True else bias if when is None else both(when, bias)
    return weight, Tensor(f"{name}.bias", axes[:1], bias_when)


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

# Norms of queries and keys after RoPE: quarter turns pass through both.
NORM_AFTER_ROPE = (
    Tensor("self_attn.query_layernorm.weight", ("|head|",)), Tensor("self_attn.key_layernorm.weight", ("|head|",)),
)  # fmt: skip

SANDWICH = (
    *INPUT_NORMS, *rms_norm("pre_feedforward_layernorm"), *rms_norm("post_feedforward_layernorm"), *attention(),
)  # fmt: skip

EXPERTS: Sizes = {"experts": ("num_experts", "num_local_experts"), "expert_ffn": "moe_intermediate_size"}

ROUTER = Tensor("mlp.gate.weight", ("expert", "model"))

CORRECTION = Tensor("mlp.gate.e_score_correction_bias", ("expert",), trained=False)


def sparse_ffn(
    when: Rule, correction: tuple[Tensor, ...] = (CORRECTION,), bias: str | bool = False
) -> tuple[Tensor, ...]:
    """DeepSeek's feed-forward layers: dense ones, or experts in groups with shared experts beside them."""
    return (
        *gated_ffn(bias, when=negate(when)),
        *(replace(tensor, when=when) for tensor in (ROUTER, *correction)),
        *experts(when),
        *gated_ffn(bias, name="mlp.shared_experts", prefix="s-", when=when),
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


def numbered_ffn(when: Rule | None = None) -> tuple[Tensor, ...]:
    return (
        *linear("feed_forward.w1", "gate", "model", when=when), *linear("feed_forward.w3", "up", "model", when=when),
        *linear("feed_forward.w2", "model", "ffn", when=when),
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
