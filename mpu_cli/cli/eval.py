"""``mpu eval``: what a model still knows, and what it can still do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note, progress, table
from mpu_cli.errors import UsageError

DATA, RUNNING, OUTPUT = "Records", "Running", "Output"
ARROWS = {"up": "↑", "down": "↓", "zero": "→ 0", "retain": "→ retain"}


def eval_(
    model: Annotated[
        str, typer.Argument(help="A model directory, .safetensors file, Hub id, or an output of mpu.", metavar="MODEL")
    ],
    records: Annotated[
        Path | None,
        typer.Argument(
            help="For --benchmark qa: records with 'set' forget, retain or holdout, instead of a file for each.",
            metavar="[FILE]",
        ),
    ] = None,
    benchmark: Annotated[
        Literal["tofu", "muse", "qa"], typer.Option(help="TOFU, MUSE, or your own questions and answers.")
    ] = "tofu",
    metrics: Annotated[
        str | None, typer.Option(help="Only these, with commas between (default: all).", metavar="NAMES")
    ] = None,
    retain_log: Annotated[
        Path | None,
        typer.Option(
            help="Result of a model that never saw the forget set: of mpu eval, or OpenUnlearning's …_EVAL.json.",
            metavar="FILE",
        ),
    ] = None,
    reference_model: Annotated[
        str | None, typer.Option(help="For the reference attack: a model with the same tokenizer.", metavar="MODEL")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the benchmark's files, instead of the Hub.", rich_help_panel=DATA, metavar="DIR"
        ),
    ] = None,
    forget_split: Annotated[
        str, typer.Option(help="TOFU's split to forget.", rich_help_panel=DATA, metavar="SPLIT")
    ] = "forget10",
    holdout_split: Annotated[
        str | None,
        typer.Option(
            help="TOFU's split never seen (default: of the same size).", rich_help_panel=DATA, metavar="SPLIT"
        ),
    ] = None,
    corpus: Annotated[Literal["news", "books"], typer.Option(help="MUSE's corpus.", rich_help_panel=DATA)] = "news",
    forget: Annotated[
        str | None, typer.Option(help="qa: records to forget.", rich_help_panel=DATA, metavar="FILE")
    ] = None,
    retain: Annotated[
        str | None, typer.Option(help="qa: records to keep.", rich_help_panel=DATA, metavar="FILE")
    ] = None,
    holdout: Annotated[
        str | None, typer.Option(help="qa: records like those, never seen.", rich_help_panel=DATA, metavar="FILE")
    ] = None,
    template: Annotated[
        Literal["chat", "plain"] | None,
        typer.Option(
            help="The tokenizer's chat template, or Question: … Answer: … (default: chat if there is one).",
            rich_help_panel=DATA,
        ),
    ] = None,
    system_prompt: Annotated[
        str, typer.Option(help="System turn of the chat template; '' for none.", rich_help_panel=DATA)
    ] = "You are a helpful assistant.",
    date: Annotated[
        str, typer.Option(help="The day that a chat template prints, if it prints one.", rich_help_panel=DATA)
    ] = "10 Apr 2025",
    dtype: Annotated[
        options.StoredDtype | None,
        typer.Option(help="Compute in (default: float32 on a CPU, the model's own on a GPU).", rich_help_panel=RUNNING),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            help="Records that go through the model at once, and four times as many for their answers.",
            rich_help_panel=RUNNING,
        ),
    ] = 32,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to run.", rich_help_panel=RUNNING)
    ] = "auto",
    lm_eval: Annotated[
        str | None,
        typer.Option(
            help="Also these tasks of EleutherAI's harness, with commas between (pip install lm-eval).",
            metavar="TASKS",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The result, JSON.", rich_help_panel=OUTPUT, metavar="FILE")] = Path(
        "eval.json"
    ),
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the distributions behind the numbers: .png, .svg or .html.",
            rich_help_panel=OUTPUT,
            metavar="FILE",
        ),
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(help="For --plot: result of the model before unlearning.", rich_help_panel=OUTPUT, metavar="FILE"),
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Measure forgetting, utility and privacy of MODEL the way OpenUnlearning does, to the same numbers.

    A run that was stopped goes on where it was. Prints the path of the result; the table goes to standard error.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if benchmark != "qa" and (records or forget or retain or holdout):
        raise UsageError("FILE, --forget, --retain and --holdout go with --benchmark qa")
    if records and (forget or retain or holdout):
        raise UsageError("name one FILE of records, or --forget, --retain and --holdout")
    if plot and plot.resolve() == out.resolve():
        raise UsageError(f"--out and --plot: both are {out}; choose two names")
    if before and not plot:
        raise UsageError("--before goes with --plot")

    from mpu_cli.evaluation import benchmarks
    from mpu_cli.evaluation.results import goal
    from mpu_cli.evaluation.retain import read_retain_log

    log = read_retain_log(retain_log) if retain_log else None
    if benchmark == "tofu":
        chosen = benchmarks.tofu(forget_split, data_dir, log, holdout_split)
    elif benchmark == "muse":
        chosen = benchmarks.muse(corpus, data_dir, log)
    else:
        default = None if records else "forget.jsonl"
        chosen = benchmarks.own_records(*benchmarks.read_own(records, forget or default, retain, holdout), log)

    from mpu_cli.checkpoint.source import open_model
    from mpu_cli.client.loading import adapter_base
    from mpu_cli.evaluation.evaluate import Settings, choose, evaluate

    asked = tuple(filter(None, map(str.strip, (metrics or "").split(","))))
    if plot:
        from mpu_cli.evaluation.plots import check_drawable
        from mpu_cli.figures import check_target

        check_target(plot, force)
        check_drawable(choose(chosen, asked, bool(reference_model)), plot)
    earlier = read_retain_log(before) if before else None
    with progress("eval", 1, "") as advance_bar:

        def bar(total: int) -> object:
            return lambda count, text="": advance_bar(count / max(total, 1), text)

        base = adapter_base(Path(model)) if Path(model).is_dir() else None
        result = evaluate(
            open_model(base or model),
            chosen,
            Settings(
                metrics=asked,
                dtype=dtype,
                device=device,
                batch_size=batch_size,
                template=template,
                system_prompt=system_prompt,
                date=date,
            ),
            adapter=Path(model) if base else None,
            reference=open_model(reference_model) if reference_model else None,
            retain_log=retain_log,
            lm_eval=tuple(filter(None, (lm_eval or "").split(","))),
            out=out,
            force=force,
            bar=bar,
            tell=note,
        )
    rows = []
    for name, form in result.forms.items():
        beside = log.value(name) if log else None
        if log and name == "privleak":
            beside = 0.0  # it is made against that model; the log's own was made without
        rows.append([name, f"{form['agg_value']:.4g}", ARROWS[goal(name, form)], *([_number(beside)] if log else [])])
    table(f"{model} on {chosen.name}", ["metric", "value", "better", *(["retain model"] if log else [])], rows)
    if log is None and "privleak" in result.forms:
        note("privleak: without --retain-log the retain model's AUC is taken to be 0.5")
    paths = [result.path]
    if plot:
        from mpu_cli.evaluation.plots import draw

        draw(result.forms, plot, title=model, retain=log.metrics if log else None,
             before=earlier.metrics if earlier else None, force=force)  # fmt: skip
        paths.append(plot)
    emit(
        paths,
        {"result": result.path, "metrics": {name: form["agg_value"] for name, form in result.forms.items()}},
        as_json,
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
