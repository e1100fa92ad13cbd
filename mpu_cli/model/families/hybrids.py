"""Layers of attention among layers of another kind: convolutions, state spaces, delta nets."""

from __future__ import annotations

from dataclasses import replace

from mpu_cli.model.families.llama import LLAMA, QWEN3
from mpu_cli.model.families.mixtures import GRANITEMOE
from mpu_cli.model.families.parts import (
    EXPERTS,
    INPUT_NORMS,
    OLDER,
    ROUTER,
    SHARED_NORM,
    SIZES,
    after_num_dense,
    attention,
    both,
    ends,
    every,
    experts,
    gated_ffn,
    granite_experts,
    is_sparse,
    kind_of,
    layer_type_is,
    linear,
    negate,
    numbered_ffn,
    only_if,
    rms_norm,
    share_of_head,
    sparse_ffn,
    unless,
    where_rope,
)
from mpu_cli.model.family import Config, Fused, Rule, Sizes, Tensor

# Layers of attention, whose output is gated, among layers of a gated delta net.
is_attention, is_delta_net = layer_type_is("full_attention"), layer_type_is("linear_attention")

_ATTENTION3_5 = only_if(
    is_attention,
    Tensor("self_attn.q_proj.weight", (Fused(("query", "|mixed|"), "heads"), "model")),
    Tensor("self_attn.k_proj.weight", ("key", "model")),
    Tensor("self_attn.v_proj.weight", ("value", "model")),
    Tensor("self_attn.o_proj.weight", ("model", "mixed")),
    *SHARED_NORM,
)

