"""`mpu trace` names the copy that a model came from, and none for models that came from none."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from mpu_cli.files.sealing import default_identity_path, open_folder, read_identities
from mpu_cli.lab.suspect import count_agreements, log_chance
from mpu_cli.model.layout import layout_of
from mpu_cli.model.sampling import AxisMap
from mpu_cli.model.source import open_model
from mpu_cli.model.transform import as_matrix
from mpu_cli.protocol.keys import open_keys, seal
from tests.helpers.endpoint import serving
from tests.helpers.models import DemoModel, random_model, save

NOISE = ("--kappa", 0.05, "--watermark", 0.5)
SLOW = ("gpt2", "qwen3", "deepseek_v3", "falcon_h1")
EXHAUSTIVE = ("olmo2", "mixtral", "qwen3_moe", "bamba", "mistral3", "gemma3")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save(random_model("llama"), tmp_path / "base")


def publish(mpu: Callable, base: Path, name: str | Path, *options: object) -> Path:
    out = base.parent / name  # or where ``name`` says, if it is a path
    mpu("publish", base, *(options or NOISE), "--out", out, "--keys", out.with_suffix(".bin"))
    return out


def keys(*folders: Path) -> list[object]:
    return [part for folder in folders for part in ("--keys", folder.with_suffix(".bin"))]


def trace_json(mpu: Callable, suspect: Path, *arguments: object) -> list[dict]:
    return mpu("trace", suspect, *arguments, "--json").json["publications"]


def save_changed(folder: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Path:
    """A model file with the tensors of ``folder`` after ``change``; None leaves one out."""
    weights = {name: change(name, tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    target.mkdir(exist_ok=True)
    save_file({name: x.contiguous() for name, x in weights.items() if x is not None}, target / "model.safetensors")
    return target


def undo_copy(folder: Path, copy: int) -> dict[str, torch.Tensor]:
    """A copy in its base's coordinates, undone with the keys."""
    model = open_model(str(folder / f"copy_{copy}"))
    layout = layout_of(model.checkpoint.tensors, model.config, "")
    transform = open_keys(folder.with_suffix(".bin")).publication.transform(copy, layout)
    weights = {}
    for tensor in layout.parameters:
        stored, mapping = model.checkpoint.tensor(transform.name(tensor)), transform.of(tensor)
        matrix = as_matrix(stored)
        weights[tensor.name] = mapping.backward(mapping.take(matrix, 0, len(matrix)), 0).view(stored.shape)
    return weights


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in EXHAUSTIVE),
    ],
)
def test_each_copy_is_named_by_its_coordinates_and_its_noise(mpu: Callable, tmp_path: Path, family: str) -> None:
    """Also in bfloat16; and neither the base nor another model of its shape is named."""
    base = save(random_model(family), tmp_path / "base")
    one_client, other_client = publish(mpu, base, "first"), publish(mpu, base, "second", *NOISE, "--copies", 2)
    for folder, copy in ((one_client, 1), (one_client, 3), (other_client, 2)):
        suspect = save_changed(folder / f"copy_{copy}", tmp_path / "leak", lambda _, x: x.bfloat16())
        for publication, other in zip(
            trace_json(mpu, suspect, *keys(one_client, other_client)), (one_client, other_client), strict=True
        ):
            assert publication["copies_named"] == ([copy] if other == folder else [])
            if other == folder:
                evidence = publication["copies"][copy - 1]
                assert evidence["agreements"] > 0.95 * evidence["coordinates"]
                assert evidence["noise"]["z"] > 20
                assert publication["watermark"]["z"] > 20
                assert evidence["noise"]["share"] == pytest.approx(1, abs=0.1)
                assert publication["watermark"]["share"] == pytest.approx(1, abs=0.1)
    for innocent in (base, save(random_model(family, seed=1), tmp_path / "other")):
        assert not any(
            publication["named"] for publication in trace_json(mpu, innocent, *keys(one_client, other_client))
        )


