"""The clients' deltas: opening them, and checking that they belong together and to this publication."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mpu_cli.errors import MpuError
from mpu_cli.files.manifest import (
    LEFT_FACTOR,
    RIGHT_FACTOR,
    TAGS,
    VERSIONS,
    DeltaManifest,
    as_metadata,
    delta_facts,
    delta_manifest,
)
from mpu_cli.files.reader import (
    FLOATS,
    Checkpoint,
    all_finite,
    compute_dtype,
    fingerprint,
    open_checkpoint,
    quoted_list,
    worker_pool,
)
from mpu_cli.files.transaction import Transaction
from mpu_cli.files.visible import visible
from mpu_cli.files.writer import MAX_SHARD, CheckpointWriter, nbytes_of
from mpu_cli.model.layout import EMBEDDING, Layout, TensorLayout
from mpu_cli.model.source import Model
from mpu_cli.model.transform import TensorMap, Transform, as_matrix, row_slices
from mpu_cli.observer import Observer
from mpu_cli.protocol.keys import Keys

SUFFIXES = ("", LEFT_FACTOR, RIGHT_FACTOR)  # of the names in deltas
MOST_RANK = 1024  # of LoRA's factors, where the matrix has no more rows or columns than that
OUTLIER = 10.0  # warn if a copy changes a tensor more than this many times as much as any other copy


@dataclass(frozen=True)
class Delta:
    """A client's delta: its tensors, the copy they belong to, and the keys of that."""

    path: Path
    checkpoint: Checkpoint
    manifest: DeltaManifest
    keys: Keys = field(repr=False)

    @property
    def copy(self) -> int:
        assert self.manifest.origin is not None
        return self.manifest.origin.copy  # open_deltas rejects deltas without an origin


