"""Grids of experiments from a TOML file: each is run, evaluated, and becomes a line of results; then tables.

base = "models/full"                 # options of `mpu run`, by name; a list is an axis of the grid
algo = ["npo", "simnpo"]
mode = ["clean", "noised", "mpu"]

[eval]                               # options of `mpu eval`, by name
forget_split = "forget01"

[[cases]]                            # options that change together; the grid is run for each
forget = "tofu:forget01"
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpu_cli.checkpoint.source import open_model
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.evaluation import benchmarks
from mpu_cli.evaluation.evaluate import Settings, choose, evaluate
from mpu_cli.evaluation.retain import RetainLog, read_retain_log
from mpu_cli.experiment.rounds import Experiment, run
from mpu_cli.experiment.settings import OPTIONS, check, plan
from mpu_cli.manifest import VERSION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EVAL = {
    "benchmark": str,
    "data_dir": str,
    "forget_split": str,
    "holdout_split": str,
    "corpus": str,
    "retain_log": str,
    "reference_model": str,
    "metrics": list,
    "batch_size": int,
    "dtype": str,
    "template": str,
    "system_prompt": str,
    "date": str,
    "device": str,
    "forget": str,
    "retain": str,
    "holdout": str,
}
AS_TRAINED = ("template", "system_prompt", "date", "device")  # of [eval], and of the run where it does not say
# what a mode does not look at: two cells that differ in it alone are one experiment
IGNORED = {
    "clean": ("kappa", "shared_noise", "copies", "noise", "alphas", "nodes", "symmetries", "secret_seed"),
    "noised": ("shared_noise", "symmetries"),
}
RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Cell:
    """One experiment of a sweep: options of run, options of eval, and which of them the sweep varies."""

    name: str
    options: dict[str, object]
    evaluation: dict[str, object]
    varied: dict[str, object]


def read_sweep(path: Path) -> list[Cell]:
    """The cells of a sweep file, in order, each once. Raises MpuError or UsageError, naming the place."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MpuError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MpuError(f"{path}: not TOML ({error})") from error
    evaluation = document.pop("eval", {})
    cases = document.pop("cases", [{}])
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise UsageError(f"{path}: cases: must be tables, each under a line [[cases]]")
    if not all(isinstance(table, dict) for table in (evaluation, *(case.get("eval", {}) for case in cases))):
        raise UsageError(f"{path}: eval: must be a table, under a line [eval]")
    cells: dict[str, Cell] = {}
    for case in cases:
        told = {**document, **{name: value for name, value in case.items() if name != "eval"}}
        measured = {**evaluation, **case.get("eval", {})}
        _check_evaluation(measured, path)
        axes = {name: value for name, value in told.items() if isinstance(value, list)}
        if empty := [name for name, values in axes.items() if not values]:
            raise UsageError(f"{path}: {empty[0]} = []: an axis needs a value")
        for choice in itertools.product(*axes.values()):
            chosen = dict(zip(axes, choice, strict=True))
            cell = _cell({**told, **chosen}, measured, [*axes, *(name for name in case if name != "eval")], path)
            cells.setdefault(json.dumps([cell.options, cell.evaluation], sort_keys=True), cell)
    named = _told_apart(list(cells.values()))
    if len({cell.name for cell in named}) < len(named):
        return [replace(cell, name=f"{cell.name}-{_digest(cell)}") for cell in named]
    return named


def _told_apart(cells: Sequence[Cell]) -> list[Cell]:
    """``cells``, each with a value for everything that any of them varies, options of eval included, but for what its
    mode ignores: where a file leaves an option out, the default is what was run."""
    axes = list(dict.fromkeys(name for cell in cells for name in cell.varied))
    measures = [
        name
        for name in dict.fromkeys(name for cell in cells for name in cell.evaluation)
        if len({repr(cell.evaluation.get(name)) for cell in cells}) > 1
    ]
    told = []
    for cell in cells:
        shown = {name: cell.options.get(name, OPTIONS[name][1]) for name in axes if name not in _ignored(cell.options)}
        shown |= {f"eval.{name}": str(cell.evaluation.get(name, "–")) for name in measures}
        told.append(replace(cell, varied={k: "default" if v is None else v for k, v in shown.items()}))
    return told


def _ignored(options: Mapping[str, object]) -> tuple[str, ...]:
    return IGNORED.get(str(options.get("mode", "mpu")), ())


def _cell(options: Mapping[str, object], evaluation: Mapping[str, object], varied: Sequence[str], path: Path) -> Cell:
    ignored = _ignored(options)
    kept = {name: value for name, value in options.items() if name not in ignored}
    check(kept, f"{path}: ")
    shown = {name: kept[name] for name in varied if name in kept}
    parts = [re.sub(r"[^\w.]+", "_", str(value)).strip("_.") for value in shown.values()]
    return Cell("-".join(parts) or "run", kept, dict(evaluation), shown)


def _check_evaluation(options: Mapping[str, object], path: Path) -> None:
    for name, value in options.items():
        if name not in EVAL:
            raise UsageError(f"{path}: [eval] {name}: is no option of eval (there are: {', '.join(EVAL)})")
        if type(value) is not EVAL[name]:
            raise UsageError(f"{path}: [eval] {name} = {value!r}: must be a {EVAL[name].__name__}")


