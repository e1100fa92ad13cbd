"""The allow-lists let through what real models have, and the folders that libraries get compute the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import NAMES, read_bounded
from mpu_cli.files.folder import clean_chat_template, clean_config, clean_tokenizer_config, clean_tokens, left_out
from mpu_cli.model.source import open_model
from mpu_cli.model.staging import staged_model
from tests.helpers.models import CONFIGS, load, needs_shared, random_model, save
from tests.helpers.paths import ROOT, SHARED


def test_what_a_part_of_a_config_loses_is_named() -> None:
    """Here the image tower's: its copies would not load, or compute something else."""
    config = {"model_type": "llama4", "vision_config": {"depth": 2, "a_ratio": 0.5, "inner": {"other": 1}}}
    assert left_out(config) == ["vision_config.a_ratio", "vision_config.inner"]
    assert left_out(config, {"a_ratio"}) == ["vision_config.a_ratio"]


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MpuError, match=f"{tmp_path}: not a regular file"):
        read_bounded(tmp_path, limit=1)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_config_of_a_family_loses_nothing(family: str) -> None:
    config = CONFIGS[family]
    assert clean_config(config) == config


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_a_staged_model_is_the_same(tmp_path: Path, family: str) -> None:
    """Weights, tokenizer and chat template, from one file and from shards."""
    base = save(random_model(family), tmp_path / "base")
    expected, text = AutoModelForCausalLM.from_pretrained(base), "w4 w5 w6"
    expected.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / "shards" / path.name).write_bytes(path.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = tokenizer(text, return_tensors="pt").input_ids
    for folder in (base, tmp_path / "shards"):
        with staged_model(open_model(str(folder))) as ours:
            model, other = AutoModelForCausalLM.from_pretrained(ours), AutoTokenizer.from_pretrained(ours)
        assert torch.equal(model(ids).logits, expected(ids).logits)
        assert other(text).input_ids == tokenizer(text).input_ids
        assert other.get_chat_template() == tokenizer.get_chat_template()


@needs_shared
def test_real_files_lose_only_what_nobody_needs() -> None:
    folder = SHARED / "models/full"
    config = json.loads((folder / "config.json").read_text())
    assert clean_config(config) == config
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert clean_tokenizer_config(tokenizer) == tokenizer


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model_max_length": 1e30, "bos_token": "<s>"}, {"bos_token": "<s>"}),  # transformers' default
        ({"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False}}, None),
        ({"added_tokens_decoder": {"0": {"content": "/s", "special": True}}}, None),
        ({"extra_special_tokens": ["<a>", "<b>"], "padding_side": "left", "legacy": True}, None),
        ({"chat_template": [{"name": "default", "template": "{{ x }}"}]}, None),
        ({"chat_template": "x" * 300_000}, {}),
        ({"bos_token": "x" * 2000, "tokenizer_class": "a/b", "model_max_length": True}, {}),
    ],
)
def test_tokenizer_settings(settings: dict, expected: dict | None) -> None:
    assert clean_tokenizer_config(settings) == (settings if expected is None else expected)


def test_other_files_of_a_tokenizer() -> None:
    assert clean_tokens({"a": 1, "b": {"content": "<s>"}, "c" * 2000: 2}) == {"a": 1, "b": {"content": "<s>"}}
    assert clean_chat_template({"chat_template": "x", "y": 1}) == {"chat_template": "x"}


def test_values_that_are_not_plain() -> None:
    names = {name: {"rope_type": "default", "factor": value} for name, value in (("rope_scaling", float("inf")),)}
    assert clean_config(names) == names
    deep: object = 1
    for _ in range(50):
        deep = [deep]
    assert clean_config({"layer_types": deep, "hidden_size": 10**400, "vocab_size": 5}) == {"vocab_size": 5}
    assert not {"transformers_weights", "auto_map", "_name_or_path", "quantization_config"} & (
        NAMES["config"] | NAMES["rope"]
    )


def test_loading_says_which_folder_was_meant(tmp_path: Path) -> None:
    """Not the private one that libraries were given."""
    base = save(random_model("llama"), tmp_path / "base")
    (base / "tokenizer.json").write_text("{}")
    with pytest.raises(Exception, match=str(base)):
        load(base, torch.float32, "cpu")


@pytest.mark.parametrize(
    "family", ["falcon_h1", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("jamba", "qwen3_5_text"))]
)
@pytest.mark.slow
def test_state_space_models_fetch_no_kernels(tmp_path: Path, family: str) -> None:
    """transformers would get and run them from the Hub if the package is there: a stand-in says if it is asked."""
    base = save(random_model(family), tmp_path / "base")
    (tmp_path / "path").mkdir()
    (tmp_path / "path/kernels.py").write_text("raise SystemExit('a kernel was asked for')\n")
    code = (
        "import mpu_cli, torch\nfrom mpu_cli.model.load import load\nfrom mpu_cli.model.source import open_model\n"
        f"model, _ = load(open_model({str(base)!r}), torch.float32, 'cpu')\n"
        "model.train()(torch.arange(3, 9)[None]).logits.sum().backward()\nprint('trained')\n"
    )
    root = ROOT
    path = f"{tmp_path / 'path'}:{root}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("trained\n"), done.stderr


@pytest.mark.parametrize(
    "value",
    [
        {"transformers_weights": "x"}, {"auto_map": {"AutoModel": "x.y"}}, {"_name_or_path": "/home/a"},
        {"attn_implementation": "owner/kernel"}, {"_attn_implementation": "x"}, {"experts_implementation": "x"},
        {"quantization_config": {"quant_method": "bitsandbytes"}}, {"name_or_path": "../x"},
        {"text_config": {"_name_or_path": "/x", "transformers_weights": "y"}}, {"hidden_act": "/etc/passwd"},
        {"architectures": ["../../x"]}, {"hidden_act": "owner/repo"}, {"unheard_of": 1},
    ],
    ids=str,
)  # fmt: skip
def test_nothing_of_a_config_that_libraries_would_obey(value: dict) -> None:
    cleaned = clean_config({"model_type": "llama", **value})
    assert json.dumps(cleaned) in (
        '{"model_type": "llama"}', '{"model_type": "llama", "text_config": {}}',
    )  # fmt: skip


class TestNamesThatStandTwice:
    """A million of them are found out in one pass; with a look at all names for each name, these take an hour."""

    names = ",".join(f'"{i}": 1' for i in range(200_000))

    @pytest.mark.parametrize("command", [("receipt",), ("inspect",)])
    def test_in_a_document(self, mpu: Callable, root: Path, command: tuple[str, ...]) -> None:
        (root / "r.json").write_text('{"format": "mpu-receipt",' + self.names + ',"199999": 2}')
        mpu(*command, "r.json", refused="twice", cwd=root)

    def test_in_records(self, mpu: Callable, root: Path) -> None:
        (root / "r.jsonl").write_text("{" + self.names + ',"199999": 2}\n')
        (root / "r.csv").write_text(",".join(map(str, range(100_000))) + ",99999\n")
        mpu("check", "base", "--forget", "r.jsonl", refused="twice", cwd=root)
        mpu("check", "base", "--forget", "r.csv", refused="two columns", cwd=root)

    def test_in_the_header_of_weights(self, mpu: Callable, root: Path) -> None:
        header = ("{" + self.names + ',"199999": 2}').encode()
        (root / "d.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        mpu("inspect", "d.safetensors", refused="twice", cwd=root)