def delta_paths(paths: Iterable[Path]) -> list[Path]:
    """The deltas given by ``paths``: files, sharded directories, or directories containing these."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise MpuError(f"{path}: no such file or directory", "name the deltas that the client sent")
        if path.is_dir() and not list(path.glob("*.index.json")):
            inside = [p for p in visible(path.iterdir()) if p.suffix == ".safetensors" or p.is_dir()]
            if not inside:
                raise MpuError(f"{path}: contains no deltas (*.safetensors)", "name what `mpu unlearn` wrote")
            if linked := [p for p in inside if p.is_symlink()]:
                raise MpuError(f"{linked[0]}: is a link, which is not followed", "give the file that it leads to")
            files += inside
        else:
            files.append(path)
    return files


def open_deltas(paths: Iterable[Path], keys: Keys) -> list[Delta]:
    """Open deltas of the publication that ``keys`` belong to, ordered by copy."""
    deltas: dict[int, Delta] = {}
    for path in delta_paths(paths):
        checkpoint = open_checkpoint(path, links=False)
        manifest = delta_manifest(checkpoint.metadata, path)
        origin = manifest.origin
        if origin is None:
            raise MpuError(f"{path}: was made from a model that is not an mpu copy, so it belongs to no run")
        if origin.run != keys.run:
            raise MpuError(
                f"{path}: belongs to run {origin.run}, but these keys are for run {keys.run}",
                "name its keys with --keys; those that --force replaced are beside them, as NAME.earlier-1.bin",
            )
        if origin.round != keys.round:
            raise MpuError(
                f"{path}: belongs to round {origin.round}, but these keys are for round {keys.round}",
                "name the keys of that round with --keys",
            )
        if origin.copy > keys.copies or keys.copy_ids[origin.copy - 1] != origin.copy_id:
            raise MpuError(f"{path}: belongs to copy {origin.copy} of another publication", "use its keys")
        if origin.copy in deltas:
            raise MpuError(
                f"{path}: belongs to copy {origin.copy}, as does {deltas[origin.copy].path}",
                "give the one that came last",
            )
        deltas[origin.copy] = Delta(path, checkpoint, manifest, keys)
    return [deltas[copy] for copy in sorted(deltas)]


@dataclass(frozen=True)
class Owner:
    """A data owner's publication, and the deltas that came back. ``rehearsed_step``: None without a rehearsal."""

    keys: Keys
    deltas: list[Delta]
    rehearsed_step: float | None = None

    @property
    def trained_differently(self) -> tuple[tuple[int, int, str], ...]:
        """A copy, a later one, and the tag in which they differ. Tags under different keys cannot be compared."""
        references: dict[str, tuple[int, Mapping[str, str]]] = {}  # by key, the first copy with tags under it
        unlike = []
        for delta in self.deltas:
            tags = delta.manifest.trained or {}
            earlier, expected = references.setdefault(str(tags.get("key")), (delta.copy, tags))
            for name in sorted(expected):
                if tags.get(name) != expected[name]:
                    unlike.append((earlier, delta.copy, name))
        return tuple(unlike)

    @property
    def algorithms(self) -> tuple[str, ...]:
        return tuple(delta.manifest.algorithm for delta in self.deltas)

    @property
    def until_done(self) -> bool:
        """Whether every copy was trained until its records were forgotten, and not for a number of epochs."""
        return all(delta.manifest.until_done for delta in self.deltas)

    def differences(self) -> Iterator[str]:
        """A sentence for each way in which the deltas say that their copies were trained differently."""
        for earlier_copy, other, tag in self.trained_differently:
            what = TAGS.get(tag, tag)
            yield f"copies {earlier_copy} and {other} were trained with different {what}; the noise does not cancel"
        algorithms = sorted(set(self.algorithms))
        if len(algorithms) > 1:
            yield (
                f"the copies were trained with different algorithms ({', '.join(algorithms)}); "
                "noise cancels only if all copies are trained identically"
            )

    def check_trained_alike(self) -> None:
        """Raise MpuError if the deltas' tags say that their copies were trained differently."""
        paths = {delta.copy: delta.path for delta in self.deltas}
        for earlier_copy, other, tag in self.trained_differently:
            if tag != VERSIONS:  # which may make no difference; if it does, the estimate shows it
                raise MpuError(
                    f"{paths[other]}: was trained with different {TAGS.get(tag, tag)} than {paths[earlier_copy]}, so "
                    "the noise does not cancel",
                    "ask for both to be trained alike, or use --trust-deltas",
                )


def owners_of(paths: Sequence[Path], publications: Sequence[Keys]) -> list[Owner]:
    """The deltas in ``paths``, by publication."""
    if len(publications) == 1:
        return [Owner(publications[0], open_deltas(paths, publications[0]))]
    paths_by_ids: dict[tuple[str, ...], list[Path]] = {keys.copy_ids: [] for keys in publications}
    if len(paths_by_ids) < len(publications):
        raise MpuError("--keys: the same publication is given twice", "give each key file once")
    for path in delta_paths(paths):
        origin = delta_manifest(open_checkpoint(path, links=False).metadata, path).origin
        ids = next((ids for ids in paths_by_ids if origin and origin.copy_id in ids), None)
        if ids is None:
            raise MpuError(f"{path}: belongs to none of these publications", "give its keys, too, or leave it out")
        paths_by_ids[ids].append(path)
    return [Owner(keys, open_deltas(paths_by_ids[keys.copy_ids], keys)) for keys in publications]


def check_delta(delta: Delta, base: Model) -> None:
    """Raise MpuError unless the delta has the tensors that its kind requires of those of the base."""
    tensors = delta.checkpoint.tensors
    if delta.manifest.kind == "lora":
        expected = _factor_shapes(delta, base)
    else:
        # Clients train no embeddings and no output head unless asked (--train-embeddings): their change is zero then.
        expected = {}
        for tensor in base.layout.parameters:
            if tensor.name in tensors or tensor.axes[0] not in EMBEDDING:
                expected[tensor.name] = base.checkpoint.tensors[tensor.name].shape
    if missing := set(expected) - set(tensors):
        raise MpuError(f"{delta.path}: lacks {quoted_list(missing)}", "ask the client for the complete delta")
    if unknown := set(tensors) - set(expected):
        raise MpuError(f"{delta.path}: contains {quoted_list(unknown)}, which the base does not have")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise MpuError(f"{delta.path}: {name!r} has shape {list(tensors[name].shape)}, expected {list(shape)}")
        if tensors[name].dtype not in FLOATS:
            raise MpuError(
                f"{delta.path}: {name!r} is stored as {tensors[name].dtype}, expected one of {', '.join(FLOATS)}"
            )


