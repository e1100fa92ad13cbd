"""``mpu surrogate``: records that stand in for private ones, under a bound on what they tell."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import expand_option_groups
from mpu_cli.cli.output import emit, note, terminal
from mpu_cli.options.surrogates import Surrogates

if TYPE_CHECKING:
    from mpu_cli.api.surrogates import SurrogatePlan


@expand_option_groups
def surrogate(
    copy: Annotated[
        str,
        typer.Argument(help="A copy from `mpu publish` (sealed or not), a model directory or Hub id.", metavar="COPY"),
    ],
    surrogates: Surrogates,
    forget: Annotated[str, typer.Option(help="The private records to forget.", metavar="DATA")] = "forget.jsonl",
    out: Annotated[Path, typer.Option(help="The surrogate records to write.", metavar="FILE")] = Path(
        "surrogate.jsonl"
    ),
    dry_run: options.DryRun = False,
    identity: options.Identity = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Make surrogate records, which tell of the private ones no more than (ε, δ).

    Releases the terms that many records share, such as a person's name, with differential privacy, and writes what
    COPY answers about them. `mpu unlearn COPY --forget surrogate.jsonl --retain PUBLIC --public-records` then forgets
    what the records are about, on any number of copies, epochs and rounds, and spends nothing more. What only a few
    records say stays.
    Prints the path of the surrogate records.
    """
    from mpu_cli.api.surrogates import carry_out_surrogate, plan_surrogate

    with terminal() as observer:
        plan = plan_surrogate(forget, options=surrogates, observer=observer)
        if dry_run:
            note(_privacy_line(plan))
            emit([], {"records": len(plan.records), **_numbers(plan), "prompts": len(plan.prompts)}, as_json)
            return
        result = carry_out_surrogate(copy, plan, out=out, force=force, identity=identity, observer=observer)
    note(_privacy_line(plan))
    note(
        f"for you only: {result.covered_records} of {len(plan.records)} records mention a released term; what the "
        "others say is hardly forgotten"
    )
    note(
        f"next: mpu unlearn {shlex.quote(copy)} --forget {shlex.quote(str(out))} --public-records --retain PUBLIC "
        "(the bound does not cover what --retain names: give public records)"
    )
    emit(
        [result.path],
        {"surrogate": result.path, "terms": list(result.terms), "covered_records": result.covered_records,
         "records": len(plan.records), **_numbers(plan)},
        as_json,
    )  # fmt: skip


def _numbers(plan: SurrogatePlan) -> dict[str, float]:
    mechanism = plan.mechanism
    return {
        "epsilon": mechanism.bound.epsilon, "delta": mechanism.bound.delta, "threshold": mechanism.threshold,
        "noise_scale": mechanism.noise_scale,
    }  # fmt: skip


def _privacy_line(plan: SurrogatePlan) -> str:
    release, mechanism = plan.options.release, plan.mechanism
    unit = "record" if release.dp_unit is None else release.dp_unit
    return (
        f"privacy: this release protects each {unit} with ε = {mechanism.bound.epsilon:.3g} at δ = "
        f"{mechanism.bound.delta:.1e} (neighbours: {release.dp_neighbours}); a term needs about {mechanism.threshold} "
        f"of them, give or take {mechanism.noise_scale:.2g}"
    )
