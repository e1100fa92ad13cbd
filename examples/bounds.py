"""What a bound on the records costs: how much is forgotten, and what happens to the rest, for each way and ε.

python examples/bounds.py MODEL --forget F --public P --kept K --unseen U [--beside B] [--epsilon 1 2 4 8]
    [--ways unbounded surrogate public dp-sgd subspace] [--epochs N] [--surrogate-epochs N] [--precision mixed]
    [--scored N] [--out FILE]
python examples/bounds.py --out FILE --plot PICTURE

MODEL knows the records of F, P, K and B, and not those of U. P is public: it is the retain set of every training. K is
kept knowledge that no training sees; B are records about the people of F that were not handed in. Each way unlearns on
MODEL and gives a delta; a line is printed for each multiple of it that the server might add:

unbounded   the records themselves, no bound
surrogate   `mpu surrogate` at ε, and ordinary training on what it writes
public      records of U in place of F: what can be forgotten without looking at F at all
dp-sgd      --dp epsilon on all weights
subspace    steps of the Gaussian mechanism in the span of the gradients of U, each followed by training on P
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score

from mpu_cli.lab.accounting import noise_multiplier_for
from mpu_cli.measuring.encoding import Item, encoder_of
from mpu_cli.measuring.scoring import Scorer
from mpu_cli.model.load import load
from mpu_cli.model.source import open_model
from mpu_cli.options.unlearning import ChatTemplate, RecordFormat
from mpu_cli.records.read import read_records

STEPS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # multiples of the delta
DELTA = 1e-5
SETS = ("forget", "public", "kept", "unseen")
COST = 0.1  # nats that kept records may lose
SUBSPACE_STEPS, SUBSPACE_RANK, SUBSPACE_MOVE, REPAIRS = 10, 64, 0.6, 8


class Bench:
    """MODEL, the sets of records, and their losses under a change of the weights."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.network, tokenizer = load(open_model(arguments.model), torch.float32, "cpu")
        encoder = encoder_of(tokenizer, ChatTemplate(), None, None, "as trained")
        paths = {name: getattr(arguments, name) for name in (*SETS, "beside")}
        self.items: dict[str, list[Item]] = {
            name: _evenly_spaced(encoder.questions(read_records(path, RecordFormat())), arguments.scored)
            for name, path in paths.items()
            if path
        }
        self.records = len(read_records(arguments.forget, RecordFormat()))
        self.before = self.losses({}, 0.0)
        self.before_means = _means(self.before)

    def losses(self, change: dict[str, torch.Tensor], step: float) -> dict[str, list[float]]:
        """Mean −log p per answer token of each record, in nats, with ``step`` times ``change`` added."""
        state = self.network.state_dict()
        for name, delta in change.items():
            state[name].add_(delta, alpha=step)
        scorer = Scorer(self.network)
        losses = {}
        for name, items in self.items.items():
            scorer.prepare(items)
            losses[name] = [score.loss for score in scorer.score(items, batch_size=16)]
        for name, delta in change.items():
            state[name].sub_(delta, alpha=step)
        return losses

    def rows(self, way: str, epsilon: float | None, change: dict[str, torch.Tensor], **facts: Any) -> Iterator[dict]:
        """A row for each step: means of the losses, and how well the server ranks by the change of the losses."""
        for step in STEPS:
            after = self.losses(change, step)
            moved = {name: [b - a for a, b in zip(self.before[name], after[name], strict=True)] for name in after}
            yield {
                "model": self.arguments.name, "records": self.records, "way": way, "epsilon": epsilon,
                "delta": DELTA if epsilon else epsilon, "step": step, "before": self.before_means, **_means(after),
                "auc_kept": _auc(moved["forget"], moved["kept"]),
                "auc_beside": _auc(moved["forget"], moved["beside"]) if "beside" in moved else None, **facts,
            }  # fmt: skip


