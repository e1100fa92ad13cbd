"""Whether the server's own records bring back what a request cost of others, judged by plain transformers.

python -m tests.benchmarks.repair DIR MODEL FORGET RETAIN HELD UNSEEN OWN[,OWN] [PUBLISH OPTION …]

Plays publish and unlearn in DIR, as ``outcome`` does, unless DIR has deltas already. Then, for each of some steps,
aggregates with it, teaches the new model one epoch of OWN, and prints what is left of FORGET and kept of HELD before
and after that. HELD are records that no command sees; OWN may have others of the same people.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.outcome import run, scores, shares

STEPS = ("1", "1.1", "1.15", "1.2", "1.3")
RATE = "3e-5"  # of the repair


def main(arguments: Sequence[str]) -> None:
    folder, model = arguments[0], str(Path(arguments[1]).resolve())
    names = ("forget", "retain", "held", "unseen")
    files = {name: str(Path(file).resolve()) for name, file in zip(names, arguments[2:6], strict=True)}
    own = [word for file in arguments[6].split(",") for word in ("--data", str(Path(file).resolve()))]
    options = [str(Path(word).resolve()) if Path(word).exists() else word for word in arguments[7:]]
    os.environ["XDG_CONFIG_HOME"] = str(Path(folder).resolve() / "config")
    if not Path(folder, "deltas").exists():
        Path(folder).mkdir(exist_ok=True)
        run("publish", model, *options, folder=folder)
        copies = sorted(path.name for path in Path(folder).glob("copy_*"))
        run("unlearn", *copies, "--forget", files["forget"], "--retain", files["retain"], folder=folder)
    judged = {name: files[name] for name in ("forget", "held", "unseen")}
    before = scores(model, judged)
    for step in STEPS:
        made, repaired = f"unlearned_{step}", f"repaired_{step}"
        run("aggregate", "deltas", "--keys", "keys.bin", "--base", model, "--step", step, "--out", made, folder=folder)
        run("finetune", made, *own, "--epochs", "1", "--lr", RATE, "--out", repaired, folder=folder)
        for name in (made, repaired):
            left, kept = shares(before, scores(f"{folder}/{name}", judged))
            print(f"{name}: {left:.1%} left, {kept:.1%} kept", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