def _factor_shapes(delta: Delta, base: Model) -> dict[str, tuple[int, ...]]:
    """The factors that a LoRA delta must have: both for each tensor for which it has one."""
    tensors = delta.checkpoint.tensors
    expected: dict[str, tuple[int, ...]] = {}
    for tensor in base.layout.parameters:
        left_name, right = tensor.name + LEFT_FACTOR, tensor.name + RIGHT_FACTOR
        is_matrix = len(tensor.axes) > 1 and not tensor.name.endswith("bias")  # of which each expert may have one
        if is_matrix and (left_name in tensors or right in tensors):
            *stack, rows, columns = base.checkpoint.tensors[tensor.name].shape
            factor, axis = (tensors[left_name], -1) if left_name in tensors else (tensors[right], -2)
            rank = factor.shape[axis] if len(factor.shape) == len(tensor.axes) else 0
            if rank < 1:
                raise MpuError(f"{delta.path}: {tensor.name!r} has a factor of shape {list(factor.shape)} and no rank")
            if rank > max(MOST_RANK, min(rows, columns)):  # squares of it are computed
                raise MpuError(
                    f"{delta.path}: {tensor.name!r} has factors of rank {rank:,}, more than a change of {rows} × "
                    f"{columns} weights can have",
                    "ask the client for one with a lower --lora rank",
                )
            expected |= {left_name: (*stack, rows, rank), right: (*stack, rank, columns)}
    if not expected:
        raise MpuError(f"{delta.path}: is a LoRA delta but has no factors for the base's tensors")
    return expected


def check_finite(x: torch.Tensor, square: float, delta: Delta, name: str) -> None:
    # A sum of squares that is not finite may merely have overflowed: check the elements before refusing.
    if not math.isfinite(square) and not all_finite(x):
        raise MpuError(f"{delta.path}: {name!r} contains NaN or Inf, so nothing from this round was applied")


def outliers_of(name: str, products: torch.Tensor, deltas: Sequence[Delta]) -> list[tuple[str, int, float]]:
    """Copies that change a tensor more than OUTLIER times as much as any other (inf: the others do not change it)."""
    norms = products.diagonal().clamp(min=0).sqrt().tolist()
    outliers = []
    for k, delta in enumerate(deltas):
        max_other_norm = max((norm for j, norm in enumerate(norms) if j != k), default=0.0)
        if len(deltas) > 1 and max_other_norm * OUTLIER < norms[k]:
            outliers.append((name, delta.copy, norms[k] / max_other_norm if max_other_norm else math.inf))
    return outliers


def check_norms(gram: torch.Tensor, deltas: Sequence[Delta], max_norm: float | None, rates: torch.Tensor) -> None:
    """Raise MpuError if a norm is above ``max_norm``: of a delta or, with the ``rates`` at which they are added, of the
    update, because weights of opposite signs make it larger than any of its deltas."""
    for delta, square in zip(deltas, gram.diagonal().tolist(), strict=True):
        if not math.isfinite(square):
            raise MpuError(f"{delta.path}: norm is not finite, so nothing from this round was applied")
        norm = math.sqrt(max(square, 0.0))
        if max_norm is not None and norm > max_norm:
            raise MpuError(
                f"{delta.path}: norm is {norm:.4g}, above --max-norm {max_norm:g}, "
                "so nothing from this round was applied"
            )
    if max_norm is not None:
        norm = math.sqrt(max(0.0, float(rates @ gram @ rates)))
        if norm > max_norm:
            raise MpuError(
                f"the update's norm is {norm:.4g}, above --max-norm {max_norm:g}, "
                "so nothing from this round was applied",
                "its deltas may disagree: see `mpu aggregate` without --max-norm, or lower --step",
            )


