"""``mpu audit``: what a client that keeps its copies can recover."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note, paths_from, progress, table
from mpu_cli.errors import MpuError, UsageError

if TYPE_CHECKING:
    from mpu_cli.checkpoint.source import Model
    from mpu_cli.server.keys import Keys
    from mpu_cli.server.noise import Scheme

CLOSE = 0.1  # relative error of the task vector, or of the weights without a reference, that counts as recovered
BELIEVING = ("two copies", "all copies", "all copies, reference")  # attacks that take the noise off as it is believed
UNDONE = 0.5  # of one copy's error: below that, what was believed explains the noise
HELD = 0.5  # share of a block's weights that a copy has as they are, above which that is said


def audit(
    copies: Annotated[list[str], typer.Argument(help="Copies of one publication, or - .", metavar="COPY…")],
    base: Annotated[str, typer.Option(help="The model that was published, to score with.", metavar="MODEL")],
    reference: Annotated[
        str | None,
        typer.Option(help="A public model that BASE was fine-tuned from, which an attacker has too.", metavar="MODEL"),
    ] = None,
    noise: Annotated[
        options.Noise | None,
        typer.Option(help="The kind of noise that the attacker believes in (default: tries both)."),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(help="extrapolate: multiples that the attacker believes in (default: publish's).", metavar="C,…"),
    ] = None,
    alphas: Annotated[
        str | None,
        typer.Option(help="zero-sum: α that the attacker believes in (default: publish's).", metavar="A,B,…"),
    ] = None,
    symmetries: Annotated[
        Literal["signed", "paper", "all"] | None,
        typer.Option(help="The set that the attacker believes in (default: what the copies say, else tries each)."),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="Keys of the publication, to check that the copies are of it and to say its κ; no attack reads them.",
            metavar="FILE",
        ),
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Look at three layers only.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the errors by block and attack: .png, .svg or .html.", metavar="FILE"),
    ] = None,
    identity: options.Identity = None,
    passphrase_file: options.PassphraseFile = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Play the client who keeps its copies: undo the coordinates without the keys, remove the noise, compare with BASE.

    "weights" is the error up to symmetries, under which the model computes the same; "task vector" that of
    base − reference as recovered. Prints a verdict.
    """
    from mpu_cli.checkpoint.source import open_model
    from mpu_cli.privacy.audit import ATTACKS
    from mpu_cli.privacy.audit import audit as run_audit

    if plot:
        from mpu_cli.figures import check_target

        check_target(plot, force)
    models = [open_model(str(path)) for path in paths_from(copies)]
    _together(models)
    schemes = _believed_noise(models, noise, alphas, nodes)
    owned = open_model(base)
    published = None
    if keys:
        from mpu_cli.cli.secrets import open_keys

        published = open_keys(keys, identity, passphrase_file)
        _belong(models, owned, published, keys)
    public = open_model(reference) if reference else None
    tried = []
    for believed, scheme in product(_believed_symmetries(models, symmetries), schemes):
        with progress("audit", owned.checkpoint.nbytes) as advance:
            found = run_audit(models, owned, public, noise=scheme, symmetries=believed, fast=fast, progress=advance)
        if public and not sum(found.task.values()):
            raise UsageError(f"--reference {reference}: holds the same weights as --base; leave it out")
        explained = min((found.function_error(name) for name in BELIEVING if name in found.attacks), default=0.0)
        tried.append((explained, believed, scheme, found))
        if explained < UNDONE * found.function_error("one copy"):
            break
    _, believed, scheme, found = min(tried, key=lambda one: one[0])
    best = min(found.attacks, key=found.function_error)
    if plot:
        from mpu_cli.privacy.plot import draw

        scale = f", κ = {published.kappa:g}" if published and not published.calibration else ""
        draw(found, plot, title=f"What {len(models)} of the copies give away{scale}", force=force)
    rows = []
    for name, told in found.attacks.items():
        task = found.task_error(name)
        rows.append(
            [
                ATTACKS[name],
                f"{found.function_error(name):.2%}",
                "–" if task is None else f"{task:.2%}",
                f"{told.seconds:.1f}",
            ]
        )
    table("What is recovered (relative error)", ["attack", "weights", "task vector", "seconds"], rows)
    unmoved = [block for block, share in found.unmoved.items() if share > HELD]
    if unmoved:
        note(f"held as they are in copy 1 (no symmetry moves them, no noise survives): {', '.join(unmoved[:4])}"
             + (f" and {len(unmoved) - 4} blocks more" if len(unmoved) > 4 else ""))  # fmt: skip
    off, share = found.function_error(best), found.change_error(best)
    of_change = f", that is to {share:.2%} of what fine-tuning changed" if public else ""
    verdict = (
        f"recovered: {ATTACKS[best]} gives the weights to {off:.2%}{of_change}"
        if share < CLOSE
        else f"not recovered by these attacks: the weights at best to {off:.2%}{of_change} ({ATTACKS[best]})"
    )
    emit(
        [verdict],
        {
            "verdict": verdict,
            "attacks": {
                name: {
                    "weights": found.function_error(name),
                    "task_vector": found.task_error(name),
                    "of_change": found.change_error(name),
                    "seconds": told.seconds,
                    "blocks": {
                        block: {
                            "weights": found.function_error(name, block),
                            "task_vector": found.task_error(name, block),
                        }
                        for block in found.weights
                    },
                }
                for name, told in found.attacks.items()
            },
            "unmoved": found.unmoved,
            "settings": {"noise": asdict(scheme), "symmetries": believed, "fast": fast},
            "published": {"kappa": published.kappa, "symmetries": published.symmetries} if published else None,
        },
        as_json,
    )


