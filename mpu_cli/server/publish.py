"""Publishing: m copies T_k(θ + ε_k) of a model, and the key file that undoes them. Streams; holds no model."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from pyrage.x25519 import Recipient

from mpu_cli.architectures.layout import Layout, TensorLayout, layout_of
from mpu_cli.checkpoint.dtypes import NAME, WORD, all_finite, compute_dtype
from mpu_cli.checkpoint.fingerprint import PIECE, combine, piece_digest, piece_digests, pieces
from mpu_cli.checkpoint.header import ITEM_SIZE
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.checkpoint.reader import Checkpoint, read_json_object
from mpu_cli.checkpoint.source import Model
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.checkpoint.writer import CheckpointWriter, Plan
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.manifest import MANIFEST_NAME, CopyManifest, as_metadata, copy_facts
from mpu_cli.sealing import seal_folder, write_private
from mpu_cli.server.keys import BaseIdentity, Calibration, Keys
from mpu_cli.server.noise import EXTRAPOLATE, Noise, Scheme
from mpu_cli.server.profile import Profile, no_clock
from mpu_cli.server.randomness import Randomness, Stream
from mpu_cli.symmetry.transform import Transform, as_matrix, row_slices

_SUM = 1 << 16  # elements summed in the compute dtype before the sum goes on in double

Progress = Callable[[int], None]  # told the bytes of base weights that are done


@dataclass(frozen=True)
class CopySurvival:
    """What storage leaves of the noise of one block in one copy (root mean squares, and a share of weights).

    Read off a slice or two of each tensor.
    """

    asked: float
    survived: float
    unchanged: float


@dataclass(frozen=True)
class BlockReport:
    """One block: how many weights, RMS of its task vector, and what each copy's noise became."""

    block: str
    weights: int
    rms: float
    copies: tuple[CopySurvival, ...]


@dataclass(frozen=True)
class Publication:
    """What ``publish`` made."""

    copies: list[Path]
    keys_path: Path
    keys: Keys
    blocks: list[BlockReport]


def make_transform(randomness: Randomness, round_: int, copy: int, layout: Layout, symmetries: str) -> Transform:
    """T_k of a publication: the transform of copy k (counted from 1) in round ``round_``."""

    def draws(symmetry: str, layer: int) -> Stream:
        return randomness.stream("symmetry", round_, copy, symmetry, layer)

    return Transform(layout, layout.symmetries(symmetries), draws)


