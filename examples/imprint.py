"""Trap units in a copy, what a server reads off the delta, and whether the client's check sees them.

    python examples/imprint.py MODEL --forget FORGET --retain RETAIN [--count 8] [--units 352] [--layers 0,1]

Half of the FFN units of some layers become traps that add nothing to what the model computes ("Robbing the Fed", Fowl
et al. 2021, arXiv 2110.13057). For each training it prints the share of token positions of the records whose hidden
state stands in the delta (cosine above 0.999), and how many of the records a server that has candidates identifies:
those with more such positions than any of as many records that were not trained on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mpu_cli.files.reader import open_checkpoint
from mpu_cli.model.load import load
from mpu_cli.model.source import open_model
from mpu_cli.records.encode import Encoding
from mpu_cli.records.forms import Record
from mpu_cli.records.read import read_records

SAME = 0.999  # cosine from which a row of the delta is a hidden state
TRAININGS = {
    "1 step, adamw": ["--epochs", "1"],
    "1 step, adamw-blockwise": ["--epochs", "1", "--optim", "adamw-blockwise"],
    "1 step, sgd": ["--epochs", "1", "--optim", "sgd", "--lr", "1e-3"],
    "1 record a step, adamw": ["--epochs", "1", "--batch-size", "1"],
    "5 steps, adamw": ["--epochs", "5"],
    "20 steps, adamw": ["--epochs", "20"],
    "1 step, LoRA of rank 8": ["--epochs", "1", "--lora", "rank=8"],
    "5 steps, ε = 8": ["--epochs", "5", "--dp", "epsilon=8"],
}


@torch.no_grad()
def plant_traps(
    folder: Path, sequences: Sequence[list[int]], units: int, layers: Sequence[int] | None = None, down: float = 1e-3
) -> None:
    """Make FFN units of some layers (None: all) open at about one position each, without changing what the model
    computes beyond the units that they replace.

    Their ``up`` rows are zero, so they add nothing; the gradient of such a row is the FFN's input at the positions
    where its gate is open (Fowl et al. 2021, arXiv 2110.13057). Gates are matched filters for positions of
    ``sequences``, with a direction of constant product as their bias.
    """
    model, _ = load(open_model(str(folder)), torch.float32, "cpu")
    weights = load_file(folder / "model.safetensors")
    for number in range(len(model.model.layers)) if layers is None else layers:
        x = torch.cat(ffn_inputs(model, sequences, number))
        gram = x.T @ x
        bias = torch.linalg.solve(gram + 1e-3 * gram.trace() / len(gram) * torch.eye(len(gram)), x.sum(0))
        low = torch.linalg.cholesky(x.T.cov() + 1e-3 * x.var() * torch.eye(x.shape[1]))
        chosen = x[torch.linspace(0, len(x) - 1, units).long()] - x.mean(0)
        filters = torch.cholesky_solve(chosen.T, low).T
        values = x @ filters.T
        least = (values / (x @ bias)[:, None]).topk(2, dim=0).values[1]
        gates = filters - least[:, None] * bias
        gates *= 300 / (x @ gates.T).std(0)[:, None]
        prefix = f"model.layers.{number}.mlp"
        weights[f"{prefix}.gate_proj.weight"][:units] = gates
        weights[f"{prefix}.up_proj.weight"][:units] = 0
        column = torch.randn(len(weights[f"{prefix}.down_proj.weight"]), generator=torch.Generator().manual_seed(0))
        weights[f"{prefix}.down_proj.weight"][:, :units] = (down * column / column.norm())[:, None]
    metadata = open_checkpoint(folder / "model.safetensors").metadata
    save_file(weights, folder / "model.safetensors", metadata)


@torch.no_grad()
def ffn_inputs(model: torch.nn.Module, sequences: Sequence[list[int]], layer: int) -> list[torch.Tensor]:
    """The inputs of a layer's FFN, (length, width), for each sequence."""
    found: list[torch.Tensor] = []
    hook = model.model.layers[layer].mlp.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0][0].clone()))
    for ids in sequences:
        model(input_ids=torch.tensor([ids]))
    hook.remove()
    return found


@torch.no_grad()
def held(rows: torch.Tensor, states: Sequence[torch.Tensor], view: torch.Tensor | None = None) -> list[int]:
    """For each sequence of ``states``, (length, width), how many stand in a row of the delta, (units, width).

    ``view``, (r, width): what of a state LoRA's rows hold.
    """
    rows = torch.nn.functional.normalize(rows[rows.norm(dim=1) > 0], dim=1)
    found = []
    for each in states:
        seen = torch.nn.functional.normalize(each if view is None else each @ view.T, dim=1)
        found.append(int(((seen @ rows.T).abs().amax(1) > SAME).sum()) if len(rows) else 0)
    return found


