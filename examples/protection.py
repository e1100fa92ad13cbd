"""What noise hides of a model, what it leaves, and what it costs: the table and figure of docs/protection.md.

python examples/protection.py TARGET --pretrained MODEL --forget FILE --retain FILE --unseen FILE --out protection.jsonl

For each setting: publish, measure a copy (losses per answer token, ROUGE of its answers), unlearn on every copy,
aggregate, and measure the server's model. A line of JSON each; those that are there are not run again, so it can be
stopped. `mpu audit` says what a client recovers. Set the training with `--train lr=3e-5,epochs=4,batch_size=8`.

python examples/protection.py --table protection.jsonl --plot protection.png

prints what was measured as a table, and draws it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from matplotlib.axes import Axes

from mpu_cli import api
from mpu_cli.checkpoint.reader import open_checkpoint
from mpu_cli.figures import PALETTE, make_figure, write_figure
from mpu_cli.models.loading import load
from mpu_cli.models.source import open_model
from mpu_cli.records.encoding import Encoding, pad
from mpu_cli.records.reading import read_records

AT_ONCE = 8  # records
ROUGE = ("forget_Q_A_ROUGE", "retain_Q_A_ROUGE")
CLEAN = {"copies": 1, "kappa": 0.0, "symmetries": "none"}


def settings() -> Iterator[dict]:
    """What is published, and how it is unlearned; the first ones say most."""

    def permanent(scale: float, draw: int = 1, **others: object) -> dict:
        return {"publish": {"copies": 1, "kappa": 0.0, "shared_noise": scale, "seed": draw}, **others}

    for seed in range(3):
        yield {"publish": CLEAN, "seed": seed}
    for scale in (3.0, 1.0, 10.0):
        yield permanent(scale)
    yield {"publish": {"copies": 3, "kappa": 1.0, "seed": 1}}
    yield permanent(3.0, 2)
    yield {"publish": CLEAN, "algo": "simnpo"}
    yield permanent(3.0, algo="simnpo")
    yield {"publish": CLEAN, "algo": "graddiff"}
    yield permanent(3.0, algo="graddiff")
    for seed in range(2):
        yield {"publish": CLEAN, "seed": seed, "lora_rank": 8, "lr": 3e-4}
    yield permanent(3.0, lora_rank=8, lr=3e-4)
    yield permanent(10.0, server_lr=2.0)
    yield permanent(3.0, 3)
    yield permanent(0.1)
    yield {"publish": {"copies": 2, "kappa": 1.0, "noise": "zero-sum", "symmetries": "paper", "seed": 1}}
    yield {"publish": {"copies": 3, "kappa": 1.0, "shared_noise": 3.0, "seed": 1}}
    yield {"publish": {"copies": 3, "kappa": 0.01, "seed": 1}}
    yield permanent(10.0, 2)
    yield {"publish": CLEAN, "seed": 1, "algo": "simnpo"}
    yield {"publish": CLEAN, "seed": 1, "algo": "graddiff"}
    yield permanent(10.0, lora_rank=8, lr=3e-4)
    yield {"publish": {"copies": 3, "kappa": 3.0, "seed": 1}}


@torch.no_grad()
def losses(folder: Path, sets: dict[str, Path]) -> dict[str, float]:
    """Mean negative log-probability per answer token, in nats, on each set."""
    model, tokenizer = load(open_model(str(folder)), torch.float32, "cpu")
    found = {}
    for name, path in sets.items():
        examples = Encoding(tokenizer).encode(read_records(path))
        total = count = 0.0
        for start in range(0, len(examples), AT_ONCE):
            batch = pad(examples[start : start + AT_ONCE])
            labels = batch.pop("labels")[:, 1:]
            scores = model(**batch).logits[:, :-1].log_softmax(-1)
            picked = scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            total -= float(picked[labels >= 0].double().sum())
            count += int((labels >= 0).sum())
        found[name] = total / count
    return found


def measured(folder: Path, sets: dict[str, Path], scratch: Path) -> dict[str, float]:
    """Losses and ROUGE of a model."""
    of = {"forget": str(sets["forget"]), "retain": str(sets["few"])}
    result = api.evaluate(folder, benchmark="qa", metrics=ROUGE, out=scratch / "eval.json", force=True, **of)
    rouge = {name.partition("_")[0] + "_rouge": form["agg_value"] for name, form in result.forms.items()}
    return losses(folder, {name: path for name, path in sets.items() if name != "few"}) | rouge


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


def play(setting: dict, given: argparse.Namespace, training: dict, sets: dict[str, Path], scratch: Path) -> dict:
    """One setting from publication to the server's model, which is left in ``scratch/after``."""
    target, began = Path(given.target), time.time()
    own = {name: value for name, value in setting.items() if name not in ("publish", "server_lr")}
    published = api.publish(
        target, given.pretrained, out=scratch, keys=scratch / "keys.bin", dtype="float32", force=True,
        **setting["publish"],
    )  # fmt: skip
    found = {"copy": measured(Path(published.copies[0]), sets, scratch)} if setting["publish"] != CLEAN else {}
    for copy in published.copies:
        api.unlearn(
            copy, out=scratch / "deltas" / f"{Path(copy).name}.safetensors", force=True, forget=str(sets["forget"]),
            retain=str(sets["retain"]), **(training | own),
        )  # fmt: skip
    result = api.aggregate(
        scratch / "deltas", keys=scratch / "keys.bin", base=target, out=scratch / "after", force=True, dtype="float32",
        server_lr=setting.get("server_lr", 1.0),
    )  # fmt: skip
    found |= {"after": measured(scratch / "after", sets, scratch), "estimate": result.error.relative}
    return found | {"seconds": round(time.time() - began)}