def publish(
    base: Model,
    reference: Model | None,
    *,
    noise: Scheme,
    kappa: float,
    symmetries: str,
    dtype: str | None,
    seed: bytes,
    seed_is_secret: bool,
    run: str | None,
    round_: int,
    out: Path,
    keys_path: Path,
    seal: Callable[[Keys], bytes],
    force: bool,
    progress: Progress,
    only: Sequence[int] | None = None,
    shared_kappa: float = 0.0,
    calibration: Calibration | None = None,
    recipients: Sequence[Recipient] = (),
    profile: Profile | None = None,
) -> Publication:
    """Write ``copy_1`` … ``copy_m`` into ``out`` and the sealed keys to ``keys_path``, all or nothing.

    ``noise`` says how much of which noise each copy gets. ``only`` names copies (from 1) if not all shall be written:
    with the same seed, each time the same publication. Noise of σ = ``shared_kappa``·RMS(v_ℓ) is the same in every
    copy, so that no combination of them removes it.
    ``calibration`` sets σ, the same in every block, in place of ``kappa`` and ``shared_kappa``, which are 0 then.
    ``recipients``, one for each copy that is written, make ``copy_k.age`` of it, which nobody else can open; what is
    not encrypted yet lies beside the keys meanwhile. ``profile`` is told where the time goes.

    The noise of block ℓ has σ_ℓ = κ·RMS(v_ℓ), v = base − reference, or base where there is none (DESIGN §3).
    ``dtype`` is safetensors' name of the dtype to store in, None for each tensor's own.

    Raises MpuError if the base or the reference does not fit, holds NaN, or an output exists; UsageError for a
    κ that is no scale.
    """
    if not (math.isfinite(kappa) and kappa >= 0):
        raise UsageError(f"--kappa {kappa}: must be a finite number, 0 or more")
    if not (math.isfinite(shared_kappa) and shared_kappa >= 0):
        raise UsageError(f"--shared-noise {shared_kappa}: must be a finite number, 0 or more")
    layout = layout_of(base.checkpoint.tensors, base.config, base.source)
    _check_alias(base, layout)
    randomness = Randomness(seed)
    run = run or randomness.key("run").hex()[:32]
    # What another publication could differ in, so that it has other ids even where it has the same seed.
    header = [[name, info.dtype, list(info.shape)] for name, info in base.checkpoint.tensors.items()]
    facts = [run, round_, list(noise.factors), kappa, symmetries, dtype, reference and reference.address, header]
    facts += [shared_kappa] if shared_kappa else []
    facts += [asdict(calibration)] if calibration else []
    facts += [noise.kind] if noise.kind == EXTRAPOLATE else []
    chosen = json.dumps(facts)
    manifests = [
        CopyManifest(run, round_, k, noise.copies, randomness.key("copy id", chosen, k).hex()[:32], symmetries)
        for k in range(1, noise.copies + 1)
    ]
    written = [m for m in manifests if only is None or m.copy in only]
    scales = [noise.scales[m.copy - 1] for m in written]
    plan = model_plan(base.checkpoint, layout, dtype)
    with Transaction(force=force) as transaction:
        keys_output = transaction.add(keys_path)  # renamed first: copies whose keys are lost would be wasted work
        names = [f"copy_{manifest.copy}" for manifest in written]
        targets = [out / (f"{name}.age" if recipients else name) for name in names]
        outputs = [transaction.add(target, directory=not recipients) for target in targets]
        folders = outputs
        if recipients:
            plain = transaction.scratch(keys_path.parent)
            folders = [plain / name for name in names]
            for folder in folders:
                folder.mkdir()
        with ExitStack() as stack:
            writers = [
                stack.enter_context(CheckpointWriter(folder, plan, as_metadata(copy_facts(manifest))))
                for folder, manifest in zip(folders, written, strict=True)
            ]
            writing = _Writing(
                base=base.checkpoint,
                layout=layout,
                reference=_matching(base, layout, reference),
                kappa=kappa,
                shared_kappa=shared_kappa,
                calibration=calibration,
                noise=Noise(
                    randomness,
                    round_,
                    noise,
                    [m.copy for m in written],
                    double=calibration is not None,
                ),
                transforms=[make_transform(randomness, round_, m.copy, layout, symmetries) for m in written],
                writers=writers,
                pool=stack.enter_context(worker_pool()),
                progress=progress,
                clock=profile.begin if profile else no_clock,
            )
            reports = writing.all_blocks(layout.blocks, scales)
            fingerprint = writing.fingerprint()
        for folder, manifest in zip(folders, written, strict=True):
            write_small_files(base, folder, plan)
            write_json(folder / MANIFEST_NAME, copy_facts(manifest))
        for folder, output, recipient in zip(folders, outputs, recipients, strict=False):
            seal_folder(folder, folder.name, output, recipient)
            shutil.rmtree(folder)
        keys = Keys(
            run=run,
            round=round_,
            seed=seed.hex(),
            seed_is_secret=seed_is_secret,
            noise=noise,
            kappa=kappa,
            symmetries=symmetries,
            sigma=writing.sigma,
            copy_ids=tuple(m.copy_id for m in manifests),
            base=BaseIdentity(base.address, str(base.config_path.resolve()), fingerprint),
            reference=reference.address if reference else None,
            shared_kappa=shared_kappa,
            shared_sigma=writing.shared_sigma,
            calibration=calibration,
        )
        write_private(keys_output, seal(keys))
    return Publication(targets, keys_path, keys, reports)


