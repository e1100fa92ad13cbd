"""Which of transformers' classes a model is made with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)


def network_of(config: PretrainedConfig) -> Any:
    """The class with all of the model's tensors. Of a wrapper around a language model, the causal one may have the
    language model's only, or not exist."""
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def concrete(config: PretrainedConfig) -> Any:
    """The model's own class; None if transformers has none."""
    images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    return images or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def build(config: PretrainedConfig, **ways: Any) -> PreTrainedModel:
    """A model as ``config`` describes it, with weights that transformers makes up."""
    return network_of(config).from_config(config, trust_remote_code=False, **ways)


def parts_of(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """``config``, and the configs of its parts: text, images, and what those consist of."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            yield from parts_of(part)
