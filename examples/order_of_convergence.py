"""How far the aggregate is from the clean update as the noise grows, for three optimisers, as a plot.

    python examples/order_of_convergence.py mpu-demo/server/base --forget mpu-demo/client/forget.jsonl \
        --retain mpu-demo/client/retain.jsonl --out order.png

Runs `mpu publish`, `mpu unlearn`, `mpu aggregate` and `mpu invert` in a temporary folder for each point, in float64.
Under SGD and blockwise AdamW the error of the aggregate falls as κ² and that of one copy as κ; under AdamW neither.
Needs matplotlib (`pip install matplotlib`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
from safetensors.numpy import load_file

matplotlib.use("Agg")
from matplotlib import pyplot

OPTIMIZERS = {"sgd": "1e-2", "adamw-blockwise": "1e-4", "adamw": "1e-4"}
KAPPAS = np.geomspace(1e-3, 1e-2, 5)


def mpu(*arguments: object) -> list[str]:
    """Run one command; returns the paths it prints."""
    command = [sys.executable, "-m", "mpu_cli", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """‖found − expected‖ / ‖expected‖ over all tensors."""
    error = sum(float(np.square(found[name] - expected[name]).sum()) for name in expected)
    return (error / sum(float(np.square(tensor).sum()) for tensor in expected.values())) ** 0.5


def measure(base: Path, reference: list[str], training: list[str], folder: Path) -> tuple[list[float], list[float]]:
    """Errors of the aggregate and of the first copy alone, by κ."""
    mpu("unlearn", base, "--out", folder / "clean.safetensors", *training)
    clean = load_file(folder / "clean.safetensors")
    together, alone = [], []
    for kappa in KAPPAS:
        here = folder / f"{kappa:.5f}"
        keys = here / "keys.bin"
        noise = ["--dtype", "float64", "--seed", 1]  # the same noise at every scale
        copies = mpu("publish", base, *reference, "--kappa", kappa, *noise, "--out", here, "--keys", keys)
        for copy in copies:
            mpu("unlearn", copy, "--out", here / "deltas" / f"{Path(copy).name}.safetensors", *training)
        inverted = [load_file(p) for p in mpu("invert", here / "deltas", "--keys", keys, "--out", here / "inverted")]
        # α = 1 and 2: the harmonic weights are 2/3 and 1/3.
        together.append(distance({n: 2 / 3 * inverted[0][n] + 1 / 3 * inverted[1][n] for n in clean}, clean))
        alone.append(distance(inverted[0], clean))
    return together, alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("--reference")
    parser.add_argument("--forget", type=Path, required=True)
    parser.add_argument("--retain", type=Path, required=True)
    parser.add_argument("--records", type=int, default=8, help="how many of each to use")
    parser.add_argument("--out", type=Path, default=Path("order.png"))
    options = parser.parse_args()

    figure, axes = pyplot.subplots(1, len(OPTIMIZERS), figsize=(11, 4), sharey=True, layout="constrained")
    with tempfile.TemporaryDirectory() as scratch:
        training = ["--algo", "graddiff", "--batch-size", "4", "--epochs", "3", "--precision", "float64"]
        for name in ("forget", "retain"):
            lines = getattr(options, name).read_text().splitlines()[: options.records]
            (Path(scratch) / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
            training += [f"--{name}", str(Path(scratch) / f"{name}.jsonl")]
        reference = ["--reference", options.reference] if options.reference else []
        for plot, (optimizer, rate) in zip(axes, OPTIMIZERS.items(), strict=True):
            folder = Path(scratch) / optimizer
            together, alone = measure(options.base, reference, [*training, "--optim", optimizer, "--lr", rate], folder)
            plot.loglog(KAPPAS, alone, "o-", label="one copy alone")
            plot.loglog(KAPPAS, together, "s-", label="aggregate of two")
            for errors, order, style, label in ((alone, 1, ":", "∝ κ"), (together, 2, "--", "∝ κ²")):
                plot.loglog(KAPPAS, errors[0] * (KAPPAS / KAPPAS[0]) ** order, style, color="grey", label=label)
            slopes = [np.polyfit(np.log(KAPPAS), np.log(errors), 1)[0] for errors in (together, alone)]
            print(f"{optimizer:<16} slope of the aggregate {slopes[0]:.2f}, of one copy {slopes[1]:.2f}")
            for kappa, *errors in zip(KAPPAS, together, alone, strict=True):
                print(f"  κ = {kappa:.4f}  aggregate {errors[0]:.2e}  one copy {errors[1]:.2e}")
            plot.set_title(f"{optimizer}, rate {rate}")
            plot.set_xlabel("noise scale κ")
    axes[0].set_ylim(top=1)
    axes[0].set_ylabel("distance from the clean update")
    axes[0].legend()
    figure.savefig(options.out, dpi=150)
    print(options.out)


if __name__ == "__main__":
    main()
