"""The whole path on a small model, step by step, on one device: what works, and how far it is from what a CPU does."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch.utils.benchmark import Timer

from mpu_cli.commands.aggregate import Aggregate
from mpu_cli.commands.evaluate import Evaluate
from mpu_cli.commands.publish import Publish
from mpu_cli.commands.unlearn import Unlearn
from mpu_cli.demo.model import make_model, make_people, make_tokenizer
from mpu_cli.files.sealing import make_identity
from mpu_cli.model.device import device_of
from mpu_cli.observer import SILENT, Observer
from mpu_cli.records.read import read_records
from mpu_cli.training.optimizers import OPTIMIZERS, make_optimizer
from mpu_cli.version import __version__
from mpu_cli.wording import counted

PEOPLE = 6
TRAINING: dict[str, Any] = {"epochs": 2, "batch_size": 4, "lr": 1e-4, "optim": "adamw-blockwise"}
PAGED = 1 << 18  # elements of a tensor whose state bitsandbytes pages: it does from 100,000 on
CLOSE, ROUGH = 0.02, 0.5  # relative distance between devices, and of bfloat16 from float32


@dataclass(frozen=True)
class Check:
    """One step: what was tried, whether it worked, seconds, and what there is to say."""

    name: str
    ok: bool
    seconds: float
    said: str


def trials(device: str, folder: Path, observer: Observer = SILENT) -> Iterator[Check]:
    """Each step in turn, in ``folder``. A step that fails does not stop the others, unless they need its result."""
    torch_device = device_of(device)
    on_cuda = torch_device.type == "cuda"
    transformers.utils.logging.disable_progress_bar()
    observer.stage("make a small model", 1, "done")
    trial = _make_trial(folder, torch_device)
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(torch_device)
    for name, step in trial.steps():
        observer.stage(name, 1, "done")
        started = time.monotonic()
        try:
            said, ok = step(), True
        except Exception as error:  # whatever it is, the user is to hear of it
            said, ok = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}", False
        yield Check(name, ok, time.monotonic() - started, said)
    if on_cuda:
        peak = torch.cuda.max_memory_allocated(torch_device)
        yield Check("peak memory on the device", True, 0.0, f"{peak / 1e6:.0f} MB")


def _make_trial(folder: Path, device: torch.device) -> _Trial:
    """A small model and its records in ``folder``."""
    people = [row for person in make_people(PEOPLE, 0) for row in person]
    (folder / "forget.jsonl").write_text("".join(json.dumps(row) + "\n" for row in people[: len(people) // 2]))
    (folder / "retain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in people[len(people) // 2 :]))
    records = [record for name in ("forget", "retain") for record in read_records(folder / f"{name}.jsonl")]
    make_model(
        records, make_tokenizer(records), folder / "model", epochs=3, seed=0, on_step=lambda *_: None,
        intermediate_size=384,  # bitsandbytes warns of widths that are no multiple of its blocks of 64
    )  # fmt: skip
    make_identity(folder / "identity.txt")
    return _Trial(folder, device)


@dataclass(frozen=True)
class _Trial:
    """The steps on one device; each returns what there is to say, and raises what went wrong."""

    folder: Path
    device: torch.device

    @property
    def _records(self) -> dict[str, str]:
        return {name: str(self.folder / f"{name}.jsonl") for name in ("forget", "retain")}

    def steps(self) -> list[tuple[str, Callable[[], str]]]:
        train, compare = self._train, self._compare
        steps: list[tuple[str, Callable[[], str]]] = [
            ("publish", self._publish),
            ("unlearn on two copies, aggregate", self._aggregate),
            ("deterministic", self._repeat),
            ("LoRA", lambda: train("lora", lora_rank=4)),
            ("bfloat16", lambda: train("bfloat16", precision="bfloat16") + ", " + compare("bfloat16", ROUGH)),
            ("mixed precision", lambda: train("mixed", precision="mixed") + ", " + compare("mixed", ROUGH)),
            ("gradient checkpointing", lambda: train("checkpointing", gradient_checkpointing=True)),
            ("resume", lambda: train("resumed", resume=True, checkpoint_steps=1)),
            ("eval", self._evaluate),
        ]
        on_cuda, with_bitsandbytes = self.device.type == "cuda", find_spec("bitsandbytes") is not None
        if self.device.type != "cpu":
            steps.insert(2, ("the same on a CPU", lambda: train("cpu", device="cpu") + ", " + compare("cpu", CLOSE)))
        if find_spec("opacus"):
            steps.append(("DP-SGD", lambda: train("private", dp_epsilon=8.0)))
        if with_bitsandbytes:
            steps.append(("LoRA in 4 bits", lambda: train("nf4", lora_rank=4, quantize="nf4")))
        if on_cuda and find_spec("flash_attn"):
            steps.append(("flash attention", lambda: train("f", precision="bfloat16", attention="flash_attention_2")))
        if on_cuda and with_bitsandbytes:
            paged = "paged_adamw_32bit"
            steps.append(("paged AdamW", lambda: train("paged", optim=paged) + ", " + paged_state(self.device)))
        return steps

    def _publish(self) -> str:
        keys, identity = self.folder / "keys.bin", self.folder / "identity.txt"
        published = Publish.call(self.folder / "model", out=self.folder, keys=keys, seed=1, copies=2, identity=identity)
        return counted(len(published.copies), "copy", "copies")

    def _train(self, out: str, copy: int = 1, **options: Any) -> str:
        every_option = {"algo": "npo", **self._records, **TRAINING, "device": str(self.device), **options}
        [done] = Unlearn.call(self.folder / f"copy_{copy}", out=self.folder / f"{out}.safetensors", **every_option)
        return f"‖Δ‖ {done.result.norm:.3g}"

    def _compare(self, out: str, most: float) -> str:
        """How far the first copy's delta is from another of the same copy."""
        delta, reference = (load_file(self.folder / f"{name}.safetensors") for name in (out, "deltas/copy_1"))
        norm = sum(float(x.double().square().sum()) for x in reference.values()) ** 0.5
        squares = sum(float((delta[name].double() - x.double()).square().sum()) for name, x in reference.items())
        distance = squares**0.5 / norm
        if not distance <= most:
            raise AssertionError(f"{distance:.2g} from float32 on {self.device} (relative; at most {most:g} expected)")
        return f"{distance:.1e} from float32 on {self.device}"

    def _aggregate(self) -> str:
        self._train("deltas/copy_1", 1)
        self._train("deltas/copy_2", 2)
        folder = self.folder
        result = Aggregate.call(
            folder / "deltas", keys=folder / "keys.bin", out=folder / "unlearned", identity=folder / "identity.txt"
        )
        return f"cosine between copies {result.pairwise:.3f}, estimated error {result.error.relative:.1%}"

    def _repeat(self) -> str:
        self._train("again")
        deltas = [load_file(self.folder / f"{name}.safetensors") for name in ("deltas/copy_1", "again")]
        if not all(torch.equal(deltas[0][name], deltas[1][name]) for name in deltas[0]):
            raise AssertionError("the same training gave other bits")
        return "the same bits twice"

    def _evaluate(self) -> str:
        options: dict[str, Any] = {"metrics": ("forget_Q_A_Prob", "forget_Q_A_ROUGE"), **self._records}
        result = Evaluate.call(
            self.folder / "unlearned", out=self.folder / "eval.json", benchmark="qa", device=str(self.device), **options
        )
        return f"forget_Q_A_Prob {result.forms['forget_Q_A_Prob']['agg_value']:.3g}"


