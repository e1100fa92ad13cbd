"""Loading a model and its tokenizer with transformers: safetensors only, and no code from the folder."""

from __future__ import annotations

import gc
import os
import secrets
import warnings
import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast, parse_flag_from_env
from accelerate.utils.memory import clear_device_cache
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.errors import MpuError
from mpu_cli.files.folder import check_tokens
from mpu_cli.files.reader import Checkpoint, quoted_list
from mpu_cli.files.sandbox import PROCESS, LimitError, load_tokenizer
from mpu_cli.model.device import blaming, device_of, processes_of
from mpu_cli.model.network import build, concrete, network_of, parts_of, repeat_keys_where_faster
from mpu_cli.model.products import multiply_where_faster
from mpu_cli.model.source import VOCABULARY_FILES, Model
from mpu_cli.model.staging import staged_model
from mpu_cli.model.tensors import (
    has_separate_heads,
    in_4_bits,
    in_memory,
    is_quantized,
    is_rounding_of,
    settle,
    shape_of,
)
from mpu_cli.options.unlearning import Quantization
from mpu_cli.records.encode import Limits

# Loading a tokenizer without code from its folder, tried in a process with limits first.


def tokenizer_of(model: Model) -> PreTrainedTokenizerBase:
    """The tokenizer of ``model``, without code from its folder."""
    with staged_model(model) as folder, blaming(f"{model.source}: transformers cannot load its tokenizer"):
        return load_staged_tokenizer(folder)


def load_staged_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a staged folder, which is first read in a process with limits. Raises LimitError there.

    Vocabularies in older forms are converted there, and only what came of that is read here.
    """
    file = folder / "tokenizer.json"
    vocabularies = [folder / name for name in VOCABULARY_FILES if (folder / name).exists()]
    if vocabularies and not file.exists():
        worked, outcome = PROCESS.convert(folder)
        if not worked:
            raise LimitError(f"{vocabularies[0].name}: {outcome}")
        if outcome:
            file.write_text(outcome, encoding="utf-8")
    if file.exists():
        worked, outcome = PROCESS.load(file.read_text(encoding="utf-8"))
        if not worked:
            raise LimitError(f"{file.name}: {outcome}")
        check_tokens(*outcome)
        for path in vocabularies:
            path.unlink()
    return load_tokenizer(folder)


SAMPLED_ELEMENTS = 256  # elements of a tensor that are compared after loading
LARGEST_TABLES = 1 << 30  # bytes that a model may compute for itself, such as those of positions


WORTH_COLLECTING = 64 << 20  # bytes
_LOADED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # what was loaded and is still there
Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def releasing_memory(work: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """``work``, after which the memory of its models is free, on the device too.

    Training leaves reference cycles, which would keep a model alive while the next is loaded. Small models may stay:
    collecting takes up to a second.
    """

    @wraps(work)
    def wrapper(*arguments: Arguments.args, **named: Arguments.kwargs) -> Value:
        try:
            return work(*arguments, **named)
        finally:
            if sum(p.nbytes for model in _LOADED for p in model.parameters()) >= WORTH_COLLECTING:
                gc.collect()
            clear_device_cache()

    return wrapper


def skeleton(model: Model) -> PreTrainedModel:
    """``model`` as its config describes it, with tensors that have shapes but no data."""
    transformers.logging.set_verbosity_error()
    with staged_model(model) as folder, blaming(f"{model.source}: transformers cannot load it"):
        return _skeleton(folder, model.checkpoint)


def _skeleton(folder: Path, checkpoint: Checkpoint) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    model = _without_data(config)
    if has_separate_heads(model, checkpoint):
        _untie(config)
        model = _without_data(config)
    return model


def _without_data(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return build(config, **options)


def _untie(config: PretrainedConfig) -> None:
    for part in parts_of(config):
        if getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False


def _attention(config: PretrainedConfig, attention: str) -> str | dict[str, str]:
    """``attention``, or "eager" for a model without sdpa. Around a language model there may be others without such a
    kernel: then it is only set for the language model."""
    if (text := config.get_text_config()) is not config:
        return {name: attention for name in config.sub_configs if getattr(config, name) is text}
    network = concrete(config)
    return "eager" if attention == "sdpa" and network is not None and not network._supports_sdpa else attention


def _experts(config: PretrainedConfig, dtype: torch.dtype) -> str:
    """The way to compute a mixture's experts. Named, because config.json could name code to fetch."""
    network = concrete(config)
    grouped = network is not None and network._can_set_experts_implementation()
    return "grouped_mm" if grouped and dtype != torch.float64 else "eager"  # torch's grouped product knows no float64