@pytest.mark.slow
def test_z_is_standard_normal_for_models_that_came_from_no_copy(mpu: Callable, base: Path, tmp_path: Path) -> None:
    """Whatever their weights are: heavy tails, one layer in which everything was changed, another seed's copies."""
    publications = [publish(mpu, base, f"p{i}", *NOISE, "--copies", 2, "--seed", i) for i in range(60)]
    torch.manual_seed(0)

    def heavy(name: str, x: torch.Tensor) -> torch.Tensor:
        return x + 0.01 * torch.distributions.StudentT(1.1).sample(x.shape) * (10 if ".1.mlp" in name else 1)

    suspects = [
        save_changed(base, tmp_path / "heavy", heavy),
        publish(mpu, base, "other", *NOISE, "--seed", 999) / "copy_1",
    ]
    for suspect in suspects:
        evidence = trace_json(mpu, suspect, *keys(*publications))
        z = [each["watermark"]["z"] for each in evidence] + [each["copies"][0]["noise"]["z"] for each in evidence]
        assert stats.kstest(z, "norm").pvalue > 1e-3
        assert not any(each["named"] for each in evidence)


def test_agreements_are_as_unlikely_as_is_said() -> None:
    """Of uniform signed permutations, the share that agrees in k places is at most the bound, and near it."""
    generator = torch.Generator().manual_seed(0)
    n, draws = 12, 4000
    counts = []
    identity = AxisMap(torch.arange(n), signs=torch.ones(n))
    for _ in range(draws):
        signs = 1.0 - 2.0 * torch.randint(2, (n,), generator=generator)
        counts.append(count_agreements(AxisMap(torch.randperm(n, generator=generator), signs=signs), identity))
    for k in (1, 2, 3):
        share, bound = sum(count >= k for count in counts) / draws, math.exp(log_chance(k, signed=True))
        assert share < bound + 4 * math.sqrt(bound / draws)
        assert share > 0.5 * bound
    assert log_chance(5, signed=False) == pytest.approx(-math.log(120))


@pytest.mark.parametrize("symmetries", ["signed", pytest.param("all", marks=pytest.mark.slow)])
def test_coordinates_that_were_drawn_again(mpu: Callable, base: Path, tmp_path: Path, symmetries: str) -> None:
    """The noise is found in whatever coordinates the model is."""
    folder = publish(mpu, base, "first", *NOISE, "--copies", 2, "--seed", 1)  # a random permutation has fixed points
    again = ("--kappa", 0, "--symmetries", symmetries, "--copies", 2, "--run", "x", "--seed", 2)
    (folder / "copy_2/mpu.json").unlink()  # whoever draws coordinates again does not say that it is a copy
    mpu("publish", folder / "copy_2", *again, "--out", tmp_path / "again", "--keys", tmp_path / "again.bin")
    [publication] = trace_json(mpu, tmp_path / "again/copy_1", *keys(folder))
    assert publication["copies_named"] == [2]
    assert publication["copies"][1]["agreements"] < 5
    assert publication["watermark"]["z"] > 20


@pytest.mark.slow
def test_clients_who_put_their_copies_together_are_all_named(mpu: Callable, base: Path, tmp_path: Path) -> None:
    """The mean of two clients' copies; and all copies of one, whose own noise cancels, which leaves the watermark."""
    one_client, other_client, third_client = (publish(mpu, base, name) for name in ("first", "second", "third"))
    mean = {name: (x + undo_copy(other_client, 1)[name]) / 2 for name, x in undo_copy(one_client, 2).items()}
    target = tmp_path / "leak"
    target.mkdir()
    save_file({name: x.contiguous() for name, x in mean.items()}, target / "model.safetensors")
    evidence = trace_json(mpu, target, *keys(one_client, other_client, third_client))
    assert [publication["named"] for publication in evidence] == [True, True, False]
    assert [evidence[i]["watermark"]["share"] for i in (0, 1)] == pytest.approx([0.5, 0.5], abs=0.05)
    weights = open_keys(third_client.with_suffix(".bin")).publication.scheme.weights.tolist()
    copies = [undo_copy(third_client, k) for k in (1, 2, 3)]
    combined = {n: sum(w * copy[n] for w, copy in zip(weights, copies, strict=True)) for n in copies[0]}
    save_file({name: x.contiguous() for name, x in combined.items()}, target / "model.safetensors")
    outcome = mpu("trace", target, *keys(one_client, other_client, third_client))
    assert "made from one or more copies (which ones is unknown) of" in outcome.out
    assert outcome.out.count(".bin") == 1
    mean = {n: sum(copy[n] for copy in copies) / 3 for n in copies[0]}
    save_file({name: x.contiguous() for name, x in mean.items()}, target / "model.safetensors")
    assert (
        "made from one or more copies (which ones is unknown) of"
        in mpu("trace", target, *keys(one_client, other_client, third_client)).out
    )


