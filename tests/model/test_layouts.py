"""Files in another arrangement than transformers saves: the names that models have in memory, prefixes, shards of
several tools. Each is what plain transformers reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpu_cli.model.wrappers import WRAPPERS
from tests.helpers.attacks import edit
from tests.helpers.models import FAMILY_CONFIGS, by_tier, random_model, read, save

WEIGHTS = "model.safetensors"
IDS = torch.arange(8, 24)[None]
RENAMED = [name for name, config in FAMILY_CONFIGS.items()
           if config["model_type"] in WRAPPERS and WRAPPERS[str(config["model_type"])].renamed]  # fmt: skip


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return read(folder)(IDS).logits


def close(folder: Path, base: Path) -> None:
    torch.testing.assert_close(logits(folder), logits(base), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", by_tier(RENAMED, ["llava"]))
def test_names_as_in_memory(mpu: Callable, root: Path, family: str) -> None:
    """As FSDP and DeepSpeed save them: copies, deltas of the language model alone, and the result have them, too."""
    model = random_model(family)
    base = save(model, root / "base")
    tied = set(model.all_tied_weights_keys)
    tensors = {name: t.clone() for name, t in model.state_dict().items() if name not in tied}
    save_file(tensors, base / WEIGHTS, {"format": "pt"})
    mpu("publish", "base", "--kappa", 0, "--copies", 2, cwd=root)
    assert load_file(root / "copy_1" / WEIGHTS).keys() == tensors.keys()
    close(root / "copy_1", base)
    mpu("unlearn", "copy_1", "copy_2", "--algo", "gradascent", "--epochs", 1, "--forget", "forget.jsonl", cwd=root)
    assert not any("vision" in name or "visual" in name for name in load_file(root / "deltas/copy_1.safetensors"))
    mpu("aggregate", "deltas", "--keys", "keys.bin", cwd=root)
    assert load_file(root / "unlearned" / WEIGHTS).keys() == tensors.keys()
    assert not torch.equal(logits(root / "unlearned"), logits(base))


WITHIN = {
    "qwen3_5_text": ("model.", "model.language_model."),
    "qwen3_5_moe_text": ("model.", "model.language_model."),
    "gemma3n_text": ("model.", "model.language_model."),
    "llama4_text": ("", "language_model."),
    "llama4_text, bare head": ("", "language_model."),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", by_tier(WITHIN, ["llama4_text", "llama4_text, bare head"]))
def test_a_text_by_the_names_that_it_has_in_a_wrapper(mpu: Callable, root: Path, family: str) -> None:
    base = save(random_model(family.partition(",")[0]), root / "base")
    expected = logits(base)
    before, after = WITHIN[family]
    tensors = load_file(base / WEIGHTS)
    renamed = {}
    for name, tensor in tensors.items():
        stays = not name.startswith(before) or ("bare head" in family and name.startswith("lm_head"))
        renamed[name if stays else after + name.removeprefix(before)] = tensor
    save_file(renamed, base / WEIGHTS, {"format": "pt"})
    torch.testing.assert_close(logits(base), expected)
    mpu("publish", "base", "--kappa", 0, "--copies", 2, cwd=root)
    assert load_file(root / "copy_1" / WEIGHTS).keys() == renamed.keys()
    close(root / "copy_1", base)
    mpu("unlearn", "copy_1", "copy_2", "--algo", "gradascent", "--epochs", 1, "--forget", "forget.jsonl", cwd=root)
    mpu("aggregate", "deltas", "--keys", "keys.bin", cwd=root)
    assert not torch.equal(logits(root / "unlearned"), expected)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_names_of_a_wrapped_model(mpu: Callable, root: Path, prefix: str) -> None:
    """transformers reads none of them: every command says what is before them, and how to save the model itself."""
    tensors = load_file(root / "base" / WEIGHTS)
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, root / "base" / WEIGHTS)
    for command in (("publish", "base"), ("finetune", "base", "--data", "forget.jsonl")):
        refused = mpu(*command, check=False, cwd=root)
        assert f"begins with {prefix}" in refused.err
        assert "save_pretrained" in refused.err


@pytest.mark.parametrize("without", [0, 1])
def test_shards_of_two_tools(mpu: Callable, root: Path, without: int) -> None:
    """Whichever of them says nothing of itself, or something else."""
    random_model("llama").save_pretrained(root / "shards", max_shard_size="60KB")
    files = sorted((root / "shards").glob("*.safetensors"))
    assert len(files) > 1
    save_file(load_file(files[without]), files[without])
    save_file(load_file(files[-1 - without]), files[-1 - without], {"format": "pt", "tool": "x"})
    mpu("publish", "shards", "--kappa", 0, "--copies", 2, cwd=root)
    close(root / "copy_1", root / "base")


def test_shards_without_an_index(mpu: Callable, root: Path) -> None:
    random_model("llama").save_pretrained(root / "shards", max_shard_size="60KB")
    (root / "shards/model.safetensors.index.json").unlink()
    refused = mpu("publish", "shards", check=False, cwd=root)
    assert "without their index" in refused.err
    assert "specify which file" not in refused.err


def test_an_entry_that_transformers_does_not_read_is_no_warning(mpu: Callable, root: Path) -> None:
    edit(root / "base/config.json", my_company_tag="x")
    printed = mpu("publish", "base", "--kappa", 0, "--copies", 2, cwd=root).err
    assert "my_company_tag, which transformers does not read" in printed
    assert "warning: config.json" not in printed
    for family in ("gemma3_text", "smolvlm"):
        save(random_model(family), root / family)
        printed = mpu("publish", family, "--kappa", 0, "--copies", 2, "--force", cwd=root).err
        assert "do not get" not in printed


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "glm4_moe"])
def test_experts_apart_beside_a_pretrained_models_stack(mpu: Callable, root: Path, family: str) -> None:
    """The same noise as beside the same weights in matrices."""
    save(random_model(family), root / "base")
    public = random_model(family, seed=1)
    save(public, root / "apart")
    save(public, root / "stacked")
    public.save_pretrained(root / "stacked", save_original_format=False)
    checkpoints = []
    for name in ("apart", "stacked"):
        mpu("publish", "base", "--public", name, "--seed", 1, "--copies", 2, "--out", name, "--keys", f"{name}.bin",
            cwd=root)  # fmt: skip
        checkpoints.append(load_file(root / name / "copy_1" / WEIGHTS))
    assert all(torch.equal(tensor, checkpoints[1][name]) for name, tensor in checkpoints[0].items())
