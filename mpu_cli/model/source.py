"""Locating a model (a file, a directory, a sharded index or a Hub id), its config and the small files next to it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from mpu_cli.errors import MpuError, first_line
from mpu_cli.files.boundary import LARGEST_TOKENIZER, read_bounded, read_json_object
from mpu_cli.files.folder import JSON_FILES, clean_config, left_out_of
from mpu_cli.files.manifest import MANIFEST_NAME
from mpu_cli.files.reader import ADAPTER_CONFIG, OPTION, PICKLES, SHARD, WORD, Checkpoint, open_checkpoint
from mpu_cli.files.visible import visible
from mpu_cli.files.writer import TensorSpecs
from mpu_cli.model.layout import Layout, layout_of

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
# The files beside the base's weights that go into a result, which is its owner's own.
FOR_PEOPLE = ("*.py", "*.md", "LICENSE*", "NOTICE*")
RESULT_FILES = (
    "*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.tiktoken", "*.bpe", "vocab.txt",
    "merges.txt", *FOR_PEOPLE,
)  # fmt: skip

LARGEST_JSON = 16 << 20  # bytes of a small file that mpu parses

# The numbers that JSON does not have, as transformers writes them in a config: {"__float__": "Infinity"}.
_NOT_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_DEEPEST = 6  # levels of lists and tables in which it is looked for

PEFT = "base_model.model."
# Prefixes that programs put before every name of a model that they wrap, and how to save the model itself.
WRAPPED = {
    "_orig_mod.": "model._orig_mod.save_pretrained(…), of what torch.compile made",
    "module.": "model.module.save_pretrained(…), of what trains in parallel",
    PEFT: "model.merge_and_unload().save_pretrained(…), of what peft made",
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
        """The address of the model from any directory: its absolute path or its Hub id."""
        return str(Path(self.source).resolve()) if Path(self.source).exists() else self.source

    @property
    def public_name(self) -> str:
        """Its Hub id, or the name of its folder: what may leave this machine."""
        return self.folder.resolve().name if Path(self.source).exists() else self.source.removeprefix(HUB_PREFIX)

    @cached_property
    def layout(self) -> Layout:
        """The layout of its tensors."""
        return layout_of(self.checkpoint.tensors, self.config, self.source)

    @property
    def side_files(self) -> list[Path]:
        return [self.folder / name for name in SIDE_FILES if os.path.lexists(self.folder / name)]

    @property
    def reading_context(self) -> str:
        """SHA-256 of its config, tokenizer and template, which decide how records are read, in hexadecimal. The dtype
        of the weights does not: a round may store them in another one."""
        small = {
            path.name: hashlib.sha256(read_bounded(path, LARGEST_TOKENIZER, links=self.links)).hexdigest()
            for path in self.side_files
        }
        read = {name: value for name, value in self.config.items() if name not in DTYPE_ENTRIES}
        facts = json.dumps([read, small], sort_keys=True, default=str)
        return hashlib.sha256(facts.encode()).hexdigest()


def cached_snapshot(source: str) -> Path | None:
    """The folder of a Hub id's files in the cache, None if they are not there; nothing is requested."""
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
        raise MpuError(f"{source}: no such file or directory", _similar(path))
    if name == source and Path(path.parts[0]).is_dir():
        hint = _similar(path) or f"for a model of the Hub, write {HUB_PREFIX}{source}"
        raise MpuError(f"{source}: no such file or directory", hint)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.safetensors", "*.safetensors.index.json", *RESULT_FILES, *SIDE_FILES]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise MpuError(
            f"{source}: not a local path, and the download from the Hub failed ({first_line(error)})"
        ) from error


def _similar(path: Path) -> str | None:
    """A hint at what in the folder of ``path``, which does not exist, is called nearly so."""
    names = [entry.name for entry in visible(path.parent.iterdir())] if path.parent.is_dir() else []
    close = get_close_matches(path.name, names, 1)
    return f"did you mean {path.with_name(close[0])}?" if close else None


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
            raise MpuError(
                f"{path}: a delta, not a model",
                "the server applies it with `mpu aggregate`; `mpu ask COPY QUESTION --delta FILE` tries it on its copy",
            )
        raise MpuError(f"{config_path}: no such file", "put the model's config.json next to its weights")
    if path.is_dir() and os.path.lexists(folder / ADAPTER_CONFIG):
        raise MpuError(
            f"{folder}: holds the weights of a model and a peft adapter, which transformers would add to them",
            f"merge them with peft (merge_and_unload), or pass {checkpoint.path} for the model without the adapter",
        )
    for prefix, saved in WRAPPED.items():  # transformers would find none of these tensors
        if checkpoint.tensors and all(name.startswith(prefix) for name in checkpoint.tensors):
            raise MpuError(
                f"{checkpoint.path}: the name of every tensor begins with {prefix}, which no model's does",
                f"save it with {saved}",
            )
    # The path that the user named may be a link in any case.
    config_links = links or config is not None
    entries = with_numbers(read_json_object(config_path, links=config_links))
    return Model(source, checkpoint, entries, config_path, folder, links=links)


