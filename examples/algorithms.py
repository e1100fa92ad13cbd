"""Every algorithm, with and without the protocol: what each lowers, and how close the aggregate comes to the clean run.

    python examples/algorithms.py mpu-demo/server/base --forget mpu-demo/client/forget.jsonl \
        --retain mpu-demo/client/retain.jsonl --work algorithms

For each algorithm and optimiser: `mpu unlearn` on the model itself (clean), and `mpu publish`, `mpu unlearn` on two
copies and `mpu aggregate` (κ = 0.01, the paper's symmetries, float32). Losses are per answer token over the whole sets.
"off" is how far the losses of the aggregate are from those of the clean run, "distance" how far its update is from
the clean one, relative. A finished row is kept in --work, so a stopped run goes on where it was. Prints a Markdown
table.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from mpu_cli.cli.main import main as mpu_main
from mpu_cli.client.loading import load
from mpu_cli.client.losses import ALGORITHMS
from mpu_cli.client.records import read_records
from mpu_cli.evaluation.encoding import Encoder
from mpu_cli.evaluation.scoring import score

OPTIMIZERS = ("adamw", "adamw-blockwise")


def mpu(*arguments: object) -> str:
    """Run one command in this process; returns its standard output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            mpu_main([str(argument) for argument in arguments])
        except SystemExit as stop:
            if stop.code:
                raise SystemExit(err.getvalue()) from stop
    return out.getvalue()


def measure(base: Path, delta: dict[str, torch.Tensor], options: argparse.Namespace) -> tuple[float, float]:
    """Loss per answer token on the forget and the retain set of base + delta."""
    model, tokenizer = load(base, torch.float32, "cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in delta:
                parameter.add_(delta[name])
    encoder = Encoder(tokenizer, "chat")
    losses = []
    for path in (options.forget, options.retain):
        items = [encoder.question(r.question, r.answer, r.place) for r in read_records(path)[:100]]
        losses.append(float(torch.cat([scores.losses for scores in score(model, items, batch_size=32)]).mean()))
    return losses[0], losses[1]


def row(base: Path, algorithm: str, optimizer: str, options: argparse.Namespace) -> dict[str, object]:
    """Run one algorithm with one optimiser, clean and through the protocol."""
    folder = options.work / f"{algorithm}-{optimizer}"
    training = [
        "--algo", algorithm, "--optim", optimizer, "--lr", options.lr, "--epochs", options.epochs, "--batch-size", 8,
        "--forget", options.forget, "--retain", options.retain, "--force",
        *(["--layer", options.layer] if algorithm == "rmu" else []),
    ]  # fmt: skip
    told = json.loads(mpu("unlearn", base, *training, "--json", "--out", folder / "clean.safetensors"))
    clean = load_file(folder / "clean.safetensors")
    reference = ["--reference", options.reference] if options.reference else []
    copies = mpu("publish", base, *reference, "--dtype", "float32", "--seed", 1, "--out", folder, "--keys",
                 folder / "keys.bin", "--force").split()  # fmt: skip
    for copy in copies:
        mpu("unlearn", copy, *training, "--out", folder / "deltas" / f"{Path(copy).name}.safetensors")
    mpu(
        "aggregate",
        folder / "deltas",
        "--keys",
        folder / "keys.bin",
        "--dtype",
        "float32",
        "--out",
        folder / "model",
        "--force",
    )
    before, after = load_file(base / "model.safetensors"), load_file(folder / "model/model.safetensors")
    aggregate = {name: after[name] - before[name].float() for name in before}
    steps = told["steps"]
    return {
        "algorithm": algorithm,
        "optimizer": optimizer,
        "term": [steps[0]["forget_term"], steps[-1]["forget_term"]],
        "clean": measure(base, clean, options),
        "mpu": measure(base, aggregate, options),
        "distance": float(
            sum((aggregate[n] - clean[n]).square().sum() for n in clean) ** 0.5
            / sum(clean[n].square().sum() for n in clean) ** 0.5
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("--reference")
    parser.add_argument("--forget", type=Path, required=True)
    parser.add_argument("--retain", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--lr", default="5e-5")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--layer", type=int, default=3, help="layer of rmu; the small models have few")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)

    forget, retain = measure(options.base, {}, options)
    print(f"Before: {forget:.3f} on the forget set, {retain:.3f} on the first 100 records of the retain set.\n")
    columns = ("forget term, first → last", "clean: forget, retain", "mpu: forget, retain", "off", "distance")
    print(f"| algorithm | optimiser | {' | '.join(columns)} |")
    print("|---" * (2 + len(columns)) + "|")
    for algorithm in ALGORITHMS:
        for optimizer in OPTIMIZERS:
            done = options.work / f"{algorithm}-{optimizer}.json"
            if not done.exists():
                done.write_text(json.dumps(row(options.base, algorithm, optimizer, options)))
            r = json.loads(done.read_text())
            cells = [
                f"{r['term'][0]:.3g} → {r['term'][1]:.3g}",
                *(f"{r[kind][0]:.3f}, {r[kind][1]:.3f}" for kind in ("clean", "mpu")),
                ", ".join(f"{mpu / clean - 1:+.1%}" for clean, mpu in zip(r["clean"], r["mpu"], strict=True)),
                f"{r['distance']:.2g}",
            ]
            print(f"| {algorithm} | {optimizer} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
