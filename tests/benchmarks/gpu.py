"""A card's speed, in rows: training beside a plain loop with two models, where a step's time goes, and whole commands.

    python -m tests.benchmarks.gpu FOLDER MODEL [MODEL …] [--forget RECORDS --retain RECORDS --unseen RECORDS]
    python -m tests.benchmarks.gpu FOLDER --tiny     # on a CPU, to see that it runs

MODEL is a folder, or a shape of tests/helpers/shapes.py with random weights. Training is NPO in bfloat16 on 32 + 32
records of 128 random tokens a step. If the first MODEL is a folder, a whole request and a sweep run on it, stage by
stage, and LoRA on the shape of 8B; in any case, the memory that the dry run says is set beside what was taken. Each row
is a line of JSON, printed as soon as it is known and kept in FOLDER/rows.jsonl; FOLDER also gets the models made, and
what the commands write. Ends after 8 minutes (--minutes).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mpu_cli.options.unlearning import Training
from mpu_cli.training.loop import train
from mpu_cli.training.losses import ALGORITHMS, Objective
from mpu_cli.training.reference import ExampleSet, freeze
from tests.benchmarks.client import LENGTH, examples, load
from tests.helpers.measuring import MPU, POLL, anonymous_bytes
from tests.helpers.models import random_model, save, save_tokenizer, write_records
from tests.helpers.shapes import SHAPES, make

WARM, TIMED, TRACED = 3, 10, 2  # steps
MEMORY = {
    "bfloat16": ["--precision", "bfloat16"],
    "mixed, checkpointing": ["--precision", "mixed", "--training", "gradient_checkpointing"],
    "LoRA, bfloat16": ["--lora", "rank=16", "--precision", "bfloat16"],
    "nf4 LoRA, bfloat16": ["--lora", "rank=16,quantize=nf4", "--precision", "bfloat16"],
}
SWEEP = """\
base = "{model}"
forget = "forget.jsonl"
retain = "retain.jsonl"
kappa = 0.01
rounds = 1
epochs = 1
template = "plain"
[eval]
benchmark = "qa"
metrics = ["forget_Q_A_Prob", "retain_Q_A_Prob"]
[[cases]]
algo = ["npo", "graddiff"]
lr = {rates}
secret_seed = {seeds}
"""


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
    read = {"forget": frozen, "retain": ExampleSet(sets[1])}
    npo = ALGORITHMS["npo"]
    training = Training(lr=1e-6, batch_size=size, compile=compiled)
    seconds: list[float] = []

    def steps(count: int) -> None:
        everything = list(range(size))
        train(
            model, [{"forget": everything, "retain": everything}] * count, read, Objective(npo, npo.constants, "nll"),
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


def memory_rows(options: argparse.Namespace, model: str) -> Iterator[dict[str, object]]:
    """What the dry run says of a training's memory, and what was taken: of the card by all that ``mpu`` holds there,
    the context and the allocator's cache included; on a CPU, anonymous memory."""
    for name, setting in MEMORY.items():
        if options.device == "cpu" and any("quantize" in each for each in setting):
            continue
        command = ["unlearn", model, "--algo", "npo", "--forget", "forget.jsonl", "--retain", "retain.jsonl",
                   "--batch-size", str(options.batch_size), "--epochs", "1", "--lr", "1e-6", "--reading",
                   "template=plain",
                   "--out", "memory.safetensors", "--force", "--device", options.device, *setting]  # fmt: skip
        said = json.loads(_mpu(options, [*command, "--dry-run", "--json"]).stdout)["memory"]
        before, peak = _used(options.device), 0.0
        with _started(options, command) as process:
            while process.poll() is None:
                if time.monotonic() > options.ends:
                    process.kill()
                peak = max(peak, _used(options.device, process.pid) - before)
                time.sleep(POLL)
        yield {
            "row": f"memory: {name}", "said_gb": round(said / 1e9, 2), "measured_gb": round(peak / 1e9, 2),
            "said_over_measured": round(said / peak, 2), "status": process.returncode,
        }  # fmt: skip


def _used(device: str, process: int | None = None) -> float:
    """Bytes in use on the card, by all programs; on a CPU, anonymous memory of ``process``."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return float(total - free)
    return float(anonymous_bytes(process)) if process else 0.0


def command_rows(options: argparse.Namespace, model: str) -> Iterator[dict[str, object]]:
    """Seconds of each command of a request, judged by the client's own check, by stage; then of a sweep."""
    records = [text for name in ("forget", "retain", "unseen") for text in (f"--{name}", f"{name}.jsonl")]
    keys = ["--keys", "keys.bin"]
    rates, seeds = ([1e-5], [1]) if options.tiny else ([1e-6, 1e-5, 1e-4], [1, 2])
    (options.scratch / "sweep.toml").write_text(SWEEP.format(model=model, rates=rates, seeds=seeds))
    commands = {
        "publish": ["publish", model, "--copies", "2"],
        "unlearn": ["unlearn", "copy_1", "copy_2", *records],
        "aggregate": ["aggregate", "deltas", *keys],
        "publish again": ["publish", "unlearned", "--copies", "2"],
        "check": ["check", "round_2/copy_1", *records],
        "eval": ["eval", "unlearned", *records],
        f"sweep of {2 * len(rates) * len(seeds)}": [
            "sweep",
            "sweep.toml",
            "--out",
            "swept",
            "--jobs",
            "2" if options.tiny else "6",
        ],
    }
    for name, arguments in commands.items():
        yield _row(options, f"mpu {name}", arguments)


