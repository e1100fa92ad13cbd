"""Grids of experiments from a TOML file: each is run, evaluated, and becomes a line of results; tables follow.

base = "models/full"                 # options of `mpu run`, by name; a list is an axis of the grid
algo = ["npo", "simnpo"]
mode = ["clean", "noised", "mpu"]

[eval]                               # options of `mpu eval`, by name
benchmark = "tofu:forget01"

[[cases]]                            # options that change together; the grid is run for each
forget = "tofu:forget01"

extends = "FILE" takes over what another file says; [[published]] is in ``published``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import queue
import re
import secrets
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.manifest import PLANNED, RESULTS, VERSION
from mpu_cli.files.resumption import alone_beside, append_line, differences, read_lines, write_atomically
from mpu_cli.lab.options.experiment import Experiment
from mpu_cli.lab.report import BEFORE, RELEARNING, RETAIN, read_plan, read_recipe
from mpu_cli.lab.rounds import LOG, publication_in, run
from mpu_cli.measuring.benchmarks import Benchmark, benchmark_of
from mpu_cli.measuring.evaluate import choose, evaluate
from mpu_cli.measuring.metrics import RELEARNED, Metric
from mpu_cli.measuring.retain import read_retain_log
from mpu_cli.model.source import open_model
from mpu_cli.observer import SILENT, Observer, PrefixedObserver
from mpu_cli.options.declare import check_in_files, declared_options, flat, from_flat
from mpu_cli.options.evaluation import Measuring
from mpu_cli.options.unlearning import Prompts, RecordFormat
from mpu_cli.plugins import require
from mpu_cli.subprocesses import Ended, import_nothing_from_here, run_mpu, stop_running
from mpu_cli.toml import read_toml
from mpu_cli.training.checks import check_options
from mpu_cli.training.data import read_dataset
from mpu_cli.version import __version__
from mpu_cli.wording import command_line, few

# Cells of a sweep side by side, each in a process of its own: on this machine, or as jobs of a cluster.

OUTPUT = "output.txt"  # in a cell's folder: what its process said


class OnThisMachine:
    """Processes here, each with a GPU of its own or a share of the cores."""

    def __init__(self, count: int):
        self._count = count
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(count):
            self._slots.put(slot)

    def run(self, arguments: Sequence[str]) -> Ended:
        import torch

        slot = self._slots.get()
        try:
            environment = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // self._count))}
            if devices := torch.cuda.device_count():
                allowed = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices)))).split(",")
                environment = {"CUDA_VISIBLE_DEVICES": allowed[slot % devices]}
            return run_mpu(arguments, environment=environment)
        finally:
            self._slots.put(slot)

    def stop(self) -> None:
        stop_running()


class ThroughSubmitit:
    """Jobs of SLURM or, where there is none, of submitit's executor on this machine. ``parameters`` are those of its
    AutoExecutor, such as ``slurm_partition``. Its files and the jobs' logs go into a new folder in ``folder``, which
    all nodes see, under a name that nobody could foresee: results come back as pickles."""

    def __init__(self, folder: Path, parameters: Mapping[str, object]):
        submitit = require("submitit", "--launcher submitit")
        import_nothing_from_here()  # its jobs start as `python -m submitit…`
        self._executor = submitit.AutoExecutor(folder=folder / f"jobs-{secrets.token_hex(16)}")
        try:
            self._executor.update_parameters(**parameters)
        except (NameError, TypeError, ValueError) as error:
            raise UsageError(f"--launcher-options: {str(error).splitlines()[0]}") from error
        self.logs, self.is_local = self._executor.folder, self._executor.cluster == "local"
        self._jobs: list[Any] = []
        self._failed = submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError

    def run(self, arguments: Sequence[str]) -> Ended:
        job = self._executor.submit(run_mpu, list(arguments))
        self._jobs.append(job)
        try:
            return job.result()
        except self._failed as error:  # killed, out of time, or never started
            return Ended(1, "", f"job {job.job_id}: {error}")

    def stop(self) -> None:
        for job in self._jobs:
            if not job.done():
                job.cancel()


class ThroughRay:
    """Tasks of the Ray cluster that RAY_ADDRESS names. Each has a GPU, if the cluster has any, unless ``parameters``,
    the options of a remote function, say otherwise. All nodes see the sweep's folder."""

    def __init__(self, parameters: Mapping[str, object]):
        ray = require("ray", "--launcher ray")
        address = os.environ.get("RAY_ADDRESS", "")
        if address in ("", "auto"):
            # Ray would join whatever cluster it finds on this machine, also another user's, and unpickle its results.
            raise UsageError(
                "--launcher ray: RAY_ADDRESS does not name a cluster", "use the address that `ray start --head` printed"
            )
        host, _, port = address.partition(":")
        current_folder = os.getcwd()
        try:
            if port.isdecimal():  # Ray itself waits for minutes where nothing answers
                socket.create_connection((host, int(port)), timeout=10).close()
            # Ray's workers import from the folder in which this is called, where somebody else may leave files.
            os.chdir("/")
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
        except OSError as error:
            raise MpuError(
                "--launcher ray: no cluster runs", "begin one with `ray start --head`, and name it in RAY_ADDRESS"
            ) from error
        finally:
            os.chdir(current_folder)
        # A task that failed is not tried again: what an experiment wrote is for its user to look at.
        options = {"num_gpus": min(1, ray.cluster_resources().get("GPU", 0)), "max_retries": 0} | dict(parameters)
        try:
            self._task: Any = ray.remote(**options)(run_mpu)
        except (TypeError, ValueError) as error:
            raise UsageError(f"--launcher-options: {str(error).splitlines()[0]}") from error
        self._ray = ray
        self._running: list[Any] = []

    def run(self, arguments: Sequence[str]) -> Ended:
        task = self._task.remote(list(arguments), folder=os.getcwd())
        self._running.append(task)
        try:
            return self._ray.get(task)
        except self._ray.exceptions.RayError as error:  # its node or its worker was lost
            return Ended(1, "", f"the task was lost: {error}")

    def stop(self) -> None:
        for task in self._running:
            self._ray.cancel(task)


