"""The only folders that transformers and peft are given: made here, from what was checked.

A folder that somebody else made could name other files, repositories or code for the libraries to load. So they get the
weights that were opened, under an index written here, and small files of known names with what ``files.folder``
lets through.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta
from transformers import PreTrainedModel

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import (
    LARGEST_TOKENIZER,
    Document,
    copy_bounded,
    open_regular,
    parse_document,
    private_scratch,
    read_json_object,
)
from mpu_cli.files.folder import JSON_FILES, LONGEST_TEMPLATE, clean_config
from mpu_cli.files.manifest import LEFT_FACTOR, RIGHT_FACTOR, delta_manifest, read_copy_manifest
from mpu_cli.files.reader import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    INDEX_NAME,
    WEIGHTS_NAME,
    Checkpoint,
    open_checkpoint,
    quoted_list,
    shard_name,
    short,
)
from mpu_cli.files.sandbox import PROCESS
from mpu_cli.model.device import blaming
from mpu_cli.model.source import LARGEST_JSON, PEFT, WRAPPED, Model, cached_snapshot
from mpu_cli.model.tensors import in_memory, is_quantized

# Names for the number of layers: libraries build that many before they look at the weights.
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "depth", "num_nextn_predict_layers",
    "num_mtp_layers",
)  # fmt: skip
MAX_LAYERS = 1_000  # known models have at most 126
_LONGEST_CONTEXT = 1 << 26  # positions; some models make tables of them
MOST_PARTS = 50  # of a config: text, images, sound, …
# Parts of the names of settings for files, repositories, code or ways to compute, whatever class has them.
_HARMFUL = ("implementation", "path", "quantization", "auto_map", "weights", "kernel", "backbone_kwargs", "use_timm")
# The entries of a LoRA adapter's config. Plain values that peft gets as they are:
_LORA = (
    "peft_type", "task_type", "lora_alpha", "bias", "fan_in_fan_out", "use_rslora", "use_dora", "lora_bias",
)  # fmt: skip
# Others that are made anew from the tensors:
_MADE_ANEW = ("target_modules", "init_lora_weights", "inference_mode", "lora_dropout")
# Entries on the choice of modules and on their training, whose outcome is the tensors.
_PAST = (
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "exclude_modules", "layers_to_transform",
    "layers_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "qalora_group_size", "runtime_config",
)  # fmt: skip
_FIRST_WEIGHTS = (None, True, False, "gaussian", "orthogonal", "eva")  # which leave the base as it is
PROMPTS = re.compile("PROMPT|PREFIX|P_TUNING|CPT|CARTRIDGE")  # in the names of peft's kinds without new weights
MERGE = "merge it into its base with peft (merge_and_unload, save_pretrained) and pass that model"
_CHANGED_BASE = re.compile(r"pissa(_niter_\d{1,3})?|olora")  # which peft takes off the base, as in training
_FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>[\w.]+)\.lora_(?:embedding_)?A(?:\.default)?(?:\.weight)?")


@contextmanager
def staged_model(model: Model) -> Iterator[Path]:
    """A private folder from which transformers loads ``model``: its config, tokenizer and the opened weights."""
    with private_scratch() as folder:
        _write(folder / "config.json", config_for_libraries(model))
        for path in model.side_files:  # the JSON among them with what is known of it only
            if clean := JSON_FILES.get(path.name):
                _write(folder / path.name, clean(read_json_object(path, LARGEST_JSON, links=model.links)))
                continue
            limit = LONGEST_TEMPLATE if path.suffix == ".jinja" else LARGEST_TOKENIZER
            with open_regular(path, links=model.links) as file:
                copy_bounded(file, folder / path.name, limit)
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
        if name in _LAYERS:
            limit = min(full_tensors, MAX_LAYERS)
        elif "position" in name or name == "n_ctx":
            limit = _LONGEST_CONTEXT
        else:
            continue
        if value > limit:
            raise MpuError(f"{model.config_path}: {name} is {value:,}, more than these weights can have")
    return cleaned


@contextmanager
def staged_adapter(folder: Path) -> Iterator[Path]:
    """A private folder from which peft loads the LoRA adapter in ``folder``.

    Which modules it changes, and with which rank, is read from its tensors: in its config both can be expressions that
    never end or ask for any amount of memory.
    """
    path = folder / ADAPTER_CONFIG
    config = read_json_object(path, links=False)
    if config.get("peft_type") != "LORA":
        kind = str(config.get("peft_type"))[:80]
        # Prompts and prefixes do not change the weights.
        hint = "no model of its own can be made of it" if PROMPTS.search(kind) else MERGE
        raise MpuError(f"{path}: not a LoRA adapter (peft_type is {kind!r})", hint)
    with open_regular(folder / ADAPTER_WEIGHTS, links=False):
        pass  # not a link: open_checkpoint takes what it is given for the user's own words
    weights = open_checkpoint(folder / ADAPTER_WEIGHTS, links=False)  # peft would fall back to a pickle
    with private_scratch() as scratch:
        _write(scratch / ADAPTER_CONFIG, _lora_config(config, weights, path))
        (scratch / ADAPTER_WEIGHTS).symlink_to(weights.path.resolve())
        yield scratch


def _lora_config(config: Mapping[str, object], weights: Checkpoint, path: Path) -> dict[str, object]:
    """The config of an adapter for peft: plain values of its ``config``, modules and ranks of its ``weights``."""
    known = {*_LORA, *_AdapterEntries.__struct_fields__, *_MADE_ANEW, *_PAST}
    if unknown := [name for name, value in config.items() if value and name not in known]:
        raise _not_honoured(path, quoted_list(unknown))
    start = config.get("init_lora_weights")
    changes_base = isinstance(start, str) and bool(_CHANGED_BASE.fullmatch(start))
    if not changes_base and start not in _FIRST_WEIGHTS:
        raise _not_honoured(path, f"init_lora_weights = {short(start)}")
    entries = parse_document(_AdapterEntries, config, path)
    # The rows of the first factor, by the module that it belongs to.
    rows: dict[str, int] = {}
    for name, info in weights.tensors.items():
        if factor := _FACTOR.fullmatch(name):
            if len(info.shape) != 2:
                raise MpuError(f"{weights.path}: {name!r} is not a matrix")
            rows[factor["module"].removesuffix(".base_layer")] = info.shape[0]
    if not rows:
        raise MpuError(f"{weights.path}: holds no factors of LoRA")
    # Of parameters, such as stacks of experts, the rows are their rank times the number of experts.
    stacks: dict[str, int] = {}
    for module in rows:
        for parameter in entries.target_parameters or ():
            inside, _, name = parameter.rpartition(".")
            if f".{module}".endswith(f".{inside}"):
                stacks[f"{module}.{name}"] = rows[module]
    ranks = {module: rank for module, rank in rows.items() if not any(s.startswith(f"{module}.") for s in stacks)}
    rank = max(ranks.values(), default=0) or entries.r
    rank_of = {module: number for module, number in ranks.items() if number != rank}
    rank_of |= _by_pattern(entries.rank_pattern, list(stacks), f"{path}: rank_pattern", entries.r)
    if any(not 0 < number <= stacks.get(name, number) for name, number in rank_of.items()):
        raise MpuError(f"{path}: names ranks that its tensors do not have")
    plain = {name: value for name, value in config.items() if name in _LORA and not isinstance(value, list | dict)}
    return plain | {
        "modules_to_save": entries.modules_to_save, "target_parameters": entries.target_parameters,
        "r": rank, "target_modules": sorted(ranks), "rank_pattern": rank_of,
        "alpha_pattern": _by_pattern(entries.alpha_pattern, [*ranks, *stacks], f"{path}: alpha_pattern"),
        "trainable_token_indices": entries.trainable_token_indices,
        "init_lora_weights": start if changes_base else True, "inference_mode": True, "lora_dropout": 0.0,
    }  # fmt: skip


def _not_honoured(path: Path, what: str) -> MpuError:
    return MpuError(
        f"{path}: {what}: mpu does not know what that makes of the adapter",
        MERGE,
    )


PlainName = Annotated[str, Meta(pattern=r"\A[\w.]{1,200}\Z")]


class _AdapterEntries(Document):
    """The entries of an adapter's config that peft gets once they have this form."""

    r: int | None = None
    modules_to_save: list[PlainName] | None = None
    target_parameters: list[PlainName] | None = None
    rank_pattern: dict[str, int] | None = None  # by regular expression, as the next
    alpha_pattern: dict[str, int | float] | None = None
    # the tokens whose embeddings were trained apart: their numbers or, by name, those of several embeddings
    trainable_token_indices: list[int] | dict[PlainName, list[int]] | None = None


