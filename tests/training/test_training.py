"""Killed and resumed, or split over two processes: the delta is the same. Logs and reports."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from safetensors.torch import load_file, save_file
from transformers.integrations import sdpa_attention

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.model import load as loading
from mpu_cli.model import network
from mpu_cli.model.source import open_model
from mpu_cli.observer import Observer
from mpu_cli.options.declare import from_flat
from mpu_cli.options.unlearning import Logging, Training, Unlearning
from mpu_cli.records.encode import IGNORED, Example
from mpu_cli.training import execution, loop
from mpu_cli.training.data import read_dataset
from mpu_cli.training.execution import check_sharding, last_checkpoint
from mpu_cli.training.loop import drop_repeated_steps
from mpu_cli.training.reference import ExampleSet, forward
from mpu_cli.training.unlearn import UnlearningTask
from tests.helpers.attacks import publish_copies, unlearn_copy
from tests.helpers.models import random_model, save, write_records
from tests.helpers.paths import ROOT
from tests.helpers.stopping import stop_when


@pytest.fixture
def folder(tmp_path):
    save(random_model("llama"), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 7, 1)
    write_records(tmp_path / "retain.jsonl", 9, 2)
    return tmp_path


def options_of(folder, **entries):
    return from_flat(Unlearning, {name: str(folder / f"{name}.jsonl") for name in ("forget", "retain")} | entries)


TRAINING = ["--algo", "npo", "--reading", "template=plain", "--lr", "1e-3", "--batch-size", "3", "--epochs", "4"]


BLOCKWISE = ["--optim", "adamw-blockwise"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "by"),
    [
        (["--optim", "adamw"], signal.SIGINT),
        pytest.param(["--optim", "adamw"], signal.SIGKILL, marks=pytest.mark.exhaustive),
        (["--algo", "pdu"], signal.SIGKILL),  # whose α is part of a checkpoint
        pytest.param([*BLOCKWISE, "--precision", "bfloat16"], signal.SIGKILL, marks=pytest.mark.exhaustive),
        pytest.param(["--lora", "rank=2"], signal.SIGTERM, marks=pytest.mark.exhaustive),
    ],
)
def test_a_stopped_run_resumes_to_the_same_delta(mpu, folder, more, by):
    """Killed or interrupted after some steps, then the same command again: what is interrupted writes a checkpoint."""
    options = [*TRAINING, *more, "--epochs", "40", "--log", "log.jsonl"]  # 120 steps
    mpu("unlearn", "base", *options, "--out", "whole.safetensors", cwd=folder)
    (folder / "log.jsonl").unlink()
    is_killed = by == signal.SIGKILL
    arguments = ["unlearn", "base", *options, "--resume", "--training", f"checkpoint_steps={10 if is_killed else 1000}"]
    log = folder / "log.jsonl"
    stop_when(arguments, lambda: log.exists() and log.read_text().count("\n") >= 25, cwd=folder, by=by)
    assert (folder / "deltas/base.safetensors.resume").is_dir()
    killed_at = log.read_text().count("\n")
    assert 25 <= killed_at < 115
    resumed = mpu(*arguments, cwd=folder)
    assert resumed.out == "deltas/base.safetensors\n"
    after = r"\d+0" if is_killed else str(killed_at)
    assert re.search(f"resuming after step {after} of 120", resumed.err)
    assert ", 120 steps" in resumed.err  # those before it was killed count
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps[-1] == 120
    assert 10 < steps[killed_at] <= killed_at + 1  # it did not start over
    uninterrupted, resumed = load_file(folder / "whole.safetensors"), load_file(folder / "deltas/base.safetensors")
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)
    assert not (folder / "deltas/base.safetensors.resume").exists()
    numbers = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert numbers == [*range(1, 121)]  # none twice


def test_the_multiplier_of_pdu_is_that_of_its_constraint(mpu, folder):
    """Read from the log: α starts at 1 and, after each step, rises by η for each nat above ε, and never below 0."""
    constants = [
        "--constants",
        "retain_limit=5.5,dual_rate=0.8",
    ]  # the limit is near the loss: α goes down and up again
    mpu("unlearn", "base", *TRAINING, "--algo", "pdu", *constants, "--epochs", "6", "--log", "log.jsonl", cwd=folder)
    alpha, alphas = 1.0, [1.0]
    for line in (folder / "log.jsonl").read_text().splitlines():
        step = json.loads(line)
        assert step["loss"] == pytest.approx(step["forget_term"] + alpha * step["retain_term"], rel=1e-5)
        alpha = max(0.0, alpha + 0.8 * (step["retain_term"] - 5.5))
        alphas.append(alpha)
    assert any(before == 0 < after for before, after in pairwise(alphas))


@pytest.mark.slow
def test_checkpoints_by_time_and_none_after_the_last_step(folder, monkeypatch):
    """One after the first step, however little time they may take; with any amount of it, one after each but the
    last."""
    options = options_of(folder, algo="graddiff", epochs=2, template="plain", batch_size=3, lr=1e-3)
    saved: list[int] = []

    class Watched(execution.CheckpointCallback):
        def on_save(self, arguments, state, *args, **more):
            saved.append(state.global_step)
            super().on_save(arguments, state, *args, **more)

    monkeypatch.setattr(loop, "CheckpointCallback", Watched)
    monkeypatch.setattr(execution, "CHECKPOINT_SHARE", 1e-9)
    copy, data, logging = open_model(str(folder / "base")), read_dataset(options), Logging(resume=True)
    UnlearningTask(copy, data, options, target=folder / "delta_a", logging=logging).run()
    assert saved == [1]
    monkeypatch.setattr(execution, "CHECKPOINT_SHARE", math.inf)
    steps = UnlearningTask(copy, data, options, target=folder / "delta_b", logging=logging).run().steps
    assert saved[1:] == list(range(1, len(steps)))
    assert len(saved) > 2


def test_checkpoints_of_something_else_are_refused(mpu, folder):
    resume = folder / "deltas/base.safetensors.resume"
    resume.mkdir(parents=True)
    (resume / "mpu-resume.json").write_text('{"sha256": "other"}')
    mpu("unlearn", "base", *TRAINING, "--resume", fails="different copy, records or options", status=1, cwd=folder)


@pytest.mark.slow
def test_checkpoints_of_another_model_are_refused(mpu, folder):
    """With the same names, shapes and size: only the weights differ."""
    arguments = ["unlearn", "base", *TRAINING, "--epochs", "400", "--resume", "--training", "checkpoint_steps=5"]
    stop_when(arguments, lambda: list(folder.glob("deltas/*.resume/checkpoint-*")), cwd=folder)
    save(random_model("llama", seed=7), folder / "base")
    mpu(*arguments, fails="different copy, records or options", status=1, cwd=folder)


def launch(folder: Path, processes: int, *arguments: str) -> subprocess.CompletedProcess:
    # README's command; accelerate's launcher would quietly start one process on a CPU
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
        "-m", "--", "mpu_cli", "unlearn", "base", *TRAINING, "--trust-copy", *arguments,
    ]  # fmt: skip
    command += ["--device", "cpu"] if torch.cuda.is_available() else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


RMU = ["--algo", "rmu", "--constants", "layer=0"]  # its losses use no weights beyond that layer


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], *(pytest.param(m, marks=pytest.mark.exhaustive) for m in (["--lora", "rank=2"], RMU))]
)
def test_two_processes_give_the_delta_of_one(mpu, folder, more):
    """gloo on CPU; batches of 3 over two processes, so that one has less to do than the other."""
    options = [*more, "--precision", "float64", "--optim", "sgd"]
    mpu("unlearn", "base", *TRAINING, *options, "--out", "one.safetensors", cwd=folder)
    done = launch(folder, 2, *options, "--out", "two.safetensors")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "two.safetensors\n"  # only one of the two prints
    assert sum("loss per answer token" in line for line in done.stderr.splitlines()) == 1
    single_delta, parallel_delta = load_file(folder / "one.safetensors"), load_file(folder / "two.safetensors")
    assert single_delta.keys() == parallel_delta.keys()
    for name, tensor in single_delta.items():
        torch.testing.assert_close(
            parallel_delta[name], tensor, rtol=1e-5, atol=1e-6 * float(tensor.abs().max()) + 1e-12
        )


# accelerate shards weights only on accelerators, so it is made to treat gloo on CPUs as NCCL on GPUs.
SHARDED = """
import os
import shlex
import sys
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from mpu_cli.entry import main
from mpu_cli.training import delta, execution, loop, lora

