"""What a client plants of a copy in its delta marks no model of the server's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpu_cli.model.transform import CHUNK
from tests.helpers.models import random_model, save

PUBLISHED = ("--symmetries", "none", "--copies", 1, "--permanent-noise", 1, "--watermark", 0.3)
SHARE = 0.1  # of what a copy has beyond the base, in the delta

Weights = dict[str, torch.Tensor]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model whose FFN matrices have two slices."""
    folder = save(random_model("llama", intermediate_size=8192, num_hidden_layers=1), tmp_path / "base")
    assert CHUNK < load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].numel() < 2 * CHUNK
    return folder


def publish(mpu: Callable, model: Path, name: str) -> Path:
    """A publication in the base's own coordinates, with permanent noise."""
    public = model.parent / "public"
    if not public.exists():
        shutil.copytree(model, public)
        weights = load_file(public / "model.safetensors")
        save_file({n: x + 0.02 * torch.randn_like(x) for n, x in weights.items()}, public / "model.safetensors")
    out = model.parent / name
    mpu("publish", model, "--public", public, *PUBLISHED, "--out", out, "--keys", out.with_suffix(".bin"))
    return out


def beyond(folder: Path, model: Path) -> Weights:
    """What the only copy of a publication has beyond the model that was published: all of its noise."""
    clean = load_file(model / "model.safetensors")
    return {n: x - clean[n] for n, x in load_file(folder / "copy_1/model.safetensors").items()}


def send(folder: Path, planted: Weights, target: Path, kind: str = "full") -> Path:
    """A delta of the publication's copy, an honest one and what is ``planted``."""
    torch.manual_seed(0)
    change = {n: 1e-4 * torch.randn_like(x) + planted.get(n, 0.0) for n, x in load_copy(folder).items()}
    if kind == "lora":
        change = {n: x for n, x in change.items() if x.ndim == 2 and "embed" not in n and "lm_head" not in n}
        factors = {}
        for name, x in change.items():
            u, s, v = torch.linalg.svd(x, full_matrices=False)
            factors |= {f"{name}.lora_B": u[:, :8] * s[:8], f"{name}.lora_A": v[:8]}
        change = factors
    facts = json.loads((folder / "copy_1/mpu.json").read_text())
    facts |= {"format": "mpu-delta", "algorithm": "npo", "kind": kind, "inverted": False}
    save_file({n: x.contiguous() for n, x in change.items()}, target, {"mpu": json.dumps(facts)})
    return target


def load_copy(folder: Path) -> Weights:
    return load_file(folder / "copy_1/model.safetensors")


def z_of(mpu: Callable, model: Path, folder: Path, base: Path) -> float:
    found = mpu("trace", model, "--keys", folder.with_suffix(".bin"), "--base", base, "--json").json
    return found["publications"][0]["watermark"]["z"]


def last_rows(x: torch.Tensor) -> torch.Tensor:
    """Of a matrix with several slices what is behind the first one."""
    kept = torch.zeros_like(x)
    if x.ndim == 2 and x.numel() > CHUNK:
        kept[CHUNK // x.shape[1] :] = x[CHUNK // x.shape[1] :]
    return kept


def in_last_rows_alone(x: torch.Tensor) -> torch.Tensor:
    """Of each matrix the last rows."""
    kept = torch.zeros_like(x)
    kept[-len(x) // 4 :] = x[-len(x) // 4 :]
    return kept


def with_loud_weights(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[::997] += 50.0
    return x


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x, id="everywhere"),
        pytest.param(last_rows, id="behind-the-first-slice", marks=pytest.mark.slow),
        pytest.param(in_last_rows_alone, id="in-last-rows-alone"),
        pytest.param(with_loud_weights, id="loud-weights", marks=pytest.mark.slow),
    ],
)
def test_noise_of_a_copy_is_taken_out_of_an_update(
    mpu: Callable, base: Path, tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Wherever it is and whatever else was changed; the sum of base and delta, added up here, is traced."""
    folder = publish(mpu, base, "first")
    planted = {n: change(SHARE * x) for n, x in beyond(folder, base).items()}
    delta = send(folder, planted, tmp_path / "delta.safetensors")
    (tmp_path / "sum").mkdir()
    clean = load_file(base / "model.safetensors")
    summed = {n: x + clean[n] for n, x in load_file(delta).items()}
    save_file(summed, tmp_path / "sum/model.safetensors")
    assert z_of(mpu, tmp_path / "sum", folder, base) > 8
    options = ("--keys", folder.with_suffix(".bin"), "--out", tmp_path / "out")
    assert "noise of the copies of round 1" in mpu("aggregate", delta, *options).err
    assert abs(z_of(mpu, tmp_path / "out", folder, base)) < 4
    # Of the rest of the update next to nothing is gone.
    lost = torch.cat([(summed[n] - x).view(-1) for n, x in load_file(tmp_path / "out/model.safetensors").items()])
    noise = torch.cat([x.view(-1) for x in planted.values() if change is not with_loud_weights] or [lost])
    assert float(lost.norm()) < 1.1 * float(noise.norm())
    assert float(lost.abs().max()) < 1.0


def test_noise_of_other_publications_of_the_base_line(mpu: Callable, base: Path, tmp_path: Path) -> None:
    """Of an earlier round and of another client, whose keys nobody names; an honest update is left as it is."""
    first, other = publish(mpu, base, "first"), publish(mpu, base, "other")
    honest = send(first, {}, tmp_path / "honest.safetensors")
    outcome = mpu("aggregate", honest, "--keys", first.with_suffix(".bin"), "--out", tmp_path / "next")
    assert "noise of the copies" not in outcome.err
    second = publish(mpu, tmp_path / "next", "second")
    for earlier in (first, other):
        planted = {n: SHARE * x for n, x in beyond(earlier, base).items()}
        delta = send(second, planted, tmp_path / "delta.safetensors")
        options = ("--keys", second.with_suffix(".bin"), "--out", tmp_path / "out", "--force")
        assert "noise of the copies of round 1" in mpu("aggregate", delta, *options).err
        assert abs(z_of(mpu, tmp_path / "out", earlier, base)) < 4


def test_adapters_with_a_watermark_are_refused_and_inverted_deltas_named(
    mpu: Callable, base: Path, tmp_path: Path
) -> None:
    """Factors of low rank cannot lose the noise; honest ones become an adapter."""
    folder = publish(mpu, base, "first")
    keys = ("--keys", folder.with_suffix(".bin"))
    for share in (0.0, SHARE):
        planted = {n: share * x for n, x in beyond(folder, base).items()}
        delta = send(folder, planted, tmp_path / f"{share}.safetensors", "lora")
        inverted = mpu("invert", delta, *keys, "--out", tmp_path / "inverted", "--force")
        assert ("has the watermark of the copies of round 1" in inverted.err) == (share > 0)
        adapter = ("aggregate", delta, *keys, "--as-adapter", "--out", tmp_path / f"adapter{share}")
        mpu(*adapter, **({"refused": "noise of the copies of round 1"} if share else {}))
    mpu("aggregate", tmp_path / f"{SHARE}.safetensors", *keys, "--out", tmp_path / "out")
    assert abs(z_of(mpu, tmp_path / "out", folder, base)) < 4