@dataclass(frozen=True)
class Jobs:
    """Up to ``count`` processes at once; ``command`` are the arguments of ``mpu`` that run one cell, but for its name,
    and print its line of results."""

    count: int
    command: Sequence[str]
    folder: Path
    launcher: OnThisMachine | ThroughSubmitit | ThroughRay

    def play(self, name: str) -> dict[str, Any]:
        """Run a cell; its line of results. Raises MpuError with what the process said if it fails."""
        ended = self.launcher.run([*self.command, "--cell", name])
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OUTPUT).write_text(ended.stderr, encoding="utf-8")
        try:
            return json.loads(ended.stdout)
        except ValueError:
            raise MpuError(ended.reason, f"{folder / OUTPUT} has all that it said") from None


# of [eval]; those of the run by default
AS_TRAINED = (*declared_options(RecordFormat), *declared_options(Prompts), "device")
# options that a mode ignores: cells that differ only in these are the same experiment
_OF_COPIES = (
    "kappa", "permanent_noise", "copies", "noise", "symmetries", "watermark", "max_noise", "secret_seed",
)  # fmt: skip
IGNORED = {"clean": _OF_COPIES, "clean-rounds": _OF_COPIES, "noised": ("symmetries", "watermark")}
FORGET_QUALITY = "forget_quality"
LOGGED = ("forget_truth_ratio", "forget_Q_A_ROUGE", "mia_min_k")  # of the retain model, for what compares with it
RETAIN_MODEL = "retain_model"  # of [eval]: the model that never saw the forget set, of which the sweep makes the log