begin = PartialState.__init__

def claim(self, *arguments, **options):
    begin(self, *arguments, **options)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

def gather(model, *chosen, whole=execution.whole_parameters):
    shards = [isinstance(p, DTensor) for p in model.parameters()]
    assert all(shards)
    return whole(model, *chosen)

def whole(model, whole=execution.whole_head):
    head = whole(model)
    assert head is not None  # or logits of a batch would exist together
    return head

PartialState.__init__ = claim
loop.whole_head = whole
delta.whole_parameters = lora.whole_parameters = gather
sys.argv[1:] = shlex.split(os.environ["ARGUMENTS"])  # torchrun mistakes some of mpu's options for its own
main()
"""
FSDP = {
    "ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"
}  # fmt: skip


def launch_sharded(folder: Path, accelerate: dict[str, str], *options: str) -> tuple[int, str]:
    """Exit status and standard error of ``unlearn base`` in two processes, sharded by ``accelerate``."""
    (folder / "sharded.py").write_text(SHARDED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "sharded.py"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **accelerate}
    environment["ARGUMENTS"] = shlex.join(["unlearn", "base", *TRAINING, "--trust-copy", "--device", "cpu", *options])
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--optim", "adamw-blockwise"],
        pytest.param(["--lora", "rank=2", "--optim", "sgd"], marks=pytest.mark.exhaustive),
    ],
)
def test_fsdp_gives_the_delta_of_one_process(mpu, folder, more):
    options = [*more, "--precision", "float64"]
    mpu("unlearn", "base", *TRAINING, *options, "--out", "one.safetensors", cwd=folder)
    status, stderr = launch_sharded(folder, {**FSDP, "FSDP_VERSION": "2"}, *options, "--out", "two.safetensors")
    assert status == 0, stderr[-3000:]
    single_delta, sharded_delta = load_file(folder / "one.safetensors"), load_file(folder / "two.safetensors")
    assert single_delta.keys() == sharded_delta.keys()
    for name, tensor in single_delta.items():
        torch.testing.assert_close(
            sharded_delta[name], tensor, rtol=1e-5, atol=1e-6 * float(tensor.abs().max()) + 1e-12
        )


def test_finetune_is_for_one_process(mpu, folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    mpu("finetune", "base", "--data", "forget.jsonl", fails="works in one process", status=2, cwd=folder)


@pytest.mark.slow
def test_processes_wait_for_as_long_as_the_first_computes():
    """Ten minutes would be NCCL's own patience, and thirty gloo's."""
    script = """