def _believed_noise(models: list[Model], kind: str | None, alphas: str | None, nodes: str | None) -> list[Scheme]:
    """The schemes that the attacker tries, with a factor for each of ``models``: those given, or the defaults."""
    from mpu_cli.manifest import read_copy_manifest
    from mpu_cli.server.noise import SCHEMES, Scheme, default_factors, given_factors

    if alphas or nodes:
        return [given_factors(kind, alphas, nodes, len(models))]
    manifests = [read_copy_manifest(model.folder, model.checkpoint.metadata) for model in models]
    numbers = [(i, len(models)) if m is None else (m.copy - 1, m.copies) for i, m in enumerate(manifests)]
    kinds = [kind] if kind else SCHEMES if len(models) > 1 else SCHEMES[:1]
    return [Scheme(each, tuple(default_factors(each, copies)[i] for i, copies in numbers)) for each in kinds]


def _believed_symmetries(models: list[Model], given: str | None) -> list[str]:
    """The sets that the attacker tries: the one given, else what the copies say, else each."""
    from mpu_cli.manifest import read_copy_manifest

    if given:
        return [given]
    tried = ["signed", "paper", "all"]
    manifest = read_copy_manifest(models[0].folder, models[0].checkpoint.metadata)
    said = manifest.symmetries if manifest else None
    return [said] if said in tried else tried


def _together(models: list[Model]) -> None:
    """UsageError for copies of different publications, which give nothing away together, and for one given twice."""
    from mpu_cli.manifest import read_copy_manifest

    manifests = [read_copy_manifest(model.folder, model.checkpoint.metadata) for model in models]
    known = [manifest for manifest in manifests if manifest is not None]
    if len({(manifest.run, manifest.round) for manifest in known}) > 1:
        raise UsageError("these are copies of different publications; audit those of each by themselves")
    if len({manifest.copy_id for manifest in known}) < len(known):
        raise UsageError("the same copy is given twice")


def _belong(models: list[Model], base: Model, published: Keys, path: Path) -> None:
    """MpuError for a copy that is none of this publication, and for another base."""
    from mpu_cli.checkpoint.fingerprint import fingerprint
    from mpu_cli.checkpoint.pool import worker_pool
    from mpu_cli.manifest import read_copy_manifest

    with worker_pool() as pool:
        if fingerprint(base.checkpoint, pool) != published.base.fingerprint:
            raise MpuError(f"{base.source}: is not the model that was published with {path}")
    for model in models:
        manifest = read_copy_manifest(model.folder, model.checkpoint.metadata)
        if manifest is None or manifest.copy_id not in published.copy_ids:
            raise MpuError(f"{model.source}: is no copy of the publication of {path}")
