"""``mpu publish``: disguised copies of a model, and the keys that undo them."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import expand_option_groups
from mpu_cli.cli.output import emit, note, table, terminal, terminal_width, under_old_name, warn
from mpu_cli.errors import UsageError
from mpu_cli.options.publishing import RANDOM, Publishing
from mpu_cli.outputs import keys_path, round_folder
from mpu_cli.wording import few

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpu_cli.server.publish import Published, PublishPlan
    from mpu_cli.server.publish_report import Remark

WIDE = 120  # columns of a terminal on which all copies of a block stand in one line


@expand_option_groups
def publish(
    base: Annotated[str, typer.Argument(help="The model: file, directory, sharded index or Hub id.", metavar="BASE")],
    publishing: Publishing,
    pretrained: Annotated[
        str | None,
        typer.Option(
            "--pretrained",
            "--reference",
            help="Public model that BASE was fine-tuned from: noise is scaled to what that changed and, unless a scale "
            "is given, chosen to hide it (default: none, noise is scaled to BASE).",
            metavar="MODEL",
        ),
    ] = None,
    config: options.ModelConfig = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for copy_1 … copy_m (default: this one; after round 1, round_R).", metavar="DIR"),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the sealed keys (default: keys.bin; after round 1, round_R/keys.bin).", metavar="FILE"
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="Make only these of the copies, such as 1 or 2,3; the others later, with the same options and --keys.",
            metavar="K,…",
        ),
    ] = None,
    copy_recipients: Annotated[
        str | None,
        typer.Option(
            help="Seal each copy as copy_k.age for its own client: m age public keys, or files that contain one.",
            metavar="A.pub,B.pub,…",
        ),
    ] = None,
    recipient: Annotated[
        list[str] | None, typer.Option(help="Seal the keys for this age public key (repeatable).", metavar="age1…")
    ] = None,
    passphrase: Annotated[bool, typer.Option("--passphrase", help="Seal the keys with a passphrase.")] = False,
    passphrase_file: options.PassphraseFile = None,
    trust_keys: options.TrustKeys = False,
    identity: options.Identity = None,
    run: Annotated[
        str | None, typer.Option(help="Name of the run (default: the one that made BASE, or random).", metavar="ID")
    ] = None,
    round_: Annotated[
        int | None,
        typer.Option("--round", help="Number of this round (default: the one after BASE's, or 1).", metavar="R"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="For repeatable experiments only: whoever knows the seed can undo the copies.", metavar="N"),
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(help="Say how well a copy knows the answers of these records, beside BASE.", metavar="FILE"),
    ] = None,
    probe_columns: Annotated[
        str | None,
        typer.Option(
            help="Names of the fields of --probe, such as question=instruction,answer=response.",
            metavar="NAME=COLUMN,…",
        ),
    ] = None,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Make M noisy copies of BASE, each in its own secret coordinates, and the sealed keys that undo them.

    Give the copies to the client and keep the keys: `mpu aggregate` needs them. Prints the path of each copy.
    """
    from mpu_cli.api.server import carry_out_publication, plan_publish
    from mpu_cli.cli.secrets import new_passphrase, open_keys
    from mpu_cli.models.source import open_model
    from mpu_cli.records.forms import parse_columns
    from mpu_cli.records.reading import read_records
    from mpu_cli.server.publish_report import UNSCALED, remarks_on_plan

    clients = [part.strip() for part in copy_recipients.split(",")] if copy_recipients is not None else []
    if not all(clients):
        raise UsageError(f"--copy-recipients {copy_recipients!r}: a recipient is empty", "give one for each copy")
    if probe:
        if clients:
            raise UsageError("--probe: copies that are sealed are not measured", "leave out one of the two")
        read_records(probe, columns=parse_columns(probe_columns))  # before the work
    path = keys or keys_path(open_model(base, config).folder, round_)
    existing_keys = (
        open_keys(path, identity, passphrase_file, trust_keys) if only is not None and path.exists() else None
    )
    secret = None if existing_keys else new_passphrase(passphrase, passphrase_file, recipient, identity)
    with terminal() as observer:
        plan = plan_publish(
            base, pretrained, config=config, out=out, only=None if only is None else _numbers(only), keys=path,
            existing_keys=existing_keys, copy_recipients=clients, recipients=recipient or [], identity=identity,
            passphrase=secret, run=run, round=round_, seed=seed, force=force, observer=observer, options=publishing,
        )  # fmt: skip
    plan_remarks = list(remarks_on_plan(plan))
    _print(plan_remarks)
    if dry_run:
        _preview(plan, as_json)
        return
    secret_factors = publishing.disguise.alphas == RANDOM
    with terminal() as observer:
        published = carry_out_publication(
            plan, plan_remarks=plan_remarks, secret_factors=secret_factors, observer=observer
        )
    probe_losses = _probe_losses(probe, probe_columns, plan, published) if probe else None
    if plan.pretrained is None and (plan.publication.kappa > 0 or plan.publication.shared_kappa > 0):
        note(UNSCALED)
    if seed is not None:
        warn("--seed is for repeatable experiments: whoever knows or guesses it can undo these copies")
    report(published, plan.publication.max_noise)
    _print(published.remarks[len(plan_remarks) :])
    note(_next_step(published))
    emit(published.copies, _document(published, probe_losses, secret_factors=secret_factors), as_json)


