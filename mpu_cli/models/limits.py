"""What a model can read."""

from __future__ import annotations

from transformers import PreTrainedModel

from mpu_cli.errors import MpuError

STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional", "ntk_alpha")  # whatever is in a batch


def longest_input(model: PreTrainedModel) -> int | None:
    """How many tokens the model can read; None for rotary positions, which extend beyond the training length."""
    config = model.config.get_text_config()
    return None if getattr(config, "rope_parameters", None) else trained_length(model)


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many tokens have an embedding; what the config says is another party's word."""
    return len(model.get_input_embeddings().weight)


def trained_length(model: PreTrainedModel) -> int | None:
    """How many tokens the model was trained on at once, as its config says; None if it does not."""
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def longest_independent_input(model: PreTrainedModel) -> int | None:
    """The most tokens up to which the model reads a record alike whatever else is in its batch; None for no limit.

    "longrope" and "dynamic" choose the frequencies of all positions by the longest input of a batch, and "dynamic"
    keeps them for later batches. Raises MpuError for a kind of rotary positions of which that is not known.
    """
    limits = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        settings = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        for layers, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            table = settings.get(layers, {}) if layers else settings
            if kind == "longrope":
                limits.append(table["original_max_position_embeddings"])
            elif kind is not None and "dynamic" in kind:
                limits.append(module.original_max_seq_len)
            elif kind is not None and kind not in STATIC_ROPE:
                raise MpuError(f"rotary positions of kind {kind!r}: whether records of a batch share them is not known")
    return min(limits, default=None)