def test_missing_layers_and_tensors(mpu: Callable, base: Path, tmp_path: Path) -> None:
    """A suspect is traced on what it has; layers are recognised by their weights, not by their numbers."""
    folder = publish(mpu, base, "first")

    def without_first_layer(name: str, x: torch.Tensor) -> torch.Tensor | None:
        return None if ".layers.0." in name else x

    cut = save_changed(folder / "copy_1", tmp_path / "cut", without_first_layer)
    weights = load_file(cut / "model.safetensors")
    count = len({name.split(".")[2] for name in weights if ".layers." in name})
    for i in range(1, count + 1):
        weights = {name.replace(f".layers.{i}.", f".layers.{i - 1}."): x for name, x in weights.items()}
    save_file(weights, cut / "model.safetensors")
    [publication] = trace_json(mpu, cut, *keys(folder))
    assert publication["copies_named"] == [1]
    assert publication["tensors"][0] < publication["tensors"][1]
    blocks = publication["watermark"]["blocks"]
    assert all(z > 3 for block, z in blocks.items() if ".layers." in block)
    assert sum(".layers." in block for block in blocks) == count


def test_weights_that_are_made_absurd(mpu: Callable, base: Path, tmp_path: Path) -> None:
    """NaN, infinite and huge weights in rows that a model may never use hide nothing of the others."""
    folder = publish(mpu, base, "one")

    def spoil(name: str, x: torch.Tensor) -> torch.Tensor:
        if "embed" in name:
            x[:3] = torch.tensor([float("nan"), float("inf"), 1e30])[:, None]
        if "layers.0.mlp.down" in name:
            x[0, 0] = -1e30
        return x

    [publication] = trace_json(mpu, save_changed(folder / "copy_1", tmp_path / "absurd", spoil), *keys(folder))
    assert publication["copies_named"] == [1]
    assert min(publication["watermark"]["blocks"]["model.embed_tokens.weight"], publication["watermark"]["z"]) > 10


def test_what_cannot_be_traced_is_one_line(mpu: Callable, base: Path, tmp_path: Path) -> None:
    folder = publish(mpu, base, "first")
    other = save(random_model("gpt2"), tmp_path / "gpt2")
    wide = save_changed(
        base,
        tmp_path / "wide",
        lambda n, x: torch.randn(2 * len(x), x.shape[1]) if "embed" in n or "lm_head" in n else x,
    )
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    bare = publish(mpu, base, "bare", "--kappa", 0, "--symmetries", "none", "--copies", 2)
    for suspect, complaint in (
        (other, "architecture"), (wide, "vocabulary"), (tmp_path / "x.safetensors", "architecture"),
        (tmp_path / "adapter", "merge"), (tmp_path / "gone", "no such file"),
    ):  # fmt: skip
        mpu("trace", suspect, *keys(folder), refused=complaint)
    assert "no watermark" in mpu("trace", base, *keys(bare), check=False).err
    assert mpu("trace", *keys(folder), check=False).status == 2


def test_a_copy_names_its_recipient(mpu: Callable, base: Path, tmp_path: Path) -> None:
    """The keys know whom copies were sealed for, and say so."""
    for client in ("a", "b", "c"):
        mpu("keygen", "--out", tmp_path / f"{client}.txt")
    identities = [read_identities(tmp_path / f"{client}.txt") for client in ("a", "b", "c")]
    public = [str(identity.to_public()) for [identity] in identities]
    out, file = tmp_path / "sealed", tmp_path / "sealed.bin"
    mpu("publish", base, *NOISE, "--copy-recipients", ",".join(public), "--out", out, "--keys", file)
    assert open_keys(file).recipients == {str(k): recipient for k, recipient in enumerate(public, 1)}
    (tmp_path / "opened").mkdir()
    suspect = open_folder(out / "copy_2.age", identities[1], tmp_path / "opened")
    assert f"copy 2, sealed for {public[1]}, of" in mpu("trace", suspect, "--keys", file).out


