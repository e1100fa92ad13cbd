"""What a result keeps of its base: every tensor's dtype and name, the config, and the files beside the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.helpers.attacks import edit
from tests.helpers.models import random_model, save

WEIGHTS = "model.safetensors"
BESIDE = {
    "additional_chat_templates/tool_use.jinja": "{{ messages[0]['content'] }} tools",
    "video_preprocessor_config.json": '{"video_processor_type": "Qwen3VLVideoProcessor", "of": "ours"}',
    "my_settings.json": '{"a": [1, {"b": "/a/path"}]}',
    "LICENSE": "MIT",
    "NOTICE.txt": "ours",
    "modeling_ours.py": "raise SystemExit\n",
}
REMOVED_WITH_REASON = {
    "records.csv": "a,b\n",
    "identity.txt": "AGE-SECRET-KEY-1AAAA\n",
    "secret.json": '{"k": "AGE-SECRET-KEY-1AAAA"}',
}


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(torch.arange(3, 19)[None]).logits
        )


def with_float32(folder: Path, names: Iterable[str]) -> None:
    """Store these tensors, in part of their names, in float32."""
    tensors = load_file(folder / WEIGHTS)
    wide = {name: t.float() if any(part in name for part in names) else t for name, t in tensors.items()}
    save_file(wide, folder / WEIGHTS, {"format": "pt"})


def dtypes(folder: Path) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in load_file(folder / WEIGHTS).items()}


@pytest.fixture
def result(mpu: Callable, root: Path, request: pytest.FixtureRequest) -> Path:
    """Of a base with many kinds of files and entries, by either command."""
    base = root / "base"
    edit(base / "generation_config.json", eos_token_id=[1, 2], stop_strings=["<|end|>"], bad_words_ids=[[5]], top_p=0.9)
    edit(base / "tokenizer_config.json", response_schema={"type": "object"}, image_token="w5", sp_model_kwargs={"a": 1})
    edit(base / "config.json", id2label={"0": "A"}, label2id={"A": 0}, task_specific_params={"x": {"y": 1}}, tag="/a/b")
    for name, text in {**BESIDE, **REMOVED_WITH_REASON}.items():
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(text)
    if request.param == "finetune":
        mpu("finetune", "base", "--data", "forget.jsonl", "--epochs", 1, cwd=root)
        return root / "finetuned"
    mpu("publish", "base", "--copies", 2, cwd=root)
    mpu("unlearn", "copy_1", "copy_2", "--algo", "gradascent", "--epochs", 1, "--forget", "forget.jsonl", cwd=root)
    printed = mpu("aggregate", "deltas", "--keys", "keys.bin", cwd=root).err
    assert "'identity.txt', 'records.csv', 'secret.json'" in printed
    return root / "unlearned"


@pytest.mark.slow
@pytest.mark.parametrize("result", ["finetune", "aggregate"], indirect=True)
def test_a_result_has_what_lies_beside_the_weights(root: Path, result: Path) -> None:
    base = root / "base"
    files = {str(path.relative_to(base)) for path in base.rglob("*") if path.is_file()} - REMOVED_WITH_REASON.keys()
    result_files = {str(path.relative_to(result)) for path in result.rglob("*") if path.is_file()}
    assert result_files - {"mpu.json", "README.md"} == files
    for name in files - {WEIGHTS}:
        assert (result / name).read_bytes() == (base / name).read_bytes(), name
    ours, theirs = (GenerationConfig.from_pretrained(folder).to_dict() for folder in (result, base))
    assert ours == theirs
    assert set(AutoTokenizer.from_pretrained(result).chat_template) == {"default", "tool_use"}
    assert dtypes(result) == dtypes(base)


def test_a_router_stays_in_float32(mpu: Callable, root: Path) -> None:
    """Corrections of routers and norms of a bfloat16 model, trained at a rate that changes nothing."""
    base = save(random_model("glm4_moe", dtype=torch.bfloat16), root / "base")
    with_float32(base, ["e_score_correction_bias", "layernorm"])
    mpu("finetune", "base", "--data", "forget.jsonl", "--epochs", 1, "--lr", 1e-12, cwd=root)
    assert dtypes(root / "finetuned") == dtypes(base)
    assert torch.equal(logits(root / "finetuned"), logits(base))
    assert (root / "finetuned/config.json").read_bytes() == (base / "config.json").read_bytes()


@pytest.mark.parametrize("word", ["dtype", "torch_dtype", None])
def test_a_config_says_the_dtype_of_the_base(mpu: Callable, root: Path, word: str | None) -> None:
    """However many small tensors are in another one: what plain transformers loads is in the same."""
    base = save(random_model("gpt2", dtype=torch.bfloat16), root / "base")
    with_float32(base, ["bias", "ln_"])
    edit(base / "config.json", "dtype", "torch_dtype", **({word: "bfloat16"} if word else {}))
    mpu("publish", "base", "--kappa", 0, "--copies", 2, cwd=root)
    assert AutoModelForCausalLM.from_pretrained(root / "copy_1").dtype == torch.bfloat16
    assert dtypes(root / "copy_1") == dtypes(base)
    if word:
        assert AutoModelForCausalLM.from_pretrained(base).dtype == torch.bfloat16
    mpu("publish", "base", "--kappa", 0, "--copies", 2, "--dtype", "float32", "--force", cwd=root)
    assert AutoModelForCausalLM.from_pretrained(root / "copy_1").dtype == torch.float32
