"""The demo: a model that knows too much, and what it still knows when it has unlearned.

The records are invented on the spot, and so are the models unless one is named: a public one, trained for long on other
people, and the server's, fine-tuned from it. Everything is done by the functions that the commands call: ``run`` plays
the protocol and, to compare with, unlearning on the model itself; ``eval`` gives the numbers.
"""

from __future__ import annotations

import html
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from mpu_cli.demo.model import (
    INITIALIZER_RANGE,
    PUBLIC_WIDTH,
    Row,
    finetune_gently,
    make_model,
    make_people,
    make_tokenizer,
)
from mpu_cli.errors import MpuError
from mpu_cli.files.transaction import Transaction
from mpu_cli.lab.finetune import finetune
from mpu_cli.lab.options.experiment import Experiment
from mpu_cli.lab.plots import PALETTE, comparison, draw_relearning, html_table, make_figure, page, svg
from mpu_cli.lab.rounds import run
from mpu_cli.lab.until_pass import run_until_pass
from mpu_cli.measuring.benchmarks.qa import own_records, read_own
from mpu_cli.measuring.evaluate import evaluate
from mpu_cli.measuring.metrics import DOWN, RELEARNED, MetricResult
from mpu_cli.measuring.metrics import RETAIN as TOWARDS_RETAIN
from mpu_cli.measuring.results import best, goal
from mpu_cli.measuring.retain import read_retain_log
from mpu_cli.model.device import device_of
from mpu_cli.model.source import Model, open_model
from mpu_cli.observer import Observer, PrefixedObserver
from mpu_cli.options.evaluation import Measuring, Recovery, Scoring
from mpu_cli.options.unlearning import (
    AlgorithmOptions,
    Goal,
    Prompts,
    RecordFormat,
    Records,
    Stopping,
    Training,
    Unlearning,
)
from mpu_cli.records.forms import Record
from mpu_cli.records.read import read_records
from mpu_cli.training.data import Dataset
from mpu_cli.training.loop import Losses


@dataclass
class Demonstration:
    """The demo's outputs: the unlearned model, the report, and metrics and answers of each model by name."""

    model: Path
    report: Path
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    relearning: dict[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)  # of each, its curve
    answers: dict[str, dict[str, str]] = field(default_factory=dict)  # question → model (or "truth") → answer


# The demo's figure and report page: the comparison, the answers, and what each party held.

# What is drawn: a title, and what a table says of it.
DRAWN = {
    "forget_Q_A_Prob": (
        "To be forgotten: still certain of it", "probability of each token of the true answers, to be forgotten"
    ),
    "retain_Q_A_Prob": (
        "To be kept: still certain of it", "probability of each token of the true answers, to be kept"
    ),
    "forget_Q_A_ROUGE": (
        "To be forgotten: still says it", "words of the true answer that its own answer has (ROUGE-L recall)"
    ),
    "retain_Q_A_ROUGE": ("To be kept: still says it", "words of the true answer that its own answer has"),
    "forget_truth_ratio": (
        "Cannot tell true from wrong", "truth ratio: how poorly it distinguishes true from wrong (1: not at all)"
    ),
    "forget_quality": (
        "Like one that never knew", "p-value: is it distinguishable from a model that never saw the forget set?"
    ),
    "mia_min_k": (
        "Shows that it knew", "attack: does it know the forget set (1: certainly; the retain model's value: no)?"
    ),
    "privleak": (
        "Shows more than one that never knew", "that attack relative to the retain model (0: no difference)"
    ),
    RELEARNED: (
        "Comes back when the other half is taught again",
        "probability of half of the true answers, after 20 steps of learning the other half again",
    ),
}  # fmt: skip
RETAIN = "retain model"
WAYS = {"clean": "the client got the model itself", "mpu": "the protocol"}


