"""Tensors that tables of families share."""

from __future__ import annotations

from dataclasses import replace

from mpu_cli.model.family import Axis, Config, Rule, Sizes, Tensor

# Rules, from which tables of families are composed: what a config says of a layer.


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


OLDER = {"attention": "full_attention", "mamba": "linear_attention"}  # what older files call kinds of layers


def kind_of(config: Config, layer: int, *names: str) -> str | None:
    """The kind of a layer by ``layer_types``, or by the first of the lists ``names``; None without a list."""
    kinds = entry("layer_types", *names)(config, layer)
    return OLDER.get(kinds[layer], kinds[layer]) if kinds else None


def layer_type_is(kind: str, pattern: str = "sliding_window_pattern", every: int = 4) -> Rule:
    """Whether a layer is of a kind: by ``layer_types``, or all but every n-th are sliding."""

    def rule(config: Config, layer: int) -> bool:
        listed = kind_of(config, layer)
        if listed:
            return listed == kind
        n = int(config.get(pattern) or every)
        return ("full_attention" if (layer + 1) % n == 0 else "sliding_attention") == kind

    return rule


def is_rope_layer(config: Config, layer: int) -> bool:
    """Whether a layer has RoPE: by its entry in ``no_rope_layers``; without the list, all but every n-th have it."""
    listed = config.get("no_rope_layers")
    if listed:
        return bool(int(listed[layer]))
    return (layer + 1) % int(config.get("no_rope_layer_interval") or 4) != 0


def has_rope_theta(config: Config, layer: int) -> bool:
    """Whether the base frequency of a layer's RoPE is not 0; without a list, every layer has one."""
    return bool(config["layer_rope_theta"][layer]) if config.get("layer_rope_theta") else True


def sparse_by_type(otherwise: Rule) -> Rule:
    """Whether a layer has experts by ``mlp_layer_types``; without the list, by ``otherwise``."""

    def rule(config: Config, layer: int) -> bool:
        kinds = config.get("mlp_layer_types")
        return bool(kinds[layer] == "sparse" if kinds else otherwise(config, layer))

    return rule


def shared_width(count: str) -> Rule:
    """The joint width of the experts that all tokens share."""
    return lambda config, _: config["moe_intermediate_size"] * int(config.get(count) or 1)


def either(*rules: Rule) -> Rule:
    return lambda config, layer: any(rule(config, layer) for rule in rules)


def both(*rules: str | Rule | None) -> Rule:
    """Whether all of these hold: rules, or config entries; None always does."""
    all_of = [entry(rule) if isinstance(rule, str) else rule for rule in rules if rule is not None]
    return lambda config, layer: all(rule(config, layer) for rule in all_of)


def negate(rule: Rule) -> Rule:
    return lambda config, layer: not rule(config, layer)


def is_sparse(config: Config, layer: int) -> bool:
    """Whether a layer of Qwen's mixtures has experts."""
    step = int(config.get("decoder_sparse_step") or 1)
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


def share_or_rotary_dim(config: Config, _: int) -> int:
    """The number of coordinates that RoPE turns, as a share of a head in files that transformers saved, else as a
    number."""
    share = config.get("partial_rotary_factor")
    if share is None:
        return int(config.get("rotary_dim", config["head_dim"]))
    return int(config["head_dim"] * share)


def after_dense(config: Config, layer: int) -> bool:
    return layer >= int(config.get("first_k_dense_replace") or 0)


def after_num_dense(config: Config, layer: int) -> bool:
    """The same, where the number of dense layers has another name."""
    return layer >= int(config["num_dense_layers"])


is_listed_or_after_dense = sparse_by_type(after_dense)
is_listed_or_after_first = sparse_by_type(lambda _, layer: layer > 0)


def every(period: str, offset: str) -> Rule:
    """Whether a layer is the one at ``offset`` in its period."""
    return lambda config, layer: layer % int(config[period]) == config[offset]


