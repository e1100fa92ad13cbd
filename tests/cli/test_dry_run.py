"""`--dry-run`: all checks are made, what would be written is said, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from mpu_cli.files.reader import open_checkpoint
from mpu_cli.protocol.publication import default_secret_path
from tests.helpers.trainings import BRIEF


@pytest.mark.slow
def test_the_whole_path(mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    for lora in ((), ("--lora", "rank=2")):
        steps = [
            ("publish", "base", "--copies", 2, "--dtype", "bfloat16", "--force"),
            ("unlearn", "copy_1", *BRIEF, *lora, "--force"),
            ("unlearn", "copy_2", *BRIEF, *lora, "--force"),
            ("aggregate", "deltas", "--dtype", "float32", "--force"),
            *([] if lora else [("invert", "deltas", "--force")]),
        ]
        for step in steps:
            before = sorted(root.rglob("*"))
            planned = mpu(*step, "--dry-run", "--json").json
            assert sorted(root.rglob("*")) == before
            mpu(*step)
            for written in planned["writes"]:
                assert Path(written["path"]).exists()
                if written["bytes"] is not None:
                    assert written["bytes"] == open_checkpoint(Path(written["path"])).nbytes


def test_its_checks(mpu: Callable, root: Path) -> None:
    mpu("publish", "base", "--copies", 2, cwd=root)
    for arguments, named in (
        (("publish", "base"), "copy_1: already exists"),
        (("unlearn", "copy_1", "--constants", "beta1=2"), "beta1"),
        (("aggregate", "deltas"), "deltas"),
    ):
        mpu(*arguments, "--dry-run", refused=named, cwd=root)


@pytest.mark.slow
def test_a_file_of_records_is_no_copy_and_an_index_of_shards_is(mpu: Callable, root: Path) -> None:
    mpu("unlearn", "base", "retain.jsonl", *BRIEF, refused="repeat --forget or --retain", cwd=root)
    model = AutoModelForCausalLM.from_pretrained(root / "base")
    model.save_pretrained(root / "base", max_shard_size="20KB")
    (root / "base/model.safetensors").unlink(missing_ok=True)
    index = "base/model.safetensors.index.json"
    assert mpu("unlearn", index, *BRIEF, "--dry-run", cwd=root).out.startswith("reads")


def test_lines_for_people(mpu: Callable, root: Path) -> None:
    planned = mpu("publish", "base", "--copies", 2, "--dry-run", cwd=root)
    labels = [line.split("\t")[0] for line in planned.out.splitlines()]
    assert labels == ["reads", *["writes"] * 3, "memory", "disk", "note"]
    assert "no --public: the noise is scaled to the weights themselves" in planned.err
    assert "this noise cancels for whoever has all copies" in planned.err
    bare = mpu("publish", "base", "--copies", 2, "--kappa", 0, "--dry-run", cwd=root).err
    assert "no noise: whoever aligns a copy with the public model has the weights" in bare


@pytest.mark.parametrize("options", [(), ("--kappa", 0), ("--kappa", 0.1, "--seed", 7, "--copies", 3)])
def test_what_publish_remarks_before_the_work_its_dry_run_remarks(
    mpu: Callable, root: Path, options: tuple[object, ...]
) -> None:
    """The remarks that need no weights are the same lines."""
    (root / "base/README.md").write_text("ours")
    dry, real = (mpu("publish", "base", *options, *more, cwd=root).err.splitlines() for more in (("--dry-run",), ()))
    assert dry
    assert not set(dry) - set(real)
    assert any("--seed is for repeatable" in line for line in dry) == ("--seed" in options)


def test_a_dry_run_makes_no_secret(mpu: Callable, tmp_path: Path, base: Path) -> None:
    options = ("--copies", 1, "--permanent-noise", 1, "--out", tmp_path, "--keys", tmp_path / "keys.bin")
    assert "noise: permanent" in mpu("publish", base, *options, "--dry-run").err
    assert not default_secret_path().exists()
    assert str(default_secret_path()) in mpu("publish", base, *options).err  # it tells that it made one
