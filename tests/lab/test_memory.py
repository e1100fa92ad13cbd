"""Peak memory of a training before it: what the pass without data counts, and what is said to fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mpu_cli.errors import UsageError
from mpu_cli.measuring.cost import Work, peak_memory
from mpu_cli.model.load import load
from mpu_cli.model.network import decoder_layers, input_of, output_of_layer
from mpu_cli.model.source import open_model
from mpu_cli.model.tensors import is_quantized, shape_of
from mpu_cli.options.declare import from_flat
from mpu_cli.options.unlearning import Unlearning
from mpu_cli.training.checks import PRECISIONS, check_options
from mpu_cli.training.delta import change_of
from mpu_cli.training.execution import in_precision
from mpu_cli.wording import bytes_of
from tests.helpers.models import random_model, save

WORK = Work(3, 20, 30)


def saved_by(model: torch.nn.Module, work: Work) -> int:
    """Bytes that a real pass keeps for its backward pass, beside the model's tensors."""
    model_storages = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved_tensors: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        root = tensor.untyped_storage().data_ptr()
        if root not in model_storages:
            saved_tensors[root] = tensor  # held, so that no other tensor gets its place
        return tensor

    ids = torch.zeros(work.rows, work.length, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, -1] = 0  # one record is shorter, so that there is a mask
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), input_of(model.get_output_embeddings()):
        output = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in saved_tensors.values())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_those_of_a_real_pass(tmp_path: Path, family: str, checkpointing: bool) -> None:
    copy = open_model(str(save(random_model(family), tmp_path / "base")))
    options = from_flat(Unlearning, {"lr": 1e-3, "gradient_checkpointing": checkpointing, "train_embeddings": True})
    predicted = peak_memory(copy, options, check_options(options), WORK)
    model, _ = load(copy, torch.float32, "cpu")
    model.train()
    saved_bytes = saved_by(model, WORK)
    expected = saved_bytes
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        expected = saved_by(model, WORK) + saved_bytes // model.config.num_hidden_layers
    assert predicted.activations == pytest.approx(expected, rel=0.02)
    assert predicted.weights == sum(p.nbytes for p in model.parameters())
    assert predicted.gradients == predicted.weights
    assert predicted.state == 2 * predicted.weights  # AdamW's


def test_what_fits(mpu: Callable, base: Path) -> None:
    """A training fits into what it takes, and no less; smaller micro-batches take less."""
    command = ("plan", base, "--length", 1024, "--batch-size", 32, "--json")
    report = mpu(*command, "--memory", "1TB").json
    needed = report["client_memory"]["total"]
    assert report["fits"]
    assert not mpu(*command, "--memory", str(int(0.9 * needed))).json["fits"]
    assert mpu(*command, "--memory", str(int(0.9 * needed)), "--training", "micro_batch_size=1").json["fits"]
    refused = mpu("plan", base, "--memory", "1MB")
    assert "does not fit\tinto 1 MB" in refused.out
    assert "gradient_checkpointing" in refused.err


@pytest.mark.slow
def test_the_dry_run_says_the_same(mpu: Callable, tmp_path: Path) -> None:
    base = save(random_model("llama"), tmp_path / "base")
    records = tmp_path / "r.jsonl"
    records.write_text(
        '{"question": "Who?", "answer": "Ada."}\n{"question": "Where was she born?", "answer": "There."}\n'
    )
    others = tmp_path / "others.jsonl"
    others.write_text(records.read_text().replace("Who?", "Who else?").replace("Where", "When"))
    planned = mpu("plan", base, "--forget", records, "--batch-size", 2, "--json").json["client_memory"]["total"]
    dry = mpu("unlearn", base, "--forget", records, "--retain", others, "--batch-size", 2, "--dry-run", "--json").json
    assert dry["memory"] == planned


def test_amounts_of_memory() -> None:
    amounts = {"24GB": 24e9, "80 GiB": 80 * 2**30, "512M": 512e6, "1.5TB": 1.5e12, "7000000": 7e6}
    assert {text: bytes_of(text) for text in amounts} == amounts
    for wrong in ("", "GB", "-1GB", "24 apples", "0GB", "24"):
        with pytest.raises(UsageError):
            bytes_of(wrong)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_mixtures_are_estimated_by_a_formula(tmp_path: Path, family: str) -> None:
    """Which expert a token goes to depends on data: the estimate is not off by more than a half."""
    copy = open_model(str(save(random_model(family), tmp_path / "base")))
    options = from_flat(Unlearning, {"lr": 1e-3, "train_embeddings": True})
    model, _ = load(copy, torch.float32, "cpu")
    model.train()
    predicted = peak_memory(copy, options, check_options(options), WORK).activations
    assert predicted == pytest.approx(saved_by(model, WORK), rel=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_activations_with_lora_are_those_of_a_real_pass(tmp_path: Path, precision: str, quantize: str | None) -> None:
    """peft's layers keep no copies of their inputs in another dtype, which would show here."""
    if quantize:
        pytest.importorskip("bitsandbytes")
    copy = open_model(str(save(random_model("llama", hidden_size=192, intermediate_size=256), tmp_path / "base")))
    options = from_flat(Unlearning, {"lr": 1e-3, "lora_rank": 2, "precision": precision, "quantize": quantize})
    predicted = peak_memory(copy, options, check_options(options), WORK)
    dtype = PRECISIONS[precision]
    model, _ = load(copy, dtype, "cpu", quantize=options.lora.quantize)
    in_precision(model, precision)
    model_bytes = sum(tensor.nbytes for tensor in model.parameters())
    change = change_of(options, model, copy.checkpoint, dtype)
    trained = change.wrap(model).train()
    factors = sum(p.nbytes for p in trained.parameters() if p.requires_grad)
    close = 0.2 if quantize and precision == "mixed" else 0.1
    assert predicted.activations == pytest.approx(saved_by(trained, WORK), rel=close)
    assert predicted.gradients == factors
    if quantize:
        scales = sum(p.quant_state.absmax.nbytes for p in model.parameters() if is_quantized(p))
        largest = max(shape_of(p).numel() for p in model.parameters() if is_quantized(p))
        assert predicted.weights == model_bytes + scales + largest * dtype.itemsize + factors


def test_layers_above_the_one_that_is_read_keep_nothing() -> None:
    """As rmu trains: the backward pass of a loss on layer 0 keeps as much in a deeper model."""
    saved_bytes = []
    for depth in (2, 6):
        model = random_model("llama", num_hidden_layers=depth).train()
        for module in (*decoder_layers(model)[1:], model.model.norm, model.get_output_embeddings()):
            module.requires_grad_(False)  # as training does where no loss reads them
        with output_of_layer(model, 0):
            saved_bytes.append(saved_by(model, WORK))
    assert saved_bytes[0] == saved_bytes[1]
