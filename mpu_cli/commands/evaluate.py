"""``mpu eval``: what a model still knows, and what it can still do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.errors import UsageError
from mpu_cli.files.resumption import differences
from mpu_cli.measuring.retain import RetainLog, read_retain_log
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import FORCE, IDENTITY, Command, Report, Table
from mpu_cli.options.declare import group, option
from mpu_cli.options.evaluation import Measuring, Scoring
from mpu_cli.plugins import extension
from mpu_cli.wording import few, names_in

if TYPE_CHECKING:
    from mpu_cli.measuring.evaluate import Evaluation
    from mpu_cli.measuring.metrics import MetricResult

OUTPUT = "Output"
ARROWS = {"up": "↑", "down": "↓", "zero": "→ 0", "retain": "→ retain"}


@dataclass(frozen=True, kw_only=True)
class Evaluate(Command):
    """Measure forgetting, utility and privacy of MODEL as OpenUnlearning does, with the same numbers.

    An interrupted run resumes where it left off. Prints a table, and the path of the result.
    """

    NAME = "eval"
    EXAMPLE = "mpu eval unlearned --forget forget.jsonl --retain retain.jsonl --unseen unseen.jsonl --out eval.json"
    ESSENTIAL = "--benchmark --forget --retain --unseen --retain-log --columns --attacks --show --plot --out"

    model: str = option(
        ..., "A model directory, .safetensors file, Hub id, or an output of mpu.", metavar="MODEL", argument=True
    )
    measuring: Measuring = group(Measuring)
    base: str | None = option(
        None, "For an adapter: its base (default: the folder beside it that its config names).", metavar="BASE"
    )
    delta: Path | None = option(
        None, "Measure MODEL, a copy, with this delta of it: the client's own check.", metavar="FILE"
    )
    show: int = option(
        0,
        "Print answers to the first N questions of the forget set; with --delta, before and after.",
        metavar="N",
        least=0,
        panel=OUTPUT,
    )
    endpoint: str | None = option(
        None,
        "Measure the model that this OpenAI-compatible address serves, such as http://HOST:8000/v1, with the tokenizer "
        "of MODEL. The key, if it needs one, is MPU_ENDPOINT_KEY.",
        metavar="URL",
        panel=Scoring.PANEL,
        in_files=False,
    )
    endpoint_model: str | None = option(
        None, "The served model's name (default: the first that the endpoint lists).", metavar="NAME",
        panel=Scoring.PANEL,
    )  # fmt: skip
    lm_eval: str | None = option(
        None,
        "Also run these EleutherAI harness tasks, comma-separated (pip install lm-eval).",
        metavar="TASKS",
        panel=Scoring.PANEL,
    )
    out: Path = option(Path("eval.json"), "Result file (JSON).", metavar="FILE", panel=OUTPUT)
    plot: Path | None = option(
        None, "Plot the distributions behind the numbers (.png, .svg, .pdf or .html).", metavar="FILE", panel=OUTPUT
    )
    texts: bool = option(
        True,
        "Whether the result file holds questions, answers and generations; leave them out of what you send.",
        flag="--texts/--no-texts",
        panel=OUTPUT,
    )
    identity: Path | None = option(None, IDENTITY, metavar="FILE")
    force: bool = option(False, FORCE, in_files=False)

    def run(self, observer: Observer = SILENT) -> Evaluation:
        """Measure the model, or the peft adapter in that folder on ``base`` or on the model that it names."""
        from mpu_cli.files.sealing import opened_copy
        from mpu_cli.measuring.benchmarks import benchmark_of
        from mpu_cli.measuring.evaluate import choose, evaluate
        from mpu_cli.model.source import open_model
        from mpu_cli.model.staging import adapter_base, is_adapter

        if self.plot and self.plot.resolve() == self.out.resolve():
            raise UsageError(f"--out and --plot: both are {self.out}", "choose different names")
        if self.endpoint_model and not self.endpoint:
            raise UsageError("--endpoint-model requires --endpoint")
        measuring = self.measuring
        if not measuring.benchmark.names_benchmark:
            raise UsageError(
                "no records to measure on", "name them with --forget, or a benchmark with --benchmark tofu"
            )
        log = read_retain_log(measuring.retain_log) if measuring.retain_log else None
        benchmark = benchmark_of(measuring, log, observer)
        if log and benchmark.attacks:
            options = log.document.get("options")
            then = options.get("attacks") if isinstance(options, Mapping) else None
            if isinstance(then, Mapping) and (changed := list(differences(then, measuring.recovery.document))):
                observer.warn(f"{log.path}: its attacks were others ({few(changed)}), so what they bring back differs")
        if self.plot:
            extension("plots").check_target(self.plot, self.force)
            extension("plots").check_drawable(choose(benchmark, measuring, bool(self.endpoint)), self.plot)
        adapter = Path(self.model) if is_adapter(Path(self.model)) else None
        if self.base and not adapter:
            raise UsageError("--base: only an adapter has one")
        source = (self.base or adapter_base(adapter)) if adapter else self.model
        served = None
        if self.endpoint:
            served = extension("endpoint").endpoint_at(self.endpoint, self.endpoint_model)
        with opened_copy(source, self.identity, observer) as opened:
            evaluation = evaluate(
                open_model(opened, links=False),
                benchmark,
                measuring,
                adapter=adapter,
                delta=self.delta,
                show=self.show,
                lm_eval=names_in(self.lm_eval),
                endpoint=served,
                out=self.out,
                texts=self.texts,
                force=self.force,
                observer=observer,
            )
        if self.plot:
            retain = log.metrics if log else None
            extension("plots").draw(evaluation.forms, self.plot, title=self._subject, retain=retain, force=self.force)
        return evaluation

    @property
    def _subject(self) -> str:
        return f"{self.endpoint or self.model} with {self.delta}" if self.delta else self.endpoint or self.model

    def tables(self, evaluation: Evaluation) -> list[Table]:
        return [_table(f"{self._subject} on {evaluation.benchmark}", evaluation.forms, evaluation.log)]

    def report(self, evaluation: Evaluation, observer: Observer) -> Report:
        for shown in evaluation.shown:
            observer.show(str(shown))
        if self.texts:
            observer.note(
                f"{self.out}: only you can read it; it holds questions and answers, which --no-texts leaves out"
            )
        if self.delta:
            observer.note("this is the copy with its delta; the server's model may forget less (docs/protection.md)")
        if evaluation.log is None and "privleak" in evaluation.forms:
            observer.note("privleak: no --retain-log, so the retain model's AUC is assumed to be 0.5")
        for name, form in evaluation.forms.items():
            if reason := form.get("reason"):
                observer.warn(f"{name} has no value: {reason}")
        values = {name: form["agg_value"] for name, form in evaluation.forms.items()}
        paths = [evaluation.path, *([self.plot] if self.plot else [])]
        return Report(paths, {"result": evaluation.path, "metrics": values})


def _table(title: str, forms: Mapping[str, MetricResult], log: RetainLog | None) -> Table:
    """The table of metrics, the main ones first, beside the retain model's."""
    from mpu_cli.measuring.results import goal, main_metrics

    rows = []
    for name in dict.fromkeys([*main_metrics(forms), *forms]):
        value, interval = _number(forms[name]["agg_value"]), forms[name].get("interval")
        if interval:
            value += f" ({interval[0]:.3g} to {interval[1]:.3g})"
        row = [name, value, ARROWS[goal(name, forms[name])]]
        if log:
            # privleak was computed against that model; the log's own value was computed without one.
            row.append(_number(0.0 if name == "privleak" else log.value(name)))
        rows.append(row)
    return Table(title, ["metric", "value", "goal", *(["retain model"] if log else [])], rows)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
