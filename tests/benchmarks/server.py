"""Time and memory of the server's commands on a synthetic checkpoint, beside what bounds them:

    python -m tests.benchmarks.server 1b DIR [--copies 2,3,4] [--repeat 5] [--mergekit PATH/mergekit-yaml] [--fast]
    python -m tests.benchmarks.server 30b-moe DIR --fast --layers 2 [--stacked]

Publish runs with its defaults, without a public model and (at m = 2) with one. For each command: seconds of wall time,
start-up included, peak anonymous resident memory (what is not a file's pages), and the ratio to its floor: `cp` of the
same bytes for publish, reading the deltas once and writing the model for aggregate. Files are in the page cache where
they fit. ``--repeat`` prints the medians of several runs of publish and `cp`, in turns. ``--fast`` leaves out the plain
method and has deltas of zeros in sparse files, for shapes for which there is not the memory or the disk (8b: 50 GB
free).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch

from mpu_cli.files.manifest import CopyManifest, DeltaManifest, as_metadata, delta_facts, read_copy_manifest
from mpu_cli.files.reader import encode_header, open_checkpoint
from mpu_cli.files.writer import CheckpointWriter, nbytes_of
from tests.helpers.measuring import MPU, run_measured
from tests.helpers.shapes import make


def make_delta(base: Path, copy: CopyManifest, target: Path, dtype: str) -> None:
    """A delta of ``copy``, a copy of ``base``, of the size that training gives, of normal numbers."""
    weights = open_checkpoint(base)
    facts = delta_facts(DeltaManifest(copy, "npo"))
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)) * 1e-4
    plan = {name: (dtype, info.shape) for name, info in weights.tensors.items()}
    target.parent.mkdir(exist_ok=True)
    with CheckpointWriter(target, plan, as_metadata(facts)) as writer:
        for name in plan:
            for part in writer.tensor(name).view(-1).split(len(noise)):
                part.copy_(noise[: len(part)])


def make_sparse_delta(base: Path, copy: CopyManifest, target: Path, dtype: str) -> None:
    """As ``make_delta``, of zeros that take no room on the disk."""
    facts = delta_facts(DeltaManifest(copy, "npo"))
    plan = {name: (dtype, info.shape) for name, info in open_checkpoint(base).tensors.items()}
    head, _ = encode_header(plan, as_metadata(facts))
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(head)
    os.truncate(target, len(head) + nbytes_of(plan))


def make_relative(base: Path, target: Path) -> Path:
    """A public model that ``base`` may be fine-tuned from: each weight is about 1 % off."""
    weights = open_checkpoint(base)
    factor = 1 + 0.01 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(2))
    target.mkdir()
    shutil.copy(base / "config.json", target)
    plan = {name: (info.dtype, info.shape) for name, info in weights.tensors.items()}
    with CheckpointWriter(target / "model.safetensors", plan, {"format": "pt"}) as writer:
        for name in plan:
            parts = (each.view(-1).split(len(factor)) for each in (writer.tensor(name), weights.tensor(name)))
            for out, part in zip(*parts, strict=True):
                out.copy_(part.float() * factor[: len(part)])
    return target


def floor_of_aggregate(deltas: Path, base: Path, scratch: Path) -> float:
    """Seconds to read every delta once and to copy the base, which is as large as what aggregate writes."""
    started = time.perf_counter()
    for path in sorted(deltas.iterdir()):
        run_measured("dd", f"if={path}", "of=/dev/null", "bs=16M")
    run_measured("cp", "-r", base, scratch)
    seconds = time.perf_counter() - started
    shutil.rmtree(scratch)
    return seconds


def tell(name: str, seconds: float, memory: float | None = None, floor: float | None = None) -> None:
    beside = "" if memory is None else f" {memory:7.0f} MB"
    print(f"{name:<34} {seconds:7.2f} s{beside}" + ("" if floor is None else f" {seconds / floor:6.2f} x its floor"))


def copy_seconds(folder: Path, copies: int) -> float:
    """Seconds of ``cp`` of that many copies."""
    scratch = folder / "cp"
    scratch.mkdir()
    started = time.perf_counter()
    for k in range(copies):
        run_measured("cp", "-r", folder / "base", scratch / str(k))
    seconds = time.perf_counter() - started
    shutil.rmtree(scratch)
    return seconds


def time_publish(base: Path, folder: Path, copies: int, repeat: int, *more: object) -> tuple[float, float]:
    """Print the medians of ``cp`` of the copies and of publish; returns those of publish, seconds and memory."""
    name = f"publish, m = {copies}" + (f" {more[0]}" if more else "")
    floors, runs = [], []
    for _ in range(repeat):
        floors.append(copy_seconds(folder, copies))
        command = (*MPU, "publish", base, "--copies", copies, "--out", folder, "--keys", folder / "keys.bin", "--force")
        runs.append(run_measured(*command, *more))
    floor, seconds, memory = (statistics.median(each) for each in (floors, *zip(*runs, strict=True)))
    tell(f"cp of {copies} copies", floor)
    tell(name, seconds, memory, floor)
    return seconds, memory


def main(options: argparse.Namespace) -> None:
    folder: Path = options.folder
    entries = {"num_hidden_layers": options.layers} if options.layers else {}
    base = make(options.shape, folder / "base", stacked=options.stacked, **entries)
    keys = ("--keys", folder / "keys.bin")
    if not options.fast:
        public = make_relative(base, folder / "public")
        time_publish(base, folder, 1, options.repeat, "--public", public)
        shutil.rmtree(public)
        shutil.rmtree(folder / "copy_1")
    for copies in options.copies:
        publish = time_publish(base, folder, copies, options.repeat)
        if copies == 2 and not options.fast:
            plain = run_measured(sys.executable, "-m", "tests.benchmarks.in_memory", base, folder / "plain", copies)
            tell("the same in memory", *plain, publish[0])
            shutil.rmtree(folder / "plain")
        if copies != 2:
            for k in range(1, copies + 1):
                shutil.rmtree(folder / f"copy_{k}")
            continue
        deltas = folder / "deltas"
        manifests = [read_copy_manifest(folder / f"copy_{k}") for k in (1, 2)]
        for dtype in ("F32", "BF16"):
            for k in (1, 2):
                manifest = manifests[k - 1]
                if options.fast:  # to make room
                    shutil.rmtree(folder / f"copy_{k}", ignore_errors=True)
                make_one = make_sparse_delta if options.fast else make_delta
                make_one(base, manifest, deltas / f"copy_{k}.safetensors", dtype)
            floor = floor_of_aggregate(deltas, base, folder / "cp")
            # These deltas have nothing in common, which aggregate refuses unless they are trusted.
            joined = run_measured(
                *MPU, "aggregate", deltas, *keys, "--out", folder / "unlearned", "--trust-deltas", "--force"
            )
            tell(f"aggregate, {dtype} deltas", *joined, floor)
            shutil.rmtree(folder / "unlearned")
            if options.mergekit and dtype == "BF16":
                tell("mergekit, the same bytes", *run_mergekit(options.mergekit, base, folder, deltas), joined[0])
            shutil.rmtree(deltas)
        for k in (1, 2):
            shutil.rmtree(folder / f"copy_{k}", ignore_errors=True)
    shutil.rmtree(folder)


def run_mergekit(tool: Path, base: Path, folder: Path, deltas: Path) -> tuple[float, float]:
    """A linear merge of base and both deltas, each as a model of its own."""
    models = [base]
    for k in (1, 2):
        model_folder = folder / "as_models" / str(k)
        model_folder.mkdir(parents=True)
        shutil.copy(base / "config.json", model_folder)
        (model_folder / "model.safetensors").symlink_to((deltas / f"copy_{k}.safetensors").resolve())
        models.append(model_folder)
    lines = ["merge_method: linear", "dtype: bfloat16", "parameters: {normalize: false}", "models:"]
    for model, weight in zip(models, (1.0, 0.67, 0.33), strict=True):
        lines += [f"  - model: {model}", f"    parameters: {{weight: {weight}}}"]
    recipe = folder / "merge.yaml"
    recipe.write_text("\n".join(lines) + "\n")
    usage = run_measured(tool, recipe, folder / "merged", "--no-copy-tokenizer")
    shutil.rmtree(folder / "merged")
    shutil.rmtree(folder / "as_models")
    return usage


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("shape")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--copies", type=lambda text: [int(part) for part in text.split(",")], default=[2])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--mergekit", type=Path)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--stacked", action="store_true", help="experts in stacks (30b-moe)")
    main(parser.parse_args())
