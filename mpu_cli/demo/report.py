"""The demo's figure and report page: the comparison, the answers, and what each party held."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.evaluation.metrics import Form
from mpu_cli.evaluation.plots import draw_comparison, svg_of_comparison
from mpu_cli.evaluation.results import best, goal
from mpu_cli.figures import html_table, page

if TYPE_CHECKING:
    from mpu_cli.demo.show import Demonstration

DRAWN = ("forget_Q_A_Prob", "retain_Q_A_Prob", "forget_truth_ratio", "forget_quality", "mia_min_k", "privleak")
WORDS = {
    "forget_Q_A_Prob": "probability of the true answers (forget set)",
    "retain_Q_A_Prob": "probability of the true answers (retain set)",
    "forget_truth_ratio": "truth ratio: how poorly it distinguishes true from wrong (1: not at all)",
    "forget_quality": "p-value: is it distinguishable from a model that never saw the forget set?",
    "mia_min_k": "attack: does it know the forget set (1: certainly; the retain model's value: no)?",
    "privleak": "that attack relative to the retain model (0: no difference)",
}


def write_report(
    folder: Path,
    shown: Demonstration,
    measured: Mapping[str, Mapping[str, Form]],
    logs: Mapping[str, Sequence[Mapping[str, object]]],
    settings: Mapping[str, object],
) -> None:
    """Write ``folder/figure.png`` and a self-contained ``folder/report.html``."""
    labels = list(measured)
    columns = {name: [shown.metrics[label].get(name) for label in labels] for name in DRAWN}
    draw_comparison(labels, columns, folder / "figure.png")
    shown_settings = ", ".join(f"{name} = {value}" for name, value in settings.items())
    rows = []
    for name, values in columns.items():
        # Only the three ways compete; "before" and "retain model" are the baselines.
        first = labels.index("clean")
        marked = {first + i for i in best(values[first:], goal(name), values[labels.index("retain model")])}
        cells = ["–" if value is None else f"{value:.3g}" + " ★" * (i in marked) for i, value in enumerate(values)]
        rows.append([f"<b>{name}</b><br>{html.escape(WORDS[name])}", *cells])
    parts = [
        f"<p>One model, three ways to make it forget ({html.escape(shown_settings)}). <b>clean</b>: the client got the "
        "model itself. <b>noised</b>: it got one noisy copy, and the noise stays. <b>mpu</b>: the protocol. <b>retain "
        "model</b>: never saw the forget set. ★ marks the best of the three: attacks nearest to the retain model's "
        "value, PrivLeak nearest to 0.</p>",
        html_table(["", *labels], rows, escape=False),
        svg_of_comparison(labels, columns),
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
        "<p>For what this does and does not protect, see mpu's SECURITY.md.</p>",
    ]
    shown.report.write_text(page("Unlearning without sharing the records or the model", parts), encoding="utf-8")


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
