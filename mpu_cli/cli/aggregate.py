"""``mpu aggregate``: combine the clients' deltas into the server's next model."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import expand_option_groups
from mpu_cli.cli.output import emit, note, paths_from, table, terminal
from mpu_cli.errors import UsageError
from mpu_cli.options.publishing import Aggregating

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpu_cli.server.agreement import Aggregation
    from mpu_cli.server.estimate import ErrorEstimate
    from mpu_cli.server.keys import Keys
    from mpu_cli.server.owners import Combined
    from mpu_cli.server.round import AggregatePlan
    from mpu_cli.server.server_lr import ServerStep


@expand_option_groups
def aggregate(
    deltas: Annotated[
        list[str],
        typer.Argument(help="Deltas, raw or inverted, directories of them, or - for standard input.", metavar="DELTAS"),
    ],
    aggregating: Aggregating,
    keys: Annotated[
        list[Path] | None,
        typer.Option(
            help="The key file of the publication (default: keys.bin); repeated for several data owners, whose updates "
            "are added.",
            metavar="FILE",
        ),
    ] = None,
    base: options.BaseAgain = None,
    config: options.ModelConfig = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the unlearned model (default: unlearned; after round 1, unlearned_R).", metavar="DIR"
        ),
    ] = None,
    as_adapter: Annotated[
        bool, typer.Option("--as-adapter", help="Write LoRA deltas as one peft adapter for BASE instead of a model.")
    ] = False,
    running: Annotated[
        Path | None,
        typer.Option(
            help="Add the deltas to the sum in DIR, after which they can be deleted; the model is written once every "
            "copy's is in it.",
            metavar="DIR",
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(help="Upload the result to this private repository on the Hub.", metavar="OWNER/NAME"),
    ] = None,
    dry_run: options.DryRun = False,
    identity: options.Identity = None,
    passphrase_file: options.PassphraseFile = None,
    trust_keys: options.TrustKeys = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Undo the coordinates of all copies' deltas, average them so that the noise cancels, and add the result to BASE.

    Prints the path of the unlearned model; with --running, of the sum until every copy is in it.
    """
    from mpu_cli.api.server import add, carry_out, plan_aggregate
    from mpu_cli.cli.secrets import open_keys
    from mpu_cli.server.incremental import Running
    from mpu_cli.server.owners import Combined

    if running and (as_adapter or dry_run):
        raise UsageError("--running does not work with --as-adapter or --dry-run", "aggregate all deltas at once")
    paths = paths_from(deltas)  # first: at the end of a pipe, the command that writes the keys may still be running
    files = keys or [Path("keys.bin")]
    if len(files) > 1 and running:
        raise UsageError("several --keys do not work with --running", "add up each owner's deltas alone")
    opened = [open_keys(file, identity, passphrase_file, trust_keys) for file in files]
    if running:
        with terminal() as observer:
            added = add(
                paths, running, keys=opened[0], base=base, config=config, out=out, push=push, force=force,
                options=aggregating, observer=observer,
            )  # fmt: skip
        if isinstance(added, Running):
            note(f"in the sum: copy {_comma_separated(added.copies)}; missing: copy {_comma_separated(added.missing)}")
            emit([running], {"sum": running, "copies": added.copies, "missing": added.missing}, as_json)
        else:
            _tell(added, opened[0], {}, aggregating, push, as_json)
        return
    plan = plan_aggregate(
        paths,
        keys=opened,
        base=base,
        config=config,
        out=out,
        as_adapter=as_adapter,
        force=force,
        options=aggregating,
    )
    if dry_run:
        _preview(plan, as_json)
        return
    with terminal() as observer:
        result = carry_out(plan, push=push, observer=observer)
    if isinstance(result, Combined):
        _tell_owners(result, plan, files, as_json)
    else:
        _tell(result, opened[0], {delta.copy: delta.path for delta in plan.deltas}, aggregating, push, as_json)


def _tell(
    result: Aggregation, keys: Keys, paths: Mapping[int, Path], options: Aggregating, push: str | None, as_json: bool
) -> None:
    """Tell of one owner's update."""
    _show("Deltas of this round", result)
    _tell_step(result.step, options)
    if options.server_lr == 1 and (keys.publication.permanent or keys.publication.omitted):
        note(
            "copies that know less forget less: if the client's `mpu check` fails, take a longer step "
            "(--server-lr auto --probe FILE finds the longest that your own records allow)"
        )
    note(f"rounding on storage: {result.rounding:.1%} of the update")
    note(f"next: `mpu publish {shlex.quote(str(result.path))}`; the client runs `mpu check` on a copy of it")
    emit(
        [result.path],
        {
            "model": result.path,
            "pushed": push,
            "run": keys.run,
            "round": keys.round,
            "copies": _copies(result, paths),
            "smallest_pairwise_cosine": result.pairwise,
            "warnings": result.warnings(),
            "norm": result.norm,
            "error_estimate": asdict(result.error),
            "trained_differently": result.trained_differently,
            "lost_to_rounding": result.rounding,
            "step": asdict(result.step) if result.step else None,
            "outliers": [
                {"tensor": name, "copy": copy, "factor": factor if math.isfinite(factor) else None}
                for name, copy, factor in result.outliers
            ],
        },
        as_json,
    )