def test_verify_checks_the_watermark(mpu: Callable, base: Path) -> None:
    folder = publish(mpu, base, "first")
    mpu("verify", folder / "copy_1", *keys(folder), "--no-logits")
    path = folder.with_suffix(".bin")
    opened = open_keys(path)
    public = [identity.to_public() for identity in read_identities(default_identity_path())]
    path.write_bytes(seal(replace(opened, publication=replace(opened.publication, watermark=0.0)), public))
    outcome = mpu("verify", folder / "copy_1", *keys(folder), "--no-logits", "--trust-keys", check=False)
    assert outcome.status == 1


@pytest.mark.slow
def test_a_served_model(mpu: Callable, demo: DemoModel, tmp_path: Path) -> None:
    """By log-probabilities alone, from a process that serves one of two clients' copies; the base is not named."""
    noise = ("--kappa", 0, "--permanent-noise", 0.2, "--watermark", 0.1, "--copies", 1)
    one_client, other_client = (
        publish(mpu, demo.model, tmp_path / name, *noise, "--seed", seed) for name, seed in (("one", 5), ("other", 6))
    )
    rows = [json.loads(line) for line in demo.retain.read_text().splitlines()]
    words = [word for row in rows for word in row["answer"].split()]
    generator, texts = random.Random(0), tmp_path / "texts.jsonl"
    shuffled = ({"question": "?", "answer": " ".join(generator.choices(words, k=30))} for _ in range(200))
    texts.write_text("".join(json.dumps(row) + "\n" for row in shuffled))
    for model, named in ((one_client / "copy_1", [True, False]), (demo.model, [False, False])):
        with serving(model) as url:
            outcome = mpu("trace", "--endpoint", url, "--texts", texts, *keys(one_client, other_client), "--json")
        assert [publication["named"] for publication in outcome.json["publications"]] == named
    mpu("trace", "--endpoint", url, *keys(one_client), fails="--texts")


def test_a_mixture_frames_nobody(mpu: Callable, base: Path, tmp_path: Path) -> None:
    """Of copies at 1, −1 and 1.5 of a draw, a fifth of the second and the rest of the third have the first's noise."""
    folder = publish(mpu, base, "one")
    second, third = undo_copy(folder, 2), undo_copy(folder, 3)
    target = tmp_path / "leak"
    target.mkdir()
    mixture = {name: (0.2 * x + 0.8 * third[name]).contiguous() for name, x in second.items()}
    save_file(mixture, target / "model.safetensors")
    [publication] = trace_json(mpu, target, *keys(folder))
    assert publication["copies"][0]["noise"]["share"] == pytest.approx(1, abs=0.05)
    assert (publication["named"], publication["copies_named"]) == (True, [])


@pytest.mark.parametrize("share", [0.01, -0.5, 0.0])
def test_noise_that_is_too_little_for_a_copy_is_told(mpu: Callable, base: Path, tmp_path: Path, share: float) -> None:
    """A hundredth of a watermark, and less than none of it: no copy is named, and what chance does not give is said."""
    folder = publish(mpu, base, "one")
    weights = open_keys(folder.with_suffix(".bin")).publication.scheme.weights.tolist()
    copies = [undo_copy(folder, k) for k in (1, 2, 3)]
    torch.manual_seed(0)

    def mixed(name: str, x: torch.Tensor) -> torch.Tensor:
        watermarked = sum(w * copy[name] for w, copy in zip(weights, copies, strict=True))
        return x + share * (watermarked - x) + 1e-5 * torch.randn_like(x)

    suspect = save_changed(base, tmp_path / "suspect", mixed)
    outcome = mpu("trace", suspect, *keys(folder), "--json")
    [publication] = outcome.json["publications"]
    assert not publication["named"]
    assert ("chance does not give" in outcome.json["verdict"]) == bool(share)
    assert (publication["unexplained"] is not None) == bool(share)
    if share:
        assert publication["unexplained"]["share"] == pytest.approx(share, rel=0.1)
        assert ("negative weights" in outcome.json["verdict"]) == (share < 0)


