"""Embeddings and output heads that are one tensor, or are said to be: what plain transformers makes of files and config
is what every command sees."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mpu_cli.model.layout import Architecture, supported_family
from mpu_cli.model.network import build
from mpu_cli.model.wrappers import WRAPPERS
from tests.helpers.attacks import edit
from tests.helpers.models import FAMILY_CONFIGS, load, random_model, save

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
IDS = torch.arange(3, 19)[None]


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(IDS).logits


@pytest.fixture
def two_heads(root: Path) -> Path:
    """A base whose config ties a head that differs from the embedding; transformers leaves them apart."""
    save(random_model("llama", tie_word_embeddings=False), root / "base")
    edit(root / "base/config.json", tie_word_embeddings=True)
    return root


def test_a_head_that_differs_is_trained_and_measured_apart(mpu: Callable, two_heads: Path) -> None:
    base = two_heads / "base"
    model, _ = load(base, torch.float32, "cpu")
    torch.testing.assert_close(model.eval()(IDS).logits, logits(base))
    save(random_model("llama", tie_word_embeddings=False), two_heads / "untied")
    for name in ("base", "untied"):
        mpu("unlearn", name, "--algo", "gradascent", "--epochs", 1, "--lr", 0.01, "--optim", "sgd",
            "--train-embeddings", "--forget", "forget.jsonl", "--out", f"{name}.safetensors",
            cwd=two_heads)  # fmt: skip
    deltas = [load_file(two_heads / f"{name}.safetensors") for name in ("base", "untied")]
    assert deltas[0].keys() == deltas[1].keys() >= {HEAD, EMBEDDING}
    assert all(torch.equal(delta, deltas[1][name]) for name, delta in deltas[0].items())


def test_finetune_keeps_a_head_that_differs(mpu: Callable, two_heads: Path) -> None:
    mpu("finetune", "base", "--data", "forget.jsonl", "--epochs", 1, "--lr", 1e-12, cwd=two_heads)
    torch.testing.assert_close(logits(two_heads / "finetuned"), logits(two_heads / "base"))


def test_an_embedding_by_the_name_of_its_head(mpu: Callable, root: Path) -> None:
    """Files of a tied model that hold only the head; transformers reads the embedding from it."""
    base = root / "base"
    tensors = load_file(base / "model.safetensors")
    tensors[HEAD] = tensors.pop(EMBEDDING)
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    mpu("publish", "base", "--kappa", 0, "--copies", 2, cwd=root)
    assert load_file(root / "copy_1/model.safetensors").keys() == tensors.keys()
    torch.testing.assert_close(logits(root / "copy_1"), logits(base), rtol=1e-4, atol=1e-5)
    mpu("unlearn", "copy_1", "copy_2", "--algo", "gradascent", "--epochs", 1, "--train-embeddings",
        "--forget", "forget.jsonl", cwd=root)  # fmt: skip
    mpu("aggregate", "deltas", "--keys", "keys.bin", cwd=root)
    result = load_file(root / "unlearned/model.safetensors")
    assert result.keys() == tensors.keys()
    assert not torch.equal(result[HEAD], tensors[HEAD])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, config in FAMILY_CONFIGS.items() if config["model_type"] in WRAPPERS])
def test_which_config_of_a_wrapper_ties(name: str) -> None:
    """As transformers' models do it, whatever the two configs say."""
    for outer in (None, True, False):
        for text in (None, True, False):
            config = deepcopy(FAMILY_CONFIGS[name])
            for part, tied in ((config, outer), (config["text_config"], text)):
                part.pop("tie_word_embeddings", None)
                if tied is not None:
                    part["tie_word_embeddings"] = tied
            with torch.device("meta"):
                model = build(AutoConfig.for_model(**config))
            filled = model.config.to_dict()
            for part, tied in ((filled, outer), (filled["text_config"], text)):
                if tied is None:
                    part.pop("tie_word_embeddings", None)
            architecture = Architecture(supported_family(filled, "config"), filled, "config")
            assert architecture.is_tied(None) == bool(model.all_tied_weights_keys), (outer, text)


def test_no_quantization_in_so_many_words(mpu: Callable, root: Path) -> None:
    edit(root / "base/config.json", quantization_config=None)
    mpu("publish", "base", "--kappa", 0, cwd=root)
    torch.testing.assert_close(logits(root / "copy_1"), logits(root / "base"), rtol=1e-4, atol=1e-5)