import torch
from mpu_cli.model.device import processes_of
state = processes_of(torch.device("cpu"))
group = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
print(state.num_processes, group.options._timeout.total_seconds())
"""
    distributed_env = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **distributed_env, "ACCELERATE_USE_CPU": "true"}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["1", "86400.0"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "optimizer", "complaint"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)}, "adamw", "fsdp_version"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}, "adamw-blockwise", None),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}, "muon", "each matrix whole"),
    ],
)
def test_what_training_would_get_wrong_is_refused(plugin, optimizer, complaint):
    accelerator = SimpleNamespace(state=SimpleNamespace(**plugin))
    with pytest.raises(UsageError, match=complaint) if complaint else nullcontext():
        check_sharding(accelerator, optimizer)


def test_the_log_has_a_line_a_step(mpu, folder):
    document = mpu("unlearn", "base", *TRAINING, "--log", "log.jsonl", "--json", cwd=folder).json
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    for line, step in zip(lines, document["steps"], strict=True):
        assert {k: line[k] for k in step} == step


def test_steps_after_the_checkpoint_leave_the_log(tmp_path):
    """Also where the training was killed while it wrote a line: those steps will be written again."""
    log, lines = tmp_path / "log.jsonl", [json.dumps({"training": "a", "step": step}) + "\n" for step in range(1, 6)]
    for killed_at in (lines, [*lines[:4], lines[4][:9]]):
        log.write_text("".join(killed_at))
        drop_repeated_steps(log, "a", 3)
        assert log.read_text() == "".join(lines[:3])


def test_report_to_tensorboard(mpu, folder):
    pytest.importorskip("tensorboard")
    mpu("unlearn", "base", *TRAINING, "--training", "report_to=tensorboard", cwd=folder)
    assert list((folder / "runs").rglob("events.out.tfevents.*"))


@pytest.mark.slow
def test_gradient_checkpointing_changes_nothing(mpu, folder):
    for name, more in (("a", []), ("b", ["--training", "gradient_checkpointing"])):
        mpu("unlearn", "base", *TRAINING, "--precision", "float64", *more, "--out", f"{name}.safetensors", cwd=folder)
    a, b = load_file(folder / "a.safetensors"), load_file(folder / "b.safetensors")
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "more",
    [[], *(pytest.param(m, marks=pytest.mark.exhaustive) for m in (["--lora", "rank=2"], ["--precision", "mixed"]))],
)
def test_compiled_layers_give_the_same_delta(mpu, folder, more):
    """To rounding, over batches of several lengths; with SGD, whose steps are as exact as the gradients."""
    for name, compiled in (("a", []), ("b", ["--training", "compile"])):
        torch._dynamo.reset()
        mpu("unlearn", "base", *TRAINING, "--optim", "sgd", "--lr", 1e-2, *more, *compiled, "--out",
            f"{name}.safetensors", cwd=folder)  # fmt: skip
    a, b = load_file(folder / "a.safetensors"), load_file(folder / "b.safetensors")
    assert a.keys() == b.keys()
    tolerance = 2e-2 if "mixed" in more else 1e-4
    for name, tensor in a.items():
        assert (b[name] - tensor).norm() <= tolerance * tensor.norm() + 1e-9, name
    assert any(not torch.equal(b[name], tensor) for name, tensor in a.items())


@pytest.mark.slow
def test_layers_that_cannot_be_compiled_are_one_error(mpu, folder, shell, monkeypatch):
    """A compiler that fails, and none."""
    compiler = folder / "g++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    command = shlex.join(["mpu", "unlearn", "base", *TRAINING, "--training", "compile", "--quiet"])
    refused = shell(f"TORCHINDUCTOR_CACHE_DIR=cache CXX={compiler} {command}")
    assert (refused.returncode, "mpu: error: --training compile: " in refused.stderr) == (1, True), refused.stderr
    assert not (folder / "deltas/base.safetensors").exists()
    monkeypatch.setattr(execution, "COMPILER", "no-such-compiler")
    mpu("unlearn", "base", *TRAINING, "--training", "compile", refused="needs a C++ compiler", cwd=folder)


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({"algo": "npo"}, 1),
        ({"algo": "dpo"}, 1),  # the records, their alternatives and those to keep
        ({"algo": "rmu", "layer": 0}, 1),
        ({"algo": "rmu", "layer": 0, "retain_loss": "nll"}, 2),  # one ends at the layer, the other does not
        ({"algo": "hinge", "micro_batch_size": 4}, 3),  # 4 records to forget, 8 to keep
        ({"algo": "hinge", "micro_batch_size": None}, 3),  # as many at once as a batch has, on a processor
    ],
)
def test_a_step_reads_both_sets_in_one_pass(folder, monkeypatch, options, passes):
    """As far as both terms read the same outputs and --training micro_batch_size lets them."""
    sizes = []

    def record_passes(model, batch, **named):
        sizes.append(len(batch["input_ids"]))
        return forward(model, batch, **named)

    monkeypatch.setattr(loop, "forward", record_passes)
    monkeypatch.setattr(loop, "_freeze_unused", lambda *_: None)  # it passes once, before the training
    common = {"epochs": 1, "template": "plain", "batch_size": 4, "micro_batch_size": 100}
    chosen = options_of(folder, **common | options)
    model = open_model(str(folder / "base"))
    trained = UnlearningTask(model, read_dataset(chosen), chosen, target=folder / "delta").run()
    assert len(sizes) == passes * len(trained.steps)


@pytest.mark.slow
def test_warm_up_lowers_the_first_steps(mpu, folder):
    options = [
        *TRAINING[:-2],
        "--epochs",
        "1",
        "--optim",
        "sgd",
        "--training",
        "weight_decay=0",
        "--precision",
        "float64",
    ]
    outcomes = [
        mpu(
            "unlearn",
            "base",
            *options,
            "--training",
            f"warmup_steps={steps}",
            "--out",
            f"w{steps}",
            "--json",
            cwd=folder,
        )
        for steps in (0, 100)
    ]
    assert outcomes[1].json["norm"] < 0.05 * outcomes[0].json["norm"]
    dry = mpu("unlearn", "base", *options, "--training", "warmup_steps=100", "--out", "w", "--dry-run", cwd=folder)
    learned = ("finetune", "base", "--data", "forget.jsonl", "--epochs", 1, "--training", "warmup_steps=100")
    finetuned = [mpu(*learned, *more, cwd=folder) for more in (["--dry-run"], [])]
    for outcome in (outcomes[1], dry, *finetuned):
        assert outcome.err.count("its rate never gets to --lr") == 1
    assert "--training warmup_steps" not in outcomes[0].err


def test_a_linear_schedule_is_steps_of_falling_rates(mpu, folder):
    """Two steps of SGD on all records are one at the rate and, from there, one at half of it."""
    options = [
        "--algo", "gradascent", "--forget", "forget.jsonl", "--optim", "sgd", "--training", "weight_decay=0",
        "--precision", "float64", "--reading", "template=plain", "--batch-size", 100,
    ]  # fmt: skip

    def change(model, out, *more):
        mpu("unlearn", model, *options, *more, "--out", out, cwd=folder)
        return load_file(folder / out)

    both = change("base", "both.safetensors", "--epochs", 2, "--lr", 1e-2, "--training", "lr_scheduler=linear")
    first = change("base", "first.safetensors", "--epochs", 1, "--lr", 1e-2)
    shutil.copytree(folder / "base", folder / "stepped")
    weights = load_file(folder / "base/model.safetensors")
    stepped = {name: weights[name].double() + first.get(name, 0) for name in weights}
    save_file(stepped, folder / "stepped/model.safetensors", {"format": "pt"})
    second = change("stepped", "second.safetensors", "--epochs", 1, "--lr", 5e-3)
    for name in both:
        torch.testing.assert_close(both[name], first[name] + second[name], rtol=1e-7, atol=1e-12)


def test_micro_batches_pad_little() -> None:
    """Each example of a step is in one of its micro-batches, and examples of one length go together."""
    lengths = [9, 2, 8, 3, 7, 2]
    examples = [Example(list(range(n)), list(range(n))) for n in lengths]
    sets = {"forget": ExampleSet(examples)}
    batches = loop.MicroBatches([{"forget": [0, 1, 2, 3, 4, 5]}], sets, [["forget"]], 3)
    shapes = [tuple(batches[i]["batch"]["input_ids"].shape) for i in range(len(batches))]
    assert shapes == [(2, 2), (2, 7), (2, 9)]  # 36 positions; in the given order, 46
    labels = [batches[i]["batch"]["labels"] for i in range(3)]
    assert sorted(int((row != IGNORED).sum()) for rows in labels for row in rows) == sorted(lengths)


@pytest.mark.slow
@pytest.mark.parametrize("resume", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_an_interrupt_says_what_is_kept(folder, resume):
    """And how to go on."""
    kept_in, log = folder / "deltas/base.safetensors.resume", folder / "log.jsonl"
    options = [*TRAINING, "--epochs", "20000", *(["--resume", "--training", "checkpoint_steps=5"] if resume else [])]
    done = stop_when(
        ["unlearn", "base", *options, "--log", "log.jsonl"],
        lambda: last_checkpoint(kept_in) if resume else log.exists() and log.stat().st_size > 500,
        cwd=folder, by=signal.SIGINT,
    )  # fmt: skip
    assert done.returncode == 130
    message = f"checkpoints are kept in {kept_in.relative_to(folder)}"
    assert (message if resume else "nothing of this training is kept") in done.stderr
    assert "the same command goes on" in done.stderr


class TestOutOfMemory:
    """A simulated accelerator's memory suffices for two records: what is trained does not depend on it."""

    @pytest.mark.parametrize(
        ("where", "more"),
        [
            ("forward", {"algo": "npo"}),
            ("backward", {"algo": "dpo", "micro_batch_size": 3}),
        ],
    )
    def test_changes_nothing_but_a_line(self, folder, monkeypatch, where, more):
        wide, messages = delta_of_training(folder, "wide", more), []
        narrow = delta_of_training(folder, "narrow", more, lambda: limit_memory(monkeypatch, 2, where), messages)
        numbers = [int(re.match(r"out of memory: from here on, (\d) records? at once", line)[1]) for line in messages]
        assert numbers == ([1] if "micro_batch_size" in more else [3, 1])  # halved until it suffices, and told once
        for name, change in wide.items():
            torch.testing.assert_close(narrow[name], change, rtol=1e-6, atol=1e-12)

    def test_one_record_that_does_not_fit_is_an_error(self, folder, monkeypatch):
        with pytest.raises(MpuError, match="out of memory") as refused:
            delta_of_training(folder, "none", {"algo": "npo"}, lambda: limit_memory(monkeypatch, 0, "forward"))
        assert "gradient_checkpointing" in refused.value.hint
        assert not (folder / "none.safetensors").exists()


