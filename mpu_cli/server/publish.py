"""Publishing: m copies T_k(θ + ε_k) of a model, and the key file that undoes them. Streams; never holds the model."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from pyrage.x25519 import Recipient

from mpu_cli.architectures.layout import Layout, TensorLayout, layout_of
from mpu_cli.checkpoint.dtypes import NAME, WORD, all_finite, compute_dtype
from mpu_cli.checkpoint.fingerprint import NEWEST, PIECE, combine, hash_of, piece_digest, piece_digests, pieces
from mpu_cli.checkpoint.fingerprint import fingerprint as fingerprint_of
from mpu_cli.checkpoint.header import ITEM_SIZE
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.checkpoint.reader import Checkpoint
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.checkpoint.writer import CheckpointWriter
from mpu_cli.errors import MpuError
from mpu_cli.manifest import MANIFEST_NAME, CopyManifest, as_metadata, copy_facts
from mpu_cli.models.files import model_specs, write_json, write_small_files
from mpu_cli.models.shallow import names_in_base, shallow
from mpu_cli.models.source import Model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.sealing import seal_folder, write_private
from mpu_cli.server.keys import BaseIdentity, Keys
from mpu_cli.server.noise import Noise
from mpu_cli.server.profile import Profile, no_clock
from mpu_cli.server.publication import Publication, permanent_seed
from mpu_cli.symmetry.transform import Transform, as_matrix, measured_slices, row_slices

_SUM = 1 << 16  # elements summed in the compute dtype before the sum continues in double


@dataclass(frozen=True)
class CopySurvival:
    """How much of one block's noise survives storage in one copy (root mean squares, and a share of weights).

    Measured on a slice or two of each tensor.
    """

    asked: float
    survived: float
    unchanged: float


@dataclass(frozen=True)
class BlockReport:
    """One block: its number of weights, the RMS of its task vector, how much of each copy's noise survives, and the RMS
    of the weights."""

    block: str
    weights: int
    rms: float
    copies: tuple[CopySurvival, ...]
    weights_rms: float = 0.0


@dataclass(frozen=True)
class Target:
    """Where a publication goes: ``copy_1`` … ``copy_m`` into ``out``, and the keys, sealed by ``seal``, to ``keys``.

    ``recipients``, one for each copy that is written, make ``copy_k.age`` of it, which nobody else can open; the plain
    copies lie beside the keys until they are encrypted. Nothing that exists is replaced unless ``force``.
    """

    out: Path
    keys: Path
    seal: Callable[[Keys], bytes]
    recipients: Sequence[Recipient] = ()
    force: bool = False

    def copy(self, manifest: CopyManifest) -> Path:
        return self.out / f"copy_{manifest.copy}{'.age' if self.recipients else ''}"


@dataclass(frozen=True)
class Published:
    """The result of ``publish``."""

    copies: list[Path]
    keys_path: Path
    keys: Keys
    blocks: list[BlockReport]


def publish(
    base: Model,
    reference: Model | None,
    publication: Publication,
    target: Target,
    *,
    only: Sequence[int] | None = None,
    known: Keys | None = None,
    observer: Observer = SILENT,
    profile: Profile | None = None,
) -> Published:
    """Write the copies of ``publication`` and its sealed keys to ``target``, all or nothing.

    The noise of block ℓ has σ_ℓ = κ·RMS(v_ℓ), v = base − reference, or base without one (docs/design.md). ``only``
    names the copies to write, counted from 1, if not all are wanted; ``known`` are the keys of this publication if
    another copy of it was made before: they stay as they are. ``profile`` collects where the time goes.

    Raises MpuError if the base or the reference does not fit, holds NaN, an output exists, or ``known`` belong to
    another publication.
    """
    whole, base = base, shallow(base, publication.omitted)
    reference = shallow(reference, publication.omitted) if reference else None
    layout = check_publishable(base, reference)
    manifests = publication.manifests(base.checkpoint.tensors, reference.address if reference else None)
    if known and known.copy_ids != tuple(m.copy_id for m in manifests):
        raise MpuError(f"{target.keys}: belongs to a publication with other options", "use those of its other copies")
    if publication.stays:
        with worker_pool() as pool:
            identity = fingerprint_of(whole.checkpoint, pool)
        publication = replace(publication, permanent_seed=permanent_seed(identity, observer.note), stays=False)
    written = [m for m in manifests if only is None or m.copy in only]
    specs = model_specs(base.checkpoint, layout, publication.dtype)
    observer.stage("publish", base.checkpoint.nbytes)
    with Transaction(force=target.force) as transaction:
        # Renamed first: copies whose keys are lost would be wasted work.
        keys_output = None if known else transaction.add(target.keys)
        paths = [target.copy(manifest) for manifest in written]
        outputs = [transaction.add(path, directory=not target.recipients) for path in paths]
        folders = outputs
        if target.recipients:
            plain = transaction.scratch(target.keys.parent)
            folders = [plain / f"copy_{manifest.copy}" for manifest in written]
            for folder in folders:
                folder.mkdir()
        with ExitStack() as stack:
            writers = [
                stack.enter_context(
                    CheckpointWriter(folder, specs, as_metadata(copy_facts(manifest)), like=base.checkpoint)
                )
                for folder, manifest in zip(folders, written, strict=True)
            ]
            writing = _Writing(
                base=base.checkpoint,
                layout=layout,
                reference=matching(base, layout, reference),
                publication=publication,
                noise=Noise(
                    publication.randomness,
                    publication.round,
                    publication.noise,
                    [m.copy for m in written],
                    double=publication.calibration is not None,
                    permanent=publication.permanent,
                ),
                scales=[publication.noise.scales[m.copy - 1] for m in written],
                transforms=[publication.transform(m.copy, layout) for m in written],
                writers=writers,
                pool=stack.enter_context(worker_pool()),
                observer=observer,
                clock=profile.begin if profile else no_clock,
                whole_names=names_in_base(whole, publication.omitted),
                hashed=hash_of(known.base.fingerprint) if known else NEWEST,
            )
            reports = writing.all_blocks(layout.blocks)
            fingerprint = writing.fingerprint(whole)
        for folder, manifest in zip(folders, written, strict=True):
            write_small_files(base, folder, specs)
            write_json(folder / MANIFEST_NAME, copy_facts(manifest))
        for folder, output, recipient in zip(folders, outputs, target.recipients, strict=False):
            seal_folder(folder, folder.name, output, recipient)
            shutil.rmtree(folder)
        keys = Keys(
            run=publication.run,
            round=publication.round,
            seed=publication.seed.hex(),
            seed_is_secret=publication.seed_is_secret,
            noise=publication.noise,
            kappa=publication.kappa,
            symmetries=publication.symmetries,
            sigma=writing.sigma,
            copy_ids=tuple(m.copy_id for m in manifests),
            base=BaseIdentity(base.address, str(base.config_path.resolve()), fingerprint),
            reference=reference.address if reference else None,
            shared_kappa=publication.shared_kappa,
            shared_sigma=writing.shared_sigma,
            calibration=publication.calibration,
            omitted_layers=publication.omitted,
            permanent_seed=publication.permanent_seed.hex() if publication.permanent_seed else None,
        )
        if keys_output:
            write_private(keys_output, target.seal(keys))
        elif known and known.base.fingerprint != fingerprint:
            raise MpuError(f"{base.source}: is not the model whose copies {target.keys} belongs to")
        elif known and (known.sigma, known.shared_sigma) != (keys.sigma, keys.shared_sigma):
            raise MpuError(
                f"{target.keys}: its noise has other scales, so the other copies were made with another reference",
                "use the reference that they were made with",
            )
    return Published(paths, target.keys, keys, reports)


def check_publishable(base: Model, reference: Model | None) -> Layout:
    """The layout of ``base``. Raises MpuError if it is not supported, or the reference does not fit it."""
    layout = layout_of(base.checkpoint.tensors, base.config, base.source)
    _check_alias(base, layout)
    matching(base, layout, reference)
    return layout


@dataclass
class _Writing:
    """The streaming part of ``publish``: a block is read once for its scale and fingerprint, then written out."""

    base: Checkpoint
    layout: Layout
    reference: Mapping[str, torch.Tensor] | None
    publication: Publication
    noise: Noise
    scales: Sequence[float]
    transforms: Sequence[Transform]
    writers: Sequence[CheckpointWriter]
    pool: Executor
    observer: Observer
    clock: Callable[[], Callable[[str], None]]
    whole_names: Mapping[str, str]  # of tensors, in the base with all its layers
    hashed: str = NEWEST
    sigma: dict[str, float] = field(default_factory=dict)
    shared_sigma: dict[str, float] = field(default_factory=dict)
    size: dict[str, float] = field(default_factory=dict)  # block → RMS of its weights
    _digests: dict[str, list[bytes]] = field(default_factory=dict)

    def all_blocks(self, blocks: Mapping[str, list[TensorLayout]]) -> list[BlockReport]:
        """Write every block. While one is written, the next one is read for its scale, so that no core is idle."""
        waiting = list(blocks.items())
        reading = [self._read(tensor) for tensor in waiting[0][1]] if waiting else []
        reports = []
        for i, (block, tensors) in enumerate(waiting):
            both = [self._squares(tensor, futures) for tensor, futures in zip(tensors, reading, strict=True)]
            squares, of_weights = (math.fsum(each) for each in zip(*both, strict=True))
            sigma, report = self._scale(block, tensors, squares, of_weights)
            writing = [] if report else [self._write(tensor, sigma) for tensor in tensors]
            reading = [self._read(tensor) for tensor in waiting[i + 1][1]] if i + 1 < len(waiting) else []
            reports.append(report or self._finish(block, tensors, squares, sigma, writing))
        return reports

    def _scale(
        self, block: str, tensors: list[TensorLayout], squares: float, of_weights: float
    ) -> tuple[float, BlockReport | None]:
        """σ of a block, and its report if it consists of constants, which are written unchanged."""
        weights = sum(self.base.tensors[tensor.name].elements for tensor in tensors)
        if any(tensor.constant for tensor in tensors):
            for tensor in tensors:
                held = as_matrix(self.base.tensor(tensor.name))
                for writer, transform in zip(self.writers, self.transforms, strict=True):
                    mapping = transform.of(tensor)
                    mapping.put(as_matrix(writer.tensor(tensor.name)), mapping.forward(held, 0), 0)
            return 0.0, BlockReport(block, weights, 0.0, ())
        if not math.isfinite(squares):
            which = "base − reference" if self.reference else "the base"
            raise MpuError(f"{self.base.path}: {which} contains NaN or Inf in block {block}, so it cannot be published")
        self.size[block] = math.sqrt(of_weights / weights)
        sigma, shared = self.publication.sigmas(math.sqrt(squares / weights), self.size[block])
        self.sigma[block] = sigma
        if shared:
            self.shared_sigma[block] = shared
        return sigma, None

    def _finish(
        self, block: str, tensors: list[TensorLayout], squares: float, sigma: float,
        writing: list[list[Future]],
    ) -> BlockReport:  # fmt: skip
        """Wait until a block is written, and report how much of its noise survives."""
        weights = sum(self.base.tensors[tensor.name].elements for tensor in tensors)
        measured = torch.zeros(len(self.writers), 2, dtype=torch.float64)
        count = 0
        for tensor, futures in zip(tensors, writing, strict=True):
            for part, n in filter(None, [future.result() for future in futures]):
                measured += part
                count += n
            for writer in self.writers:
                writer.forget_pages(tensor.name)
            self.base.forget_pages(tensor.name)
            self.observer.advance(self.base.tensors[tensor.name].nbytes)
        return BlockReport(
            block,
            weights,
            math.sqrt(squares / weights),
            tuple(
                CopySurvival(
                    math.hypot(scale * sigma, self.shared_sigma.get(block, 0.0)),
                    math.sqrt(squared / count),
                    unchanged / count,
                )
                for scale, (squared, unchanged) in zip(self.scales, measured.tolist(), strict=True)
            ),
            self.size[block],
        )

    def fingerprint(self, whole: Model) -> str:
        """The fingerprint of the ``whole`` base, from the digests of the blocks and of what belongs to none: the alias
        and layers that are left out, which are read for it."""
        ours = {info: name for name, info in self.base.tensors.items()}
        digests = {}
        for name, info in whole.checkpoint.tensors.items():
            known = self._digests.get(ours.get(info, ""))
            digests[name] = known or list(piece_digests(whole.checkpoint, name, self.pool, self.hashed))
        return combine(whole.checkpoint.tensors, digests, self.hashed)

    def _read(self, tensor: TensorLayout) -> list[Future]:
        """Start summing v² over one tensor; its pieces are digested on the way, while they are in the cache."""
        info = self.base.tensors[tensor.name]
        raw, weights = self.base.raw(tensor.name), self.base.tensor(tensor.name).view(-1)
        other = self.reference[tensor.name].view(-1) if self.reference and not tensor.constant else None
        dtype = compute_dtype(info.dtype)

        def square(x: torch.Tensor) -> float:
            return math.fsum(float(torch.dot(p, p)) for p in x.split(_SUM))

        def piece(offset: int) -> tuple[bytes, float, float]:
            lap = self.clock()
            digest = piece_digest(raw, offset, self.hashed)
            lap("read the base, fingerprint")
            if tensor.constant:
                return digest, 0.0, 0.0
            part = slice(offset // ITEM_SIZE[info.dtype], (offset + PIECE) // ITEM_SIZE[info.dtype])
            v = weights[part].to(dtype)
            of_weights = of_task = square(v)
            if other is not None:
                of_task = square(v - other[part].to(dtype))
            lap("scale of the noise")
            return digest, of_task, of_weights

        return [self.pool.submit(piece, offset) for offset in pieces(info)]

    def _squares(self, tensor: TensorLayout, futures: list[Future]) -> tuple[float, float]:
        """Σ v² and Σ θ² over one tensor, once it has been read."""
        results = [future.result() for future in futures]
        self._digests[tensor.name] = [digest for digest, _, _ in results]
        return math.fsum(task for _, task, _ in results), math.fsum(weights for _, _, weights in results)

    def _write(self, tensor: TensorLayout, sigma: float) -> list[Future]:
        """Start writing one tensor of every copy; each slice returns its sums for ``CopySurvival`` and the number of
        weights in them, or None if it was not measured."""
        weights = as_matrix(self.base.tensor(tensor.name))
        rows, columns = weights.shape
        names = [transform.name(tensor) for transform in self.transforms]
        targets = [as_matrix(writer.tensor(name)) for writer, name in zip(self.writers, names, strict=True)]
        maps = [transform.of(tensor) for transform in self.transforms]
        shared = self.shared_sigma.get(tensor.block, 0.0)
        subkeys = self.noise.subkeys(self.whole_names[tensor.name], sigma, shared)
        stored = targets[0].dtype
        dtype = compute_dtype(self.base.tensors[tensor.name].dtype, NAME[stored])
        if self.publication.calibration:
            dtype = torch.float64  # rounding the noise before adding it could leak the weight

        def work(start: int, stop: int, measured: bool) -> tuple[torch.Tensor, int] | None:
            lap = self.clock()
            clean = weights[start:stop].to(dtype)
            lap("convert the base")
            draws = self.noise.draws(subkeys, start * columns, stop * columns, dtype)
            lap("draw the noise")
            noisy = self.noise.of_copies(draws, sigma, shared, clean.view(-1)) if subkeys else [clean] * len(maps)
            lap("add the noise")
            sums = torch.zeros(len(maps), 2, dtype=torch.float64)
            for k, (mapping, target) in enumerate(zip(maps, targets, strict=True)):
                turned = mapping.forward(noisy[k].view(clean.shape), start)
                lap("change coordinates")
                written = turned.to(stored)
                if not all_finite(written):
                    raise MpuError(
                        f"{self.base.path}: {tensor.name!r} overflows {WORD[NAME[stored]]} with its noise",
                        "choose a wider --dtype or a smaller --kappa",
                    )
                mapping.put(target, written, start)
                lap("convert and write")
                if measured:
                    without = mapping.forward(clean, start)
                    survived = (written.to(dtype) - without).view(-1)
                    sums[k, 0] = torch.dot(survived, survived)
                    sums[k, 1] = written.numel() - torch.count_nonzero(written != without.to(stored))
                    lap("measure what survives")
            return (sums, clean.numel()) if measured else None

        def make_room(writer: CheckpointWriter) -> None:
            lap = self.clock()
            writer.populate(tensor.name)
            lap("make room for the copies")

        for writer in self.writers:
            self.pool.submit(make_room, writer)
        slices = row_slices(maps, rows, columns)
        looked_at = measured_slices(len(slices))
        return [self.pool.submit(work, *bounds, i in looked_at) for i, bounds in enumerate(slices)]


def _check_alias(base: Model, layout: Layout) -> None:
    """Raise MpuError if a stored head differs from the embedding it is tied to, as one of them would be lost."""
    if layout.alias is None:
        return
    embedding = next(t.name for t in layout.parameters if t.axes[0] == ("vocab",))
    if not torch.equal(base.checkpoint.tensor(layout.alias), base.checkpoint.tensor(embedding)):
        raise MpuError(
            f"{base.source}: its config.json ties the head to the embedding, but {layout.alias!r} differs from "
            f"{embedding!r}",
            "set tie_word_embeddings to false, or remove the one that is not used",
        )


def matching(base: Model, layout: Layout, reference: Model | None) -> dict[str, torch.Tensor] | None:
    """The reference's tensors by the base's names. Raises MpuError if the architectures differ."""
    if reference is None:
        return None
    other = layout_of(reference.checkpoint.tensors, reference.config, reference.source)
    names, others = [t.name for t in layout.parameters], [t.name for t in other.parameters]
    if layout.family is not other.family or len(names) != len(others):
        raise MpuError(
            f"{reference.source}: tensors differ from {base.source} (different architecture or different head)"
        )
    for name, match in zip(names, others, strict=True):
        shapes = base.checkpoint.tensors[name].shape, reference.checkpoint.tensors[match].shape
        if shapes[0] != shapes[1]:
            raise MpuError(
                f"{reference.source}: {match!r} has shape {list(shapes[1])}, but {list(shapes[0])} in the base",
                "use a reference with the base's shapes",
            )
    return {name: reference.checkpoint.tensor(match) for name, match in zip(names, others, strict=True)}
