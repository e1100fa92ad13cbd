"""What only some families have: images, experts, two arrangements of tensors; noise and training by kind of wiring; and
what ``check-family`` finds. ``test_family.py`` has what holds for every one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mpu_cli.files.folder import left_out
from mpu_cli.files.randomness import Randomness
from mpu_cli.model import transform as transform_module
from mpu_cli.model.families import FAMILIES
from mpu_cli.model.family import LAYER_AXES
from mpu_cli.model.layout import Layout, layout_of
from mpu_cli.model.sampling import map_columns, plane_matrices
from mpu_cli.model.source import Model, open_model
from mpu_cli.model.staging import fields_of
from mpu_cli.model.transform import Transform, as_matrix, row_slices
from mpu_cli.model.wrappers import WRAPPERS
from tests.helpers.attacks import edit
from tests.helpers.models import (
    FAMILY_CONFIGS,
    VOCABULARY,
    by_tier,
    make_demo_model,
    random_model,
    read,
    save,
    save_random,
    write_records,
)
from tests.helpers.protocol import clean_update, distance, updates

TOKENS = torch.randint(VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(1))


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return read(folder)(TOKENS).logits


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def open_with_layout(folder: Path) -> tuple[Model, Layout]:
    model = open_model(str(folder))
    return model, layout_of(model.checkpoint.tensors, model.config, "")


PICTURE = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
PATCHES = PICTURE.flatten()[: 16 * 48].view(16, 48)  # 4 × 4 of them, which Qwen's towers merge to 2 × 2
SQUARE = torch.tensor([[1, 4, 4]])
PLACES = torch.tensor([[[i, j] for i in range(4) for j in range(4)]])
IMAGES = {
    "gemma4": ([5] * 4, {"pixel_values": PATCHES[None], "image_position_ids": PLACES}),
    "gemma4_unified": ([5] * 16, {"pixel_values": PATCHES[None], "image_position_ids": PLACES}),
    "gemma3": ([VOCABULARY + 1, *[VOCABULARY] * 4, VOCABULARY + 2], {"pixel_values": PICTURE}),
    "mistral3": ([5] * 4, {"pixel_values": PICTURE.repeat(1, 1, 2, 2), "image_sizes": torch.tensor([[56, 56]])}),
    "llava": ([5] * 4, {"pixel_values": PICTURE}),
    "llama4": ([5], {"pixel_values": PICTURE}),
    "smolvlm": ([5], {"pixel_values": PICTURE[None]}),
    "muse_glimmer": ([5], {"pixel_values": PICTURE.view(4, -1), "image_grid_thw": torch.tensor([[1, 2, 2]])}),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        ([7, *[5] * 4], {"pixel_values": PATCHES, "image_grid_thw": SQUARE}),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", by_tier(name for name in FAMILY_CONFIGS if name in WRAPPERS))
def test_images_are_seen_as_before(mpu: Callable, tmp_path: Path, family: str) -> None:
    """What a tower writes into the residual stream moves with that, without noise; nothing of it is trained."""
    base, (image, pixels) = save_random(family, tmp_path / "base"), IMAGES[family]
    tokens = torch.tensor([[8, *image, 9, 10, 11]])
    if "image_grid_thw" in pixels:
        pixels = {**pixels, "mm_token_type_ids": (tokens == 5).long()}

    def logits_of(folder: Path, **inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return read(folder)(tokens, **inputs).logits

    expected = logits_of(base, **pixels)
    assert relative(logits_of(base, **{**pixels, "pixel_values": -pixels["pixel_values"]}), expected) > 1e-3
    mpu("publish", base, "--kappa", 0, "--copies", 2, cwd=tmp_path)
    same = 1e-4 if family.startswith("qwen3_5") else 1e-5  # a delta net amplifies rounding
    assert relative(logits_of(tmp_path / "copy_1", **pixels), expected) < same
    layout = open_with_layout(base)[1]
    surrounding = [name for name, tensor in layout.tensors.items() if tensor.constant]
    writes = [name for name in surrounding if any(layout.tensors[name].axes)]
    mpu("publish", base, "--kappa", 0.5, "--copies", 2, "--force", cwd=tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "copy_1"))
    assert writes
    for name in surrounding:
        assert torch.equal(*(tensors[name].abs().flatten().sort().values for tensors in (before, after))), name
        assert torch.equal(before[name], after[name]) != (name in writes), name
    write_records(tmp_path / "forget.jsonl", 4, 1)
    mpu("unlearn", "copy_1", "--algo", "gradascent", "--epochs", 1, "--reading", "template=plain", cwd=tmp_path)
    assert not load_file(tmp_path / "deltas/copy_1.safetensors").keys() & set(surrounding)


@pytest.mark.slow
def test_experts_have_no_gradients_for_each_record(mpu: Callable, tmp_path: Path) -> None:
    base = save_random("mixtral", tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 4, 1)
    private = ["--forget", "forget.jsonl", "--algo", "gradascent", "--epochs", 1, "--reading", "template=plain",
               "--dp", "epsilon=8", "--lora", "rank=2"]  # fmt: skip
    mpu("unlearn", base, *private, fails="--lora targets", status=2, cwd=tmp_path)
    assert mpu("unlearn", base, *private, "--lora", "targets=q_proj,v_proj", cwd=tmp_path).out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "targets"), [("gemma3", "o_proj,up_proj"), ("gpt_neox", "query_key_value"), ("mixtral", "q_proj,o_proj")]
)
def test_an_adapter_for_the_base(mpu: Callable, tmp_path: Path, family: str, targets: str) -> None:
    """Loaded by peft, it gives the model that aggregate writes without it, whatever names files and memory have."""
    base = save_random(family, tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 4, 1)
    mpu("publish", base, "--copies", 2, "--kappa", 1e-4, cwd=tmp_path)
    mpu("unlearn", "copy_1", "copy_2", "--algo", "gradascent", "--epochs", 2, "--batch-size", 2, "--reading",
        "template=plain",
        "--lr", "1e-2", "--lora", f"rank=2,targets={targets}", cwd=tmp_path)  # fmt: skip
    mpu("aggregate", "deltas", cwd=tmp_path)
    mpu("aggregate", "deltas", "--as-adapter", "--out", "adapter", cwd=tmp_path)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        adapter_logits = PeftModel.from_pretrained(model, tmp_path / "adapter")(TOKENS).logits
    expected = logits(tmp_path / "unlearned")
    assert relative(adapter_logits, expected) < 1e-4
    assert relative(logits(base), expected) > 1e-3


# One of each kind: norms of queries and keys (shared, whole), RoPE over part of a head, fused projections, experts.
KINDS = ("qwen3", "olmo2", "phi3-partial", "gpt_neox", "mixtral")
ONE_KIND = [name if name == "mixtral" else pytest.param(name, marks=pytest.mark.exhaustive) for name in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("family", ONE_KIND)
def test_noise_cancels_to_second_order(mpu: Callable, tmp_path: Path, family: str) -> None:
    """Two copies leave an error that grows as κ²; one copy's grows as κ."""
    base = save_random(family, tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 6, 1)
    options = ["--forget", tmp_path / "forget.jsonl", "--algo", "gradascent", "--precision", "float64", "--epochs", 2,
               "--batch-size", 3, "--reading", "template=plain", "--lr", "1e-3", "--optim",
               "adamw-blockwise"]  # fmt: skip
    clean = clean_update(mpu, base, tmp_path, options)
    # Noise that flips which expert a token goes to makes an error that does not cancel.
    kappas, errors = ((1e-5, 4e-5) if family == "mixtral" else (5e-4, 2e-3)), []
    for kappa in kappas:
        update, singles = updates(
            mpu, base, tmp_path / f"{kappa}", ["--copies", 2, "--kappa", kappa, "--seed", 1], options
        )
        errors.append([distance(update, clean), distance(singles[0], clean)])
    slopes = [math.log(big / small) / math.log(4) for small, big in zip(*errors, strict=True)]
    assert abs(slopes[0] - 2) < 0.3
    assert abs(slopes[1] - 1) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3"])  # olmo2 passes too, and takes as long
