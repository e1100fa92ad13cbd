"""``mpu aggregate``: combine the clients' deltas into the server's next model."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import grouped
from mpu_cli.cli.output import emit, note, paths_from, table, terminal, warn
from mpu_cli.errors import UsageError
from mpu_cli.options.publishing import Aggregating
from mpu_cli.outputs import model_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpu_cli.models.source import Model
    from mpu_cli.server.agreement import Aggregation
    from mpu_cli.server.deltas import Delta
    from mpu_cli.server.estimate import ErrorEstimate
    from mpu_cli.server.keys import Keys
    from mpu_cli.server.step import Step


@grouped
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
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Undo the coordinates of all copies' deltas, average them so that the noise cancels, and add the result to BASE.

    Prints the path of the unlearned model; with --running, of the sum until every copy is in it.
    """
    from mpu_cli.cli.secrets import open_keys
    from mpu_cli.server.adapter import aggregate_adapter
    from mpu_cli.server.aggregate import aggregate as run_aggregate
    from mpu_cli.server.deltas import open_deltas
    from mpu_cli.server.keys import published_base

    if running and (as_adapter or dry_run):
        raise UsageError("--running does not work with --as-adapter or --dry-run", "aggregate all deltas at once")
    paths = paths_from(deltas)  # first: at the end of a pipe, the command that writes the keys may still be running
    files = keys or [Path("keys.bin")]
    if len(files) > 1:
        if running or as_adapter or dry_run or push:
            raise UsageError("several --keys work with plain aggregation only", "aggregate each owner's deltas alone")
        publications = [open_keys(file, identity, passphrase_file) for file in files]
        _of_owners(paths, files, publications, aggregating, base, config, out, force, as_json)
        return
    opened = open_keys(files[0], identity, passphrase_file)
    opened_deltas = open_deltas(paths, opened)
    model = published_base(opened, base, config)
    out = out or model_folder(opened.round)
    if dry_run:
        _preview(model, opened_deltas, opened, aggregating, out, force, as_json)
        return
    if push:
        from mpu_cli.models.hub import check_repository

        check_repository(push)  # before the work
    with terminal() as observer:
        if running:
            from mpu_cli.server.running import add, finish

            for delta in opened_deltas:
                summed = add(model, delta, opened, aggregating, running, observer)
            missing = sorted(set(range(1, opened.copies + 1)) - set(summed.copies))
            if missing:
                note(f"in the sum: copy {_listed(summed.copies)}; missing: copy {_listed(missing)}")
                emit([running], {"sum": running, "copies": summed.copies, "missing": missing}, as_json)
                return
            result = finish(model, opened, aggregating, running, out=out, force=force, observer=observer)
        elif as_adapter:
            result = aggregate_adapter(model, opened_deltas, opened, aggregating, out=out, force=force)
        else:
            result = run_aggregate(model, opened_deltas, opened, aggregating, out=out, force=force, observer=observer)
    paths_of = {delta.copy: delta.path for delta in opened_deltas}
    _show("Deltas of this round", result)
    _tell_step(result.step, aggregating)
    if aggregating.server_lr == 1 and (opened.permanent or opened.omitted_layers):
        note(
            "copies that know less forget less: if `mpu eval` still shows the records, take a longer step "
            "(--server-lr auto --probe FILE finds the longest that your own records allow)"
        )
    note(f"rounding on storage: {result.rounding:.1%} of the update")
    for warning in result.warnings():
        warn(warning)
    if push:
        from mpu_cli.models.hub import upload

        note(f"uploaded to {upload(out, push)}")
    emit(
        [out],
        {
            "model": out,
            "pushed": push,
            "run": opened.run,
            "round": opened.round,
            "copies": _copies(result, paths_of),
            "smallest_pairwise_cosine": result.pairwise,
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


def _of_owners(
    paths: Sequence[Path],
    files: Sequence[Path],
    publications: Sequence[Keys],
    aggregating: Aggregating,
    base: str | None,
    config: Path | None,
    out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Aggregate the deltas of several data owners, and tell of each owner's update."""
    from mpu_cli.server.keys import published_base
    from mpu_cli.server.owners import aggregate_owners, owners_of

    owners = owners_of(paths, publications)
    model = published_base(publications[0], base, config)
    target = out or model_folder(publications[0].round)
    with terminal() as observer:
        result = aggregate_owners(model, owners, aggregating, out=target, force=force, observer=observer)
    told = []
    for file, owner, update in zip(files, owners, result.updates, strict=True):
        _show(f"{file}: run {owner.keys.run}, round {owner.keys.round}", update)
        for warning in update.warnings():
            warn(f"{file}: {warning}")
        paths_of = {delta.copy: delta.path for delta in owner.deltas}
        told.append({
            "keys": file, "run": owner.keys.run, "round": owner.keys.round, "copies": _copies(update, paths_of),
            "norm": update.norm, "smallest_pairwise_cosine": update.pairwise, "error_estimate": asdict(update.error),
        })  # fmt: skip
    for i, one in enumerate(files):
        for j in range(i):
            note(f"cosine between the updates of {files[j]} and {one}: {float(result.cosines[i, j]):.3f}")
    _tell_step(result.step, aggregating)
    note("to leave an owner out, leave out its keys and deltas")
    emit([target], {"model": target, "owners": told, "cosines": result.cosines.tolist(),
                    "lost_to_rounding": result.rounding, "step": asdict(result.step) if result.step else None},
         as_json)  # fmt: skip


def _tell_step(step: Step | None, options: Aggregating) -> None:
    """Which step was taken along the update, and what others would have cost."""
    from mpu_cli.server.step import LARGEST

    if step is None:
        note(f"applied with a step of {options.server_lr:g}")
        return
    tried = [[f"{at:g}", f"{loss:.4f}"] for at, loss in step.curve]
    table("Steps tried", ["step", f"loss per answer token on {options.probe}"], tried)
    which = "the largest that is tried" if step.chosen >= LARGEST else "the largest found"
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


def _listed(copies: Sequence[int]) -> str:
    return ", ".join(map(str, copies))


def _preview(
    base: Model, deltas: Sequence[Delta], keys: Keys, options: Aggregating, out: Path, force: bool, as_json: bool
) -> None:
    """What `mpu aggregate` would read and write, all deltas checked except for their numbers."""
    from mpu_cli.checkpoint.dtypes import OPTION
    from mpu_cli.checkpoint.writer import nbytes_of
    from mpu_cli.cli.preview import Preview, show
    from mpu_cli.models.files import model_specs
    from mpu_cli.server.deltas import check_round
    from mpu_cli.server.profile import BUFFERS

    layout, weights = check_round(base, deltas, keys, options)
    specs = model_specs(base.checkpoint, layout, OPTION[options.dtype] if options.dtype else None)
    shown = ", ".join(f"{weight:.3g}" for weight in weights)
    show(
        Preview(
            reads=[(base.source, base.checkpoint.nbytes), *((d.path, d.checkpoint.nbytes) for d in deltas)],
            writes=[(out, nbytes_of(specs))],
            memory=BUFFERS,
            notes=[f"run {keys.run}, round {keys.round}; the copies' weights: {shown}"],
        ),
        force=force,
        as_json=as_json,
    )


def _accuracy(error: ErrorEstimate) -> str:
    """The note about the distance from the clean update."""
    permanent = ""
    if math.isnan(error.permanent):
        permanent = "; what the permanent noise adds cannot be estimated without noise that cancels"
    elif error.permanent:
        permanent = f"; the permanent noise adds about {error.permanent:.0%} (to first order)"
    if math.isnan(error.relative):
        return "error of the update: cannot be estimated" + permanent
    return (
        f"error of the update: about {error.relative:.1%}, at most about {error.one_order_lower:.1%} (the change "
        f"from cancelling one order less of the noise); "
        f"variance factor {error.variance_factor:.2f}, signal-to-noise ratio {error.signal_to_noise:.3g}" + permanent
    )
