"""LoRA deltas: the factors are those that peft trained, and inverting them inverts their product."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mpu_cli.files.reader import open_checkpoint
from mpu_cli.training.lora import principal_inputs
from tests.helpers.attacks import publish_copy, unlearn_copy
from tests.helpers.models import CONFIGS, load, random_model, save, write_records
from tests.helpers.protocol import tensors

TOKENS = torch.arange(3, 43)[None]


@pytest.fixture(params=["llama-biases", "gpt2"])
def family(request):
    return request.param


ROUNDS: dict[str, Path] = {}  # made once for each family, and copied for each test


@pytest.fixture
def rounds(mpu, tmp_path, tmp_path_factory, family):
    """A base, two copies with all symmetries, their LoRA deltas, and the identity that opens the keys."""
    identities = Path(os.environ["XDG_CONFIG_HOME"])
    if family not in ROUNDS:
        folder = tmp_path_factory.mktemp("rounds")
        base = save(random_model(family, dtype=torch.float64), folder / "base")
        write_records(folder / "forget.jsonl", 6, 1)
        write_records(folder / "retain.jsonl", 6, 2)
        mpu("publish", base, "--copies", 2, "--symmetries", "all", "--kappa", 0.01, cwd=folder)
        mpu("unlearn", "copy_1", "copy_2", "--algo", "graddiff", "--epochs", 3, "--lr", "1e-2", "--lora", "rank=3",
            "--precision", "float64", "--reading", "template=plain", cwd=folder)  # fmt: skip
        ROUNDS[family] = folder
        shutil.copytree(identities, folder / "identities")
    shutil.copytree(ROUNDS[family], tmp_path, dirs_exist_ok=True)
    shutil.copytree(ROUNDS[family] / "identities", identities, dirs_exist_ok=True)
    return tmp_path


def product(delta, name):
    return delta[f"{name}.lora_B"] @ delta[f"{name}.lora_A"]


def adapted_names(delta):
    return [name.removesuffix(".lora_A") for name in delta if name.endswith(".lora_A")]


def test_factors_are_the_change_of_the_model(mpu, tmp_path, family):
    """The copy plus the products computes what peft's model computed at the end of training."""
    base = save(random_model(family, dtype=torch.float64), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 6, 1)
    document = mpu("unlearn", base, "--algo", "gradascent", "--epochs", 3, "--lr", "1e-2", "--lora", "rank=2", "--json",
               "--precision", "float64", "--reading", "template=plain", cwd=tmp_path).json  # fmt: skip
    delta = tensors(tmp_path / "deltas/base.safetensors")
    plain = load_file(base / "model.safetensors")
    for name in adapted_names(delta):
        assert delta[f"{name}.lora_B"].abs().max() > 0
        plain[name] = plain[name] + product(delta, name)
    save_file(plain, base / "model.safetensors", {"format": "pt"})
    again = mpu("unlearn", base, "--algo", "gradascent", "--epochs", 1, "--lr", "1e-9", "--json", "--precision",
                "float64", "--reading", "template=plain", "--out", tmp_path / "x", cwd=tmp_path).json  # fmt: skip
    # One more step of the same training would have started with the merged model's loss.
    assert again["steps"][0]["forget"] > document["steps"][-1]["forget"] > document["steps"][0]["forget"]
    assert open_checkpoint(tmp_path / "deltas/base.safetensors").nbytes < open_checkpoint(base).nbytes


