"""How far the aggregate is from the clean update as the noise grows, for one to four copies and three optimisers.

    python examples/order_of_convergence.py mpu-demo/models/target --forget mpu-demo/records/forget.jsonl \
        --retain mpu-demo/records/retain.jsonl --out order.png

Runs `mpu publish`, `mpu unlearn` and `mpu invert` in a temporary folder for each noise scale, in float64, with copies
at the nodes 1, −1, 1.5, −1.5. The aggregate of m copies uses the first m, whose nodes are the defaults for m. With SGD
and blockwise AdamW its error falls as κ^m and that of a single copy as κ; AdamW's step is close to the sign of the
gradient, which is not smooth.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
from fidelity import mpu
from safetensors.numpy import load_file

from mpu_cli.protocol.noise import Extrapolated

matplotlib.use("Agg")
from matplotlib import pyplot

OPTIMIZERS = {"sgd": "1e-2", "adamw-blockwise": "1e-4", "adamw": "1e-4"}
NODES = Extrapolated.default(4).factors
MARKS = ("o", "s", "^", "D")


def flat(path: Path) -> np.ndarray:
    """All tensors of a delta in one vector, sorted by name."""
    tensors = load_file(path)
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


def measure(
    base: Path, publishing: list[str], training: list[str], kappas: np.ndarray, folder: Path
) -> dict[int, list[float]]:
    """Relative errors for each κ: key 1 is the first copy alone, key m the aggregate of the first m copies."""
    mpu("unlearn", base, "--out", folder / "clean.safetensors", *training)
    clean = flat(folder / "clean.safetensors")
    errors: dict[int, list[float]] = {m: [] for m in range(1, len(NODES) + 1)}
    for kappa in kappas:
        here = folder / f"{kappa:.5f}"
        keys = here / "keys.bin"
        noise = ["--noise", f"extrapolate:{','.join(map(str, NODES))}", "--seed", 1]  # the same at every scale
        copies = mpu("publish", base, *publishing, "--kappa", kappa, *noise, "--out", here, "--keys", keys).split()
        for copy in copies:
            mpu("unlearn", copy, "--out", here / "deltas" / f"{Path(copy).name}.safetensors", *training)
        inverted = mpu("invert", here / "deltas", "--keys", keys, "--out", here / "inverted").split()
        deltas = np.stack([flat(Path(path)) for path in inverted])
        for m, found in errors.items():
            weights = Extrapolated(NODES[:m]).weights.numpy() if m > 1 else np.ones(1)
            found.append(float(np.linalg.norm(weights @ deltas[:m] - clean) / np.linalg.norm(clean)))
        shutil.rmtree(here)
    return errors


def draw(kappas: np.ndarray, measured: dict[str, dict[int, list[float]]], out: Path) -> None:
    """One panel per optimiser: errors over κ, with lines that show the expected slopes."""
    figure, axes = pyplot.subplots(
        1, len(measured), figsize=(11, 4.4), sharey=True, squeeze=False, layout="constrained"
    )
    for plot, (optimizer, errors) in zip(axes[0], measured.items(), strict=True):
        for m, found in errors.items():
            slope = np.polyfit(np.log(kappas), np.log(found), 1)[0]
            label = "one copy alone" if m == 1 else f"aggregate of {m}"
            plot.loglog(kappas, found, f"{MARKS[m - 1]}-", label=f"{label}: slope {slope:.2f}")
            plot.loglog(kappas, found[-1] * (kappas / kappas[-1]) ** m, ":", color="grey", linewidth=1)
            print(f"{optimizer:<16} {label:<16} slope {slope:.2f}  " + "  ".join(f"{e:.1e}" for e in found))
        plot.set_title(f"{optimizer}, rate {OPTIMIZERS[optimizer]}")
        plot.set_xlabel("noise scale κ (dotted: κ, κ², κ³, κ⁴)")
        plot.set_xticks(kappas, [f"{kappa:g}" for kappa in kappas])
        plot.minorticks_off()
        plot.legend(fontsize=8, loc="lower right")
    axes[0, 0].set_ylim(1e-15 if max(kappas) < 0.01 else 1e-6, 1)  # room for the legends
    axes[0, 0].set_ylabel("distance from the clean update")
    figure.savefig(out, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("--public")
    parser.add_argument("--forget", type=Path, required=True)
    parser.add_argument("--retain", type=Path, required=True)
    parser.add_argument("--records", type=int, default=8, help="how many records of each set to use")
    parser.add_argument("--kappas", default="0.0005,0.001,0.002,0.004")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help="of " + ", ".join(OPTIMIZERS))
    parser.add_argument("--precision", default="float64", help="of training, and the dtype of the copies")
    parser.add_argument("--out", type=Path, default=Path("order.png"))
    options = parser.parse_args()

    kappas = np.array([float(kappa) for kappa in options.kappas.split(",")])
    with tempfile.TemporaryDirectory() as scratch:
        training = ["--algo", "graddiff", "--batch-size", "4", "--epochs", "3", "--precision", options.precision]
        for name in ("forget", "retain"):
            lines = getattr(options, name).read_text().splitlines()[: options.records]
            (Path(scratch) / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
            training += [f"--{name}", str(Path(scratch) / f"{name}.jsonl")]
        public = ["--public", options.public] if options.public else []
        measured = {}
        for optimizer in options.optimizers.split(","):
            chosen = [*training, "--train-embeddings", "--optim", optimizer, "--lr", OPTIMIZERS[optimizer]]
            stored = [*public, "--dtype", options.precision]
            measured[optimizer] = measure(options.base, stored, chosen, kappas, Path(scratch) / optimizer)
    draw(kappas, measured, options.out)
    print(options.out)


if __name__ == "__main__":
    main()
