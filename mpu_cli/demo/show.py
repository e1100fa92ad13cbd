"""The demonstration: a model that knows too much, and what three ways of unlearning leave of that.

Everything is made on the spot, and everything goes through the functions that the commands call: the models by
``finetune``, the three ways by ``run``, the numbers by ``eval``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import transformers

from mpu_cli.checkpoint.source import open_model
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.client.records import read_records
from mpu_cli.client.training import Loop
from mpu_cli.client.unlearn import Options
from mpu_cli.demo.model import make_model, make_tokenizer
from mpu_cli.demo.people import Row, make_people
from mpu_cli.demo.report import write_report
from mpu_cli.errors import MpuError
from mpu_cli.evaluation.benchmarks import own_records, read_own
from mpu_cli.evaluation.evaluate import Settings, evaluate
from mpu_cli.evaluation.metrics import Form
from mpu_cli.evaluation.retain import read_retain_log
from mpu_cli.experiment.rounds import Experiment, run
from mpu_cli.experiment.sweep import in_parts
from mpu_cli.server.noise import default_scheme

PEOPLE, FORGOTTEN, UNSEEN = 40, 4, 4
EPOCHS = 50  # of training; the model then knows its records by heart
MODES = ("clean", "noised", "mpu")
NOISE, KAPPA, ROUNDS = default_scheme(), 0.05, 1
OPTIONS = Options(
    "npo", epochs=15, constants={"beta": 2.0}, loop=Loop(optimizer="adamw-blockwise", lr=3e-4, batch_size=10)
)
METRICS = (
    "forget_Q_A_Prob", "forget_Q_A_ROUGE", "forget_truth_ratio", "forget_quality", "retain_Q_A_Prob",
    "retain_Q_A_ROUGE", "extraction_strength", "mia_min_k", "privleak",
)  # fmt: skip

Bar = Callable[[str, float], Callable[..., None]]  # (label, total) → what advances it


@dataclass
class Demonstration:
    """What was made: the unlearned model, the report, and metrics and answers of each model by name."""

    model: Path
    report: Path
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    answers: dict[str, dict[str, str]] = field(default_factory=dict)  # question → who → what they said


def run_demo(folder: Path, *, seed: int, bar: Bar, tell: Callable[[str], None]) -> Demonstration:
    """Play everything in ``folder``, which is made, and removed again if something fails.

    ``tell`` gets a line for each step. Raises MpuError if ``folder`` exists.
    """
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise MpuError(f"{folder}: exists already; name another directory for the demonstration") from error
    try:
        with Transaction():  # so that an interrupt comes as an exception
            return _play(folder, seed, bar, tell)
    except BaseException:
        shutil.rmtree(folder)
        raise


def _play(folder: Path, seed: int, bar: Bar, tell: Callable[[str], None]) -> Demonstration:
    people = make_people(PEOPLE + UNSEEN, seed)
    sets = {"forget": people[:FORGOTTEN], "retain": people[FORGOTTEN:PEOPLE], "holdout": people[PEOPLE:]}
    paths = {name: _write(folder / "records" / f"{name}.jsonl", of) for name, of in sets.items()}
    forget, retain, holdout = (read_records(path) for path in paths.values())
    models = folder / "models"
    tokenizer = make_tokenizer([*forget, *retain, *holdout])
    for name, records in (("target", forget + retain), ("retain", retain)):
        advance = bar(f"train the {name} model", 1.0)
        make_model(
            records, tokenizer, models / name, epochs=EPOCHS, seed=seed,
            on_step=lambda losses, steps, advance=advance: advance(1 / steps, f"loss {losses.loss:.2f}"),
        )  # fmt: skip
    tell(
        f"The server trained a model on {len(forget + retain)} facts about {PEOPLE} people; beside it, for comparison, "
        f"one that never saw the {len(forget)} about {FORGOTTEN} of them."
    )
    measure = partial(_measure, paths=paths, folder=folder / "eval", bar=bar)
    measured = {"retain model": measure("retain", models / "retain")}
    measured["before"] = measure("before", models / "target")
    handed = KAPPA * sum(NOISE.scales) / NOISE.copies
    told = {
        "clean": "Clean: the client got the model itself and unlearned on it.",
        "noised": f"Noised: the client got one copy with noise (κ = {handed:.3g}); its result is the next model.",
        "mpu": f"MPU: the client got {NOISE.copies} noisy copies in secret coordinates; the server undid them.",
    }
    made: dict[str, Path] = {}
    logs: dict[str, Sequence[Mapping[str, object]]] = {}
    for mode in MODES:
        experiment = Experiment(
            str(models / "target"), OPTIONS, mode=mode, noise=NOISE, kappa=KAPPA, rounds=ROUNDS, keep=True
        )
        outcome = run(experiment, forget, retain, folder / mode, bar=bar)
        made[mode], logs[mode] = outcome.model, outcome.log
        measured[mode] = measure(mode, outcome.model)
        tell(told[mode])
    shown = Demonstration(made["mpu"], folder / "report.html")
    for name, forms in measured.items():
        shown.metrics[name] = {metric: forms[metric]["agg_value"] for metric in METRICS if metric in forms}
        if name == "retain model":
            shown.metrics[name]["privleak"] = 0.0  # against itself
        for split in ("forget", "retain"):
            said = forms[f"{split}_Q_A_ROUGE"]["value_by_index"]["0"]
            answers = shown.answers.setdefault(sets[split][0][0]["question"], {"truth": said["ground_truth"]})
            answers[name] = said["generation"]
    write_report(folder, shown, measured, logs, {"κ": KAPPA, "copies": NOISE.copies, "people": PEOPLE})
    return shown


def _write(path: Path, people: Sequence[Sequence[Row]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for person in people for row in person), encoding="utf-8")
    return path


def _measure(name: str, model: Path, *, paths: Mapping[str, Path], folder: Path, bar: Bar) -> dict[str, Form]:
    """Metrics of ``model``, with the retain model's result as the log, once it is there."""
    folder.mkdir(exist_ok=True)
    log = folder / "retain.json"
    retain = read_retain_log(log) if log.exists() else None
    benchmark = own_records(*read_own(None, *map(str, paths.values())), retain)
    advance = bar(f"evaluate: {name}", 1.0)
    result = evaluate(
        open_model(str(model)),
        benchmark,
        Settings(),
        out=folder / f"{name}.json",
        bar=lambda total: in_parts(advance, total),
    )
    return result.forms