def write_report(folder: Path, shown: Demonstration, settings: Mapping[str, object]) -> None:
    """Write a self-contained ``folder/report.html``."""
    labels = list(shown.metrics)
    columns = {}
    for name in DRAWN:
        if any(name in metrics for metrics in shown.metrics.values()):
            columns[name] = [metrics.get(name) for metrics in shown.metrics.values()]
    titled = {DRAWN[name][0]: values for name, values in columns.items()}
    shown_settings = ", ".join(f"{name} = {value}" for name, value in settings.items())
    rows = []
    for name, values in columns.items():
        # Only the ways compete; "before" and "retain model" are the baselines.
        first_way = next(i for i, label in enumerate(labels) if label in WAYS)
        never_knew = values[labels.index(RETAIN)] if RETAIN in labels else None
        # Less than a model that never saw the records knows is no better than as much.
        aim = TOWARDS_RETAIN if never_knew is not None and goal(name) == DOWN else goal(name)
        marked = {first_way + i for i in best(values[first_way:], aim, never_knew)}
        cells = ["–" if value is None else f"{value:.3g}" for value in values]
        for i in marked:
            cells[i] += " ★"
        rows.append([f"<b>{name}</b><br>{html.escape(DRAWN[name][1])}", *cells])
    ways = [f"<b>{name}</b>: {text}." for name, text in WAYS.items() if name in labels]
    parts = [
        f"<p>A model that was made to forget ({html.escape(shown_settings)}). {' '.join(ways)} "
        + ("<b>retain model</b>: never saw the forget set. " if RETAIN in labels else "")
        + ("★ marks the best of them.</p>" if len(ways) > 1 else "</p>"),
        html_table(["", *labels], rows, escape=False),
        svg(comparison(labels, titled)),
        *_relearning(shown),
        "<h2>What each model answers</h2>",
        *(html_table([question, ""], list(answers.items())) for question, answers in shown.answers.items()),
        "<h2>What each party held</h2>",
        html_table(
            ["server", "client"], [[_files(folder / "mpu" / party) for party in ("server", "client")]], escape=False
        ),
        "<p>The server's folder has no records; the client's has no keys, no base weights and no α.</p>",
        "<p>For what this does and does not protect, see mpu's docs/protection.md.</p>",
    ]
    shown.report.write_text(page("Unlearning without sharing the records or the model", parts), encoding="utf-8")


def _relearning(shown: Demonstration) -> list[str]:
    curves = [(name, PALETTE[i], curve) for i, (name, curve) in enumerate(shown.relearning.items())]
    if not curves:
        return []
    return [
        "<h2>Does it stay forgotten?</h2>",
        "<p>Half of what was forgotten is taught to each model again; this is how likely the other half becomes. What "
        "was only suppressed comes back, and the retain model, which never knew it, shows what such training teaches "
        "anyway.</p>",
        svg(make_figure([lambda axes: draw_relearning(axes, curves)], None)),
    ]


def _files(folder: Path) -> str:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return "<br>".join(html.escape(str(path.relative_to(folder))) for path in paths)


LABELS = {"forget": "To be forgotten", "retain": "To be kept"}


@dataclass(frozen=True)
class Scenario:
    """The people to know and to forget, the model's training, and the metrics."""

    people: int
    forgotten: int
    unseen: int
    evaluated: int  # of the people that are to be kept, how many are asked about
    epochs: int  # of the fine-tuning
    metrics: tuple[str, ...]
    clean: Unlearning | None = None  # the unlearning on the model itself, to compare with
    retain_model: bool = False  # whether to train one that never saw the people to be forgotten, to compare with
    recovery: Recovery = field(default_factory=Recovery)  # attacks on what every model forgot
    device: str = "auto"