def _digest(cell: Cell) -> str:
    # With the defaults: a result made under other ones is not this cell's.
    text = json.dumps([check(cell.options), cell.evaluation, VERSION], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def sweep(
    cells: Sequence[Cell],
    folder: Path,
    *,
    bar: Callable[[str, float], Callable[..., None]],
    tell: Callable[[str], None],
    warn: Callable[[str], None] = lambda _: None,
) -> tuple[list[dict[str, object]], dict[str, str]]:
    """Run every cell that has no result in ``folder`` yet; the lines of all results, in the order of ``cells``, and of
    cells that failed the reason.

    A cell's models go once it is evaluated, unless it says ``keep = true``; its log and result stay. Raises MpuError
    or UsageError, before anything is run, for options that cannot be.
    """
    for cell in cells:
        plan(cell.options)
        _measure_of(cell)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS
    done = {line["name"]: line for line in read_lines(path)}
    failed: dict[str, str] = {}
    for number, cell in enumerate(cells, 1):
        if done.get(cell.name, {}).get("digest") == _digest(cell):
            continue
        done.pop(cell.name, None)
        tell(f"{number} of {len(cells)}: {cell.name}")
        made = plan(cell.options)
        try:
            outcome = run(
                made.experiment, made.forget, made.retain, folder / cell.name, bar=bar, tell=lambda _: None,
                warn=lambda text, name=cell.name: warn(f"{name}: {text}"),
            )  # fmt: skip
            metrics = _evaluate(outcome.model, cell, folder / cell.name / "eval.json", bar)
        except MpuError as error:
            failed[cell.name] = str(error)
            continue
        line = {
            "name": cell.name, "digest": _digest(cell), **cell.varied, "metrics": metrics, **_agreement(outcome.log),
        }  # fmt: skip
        done[cell.name] = line
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if not made.experiment.keep:
            _clear(folder / cell.name, made.experiment)
    return [done[cell.name] for cell in cells if cell.name in done], failed


def _measure_of(cell: Cell) -> tuple[benchmarks.Benchmark, Settings, RetainLog | None]:
    """What [eval] of a cell asks for. Raises MpuError or UsageError for what cannot be."""
    given = cell.evaluation
    log = read_retain_log(Path(given["retain_log"])) if "retain_log" in given else None
    settings = Settings(
        metrics=tuple(given.get("metrics", ())), dtype=given.get("dtype"), batch_size=given.get("batch_size", 32),
        **{name: given.get(name, check(cell.options)[name]) for name in AS_TRAINED},
    )  # fmt: skip
    benchmark = benchmark_of(given, cell.options, log)
    choose(benchmark, settings.metrics, "reference_model" in given)
    return benchmark, settings, log


def _evaluate(model: Path, cell: Cell, out: Path, bar: Callable[[str, float], Callable[..., None]]) -> dict[str, float]:
    given = cell.evaluation
    benchmark, settings, log = _measure_of(cell)
    result = evaluate(
        open_model(str(model)),
        benchmark,
        settings,
        reference=open_model(given["reference_model"]) if "reference_model" in given else None,
        retain_log=log.path if log else None,
        out=out,
        force=True,
        bar=lambda total: in_parts(bar(f"{cell.name}: eval", 1.0), total),
    )
    return {name: form["agg_value"] for name, form in result.forms.items()}


def in_parts(advance: Callable[..., None], total: float) -> Callable[..., None]:
    """What advances a bar that ends at 1, told counts of ``total``."""
    return lambda count, text="": advance(count / total, text)


def benchmark_of(
    given: Mapping[str, object], options: Mapping[str, object], log: RetainLog | None
) -> benchmarks.Benchmark:
    """The benchmark that [eval] names; records and folder are those of the run where it names none."""
    folder = given.get("data_dir", options.get("data_dir"))
    data_dir = Path(str(folder)) if folder else None
    kind = given.get("benchmark", "tofu")
    if kind == "tofu":
        return benchmarks.tofu(str(given.get("forget_split", "forget10")), data_dir, log, given.get("holdout_split"))
    if kind == "muse":
        return benchmarks.muse(str(given.get("corpus", "news")), data_dir, log)
    if kind != "qa":
        raise UsageError(f"[eval] benchmark = {kind!r}: is one of tofu, muse, qa")
    defaults = {name: f"{name}.jsonl" for name in ("forget", "retain") if Path(f"{name}.jsonl").exists()}
    names = [given.get(name, options.get(name, defaults.get(name))) for name in ("forget", "retain", "holdout")]
    return benchmarks.own_records(*benchmarks.read_own(None, *names), log)


def _clear(folder: Path, experiment: Experiment) -> None:
    shutil.rmtree(folder / "server" / f"round_{experiment.all_rounds}" / "model", ignore_errors=True)


def _agreement(log: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """What the log says of noise and copies, over the rounds: for telling why a result is what it is."""
    published = [line for line in log if line["step"] == "publish"]
    joined = [line for line in log if line["step"] == "aggregate"]
    return {
        "smallest_pairwise_cosine": min((line["smallest_pairwise_cosine"] for line in joined), default=None),
        "error_estimate": max(filter(None, (line.get("error_estimate") for line in joined)), default=None),
        "lost_to_rounding": max((line["lost_to_rounding"] for line in joined), default=None),
        "noise_asked": max((line["noise_asked"] for line in published), default=None),
        "noise_survived": max((line["noise_survived"] for line in published), default=None),
        "seconds": round(sum(line["seconds"] for line in log), 3),
    }


def read_lines(path: Path) -> list[dict[str, object]]:
    """The whole lines of a results file; none if there is no file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):  # stopped while it wrote
        text = text[: text.rfind("\n") + 1]
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    try:
        return [json.loads(line) for line in text.splitlines()]
    except ValueError as error:
        raise MpuError(f"{path}: is not a file of results of mpu sweep ({error})") from error