@dataclass(frozen=True)
class Cell:
    """One experiment of a sweep: options of run, options of eval, and which of them the sweep varies."""

    name: str
    options: dict[str, object]
    evaluation: dict[str, object]
    varied: dict[str, object]

    @property
    def experiment(self) -> Experiment:
        return from_flat(Experiment, self.options)

    @property
    def measuring(self) -> Measuring:
        """Options of eval; where [eval] does not say, records are measured as they were trained."""
        trained = flat(self.experiment)
        options = {name: trained[name] for name in AS_TRAINED} | self.evaluation
        options.pop(RETAIN_MODEL, None)  # its log is made first
        names_records = any(options.get(name) for name in ("forget", "retain", "unseen"))
        if options.get("benchmark", "qa" if names_records else None) == "qa":
            record_files = {name: trained[name] for name in ("forget", "retain") if Path(str(trained[name])).exists()}
            options = record_files | options
        return from_flat(Measuring, options)


def read_sweep(path: Path, overrides: Mapping[str, object] | None = None) -> list[Cell]:
    """The cells of a sweep file, in order, each once; ``overrides`` replace options, "eval.…" those of eval."""
    document = read_recipe(path)
    document.pop("published", None)
    evaluation = document.pop("eval", {})
    cases = document.pop("cases", [{}])
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise UsageError(f"{path}: cases: must be tables, each under a line [[cases]]")
    if not all(isinstance(table, dict) for table in (evaluation, *(case.get("eval", {}) for case in cases))):
        raise UsageError(f"{path}: eval: must be a table, under a line [eval]")
    eval_overrides, run_overrides = {}, {}
    for name, value in (overrides or {}).items():
        if name.startswith("eval."):
            eval_overrides[name.removeprefix("eval.")] = value
        else:
            run_overrides[name] = value
    cells: dict[str, Cell] = {}
    for case in cases:
        in_eval = {**evaluation, **case.pop("eval", {})}
        in_file = {**document, **case}
        check_in_files(declared_options(Experiment), in_file, f"{path}: ", "give it with --set")
        check_in_files(declared_options(Measuring), in_eval, f"{path}: [eval] ", "give it with --set")
        options, measured = {**in_file, **run_overrides}, {**in_eval, **eval_overrides}
        from_flat(Measuring, {name: v for name, v in measured.items() if name != RETAIN_MODEL}, f"{path}: [eval] ")
        if RETAIN_MODEL in measured and "retain_log" in measured:
            raise UsageError(f"{path}: [eval] retain_model: there is a retain_log already", "leave one of them out")
        axes = {name: value for name, value in options.items() if isinstance(value, list)}
        if empty := [name for name, values in axes.items() if not values]:
            raise UsageError(f"{path}: {empty[0]} = []: an axis needs a value")
        for choice in itertools.product(*axes.values()):
            cell = _cell({**options, **dict(zip(axes, choice, strict=True))}, measured, [*axes, *case], path)
            cells.setdefault(json.dumps([cell.options, cell.evaluation], sort_keys=True), cell)
    named = _with_axis_values(list(cells.values()))
    if len({cell.name for cell in named}) < len(named):
        return [replace(cell, name=f"{cell.name}-{_digest(cell)}") for cell in named]
    return named


def overrides_of(path: Path) -> dict[str, object]:
    """The options in ``path``, those of its table [eval] as "eval.…"."""
    document = read_toml(path)
    evaluation = document.pop("eval", {})
    if not isinstance(evaluation, dict):
        raise UsageError(f"{path}: eval: must be a table, under a line [eval]")
    check_in_files(declared_options(Experiment), document, f"{path}: ", "give it with --set")
    return {**document, **{f"eval.{name}": value for name, value in evaluation.items()}}


def _with_axis_values(cells: Sequence[Cell]) -> list[Cell]:
    """``cells``, each with a value for every option that any of them varies, including those of eval, except what its
    mode ignores: where a file omits an option, the default is what was run."""
    axes = dict.fromkeys(name for cell in cells for name in cell.varied)
    eval_axes = []
    for name in dict.fromkeys(name for cell in cells for name in cell.evaluation):
        if len({repr(cell.evaluation.get(name)) for cell in cells}) > 1:
            eval_axes.append(name)
    named = []
    for cell in cells:
        values, ignored = _defaults(cell) | cell.options, _ignored_options(cell.options)
        varied = {
            name: "default" if values[name] in (None, ()) else values[name] for name in axes if name not in ignored
        }
        varied |= {f"eval.{name}": str(cell.evaluation.get(name, "–")) for name in eval_axes}
        named.append(replace(cell, varied=varied))
    return named


