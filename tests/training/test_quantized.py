"""Copies in 4 bits: what is held is bitsandbytes' rounding of the copy, and the rest of the path is LoRA's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from mpu_cli.errors import MpuError
from mpu_cli.model.load import check_is, load
from mpu_cli.model.source import open_model
from mpu_cli.model.tensors import dequantized_weight, is_quantized, share_in_4_bits
from tests.helpers.models import random_model, save, write_records
from tests.helpers.paths import ROOT
from tests.helpers.protocol import tensors

pytest.importorskip("bitsandbytes")
LARGE = {"hidden_size": 192, "intermediate_size": 256}  # rows of several blocks


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_records(tmp_path / "forget.jsonl", 6, 1)
    write_records(tmp_path / "retain.jsonl", 6, 2)
    return save(random_model("llama-biases", **LARGE), tmp_path / "base")


def by_transformers(folder: Path) -> torch.nn.Module:
    """The model in 4 bits as transformers loads it."""
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=torch.float32)


def test_weights_are_the_nearest_of_sixteen_levels(base: Path) -> None:
    """Of each 64 weights in a row of the file, by the largest of them; the rest of the model is as it was."""
    from bitsandbytes.functional import get_4bit_type

    model, _ = load(open_model(str(base)), torch.float32, "cpu", quantize="nf4")
    levels = get_4bit_type("nf4", device="cpu")
    files = {name: tensor.float() for name, tensor in tensors(base).items()}
    params = dict(model.named_parameters())
    in_4_bits = {name for name, parameter in params.items() if is_quantized(parameter)}
    assert in_4_bits == {name for name in params if name.endswith("_proj.weight")}
    for name, parameter in params.items():
        if name not in in_4_bits:
            assert torch.equal(parameter, files[name])
            continue
        blocks = files[name].reshape(-1, 64)
        scale = blocks.abs().amax(1, keepdim=True)
        nearest = levels[(blocks / scale)[..., None].sub(levels).abs().argmin(-1)] * scale
        torch.testing.assert_close(dequantized_weight(parameter).reshape(-1, 64), nearest)
    total = sum(x.numel() for x in files.values())
    assert share_in_4_bits(model) == pytest.approx(sum(files[name].numel() for name in in_4_bits) / total)


def test_another_weight_is_noticed(base: Path) -> None:
    copy = open_model(str(base))
    model, _ = load(copy, torch.float32, "cpu", quantize="nf4")
    check_is(model, copy.checkpoint)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data.bitwise_xor_(1)
    with pytest.raises(MpuError, match="up_proj"):
        check_is(model, copy.checkpoint)


def test_what_a_model_computes_does_not_change_once_it_is_evaluated(base: Path) -> None:
    """Some CPUs would repack the weights for products in bfloat16, and the reference be of another model."""
    model, _ = load(open_model(str(base)), torch.float32, "cpu", quantize="nf4")
    ids = torch.arange(3, 30)[None]
    model.train()
    trained = model(ids).logits.detach()
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, trained)


@pytest.mark.slow
def test_the_whole_path(mpu: Callable, base: Path, tmp_path: Path) -> None:
    """Deltas are LoRA's, aggregate takes them, and the loss before training is that of the model in 4 bits."""
    mpu("publish", base, "--copies", 2, "--kappa", 0, "--symmetries", "none", cwd=tmp_path)
    training_options = (
        "--algo",
        "graddiff",
        "--epochs",
        4,
        "--lr",
        "1e-2",
        "--lora",
        "rank=3",
        "--reading",
        "template=plain",
    )
    for k in (1, 2):
        outcome = mpu("unlearn", f"copy_{k}", *training_options, "--lora", "quantize=nf4", "--json", cwd=tmp_path)
    assert "of the weights are held in 4 bits" in outcome.err
    first_delta, second_delta = (tensors(tmp_path / f"deltas/copy_{k}.safetensors") for k in (1, 2))
    assert {name.rsplit(".", 1)[1] for name in first_delta} == {"lora_A", "lora_B"}
    assert all(
        torch.equal(first_delta[name], second_delta[name]) for name in first_delta
    )  # the same copy, rounded alike
    mpu("aggregate", "deltas", "--out", "after", cwd=tmp_path)
    before, after = tensors(base), tensors(tmp_path / "after")
    for name in before:
        change = (
            first_delta[f"{name}.lora_B"] @ first_delta[f"{name}.lora_A"]
            if f"{name}.lora_A" in first_delta
            else torch.zeros(())
        )
        torch.testing.assert_close(after[name], before[name] + change, rtol=1e-5, atol=1e-6)
    unquantized_report = mpu(
        "unlearn", "copy_1", *training_options, "--json", "--out", "whole.safetensors", cwd=tmp_path
    ).json
    assert outcome.json["before"]["forget"] != unquantized_report["before"]["forget"]
    assert outcome.json["after"]["forget"] > outcome.json["before"]["forget"]


