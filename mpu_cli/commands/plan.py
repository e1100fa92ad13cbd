"""``mpu plan``: what a round will cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from mpu_cli.commands.unlearn import memory_of
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import Command, Report
from mpu_cli.options.declare import group, option
from mpu_cli.options.publishing import Disguise
from mpu_cli.options.unlearning import Lora, RecordFormat, Training, Unlearning
from mpu_cli.wording import bytes_of, counted, in_bytes, in_time

if TYPE_CHECKING:
    from mpu_cli.measuring.cost import Cost, Machine, Memory, Work
    from mpu_cli.model.source import Model
    from mpu_cli.protocol.noise import Scheme


BUSY = 0.5  # of the time of each core, for other programs


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a round costs. ``model``: as it is sent; ``tokens``: that training reads per copy, if the records are known;
    ``peak``: memory of the client; ``suggestion``: what makes it fit into ``room``, if it does not."""

    model: Model
    disguise: Disguise
    scheme: Scheme
    costs: Cost
    machine: Machine
    tokens: int | None
    peak: Memory
    work: Work
    room: float | None
    suggestion: tuple[str, Memory] | None

    @property
    def fits(self) -> bool | None:
        return None if self.room is None else self.peak.total <= self.room


@dataclass(frozen=True, kw_only=True)
class Plan(Command):
    """Estimate the cost of one round of the protocol: bytes written and sent, memory of each party, operations, time.

    Copies and noise are those of `mpu publish` with the same options, the client's memory is that of `mpu unlearn`;
    bandwidth and speed are measured here.
    """

    NAME: ClassVar[str] = "plan"
    EXAMPLE: ClassVar[str] = "mpu plan my-model --forget forget.jsonl --memory 24GB"

    model: str = option(..., "The server's model, or the client's copy of it.", metavar="MODEL", argument=True)
    disguise: Disguise = group(Disguise)
    training: Training = group(Training)
    lora: Lora = group(Lora)
    reading: RecordFormat = group(RecordFormat)
    pretrained: str | None = option(
        None, "Public model that MODEL was fine-tuned from, as for publish.", metavar="MODEL"
    )
    algo: str = option(Unlearning.algo, "Unlearning algorithm.", metavar="NAME")
    forget: str | None = option(
        None, "Records to forget, to estimate the time and memory of training (as for unlearn).", metavar="DATA"
    )
    length: int = option(256, "Tokens of the longest record, where there is no --forget.", least=2, metavar="N")
    memory: str | None = option(
        None,
        "Memory of the client's card or machine, such as 24GB: says whether training fits, and what makes it fit.",
        metavar="SIZE",
    )
    epochs: int = option(10, "Epochs per round, with as many retain records as forget records.", least=1)

    def run(self, observer: Observer = SILENT) -> Estimate:  # noqa: ARG002 (as all commands have it)
        room = None if self.memory is None else bytes_of(self.memory)

        from mpu_cli.measuring.cost import (
            Work,
            cost,
            examples_of,
            largest_work,
            measure_machine,
            peak_memory,
            rows_at_once,
            set_count,
            way_to_fit,
        )
        from mpu_cli.model.source import open_model
        from mpu_cli.protocol.noise import scheme_of
        from mpu_cli.training.job import check_options
        from mpu_cli.training.rates import with_precision

        unlearning = Unlearning(algo=self.algo, training=self.training, lora=self.lora)
        objective = check_options(unlearning)
        if self.pretrained is not None:
            open_model(self.pretrained)  # raises for one that is not there
        disguise = self.disguise.with_scale(with_pretrained=self.pretrained is not None)
        scheme = scheme_of(disguise)
        opened = open_model(self.model)
        unlearning = replace(unlearning, training=with_precision(self.training, opened))
        tokens = None
        rows = rows_at_once(unlearning, objective)
        work = Work(rows, self.length, rows * self.length // 2)
        if self.forget:
            examples = examples_of(opened, self.forget, self.reading)
            tokens = set_count(unlearning) * self.epochs * sum(len(example.ids) for example in examples)
            work = largest_work({"forget": examples}, unlearning, objective)
        machine = measure_machine(unlearning.training.precision)
        costs = cost(opened, machine, copies=scheme.copies, options=unlearning, tokens=tokens)
        peak = peak_memory(opened, unlearning, objective, work)
        suggestion = None
        if room is not None and peak.total > room:
            suggestion = way_to_fit(opened, unlearning, objective, work, room)
        return Estimate(
            model=opened, disguise=disguise, scheme=scheme, costs=costs, machine=machine, tokens=tokens, peak=peak,
            work=work, room=room, suggestion=suggestion,
        )  # fmt: skip

    def report(self, estimate: Estimate, observer: Observer) -> Report:
        scheme, disguise, costs, peak = estimate.scheme, estimate.disguise, estimate.costs, estimate.peak
        lines = [
            f"model\t{costs.weights:,} weights, {costs.attention_weights:,} of them in attention",
            f"server writes and sends\t{in_bytes(costs.published)} in {counted(scheme.copies, 'copy', 'copies')}",
            f"client returns\t{in_bytes(costs.returned)} of deltas",
            f"server memory\tabout {in_bytes(costs.server_memory)}, regardless of the model",
            f"client memory\tabout {in_bytes(peak.total)}: {memory_of(peak, estimate.work)}",
        ]
        if estimate.room is not None:
            lines.append(_fit_line(estimate.room, bool(estimate.fits), estimate.suggestion))
        lines += _work_lines(costs, estimate.machine, estimate.tokens)
        lines += _noise_lines(scheme, disguise)
        observer.note("these are estimates for one round; `mpu run` logs measured numbers for whole rounds")
        document = {
            **asdict(costs),
            "machine": asdict(estimate.machine),
            "tokens": estimate.tokens,
            "client_memory": {**asdict(peak), "total": peak.total},
            "fits": estimate.fits,
            "fits_with": estimate.suggestion[0] if estimate.suggestion else None,
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


def _work_lines(costs: Cost, machine: Machine, tokens: int | None) -> Iterator[str]:
    """How long both parties take on this machine."""
    yield (
        f"server's work\tabout {in_time(costs.server_seconds)}: {in_bytes(costs.moved)} moved and "
        f"{costs.operations:.3g} operations, as the paper counts, at {machine.bandwidth / 1e9:.1f} GB/s and "
        f"{machine.operations / 1e9:.0f} billion operations/s"
    )
    if costs.training_operations is not None and costs.training_seconds is not None:
        yield (
            f"client trains\t{costs.training_operations:.3g} operations on {tokens:,} tokens per copy: about "
            f"{in_time(costs.training_seconds)} on this machine's processors at "
            f"{machine.training_operations / 1e9:.0f} billion operations/s, {machine.spread:.1f} times as long at the "
            "slowest speed measured"
        )
    if machine.busy > BUSY:
        yield "busy\tother programs compute here now: alone, all of it takes less time"


def _fit_line(room: float, fits: bool, suggestion: tuple[str, Memory] | None) -> str:
    """Whether training fits, or with what it would."""
    if fits:
        return f"fits\tinto {in_bytes(room)}"
    text = "nor with smaller micro-batches, checkpointing, LoRA and bfloat16; FSDP shares it between several cards"
    if suggestion:
        text = f"with {suggestion[0]} it takes {in_bytes(suggestion[1].total)}"
    return f"does not fit\tinto {in_bytes(room)}; {text}"


def _noise_lines(scheme: Scheme, disguise: Disguise) -> Iterator[str]:
    """What the noise leaves in the update."""
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
