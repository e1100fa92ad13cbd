"""``mpu plan``: what a round will cost."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import grouped
from mpu_cli.cli.output import emit, in_bytes, in_time, note
from mpu_cli.errors import UsageError
from mpu_cli.options.publishing import Copies, Depth, PermanentNoise
from mpu_cli.options.unlearning import Optimizer, Training


@grouped
def plan(
    model: Annotated[str, typer.Argument(help="The server's model.", metavar="MODEL")],
    copies: Copies,
    shared: PermanentNoise,
    depth: Depth,
    optim: Annotated[
        Optimizer, typer.Option(help="The client's optimiser, to estimate its memory.")
    ] = Training().optim,
    forget: Annotated[
        str | None,
        typer.Option(help="Records to forget, to estimate the cost of training (as for unlearn).", metavar="DATA"),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the tofu or muse files.", metavar="DIR")] = None,
    epochs: Annotated[int, typer.Option(help="Epochs per round, with as many retain records as forget records.")] = 10,
    as_json: options.Json = False,
) -> None:
    """Estimate the cost of one round of the protocol: bytes written and sent, memory of each party, operations, time.

    Bandwidth and speed are measured on this machine. Training activations are not counted.
    """
    if epochs < 1:
        raise UsageError(f"--epochs {epochs}: must be at least 1")

    from mpu_cli.architectures.family import describe
    from mpu_cli.architectures.layout import layout_of
    from mpu_cli.experiment.cost import cost, measure_machine, training_tokens
    from mpu_cli.models.shallow import shallow
    from mpu_cli.models.source import open_model
    from mpu_cli.server.families import published_as_they_are
    from mpu_cli.server.scheme import scheme_of

    scheme = scheme_of(copies)
    opened = shallow(open_model(model), depth.omitted)  # what is sent and trained on
    tokens = None
    if forget:
        tokens = 2 * epochs * training_tokens(opened, forget, data_dir)
    machine = measure_machine()
    costs = cost(opened, machine, copies=scheme.copies, optimizer=optim, tokens=tokens)
    lines = [
        f"model\t{costs.weights:,} weights, {costs.attention_weights:,} of them in attention",
        f"server writes and sends\t{in_bytes(costs.published)} in {scheme.copies} copies",
        f"client returns\t{in_bytes(costs.returned)} of float32 deltas",
        f"server memory\tabout {in_bytes(costs.server_memory)}, regardless of the model",
        f"client memory\t{in_bytes(costs.client_memory)} for weights, gradient and {optim}'s state, plus activations",
        f"server's work\tabout {in_time(costs.server_seconds)}: {in_bytes(costs.moved)} moved and "
        f"{costs.operations:.3g} operations, as the paper counts, at {machine.bandwidth / 1e9:.1f} GB/s and "
        f"{machine.operations / 1e9:.0f} billion operations/s",
    ]
    if costs.training_operations is not None:
        lines.append(
            f"client trains\t{costs.training_operations:.3g} operations on {tokens:,} tokens per copy: at least "
            f"{costs.training_seconds:.3g} s on this machine's processor"
        )
    layout = layout_of(opened.checkpoint.tensors, opened.config, opened.source)
    kinds = dict.fromkeys(map(describe, layout.structures))
    residual = "residual stream: order" + (" and signs" if layout.family.rms_norm else "")
    lines.append(f"symmetries\t{opened.config['model_type']}: {' | '.join(kinds)}; {residual}")
    if bare := published_as_they_are(layout, opened.checkpoint.tensors):
        lines.append(f"bare\t{bare}")
    weights = scheme.weights
    lines.append(
        f"noise\t{scheme.kind} ({', '.join(f'{factor:g}' for factor in scheme.factors)}): cancels up to order "
        f"{scheme.order - 1} and leaves {scheme.remainder:.3g}·κ^{scheme.order}; other differences between "
        f"copies are multiplied by up to {float(weights.abs().sum()):.3g} (their variance, if random, by "
        f"{scheme.variance_factor:.3g})"
    )
    if shared.permanent_noise:
        lines.append(
            "shared noise\tnothing cancels it: every weight that the client trains on is off by "
            f"{shared.permanent_noise:g} times the RMS of its block's task vector, and the aggregated update is off "
            f"in proportion to that (first order; noise of --kappa: order {scheme.order}). "
            "Rehearse with `mpu run --permanent-noise`"
        )
    note("these are estimates for one round; `mpu run` logs measured numbers for whole rounds")
    emit(lines, {
            **asdict(costs), "machine": asdict(machine), "tokens": tokens,
            "noise": {"kind": scheme.kind, "factors": scheme.factors, "weights": weights.tolist(),
                      "order": scheme.order, "remainder": scheme.remainder, "variance_factor": scheme.variance_factor},
        }, as_json)  # fmt: skip