@dataclass
class _Writing:
    """The streaming part of ``publish``: a block is read once for its scale and fingerprint, then written out."""

    base: Checkpoint
    layout: Layout
    reference: Mapping[str, torch.Tensor] | None
    kappa: float
    shared_kappa: float
    calibration: Calibration | None
    noise: Noise
    transforms: Sequence[Transform]
    writers: Sequence[CheckpointWriter]
    pool: Executor
    progress: Progress
    clock: Callable[[], Callable[[str], None]]
    sigma: dict[str, float] = field(default_factory=dict)
    shared_sigma: dict[str, float] = field(default_factory=dict)
    _digests: dict[str, list[bytes]] = field(default_factory=dict)

    def all_blocks(self, blocks: Mapping[str, list[TensorLayout]], scales: Sequence[float]) -> list[BlockReport]:
        """Write every block. The next one is read for its scale while one is written, so that no core waits."""
        waiting = list(blocks.items())
        reading = [self._read(tensor) for tensor in waiting[0][1]] if waiting else []
        reports = []
        for i, (block, tensors) in enumerate(waiting):
            squares = math.fsum(self._square(tensor, told) for tensor, told in zip(tensors, reading, strict=True))
            sigma, report = self._scale(block, tensors, squares)
            writing = [] if report else [self._write(tensor, sigma) for tensor in tensors]
            reading = [self._read(tensor) for tensor in waiting[i + 1][1]] if i + 1 < len(waiting) else []
            reports.append(report or self._finish(block, tensors, squares, sigma, scales, writing))
        return reports

    def _scale(self, block: str, tensors: list[TensorLayout], squares: float) -> tuple[float, BlockReport | None]:
        """σ of a block, and its report if it is one of constants, which are written as they are."""
        weights = sum(self.base.tensors[tensor.name].elements for tensor in tensors)
        if any(tensor.constant for tensor in tensors):
            for tensor in tensors:
                for writer in self.writers:
                    writer.tensor(tensor.name).copy_(self.base.tensor(tensor.name))
            return 0.0, BlockReport(block, weights, 0.0, ())
        if not math.isfinite(squares):
            which = "base − reference" if self.reference else "the base"
            raise MpuError(f"{self.base.path}: {which} holds NaN or Inf in block {block}; nothing sound to publish")
        rms = math.sqrt(squares / weights)
        told = self.calibration
        sigma = self.sigma[block] = told.sigma if told else self.kappa * rms
        if shared := told.shared_sigma if told else self.shared_kappa * rms:
            self.shared_sigma[block] = shared
        return sigma, None

    def _finish(
        self, block: str, tensors: list[TensorLayout], squares: float, sigma: float, scales: Sequence[float],
        writing: list[list[Future]],
    ) -> BlockReport:  # fmt: skip
        """Wait for a block that is being written; what became of its noise."""
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
            self.progress(self.base.tensors[tensor.name].nbytes)
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
                for scale, (squared, unchanged) in zip(scales, measured.tolist(), strict=True)
            ),
        )

    def fingerprint(self) -> str:
        """The base's, from the digests that the blocks left; the alias, which no block has, is added."""
        if alias := self.layout.alias:
            self._digests[alias] = list(piece_digests(self.base, alias, self.pool))
        return combine(self.base.tensors, self._digests)

    def _read(self, tensor: TensorLayout) -> list[Future]:
        """Begin to sum v² over one tensor; its pieces are digested on the way, while they are in the cache."""
        info = self.base.tensors[tensor.name]
        raw, weights = self.base.raw(tensor.name), self.base.tensor(tensor.name).view(-1)
        other = self.reference[tensor.name].view(-1) if self.reference and not tensor.constant else None
        dtype = compute_dtype(info.dtype)

        def piece(offset: int) -> tuple[bytes, float]:
            lap = self.clock()
            digest = piece_digest(raw, offset)
            lap("read the base, fingerprint")
            if tensor.constant:
                return digest, 0.0
            part = slice(offset // ITEM_SIZE[info.dtype], (offset + PIECE) // ITEM_SIZE[info.dtype])
            v = weights[part].to(dtype)
            if other is not None:
                v = v - other[part].to(dtype)
            square = math.fsum(float(torch.dot(p, p)) for p in v.split(_SUM))
            lap("scale of the noise")
            return digest, square

        return [self.pool.submit(piece, offset) for offset in pieces(info)]

    def _square(self, tensor: TensorLayout, futures: list[Future]) -> float:
        """Σ v² over one tensor, when it has been read."""
        results = [future.result() for future in futures]
        self._digests[tensor.name] = [digest for digest, _ in results]
        return math.fsum(square for _, square in results)

    def _write(self, tensor: TensorLayout, sigma: float) -> list[Future]:
        """Begin to write one tensor of every copy; slices give sums of what ``CopySurvival`` tells and over how many
        weights, or None where they were not measured."""
        weights = as_matrix(self.base.tensor(tensor.name))
        rows, columns = weights.shape
        targets = [as_matrix(writer.tensor(tensor.name)) for writer in self.writers]
        maps = [transform.of(tensor) for transform in self.transforms]
        shared = self.shared_sigma.get(tensor.block, 0.0)
        keys = self.noise.keys(tensor.name, sigma, shared)
        stored = targets[0].dtype
        dtype = compute_dtype(self.base.tensors[tensor.name].dtype, NAME[stored])
        if self.calibration:
            dtype = torch.float64  # what rounding does to noise before it is added could tell of the weight

        def work(start: int, stop: int, measured: bool) -> tuple[torch.Tensor, int] | None:
            lap = self.clock()
            clean = weights[start:stop].to(dtype)
            lap("convert the base")
            draws = self.noise.draws(keys, start * columns, stop * columns, dtype)
            lap("draw the noise")
            noisy = self.noise.of_copies(draws, sigma, shared, clean.view(-1)) if keys else [clean] * len(maps)
            lap("add the noise")
            sums = torch.zeros(len(maps), 2, dtype=torch.float64)
            for k, (mapping, target) in enumerate(zip(maps, targets, strict=True)):
                turned = mapping.forward(noisy[k].view(clean.shape), start)
                lap("change coordinates")
                written = turned.to(stored)
                if not all_finite(written):
                    raise MpuError(
                        f"{self.base.path}: {tensor.name!r} with its noise is too large for {WORD[NAME[stored]]}; "
                        "choose a wider --dtype or a smaller --kappa"
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


def measured_slices(slices: int) -> range:
    """Which slices of a tensor to measure: the first, and of many one in the middle. Enough weights for what is told,
    at a small part of the time."""
    return range(0, slices, max(8, -(-slices // 2)))


def _check_alias(base: Model, layout: Layout) -> None:
    """A head that is stored beside the embedding it is tied to must be the same, or one of them would be lost."""
    if layout.alias is None:
        return
    embedding = next(t.name for t in layout.parameters if t.axes[0] == ("vocab",))
    if not torch.equal(base.checkpoint.tensor(layout.alias), base.checkpoint.tensor(embedding)):
        raise MpuError(
            f"{base.source}: its config.json ties the head to the embedding, but {layout.alias!r} differs from "
            f"{embedding!r}; set tie_word_embeddings to false, or drop the one that is not used"
        )


def _matching(base: Model, layout: Layout, reference: Model | None) -> dict[str, torch.Tensor] | None:
    """The reference's tensors by the base's names; MpuError if it is not the same architecture."""
    if reference is None:
        return None
    other = layout_of(reference.checkpoint.tensors, reference.config, reference.source)
    names, others = [t.name for t in layout.parameters], [t.name for t in other.parameters]
    if layout.family is not other.family or len(names) != len(others):
        raise MpuError(
            f"{reference.source}: has other tensors than {base.source} (another architecture, or another head)"
        )
    for name, match in zip(names, others, strict=True):
        shapes = base.checkpoint.tensors[name].shape, reference.checkpoint.tensors[match].shape
        if shapes[0] != shapes[1]:
            raise MpuError(
                f"{reference.source}: {match!r} has shape {list(shapes[1])}, the base's {list(shapes[0])}; "
                "a reference must have the base's shapes"
            )
    return {name: reference.checkpoint.tensor(match) for name, match in zip(names, others, strict=True)}


def model_plan(checkpoint: Checkpoint, layout: Layout, dtype: str | None) -> Plan:
    """What a model made from ``checkpoint`` holds: its tensors in ``dtype`` (None: their own), constants as they are,
    and no second copy of a tied head."""
    return {
        name: (dtype if dtype and not layout.tensors[name].constant else info.dtype, info.shape)
        for name, info in checkpoint.tensors.items()
        if name != layout.alias
    }


def write_small_files(model: Model, folder: Path, plan: Plan) -> None:
    """Put the config, with the dtype of ``plan``, and the tokenizer files of ``model`` into ``folder``."""
    dtypes = Counter(dtype for dtype, _ in plan.values())
    word = WORD[max((d for d in dtypes if d in WORD), key=dtypes.__getitem__)]
    write_json(folder / "config.json", {**_public(model.config), "dtype": word, "torch_dtype": word})
    for path in model.side_files:
        if path.name == "tokenizer_config.json":
            write_json(folder / path.name, _public(read_json_object(path)))
        else:
            (folder / path.name).write_bytes(path.read_bytes())


def _public(config: Mapping[str, object]) -> dict[str, object]:
    """A config without where the model lay on the server and what code to run for it: neither is to travel."""
    return {k: v for k, v in config.items() if k not in ("_name_or_path", "name_or_path", "auto_map")}


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
