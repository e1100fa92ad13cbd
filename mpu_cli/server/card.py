"""The model card of an unlearned model: README.md beside the weights, as the Hub shows it."""

from __future__ import annotations

import json
import math
from pathlib import Path

from mpu_cli.models.source import Model
from mpu_cli.server.agreement import Aggregation
from mpu_cli.server.keys import Keys
from mpu_cli.version import __version__

CARD = "README.md"
WARNED = "Warnings of `mpu aggregate`:"


def card(base: Model, keys: Keys, result: Aggregation, kind: str) -> str:
    """Where the model comes from: its base, the round, how the copies agreed. It names no path and no secret.

    ``kind`` is "model" or "adapter".
    """
    of_hub = None if Path(base.source).exists() else base.source
    algorithms = ", ".join(sorted(set(result.algorithms)))
    error = result.error.relative
    head = [f"base_model: {json.dumps(of_hub)}"] if of_hub else []
    head += ["library_name: peft"] if kind == "adapter" else ["library_name: transformers"]
    head += ["tags:", "- unlearning", "- mpu"]
    rows = [
        ("base", of_hub or f"a private {base.config.get('model_type')} model"),
        ("base's fingerprint", keys.base.fingerprint),
        ("run, round", f"{keys.run}, {keys.round}"),
        ("copies", f"{keys.copies}, {keys.publication.scheme.name} noise, symmetries {keys.publication.symmetries}"),
        ("algorithm", f"{algorithms}, by the owner of the records"),
        ("norm of the update", f"{result.norm:.4g}"),
        ("estimated error of the update", "not known" if math.isnan(error) else f"{error:.1%}"),
        ("smallest cosine between copies", f"{result.pairwise:.3f}"),
        ("made by", f"mpu {__version__}"),
    ]
    curve = []
    if step := result.step:
        rows.insert(-1, ("step along the update", f"{step.chosen:g}"))
        curve = [
            f"The step was chosen for the loss on records of the server's to rise by at most {step.max_rise:g} nats "
            "per answer token:", "", "| step | loss |", "|---|---|",
            *(f"| {tried:g} | {loss:.4f} |" for tried, loss in step.curve), "",
        ]  # fmt: skip
    warnings = [f"- {text}" for text in result.warnings()]
    return "\n".join(
        [
            "---", *head, "---", "",
            "# Unlearned model" if kind == "model" else "# Unlearning, as an adapter", "",
            "Records were unlearned without leaving their owner, with MPU "
            "([arXiv 2602.23798](https://arxiv.org/abs/2602.23798)): the owner trained disguised copies of the base "
            "and returned weight changes only, which were combined here.", "",
            "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), "",
            *curve,
            *([WARNED, "", *warnings, ""] if warnings else []),
            "Unlearning lowers what a model shows of its records; it is no proof that nothing is left. `mpu eval` "
            "measures what is.", "",
        ]
    )  # fmt: skip
