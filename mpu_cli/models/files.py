"""The files of a model directory besides its weights, and what its weight files will hold."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePath

from mpu_cli.architectures.layout import Layout
from mpu_cli.boundary.cleaning import JSON_FILES, clean_config, left_out_of
from mpu_cli.boundary.documents import read_json_object
from mpu_cli.boundary.files import LARGEST_TOKENIZER, read_bounded
from mpu_cli.checkpoint.dtypes import OPTION, WORD
from mpu_cli.checkpoint.reader import ADAPTER_CONFIG, PICKLES, Checkpoint
from mpu_cli.checkpoint.writer import TensorSpecs
from mpu_cli.manifest import MANIFEST_NAME
from mpu_cli.models.source import FOR_PEOPLE, LARGEST_JSON, RESULT_FILES, Model

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
    for name in _beside(model):
        path = model.folder / name
        if _is_one_of(name, RESULT_FILES) and _is_public(path):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(read_bounded(path, LARGEST_TOKENIZER, links=model.links))
        else:
            behind.append(str(name))
    return behind


def not_in_copies(model: Model) -> list[str]:
    """What copies do not get of the files beside the weights of ``model`` that transformers may read: names of files,
    and entries as FILE: ENTRY."""
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
    names = (path.relative_to(model.folder) for pattern in ("*", "*/*.jinja") for path in model.folder.glob(pattern))
    ignored = (*_WEIGHTS, *_REPLACED, ".*")
    return sorted(name for name in names if (model.folder / name).is_file() and not _is_one_of(name, ignored))


def _is_one_of(name: PurePath, patterns: Iterable[str]) -> bool:
    return any(len(name.parts) == len(PurePath(pattern).parts) and name.match(pattern) for pattern in patterns)


def _is_public(path: Path) -> bool:
    return path.stat().st_size <= LARGEST_TOKENIZER and _SECRET not in path.read_bytes()


def _word_of_most(specs: TensorSpecs) -> str:
    """The dtype in which most of the weights are, as a config calls it."""
    weights: Counter[str] = Counter()
    for dtype, shape in specs.values():
        weights[dtype] += math.prod(shape)
    return WORD[max((dtype for dtype in weights if dtype in WORD), key=weights.__getitem__)]


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
