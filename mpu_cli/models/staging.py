"""The only folders that transformers and peft are given: made here, of what was checked.

A folder that somebody else made could name other files, repositories or code for the libraries to load. So they get the
weights that were opened, under an index written here, and small files of known names with what ``boundary.cleaning``
lets through.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpu_cli.boundary.cleaning import JSON_FILES, LONGEST_TEMPLATE, clean_config
from mpu_cli.boundary.files import copy_bounded, open_regular, private_scratch
from mpu_cli.checkpoint.reader import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    INDEX_NAME,
    WEIGHTS_NAME,
    Checkpoint,
    open_checkpoint,
    read_json_object,
)
from mpu_cli.errors import MpuError
from mpu_cli.models.source import LARGEST_JSON, LARGEST_TOKENIZER, Model

# Names for the number of layers: libraries build that many before they look at the weights.
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "depth", "num_nextn_predict_layers",
    "num_mtp_layers",
)  # fmt: skip
MAX_LAYERS = 1_000  # known models have at most 126
_LONGEST_CONTEXT = 1 << 26  # positions; some models make tables of them
MOST_PARTS = 50  # of a config: text, images, sound, …
_LORA = ("peft_type", "task_type", "lora_alpha", "bias", "fan_in_fan_out", "use_rslora", "use_dora")
_FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>[\w.]+)\.lora_(?:embedding_)?A(?:\.weight)?")
_WORDS = re.compile(r"[\w.]{1,200}")


@contextmanager
def staged(model: Model) -> Iterator[Path]:
    """A private folder from which transformers loads ``model``: its config, tokenizer and the opened weights.

    Raises MpuError for a config that no library should see.
    """
    with private_scratch() as folder:
        _write(folder / "config.json", config_for_libraries(model))
        stage_tokenizer(model, folder)
        _link_weights(model.checkpoint, folder)
        yield folder


def config_for_libraries(model: Model) -> dict[str, object]:
    """The config of ``model`` with the names that supported families and its own class of transformers' have."""
    config = model.config
    if config.get("quantization_config"):
        raise MpuError(f"{model.config_path}: is quantised (quantization_config)", "dequantise the weights first")
    cleaned = clean_config(config, fields_of(config))
    # Tensors without elements cost a file nothing, and the layers that they stand for cost memory and minutes.
    full_tensors = sum(info.elements > 0 for info in model.checkpoint.tensors.values())
    for name, value in _numbers(cleaned):
        limit = min(full_tensors, MAX_LAYERS) if name in _LAYERS else _LONGEST_CONTEXT
        if value > limit and (name in _LAYERS or "position" in name or name == "n_ctx"):
            raise MpuError(f"{model.config_path}: {name} is {value:,}, more than these weights can have")
    return cleaned


def stage_tokenizer(model: Model, folder: Path) -> None:
    """Put the small files of ``model`` into ``folder``, the JSON among them with what is known of it only."""
    for path in model.side_files:
        if clean := JSON_FILES.get(path.name):
            _write(folder / path.name, clean(read_json_object(path, LARGEST_JSON, links=model.links)))
            continue
        limit = LONGEST_TEMPLATE if path.suffix == ".jinja" else LARGEST_TOKENIZER
        with open_regular(path, links=model.links) as file:
            copy_bounded(file, folder / path.name, limit)


@contextmanager
def staged_adapter(folder: Path) -> Iterator[Path]:
    """A private folder from which peft loads the LoRA adapter in ``folder``. Raises MpuError for any other kind.

    Which modules it changes, and with which rank, is read from its tensors: in its config both can be expressions that
    never end or ask for any amount of memory.
    """
    path = folder / ADAPTER_CONFIG
    config = read_json_object(path, links=False)
    if config.get("peft_type") != "LORA":
        raise MpuError(f"{path}: not a LoRA adapter (peft_type is {str(config.get('peft_type'))[:80]!r})")
    with open_regular(folder / ADAPTER_WEIGHTS, links=False):
        pass  # not a link: open_checkpoint takes what it is given for the user's own words
    weights = open_checkpoint(folder / ADAPTER_WEIGHTS, links=False)  # peft would fall back to a pickle
    with private_scratch() as scratch:
        _write(scratch / ADAPTER_CONFIG, _lora_config(config, weights, path))
        (scratch / ADAPTER_WEIGHTS).symlink_to(weights.path.resolve())
        yield scratch


