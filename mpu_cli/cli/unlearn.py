"""``mpu unlearn``: the client's side of the protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import expand_option_groups
from mpu_cli.cli.output import emit, in_bytes, in_time, note, paths_from, show_answers, terminal, warn
from mpu_cli.errors import MpuError
from mpu_cli.options.unlearning import Checks, Logging, Records, Unlearning
from mpu_cli.outputs import name_of_copy

if TYPE_CHECKING:
    from mpu_cli.api.client import UnlearnPlan
    from mpu_cli.client.outcome import UnlearningResult
    from mpu_cli.evaluation.answers import Shown
    from mpu_cli.experiment.memory import Memory, Work


@expand_option_groups
def unlearn(
    copies: Annotated[
        list[str],
        typer.Argument(
            help="Copies from `mpu publish` (sealed or not), any model directories or Hub ids, or - for names on "
            "standard input.",
            metavar="COPY…",
        ),
    ],
    unlearning: Unlearning,
    checks: Checks,
    logging: Logging,
    out: Annotated[
        str | None,
        typer.Option(
            help="The delta to write, or the directory for it (default: deltas/COPY.safetensors; after round 1, "
            "deltas/round_R/COPY.safetensors). Of several copies, the directory.",
            metavar="FILE",
        ),
    ] = None,
    reference_file: Annotated[
        Path | None,
        typer.Option(
            help="The reference model's probabilities: written in round 1, read in later rounds. For npo, dpo, "
            "undial and --retain-loss kl. Of several copies, a directory with a file for each.",
            metavar="FILE",
            rich_help_panel=Records.PANEL,
        ),
    ] = None,
    show: Annotated[
        int,
        typer.Option(help="Print answers to the first N questions to forget, before and after.", metavar="N", min=0),
    ] = 0,
    dry_run: options.DryRun = False,
    identity: options.Identity = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Unlearn the --forget records on each COPY and write the change in its weights, which is all that goes back.

    All copies of a round need the same options, or the noise does not cancel. Prints the path of each delta. With
    --resume, copies that have one already are passed over.
    """
    with terminal() as observer:
        from mpu_cli.api.client import plan_unlearn, unlearn_all

        plan = plan_unlearn(
            [str(path) for path in paths_from(copies)], out=out, reference_file=reference_file, identity=identity,
            force=force, options=unlearning, checks=checks, logging=logging, observer=observer,
        )  # fmt: skip
        for warning in plan.warnings:
            warn(warning)
        if dry_run:
            _preview(plan, as_json)
            return
        outcomes = []
        for outcome in unlearn_all(plan, show=show, observer=observer):
            if outcome.result and outcome.result.is_main_process:
                _tell(outcome.task.copy, unlearning, outcome.result)
                show_answers(outcome.answers)
            outcomes.append(outcome)
    if any(outcome.result and not outcome.result.is_main_process for outcome in outcomes):
        return  # the first of several processes tells
    documents = [
        {"copy": each.task.copy, "delta": each.task.target,
         **(document_of(unlearning, each.result, each.answers) if each.result else {}), "warnings": each.warnings}
        for each in outcomes
    ]  # fmt: skip
    targets = [each.task.target for each in outcomes]
    note(
        "next: send the deltas (`mpu audit-delta` shows what they tell). The server's model may forget less than "
        "the copy: ask for a copy of the new one, and `mpu check` it"
    )
    emit(targets, documents[0] if len(documents) == 1 else {"deltas": documents}, as_json)


def _tell(copy: str, unlearning: Unlearning, result: UnlearningResult) -> None:
    """What came of one copy, on standard error."""
    rounded = f" ({result.rounding:.2%} of it lost to {unlearning.delta_dtype})" if unlearning.delta_dtype else ""
    note(result.summary(name_of_copy(copy), unlearning.algo) + rounded)
    if result.checked:
        note(result.checked)
    for warning in result.warnings():
        warn(warning)
    if result.spent:
        unit = unlearning.privacy.dp_unit or "record"
        note(
            f"privacy: this delta protects each {unit} with ε = {result.spent['epsilon']:.3g} at δ = "
            f"{unlearning.privacy.dp_delta:g} (neighbours: {unlearning.privacy.dp_neighbours}); "
            f"{_together(result.spent, result.earlier)}"
        )


