"""``mpu audit``: what a client that keeps its copies can recover."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, few, note, paths_from, table, terminal
from mpu_cli.errors import MpuError
from mpu_cli.options.publishing import NoiseKind

if TYPE_CHECKING:
    from mpu_cli.models.source import Model
    from mpu_cli.server.keys import Keys

CLOSE = 0.1  # relative error of the task vector, or without a pretrained model of the weights, that is a recovery
HELD = 0.5  # share of a block's weights unchanged in a copy, above which this is reported


def audit(
    copies: Annotated[
        list[str],
        typer.Argument(help="Copies of BASE, also of several publications, or - for standard input.", metavar="COPY…"),
    ],
    base: Annotated[str, typer.Option(help="The published model, to score the attacks with.", metavar="MODEL")],
    reference: Annotated[
        str | None,
        typer.Option(
            "--pretrained",
            "--reference",
            help="Public model that BASE was fine-tuned from, which an attacker also has.",
            metavar="MODEL",
        ),
    ] = None,
    noise: Annotated[
        NoiseKind | None,
        typer.Option(help="Kind of noise that the attacker assumes (default: try both)."),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(help="extrapolate: multiples that the attacker assumes (default: as for publish).", metavar="C,…"),
    ] = None,
    alphas: Annotated[
        str | None,
        typer.Option(help="zero-sum: α that the attacker assumes (default: as for publish).", metavar="A,B,…"),
    ] = None,
    symmetries: Annotated[
        Literal["signed", "paper", "all"] | None,
        typer.Option(help="Symmetries that the attacker assumes (default: as stated in the copies, else try each)."),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="Keys of the publication, to check that the copies belong to it and report κ; no attack reads them.",
            metavar="FILE",
        ),
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Examine only three layers.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot the errors by block and attack to a .png, .svg or .html file.", metavar="FILE"),
    ] = None,
    identity: options.Identity = None,
    passphrase_file: options.PassphraseFile = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Play a client that keeps its copies: undo the coordinates without the keys, remove the noise, compare with BASE.

    "weights" is the error up to symmetries, under which the model computes the same function; "of the change" is the
    same error relative to base − pretrained, what fine-tuning changed, and decides the verdict; "task vector" is the
    error of base − pretrained itself, in the pretrained model's coordinates. Each is that of the best estimate of a
    change in noise: as it is, scaled down, or by its singular values. Prints a verdict.
    """
    from mpu_cli.auditing.attacks import ATTACKS
    from mpu_cli.auditing.belief import audit_as_believed
    from mpu_cli.models.source import open_model

    if plot:
        from mpu_cli.figures import check_target

        check_target(plot, force)
    models = [open_model(str(path), links=False) for path in paths_from(copies)]
    owned = open_model(base)
    published = None
    if keys:
        from mpu_cli.cli.secrets import open_keys

        opened = open_keys(keys, identity, passphrase_file)
        _belong(models, owned, opened, keys)
        published = opened.publication
    public = open_model(reference) if reference else None
    with terminal() as observer:
        attempt = audit_as_believed(
            models, owned, public, noise=noise, nodes=nodes, alphas=alphas, symmetries=symmetries, fast=fast,
            observer=observer,
        )  # fmt: skip
    result, scheme, believed = attempt.audit, attempt.noise, attempt.symmetries
    best = min(result.attacks, key=result.function_error)
    if plot:
        from mpu_cli.auditing.plot import draw

        scale = f", κ = {published.kappa:g}" if published and not published.calibration else ""
        draw(result, plot, title=f"What {len(models)} of the copies reveal{scale}", force=force)
    rows = []
    for name, recovered in result.attacks.items():
        task = result.task_error(name)
        rows.append(
            [
                ATTACKS[name].description,
                f"{result.function_error(name):.2%}",
                *([f"{result.change_error(name):.2%}"] if public else []),
                "–" if task is None else f"{task:.2%}",
                result.method(name),
                f"{recovered.seconds:.1f}",
            ]
        )
    table(
        "Relative error of what is recovered",
        ["attack", "weights", *(["of the change"] if public else []), "task vector", "the change is", "seconds"],
        rows,
    )
    unmoved = [block for block, share in result.unmoved.items() if share > HELD]
    if unmoved:
        note(f"unchanged in copy 1 (no symmetry moves them, no noise survives): {few(unmoved)}")
    off, share = result.function_error(best), result.change_error(best)
    of_change = f" and {share:.2%} of what fine-tuning changed" if public else ""
    verdict = (
        f"{'recovered' if share < CLOSE else 'not recovered'}: the best of these attacks, {ATTACKS[best].description}, "
        f"is off by {off:.2%} of the weights{of_change}"
    )
    emit(
        [verdict],
        {
            "verdict": verdict,
            "attacks": {
                name: {
                    "weights": result.function_error(name),
                    "task_vector": result.task_error(name),
                    "of_change": result.change_error(name),
                    "method": result.method(name),
                    "seconds": recovered.seconds,
                    "blocks": {
                        block: {
                            "weights": result.function_error(name, block),
                            "task_vector": result.task_error(name, block),
                        }
                        for block in result.weights
                    },
                }
                for name, recovered in result.attacks.items()
            },
            "unmoved": result.unmoved,
            "settings": {
                "noise": {"kind": scheme.kind, "factors": scheme.factors},
                "symmetries": believed,
                "fast": fast,
            },
            "published": {"kappa": published.kappa, "symmetries": published.symmetries} if published else None,
        },
        as_json,
    )


def _belong(models: list[Model], base: Model, published: Keys, path: Path) -> None:
    """Raise MpuError if a copy is not of this publication, or the base differs from the published one."""
    from mpu_cli.checkpoint.fingerprint import fingerprint, hash_of
    from mpu_cli.checkpoint.pool import worker_pool
    from mpu_cli.manifest import read_copy_manifest

    with worker_pool() as pool:
        if fingerprint(base.checkpoint, pool, hash_of(published.base.fingerprint)) != published.base.fingerprint:
            raise MpuError(f"{base.source}: is not the model that was published with {path}")
    for model in models:
        manifest = read_copy_manifest(model.folder, model.checkpoint.metadata)
        if manifest is None or manifest.copy_id not in published.copy_ids:
            raise MpuError(f"{model.source}: was not published with {path}")
