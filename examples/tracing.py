"""What a trace withstands: copies are changed as somebody who leaks one might change them, and then traced.

python examples/tracing.py TARGET PRETRAINED FORGET RETAIN [--columns NAME=COLUMN,…] [--steps N] [--out FILE]

Publishes TARGET three times with the defaults (one copy for client A, three for client B, one for client C), changes
A's copy (or, where a row says so, several) in one way for each row, and prints what `mpu trace` finds with the keys of
all three: z and share of the watermarks, z of the noise of B's copies, the most places at which coordinates agree, who
is named, and the loss per answer token on RETAIN. Colluding clients undo each other's coordinates with the keys, which
is more than they could do. At the end, what the watermark costs the server's update.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mpu_cli.lab.trace import PublicationKeys, trace_endpoint
from mpu_cli.measuring.encoding import Item
from mpu_cli.measuring.scoring import Scorer, TokenScores
from mpu_cli.model.layout import layout_of
from mpu_cli.model.load import load
from mpu_cli.model.network import read_answers
from mpu_cli.model.source import open_model
from mpu_cli.model.transform import as_matrix
from mpu_cli.protocol.keys import open_keys

Weights = dict[str, torch.Tensor]
BATCH = 4  # records of FORGET in a step of fine-tuning


class Leak:
    """The publications, and models that are made from their copies."""

    def __init__(self, arguments: argparse.Namespace, folder: Path):
        self.arguments, self.folder = arguments, folder
        self.copies: dict[str, Weights] = {}
        for client, copies in (("A", 1), ("B", 3), ("C", 1)):
            options = ["--public", arguments.pretrained, "--copies", copies, "--out", folder / client]
            self.mpu("publish", arguments.target, *options, "--keys", folder / f"{client}.bin")
            for k in range(1, copies + 1):
                self.copies[f"{client}{k}"] = self.read(folder / client / f"copy_{k}")
        self.pretrained = self.read(Path(arguments.pretrained))
        self.template = folder / "A/copy_1"

    def mpu(self, *command: object) -> str:
        done = subprocess.run(["mpu", *map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        return done.stdout

    def read(self, folder: Path) -> Weights:
        return {
            name: tensor.float()
            for file in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }

    def undone(self, client: str, copy: int) -> Weights:
        """A copy in the base's coordinates, undone with its keys."""
        keys = open_keys(self.folder / f"{client}.bin")
        model = open_model(str(self.folder / client / f"copy_{copy}"))
        layout = layout_of(model.checkpoint.tensors, model.config, "")
        transform = keys.publication.transform(copy, layout)
        weights = {}
        for tensor in layout.parameters:
            matrix, mapping = as_matrix(model.checkpoint.tensor(tensor.name)).float(), transform.of(tensor)
            weights[tensor.name] = mapping.backward(mapping.take(matrix, 0, len(matrix)), 0).view(
                model.checkpoint.tensors[tensor.name].shape
            )
        return weights

    def store(self, weights: Weights, **config: object) -> Path:
        """A model with these weights, beside a copy's other files."""
        target = self.folder / "leaked"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.template, target, ignore=shutil.ignore_patterns("*.safetensors*", "mpu.json"))
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, target / "model.safetensors")
        path = target / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return target

    def loss(self, model: Path) -> float:
        network, tokenizer = load(open_model(str(model)), torch.float32, "auto")
        return read_answers(Path(self.arguments.retain), tokenizer, self.arguments.columns).loss(network)

    def trained(self, *options: object) -> Path:
        """A's copy, trained further on other records."""
        arguments, out = self.arguments, self.folder / "leaked"
        shutil.rmtree(out, ignore_errors=True)
        columns = ["--columns", arguments.columns] if arguments.columns else []
        data = ["--data", arguments.forget, *columns, "--out", out]
        self.mpu("finetune", self.template, *data, *options)
        return out

    def with_delta(self, *options: object) -> Path:
        """A's copy after its delta."""
        arguments, delta = self.arguments, self.folder / "delta.safetensors"
        columns = ["--columns", arguments.columns] if arguments.columns else []
        records = ["--forget", arguments.forget, "--retain", arguments.retain, *columns]
        self.mpu("unlearn", self.template, *records, *options, "--out", delta, "--force")
        change = merge_factors(load_file(delta))
        return self.store({name: x + change[name] if name in change else x for name, x in self.copies["A1"].items()})


def merge_factors(delta: Weights) -> Weights:
    """A LoRA delta's change to each tensor, the product of its factors; another delta as it is."""
    return {
        name.removesuffix(".lora_B"): x @ delta[name.removesuffix("B") + "A"] if name.endswith(".lora_B") else x
        for name, x in delta.items()
        if not name.endswith(".lora_A")
    }


def mix(first: Weights, second: Weights, share: float) -> Weights:
    return {name: share * x + (1 - share) * second[name] for name, x in first.items()}


