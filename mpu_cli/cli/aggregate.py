"""``mpu aggregate``: the clients' deltas into the server's next model."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note, paths_from, progress, table, warn

if TYPE_CHECKING:
    from mpu_cli.server.estimate import ErrorEstimate

DISAGREE = 0.5  # cosine between two copies' deltas below which something is likely wrong
TAGS = {
    "tokens": "records (or template, date, tokenizer)",
    "options": "options or seed",
    "versions": "library versions",
}
SHOWN = 3  # outliers that are named
UNLIKE = 3.0  # times another copy's norm, from which on a copy was likely trained otherwise


def aggregate(
    deltas: Annotated[
        list[str], typer.Argument(help="Deltas, raw or inverted, directories of them, or - .", metavar="DELTAS")
    ],
    keys: options.KeysFile = Path("keys.bin"),
    base: options.BaseAgain = None,
    config: options.Config = None,
    out: Annotated[Path, typer.Option(help="Directory for the unlearned model.", metavar="DIR")] = Path("unlearned"),
    server_lr: Annotated[float, typer.Option(help="η: how much of the update to apply.")] = 1.0,
    max_norm: Annotated[
        float | None, typer.Option(help="Refuse the round if a delta's norm is above this.", metavar="NORM")
    ] = None,
    dtype: options.Dtype = None,
    as_adapter: Annotated[
        bool, typer.Option("--as-adapter", help="Write LoRA deltas as one peft adapter for BASE instead of a model.")
    ] = False,
    identity: options.Identity = None,
    passphrase_file: options.PassphraseFile = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Undo the coordinates of the deltas of all copies, average them so that the noise cancels, add that to BASE.

    Prints the path of the unlearned model.
    """
    from mpu_cli.checkpoint.dtypes import OPTION
    from mpu_cli.cli.secrets import open_keys
    from mpu_cli.server.aggregate import LOST, aggregate_adapter, open_deltas, published_base
    from mpu_cli.server.aggregate import aggregate as run_aggregate

    paths = paths_from(deltas)  # first: at the end of a pipe, what makes the keys may still be at work
    opened = open_keys(keys, identity, passphrase_file)
    found = open_deltas(paths, opened)
    model = published_base(opened, base, config)
    if as_adapter:
        result = aggregate_adapter(model, found, opened, server_lr=server_lr, out=out, force=force, max_norm=max_norm)
    else:
        with progress("aggregate", model.checkpoint.nbytes) as advance:
            result = run_aggregate(
                model,
                found,
                opened,
                server_lr=server_lr,
                dtype=OPTION[dtype] if dtype else None,
                out=out,
                force=force,
                progress=advance,
                max_norm=max_norm,
            )
    rows = [
        [f"copy {delta.copy}", f"{norm:.4g}", "–" if math.isnan(cosine) else f"{cosine:.4f}"]
        for delta, norm, cosine in zip(found, result.norms, result.cosines, strict=True)
    ]
    table(
        "Deltas of this round",
        ["", "norm", "cosine with the aggregate"],
        [*rows, ["aggregate", f"{result.norm:.4g}", ""]],
    )
    if result.pairwise < DISAGREE:
        warn(
            f"the copies disagree (cosine {result.pairwise:.2f} between two of them): other options or records for "
            "each copy, noise too large, or a delta that was tampered with"
        )
    for one, other, name in result.unlike:
        warn(f"copies {one} and {other} were trained with different {TAGS.get(name, name)}; the noise does not cancel")
    if len(told := sorted({delta.manifest.algorithm for delta in found})) > 1:
        warn(f"the copies were trained by different algorithms ({', '.join(told)}); the noise cancels between equals")
    elif max(result.norms) > UNLIKE * min(result.norms):
        warn(
            f"one copy's change is {max(result.norms) / max(min(result.norms), 1e-30):.1f} times another's: other "
            "options for each copy, or a delta that was tampered with"
        )
    for name, copy, factor in result.outliers[:SHOWN]:
        much = f"{factor:.0f} times as much as any other copy" if math.isfinite(factor) else "and no other copy does"
        warn(f"copy {copy} changes {name} {much}: trained otherwise, or tampered with")
    if len(result.outliers) > SHOWN:
        warn(f"and {len(result.outliers) - SHOWN} tensors more like that")
    if result.norm == 0:
        warn("all deltas are zero: nothing was unlearned")
    if result.rounding > LOST:
        warn(f"storage rounds away {result.rounding:.0%} of the update; --dtype float32 keeps it")
    note(_accuracy(result.error))
    if result.error.warning:
        warn(result.error.warning)
    note(f"applied with η = {server_lr:g}; rounding on storage: {result.rounding:.1%} of the update")
    emit(
        [out],
        {
            "model": out,
            "run": opened.run,
            "round": opened.round,
            "copies": [
                {"copy": delta.copy, "delta": delta.path, "norm": norm, "cosine": cosine}
                for delta, norm, cosine in zip(found, result.norms, result.cosines, strict=True)
            ],
            "smallest_pairwise_cosine": result.pairwise,
            "norm": result.norm,
            "error_estimate": asdict(result.error),
            "trained_differently": result.unlike,
            "lost_to_rounding": result.rounding,
            "outliers": [
                {"tensor": name, "copy": copy, "factor": factor if math.isfinite(factor) else None}
                for name, copy, factor in result.outliers
            ],
        },
        as_json,
    )


def _accuracy(error: ErrorEstimate) -> str:
    """What is said of the distance from the clean update."""
    if math.isnan(error.relative):
        return "error of the update: nothing to estimate it from"
    return (
        f"error of the update: about {error.relative:.1%}, at most about {error.one_order_lower:.1%} (what one order "
        f"less of the noise cancelling would change); "
        f"variance factor {error.variance_factor:.2f}, signal-to-noise ratio {error.signal_to_noise:.3g}"
    )