def _by_pattern(
    table: Mapping[str, Any] | None, modules: Sequence[str], where: str, default: int | None = None
) -> dict[str, Any]:
    """The numbers that a table of regular expressions gives to these modules, as peft reads it; without ``default``,
    only of those that it names."""
    table = table or {}
    outcomes = PROCESS.match(list(table), modules) if table else [(True, "")] * len(modules)
    if problem := next((value for worked, value in outcomes if not worked), None):
        raise MpuError(f"{where} is not a table of modules and numbers ({problem})")
    numbers = {name: table.get(pattern, default) for name, (_, pattern) in zip(modules, outcomes, strict=True)}
    return {name: number for name, number in numbers.items() if number is not None}


def _link_weights(checkpoint: Checkpoint, folder: Path) -> None:
    files = sorted({info.file for info in checkpoint.tensors.values()})
    names = {file: shard_name(i, len(files)) for i, file in enumerate(files, 1)}
    if len(files) == 1:
        names = {files[0]: WEIGHTS_NAME}
    else:
        weight_map = {tensor: names[info.file] for tensor, info in checkpoint.tensors.items()}
        _write(folder / INDEX_NAME, {"metadata": {"total_size": checkpoint.nbytes}, "weight_map": weight_map})
    for file, name in names.items():
        (folder / name).symlink_to(file.resolve())