def _ignored_options(options: Mapping[str, object]) -> tuple[str, ...]:
    return IGNORED.get(str(options.get("mode", "mpu")), ())


def _cell(options: Mapping[str, object], evaluation: Mapping[str, object], varied: Sequence[str], path: Path) -> Cell:
    ignored = _ignored_options(options)
    effective_options = {name: value for name, value in options.items() if name not in ignored}
    from_flat(Experiment, effective_options, f"{path}: ")
    shown = {name: effective_options[name] for name in varied if name in effective_options}
    parts = [re.sub(r"[^\w.]+", "_", str(value)).strip("_.") for value in shown.values()]
    return Cell("-".join(parts) or "run", effective_options, dict(evaluation), shown)


def _defaults(cell: Cell) -> dict[str, object]:
    """The value of each option where ``cell`` omits it; the scales of the noise depend on what else is set."""
    declarations = declared_options(Experiment).items()
    defaults = {name: declared.default for name, declared in declarations if not declared.is_required}
    experiment = cell.experiment
    if "kappa" in _ignored_options(cell.options):
        return defaults
    disguise = experiment.disguise.with_scale(with_pretrained=experiment.public is not None)
    return defaults | {"kappa": disguise.kappa, "permanent_noise": disguise.permanent_noise}


def _digest(cell: Cell) -> str:
    # Includes the defaults: a result made with different ones is not this cell's.
    return _short_digest([flat(cell.experiment), cell.evaluation, VERSION])


def _short_digest(document: object) -> str:
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def sweep(
    cells: Sequence[Cell], folder: Path, observer: Observer = SILENT, jobs: Jobs | None = None
) -> tuple[list[dict[str, Any]], dict[str, MpuError]]:
    """Run every cell that has no result in ``folder`` yet; the lines of all results, in the order of ``cells``, and the
    reason for each cell that failed.

    A cell's models are removed once it is evaluated, unless it says ``keep = true``; its log and result stay. With
    ``jobs``, several cells run at once.
    """
    for cell in cells:
        _check(cell)
        read_dataset(cell.experiment.unlearning)
        _benchmark(cell)
    _write_plan(folder, cells)
    report = command_line("mpu", "report", folder)
    observer.note(f"`{report}` shows what is done so far, after an interruption, too")
    cells = [_with_retain_log(cell, folder, observer) for cell in cells]
    done = finished(cells, folder)
    failed: dict[str, MpuError] = {}
    lock = Lock()

    def attempt(number: int, cell: Cell) -> None:
        with lock:
            observer.note(f"{number} of {len(cells)}: {cell.name}")
        try:
            line = jobs.play(cell.name) if jobs else play(cell, folder, observer)
        except MpuError as error:
            failed[cell.name] = error
            return
        with lock:
            done[cell.name] = line
            append_line(folder / RESULTS, line)

    todo = [(number, cell) for number, cell in enumerate(cells, 1) if cell.name not in done]
    if not jobs:
        for number, cell in todo:  # in this thread, which Ctrl-C interrupts
            attempt(number, cell)
    else:
        with ThreadPoolExecutor(jobs.count) as pool:
            futures = [pool.submit(attempt, number, cell) for number, cell in todo]
            try:
                for future in futures:
                    future.result()
            except BaseException:  # Ctrl-C stops those that run, and no further one begins
                pool.shutdown(wait=False, cancel_futures=True)
                jobs.launcher.stop()
                raise
    return [done[cell.name] for cell in cells if cell.name in done], failed


