"""The demonstration's figure and its page: the comparison, what was said, and what each party held."""

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
    "forget_Q_A_Prob": "probability of the true answers to forget",
    "retain_Q_A_Prob": "probability of the true answers to keep",
    "forget_truth_ratio": "how little better it tells true from wrong (1: not at all)",
    "forget_quality": "p-value: is it told from a model that never saw the forget set?",
    "mia_min_k": "attack: does it know the forget set (1: surely, the retain model's: no)?",
    "privleak": "that attack against the retain model's (0: alike)",
}


def write_report(
    folder: Path,
    shown: Demonstration,
    measured: Mapping[str, Mapping[str, Form]],
    logs: Mapping[str, Sequence[Mapping[str, object]]],
    settings: Mapping[str, object],
) -> None:
    """``folder/figure.png`` and ``folder/report.html``, which needs nothing beside itself."""
    labels = list(measured)
    columns = {name: [shown.metrics[label].get(name) for label in labels] for name in DRAWN}
    draw_comparison(labels, columns, folder / "figure.png")
    told = ", ".join(f"{name} = {value}" for name, value in settings.items())
    rows = []
    for name, values in columns.items():
        # Of the three ways; before and the retain model are what they are compared with.
        first = labels.index("clean")
        marked = {first + i for i in best(values[first:], goal(name))}
        cells = ["–" if value is None else f"{value:.3g}" + " ★" * (i in marked) for i, value in enumerate(values)]
        rows.append([WORDS[name], *cells])
    parts = [
        f"<p>One model, three ways to make it forget ({html.escape(told)}). <b>clean</b>: the client was handed the "
        "model itself. <b>noised</b>: one noisy copy, and its noise stays. <b>mpu</b>: the protocol. <b>retain "
        "model</b>: never saw what was to be forgotten. ★ the best of the three.</p>",
        html_table(["", *labels], rows),
        svg_of_comparison(labels, columns),
        "<h2>What they say</h2>",
        *(html_table([question, ""], list(said.items()), kind="texts") for question, said in shown.answers.items()),
        "<h2>What each party held</h2>",
        html_table(
            ["server", "client"],
            [["<br>".join(_files(folder / "mpu" / party)) for party in ("server", "client")]],
            kind="texts",
            escape=False,
        ),
        "<p>The server's folder holds no record, the client's no key, no base weight and no α.</p>",
        "<h2>What the steps did</h2>",
        html_table(
            ["way", "step", "copy", "seconds", "what"],
            [_step(mode, line) for mode, log in logs.items() for line in log],
        ),
        "<p>What this does and does not protect: see SECURITY.md of mpu.</p>",
    ]
    shown.report.write_text(page("Unlearning without showing each other anything", parts), encoding="utf-8")


def _files(folder: Path) -> list[str]:
    return [html.escape(str(path.relative_to(folder))) for path in sorted(folder.rglob("*")) if path.is_file()]


def _step(mode: str, line: Mapping[str, object]) -> list[str]:
    what = {
        "publish": lambda: f"noise σ {line['noise_survived']:.2e} of {line['noise_asked']:.2e} asked for",
        "unlearn": lambda: f"{line['steps']} steps, ‖Δ‖ {line['norm']:.3g}",
        "aggregate": lambda: (
            f"‖Δ‖ {line['norm']:.3g}, smallest cosine between copies {line['smallest_pairwise_cosine']:.3f}"
        ),
    }[str(line["step"])]()
    return [mode, str(line["step"]), str(line.get("copy", "–")), f"{line['seconds']:.1f}", what]
