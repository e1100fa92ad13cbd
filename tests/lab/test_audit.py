"""``mpu audit``: the attacks find what was planted and report how close they came."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpu_cli.lab.alignment import (
    layer_maps,
    match,
    match_rows,
    model_maps,
    plane_angles,
    procrustes,
    residual_map,
    undo,
)
from mpu_cli.lab.attacks import AS_IT_IS, SCALED, SPECTRAL, estimates
from mpu_cli.model.layout import layout_of
from mpu_cli.model.sampling import AxisMap, map_columns, plane_matrices
from mpu_cli.model.source import open_model
from mpu_cli.protocol.keys import open_keys
from mpu_cli.protocol.review import seen_of
from tests.helpers.models import CONFIGS, needs_shared, random_model, save
from tests.helpers.paths import SHARED

FAMILIES = ["llama", "llama-biases", "qwen2", "gpt2", "granite"]
FURTHER_FAMILIES = [
    "qwen3", "gemma3_text", "olmo2", "exaone4", "phi3-partial", "gpt_neox", "cohere2", "codegen", "falcon", "bloom",
    "mixtral", "qwen3_moe", "qwen3_5_text", "llama4_text", "glm4_moe-normed", "granitemoeshared", "gpt_oss",
    "gemma4_text", "gemma4_text-channels", "deepseek_v3", "deepseek_v2-lite", "qwen3_next", "granitemoehybrid",
    "jamba", "opt-350m", "laguna", "bitnet", "mistral3",
]  # fmt: skip

# The others undo a part of what "all" does.
SYMMETRIES = [*(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("paper", "signed")), "all"]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *FURTHER_FAMILIES])
@pytest.mark.parametrize("symmetries", SYMMETRIES)
def test_finds_what_was_planted(mpu: Callable, tmp_path: Path, family: str, symmetries: str) -> None:
    """Without noise, recovers exactly the permutations, signs and rotations of the publication."""
    base = save(random_model(family), tmp_path / "base")
    outcome = mpu(
        "publish", base, "--kappa", 0, "--dtype", "float64", "--symmetries", symmetries, "--seed", 5, "--run", "r",
        "--out", tmp_path, "--keys", tmp_path / "keys.bin", "--json",
    )  # fmt: skip
    assert outcome.status == 0
    keys = open_keys(tmp_path / "keys.bin")
    copy, model = open_model(str(tmp_path / "copy_1")), open_model(str(base))
    layout = layout_of(model.checkpoint.tensors, model.config, "")
    true = keys.publication.transform(1, layout)
    state_dicts = [{t.name: m.checkpoint.tensor(t.name).float() for t in layout.parameters} for m in (copy, model)]
    residual = residual_map(layout, *state_dicts, symmetries)
    outer = model_maps(layout, *state_dicts, symmetries, residual)
    if symmetries != "paper":
        assert_same(residual, true._shared["model"])
        assert all(axis not in true._shared or axis in outer for axis in ("channel", "|channel|"))
        for axis in outer.keys() & true._shared.keys():
            assert_same(outer[axis], true._shared[axis])
    for tensors in (ts for ts in layout.blocks.values() if ts[0].layer is not None and not ts[0].constant):
        aligned = undo(layout, tensors, state_dicts[0], outer)
        recovered = layer_maps(layout, tensors, aligned, state_dicts[1], symmetries)
        planted = true._layer_maps(tensors[0].layer)
        axes = {axis for tensor in tensors for group in tensor.axes for axis in group}
        assert set(recovered) >= set(planted) & axes
        for axis, mapping in ((axis, planted[axis]) for axis in planted if axis in axes):
            pairs = (
                zip(recovered[axis], mapping, strict=True)
                if isinstance(mapping, tuple)
                else [(recovered[axis], mapping)]
            )
            for recovered_map, planted_map in pairs:
                assert_same(recovered_map, planted_map)


def assert_same(actual: AxisMap, expected: AxisMap) -> None:
    """Both are the same orthogonal map, whether written as order and signs or as rotations."""
    actual_matrix, expected_matrix = (
        map_columns(torch.eye(len(axis), dtype=torch.float64), axis) for axis in (actual, expected)
    )
    torch.testing.assert_close(actual_matrix, expected_matrix, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("symmetries", SYMMETRIES)
def test_copies_give_the_weights_away(mpu: Callable, tmp_path: Path, family: str, symmetries: str) -> None:
    """With a little noise: one copy gives them up to the noise, all copies without it, in any coordinates."""
    base = save(random_model(family), tmp_path / "base")
    mpu("publish", base, "--kappa", 0.01, "--symmetries", symmetries, "--out", tmp_path, "--keys", tmp_path / "k.bin")
    copies = (tmp_path / "copy_1", tmp_path / "copy_2")
    document = mpu("audit", *copies, "--base", base, "--symmetries", symmetries, "--json").json
    assert document["verdict"].startswith("recovered: ")
    attacks = document["attacks"]
    # Fitting the rotations absorbs at most half of the noise; the error that remains is of the noise's size.
    assert 0.005 < attacks["one copy"]["weights"] < 0.0105
    # The noise cancels; what remains is the alignment error, and the alignment sees twice the noise of a copy.
    assert attacks["all copies"]["weights"] < 0.6 * attacks["one copy"]["weights"]


@pytest.mark.slow
def test_names_without_their_prefix(mpu: Callable, tmp_path: Path) -> None:
    """A GPT-2 stored like the first ones on the Hub is the same reference."""
    base = save(random_model("gpt2"), tmp_path / "base")
    reference = save(random_model("gpt2", seed=1), tmp_path / "reference")
    mpu("publish", base, "--public", reference, "--copies", 2, "--out", tmp_path, "--keys", tmp_path / "k.bin")
    arguments = ("audit", tmp_path / "copy_1", tmp_path / "copy_2", "--base", base, "--json", "--public", reference)
    expected = mpu(*arguments).json["attacks"]
    path = reference / "model.safetensors"
    save_file({n.removeprefix("transformer."): t for n, t in load_file(path).items()}, path)
    attacks = mpu(*arguments).json["attacks"]
    for name, expected_attack in expected.items():
        assert attacks[name]["weights"] == expected_attack["weights"]
        assert attacks[name]["task_vector"] == expected_attack["task_vector"]


def test_two_copies_of_one_draw_are_enough(mpu: Callable, tmp_path: Path) -> None:
    """Any two copies are enough to remove extrapolating noise; zero-sum noise takes all of them."""
    base = save(random_model("llama"), tmp_path / "base")
    for noise in ("extrapolate", "zero-sum"):
        out = tmp_path / noise
        mpu("publish", base, "--noise", noise, "--copies", 4, "--kappa", 0.01, "--dtype", "float32", "--out", out,
            "--keys", out / "k.bin")  # fmt: skip
    two, four = (("extrapolate/copy_2", "extrapolate/copy_3"), [f"extrapolate/copy_{k}" for k in (1, 2, 3, 4)])
    some = mpu("audit", *two, "--base", base, "--json", cwd=tmp_path).json
    assert some["attacks"]["all copies"]["weights"] < 1e-6
    assert some["settings"]["noise"] == {"kind": "extrapolate", "factors": [-1, 1.5]}
    assert some["settings"]["symmetries"] == "signed"  # as stated by the copies
    attacks = mpu("audit", *four, "--base", base, "--json", cwd=tmp_path).json["attacks"]
    assert attacks["two copies"]["weights"] < 1e-6
    assert attacks["all copies"]["weights"] < 1e-6
    zero_sum = [f"zero-sum/copy_{k}" for k in (1, 2, 3, 4)]
    three = mpu("audit", *zero_sum[:3], "--base", base, "--json", cwd=tmp_path).json["attacks"]
    assert "two copies" not in three
    assert min(attack["weights"] for attack in three.values()) > 0.002
    # An attacker who tries extrapolation first then tries the other kind.
    assert mpu("audit", *zero_sum, "--base", base, "--json", cwd=tmp_path).json["verdict"].startswith("recovered")


@pytest.mark.slow
@needs_shared
def test_real_weights(mpu: Callable, tmp_path: Path) -> None:
    """The paper's defaults on a real checkpoint: a public relative gives the task vector away, both copies the rest."""
    models = SHARED / "models"
    common = ("--public", models / "pretrained")
    mpu(
        "publish",
        models / "full",
        *common,
        "--kappa",
        0.01,
        "--dtype",
        "float32",
        "--out",
        tmp_path,
        "--keys",
        tmp_path / "k.bin",
    )
    copies = (tmp_path / "copy_1", tmp_path / "copy_2")
    attacks = mpu("audit", *copies, "--base", models / "full", *common, "--json").json["attacks"]
    assert attacks["one copy, reference"]["task_vector"] < 0.02
    assert attacks["all copies, reference"]["task_vector"] < 0.01
    assert attacks["all copies"]["weights"] < 1e-4

    assert attacks["all copies, factors unknown"]["weights"] < 0.5 * attacks["one copy"]["weights"]
    # The errors of the blocks add up to the total error.
    full_model = open_model(str(models / "full"))
    blocks = layout_of(full_model.checkpoint.tensors, full_model.config, "").blocks
    squares = {
        block: sum(float(full_model.checkpoint.tensor(t.name).double().square().sum()) for t in tensors)
        for block, tensors in blocks.items()
    }
    block_errors = attacks["one copy"]["blocks"]
    joined = sum(block_errors[block]["weights"] ** 2 * square for block, square in squares.items()) / sum(
        squares.values()
    )
    assert attacks["one copy"]["weights"] == pytest.approx(math.sqrt(joined), rel=1e-3)
    single_copy_attacks = mpu("audit", copies[0], "--base", models / "full", "--json").json["attacks"]
    assert list(single_copy_attacks) == ["one copy"]
    fast = mpu("audit", *copies, "--base", models / "full", "--fast", "--json").json["attacks"]
    assert len(fast["one copy"]["blocks"]) == 3 + 2
    mpu("publish", models / "full", *common, "--out", tmp_path / "other", "--keys", tmp_path / "other.bin")
    refused = mpu("audit", *copies, "--base", models / "full", "--keys", tmp_path / "other.bin", check=False)
    assert "was not published with these keys" in refused.err


