"""``mpu plan``: what a round will cost."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import expand_option_groups
from mpu_cli.cli.output import bytes_of, emit, in_bytes, in_time, note
from mpu_cli.cli.unlearn import memory_of
from mpu_cli.errors import UsageError
from mpu_cli.options.publishing import Disguise
from mpu_cli.options.unlearning import Algorithm, Lora, RecordFormat, Training, Unlearning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpu_cli.experiment.cost import Cost, Machine
    from mpu_cli.experiment.memory import Memory
    from mpu_cli.models.source import Model
    from mpu_cli.server.scheme import Scheme


@expand_option_groups
def plan(
    model: Annotated[str, typer.Argument(help="The server's model, or the client's copy of it.", metavar="MODEL")],
    disguise: Disguise,
    training: Training,
    lora: Lora,
    reading: RecordFormat,
    pretrained: Annotated[
        str | None,
        typer.Option(help="Public model that MODEL was fine-tuned from, as for publish.", metavar="MODEL"),
    ] = None,
    algo: Annotated[Algorithm, typer.Option(help="Unlearning algorithm.")] = "npo",
    forget: Annotated[
        str | None,
        typer.Option(
            help="Records to forget, to estimate the time and memory of training (as for unlearn).", metavar="DATA"
        ),
    ] = None,
    length: Annotated[
        int, typer.Option(help="Tokens of the longest record, where there is no --forget.", min=2, metavar="N")
    ] = 256,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of the client's card or machine, such as 24GB: says whether training fits, and what makes it "
            "fit.",
            metavar="SIZE",
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Epochs per round, with as many retain records as forget records.")] = 10,
    as_json: options.Json = False,
) -> None:
    """Estimate the cost of one round of the protocol: bytes written and sent, memory of each party, operations, time.

    Copies and noise are those of `mpu publish` with the same options, the client's memory is that of `mpu unlearn`;
    bandwidth and speed are measured here.
    """
    if epochs < 1:
        raise UsageError(f"--epochs {epochs}: must be at least 1")
    room = None if memory is None else bytes_of(memory)

    from mpu_cli.client.checks import check_options
    from mpu_cli.experiment.cost import cost, examples_of, measure_machine, sets_of
    from mpu_cli.experiment.memory import Work, largest_work, peak_memory, rows_at_once, way_to_fit
    from mpu_cli.models.shallow import shallow
    from mpu_cli.models.source import open_model
    from mpu_cli.server.scheme import scheme_of

    unlearning = Unlearning(algo=algo, training=training, lora=lora)
    objective = check_options(unlearning)
    if pretrained is not None:
        open_model(pretrained)  # raises for one that is not there
    disguise = disguise.with_scale(with_pretrained=pretrained is not None)
    scheme = scheme_of(disguise)
    opened = shallow(open_model(model), disguise.omitted_layers)  # what is sent and trained on
    tokens = None
    rows = rows_at_once(training)
    work = Work(rows, length, rows * length // 2)
    if forget:
        examples = examples_of(opened, forget, reading)
        tokens = sets_of(unlearning) * epochs * sum(len(example.ids) for example in examples)
        work = largest_work([examples], unlearning)
    machine = measure_machine()
    costs = cost(opened, machine, copies=scheme.copies, options=unlearning, tokens=tokens)
    peak = peak_memory(opened, unlearning, objective, work)
    fits = None if room is None else peak.total <= room
    suggestion = None
    if room is not None and not fits:
        suggestion = way_to_fit(opened, unlearning, objective, work, room)
    lines = list(_of_costs(costs, scheme.copies))
    lines.append(f"client memory\tabout {in_bytes(peak.total)}: {memory_of(peak, work)}")
    if room is not None:
        lines.append(_fitting(room, bool(fits), suggestion))
    lines += [*_of_work(costs, machine, tokens), *_of_symmetries(opened, disguise), *_of_noise(scheme, disguise)]
    note("these are estimates for one round; `mpu run` logs measured numbers for whole rounds")
    emit(lines, {
            **asdict(costs), "machine": asdict(machine), "tokens": tokens,
            "client_memory": {**asdict(peak), "total": peak.total}, "fits": fits,
            "fits_with": suggestion[0] if suggestion else None,
            "noise": {"kappa": disguise.kappa, "permanent_noise": disguise.permanent_noise,
                      "kind": scheme.kind, "factors": scheme.factors, "weights": scheme.weights.tolist(),
                      "order": scheme.order, "remainder": scheme.remainder, "variance_factor": scheme.variance_factor},
        }, as_json)  # fmt: skip


def _of_costs(costs: Cost, copies: int) -> Iterator[str]:
    """The sizes of what is sent, and the server's memory."""
    yield f"model\t{costs.weights:,} weights, {costs.attention_weights:,} of them in attention"
    yield f"server writes and sends\t{in_bytes(costs.published)} in {copies} copies"
    yield f"client returns\t{in_bytes(costs.returned)} of deltas"
    yield f"server memory\tabout {in_bytes(costs.server_memory)}, regardless of the model"


def _of_work(costs: Cost, machine: Machine, tokens: int | None) -> Iterator[str]:
    """How long both parties take on this machine."""
    yield (
        f"server's work\tabout {in_time(costs.server_seconds)}: {in_bytes(costs.moved)} moved and "
        f"{costs.operations:.3g} operations, as the paper counts, at {machine.bandwidth / 1e9:.1f} GB/s and "
        f"{machine.operations / 1e9:.0f} billion operations/s"
    )
    if costs.training_operations is not None and costs.training_seconds is not None:
        yield (
            f"client trains\t{costs.training_operations:.3g} operations on {tokens:,} tokens per copy: about "
            f"{in_time(costs.training_seconds)} on this machine's processors"
        )


def _of_symmetries(model: Model, disguise: Disguise) -> Iterator[str]:
    """Which symmetries hide the weights of ``model``, and what stays in place."""
    from mpu_cli.architectures.family import describe
    from mpu_cli.architectures.layout import layout_of
    from mpu_cli.server.symmetry_check import in_place, published_as_they_are

    layout = layout_of(model.checkpoint.tensors, model.config, model.source)
    kinds = dict.fromkeys(map(describe, layout.structures))
    residual = "residual stream: order" + (" and signs" if layout.family.rms_norm else "")
    yield f"symmetries\t{model.config['model_type']}: {' | '.join(kinds)}; {residual}"
    if bare := published_as_they_are(layout, model.checkpoint.tensors):
        yield f"bare\t{bare}"
    if unmoved := in_place(layout, model.checkpoint.tensors, disguise.symmetries):
        yield f"in place\t{unmoved}"


def _fitting(room: float, fits: bool, suggestion: tuple[str, Memory] | None) -> str:
    """Whether training fits, or with what it would."""
    if fits:
        return f"fits\tinto {in_bytes(room)}"
    text = "nor with smaller micro-batches, checkpointing, LoRA and bfloat16; FSDP shares it between several cards"
    if suggestion:
        text = f"with {suggestion[0]} it takes {in_bytes(suggestion[1].total)}"
    return f"does not fit\tinto {in_bytes(room)}; {text}"


def _of_noise(scheme: Scheme, disguise: Disguise) -> Iterator[str]:
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
