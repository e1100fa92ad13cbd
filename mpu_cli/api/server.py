"""The server's steps: ``publish``, ``invert`` and ``aggregate``, and the plans of what they will read and write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mpu_cli.api.paths import PathLike
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.errors import UsageError
from mpu_cli.manifest import read_model_manifest
from mpu_cli.models.hub import check_repository, upload
from mpu_cli.models.source import Model, open_model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.declare import with_keywords
from mpu_cli.options.publishing import Aggregating, Publishing
from mpu_cli.outputs import keys_path, model_folder, next_round, round_folder
from mpu_cli.sealing import default_identity_path, parse_recipients, read_identities
from mpu_cli.server import keys as _keys
from mpu_cli.server.adapter import aggregate_adapter
from mpu_cli.server.aggregate import aggregate as _aggregate
from mpu_cli.server.agreement import Aggregation
from mpu_cli.server.deltas import open_deltas
from mpu_cli.server.incremental import Running, finish
from mpu_cli.server.incremental import add as add_delta
from mpu_cli.server.inverse import invert as _invert
from mpu_cli.server.keys import Keys
from mpu_cli.server.owners import Combined, aggregate_owners
from mpu_cli.server.publication import default_secret_path, publication_of, server_secret
from mpu_cli.server.publish import Published, PublishPlan, Target
from mpu_cli.server.publish import plan_publish as _plan_publish
from mpu_cli.server.publish import publish as _publish
from mpu_cli.server.publish_report import Remark, leakage_of, remarks_on_plan, remarks_on_result
from mpu_cli.server.round import AggregatePlan, owners_of
from mpu_cli.server.round import plan_aggregate as _plan_aggregate

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpu_cli.api.arguments import AggregateArguments, PublishArguments
    from mpu_cli.options.keywords import AggregateKeywords, PublishKeywords


def plan_publish(
    base: PathLike,
    pretrained: PathLike | None = None,
    *,
    config: PathLike | None = None,
    out: PathLike | None = None,
    keys: PathLike | None = None,
    only: Sequence[int] | None = None,
    existing_keys: Keys | None = None,
    copy_recipients: Sequence[str] = (),
    recipients: Sequence[str] = (),
    passphrase: str | None = None,
    identity: PathLike | None = None,
    run: str | None = None,
    round: int | None = None,
    seed: int | None = None,
    force: bool = False,
    options: Publishing | None = None,
    observer: Observer = SILENT,
    **keywords: Unpack[PublishKeywords],
) -> PublishPlan:
    """What ``publish`` with the same arguments will read and write, after every check that needs no weights.

    Args:
        base: the model to hide: a file, a directory, a sharded index or a Hub id.
        pretrained: the public model that ``base`` was fine-tuned from, which the noise is scaled to.
        config: the model's config.json, if it does not lie beside the weights.
        out: directory for the copies (default: this one; after round 1, round_R).
        keys: where to write the sealed keys (default: keys.bin; after round 1, round_R/keys.bin).
        only: the copies to write, counted from 1.
        existing_keys: the keys, if they exist already and ``only`` makes further copies (default: those in ``keys``).
        copy_recipients: age public keys, one a copy, that the copies are sealed for.
        recipients: age public keys that the keys are sealed for; else ``passphrase``, else ``identity``.
        run: the run's name (default: the one that made ``base``, or random).
        round: the round's number (default: the one after that of ``base``, or 1).
        seed: for repeatable experiments only: whoever knows it can undo the copies.
        force: replace copies that exist.
        options: how to publish.
        keywords: single options, such as ``kappa=0.01``, which win over ``options``.

    Raises UsageError for options that do not go together, MpuError for models that are not supported.
    """
    how = with_keywords(Publishing, options, keywords)
    if len(copy_recipients) > 1 and only is None and how.disguise.count is None:
        how = replace(how, disguise=replace(how.disguise, copies=len(copy_recipients)))
    model = open_model(str(base), Path(config) if config else None)
    manifest = read_model_manifest(model.folder)
    if (
        manifest
        and manifest.permanent
        and pretrained is None
        and not how.disguise.sets_scale
        and how.calibration.epsilon is None
    ):
        raise UsageError(
            f"{base}: the copies of round {manifest.round} had permanent noise, and those of the next would not",
            "name the public model with --pretrained again, or choose --kappa or --permanent-noise",
        )
    run_of_base, next_one = next_round(model.folder)
    number = next_one if round is None else round
    publication = publication_of(
        how, with_pretrained=pretrained is not None, seed=seed, run=run or run_of_base or "", round_=number
    )
    path = Path(keys) if keys else keys_path(model.folder, number)
    if existing_keys is None and only is not None and path.exists():
        existing_keys = open_keys(path, identity=identity, passphrase=passphrase)
    if existing_keys:
        publication = publication.with_secrets_of(existing_keys.publication)
    if odd := [copy for copy in only or () if not 1 <= copy <= publication.copies]:
        raise UsageError(f"--only {odd[0]}: copies are numbered from 1 to {publication.copies}")
    count = publication.copies if only is None else len(set(only))
    if copy_recipients and len(copy_recipients) != count:
        raise UsageError(f"--copy-recipients: {len(copy_recipients)} for {count} copies", "give one for each copy")
    identity_path = Path(identity) if identity else None
    sealer = _keys.sealer(recipients=recipients, passphrase=passphrase, identity=identity_path, note=observer.note)
    sealed_for = parse_recipients(copy_recipients, "--copy-recipients")
    target = Target(Path(out) if out else round_folder(Path("."), number), path, sealer, sealed_for, force)
    public = open_model(str(pretrained)) if pretrained else None
    return _plan_publish(model, public, publication, target, only=only, existing_keys=existing_keys)


def publish(
    base: PathLike,
    pretrained: PathLike | None = None,
    *,
    observer: Observer = SILENT,
    **arguments: Unpack[PublishArguments],
) -> Published:
    """``mpu publish``: disguised copies of ``base``, and the sealed keys that undo them.

    A model that `mpu aggregate` made continues its run in the next round, in the folder ``round_R``. ``arguments`` are
    those of ``plan_publish``, which describes them: out, keys, recipients, seed, …, and options such as kappa, copies,
    symmetries, noise. The result's ``warnings`` are what the command warns of, and go to ``observer``, too; its
    ``leakage`` is an estimate of what the copies hide.
    """
    published = carry_out_publication(plan_publish(base, pretrained, observer=observer, **arguments), observer=observer)
    for warning in published.warnings:
        observer.warn(warning)
    return published


def carry_out_publication(
    plan: PublishPlan,
    *,
    plan_remarks: Sequence[Remark] | None = None,
    secret_factors: bool = True,
    observer: Observer = SILENT,
) -> Published:
    """Publish what ``plan`` says; the result has an estimate of what leaks, and remarks.

    ``plan_remarks``: those on the plan, if they are known; ``secret_factors``: whether no remark names the noise's
    factors.
    """
    published = _publish(plan, observer=observer)
    leakage = leakage_of(plan, published)
    on_result = remarks_on_result(plan, published, leakage, secret_factors=secret_factors)
    on_plan = remarks_on_plan(plan) if plan_remarks is None else plan_remarks
    return replace(published, leakage=leakage, remarks=(*on_plan, *on_result))


def invert(
    deltas: PathLike | Iterable[PathLike],
    *,
    keys: PathLike | Keys = "keys.bin",
    base: PathLike | None = None,
    config: PathLike | None = None,
    out: PathLike = "inverted",
    identity: PathLike | None = None,
    passphrase: str | None = None,
    force: bool = False,
    observer: Observer = SILENT,
) -> list[Path]:
    """``mpu invert``: each delta in the base's coordinates, as a file in ``out``; their paths."""
    opened = open_keys(keys, identity=identity, passphrase=passphrase)
    opened_deltas = open_deltas(_paths(deltas), opened)
    model = _base_of(opened, base, config)
    targets = [Path(out) / f"copy_{delta.copy}.safetensors" for delta in opened_deltas]
    with Transaction(force=force) as transaction:
        observer.stage("invert", sum(delta.checkpoint.nbytes for delta in opened_deltas))
        for delta, target in zip(opened_deltas, targets, strict=True):
            _invert(model, delta, opened, target=target, transaction=transaction, observer=observer)
    return targets


