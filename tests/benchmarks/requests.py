"""Whether requests one after another stay forgotten, judged by plain transformers after each.

python -m tests.benchmarks.requests MODEL FORGET RETAIN HELD UNSEEN COUNT [--anew] [PUBLISH OPTION …]

Cuts FORGET, records in the order of their authors, into COUNT requests of equal size. MODEL is published once; for each
request the client unlearns on the copies that it kept, and the server aggregates the new deltas. With --anew, each
request begins with a publication of the model that the one before left. Prints what is then left of each request and
kept of HELD, records that the model knows and no command sees, as shares of what the first model knew beyond what it
guessed of UNSEEN, and the client's seconds.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.outcome import run, scores


def main(arguments: Sequence[str]) -> None:
    model, *named = arguments[:5]
    forget, retain, held, unseen = (str(Path(name).resolve()) for name in named)
    count, options = int(arguments[5]), list(arguments[6:])
    anew = "--anew" in options
    if anew:
        options.remove("--anew")
    options = [str(Path(each).resolve()) if Path(each).exists() else each for each in options]
    lines = Path(forget).read_text(encoding="utf-8").splitlines(keepends=True)
    size = len(lines) // count
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"  # the notes of the requests
        judged = {"held": held, "unseen": unseen}
        for number in range(1, count + 1):
            request = Path(folder) / f"request_{number}.jsonl"
            request.write_text("".join(lines[(number - 1) * size : number * size]), encoding="utf-8")
            judged[request.stem] = str(request)
        before, base = scores(model, judged), str(Path(model).resolve())
        for number in range(1, count + 1):
            place = Path(folder) / (f"published_{number}" if anew else "published")
            if not place.exists():
                place.mkdir()
                run("publish", base, *options, "--out", "copies", "--keys", "keys.bin", folder=str(place))
            copies = sorted(str(path) for path in (place / "copies").glob("copy_*"))
            records = ("--forget", judged[f"request_{number}"], "--retain", retain)
            deltas, after = f"deltas_{number}/", str(place / f"model_{number}")
            seconds = run("unlearn", *copies, *records, "--out", deltas, folder=str(place))
            run("aggregate", deltas, "--keys", "keys.bin", "--out", after, "--base", base, folder=str(place))
            now = scores(after, judged)
            *left, kept = [
                (now[name] - now["unseen"]) / (before[name] - before["unseen"])
                for name in (*(f"request_{i}" for i in range(1, number + 1)), "held")
            ]
            shares = ", ".join(f"{share:.1%}" for share in left)
            print(f"after {number}: left {shares}; kept {kept:.1%}; this one took {seconds:.0f} s", flush=True)
            if anew:
                base = after


if __name__ == "__main__":
    main(sys.argv[1:])
