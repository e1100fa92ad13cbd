"""Copies that lack layers of the base: they compute what the base without these layers computes, and what comes back
changes the others only."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mpu_cli.errors import UsageError
from mpu_cli.options.publishing import parse_layers
from tests.helpers.models import CONFIGS, random_model, save, write_records
from tests.helpers.protocol import distance, merge_factors, tensors


# What a layer of theirs computes follows from its number, or from a config of a form of its own.
class TestThroughTheCommandLine:
    """The whole path, on a model of four layers of which the copies lack two."""

    @pytest.fixture
    def base(self, tmp_path: Path) -> Path:
        config = CONFIGS["llama"] | {"num_hidden_layers": 4}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float64)
        save(model, tmp_path / "base")
        return tmp_path / "base"

    @pytest.fixture
    def training(self, tmp_path: Path) -> list[object]:
        forget, retain = (write_records(tmp_path / f"{name}.jsonl", 8, i) for i, name in enumerate(("f", "r")))
        return ["--algo", "npo", "--forget", forget, "--retain", retain, "--epochs", 1, "--batch-size", 4,
                "--lr", "1e-3", "--precision", "float64"]  # fmt: skip

    @pytest.mark.parametrize("more", [(), ("--lora", "rank=2")], ids=["full", "lora"])
    @pytest.mark.slow
    def test_the_update_is_that_of_the_shallow_model(
        self, mpu: Callable, tmp_path: Path, base: Path, training: list, more: tuple
    ) -> None:
        """Noise that cancels aside: trained on copies without noise, and on what is left of the base."""
        mpu("publish", base, "--kappa", 0, "--copies", 2, "--omit-layers", "1-2", "--out", tmp_path,
            "--keys", tmp_path / "keys.bin")  # fmt: skip
        mpu("publish", base, "--kappa", 0, "--copies", 2, "--omit-layers", "1,2", "--out", tmp_path / "plain",
            "--keys", tmp_path / "plain" / "keys.bin", "--symmetries", "none")  # fmt: skip
        for copy in (tmp_path / "copy_1", tmp_path / "copy_2", tmp_path / "plain" / "copy_1"):
            mpu("unlearn", copy, "--out", copy.parent / "deltas" / f"{copy.name}.safetensors", *training, *more)
        clean = merge_factors(tensors(tmp_path / "plain" / "deltas" / "copy_1.safetensors"))
        expected = {name.replace("layers.1.", "layers.3."): change for name, change in clean.items()}
        keys = ("--keys", tmp_path / "keys.bin")
        mpu("aggregate", tmp_path / "deltas", *keys, "--out", tmp_path / "after")
        before, after = tensors(base), tensors(tmp_path / "after")
        update = {name: after[name] - before[name] for name in before}
        assert distance(update, expected) < 1e-5
        assert all(not update[name].any() for name in update if name not in expected)
        inverted = mpu("invert", tmp_path / "deltas", *keys, "--out", tmp_path / "inverted").out.split()
        for name, paths in (("all", inverted), ("mixed", (tmp_path / "deltas" / "copy_1.safetensors", inverted[1]))):
            mpu("aggregate", *paths, *keys, "--out", tmp_path / name)
            again = tensors(tmp_path / name)
            assert distance({name: again[name] - before[name] for name in before}, update) < 1e-9

    def test_it_is_told_verified_and_audited(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        mpu("publish", base, "--kappa", 0, "--copies", 1, "--permanent-noise", 0.1, "--omit-layers", "1-2", "--out",
            tmp_path, "--keys", tmp_path / "keys.bin")  # fmt: skip
        copy = tmp_path / "copy_1"
        assert mpu("inspect", copy, "--json").json["layers left out"] == "1, 2"
        assert mpu("verify", copy, "--keys", tmp_path / "keys.bin").status == 0
        attacks = mpu("audit", copy, "--base", base, "--json").json["attacks"]
        off = attacks["one copy"]["blocks"]
        assert off["model.layers.1 (left out)"]["weights"] == pytest.approx(1.0)
        assert off["model.layers.1"]["weights"] < 0.2

    def test_buffers_of_layers(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        """Old checkpoints store some that are no parameters, one in each layer."""
        path = base / "model.safetensors"
        weights = load_file(path)
        buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.full((4,), float(i)) for i in range(4)}
        save_file(weights | buffers, path, {"format": "pt"})
        public = tmp_path / "public"
        shutil.copytree(base, public)
        save_file({name: tensor * 0.9 for name, tensor in weights.items()} | buffers, public / "model.safetensors")
        mpu("publish", base, "--pretrained", public, "--omit-layers", "1-2", "--out", tmp_path, "--keys",
            tmp_path / "keys.bin")  # fmt: skip
        copy = load_file(tmp_path / "copy_1" / "model.safetensors")
        copy_buffers = {int(n.split(".")[2]): float(t[0]) for n, t in copy.items() if n.endswith("inv_freq")}
        assert copy_buffers == {0: 0.0, 1: 3.0}

    def test_another_base_is_named(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        mpu("publish", base, "--omit-layers", "3", "--copies", 2, "--out", tmp_path, "--keys", tmp_path / "keys.bin")
        other = tmp_path / "other"
        save(random_model("llama"), other)
        outcome = mpu("verify", tmp_path / "copy_1", "--keys", tmp_path / "keys.bin", "--base", other, check=False)
        assert (outcome.status, "is not the model that was published" in outcome.err) == (1, True)

    def test_what_is_refused(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        for layers, complaint in (("0-3", "none of the model's layers is left"), ("4", "there is no layer 4")):
            mpu("publish", base, "--omit-layers", layers, "--out", tmp_path / "x", fails=complaint, status=2)
            assert not (tmp_path / "x").exists()


@given(st.sets(st.integers(0, 40), min_size=1))
def test_layers_are_parsed(layers: set[int]) -> None:
    assert parse_layers(",".join(map(str, layers))) == tuple(sorted(layers))
    lowest, highest = min(layers), max(layers)
    assert parse_layers(f"{lowest}-{highest}") == tuple(range(lowest, highest + 1))


@pytest.mark.parametrize("text", ["", "3-1", "a", "1-", "-1", "1,,2", "1.5"])
def test_no_layers(text: str) -> None:
    with pytest.raises(UsageError, match="names no layers"):
        parse_layers(text)