def fields_of(config: Mapping[str, object]) -> set[str]:
    """The names that transformers' class of this ``model_type`` has for its settings, and those of its parts."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return set()
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    names: set[str] = set()
    classes: list[Any] = [CONFIG_MAPPING[kind]]
    for part in map(config.get, getattr(classes[0], "sub_configs", ())):  # which may name its class itself
        part_kind = part.get("model_type") if isinstance(part, dict) else None
        if isinstance(part_kind, str) and part_kind in CONFIG_MAPPING:
            classes.append(CONFIG_MAPPING[part_kind])
    for config_class in islice(classes, MOST_PARTS):  # and those of its parts, which are added
        if hasattr(config_class, "sub_configs"):
            names |= {field.name for field in dataclasses.fields(config_class)} - inherited
            names |= {*config_class.attribute_map, *config_class.attribute_map.values(), *config_class.sub_configs}
            classes += [getattr(part, "config_class", part) for part in config_class.sub_configs.values()]
    # scale_attn_weights is GPT-2's switch for dividing scores by the square root of a head's size.
    harmful = {name for name in names if any(sign in name for sign in _HARMFUL)} - {"scale_attn_weights"}
    return {name for name in names - harmful if not name.startswith("_")}


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif type(value) is int:
            yield name, value


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


# A delta on the model that it belongs to, so that a client can look at what it is about to return.


def open_delta(source: Model, path: Path) -> Checkpoint:
    """The delta in ``path``, a file or a sharded directory; MpuError if it is not one of ``source``."""
    checkpoint = open_checkpoint(path, links=False)
    delta = delta_manifest(checkpoint.metadata, path)
    copy = read_copy_manifest(source.folder, source.checkpoint.metadata)
    if copy and delta.inverted:
        raise MpuError(f"{path}: inverted, so it is a change of the base", "pass the base instead of a copy")
    if copy and (delta.origin is None or delta.origin.copy_id != copy.copy_id):
        raise MpuError(f"{path}: not a delta of {source.source}", "pass the copy that it was made from")
    return checkpoint


@torch.no_grad()
def add_delta(model: PreTrainedModel, source: Model, delta: Checkpoint) -> None:
    """Add an opened delta to the weights of ``model``, loaded from ``source``; the product of LoRA's factors."""
    unmatched = set(delta.tensors)
    for stored, view in in_memory(model, source.checkpoint.tensors).items():
        if stored in delta.tensors:
            change = delta.tensor(stored).to(view.device)
            unmatched -= {stored}
        elif stored + LEFT_FACTOR in delta.tensors and stored + RIGHT_FACTOR in delta.tensors:
            factors = (stored + LEFT_FACTOR, stored + RIGHT_FACTOR)
            left, right = (delta.tensor(name).to(view.device) for name in factors)
            change = left @ right
            unmatched -= {*factors}
        else:
            continue
        if change.shape != view.shape:
            raise MpuError(f"{delta.path}: {stored!r} has shape {list(change.shape)}, expected {list(view.shape)}")
        view.copy_((view.to(change.dtype) + change).to(view.dtype))
    if unmatched:
        raise MpuError(f"{delta.path}: contains {quoted_list(unmatched)}, which {source.source} does not have")


