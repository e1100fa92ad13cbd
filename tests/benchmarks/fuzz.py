"""Mutations of real files, read as the other party's: ``python -m tests.benchmarks.fuzz [COUNT] [FIRST SEED]``.

Prints how many ran of each kind, how many were refused, the slowest, and everything that was neither a result nor an
error of ours, took over ten seconds or a gigabyte, or wrote a file outside.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.helpers.fuzzing import TARGETS, Report, make_seeds, play

SHARE = {"config, built": 0.3, "tokenizer": 0.3, "tokenizer config": 0.3}  # libraries are called, which takes longer


def main(count: int, first_seed: int) -> int:
    total = Report()
    each = count / sum(SHARE.get(target, 1.0) for target in TARGETS)
    with tempfile.TemporaryDirectory() as folder:
        seeds, scratch = Path(folder) / "seeds", Path(folder) / "scratch"
        seeds.mkdir()
        scratch.mkdir()
        make_seeds(seeds)
        for target in TARGETS:
            report, started = Report(), time.monotonic()
            for seed in range(first_seed, first_seed + round(each * SHARE.get(target, 1.0))):
                play(target, seeds, scratch, seed, report)
            print(
                f"{target:<18}{report.ran:>7} inputs{report.refused:>7} refused  slowest {report.slowest:6.2f} s  "
                f"in all {time.monotonic() - started:6.0f} s  {len(report.problems)} problems", flush=True,
            )  # fmt: skip
            for problem in report.problems[:20]:
                print("  " + problem, flush=True)
            total.ran += report.ran
            total.problems += report.problems
    print(f"{total.ran:,} inputs, {len(total.problems)} problems")
    return min(1, len(total.problems))


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(numbers[0] if numbers else 10_000, numbers[1] if len(numbers) > 1 else 0))