def delta_of_training(folder, name, more, before=lambda: None, messages=None):
    """The delta of a training in float64; ``before`` is called when the first pass of it begins."""

    class Listening(Observer):
        def stage(self, label, *_):
            if label.startswith("unlearn"):
                before()

        def warn(self, text):
            if messages is not None:
                messages.append(text)

    common = {"epochs": 2, "template": "plain", "batch_size": 6, "precision": "float64", "optim": "sgd", "lr": 1e-2}
    options = options_of(folder, **common | more)
    copy, target = open_model(str(folder / "base")), folder / f"{name}.safetensors"
    UnlearningTask(copy, read_dataset(options), options, target=target, observer=Listening()).run()
    return load_file(target)


def limit_memory(monkeypatch, most, where):
    """Training passes of more than ``most`` records fail, on the way there or back."""
    real = loop.forward

    def fail(_=None):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def forward_or_fail(model, batch, **options):
        if len(batch["input_ids"]) <= most:
            return real(model, batch, **options)
        if where == "forward":
            fail()
        hidden = model.model.layers[0].register_forward_hook(lambda _, __, out: out.register_hook(fail) and None)
        try:
            return real(model, batch, **options)
        finally:
            hidden.remove()

    monkeypatch.setattr(loop, "forward", forward_or_fail)


