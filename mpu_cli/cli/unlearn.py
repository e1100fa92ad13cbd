"""``mpu unlearn``: the client's side of the protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import grouped
from mpu_cli.cli.output import emit, note, show_answers, terminal, warn
from mpu_cli.errors import MpuError
from mpu_cli.options.unlearning import Checks, Logging, Records, Unlearning
from mpu_cli.outputs import delta_path, name_of_copy, round_of_copy

if TYPE_CHECKING:
    from mpu_cli.client.dataset import Dataset


@grouped
def unlearn(
    copy: Annotated[
        str,
        typer.Argument(
            help="A copy from `mpu publish` (sealed or not), or any model directory or Hub id.", metavar="COPY"
        ),
    ],
    unlearning: Unlearning,
    checks: Checks,
    logging: Logging,
    out: Annotated[
        str | None,
        typer.Option(
            help="The delta to write, or the directory for it (default: deltas/COPY.safetensors; after round 1, "
            "deltas/round_R/COPY.safetensors).",
            metavar="FILE",
        ),
    ] = None,
    reference_file: Annotated[
        Path | None,
        typer.Option(
            help="The reference model's probabilities: written in round 1, read in later rounds. For npo, dpo, "
            "undial and --retain-loss kl.",
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
    """Unlearn the --forget records on COPY and write the change in its weights, which is all that goes back.

    Run it on every copy of the round with the same options, or the noise does not cancel. Prints the path of the
    delta.
    """
    from mpu_cli.client.dataset import read_dataset

    # Read the records first, so that problems with them are found before anything large is loaded.
    data = read_dataset(unlearning)
    target = delta_path(out, copy, round_of_copy(Path(copy)))

    with terminal() as observer:
        from mpu_cli.cli.secrets import opened_copy
        from mpu_cli.client.ledger import default_ledger_path
        from mpu_cli.client.tag import client_secret, default_secret_path
        from mpu_cli.client.unlearn import check_logging, check_options
        from mpu_cli.client.unlearn import unlearn as run_unlearn
        from mpu_cli.models.source import open_model

        check_options(unlearning)  # before a sealed copy is opened
        check_logging(logging, unlearning.privacy)
        if dry_run:
            _preview(copy, data, unlearning, target, force, as_json)
            return
        with opened_copy(copy, identity, target) as source:
            result = run_unlearn(
                open_model(source, links=False), data, unlearning, target=target, force=force, logging=logging,
                reference_file=reference_file, secret=lambda: client_secret(default_secret_path()),
                ledger=default_ledger_path(), checks=checks, observer=observer,
            )  # fmt: skip
            answers = []
            if show and result.first:
                from mpu_cli.evaluation.evaluate import answers_before_and_after

                prompts = unlearning.prompts
                answers = answers_before_and_after(
                    open_model(source, links=False), target, data.forget[:show], prompts, prompts.template,
                    unlearning.training.device,
                )  # fmt: skip
    if not result.first:
        return
    text = f"{name_of_copy(copy)}: {unlearning.algo}, {len(result.steps)} steps"
    if result.before and result.after:
        text += f"; loss per answer token on the forget set {result.before.forget:.3f} → {result.after.forget:.3f}"
        if result.before.retain is not None:
            text += f", on the retain set {result.before.retain:.3f} → {result.after.retain:.3f}"
    elif result.steps:
        first, last = result.steps[0].forget, result.steps[-1].forget
        text += f"; loss per answer token {first:.3f} → {last:.3f} (first and last batch)"
    rounded = f" ({result.rounding:.2%} of it lost to {unlearning.delta_dtype})" if unlearning.delta_dtype else ""
    note(f"{text}; ‖Δ‖ {result.norm:.3g}{rounded}")
    for warning in result.warnings():
        warn(warning)
    if result.spent:
        unit = unlearning.privacy.dp_unit or "record"
        note(
            f"privacy: this delta protects each {unit} with ε = {result.spent['epsilon']:.3g} at δ = "
            f"{unlearning.privacy.dp_delta:g}; {_together(result.spent, result.earlier)}"
        )
    show_answers(answers)
    emit(
        [target],
        {
            "delta": target,
            "algorithm": unlearning.algo,
            "norm": result.norm,
            "lost_to_rounding": result.rounding,
            "before": asdict(result.before) if result.before else None,
            "after": asdict(result.after) if result.after else None,
            "warnings": result.warnings(),
            "privacy": result.spent,
            "answers": [asdict(answer) for answer in answers],
            "steps": [asdict(s) for s in result.steps],
        },
        as_json,
    )


def _together(spent: Mapping[str, float], earlier: int) -> str:
    """What this delta spends together with those before it."""
    if not earlier:
        return "each further delta of these records spends more"
    total = spent["epsilon_of_ledger"]
    if math.isinf(total):
        return f"with the {earlier} trainings before it, no bound holds: some had no --dp-epsilon"
    return f"with the {earlier} trainings before it: ε = {total:.3g}"


def _preview(copy: str, data: Dataset, options: Unlearning, target: Path, force: bool, as_json: bool) -> None:
    """What `mpu unlearn` would read and write. Steps are those of records that are one example each."""
    from mpu_cli.checkpoint.writer import nbytes_of
    from mpu_cli.cli.preview import Preview, show
    from mpu_cli.client.training import schedule
    from mpu_cli.client.unlearn import delta_specs, epochs_of
    from mpu_cli.experiment.cost import training_memory
    from mpu_cli.models.source import open_model
    from mpu_cli.sealing import is_sealed

    if Path(copy).is_file() and is_sealed(Path(copy)):
        raise MpuError(f"{copy}: sealed, so it has to be opened first", "run it without --dry-run")
    model = open_model(copy, links=False)
    specs = delta_specs(model, options)
    trained = sum(info.elements for info in model.checkpoint.tensors.values())
    optimised = sum(math.prod(shape) for _, shape in specs.values())
    steps = len(
        schedule(
            len(data.forget), len(data.retain), epochs=epochs_of(options), batch_size=options.training.batch_size,
            seed=options.training.seed,
        )
    )  # fmt: skip
    show(
        Preview(
            reads=[(model.source, model.checkpoint.nbytes), (f"{len(data.forget)} records to forget", None),
                   (f"{len(data.retain)} records to keep", None)],
            writes=[(target, nbytes_of(specs))],
            memory=4 * (trained - optimised if options.lora.lora_rank is None else trained)
            + training_memory(optimised, options.training.optim),
            notes=[f"{options.algo}, {epochs_of(options)} epochs of {options.training.batch_size} records a step: "
                   f"about {steps} steps; activations need memory on top"],
        ),
        force=force,
        as_json=as_json,
    )  # fmt: skip
