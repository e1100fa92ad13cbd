"""What noise hides of a model, what it leaves, and what it costs: tables and figure in docs.

python examples/protection.py TARGET --public MODEL --forget FILE --retain FILE --unseen FILE --out protection.jsonl

For each setting: publish, measure a copy, unlearn on every copy, aggregate, and measure the server's model. Then the
step that the server takes along the update is chosen so that the records to be forgotten are as unlikely as they are to
the public model, which never saw them, and that model is measured too: settings are compared at equal forgetting. At
last half of the records to be forgotten are learned again, and the other half measured.

A line of JSON each; those that are there are not run again, so it can be stopped, and `--share 1/2` and `--share 2/2`
run in two processes. `mpu audit` says what a client recovers. Set the training with
`--train lr=3e-5,epochs=4,batch_size=8`.

python examples/protection.py --table smollm2.jsonl toy.jsonl --plot protection.png

prints what was measured as tables, and draws it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from matplotlib.axes import Axes
from scipy.optimize import brentq

import mpu_cli
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.lab.plots import PALETTE, make_figure, write_figure
from mpu_cli.model.load import load
from mpu_cli.model.source import open_model
from mpu_cli.records.encode import Encoding, pad
from mpu_cli.records.read import read_records

AT_ONCE = 8  # records
SETS = ("forget", "retain", "unseen")
LARGEST_STEP, RELEARNING_RATE = 16, 1e-5
OPTIONS = {"alpha": "α =", "weight_decay": "weight decay"}
ROUGE = ("forget_Q_A_ROUGE", "retain_Q_A_ROUGE")
CLEAN = {"copies": 1, "kappa": 0.0, "symmetries": "none"}


def settings(noises: list[float]) -> Iterator[dict]:
    """What is published, and how it is unlearned, the lossiest copies first; the first ones say most."""

    def clean(**others: object) -> dict:
        return {"publish": CLEAN, **others}

    def permanent(scale: float, draw: int = 1, **others: object) -> dict:
        return {"publish": {"copies": 1, "kappa": 0.0, "permanent_noise": scale, "seed": draw}, **others}

    lora = {"lora_rank": 8, "lr": 3e-4}
    largest, smaller = noises[:2]
    heavy = {"alpha": 5.0}  # more weight on what is to be kept
    yield clean(seed=0)
    yield permanent(largest)
    yield permanent(smaller)
    yield permanent(largest, 2)
    yield clean(seed=1)
    yield permanent(smaller, 2)
    yield clean(**heavy)
    yield permanent(largest, **heavy)
    yield clean(seed=1, **heavy)
    yield permanent(largest, 2, **heavy)
    yield clean(algo="graddiff")
    yield permanent(largest, algo="graddiff")
    yield clean(**lora)
    yield permanent(largest, **lora)
    yield permanent(smaller, 2, **heavy)
    yield {"publish": {"copies": 3, "kappa": 1.0, "seed": 1}}
    yield permanent(largest, 3)
    yield clean(seed=2)
    yield permanent(smaller, 3)
    yield clean(algo="simnpo")
    yield permanent(largest, algo="simnpo")
    for algo in ("undial", "rmu"):
        yield clean(algo=algo)
        yield permanent(largest, algo=algo)
    yield clean(weight_decay=1.0)
    yield {"publish": {"copies": 3, "kappa": 1.0, "permanent_noise": largest, "seed": 1}}
    yield permanent(smaller, algo="graddiff")
    yield permanent(smaller, **lora)
    yield from (permanent(scale) for scale in noises[2:])
    yield {"publish": {"copies": 2, "kappa": 1.0, "noise": "zero-sum", "symmetries": "paper", "seed": 1}}
    yield {"publish": {"copies": 3, "kappa": 0.01, "seed": 1}}


class Scored:
    """A model in memory on the way from ``before`` along an update, and its losses per answer token, in nats."""

    def __init__(self, folder: Path, sets: dict[str, Path]):
        self.model, tokenizer = load(open_model(str(folder)), torch.float32, "cpu")
        encoding = Encoding(tokenizer)
        self.batches = {}
        for name, path in sets.items():
            examples = sorted(encoding.encode(read_records(path)), key=lambda example: len(example.ids))
            self.batches[name] = [pad(examples[i : i + AT_ONCE]) for i in range(0, len(examples), AT_ONCE)]
        self.before = {name: held.detach().clone() for name, held in self.model.named_parameters()}
        self.update: dict[str, torch.Tensor] = {}

    def towards(self, folder: Path) -> None:
        """Go to the model in ``folder``; its change is the update."""
        own = {
            name: held.detach()
            for name, held in load(open_model(str(folder)), torch.float32, "cpu")[0].named_parameters()
        }
        self.update = {name: held - self.before[name] for name, held in own.items()}
        self.go(1.0)

    @torch.no_grad()
    def go(self, step: float) -> None:
        for name, held in self.model.named_parameters():
            held.copy_(self.before[name])
            if self.update and step:
                held.add_(self.update[name], alpha=step)

    def loss(self, name: str) -> torch.Tensor:
        total, count = torch.zeros(()), 0
        for batch in self.batches[name]:
            one, tokens = self._of(batch)
            total, count = total + one, count + tokens
        return total / count

    def _of(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        labels = batch["labels"][:, 1:]
        states = self.model.base_model(
            **{key: value for key, value in batch.items() if key != "labels"}
        ).last_hidden_state
        asked = labels >= 0
        logits = self.model.get_output_embeddings()(states[:, :-1][asked])
        return torch.nn.functional.cross_entropy(logits, labels[asked], reduction="sum"), int(asked.sum())

    @torch.no_grad()
    def losses(self, *names: str) -> dict[str, float]:
        return {name: float(self.loss(name)) for name in names}

    def step_to(self, level: float) -> float | None:
        """The step at which the loss on the records to be forgotten is ``level``; None if none up to 16 reaches it."""
        known: dict[float, float] = {}

        def above(step: float) -> float:
            if step not in known:
                self.go(step)
                known[step] = self.losses("forget")["forget"] - level
            return known[step]

        step = 1.0
        while above(step) < 0:
            step *= 2
            if step > LARGEST_STEP:
                return None
        while above(step / 2) > 0 and step > 1 / LARGEST_STEP:
            step /= 2
        return float(brentq(above, step / 2, step, xtol=0.02 * step))

    def relearned(self) -> list[float]:
        """Losses on one half of the forgotten records after 0, 2, 4 and 8 steps on the other half."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=RELEARNING_RATE)
        batches = self.batches["first"]
        found = [self.losses("second")["second"]]
        for step in range(8):
            optimizer.zero_grad()
            total, count = self._of(batches[step % len(batches)])
            (total / count).backward()
            optimizer.step()
            if step + 1 in (2, 4, 8):
                found.append(self.losses("second")["second"])
        optimizer.zero_grad()
        return found


