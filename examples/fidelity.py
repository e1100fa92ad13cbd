"""How close the aggregate comes to the clean run, by algorithm, optimiser and noise draw.

    python examples/fidelity.py mpu-demo/models/target --forget mpu-demo/records/forget.jsonl \
        --retain mpu-demo/records/retain.jsonl --algo npo,graddiff --optim adamw --draws 5 --work fidelity \
        --with "--copies 2 --noise zero-sum --symmetries paper" --with "--copies 3" --with "--mode noised"

For each algorithm and optimiser, runs `mpu run --mode clean` and, for each --with (options of `mpu run`), --draws draws
of the noise, all in float32. Losses are per answer token over the forget set and the first 100 retain records. "off" is
the mean absolute deviation of a loss from the clean run's, over the draws; "distance" is how far the update is from the
clean one, ‖θ − θ_clean‖ / ‖θ_clean − θ₀‖. ± is half the width of the mean's 95 % interval (Student's t). Results of
finished runs are kept in --work, so an interrupted script resumes where it left off. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import shlex
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from mpu_cli.cli.main import main as mpu_main
from mpu_cli.lab.report import half_interval
from mpu_cli.measuring.encoding import TrainedEncoder
from mpu_cli.measuring.scoring import Scorer
from mpu_cli.model.load import load
from mpu_cli.model.source import open_model
from mpu_cli.records.encode import Encoding
from mpu_cli.records.read import read_records
from mpu_cli.training.losses import ALGORITHMS


def mpu(*arguments: object) -> str:
    """Run one command in this process and return its standard output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            mpu_main([str(argument) for argument in arguments])
        except SystemExit as stop:
            if stop.code:
                raise SystemExit(err.getvalue()) from stop
    return out.getvalue()


def losses(model: Path, options: argparse.Namespace) -> list[float]:
    """Loss per answer token of ``model`` on the forget and retain sets."""
    loaded, tokenizer = load(open_model(str(model)), torch.float32, "cpu")
    encoder = TrainedEncoder(Encoding(tokenizer))
    means = []
    for path in (options.forget, options.retain):
        items = encoder.questions(read_records(path)[:100])
        means.append(float(torch.cat([scores.losses for scores in Scorer(loaded).score(items, batch_size=32)]).mean()))
    return means


def measure(training: Sequence[object], options: argparse.Namespace, clean: Path | None, kept: Path | None) -> dict:
    """Losses after `mpu run` with ``training``, and the distance from ``clean``; the model is saved as ``kept``."""
    name = hashlib.sha256(repr(training).encode()).hexdigest()[:16]
    done, folder = options.work / f"{name}.json", options.work / name
    if not done.exists() or (kept and not kept.exists()):
        shutil.rmtree(folder, ignore_errors=True)
        told = json.loads(mpu("run", options.base, *training, "--out", folder, "--json"))
        model = Path(told["model"])
        found: dict[str, object] = {"losses": losses(model, options)}
        if clean:
            before, after, aim = (load_file(m / "model.safetensors") for m in (options.base, model, clean))
            error = sum(float((after[n] - aim[n]).square().sum()) for n in aim)
            found["distance"] = (error / sum(float((aim[n] - before[n]).square().sum()) for n in aim)) ** 0.5
        found["estimate"] = [line["error_estimate"] for line in told["log"] if line["step"] == "aggregate"]
        if kept:
            shutil.rmtree(kept, ignore_errors=True)
            shutil.move(model, kept)
        shutil.rmtree(folder)
        done.write_text(json.dumps(found))
    return json.loads(done.read_text())


def mean(values: Sequence[float], form: str) -> str:
    """The mean of ``values`` and, if there are several, half of its 95 % interval."""
    text = format(statistics.mean(values), form)
    if len(values) < 2:
        return text
    return f"{text} ± {format(half_interval(values), form)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("--public")
    parser.add_argument("--forget", type=Path, required=True)
    parser.add_argument("--retain", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--algo", default=",".join(ALGORITHMS))
    parser.add_argument("--optim", default="adamw,adamw-blockwise")
    parser.add_argument("--with", dest="variants", action="append", help="options of mpu run; repeatable")
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--lr", default="5e-5")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--layer", type=int, default=3, help="layer for rmu (the small models have few)")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)

    print("| algorithm | optimiser | | forget, retain | off: forget, retain | distance |")
    print("|---" * 6 + "|")
    for algorithm in options.algo.split(","):
        for optimizer in options.optim.split(","):
            training = [
                "--unlearn", "train_embeddings", "--algo", algorithm, "--optim", optimizer, "--lr", options.lr,
                "--epochs", options.epochs,
                "--rounds", options.rounds, "--batch-size", 8, "--forget", options.forget, "--retain", options.retain,
                "--dtype", "float32", "--kappa", 0.01,
                *(["--public", options.public] if options.public else []),
                *(["--constants", f"layer={options.layer}"] if algorithm == "rmu" else []),
            ]  # fmt: skip
            model = options.work / f"clean-{hashlib.sha256(repr(training).encode()).hexdigest()[:16]}"
            clean = measure([*training, "--mode", "clean"], options, None, model)["losses"]
            print(f"| {algorithm} | {optimizer} | clean | {clean[0]:.3f}, {clean[1]:.3f} | | |", flush=True)
            for variant in options.variants or ["--copies 3"]:
                runs = [
                    measure([*training, *shlex.split(variant), "--secret-seed", draw], options, model, None)
                    for draw in range(1, options.draws + 1)
                ]
                found = [mean([run["losses"][i] for run in runs], ".3f") for i in (0, 1)]
                off = [mean([abs(run["losses"][i] / clean[i] - 1) for run in runs], ".1%") for i in (0, 1)]
                distance = mean([run["distance"] for run in runs], ".3f")
                label = variant.replace("--", "")
                print(f"| {algorithm} | {optimizer} | {label} | {', '.join(found)} | {', '.join(off)} | {distance} |",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
