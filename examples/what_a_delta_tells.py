"""What the server learns about the forget set from the model it receives: which records that model knows less well.

mpu eval BEFORE --benchmark tofu:forget01 --metrics forget_Q_A_Prob,retain_Q_A_Prob --out before.json
mpu eval AFTER  --benchmark tofu:forget01 --metrics forget_Q_A_Prob,retain_Q_A_Prob --out after.json
python examples/what_a_delta_tells.py before.json after.json

Prints the AUC of an attack that guesses that the forgotten records are those whose log-probability fell most: 0.5 is
chance, 1 distinguishes all of them from the retained records.
"""

from __future__ import annotations

import json
import math
import sys

from sklearn.metrics import roc_auc_score


def log_probabilities(path: str, metric: str) -> dict[str, float]:
    with open(path, encoding="utf-8") as file:
        rows = json.load(file)["metrics"][metric]["value_by_index"]
    return {number: math.log(row["prob"]) for number, row in rows.items()}


def main(before: str, after: str) -> None:
    falls, forgotten = [], []
    for metric in ("forget_Q_A_Prob", "retain_Q_A_Prob"):
        old, new = log_probabilities(before, metric), log_probabilities(after, metric)
        falls += [old[number] - new[number] for number in old]
        forgotten += [metric.startswith("forget")] * len(old)
    print(f"AUC {roc_auc_score(forgotten, falls):.3f} ({sum(forgotten)} of {len(forgotten)} records)")


if __name__ == "__main__":
    main(*sys.argv[1:])