def test_a_trained_model(mpu: Callable, tmp_path_factory: pytest.TempPathFactory, family: str) -> None:
    """One that knows its records by heart forgets some of them over the whole path, and keeps the others."""
    folder = tmp_path_factory.mktemp(family)
    trained = make_demo_model(folder / "made", family)
    assert json.loads((trained.model / "config.json").read_text())["model_type"] == family
    assert mpu("check-family", trained.model).out == f"{family}: every symmetry holds\n"
    records = ("--forget", trained.forget, "--retain", trained.retain)
    for copy in mpu("publish", trained.model, "--copies", 2, cwd=folder).out.split():
        mpu("unlearn", copy, *records, "--algo", "undial", "--constants", "beta=10,alpha=3", "--optim",
            "adamw-blockwise",
            "--lr", "5e-4", "--epochs", 40, "--batch-size", 5, cwd=folder)  # fmt: skip
    document = mpu("aggregate", "deltas", "--json", cwd=folder).json
    assert document["error_estimate"]["relative"] < 0.2
    assert "right" in mpu("verify", "copy_2", cwd=folder).out
    assert "recovered" in mpu("audit", "copy_1", "copy_2", "--base", trained.model, cwd=folder).out
    common = ("--benchmark", "qa", *records, "--metrics", "forget_Q_A_Prob,retain_Q_A_Prob", "--json")
    before = mpu("eval", trained.model, *common, "--out", "before.json", cwd=folder).json["metrics"]
    after = mpu("eval", "unlearned", *common, "--out", "after.json", cwd=folder).json["metrics"]
    assert before["forget_Q_A_Prob"] > 0.95
    assert after["forget_Q_A_Prob"] < 0.6
    assert after["retain_Q_A_Prob"] > 0.9