def paged_state(device: torch.device) -> str:
    """Steps of paged AdamW on a tensor that is large enough to be paged, as the small model's are not, with its state
    loaded again halfway. Raises AssertionError if the state is not paged or the steps are not AdamW's."""
    ways = []
    for name in ("adamw", "paged_adamw_32bit"):
        draw = torch.Generator().manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(PAGED, generator=draw).to(device))
        groups = [{"params": [parameter], "weight_decay": 0.01}]
        optimizer = make_optimizer(name, groups, 1e-3)
        for _ in range(2):
            for _ in range(2):
                parameter.grad = torch.randn(PAGED, generator=draw).to(device)
                optimizer.step()
            state = optimizer.state_dict()
            optimizer = make_optimizer(name, groups, 1e-3)
            optimizer.load_state_dict(state)
        ways.append(parameter.detach().cpu())
    param_state = optimizer.state[parameter]
    if not all(getattr(param_state[name], "is_paged", False) for name in ("state1", "state2")):
        raise AssertionError("the optimiser's state is not paged")
    torch.testing.assert_close(*ways, rtol=1e-4, atol=1e-6)
    return "state paged, before and after it is loaded"


# What this machine offers: versions, devices, attention backends, packages that some options need.

NEEDED = ("torch", "transformers", "accelerate", "peft", "safetensors", "tokenizers", "datasets", "numpy", "scipy",
          "pyrage", "typer", "rich")  # fmt: skip