def check_round(base: Model, deltas: Sequence[Delta], keys: Keys) -> None:
    """Raise MpuError unless every copy has a delta, and they fit the base and each other."""
    if missing := set(range(1, keys.copies + 1)) - {delta.copy for delta in deltas}:
        lacking = f"{', '.join(map(str, sorted(missing)))} of run {keys.run}, round {keys.round}"
        raise MpuError(
            f"no delta for copy {lacking}: all {keys.copies} of a publication are needed",
            "wait for it, or leave out these --keys (`mpu inspect KEYS` prints the run)",
        )
    try:
        for delta in deltas:
            check_delta(delta, base)
    except MpuError:
        check_base(base, keys)  # a delta does not fit: is that its fault, or the base's?
        raise
    for delta in deltas[1:]:  # noise cancels only where all of them change a tensor
        if odd := deltas[0].checkpoint.tensors.keys() ^ delta.checkpoint.tensors.keys():
            raise MpuError(
                f"{delta.path}: tensors differ from {deltas[0].path} ({quoted_list(odd)})",
                "train all copies of a round with the same options",
            )


def check_base(base: Model, keys: Keys, digest: str | None = None) -> None:
    """Raises MpuError unless ``base`` is what was published; reads it, unless its ``digest`` is known."""
    if digest is None:
        digest = fingerprint(base.checkpoint)
    if digest != keys.base.fingerprint:
        raise MpuError(
            f"{base.source}: is not the model that was published (its fingerprint differs from the one in the keys)",
            "specify the right one with --base",
        )


# T_k⁻¹ of deltas, slice by slice: what ``invert`` writes and ``aggregate`` adds up.


@dataclass(frozen=True)
class FullRank:
    """One delta's change to one tensor, (rows, columns) in the copy's coordinates, inverted slice by slice."""

    mapping: TensorMap
    change: torch.Tensor

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.change.dtype,)

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows ``start … stop`` in the base's coordinates, in ``dtype`` if they were rotated, else in their own."""
        copy_rows = self.mapping.take(self.change, start, stop)
        return self.mapping.backward(copy_rows.to(dtype), start) if self.mapping.turns else copy_rows


class LowRank:
    """One delta's change to one tensor as a product of factors; only the requested slice is computed."""

    def __init__(self, left_factor: FullRank, right: FullRank):
        self.mapping, self.dtypes = left_factor.mapping, (*left_factor.dtypes, *right.dtypes)
        self._left_factor = left_factor
        self._rank = rank = left_factor.change.shape[1]
        wide = compute_dtype(*self.dtypes)
        starts = range(0, len(right.change), rank)
        # (r, columns), one below the other for a stack
        self._right = torch.cat([right.rows(i, i + rank, wide).to(wide) for i in starts])

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows ``start … stop`` of the product, all of one matrix."""
        offset = 0 if self.mapping.block is None else start // self.mapping.block * self._rank
        right = self._right[offset : offset + self._rank]
        return self._left_factor.rows(start, stop, dtype).to(dtype) @ right.to(dtype)

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both complete factors, in the base's coordinates."""
        left_factor = self._left_factor.rows(0, len(self._left_factor.change), self._right.dtype)
        return left_factor.to(self._right.dtype), self._right


Change = FullRank | LowRank