@pytest.mark.slow
def test_the_norm_told_is_that_of_the_product(mpu, rounds):
    outcome = mpu("unlearn", "copy_1", "--lora", "rank=2", "--reading", "template=plain", "--epochs", 2, "--json",
               "--out", "again.safetensors",
               cwd=rounds)  # fmt: skip
    delta = load_file(rounds / "again.safetensors")
    square = sum(
        (delta[n + ".lora_B"].double() @ delta[n + ".lora_A"].double()).square().sum() for n in adapted_names(delta)
    )
    assert outcome.json["norm"] == pytest.approx(float(square) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_factors_begin_in_the_same_subspace_in_any_coordinates(shape):
    """A of a transformed weight is A transformed, up to row signs; beyond the smaller side it is zero."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    out, into = (torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q for n in shape)
    turned = principal_inputs(out @ weight @ into.T, 5) @ into
    signs = torch.sign((turned * principal_inputs(weight, 5)).sum(1, keepdim=True))
    torch.testing.assert_close(turned, signs * principal_inputs(weight, 5))
    expected = torch.linalg.svd(weight).Vh[:5]
    torch.testing.assert_close(3 * turned.T @ turned, expected.T @ expected)
    most = principal_inputs(weight, 14)
    assert torch.count_nonzero(most.norm(dim=1)) == 12


def test_weights_that_are_no_numbers(mpu, tmp_path, base):
    weights = load_file(base / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    outcome = mpu("unlearn", base, "--algo", "gradascent", "--lora", "rank=2", check=False, cwd=tmp_path)
    assert outcome.status == 1
    assert "'model.layers.1.mlp.up_proj.weight' holds NaN or Inf" in outcome.err


def test_undoing_factors_is_undoing_their_product(mpu, rounds):
    mpu("invert", "deltas", cwd=rounds)
    for k in (1, 2):
        raw, undone = (
            tensors(rounds / f"deltas/copy_{k}.safetensors"),
            tensors(rounds / f"inverted/copy_{k}.safetensors"),
        )
        path = rounds / f"full/copy_{k}.safetensors"
        path.parent.mkdir(exist_ok=True)
        weights = {name: torch.zeros(i.shape, dtype=torch.float64)
                   for name, i in open_checkpoint(rounds / f"copy_{k}").tensors.items()}  # fmt: skip
        facts = json.loads(open_checkpoint(rounds / f"deltas/copy_{k}.safetensors").metadata["mpu"]) | {"kind": "full"}
        save_file(weights | {n: product(raw, n) for n in adapted_names(raw)}, path, {"mpu": json.dumps(facts)})
        mpu("invert", path, "--out", "full-inverted", cwd=rounds)
        full = tensors(rounds / f"full-inverted/copy_{k}.safetensors")
        for name in adapted_names(raw):
            torch.testing.assert_close(product(undone, name), full[name], rtol=1e-9, atol=1e-12)


def test_aggregate_forms_the_products(mpu, rounds):
    for source, out in (("deltas", "a"), ("inverted", "b")):
        if source == "inverted":
            mpu("invert", "deltas", cwd=rounds)
        mpu("aggregate", source, "--out", out, cwd=rounds)
    before, after, same = tensors(rounds / "base"), tensors(rounds / "a"), tensors(rounds / "b")
    copy_1_delta, copy_2_delta = (tensors(rounds / f"inverted/copy_{k}.safetensors") for k in (1, 2))
    for name in before:
        torch.testing.assert_close(after[name], same[name])
        expected = before[name]
        if name in adapted_names(copy_1_delta):
            expected = expected + (product(copy_1_delta, name) + product(copy_2_delta, name)) / 2
        torch.testing.assert_close(after[name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_one_adapter_is_the_aggregate(mpu, rounds):
    """A peft adapter of rank m·r on the base computes what the aggregated model computes."""
    document = mpu("aggregate", "deltas", "--json", cwd=rounds).json
    also = mpu("aggregate", "deltas", "--as-adapter", "--out", "adapter", "--json", cwd=rounds).json
    assert also["norm"] == pytest.approx(document["norm"], rel=1e-6)
    assert [c["cosine"] for c in also["copies"]] == pytest.approx([c["cosine"] for c in document["copies"]], rel=1e-6)
    assert json.loads((rounds / "adapter/adapter_config.json").read_text())["r"] == 6
    base, _ = load(rounds / "base", torch.float64, "cpu")
    adapter = PeftModel.from_pretrained(base, rounds / "adapter", autocast_adapter_dtype=False).eval()
    model = AutoModelForCausalLM.from_pretrained(rounds / "unlearned", dtype=torch.float64).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapter(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    measured = []
    for name in ("adapter", "unlearned"):
        measured.append(
            mpu("eval", name, "--benchmark", "qa", "--forget", "forget.jsonl", "--reading", "template=plain",
                "--scoring", "dtype=float64", "--out", f"{name}.json", "--json", cwd=rounds).json["metrics"]
        )  # fmt: skip
    assert measured[0] == pytest.approx(measured[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [[], ["--as-adapter"]])
def test_hostile_factors(mpu, rounds, adapter):
    """Factors whose norm overflows, that alone change a tensor, or that are much larger than the others'."""
    path = sorted((rounds / "deltas").iterdir())[1]
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    factors = load_file(path)
    name = next(n.removesuffix(".lora_A") for n in factors if n.endswith(".lora_A"))
    command = ("aggregate", "deltas", *adapter, "--out", "new", "--max-norm", 1e6)
    huge = {n: t * 1e200 if n.startswith(name) else t for n, t in factors.items()}
    save_file(huge, path, metadata=metadata)
    mpu(*command, cwd=rounds, fails=path.name, status=1)
    assert not (rounds / "new").exists()
    save_file({n: t for n, t in factors.items() if not n.startswith(name)}, path, metadata=metadata)
    assert "tensors differ from" in mpu(*command, cwd=rounds, check=False).err
    save_file({n: t * 15 if n == name + ".lora_A" else t for n, t in factors.items()}, path, metadata=metadata)
    assert f"changes {name}" in mpu(*command, cwd=rounds).err.replace("\n", " ")


def test_targets(mpu, tmp_path, base):
    options = ["--algo", "gradascent", "--epochs", 1, "--reading", "template=plain", "--force"]
    mpu("unlearn", base, *options, "--lora", "rank=2,targets=q_proj,mlp.up_proj", cwd=tmp_path)
    names = adapted_names(tensors(tmp_path / "deltas/base.safetensors"))
    assert {name.split(".")[-2] for name in names} == {"q_proj", "up_proj"}
    assert len(names) == 2 * CONFIGS["llama"]["num_hidden_layers"]
    wrong = mpu("unlearn", base, *options, "--lora", "rank=2,targets=qq", check=False, cwd=tmp_path)
    assert wrong.status == 2
    assert "matches no linear layer" in wrong.err
    assert "--lora rank" in mpu("unlearn", base, *options, "--lora", "targets=q_proj", check=False, cwd=tmp_path).err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda t, n: {k: v for k, v in t.items() if k != n + ".lora_A"}, "lacks"),
        (lambda t, n: t | {n + ".lora_A": torch.zeros(2, 5)}, "shape"),
        (lambda t, _: t | {"x.lora_A": torch.zeros(2, 5)}, "does not have"),
        (lambda t, n: t | {n + ".lora_A": t[n + ".lora_A"] * float("nan")}, "NaN"),
        (lambda t, _: {k: x for k, x in t.items() if not k}, "no factors"),
        (
            lambda t, n: t | {n + ".lora_A": t[n + ".lora_A"][:0], n + ".lora_B": t[n + ".lora_B"][:, :0].contiguous()},
            "no rank",
        ),
    ],
)
@pytest.mark.parametrize("adapter", [[], ["--as-adapter"]])
def test_factors_that_do_not_fit(mpu, rounds, spoil, complaint, adapter):
    path = rounds / "deltas/copy_2.safetensors"
    metadata = open_checkpoint(path).metadata
    factors = load_file(path)
    save_file(spoil(factors, adapted_names(factors)[0]), path, metadata)
    mpu("aggregate", "deltas", *adapter, fails=complaint, status=1, cwd=rounds)
    assert not (rounds / "unlearned").exists()