def rouge(folder: Path, sets: dict[str, Path], scratch: Path) -> dict[str, float]:
    """ROUGE-L recall of a model's answers."""
    of = {"forget": str(sets["forget"]), "retain": str(sets["retain"])}
    result = mpu_cli.evaluate(folder, benchmark="qa", metrics=ROUGE, out=scratch / "eval.json", force=True, **of)
    return {name.partition("_")[0] + "_rouge": form["agg_value"] for name, form in result.forms.items()}


def change(model: Path, target: Path) -> Iterator[tuple[str, torch.Tensor]]:
    after, before = open_checkpoint(model), open_checkpoint(target)
    for name in before.tensors:
        yield name, after.tensor(name).float() - before.tensor(name).float()


def distance(model: Path, clean: Path, target: Path) -> float:
    """‖Δ − Δ_clean‖ / ‖Δ_clean‖."""
    apart = size = 0.0
    for (_, one), (_, other) in zip(change(model, target), change(clean, target), strict=True):
        apart += float((one - other).double().square().sum())
        size += float(other.double().square().sum())
    return (apart / size) ** 0.5


def play(
    setting: dict, given: argparse.Namespace, training: dict, sets: dict[str, Path], level: float, scratch: Path
) -> dict:
    """One setting from publication to the server's model, which is left in ``scratch/after``."""
    target, began = Path(given.target), time.time()
    own = {name: value for name, value in setting.items() if name != "publish"}
    published = mpu_cli.publish(
        target, given.public, out=scratch, keys=scratch / "keys.bin", dtype="float32", force=True,
        **setting["publish"],
    )  # fmt: skip
    found = {}
    if setting["publish"] != CLEAN:
        copy = Path(published.copies[0])
        found["copy"] = Scored(copy, sets).losses(*SETS) | rouge(copy, sets, scratch)
    for copy in published.copies:
        mpu_cli.unlearn(
            copy, out=scratch / "deltas" / f"{Path(copy).name}.safetensors", force=True, forget=str(sets["forget"]),
            retain=str(sets["train"]), **(training | own),
        )  # fmt: skip
    trained = round(time.time() - began)

    def aggregate(step: float) -> float:
        return mpu_cli.aggregate(
            scratch / "deltas", keys=scratch / "keys.bin", base=target, out=scratch / "after", force=True,
            dtype="float32", step=step,
        ).error.relative  # fmt: skip

    estimate = aggregate(1.0)
    scored = Scored(target, sets)
    scored.towards(scratch / "after")
    found |= {"after": scored.losses(*SETS), "estimate": estimate}
    if step := scored.step_to(level):
        scored.go(step)
        equal = {"step": step} | scored.losses(*SETS)
        equal["relearned"] = scored.relearned()
        aggregate(step)
        found["equal"] = equal | rouge(scratch / "after", sets, scratch)
        aggregate(1.0)
    return found | {"seconds": round(time.time() - began), "training": trained}