class InverseMaps:
    """Applies T_k⁻¹ to deltas of a base with this ``layout``, slice by slice; deltas that are already inverted are used
    as they are."""

    def __init__(self, deltas: Sequence[Delta], layout: Layout):
        self.deltas = deltas
        self._transforms: list[Transform] = []
        for delta in deltas:
            publication = delta.keys.publication
            if delta.manifest.inverted:
                publication = replace(publication, symmetries="none")
            self._transforms.append(publication.transform(delta.copy, layout))

    def stored_name(self, number: int, tensor: TensorLayout) -> str:
        """The name of ``tensor`` in a delta: experts change places in a copy."""
        return self._transforms[number].name(tensor)

    def parts(self, number: int, tensor: TensorLayout) -> dict[str, FullRank]:
        """The tensors that a delta has of ``tensor``, by their suffixes: the whole change, its factors, or nothing."""
        stored, name = self.deltas[number].checkpoint, self.stored_name(number, tensor)
        maps = {"": self._transforms[number].of(tensor)}
        if name + LEFT_FACTOR in stored.tensors:
            rank = stored.tensors[name + LEFT_FACTOR].shape[-1]
            maps[LEFT_FACTOR], maps[RIGHT_FACTOR] = maps[""].split(rank)
        return {
            suffix: FullRank(mapping, as_matrix(stored.tensor(name + suffix)))
            for suffix, mapping in maps.items()
            if name + suffix in stored.tensors
        }

    def forget_pages(self, tensor: TensorLayout) -> None:
        """Drop the pages of what the deltas have of ``tensor``, once its changes were used."""
        for number, delta in enumerate(self.deltas):
            for suffix in SUFFIXES:
                name = self.stored_name(number, tensor) + suffix
                if name in delta.checkpoint.tensors:
                    delta.checkpoint.forget_pages(name)

    def changes(self, tensor: TensorLayout) -> dict[int, Change]:
        """The changes to ``tensor``, by the numbers of their deltas; none of a delta that did not train it."""
        changes: dict[int, Change] = {}
        for number in range(len(self.deltas)):
            parts = self.parts(number, tensor)
            if "" in parts:
                changes[number] = parts[""]
            elif parts:
                changes[number] = LowRank(parts[LEFT_FACTOR], parts[RIGHT_FACTOR])
        return changes


def invert(base: Model, delta: Delta, *, target: Path, transaction: Transaction, observer: Observer) -> None:
    """Write T_k⁻¹(Δ_k) to ``target`` in the delta's own dtypes, as part of ``transaction``."""
    if delta.manifest.inverted:
        raise MpuError(f"{delta.path}: is already inverted", "pass it to `mpu aggregate` as it is")
    check_delta(delta, base)
    layout, tensors = base.layout, delta.checkpoint.tensors
    inverse_maps = InverseMaps([delta], layout)
    specs: dict[str, tuple[str, tuple[int, ...]]] = {}  # by the base's names
    for tensor in layout.parameters:
        for suffix in SUFFIXES:
            if info := tensors.get(inverse_maps.stored_name(0, tensor) + suffix):
                specs[tensor.name + suffix] = info.dtype, info.shape
    output = transaction.add(target, directory=nbytes_of(specs) > MAX_SHARD)
    metadata = as_metadata(delta_facts(replace(delta.manifest, inverted=True)))
    with CheckpointWriter(output, specs, metadata) as writer, worker_pool() as pool:
        for tensor in layout.parameters:
            for suffix, part in inverse_maps.parts(0, tensor).items():
                name = tensor.name + suffix
                _invert_tensor(pool, delta, name, part=part, target=as_matrix(writer.tensor(name)))
                writer.forget_pages(name)
                observer.advance(writer.tensors[name].nbytes)
            inverse_maps.forget_pages(tensor)


def _invert_tensor(pool: Executor, delta: Delta, name: str, *, part: FullRank, target: torch.Tensor) -> None:
    """Write ``part`` of the delta, mapped back, into ``target``."""
    dtype = compute_dtype(target.dtype)

    def work(bounds: tuple[int, int]) -> None:
        undone = part.rows(*bounds, dtype)
        check_finite(undone, float(undone.square().sum()), delta, name)
        target[slice(*bounds)] = undone

    list(pool.map(work, row_slices([part.mapping], *target.shape)))
