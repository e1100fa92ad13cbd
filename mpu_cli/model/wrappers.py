"""Models around a language model, such as those that read images.

A record of text is trained on the language model. The rest is carried along: what it writes into the residual stream is
moved with that, without noise, and everything else stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from mpu_cli.model.families import FAMILIES
from mpu_cli.model.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED, MUSE
from mpu_cli.model.families.hybrids import QWEN3_5, QWEN3_5_MOE
from mpu_cli.model.families.latent import MISTRAL4
from mpu_cli.model.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from mpu_cli.model.families.mixtures import LLAMA4, QWEN3_MOE
from mpu_cli.model.families.parts import linear, only_if
from mpu_cli.model.family import Config, Family, Rule, Sizes, Tensor

TEXT = "model."  # what the language model's names begin with where it is alone
HEAD = "lm_head.weight"  # the output layer's name in memory


@dataclass(frozen=True)
class Wrapper:
    """A model around one of several language models."""

    model_type: str
    # the language models, by the ``model_type`` of the text's config; the first if that does not say
    texts: Mapping[str, Family]
    inner: str  # the beginning of the language model's names in files
    writes: tuple[Tensor, ...]  # the tensors outside the language model of which one axis is the residual stream
    frozen_prefixes: tuple[str, ...]  # of what surrounds the language model
    head: str = HEAD  # the name of the output head in files
    sizes: Sizes = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()  # prefixes in files, with those in memory
    tied: bool = False  # what transformers assumes if the config does not say whether the head is the embedding
    ties: tuple[str, ...] = ("outer",)  # the configs that may say it
    note: str = "with images; the vision tower stays as it is"

    def around(self, text: Family) -> Family:
        """The table of the whole, with ``text`` as the language model."""
        tensors = tuple(replace(t, name=self._name(t.name)) for t in text.tensors)
        return replace(
            text,
            model_types=(self.model_type,),
            text_config="text_config",
            ties=self.ties,
            text_tied=bool(text.defaults.get("tie_word_embeddings")),
            sizes={**text.sizes, **self.sizes},
            prefix=self.inner,
            layer=self._name(text.layer),
            tensors=(*tensors, *self.writes),
            heads=(self.head,),
            frozen_prefixes=self.frozen_prefixes,
            renamed=self.renamed,
            defaults={**text.defaults, "tie_word_embeddings": self.tied},
            note="; ".join(filter(None, (self.note, text.note.replace("text only", "")))),
        )

    def _name(self, name: str) -> str:
        return self.head if name == HEAD else self.inner + name.removeprefix(TEXT)

    @cached_property
    def families(self) -> Mapping[str, Family]:
        """The table for each of ``texts``."""
        return {name: self.around(text) for name, text in self.texts.items()}


def part(config_name: str, *names: str) -> Rule:
    """The first of these entries of a part's config; None if the model has no such part. Raises KeyError for a part
    that has none of them."""

    def rule(config: Config, _: int) -> object:
        part_config = config.get(config_name)
        if not part_config:
            return None
        return part_config[next((name for name in names if name in part_config), names[-1])]

    return rule


def merged_patch_width(name: str) -> Rule:
    """The width of a square of patches that are merged, of which each has the width ``name``."""
    return lambda config, _: config["vision_config"][name] * config["vision_config"].get("spatial_merge_size", 2) ** 2


def linear_to_residual(name: str, axis: str, bias: bool | str = False) -> tuple[Tensor, ...]:
    """A linear layer, from ``axis`` to the residual stream."""
    return tuple(replace(tensor, trained=False) for tensor in linear(name, "model", axis, bias=bias))


def deepstack_mergers() -> tuple[Tensor, ...]:
    """The mergers that Qwen 3 VL has for inner layers of its tower: one for each that its config lists."""

    def has(number: int) -> Rule:
        return lambda config, _: number < len(config["vision_config"].get("deepstack_visual_indexes", (8, 16, 24)))

    mergers: list[Tensor] = []
    for k in range(16):
        name = f"model.visual.deepstack_merger_list.{k}.linear_fc2"
        mergers += only_if(has(k), *linear_to_residual(name, "patches", bias=True))
    return tuple(mergers)


# Llava and models whose tensors are named like it.
TOWER_PREFIXES = ("vision_tower.", "multi_modal_projector.")
RENAMED = (
    ("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."),
    *((prefix, f"model.{prefix}") for prefix in TOWER_PREFIXES),
)  # fmt: skip
LLAVA = Wrapper(
    "llava",
    {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "gemma": GEMMA, "gemma2": GEMMA2},
    inner="language_model.model.",
    head="language_model.lm_head.weight",
    writes=linear_to_residual("multi_modal_projector.linear_2", "projected", "multimodal_projector_bias"),
    frozen_prefixes=TOWER_PREFIXES,
    sizes={"projected": "hidden_size"},
    renamed=RENAMED,
    ties=("outer", "text"),
)
MISTRAL3 = replace(
    LLAVA,
    model_type="mistral3",
    texts={"mistral": MISTRAL, "ministral3": MISTRAL, "ministral": MISTRAL, "mistral4": MISTRAL4},
    tied=True,
    ties=("outer",),
)
GEMMA3_WRAPPER = replace(
    LLAVA,
    model_type="gemma3",
    texts={"gemma3_text": GEMMA3},
    writes=(Tensor("multi_modal_projector.mm_input_projection_weight", ("vision", "model"), trained=False),),
    frozen_prefixes=("vision_tower.", "multi_modal_projector.mm_soft_emb_norm."),
    sizes={"vision": part("vision_config", "hidden_size")},
    tied=True,
    ties=("outer",),
)


GEMMA4_WRAPPER = Wrapper(
    "gemma4",
    {"gemma4_text": GEMMA4},
    inner="model.language_model.",
    writes=(
        *only_if("vision_config", *linear_to_residual("model.embed_vision.embedding_projection", "vision")),
        *only_if("audio_config", *linear_to_residual("model.embed_audio.embedding_projection", "audio")),
    ),
    frozen_prefixes=("model.vision_tower.", "model.audio_tower."),
    sizes={"vision": part("vision_config", "hidden_size"), "audio": part("audio_config", "output_proj_dims")},
    tied=True,
    note="with images and sounds, whose towers stay as they are",
)
GEMMA4_UNIFIED_WRAPPER = replace(
    GEMMA4_WRAPPER,
    model_type="gemma4_unified",
    texts={"gemma4_unified_text": GEMMA4_UNIFIED},
    frozen_prefixes=("model.vision_embedder.",),
    sizes={
        "vision": part("vision_config", "output_proj_dims"),
        "audio": part("audio_config", "output_proj_dims", "audio_embed_dim"),
    },
    renamed=(
        ("model.vision_embedder.", "model.embed_vision."),
        ("model.embed_vision.", "model.embed_vision.multimodal_embedder."),
    ),
    note="with images and sounds, whose embedders stay as they are",
)

QWEN2_VL = Wrapper(
    "qwen2_vl",
    {"qwen2_vl_text": QWEN2},
    inner="model.",
    writes=linear_to_residual("visual.merger.mlp.2", "patches", bias=True),
    frozen_prefixes=("visual.",),
    sizes={"patches": merged_patch_width("embed_dim")},
    renamed=(("model.", "model.language_model."), ("visual.", "model.visual.")),
    ties=("outer", "text"),
)
QWEN2_5_VL = replace(
    QWEN2_VL,
    model_type="qwen2_5_vl",
    texts={"qwen2_5_vl_text": QWEN2},
    sizes={"patches": merged_patch_width("hidden_size")},
)
QWEN3_5_WRAPPER = Wrapper(
    "qwen3_5",
    {"qwen3_5_text": QWEN3_5},
    inner="model.language_model.",
    writes=linear_to_residual("model.visual.merger.linear_fc2", "patches", bias=True),
    frozen_prefixes=("model.visual.",),
    sizes={"patches": merged_patch_width("hidden_size")},
)
QWEN3_5_MOE_WRAPPER = replace(QWEN3_5_WRAPPER, model_type="qwen3_5_moe", texts={"qwen3_5_moe_text": QWEN3_5_MOE})
QWEN3_VL = replace(
    QWEN3_5_WRAPPER,
    model_type="qwen3_vl",
    texts={"qwen3_vl_text": QWEN3},
    writes=(*QWEN3_5_WRAPPER.writes, *deepstack_mergers()),
)
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    model_type="qwen3_vl_moe",
    texts={"qwen3_vl_moe_text": QWEN3_MOE},
    note=f"{QWEN3_VL.note}; as transformers saves it, not with the Hub's transposed stacks",
)
LLAMA4_WRAPPER = Wrapper(
    "llama4",
    {"llama4_text": LLAMA4},
    inner="language_model.model.",
    head="language_model.lm_head.weight",
    writes=linear_to_residual("multi_modal_projector.linear_1", "vision"),
    frozen_prefixes=("vision_model.", "multi_modal_projector."),
    sizes={"vision": part("vision_config", "vision_output_dim")},
    ties=("text",),
)

MUSE_WRAPPER = Wrapper(
    "muse_glimmer",
    {"muse_glimmer_text": MUSE},
    inner="model.language_model.",
    writes=linear_to_residual("model.vision_projection", "projected"),
    frozen_prefixes=("model.vision_tower.", "model.vision_adapter."),
    sizes={"projected": "projector_hidden_size"},
)


def shuffled_patch_width(config: Config, _: int) -> int:
    """The width of a square of patches, ``scale_factor`` to a side, that are shuffled into one."""
    return config["vision_config"]["hidden_size"] * config.get("scale_factor", 2) ** 2


SMOLVLM = Wrapper(
    "smolvlm",
    {"llama": LLAMA},
    inner="model.text_model.",
    writes=linear_to_residual("model.connector.modality_projection.proj", "patches"),
    frozen_prefixes=("model.vision_model.",),
    sizes={"patches": shuffled_patch_width},
)

_ALL = (
    GEMMA3_WRAPPER, GEMMA4_WRAPPER, GEMMA4_UNIFIED_WRAPPER, MISTRAL3, QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE,
    QWEN3_5_WRAPPER, QWEN3_5_MOE_WRAPPER, LLAMA4_WRAPPER, MUSE_WRAPPER, LLAVA, SMOLVLM,
)  # fmt: skip
WRAPPERS = {wrapper.model_type: wrapper for wrapper in _ALL}


# The reasons why some architectures that users ask for are refused.
REFUSED = {
    "kimi_k25": "transformers saves it under names that it does not load",
    "kimi_linear": "no table describes its linear attention",
    "mllama": "cross-attention reads images past the residual stream",
    "olmo_hybrid": "its files hold convolutions apart that memory holds as one, in parts of different sizes",
    "phi4_multimodal": "adapters inside its layers write into the residual stream as well",
    "xglm": "fixed sinusoids are added to the residual stream, so nothing of that can move",
    "zamba2": "its attention layers share weights, and no table says that layers are tied",
}


def family_of(model_type: object, text_type: object = None) -> Family | None:
    """The table of a model with this ``model_type`` and, of a wrapper, of the text's config; None if there is none."""
    if wrapper := WRAPPERS.get(str(model_type)):
        return wrapper.families.get(str(text_type or next(iter(wrapper.texts))))
    return FAMILIES.get(str(model_type))


def supported_families() -> dict[str, Family]:
    """A table for each ``model_type`` that is supported; of a wrapper, that with the first of its texts."""
    return FAMILIES | {name: next(iter(wrapper.families.values())) for name, wrapper in WRAPPERS.items()}