def _evenly_spaced(items: list[Item], most: int) -> list[Item]:
    return [items[i * len(items) // most] for i in range(most)] if len(items) > most else items


def _means(losses: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(sum(values) / len(values), 3) for name, values in losses.items()}


def _auc(positive: Sequence[float], negative: Sequence[float]) -> float:
    return round(float(roc_auc_score([1] * len(positive) + [0] * len(negative), [*positive, *negative])), 3)


def mpu(*command: object) -> dict[str, Any]:
    done = subprocess.run(["mpu", *map(str, command), "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def unlearned(arguments: argparse.Namespace, folder: Path, forget: object, *options: object) -> dict[str, torch.Tensor]:
    """The delta of an ordinary training on ``forget``, and on the public records as the retain set."""
    target = folder / "delta.safetensors"
    mpu("unlearn", arguments.model, "--forget", forget, "--retain", arguments.public, "--epochs", arguments.epochs,
        "--precision", arguments.precision, "--out", target, "--force", "--trust-copy", *options)  # fmt: skip
    return load_file(target)


def in_subspace(bench: Bench, epsilon: float) -> dict[str, torch.Tensor]:
    """Gaussian mechanism on the forget records' gradients in a basis of public gradients, with repairs on P."""
    network = bench.network
    weights = {n: p for n, p in network.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n}
    start = {name: weight.detach().clone() for name, weight in weights.items()}

    def gradient(items: Sequence[Item]) -> torch.Tensor:
        loss = torch.zeros(())
        for item in items:
            ids = torch.tensor([item.ids])
            logits = network(input_ids=ids, use_cache=False).logits[0, item.start - 1 : -1]
            loss = loss + torch.nn.functional.cross_entropy(logits, ids[0, item.start :]) / len(items)
        gradients = torch.autograd.grad(loss, [*weights.values()])
        return torch.cat([g.flatten() for g in gradients])

    def move(direction: torch.Tensor, size: float) -> None:
        pieces = direction.split([w.numel() for w in weights.values()])
        for weight, piece in zip(weights.values(), pieces, strict=True):
            weight.data.add_(piece.view_as(weight), alpha=size)

    with torch.enable_grad():
        public = torch.stack([gradient([item]) for item in bench.items["unseen"][:SUBSPACE_RANK]])
        basis = torch.linalg.qr(public.T).Q  # (weights, rank)
        sigma = noise_multiplier_for(epsilon, DELTA, sample_rate=1.0, steps=SUBSPACE_STEPS)
        generator = torch.Generator().manual_seed(0)
        for _ in range(SUBSPACE_STEPS):
            coordinates = torch.stack([basis.T @ gradient([item]) for item in bench.items["forget"]])
            unit = torch.nn.functional.normalize(coordinates, dim=1)  # every record has the length of the clip
            noisy = unit.sum(0) + sigma * torch.randn(unit.shape[1], generator=generator)
            move(basis @ torch.nn.functional.normalize(noisy, dim=0), SUBSPACE_MOVE)
            for start_at in torch.randperm(len(bench.items["public"]) - 16, generator=generator)[:REPAIRS].tolist():
                repair = gradient(bench.items["public"][start_at : start_at + 16])
                move(torch.nn.functional.normalize(repair, dim=0), -SUBSPACE_MOVE / REPAIRS)
    change = {name: weight.detach() - start[name] for name, weight in weights.items()}
    for name, weight in weights.items():
        weight.data.copy_(start[name])
    return change


def ways(bench: Bench, folder: Path) -> Iterator[dict]:
    arguments = bench.arguments
    if "unbounded" in arguments.ways:
        yield from bench.rows("unbounded", None, unlearned(arguments, folder, arguments.forget))
    if "public" in arguments.ways:
        yield from bench.rows("public", 0.0, unlearned(arguments, folder, arguments.unseen))
    for epsilon in arguments.epsilon:
        if "surrogate" in arguments.ways:
            surrogates = folder / "surrogate.jsonl"
            made = mpu("surrogate", arguments.model, "--forget", arguments.forget, "--dp",
                f"epsilon={epsilon},delta={DELTA}", "--public", arguments.public, "--out", surrogates,
                "--force")  # fmt: skip
            facts = {"terms": len(made["terms"]), "covered": made["covered_records"], "threshold": made["threshold"]}
            epochs = ("--epochs", arguments.surrogate_epochs or arguments.epochs)
            change = unlearned(arguments, folder, surrogates, "--public-records", *epochs)
            yield from bench.rows("surrogate", epsilon, change, **facts)
        if "dp-sgd" in arguments.ways:
            options = ("--dp", f"epsilon={epsilon},delta={DELTA}")
            yield from bench.rows("dp-sgd", epsilon, unlearned(arguments, folder, arguments.forget, *options))
        if "subspace" in arguments.ways:
            yield from bench.rows("subspace", epsilon, in_subspace(bench, epsilon))


def curves_of(rows: list[dict]) -> dict[tuple[str, int, str, float | None], list[tuple[float, float]]]:
    """For each model, number of records, way and ε: (loss added to kept records, to records to forget), by step."""
    curves: dict[tuple[str, int, str, float | None], list[tuple[float, float]]] = {}
    for row in rows:
        added = tuple(row[name] - row["before"][name] for name in ("kept", "forget"))
        curves.setdefault((row["model"], row["records"], row["way"], row["epsilon"]), [(0.0, 0.0)]).append(added)
    return curves


def table(rows: list[dict]) -> list[str]:
    """What is forgotten where kept records have lost COST, between the steps by linear interpolation; as Markdown."""
    lines = ["| model | records | way | ε | δ | forgotten, in nats |", "|---|---|---|---|---|---|"]
    deltas = {(row["model"], row["records"], row["way"], row["epsilon"]): row["delta"] for row in rows}
    for (model, records, way, epsilon), points in curves_of(rows).items():
        costs, gains = zip(*points, strict=True)
        reached = f"{np.interp(COST, np.maximum.accumulate(costs), gains):.2f}"
        if max(costs) < COST:
            reached = f"{max(gains):.2f}, where they lost {max(costs):.3f}"
        delta = deltas[model, records, way, epsilon]
        bound = "– | –" if epsilon is None else f"{epsilon:g} | {delta:g}"
        lines.append(f"| {model} | {records} | {way} | {bound} | {reached} |")
    return lines


def draw(rows: list[dict], path: str) -> None:
    """Forgotten against the cost to what is kept, in nats per answer token: a panel for each model and number."""
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row["model"], row["records"]) for row in rows))
    figure, all_axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False)
    labels = {"unbounded": "no bound", "public": "without the records (ε = 0)", "dp-sgd": "DP-SGD"}
    labels |= {"surrogate": "surrogate", "subspace": "public subspace"}
    for axes, panel in zip(all_axes[0], panels, strict=True):
        for (*where, way, epsilon), points in curves_of(rows).items():
            if tuple(where) == panel:
                label = labels[way] + (f", ε = {epsilon:g}" if epsilon else "")
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        axes.axvline(COST, color="grey", linewidth=0.8, linestyle=":")
        axes.set(
            title=f"{panel[0]} parameters, {panel[1]} records", xlabel="loss added to kept records", xlim=(-0.02, 0.5)
        )
        axes.set_ylabel("loss added to records to forget")
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    for name in SETS:
        parser.add_argument(f"--{name}")
    parser.add_argument("--beside")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--ways", nargs="+", default=["unbounded", "public", "surrogate", "dp-sgd", "subspace"])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--surrogate-epochs", type=int, help="of training on surrogate records (default: --epochs)")
    parser.add_argument("--precision", default="float32", help="of training, as for mpu unlearn")
    parser.add_argument("--scored", type=int, default=1000, help="records of each set that are scored, at most")
    parser.add_argument("--name", default="", help="of MODEL, in the rows")
    parser.add_argument("--plot", help="draw the rows of --out here, print their table, and measure nothing")
    parser.add_argument("--out", help="append the rows to this file, as JSON lines")
    arguments = parser.parse_args()
    if arguments.plot:
        rows = [json.loads(line) for line in Path(arguments.out).read_text(encoding="utf-8").splitlines()]
        draw(rows, arguments.plot)
        print("\n".join(table(rows)))
        return
    if missing := [name for name in ("model", *SETS) if not getattr(arguments, name)]:
        parser.error(f"needs {', '.join(missing)}")
    torch.set_grad_enabled(False)
    bench = Bench(arguments)
    print(json.dumps({"model": arguments.name, "way": "before", **bench.before_means}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for row in ways(bench, Path(folder)):
            print(json.dumps(row), flush=True)
            if arguments.out:
                with Path(arguments.out).open("a", encoding="utf-8") as log:
                    log.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
