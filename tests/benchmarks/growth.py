"""How time and peak memory of training and scoring grow, beside a simple model of cost.

    python -m tests.benchmarks.growth DIR [--picture FILE.svg]

Training is a step of NPO as ``mpu unlearn`` does it, on a batch of forget and one of retain records; scoring is a batch
as ``mpu eval`` reads it. Both in float32 on the CPU, on random tokens, half of each record being the answer. Length,
batch, vocabulary and parameters vary one at a time. Every measurement is a process of its own; DIR must be new or
empty, and is deleted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from mpu_cli.lab.plots import PALETTE, log_ticks
from mpu_cli.measuring.cost import training_memory
from mpu_cli.measuring.encoding import Item
from mpu_cli.measuring.scoring import Scorer
from mpu_cli.model.network import CHUNK
from mpu_cli.options.unlearning import Training
from mpu_cli.records.encode import IGNORED, Example
from mpu_cli.training.loop import train
from mpu_cli.training.losses import ALGORITHMS, Objective
from mpu_cli.training.reference import ExampleSet, freeze
from tests.helpers.measuring import Machine, measure_machine, run_measured
from tests.helpers.shapes import make, tensors_of, whole_config

KINDS = {"train": "training step", "score": "scoring"}
SMALL = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
OPTIMIZER_BYTES = 40  # per weight: AdamW reads four numbers and writes three; clipping reads one twice and writes it
BASE = {"5m": "0.1b", "0.1b": "0.1b", "0.5b": "0.5b"}  # the shape that each one's config starts from


def entries_of(shape: str, vocabulary: int) -> dict[str, int]:
    """The entries of the config that differ from those of its base."""
    return {"vocab_size": vocabulary, **(SMALL if shape == "5m" else {})}


@dataclass(frozen=True)
class Point:
    """What is measured: a ``shape`` with this ``vocabulary``, on ``batch`` records of ``length`` tokens."""

    shape: str = "0.1b"
    vocabulary: int = 128256
    length: int = 128
    batch: int = 4

    @property
    def config(self) -> dict:
        return whole_config(BASE[self.shape]) | entries_of(self.shape, self.vocabulary)

    @property
    def weights(self) -> int:
        return sum(map(prod, tensors_of(self.config).values()))


@dataclass(frozen=True)
class Use:
    """Seconds, and peak anonymous memory in MB."""

    seconds: float
    memory: float


Uses = dict[tuple[str, Point], Use]  # by kind and point
SERIES = {  # by what varies, a field of Point
    "length": {str(n): Point(length=n) for n in (64, 128, 256, 512)},
    "batch": {str(n): Point(batch=n) for n in (1, 2, 4, 8)},
    "vocabulary": {f"{n // 1000}k": Point(vocabulary=n) for n in (8192, 32768, 128256)},
    "weights": {"5M": Point("5m", vocabulary=4096), "0.1B": Point("0.1b"), "0.5B": Point("0.5b")},
}
NAMES = {
    "length": "length (tokens)", "batch": "batch (records)", "vocabulary": "vocabulary (tokens)",
    "weights": "parameters",
}  # fmt: skip


def rows_of(vocabulary: int, count: int, length: int, seed: int) -> list[list[int]]:
    return torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def train_steps(model: torch.nn.Module, length: int, batch: int) -> float:
    """Seconds of the third step; the first one makes the optimiser's state."""
    prompt, vocabulary = length // 2, model.config.vocab_size
    forget, retain = (
        [Example(row, [IGNORED] * prompt + row[prompt:]) for row in rows_of(vocabulary, batch, length, seed)]
        for seed in (1, 2)
    )
    frozen = freeze(model, forget, "log_probs", layer=-1, batch_size=batch)
    sets = {"forget": frozen, "retain": ExampleSet(retain)}
    steps = [{"forget": list(range(batch)), "retain": list(range(batch))}] * 3
    npo, ends = ALGORITHMS["npo"], []
    # Called before a step's last backward pass, so that from one call to the next is as much work as a step.
    train(
        model, steps, sets, Objective(npo, npo.constants, "nll"), Training(lr=1e-5),
        on_step=lambda *_: ends.append(time.perf_counter()),
    )  # fmt: skip
    return ends[2] - ends[1]


