"""``mpu plan``: what a round will cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from mpu_cli.commands.unlearn import memory_of
from mpu_cli.errors import UsageError
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import Command, Report
from mpu_cli.options.declare import group, option
from mpu_cli.options.publishing import Disguise
from mpu_cli.options.unlearning import Goal, Lora, RecordFormat, Stopping, Training, Unlearning
from mpu_cli.wording import bytes_of, counted, in_bytes

if TYPE_CHECKING:
    from mpu_cli.measuring.cost import Cost, Memory, Work
    from mpu_cli.protocol.noise import Scheme


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of one round."""

    disguise: Disguise
    scheme: Scheme
    costs: Cost
    peak: Memory  # of the client
    work: Work
    available: float | None  # bytes of memory that the client has
    records: int | None  # number to forget, None if unknown
    kept: int  # records to keep in a step for each record to forget
    steps: int | None  # on each copy, at most
    step_seconds: float | None

    @property
    def fits(self) -> bool | None:
        return None if self.available is None else self.peak.total <= self.available


@dataclass(frozen=True, kw_only=True)
class Plan(Command):
    """Estimate the cost of one round of the protocol: bytes written and sent, memory of each party, steps of training.

    Copies and noise are those of `mpu publish` with the same options, memory and steps those of `mpu unlearn`.
    """

    NAME = "plan"
    EXAMPLE = "mpu plan my-model --forget forget.jsonl --memory 24GB"

    model: str = option(..., "The server's model, or the client's copy of it.", metavar="MODEL", argument=True)
    disguise: Disguise = group(Disguise)
    training: Training = group(Training)
    lora: Lora = group(Lora)
    reading: RecordFormat = group(RecordFormat)
    public: str | None = option(None, "Public model that MODEL was fine-tuned from, as for publish.", metavar="MODEL")
    algo: str = option(Unlearning.algo, "Unlearning algorithm.", metavar="NAME", imports=True)
    forget: str | None = option(
        None, "Records to forget, to count the steps and memory of training (as for unlearn).", metavar="DATA"
    )
    length: int = option(256, "Tokens of the longest record, where there is no --forget.", least=2, metavar="N")
    memory: str | None = option(
        None, "Memory of the client's card or machine, such as 24GB: says whether training fits.", metavar="SIZE"
    )
    epochs: int | None = option(None, "Epochs per round (default: until it is done).", least=1)
    measure_step: bool = option(False, "Also train two steps here on --forget, and say how long one takes.")

    def run(self, observer: Observer = SILENT) -> Estimate:  # noqa: ARG002 (as all commands have it)
        available = None if self.memory is None else bytes_of(self.memory)
        if self.measure_step and self.forget is None:
            raise UsageError("--measure-step: needs records to train on", "add --forget DATA")

        from mpu_cli.measuring.cost import (
            Work,
            cost,
            examples_of,
            largest_work,
            peak_memory,
            rows_at_once,
            seconds_of_step,
            steps_of,
        )
        from mpu_cli.model.source import open_model
        from mpu_cli.protocol.noise import scheme_of
        from mpu_cli.records.read import read_records
        from mpu_cli.training.checks import check_options
        from mpu_cli.training.data import Dataset
        from mpu_cli.training.rates import with_precision
        from mpu_cli.training.stopping import StoppingRule

        unlearning = Unlearning(algo=self.algo, training=self.training, lora=self.lora, epochs=self.epochs)
        objective = check_options(unlearning)
        if self.public is not None:
            open_model(self.public)  # raises for one that is not there
        disguise = self.disguise.with_scale(with_pretrained=self.public is not None)
        scheme = scheme_of(disguise)
        opened = open_model(self.model)
        unlearning = replace(unlearning, training=with_precision(self.training, opened))
        rows = rows_at_once(unlearning, objective)
        work = Work(rows, self.length, rows * self.length // 2)
        count = steps = seconds = None
        if self.forget:
            records = read_records(self.forget, self.reading)
            count = len(records)
            work = largest_work({"forget": examples_of(opened, records)}, unlearning, objective)
            steps = steps_of(unlearning, count, None if self.epochs else StoppingRule(Goal(), Stopping()))
            if self.measure_step:
                seconds = seconds_of_step(opened, Dataset(records, records), unlearning)
        return Estimate(
            disguise=disguise,
            scheme=scheme,
            costs=cost(opened, copies=scheme.copies, options=unlearning),
            peak=peak_memory(opened, unlearning, objective, work),
            work=work,
            available=available,
            records=count,
            kept=objective.algorithm.retain_per_forget if objective.constants.alpha else 0,
            steps=steps,
            step_seconds=seconds,
        )

    def report(self, estimate: Estimate, observer: Observer) -> Report:
        from mpu_cli.training.unlearn import ADVICE

        scheme, disguise, costs, peak = estimate.scheme, estimate.disguise, estimate.costs, estimate.peak
        lines = [
            f"model\t{costs.weights:,} weights",
            f"server writes and sends\t{in_bytes(costs.published)} in {counted(scheme.copies, 'copy', 'copies')}",
            f"client returns\t{in_bytes(costs.returned)} of deltas",
            f"server memory\tabout {in_bytes(costs.server_memory)}, regardless of the model",
            f"client memory\tabout {in_bytes(peak.total)}: {memory_of(peak, estimate.work)}",
        ]
        if estimate.available is not None:
            lines.append(f"{'fits' if estimate.fits else 'does not fit'}\tinto {in_bytes(estimate.available)}")
        if estimate.steps is not None:
            lines.append(f"client trains\t{self._time(estimate)}")
        lines += _noise_lines(scheme, disguise)
        observer.note("these are estimates for one round; `mpu run` logs measured numbers for whole rounds")
        if estimate.fits is False:
            observer.note(f"what takes less memory: {ADVICE}")
        document = {
            **asdict(costs),
            "records": estimate.records,
            "steps": estimate.steps,
            "step_seconds": estimate.step_seconds,
            "client_memory": {**asdict(peak), "total": peak.total},
            "fits": estimate.fits,
            "noise": {
                "kappa": disguise.kappa,
                "permanent_noise": disguise.permanent_noise,
                "kind": scheme.kind,
                "factors": scheme.factors,
                "weights": scheme.weights.tolist(),
                "order": scheme.order,
                "remainder": scheme.remainder,
                "variance_factor": scheme.variance_factor,
            },
        }
        return Report(lines, document)

    def _time(self, estimate: Estimate) -> str:
        """The length of the client's training on each copy: in steps, and with a step's time if it was measured."""
        size = min(self.training.batch_size, estimate.records or 0)
        most = "" if self.epochs else " at most"
        text = f"as long as {counted(estimate.steps or 0, 'step')}{most} of {counted(size, 'record')} to forget"
        if estimate.kept:
            text += f" and {size * estimate.kept} to keep"
        if estimate.step_seconds is not None:
            text += f"; a step takes {estimate.step_seconds:.2g} s here"
        return text


def _noise_lines(scheme: Scheme, disguise: Disguise) -> Iterator[str]:
    """The remainder of the noise in the update."""
    if disguise.kappa:
        factors = ", ".join(f"{factor:g}" for factor in scheme.factors)
        yield (
            f"noise\tκ = {disguise.kappa:g}, {scheme.kind} ({factors}): cancels up to order "
            f"{scheme.order - 1} and leaves {scheme.remainder:.3g}·κ^{scheme.order}; other differences between "
            f"copies are multiplied by up to {float(scheme.weights.abs().sum()):.3g} (their variance, if random, by "
            f"{scheme.variance_factor:.3g})"
        )
    if disguise.permanent_noise:
        most = "" if disguise.max_noise is None else f", or {disguise.max_noise:g} times that of its weights if less"
        yield (
            "permanent noise\tnothing cancels it: every weight that the client trains on is off by "
            f"{disguise.permanent_noise:g} times the RMS of its block's task vector{most}. The update is off in "
            "proportion to that. Rehearse with `mpu run` and the same options"
        )
