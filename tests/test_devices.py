"""Whatever computes on a device finds its tensors there: on a simulated accelerator, and on CUDA where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mpu_cli.model.device import ACCELERATE, processes_of, tell_accelerate
from tests.helpers.models import random_model, save, write_records
from tests.helpers.paths import ROOT
from tests.helpers.stopping import stop_when
from tests.helpers.trainings import for_run

COMMON = ["--epochs", "1", "--reading", "template=plain", "--batch-size", "2", "--optim", "sgd", "--lr", "1e-2"]
STEEP = ("adamw", "muon", "bfloat16")  # where a last bit can become the sign of a step
TRAININGS = {
    **{algo: ["--algo", algo] for algo in ("gradascent", "npo", "dpo", "undial")},
    "rmu": ["--algo", "rmu", "--constants", "layer=0"],
    "kl": ["--algo", "npo", "--constants", "retain_loss=kl"],
    "lora": ["--algo", "npo", "--lora", "rank=2"],
    "blockwise": ["--algo", "npo", "--optim", "adamw-blockwise"],
    "adamw": ["--algo", "npo", "--optim", "adamw", "--lr", "1e-3"],
}
MORE = {
    **{algo: ["--algo", algo] for algo in ("graddiff", "simnpo", "satimp", "wga")},
    "hidden": ["--algo", "npo", "--constants", "retain_loss=hidden,layer=0"],
    "muon": ["--algo", "npo", "--optim", "muon"],
    "checkpointing": ["--algo", "npo", "--training", "gradient_checkpointing"],
    "bfloat16": ["--algo", "npo", "--precision", "bfloat16"],
}
MEASURING = ["eval", "base", "--benchmark", "qa", "--forget", "forget.jsonl", "--retain", "retain.jsonl",
             "--reading", "template=plain"]  # fmt: skip


@pytest.fixture
def root(mpu: Callable, tmp_path: Path) -> Path:
    save(random_model("qwen2"), tmp_path / "base")  # with a tied head, biases, grouped heads
    for name, seed in (("forget", 1), ("retain", 2)):
        write_records(tmp_path / f"{name}.jsonl", 4, seed)
    mpu("publish", "base", "--copies", 2, "--seed", 1, cwd=tmp_path)
    return tmp_path


def commands(device: str, trainings: dict[str, list[str]]) -> list[list[str]]:
    run = [
        ["unlearn", "copy_1", *COMMON, *training, "--device", device, "--out", f"{name}_{device}"]
        for name, training in trainings.items()
    ]
    run += [["finetune", "base", "--data", "forget.jsonl", *COMMON, "--device", device, "--out", f"taught_{device}"]]
    return [*run, [*MEASURING, "--device", device, "--out", f"{device}.json"]]


def change(delta: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The change of each weight: of LoRA's factors, whose signs a device may choose, the product."""
    ends = {name.removesuffix(".lora_B") for name in delta if name.endswith(".lora_B")}
    return {name: delta[f"{name}.lora_B"] @ delta[f"{name}.lora_A"] for name in ends} or delta


def check(mpu: Callable, root: Path, device: str, trainings: dict[str, list[str]], tolerance: float) -> None:
    """The results of all commands on ``device``, which are there already, are those of a CPU."""
    for command in commands("cpu", trainings):
        mpu(*command, cwd=root)
    for name in trainings:
        expected, actual = (change(load_file(root / f"{name}_{where}.safetensors")) for where in ("cpu", device))
        norm = sum(float(x.double().square().sum()) for x in expected.values()) ** 0.5
        off = sum(float((actual[k].double() - x.double()).square().sum()) for k, x in expected.items()) ** 0.5
        assert norm > 0, name
        assert off < (0.1 if name in STEEP else tolerance) * norm, name
    taught = [load_file(root / f"taught_{where}/model.safetensors") for where in ("cpu", device)]
    assert all(torch.allclose(taught[0][name], taught[1][name], atol=1e-3) for name in taught[0])
    measured = [json.loads((root / f"{where}.json").read_text())["metrics"] for where in ("cpu", device)]
    for name, form in measured[0].items():
        assert measured[1][name]["agg_value"] == pytest.approx(form["agg_value"], rel=tolerance, abs=1e-4), name


