"""``mpu audit``: what a client that keeps its copies can recover."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note, paths_from, table, terminal
from mpu_cli.options.publishing import NoiseKind
from mpu_cli.wording import few

if TYPE_CHECKING:
    from mpu_cli.auditing.result import Audit

UNMOVED = 0.5  # share of a block's weights unchanged in a copy, above which this is reported


def audit(
    copies: Annotated[
        list[str],
        typer.Argument(help="Copies of BASE, also of several publications, or - for standard input.", metavar="COPY…"),
    ],
    base: Annotated[str, typer.Option(help="The published model, to score the attacks with.", metavar="MODEL")],
    pretrained: Annotated[
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
        typer.Option(help="Plot the errors by block and attack to a .png, .svg, .pdf or .html file.", metavar="FILE"),
    ] = None,
    identity: options.Identity = None,
    passphrase_file: options.PassphraseFile = None,
    trust_keys: options.TrustKeys = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Play a client that keeps its copies: undo the coordinates without the keys, remove the noise, compare with BASE.

    "weights" is the error up to symmetries, under which the model computes the same function; "of the change" is the
    same error relative to base − pretrained, what fine-tuning changed, and decides the verdict; "task vector" is the
    error of base − pretrained itself, in the pretrained model's coordinates. Each is that of the best estimate of a
    change in noise: as it is, scaled down, or by its singular values. Prints a verdict.
    """
    from mpu_cli.api.measuring import audit as run_audit

    if plot:
        from mpu_cli.figures import check_target

        check_target(plot, force)
    opened = None
    if keys:
        from mpu_cli.cli.secrets import open_keys

        opened = open_keys(keys, identity, passphrase_file, trust_keys)
    named = [str(path) for path in paths_from(copies)]
    with terminal() as observer:
        attempt = run_audit(
            named, base, pretrained, noise=noise, nodes=nodes, alphas=alphas, symmetries=symmetries, keys=opened,
            fast=fast, observer=observer,
        )  # fmt: skip
    result, published = attempt.audit, opened.publication if opened else None
    if plot:
        from mpu_cli.auditing.plot import draw

        scale = f", κ = {published.kappa:g}" if published and not published.calibration else ""
        draw(result, plot, title=f"What {len(named)} of the copies reveal{scale}", force=force)
    _tell(result)
    if fast:
        note("--fast: three layers only; errors of all layers differ from these")
    if max(map(result.change_error, result.attacks)) > 1:
        note("above 100 %: further off than the public model itself, which changes nothing")
    settings = {
        "noise": {"kind": attempt.noise.kind, "factors": attempt.noise.factors},
        "symmetries": attempt.symmetries,
        "fast": fast,
    }
    document = {
        "verdict": result.verdict,
        "attacks": result.document(),
        "unmoved": result.unmoved,
        "settings": settings,
        "published": {"kappa": published.kappa, "symmetries": published.symmetries} if published else None,
    }
    emit([result.verdict], document, as_json)


def _tell(result: Audit) -> None:
    """The table of attacks, and the blocks that nothing hides."""
    from mpu_cli.auditing.result import ATTACKS

    rows = []
    for name, recovered in result.attacks.items():
        task = result.task_error(name)
        rows.append(
            [
                ATTACKS[name].description,
                f"{result.function_error(name):.2%}",
                *([f"{result.change_error(name):.2%}"] if result.with_reference else []),
                "–" if task is None else f"{task:.2%}",
                result.method(name),
                f"{recovered.seconds:.1f}",
            ]
        )
    of_change = ["of the change"] if result.with_reference else []
    columns = ["attack", "weights", *of_change, "task vector", "the change is", "seconds"]
    table("Relative error of what is recovered", columns, rows)
    if unmoved := [block for block, share in result.unmoved.items() if share > UNMOVED]:
        note(f"unchanged in copy 1 (no symmetry moves them, no noise survives): {few(unmoved)}")