KNOWLEDGE = ("forget_Q_A_Prob", "forget_Q_A_ROUGE", "retain_Q_A_Prob", "retain_Q_A_ROUGE")
PUBLIC_PEOPLE, PUBLIC_EPOCHS = 60, 30  # of the public model that is made on the spot
SMALL = Scenario(
    people=44, forgotten=8, unseen=16, evaluated=36, epochs=40,  # of fewer records a check cannot say enough
    # The level at which `unlearn --unseen` arrives, too: the log-probability of what the model never saw.
    clean=Unlearning(
        algo="hinge", epochs=35, algorithm_options=AlgorithmOptions(level=-1.6), training=Training(batch_size=10)
    ),
    metrics=(
        "forget_Q_A_Prob", "forget_Q_A_ROUGE", "forget_truth_ratio", "forget_quality", "retain_Q_A_Prob",
        "retain_Q_A_ROUGE", "extraction_strength", "mia_min_k", "privleak", RELEARNED,
    ),
    retain_model=True,
    recovery=Recovery(attacks=("relearn:20:3e-4",)),
)  # fmt: skip
# A real model on two cores: fewer people, and what can be shown.
REAL = Scenario(people=10, forgotten=2, unseen=6, evaluated=3, epochs=8, metrics=KNOWLEDGE)
LEARNING = Training(lr=1e-4, batch_size=8)  # of a model that is given


def run_demo(folder: Path, *, model: str | None, seed: int, device: str, observer: Observer) -> Demonstration:
    """Play everything in ``folder``, which is made, and removed again if something fails; with ``model``, a chat model,
    or one that is made on the spot. Models are trained and asked on ``device``."""
    device_of(device)  # or it fails when the folder is there
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    given = open_model(model) if model else None
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise MpuError(f"{folder}: already exists", "choose another directory for the demo") from error
    try:
        with Transaction():  # turns interrupts into exceptions
            return _play(folder, given, replace(REAL if given else SMALL, device=device), seed, observer)
    except BaseException:
        shutil.rmtree(folder)
        raise


def _play(folder: Path, given: Model | None, scenario: Scenario, seed: int, observer: Observer) -> Demonstration:
    people = make_people(scenario.people + scenario.unseen + PUBLIC_PEOPLE, seed)
    sets = {
        "forget": people[: scenario.forgotten], "retain": people[scenario.forgotten : scenario.people],
        "unseen": people[scenario.people : scenario.people + scenario.unseen],
    }  # fmt: skip
    paths = {name: _write(folder / "records" / f"{name}.jsonl", group) for name, group in sets.items()}
    forget, retain, unseen = (read_records(path) for path in paths.values())
    eval_paths = paths | {"retain": _write(folder / "records" / "asked.jsonl", sets["retain"][: scenario.evaluated])}
    models = folder / "models"
    if given:
        finetune(
            given, forget + retain, replace(LEARNING, seed=seed, device=scenario.device), Prompts(),
            epochs=scenario.epochs, out=models / "target", observer=PrefixedObserver(observer, "the target model"),
        )  # fmt: skip
    else:
        others = read_records(_write(folder / "records" / "public.jsonl", people[scenario.people + scenario.unseen :]))
        _make_models(models, [forget, retain, unseen, others], scenario, seed, observer)
    public, target = given.source if given else str(models / "public"), models / "target"
    what_follows = f"The client wants {scenario.forgotten} of them forgotten."
    if scenario.retain_model:
        what_follows += f" Another, to compare with, never saw the {len(forget)} facts about these."
    observer.note(
        f"The server fine-tuned {'your' if given else 'a public'} model on {len(forget + retain)} facts about "
        f"{scenario.people} people. {what_follows}"
    )
    measure = partial(_measure, paths=eval_paths, scenario=scenario, folder=folder / "eval", observer=observer)
    measured = {}
    if scenario.retain_model:
        measured[RETAIN] = measure("retain", models / "retain")
    measured["before"] = measure("before", target)
    if scenario.clean:
        clean = replace(scenario.clean, training=replace(scenario.clean.training, device=scenario.device))
        experiment = Experiment(base=str(target), unlearning=clean, mode="clean", rounds=1, keep=True)
        outcome = run(
            experiment, Dataset(forget, retain), folder / "clean", PrefixedObserver(observer, "clean", notes=False)
        )
        measured["clean"] = measure("clean", outcome.model)
        observer.note("Clean: the client got the model itself and unlearned on it.")
    records = Records(forget=str(paths["forget"]), retain=str(paths["retain"]))
    unlearning = Unlearning(records=records, training=Training(device=scenario.device))
    protocol = Experiment(base=str(target), unlearning=unlearning, public=public)
    goal = Goal(unseen=str(paths["unseen"]))
    request = run_until_pass(protocol, goal, Stopping(), folder / "mpu", PrefixedObserver(observer, "mpu", notes=False))
    measured["mpu"] = measure("mpu", request.model)
    observer.note(
        "MPU: the client got a copy with permanent noise, in secret coordinates, and returned how its weights changed; "
        f"the server mapped that back. The client's check of the new model: {request.verdicts[-1].sentence}."
    )
    shown = Demonstration(request.model, folder / "report.html")
    for name, forms in measured.items():
        shown.metrics[name] = {metric: forms[metric]["agg_value"] for metric in scenario.metrics if metric in forms}
        if curve := forms.get(RELEARNED, {}).get("curve"):
            shown.relearning[name] = curve
        if name == RETAIN:
            shown.metrics[name]["privleak"] = 0.0  # against itself
        for split, label in LABELS.items():
            answer = forms[f"{split}_Q_A_ROUGE"]["value_by_index"]["0"]
            question = f"{label}: {sets[split][0][0]['question']}"
            answers = shown.answers.setdefault(question, {"truth": answer["ground_truth"]})
            answers[name] = answer["generation"]
    write_report(folder, shown, {"people": scenario.people, "to be forgotten": scenario.forgotten})
    return shown


