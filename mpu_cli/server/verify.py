"""Verifying a publication: undo a copy and compare it with base plus noise, in weights and in logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import torch

from mpu_cli.architectures.layout import Layout, TensorLayout, layout_of
from mpu_cli.checkpoint.dtypes import NAME, compute_dtype
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.checkpoint.reader import Checkpoint
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.manifest import read_copy_manifest
from mpu_cli.models.shallow import names_in_base, shallow
from mpu_cli.models.source import Model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.server.keys import Keys
from mpu_cli.server.noise import Noise
from mpu_cli.symmetry.transform import TensorMap, Transform, as_matrix, row_slices

TOKENS = (2, 64)  # batch and length of the random tokens on which logits are compared
SAME_FUNCTION = 1e-4  # of the largest logit, in float32
# Another processor may round the last bit of the noise differently, which occasionally changes the weight too.
OTHERWISE_ROUNDED = 0.01  # share of weights


@dataclass(frozen=True)
class BlockCheck:
    """One block of a copy.

    Undone: ``survived``, RMS of T⁻¹(copy) − base; ``difference``, the largest |T⁻¹(copy) − (base + noise)|.
    Regenerated from the keys and compared with the stored copy: ``changed``, share of weights that differ;
    ``rounding``, whether all of these differ by no more than rounding.
    """

    block: str
    requested: float
    survived: float
    difference: float
    changed: float
    rounding: bool

    @property
    def ok(self) -> bool:
        return self.rounding and self.changed <= OTHERWISE_ROUNDED


@dataclass(frozen=True)
class Verification:
    """A copy compared with base plus noise. Logit differences are relative to the largest logit, None if not requested.

    ``function``: for T(base + noise) before storage, which shows that T preserves the function; ``logits``: for the
    copy as stored.
    """

    copy: int
    blocks: list[BlockCheck]
    function: float | None
    logits: float | None

    @property
    def ok(self) -> bool:
        return all(block.ok for block in self.blocks) and (self.function is None or self.function <= SAME_FUNCTION)


def verify(base: Model, copy: Model, keys: Keys, *, logits: bool = True, observer: Observer = SILENT) -> Verification:
    """Compare one copy with what the keys say it is.

    Raises MpuError if it is not a copy of this publication. A copy with wrong contents is reported, not raised.
    """
    manifest = read_copy_manifest(copy.folder, copy.checkpoint.metadata)
    if manifest is None:
        raise MpuError(f"{copy.source}: not an mpu copy (mpu.json is missing or foreign)")
    if not 1 <= manifest.copy <= keys.copies or keys.copy_ids[manifest.copy - 1] != manifest.copy_id:
        raise MpuError(f"{copy.source}: belongs to another publication", "use the keys of that publication")
    try:
        names = names_in_base(base, keys.publication.omitted)
    except UsageError as error:
        raise MpuError(
            f"{base.source}: is not the model that was published ({error})", "specify it with --base"
        ) from error
    full_base, base = base, shallow(base, keys.publication.omitted)
    layout = layout_of(base.checkpoint.tensors, base.config, base.source)
    if [t.name for t in layout.parameters] != [
        t.name for t in layout_of(copy.checkpoint.tensors, copy.config, copy.source).parameters
    ]:
        raise MpuError(f"{copy.source}: tensors differ from {base.source}")
    again = _Again(
        base.checkpoint,
        copy.checkpoint,
        keys,
        keys.publication.noise([manifest.copy]),
        keys.publication.transform(manifest.copy, layout),
        manifest.copy,
        names,
        keys.publication.permanent_names(layout_of(full_base.checkpoint.tensors, full_base.config, full_base.source)),
    )
    network = _Network(base, layout) if logits else None
    observer.stage("verify", base.checkpoint.nbytes)
    blocks = []
    with worker_pool() as pool:
        for block, tensors in layout.blocks.items():
            if tensors[0].constant:
                list(pool.map(partial(again.regenerate, network), tensors))
            else:
                blocks.append(again.summary(block, list(pool.map(partial(again.check, network), tensors))))
            observer.advance(sum(base.checkpoint.tensors[t.name].nbytes for t in tensors))
        function, stored = _logits_differences(copy, layout, again, network, pool) if network else (None, None)
    return Verification(manifest.copy, blocks, function, stored)


@dataclass(frozen=True)
class _Slice:
    """Some rows of one tensor: base, noise, and the copy as stored, regenerated and (on request) undone."""

    start: int
    base: torch.Tensor
    noise: torch.Tensor
    stored: torch.Tensor
    again: torch.Tensor
    mapping: TensorMap

    def undone(self) -> torch.Tensor:
        return self.mapping.backward(self.stored.double(), self.start)


@dataclass
class _Again:
    """One copy, regenerated from the base and the keys, slice by slice."""

    base: Checkpoint
    copy: Checkpoint
    keys: Keys
    noise: Noise
    transform: Transform
    number: int
    full_names: Mapping[str, str]  # of tensors, in the base with all its layers
    permanent_names: Mapping[str, str]  # of those, where permanent noise is drawn

    def slices(self, tensor: TensorLayout) -> Iterator[_Slice]:
        name = self.transform.name(tensor)
        clean, published = as_matrix(self.base.tensor(tensor.name)), as_matrix(self.copy.tensor(name))
        if clean.shape != published.shape:
            raise MpuError(f"{self.copy.path}: shape of {tensor.name!r} differs from the base")
        # the dtype that publish computed in
        dtype = (
            torch.float64
            if self.keys.publication.calibration
            else compute_dtype(NAME[clean.dtype], NAME[published.dtype])
        )
        scales = self.keys.scales(tensor.block)
        name_in_base = self.full_names[tensor.name]
        subkeys = self.noise.subkeys(name_in_base, scales, self.permanent_names.get(name_in_base))
        mapping = self.transform.of(tensor)
        columns = clean.shape[1]
        for start, stop in row_slices([mapping], *clean.shape):
            weights = clean[start:stop].to(dtype)
            noise, noisy = torch.zeros_like(weights), weights
            if subkeys:
                draws = self.noise.draws(subkeys, start * columns, stop * columns, dtype)
                [noise], [noisy] = (self.noise.of_copies(draws, scales, to) for to in (None, weights.view(-1)))
                noise, noisy = noise.view_as(weights), noisy.view_as(weights)
            stored = mapping.take(published, start, stop)
            again = mapping.forward(noisy, start)
            yield _Slice(start, weights, noise, stored, again, mapping)

    def check(self, network: _Network | None, tensor: TensorLayout) -> _TensorCheck:
        """One tensor of the copy, undone and regenerated; ``network`` gets it as it was before storage."""
        result = _TensorCheck()
        for part in self._slices_into(network, tensor):
            result.add(part)
        return result

    def regenerate(self, network: _Network | None, tensor: TensorLayout) -> None:
        """Give ``network`` a constant that the coordinates of the copy reorder."""
        if network and any(tensor.axes):
            for _ in self._slices_into(network, tensor):
                pass

    def _slices_into(self, network: _Network | None, tensor: TensorLayout) -> Iterator[_Slice]:
        """The slices of a tensor. Once they are through, ``network`` has the tensor."""
        if network is None:
            yield from self.slices(tensor)
            return
        target = torch.empty(as_matrix(self.base.tensor(tensor.name)).shape)
        mapping = self.transform.of(tensor)
        for part in self.slices(tensor):
            mapping.put(target, part.again.float(), part.start)
            yield part
        network.fill(self.transform.name(tensor), target)

    def summary(self, block: str, parts: Sequence[_TensorCheck]) -> BlockCheck:
        count = sum(part.count for part in parts)
        return BlockCheck(
            block,
            self.keys.scales(block).of_copy(self.keys.publication.scheme.scales[self.number - 1]),
            math.sqrt(math.fsum(part.survived for part in parts) / count),
            max(part.difference for part in parts),
            sum(part.changed for part in parts) / count,
            all(part.rounding for part in parts),
        )


@dataclass
class _TensorCheck:
    """What BlockCheck says, of one tensor: sums over its ``count`` weights."""

    survived: float = 0.0
    difference: float = 0.0
    changed: int = 0
    count: int = 0
    rounding: bool = True

    def add(self, part: _Slice) -> None:
        clean, undone = part.base.double(), part.undone()
        off = (undone - (clean + part.noise)).abs().max()
        self.difference = max(self.difference, float(off.nan_to_num(torch.inf)))
        self.survived += float((undone - clean).square().sum())
        self.count += clean.numel()
        expected = part.again.to(part.stored.dtype)
        self.changed += int((part.stored != expected).sum())
        apart = (part.stored.double() - expected.double()).abs()
        eps = torch.finfo(part.stored.dtype).eps
        allowed = 2 * eps * expected.double().abs() + 1e-6 * float(expected.double().abs().max())
        self.rounding &= bool((apart <= allowed).all())  # false for NaN too


class _Network:
    """The base's network, built once, whose weights are replaced for each comparison."""

    def __init__(self, model: Model, layout: Layout):
        from transformers import AutoConfig

        from mpu_cli.models.network import build
        from mpu_cli.models.tensor_names import in_memory

        described = {k: v for k, v in model.config.items() if k not in ("dtype", "torch_dtype")}
        self._network = build(AutoConfig.for_model(**described), dtype=torch.float32).eval()
        self._places = in_memory(self._network, layout.tensors)
        length = min(TOKENS[1], layout.sizes.get("position", TOKENS[1]))
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(layout.sizes["vocab"], (TOKENS[0], length), generator=generator)
        self._threads = torch.get_num_threads()

    @torch.no_grad()
    def fill(self, name: str, values: torch.Tensor) -> None:
        target = self._places[name]
        target.copy_(values.view(target.shape))

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        """(batch, length, vocabulary), of random tokens; on all cores, also where a pool of workers has them."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return self._network(self._tokens).logits  # type: ignore[no-any-return]
        finally:
            torch.set_num_threads(before)


def _logits_differences(
    copy: Model, layout: Layout, again: _Again, network: _Network, pool: Executor
) -> tuple[float, float]:
    """Largest logit differences from base plus noise: of T(base + noise), which ``network`` has, and of the copy."""
    filled = [tensor for tensor in layout.tensors.values() if any(tensor.axes) or not tensor.constant]

    def fill_noisy(tensor: TensorLayout) -> None:
        network.fill(tensor.name, torch.cat([(part.base + part.noise).float() for part in again.slices(tensor)]))

    def fill_stored(tensor: TensorLayout) -> None:
        network.fill(tensor.name, copy.checkpoint.tensor(tensor.name).float())

    transformed = network.logits()
    list(pool.map(fill_noisy, filled))
    expected = network.logits()
    list(pool.map(fill_stored, filled))
    largest = float(expected.abs().max())
    transformed_difference, stored_difference = (
        float((logits - expected).abs().max()) / largest for logits in (transformed, network.logits())
    )
    return transformed_difference, stored_difference