def linear(
    name: str, *axes: Axis, bias: str | Rule | bool = False, when: str | Rule | None = None
) -> tuple[Tensor, ...]:
    """A linear layer's weight, (outputs, inputs), and its bias if it has one. ``when`` is for both."""
    weight = Tensor(f"{name}.weight", axes, when)
    if bias is False:
        return (weight,)
    bias_when = when
    if bias is not True:
        bias_when = bias if when is None else both(when, bias)
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
    out: str = "o_proj",
) -> tuple[Tensor, ...]:
    """Llama's attention, whose last layer is called ``out``."""
    out_bias = bias if out_bias is None else out_bias
    return (
        *linear(f"{name}.q_proj", "query", "model", bias=bias, when=when),
        *linear(f"{name}.k_proj", "key", "model", bias=bias, when=when),
        *linear(f"{name}.v_proj", "value", "model", bias=bias, when=when),
        *linear(f"{name}.{out}", "model", "mixed", bias=out_bias, when=when),
    )  # fmt: skip


def gated_ffn(
    bias: str | Rule | bool = False, name: str = "mlp", prefix: str = "", when: str | Rule | None = None
) -> tuple[Tensor, ...]:
    return (
        *linear(f"{name}.gate_proj", f"{prefix}gate", "model", bias=bias, when=when),
        *linear(f"{name}.up_proj", f"{prefix}up", "model", bias=bias, when=when),
        *linear(f"{name}.down_proj", "model", f"{prefix}ffn", bias=bias, when=when),
    )


def plain_ffn(
    up: str = "mlp.up_proj", down: str = "mlp.down_proj", bias: str | Rule | bool = False
) -> tuple[Tensor, ...]:
    return *linear(up, "ffn", "model", bias=bias), *linear(down, "model", "ffn", bias=bias)


def experts(when: str | Rule | None = None, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
            split: str = "mlp", fused: str = "mlp") -> tuple[Tensor, ...]:  # fmt: skip
    """The experts of a mixture: a matrix each in files from the Hub, stacked in files that hold what memory does."""
    gate, up, down = (f"{split}.experts.{{e}}.{name}.weight" for name in names)
    return (
        Tensor(f"{fused}.experts.gate_up_proj", ("expert", ("e-gate", "e-up"), "model"), when, (gate, up)),
        Tensor(f"{fused}.experts.down_proj", ("expert", "model", "e-ffn"), when, (down,)),
    )


def ends(embedding: str, *others: Tensor, head: str = "lm_head", bias: str | bool = False) -> tuple[Tensor, ...]:
    """The tensors before and after the layers."""
    return Tensor(f"{embedding}.weight", ("vocab", "model")), *others, *linear(head, "vocab", "model", bias=bias)


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
    when: Rule,
    correction: tuple[Tensor, ...] = (CORRECTION,),
    bias: str | bool = False,
    shared: str = "mlp.shared_experts",
) -> tuple[Tensor, ...]:
    """Feed-forward layers: dense ones, or experts in groups with ``shared`` experts beside them."""
    return (
        *gated_ffn(bias, when=negate(when)),
        *only_if(when, ROUTER, *correction),
        *experts(when),
        *(gated_ffn(bias, name=shared, prefix="s-", when=when) if shared else ()),
    )


def granite_experts(when: str | None = None) -> tuple[Tensor, ...]:
    """Stacked in files from the Hub too, under other names than in memory."""
    moe = "block_sparse_moe"
    return (
        Tensor(f"{moe}.router.weight", ("expert", "model"), when, (f"{moe}.router.layer.weight",)),
        Tensor(f"{moe}.experts.gate_up_proj", ("expert", ("e-gate", "e-up"), "model"), when,
               (f"{moe}.input_linear.weight",)),
        Tensor(f"{moe}.experts.down_proj", ("expert", "model", "e-ffn"), when, (f"{moe}.output_linear.weight",)),
    )  # fmt: skip


def numbered_ffn(when: Rule | None = None) -> tuple[Tensor, ...]:
    return (
        *linear("feed_forward.w1", "gate", "model", when=when), *linear("feed_forward.w3", "up", "model", when=when),
        *linear("feed_forward.w2", "model", "ffn", when=when),
    )  # fmt: skip


def only_if(when: str | Rule, *tensors: Tensor) -> tuple[Tensor, ...]:
    """``tensors`` that exist if the config entry, or the rule, says so."""
    return tuple(replace(tensor, when=when) for tensor in tensors)


def renamed_parts(when: Rule, names: dict[str, str], *tensors: Tensor) -> tuple[Tensor, ...]:
    """``tensors`` of a mixture by their names in memory, with those that the Hub's files have."""

    def in_file(name: str) -> str:
        return next((old + name.removeprefix(new) for old, new in names.items() if name.startswith(new)), name)

    return tuple(replace(tensor, when=when, parts=(in_file(tensor.name),)) for tensor in tensors)
