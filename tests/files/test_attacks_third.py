"""What a third round of attacks found, each on real files and through the command line where a party would."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpu_cli import unlearn
from mpu_cli.training import copycheck, private
from tests.helpers.attacks import TRAINING
from tests.helpers.models import random_model, save, write_records


class TestUnderDP:
    """Nothing that is seen outside depends on the records, but through the mechanism."""

    @pytest.mark.slow
    def test_a_copy_is_judged_by_its_weights(self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Units that are parallel, as in traps: refused in the same words, whatever the records are."""
        file = root / "base" / "model.safetensors"
        tensors = load_file(file)
        gate = tensors["model.layers.0.mlp.gate_proj.weight"]
        gate[1 : len(gate) // 2] = gate[0]
        save_file(tensors, file, {"format": "pt"})
        options = [*TRAINING, "--algo", "graddiff", "--out", "d.safetensors", "--dp-epsilon", 8]
        write_records(root / "other.jsonl", 15, 9)
        outcomes = [
            mpu("unlearn", "base", *options, "--forget", name, check=False, cwd=root)
            for name in ("forget.jsonl", "other.jsonl")
        ]
        assert "units built to record single tokens" in outcomes[0].err
        assert outcomes[0].err == outcomes[1].err
        monkeypatch.setattr(copycheck, "ffn_units", pytest.fail)  # nothing that records decide is looked at
        mpu("unlearn", "base", *options, "--trust-copy", cwd=root)

    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    def test_one_record_moves_the_sum_by_the_clip_at_most(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
    ) -> None:
        """In every precision that is allowed: the sums that noise is added to, with a record and without it."""
        base = save(random_model("llama", seed=1), tmp_path / "base")
        rows = write_records(tmp_path / "all.jsonl", 64, 1).read_text().splitlines(keepends=True)

        def summed(count: int) -> torch.Tensor:
            (tmp_path / "forget.jsonl").write_text("".join(rows[:count]))
            sums: list[torch.Tensor] = []

            def capture(x: torch.Tensor, *_: object) -> torch.Tensor:
                sums.append(x.detach().double().reshape(-1).clone())
                return x

            monkeypatch.setattr(private, "with_noise", capture)
            unlearn(
                base, out=tmp_path / "d.safetensors", force=True, forget=str(tmp_path / "forget.jsonl"),
                template="plain", trust_copy=True, dp_epsilon=8.0, batch_size=4096, epochs=1, lr=1e-4,
                algo="gradascent", precision=precision,
            )  # fmt: skip
            return torch.cat(sums)

        moved = float((summed(64) - summed(63)).norm())
        assert 0.5 < moved <= 1 + 1e-5  # of a clip of 1, which these gradients exceed


@pytest.mark.slow
@pytest.mark.parametrize("named", ["./retain.jsonl", "retain.jsonl", "absolute"])
@pytest.mark.parametrize("variable", ["MPU_UNLEARN_RETAIN", "MPU_UNLEARN_FORGET"])
def test_records_that_the_environment_names_are_not_public(
    mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch, variable: str, named: str
) -> None:
    write_records(root / "public.jsonl", 6, 1)
    path = str((root / "private.jsonl").resolve()) if named == "absolute" else named
    write_records(root / Path(path).name, 6, 2)
    monkeypatch.setenv(variable, path)
    given = ["--retain", "public.jsonl"] if variable.endswith("FORGET") else ["--forget", "public.jsonl"]
    refused = mpu("unlearn", "base", *given, "--public-records", "--dry-run", check=False, cwd=root)
    assert refused.status == 2
    assert "is where private records are expected" in refused.err
    monkeypatch.delenv(variable)
    mpu("unlearn", "base", "--forget", "public.jsonl", "--retain", "public.jsonl", "--public-records", "--dry-run",
        cwd=root)  # fmt: skip


@pytest.mark.slow
def test_what_no_noise_covers_is_for_its_owner_only(mpu: Callable, root: Path) -> None:
    """The server's new model, under an open umask."""
    training = [*TRAINING, "--algo", "gradascent", "--epochs", 1]
    mpu("publish", "base", "--copies", 2, "--kappa", 0.01, cwd=root)
    mpu("unlearn", "copy_1", "copy_2", *training, cwd=root)
    subprocess.run(
        [sys.executable, "-m", "mpu_cli", "aggregate", "deltas", "--out", "model"], cwd=root, check=True,
        capture_output=True, preexec_fn=lambda: os.umask(0),
    )  # fmt: skip
    files = list((root / "model").rglob("*.safetensors"))
    assert files
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