OF_BITSANDBYTES = [name for name, optimizer in OPTIMIZERS.items() if optimizer.package == "bitsandbytes"]
OPTIONAL = {
    "bitsandbytes": f"--optim {', '.join(OF_BITSANDBYTES)}", "opacus": "unlearn --dp",
    "flash-attn": "--training attention=flash_attention_2",
    "lm-eval": "eval --benchmark wmdp, --lm-eval", "optuna": "tune",
    "dp-accounting": "--dp",
    "opendp": "surrogate",
}  # fmt: skip


def facts(device: torch.device) -> dict[str, str]:
    """Everything in words, by topic, in the order in which people want to read it; speed and room are of ``device``."""
    speeds = [
        f"{rate / 1e9:,.0f} billion operations/s in {str(dtype).removeprefix('torch.')}"
        for dtype, rate in _speeds(device)
    ]
    return {
        "mpu": f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "versions": ", ".join(f"{name} {_version(name) or 'MISSING'}" for name in NEEDED),
        **dict(_devices()),
        "speed": f"{device}: {', '.join(speeds)}",
        "room": _room(device),
        "for some options": "; ".join(
            f"{name} {_version(name) or 'not installed'} ({use})" for name, use in OPTIONAL.items()
        ),
    }


def _speeds(device: torch.device) -> Iterator[tuple[torch.dtype, float]]:
    """Operations a second in products of large matrices, by dtype: the best of a few."""
    size = 1024 if device.type == "cpu" else 8192
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        measured = Timer("matrix @ matrix", globals={"matrix": matrix}).blocked_autorange(min_run_time=0.2)
        yield dtype, 2 * size**3 / min(measured.times)


def _room(device: torch.device) -> str:
    """How many weights a model may have whose weights, gradients and optimiser fill half of the memory; the rest is for
    activations."""
    memory = _memory(device)
    full, low_rank = memory / 2 / (8 + OPTIMIZERS["adamw"].state_bytes), memory / 2 / 2
    size = f"{memory / 1e9:.0f} GB"
    return (
        f"{device}: half of {size} holds AdamW's training of {full / 1e9:.2g} billion weights in float32, or LoRA's on "
        f"{low_rank / 1e9:.2g} billion in bfloat16; `mpu plan MODEL --memory {size.replace(' ', '')}` counts it"
    )


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> Iterator[tuple[str, str]]:
    memory = _memory(torch.device("cpu"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cpu", f"{cores} cores, {torch.get_num_threads()} threads for torch, {memory / 1e9:.0f} GB"
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        yield (
            f"cuda:{i}",
            f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, "
            f"capability {properties.major}.{properties.minor}, "
            f"bfloat16: {'yes' if torch.cuda.is_bf16_supported() else 'no'}",
        )
    if torch.cuda.is_available():
        backends = torch.backends.cuda
        enabled = {
            "flash": backends.flash_sdp_enabled(), "memory-efficient": backends.mem_efficient_sdp_enabled(),
            "cudnn": backends.cudnn_sdp_enabled(), "math": backends.math_sdp_enabled(),
        }  # fmt: skip
        yield "cuda", f"CUDA {torch.version.cuda}; sdpa: {', '.join(name for name, on in enabled.items() if on)}"
    elif (other := torch.accelerator.current_accelerator()) is not None:
        yield other.type, "seen by torch; use it with --device"
    else:
        yield "accelerator", "torch finds none: training uses the CPU"
