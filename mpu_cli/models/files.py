"""The files of a model directory besides its weights, and what its weight files will hold."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from mpu_cli.architectures.layout import Layout
from mpu_cli.boundary.cleaning import JSON_FILES, clean_config
from mpu_cli.boundary.files import read_bounded
from mpu_cli.checkpoint.dtypes import WORD
from mpu_cli.checkpoint.reader import Checkpoint, read_json_object
from mpu_cli.checkpoint.writer import TensorSpecs
from mpu_cli.models.source import LARGEST_JSON, LARGEST_TOKENIZER, Model


def model_specs(checkpoint: Checkpoint, layout: Layout, dtype: str | None) -> TensorSpecs:
    """The contents of a model made from ``checkpoint``: its tensors in ``dtype`` (None: their own), constants
    unchanged, and no second copy of a tied head."""
    return {
        name: (dtype if dtype and not layout.tensors[name].constant else info.dtype, info.shape)
        for name, info in checkpoint.tensors.items()
        if name != layout.alias
    }


def write_small_files(model: Model, folder: Path, specs: TensorSpecs) -> None:
    """Put the config, with the dtype of ``specs``, and the tokenizer files of ``model`` into ``folder``.

    JSON leaves with the names that are known to be harmless, and without words that could be paths.
    """
    dtypes = Counter(dtype for dtype, _ in specs.values())
    word = WORD[max((d for d in dtypes if d in WORD), key=dtypes.__getitem__)]
    write_json(folder / "config.json", {**clean_config(model.config), "dtype": word, "torch_dtype": word})
    for path in model.side_files:
        if clean := JSON_FILES.get(path.name):
            write_json(folder / path.name, clean(read_json_object(path, LARGEST_JSON, links=model.links)))
        else:
            (folder / path.name).write_bytes(read_bounded(path, LARGEST_TOKENIZER, links=model.links))


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