def name_of(setting: dict) -> str:
    """What the client gets, in words."""
    noise = setting["publish"]
    own, permanent, copies = noise.get("kappa", 0.0), noise.get("permanent_noise", 0.0), noise["copies"]
    words = [f"{copies} copies, κ = {own:g}" + (" (zero-sum)" if "noise" in noise else "")] if own else []
    words += [f"permanent {permanent:g}"] if permanent else []
    return ", ".join(words) or "the model itself"


def way_of(setting: dict) -> str:
    """How it is unlearned, in words."""
    words = [setting.get("algo", "npo")] + (["LoRA"] if "lora_rank" in setting else [])
    return ", ".join(words + [f"{name} {setting[key]:g}" for key, name in OPTIONS.items() if key in setting])


def number_of(setting: dict) -> int:
    """Which draw of the noise it is, or order of the records."""
    return setting.get("seed", 0) + 1 if name_of(setting) == "the model itself" else setting["publish"].get("seed", 1)


def played(lines: list[dict]) -> list[dict]:
    """The settings that were played, those that are alike together."""
    own = [line for line in lines if "setting" in line]
    ways = list(dict.fromkeys(way_of(line["setting"]) for line in own))
    names = list(dict.fromkeys(name_of(line["setting"]) for line in own))
    return sorted(own, key=lambda line: (ways.index(way_of(line["setting"])), names.index(name_of(line["setting"]))))


