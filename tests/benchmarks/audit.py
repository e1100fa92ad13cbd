"""What `mpu audit` recovers of a synthetic checkpoint of a real shape, and in what time:

    python -m tests.benchmarks.audit 1b DIR [--kappas 0.01,0.1]

Weights are normal, in bfloat16; the public reference is 10 % of their size away.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from pathlib import Path

import torch

from mpu_cli.files.reader import open_checkpoint
from mpu_cli.files.writer import CheckpointWriter
from tests.helpers.measuring import MPU, run_measured
from tests.helpers.shapes import make

DISTANCE = 0.1  # of the reference, relative to the weights


def make_pair(shape: str, folder: Path) -> tuple[Path, Path]:
    """A base of independent weights (`make` repeats some, and equal rows cannot be told apart), and a reference."""
    empty = make(shape, folder / "shape")
    source = open_checkpoint(empty)
    plan = {name: (info.dtype, info.shape) for name, info in source.tensors.items()}
    paths = folder / "base", folder / "reference"
    for path in paths:
        path.mkdir()
        shutil.copy(empty / "config.json", path)
    generator = torch.Generator().manual_seed(9)
    with CheckpointWriter(paths[0], plan, {}) as base, CheckpointWriter(paths[1], plan, {}) as reference:
        for name in plan:
            pieces = [writer.tensor(name).view(-1).split(1 << 22) for writer in (base, reference)]
            for weights, public in zip(*pieces, strict=True):
                drawn = torch.randn(2, len(weights), generator=generator) * 0.02
                weights.copy_(drawn[0])
                public.copy_(drawn[0] + DISTANCE * drawn[1])
    shutil.rmtree(empty)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kappas", default="0.01,0.1")
    options = parser.parse_args()
    folder: Path = options.folder
    base, reference = folder / "base", folder / "reference"
    if not reference.exists():
        make_pair(options.shape, folder)
    print("| symmetries | κ | layers | attack | weights | task vector | seconds of the attack | of the command |")
    print("|---|---|---|---|---|---|---|---|")
    for symmetries in ("paper", "all"):
        for kappa in options.kappas.split(","):
            chosen = ("--symmetries", symmetries, "--public", reference)
            run_measured(
                *MPU,
                "publish",
                base,
                *chosen,
                *("--copies", "2", "--noise", "zero-sum"),
                "--kappa",
                kappa,
                "--out",
                folder,
                "--keys",
                folder / "keys.bin",
                "--force",
            )
            for layers, fast in (("three", ["--fast"]), ("all", [])):
                started = time.perf_counter()
                output = subprocess.run(
                    [*MPU, "audit", folder / "copy_1", folder / "copy_2", "--base", base, *chosen, *fast,
                     "--noise", "zero-sum", "--json"],
                    capture_output=True, check=True,
                ).stdout  # fmt: skip
                seconds = time.perf_counter() - started
                for name, attack in json.loads(output)["attacks"].items():
                    task = "–" if attack["task_vector"] is None else f"{attack['task_vector']:.2%}"
                    print(
                        f"| {symmetries} | {kappa} | {layers} | {name} | {attack['weights']:.2%} | {task} | "
                        f"{attack['seconds']:.1f} | {seconds:.1f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
