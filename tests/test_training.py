"""Killed and resumed, one process and two: the same delta. Logs and reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from safetensors.torch import load_file

from mpu_cli.client.training import check_sharding
from mpu_cli.errors import UsageError
from tests.models import random_model, save, write_records


@pytest.fixture
def folder(tmp_path):
    save(random_model("llama"), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 7, 1)
    write_records(tmp_path / "retain.jsonl", 9, 2)
    return tmp_path


TRAINING = ["--algo", "npo", "--template", "plain", "--lr", "1e-3", "--batch-size", "3", "--epochs", "4"]


@pytest.mark.parametrize("more", [["--optim", "adamw"], ["--optim", "adamw-blockwise"], ["--lora-rank", "2"]])
def test_a_killed_run_resumes_to_the_same_delta(mpu, folder, more):
    """SIGKILL after some steps, then the same command again."""
    options = [*TRAINING, *more, "--epochs", "40", "--log", "log.jsonl"]  # 120 steps
    mpu("unlearn", "base", *options, "--out", "whole", cwd=folder)
    (folder / "log.jsonl").unlink()
    command = [sys.executable, "-m", "mpu_cli", "unlearn", "base", *options, "--resume", "--checkpoint-steps", "10"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = folder / "log.jsonl"
    deadline = time.monotonic() + 90
    while (not log.exists() or log.read_text().count("\n") < 25) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (folder / "deltas/base.safetensors.resume").is_dir()
    killed_at = log.read_text().count("\n")
    assert 25 <= killed_at < 115
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "deltas/base.safetensors\n"
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps[-1] == 120
    assert 10 < steps[killed_at] <= killed_at + 1  # it did not begin anew
    whole, resumed = load_file(folder / "whole"), load_file(folder / "deltas/base.safetensors")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not (folder / "deltas/base.safetensors.resume").exists()


def test_checkpoints_of_something_else_are_refused(mpu, folder):
    resume = folder / "deltas/base.safetensors.resume"
    resume.mkdir(parents=True)
    (resume / "mpu-resume.json").write_text('{"sha256": "other"}')
    outcome = mpu("unlearn", "base", *TRAINING, "--resume", check=False, cwd=folder)
    assert outcome.status == 1
    assert "another copy, records or options" in outcome.err


def launch(folder: Path, processes: int, *arguments: str) -> subprocess.CompletedProcess:
    # accelerate's launcher would quietly start one process on a CPU; torch's starts what it is told
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
        "-m", "mpu_cli", "unlearn", "base", *TRAINING, "--device", "cpu", *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("more", [[], ["--lora-rank", "2"]], ids=["full", "lora"])
def test_two_processes_give_the_delta_of_one(mpu, folder, more):
    """gloo on CPU; steps of 3 over two processes, so that one has less to do than the other."""
    options = [*more, "--precision", "float64", "--optim", "sgd"]
    mpu("unlearn", "base", *TRAINING, *options, "--out", "one", cwd=folder)
    done = launch(folder, 2, *options, "--out", "two")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "two\n"  # one of the two speaks
    one, two = load_file(folder / "one"), load_file(folder / "two")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-6 * float(tensor.abs().max()) + 1e-12)


SHARDED = """
import sys
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from mpu_cli.client.training import whole_parameters
from tests.models import random_model

init_process_group("gloo")
torch.manual_seed(0)
ids = torch.randint(3, 90, (2, 9))
models = [random_model("llama"), random_model("llama")]
for module in (*models[1].model.layers, models[1]):
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
for model in models:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
whole, gathered = (dict(whole_parameters(model)) for model in models)
assert list(whole) == list(gathered)
assert not any(torch.equal(w, o) for w, o in zip(whole.values(), random_model("llama").parameters()))
for name, weights in whole.items():
    torch.testing.assert_close(gathered[name], weights)
destroy_process_group()
"""


def test_shards_are_gathered(tmp_path):
    """FSDP 2 over two processes (gloo): after a step, gathered weights are those of a process that holds them all."""
    (tmp_path / "sharded.py").write_text(SHARDED)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", tmp_path / "sharded.py"
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_shards_that_are_not_gathered_are_refused():
    """No such run is possible without a GPU: accelerate's own plugin, as it would be in the state of one."""
    for version in (1, 2):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
        if version == 2:
            check_sharding(accelerator)
        else:
            with pytest.raises(UsageError, match="fsdp_version"):
                check_sharding(accelerator)


def test_the_log_has_a_line_a_step(mpu, folder):
    told = mpu("unlearn", "base", *TRAINING, "--log", "log.jsonl", "--json", cwd=folder).json
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    for line, step in zip(lines, told["steps"], strict=True):
        assert {k: line[k] for k in step} == step


def test_report_to_tensorboard(mpu, folder):
    pytest.importorskip("tensorboard")
    mpu("unlearn", "base", *TRAINING, "--report-to", "tensorboard", cwd=folder)
    assert list((folder / "runs").rglob("events.out.tfevents.*"))


def test_gradient_checkpointing_changes_nothing(mpu, folder):
    for name, more in (("a", []), ("b", ["--gradient-checkpointing"])):
        mpu("unlearn", "base", *TRAINING, "--precision", "float64", *more, "--out", name, cwd=folder)
    a, b = load_file(folder / "a"), load_file(folder / "b")
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, rtol=1e-6, atol=1e-9)


def test_warm_up_lowers_the_first_steps(mpu, folder):
    options = [*TRAINING[:-2], "--epochs", "1", "--optim", "sgd", "--weight-decay", "0", "--precision", "float64"]
    norms = [
        mpu("unlearn", "base", *options, "--warmup-steps", steps, "--out", f"w{steps}", "--json", cwd=folder).json[
            "norm"
        ]
        for steps in (0, 100)
    ]
    assert norms[1] < 0.05 * norms[0]


@pytest.mark.parametrize("name", ["paged_adamw_32bit", "adamw_8bit"])
def test_an_optimizer_that_is_not_installed_is_named(mpu, folder, name):
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        outcome = mpu("unlearn", "base", *TRAINING, "--optim", name, check=False, cwd=folder)
        assert outcome.status == 1
        assert "pip install" in outcome.err
    else:
        mpu("unlearn", "base", *TRAINING, "--optim", name, cwd=folder)
