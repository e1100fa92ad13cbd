"""The demo: a model that knows too much, and what three ways of unlearning leave of that.

Everything is created on the spot by the functions that the commands call: the models by ``finetune``, the three ways
by ``run``, the numbers by ``eval``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import transformers

from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.client.dataset import Dataset
from mpu_cli.demo.model import make_model, make_tokenizer
from mpu_cli.demo.people import Row, make_people
from mpu_cli.demo.report import write_report
from mpu_cli.errors import MpuError
from mpu_cli.evaluation.benchmarks import own_records, read_own
from mpu_cli.evaluation.evaluate import evaluate
from mpu_cli.evaluation.metrics import Form
from mpu_cli.evaluation.retain import read_retain_log
from mpu_cli.experiment.rounds import run
from mpu_cli.models.source import open_model
from mpu_cli.observer import SILENT, Observer, WarningsOnly, Within
from mpu_cli.options.evaluation import Measuring
from mpu_cli.options.experiment import Experiment, Mode
from mpu_cli.options.publishing import Disguise
from mpu_cli.options.unlearning import Loss, Training, Unlearning
from mpu_cli.records.reading import read_records
from mpu_cli.server.noise import default_scheme

PEOPLE, FORGOTTEN, UNSEEN = 40, 4, 4
EPOCHS = 50  # of training; the model then knows its records by heart
MODES: tuple[Mode, ...] = ("clean", "noised", "mpu")
NOISE, KAPPA, ROUNDS = default_scheme(), Disguise().kappa, 1
# of those tried, the one after which a model that small still answers in sentences
UNLEARNING = Unlearning(
    algo="undial",
    epochs=40,
    loss=Loss(beta=10.0, alpha=3.0),
    training=Training(optim="adamw-blockwise", lr=8e-4, batch_size=10),
)
METRICS = (
    "forget_Q_A_Prob", "forget_Q_A_ROUGE", "forget_truth_ratio", "forget_quality", "retain_Q_A_Prob",
    "retain_Q_A_ROUGE", "extraction_strength", "mia_min_k", "privleak",
)  # fmt: skip


@dataclass
class Demonstration:
    """The demo's outputs: the unlearned model, the report, and metrics and answers of each model by name."""

    model: Path
    report: Path
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    answers: dict[str, dict[str, str]] = field(default_factory=dict)  # question → model (or "truth") → answer


def run_demo(folder: Path, *, seed: int = 0, observer: Observer = SILENT) -> Demonstration:
    """Play everything in ``folder``, which is made, and removed again if something fails.

    Raises MpuError if ``folder`` exists.
    """
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise MpuError(f"{folder}: already exists", "choose another directory for the demo") from error
    try:
        with Transaction():  # turns interrupts into exceptions
            return _play(folder, seed, observer)
    except BaseException:
        shutil.rmtree(folder)
        raise


def _play(folder: Path, seed: int, observer: Observer) -> Demonstration:
    people = make_people(PEOPLE + UNSEEN, seed)
    sets = {"forget": people[:FORGOTTEN], "retain": people[FORGOTTEN:PEOPLE], "holdout": people[PEOPLE:]}
    paths = {name: _write(folder / "records" / f"{name}.jsonl", of) for name, of in sets.items()}
    forget, retain, holdout = (read_records(path) for path in paths.values())
    models = folder / "models"
    tokenizer = make_tokenizer([*forget, *retain, *holdout])
    for name, records in (("target", forget + retain), ("retain", retain)):
        observer.stage(f"train the {name} model", 1.0, "done")
        make_model(
            records, tokenizer, models / name, epochs=EPOCHS, seed=seed,
            on_step=lambda losses, steps: observer.advance(1 / steps, f"loss {losses.loss:.2f}"),
        )  # fmt: skip
    observer.note(
        f"The server trained a model on {len(forget + retain)} facts about {PEOPLE} people and, for comparison, "
        f"one that never saw the {len(forget)} facts about {FORGOTTEN} of them."
    )
    measure = partial(_measure, paths=paths, folder=folder / "eval", observer=observer)
    measured = {"retain model": measure("retain", models / "retain")}
    measured["before"] = measure("before", models / "target")
    handed = KAPPA * sum(NOISE.scales) / NOISE.copies
    captions = {
        "clean": "Clean: the client got the model itself and unlearned on it.",
        "noised": f"Noised: the client got one noisy copy (κ = {handed:.3g}); its result is the new model.",
        "mpu": f"MPU: the client got {NOISE.copies} noisy copies in secret coordinates; the server mapped them back.",
    }
    models_made: dict[str, Path] = {}
    logs: dict[str, Sequence[Mapping[str, object]]] = {}
    for mode in MODES:
        experiment = Experiment(
            base=str(models / "target"), unlearning=UNLEARNING, mode=mode, disguise=Disguise(kappa=KAPPA),
            rounds=ROUNDS, keep=True,
        )  # fmt: skip
        outcome = run(experiment, Dataset(forget, retain), folder / mode, WarningsOnly(observer))
        models_made[mode], logs[mode] = outcome.model, outcome.log
        measured[mode] = measure(mode, outcome.model)
        observer.note(captions[mode])
    shown = Demonstration(models_made["mpu"], folder / "report.html")
    for name, forms in measured.items():
        shown.metrics[name] = {metric: forms[metric]["agg_value"] for metric in METRICS if metric in forms}
        if name == "retain model":
            shown.metrics[name]["privleak"] = 0.0  # against itself
        for split in ("forget", "retain"):
            answer = forms[f"{split}_Q_A_ROUGE"]["value_by_index"]["0"]
            question = str(sets[split][0][0]["question"])
            answers = shown.answers.setdefault(question, {"truth": answer["ground_truth"]})
            answers[name] = answer["generation"]
    write_report(folder, shown, measured, logs, {"κ": KAPPA, "copies": NOISE.copies, "people": PEOPLE})
    return shown


def _write(path: Path, people: Sequence[Sequence[Row]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for person in people for row in person), encoding="utf-8")
    return path


def _measure(name: str, model: Path, *, paths: Mapping[str, Path], folder: Path, observer: Observer) -> dict[str, Form]:
    """Metrics of ``model``, with the retain model's result as the log if it exists."""
    folder.mkdir(exist_ok=True)
    log = folder / "retain.json"
    retain = read_retain_log(log) if log.exists() else None
    forget, kept, unseen = read_own(None, str(paths["forget"]), str(paths["retain"]), str(paths["holdout"]))
    benchmark = own_records(forget, kept, unseen, retain)
    result = evaluate(
        open_model(str(model)),
        benchmark,
        Measuring(retain_log=log if retain else None),
        out=folder / f"{name}.json",
        observer=Within(WarningsOnly(observer), name),
    )
    return result.forms
