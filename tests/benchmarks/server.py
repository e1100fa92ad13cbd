"""Time and memory of publish and aggregate on a synthetic checkpoint: ``python -m tests.benchmarks.server 1b DIR``.

Prints, for each command, seconds of wall time, peak anonymous resident memory (what is not a file's pages), and the
seconds that copying the same bytes with ``cp`` takes. Files are in the page cache where they fit.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from mpu_cli.checkpoint.reader import open_checkpoint
from mpu_cli.checkpoint.writer import CheckpointWriter
from mpu_cli.manifest import DeltaManifest, as_metadata, delta_facts, read_copy_manifest
from tests.benchmarks.shapes import make

POLL = 0.01  # seconds between looks at the process's memory


def run(*command: str) -> tuple[float, float]:
    """Wall seconds of a command and its peak anonymous memory in MB."""
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        peak = max([peak, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))])
        time.sleep(POLL)
    if process.wait():
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
    return time.perf_counter() - started, peak / 1024


def make_delta(copy: Path, target: Path) -> None:
    """A float32 delta of ``copy`` of the size that training gives, of normal numbers."""
    weights = open_checkpoint(copy)
    facts = delta_facts(DeltaManifest(read_copy_manifest(copy), "npo"))
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)) * 1e-4
    plan = {name: ("F32", info.shape) for name, info in weights.tensors.items()}
    target.parent.mkdir(exist_ok=True)
    with CheckpointWriter(target, plan, as_metadata(facts)) as writer:
        for name in plan:
            for part in writer.tensor(name).view(-1).split(len(noise)):
                part.copy_(noise[: len(part)])


def main(shape: str, folder: Path) -> None:
    mpu = [sys.executable, "-m", "mpu_cli"]
    base = make(shape, folder / "base")
    weights = base / "model.safetensors"
    keys = str(folder / "keys.bin")
    rows = [("publish", *run(*mpu, "publish", str(base), "--out", str(folder), "--keys", keys))]
    if weights.exists():
        rows.append(("cp of both copies", *run("cp", str(weights), str(weights) + ".copied")))
        rows[-1] = (rows[-1][0], rows[-1][1] * 2, rows[-1][2])
        Path(str(weights) + ".copied").unlink()
    for k in (1, 2):
        make_delta(folder / f"copy_{k}", folder / "deltas" / f"copy_{k}.safetensors")
    aggregate = [*mpu, "aggregate", str(folder / "deltas"), "--keys", keys, "--out", str(folder / "unlearned")]
    rows.append(("aggregate", *run(*aggregate)))
    for name, seconds, memory in rows:
        print(f"{name:<20} {seconds:7.2f} s {memory:7.0f} MB")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