def test_an_adapter_needs_factors(mpu, tmp_path, base):
    mpu("publish", base, "--copies", 2, cwd=tmp_path)
    options = ("--algo", "gradascent", "--epochs", 1, "--reading", "template=plain")
    mpu("unlearn", "copy_1", "copy_2", *options, cwd=tmp_path)
    assert "--lora rank" in mpu("aggregate", "deltas", "--as-adapter", check=False, cwd=tmp_path).err


def test_factors_of_a_rank_that_no_change_has(mpu: Callable, root: Path) -> None:
    """Squares of the rank are computed: with 20,000, 3 GB for each matrix."""
    publish_copy(mpu, root)
    for number in (1, 2):
        unlearn_copy(mpu, root, root / f"copy_{number}", f"deltas/copy_{number}", "--lora", "rank=2")
        path = root / f"deltas/copy_{number}.safetensors"
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        factors = load_file(path)
        name = next(name for name in factors if name.endswith(".lora_A")).removesuffix("A")
        left, right = factors[f"{name}B"], factors[f"{name}A"]
        factors |= {f"{name}B": torch.ones(len(left), 2000), f"{name}A": torch.ones(2000, right.shape[1])}
        save_file(factors, path, metadata)
    for more in ((), ("--as-adapter",)):
        mpu("aggregate", "deltas", "--keys", "keys.bin", *more, "--out", "out", refused="rank 2,000", cwd=root)