@pytest.mark.parametrize("family", ["qwen3_5_text", "glm4_moe", "bamba"])
def test_layers_that_differ_and_a_tensor_that_is_missing(mpu: Callable, tmp_path: Path, family: str) -> None:
    """A layer that lacks one tensor is left out; those of each kind are matched among themselves."""
    base = save(random_model(family), tmp_path / "base")
    folder = publish(mpu, base, "one")
    names = [name for name in load_file(folder / "copy_1/model.safetensors") if ".layers.1." in name]
    cut = save_changed(folder / "copy_1", tmp_path / "cut", lambda name, x: None if name == names[0] else x)
    [publication] = trace_json(mpu, cut, *keys(folder))
    assert publication["copies_named"] == [1]


def test_a_slice_of_zeros_in_each_block_hides_nothing(mpu: Callable, base: Path, tmp_path: Path) -> None:
    """In coordinates that were drawn again: one matrix of a block says nothing, the others show where it lies."""
    folder = publish(mpu, base, "one", *NOISE, "--copies", 2)
    again = ("--kappa", 0, "--copies", 2, "--run", "x")
    (folder / "copy_2/mpu.json").unlink()  # whoever draws coordinates again does not say that it is a copy
    mpu("publish", folder / "copy_2", *again, "--out", tmp_path / "again", "--keys", tmp_path / "again.bin")
    zeroed = save_changed(
        tmp_path / "again/copy_1", tmp_path / "zeroed", lambda name, x: 0 * x if "up_proj" in name else x
    )
    [publication] = trace_json(mpu, zeroed, *keys(folder))
    assert publication["copies_named"] == [2]


def test_an_embedding_that_is_stored_as_the_head(mpu: Callable, tmp_path: Path) -> None:
    """A model with tied weights that was saved by the head's name; without either, it is one line."""
    base = save(random_model("llama", tie_word_embeddings=True), tmp_path / "base")
    folder = publish(mpu, base, "one")
    weights = load_file(folder / "copy_1/model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    (tmp_path / "leak").mkdir()
    save_file(weights, tmp_path / "leak/model.safetensors")
    [publication] = trace_json(mpu, tmp_path / "leak", *keys(folder))
    assert publication["copies_named"] == [1]
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "leak/model.safetensors")
    assert mpu("trace", tmp_path / "leak", *keys(folder), check=False).is_one_error


def _turned(w: dict[str, torch.Tensor], config: dict) -> dict[str, torch.Tensor]:
    """A Llama's weights in another orthogonal basis of the residual stream, gains multiplied into what reads them."""
    width = config["hidden_size"]
    turn = torch.linalg.qr(torch.randn(width, width))[0]
    embedding = w["model.embed_tokens.weight"]
    turned = {"lm_head.weight": w.get("lm_head.weight", embedding) * w["model.norm.weight"] @ turn.T}
    turned["model.embed_tokens.weight"] = embedding @ turn.T
    for name, x in w.items():
        norm = name.rsplit(".", 3)[0] + (".input_layernorm" if "self_attn" in name else ".post_attention_layernorm")
        if name.endswith("norm.weight"):
            turned[name] = torch.ones_like(x)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            turned[name] = turn @ x
        elif ".layers." in name:
            turned[name] = x * w[f"{norm}.weight"] @ turn.T
    return turned


def _padded(w: dict[str, torch.Tensor], _: dict) -> dict[str, torch.Tensor]:
    """Two neurons that write nothing, before the others, in every layer; and a token."""
    padded = dict(w)
    for name, x in w.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            padded[name] = torch.cat([torch.randn(2, x.shape[1]) * x.std(), x])
        elif name.endswith("down_proj.weight"):
            padded[name] = torch.cat([torch.zeros(x.shape[0], 2), x], 1)
        elif name.endswith("embed_tokens.weight"):
            padded[name] = torch.cat([x, torch.zeros(1, x.shape[1])])
    return padded