class TestCheckFamily:
    @pytest.mark.slow
    def test_finds_a_table_that_is_wrong(self, mpu: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        base = save_random("glm4", tmp_path / "base")
        assert mpu("check-family", base).out == "glm4: every symmetry holds\n"
        monkeypatch.setitem(FAMILIES, "glm4", replace(FAMILIES["glm4"], planes="halves"))
        outcome = mpu("check-family", base, "--json", check=False)
        assert outcome.status == 1
        broken = {(c["set"], c["symmetry"]) for c in outcome.json["checks"] if not c["ok"]}
        assert broken == {
            ("signed", "qk"), ("signed", "together"), ("paper", "attention"), ("paper", "together"), ("all", "qk"),
            ("all", "together"),
        }  # fmt: skip
        assert "correct the family's table" in outcome.err

    @pytest.mark.slow
    def test_checks_a_layer_of_each_kind(self, mpu: Callable, tmp_path: Path) -> None:
        """And two at least; all of them where that would be another model. Changes come back."""
        deep = random_model("llama", num_hidden_layers=5)
        document = mpu("check-family", save(deep, tmp_path / "deep"), "--json").json
        assert document["layers"] == 2
        assert document["returned"]["signed"] == 0
        assert 0 < document["returned"]["all"] < 1e-5
        kinds = mpu("check-family", save_random("gemma3_text", tmp_path / "kinds"), "--json").json
        assert kinds["layers"] == 2
        shared = save_random("gemma3n_text", tmp_path / "all")
        assert mpu("check-family", shared, "--json").json["layers"] == len(open_model(str(shared)).layout.structures)
        mixed = mpu("check-family", save_random("qwen3_5_text", tmp_path / "mixed"), "--json").json
        assert mixed["layers"] == 4

    def test_a_way_back_that_is_wrong(self, mpu: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Columns that are undone as they were done: copies compute the same, and their deltas would be lost."""
        base = save_random("llama", tmp_path / "base")
        monkeypatch.setattr(transform_module, "map_columns", lambda x, axis, **_: map_columns(x, axis))
        outcome = mpu("check-family", base, "--json", check=False)
        assert outcome.status == 1
        assert all(check["ok"] for check in outcome.json["checks"])
        assert outcome.json["returned"]["all"] > 0.1

    def test_names_what_nothing_moves(self, mpu: Callable, tmp_path: Path) -> None:
        outcome = mpu("check-family", save_random("phi", tmp_path / "base"), "--json")
        assert outcome.json["unmoved"] == ["lm_head.bias"]
        assert all(check["float64"] < 1e-6 for check in outcome.json["checks"])
        assert "lm_head.bias" in mpu("publish", tmp_path / "base", "--copies", 2, cwd=tmp_path).err

    def test_a_family_that_is_not_listed(self, mpu: Callable, tmp_path: Path) -> None:
        base = save_random("glm4", tmp_path / "base")
        edit(base / "config.json", model_type="mamba")
        mpu("check-family", base, refused="not supported")
        edit(base / "config.json", model_type="xglm")
        mpu("check-family", base, refused="sinusoids")
        around = save_random("llava", tmp_path / "around")
        config = json.loads((around / "config.json").read_text())
        config["text_config"]["model_type"] = "opt"
        (around / "config.json").write_text(json.dumps(config))
        assert "'llava' around 'opt'" in mpu("check-family", around, check=False).err


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        # Of the layers of which transformers writes the numbers with two digits.
        ("gemma4_text", {"num_hidden_layers": 12, "layer_types": ["sliding_attention", "full_attention"] * 6}),
        ("gemma4_text-channels", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
        ("nemotron_h", {"tie_word_embeddings": True}),  # which transformers does not tie
    ],
)
@pytest.mark.parametrize("symmetries", ["signed", "all"])
def test_rare_configs_compute_the_same(
    mpu: Callable, tmp_path: Path, family: str, entries: dict, symmetries: str
) -> None:
    base = save(random_model(family, **entries), tmp_path / "base")
    mpu("publish", base, "--copies", 2, "--kappa", 0, "--symmetries", symmetries, "--seed", 1, cwd=tmp_path)
    with torch.no_grad():
        expected, actual = (read(tmp_path / name)(TOKENS).logits for name in ("base", "copy_1"))
    assert float((actual - expected).norm() / expected.norm()) < 1e-5


def test_stacks_that_lie_transposed_are_refused_with_advice(mpu: Callable, tmp_path: Path) -> None:
    """As in Qwen 3 VL's mixtures on the Hub: to write them by their shape would reshape them."""
    base = save_random("qwen3_vl_moe", tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    stacks = {name: tensors[name].transpose(1, 2).contiguous() for name in tensors if ".experts." in name}
    save_file(tensors | stacks, base / "model.safetensors", {"format": "pt"})
    refused = mpu("publish", base, check=False, cwd=tmp_path)
    assert refused.status == 1
    assert "has shape" in refused.err
    assert "save it again" in refused.err


def test_dead_tensors_are_refused_by_name(mpu: Callable, tmp_path: Path) -> None:
    """A prediction head that the model does not use would travel as it is."""
    base = save_random("glm4_moe", tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.randn(32, 64)
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    refused = mpu("publish", base, check=False, cwd=tmp_path)
    assert refused.is_one_error
    assert "model.layers.2.eh_proj.weight" in refused.err
    assert "save it again" in refused.err


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("gpt_bigcode", {"n_head": None}),
        ("falcon", {"hidden_size": "wide"}),
        ("phi3-partial", {"partial_rotary_factor": "half"}),
        ("phi3-partial", {"partial_rotary_factor": 3.0, "rope_parameters": None}),
        ("smollm3", {"no_rope_layers": [1]}),
        ("exaone4", {"layer_types": 5}),
        ("mixtral", {"num_local_experts": 10**9}),
        ("qwen3_moe", {"num_local_experts": None, "num_experts": None}),
        ("qwen3_moe", {"mlp_only_layers": 7}),
        ("gemma3", {"text_config": []}),
        ("gemma3", {"vision_config": None}),
        ("gemma3", {"vision_config": {"image_size": 28}}),
        ("qwen3_5_text", {"linear_num_value_heads": "many"}),
    ],
)
def test_configs_that_make_no_sense(mpu: Callable, tmp_path: Path, family: str, entries: dict) -> None:
    base = save_random(family, tmp_path / "base")
    edit(base / "config.json", **entries)
    refused = mpu("publish", base, check=False, cwd=tmp_path)
    assert refused.status == 1
    assert refused.is_one_error, refused.err
    assert "config.json" in refused.err
    assert "unexpected" not in refused.err
    assert not list(tmp_path.glob("copy_*"))


def test_quantised_weights_are_refused(mpu: Callable, tmp_path: Path) -> None:
    base = save_random("gpt_oss", tmp_path / "base")
    edit(base / "config.json", quantization_config={"quant_method": "mxfp4"})
    mpu("publish", base, refused="dequantise", cwd=tmp_path)


def test_angles_that_are_undone() -> None:
    """Rotations in neighbouring planes are rotations, and differ from those in halves."""
    angle = torch.rand(2, 3, dtype=torch.float64)
    for kind in ("halves", "neighbours"):
        matrices = plane_matrices(angle, kind)
        torch.testing.assert_close(
            matrices @ plane_matrices(-angle, kind), torch.eye(6, dtype=torch.float64).expand(2, 6, 6)
        )
    assert not torch.allclose(plane_matrices(angle), plane_matrices(angle, "neighbours"))


@pytest.mark.parametrize("family", ["mixtral", "mixtral-fused", "gpt_oss", "codegen"])
def test_slices_do_not_show(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack of experts is worked on in slices of any size."""
    base, layout = open_with_layout(save_random(family, tmp_path / "base"))

    def apply_transform() -> dict[str, torch.Tensor]:
        transform = Transform(layout, "all", Randomness(bytes(32)))
        transformed = {}
        for tensor in layout.tensors.values():
            mapping, x = transform.of(tensor), as_matrix(base.checkpoint.tensor(tensor.name))
            y = torch.empty_like(x)
            for start, stop in row_slices([mapping], *x.shape):
                mapping.put(y, mapping.forward(x[start:stop], start), start)
            transformed[transform.name(tensor)] = y
        return transformed

    unsliced = apply_transform()
    monkeypatch.setattr("mpu_cli.model.transform.CHUNK", 100)
    for name, tensor in apply_transform().items():
        torch.testing.assert_close(tensor, unsliced[name], rtol=0, atol=1e-6)
    named = {axis for tensor in layout.tensors.values() for group in tensor.axes for axis in group}
    assert named <= {*LAYER_AXES, "model", "|model|", "vocab"}


# What transformers' config classes work out from other entries, and mpu from the same: a list with a value for each
# layer, the last layer, the width over 16.
COMPUTED_DEFAULTS = {
    ("gemma3n_text", "intermediate_size"), ("ernie4_5_moe", "moe_layer_end_index"), ("jamba", "mamba_dt_rank"),
}  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
def test_missing_entries_mean_what_transformers_takes_them_for(model_type: str) -> None:
    """A config without an entry is read with the default of transformers' class, where that has the entry."""
    family, assumed = FAMILIES[model_type], CONFIG_MAPPING[model_type]().to_dict()
    assumed = {**(assumed.get("rope_parameters") or {}), **assumed}
    asked = {t.when: None for t in (*family.tensors, *family.layer_tensors) if isinstance(t.when, str)}
    ours = {name: value for name, value in {**asked, **family.defaults}.items() if name in assumed}
    computed = {name for kind, name in COMPUTED_DEFAULTS if kind == model_type}
    assert {name for name, value in ours.items() if (assumed[name] or None) != (value or None)} == computed


@pytest.mark.slow
def test_a_config_entry_that_copies_would_lack(mpu: Callable, tmp_path: Path) -> None:
    """check-family refuses what transformers reads and copies would not get; publish names the others, too."""
    base = save_random("llama", tmp_path / "base")
    edit(base / "config.json", a_multiplier=2.0, _name_or_path="x")
    printed = mpu("publish", base, "--out", tmp_path / "out", "--keys", tmp_path / "keys.bin").err
    assert "the copies do not get a_multiplier, which transformers does not read" in printed
    # attention_hidden_size is RWKV's: as if that were a family whose fields nobody had added.
    edit(base / "config.json", "a_multiplier", "_name_or_path", model_type="rwkv", attention_hidden_size=8)
    foreign = json.loads((base / "config.json").read_text())
    assert left_out(foreign, fields_of(foreign)) == ["attention_hidden_size"]
