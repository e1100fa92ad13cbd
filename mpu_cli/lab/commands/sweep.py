"""``mpu sweep``: a grid of experiments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.resumption import write_atomically
from mpu_cli.files.transaction import check_folder
from mpu_cli.lab.tables import markdown_table
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import Command, Report
from mpu_cli.options.declare import option
from mpu_cli.toml import parse_value
from mpu_cli.wording import counted, in_bytes, names_in

if TYPE_CHECKING:
    from mpu_cli.lab.sweep import Cell, Jobs, OnThisMachine, ThroughRay, ThroughSubmitit


@dataclass(frozen=True)
class Swept:
    """``lines``: a result for each experiment; ``published``: what papers say of the same; ``failed``: by name."""

    cells: Sequence[Cell]
    lines: Sequence[Mapping[str, Any]]
    published: Sequence[Mapping[str, Any]]
    failed: Mapping[str, MpuError]


@dataclass(frozen=True, kw_only=True)
class Sweep(Command):
    """Run and evaluate every experiment of a grid. Print a Markdown table for each metric, with distances from clean.

    An interrupted sweep resumes where it left off; results are lines of DIR/results.jsonl.
    """

    NAME = "sweep"
    EXAMPLE = "mpu sweep grid.toml --metrics model_utility,forget_truth_ratio"
    DRY_RUN = "Only list the experiments, which of them are done, and what the others cost."

    file: Path = option(
        ..., "TOML: options of run, with lists for axes; see docs/measuring.md.", metavar="FILE", argument=True
    )
    out: Path | None = option(None, "Folder for the results (default: FILE's name).", metavar="DIR")
    metrics: str | None = option(None, "Metrics to print, comma-separated.", metavar="NAMES")
    across: str | None = option(None, "Axis to use as columns (default: mode).", metavar="OPTION")
    over: str | None = option(
        None,
        "Axes to average over, comma-separated: means with 95 % intervals (default: secret_seed and seed, if they "
        "vary).",
        metavar="OPTIONS",
    )
    with_file: Path | None = option(
        None, "TOML whose options replace those of FILE; --set replaces both.", metavar="FILE", flag="--with"
    )
    settings: list[str] | None = option(
        None, "Replace an option of FILE, or eval.OPTION one of eval; may be repeated.", metavar="OPTION=VALUE",
        flag="--set",
    )  # fmt: skip
    jobs: int = option(
        1,
        "Experiments at once, each in a process of its own. Here they take the GPUs in turn, so that several share one "
        "if there are more of them, or share the cores.",
        least=1,
        metavar="N",
    )
    launcher: Literal["local", "submitit", "ray"] = option(
        "local",
        "Where they run: here, as jobs of SLURM through submitit, or on a Ray cluster; the results are the same.",
    )
    launcher_options: str | None = option(
        None,
        "Parameters of submitit's executor, such as slurm_partition=gpu,gpus_per_node=1,timeout_min=600, or of a Ray "
        "task, such as num_cpus=4,num_gpus=1.",
        metavar="NAME=VALUE,…",
        in_files=False,
    )
    cell: str | None = option(None, "", hidden=True)

    def run(self, observer: Observer = SILENT) -> Swept | dict[str, Any]:
        """All results; of one ``cell``, which a process of its own plays, its line."""
        from mpu_cli.lab.report import LITERATURE
        from mpu_cli.lab.sweep import ThroughSubmitit, play, sweep

        check_folder(self._folder)
        cells = self._cells()
        if self.cell is not None:
            [selected] = [cell for cell in cells if cell.name == self.cell]
            return play(selected, self._folder, observer)
        known_numbers = self._known_numbers(cells)
        jobs = self._jobs(self._folder, observer)
        if jobs and isinstance(jobs.launcher, ThroughSubmitit):
            observer.note(f"{jobs.launcher.logs}: logs of the jobs")
        lines, failed = sweep(cells, self._folder, observer, jobs)
        fields = {name for line in lines for name in line} | {"mode"}
        algorithms = {str(cell.experiment.unlearning.algo) for cell in cells}
        published = []  # others' results with the algorithms of this sweep, and the options that it has, too
        for line in known_numbers:
            if line.get("algo") in algorithms:
                published.append({name: value for name, value in line.items() if name in fields})
        if published:
            text = "".join(json.dumps(line) + "\n" for line in published)
            write_atomically(self._folder / LITERATURE, text)
        return Swept(cells, lines, published, failed)

    def report(self, done: Swept | dict[str, Any], observer: Observer) -> Report:  # noqa: ARG002 (as all commands have it)
        from mpu_cli.lab.report import degradation, metric_names, pivot, provenance_of, sentences
        from mpu_cli.measuring.results import chosen_metrics, main_metrics

        if isinstance(done, dict):
            return Report([json.dumps(done)], None)  # for the process that asked for it
        lines = list(done.lines)
        available = metric_names(lines)
        names = main_metrics(available)
        if self.metrics is not None and available:
            names = chosen_metrics(self.metrics, available)
        if done.published and not any("mode" in line for line in lines):  # the published ones have it
            modes = {cell.name: cell.experiment.mode for cell in done.cells}
            lines = [{**line, "mode": modes[line["name"]]} for line in lines]
        axes = None if self.over is None else list(names_in(self.over))
        printed: list[str] = []
        for name, rows in pivot([*lines, *done.published], names, self.across, axes).items():
            printed += [f"**{name}**", "", *markdown_table(rows), ""]
        for mode, distances in degradation([*lines, *done.published], names).items():
            printed += [f"{mode}: {sentence}" for sentence in sentences(distances)]
        printed += provenance_of([self._folder])
        failure = None
        if done.failed:
            name, first = next(iter(done.failed.items()))
            counts = f"{len(done.failed)} of {counted(len(done.cells), 'experiment')} failed"
            failure = MpuError(f"{counts}, the first being {name}: {first.problem}", first.hint)
        if printed and not printed[-1]:  # the empty line after the last table
            printed.pop()
        return Report(printed, lines, failure=failure)

    def preview(self, observer: Observer) -> Report:
        """The experiments, what passes between the parties, and how many steps are trained."""
        from mpu_cli.lab.rounds import costs_of
        from mpu_cli.lab.sweep import finished, preview

        check_folder(self._folder)
        cells = self._cells()
        with TemporaryDirectory() as scratch:  # submitit makes its folder at once
            self._jobs(Path(scratch), observer)  # raises for a cluster that cannot be used
        self._known_numbers(cells)  # raises for what is not there
        for warning in preview(cells):
            observer.warn(warning)
        done = finished(cells, self._folder)
        todo = [cell for cell in cells if cell.name not in done]
        costs = dict(zip([cell.name for cell in todo], costs_of([cell.experiment for cell in todo]), strict=True))
        rows, document = [], []
        for cell in cells:
            amounts = ["–", "–", "done" if cell.name in done else "–"]
            if cost := costs.get(cell.name):
                amounts = [in_bytes(cost.sent), in_bytes(cost.returned), f"{cost.steps:,}"]
            rows.append([cell.name, *amounts])
            document.append(
                {"name": cell.name, **cell.varied, "done": cell.name in done, **(asdict(cost) if cost else {})}
            )
        columns = ["", "sent to the client", "returned", "steps of training"]
        title = counted(len(cells), "experiment") + (f", of which {len(done)} done" if done else "")
        observer.table(title, columns, rows)
        known = [cost for cost in costs.values() if cost]
        if len(known) < len(todo):
            observer.note(
                f"the cost of {len(todo) - len(known)} is not known: their models or records are not on this machine"
            )
        for base in sorted({cell.experiment.base for cell in cells}):
            if not Path(base).exists():
                observer.warn(f"{base}: no such model on this machine; if it is not on the Hub, its experiments fail")
        if known:
            steps = sum(cost.steps for cost in known)
            observer.note(f"in all as long as {counted(steps, 'step')} of training; evaluation comes on top")
        return Report([cell.name for cell in cells], document)

    def _jobs(self, folder: Path, observer: Observer) -> Jobs | None:
        """The jobs that run cells in processes of their own, with their logs in ``folder``; None to run one after the
        other in this one."""
        from mpu_cli.lab.sweep import Jobs, OnThisMachine, ThroughRay, ThroughSubmitit

        if self.launcher_options and self.launcher == "local":
            raise UsageError(
                "--launcher-options: says how a cluster runs experiments", "add --launcher submitit, or ray"
            )
        parameters = _named_values(names_in(self.launcher_options), "--launcher-options")
        launcher: OnThisMachine | ThroughSubmitit | ThroughRay
        if self.launcher == "submitit":
            launcher = ThroughSubmitit(folder, parameters)
            if launcher.is_local:
                observer.note("--launcher submitit: no SLURM here, so experiments run as processes of this machine")
        elif self.launcher == "ray":
            launcher = ThroughRay(parameters)
        elif self.jobs > 1:
            launcher = OnThisMachine(self.jobs)
        else:
            return None
        # The command line's arguments, without those that say how many run at once.
        command = ["sweep", str(self.file), "--out", str(self._folder)]
        if self.with_file:
            command += ["--with", str(self.with_file)]
        for setting in self.settings or []:
            command += ["--set", setting]
        return Jobs(self.jobs, command, self._folder, launcher)

    def _known_numbers(self, cells: Sequence[Cell]) -> list[Mapping[str, Any]]:
        """Others' results that FILE names. Raises UsageError, before hours of training, also for unknown --metrics."""
        from mpu_cli.lab.report import published_results
        from mpu_cli.lab.sweep import sweep_metric_names
        from mpu_cli.measuring.results import chosen_metrics

        if self.metrics is not None:
            chosen_metrics(self.metrics, sweep_metric_names(cells))
        return published_results(self.file, sorted({cell.experiment.base for cell in cells}))

    @property
    def _folder(self) -> Path:
        return self.out or Path(self.file.stem)

    def _cells(self) -> list[Cell]:
        from mpu_cli.lab.sweep import overrides_of, read_sweep

        overrides = overrides_of(self.with_file) if self.with_file else {}
        return read_sweep(self.file, {**overrides, **_named_values(self.settings or [], "--set")})


def _named_values(settings: Sequence[str], flag: str) -> dict[str, object]:
    """Values by name from NAME=VALUE, values as in TOML, or text."""
    values = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"{flag} {setting}: not of the form NAME=VALUE")
        values[name.strip()] = parse_value(value.strip())
    return values