def run_on_simulated_device(root: Path, command_lines: list[list[str]]) -> list[dict[str, Any]]:
    """Run commands of ``mpu`` on the simulated device, all of which must work and leave nothing on it."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.helpers.accelerator"], input=json.dumps(command_lines), text=True,
        capture_output=True, cwd=root, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    ran = json.loads(result.stdout)
    for each in ran:
        assert not each["failed"], (each["command"], each["failed"])
        assert each["left"] == 0, each["command"]
    return ran


@pytest.mark.slow
@pytest.mark.parametrize("trainings", [TRAININGS, pytest.param(MORE, marks=pytest.mark.exhaustive)])
def test_nothing_is_left_on_the_cpu(mpu: Callable, root: Path, trainings: dict[str, list[str]]) -> None:
    """Nor on the device, once a command is done."""
    run_on_simulated_device(root, commands("sim", trainings))
    check(mpu, root, "sim", trainings, 1e-3)


@pytest.mark.slow
def test_other_ways_to_train_leave_nothing_on_the_cpu(root: Path) -> None:
    """DP-SGD, a training that was stopped and goes on, a round in one command, and a grid of rounds. `watch` trains
    in processes of its own, which are `unlearn`."""
    stop_when(
        ["unlearn", "copy_1", *COMMON, "--epochs", 40, "--resume", "--training", "checkpoint_steps=1", "--out",
        "resumed",
         "--device", "cpu"],
        (root / "resumed.safetensors.resume/checkpoint-2").exists, cwd=root,
    )  # fmt: skip
    resumed = ["unlearn", "copy_1", *COMMON, "--epochs", "40", "--resume", "--training", "checkpoint_steps=99"]
    training = ["--algo", "npo", *COMMON, "--device", "sim"]
    (root / "grid.toml").write_text(
        """
base = "base"
forget = "forget.jsonl"
retain = "retain.jsonl"
mode = ["clean", "mpu"]
copies = 2
epochs = 1
lr = 1e-2
optim = "sgd"
template = "plain"
device = "sim"
[eval]
benchmark = "qa"
"""
    )
    run_on_simulated_device(
        root,
        [
            ["unlearn", "copy_1", *training, "--dp", "epsilon=8", "--out", "private"],
            [*resumed, "--out", "resumed", "--device", "sim"],
            ["run", "base", *for_run(COMMON), "--rounds", "2", "--copies", "2", "--out", "rounds", "--device", "sim"],
            ["sweep", "grid.toml", "--out", "grid"],
        ],
    )
    assert len(list((root / "grid").rglob("eval.json"))) >= 2


@pytest.mark.slow
def test_memory_and_waiting(mpu: Callable, root: Path) -> None:
    """A training takes no more than the dry run says, and steps wait for the device a bounded number of times, however
    deep the model is."""
    deep = random_model("qwen2", num_hidden_layers=6, hidden_size=96, intermediate_size=256, vocab_size=160)
    save(deep, root / "deep")
    command = ["unlearn", "deep", *COMMON, "--algo", "npo", "--lr", "1e-3"]
    variants = {
        "adamw": ["--optim", "adamw"],
        "blockwise": ["--optim", "adamw-blockwise"],
        "checkpointing": ["--optim", "adamw", "--training", "gradient_checkpointing"],
        "one record at a time": ["--training", "micro_batch_size=1"],
        "LoRA": ["--lora", "rank=2", "--optim", "adamw"],
    }
    command_lines = [[*command, *more, "--device", "sim", "--out", name] for name, more in variants.items()]
    lengths = [("base", 1), ("base", 9), ("deep", 1), ("deep", 9)]
    for model, epochs in lengths:
        options = ["--epochs", str(epochs), "--device", "sim", "--out", f"{model}-{epochs}"]
        command_lines.append(["unlearn", model, *command[2:], *options])
    ran = run_on_simulated_device(root, command_lines)
    for (name, more), each in zip(variants.items(), ran, strict=False):
        document = mpu(*command, *more, "--out", "unwritten", "--dry-run", "--json", cwd=root).json
        assert each["peak"] <= document["memory"], name
    waits = dict(zip(lengths, (each["waits"] for each in ran[-4:]), strict=True))
    of_a_step = {model: (waits[model, 9] - waits[model, 1]) / (8 * 2) for model in ("base", "deep")}
    assert of_a_step["base"] == of_a_step["deep"] <= 12


@pytest.mark.slow
def test_the_simulation_finds_what_is_left() -> None:
    """Or the test above shows nothing: operations that would fail on a GPU fail there."""
    script = """
import torch
from tests.helpers import accelerator
accelerator.register()
there, here = torch.ones(3, 4).to("sim"), torch.ones(3, 4)
mistakes = {
    "add": lambda: there + here, "matmul": lambda: there @ here.T, "where": lambda: torch.where(here > 0, there, there),
    "embedding": lambda: torch.nn.functional.embedding(torch.tensor([0]), there),
    "cat": lambda: torch.cat([there, here]),
    "gather": lambda: there.gather(1, torch.zeros(3, 1, dtype=torch.long)),
    "loss": lambda: torch.nn.functional.cross_entropy(there, torch.tensor([0, 1, 2])),
}
for name, mistake in mistakes.items():
    try:
        mistake()
    except RuntimeError:
        continue
    raise SystemExit(name)
