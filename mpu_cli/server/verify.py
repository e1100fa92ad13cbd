"""Verifying a publication: undo a copy and compare it with base plus noise, in weights and in logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from mpu_cli.architectures.layout import Layout, TensorLayout, layout_of
from mpu_cli.checkpoint.dtypes import NAME, compute_dtype
from mpu_cli.checkpoint.reader import Checkpoint
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.manifest import read_copy_manifest
from mpu_cli.models.shallow import names_in_base, shallow
from mpu_cli.models.source import Model
from mpu_cli.models.tensor_names import in_memory
from mpu_cli.observer import SILENT, Observer
from mpu_cli.server.keys import Keys
from mpu_cli.server.noise import Noise
from mpu_cli.symmetry.transform import Transform, as_matrix, row_slices

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
    observer.stage("verify", base.checkpoint.nbytes)
    blocks = []
    for block, tensors in layout.blocks.items():
        if not tensors[0].constant:
            blocks.append(again.block(block, tensors))
        observer.advance(sum(base.checkpoint.tensors[t.name].nbytes for t in tensors))
    function, stored = _logits_differences(base, copy, layout, again) if logits else (None, None)
    return Verification(manifest.copy, blocks, function, stored)


Named = tuple[str, torch.Tensor]  # a tensor with its name in the model that it is for


@dataclass(frozen=True)
class _Slice:
    """Some rows of one tensor: base, noise, and the copy as stored, regenerated and undone."""

    start: int
    base: torch.Tensor
    noise: torch.Tensor
    stored: torch.Tensor
    again: torch.Tensor
    undone: torch.Tensor


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
            yield _Slice(start, weights, noise, stored, again, mapping.backward(stored.double(), start))

    def block(self, block: str, tensors: list[TensorLayout]) -> BlockCheck:
        survived = count = difference = changed = 0.0
        rounding = True
        for tensor in tensors:
            for part in self.slices(tensor):
                clean = part.base.double()
                off = (part.undone - (clean + part.noise)).abs().max()
                difference = max(difference, float(off.nan_to_num(torch.inf)))
                survived += float((part.undone - clean).square().sum())
                count += clean.numel()
                expected = part.again.to(part.stored.dtype)
                changed += int((part.stored != expected).sum())
                apart = (part.stored.double() - expected.double()).abs()
                eps = torch.finfo(part.stored.dtype).eps
                allowed = 2 * eps * expected.double().abs() + 1e-6 * float(expected.double().abs().max())
                rounding &= bool((apart <= allowed).all())  # false for NaN too
        requested_sigma = self.keys.scales(block).of_copy(self.keys.publication.scheme.scales[self.number - 1])
        return BlockCheck(block, requested_sigma, math.sqrt(survived / count), difference, changed / count, rounding)


def _logits_differences(base: Model, copy: Model, layout: Layout, again: _Again) -> tuple[float, float]:
    """Largest logit differences from base plus noise on random tokens: of T(base + noise), and of the copy."""
    length = min(TOKENS[1], layout.sizes.get("position", TOKENS[1]))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(layout.sizes["vocab"], (TOKENS[0], length), generator=generator)

    def noisy(tensor: TensorLayout) -> Named:
        return tensor.name, torch.cat([(part.base + part.noise).float() for part in again.slices(tensor)])

    def transformed_weights(tensor: TensorLayout) -> Named:
        target = torch.empty(as_matrix(base.checkpoint.tensor(tensor.name)).shape)
        mapping = again.transform.of(tensor)
        for part in again.slices(tensor):
            mapping.put(target, part.again.float(), part.start)
        return again.transform.name(tensor), target

    def stored_weights(tensor: TensorLayout) -> Named:
        return tensor.name, copy.checkpoint.tensor(tensor.name).float()

    expected = _logits(base, layout, noisy, tokens)
    largest = float(expected.abs().max())

    def apart(weights: Callable[[TensorLayout], Named]) -> float:
        return float((_logits(base, layout, weights, tokens) - expected).abs().max()) / largest

    return apart(transformed_weights), apart(stored_weights)


def _logits(
    model: Model, layout: Layout, weights: Callable[[TensorLayout], Named], tokens: torch.Tensor
) -> torch.Tensor:
    from transformers import AutoConfig

    from mpu_cli.models.network import build

    config = AutoConfig.for_model(**{k: v for k, v in model.config.items() if k not in ("dtype", "torch_dtype")})
    network = build(config, dtype=torch.float32).eval()
    places = in_memory(network, layout.tensors)
    with torch.no_grad():
        for tensor in layout.tensors.values():
            if tensor.constant and not any(tensor.axes):
                continue
            name, values = weights(tensor)
            target = places[name]
            target.copy_(values.view(target.shape))
        return network(tokens).logits