# LoRA adapters of peft's: which base they belong to, and a model with one added to its weights.


def is_adapter(folder: Path) -> bool:
    """Whether ``folder`` holds a peft adapter and no model's weights; a model's config may lie beside it."""
    weights = (WEIGHTS_NAME, INDEX_NAME)
    return (folder / ADAPTER_CONFIG).is_file() and not any((folder / name).exists() for name in weights)


def adapter_base(folder: Path) -> str:
    """The base model of the peft adapter in ``folder``.

    Its config, which may be another party's, names a folder beside it or a model in the Hub's cache: on its word, no
    other file is opened and nothing is requested.
    """
    path = folder / ADAPTER_CONFIG
    base = read_json_object(path, links=False).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise MpuError(f"{path}: base_model_name_or_path does not name the adapter's base model")
    beside = folder.resolve().parent / Path(base).name
    if base == beside.name and beside.is_dir():
        return str(beside)
    if snapshot := cached_snapshot(base):
        return str(snapshot)
    raise MpuError(f"{path}: names the base {short(base)}, which is not beside it", "name it with --base")


def with_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """``model`` with the adapter in ``folder`` added to its weights."""
    from peft import PeftModel, get_peft_model_state_dict

    with blaming(f"{folder}: peft cannot apply this adapter to the model"), staged_adapter(folder) as staged:
        names = {name.replace(".default", "") for name in open_checkpoint(staged / ADAPTER_WEIGHTS).tensors}
        for prefix, saved in WRAPPED.items():
            if prefix != PEFT and any(f".{prefix}" in name for name in names):
                raise MpuError(
                    f"{folder}: names in the adapter hold {prefix}, which no model's do", f"save it with {saved}"
                )
        adapted = PeftModel.from_pretrained(model, staged, local_files_only=True)
        if unused := names - get_peft_model_state_dict(adapted, save_embedding_layers=True).keys():
            raise MpuError(f"{folder}: the model has no place for this adapter's {quoted_list(unused)}")
        in_4_bits = any(map(is_quantized, model.parameters()))  # adding to those would round the adapter
        apart = in_4_bits or _is_on_tied(adapted)
        return adapted.get_base_model() if apart else adapted.merge_and_unload()


def remark_on_ties(model: torch.nn.Module) -> str | None:
    """The remark on a model with an adapter on one of two tied layers; None if it has none."""
    if not _is_on_tied(model):
        return None
    return (
        "the adapter changes one of two layers that share a matrix, such as lm_head and the embedding, and is kept "
        "apart from it; merged by peft and saved, it would change both"
    )


def _is_on_tied(adapted: torch.nn.Module) -> bool:
    """Whether an adapter changes a tensor that a layer without one has, too: merged, it would change that as well."""
    from peft.tuners.lora import LoraLayer

    # A parameter that two layers share has two names.
    name_counts = Counter(id(parameter) for _, parameter in adapted.named_parameters(remove_duplicate=False))
    for module in adapted.modules():
        if isinstance(module, LoraLayer):
            base_parameters = module.get_base_layer().parameters(recurse=False)
            if any(name_counts[id(parameter)] > 1 for parameter in base_parameters):
                return True
    return False