_DELTA_NET = only_if(
    is_delta_net,
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

_SIZES3_5: Sizes = {
    **SIZES, "one": 1, "taps": "linear_conv_kernel_dim", "delta-head": "linear_num_value_heads",
    "|delta|": "linear_value_head_dim", "delta-groups": "linear_num_key_heads",
    "delta-value": lambda config, _: config["linear_num_value_heads"] * config["linear_value_head_dim"],
    "delta-key": lambda config, _: config["linear_num_key_heads"] * config["linear_key_head_dim"],
}  # fmt: skip

QWEN3_5 = replace(
    QWEN3,
    model_types=("qwen3_5_text",),
    renamed=(("model.language_model.", "model."),),
    sizes=_SIZES3_5,
    layer_tensors=(*INPUT_NORMS, *_ATTENTION3_5, *_DELTA_NET, *gated_ffn()),
    rotary=share_of_head("partial_rotary_factor"),
    defaults={
        "num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    unless={"attention_bias": False},
    dead=("mtp.*",),
    note="inside delta nets, order only",
)  # fmt: skip

QWEN3_5_MOE = replace(
    QWEN3_5,
    model_types=("qwen3_5_moe_text",),
    sizes={
        **{size: source for size, source in _SIZES3_5.items() if size != "ffn"}, **EXPERTS,
        "shared_ffn": "shared_expert_intermediate_size",
    },
    layer_tensors=(
        *INPUT_NORMS, *_ATTENTION3_5, *_DELTA_NET, ROUTER, *experts(),
        *gated_ffn(name="mlp.shared_expert", prefix="s-"),
        Tensor("mlp.shared_expert_gate.weight", ("one", "model")),
    ),
    defaults={**QWEN3_5.defaults, "num_key_value_heads": 2},
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
        *sparse_ffn(is_sparse, (), shared="mlp.shared_expert"),
        Tensor("mlp.shared_expert_gate.weight", ("one", "model"), is_sparse),
    ),
    renamed=(),
)  # fmt: skip

# Layers of attention among gated short convolutions. A convolution works on each channel alone and has no activation,
# so it is a gated feed-forward layer whose neurons see earlier tokens: gate · conv(gate · up).


def is_convolution(config: Config, layer: int) -> bool:
    """Whether a layer of LFM2 is a short convolution; without any list, none is."""
    kind = kind_of(config, layer)
    if kind:
        return kind == "conv"
    attention_layers = config.get("full_attn_idxs")
    return attention_layers is not None and layer not in attention_layers


def is_convolution3(config: Config, layer: int) -> bool:
    """The same of LFM3: without a list, attention is in every second layer but the first."""
    kind = kind_of(config, layer)
    if kind:
        return kind == "conv"
    return layer == 0 or layer % 2 == 1


def short_convolution(when: Rule) -> tuple[Tensor, ...]:
    return (
        *linear("conv.in_proj", ("s-gate", "s-gate", "s-up"), "model", bias="conv_bias", when=when),
        Tensor("conv.conv.weight", ("s-gate", "one", "taps"), when),
        Tensor("conv.conv.bias", ("s-up",), both(when, "conv_bias")),
        *linear("conv.out_proj", "model", "s-ffn", bias="conv_bias", when=when),
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
    tensors=ends("model.embed_tokens", *rms_norm("model.embedding_norm")),
    layer_tensors=(
        *rms_norm("operator_norm"), *rms_norm("ffn_norm"), *numbered_ffn(), *short_convolution(is_convolution),
        *attention(False, when=negate(is_convolution), out="out_proj"),
        Tensor("self_attn.q_layernorm.weight", ("|head|",), negate(is_convolution)),
        Tensor("self_attn.k_layernorm.weight", ("|head|",), negate(is_convolution)),
    ),
    defaults={
        "tie_word_embeddings": True, "num_key_value_heads": 8, "conv_L_cache": 3, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
    },
    unless={"tie_embedding": True},  # which transformers reads in place of tie_word_embeddings
    note="convolutions move like feed-forward layers",
)  # fmt: skip


LFM2_MOE = replace(
    LFM2,
    model_types=("lfm2_moe",),
    sizes={**_CONVOLUTION, **EXPERTS},
    layer_tensors=(
        *(tensor for tensor in LFM2.layer_tensors if not tensor.name.startswith("feed_forward.")),
        *numbered_ffn(negate(after_num_dense)),
        Tensor("feed_forward.gate.weight", ("expert", "model"), after_num_dense),
        Tensor("feed_forward.expert_bias", ("expert",), both(after_num_dense, "use_expert_bias"),
               trained=False),
        *experts(after_num_dense, ("w1", "w3", "w2"), "feed_forward", "feed_forward"),
    ),
    defaults={
        "tie_word_embeddings": True, "num_key_value_heads": 8, "conv_L_cache": 3, "num_dense_layers": 2,
        "use_expert_bias": True, "num_experts": 32, "moe_intermediate_size": 1792,
    },
)  # fmt: skip

# A gate for each head. Where RoPE is "proportional" it turns the first planes of the whole head, and others by 0.
_GATE_OF_HEADS = both(negate(is_convolution3), "use_attention_gate")

LFM3 = replace(
    LFM2,
    model_types=("lfm3",),
    sizes=_CONVOLUTION,
    layer_tensors=(
        *rms_norm("operator_norm"), *rms_norm("ffn_norm"),
        *rms_norm("post_operator_norm", "use_sandwich_norm"), *rms_norm("post_ffn_norm", "use_sandwich_norm"),
        *numbered_ffn(), *short_convolution(is_convolution3),
        *attention(when=negate(is_convolution3)),
        *only_if(negate(is_convolution3), *SHARED_NORM),
        Tensor("self_attn.g_proj.weight", ("head", "model"), _GATE_OF_HEADS, ("self_attn.gate_proj.weight",)),
    ),
    defaults={
        "tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 128, "conv_L_cache": 7,
        "use_sandwich_norm": True, "use_attention_gate": True,
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
        *(Tensor(f"{name}.{parameter}", ("ssm-head",), when) for parameter in ("A_log", "D", "dt_bias")),
        *linear(f"{name}.in_proj", ("ssm", *convolved, "ssm-head"), "model", bias=bias, when=when),
        Tensor(f"{name}.conv1d.weight", (convolved, "one", "taps"), when),
        Tensor(f"{name}.conv1d.bias", (convolved,), both(when, conv_bias)),
        Tensor(f"{name}.norm.weight", ("ssm",), norm or when),
        *linear(f"{name}.out_proj", "model", "ssm", bias=out_bias, when=when),
    )


def mamba2_sizes(heads: str, inner: str | Rule, groups: str, state: str, taps: str) -> Sizes:
    """``inner``: how wide the output of all heads is. B and C have ``state`` coordinates in each group."""
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
    "mamba_conv_bias": True,
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
        *mamba2("mamba", "mamba_proj_bias", "mamba_proj_bias", "mamba_conv_bias", negate(attends)),
        *granite_experts("num_local_experts"),
        Tensor("shared_mlp.input_linear.weight", (("s-gate", "s-up"), "model")),
        Tensor("shared_mlp.output_linear.weight", ("model", "s-ffn")),
    ),
    rotary=where_rope(lambda config, _: config.get("position_embedding_type") == "rope"),
    defaults={"num_local_experts": 8, "shared_intermediate_size": 1024, **_MAMBA_DEFAULTS},
    note="inside Mamba layers, order only",
)  # fmt: skip


def is_listed(config: Config, layer: int) -> bool:
    """Whether a layer of Bamba has attention."""
    return layer in (config.get("attn_layer_indices") or ())


BAMBA = replace(
    LLAMA,
    model_types=("bamba",),
    sizes={**SIZES, **_MAMBA},
    tensors=ends("model.embed_tokens", *rms_norm("model.final_layernorm")),
    layer_tensors=(
        *rms_norm("input_layernorm"), *rms_norm("pre_ff_layernorm"), *attention(when=is_listed),
        *mamba2("mamba", "mamba_proj_bias", "mamba_proj_bias", "mamba_conv_bias", negate(is_listed)),
        *gated_ffn("mlp_bias", "feed_forward"),
    ),
    rotary=share_of_head("partial_rotary_factor"),
    defaults={"num_key_value_heads": 8, "partial_rotary_factor": 0.5, **_MAMBA_DEFAULTS},
    unless={},
    note="inside Mamba layers, order only",
)  # fmt: skip