def test_nothing_of_a_training_lives_on(folder, monkeypatch):
    """Without the collector: neither the model nor the optimiser, whose room the next model needs."""
    weakrefs = []
    real = loop.UnlearningTrainer.create_optimizer

    def record_references(self, *arguments):
        optimizer = real(self, *arguments)
        weakrefs.extend([weakref.ref(self.model), weakref.ref(optimizer)])
        return optimizer

    monkeypatch.setattr(loop.UnlearningTrainer, "create_optimizer", record_references)
    monkeypatch.setattr(loading, "WORTH_COLLECTING", 1)
    gc.disable()
    try:
        delta_of_training(folder, "delta", {"algo": "graddiff", "precision": "mixed"})
    finally:
        gc.enable()
    assert len(weakrefs) == 2
    assert [each() for each in weakrefs] == [None, None]


@pytest.mark.slow
def test_mixed_precision_rounds_layers_and_not_the_weights(folder):
    """Near to float32 and nearer than bfloat16, whose weights round small steps away; the weights are in float32."""
    full_precision, mixed, half = (
        delta_of_training(folder, precision, {"algo": "graddiff", "precision": precision, "optim": "adamw", "lr": 1e-5})
        for precision in ("float32", "mixed", "bfloat16")
    )
    assert all(change.dtype == torch.float32 for change in mixed.values())

    def off(delta):
        return (
            sum(float((delta[name].double() - change).square().sum()) for name, change in full_precision.items()) ** 0.5
        )

    def changed_weights(delta):
        return sum(int(change.count_nonzero()) for change in delta.values())

    assert 0 < off(mixed) < 0.5 * off(half)
    assert changed_weights(mixed) > 0.99 * changed_weights(full_precision)
    assert changed_weights(half) < 0.9 * changed_weights(full_precision)


