"""The demo: a model that knows too much, and what three ways of unlearning leave of that.

The records are invented on the spot, and so is the model unless one is named. Everything is done by the functions that
the commands call: ``finetune`` makes the models, ``run`` plays the three ways, ``eval`` gives the numbers.
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

from mpu_cli.demo.model import Row, make_model, make_people, make_tokenizer
from mpu_cli.errors import MpuError
from mpu_cli.files.transaction import Transaction
from mpu_cli.lab.rounds import run
from mpu_cli.measuring.benchmarks.qa import own_records, read_own
from mpu_cli.measuring.evaluate import evaluate
from mpu_cli.measuring.metrics import DOWN, RELEARNED, MetricResult
from mpu_cli.measuring.metrics import RETAIN as TOWARDS_RETAIN
from mpu_cli.measuring.plots import PALETTE, comparison, draw_relearning, html_table, make_figure, page, svg
from mpu_cli.measuring.results import best, goal
from mpu_cli.measuring.retain import read_retain_log
from mpu_cli.model.device import device_of
from mpu_cli.model.source import Model, open_model
from mpu_cli.observer import SILENT, Observer, Within
from mpu_cli.options.evaluation import Measuring, Recovery, Scoring
from mpu_cli.options.experiment import Experiment, Mode
from mpu_cli.options.publishing import AUTO, Disguise, ServerRate
from mpu_cli.options.unlearning import Loss, Prompts, RecordFormat, Training, Unlearning
from mpu_cli.protocol.noise import scheme_of
from mpu_cli.records.forms import Record
from mpu_cli.records.read import read_records
from mpu_cli.training.data import Dataset
from mpu_cli.training.finetune import finetune


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
WAYS = {
    "clean": "the client got the model itself", "noised": "it got one copy with permanent noise",
    "mpu": "the protocol",
}  # fmt: skip


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
        clean_index = labels.index("clean")
        never_knew = values[labels.index(RETAIN)] if RETAIN in labels else None
        # Less than a model that never saw the records knows is no better than as much.
        aim = TOWARDS_RETAIN if never_knew is not None and goal(name) == DOWN else goal(name)
        marked = {clean_index + i for i in best(values[clean_index:], aim, never_knew)}
        cells = ["–" if value is None else f"{value:.3g}" for value in values]
        for i in marked:
            cells[i] += " ★"
        rows.append([f"<b>{name}</b><br>{html.escape(DRAWN[name][1])}", *cells])
    ways = [f"<b>{name}</b>: {text}." for name, text in WAYS.items() if name in labels]
    parts = [
        f"<p>One model, {len(ways)} ways to make it forget ({html.escape(shown_settings)}). {' '.join(ways)} "
        + ("<b>retain model</b>: never saw the forget set. " if RETAIN in labels else "")
        + "★ marks the best of them.</p>",
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


MODES: tuple[Mode, ...] = ("clean", "noised", "mpu")
LABELS = {"forget": "To be forgotten", "retain": "To be kept"}


@dataclass(frozen=True)
class Story:
    """Who is known and who is to be forgotten, how the model learns and unlearns, and what is measured.

    ``evaluated``: of the people that are to be kept, how many are asked about; ``retain_model``: whether one that never
    saw the others is trained, to compare with; ``recovery``: attacks on what every model forgot; ``max_rise``: if set,
    the server goes as far along mpu's update as what is to be kept allows (``--server-lr auto``). ``device``: on which
    models are trained and asked.
    """

    people: int
    forgotten: int
    unseen: int
    evaluated: int
    epochs: int
    unlearning: Unlearning
    metrics: tuple[str, ...]
    retain_model: bool
    modes: tuple[Mode, ...] = MODES
    max_rise: float | None = None
    recovery: Recovery = field(default_factory=Recovery)
    device: str = "auto"


KNOWLEDGE = ("forget_Q_A_Prob", "forget_Q_A_ROUGE", "retain_Q_A_Prob", "retain_Q_A_ROUGE")
SMALL = Story(
    people=40, forgotten=4, unseen=12, evaluated=36, epochs=50,
    # The level at which `unlearn --unseen` arrives, too: the log-probability of what the model never saw.
    unlearning=Unlearning(algo="hinge", epochs=35, loss=Loss(level=-1.6), training=Training(batch_size=10)),
    metrics=(
        "forget_Q_A_Prob", "forget_Q_A_ROUGE", "forget_truth_ratio", "forget_quality", "retain_Q_A_Prob",
        "retain_Q_A_ROUGE", "extraction_strength", "mia_min_k", "privleak", RELEARNED,
    ),
    retain_model=True,
    recovery=Recovery(attacks=("relearn",), relearn_lr=3e-4),
)  # fmt: skip
# A real model on two cores: fewer people, the noise that `publish` chooses for it, and what can be shown.
REAL = Story(
    people=10, forgotten=2, unseen=6, evaluated=3, epochs=8,
    unlearning=Unlearning(algo="npo", epochs=12, training=Training(lr=3e-5, batch_size=10)),
    metrics=KNOWLEDGE,
    retain_model=False,
    modes=("clean", "mpu"),
    max_rise=0.1,
)  # fmt: skip
LEARNING = Training(lr=1e-4, batch_size=8)  # of a model that is given


def run_demo(
    folder: Path, *, model: str | None = None, seed: int = 0, device: str = "auto", observer: Observer = SILENT
) -> Demonstration:
    """Play everything in ``folder``, which is made, and removed again if something fails; with ``model``, a chat model,
    or one that is made on the spot. Models are trained and asked on ``device``.

    Raises MpuError if ``folder`` exists, or if the model or the device cannot be used.
    """
    device_of(device)  # or it fails when the folder is there
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    pretrained = open_model(model) if model else None
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise MpuError(f"{folder}: already exists", "choose another directory for the demo") from error
    try:
        with Transaction():  # turns interrupts into exceptions
            return _play(folder, pretrained, replace(REAL if pretrained else SMALL, device=device), seed, observer)
    except BaseException:
        shutil.rmtree(folder)
        raise


def _play(folder: Path, pretrained: Model | None, story: Story, seed: int, observer: Observer) -> Demonstration:
    people = make_people(story.people + story.unseen, seed)
    sets = {
        "forget": people[: story.forgotten], "retain": people[story.forgotten : story.people],
        "holdout": people[story.people :],
    }  # fmt: skip
    files = {"forget": "forget", "retain": "retain", "holdout": "unseen"}
    paths = {name: _write(folder / "records" / f"{files[name]}.jsonl", group) for name, group in sets.items()}
    forget, retain, holdout = (read_records(path) for path in paths.values())
    eval_paths = paths | {"retain": _write(folder / "records" / "asked.jsonl", sets["retain"][: story.evaluated])}
    _teach(folder / "models", pretrained, story, sets=[forget, retain, holdout], seed=seed, observer=observer)
    what_follows = f". The client wants {story.forgotten} of them forgotten."
    if story.retain_model:
        facts = f"the {len(forget)} facts about {story.forgotten} of them"
        what_follows = f" and, for comparison, one that never saw {facts}."
    observer.note(
        f"The server trained {'your' if pretrained else 'a'} model on {len(forget + retain)} facts about "
        f"{story.people} people{what_follows}"
    )
    measure = partial(_measure, paths=eval_paths, story=story, folder=folder / "eval", observer=observer)
    target = folder / "models" / "target"
    disguise = Disguise().with_scale(with_pretrained=pretrained is not None)
    measured = {}
    if story.retain_model:
        measured[RETAIN] = measure("retain", folder / "models" / "retain")
    measured["before"] = measure("before", target)
    noise = scheme_of(disguise)
    handed = (disguise.kappa or 0.0) * sum(noise.scales) / noise.copies
    captions = {
        "clean": "Clean: the client got the model itself and unlearned on it.",
        "noised": f"Noised: the client got one noisy copy (κ = {handed:.3g}); its result is the new model.",
        "mpu": f"MPU: the client got {noise.copies} noisy copies in secret coordinates; the server mapped them back.",
    }
    if noise.copies == 1:
        scale = f"permanent noise of {disguise.permanent_noise:g} times what learning had changed"
        captions["mpu"] = (
            f"MPU: the client got one copy with {scale}, in secret coordinates; the server mapped it back."
        )
    unlearning = replace(story.unlearning, training=replace(story.unlearning.training, device=story.device))
    models_made: dict[str, Path] = {}
    for mode in story.modes:
        step = ServerRate()
        if mode == "mpu" and story.max_rise:
            step = ServerRate(server_lr=AUTO, probe=paths["retain"], max_rise=story.max_rise)
        experiment = Experiment(
            base=str(target), unlearning=unlearning, mode=mode, disguise=disguise, rounds=1, keep=True,
            pretrained=pretrained.source if pretrained else None, server_rate=step,
        )  # fmt: skip
        outcome = run(experiment, Dataset(forget, retain), folder / mode, Within(observer, mode, notes=False))
        models_made[mode] = outcome.model
        measured[mode] = measure(mode, outcome.model)
        observer.note(captions[mode])
    shown = Demonstration(models_made["mpu"], folder / "report.html")
    for name, forms in measured.items():
        shown.metrics[name] = {metric: forms[metric]["agg_value"] for metric in story.metrics if metric in forms}
        if curve := forms.get(RELEARNED, {}).get("curve"):
            shown.relearning[name] = curve
        if name == RETAIN:
            shown.metrics[name]["privleak"] = 0.0  # against itself
        for split, label in LABELS.items():
            answer = forms[f"{split}_Q_A_ROUGE"]["value_by_index"]["0"]
            question = f"{label}: {sets[split][0][0]['question']}"
            answers = shown.answers.setdefault(question, {"truth": answer["ground_truth"]})
            answers[name] = answer["generation"]
    write_report(folder, shown, {"κ": disguise.kappa, "copies": noise.copies, "people": story.people})
    return shown


def _teach(
    models: Path, pretrained: Model | None, story: Story, *, sets: list[list[Record]], seed: int, observer: Observer
) -> None:
    """Make the models that the story begins with."""
    forget, retain, holdout = sets
    if pretrained:
        finetune(
            pretrained, forget + retain, replace(LEARNING, seed=seed, device=story.device), Prompts(),
            epochs=story.epochs, out=models / "target", observer=Within(observer, "the target model"),
        )  # fmt: skip
        return
    tokenizer = make_tokenizer([*forget, *retain, *holdout])
    for name, records in (("target", forget + retain), ("retain", retain)):
        observer.stage(f"train the {name} model", 1.0, "done")
        make_model(
            records, tokenizer, models / name, epochs=story.epochs, seed=seed, device=device_of(story.device),
            on_step=lambda losses, steps: observer.advance(1 / steps, f"loss {losses.loss:.2f}"),
        )  # fmt: skip


def _write(path: Path, people: Sequence[Sequence[Row]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for person in people for row in person), encoding="utf-8")
    return path


def _measure(
    name: str, model: Path, *, paths: Mapping[str, Path], story: Story, folder: Path, observer: Observer
) -> dict[str, MetricResult]:
    """The story's metrics of ``model``, with the retain model's result as the log if it exists."""
    folder.mkdir(exist_ok=True)
    log = folder / "retain.json"
    retain = read_retain_log(log) if log.exists() else None
    sources = {name: str(paths[name]) for name in ("forget", "retain", "holdout")}
    forget, retain_records, unseen = read_own(sources, RecordFormat())
    benchmark = replace(own_records(forget, retain_records, unseen, retain), attacks=story.recovery.attacks)
    names = tuple(name for name in story.metrics if name in benchmark.metrics)
    scoring = Scoring(device=story.device)
    result = evaluate(
        open_model(str(model)),
        benchmark,
        Measuring(retain_log=log if retain else None, metrics=names, recovery=story.recovery, scoring=scoring),
        out=folder / f"{name}.json",
        observer=Within(observer, name, notes=False),
    )
    return result.forms
