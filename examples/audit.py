"""What each attack of `mpu audit` recovers, over noise scales, copies, symmetries and dtypes, as a Markdown table.

python examples/audit.py BASE [--reference MODEL]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import tempfile
from pathlib import Path

from mpu_cli.cli.main import main as mpu

ATTACKS = ("one copy", "one copy, reference", "all copies", "all copies, reference", "all copies, α unknown")


def run(*arguments: object) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            mpu([str(argument) for argument in arguments])
        except SystemExit as stop:
            if stop.code:
                raise SystemExit(err.getvalue()) from stop
    return out.getvalue()


def main(options: argparse.Namespace) -> None:
    reference = ["--reference", options.reference] if options.reference else []
    print("| symmetries | dtype | m | κ | " + " | ".join(ATTACKS) + " | task vector: one copy | all copies |")
    print("|" + "---|" * (len(ATTACKS) + 6))
    for symmetries, dtype, m, kappa in itertools.product(
        ("paper", "all"), ("float32", "bfloat16"), (2, 3), (0.01, 0.1, 1, 10)
    ):
        with tempfile.TemporaryDirectory() as folder:
            chosen = ("--symmetries", symmetries)
            published = run(
                "publish", options.base, *reference, *chosen, "--copies", m, "--kappa", kappa, "--dtype", dtype,
                "--out", folder, "--keys", Path(folder) / "keys.bin",
            )  # fmt: skip
            told = json.loads(run("audit", *published.split(), "--base", options.base, *reference, *chosen, "--json"))[
                "attacks"
            ]
        cells = [f"{told[name]['weights']:.2%}" if name in told else "–" for name in ATTACKS]
        for name in ("one copy, reference", "all copies, reference"):
            cells.append(f"{told[name]['task_vector']:.2%}" if name in told else "–")
        print(f"| {symmetries} | {dtype} | {m} | {kappa:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("base")
    parser.add_argument("--reference")
    main(parser.parse_args())