def is_sharded() -> bool:
    """Whether accelerate's settings split the weights over processes."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def load_once_per_host() -> None:
    """Let ``load`` read weights in the first process of a host only, where the others receive theirs from it.

    Those get a model of memory that nothing was written to. Accelerate distributes the weights.
    """
    if is_sharded():
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"


def has_weights() -> bool:
    """Whether this process's model has weights, or receives them from the first process once it trains."""
    return not is_sharded() or PartialState().is_main_process


def load(
    source: Model, dtype: torch.dtype, device: str, attention: str = "sdpa", quantize: Quantization | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer of ``source``: safetensors only, no code from its folder, nothing random in training.

    With ``quantize``, linear layers are held in 4 bits. What was loaded is compared with the opened files. With
    dropout, or routers that draw experts, every copy would train with other random numbers and the noise would not
    cancel.
    """
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    repeat_keys_where_faster()
    multiply_where_faster()
    warnings.filterwarnings("ignore", category=FutureWarning)  # between libraries; nothing a user can act on
    torch_device = device_of(device)
    if torch_device == torch.device("cuda"):  # each process has one of its own
        torch_device = processes_of(torch_device).device
    with staged_model(source) as folder:
        PROCESS.start()
        with blaming(f"{source.source}: transformers cannot load it"):
            empty_model = _skeleton(folder, source.checkpoint)
            check_size(empty_model, source)
            quantization: dict[str, Any] = {}
            if quantize:
                quantization = {
                    "quantization_config": in_4_bits(empty_model, dtype),
                    "device_map": {"": str(torch_device)},
                }
            tied = bool(empty_model.all_tied_weights_keys)
            model, tokenizer, info = _load(folder, dtype, attention, quantization, tied=tied)
        if unmatched := {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}:
            raise MpuError(f"{source.source}: the weights do not match config.json ({quoted_list(unmatched)})")
        if has_weights():
            check_is(model, source.checkpoint)
    _LOADED.add(model)
    _without_jitter(model)
    if quantize:
        settle(model)
        return model, tokenizer
    if dtype == torch.float64:
        # transformers makes some routers in float32, whatever the dtype.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    if has_weights():
        model.to(torch_device)
    model.tie_weights()  # on some devices, torch makes new parameters of both
    if is_sharded():  # all processes get the first one's buffers, which no file holds
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(torch_device))
                broadcast(getattr(module, name), from_process=0)
    return model, tokenizer


def _load(
    folder: Path, dtype: torch.dtype, attention: str, quantization: dict[str, Any], *, tied: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]:
    tokenizer = load_staged_tokenizer(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if not tied:
        _untie(config)
    for part in parts_of(config):
        for name, rate in vars(part).items():
            if rate and name.endswith(("dropout", "pdrop", "dropout_prob", "layerdrop")):
                setattr(part, name, 0 * rate)  # an int where the field is one
    options = {
        "dtype": dtype, "attn_implementation": _attention(config, attention),
        "experts_implementation": _experts(config, dtype), **quantization,
    }  # fmt: skip
    if has_weights():
        model, info = network_of(config).from_pretrained(
            folder, config=config, use_safetensors=True, output_loading_info=True, local_files_only=True,
            trust_remote_code=False, **options,
        )  # fmt: skip
        return model, tokenizer, info
    model = _without_data(config, **options)
    model.to_empty(device="cpu")  # memory that the system gives no pages to until something is written
    return model, tokenizer, {"missing_keys": (), "mismatched_keys": ()}


def _without_jitter(model: PreTrainedModel) -> None:
    """Let modules that have noise for training, such as routers that draw experts, work as they do outside it."""
    for module in model.modules():
        if any(name.endswith("jitter_noise") for name in vars(module)):
            # Before each pass, because train() sets the flag of all modules again.
            module.register_forward_pre_hook(_leave_training)


def _leave_training(module: torch.nn.Module, _: object) -> None:
    module.training = False


def check_size(skeleton: PreTrainedModel, source: Model) -> None:
    """Raises MpuError if ``config.json`` describes more than the files hold, before memory is taken for it."""
    described = sum(parameter.numel() for parameter in skeleton.parameters())
    stored_weights = sum(info.elements for info in source.checkpoint.tensors.values())
    tables = sum(buffer.numel() * buffer.element_size() for buffer in skeleton.buffers())
    if described > stored_weights or tables > LARGEST_TABLES:
        what = f"{described:,} weights" if described > stored_weights else f"tables of {tables:,} bytes"
        raise MpuError(
            f"{source.config_path}: describes a model of {what}, but the files hold {stored_weights:,} weights",
            "the weights do not match config.json: get both again",
        )


def check_is(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Raises MpuError unless ``model`` holds the weights of ``checkpoint``: of each tensor, SAMPLED_ELEMENTS at places
    that nobody can foresee. What was trained or measured is then what was opened and fingerprinted."""
    draw = torch.Generator().manual_seed(secrets.randbits(63))  # only which elements are looked at
    for name, view in in_memory(model, checkpoint.tensors).items():
        file_tensor = checkpoint.tensor(name)
        if file_tensor.shape != shape_of(view):
            raise MpuError(f"{checkpoint.path}: {name!r} has another shape than the model that was loaded")
        if file_tensor.numel() and not _has_values_of(view, file_tensor, draw):
            raise MpuError(
                f"{checkpoint.path}: what was loaded as {name!r} differs from this file",
                "let nothing else write there, and try again",
            )


def _has_values_of(view: torch.Tensor, file_tensor: torch.Tensor, draw: torch.Generator) -> bool:
    """Whether a parameter or buffer has the values of the tensor ``file_tensor``, rounded to its own dtype."""
    if is_quantized(view):
        return is_rounding_of(view, file_tensor, draw)
    if not view.is_floating_point():
        return True
    places = torch.randint(file_tensor.numel(), (min(SAMPLED_ELEMENTS, file_tensor.numel()),), generator=draw)
    flat, loaded = file_tensor.reshape(-1)[places], view.detach().reshape(-1)[places.to(view.device)].cpu()
    return torch.equal(flat.to(view.dtype).nan_to_num(), loaded.nan_to_num())


# The limits on what a model can read.

STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional", "ntk_alpha")  # whatever is in a batch


def longest_input(model: PreTrainedModel) -> int | None:
    """The number of tokens that the model can read; None for rotary positions, which extend beyond the training
    length."""
    config = model.config.get_text_config()
    return None if getattr(config, "rope_parameters", None) else trained_length(model)


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of tokens that have an embedding; what the config says is another party's word."""
    return len(model.get_input_embeddings().weight)


def trained_length(model: PreTrainedModel) -> int | None:
    """The number of tokens that the model was trained on at once, as its config says; None if it does not."""
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def limits_of(model: PreTrainedModel, *, independent: bool = False) -> Limits:
    """The limits on what ``model`` can read; ``independent``: so that it reads a record alike whatever else is in its
    batch."""
    limits = [longest_input(model), longest_independent_input(model) if independent else None]
    longest = min((limit for limit in limits if limit is not None), default=None)
    return Limits(longest, trained_length(model), vocabulary_size(model))


def longest_independent_input(model: PreTrainedModel) -> int | None:
    """The most tokens up to which the model reads a record alike whatever else is in its batch; None for no limit.

    "longrope" and "dynamic" choose the frequencies of all positions by the longest input of a batch, and "dynamic"
    keeps them for later batches.
    """
    limits = []
    for module in model.get_decoder().modules():  # not of a tower around it, which reads no text
        kinds = getattr(module, "rope_type", None)
        settings = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        if not isinstance(kinds, dict):  # else by the type of layers
            kinds = {None: kinds}
        for layer_type, kind in kinds.items():
            table = settings.get(layer_type, {}) if layer_type else settings
            if kind == "longrope":
                limits.append(table["original_max_position_embeddings"])
            elif kind is not None and "dynamic" in kind:
                limits.append(module.original_max_seq_len)
            elif kind is not None and kind not in STATIC_ROPE:
                raise MpuError(f"rotary positions of kind {kind!r}: whether records of a batch share them is not known")
    return min(limits, default=None)
