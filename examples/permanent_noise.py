"""Can the first order of permanent noise be taken off without giving the noise away? Four ways, on a small model.

python examples/permanent_noise.py [DIR]

Teaches a small model (0.9 M parameters, made on the spot) about more people, publishes it with permanent noise of η
task vectors, unlearns three of those people (NPO), and prints losses per answer token of the copy and of the server's
model afterwards, on records to forget, to keep and unseen, and the update's distance from that without noise:

permanent   as it is
flat        noise that is smaller where the loss is sensitive (diagonal Fisher information on the server's own records)
corrected   minus what the same noise changes in unlearning some of the server's own records
rounds      half or a quarter of the epochs a round, each round with a new draw
mean        the mean of four updates with a draw each
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from protection import losses  # beside this file
from safetensors.torch import load_file, save_file

import mpu_cli
from mpu_cli.demo.model import make_model, make_people, make_tokenizer
from mpu_cli.lab.finetune import finetune
from mpu_cli.model.load import load
from mpu_cli.model.source import open_model
from mpu_cli.options.unlearning import Prompts, Training
from mpu_cli.records.encode import Encoding, pad
from mpu_cli.records.read import read_records

Weights = dict[str, torch.Tensor]
EPOCHS, SCALES, DRAWS = 12, (0.1, 0.3, 1.0), 2
UNLEARNING = {"algo": "npo", "lr": 1e-4, "batch_size": 5, "trust_copy": True}


class Trial:
    """The two models, the records, and what is done with them."""

    def __init__(self, folder: Path):
        self.folder = folder
        people = make_people(44, 0)
        groups = {
            "public": people[:24], "forget": people[24:27], "retain": people[27:40], "unseen": people[40:],
            "own forget": people[:3], "own retain": people[3:16],
        }  # fmt: skip
        self.files = {name: folder / f"{name}.jsonl" for name in groups}
        for name, those in groups.items():
            self.files[name].write_text("".join(json.dumps(row) + "\n" for person in those for row in person))
        known = [self.records(name) for name in ("public", "forget", "retain")]
        everything = [record for name in ("public", "forget", "retain", "unseen") for record in self.records(name)]
        make_model(known[0], make_tokenizer(everything), folder / "base", epochs=60, seed=0, on_step=lambda *_: None)
        training = Training(lr=3e-4, batch_size=10)
        finetune(
            open_model(str(folder / "base")),
            [*known[0], *known[1], *known[2]],
            training,
            Prompts(),
            epochs=20,
            out=folder / "target",
        )
        self.target = load_file(folder / "target/model.safetensors")
        public = load_file(folder / "base/model.safetensors")
        self.task = {name: tensor - public[name] for name, tensor in self.target.items()}

    def records(self, name: str) -> list:
        return list(read_records(str(self.files[name])))

    def store(self, weights: Weights) -> Path:
        """A model folder with these weights."""
        target = self.folder / "model"
        target.mkdir(exist_ok=True)
        for path in (self.folder / "target").iterdir():
            (target / path.name).write_bytes(path.read_bytes())
        save_file(weights, target / "model.safetensors", {"format": "pt"})
        return target

    def losses(self, weights: Weights) -> str:
        of = {name: self.files[name] for name in ("forget", "retain", "unseen")}
        return " / ".join(f"{loss:.2f}" for loss in losses(self.store(weights), of).values())

    def update(self, weights: Weights, of: str = "", seed: int = 0, epochs: int = EPOCHS) -> Weights:
        """What unlearning changes; ``of`` "own " for the server's own records."""
        delta = self.folder / "delta.safetensors"
        mpu_cli.unlearn(
            self.store(weights), out=delta, force=True, forget=str(self.files[of + "forget"]),
            retain=str(self.files[of + "retain"]), seed=seed, epochs=epochs, **UNLEARNING,
        )  # fmt: skip
        return load_file(delta)

    def noise(self, eta: float, draw: int, shape: Weights | None = None) -> Weights:
        generator = torch.Generator().manual_seed(draw)
        made = {}
        for name, change in self.task.items():
            normal = torch.randn(change.shape, generator=generator)
            if shape:
                normal *= shape[name] / shape[name].square().mean().sqrt()
            made[name] = normal * eta * change.square().mean().sqrt()
        return made

    def flat(self) -> Weights:
        """Where the loss on the server's own records is least sensitive: 1/√F, bounded."""
        model, tokenizer = load(open_model(str(self.folder / "target")), torch.float32, "cpu")
        fisher = {name: torch.zeros_like(tensor) for name, tensor in self.target.items()}
        for example in Encoding(tokenizer).encode(self.records("public")):
            model.zero_grad()
            model(**pad([example])).loss.backward()
            for name, parameter in model.named_parameters():
                if name in fisher:
                    fisher[name] += parameter.grad.square()
        return {name: 1 / (each + 0.1 * each.mean() + 1e-12).sqrt() for name, each in fisher.items()}

    def hidden(self, eta: float, shape: Weights) -> float:
        """What the best linear estimate of each weight's change leaves of it, if the scale of its noise is known."""
        left = whole = 0.0
        for name, change in self.task.items():
            squares = change.double().square()
            size = squares.mean()
            noise = (shape[name] / shape[name].square().mean().sqrt()).double().square() * eta**2 * size
            kept = size / (noise + size)
            left += float((squares * (1 - kept) ** 2 + noise * kept**2).sum())
            whole += float(squares.sum())
        return math.sqrt(left / whole)