weight = torch.nn.Parameter(there.clone())
(weight @ there.T).square().sum().backward()
assert weight.grad.device.type == "sim" and weight.grad.cpu().eq(24).all()
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_a_later_training_has_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate would go on using the device of the one before."""
    monkeypatch.setenv(ACCELERATE, "")
    tell_accelerate(torch.device("cuda:1"))
    assert os.environ[ACCELERATE] == "cuda:1"
    tell_accelerate(torch.device("cpu"))
    assert ACCELERATE not in os.environ


@pytest.mark.parametrize(
    ("name", "said"),
    [("warp", "no device of this name"), ("meta", "no device of this name"), ("cuda:99", "finds no such")],
)
def test_unknown_devices(mpu: Callable, tmp_path: Path, name: str, said: str) -> None:
    save(random_model("llama"), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 4, 1)
    for command in (["unlearn", "base", "--algo", "gradascent"], ["eval", "base", "--benchmark", "qa"]):
        mpu(*command, "--forget", "forget.jsonl", "--device", name, cwd=tmp_path, fails=said, status=2)


needs_flash = pytest.mark.skipif(not find_spec("flash_attn"), reason="no flash-attn")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.cuda
@needs_cuda
def test_cuda_computes_what_a_cpu_does(mpu: Callable, root: Path) -> None:
    for command in commands("cuda", {**TRAININGS, **MORE}):
        mpu(*command, cwd=root)
    check(mpu, root, "cuda", {**TRAININGS, **MORE}, 1e-2)


@pytest.mark.cuda
@needs_cuda
def test_cuda_is_deterministic(mpu: Callable, root: Path) -> None:
    """The same bits each time; and copies trained on CUDA aggregate to what is nearly the clean update."""
    for k in (1, 2):
        for out in ("a", "b"):
            mpu(
                "unlearn",
                f"copy_{k}",
                "--algo",
                "npo",
                *COMMON,
                "--device",
                "cuda",
                "--out",
                f"{out}/copy_{k}",
                cwd=root,
            )
    run_a, run_b = (load_file(root / out / "copy_1.safetensors") for out in "ab")
    assert all(torch.equal(run_a[name], run_b[name]) for name in run_a)
    document = mpu("aggregate", "a", "--json", cwd=root).json
    assert document["smallest_pairwise_cosine"] > 0.5


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["--training", "attention=flash_attention_2"], marks=needs_flash),
        ["--training", "deterministic=false"], ["--dp", "epsilon=8"],
        ["--resume", "--training", "checkpoint_steps=1"],
    ],
)  # fmt: skip
def test_what_only_cuda_has(mpu: Callable, root: Path, more: list[str]) -> None:
    precision = ["--precision", "bfloat16"] if "flash_attention_2" in more else []
    mpu("unlearn", "copy_1", "--algo", "npo", *COMMON, *precision, "--device", "cuda", *more, cwd=root)
    delta = load_file(root / "deltas/copy_1.safetensors")
    assert all(torch.isfinite(change).all() for change in delta.values())
    assert any(change.any() for change in delta.values())


class TestDoctor:
    @pytest.mark.slow
    def test_tries_the_whole_path(self, mpu: Callable, tmp_path: Path) -> None:
        document = mpu("doctor", "--json", cwd=tmp_path).json
        assert document["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
        assert all(check["ok"] for check in document["checks"]), document["checks"]
        assert [check["name"] for check in document["checks"]] == ["publish", "unlearn", "aggregate", "evaluate"]
        assert torch.__version__ in document["machine"]["versions"]
        assert not list(tmp_path.iterdir())

    @pytest.mark.slow
    def test_says_what_fails(self, mpu: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The step that fails is told with its reason, what needs its result is not tried, and the status says so."""
        from mpu_cli.commands.unlearn import Unlearn

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("no kernel image is available")

        monkeypatch.setattr(Unlearn, "run", broken)
        outcome = mpu("doctor", cwd=tmp_path, check=False)
        assert outcome.status == 1
        assert "works\tpublish on " in outcome.out
        assert "FAILS\tunlearn on " in outcome.out
        assert "RuntimeError: no kernel image is available" in outcome.out
        assert "aggregate on " not in outcome.out


def test_a_training_on_the_cpu_does_not_bind_the_next_one() -> None:
    """accelerate keeps the device that it was first asked for: --device cuda would quietly load on the CPU."""
    for kind, on_cpu in (("cpu", True), ("cuda", False), ("cpu", True)):
        assert processes_of(torch.device(kind))._cpu == on_cpu


def test_cublas_is_told_before_it_is_used() -> None:
    """It reads the variable once: later is too late for deterministic training."""
    command = "import mpu_cli, os, sys; print(os.environ['CUBLAS_WORKSPACE_CONFIG'], 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    result = subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == [":4096:8", "False"]
