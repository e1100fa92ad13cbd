"""Where the time of a training step and of a scoring batch goes, by kind of operation.

    python -m tests.benchmarks.profile MODEL [--length 128] [--batch 4] [--threads 2]

MODEL is a folder, or the name of a shape (0.1b, 0.5b), which is made of random weights. On the CPU in float32, as
`mpu unlearn` (NPO, AdamW, three steps, embeddings and head not trained) and `mpu eval` (two batches) compute; torch's
profiler attributes each operation's own time. The last row compares with matrix products alone, at this machine's rate
for large ones. ``--compile`` compiles each layer first (torch.compile), outside of what is measured.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from mpu_cli.training.loop import outside_layers
from tests.benchmarks.growth import score_batch, train_steps
from tests.helpers.measuring import measure_machine
from tests.helpers.shapes import SHAPES, make

KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::addbmm", "mkldnn"),
    "attention": ("scaled_dot_product", "_flash_attention"),
    "optimiser and clipping": ("_fused_adam", "_foreach", "linalg_vector_norm"),
    "softmax and losses": ("softmax", "logsumexp", "gather", "scatter", "exp", "cross_entropy", "nll"),
    "copies and fills": ("copy_", "fill_", "zero_", "cat", "contiguous", "index_select", "_to_copy"),
    "elementwise": ("mul", "add", "silu", "pow", "mean", "rsqrt", "sub", "neg", "sum", "sigmoid", "div", "square"),
}


def kind_of(name: str) -> str:
    return next((kind for kind, signs in KINDS.items() if any(sign in name for sign in signs)), "the rest")


def shares(work: object) -> tuple[dict[str, float], float]:
    """Seconds of each kind of operation in ``work``, and operations of its matrix products."""
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler:
        work()
    of_kind: defaultdict[str, float] = defaultdict(float)
    operations = 0.0
    for event in profiler.key_averages():
        of_kind[kind_of(event.key)] += event.self_cpu_time_total / 1e6
        operations += event.flops if kind_of(event.key) == "matrix products" else 0
    return dict(of_kind), operations


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rate = measure_machine().operations
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.model)
        if options.model in SHAPES:
            folder = Path(scratch) / options.model
            make(options.model, folder)
        kinds = {"training": train_steps, "scoring": score_batch}
        profiles = {}
        for name, work in kinds.items():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            for weight in outside_layers(model):
                weight.requires_grad_(False)
            if options.compile:
                started = time.perf_counter()
                for layer in model.model.layers:
                    layer.compile(dynamic=False)
                work(model, options.length, options.batch)
                print(f"{name}: compiled in {time.perf_counter() - started:.0f} s")
            profiles[name] = shares(lambda work=work, model=model: work(model, options.length, options.batch))
    print(f"| | {' | '.join(f'{name}, share' for name in profiles)} |\n|---|---|---|")
    for kind in [*KINDS, "the rest"]:
        cells = [f"{seconds.get(kind, 0) / sum(seconds.values()):.0%}" for seconds, _ in profiles.values()]
        print(f"| {kind} | {' | '.join(cells)} |")
    total_seconds = [sum(seconds.values()) for seconds, _ in profiles.values()]
    ideal = [operations / rate for _, operations in profiles.values()]
    print(f"| seconds in all | {' | '.join(f'{seconds:.2f}' for seconds in total_seconds)} |")
    times = [a / b for a, b in zip(total_seconds, ideal, strict=True)]
    cells = " | ".join(f"{each:.2f}" for each in times)
    print(f"| times what its matrix products take at {rate / 1e9:.0f} GFLOP/s | {cells} |")


if __name__ == "__main__":
    main()
