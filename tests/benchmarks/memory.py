"""Peak memory of `mpu unlearn`, as its dry run predicts it and as it was: a table.

    python -m tests.benchmarks.memory DIR FORGET RETAIN MODEL…
    python -m tests.benchmarks.memory    # activations of a record at the shapes of 1B and 8B, of which nothing is made

Each row is one process; memory is anonymous memory (RssAnon), which leaves out the files that are mapped.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from mpu_cli.measuring.cost import Work, held_for_backward
from mpu_cli.options.unlearning import Unlearning
from tests.helpers.measuring import run_measured
from tests.helpers.shapes import whole_config

COMMON = ["--algo", "npo", "--epochs", "2", "--lr", "1e-5", "--reading", "template=plain", "--force"]
SETTINGS = {
    "1 record": ["--batch-size", "1"],
    "4 records": ["--batch-size", "4"],
    "8 records": ["--batch-size", "8"],
    "4 records, GradDiff": ["--batch-size", "4", "--algo", "graddiff"],
    "4 records, adamw-blockwise": ["--batch-size", "4", "--optim", "adamw-blockwise"],
    "4 records, checkpointing": ["--batch-size", "4", "--training", "gradient_checkpointing"],
    "4 records, bfloat16": ["--batch-size", "4", "--precision", "bfloat16"],
    "4 records, LoRA": ["--batch-size", "4", "--lora", "rank=16"],
    "8 records, LoRA": ["--batch-size", "8", "--lora", "rank=16"],
    "4 records, LoRA, checkpointing": [
        "--batch-size",
        "4",
        "--lora",
        "rank=16",
        "--training",
        "gradient_checkpointing",
    ],
}


def main(folder: Path, forget: str, retain: str, models: list[str]) -> None:
    print("| model | | predicted MB | measured MB | off |\n|---|---|---|---|---|")
    for model in models:
        for name, setting in SETTINGS.items():
            command = [sys.executable, "-m", "mpu_cli", "unlearn", model, "--forget", forget, "--retain", retain,
                       *COMMON, *setting, "--out", str(folder / "delta.safetensors")]  # fmt: skip
            planned = json.loads(subprocess.check_output([*command, "--dry-run", "--json"], stderr=subprocess.DEVNULL))
            with tempfile.TemporaryFile("w+") as output:
                _, peak = run_measured(*command, stdout=output)
            predicted, measured = planned["memory"] / 1e6, peak * 2**20 / 1e6
            off = f"{predicted / measured - 1:+.0%}"
            print(f"| {Path(model).name} | {name} | {predicted:,.0f} | {measured:,.0f} | {off} |", flush=True)


def of_shapes() -> None:
    """Activations of one record, counted in a pass without data."""
    for shape, dtype in (("1b", torch.float32), ("8b", torch.bfloat16)):
        with torch.device("meta"):
            bare = AutoModelForCausalLM.from_config(LlamaConfig(**whole_config(shape)))
        embeddings = {
            id(p) for m in (bare.get_input_embeddings(), bare.get_output_embeddings()) for p in m.parameters()
        }
        trained = {name for name, p in bare.named_parameters() if id(p) not in embeddings}
        for length in (256, 2048):
            activation_bytes = held_for_backward(bare, dtype, Unlearning(), Work(1, length, length // 2), trained)
            print(f"{shape} {dtype} {length} tokens: {activation_bytes / 1e9:.2f} GB")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        of_shapes()
    else:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