def table(lines: list[dict]) -> str:
    """All lines as Markdown. Losses are of records to be forgotten / to be kept, ROUGE likewise."""

    def pair(of: dict | None, names: tuple[str, str], digits: int = 2) -> str:
        return " / ".join(f"{of[name]:.{digits}f}" for name in names) if of else "–"

    losses, rouges = ("forget", "retain"), ("forget_rouge", "retain_rouge")
    rows = [["the client gets", "algorithm", "draw", "copy: losses", "ROUGE", "after, step 1", "step", "kept: loss",
             "ROUGE", "relearned", "update from clean"]]  # fmt: skip
    for name in ("before", "public"):
        for line in (line[name] for line in lines if name in line):
            again = f"{line['relearned'][0]:.2f} → {line['relearned'][-1]:.2f}"
            rows.append([f"*{name}*", "", "", pair(line, losses), pair(line, rouges), "", "", "", "", again, ""])
    for line in played(lines):
        equal, copy = line.get("equal"), line.get("copy")
        at_level = ["none", "–", "–", "–"]
        if equal:
            again = f"{equal['relearned'][0]:.2f} → {equal['relearned'][-1]:.2f}"
            at_level = [f"{equal['step']:.2g}", f"{equal['retain']:.3f}", pair(equal, rouges), again]
        rows.append([
            name_of(line["setting"]), way_of(line["setting"]), str(number_of(line["setting"])), pair(copy, losses),
            pair(copy, rouges), pair(line["after"], losses), *at_level,
            f"{line['distance']:.0%}" if "distance" in line else "–",
        ])  # fmt: skip
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(files: list[Path], path: Path) -> None:
    """What unlearning costs at equal forgetting: a panel for each file, a row for each setting, a dot for each draw."""

    def panel(file: Path) -> Callable[[Axes], None]:
        lines = _done(file)
        [before] = [line["before"]["retain"] for line in lines if "before" in line]
        found: dict[tuple[str, str], list[float]] = {}
        for line in played(lines):
            if "equal" in line:
                key = way_of(line["setting"]), name_of(line["setting"])
                found.setdefault(key, []).append(line["equal"]["retain"])

        def drawn(axes: Axes) -> None:
            for row, ((_, name), values) in enumerate(found.items()):
                colour = PALETTE[6 if name == "the model itself" else 0]
                axes.scatter(values, [-row] * len(values), color=colour, s=18)
            axes.axvline(before, color=PALETTE[7], linewidth=0.8)
            axes.set_yticks([-row for row in range(len(found))], [f"{way}: {name}" for way, name in found], fontsize=7)
            axes.set_xscale("log")
            axes.set_xlabel("loss per answer token on what is to be kept\n(line: before unlearning)", fontsize=8)
            axes.set_title(file.stem, fontsize=9)

        return drawn

    figure = make_figure([panel(file) for file in files], None)
    write_figure(figure, path, "Unlearning on copies", header=[], rows=[], force=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?")
    for name in ("public", "forget", "retain", "unseen"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", default="protection.jsonl")
    parser.add_argument("--noise", default="10,3,1", help="scales of permanent noise, two or more")
    parser.add_argument("--level", type=float, help="loss to compare at, in nats (default: that of the public model)")
    parser.add_argument("--share", default="1/1", help="which part of the settings, of how many")
    parser.add_argument("--train", default="lr=3e-5,epochs=4,batch_size=8")
    given = parser.parse_args()
    if given.table:
        for file in given.table:
            print(table(_done(file)), end="\n\n")
        if given.plot:
            draw(given.table, given.plot)
        return
    if not all((given.target, given.public, given.forget, given.retain, given.unseen)):
        parser.error("TARGET, --public, --forget, --retain and --unseen are needed")
    training = {"algo": "npo"} | {
        name: float(value) if name == "lr" else int(value)
        for name, value in (part.split("=") for part in given.train.split(","))
    }
    noises = [float(scale) for scale in given.noise.split(",")]
    out = Path(given.out)
    part, parts = map(int, given.share.split("/"))
    clean = Path(f"{out}.clean").absolute()  # updates without noise, by what else decides them
    with tempfile.TemporaryDirectory(dir=out.absolute().parent) as scratch:
        sets = {"forget": Path(given.forget), "unseen": Path(given.unseen), "train": Path(given.retain)}
        lines = sets["forget"].read_text().splitlines(keepends=True)
        half = len(lines) // 2
        kept = sets["train"].read_text().splitlines(keepends=True)[: len(lines)]
        for name, taken in (("retain", kept), ("first", lines[:half]), ("second", lines[half:])):
            sets[name] = Path(scratch) / f"{name}.jsonl"
            sets[name].write_text("".join(taken))
        done = _done(out)
        if not any("before" in line for line in done):
            for name in ("target", "public"):
                folder = Path(getattr(given, name))
                scored = Scored(folder, sets)
                found = scored.losses(*SETS) | {"relearned": scored.relearned()} | rouge(folder, sets, Path(scratch))
                _note(out, {"before" if name == "target" else "public": found})
        [as_public] = [line["public"]["forget"] for line in _done(out) if "public" in line]
        level = given.level or as_public
        for i, setting in enumerate(settings(noises)):
            if i % parts != part - 1 or any(line.get("setting") == setting for line in _done(out)):
                continue
            folder = Path(scratch) / "one"
            folder.mkdir()
            line = {"setting": setting} | play(setting, given, training, sets, level, folder)
            compared = clean / way_of(setting).replace(", ", "-").replace("α = ", "alpha-").replace(" ", "-")
            if setting["publish"] == CLEAN and not compared.exists():
                compared.parent.mkdir(exist_ok=True)
                (folder / "after").rename(compared)
            elif compared.exists():
                line["distance"] = distance(folder / "after", compared, Path(given.target))
            _note(out, line)
            shutil.rmtree(folder)


def _done(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _note(out: Path, line: dict) -> None:
    print(json.dumps(line), flush=True)
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
