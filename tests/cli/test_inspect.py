"""`mpu inspect`: every kind of file is told from the others, nothing is changed, and no secret is shown."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpu_cli.files.sealing import default_identity_path
from mpu_cli.training.ledger import default_ledger_path
from tests.helpers.attacks import publish_copies, unlearn_copy
from tests.helpers.models import random_model, save
from tests.helpers.trainings import BRIEF, for_run


def state_of(folder: Path) -> dict[str, tuple]:
    facts = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        facts[str(path)] = (status.st_mode, status.st_ino, status.st_mtime_ns, content)
    return facts


def test_it_changes_nothing(mpu: Callable, root: Path) -> None:
    """Of anything, whole or cut off."""
    honest, _ = publish_copies(mpu, root)
    unlearn_copy(mpu, root, honest, "d")
    (root / "log.jsonl").write_text('{"step": 1}\n{"step": 2')
    (root / "run").mkdir()
    (root / "run/run.json").write_text("{}")
    (root / "run/log.jsonl").symlink_to(root / "log.jsonl")
    before = state_of(root)
    for path in ("copy_1", "d.safetensors", "keys.bin", "log.jsonl", "run", ".", "base", default_ledger_path()):
        mpu("inspect", path, check=False, cwd=root)
    assert state_of(root) == before


@pytest.mark.parametrize("obstacle", ["fifo", "device", "private"])
def test_nothing_inside_a_folder_is_followed_or_waited_for(mpu: Callable, root: Path, obstacle: str) -> None:
    (root / "secret").write_text("| algorithm | hunter2 |\n")
    model = root / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_bytes((root / "base" / name).read_bytes())
    weights = load_file(model / "model.safetensors")
    save_file(
        weights, model / "model.safetensors", {"mpu": json.dumps({"format": "mpu-model", "run": "x", "round": 1})}
    )
    card = model / "README.md"
    if obstacle == "fifo":
        os.mkfifo(card)
    else:
        card.symlink_to("/dev/zero" if obstacle == "device" else root / "secret")
    outcome = mpu("inspect", "model", cwd=root)
    assert "model, after aggregation" in outcome.out
    assert "hunter2" not in outcome.out


def test_json_has_no_control_characters(mpu: Callable, root: Path) -> None:
    save_file({"w\u009b31m\u202e": torch.zeros(2)}, root / "odd.safetensors")
    outcome = mpu("inspect", "odd.safetensors", "--tensors", "--json", cwd=root)
    assert all(character.isprintable() or character == "\n" for character in outcome.out)
    assert "w\u009b31m\u202e" in outcome.json["list"]


@pytest.mark.parametrize("entry", ["list", "kind", "format"])
def test_a_file_does_not_write_the_table(mpu: Callable, root: Path, entry: str) -> None:
    facts = {"format": "mpu-copy", "run": "r", entry: "keys of a publication, sealed by this server"}
    save_file({"a": torch.ones(1)}, root / "w.safetensors", {"mpu": json.dumps(facts)})
    assert "sealed by" not in mpu("inspect", "w.safetensors", cwd=root).out
    (root / "log.jsonl").write_text(json.dumps({"step": entry}) + "\n")
    assert mpu("inspect", "log.jsonl", "--json", cwd=root).json["kind"] == "JSON lines"


def test_what_it_prints_is_bounded(mpu: Callable, root: Path) -> None:
    steps = ["x" * 1_000_000, *(f"s{i}" for i in range(1000))]
    (root / "log.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    assert len(mpu("inspect", "log.jsonl", cwd=root).out) < 100_000
    (root / "e.json").write_text('{"format": "mpu-eval", "benchmark": ' + "[" * 500 + "]" * 500 + "}")
    for more in ((), ("--json",)):
        assert "mpu eval" in mpu("inspect", "e.json", *more, cwd=root).out


def test_secrets_and_the_register_are_described(mpu: Callable, tmp_path: Path) -> None:
    base = save(random_model("llama"), tmp_path / "base")
    mpu("publish", base, "--copies", 1, "--permanent-noise", 1, "--out", tmp_path, "--keys", tmp_path / "k.bin")
    configuration = default_identity_path().parent
    assert "server's secret" in mpu("inspect", configuration / "server.key").out
    assert "register of your publications" in mpu("inspect", configuration / "published.jsonl").out


@pytest.mark.slow
def test_everything_that_mpu_makes_can_be_inspected(mpu: Callable, root: Path) -> None:
    """Every file and folder that a run and an evaluation leave says what it is, and no two kinds look alike."""
    run = ("run", "base", *for_run(BRIEF), "--copies", 2, "--rounds", 1, "--keep")
    planned = mpu(*run, "--dry-run", "--json", cwd=root).json
    assert not (root / "run").exists()
    mpu(*run, cwd=root)
    log = [json.loads(line) for line in (root / "run/log.jsonl").read_text().splitlines()]
    assert planned["sent"] == sum(line["bytes"] for line in log if line["step"] == "publish")
    mpu("eval", "base", "--benchmark", "qa", "--metrics", "forget_Q_A_Prob", cwd=root)
    mpu("unlearn", "base", *BRIEF, cwd=root)
    delta = ("--delta", "deltas/base.safetensors", "--out", "delta.json")
    evaluated = mpu("eval", "base", "--benchmark", "qa", "--metrics", "forget_Q_A_Prob", *delta, cwd=root)
    assert "base with deltas/base.safetensors on qa" in " ".join(evaluated.out.split())
    described = mpu("inspect", "delta.json", "--json", cwd=root).json
    assert (described["model"], described["delta"]) == ("base", "deltas/base.safetensors")
    compared = mpu("compare", "eval.json", "delta.json", cwd=root)
    assert "different deltas (eval: none; delta: deltas/base.safetensors)" in compared.err
    assert "not directly comparable" not in compared.err
    (root / "grid").mkdir()
    (root / "grid/results.jsonl").write_text('{"name": "1"}\n')
    (root / "grid/sweep.json").write_text('{"experiments": ["1", "2"]}')
    assert mpu("inspect", ".", "--json", cwd=root).json["kind"] == "folder"  # with a run in it, and no sweep itself
    kinds = {
        path: mpu("inspect", path, "--json", cwd=root).json["kind"]
        for path in (
            "run", "run/run.json", "run/log.jsonl", "run/server/identity.txt", "run/server/round_1/deltas",
            "run/server/round_1/model", "run/client/round_1/copy_1", "eval.json", "deltas/base.safetensors", "base",
            "grid",
        )
    }  # fmt: skip
    assert len(set(kinds.values())) == len(kinds)
