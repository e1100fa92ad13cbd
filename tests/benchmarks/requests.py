"""Whether requests one after another stay forgotten, judged by plain transformers once all of them were played.

python -m tests.benchmarks.requests MODEL FORGET RETAIN HELD UNSEEN COUNT [PUBLISH OPTION …]

Cuts FORGET, records in the order of their authors, into COUNT requests of equal size, and plays publish, unlearn and
aggregate for each on the model that the one before left. Prints what is then left of each and what is kept of HELD,
records that the model knows and no command sees, as shares of what the first model knew.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.outcome import run, scores


def main(arguments: Sequence[str]) -> None:
    model, *named = arguments[:5]
    forget, retain, held, unseen = (str(Path(name).resolve()) for name in named)
    count, options = int(arguments[5]), arguments[6:]
    lines = Path(forget).read_text(encoding="utf-8").splitlines(keepends=True)
    size = len(lines) // count
    with tempfile.TemporaryDirectory() as folder:
        judged = {"held": held, "unseen": unseen}
        for number in range(count):
            request = Path(folder) / f"request_{number + 1}.jsonl"
            request.write_text("".join(lines[number * size : (number + 1) * size]), encoding="utf-8")
            judged[request.stem] = str(request)
        before = scores(model, judged)
        base, seconds = str(Path(model).resolve()), 0.0
        for number in range(1, count + 1):
            place = Path(folder) / f"played_{number}"
            place.mkdir()
            run("publish", base, *options, "--out", "copies", "--keys", "keys.bin", folder=str(place))
            copies = sorted(str(path) for path in (place / "copies").glob("copy_*"))
            files = ("--forget", judged[f"request_{number}"], "--retain", retain)
            seconds += run("unlearn", *copies, *files, "--out", "deltas/", folder=str(place))
            run("aggregate", "deltas", "--keys", "keys.bin", "--out", "model", "--base", base, folder=str(place))
            base = str(place / "model")
            after = scores(base, judged)
            left = [
                (after[f"request_{i}"] - after["unseen"]) / (before[f"request_{i}"] - before["unseen"])
                for i in range(1, count + 1)
            ]
            shares = ", ".join(f"{share:.1%}" for share in left)
            kept = after["held"] / before["held"]
            print(f"after {number}: left {shares}; kept {kept:.1%}; unlearn took {seconds:.0f} s so far", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