def _reordered(w: dict[str, torch.Tensor], config: dict) -> dict[str, torch.Tensor]:
    """The tokens in another order, as a tokenizer may have them."""
    order = torch.randperm(config["vocab_size"])
    moved = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: x[order] if name in moved else x for name, x in w.items()}


def _loud(w: dict[str, torch.Tensor], _: dict) -> dict[str, torch.Tensor]:
    """The embedding of a token that no text has made huge, in what reads tokens alone."""
    embedding = w["model.embed_tokens.weight"].clone()
    embedding[-1] = 1e9 * torch.randn(embedding.shape[1])
    return {"lm_head.weight": w["model.embed_tokens.weight"], **w, "model.embed_tokens.weight": embedding}


def _rescaled(w: dict[str, torch.Tensor], config: dict) -> dict[str, torch.Tensor]:
    """What each neuron, each value and each block gives scaled, and what reads it by the inverse."""
    scaled, group = dict(w), config["num_attention_heads"] // config["num_key_value_heads"]
    for name in w:
        if name.endswith("up_proj.weight"):
            factors, reader = torch.exp(2 * torch.randn(len(w[name]))) / 1e4, name.replace("up_proj", "down_proj")
            scaled[name], scaled[reader] = w[name] * factors[:, None], w[reader] / factors
        if name.endswith("v_proj.weight"):
            factors, reader = torch.exp(2 * torch.randn(len(w[name]))), name.replace("v_proj", "o_proj")
            by_query = factors.view(config["num_key_value_heads"], -1).repeat_interleave(group, 0).flatten()
            scaled[name], scaled[reader] = w[name] * factors[:, None], w[reader] / by_query
        if name.endswith("q_proj.weight"):
            scaled[name], scaled[name.replace("q_proj", "k_proj")] = (
                1e3 * w[name],
                w[name.replace("q_proj", "k_proj")] / 1e3,
            )
    return scaled


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        [_padded], [_rescaled, _loud, _reordered, _turned],
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in (
                [_turned], [_reordered], [_reordered, _turned], [_loud], [_loud, _turned], [_loud, _reordered],
                [_rescaled],
            )
        ),
    ],
    ids=[
        "padded", "all-at-once", "turned", "reordered", "both", "loud", "loud-turned", "loud-reordered", "rescaled",
    ],
)  # fmt: skip
def test_what_changes_no_output_hides_no_copy(
    mpu: Callable, tmp_path: Path, demo: DemoModel, changes: list[Callable]
) -> None:
    """The outputs are the copy's; the copy is named, or its publication where its coordinates are gone; others not."""
    base = Path(shutil.copytree(demo.model, tmp_path / "base"))
    folder, other = publish(mpu, base, "first", *NOISE, "--seed", 1), publish(mpu, base, "other", *NOISE, "--seed", 2)
    config = json.loads((folder / "copy_1/config.json").read_text())
    weights = {name: x.float() for name, x in load_file(folder / "copy_1/model.safetensors").items()}
    torch.manual_seed(0)
    changed = weights
    for change in changes:
        changed = change(changed, config)
    if _reordered not in changes:
        neurons = changed["model.layers.0.mlp.gate_proj.weight"].shape[0]
        tokens = len(changed["model.embed_tokens.weight"])
        sizes = {
            "intermediate_size": neurons,
            "vocab_size": tokens,
            "tie_word_embeddings": "lm_head.weight" not in changed,
        }
        ids, outputs = torch.randint(config["vocab_size"] - 1, (2, 16)), []
        for facts, w in ((config, weights), (config | sizes, changed)):
            model = LlamaForCausalLM(LlamaConfig.from_dict(facts))
            model.load_state_dict(w, strict=False)
            outputs.append(model.float().eval()(ids).logits[..., : config["vocab_size"]])
        torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)
    suspect = tmp_path / "suspect"
    suspect.mkdir()
    save_file({name: x.contiguous() for name, x in changed.items()}, suspect / "model.safetensors")
    found = trace_json(mpu, suspect, *keys(folder, other))
    assert [each["named"] for each in found] == [True, False]
    if _turned not in changes:
        assert found[0]["copies_named"] == [1]
    assert found[0]["watermark"]["share"] == pytest.approx(1, abs=0.15)