def name_of(setting: dict) -> str:
    """A setting in words."""
    noise = setting["publish"]
    own, shared, copies = noise.get("kappa", 0.0), noise.get("shared_noise", 0.0), noise["copies"]
    words = ["the model itself"] if not own and not shared else []
    words += [f"{copies} copies, κ = {own:g}" + (" (zero-sum)" if "noise" in noise else "")] if own else []
    words += [("one copy, " if copies == 1 else "") + f"permanent {shared:g}"] if shared else []
    words += [f"update × {setting['server_lr']:g}"] if "server_lr" in setting else []
    number = noise.get("seed") if own or shared else setting.get("seed", 0) + 1
    return ", ".join(words) + (f" ({number})" if number else "")


def way_of(setting: dict) -> str:
    return setting.get("algo", "npo") + (", LoRA" if "lora_rank" in setting else "")


def table(lines: list[dict]) -> str:
    """All lines as Markdown: losses on records to forget, to keep and unseen ones, and ROUGE on the first two."""
    columns = ("forget", "retain", "unseen")
    rouges = ("forget_rouge", "retain_rouge")

    def cells(of: dict | None) -> list[str]:
        if not of:
            return ["–", "–"]
        return [" / ".join(f"{of[name]:.2f}" for name in columns), " / ".join(f"{of[name]:.2f}" for name in rouges)]

    rows = [["", "algorithm", "the copy: losses", "ROUGE", "the model after: losses", "ROUGE", "update from clean"]]
    rows += [["before", "", "", "", *cells(line["before"]), ""] for line in lines if "before" in line]
    played = [line for line in lines if "setting" in line]
    for line in sorted(played, key=lambda line: (way_of(line["setting"]) != "npo", way_of(line["setting"]))):
        apart = f"{line['distance']:.0%}" if "distance" in line else "–"
        rows.append([name_of(line["setting"]), way_of(line["setting"]), *cells(line.get("copy")),
                     *cells(line["after"]), apart])  # fmt: skip
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(lines: list[dict], path: Path) -> None:
    """What is forgotten against what is lost, a point for each setting."""

    def panel(axes: Axes) -> None:
        played = [line for line in lines if "setting" in line and way_of(line["setting"]) == "npo"]
        for line in played:
            noise = line["setting"]["publish"]
            own, shared = noise.get("kappa", 0.0), noise.get("shared_noise", 0.0)
            colour = PALETTE[0 if not own and not shared else 1 if not own else 2 if not shared else 3]
            x, y = line["after"]["retain"], line["after"]["forget"]
            axes.scatter([x], [y], color=colour)
            axes.annotate(name_of(line["setting"]), (x, y), fontsize=6, xytext=(4, 3), textcoords="offset points")
        axes.set_xlabel("loss per answer token on what is to be kept", fontsize=9)
        axes.set_ylabel("… on what is to be forgotten", fontsize=9)
        axes.margins(x=0.25, y=0.1)

    write_figure(make_figure([panel], None), path, "Unlearning on noisy copies", [], [], force=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?")
    for name in ("pretrained", "forget", "retain", "unseen"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", default="protection.jsonl")
    parser.add_argument("--train", default="lr=3e-5,epochs=4,batch_size=8")
    given = parser.parse_args()
    if given.table:
        lines = [json.loads(line) for line in given.table.read_text().splitlines()]
        print(table(lines))
        if given.plot:
            draw(lines, given.plot)
        return
    if not all((given.target, given.pretrained, given.forget, given.retain, given.unseen)):
        parser.error("TARGET, --pretrained, --forget, --retain and --unseen are needed")
    training = {"algo": "npo"} | {
        name: float(value) if name == "lr" else int(value)
        for name, value in (part.split("=") for part in given.train.split(","))
    }
    out = Path(given.out)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    clean = Path(f"{out}.clean").absolute()  # updates without noise, by what else decides them
    with tempfile.TemporaryDirectory(dir=out.absolute().parent) as scratch:
        few = Path(scratch) / "few.jsonl"
        few.write_text("".join(Path(given.retain).read_text().splitlines(keepends=True)[:40]))
        sets = {name: Path(getattr(given, name)) for name in ("forget", "retain", "unseen")} | {"few": few}
        if not any("before" in line for line in done):
            _note(out, {"before": measured(Path(given.target), sets, Path(scratch))})
        for setting in settings():
            if any(line.get("setting") == setting for line in done):
                continue
            folder = Path(scratch) / "one"
            folder.mkdir()
            line = {"setting": setting} | play(setting, given, training, sets, folder)
            compared = clean / f"{setting.get('algo', 'npo')}-{setting.get('lora_rank', 'full')}"
            if setting["publish"] == CLEAN and not compared.exists():
                compared.parent.mkdir(exist_ok=True)
                (folder / "after").rename(compared)
            elif compared.exists():
                line["distance"] = distance(folder / "after", compared, Path(given.target))
            _note(out, line)
            for path in sorted(folder.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            folder.rmdir()


def _note(out: Path, line: dict) -> None:
    print(json.dumps(line), flush=True)
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