def finished(cells: Sequence[Cell], folder: Path) -> dict[str, dict[str, Any]]:
    """The lines of the cells that have a result in ``folder``, by name."""
    lines = {
        str(line["name"]): line for line in read_lines(folder / RESULTS, "remove it to run every experiment again")
    }
    digests = {cell.name: _digest(_named_retain_log(cell, folder)) for cell in cells}
    return {name: lines[name] for name, digest in digests.items() if lines.get(name, {}).get("digest") == digest}


def _write_plan(folder: Path, cells: Sequence[Cell]) -> None:
    """Write down in ``folder`` the names of all experiments of this sweep so far, and how they are made."""
    shared = json.loads(json.dumps(_shared_options(cells), default=str))
    names = [cell.name for cell in cells]
    if (folder / RESULTS).exists() or any(folder.glob(f"*/{LOG}")):
        before = read_plan(folder)
        names = list(dict.fromkeys([*before.experiments, *names]))
        common = before.options.keys() & shared.keys()  # what is an axis in one of them is in the names
        then, now = ({name: options[name] for name in common} for options in (before.options, shared))
        changed = list(differences(then, now))
        if changed:
            raise MpuError(
                f"{folder}: holds experiments with other options ({few(changed)})",
                "choose another --out, or make an axis of them",
            )
    folder.mkdir(parents=True, exist_ok=True)
    versions = {"mpu": __version__, "torch": version("torch"), "transformers": version("transformers")}
    plan = {"experiments": names, "options": shared, "versions": versions}
    write_atomically(folder / PLANNED, json.dumps(plan, indent=2))


def _shared_options(cells: Sequence[Cell]) -> dict[str, object]:
    """The options that decide results and are the same in all ``cells`` that have them."""
    values: dict[str, list[object]] = {}
    for cell in cells:
        ignored = _ignored_options(cell.options)
        scales = {name: value for name, value in _defaults(cell).items() if name in ("kappa", "permanent_noise")}
        options = flat(cell.experiment) | scales
        for name, declared in declared_options(Experiment).items():
            if declared.affects_result and name not in ignored:
                values.setdefault(name, []).append(options[name])
    return {name: same[0] for name, same in values.items() if all(value == same[0] for value in same)}


def _check(cell: Cell) -> None:
    """Raise UsageError for options that do not go together."""
    check_options(cell.experiment.unlearning)
    publication_in(cell.experiment, seed=bytes(32))
    cell.experiment.step_options.check_step()


def preview(cells: Sequence[Cell]) -> list[str]:
    """The warnings of a sweep before it trains, a sentence each, also of what is missing on this machine."""
    warnings: dict[str, None] = {}
    for cell in cells:
        _check(cell)
        try:
            data = read_dataset(cell.experiment.unlearning)
            warnings |= dict.fromkeys(data.warnings(cell.experiment.unlearning.privacy))
            _benchmark(cell)
        except UsageError:
            raise
        except MpuError as error:  # the sweep may be for another machine
            warnings[error.problem] = None
    return list(warnings)


def play(cell: Cell, folder: Path, observer: Observer = SILENT) -> dict[str, Any]:
    """Run and evaluate one cell in ``folder``; its line of results. Raises MpuError if it fails."""
    cell_observer, experiment = PrefixedObserver(observer, cell.name, notes=False), cell.experiment
    cell = _with_retain_log(cell, folder, cell_observer)
    before = _before(cell, folder, cell_observer)
    forms: dict[str, Mapping[str, Any]] = {BEFORE: before}
    if log := cell.measuring.retain_log:
        forms[RETAIN] = read_retain_log(log).metrics
        if "privleak" in forms[RETAIN]:  # relative to that model, as the others' is, and not to an AUC of 0.5
            forms[RETAIN] = {**forms[RETAIN], "privleak": {"agg_value": 0.0}}
    outcome = run(experiment, read_dataset(experiment.unlearning), folder / cell.name, cell_observer)
    started = time.monotonic()
    forms["after"] = _evaluate(outcome.model, cell, folder / cell.name / "eval.json", cell_observer)
    if not experiment.keep:
        shutil.rmtree(outcome.model, ignore_errors=True)
    # Of work that was done again, such as where only [eval] changed, the last time counts.
    seconds = {(line["step"], line.get("round"), line.get("copy")): line["seconds"] for line in outcome.log}
    relearned = {model: metrics.get(RELEARNED, {}) for model, metrics in forms.items()}
    curves = {model: form["curve"] for model, form in relearned.items() if "curve" in form}
    return {
        "name": cell.name,
        "digest": _digest(cell),
        **cell.varied,
        "metrics": _values(forms["after"]),
        BEFORE: _values(before),
        RETAIN: _values(forms.get(RETAIN, {})),
        **({RELEARNING: curves} if curves else {}),
        "seconds": round(sum(seconds.values()), 3),
        "evaluation_seconds": round(time.monotonic() - started, 3),
    }


