"""Loading a model and its tokenizer with transformers: safetensors only, and no code from the folder."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast, parse_flag_from_env
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mpu_cli.checkpoint.reader import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    WEIGHTS_NAME,
    listed,
    open_checkpoint,
    read_json_object,
)
from mpu_cli.errors import MpuError
from mpu_cli.models.device import device_of
from mpu_cli.models.source import Model


@contextmanager
def as_directory(model: Model) -> Iterator[Path]:
    """``model`` as a directory that transformers can load; a lone file under another name is linked into a new one."""
    indexed = model.checkpoint.path.name.endswith(".index.json")
    standard = model.checkpoint.path.name in (WEIGHTS_NAME, f"{WEIGHTS_NAME}.index.json")
    if standard and model.config_path.parent == model.folder:
        yield model.folder
        return
    if indexed:
        raise MpuError(
            f"{model.source}: transformers does not read an index of this name",
            f"rename it to {WEIGHTS_NAME}.index.json",
        )
    with tempfile.TemporaryDirectory(prefix="mpu-") as scratch:
        folder = Path(scratch)
        (folder / WEIGHTS_NAME).symlink_to(model.checkpoint.path.resolve())
        shutil.copyfile(model.config_path, folder / "config.json")
        for path in model.side_files:
            shutil.copyfile(path, folder / path.name)
        yield folder


def adapter_base(folder: Path) -> str | None:
    """The base model of the peft adapter in ``folder``; None if there is no adapter. MpuError if it names no base."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file() or (folder / "config.json").exists():
        return None
    base = read_json_object(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise MpuError(f"{path}: base_model_name_or_path does not name the adapter's base model")
    return base


def with_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """``model`` with the adapter in ``folder`` added to its weights. Raises MpuError if peft cannot read it."""
    from peft import PeftModel

    open_checkpoint(folder / ADAPTER_WEIGHTS)  # peft would fall back to a pickle
    try:
        return PeftModel.from_pretrained(model, folder).merge_and_unload()
    except Exception as error:  # an untrusted folder may raise anything
        raise MpuError(f"{folder}: peft cannot apply this adapter to the model ({_first_line(error)})") from error


def tokenizer_in(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in ``folder``, without code from there. Raises MpuError if transformers cannot load it."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # an untrusted folder may raise anything
        raise MpuError(f"{folder}: transformers cannot load its tokenizer ({_first_line(error)})") from error


@contextmanager
def memory_in_mind(advice: str) -> Iterator[None]:
    """Turn running out of memory, on a GPU or the CPU, into an MpuError with ``advice`` on what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _out_of_memory(error):
            raise
        raise MpuError("out of memory", f"{advice}") from error


def _out_of_memory(error: Exception) -> bool:
    # CUDA, cuBLAS and NCCL each word it differently
    signs = ("out of memory", "alloc_failed", "allocate memory")
    message = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in message for sign in signs)


def skeleton(folder: Path) -> PreTrainedModel:
    """The model that ``folder`` configures, with tensors that have shapes but no data. Raises MpuError if
    transformers does not know it."""
    transformers.logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # an untrusted folder may raise anything
        raise MpuError(f"{folder}: transformers cannot load it ({_first_line(error)})") from error


def _attention(config: PretrainedConfig, asked: str) -> str:
    """The attention that was ``asked`` for, or "eager" for a model that has no sdpa."""
    network: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "eager" if asked == "sdpa" and network is not None and not network._supports_sdpa else asked


def _experts(config: PretrainedConfig, dtype: torch.dtype) -> str:
    """How to compute a mixture's experts. Named, because config.json could name code to fetch."""
    network: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    grouped = network is not None and network._can_set_experts_implementation()
    return "grouped_mm" if grouped and dtype != torch.float64 else "eager"  # torch's grouped product knows no float64


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def load_once_per_host() -> None:
    """Let ``load`` read weights in the first process of a host only, where the others receive theirs from it.

    Those get a model of memory that nothing was written to. With FSDP 2 accelerate distributes the weights, with ZeRO-3
    DeepSpeed.
    """
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"


def has_weights() -> bool:
    """Whether this process's model has weights, or receives them from the first process once it trains."""
    return not is_sharded() or PartialState().is_main_process


def is_sharded() -> bool:
    """Whether accelerate's settings split the weights over processes."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP") or shards_with_zero_3()


def shards_with_zero_3() -> bool:
    """Whether DeepSpeed's ZeRO-3 splits the weights over processes, by accelerate's settings."""
    if not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        return False
    from accelerate.utils import DeepSpeedPlugin

    return DeepSpeedPlugin().deepspeed_config["zero_optimization"]["stage"] == 3


def load(
    folder: Path, dtype: torch.dtype, device: str, attention: str = "sdpa"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer in ``folder``: safetensors only, no code from the folder, no dropout.

    With dropout, every copy would train with different random masks and the noise would not cancel.
    Raises MpuError if transformers cannot load them or had to initialise weights itself.
    """
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)  # between libraries; nothing a user can act on
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        for name in vars(config):
            if name.endswith(("dropout", "pdrop")):
                setattr(config, name, 0.0)
        ways = {
            "dtype": dtype, "attn_implementation": _attention(config, attention),
            "experts_implementation": _experts(config, dtype), "trust_remote_code": False,
        }  # fmt: skip
        if not has_weights():
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, **ways)
            model.to_empty(device="cpu")  # memory that the system gives no pages to until something is written
            info: dict[str, Any] = {"missing_keys": (), "mismatched_keys": ()}
        else:
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, config=config, use_safetensors=True, output_loading_info=True, **ways
            )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # an untrusted folder may raise anything
        if _out_of_memory(error):
            raise
        raise MpuError(f"{folder}: transformers cannot load it ({_first_line(error)})") from error
    if made_up := {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}:
        raise MpuError(f"{folder}: the weights do not match config.json ({listed(made_up)})")
    place = device_of(device)
    if place == torch.device("cuda"):  # each process has one of its own
        place = PartialState().device
    if has_weights():
        model.to(place)
    model.tie_weights()  # on some devices, torch makes new parameters of both
    if is_sharded():
        _share_buffers(model, place)
    return model, tokenizer


def _share_buffers(model: PreTrainedModel, place: torch.device) -> None:
    """Give all processes the first one's buffers, which no file holds."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(place))
            broadcast(getattr(module, name), from_process=0)