def test_the_fast_match_is_the_assignment() -> None:
    """With many features, only some are compared at first; if rows are too similar, all are."""
    torch.manual_seed(0)
    target = torch.randn(300, 4000)
    order = torch.randperm(300)
    assert torch.equal(match_rows(target[order] + torch.randn(300, 4000), target), order)
    common = torch.randn(4000) * 20  # all rows nearly parallel: a few features cannot distinguish them
    alike = target + common
    assert torch.equal(match_rows(alike[order] + 0.1 * torch.randn(300, 4000), alike), order)


@pytest.mark.parametrize("rank", [2, 40])
def test_singular_values_find_what_has_low_rank(rank: int) -> None:
    """The best known estimate: it beats scaling for low rank, and the estimate while publishing foresees its error."""
    draw = torch.Generator().manual_seed(0)
    shape = (300, 400)
    change = torch.randn(shape[0], rank, generator=draw) @ torch.randn(rank, shape[1], generator=draw)
    change = change / change.square().mean().sqrt()
    noisy = change + 2 * torch.randn(shape, generator=draw)
    denoised = estimates({"w": noisy}, {"w": torch.zeros(shape)}, {"w": change})
    errors = {method: float((estimate["w"] - change).norm() / change.norm()) for method, estimate in denoised.items()}
    assert errors[AS_IT_IS] == pytest.approx(2, rel=0.02)
    assert errors[SCALED] == pytest.approx(2 / math.sqrt(5), rel=0.02)
    if rank == 2:
        assert errors[SPECTRAL] < 0.3
    spikes = torch.linalg.svdvals(change)[:rank].double()
    foreseen = math.sqrt(1 - seen_of(spikes, 2.0, *shape) / float(change.square().sum()))
    assert errors[SPECTRAL] == pytest.approx(foreseen, rel=0.03)


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize(
    "noise",
    [
        ("--kappa", 1), ("--copies", 1), pytest.param((), marks=pytest.mark.exhaustive),
        pytest.param(("--kappa", 0, "--permanent-noise", 3), marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_publish_foresees_what_audit_finds(mpu: Callable, tmp_path: Path, noise: tuple) -> None:
    """Within five points, with no other option than the public model, too."""
    models = SHARED / "models"
    public = ("--public", models / "pretrained")
    outcome = mpu(
        "publish", models / "full", *public, *noise, "--seed", 1, "--dtype", "float32", "--json", cwd=tmp_path
    )
    copies = sorted(tmp_path.glob("copy_*"))
    audit = mpu("audit", *copies, "--base", models / "full", *public, "--json", cwd=tmp_path).json["attacks"]
    foreseen = outcome.json["hidden"]
    assert foreseen["one_copy"] == pytest.approx(audit["one copy, reference"]["of_change"], abs=0.05)
    if len(copies) > 1:
        measured_error = min(attack["of_change"] for name, attack in audit.items() if "all copies" in name)
        assert foreseen["all_copies"] == pytest.approx(measured_error, abs=0.05)
    assert ("takes the noise off" in outcome.err) == (noise == ("--kappa", 1))
    if "--permanent-noise" in noise:
        assert foreseen["all_copies"] > 0.6


def test_closed_forms() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(8, 50, generator=generator, dtype=torch.float64)
    q = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))[0]
    torch.testing.assert_close(procrustes((q @ y) @ y.T), q)
    angle = torch.rand(4, generator=generator, dtype=torch.float64) * 6
    c, s = torch.diag(angle.cos()), torch.diag(angle.sin())
    turn = torch.cat([torch.cat([c, -s], 1), torch.cat([s, c], 1)], 0)
    torch.testing.assert_close(plane_matrices(plane_angles((turn @ y) @ y.T, "halves")[None])[0], turn)


def test_match_is_the_best_assignment() -> None:
    """If rows compete for a column, finds the best total; checked by brute force."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        similarity = torch.rand(5, 5, generator=generator)
        similarity[:, 0] += 0.5
        total = float(similarity[torch.arange(5), match(similarity)].sum())
        assert total == pytest.approx(
            max(float(similarity[torch.arange(5), list(p)].sum()) for p in permutations(range(5)))
        )


def test_bad_input(mpu: Callable, tmp_path: Path) -> None:
    base = save(random_model("llama"), tmp_path / "base")
    other = save(random_model("llama", intermediate_size=64), tmp_path / "other")
    assert "do not match the base" in mpu("audit", other, "--base", base, check=False).err
    assert mpu("audit", base, base, "--base", base, "--noise", "zero-sum:1", check=False).status == 2
    assert mpu("audit", base, base, "--base", base, "--noise", "extrapolate:1,1", check=False).status == 2
    assert mpu("audit", base, "--base", base, "--noise", "zero-sum:one", check=False).status == 2
    assert set(FAMILIES) <= set(CONFIGS)


def test_what_would_be_a_false_all_clear(mpu: Callable, tmp_path: Path) -> None:
    """Copies that do not belong together, a base that was not the one published, a reference that is the base."""
    base = save(random_model("llama"), tmp_path / "base")
    for out in "ab":
        mpu("publish", base, "--out", out, "--keys", f"{out}/keys.bin", cwd=tmp_path)
    mixed = mpu(
        "audit", "a/copy_1", "b/copy_2", "--base", base, "--noise", "extrapolate:1,-1", check=False, cwd=tmp_path
    )
    assert (mixed.status, "those of one publication" in mixed.err) == (2, True)
    other = save(random_model("llama", seed=1), tmp_path / "other")
    wrong = mpu("audit", "a/copy_1", "--base", other, "--keys", "a/keys.bin", check=False, cwd=tmp_path)
    assert (wrong.status, "is not the model that was published" in wrong.err) == (1, True)
    same = mpu("audit", "a/copy_1", "--base", base, "--public", base, check=False, cwd=tmp_path)
    assert (same.status, "the same weights as --base" in same.err) == (2, True)


@pytest.mark.slow
def test_several_publications_together(mpu: Callable, tmp_path: Path) -> None:
    """One copy of each of n publications of a base: noise that cancels within each averages over them, by 1/√n, and
    permanent noise, one draw for all, does not; two copies of one of them remove what cancels."""
    base = save(random_model("llama"), tmp_path / "base")
    for name, options in (("own", ("--kappa", 0.1)), ("permanent", ("--copies", 1, "--permanent-noise", 0.1))):
        for number in range(4):
            out = tmp_path / name / str(number)
            seed = ("--seed", number) if name == "own" else ()
            mpu("publish", base, *options, *seed, "--dtype", "float32", "--out", out, "--keys", out / "keys.bin")

    def off(name: str, copies: int) -> float:
        paths = [tmp_path / name / str(number) / "copy_1" for number in range(copies)]
        attacks = mpu("audit", *paths, "--base", base, "--json").json["attacks"]
        return attacks["all copies" if copies > 1 else "one copy"]["weights"]

    for copies in (2, 4):
        assert off("own", copies) == pytest.approx(off("own", 1) / copies**0.5, rel=0.1)
        assert off("permanent", copies) == pytest.approx(off("permanent", 1), rel=0.02)
    for number in range(2):  # one run and round may be published twice
        out = tmp_path / "again" / str(number)
        again = ("--run", "r", "--kappa", 0.1, "--dtype", "float32", "--seed", number)
        mpu("publish", base, *again, "--out", out, "--keys", out / "keys.bin")
    assert off("again", 2) == pytest.approx(off("again", 1) / 2**0.5, rel=0.1)
    paths = [tmp_path / "own" / root for root in ("0/copy_1", "0/copy_2", "1/copy_1", "1/copy_2")]
    attacks = mpu("audit", *paths, "--base", base, "--json").json["attacks"]
    assert attacks["all copies"]["weights"] < 1e-5


@pytest.mark.slow
def test_an_audit_with_another_base_is_warned_of(mpu: Callable, root: Path) -> None:
    save(random_model("llama", seed=3), root / "other")
    mpu("publish", "base", "--copies", 2, "--kappa", 0.01, cwd=root)
    assert "--keys checks it" in mpu("audit", "copy_1", "copy_2", "--base", "other", cwd=root).err
    assert "--keys checks it" not in mpu("audit", "copy_1", "copy_2", "--base", "base", cwd=root).err
