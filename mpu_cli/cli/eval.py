"""``mpu eval``: what a model still knows, and what it can still do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import expand_option_groups
from mpu_cli.cli.output import emit, names_in, note, show_answers, table, terminal, warn
from mpu_cli.options.evaluation import Measuring, Scoring

if TYPE_CHECKING:
    from mpu_cli.evaluation.metrics import MetricResult
    from mpu_cli.evaluation.retain import RetainLog

OUTPUT = "Output"
ARROWS = {"up": "↑", "down": "↓", "zero": "→ 0", "retain": "→ retain"}


@expand_option_groups
def eval_(
    model: Annotated[
        str, typer.Argument(help="A model directory, .safetensors file, Hub id, or an output of mpu.", metavar="MODEL")
    ],
    measuring: Measuring,
    records: Annotated[
        Path | None,
        typer.Argument(
            help="For --benchmark qa: one file instead of three; each record's 'set' is forget, retain or holdout.",
            metavar="[FILE]",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="For an adapter: its base (default: the folder beside it that its config names).", metavar="BASE"
        ),
    ] = None,
    delta: Annotated[
        Path | None,
        typer.Option(help="Measure MODEL, a copy, with this delta of it: the client's own check.", metavar="FILE"),
    ] = None,
    show: Annotated[
        int,
        typer.Option(
            help="Print answers to the first N questions of the forget set; with --delta, before and after.",
            metavar="N",
            min=0,
            rich_help_panel=OUTPUT,
        ),
    ] = 0,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Measure the model that this OpenAI-compatible address serves, such as http://HOST:8000/v1, with the "
            "tokenizer of MODEL. The key, if it needs one, is MPU_ENDPOINT_KEY.",
            metavar="URL",
            rich_help_panel=Scoring.PANEL,
        ),
    ] = None,
    endpoint_model: Annotated[
        str | None,
        typer.Option(
            help="The served model's name (default: the first that the endpoint lists).",
            metavar="NAME",
            rich_help_panel=Scoring.PANEL,
        ),
    ] = None,
    lm_eval: Annotated[
        str | None,
        typer.Option(
            help="Also run these EleutherAI harness tasks, comma-separated (pip install lm-eval).",
            metavar="TASKS",
            rich_help_panel=Scoring.PANEL,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Result file (JSON).", rich_help_panel=OUTPUT, metavar="FILE")] = Path(
        "eval.json"
    ),
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Plot the distributions behind the numbers (.png, .svg, .pdf or .html).",
            rich_help_panel=OUTPUT,
            metavar="FILE",
        ),
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(help="For --plot: result of the model before unlearning.", rich_help_panel=OUTPUT, metavar="FILE"),
    ] = None,
    texts: Annotated[
        bool,
        typer.Option(
            "--texts/--no-texts",
            help="Whether the result file holds questions, answers and generations; leave them out of what you send.",
            rich_help_panel=OUTPUT,
        ),
    ] = True,
    identity: options.Identity = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Measure forgetting, utility and privacy of MODEL as OpenUnlearning does, with the same numbers.

    An interrupted run resumes where it left off. Prints the path of the result; the table goes to standard error.
    """
    from mpu_cli.api.measuring import measure

    with terminal() as observer:
        measured = measure(
            model, records, out=out, base=base, delta=delta, show=show, lm_eval=names_in(lm_eval), endpoint=endpoint,
            endpoint_model=endpoint_model, plot=plot, before=before, force=force, identity=identity,
            texts=texts, options=measuring, observer=observer,
        )  # fmt: skip
    result = measured.result
    _tell(f"{endpoint or model} on {measured.benchmark}", result.forms, measured.log)
    show_answers(result.shown)
    if texts:
        note(f"{out}: only you can read it; it holds questions and answers, which --no-texts leaves out")
    if delta:
        note("this is the copy with its delta; the server's model may forget less (docs/protection.md)")
    if measured.log is None and "privleak" in result.forms:
        note("privleak: no --retain-log, so the retain model's AUC is assumed to be 0.5")
    for name, form in result.forms.items():
        if reason := form.get("reason"):
            warn(f"{name} has no value: {reason}")
    emit(
        [result.path, *([plot] if plot else [])],
        {"result": result.path, "metrics": {name: form["agg_value"] for name, form in result.forms.items()}},
        as_json,
    )


def _tell(title: str, forms: Mapping[str, MetricResult], log: RetainLog | None) -> None:
    """The table of metrics, the main ones first, beside the retain model's."""
    from mpu_cli.evaluation.results import goal, main_metrics

    rows = []
    for name in dict.fromkeys([*main_metrics(forms), *forms]):
        beside = log.value(name) if log else None
        if log and name == "privleak":
            beside = 0.0  # computed against that model; the log's own value was computed without one
        form = forms[name]
        rows.append([name, _with_interval(form), ARROWS[goal(name, form)], *([_number(beside)] if log else [])])
    table(title, ["metric", "value", "goal", *(["retain model"] if log else [])], rows)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _with_interval(form: Mapping[str, Any]) -> str:
    between = form.get("interval")
    return _number(form["agg_value"]) + (f" ({between[0]:.3g} to {between[1]:.3g})" if between else "")