def plus(one: Weights, other: Weights, times: float = 1.0) -> Weights:
    return {name: tensor + times * other[name] if name in other else tensor for name, tensor in one.items()}


def apart(one: Weights, other: Weights) -> float:
    squares = [
        (float((one[n] - t).double().square().sum()), float(t.double().square().sum())) for n, t in other.items()
    ]
    return math.sqrt(sum(a for a, _ in squares) / sum(b for _, b in squares))


def main(folder: Path) -> None:
    trial = Trial(folder)
    clean = trial.update(trial.target)
    print("| noise | draw | the copy | the model after | from clean |\n|---|---|---|---|---|")

    def show(name: str, draw: object, copy: Weights | None, change: Weights) -> None:
        known = trial.losses(copy) if copy else ""
        distance = f"{apart(change, clean):.0%}"
        print(f"| {name} | {draw} | {known} | {trial.losses(plus(trial.target, change))} | {distance} |", flush=True)

    for seed in range(3):
        show("none", f"seed {seed}", trial.target, trial.update(trial.target, seed=seed))
    flat, own = trial.flat(), trial.update(trial.target, of="own ")
    even = {name: torch.ones_like(change) for name, change in trial.task.items()}
    for eta in SCALES:
        hides = [f"{trial.hidden(eta, shape):.3f}" for shape in (even, flat)]
        print(f"noise of {eta:g}: an attacker is off by {hides[0]}, if it is flat by {hides[1]}", file=sys.stderr)
        changes = []
        for draw in range(4):
            copy = plus(trial.target, trial.noise(eta, draw))
            changes.append(trial.update(copy))
            if draw >= DRAWS:
                continue
            show(f"permanent {eta:g}", draw, copy, changes[-1])
            shaped = plus(trial.target, trial.noise(eta, draw, flat))
            show(f"flat {eta:g}", draw, shaped, trial.update(shaped))
            effect = plus(trial.update(copy, of="own "), own, -1.0)
            show(f"corrected {eta:g}", draw, None, plus(changes[-1], effect, -1.0))
        show(f"mean {eta:g}", "0 to 3", None, {n: sum(each[n] for each in changes) / 4 for n in clean})
        for rounds in (2, 4):
            model = dict(trial.target)
            for number in range(rounds):
                copy = plus(model, trial.noise(eta, 100 + number))
                model = plus(model, trial.update(copy, seed=number, epochs=EPOCHS // rounds))
            show(f"{rounds} rounds {eta:g}", "new ones", None, {n: model[n] - trial.target[n] for n in clean})


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
