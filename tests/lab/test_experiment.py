"""``mpu run``, ``sweep``, ``finetune`` and ``plan``: both parties on one machine, compared with the single commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import mpu_cli
from mpu_cli.demo.model import make_people
from mpu_cli.files.sealing import default_identity_path, read_identities
from mpu_cli.lab import rounds
from mpu_cli.lab.options.experiment import Experiment
from mpu_cli.lab.rounds import publication_in
from mpu_cli.lab.sweep import ThroughRay, ThroughSubmitit, read_sweep
from mpu_cli.observer import Observer
from mpu_cli.options.declare import from_flat
from mpu_cli.protocol.keys import unseal
from mpu_cli.protocol.register import default_register_path
from mpu_cli.protocol.updates import default_updates_path
from mpu_cli.training.data import read_dataset
from mpu_cli.version import __version__
from tests.conftest import Outcome
from tests.helpers.models import DemoModel, random_model, save, write_records
from tests.helpers.protocol import distance, tensors
from tests.helpers.stopping import stop_when
from tests.helpers.trainings import for_run

SAME_THREADS = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
TRAINING = ("--algo", "graddiff", "--epochs", 2, "--lr", 1e-3, "--batch-size", 4, "--optim", "adamw-blockwise")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a base, a reference, forget and retain records."""
    save(random_model("llama"), tmp_path / "base")
    reference = random_model("llama")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    save(reference, tmp_path / "reference")
    write_records(tmp_path / "forget.jsonl", 10, 1)
    write_records(tmp_path / "retain.jsonl", 10, 2)
    return tmp_path


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A cluster of two cores on this machine, which RAY_ADDRESS names."""
    pytest.importorskip("ray")
    ray = Path(sys.executable).with_name("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Sockets have to have short names.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        head = subprocess.Popen(
            [ray, "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=2",
             "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        assert head.stdout
        started = any("Ray runtime started" in line for line in head.stdout)
        patch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        try:
            assert started
            yield
        finally:
            head.terminate()
            head.wait()


class TestRun:
    @pytest.mark.slow
    def test_clean_is_uninterrupted(self, mpu: Callable, root: Path) -> None:
        """All epochs in one training; clean-rounds begins anew in each round."""
        epochs = TRAINING[TRAINING.index("--epochs") + 1]
        rounds = ("--rounds", 2, "--unlearn", "optim=adamw")
        for mode in ("clean", "clean-rounds"):
            mpu("run", "base", "--mode", mode, *for_run(TRAINING), *rounds, "--out", mode, cwd=root)
        mpu(
            "unlearn",
            "base",
            *TRAINING,
            "--optim",
            "adamw",
            "--epochs",
            2 * epochs,
            "--out",
            "delta.safetensors",
            cwd=root,
        )
        base, change = tensors(root / "base"), tensors(root / "delta.safetensors")
        after = tensors(root / "clean/server/round_1/model")
        apart = tensors(root / "clean-rounds/server/round_2/model")
        for name, weights in base.items():
            torch.testing.assert_close(after[name], (weights + change.get(name, 0)).float().double(), rtol=0, atol=1e-7)
        assert any(not torch.allclose(apart[name], after[name], atol=1e-5) for name in after)

    def test_noised_keeps_the_noise(self, mpu: Callable, root: Path) -> None:
        """θ₁ = θ₀ + ε + Δ(θ₀ + ε), ε of scale κ·mean(α)."""
        mpu(
            "run", "base", "--public", "reference", "--mode", "noised", "--kappa", 0.2,
            "--publish", "noise=zero-sum:1,3", *for_run(TRAINING), "--rounds", 1, "--out", "noised", "--keep", cwd=root,
        )  # fmt: skip
        copy = tensors(root / "noised/client/round_1/copy_1")
        delta = tensors(root / "noised/server/round_1/deltas/copy_1.safetensors")
        after = tensors(root / "noised/server/round_1/model")
        base, reference = tensors(root / "base"), tensors(root / "reference")
        for name, weights in copy.items():
            torch.testing.assert_close(after[name], (weights + delta.get(name, 0)).float().double(), rtol=0, atol=1e-7)
        name = "model.embed_tokens.weight"
        audited = mpu("audit", "noised/client/round_1/copy_1", "--base", "base", "--json", cwd=root)
        assert audited.json["settings"]["noise"]["factors"] == [1.0]
        expected_sigma = 0.2 * 2 * float((base[name] - reference[name]).square().mean().sqrt())
        assert float((copy[name] - base[name]).square().mean().sqrt()) == pytest.approx(expected_sigma, rel=0.05)

    @pytest.mark.slow
    def test_what_storage_rounds_away_is_told(self, mpu: Callable, root: Path) -> None:
        (root / "narrow.toml").write_text(
            'base = "narrow"\nalgo = "graddiff"\nepochs = 1\nrounds = 1\nlr = 1e-6\n[eval]\nbenchmark = "qa"\n'
            + 'metrics = ["forget_Q_A_Prob"]\n'
        )
        save(random_model("llama", dtype=torch.bfloat16), root / "narrow")
        small = ("--algo", "graddiff", "--epochs", 1, "--rounds", 1, "--lr", 1e-6)
        assert "rounds away" in mpu("run", "narrow", *small, "--out", "a", cwd=root).err
        assert (
            "rounds away" not in mpu("run", "narrow", *small, "--publish", "dtype=float32", "--out", "b", cwd=root).err
        )
        assert "rounds away" in mpu("sweep", "narrow.toml", cwd=root).err
        taught = mpu("finetune", "narrow", "--data", "forget.jsonl", "--epochs", 1, "--lr", 1e-6, "--json", cwd=root)
        assert "rounds away" in taught.err
        assert taught.json["lost_to_rounding"] > 0.3

    @pytest.mark.slow
    def test_one_copy_at_a_time(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(root)
        copy_counts = set()

        class Watching(Observer):
            def stage(self, *_: object) -> None:
                copy_counts.add(len(list(root.glob("run/client/*/copy_*"))))

            def advance(self, *_: object) -> None:
                self.stage()

        experiment = from_flat(
            Experiment, {"base": "base", "algo": "gradascent", "epochs": 1, "batch_size": 5, "rounds": 2}
        )
        outcome = rounds.run(experiment, read_dataset(experiment.unlearning), root / "run", Watching())
        assert copy_counts == {0, 1}
        assert [line["step"] for line in outcome.log] == (["publish", "unlearn"] * 3 + ["aggregate"]) * 2
        folders = {str(p.relative_to(root / "run")) for p in (root / "run").rglob("*") if p.is_dir()}
        assert "server/round_1/model" not in folders
        assert not any("copy" in name or "deltas" in name for name in folders)

    @pytest.mark.slow
    def test_goes_on_after_a_kill(self, mpu: Callable, root: Path) -> None:
        arguments = ["run", "base", *for_run(TRAINING), "--rounds", 2, "--secret-seed", 3]
        mpu(*arguments, "--out", "whole", cwd=root)
        first_delta = "stopped/server/round_1/deltas/copy_1*"
        stop_when([*arguments, "--out", "stopped"], lambda: list(root.glob(first_delta)), cwd=root, env=SAME_THREADS)
        assert not (root / "stopped/server/round_2/model").exists()
        half = root / "stopped/client/round_1/deltas/.copy_2.safetensors.x.partial"  # from a kill at another moment
        half.mkdir(parents=True)
        mpu(*arguments, "--keep", "--out", "stopped", cwd=root)
        assert not half.exists()
        assert (
            distance(tensors(root / "stopped/server/round_2/model"), tensors(root / "whole/server/round_2/model"))
            < 1e-7
        )
        steps = [json.loads(line) for line in (root / "stopped/log.jsonl").read_text().splitlines()]
        assert len({(s["step"], s["round"], s.get("copy")) for s in steps}) == 2 * (3 + 3 + 1)

    @pytest.mark.slow
    def test_goes_on_in_the_third_round(self, mpu: Callable, root: Path) -> None:
        """No step is repeated, whether the run was killed or had finished; a concurrent run is rejected."""
        arguments = ("run", "base", *for_run(TRAINING), "--rounds", 3, "--secret-seed", 3, "--out", "out")
        second: list[Outcome] = []

        def in_round_3() -> bool:
            if not second and (root / "out/log.jsonl").exists():
                second.append(mpu(*arguments, cwd=root, check=False))
            return bool(list(root.glob("out/server/round_3/deltas/copy_1*")))

        stop_when(arguments, in_round_3, cwd=root, env=SAME_THREADS)
        assert "in use by another mpu run" in second[0].err
        (root / "out/server/round_3/outbox").mkdir(exist_ok=True)  # as left by a kill while a copy is written
        (root / "out/server/round_3/.model.x.partial").mkdir()
        mpu(*arguments, cwd=root)
        steps = [json.loads(line) for line in (root / "out/log.jsonl").read_text().splitlines()]
        step_keys = [(s["step"], s["round"], s.get("copy")) for s in steps]
        assert len(step_keys) == len(set(step_keys))
        assert len(step_keys) in (20, 21)  # a copy may have been written when its log line was not
        assert not [*root.rglob("out/**/*.partial"), *root.rglob("outbox"), *root.glob("out/client/*")]
        assert mpu(*arguments, "--keep", cwd=root).out.strip() == "out/server/round_3/model"
        assert (root / "out/log.jsonl").read_text().count("\n") == len(step_keys)

    @pytest.mark.slow
    def test_other_options_in_the_same_folder(self, mpu: Callable, root: Path) -> None:
        command = ("run", "base", *for_run(TRAINING), "--rounds", 1, "--out", "out")
        mpu(*command, cwd=root)
        again = mpu(*command, cwd=root)
        assert again.out.strip() == "out/server/round_1/model"
        mpu(*command, "--kappa", 0.3, cwd=root, fails="experiment.kappa not set → 0.3", status=1)
        (root / "mine").mkdir()
        (root / "mine" / "thesis.txt").write_text("all of it")
        assert (
            "holds no experiment" in mpu("run", "base", *for_run(TRAINING), "--out", "mine", cwd=root, check=False).err
        )

    @pytest.mark.slow
    def test_what_each_party_holds(self, mpu: Callable, root: Path) -> None:
        """No key, α or base weight in the client's folder; no record in the server's."""
        mpu(
            "run", "base", "--public", "reference", "--kappa", 0.05, "--publish", "noise=zero-sum:1.2345,2.3456",
            *for_run(TRAINING),
            "--rounds", 1, "--keep", "--out", "out", cwd=root,
        )  # fmt: skip
        server, client = root / "out/server", root / "out/client"
        keys = unseal(server / "round_1/keys.bin", read_identities(server / "identity.txt"))
        secrets = [keys.publication.seed, keys.publication.seed.hex().encode(), b"1.2345", b"2.3456", b"AGE-SECRET-KEY"]
        secrets += [repr(sigma).encode() for sigma in keys.sigma.values() if sigma]
        weights = AutoModelForCausalLM.from_pretrained(root / "base").state_dict()
        secrets += [
            w.flatten()[i : i + 4].numpy().tobytes() for w in weights.values() for i in range(0, w.numel() - 4, 4)
        ]
        client_contents = [path.read_bytes() for path in client.rglob("*") if path.is_file()]
        assert len(client_contents) > 8
        assert not any(secret in content for content in client_contents for secret in secrets)
        texts = []
        for name in ("forget", "retain"):
            for line in (root / f"{name}.jsonl").read_text().splitlines():
                texts += [text.encode() for text in json.loads(line).values()]
        server_contents = [path.read_bytes() for path in server.rglob("*") if path.is_file()]
        assert len(server_contents) > 6
        assert not any(text in content for content in server_contents for text in texts)

    def test_bad_input(self, mpu: Callable, root: Path) -> None:
        for arguments, status, said in (
            (("--copies", 1), 2, "has to be permanent"),
            (("--rounds", 0), 2, "at least 1"),
            (("--epochs", 0), 2, "--epochs"),
            (("--aggregate", "step=nan"), 2, "--aggregate step"),
            (("--secret-seed", -1), 2, "--secret-seed"),
            (("--forget", "none.jsonl"), 1, "none.jsonl"),
            (("--publish", "noise=zero-sum:1,two"), 2, "comma-separated numbers"),
            (("--copies", 2, "--publish", "noise=zero-sum:1,2,3"), 2, "3 factors for 2 copies"),
            (("--publish", "noise=extrapolate:1,1"), 2, "copies with the same factor"),
            (("--kappa", "-1"), 2, "at least 0"),
        ):
            mpu("run", "base", *arguments, "--out", "bad", cwd=root, refused=said, status=status)
        assert not (root / "bad").exists()

    @pytest.mark.slow
    @pytest.mark.exhaustive
    def test_trainings_on_several_processes(self, mpu: Callable, root: Path) -> None:
        """Started by torch's launcher, with LoRA and a reference kept over two rounds: the same model."""
        options = "optim=sgd,lora_rank=2,lora_targets=q_proj,down_proj,deterministic=false,precision=float64"
        training = ("--algo", "npo", "--epochs", 1, "--lr", 1e-2, "--batch-size", 4, "--unlearn", options)
        run = ("run", "base", *training, "--rounds", 2, "--copies", 2, "--secret-seed", 1)
        mpu(*run, "--out", "one", cwd=root)
        command = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 -m --"
        mpu(*run, "--out", "two", "--launch", command, cwd=root)
        one_process, two_processes = (tensors(root / f"{out}/server/round_2/model") for out in ("one", "two"))
        base = tensors(root / "base")
        assert (
            distance(
                {n: two_processes[n] - x for n, x in base.items()}, {n: one_process[n] - x for n, x in base.items()}
            )
            < 1e-4
        )
        mpu(*run, "--forget", "nothing.jsonl", "--out", "bad", "--launch", command, cwd=root, fails="nothing.jsonl")
        mpu(*run, "--out", "worse", "--launch", "no-such-launcher -m", cwd=root, fails="cannot be started")


