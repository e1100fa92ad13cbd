"""Locating a model (a file, a directory, a sharded index or a Hub id), its config and the small files next to it."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpu_cli.boundary.documents import read_json_object
from mpu_cli.checkpoint.reader import ADAPTER_CONFIG, SHARD, Checkpoint, open_checkpoint
from mpu_cli.errors import MpuError

# Copied along with the weights. Nothing else is: a directory may contain files that must not be shared.
VOCABULARY_FILES = ("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "tekken.json")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", *VOCABULARY_FILES,
)  # fmt: skip
SIDE_FILES = (
    "generation_config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    *TOKENIZER_FILES,
)  # fmt: skip
# What a result, which is its owner's own, has of the files beside the base's weights.
FOR_PEOPLE = ("*.py", "*.md", "LICENSE*", "NOTICE*")
RESULT_FILES = (
    "*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.tiktoken", "*.bpe", "vocab.txt",
    "merges.txt", *FOR_PEOPLE,
)  # fmt: skip

LARGEST_JSON = 16 << 20  # bytes of a small file that mpu parses

# How transformers writes numbers in a config that JSON does not have: {"__float__": "Infinity"}.
_NOT_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_DEEPEST = 6  # levels of lists and tables in which it is looked for

# What programs put before every name of a model that they wrap, and how to save the model itself.
_WRAPPED = {
    "_orig_mod.": "model._orig_mod.save_pretrained(…), of what torch.compile made",
    "module.": "model.module.save_pretrained(…), of what trains in parallel",
    "base_model.model.": "model.merge_and_unload().save_pretrained(…), of what peft made",
}
HUB_PREFIX = "hub:"  # of a name that is looked for on the Hub and nowhere else
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z")


@dataclass(frozen=True)
class Model:
    """A checkpoint with its config; ``folder`` is where its tokenizer and other small files are.

    ``links``: whether its files may be links. Only those of a model of the user's own may.
    """

    source: str
    checkpoint: Checkpoint
    config: dict[str, object]
    config_path: Path
    folder: Path
    links: bool = True

    @property
    def address(self) -> str:
        """How to find the model again from any directory: its absolute path or its Hub id."""
        return str(Path(self.source).resolve()) if Path(self.source).exists() else self.source

    @property
    def public_name(self) -> str:
        """Its Hub id, or the name of its folder: what may leave this machine."""
        return self.folder.resolve().name if Path(self.source).exists() else self.source.removeprefix(HUB_PREFIX)

    @property
    def side_files(self) -> list[Path]:
        return [self.folder / name for name in SIDE_FILES if os.path.lexists(self.folder / name)]


def cached_snapshot(source: str) -> Path | None:
    """Where a Hub id's files lie in the cache, None if they do not; nothing is asked for."""
    name = source.removeprefix(HUB_PREFIX)
    if not _HUB_ID.fullmatch(name):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def locate(source: str) -> Path:
    """The local path of ``source``; a Hub id is downloaded (safetensors and small files only).

    What looks like a mistyped path, because its first part is a folder here, is not looked for on the Hub: private
    names stay on this machine. ``hub:OWNER/NAME`` is always a Hub id.
    """
    path = Path(source)
    if path.exists():
        return path
    name = source.removeprefix(HUB_PREFIX)
    if not _HUB_ID.match(name) or path.suffix in (".safetensors", ".json", ".bin"):
        raise MpuError(f"{source}: no such file or directory")
    if name == source and Path(path.parts[0]).is_dir():
        raise MpuError(f"{source}: no such file or directory", f"for a model of the Hub, write {HUB_PREFIX}{source}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=["*.safetensors", "*.safetensors.index.json", *RESULT_FILES, *SIDE_FILES]
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MpuError(f"{source}: not a local path, and the download from the Hub failed ({reason})") from error


def open_model(source: str, config: Path | None = None, *, links: bool = True) -> Model:
    """Open the weights at ``source``, with ``config`` or else the ``config.json`` next to them.

    Without ``links``, for what another party made, nothing inside its folder may be a link. Raises MpuError if either
    is missing or damaged.
    """
    path = locate(source)
    folder = path if path.is_dir() else path.parent
    if path.is_file() and (shard := SHARD.search(path.name)) and int(shard["count"]) > 1:
        raise MpuError(f"{path}: one of {int(shard['count'])} shards of a model", f"pass the folder {folder}")
    config_path = config or folder / "config.json"
    checkpoint = open_checkpoint(path, links=links)
    if not os.path.lexists(config_path):
        if '"mpu-delta"' in checkpoint.metadata.get("mpu", ""):
            raise MpuError(f"{path}: a delta, not a model", "apply it to its base with `mpu aggregate`")
        raise MpuError(
            f"{config_path}: no such file",
            "put the model's config.json next to its weights (publish, verify, invert "
            "and aggregate also take --model-config)",
        )
    if path.is_dir() and os.path.lexists(folder / ADAPTER_CONFIG):
        raise MpuError(
            f"{folder}: holds the weights of a model and a peft adapter, which transformers would add to them",
            f"merge them with peft (merge_and_unload), or pass {checkpoint.path} for the model without the adapter",
        )
    _check_unwrapped(checkpoint)
    config_links = links or config is not None
    entries = with_numbers(read_json_object(config_path, links=config_links))
    return Model(source, checkpoint, entries, config_path, folder, links=links)


def _check_unwrapped(checkpoint: Checkpoint) -> None:
    """Raises MpuError if every name begins as those of a wrapped model do: transformers would find none of them."""
    for prefix, saved in _WRAPPED.items():
        if checkpoint.tensors and all(name.startswith(prefix) for name in checkpoint.tensors):
            raise MpuError(
                f"{checkpoint.path}: the name of every tensor begins with {prefix}, which no model's does",
                f"save it with {saved}",
            )


def with_numbers(value: Any, depth: int = 0) -> Any:
    """``value``, read from JSON, with numbers in place of transformers' tables for them."""
    if depth > _DEEPEST or not isinstance(value, dict | list):
        return value
    if isinstance(value, list):
        return [with_numbers(item, depth + 1) for item in value]
    if value.keys() == {"__float__"} and isinstance(tag := value["__float__"], str) and tag in _NOT_FINITE:
        return _NOT_FINITE[tag]
    return {name: with_numbers(inner, depth + 1) for name, inner in value.items()}
