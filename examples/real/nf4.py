"""How far LoRA on copies held in 4 bits is from LoRA on the model itself, for each set of symmetries.

    python examples/real/nf4.py MODEL FORGET RETAIN [--epochs 10] [--lr 2e-4] [--batch-size 8] [--algo graddiff]

A row for each set and noise: the distance of the aggregate from what training MODEL itself gives, relative to that, in
float32 and with the copies in 4 bits; and losses of the aggregate on both sets, per answer token.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from mpu_cli import aggregate, publish, unlearn
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.files.sealing import make_identity

SETTINGS = (("none", 0.0), ("signed", 0.0), ("signed", 0.01), ("all", 0.01))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("forget")
    parser.add_argument("retain")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--algo", default="graddiff")
    given = parser.parse_args()
    how = {
        "algo": given.algo, "forget": given.forget, "retain": given.retain, "epochs": given.epochs, "lr": given.lr,
        "lora_rank": given.rank, "batch_size": given.batch_size, "optim": "adamw-blockwise", "trust_copy": True,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_identity(folder / "identity.txt")
        clean = {}
        print("| set | κ | held in | from clean in float32 | from clean in 4 bits | forget | retain |")
        print("|---|---|---|---|---|---|---|")
        for held in (None, "nf4"):
            [done] = unlearn(given.model, out=folder / f"clean-{held}.safetensors", quantize=held, **how)
            clean[held] = products(folder / f"clean-{held}.safetensors")
            line("the model itself", 0, held, clean[held], clean, done.result.after, done.result.before)
        for symmetries, kappa in SETTINGS:
            place = folder / f"{symmetries}-{kappa}"
            publish(
                given.model, out=place, keys=place / "keys.bin", copies=2, kappa=kappa, symmetries=symmetries, seed=1,
                identity=folder / "identity.txt",
            )  # fmt: skip
            for held in (None, "nf4"):
                for k in (1, 2):
                    unlearn(place / f"copy_{k}", out=place / f"{held}/copy_{k}.safetensors", quantize=held, **how)
                aggregate(
                    place / f"{held}", base=given.model, keys=place / "keys.bin", out=place / f"model-{held}",
                    identity=folder / "identity.txt",
                )  # fmt: skip
                change = difference(place / f"model-{held}", given.model)
                [done] = unlearn(
                    place / f"model-{held}", out=place / "x.safetensors", force=True, **{**how, "epochs": 1}
                )
                line(symmetries, kappa, held, change, clean, done.result.before, None)


def products(delta: Path) -> dict[str, torch.Tensor]:
    held = open_checkpoint(delta)
    names = [name.removesuffix(".lora_A") for name in held.tensors if name.endswith(".lora_A")]
    return {name: held.tensor(f"{name}.lora_B") @ held.tensor(f"{name}.lora_A") for name in names}


def difference(after: Path, before: str) -> dict[str, torch.Tensor]:
    one, two = open_checkpoint(after), open_checkpoint(Path(before))
    return {name: one.tensor(name).float() - two.tensor(name).float() for name in one.tensors if name in two.tensors}


def distance(change: dict[str, torch.Tensor], clean: dict[str, torch.Tensor]) -> float:
    off = sum(float((change[name] - value).double().square().sum()) for name, value in clean.items())
    return (off / sum(float(value.double().square().sum()) for value in clean.values())) ** 0.5


def line(symmetries, kappa, held, change, clean, after, before) -> None:
    off = [f"{distance(change, clean[key]):.1%}" if key in clean else "" for key in (None, "nf4")]
    was = f" (was {before.forget:.3f} / {before.retain:.3f})" if before else ""
    losses = f"{after.forget:.3f}{was} | {after.retain:.3f}"
    print(f"| {symmetries} | {kappa:g} | {held or 'float32'} | {' | '.join(off)} | {losses} |", flush=True)


if __name__ == "__main__":
    main()