class TestSweep:
    GRID = """
base = "base"
algo = ["graddiff", "npo"]
mode = ["clean", "mpu"]
kappa = [0.01, 0.1]
epochs = 1
rounds = 1
batch_size = 5

[eval]
benchmark = "qa"
metrics = ["forget_Q_A_Prob", "retain_Q_A_Prob"]
"""

    def test_a_dry_run_finds_that_a_cluster_cannot_be_used(
        self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (root / "grid.toml").write_text(self.GRID)
        monkeypatch.setitem(sys.modules, "ray", None)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        mpu("sweep", "grid.toml", "--launcher", "ray", "--dry-run", refused="--launcher ray needs ray", cwd=root)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "jobs",
        [
            pytest.param((), marks=pytest.mark.exhaustive),
            ("--jobs", 2),
            pytest.param(("--launcher", "submitit"), marks=pytest.mark.exhaustive),
            ("--launcher", "ray"),
        ],
        ids=["one process", "two", "SLURM's", "Ray's"],
    )
    def test_an_interrupt_stops_it(self, root: Path, request: pytest.FixtureRequest, jobs: tuple) -> None:
        """Also while a cell is evaluated, and no further cell begins."""
        if "ray" in jobs:
            request.getfixturevalue("ray_cluster")
        (root / "grid.toml").write_text(self.GRID)
        done = stop_when(
            ["sweep", "grid.toml", *jobs], lambda: list((root / "grid").glob("*/run.json")), cwd=root,
            env={"XDG_CONFIG_HOME": str(root / "config")}, by=signal.SIGINT,
        )  # fmt: skip
        assert done.returncode == 128 + signal.SIGINT
        assert 1 <= sum(" of 6: " in line for line in done.stderr.splitlines()) <= 2
        assert "`mpu report grid` shows what is done so far" in done.stderr

    @pytest.mark.slow
    def test_grid(self, mpu: Callable, root: Path) -> None:
        (root / "grid.toml").write_text(self.GRID)
        lines = mpu("sweep", "grid.toml", "--json", cwd=root).json
        # clean ignores κ, so it appears once per algorithm
        assert [line["name"] for line in lines] == [
            "graddiff-clean", "graddiff-mpu-0.01", "graddiff-mpu-0.1",
            "npo-clean", "npo-mpu-0.01", "npo-mpu-0.1",
        ]  # fmt: skip
        for line in lines:
            eval_metrics = json.loads((root / "grid" / line["name"] / "eval.json").read_text())["metrics"]
            assert line["metrics"] == {name: form["agg_value"] for name, form in eval_metrics.items()}
        assert not list((root / "grid").rglob("model.safetensors"))
        frame = mpu_cli.results(root / "grid")
        assert list(frame.index) == [line["name"] for line in lines]
        assert frame.loc["npo-mpu-0.1", ["algo", "mode", "kappa"]].to_list() == ["npo", "mpu", 0.1]
        for line in lines:
            assert frame.loc[line["name"], "metrics.forget_Q_A_Prob"] == line["metrics"]["forget_Q_A_Prob"]
            assert frame.loc[line["name"], "before.forget_Q_A_Prob"] == line["before"]["forget_Q_A_Prob"]
        before = (root / "grid/results.jsonl").read_text().splitlines()
        (root / "grid/results.jsonl").write_text("\n".join(before[:-1]) + '\n{"name": "npo-mpu-0')
        planned = mpu("sweep", "grid.toml", "--dry-run", "--json", cwd=root)
        assert [line["name"] for line in planned.json if not line["done"]] == ["npo-mpu-0.1"]
        assert "6 experiments, of which 5 done" in planned.err
        assert f"in all as long as {planned.json[-1]['steps']} steps" in planned.err
        said = mpu("sweep", "grid.toml", "--metrics", "forget_Q_A_Prob", cwd=root)
        assert [line for line in said.err.splitlines() if " of 6: " in line] == ["6 of 6: npo-mpu-0.1"]
        assert len((root / "grid/results.jsonl").read_text().splitlines()) == 6
        cells = said.out.splitlines()
        assert cells[:4] == [
            "**forget_Q_A_Prob**",
            "",
            "| algo | kappa | before | clean | mpu | mpu: % from clean | mpu: % of clean's change |",
            "|---|---|---|---|---|---|---|",
        ]
        assert len(cells) == 12
        assert cells[9].startswith("mpu: average degradation (distance from clean) over 2 algorithms: ")
        assert cells[10].startswith("before: average degradation (distance from clean) over 2 algorithms: ")
        assert "100 % of clean's change (forget_Q_A_Prob)" in cells[10]
        assert cells[11].startswith("All with ")  # how the numbers can be made again
        assert {"epochs = 1", f"torch {version('torch')}"} <= set(re.split("[,;] |[.]$", cells[11]))
        other = ("sweep", "grid.toml", "--set", "epochs=2")
        mpu(*other, refused="grid: holds experiments with other options (epochs 1 → 2)", status=1, cwd=root)
        planned = json.loads((root / "grid/sweep.json").read_text())["experiments"]
        mpu("sweep", "grid.toml", "--set", 'algo=["npo"]', "--set", "kappa=[0.1]", cwd=root)
        assert json.loads((root / "grid/sweep.json").read_text())["experiments"] == planned
        assert cells[4].split("|")[4] == cells[5].split("|")[4]  # clean, next to both κ
        [measured] = (root / "grid").glob("before-*.json")
        before = json.loads(measured.read_text())["metrics"]["forget_Q_A_Prob"]["agg_value"]
        row = [cell.strip() for cell in cells[4].split("|")[1:-1]]
        assert row[2] == f"{before:.4g}"
        values = {line["name"]: line["metrics"]["forget_Q_A_Prob"] for line in lines}
        clean, ours = values["graddiff-clean"], values["graddiff-mpu-0.01"]
        assert float(row[6]) == pytest.approx(100 * abs(ours - clean) / abs(before - clean), rel=1e-3)

    @pytest.mark.slow
    def test_settings_jobs_and_what_others_measured(self, mpu: Callable, root: Path) -> None:
        """--set and --with replace options, jobs change nothing, published numbers stand beside; one retain log."""
        (root / "grid.toml").write_text(
            self.GRID.replace('benchmark = "qa"', 'benchmark = "qa"\nretain_model = "reference"')
            + '[[published]]\nsource = "us"\nalgo = "npo"\nmetrics = { forget_Q_A_Prob = 0.25 }\n'
        )
        (root / "with.toml").write_text('kappa = [0.01, 0.1]\nlr = 1e-4\n[eval]\nmetrics = ["forget_Q_A_Prob"]\n')
        options = ("sweep", "grid.toml", "--with", "with.toml", "--set", "algo=npo", "--set", "kappa=0.1")
        listed = mpu(*options, "--dry-run", "--json", cwd=root).json
        assert [line["name"] for line in listed] == ["clean", "mpu"]
        assert listed[1]["sent"] == 3 * listed[0]["sent"] > 0
        assert not (root / "grid").exists()
        sequential = mpu(*options, "--out", "alone", "--json", cwd=root).json
        parallel = mpu(*options, "--out", "together", "--jobs", 2, "--json", cwd=root).json
        assert [line["name"] for line in sequential] == ["clean", "mpu"]
        for sequential_line, parallel_line in zip(sequential, parallel, strict=True):
            assert sequential_line["metrics"].keys() == {"forget_Q_A_Prob"}
            assert sequential_line["metrics"]["forget_Q_A_Prob"] == pytest.approx(
                parallel_line["metrics"]["forget_Q_A_Prob"], rel=1e-2
            )
        assert len(list((root / "alone").glob("retain-*.json"))) == 1
        for out, done in (("alone", True), ("new", False)):
            planned = mpu(*options, "--out", out, "--dry-run", "--json", cwd=root).json
            assert [line["done"] for line in planned] == [done, done]
        table = mpu(*options, "--out", "alone", cwd=root).out.splitlines()
        distances = "mpu: % from clean | mpu: % of clean's change"
        assert table[2] == f"| retain model | before | clean | mpu | published: us | {distances} |"
        [log] = (root / "alone").glob("retain-*.json")
        of_retain = json.loads(log.read_text())["metrics"]["forget_Q_A_Prob"]["agg_value"]
        assert [cell.strip() for cell in table[4].split("|")][1:6:4] == [f"{of_retain:.4g}", "0.25"]
        assert table[-3].startswith("mpu: average degradation (distance from clean) over 1 algorithm: ")
        failed = mpu(*options, "--set", "lr=1e30", "--out", "bad", "--jobs", 2, cwd=root, check=False)
        assert failed.status == 1
        assert "2 of 2 experiments failed" in failed.err
        assert "diverged" in failed.err
        assert "NAME=VALUE" in mpu("sweep", "grid.toml", "--set", "algo", cwd=root, check=False).err
        page = root / mpu("report", "alone", cwd=root).out.strip()
        assert "<b>mpu</b>: average degradation" in page.read_text()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("launcher", "parameters"),
        [
            pytest.param("submitit", "timeout_min=5,cpus_per_task=1", marks=pytest.mark.exhaustive),
            ("ray", "num_cpus=1"),
        ],
    )
    def test_a_cluster_gives_the_same(
        self, mpu: Callable, root: Path, request: pytest.FixtureRequest, launcher: str, parameters: str
    ) -> None:
        """Jobs of submitit's executor on this machine, which they leave as those of SLURM do, and tasks of Ray; what
        fails is named."""
        if launcher == "ray":
            request.getfixturevalue("ray_cluster")
        (root / "grid.toml").write_text(self.GRID)
        options = ("sweep", "grid.toml", "--set", "algo=npo", "--set", "kappa=0.1", "--json")
        here = mpu(*options, "--out", "here", cwd=root).json
        cluster = ("--launcher", launcher, "--launcher-options", parameters, "--jobs", 2)
        outcome = mpu(*options, "--out", "cluster", *cluster, cwd=root)
        jobs, planned = outcome.json, mpu(*options, "--out", "planned", *cluster, "--dry-run", cwd=root)
        for text in (outcome.err, planned.err):  # SLURM is not installed where tests run
            assert ("experiments run as processes of this machine" in text) is (launcher == "submitit")
        assert not (root / "planned").exists()
        assert [line["name"] for line in jobs] == ["clean", "mpu"]
        assert jobs[0]["metrics"] == pytest.approx(here[0]["metrics"], rel=1e-4)  # of clean: the other has secret noise
        assert jobs[1]["metrics"].keys() == here[1]["metrics"].keys()
        folders = re.findall(r"^(\S+): logs of the jobs$", outcome.err, re.M)
        assert len(folders) == (launcher == "submitit")
        assert sum(len(list((root / folder).glob("*_log.out"))) for folder in folders) == 2 * len(folders)
        failed = mpu(*options, "--set", "lr=1e30", "--out", "bad", *cluster, cwd=root, check=False)
        assert "2 of 2 experiments failed" in failed.err
        assert "diverged" in failed.err
        wrong = mpu(*options, "--out", "wrong", *cluster[:2], "--launcher-options", "gpus=1", cwd=root, check=False)
        assert wrong.is_one_error
        assert mpu(*options, "--launcher-options", parameters, cwd=root, check=False).is_one_error

    @pytest.mark.slow
    def test_a_loss_of_ones_own_reaches_jobs(self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """By PYTHONPATH; the result is the built-in term's."""
        (root / "own").mkdir()
        (root / "own/losses.py").write_text("def climb(forget, _, constants):\n    return -forget.cross_entropy\n")
        (root / "grid.toml").write_text(self.GRID)
        monkeypatch.syspath_prepend(root / "own")  # this process's own, which has started already
        monkeypatch.setenv("PYTHONPATH", str(root / "own"), prepend=os.pathsep)
        one = ("sweep", "grid.toml", "--set", "mode=clean", "--set", "lr=1e-3", "--launcher", "submitit", "--json")
        [own] = mpu(*one, "--set", "algo=losses:climb", "--out", "own_loss", cwd=root).json
        [built_in] = mpu(*one, "--set", "algo=graddiff", "--out", "built_in", cwd=root).json
        assert own["metrics"] == built_in["metrics"] != own["before"]

    @pytest.mark.parametrize("address", [None, "", "auto"])
    def test_a_ray_cluster_has_to_be_named(
        self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch, address: str | None
    ) -> None:
        """Ray by itself joins one that it finds on this machine, whoever runs it, and unpickles what that returns."""
        monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))  # nothing of it is called
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        if address is not None:
            monkeypatch.setenv("RAY_ADDRESS", address)
        (root / "grid.toml").write_text(self.GRID)
        mpu("sweep", "grid.toml", "--launcher", "ray", refused="RAY_ADDRESS", status=2, cwd=root)

    @pytest.mark.slow
    @pytest.mark.usefixtures("ray_cluster")
    def test_rays_tasks_import_nothing_from_the_current_folder(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whose files may be somebody else's."""
        (root / "mpu_cli.py").write_text("raise SystemExit('code of the current folder')")
        monkeypatch.chdir(root)
        import ray

        ray.shutdown()  # of an earlier test, which was in another folder
        assert ThroughRay({"num_cpus": 1}).run(["--version"]).stdout == f"mpu {__version__}\n"
        assert Path.cwd() == root

    @pytest.mark.slow
    @pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no option for it")
    def test_a_job_imports_nothing_from_the_current_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where somebody else may leave files: submitit starts its processes as `python -m`, which would."""
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        for name in ("shlex", "submitit", "mpu_cli", "cloudpickle"):
            Path(f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\n")
        ended = ThroughSubmitit(tmp_path, {"timeout_min": 5}).run(["--version"])
        assert not (tmp_path / "imported").exists()
        assert (ended.status, ended.stdout.split()[-1]) == (0, __version__), ended

    @pytest.mark.slow
    def test_a_ray_cluster_has_to_run(self, root: Path, shell: Callable) -> None:
        pytest.importorskip("ray")
        (root / "grid.toml").write_text(self.GRID)
        ended = shell("RAY_ADDRESS=127.0.0.1:1 mpu sweep grid.toml --launcher ray")
        assert ended.returncode == 1
        assert ended.stderr.startswith("mpu: error: --launcher ray: no cluster runs")
        assert not (root / "grid").exists()

    @pytest.mark.slow
    def test_cases_change_together(self, mpu: Callable, root: Path) -> None:
        (root / "cases.toml").write_text(
            self.GRID.split("[eval]")[0].replace('["graddiff", "npo"]', '"gradascent"').replace("[0.01, 0.1]", "0.01")
            + '[eval]\nbenchmark = "qa"\nmetrics = ["forget_Q_A_Prob"]\n'
            + "[[cases]]\nlr = 1e-4\nseed = 1\n[[cases]]\nlr = 2e-4\nseed = 2\n"
        )
        lines = mpu("sweep", "cases.toml", "--out", "cases", "--json", cwd=root).json
        assert [(line["mode"], line["lr"], line["seed"]) for line in lines] == [
            ("clean", 1e-4, 1), ("mpu", 1e-4, 1), ("clean", 2e-4, 2), ("mpu", 2e-4, 2),
        ]  # fmt: skip
        means = mpu("sweep", "cases.toml", "--out", "cases", "--over", "lr,seed", cwd=root).out.splitlines()
        assert means[2] == "| before | clean | mpu | mpu: % from clean | mpu: % of clean's change |"
        assert means[4].count("±") == 4

    @pytest.mark.slow
    def test_defaults_are_told_and_a_failure_stops_nothing(self, mpu: Callable, root: Path) -> None:
        (root / "cases.toml").write_text(
            'base = "base"\nalgo = "gradascent"\ntemplate = "plain"\nepochs = 1\nrounds = 1\noptim = "sgd"\n'
            + '[eval]\nbenchmark = "qa"\nmetrics = ["forget_Q_A_Prob"]\ntemplate = "plain"\n'
            + '[[cases]]\nlr = [1e-4, 1e30]\n[[cases]]\nlr = 1e-5\nnoise = "zero-sum:1,1"\n[[cases]]\nlr = 1e-5\n'
            + 'mode = "noised"\nnoise = "zero-sum:1,2,3"\ncopies = 3\n'
        )
        mpu("sweep", "cases.toml", cwd=root, fails="1 of 4 experiments failed", status=1)
        lines = [json.loads(line) for line in (root / "cases/results.jsonl").read_text().splitlines()]
        assert [(line.get("lr"), line.get("noise")) for line in lines] == [
            (1e-4, "default"), (1e-5, "zero-sum:1,1"), (1e-5, "zero-sum:1,2,3"),
        ]  # fmt: skip

    @pytest.mark.slow
    def test_a_model_is_asked_as_it_was_trained(self, mpu: Callable, root: Path) -> None:
        """A template without a system turn: training needs --reading system_prompt=, and so does evaluation."""
        template = root / "base/chat_template.jinja"
        refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        template.write_text(refusing + template.read_text())
        (root / "one.toml").write_text(
            'base = "base"\nalgo = "gradascent"\nepochs = 1\nrounds = 1\nmode = "clean"\nsystem_prompt = ""\n'
            + '[eval]\nbenchmark = "qa"\nmetrics = ["forget_Q_A_Prob"]\n'
        )
        [line] = mpu("sweep", "one.toml", "--json", cwd=root).json
        mpu("run", "base", "--algo", "gradascent", "--epochs", 1, "--rounds", 1, "--mode", "clean",
            "--unlearn", "system_prompt=", "--out", "again", cwd=root)  # fmt: skip
        evaluation = mpu("eval", "again/server/round_1/model", "--benchmark", "qa", "--metrics", "forget_Q_A_Prob",
                    "--reading", "system_prompt=", "--json", cwd=root).json  # fmt: skip
        assert line["metrics"]["forget_Q_A_Prob"] == evaluation["metrics"]["forget_Q_A_Prob"]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("base = ", "not TOML"),
            ('algo = "npo"', "base: missing"),
            ('base = "base"\nalgorithm = "npo"', "algorithm: unknown option"),
            ('base = "base"\nalgo = ["npo", "magic"]', "--algo magic: no such algorithm"),
            ('base = "base"\nlr = "fast"', "lr = 'fast': must be a number or auto"),
            ('base = "base"\n[eval]\nsplits = "forget01"', "[eval] splits: unknown option"),
            ('base = "base"\n[eval]\nmetrics = "all"', "no such metric"),
            ('base = "base"\n[cases]\nlr = 1e-4', "[[cases]]"),
            ('base = "base"\neval = 3', "[eval]"),
            ('base = "base"\nkappa = []', "needs a value"),
            ('base = "base"\nstep = "auto"', "add --probe FILE"),
            ('base = "base"\n[eval]\nbenchmark = "nope"', "must be one of muse, qa, tofu, wmdp"),
        ],
    )
    def test_bad_input(self, mpu: Callable, root: Path, text: str, said: str) -> None:
        (root / "grid.toml").write_text(text)
        outcome = mpu("sweep", "grid.toml", cwd=root, check=False)
        assert outcome.status in (1, 2)
        assert said in outcome.err
        assert not (root / "grid").exists()

    def test_a_metric_that_the_sweep_will_not_have(self, mpu: Callable, root: Path) -> None:
        (root / "grid.toml").write_text('base = "base"\nalgo = "graddiff"\n[eval]\nbenchmark = "qa"\n')
        mpu("sweep", "grid.toml", "--metrics", "model_utility", refused="model_utility", cwd=root)
        assert not (root / "grid").exists()


def test_a_repaired_model_is_still_of_its_round(mpu: Callable, root: Path) -> None:
    """What the server teaches an unlearned model again is published as the next round, which the client checks."""
    mpu("publish", "base", "--copies", 1, "--kappa", 0, cwd=root)
    mpu("unlearn", "copy_1", "--forget", "forget.jsonl", "--retain", "retain.jsonl", "--max-steps", 2, cwd=root)
    mpu("aggregate", "deltas", "--keys", "keys.bin", cwd=root)
    mpu("finetune", "unlearned", "--data", "retain.jsonl", "--epochs", 1, "--out", "repaired", cwd=root)
    assert distance(tensors(root / "repaired"), tensors(root / "unlearned")) > 0
    [step] = [each["step"] for each in mpu("status", "--json", cwd=root).json["next"]]
    assert shlex.split(step)[:3] == ["mpu", "publish", "repaired"]  # and not the model before the repair
    mpu("publish", "repaired", "--kappa", 0, cwd=root)
    assert mpu("check", "round_2/copy_1", "--json", cwd=root, check=False).json["verdict"]


@pytest.mark.slow
def test_finetune_learns(mpu: Callable, root: Path) -> None:
    mpu("finetune", "base", "--data", "forget.jsonl", "--data", "retain.jsonl", "--epochs", 30, "--lr", 3e-3,
        "--batch-size", 5, "--out", "taught", cwd=root)  # fmt: skip
    probabilities = {}
    for name in ("base", "taught"):
        probabilities[name] = mpu(
            "eval", name, "--benchmark", "qa", "--forget", "forget.jsonl", "--metrics", "forget_Q_A_Prob",
            "--out", f"{name}.json", "--json", cwd=root,
        ).json["metrics"]["forget_Q_A_Prob"]  # fmt: skip
    assert probabilities["taught"] > 10 * probabilities["base"]
    stored = AutoModelForCausalLM.from_pretrained(root / "taught", dtype="auto")
    assert stored.dtype == torch.float32
    for option, value in (("--epochs", 0), ("--training", "weight_decay=nan"), ("--seed", -1)):
        assert mpu("finetune", "base", "--data", "forget.jsonl", option, value, cwd=root, check=False).status == 2
    assert (
        "already exists"
        in mpu("finetune", "base", "--data", "forget.jsonl", "--out", "taught", cwd=root, check=False).err
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "", "--public reference", pytest.param("--public reference --copies 3", marks=pytest.mark.exhaustive),
        pytest.param("--public reference --kappa 0.5", marks=pytest.mark.exhaustive),
        "--public reference --permanent-noise 2 --copies 1", "--public reference --watermark 0 --max-noise 0.02",
        "--copies 2 --noise zero-sum --kappa 0.3 --watermark 0.2",
        pytest.param("--copies 1 --permanent-noise 0.1", marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_a_rehearsal_publishes_what_publish_does(mpu: Callable, root: Path, options: str) -> None:
    """`run` and `plan` have the copies and the noise of `publish` with the same options."""
    mpu("publish", "base", *options.split(), cwd=root)
    of_run: list[str] = []
    for flag, value in zip(options.split()[::2], options.split()[1::2], strict=True):
        apart = flag in ("--public", "--copies", "--kappa", "--permanent-noise")
        name = flag.removeprefix("--").replace("-", "_")
        of_run += [flag, value] if apart else ["--publish", f"{name}={value}"]
    mpu(
        "run",
        "base",
        *for_run(TRAINING),
        *of_run,
        "--rounds",
        1,
        "--epochs",
        1,
        "--keep",
        "--out",
        "out",
        cwd=root,
    )
    keys = unseal(root / "keys.bin", read_identities(default_identity_path()))
    rehearsed_keys = unseal(root / "out/server/round_1/keys.bin", read_identities(root / "out/server/identity.txt"))
    published, rehearsed = keys.publication, rehearsed_keys.publication
    facts = ("scheme", "kappa", "shared_kappa", "watermark", "symmetries")
    assert {name: getattr(rehearsed, name) for name in facts} == {name: getattr(published, name) for name in facts}
    assert rehearsed_keys.sigma == keys.sigma  # which --max-noise has lowered
    assert rehearsed_keys.shared_sigma == pytest.approx(keys.shared_sigma, rel=5e-3)  # publish rounds it
    planned = mpu("plan", "base", *options.split(), "--json", cwd=root).json
    assert (planned["copies"], planned["noise"]["kappa"], planned["noise"]["permanent_noise"]) == (
        published.copies, published.kappa, published.shared_kappa,
    )  # fmt: skip


def test_a_sweep_says_which_noise_each_cell_has(tmp_path: Path) -> None:
    """Where a case omits the scales, those that it is run with; one noised copy keeps permanent noise."""
    (tmp_path / "grid.toml").write_text(
        'base = "base"\nalgo = "gradascent"\n[[cases]]\npermanent_noise = [0.1, 1.0]\nmode = "noised"\n'
        '[[cases]]\nkappa = 0.3\n[[cases]]\npublic = "reference"\n'
    )
    cells = read_sweep(tmp_path / "grid.toml")
    assert [(cell.varied["kappa"], cell.varied["permanent_noise"]) for cell in cells] == [
        (0.01, 0.1), (0.01, 1.0), (0.3, 0.0), (0.0, 10.0),
    ]  # fmt: skip
    scales = [publication_in(cell.experiment, seed=bytes(32)) for cell in cells]
    assert [(each.copies, each.kappa, each.shared_kappa) for each in scales] == [
        (1, 0.01, 0.1), (1, 0.01, 1.0), (3, 0.3, 0.0), (1, 0.0, 10.0),
    ]  # fmt: skip


@pytest.mark.slow
def test_plan_counts(mpu: Callable, root: Path) -> None:
    """The bytes are those that publish and unlearn then write, and the steps those that unlearn may take."""
    options = ("--copies", 3, "--forget", "forget.jsonl", "--batch-size", 4)
    lasting = mpu("plan", "base", *options, "--permanent-noise", 0.1, cwd=root).out.replace("\n", " ")
    assert "off by 0.1 times the RMS of its block's task vector" in lasting
    document = mpu("plan", "base", *options, "--json", cwd=root).json
    model = AutoModelForCausalLM.from_pretrained(root / "base")
    assert document["weights"] == model.num_parameters()
    assert (document["noise"]["kind"], document["noise"]["order"], document["noise"]["remainder"]) == (
        "extrapolate",
        3,
        1.5,
    )
    other = mpu("plan", "base", "--noise", "extrapolate:1,-2", "--json", cwd=root).json
    assert other["noise"]["weights"] == pytest.approx([2 / 3, 1 / 3])
    assert (other["copies"], other["noise"]["variance_factor"]) == (2, pytest.approx(5 / 9))
    mpu("publish", "base", "--copies", 3, cwd=root)
    dry = mpu("unlearn", "copy_1", "--batch-size", 4, "--dry-run", cwd=root).out.replace("\n", " ")
    assert "4 records to forget and 8 to keep a step" in dry
    assert f"until it is done, {document['steps']} steps at most" in dry
    mpu("unlearn", "copy_1", *TRAINING, cwd=root)
    written = sum(t.numel() * 4 for t in tensors(root / "copy_1").values())
    returned = sum(t.numel() * 4 for t in tensors(root / "deltas/copy_1.safetensors").values())
    assert (document["published"], document["returned"]) == (3 * written, 3 * returned)


@pytest.mark.slow
def test_plan_measures_a_step_if_asked(mpu: Callable, root: Path) -> None:
    """On the records, with the two to keep for each that the default algorithm reads; nothing of it stays."""
    options = ("plan", "base", "--forget", "forget.jsonl", "--batch-size", 2)
    before = sorted(root.rglob("*"))
    asked = mpu(*options, "--measure-step", cwd=root)
    assert re.search(r"2 records to forget and 4 to keep; a step takes [\d.e-]+ s here", asked.out.replace("\n", " "))
    assert "a step takes" not in mpu(*options, cwd=root).out
    assert sorted(root.rglob("*")) == before
    mpu("plan", "base", "--measure-step", cwd=root, fails="needs records to train on", status=2)


class TestUntilPass:
    """``mpu run`` without --epochs: the commands of both parties, until the client's verdict is a pass."""

    @pytest.mark.slow
    def test_it_is_what_the_commands_say(self, mpu: Callable, tmp_path: Path, demo: DemoModel) -> None:
        """Its verdict is that of `mpu check` on the copies that it leaves, a second call goes on, a round that was cut
        off is made again alike, and with too few steps it ends without a pass."""
        records = ("--forget", demo.forget, "--retain", demo.retain)
        run = ("run", demo.model, *records, "--copies", 2, "--secret-seed", 3, "--unlearn", "max_steps=4",
               "--rounds", 1, "--json")  # fmt: skip
        first = mpu(*run, cwd=tmp_path, check=False)
        assert (first.status, first.json["passed"]) == (1, False)
        checked = mpu("check", "run/client/round_2/copy_1", *records, "--before", "run/client/round_1/copy_1", "--json",
                      cwd=tmp_path, check=False)  # fmt: skip
        [verdict] = first.json["verdicts"]
        for name in ("left", "kept", "scores", "verdict"):
            assert verdict[name] == checked.json[name]
        model = tmp_path / first.json["model"]
        weights = load_file(model / "model.safetensors")
        shutil.rmtree(model)
        again = mpu(*run, cwd=tmp_path, check=False)
        assert again.json == first.json
        for name, tensor in load_file(model / "model.safetensors").items():
            assert torch.equal(tensor, weights[name])
        mpu(*run, "--kappa", 0.02, cwd=tmp_path, fails="holds a different experiment")
        fixed = ("--epochs", 1, "--goal", "max_left=0.1")
        hint = mpu("run", demo.model, *records, *fixed, cwd=tmp_path, refused="--goal max_left: only for", status=2).err
        assert hint.endswith("leave out --epochs\n")

    def test_what_no_command_has_is_refused(self, mpu: Callable, tmp_path: Path, demo: DemoModel) -> None:
        """And not ignored."""
        run = ("run", demo.model, "--forget", demo.forget, "--retain", demo.retain, "--loss-reference", "round")
        mpu(*run, refused="--loss-reference: needs a fixed number of epochs", status=2, cwd=tmp_path)
        assert not list(tmp_path.iterdir())

    @pytest.mark.slow
    def test_what_is_played_is_in_no_record_of_the_servers(
        self, mpu: Callable, tmp_path: Path, demo: DemoModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody received the copies, so other noise may follow; and an algorithm that keeps no records has none."""
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        noise = ("--copies", 1, "--kappa", 0, "--permanent-noise")
        run = ("run", demo.model, "--forget", demo.forget, "--algo", "gradascent", "--rounds", 1, "--unlearn",
               "max_steps=1")  # fmt: skip
        for scale in (0.05, 0.2):
            played = mpu(*run, *noise, scale, "--out", f"run_{scale}", "--json", cwd=tmp_path, check=False)
            assert "keeping is undecided" in played.json["verdicts"][0]["verdict"]
        assert not default_register_path().exists()
        assert not default_updates_path().exists()
        mpu("publish", demo.model, *noise, 0.5, cwd=tmp_path)

    @pytest.mark.slow
    def test_another_round_forgets_what_one_did_not(self, mpu: Callable, tmp_path: Path, demo: DemoModel) -> None:
        """As long as it is not forgotten; each round leaves less, and no round follows one that forgot."""
        unseen = tmp_path / "unseen.jsonl"  # without, what is left may be what anybody guesses
        unseen.write_text("".join(json.dumps(row) + "\n" for person in make_people(12, 0)[10:] for row in person))
        records = ("--forget", demo.forget, "--retain", demo.retain, "--unseen", unseen)
        done = mpu("run", demo.model, *records, "--copies", 2, "--unlearn", "max_steps=1",
                   "--json", cwd=tmp_path, check=False)  # fmt: skip
        left = [verdict["left"]["estimate"] for verdict in done.json["verdicts"]]
        assert len(left) > 1
        assert left == sorted(left, reverse=True)
        assert all("not forgotten" in verdict["verdict"] for verdict in done.json["verdicts"][:-1])
