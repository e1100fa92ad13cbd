"""Publishing: m copies T_k(θ + ε_k) of a model, and the key file that undoes them. Streams; never holds the model.

``plan_publish`` reads headers only and says what would be written; ``publish`` does what a plan says.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch
from pyrage.x25519 import Recipient

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import private_scratch
from mpu_cli.files.folder import left_out
from mpu_cli.files.manifest import MANIFEST_NAME, CopyManifest, as_metadata, copy_facts
from mpu_cli.files.randomness import Randomness
from mpu_cli.files.reader import quoted_list, worker_pool
from mpu_cli.files.sealing import seal_folder, write_private
from mpu_cli.files.transaction import Transaction
from mpu_cli.files.writer import CheckpointWriter, TensorSpecs, nbytes_of
from mpu_cli.model.source import Model, model_specs, not_in_copies, open_model, write_json, write_small_files
from mpu_cli.observer import SILENT, Observer
from mpu_cli.protocol.copies import BaseScan, BlockReport, CopyWriter
from mpu_cli.protocol.keys import BaseIdentity, Keys
from mpu_cli.protocol.publication import Publication, matching, server_secret
from mpu_cli.protocol.register import (
    RegisterEntry,
    default_register_path,
    enter,
    enter_calibrated,
    enter_permanent,
    sample_of,
    withdraw,
)


@dataclass(frozen=True)
class Target:
    """The destination of a publication: ``copy_1`` … ``copy_m`` into ``out``, and the keys, sealed by ``seal``, to
    ``keys``.

    With ``recipients``, one for each copy that is written, copies become ``copy_k.age``, which nobody else can open;
    the plain copies lie beside the keys until they are encrypted. Nothing that exists is replaced unless ``force``.
    """

    out: Path
    keys: Path
    seal: Callable[[Keys], bytes]
    recipients: Sequence[Recipient] = ()
    force: bool = False

    def copy_path(self, manifest: CopyManifest) -> Path:
        return self.out / f"copy_{manifest.copy}{'.age' if self.recipients else ''}"


@dataclass(frozen=True)
class PublishPlan:
    """The models that ``publish`` will read, and the copies that it will write."""

    base: Model
    pretrained: Model | None
    publication: Publication
    target: Target
    specs: TensorSpecs  # the tensors of each copy
    manifests: tuple[CopyManifest, ...]  # of all copies of the publication
    copies: tuple[int, ...]  # the numbers, from 1, of those to write
    existing_keys: Keys | None  # if another copy of the publication was made before

    @property
    def manifests_to_write(self) -> list[CopyManifest]:
        return [self.manifests[copy - 1] for copy in self.copies]

    @property
    def outputs(self) -> list[tuple[Path, int | None]]:
        """The copies and, unless they are there already, the keys, with the bytes of what is large."""
        size = nbytes_of(self.specs)
        outputs: list[tuple[Path, int | None]] = []
        for manifest in self.manifests_to_write:
            outputs.append((self.target.copy_path(manifest), size))
        if not self.existing_keys:
            outputs.append((self.target.keys, None))
        return outputs


@dataclass(frozen=True)
class Published:
    """The result of ``publish``: the folders or sealed files of the copies, their ``numbers``, the keys and where they
    are, and what storage left of each block's noise."""

    copies: list[Path]
    numbers: Sequence[int]
    keys_path: Path
    keys: Keys
    blocks: list[BlockReport]


def plan_publish(
    base: Model,
    pretrained: Model | None,
    publication: Publication,
    target: Target,
    *,
    only: Sequence[int] | None,
    existing_keys: Keys | None = None,
) -> PublishPlan:
    """The plan to write the copies of ``publication`` and its sealed keys to ``target``.

    ``only`` names the copies to write, counted from 1, if not all are wanted, in the order of the recipients;
    ``existing_keys`` are the keys of this publication if another copy of it was made before: they stay as they are.
    """
    _check_alias(base)
    matching(base, pretrained)  # raises if the architectures differ
    manifests = publication.manifests(base.checkpoint.tensors, pretrained.address if pretrained else None)
    if existing_keys and existing_keys.copy_ids != tuple(manifest.copy_id for manifest in manifests):
        raise MpuError(f"{target.keys}: belongs to a publication with other options", "use those of its other copies")
    copies = tuple(dict.fromkeys(only)) if only is not None else tuple(range(1, publication.copies + 1))
    return PublishPlan(
        base=base, pretrained=pretrained, publication=publication, target=target,
        specs=model_specs(base.checkpoint, base.layout, publication.dtype), manifests=tuple(manifests), copies=copies,
        existing_keys=existing_keys,
    )  # fmt: skip