has_attention = every("attn_layer_period", "attn_layer_offset")

has_experts = both(every("expert_layer_period", "expert_layer_offset"), lambda config, _: config["num_experts"] > 1)

_MAMBA1 = (
    *linear("mamba.in_proj", ("m-inner", "m-inner"), "model", bias="mamba_proj_bias"),
    Tensor("mamba.conv1d.weight", ("m-inner", "one", "taps")),
    Tensor("mamba.conv1d.bias", ("m-inner",), "mamba_conv_bias"),
    *linear("mamba.x_proj", ("m-rank", "m-state", "m-state"), "m-inner"),
    *linear("mamba.dt_proj", "m-inner", "m-rank", bias=True),
    Tensor("mamba.A_log", ("m-inner", "m-state")),
    Tensor("mamba.D", ("m-inner",)),
    Tensor("mamba.dt_layernorm.weight", ("m-rank",)),
    Tensor("mamba.b_layernorm.weight", ("m-state",)),
    Tensor("mamba.c_layernorm.weight", ("m-state",)),
    *linear("mamba.out_proj", "model", "m-inner", bias="mamba_proj_bias"),
)


def rank_of_time_steps(config: Config, _: int) -> int:
    """The rank of the time steps of Jamba's Mamba: by default a sixteenth of the residual stream."""
    if config["mamba_dt_rank"] == "auto":
        return -(-config["hidden_size"] // 16)
    return config["mamba_dt_rank"]


JAMBA = replace(
    BAMBA,
    model_types=("jamba",),
    sizes={
        **SIZES, **EXPERTS, "expert_ffn": "intermediate_size", "one": 1, "taps": "mamba_d_conv",
        "m-state": "mamba_d_state", "m-inner": _MAMBA["ssm"],
        "m-rank": rank_of_time_steps,
    },
    layer_tensors=(
        *rms_norm("input_layernorm"), *rms_norm("pre_ff_layernorm"), *attention(False, when=has_attention),
        *(replace(tensor, when=both(negate(has_attention), tensor.when)) for tensor in _MAMBA1),
        *gated_ffn(name="feed_forward", when=negate(has_experts)),
        Tensor("feed_forward.router.weight", ("expert", "model"), has_experts),
        *experts(has_experts, split="feed_forward", fused="feed_forward"),
    ),
    planes=None,
    rotary=None,
    defaults={
        "num_key_value_heads": 8, "num_experts": 16, "expert_layer_period": 2, "expert_layer_offset": 1,
        "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_dt_rank": "auto", "mamba_conv_bias": True,
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
    defaults={"num_key_value_heads": 8, "mamba_d_ssm": 1024, **_MAMBA_DEFAULTS},
    unless=LLAMA.unless,
    note="inside Mamba, order only",
)  # fmt: skip

_NEMOTRON_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def nemotron_kinds(config: Config) -> list[str]:
    """The kind of each layer of Nemotron-H; older files have a letter for each."""
    layer_types = config.get("layers_block_type") or config.get("layer_types")
    if layer_types:
        return [OLDER.get(kind, kind) for kind in layer_types]
    return [_NEMOTRON_LETTERS[letter] for letter in config["hybrid_override_pattern"]]


def nemotron_is(kind: str) -> Rule:
    return lambda config, layer: nemotron_kinds(config)[layer] == kind


is_moe, is_mlp = nemotron_is("moe"), nemotron_is("mlp")

is_latent = both(is_moe, "moe_latent_size")  # experts read and write fewer coordinates than the residual stream

is_direct = both(is_moe, unless("moe_latent_size"))


def ungated_experts(width: str, when: Rule) -> tuple[Tensor, ...]:
    return (
        Tensor("mixer.experts.up_proj", ("expert", "e-up", width), when, ("mixer.experts.{e}.up_proj.weight",)),
        Tensor("mixer.experts.down_proj", ("expert", width, "e-ffn"), when, ("mixer.experts.{e}.down_proj.weight",)),
    )


NEMOTRON_H = replace(
    LLAMA,
    model_types=("nemotron_h",),
    ties=(),
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
    tensors=ends("backbone.embeddings", *rms_norm("backbone.norm_f")),
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
    dead=("mtp.*", "backbone.mtp.*"),
    renamed=(("backbone.", "model."),),
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504, "use_conv_bias": True,
        "hybrid_override_pattern": "ME*-", "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
        "ssm_state_size": 128, "conv_kernel": 4, "n_routed_experts": 8, "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    },
    unless={},
    note="inside Mamba layers, order only",
)  # fmt: skip