def _values(forms: Mapping[str, Mapping[str, Any]]) -> dict[str, object]:
    return {name: form["agg_value"] for name, form in forms.items() if "agg_value" in form}


def _before(cell: Cell, folder: Path, observer: Observer) -> dict[str, Any]:
    """The cell's metrics of the model before unlearning, measured once for all cells that agree on how."""
    out = folder / f"{BEFORE}-{_short_digest([cell.experiment.base, flat(cell.measuring)])}.json"
    with alone_beside(out, observer):
        if out.exists():
            return json.loads(out.read_text(encoding="utf-8"))["metrics"]
        return _evaluate(Path(cell.experiment.base), cell, out, PrefixedObserver(observer, BEFORE))


def _named_retain_log(cell: Cell, folder: Path) -> Cell:
    """``cell`` with the log of its retain model, which may have to be made."""
    model = cell.evaluation.get(RETAIN_MODEL)
    if model is None:
        return cell
    log = folder / f"retain-{_short_digest([model, flat(cell.measuring)])}.json"
    evaluation = {name: value for name, value in cell.evaluation.items() if name != RETAIN_MODEL}
    return replace(cell, evaluation={**evaluation, "retain_log": str(log)})


def _with_retain_log(cell: Cell, folder: Path, observer: Observer) -> Cell:
    """``cell`` with the log of its retain model, measured now unless ``folder`` has it."""
    with_log = _named_retain_log(cell, folder)
    if with_log is not cell and not Path(str(with_log.evaluation["retain_log"])).exists():
        model, measuring = str(cell.evaluation[RETAIN_MODEL]), cell.measuring
        observer.note(f"measuring {model}, the retain model")
        benchmark = benchmark_of(measuring, None)
        if measuring.metrics:
            logged = (*measuring.metrics, *(name for name in LOGGED if name in benchmark.metrics))
            measuring = replace(measuring, metrics=tuple(name for name in logged if name != FORGET_QUALITY))
        log = Path(str(with_log.evaluation["retain_log"]))
        evaluate(open_model(model), benchmark, measuring, out=log, observer=observer)
    return with_log


def sweep_metric_names(cells: Sequence[Cell]) -> list[str]:
    """The names of all metrics that ``cells`` will have."""
    names: dict[str, None] = {}
    for cell in cells:
        names |= dict.fromkeys(_benchmark(cell)[1])
        names |= {FORGET_QUALITY: None} if RETAIN_MODEL in cell.evaluation else {}
    return list(names)


def _benchmark(cell: Cell) -> tuple[Benchmark, dict[str, Metric]]:
    """The benchmark that [eval] of a cell names, and the metrics chosen from it.

    Raises MpuError or UsageError for what cannot be measured.
    """
    options = cell.measuring
    benchmark = benchmark_of(options, read_retain_log(options.retain_log) if options.retain_log else None)
    if RETAIN_MODEL in cell.evaluation:  # its log is not made yet
        options = replace(options, metrics=tuple(name for name in options.metrics if name != FORGET_QUALITY))
    return benchmark, choose(benchmark, options)


def _evaluate(model: Path, cell: Cell, out: Path, observer: Observer) -> dict[str, Any]:
    benchmark, _ = _benchmark(cell)
    return evaluate(open_model(str(model)), benchmark, cell.measuring, out=out, force=True, observer=observer).forms