def _tell_owners(result: Combined, plan: AggregatePlan, files: Sequence[Path], as_json: bool) -> None:
    """Tell of each owner's update, and how far they point in one direction."""
    summaries = []
    for file, owner, update in zip(files, plan.owners, result.updates, strict=True):
        _show(f"{file}: run {owner.keys.run}, round {owner.keys.round}", update)
        paths_of = {delta.copy: delta.path for delta in owner.deltas}
        summaries.append({
            "keys": file, "run": owner.keys.run, "round": owner.keys.round, "copies": _copies(update, paths_of),
            "norm": update.norm, "smallest_pairwise_cosine": update.pairwise, "error_estimate": asdict(update.error),
        })  # fmt: skip
    for i, keys_file in enumerate(files):
        for j in range(i):
            note(f"cosine between the updates of {files[j]} and {keys_file}: {float(result.cosines[i, j]):.3f}")
    _tell_step(result.step, plan.options)
    note("to leave an owner out, leave out its keys and deltas")
    step = asdict(result.step) if result.step else None
    emit(
        [result.path],
        {
            "model": result.path,
            "owners": summaries,
            "cosines": result.cosines.tolist(),
            "warnings": result.warnings(),
            "lost_to_rounding": result.rounding,
            "step": step,
        },
        as_json,
    )


def _tell_step(step: ServerStep | None, options: Aggregating) -> None:
    """Which step was taken along the update, and what others would have cost."""
    from mpu_cli.server.server_lr import MAX_STEP

    if step is None:
        note(f"applied with a step of {options.server_lr:g}")
        return
    tried = [[f"{at:g}", f"{loss:.4f}"] for at, loss in step.curve]
    table("Steps tried", ["step", f"loss per answer token on {options.probe}"], tried)
    which = "the largest that is tried" if step.chosen >= MAX_STEP else "the largest found"
    note(f"applied with a step of {step.chosen:g}, {which} at which it rises by at most {step.max_rise:g}")


def _show(title: str, result: Aggregation) -> None:
    """A round's deltas, and how far their aggregate is from the clean update."""
    rows = [
        [f"copy {copy}", f"{norm:.4g}", "–" if math.isnan(cosine) else f"{cosine:.4f}"]
        for copy, (norm, cosine) in enumerate(zip(result.norms, result.cosines, strict=True), 1)
    ]
    table(title, ["", "norm", "cosine with the aggregate"], [*rows, ["aggregate", f"{result.norm:.4g}", ""]])
    note(_accuracy(result.error))


def _copies(result: Aggregation, paths: Mapping[int, Path]) -> list[dict[str, object]]:
    return [
        {"copy": k, "delta": paths.get(k), "norm": norm, "cosine": None if math.isnan(cosine) else cosine}
        for k, (norm, cosine) in enumerate(zip(result.norms, result.cosines, strict=True), 1)
    ]


def _comma_separated(copies: Sequence[int]) -> str:
    return ", ".join(map(str, copies))


def _preview(plan: AggregatePlan, as_json: bool) -> None:
    """What `mpu aggregate` would read and write, all deltas checked except for their numbers."""
    from mpu_cli.cli.preview import Preview, show
    from mpu_cli.server.copying import BUFFERS

    notes = []
    for keys, weights in zip(plan.publications, plan.weights, strict=True):
        shown = ", ".join(f"{weight:.3g}" for weight in weights)
        notes.append(f"run {keys.run}, round {keys.round}; the copies' weights: {shown}")
    reads = [(plan.base.source, plan.base.checkpoint.nbytes)]
    reads += [(str(delta.path), delta.checkpoint.nbytes) for delta in plan.deltas]
    show(
        Preview(reads=reads, writes=[(plan.out, plan.nbytes)], memory=BUFFERS, notes=notes),
        force=plan.force,
        as_json=as_json,
    )


def _accuracy(error: ErrorEstimate) -> str:
    """The note about the distance from the clean update."""
    if math.isnan(error.relative) and not error.permanent > 0:
        return "error of the update: cannot be estimated" + (" from one copy" if math.isnan(error.permanent) else "")
    if math.isnan(error.relative):
        return f"error of the update: about {error.permanent:.0%}, from permanent noise"
    if math.isnan(error.permanent):
        total = (
            f"about {error.relative:.1%}, and what permanent noise adds, which cannot be estimated without noise that "
            "cancels"
        )
    elif error.permanent:
        total = (
            f"about {math.hypot(error.relative, error.permanent):.0%}: {error.permanent:.0%} from permanent noise, "
            f"{error.relative:.1%} from noise that cancels"
        )
    else:
        total = (
            f"about {error.relative:.1%}, at most about {error.one_order_lower:.1%} (the change from cancelling one "
            "order less of the noise)"
        )
    return (
        f"error of the update: {total}; variance factor {error.variance_factor:.2f}, signal-to-noise ratio "
        f"{error.signal_to_noise:.3g}"
    )
