"""The demo's figure and report page: the comparison, the answers, and what each party held."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpu_cli.demo.outcome import Demonstration
from mpu_cli.evaluation.attack_metrics import RELEARNED
from mpu_cli.evaluation.plots import draw_comparison, draw_relearning, svg_of_comparison
from mpu_cli.evaluation.results import best, goal
from mpu_cli.figures import PALETTE, html_table, make_figure, page, svg

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


def write_report(
    folder: Path,
    shown: Demonstration,
    logs: Mapping[str, Sequence[Mapping[str, object]]],
    settings: Mapping[str, object],
) -> None:
    """Write ``folder/figure.png`` and a self-contained ``folder/report.html``."""
    labels = list(shown.metrics)
    columns = {
        name: [shown.metrics[label].get(name) for label in labels]
        for name in DRAWN
        if any(name in metrics for metrics in shown.metrics.values())
    }
    titled = {DRAWN[name][0]: values for name, values in columns.items()}
    draw_comparison(labels, titled, folder / "figure.png")
    shown_settings = ", ".join(f"{name} = {value}" for name, value in settings.items())
    rows = []
    for name, values in columns.items():
        # Only the ways compete; "before" and "retain model" are the baselines.
        clean_index = labels.index("clean")
        never_knew = values[labels.index(RETAIN)] if RETAIN in labels else None
        marked = {clean_index + i for i in best(values[clean_index:], goal(name), never_knew)}
        cells = ["–" if value is None else f"{value:.3g}" + " ★" * (i in marked) for i, value in enumerate(values)]
        rows.append([f"<b>{name}</b><br>{html.escape(DRAWN[name][1])}", *cells])
    ways = [f"<b>{name}</b>: {text}." for name, text in WAYS.items() if name in labels]
    parts = [
        f"<p>One model, {len(ways)} ways to make it forget ({html.escape(shown_settings)}). {' '.join(ways)} "
        + ("<b>retain model</b>: never saw the forget set. " if RETAIN in labels else "")
        + "★ marks the best of them.</p>",
        html_table(["", *labels], rows, escape=False),
        svg_of_comparison(labels, titled),
        *_relearning(shown),
        "<h2>What each model answers</h2>",
        *(html_table([question, ""], list(answers.items())) for question, answers in shown.answers.items()),
        "<h2>What each party held</h2>",
        html_table(
            ["server", "client"],
            [["<br>".join(_files(folder / "mpu" / party)) for party in ("server", "client")]],
            escape=False,
        ),
        "<p>The server's folder has no records; the client's has no keys, no base weights and no α.</p>",
        "<h2>What each step did</h2>",
        html_table(
            ["way", "step", "copy", "seconds", "details"],
            [_step(mode, line) for mode, log in logs.items() for line in log],
        ),
        "<p>For what this does and does not protect, see mpu's docs/threat_model.md.</p>",
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


def _files(folder: Path) -> list[str]:
    return [html.escape(str(path.relative_to(folder))) for path in sorted(folder.rglob("*")) if path.is_file()]


def _step(mode: str, line: Mapping[str, object]) -> list[str]:
    what = {
        "publish": lambda: f"noise σ {line['noise_survived']:.2e} of {line['noise_asked']:.2e} requested",
        "unlearn": lambda: f"{line['steps']} steps, ‖Δ‖ {line['norm']:.3g}",
        "aggregate": lambda: (
            f"‖Δ‖ {line['norm']:.3g}, smallest cosine between copies {line['smallest_pairwise_cosine']:.3f}"
        ),
    }[str(line["step"])]()
    return [mode, str(line["step"]), str(line.get("copy", "–")), f"{line['seconds']:.1f}", what]