def _lora_config(config: Mapping[str, object], weights: Checkpoint, path: Path) -> dict[str, object]:
    """What peft is told of an adapter: plain values of its ``config``, modules and ranks of its ``weights``."""
    ranks: dict[str, int] = {}
    for name, info in weights.tensors.items():
        if factor := _FACTOR.fullmatch(name):
            if len(info.shape) != 2:
                raise MpuError(f"{weights.path}: {name!r} is not a matrix")
            ranks[factor["module"]] = info.shape[0]
    if not ranks:
        raise MpuError(f"{weights.path}: holds no factors of LoRA")
    lists = {name: config.get(name) for name in ("modules_to_save", "target_parameters")}
    for name, value in lists.items():
        words = value if isinstance(value, list) else []
        if value is not None and (not words or not all(isinstance(w, str) and _WORDS.fullmatch(w) for w in words)):
            raise MpuError(f"{path}: {name} is not a list of plain names")
    rank = max(ranks.values())
    scales = config.get("alpha_pattern") or {}
    if not isinstance(scales, dict) or not all(
        isinstance(alpha, int | float) and _WORDS.fullmatch(name) for name, alpha in scales.items()
    ):
        raise MpuError(f"{path}: alpha_pattern is not a table of modules and numbers")
    kept = {name: value for name, value in config.items() if name in _LORA and not isinstance(value, list | dict)}
    return kept | {
        **lists, "r": rank, "target_modules": sorted(ranks),
        "rank_pattern": {module: own for module, own in ranks.items() if own != rank}, "alpha_pattern": scales,
        "inference_mode": True, "lora_dropout": 0.0,
    }  # fmt: skip


def _link_weights(checkpoint: Checkpoint, folder: Path) -> None:
    files = sorted({info.file for info in checkpoint.tensors.values()})
    if len(files) == 1:
        (folder / WEIGHTS_NAME).symlink_to(files[0].resolve())
        return
    names = {file: f"model-{i:05d}-of-{len(files):05d}.safetensors" for i, file in enumerate(files, 1)}
    for file, name in names.items():
        (folder / name).symlink_to(file.resolve())
    weight_map = {tensor: names[info.file] for tensor, info in checkpoint.tensors.items()}
    _write(folder / INDEX_NAME, {"metadata": {"total_size": checkpoint.nbytes}, "weight_map": weight_map})


def fields_of(config: Mapping[str, object]) -> set[str]:
    """The names that transformers' class of this ``model_type`` has for its settings, and those of its parts."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return set()
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    names: set[str] = set()
    classes: list[Any] = [CONFIG_MAPPING[kind]]
    for _ in range(MOST_PARTS):
        if not classes:
            break
        each = classes.pop()
        if not hasattr(each, "sub_configs"):
            continue
        names |= {field.name for field in dataclasses.fields(each)} - inherited
        names |= {*each.attribute_map, *each.attribute_map.values(), *each.sub_configs}
        classes += [getattr(part, "config_class", part) for part in each.sub_configs.values()]
        if each is CONFIG_MAPPING[kind]:  # a part of any class names its own
            parts = [part.get("model_type") for part in map(config.get, each.sub_configs) if isinstance(part, dict)]
            classes += [CONFIG_MAPPING[part] for part in parts if isinstance(part, str) and part in CONFIG_MAPPING]
    return {name for name in names if not name.startswith("_") and not _harmful(name)}


def _harmful(name: str) -> bool:
    """Whether a setting names files, repositories, code or ways to compute, whatever class has it."""
    signs = ("implementation", "path", "quantization", "auto_map", "weights", "kernel", "backbone_kwargs", "use_timm")
    return any(sign in name for sign in signs) and name != "scale_attn_weights"


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif type(value) is int:
            yield name, value


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
