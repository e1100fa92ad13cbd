"""Rules, from which tables of families are composed: what a config says of a layer."""

from __future__ import annotations

from mpu_cli.architectures.family import Config, Rule


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


def listed_or_every(name: str, interval: str, every: int) -> Rule:
    """The entry of a layer in the list ``name``; without one, 0 in every n-th layer."""

    def rule(config: Config, layer: int) -> int:
        table = config.get(name)
        return int(table[layer]) if table else int((layer + 1) % int(config.get(interval) or every) != 0)

    return rule


def list_entry(name: str) -> Rule:
    """The entry of a layer in the list ``name``; without one, 1."""
    return lambda config, layer: config[name][layer] if config.get(name) else 1


def sparse_by_type(otherwise: Rule) -> Rule:
    """Whether a layer has experts by ``mlp_layer_types``; without the list, by ``otherwise``."""

    def rule(config: Config, layer: int) -> bool:
        kinds = config.get("mlp_layer_types")
        return bool(kinds[layer] == "sparse" if kinds else otherwise(config, layer))

    return rule


def of_each_layer(name: str, otherwise: str) -> Rule:
    """The entry of a layer in the list ``name``; without one, the same entry for all layers."""
    return lambda config, layer: config[name][layer] if config.get(name) else config[otherwise]


def times(factor: int, name: str) -> Rule:
    """A size that is a multiple of another."""
    return lambda config, _: factor * int(config[name])


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
    """How many coordinates RoPE turns, as a share of a head in files that transformers saved, else as a number."""
    share = config.get("partial_rotary_factor")
    return int(config.get("rotary_dim", config["head_dim"]) if share is None else config["head_dim"] * share)


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