def score_batch(model: torch.nn.Module, length: int, batch: int) -> float:
    """Seconds of the second of two batches."""
    for seed in (1, 2):
        rows = rows_of(model.config.vocab_size, batch, length, seed)
        items = [Item(tuple(row), length // 2, tuple(row[: length // 2]), "") for row in rows]
        started = time.perf_counter()
        Scorer(model).score(items, batch_size=batch)
    return time.perf_counter() - started


def work(folder: Path, kind: str, length: int, batch: int) -> None:
    """One measurement, in a process of its own: prints seconds. "start" does nothing, for the memory of a process."""
    seconds = 0.0
    if kind != "start":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        seconds = {"train": train_steps, "score": score_batch}[kind](model, length, batch)
    print(json.dumps(seconds))


def measure(folder: Path, kind: str, point: Point) -> Use:
    command = (sys.executable, "-m", "tests.benchmarks.growth", folder, "--work", kind, point.length, point.batch)
    with tempfile.TemporaryFile("w+") as output:
        _, peak = run_measured(*command, stdout=output)
        output.seek(0)
        return Use(json.loads(output.read().splitlines()[-1]), peak * 2**20 / 1e6)


def predict(kind: str, point: Point, machine: Machine, start: float) -> Use:
    """The model of cost; ``start`` is the memory in MB of a process that only imports.

    A token of a layer leaves for the backward pass: input, normalised and scaled states of two norms (6 × width),
    queries and the attention's output (2 × heads), keys and values (2 × their heads), and gate, its SiLU, up and their
    product (4 × feed-forward). Scoring holds one layer of them. Logits are of answer tokens, at most CHUNK at once.
    """
    config = point.config
    heads, shared = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    activations = 6 * config["hidden_size"] + 2 * heads + 2 * shared + 4 * config["intermediate_size"]
    tokens = point.batch * point.length
    answers = tokens // 2
    head = point.vocabulary * config["hidden_size"]
    body = point.weights - head  # the embedding, which is the head as well, is only looked up
    logits = answers * point.vocabulary
    if kind == "score":
        operations, moved = 2 * body * tokens + 2 * head * answers, 0
        memory = 4 * (point.weights + tokens * activations + min(logits, CHUNK))
    else:
        again = 2 if logits > CHUNK else 0  # more than one chunk is computed again in the backward pass
        operations = 2 * (6 * body * tokens + (6 + again) * head * answers)
        moved = OPTIMIZER_BYTES * point.weights
        memory = training_memory(point.weights, "adamw")
        memory += 4 * (tokens * config["num_hidden_layers"] * activations + min(logits, CHUNK) + head)
    return Use(operations / machine.operations + moved / machine.bandwidth, start + memory / 1e6)


def draw(measured: Uses, predicted: Uses, path: Path) -> None:
    """A panel for each quantity: above seconds, below memory; dots are measured, lines are the model's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), layout="constrained")
    grid = figure.subplots(2, len(SERIES), sharex="col", sharey="row")
    for (field, label), row in zip((("seconds", "time (s)"), ("memory", "peak memory (MB)")), grid, strict=True):
        for (quantity, points), axes in zip(SERIES.items(), row, strict=True):
            x = [getattr(point, quantity) for point in points.values()]
            for (kind, name), colour in zip(KINDS.items(), PALETTE, strict=False):
                dots, line = (
                    [getattr(uses[kind, p], field) for p in points.values()] for uses in (measured, predicted)
                )
                axes.plot(x, line, color=colour, linewidth=1.2, label=f"{name}, model of cost")
                axes.plot(x, dots, "o", color=colour, markersize=4, label=f"{name}, measured")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xticks(x, list(points))
            axes.set_xticks([], minor=True)
            axes.tick_params(labelsize=8)
            axes.grid(axis="y", color="#ddd", linewidth=0.5)
            axes.spines[["top", "right"]].set_visible(False)
        log_ticks(row[0].yaxis)  # once all panels of the row have set its limits
        row[0].set_ylabel(label, fontsize=9)
    for quantity, axes in zip(SERIES, grid[-1], strict=True):
        axes.set_xlabel(NAMES[quantity], fontsize=9)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path)


def table(measured: Uses, predicted: Uses) -> list[str]:
    """Lines of a table in Markdown."""
    lines = ["| | | training: s | model | MB | model | scoring: s | model | MB | model |", "|" + "---|" * 10]
    for quantity, points in SERIES.items():
        for label, point in points.items():
            cells: list[str] = []
            for kind in KINDS:
                pair = (measured[kind, point], predicted[kind, point])
                cells += [f"{use.seconds:.2f}" for use in pair] + [f"{use.memory:,.0f}" for use in pair]
            lines.append(f"| {NAMES[quantity]} | {label} | {' | '.join(cells)} |")
    return lines


def main(options: argparse.Namespace) -> None:
    folder: Path = options.folder
    if options.work:
        kind, length, batch = options.work
        work(folder, kind, int(length), int(batch))
        return
    machine = measure_machine()
    start = measure(folder, "start", Point()).memory
    rates = f"{machine.operations / 1e9:.1f} billion operations/s, {machine.bandwidth / 1e9:.1f} GB/s"
    print(f"{rates}, a process takes {start:.0f} MB", flush=True)
    measured: Uses = {}
    points = sorted({point for series in SERIES.values() for point in series.values()}, key=lambda p: p.weights)
    for (shape, vocabulary), alike in groupby(points, key=lambda p: (p.shape, p.vocabulary)):
        base = make(BASE[shape], folder / f"{shape}-{vocabulary}", **entries_of(shape, vocabulary))
        for point in alike:
            for kind in KINDS:
                measured[kind, point] = measure(base, kind, point)
                print(kind, point, measured[kind, point], file=sys.stderr, flush=True)
        shutil.rmtree(base)
    folder.rmdir()
    predicted = {(kind, point): predict(kind, point, machine, start) for kind, point in measured}
    print("\n".join(table(measured, predicted)))
    if options.picture:
        draw(measured, predicted, options.picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--picture", type=Path, metavar="FILE.svg")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    main(parser.parse_args())