def _probe_losses(probe: Path, columns: str | None, plan: PublishPlan, published: Published) -> dict[str, float]:
    """The losses of the base, a copy and the public model on the server's own records, which are also printed."""
    from mpu_cli.server.leakage_estimate import losses_of_copy

    losses = losses_of_copy(probe, plan, published, columns)
    probabilities = ", ".join(f"{name} {math.exp(-loss):.0%}" for name, loss in losses.items())
    note(f"probability of an answer's tokens on {probe} (geometric mean): {probabilities}")
    return losses


def _next_step(published: Published) -> str:
    """What to do with the copies."""
    sent = [shlex.quote(str(path)) for path in published.copies]
    names = [shlex.quote(path.name) for path in published.copies]
    returned = round_folder(Path("deltas"), published.keys.round)
    return (
        f"next: send {few(sent)} to the client, who runs `mpu unlearn {' '.join(names[:2])} …` and returns what it "
        f"writes; then `mpu aggregate {returned} --keys {shlex.quote(str(published.keys_path))}`"
    )


def _print(remarks: Iterable[Remark]) -> None:
    for remark in remarks:
        (warn if remark.is_warning else note)(remark.text)


def _document(
    published: Published, probe_losses: dict[str, float] | None, *, secret_factors: bool
) -> dict[str, object]:
    """What --json prints."""
    publication = published.keys.publication
    scheme, calibration = publication.scheme, publication.calibration
    return {
        "copies": published.copies,
        "keys": published.keys_path,
        "run": published.keys.run,
        "round": published.keys.round,
        "symmetries": publication.symmetries,
        "noise": {"kind": scheme.kind, "factors": None if secret_factors else scheme.factors},
        "calibration": asdict(calibration) if calibration else None,
        "hidden": asdict(published.leakage) if published.leakage else None,
        "probe": probe_losses,
        "warnings": published.warnings,
        "blocks": [
            asdict(block) | {"copies": [under_old_name(asdict(copy)) for copy in block.copies]}
            for block in published.blocks
        ],
    }


def _preview(plan: PublishPlan, as_json: bool) -> None:
    """What `mpu publish` would read and write."""
    from mpu_cli.cli.preview import Preview, show
    from mpu_cli.server.copying import BUFFERS
    from mpu_cli.server.publish_report import UNSCALED
    from mpu_cli.server.symmetry_check import published_as_they_are

    publication = plan.publication
    notes = [
        f"run {publication.run}, round {publication.round}; noise {publication.scheme.name}, symmetries "
        f"{publication.symmetries}"
    ]
    if bare := published_as_they_are(plan.layout, plan.base.checkpoint.tensors):
        notes.insert(0, bare)
    noise = publication.kappa or publication.shared_kappa or publication.calibration
    if not noise:
        notes.append("no noise: whoever aligns a copy with the public model has the weights")
    elif plan.pretrained is None and not publication.calibration:
        notes.append(UNSCALED)
    if noise and not publication.permanent and publication.copies > 1:
        notes.append("this noise cancels for whoever has all copies; --pretrained alone chooses permanent noise")
    show(
        Preview(
            reads=[(model.source, model.checkpoint.nbytes) for model in (plan.full_base, plan.pretrained) if model],
            writes=plan.outputs,
            memory=BUFFERS,
            notes=notes,
        ),
        force=plan.target.force,
        as_json=as_json,
    )


def _numbers(text: str) -> list[int]:
    """The copies named by ``--only``. Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise UsageError(f"--only {text}: copies are numbered", "name them as 1 or 2,3")
    return [int(part) for part in parts]


def report(published: Published, max_noise: float | None = None) -> None:
    """Report on standard error how much of the noise survives."""
    blocks = [block for block in published.blocks if block.copies]
    publication = published.keys.publication
    kappa, shared, calibration = publication.kappa, publication.shared_kappa, publication.calibration
    if kappa or shared or calibration:
        rows = []
        narrow = (terminal_width() or WIDE) < WIDE
        for block in blocks:
            if narrow:
                name = block.block.removesuffix(".weight")
                for k, copy in enumerate(block.copies, 1):
                    rows.append(
                        [name, str(k), f"{copy.requested:.2e}", f"{copy.survived:.2e}", f"{copy.unchanged:.1%}"]
                    )
                continue
            row = [block.block, f"{block.weights:,}", f"{block.rms:.3g}"]
            for copy in block.copies:
                row += [f"{copy.requested:.2e}", f"{copy.survived:.2e}", f"{copy.unchanged:.1%}"]
            rows.append(row)
        columns = ["block", "copy", "σ", "survived", "unchanged"] if narrow else ["block", "weights", "RMS(v)"]
        for k in range(1, 1 if narrow else len(published.copies) + 1):
            columns += [f"σ of {k}", "survived", "unchanged"]
        scale = f"κ = {kappa:g}" + (f" and permanent noise of {shared:g}" if shared else "")
        scale += f", at most {max_noise:.1%} of the weights" if max_noise is not None else ""
        if calibration:
            scale = f"ε = {calibration.epsilon:g}, δ = {calibration.delta:g}"
        table(f"Noise at {scale}, as requested and as stored", columns, rows)
        note(
            "RMS(v): size of what fine-tuning changed (without --pretrained, of the weights); σ: the requested noise; "
            "survived: what storage left of it; unchanged: share of weights whose noise was rounded away"
        )
    note(
        f"keys: {published.keys_path} (run {published.keys.run}, round {published.keys.round}); "
        "keep it, and keep it secret: without it deltas cannot be mapped back"
    )