def test_eval_measures_the_model_in_4_bits(mpu: Callable, base: Path, tmp_path: Path) -> None:
    command = ("eval", base, "--benchmark", "qa", "--forget", "forget.jsonl", "--retain", "retain.jsonl",
             "--reading", "template=plain", "--metrics", "forget_Q_A_Prob", "--json")  # fmt: skip
    probability = mpu(*command, "--scoring", "quantize=nf4", "--out", "a.json", cwd=tmp_path).json["metrics"][
        "forget_Q_A_Prob"
    ]
    rounded = by_transformers(base)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(dequantized_weight(rounded.get_parameter(name)))
    plain.save_pretrained(tmp_path / "rounded")
    for file in base.glob("*token*"):
        (tmp_path / "rounded" / file.name).write_bytes(file.read_bytes())
    again = mpu("eval", tmp_path / "rounded", *command[2:], "--out", "b.json", cwd=tmp_path).json["metrics"]
    assert probability == pytest.approx(again["forget_Q_A_Prob"], rel=1e-5)
    assert probability != pytest.approx(
        mpu(*command, "--out", "c.json", cwd=tmp_path).json["metrics"]["forget_Q_A_Prob"]
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "need --lora rank"),
        (("--lora", "rank=2", "--precision", "float64"), "float64"),
    ],
)
def test_what_does_not_go_together(mpu: Callable, base: Path, tmp_path: Path, options: tuple, said: str) -> None:
    mpu("unlearn", base, "--lora", "quantize=nf4", *options, fails=said, status=2, cwd=tmp_path)


@pytest.mark.usefixtures("base")
def test_a_model_without_linear_layers(mpu: Callable, tmp_path: Path) -> None:
    other = save(random_model("gpt2"), tmp_path / "gpt2")
    outcome = mpu("unlearn", other, "--lora", "rank=2,quantize=nf4", check=False, cwd=tmp_path)
    assert outcome.status == 2
    assert "no linear layers that can be held in 4 bits" in outcome.err


def test_attacks_that_change_weights(mpu: Callable, base: Path, tmp_path: Path) -> None:
    outcome = mpu("eval", base, "--benchmark", "qa", "--forget", "forget.jsonl", "--retain", "retain.jsonl",
               "--attacks", "relearn", "--scoring", "quantize=nf4", check=False, cwd=tmp_path)  # fmt: skip
    assert (outcome.status, "changes weights" in outcome.err) == (2, True)


@pytest.mark.slow
def test_no_library_fetches_kernels(tmp_path: Path) -> None:
    """bitsandbytes would, on a CPU with bfloat16 products, if the package is there: a stand-in says if it is asked."""
    (tmp_path / "kernels.py").write_text("raise SystemExit('a kernel was asked for')\n")
    code = "import mpu_cli, bitsandbytes; print('imported')"
    path = f"{tmp_path}:{ROOT}"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.stdout == "imported\n", done.stderr
