"""The files of a model directory besides its weights, and what its weight files will hold."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path, PurePath

from mpu_cli.architectures.layout import Layout
from mpu_cli.boundary.cleaning import JSON_FILES, clean_config
from mpu_cli.boundary.files import read_bounded
from mpu_cli.checkpoint.dtypes import OPTION, WORD
from mpu_cli.checkpoint.reader import ADAPTER_CONFIG, PICKLES, Checkpoint, read_json_object
from mpu_cli.checkpoint.writer import TensorSpecs
from mpu_cli.manifest import MANIFEST_NAME
from mpu_cli.models.source import LARGEST_JSON, LARGEST_TOKENIZER, RESULT_FILES, Model

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


def write_small_files(model: Model, folder: Path, specs: TensorSpecs, dtype: str | None = None) -> None:
    """Put the config and the tokenizer files of ``model`` into ``folder``, for a copy: with ``dtype``, or that of the
    model's config or else of most weights in ``specs``.

    JSON leaves with the names that are known to be harmless, and without words that could be paths.
    """
    words = [model.config.get(name) for name in DTYPE_ENTRIES]
    word = WORD[dtype] if dtype else next((word for word in words if word in OPTION), _word_of_most(specs))
    write_json(folder / "config.json", {**clean_config(model.config), **dict.fromkeys(DTYPE_ENTRIES, word)})
    for path in model.side_files:
        if clean := JSON_FILES.get(path.name):
            write_json(folder / path.name, clean(read_json_object(path, LARGEST_JSON, links=model.links)))
        else:
            (folder / path.name).write_bytes(read_bounded(path, LARGEST_TOKENIZER, links=model.links))


def carry_small_files(model: Model, folder: Path, dtype: str | None = None) -> list[str]:
    """Put what lies beside the weights of ``model`` into ``folder``, unchanged, for a result, which is its owner's own.

    Only the config's dtype is another if ``dtype`` says so. Returns the names of what is left behind: other kinds of
    files, large ones, and identities, which are secret.
    """
    config = read_bounded(model.config_path, LARGEST_JSON)
    if dtype:
        entries = json.loads(config)
        names = [name for name in DTYPE_ENTRIES if name in entries] or DTYPE_ENTRIES
        config = json.dumps({**entries, **dict.fromkeys(names, WORD[dtype])}, indent=2).encode() + b"\n"
    (folder / "config.json").write_bytes(config)
    behind = []
    for path in sorted(model.folder.glob("*")) + sorted(model.folder.glob("*/*.jinja")):
        name = path.relative_to(model.folder)
        if any(name.match(pattern) for pattern in (*_WEIGHTS, *_REPLACED, ".*")):
            continue
        if any(_matches(name, pattern) for pattern in RESULT_FILES) and _is_public(path):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(read_bounded(path, LARGEST_TOKENIZER, links=model.links))
        elif path.is_file():
            behind.append(str(name))
    return behind


def _matches(name: PurePath, pattern: str) -> bool:
    return len(name.parts) == len(PurePath(pattern).parts) and name.match(pattern)


def _is_public(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= LARGEST_TOKENIZER and _SECRET not in path.read_bytes()


def _word_of_most(specs: TensorSpecs) -> str:
    """The dtype in which most of the weights are, as a config calls it."""
    weights: Counter[str] = Counter()
    for dtype, shape in specs.values():
        weights[dtype] += math.prod(shape)
    return WORD[max((dtype for dtype in weights if dtype in WORD), key=weights.__getitem__)]


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