def large_rows(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """LoRA on a model of 8 billion weights, 64 + 64 records in one step, without and with 4 bits."""
    folder = options.scratch / "8b"
    if not folder.exists():
        save_tokenizer(make("8b", folder))
    for name, more in (("LoRA", []), ("nf4 LoRA", ["--lora", "quantize=nf4"])):
        command = ["unlearn", "8b", "--algo", "npo", "--forget", "forget.jsonl", "--retain", "retain.jsonl",
                   "--batch-size", "64", "--epochs", "1", "--lr", "1e-6", "--reading", "template=plain", "--lora",
                   "rank=16",
                   "--precision", "bfloat16", "--training", "gradient_checkpointing", "--out", "8b.safetensors",
                   "--force",
                   "--trust-copy", *more]  # fmt: skip
        yield _row(options, f"8B, {name}", command)


def _row(options: argparse.Namespace, name: str, arguments: list[str]) -> dict[str, object]:
    """The seconds of a command, and of its stages."""
    started = time.monotonic()
    try:
        done = _mpu(options, ["--profile", *arguments])
    except subprocess.TimeoutExpired:
        return {"row": name, "left_out": f"not done after {time.monotonic() - started:.0f} s"}
    row: dict[str, object] = {"row": name, "seconds": round(time.monotonic() - started, 1)}
    row["stages"] = {
        label: float(seconds) for label, seconds in re.findall(r"^profile: (.*): ([\d.]+) s$", done.stderr, re.M)
    }
    return row if not done.returncode else row | {"status": done.returncode, "stderr": done.stderr[-300:]}


def _mpu(options: argparse.Namespace, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    left = max(30.0, options.ends - time.monotonic())  # a dry run that was begun may end
    return subprocess.run(
        [*MPU, *arguments], cwd=options.scratch, capture_output=True, text=True, check=False, timeout=left
    )


def _started(options: argparse.Namespace, arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*MPU, *arguments], cwd=options.scratch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
    )


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def rows(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """All of them, the most telling first."""
    rate = products_per_second(options.device, getattr(torch, options.dtype), 512 if options.tiny else 8192)
    card = "a CPU" if options.tiny else torch.cuda.get_device_name()
    yield {"row": f"products of {card}", "tflops": round(rate / 1e12, 3), "torch": torch.__version__}
    for name in options.models:
        folder = options.scratch / (name if name in SHAPES else Path(name).name + "_steps")
        yield from training_rows(options, name, folder)
        for compiled in (False,) if options.tiny else (False, True):
            yield step_row(options, name, folder, rate, compiled)
    first = options.models[0]
    if first in SHAPES:
        yield from memory_rows(options, str(save_tokenizer(options.scratch / first / "base")))
        return
    model = str(Path(first).resolve())
    yield from command_rows(options, model)
    yield from memory_rows(options, model)
    if not options.tiny:
        yield from large_rows(options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path, metavar="FOLDER")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--minutes", type=float, default=8.0, help="what is not begun by then is left out")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the table of a step's operations")
    for name in ("forget", "retain", "unseen"):
        parser.add_argument(f"--{name}", metavar="RECORDS", help="in place of random words")
    options = parser.parse_args()
    options.ends = time.monotonic() + 60 * options.minutes
    options.device, options.dtype = ("cpu", "float32") if options.tiny else ("cuda", "bfloat16")
    options.batches, options.batch_size = (1, 2) if options.tiny else (8, 32)
    options.scratch.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(("forget", "retain", "unseen")):
        target = options.scratch / f"{name}.jsonl"
        if given := getattr(options, name):
            shutil.copyfile(given, target)
        else:
            write_records(target, 8 if options.tiny else 64, seed, 4 if options.tiny else LENGTH // 2)
    if options.tiny:
        options.models = [str(save(random_model("llama"), options.scratch / "tiny"))]
    failed = []
    with (options.scratch / "rows.jsonl").open("w") as file:
        for row in rows(options):
            line = json.dumps(row)
            print(line, flush=True)
            file.write(line + "\n")
            if row.get("status") and row["row"] != "mpu check":  # whose verdict, of one epoch, may be any
                failed.append(row["row"])
            if time.monotonic() > options.ends:
                break
    if failed:
        raise SystemExit(f"failed: {', '.join(map(str, failed))}")


if __name__ == "__main__":
    main()