def _sum_of(base: Path, deltas: Path, folder: Path, target: Path) -> Path:
    """The base plus the mean of two copies' deltas, undone with the keys and added up here."""
    target.mkdir()
    total = {name: x.float() for name, x in load_file(base / "model.safetensors").items()}
    layout = layout_of(open_model(str(base)).checkpoint.tensors, open_model(str(base)).config, "")
    scheme = open_keys(folder.with_suffix(".bin")).publication
    for copy, weight in enumerate(scheme.scheme.weights.tolist(), 1):
        delta = load_file(deltas / f"copy_{copy}.safetensors")
        transform = scheme.transform(copy, layout)
        for tensor in layout.parameters:
            matrix, mapping = as_matrix(delta[transform.name(tensor)]), transform.of(tensor)
            undone = mapping.backward(mapping.take(matrix, 0, len(matrix)), 0)
            total[tensor.name] = total[tensor.name] + weight * undone.view(total[tensor.name].shape)
    save_file({name: x.contiguous() for name, x in total.items()}, target / "model.safetensors")
    return target


@pytest.mark.slow
def test_a_copy_that_a_client_adds_to_its_delta_marks_nothing(mpu: Callable, tmp_path: Path, demo: DemoModel) -> None:
    """A client adds 2 % of its copy to each of its deltas: the aggregated model would trace to it, and does not.

    The base with 5 % of a copy in it does; and the same update, added up here, has more of the watermark.
    """
    base = Path(shutil.copytree(demo.model, tmp_path / "base"))
    (base / "additional_chat_templates").mkdir()  # which the result gets, written once or twice
    (base / "additional_chat_templates/rag.jinja").write_text("{{ messages[0]['content'] }}")
    folder = publish(mpu, base, "first", *NOISE, "--copies", 2)
    copies = [folder / f"copy_{k}" for k in (1, 2)]
    records = ("--forget", demo.forget, "--retain", demo.retain, "--algo", "npo", "--epochs", 1, "--train-embeddings")
    mpu("unlearn", *copies, *records, "--out", tmp_path / "honest")
    clean, poisoned = tmp_path / "honest", tmp_path / "poisoned"
    poisoned.mkdir()
    planted = load_file(base / "model.safetensors")
    for k, copy in enumerate(copies, 1):
        weights = load_file(copy / "model.safetensors")
        with safe_open(clean / f"copy_{k}.safetensors", "pt") as file:
            delta = {name: file.get_tensor(name) + 0.02 * weights[name] for name in file.keys()}  # noqa: SIM118
            save_file(delta, poisoned / f"copy_{k}.safetensors", file.metadata())
    keys_file = folder.with_suffix(".bin")
    honest = mpu("aggregate", clean, "--keys", keys_file, "--out", tmp_path / "a", "--dtype", "float32")
    outcome = mpu("aggregate", poisoned, "--keys", keys_file, "--out", tmp_path / "b", "--dtype", "float32")
    assert "noise of the copies of round 1" in outcome.err
    assert (tmp_path / "b/additional_chat_templates/rag.jinja").exists()
    assert "noise of the copies" not in honest.err
    for k in (1, 2):
        for name, x in undo_copy(folder, k).items():
            planted[name] = planted[name] + 0.05 * x.to(planted[name])
    save_file(planted, tmp_path / "planted.safetensors")
    models = (tmp_path / "planted.safetensors", tmp_path / "b", tmp_path / "a")
    found = [trace_json(mpu, model, *keys(folder))[0] for model in models]
    assert [each["named"] for each in found] == [True, False, False]
    without, honest_z = (abs(each["watermark"]["z"]) for each in found[1:])
    planted_z = trace_json(mpu, _sum_of(base, poisoned, folder, tmp_path / "sum"), *keys(folder))[0]["watermark"]["z"]
    assert planted_z > 2 * max(without, honest_z, 3.0)