def mpu(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "mpu_cli", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if check and done.returncode:
        raise SystemExit(done.stderr)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--forget", type=Path, required=True)
    parser.add_argument("--retain", type=Path, required=True)
    parser.add_argument("--count", type=int, default=8, help="records of each set, and as many that are not used")
    parser.add_argument("--units", type=int, default=352)
    parser.add_argument("--layers", default=None, help="comma-separated (default: all)")
    parser.add_argument("--down", type=float, default=1e-9)
    parser.add_argument("--only", nargs="*", default=None, help="names of trainings")
    options = parser.parse_args()
    layers = None if options.layers is None else [int(layer) for layer in options.layers.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        lines = {name: getattr(options, name).read_text(encoding="utf-8").splitlines() for name in ("forget", "retain")}
        for name, all_of_it in lines.items():
            (work / f"{name}.jsonl").write_text("\n".join(all_of_it[: options.count]) + "\n", encoding="utf-8")
        (work / "unused.jsonl").write_text("\n".join(lines["retain"][-2 * options.count :]) + "\n", encoding="utf-8")
        (work / "like.jsonl").write_text("\n".join(lines["retain"][-200 : -2 * options.count]) + "\n", encoding="utf-8")
        mpu("publish", options.model, "--copies", 2, "--kappa", 0, "--symmetries", "none", "--dtype", "float32",
            "--out", work, "--keys", work / "keys.bin")  # fmt: skip
        copy = work / "copy_1"
        _, tokenizer = load(open_model(str(copy)), torch.float32, "cpu")
        encode = Encoding(tokenizer).encode

        def ids(name: str) -> list[list[int]]:
            records: list[Record] = read_records(work / f"{name}.jsonl")
            return [example.ids for example in encode(records)]

        plant_traps(copy, ids("like"), options.units, layers, options.down)
        records = ["--forget", work / "forget.jsonl", "--retain", work / "retain.jsonl"]
        batch = ["--batch-size", options.count]
        checked = mpu("unlearn", copy, *records, "--epochs", 1, *batch, "--out", work / "x.safetensors", check=False)
        print("the client's check: " + (checked.stderr.strip().splitlines() or ["nothing"])[0])
        model, _ = load(open_model(str(copy)), torch.float32, "cpu")
        planted = list(range(len(model.model.layers))) if layers is None else layers
        fixed = len(_common([*ids("forget"), *ids("retain")]))
        states = {
            name: [[s[fixed:] for s in ffn_inputs(model, ids(name), layer)] for layer in planted]
            for name in ("forget", "retain", "unused")
        }
        for title, training in TRAININGS.items():
            if options.only is not None and title not in options.only:
                continue
            mpu("unlearn", copy, *records, *batch, "--lr", "1e-5", *training, "--trust-copy", "--force", "--out",
                work / "delta.safetensors")  # fmt: skip
            delta = load_file(work / "delta.safetensors")
            counts = {name: torch.zeros(len(states[name][0]), dtype=torch.long) for name in states}
            for number, layer in enumerate(planted):
                tensor = f"model.layers.{layer}.mlp.up_proj.weight"
                low_rank = f"{tensor}.lora_B" in delta
                rows = delta[f"{tensor}.lora_B" if low_rank else tensor][: options.units]
                view = delta[f"{tensor}.lora_A"] if low_rank else None
                for name in states:
                    counts[name] += torch.tensor(held(rows, states[name][number], view))
            used = torch.cat([counts["forget"], counts["retain"]])
            positions = sum(len(s) for name in ("forget", "retain") for s in states[name][0])
            most = int(counts["unused"].max())
            print(
                f"{title:<26}{int(used.sum()):>6} hidden states of {positions} positions in {len(planted)} layers, "
                f"{int((used > most).sum())} of {len(used)} records identified (unused ones have at most {most})",
                flush=True,
            )


def _common(sequences: Sequence[list[int]]) -> list[int]:
    """The tokens with which all sequences begin."""
    first = min(sequences, key=len)
    length = next((i for i in range(len(first)) if any(s[i] != first[i] for s in sequences)), len(first))
    return first[:length]


if __name__ == "__main__":
    main()