def plan_aggregate(
    deltas: PathLike | Iterable[PathLike],
    *,
    keys: PathLike | Keys | Sequence[PathLike | Keys] = "keys.bin",
    base: PathLike | None = None,
    config: PathLike | None = None,
    out: PathLike | None = None,
    as_adapter: bool = False,
    identity: PathLike | None = None,
    passphrase: str | None = None,
    force: bool = False,
    options: Aggregating | None = None,
    **keywords: Unpack[AggregateKeywords],
) -> AggregatePlan:
    """What ``aggregate`` with the same arguments will read and write, after every check that needs no numbers.

    Args:
        deltas: files, or directories of them.
        keys: the key file of the publication, or one for each data owner, whose updates are added.
        base: the published model (default: where the keys say that it was); ``config``: its config.json.
        out: directory for the model (default: unlearned; after round 1, unlearned_R).
        as_adapter: write LoRA deltas as one peft adapter instead.
        identity: the age identity that opens the keys (default: your own).
        passphrase: opens keys that were sealed with one.
        force: replace what exists, and write an update that is nothing but noise.
        options: how to aggregate; ``keywords`` are single options, which win over it.

    Raises MpuError for deltas that were not trained on these copies, are incomplete, or do not fit.
    """
    files = [keys] if isinstance(keys, str | Path | Keys) else list(keys)
    publications = [open_keys(file, identity=identity, passphrase=passphrase) for file in files]
    return _plan_aggregate(
        _base_of(publications[0], base, config),
        owners_of(_paths(deltas), publications),
        with_keywords(Aggregating, options, keywords),
        out=Path(out) if out else model_folder(publications[0].round),
        as_adapter=as_adapter,
        force=force,
    )


