"""Whether the server's own records bring back what a request cost of others, judged by plain transformers.

python -m tests.benchmarks.repair DIR MODEL FORGET[,FORGET] RETAIN HELD UNSEEN OWN[,OWN] [--again STEP[,FORGET]]
    [PUBLISH OPTION …]

Plays publish and unlearn in DIR, as ``outcome`` does, unless DIR has deltas already; each FORGET is a client with a
publication of its own. Then, for each of some steps, aggregates with it, teaches the new model one epoch of OWN, and
prints what is left of all records to forget and kept of HELD before and after that, and what these means hide. HELD are
records that no command sees; OWN may have others of the same people. With --again, a second round follows on the model
that was repaired after STEP: of the same clients, or of another one with FORGET.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from tests.benchmarks.outcome import load, probabilities, run, shares

STEPS = ("0.8", "0.9", "0.95", "1", "1.05", "1.1", "1.15", "1.2", "1.3")
STEPS_AGAIN = ("0.2", "0.35", "1")
RATE = "3e-5"  # of the repair


def absolute(word: str) -> str:
    """``word``, a comma-separated list, with absolute paths in place of names of files that there are."""
    return ",".join(str(Path(part).resolve()) if Path(part).exists() else part for part in word.split(","))


def play(folder: str, base: str, requests: Sequence[str], retain: str, options: Sequence[str]) -> list[str]:
    """Publish ``base`` to each request's client, who unlearns it; the arguments of aggregate but for the step."""
    deltas, keys = [], []
    for client, forget in enumerate(requests, 1):
        copies = f"client_{client}"
        deltas.append(f"deltas_{client}/")
        keys += ["--keys", f"keys_{client}.bin"]
        if not Path(folder, deltas[-1]).exists():
            run("publish", base, "--run", copies, "--out", copies, "--keys", keys[-1], *options, folder=folder)
            named = sorted(f"{copies}/{path.name}" for path in Path(folder, copies).glob("copy_*"))
            run("unlearn", *named, "--forget", forget, "--retain", retain, "--out", deltas[-1], folder=folder)
    return [*deltas, *keys, "--base", base]


def main(arguments: Sequence[str]) -> None:
    Path(arguments[0]).mkdir(exist_ok=True)
    folder, model, forget, retain, held, unseen, own, *options = map(absolute, arguments)
    again, rest = "", ""
    if "--again" in options:
        place = options.index("--again")
        again, _, rest = options[place + 1].partition(",")
        del options[place : place + 2]
    os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"
    requests, own_records = forget.split(","), [word for file in own.split(",") for word in ("--data", file)]
    records = Path(folder, "forget.jsonl")
    every = dict.fromkeys(requests + ([rest] if rest else []))
    records.write_text("".join(Path(file).read_text(encoding="utf-8") for file in every), encoding="utf-8")
    judged = {"forget": str(records), "held": held, "unseen": unseen}

    def judge(place: str) -> dict[str, list[float]]:
        network = load(place)
        return {name: probabilities(network, place, file) for name, file in judged.items()}

    before = judge(model)

    def repair(place: str, parts: Sequence[str], steps: Sequence[str]) -> None:
        for step in steps:
            made, repaired = f"unlearned_{step}", f"repaired_{step}"
            run("aggregate", *parts, "--step", step, "--out", made, folder=place)
            run("finetune", made, *own_records, "--epochs", "1", "--lr", RATE, "--out", repaired, folder=place)
            for name in (made, repaired):
                after = judge(f"{place}/{name}")
                means = ({key: fmean(values) for key, values in scores.items()} for scores in (before, after))
                left, kept = shares(*means)
                lost = sum(now < then / 2 for now, then in zip(after["held"], before["held"], strict=True))
                print(
                    f"{Path(place).name}/{name}: {left:.1%} left, {kept:.1%} kept; best known record: probability "
                    f"{max(after['forget']):.2f}; {lost} of {len(after['held'])} others lost more than half",
                    flush=True,
                )

    repair(folder, play(folder, model, requests, retain, options), STEPS)
    if again:
        second = f"{folder}/again"
        Path(second).mkdir(exist_ok=True)
        base = f"{folder}/repaired_{again}"
        repair(second, play(second, base, [rest] if rest else requests, retain, options), STEPS_AGAIN)


if __name__ == "__main__":
    main(sys.argv[1:])