def test_keys_are_repeated_where_no_kernel_takes_groups():
    """In float32 outside of a CPU; in half precision, and on a CPU, transformers decides."""
    network.repeat_keys_where_faster()
    network.repeat_keys_where_faster()  # once only
    grouped = sdpa_attention.use_gqa_in_sdpa
    assert grouped.__wrapped__.__module__ == "transformers.integrations.sdpa_attention"
    for device, dtype, expected in (
        ("meta", torch.float32, False),
        ("meta", torch.bfloat16, True),
        ("cpu", torch.float32, True),
    ):
        key = torch.empty(1, 2, 8, 4, device=device, dtype=dtype)
        assert grouped(None, key, key) == expected
        assert not grouped(torch.ones(1), key, key)


def test_the_trainer_computes_where_the_model_is(monkeypatch, tmp_path):
    """On the second of two GPUs, which transformers' own arguments would not name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    second = torch.device("cuda:1")
    arguments = loop._arguments(tmp_path, Training(lr=1e-3), Logging(), second, sharded=False)
    assert (arguments.device, arguments.n_gpu) == (second, 1)


@pytest.mark.slow
def test_a_checkpoint_without_room_ends_nothing(mpu, folder):
    """A limit on the size of files is to a program what a full disk is."""
    options = [*TRAINING, "--epochs", "2"]
    mpu("unlearn", "base", *options, "--out", "whole.safetensors", cwd=folder)
    size = (folder / "base/model.safetensors").stat().st_size
    command = [sys.executable, "-m", "mpu_cli", "unlearn", "base", *options, "--resume"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size * 3 // 2, size * 3 // 2))  # the weights, not Adam's state

    done = subprocess.run(command, cwd=folder, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "base.safetensors.resume/checkpoint-1: no room for a checkpoint" in done.stderr
    assert done.stderr.count("no room") == 1
    whole, delta = load_file(folder / "whole.safetensors"), load_file(folder / "deltas/base.safetensors")
    assert all(torch.equal(whole[name], delta[name]) for name in whole)
    assert not list(folder.glob("deltas/*.resume"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_log_without_room_ends_nothing(mpu, folder):
    outcome = mpu("unlearn", "base", *TRAINING, "--log", "/dev/full", "--out", "d.safetensors", cwd=folder)
    assert outcome.err.count("/dev/full: No space left on device; the training goes on without its log") == 1
    assert (folder / "d.safetensors").exists()


@pytest.mark.slow
def test_a_dry_run_counts_checkpoints(mpu, folder):
    plain, resumed = (
        mpu("unlearn", "base", *TRAINING, *more, "--dry-run", "--json", cwd=folder).json for more in ((), ("--resume",))
    )
    weights = (folder / "base/model.safetensors").stat().st_size
    assert resumed["disk"]["needed"] - plain["disk"]["needed"] > 5 * weights  # two, of weights and Adam's two states


class TestAPlantedCheckpoint:
    def test_one_that_mpu_did_not_write(self, mpu: Callable, root: Path) -> None:
        """Planted beside the delta, with a seal made with another secret: nothing is trained on it."""
        honest, _ = publish_copies(mpu, root)
        planted = root / "d.safetensors.resume/checkpoint-1"
        planted.mkdir(parents=True)
        for name in ("model.safetensors", "config.json"):
            (planted / name).write_bytes((honest / name).read_bytes())
        (planted / "trainer_state.json").write_text("{}")
        (planted / "mpu-seal.json").write_text(json.dumps({"hmac-sha256": "0" * 64}))
        unlearn_copy(mpu, root, honest, "d", "--resume", fails="not a checkpoint that this mpu wrote", status=1)
        (planted / "mpu-seal.json").unlink()
        unlearn_copy(mpu, root, honest, "d", "--resume")  # it counts as one that was never finished
