"""How far each command is from what this machine allows: seconds, the limit, and the share.

python -m tests.benchmarks.limits DIR MODEL FORGET RETAIN UNSEEN [--steps N] [--precision PRECISION]

Measures the machine first: products of matrices in float32 and bfloat16, and a copy of the model's file. Then it runs
the main commands on MODEL, a chat model that knows FORGET and RETAIN, in DIR. The limit of a command that computes is
its products alone at the measured rate, counted by torch's FlopCounterMode in one pass over records of the same
lengths; that of a command that streams is a `cp` of as many bytes as it reads and writes, whichever are more. Imports,
checks and everything else are what a share below 1 consists of. One process at a time; take a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from mpu_cli.model.load import limits_of, load
from mpu_cli.model.source import open_model
from mpu_cli.options.unlearning import Prompts
from mpu_cli.records.encode import Example, encoding_of, pad
from mpu_cli.records.read import read_records
from mpu_cli.training.stopping import EVERY, SCORED_RECORDS
from tests.benchmarks.gpu import products_per_second
from tests.helpers.measuring import MPU, run_measured

SIZE = 2048  # of the matrices
PER_STEP = 8, 16  # records to forget and to keep
DTYPES = {"float32": torch.float32, "mixed": torch.bfloat16, "bfloat16": torch.bfloat16}


class Passes:
    """Operations of one forward pass over records, by a model on meta tensors: products alone count."""

    def __init__(self, model: str):
        source = open_model(model)
        self.loaded, tokenizer = load(source, torch.float32, "cpu")
        self._encoding = encoding_of(tokenizer, Prompts(), None, limits_of(self.loaded))

    def examples(self, file: str) -> list[Example]:
        encoded = self._encoding.encode(read_records(file))
        return [example for example in encoded if isinstance(example, Example)]

    def operations(self, examples: list[Example]) -> float:
        """Of all ``examples``, by those of a few as they would be padded together."""
        few = sorted(examples, key=lambda example: len(example.ids))[:: max(1, len(examples) // 8)]
        batch = pad(few)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.loaded(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        tokens = batch["attention_mask"].sum().item()
        return counter.get_total_flops() * sum(len(example.ids) for example in examples) / float(tokens)


def copied_bytes_per_second(file: Path, folder: Path) -> float:
    """Of ``cp`` of a file that is in memory, to the disk of ``folder``."""
    rates = []
    for number in range(3):
        target, started = folder / f"cp_{number}", time.perf_counter()
        shutil.copyfile(file, target)
        rates.append(file.stat().st_size / (time.perf_counter() - started))
        target.unlink()
    return max(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name in ("model", "forget", "retain", "unseen"):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precision", default="float32", choices=DTYPES)
    options = parser.parse_args()
    options.folder.mkdir()
    os.environ["XDG_CONFIG_HOME"] = str(options.folder / "config")
    passes = Passes(options.model)
    sets = {name: passes.examples(getattr(options, name)) for name in ("forget", "retain", "unseen")}
    rates = {name: products_per_second("cpu", dtype, SIZE) for name, dtype in DTYPES.items()}
    weights = next(Path(options.model).glob("*.safetensors"))
    nbytes, copying = weights.stat().st_size, copied_bytes_per_second(weights, options.folder)
    print(f"products: {', '.join(f'{name} {rate / 1e9:.0f} GFLOP/s' for name, rate in rates.items())}")
    print(f"cp: {copying / 1e9:.2f} GB/s\n\ncommand\tseconds\tlimit\tshare")

    def row(name: str, limit: float, *command: object) -> None:
        seconds, _ = run_measured(*MPU, *command, "--quiet")
        print(f"{name}\t{seconds:.1f}\t{limit:.1f}\t{min(1.0, limit / seconds):.0%}", flush=True)

    records = ("--forget", options.forget, "--retain", options.retain, "--unseen", options.unseen)
    out, keys = options.folder / "copies", options.folder / "keys.bin"
    row("publish", 2 * nbytes / copying, "publish", options.model, "--kappa", 0.01, "--out", out, "--keys", keys)
    row("verify", nbytes / copying, "verify", out / "copy_1", "--keys", keys, "--no-logits")
    of = {name: passes.operations(examples) for name, examples in sets.items()}
    forget, retain = (of[name] / len(sets[name]) for name in ("forget", "retain"))
    step = 3 * (PER_STEP[0] * forget + PER_STEP[1] * retain)  # the backward pass takes twice the forward's
    scored = sum(of[name] * min(1, SCORED_RECORDS / len(sets[name])) for name in sets)
    looks = 1 + options.steps // EVERY
    training = (options.steps * step + of["retain"] + looks * scored) / rates[options.precision]
    deltas = options.folder / "deltas"
    training_options = ("--max-steps", options.steps, "--precision", options.precision, "--out", f"{deltas}/")
    name = f"unlearn, {options.steps} steps"
    row(name, training, "unlearn", out / "copy_1", *records, *training_options, "--trust-copy", "--alone")
    run_measured(*MPU, "unlearn", out / "copy_2", *records, *training_options, "--trust-copy", "--alone", "--quiet")
    streamed = max(3 * nbytes, nbytes) / copying  # both deltas and the base are read, the model is written
    row("aggregate", streamed, "aggregate", deltas, "--keys", keys, "--out", options.folder / "unlearned")
    both = 2 * sum(of.values()) / rates["float32"]  # two models
    run_measured(*MPU, "publish", options.folder / "unlearned", "--kappa", 0.01, "--copies", 1, "--out",
                 options.folder / "round_2", "--keys", options.folder / "keys_2.bin", "--quiet")  # fmt: skip
    checked = (
        "check",
        options.folder / "round_2/copy_1",
        *records,
        "--before",
        out / "copy_1",
        "--scoring",
        "dtype=float32",
    )
    try:
        row("check", both, *checked)
    except SystemExit:
        sys.exit("check: not a pass, so its time was not printed: give more --steps")


if __name__ == "__main__":
    main()