def with_numbers(value: Any, depth: int = 0) -> Any:
    """``value``, read from JSON, with numbers in place of transformers' tables for them."""
    if depth > _DEEPEST or not isinstance(value, dict | list):
        return value
    if isinstance(value, list):
        return [with_numbers(item, depth + 1) for item in value]
    if value.keys() == {"__float__"} and isinstance(tag := value["__float__"], str) and tag in _NOT_FINITE:
        return _NOT_FINITE[tag]
    return {name: with_numbers(inner, depth + 1) for name, inner in value.items()}


# The files of a model directory besides its weights, and what its weight files will hold.

DTYPE_ENTRIES = ("dtype", "torch_dtype")  # of a config, by newer and older names
_WEIGHTS = ("*.safetensors", "*.index.json", "*.gguf", *(f"*{ending}" for ending in PICKLES))
_REPLACED = ("config.json", MANIFEST_NAME, ADAPTER_CONFIG)  # the adapter is not in the weights that a result has
_SECRET = b"AGE-SECRET-KEY-"


def model_specs(checkpoint: Checkpoint, layout: Layout, dtype: str | None) -> TensorSpecs:
    """The contents of a model made from ``checkpoint``: its tensors in ``dtype`` (None: their own), constants
    unchanged, and no second copy of a tied head."""
    return {
        name: (dtype if dtype and not layout.tensors[name].constant else info.dtype, info.shape)
        for name, info in checkpoint.tensors.items()
        if name != layout.alias
    }


def write_small_files(model: Model, folder: Path, specs: TensorSpecs, dtype: str | None) -> None:
    """Put the config and the tokenizer files of ``model`` into ``folder``, for a copy: with ``dtype``, or that of the
    model's config or else of most weights in ``specs``.

    JSON leaves with the names that are known to be harmless, and without words that could be paths.
    """
    words = [str(model.config.get(name)) for name in DTYPE_ENTRIES]
    word = WORD[dtype] if dtype else next((word for word in words if word in OPTION), _word_of_most(specs))
    write_json(folder / "config.json", {**clean_config(model.config), **dict.fromkeys(DTYPE_ENTRIES, word)})
    for path in model.side_files:
        if clean := JSON_FILES.get(path.name):
            write_json(folder / path.name, clean(read_json_object(path, LARGEST_JSON, links=model.links)))
        else:
            (folder / path.name).write_bytes(read_bounded(path, LARGEST_TOKENIZER, links=model.links))


def carry_small_files(model: Model, folder: Path, dtype: str | None = None) -> list[str]:
    """Put what lies beside the weights of ``model`` into ``folder``, unchanged, for a result, which is its owner's own.

    With ``dtype``, the config names that one. Returns the names of what is left behind: other kinds of files, large
    ones, and identities, which are secret.
    """
    config = read_bounded(model.config_path, LARGEST_JSON)
    if dtype:
        entries = json.loads(config)
        names = [name for name in DTYPE_ENTRIES if name in entries] or DTYPE_ENTRIES
        config = json.dumps({**entries, **dict.fromkeys(names, WORD[dtype])}, indent=2).encode() + b"\n"
    (folder / "config.json").write_bytes(config)
    behind = []
    for name in _beside(model):
        path = model.folder / name
        small = path.stat().st_size <= LARGEST_TOKENIZER
        if _is_one_of(name, RESULT_FILES) and small and _SECRET not in path.read_bytes():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(read_bounded(path, LARGEST_TOKENIZER, links=model.links))
        else:
            behind.append(str(name))
    return behind


def not_in_copies(model: Model) -> list[str]:
    """The contents of the files beside the weights of ``model`` that transformers may read and copies do not get: names
    of files, and entries as FILE: ENTRY."""
    lost = []
    for name in _beside(model):
        path = model.folder / name
        if path in model.side_files and name.name in JSON_FILES:
            table = read_json_object(path, LARGEST_JSON, links=model.links)
            lost += [f"{name}: {entry}" for entry in left_out_of(name.name, table)]
        elif path not in model.side_files and _is_one_of(name, RESULT_FILES) and not _is_one_of(name, FOR_PEOPLE):
            lost.append(str(name))
    return lost


def _beside(model: Model) -> list[PurePath]:
    """The files in the folder of ``model`` that are neither weights nor written anew for what is made of it."""
    paths = visible([*model.folder.glob("*"), *model.folder.glob("*/*.jinja")])
    names = [path.relative_to(model.folder) for path in paths if path.is_file()]
    ignored = (*_WEIGHTS, *_REPLACED)
    return sorted(name for name in names if not _is_one_of(name, ignored))


def _is_one_of(name: PurePath, patterns: Iterable[str]) -> bool:
    return any(len(name.parts) == len(PurePath(pattern).parts) and name.match(pattern) for pattern in patterns)


def _word_of_most(specs: TensorSpecs) -> str:
    """The dtype in which most of the weights are, as a config calls it."""
    weights: Counter[str] = Counter()
    for dtype, shape in specs.values():
        weights[dtype] += math.prod(shape)
    return WORD[max((dtype for dtype in weights if dtype in WORD), key=weights.__getitem__)]


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