def aggregate(
    deltas: PathLike | Iterable[PathLike],
    *,
    keys: PathLike | Keys = "keys.bin",
    push: str | None = None,
    observer: Observer = SILENT,
    **arguments: Unpack[AggregateArguments],
) -> Aggregation:
    """``mpu aggregate``: the model with the deltas' combined update, or one peft adapter.

    ``push`` names a private repository on the Hub to upload the result to. ``arguments`` are those of
    ``plan_aggregate``, which describes them: base, out, as_adapter, force, …, and the options server_lr, dtype,
    max_norm, …. The result's ``warnings()`` go to ``observer``, too.
    """
    plan = plan_aggregate(deltas, keys=keys, **arguments)
    return cast(Aggregation, carry_out(plan, push=push, observer=observer))


def carry_out(plan: AggregatePlan, *, push: str | None = None, observer: Observer = SILENT) -> Aggregation | Combined:
    """Aggregate as ``plan`` says: an ``Aggregation`` of one data owner's update, or several ``Combined``."""
    if push:
        check_repository(push)  # before the work
    result: Aggregation | Combined
    if len(plan.owners) > 1:
        result = aggregate_owners(plan, observer=observer)
    elif plan.as_adapter:
        result = aggregate_adapter(plan)
    else:
        result = _aggregate(plan, observer=observer)
    for warning in result.warnings():
        observer.warn(warning)
    if push:
        observer.note(f"uploaded to {upload(plan.out, push)}")
    return result


def add(
    deltas: PathLike | Iterable[PathLike],
    running: PathLike,
    *,
    keys: PathLike | Keys = "keys.bin",
    base: PathLike | None = None,
    config: PathLike | None = None,
    out: PathLike | None = None,
    identity: PathLike | None = None,
    passphrase: str | None = None,
    push: str | None = None,
    force: bool = False,
    options: Aggregating | None = None,
    observer: Observer = SILENT,
    **keywords: Unpack[AggregateKeywords],
) -> Running | Aggregation:
    """``mpu aggregate --running``: add the deltas to the sum in the folder ``running``, after which they can be
    deleted; once every copy's is in it, write the model."""
    if push:
        check_repository(push)
    how = with_keywords(Aggregating, options, keywords)
    opened = open_keys(keys, identity=identity, passphrase=passphrase)
    model, folder = _base_of(opened, base, config), Path(running)
    for delta in open_deltas(_paths(deltas), opened):
        summed = add_delta(model, delta, opened, how, folder, observer)
    if summed.missing:
        return summed
    target = Path(out) if out else model_folder(opened.round)
    result = finish(model, opened, how, folder, out=target, force=force, observer=observer)
    for warning in result.warnings():
        observer.warn(warning)
    if push:
        observer.note(f"uploaded to {upload(target, push)}")
    return result


def _paths(deltas: PathLike | Iterable[PathLike]) -> list[Path]:
    return [Path(deltas)] if isinstance(deltas, str | Path) else [Path(delta) for delta in deltas]


def open_keys(
    keys: PathLike | Keys,
    *,
    identity: PathLike | None = None,
    passphrase: str | None = None,
    trust_keys: bool = False,
) -> Keys:
    """The keys in a file, opened with a passphrase or an identity (default: your own); keys that are open as they are.

    Raises MpuError if they were not sealed by this server, unless ``trust_keys``.
    """
    if isinstance(keys, Keys):
        return keys
    path = Path(keys)
    if passphrase is not None:
        return _keys.unseal(path, passphrase=passphrase)
    identities = read_identities(Path(identity) if identity else default_identity_path())
    secret = server_secret() if default_secret_path().exists() else None
    opened = _keys.unseal(path, identities, secret=secret)
    return opened if trust_keys else _keys.check_authentic(opened, path)


def _base_of(keys: Keys, base: PathLike | None, config: PathLike | None) -> Model:
    return _keys.published_base(keys, str(base) if base else None, Path(config) if config else None)