def _make_models(
    models: Path, sets: Sequence[Sequence[Record]], scenario: Scenario, seed: int, observer: Observer
) -> None:
    """The public model, and two that are fine-tuned from it: the server's, and one that never saw the records to
    forget."""
    forget, retain, _, others = sets
    tokenizer = make_tokenizer([record for records in sets for record in records])
    device, public = device_of(scenario.device), models / "public"

    def on_step(losses: Losses, steps: int) -> None:
        observer.advance(1 / steps, f"loss {losses.loss:.2f}")

    observer.stage("train the public model", 1.0, "done")
    make_model(
        others, tokenizer, public, epochs=PUBLIC_EPOCHS, seed=seed, on_step=on_step, device=device,
        width=PUBLIC_WIDTH, initializer_range=INITIALIZER_RANGE,
    )  # fmt: skip
    for name, records in (("target", [*forget, *retain]), ("retain", retain)):
        observer.stage(f"train the {name} model", 1.0, "done")
        finetune_gently(
            public, records, models / name, epochs=scenario.epochs, seed=seed, on_step=on_step, device=device
        )


def _write(path: Path, people: Sequence[Sequence[Row]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for person in people for row in person), encoding="utf-8")
    return path


def _measure(
    name: str, model: Path, *, paths: Mapping[str, Path], scenario: Scenario, folder: Path, observer: Observer
) -> dict[str, MetricResult]:
    """The scenario's metrics of ``model``, with the retain model's result as the log if it exists."""
    folder.mkdir(exist_ok=True)
    log = folder / "retain.json"
    retain = read_retain_log(log) if log.exists() else None
    sources = {"forget": str(paths["forget"]), "retain": str(paths["retain"]), "holdout": str(paths["unseen"])}
    forget, retain_records, unseen = read_own(sources, RecordFormat())
    benchmark = replace(own_records(forget, retain_records, unseen, retain), attacks=tuple(scenario.recovery.names))
    names = tuple(name for name in scenario.metrics if name in benchmark.metrics)
    scoring = Scoring(device=scenario.device)
    result = evaluate(
        open_model(str(model)),
        benchmark,
        Measuring(retain_log=log if retain else None, metrics=names, recovery=scenario.recovery, scoring=scoring),
        out=folder / f"{name}.json",
        observer=PrefixedObserver(observer, name, notes=False),
    )
    return result.forms