def as_int8(x: torch.Tensor) -> torch.Tensor:
    """Rounded to 255 levels in each row."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (x / scale).round() * scale


def as_nf4(x: torch.Tensor) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(x, quant_type="nf4")) if x.ndim > 1 and x.numel() % 64 == 0 else x


def pruned(x: torch.Tensor, share: float) -> torch.Tensor:
    if x.ndim < 2:
        return x
    bound = x.abs().flatten().kthvalue(max(1, int(share * x.numel()))).values
    return torch.where(x.abs() <= bound, torch.zeros(()), x)


def noisy(x: torch.Tensor, share: float) -> torch.Tensor:
    return x + share * x.square().mean().sqrt() * torch.randn_like(x)


def without_layers(leak: Leak, weights: Weights, drop: int) -> Path:
    """``weights`` without ``drop`` layers in the middle, the others renumbered."""
    config = json.loads((leak.template / "config.json").read_text())
    count = config["num_hidden_layers"]
    lost = set(range(count // 2, count // 2 + drop))
    rest = [i for i in range(count) if i not in lost]
    cut = {}
    for name, tensor in weights.items():
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            if int(parts[at]) in lost:
                continue
            parts[at] = str(rest.index(int(parts[at])))
        cut[".".join(parts)] = tensor
    return leak.store(cut, num_hidden_layers=len(rest))


def rows(leak: Leak) -> Iterator[tuple[str, Callable[[], Path | str]]]:
    """What is done to a copy, and how."""
    copy, steps = leak.copies["A1"], leak.arguments.steps

    def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Path]:
        return lambda: leak.store({name: change(x) for name, x in copy.items()})

    def again(symmetries: str) -> Callable[[], Path]:
        def publish() -> Path:
            out = leak.folder / "again"
            shutil.rmtree(out, ignore_errors=True)
            leak.mpu("publish", leak.template, "--kappa", 0, "--copies", 2, "--symmetries", symmetries, "--run", "x",
                     "--out", out, "--keys", leak.folder / "again.bin", "--force")  # fmt: skip
            return out / "copy_1"

        return publish

    def combined(weights: list[float]) -> Callable[[], Path]:
        def combine() -> Path:
            parts = [leak.undone("B", k + 1) for k in range(3)]
            return leak.store({n: sum(w * p[n] for w, p in zip(weights, parts, strict=True)) for n in parts[0]})

        return combine

    yield "A's copy as it is", lambda: leak.template
    for dtype in (torch.bfloat16, torch.float16):
        yield f"stored as {str(dtype).removeprefix('torch.')}", each(lambda x, dtype=dtype: x.to(dtype).float())
    yield "stored in 8 bits", each(as_int8)
    yield "stored in 4 bits (NF4)", each(as_nf4)
    records = len(Path(leak.arguments.forget).read_text().splitlines())
    for n in steps:
        size = ("--epochs", max(1, n * BATCH // records), "--batch-size", BATCH)
        yield f"fine-tuned, {n} steps at 2e-5", lambda size=size: leak.trained(*size, "--lr", "2e-5")
    yield "unlearned (NPO)", lambda: leak.with_delta("--algo", "npo")
    yield "unlearned (NPO, LoRA)", lambda: leak.with_delta("--algo", "npo", "--lora", "rank=8")
    nodes = open_keys(leak.folder / "B.bin").publication.scheme.weights.tolist()
    yield "B's three copies, noise cancelled", combined(nodes)
    yield "B's three copies, plain mean", combined([1 / 3, 1 / 3, 1 / 3])
    yield "mean of A's and C's copies", lambda: leak.store(mix(leak.undone("A", 1), leak.undone("C", 1), 0.5))
    yield (
        "A's and C's copies and B's first",
        lambda: leak.store(mix(mix(leak.undone("A", 1), leak.undone("C", 1), 0.5), leak.undone("B", 1), 2 / 3)),
    )
    for share in (0.75, 0.5, 0.25):
        yield (
            f"{share:.0%} copy, the rest public model",
            lambda share=share: leak.store(mix(leak.undone("A", 1), leak.pretrained, share)),
        )
    for share in (0.1, 0.3, 0.5):
        yield f"{share:.0%} of the weights pruned", each(lambda x, share=share: pruned(x, share))
    yield "coordinates drawn again (signed)", again("signed")
    yield "coordinates drawn again (with rotations)", again("all")
    yield "two layers dropped", lambda: without_layers(leak, copy, 2)
    for share in (0.1, 0.2, 0.5):
        yield f"noise of {share:.0%} of the weights added", each(lambda x, share=share: noisy(x, share))
    yield "the base", lambda: leak.arguments.target
    yield "the public model", lambda: leak.arguments.pretrained


class Local:
    """What an endpoint that serves a model would return."""

    url = "local"

    def __init__(self, model: Path, dtype: torch.dtype):
        network, _ = load(open_model(str(model)), dtype, "auto")
        self.scorer = Scorer(network)

    def score(self, items: list[Item], *, batch_size: int) -> list[TokenScores]:
        self.scorer.prepare(items)
        return self.scorer.score(items, batch_size=batch_size)


def served(leak: Leak) -> list[str]:
    """z of the watermark by log-probabilities alone, of A's copy, which is traced with A's and with C's keys."""
    target = open_model(leak.arguments.target)
    publications = [PublicationKeys(client, open_keys(leak.folder / f"{client}.bin"), target) for client in ("A", "C")]
    texts = Path(leak.arguments.retain).read_text().splitlines()
    lines = [f"| served | {' | '.join(f'{n} texts' for n in leak.arguments.served)} |"]
    lines.append("|---|" + "---|" * len(leak.arguments.served))
    ways: list[tuple[str, Callable[[], Path], torch.dtype]] = [
        ("A's copy", lambda: leak.template, torch.float32),
        ("in bfloat16", lambda: leak.template, torch.bfloat16),
        ("in 8 bits", lambda: leak.store({n: as_int8(x) for n, x in leak.copies["A1"].items()}), torch.float32),
        ("unlearned (NPO)", lambda: leak.with_delta("--algo", "npo"), torch.float32),
    ]
    for name, make, dtype in ways:
        endpoint, cells = Local(make(), dtype), []
        for count in leak.arguments.served:
            chosen = leak.folder / "texts.jsonl"
            chosen.write_text("\n".join(texts[:count]) + "\n")
            found = trace_endpoint(endpoint, publications, chosen)
            watermarks = [publication.watermark for publication in found.publications]
            cells.append(", ".join(f"{watermark.z:.1f}" for watermark in watermarks if watermark))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def errors(leak: Leak) -> list[str]:
    """How far the server's update is from that of unlearning on the model itself, without the watermark and with it."""
    arguments = leak.arguments
    columns = ["--columns", arguments.columns] if arguments.columns else []
    records = ["--forget", arguments.forget, "--retain", arguments.retain, *columns, "--algo", "npo"]
    clean_file = leak.folder / "clean.safetensors"
    leak.mpu("unlearn", arguments.target, *records, "--out", clean_file)
    clean, distances = load_file(clean_file), []
    for watermark in (0, 0.1):
        out = leak.folder / f"watermark_{watermark}"
        options = ["--public", arguments.pretrained, "--watermark", watermark, "--out", out, "--keys", out / "keys.bin"]
        leak.mpu("publish", arguments.target, *options)
        leak.mpu("unlearn", out / "copy_1", *records, "--out", out / "d.safetensors")
        leak.mpu("invert", out / "d.safetensors", "--keys", out / "keys.bin", "--out", out)
        update = load_file(out / "copy_1.safetensors")
        off = sum(float((update[name].double() - change.double()).square().sum()) for name, change in clean.items())
        distances.append((off / sum(float(change.double().square().sum()) for change in clean.values())) ** 0.5)
    return [
        f"Update's distance from the clean one: {distances[0]:.4f} without a watermark, {distances[1]:.4f} with it."
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "pretrained", "forget", "retain"):
        parser.add_argument(name)
    parser.add_argument("--columns")
    parser.add_argument("--steps", type=int, nargs="*", default=[100])
    parser.add_argument("--rows", default=".", metavar="REGEX", help="make only the rows that this matches")
    parser.add_argument("--served", type=int, nargs="*", default=[], metavar="N", help="trace with so many texts, too")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    lines = [
        "| what was done | z of the watermark | z of noise | coordinates | named | loss |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"
        leak = Leak(arguments, Path(folder))
        keys = [part for client in "ABC" for part in ("--keys", leak.folder / f"{client}.bin")]
        print("\n".join(lines), flush=True)
        for what, make in rows(leak):
            if not re.search(arguments.rows, what):
                continue
            model = make()
            public = ["--public", arguments.pretrained] if "public model" in what else []
            found = json.loads(leak.mpu("trace", model, *keys, "--base", arguments.target, *public, "--json"))
            watermarks, noises, agreeing, named = [], [], [], []
            for client, publication in zip("ABC", found["publications"], strict=True):
                watermark = publication["watermark"]
                watermarks.append(f"{client} {watermark['z'] or 0:.1f} ({watermark['share'] or 0:.2f})")
                for each in publication["copies"]:
                    if each["noise"] and each["noise"]["z"] is not None:
                        noises.append(f"{client}{each['copy']} {each['noise']['z']:.1f}")
                    agreeing.append(each["agreements"] or 0)
                copies = "".join(map(str, publication["copies_named"]))
                named += [f"{client}{copies}"] if publication["named"] else []
            cells = [", ".join(watermarks), ", ".join(noises), f"{max(agreeing)}", ", ".join(named) or "none",
                     f"{leak.loss(Path(model)):.3f}"]  # fmt: skip
            lines.append(f"| {what} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
        if arguments.served:
            lines += ["", *served(leak)]
            print("\n".join(lines[-6:]), flush=True)
        if arguments.rows == ".":
            lines += ["", *errors(leak)]
            print("\n".join(lines[-2:]), flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
