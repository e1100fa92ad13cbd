"""peft's LoRA adapters on a base, as mpu reads them, compared with peft itself; what is not honoured is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from mpu_cli.errors import MpuError
from mpu_cli.files import sandbox
from mpu_cli.model.staging import remark_on_ties, with_adapter
from tests.helpers.attacks import edit
from tests.helpers.models import random_model

IDS = torch.arange(3, 19)[None]
MODULES = ["q_proj", "v_proj", "up_proj"]
LAYER = r".*layers\.1\..*(q_proj|v_proj)"


def make_adapter(folder: Path, family: str, **config: object) -> None:
    """An adapter whose weights are random."""
    torch.manual_seed(3)
    options = {"r": 4, "lora_alpha": 16, "target_modules": MODULES} | config
    adapted = get_peft_model(random_model(family), LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)


@torch.no_grad()
def check_like_peft(folder: Path, family: str) -> None:
    expected = PeftModel.from_pretrained(random_model(family), folder).eval()(IDS).logits
    ours = with_adapter(random_model(family), folder).eval()(IDS).logits
    base = random_model(family)(IDS).logits
    assert (expected - base).abs().max() > 0.01
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def rename(folder: Path, new: Callable[[str], str]) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({new(name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True, "use_dora": True},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "gaussian"},
        {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 64}},
        {"rank_pattern": {LAYER: 8}, "alpha_pattern": {LAYER: 128, "up_proj": 2}},
        {"lora_bias": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"]},
        {"trainable_token_indices": [3, 4, 5]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": "all-linear", "exclude_modules": ["v_proj"]},
        {"target_modules": r".*\.1\..*(q_proj|v_proj)"},
        {"layers_to_transform": [1]},
    ],
    ids=str,
)
def test_what_an_adapters_config_can_say(tmp_path: Path, config: dict) -> None:
    make_adapter(tmp_path, "llama-biases", **config)
    check_like_peft(tmp_path, "llama-biases")


TIED = (
    {"trainable_token_indices": {"embed_tokens": [3, 4]}},
    {"modules_to_save": ["norm"]},
    {"target_modules": ["embed_tokens"]},
    {"target_modules": ["lm_head", "q_proj"]},
)


@pytest.mark.parametrize("config", TIED, ids=str)
def test_on_a_tied_embedding(tmp_path: Path, config: dict) -> None:
    make_adapter(tmp_path, "llama", **config)
    check_like_peft(tmp_path, "llama")


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        {"target_parameters": ["mlp.experts.down_proj"], "target_modules": ["q_proj"],
         "rank_pattern": {"experts.down_proj": 2, "q_proj": 8}, "alpha_pattern": {r"experts\.(up|down)_proj": 64}},
    ],
    ids=str,
)  # fmt: skip
def test_on_stacks_of_experts(tmp_path: Path, config: dict) -> None:
    make_adapter(tmp_path, "qwen3_moe", **config)
    check_like_peft(tmp_path, "qwen3_moe")


def test_names_with_the_adapters_own(tmp_path: Path) -> None:
    """As a state dict in memory has them."""
    make_adapter(tmp_path, "llama-biases")
    rename(tmp_path, lambda name: name.replace(".weight", ".default.weight"))
    check_like_peft(tmp_path, "llama-biases")


def test_names_of_a_compiled_model(tmp_path: Path) -> None:
    """peft saves the adapter of a compiled model under names that no model has: said before peft reads it."""
    make_adapter(tmp_path, "llama-biases")
    rename(tmp_path, lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."))
    with pytest.raises(MpuError, match="hold _orig_mod"):
        with_adapter(random_model("llama-biases"), tmp_path)


def test_an_adapter_on_one_of_two_tied_layers_is_remarked_on(tmp_path: Path) -> None:
    """Merged by peft, it changes the embedding as well, and the logits are others."""
    make_adapter(tmp_path, "llama", target_modules=["lm_head", "q_proj"])
    ours = with_adapter(random_model("llama"), tmp_path)
    assert "would change both" in (remark_on_ties(ours) or "")
    merged = PeftModel.from_pretrained(random_model("llama"), tmp_path).merge_and_unload()
    with torch.no_grad():
        assert (merged(IDS).logits - ours(IDS).logits).abs().max() > 1e-3
    make_adapter(tmp_path / "other", "llama")
    assert remark_on_ties(with_adapter(random_model("llama"), tmp_path / "other")) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ({"layer_replication": [[0, 2], [0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"an_entry_of_next_year": 0.5}, "an_entry_of_next_year"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
        ({"init_lora_weights": {"a": 1}}, "init_lora_weights"),
        ({"alpha_pattern": {"(([a-z_.0-9])*)*X": 1}}, "took longer"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern"),
        ({"trainable_token_indices": {"a/b": [1]}}, "trainable_token_indices"),
    ],
    ids=str,
)
def test_what_is_not_honoured_is_refused(
    tmp_path: Path, entries: dict, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "REQUEST_SECONDS", 2.0)
    make_adapter(tmp_path, "llama-biases")
    edit(tmp_path / "adapter_config.json", **entries)
    with pytest.raises(MpuError, match=complaint):
        with_adapter(random_model("llama-biases"), tmp_path)


def test_an_adapter_beside_a_model(mpu: Callable, tmp_path: Path, base: Path) -> None:
    """transformers would add it to the weights: refused, and the file by itself is the model without it."""
    make_adapter(base, "llama")
    mpu("publish", base, "--out", tmp_path, "--keys", tmp_path / "keys.bin", fails="and a peft adapter", status=1)
    weights = base / "model.safetensors"
    mpu("publish", weights, "--copies", 2, "--kappa", 0, "--symmetries", "none", "--out", tmp_path, "--keys",
        tmp_path / "keys.bin")  # fmt: skip
    copy = load_file(tmp_path / "copy_1/model.safetensors")
    assert all(torch.equal(tensor, copy[name]) for name, tensor in load_file(weights).items())