def publish(plan: PublishPlan, *, observer: Observer = SILENT) -> Published:
    """Write what ``plan`` says, all or nothing.

    The noise of block ℓ has σ_ℓ = κ·RMS(v_ℓ), v = base − pretrained, or base without one (docs/design.md). Raises
    MpuError if either holds NaN, an output exists, copies made before are of another base, or the register forbids it.
    """
    target, manifests = plan.target, plan.manifests_to_write
    _check_tokens(plan)
    observer.stage("publish", plan.base.checkpoint.nbytes)
    entries: list[RegisterEntry] = []  # gets this publication's, which is withdrawn if anything below fails
    with _withdrawing(entries), Transaction(force=target.force) as transaction:
        # Renamed first: copies whose keys are lost would be wasted work.
        keys_output = None if plan.existing_keys else transaction.add(target.keys)
        earlier_keys = None
        if keys_output and target.keys.exists():  # without them, deltas of copies that were sent out are worthless
            numbered = (target.keys.with_name(f"{target.keys.stem}.earlier-{n}{target.keys.suffix}") for n in count(1))
            earlier_keys = next(candidate for candidate in numbered if not candidate.exists())
            write_private(transaction.add(earlier_keys), target.keys.read_bytes())
        paths = [target.copy_path(manifest) for manifest in manifests]
        outputs = [transaction.add(path, directory=not target.recipients) for path in paths]
        folders = outputs
        if target.recipients:
            plain = transaction.scratch(target.keys.parent)
            folders = [plain / f"copy_{manifest.copy}" for manifest in manifests]
            for folder in folders:
                folder.mkdir()
        reports, keys = _write_copies(plan, folders, entries, observer)
        # Not strict: without recipients, copies are not sealed.
        for folder, output, recipient in zip(folders, outputs, target.recipients, strict=False):
            seal_folder(folder, folder.name, output, recipient)
            shutil.rmtree(folder)
        if keys_output:
            write_private(keys_output, target.seal(keys))
        elif plan.existing_keys:
            if plan.existing_keys.base.fingerprint != keys.base.fingerprint:
                raise MpuError(f"{plan.base.source}: is not the model whose copies {target.keys} belongs to")
            if (plan.existing_keys.sigma, plan.existing_keys.shared_sigma) != (keys.sigma, keys.shared_sigma):
                raise MpuError(
                    f"{target.keys}: its noise has other scales, so the other copies were made with another "
                    "pretrained model, or by an earlier version of mpu",
                    "use the one that they were made with",
                )
    if earlier_keys:
        observer.note(f"{target.keys}: the keys of the earlier publication are kept as {earlier_keys}")
    return Published(paths, plan.copies, target.keys, keys, reports)


def remake_copy(base: Model, keys: Keys, number: int, folder: Path) -> Model:
    """Copy ``number`` of the publication of ``base`` with these ``keys``, made once more, in ``folder``: for a server
    that sealed it for its client, or does not have it any more."""
    public = open_model(keys.reference) if keys.reference else None
    target = Target(out=folder, keys=folder / "keys.bin", seal=lambda _: b"")  # the keys that exist are not written
    plan = plan_publish(base, public, keys.publication, target, only=[number], existing_keys=keys)
    return open_model(str(publish(plan).copies[0]))


def _write_copies(
    plan: PublishPlan, folders: Sequence[Path], entries: list[RegisterEntry], observer: Observer
) -> tuple[list[BlockReport], Keys]:
    """Write each copy into its folder; the keys that undo them. ``entries`` gets the line in the register, if there is
    one."""
    existing_keys, publication, layout = plan.existing_keys, plan.publication, plan.base.layout
    is_registered = existing_keys is None and publication.is_registered
    # Earlier publications constrain one whose permanent noise is the server's own, or that has a budget of ε.
    is_bound = publication.derive_permanent_seed or publication.calibration is not None
    with ExitStack() as stack:
        scan = BaseScan(
            plan.base.checkpoint,
            layout,
            matching(plan.base, plan.pretrained),
            stack.enter_context(worker_pool()),
            with_content=is_registered and is_bound,
        )
        permanent_sigma = None
        if is_registered:
            publication, permanent_sigma = _enter_in_register(plan, scan, entries, observer)
        elif existing_keys and publication.permanent_seed:
            permanent_sigma = existing_keys.shared_sigma
        noise_share = _share_of_permanent_noise(scan, publication, permanent_sigma)
        writers = []
        for folder, manifest in zip(folders, plan.manifests_to_write, strict=True):
            facts = copy_facts(replace(manifest, noise=noise_share))
            writer = CheckpointWriter(folder, plan.specs, as_metadata(facts), like=plan.base.checkpoint)
            writers.append(stack.enter_context(writer))
            write_small_files(plan.base, folder, plan.specs, plan.publication.dtype)
            write_json(folder / MANIFEST_NAME, facts)
        writing = CopyWriter(
            scan=scan,
            publication=publication,
            noise=publication.noise(plan.copies, layout.full_name),
            scales=[publication.scheme.scales[copy - 1] for copy in plan.copies],
            transforms=[publication.transform(copy, layout) for copy in plan.copies],
            writers=writers,
            observer=observer,
            permanent_sigma=permanent_sigma,
        )
        reports = writing.all_blocks()
        scaled = publication.calibration is None and (publication.kappa or publication.shared_kappa)
        if plan.pretrained and scaled and all(report.rms == 0 for report in reports if report.copies):
            raise MpuError(
                f"{plan.pretrained.source}: has the weights of {plan.base.source}, so there is nothing to scale noise "
                "to",
                "name the public model that yours was fine-tuned from with --public",
            )
        fingerprint = scan.fingerprint()
    keys = Keys(
        publication=publication,
        sigma=writing.sigma,
        copy_ids=tuple(manifest.copy_id for manifest in plan.manifests),
        base=BaseIdentity(plan.base.address, str(plan.base.config_path.resolve()), fingerprint),
        reference=plan.pretrained.address if plan.pretrained else None,
        shared_sigma=writing.shared_sigma,
        recipients={str(copy): str(to) for copy, to in zip(plan.copies, plan.target.recipients, strict=False)},
    )
    return reports, keys


