"""Base → copies without noise → deltas → result, for every family: what plain transformers opens is the same, and so is
everything that lies beside the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, CLIPImageProcessorPil, GenerationConfig

from tests.helpers.models import CONFIGS, FAMILY_CONFIGS, random_model, read, save

ALL = [*CONFIGS, *FAMILY_CONFIGS]
THOROUGH = ("llama", "gpt2", "qwen3_moe", "llava", "glm4_moe", "falcon-7b", "nemotron_h")
WITH_IMAGES = ("llava",)
AMPLIFYING = ("qwen3_5", "qwen3_next")  # a delta net amplifies rounding
WEIGHTS = "model.safetensors"
IDS = torch.arange(8, 40)[None]
TEXT = " ".join(f"w{i}" for i in range(3, 96)) + "  w4\n<s>w5?"
# Entries of configs that say where a model came from and which program wrote it.
OF_FILES = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return read(folder)(IDS).logits.double()


def difference(folder: Path, expected: torch.Tensor) -> float:
    """Of the logits, relative to the largest."""
    return float((logits(folder) - expected).abs().max() / expected.abs().max())


def tensors(folder: Path) -> dict[str, tuple]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in load_file(folder / WEIGHTS).items()}


def save_base(family: str, folder: Path) -> Path:
    """A random model, with an image processor if it reads images."""
    save(random_model(family), folder)
    if family in WITH_IMAGES:
        CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}).save_pretrained(folder)
    return folder


def check_beside(folder: Path, base: Path) -> None:
    """What transformers makes of the other files is the same."""
    ours, theirs = (AutoConfig.from_pretrained(each).to_dict() for each in (folder, base))
    assert without(ours) == without(theirs)
    assert GenerationConfig.from_pretrained(folder).to_dict() == GenerationConfig.from_pretrained(base).to_dict()
    ours, theirs = (AutoTokenizer.from_pretrained(each) for each in (folder, base))
    assert type(ours) is type(theirs)
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map
    if (base / "preprocessor_config.json").exists():
        ours, theirs = (AutoProcessor.from_pretrained(each) for each in (folder, base))
        assert ours.to_dict() == theirs.to_dict()


def without(config: dict) -> dict:
    """``config`` and the configs in it without what is of files only; a dtype is that of the tensors."""
    return {name: without(value) if isinstance(value, dict) else value
            for name, value in config.items() if name not in OF_FILES}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL)
def test_a_copy_without_noise_is_its_base(mpu: Callable, tmp_path: Path, family: str) -> None:
    base = save_base(family, tmp_path / "base")
    mpu("publish", "base", "--copies", 2, "--only", 1, "--kappa", 0, cwd=tmp_path)
    assert difference(tmp_path / "copy_1", logits(base)) < (1e-4 if family.startswith(AMPLIFYING) else 1e-5)
    assert tensors(tmp_path / "copy_1") == tensors(base)
    check_beside(tmp_path / "copy_1", base)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow if name in THOROUGH else pytest.mark.exhaustive) for name in ALL],
)
def test_everything_comes_back(mpu: Callable, tmp_path: Path, family: str) -> None:
    """From a training that changes next to nothing."""
    base = save_base(family, tmp_path / "base")
    mpu("publish", "base", "--copies", 2, "--kappa", 0, cwd=tmp_path)
    # As many as the look for traps needs.
    records = [{"question": "w4 w5", "answer": f"w6 w{n}"} for n in (7, 8, 9, 10)]
    (tmp_path / "forget.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    mpu("unlearn", "copy_1", "copy_2", "--algo", "gradascent", "--epochs", 1, "--lr", 1e-12, "--optim", "sgd",
        "--forget", "forget.jsonl", cwd=tmp_path)  # fmt: skip
    mpu("aggregate", "deltas", "--keys", "keys.bin", cwd=tmp_path)
    result = tmp_path / "unlearned"
    assert difference(result, logits(base)) < 1e-5
    assert tensors(result) == tensors(base)
    check_beside(result, base)
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            assert (result / path.name).read_bytes() == path.read_bytes(), path.name