def document_of(unlearning: Unlearning, result: UnlearningResult, answers: Sequence[Shown] = ()) -> dict[str, object]:
    """What came of one copy, for JSON."""
    return {
        "algorithm": unlearning.algo,
        "lr": result.rate,
        "norm": result.norm,
        "lost_to_rounding": result.rounding,
        "before": asdict(result.before) if result.before else None,
        "after": asdict(result.after) if result.after else None,
        "warnings": result.warnings(),
        "privacy": result.spent,
        "answers": [asdict(answer) for answer in answers],
        "steps": [asdict(s) for s in result.steps],
    }


def _together(spent: Mapping[str, float], earlier: int) -> str:
    """What this delta spends together with those before it."""
    if not earlier:
        return "each further delta of these records spends more"
    total = spent["epsilon_of_ledger"]
    if math.isinf(total):
        return f"with the {earlier} trainings before it, no bound holds: some had no --dp-epsilon"
    return f"with the {earlier} trainings before it: ε = {total:.3g}"


def _preview(plan: UnlearnPlan, as_json: bool) -> None:
    """What `mpu unlearn` would read and write. Steps are those of records that are one example each."""
    from mpu_cli.checkpoint.writer import nbytes_of
    from mpu_cli.cli.preview import Preview, show
    from mpu_cli.client.delta import delta_specs
    from mpu_cli.client.rate import TOO_LITTLE
    from mpu_cli.experiment.cost import training_cost
    from mpu_cli.models.source import open_model
    from mpu_cli.sealing import is_sealed

    if sealed := [task.copy for task in plan.tasks if Path(task.copy).is_file() and is_sealed(Path(task.copy))]:
        raise MpuError(f"{sealed[0]}: sealed, so it has to be opened first", "run it without --dry-run")
    models = [open_model(task.copy, links=False) for task in plan.tasks]
    # Copies of a round are alike, and trained one after the other: the largest is counted.
    cost = training_cost(max(models, key=lambda model: model.checkpoint.nbytes), plan.data, plan.options)
    epochs = f"{cost.epochs} epoch{'s' * (cost.epochs != 1)}"
    notes = [
        f"{plan.options.algo}, {epochs} of {plan.options.training.batch_size} records a step: about {cost.steps} "
        f"step{'s' * (cost.steps != 1)} at a rate of {cost.rate:.2g}",
        f"memory at its peak: {memory_of(cost.memory, cost.work)}",
    ]
    if cost.usual_rate and cost.rate < TOO_LITTLE * cost.usual_rate:
        notes.append(
            f"so few steps at this rate hardly forget: --lr auto would be {cost.usual_rate:.2g}; `mpu tune` finds both"
        )
    if plan.options.privacy.dp_epsilon is not None:
        signal = plan.most_signal(models[0])
        notes.append(
            f"privacy: the noise is at least {1 / signal:.2g} times what the records change, even if all of them pull "
            "the same way; `mpu surrogate` forgets what many records share at a smaller price"
        )
    if cost.seconds is not None:
        notes.append(f"training takes about {in_time(len(models) * cost.seconds)} on this machine's processors")
    records = [(f"{len(plan.data.forget)} records to forget", None), (f"{len(plan.data.retain)} records to keep", None)]
    sizes = [nbytes_of(delta_specs(model, plan.options)) for model in models]
    preview = Preview(
        reads=[*((model.source, model.checkpoint.nbytes) for model in models), *records],
        writes=[(task.target, size) for task, size in zip(plan.tasks, sizes, strict=True)],
        memory=cost.memory.total,
        notes=notes,
    )
    show(preview, force=plan.force, as_json=as_json)


def memory_of(memory: Memory, work: Work) -> str:
    """What takes the memory of a training."""
    return (
        f"weights {in_bytes(memory.weights)}, gradients and the optimiser {in_bytes(memory.gradients + memory.state)}, "
        f"activations and logits of {work.rows} record{'s' * (work.rows > 1)} of {work.length} tokens "
        f"{in_bytes(memory.activations + memory.logits)}"
    )