def _share_of_permanent_noise(scan: BaseScan, publication: Publication, settled: Mapping[str, float] | None) -> float:
    """The RMS of permanent noise as a share of that of the weights, to two digits; ``settled``: σ of each block, if an
    earlier publication decided it."""
    calibrated = publication.calibration and publication.calibration.shared_sigma
    if not (publication.shared_kappa or calibrated or settled):
        return 0.0
    noise = weights = 0.0
    for block, scale in scan.scales().items():
        count = sum(scan.base.tensors[tensor.name].elements for tensor in scan.layout.blocks[block])
        sigma = settled.get(block, 0.0) if settled else publication.sigmas(scale.task, scale.weights)[1]
        noise += count * sigma**2
        weights += count * scale.weights**2
    return float(f"{math.sqrt(noise / weights):.2g}") if weights else 0.0


@contextmanager
def _withdrawing(entries: Sequence[RegisterEntry]) -> Iterator[None]:
    """Withdraw ``entries`` from the register if publishing fails: nobody has a copy then."""
    try:
        yield
    except BaseException:
        for entry in entries:
            withdraw(default_register_path(), entry)
        raise


def _enter_in_register(
    plan: PublishPlan, scan: BaseScan, entries: list[RegisterEntry], observer: Observer
) -> tuple[Publication, dict[str, float] | None]:
    """Enter the publication in the server's register and in ``entries``.

    Returns it with the seed of its permanent noise, and that noise's σ by block, which an earlier publication may have
    decided; None under --dp epsilon.
    """
    publication, path, layout = plan.publication, default_register_path(), plan.base.layout
    sample = sample_of(plan.base.checkpoint, layout)
    cancels = publication.kappa or (publication.calibration and publication.calibration.sigma)
    entry = RegisterEntry(
        publication.run, publication.round, "", sample, seed=publication.seed.hex(),
        draws=publication.scheme.mixing.shape[1] if cancels else 0, watermarked=publication.watermark > 0,
    )  # fmt: skip
    if not publication.calibration and not publication.derive_permanent_seed:
        if entry.draws or entry.watermarked:
            entries.append(enter(path, entry))
        return publication, None
    scales = scan.scales()  # reads all blocks, which the content needs
    entry = replace(entry, content=scan.content())
    if calibration := publication.calibration:
        sigma = calibration.shared_sigma or calibration.sigma * min(publication.scheme.scales)
        entries.append(enter_calibrated(path, entry, sigma, calibration.rounds, again=publication.again))
        return publication, None
    secret = server_secret(observer.note)  # before the entry: without it nothing is published
    requested = {block: publication.sigmas(scale.task, scale.weights)[1] for block, scale in scales.items()}
    names = {block: layout.full_name(tensors[0].name) for block, tensors in layout.blocks.items()}
    requested_by_name = {names[block]: sigma for block, sigma in requested.items() if sigma}
    # Shows later whether server.key is still the same, and leaks nothing else of it.
    entry = replace(entry, secret=Randomness(secret).key("which secret").hex()[:16])
    entry = enter_permanent(path, entry, requested_by_name, again=publication.again)
    entries.append(entry)
    seed = Randomness(secret).key("permanent noise", entry.noise_content)
    publication = replace(publication, permanent_seed=seed, derive_permanent_seed=False)
    return publication, {block: entry.permanent_sigma.get(name, 0.0) for block, name in names.items()}


def _check_tokens(plan: PublishPlan) -> None:
    """Raise MpuError if the copies would tokenise differently from the base. Compared only if they lose anything: the
    libraries that read tokenizers take seconds to import."""
    lost = [*not_in_copies(plan.base), *left_out(plan.base.config)]
    if not lost:
        return
    from mpu_cli.model.network import check_same_tokens

    with private_scratch() as folder:
        write_small_files(plan.base, folder, plan.specs, plan.publication.dtype)
        check_same_tokens(plan.base, folder, quoted_list(lost))


def _check_alias(base: Model) -> None:
    """Raise MpuError if a stored head differs from the embedding it is tied to, as one of them would be lost."""
    layout = base.layout
    if layout.alias is None:
        return
    embedding = next(t.name for t in layout.parameters if t.axes[0] == ("vocab",))
    if not torch.equal(base.checkpoint.tensor(layout.alias), base.checkpoint.tensor(embedding)):
        raise MpuError(
            f"{base.source}: its config.json ties the head to the embedding, but {layout.alias!r} differs from "
            f"{embedding!r}",
            "set tie_word_embeddings to false, or remove the one that is not used",
        )
