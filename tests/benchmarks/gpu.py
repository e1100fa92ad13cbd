"""A card's speed, in rows: training beside a plain loop with two models, where a step's time goes, and whole commands.

    python -m tests.benchmarks.gpu FOLDER MODEL [MODEL …] [--forget RECORDS --retain RECORDS --unseen RECORDS]
    python -m tests.benchmarks.gpu FOLDER --tiny     # on a CPU, to see that it runs

MODEL is a folder, or a shape of tests/helpers/shapes.py with random weights. Training is NPO in bfloat16 on 32 + 32
records of 128 random tokens a step. With records, publish, unlearn, aggregate, check and eval run on the first MODEL,
and their seconds are given. Each row is a line of JSON, as soon as it is known. FOLDER gets the models made, and what
the commands write.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mpu_cli.options.unlearning import Training
from mpu_cli.training.loop import ExampleSet, TrainingStep, train
from mpu_cli.training.losses import ALGORITHMS, Objective
from mpu_cli.training.reference import Reference, freeze
from tests.benchmarks.client import LENGTH, examples, load
from tests.helpers.models import random_model, save
from tests.helpers.shapes import SHAPES

WARM, TIMED, TRACED = 3, 10, 2  # steps


def products_per_second(device: str, dtype: torch.dtype, size: int) -> float:
    """Floating-point operations a second in large matrix products."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    for count in (3, 10):
        started = _now(device)
        for _ in range(count):
            a @ a
        seconds = _now(device) - started
    return 2 * size**3 * count / seconds


def training_rows(options: argparse.Namespace, name: str, folder: Path) -> Iterator[dict[str, object]]:
    """Tokens a second of this package and of the plain loop, each in a process of its own."""
    arguments = [name, str(folder), "--device", options.device, "--dtype", options.dtype]
    arguments += ["--batches", str(options.batches), "--batch-size", str(options.batch_size)]
    printed = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.client", *arguments], check=True, capture_output=True, text=True
    ).stdout
    rates = {}
    for line in printed.splitlines():
        kind, tokens, _, megabytes, _ = line.split()
        rates[kind] = float(tokens)
        yield {"row": f"{name}: {kind}", "tokens_per_second": float(tokens), "peak_gb": float(megabytes) * 2**20 / 1e9}
    yield {"row": f"{name}: ours over two_models", "ratio": round(rates["ours"] / rates["two_models"], 2)}


def step_row(options: argparse.Namespace, name: str, folder: Path, rate: float, compiled: bool) -> dict[str, object]:
    """Seconds of a step, the share of the card's products that it uses, and what it launches."""
    options.folder = folder
    model = load(options)
    size = options.batch_size
    sets = [examples(model.config.vocab_size, size, seed) for seed in (1, 2)]
    frozen = freeze(model, sets[0], "log_probs", layer=-1, batch_size=size)
    read = {"forget": ExampleSet(sets[0], frozen), "retain": ExampleSet(sets[1], Reference())}
    npo = ALGORITHMS["npo"]
    training = Training(lr=1e-6, batch_size=size, compile=compiled)
    seconds: list[float] = []

    def steps(count: int) -> None:
        everything = list(range(size))
        train(
            model, [TrainingStep(everything, everything)] * count, read, Objective(npo, npo.constants, "nll"),
            training, on_step=lambda *_: seconds.append(_now(options.device)),
        )  # fmt: skip

    steps(WARM + TIMED)
    step = (seconds[-1] - seconds[WARM - 1]) / TIMED
    trained = sum(p.numel() for p in model.parameters())
    row: dict[str, object] = {
        "row": f"{name}: a step{', compiled' if compiled else ''}",
        "seconds": round(step, 4),
        "of_products": round(6 * trained * 2 * size * LENGTH / step / rate, 3),
    }
    if compiled:
        return row
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if options.device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        steps(TRACED)
    events = profiler.key_averages()
    if options.device == "cuda":
        launches = sum(event.count for event in events if event.key.startswith(("cudaLaunch", "cuLaunch")))
        waits = sum(event.count for event in events if event.key.endswith("Synchronize"))
        row |= {"launches": launches // TRACED, "waits": waits // TRACED}
        on_card = [event.self_device_time_total for event in events if event.device_type == DeviceType.CUDA]
        row["busy"] = round(sum(on_card) / 1e6 / TRACED / step, 2)
    if options.trace:
        options.trace.write_text(events.table(sort_by="self_cpu_time_total", row_limit=60, max_name_column_width=60))
    return row


def command_rows(options: argparse.Namespace, model: str) -> Iterator[dict[str, object]]:
    """Seconds of each command of a request, judged by the client's own check."""
    folder = options.scratch / "request"
    folder.mkdir(exist_ok=True)
    records = [text for name in ("forget", "retain", "unseen") for text in (f"--{name}", getattr(options, name))]
    keys = ["--keys", "keys.bin"]
    commands = {
        "publish": ["publish", model],
        "unlearn": ["unlearn", "copy_1", *records],
        "aggregate": ["aggregate", "deltas", *keys],
        "publish again": ["publish", "unlearned"],
        "check": ["check", "round_2/copy_1", *records],
        "eval": ["eval", "unlearned", *records],
    }
    for name, arguments in commands.items():
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "mpu_cli", *arguments], cwd=folder, capture_output=True, text=True, check=False
        )
        row: dict[str, object] = {"row": f"mpu {name}", "seconds": round(time.monotonic() - started, 1)}
        yield row if not done.returncode else row | {"status": done.returncode, "stderr": done.stderr[-500:]}


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path, metavar="FOLDER")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the table of a step's operations")
    for name in ("forget", "retain", "unseen"):
        parser.add_argument(f"--{name}", metavar="RECORDS")
    options = parser.parse_args()
    options.device, options.dtype = ("cpu", "float32") if options.tiny else ("cuda", "bfloat16")
    options.batches, options.batch_size = (1, 2) if options.tiny else (8, 32)
    options.scratch.mkdir(parents=True, exist_ok=True)

    def show(row: dict[str, object]) -> None:
        print(json.dumps(row), flush=True)

    rate = products_per_second(options.device, getattr(torch, options.dtype), 512 if options.tiny else 8192)
    card = "a CPU" if options.tiny else torch.cuda.get_device_name()
    show({"row": f"products of {card}", "tflops": round(rate / 1e12, 3), "torch": torch.__version__})
    if options.tiny:
        options.models = [str(save(random_model("llama"), options.scratch / "tiny"))]
    for name in options.models:
        folder = options.scratch / (name if name in SHAPES else Path(name).name + "_steps")
        for row in training_rows(options, name, folder):
            show(row)
        for compiled in (False,) if options.tiny else (False, True):
            show(step_row(options, name, folder, rate, compiled))
    if options.forget:
        for row in command_rows(options, str(Path(options.models[0]).resolve())):
            show(row)


if __name__ == "__main__":
    main()
