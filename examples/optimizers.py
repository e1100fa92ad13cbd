"""Which optimiser suits which set of symmetries: distances from the clean update without noise, slopes with noise.

    python examples/optimizers.py mpu-demo/models/target --forget mpu-demo/records/forget.jsonl \
        --retain mpu-demo/records/retain.jsonl

For each optimiser, runs `mpu unlearn` on the base (clean) and, for each set of symmetries, `mpu publish` of two copies
without noise, `mpu unlearn` and `mpu aggregate`, and reports the distance between the updates. Then reports that
distance at two noise scales, with the default nodes for two copies in signed coordinates, and its slope: 2 if the noise
cancels as it should. Runs in float64. GradDiff, three epochs of --records
records, batch size 4. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import numpy as np
from fidelity import mpu
from safetensors.numpy import load_file

RATES = {
    "sgd": "1e-2",
    "adamw": "1e-4",
    "adamw-blockwise": "1e-4",
    "muon": "1e-4",
}
SETS = ("signed", "paper", "all")


def update(base: Path, model: Path) -> np.ndarray:
    """The change in all weights from ``base`` to ``model``."""
    before, after = load_file(base / "model.safetensors"), load_file(model / "model.safetensors")
    return np.concatenate([(after[name].astype(np.float64) - before[name]).ravel() for name in sorted(before)])


def aggregate(base: Path, folder: Path, publish: list[object], training: list[object]) -> np.ndarray:
    """The update that the protocol produces with two copies."""
    keys = folder / "keys.bin"
    copies = mpu(
        "publish", base, "--copies", 2, "--seed", 1, "--dtype", "float64", *publish, "--out", folder, "--keys", keys
    )
    for copy in copies.split():
        mpu("unlearn", copy, "--out", folder / "deltas" / f"{Path(copy).name}.safetensors", *training)
    mpu("aggregate", folder / "deltas", "--keys", keys, "--dtype", "float64", "--out", folder / "model")
    return update(base, folder / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("--public")
    parser.add_argument("--forget", type=Path, required=True)
    parser.add_argument("--retain", type=Path, required=True)
    parser.add_argument("--records", type=int, default=8, help="how many records of each set to use")
    parser.add_argument("--optim", default=",".join(RATES))
    parser.add_argument("--kappas", default="0.001,0.004")
    options = parser.parse_args()

    kappas = [float(kappa) for kappa in options.kappas.split(",")]
    heads = [*(f"κ = 0, {name}" for name in SETS), *(f"κ = {kappa:g}" for kappa in kappas), "slope"]
    print(f"| optimiser, rate | {' | '.join(heads)} |")
    print("|---" * (1 + len(heads)) + "|")
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        records: list[object] = []
        for name in ("forget", "retain"):
            lines = getattr(options, name).read_text().splitlines()[: options.records]
            (work / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
            records += [f"--{name}", work / f"{name}.jsonl"]
        reference = ["--public", options.public] if options.public else []
        # bfloat16 weights would round the values to compare, so the base is first published unchanged in float64.
        mpu("publish", options.base, "--copies", 2, "--kappa", 0, "--symmetries", "none", "--dtype", "float64",
            "--out", work, "--keys", work / "keys.bin")  # fmt: skip
        base = work / "copy_1"
        for optimizer in options.optim.split(","):
            training = [
                *records, "--algo", "graddiff", "--batch-size", 4, "--epochs", 3, "--precision", "float64",
                "--train-embeddings", "--optim", optimizer, "--lr", RATES[optimizer],
            ]  # fmt: skip
            folder = work / optimizer
            mpu("unlearn", base, "--out", folder / "clean.safetensors", *training)
            tensors = load_file(folder / "clean.safetensors")
            clean = np.concatenate([tensors[name].astype(np.float64).ravel() for name in sorted(tensors)])
            ways = [["--kappa", 0, "--symmetries", name] for name in SETS]
            ways += [[*reference, "--kappa", kappa, "--symmetries", "signed"] for kappa in kappas]
            errors = []
            for number, publish in enumerate(ways):
                found = aggregate(base, folder / str(number), publish, training)
                errors.append(float(np.linalg.norm(found - clean) / np.linalg.norm(clean)))
            slope = math.log(errors[-1] / errors[-2]) / math.log(kappas[-1] / kappas[-2])
            cells = [*(f"{error:.1e}" for error in errors), f"{slope:.2f}"]
            print(f"| {optimizer}, {RATES[optimizer]} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
