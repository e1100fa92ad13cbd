"""Proving a publication right: undo a copy and compare it with base plus noise, in weights and in logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mpu_cli.architectures.layout import Layout, TensorLayout, layout_of
from mpu_cli.checkpoint.dtypes import TORCH
from mpu_cli.checkpoint.reader import Checkpoint
from mpu_cli.checkpoint.source import Model
from mpu_cli.errors import MpuError
from mpu_cli.manifest import read_copy_manifest
from mpu_cli.server.keys import Keys
from mpu_cli.server.noise import Noise
from mpu_cli.server.publish import make_transform
from mpu_cli.server.randomness import Randomness
from mpu_cli.symmetry.transform import Transform, as_matrix, row_slices

TOKENS = (2, 64)  # batch and length of the random tokens on which logits are compared


@dataclass(frozen=True)
class BlockCheck:
    """One block of a copy after undoing it. ``difference`` is the largest |T⁻¹(copy) − (base + noise)|, ``relative``
    the worst ratio of its RMS to that of the weights over the block's tensors, ``bound`` what storage allows it."""

    block: str
    asked: float
    survived: float
    difference: float
    relative: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.relative <= self.bound


@dataclass(frozen=True)
class Verification:
    """``logits``: largest difference of the logits relative to the largest logit (None if not asked for), and
    ``logits_bound`` what storage allows it."""

    copy: int
    blocks: list[BlockCheck]
    logits: float | None
    logits_bound: float

    @property
    def ok(self) -> bool:
        return all(block.ok for block in self.blocks) and (self.logits is None or self.logits <= self.logits_bound)


def verify(base: Model, copy: Model, keys: Keys, *, logits: bool, progress: Callable[[int], None]) -> Verification:
    """Compare one copy with what the keys say it is.

    Raises MpuError if it is no copy of this publication. A copy that differs by more than its dtype's rounding is
    reported, not raised.
    """
    manifest = read_copy_manifest(copy.folder)
    if manifest is None:
        raise MpuError(f"{copy.source}: is no copy of mpu (no mpu.json that says so)")
    if not 1 <= manifest.copy <= keys.copies or keys.copy_ids[manifest.copy - 1] != manifest.copy_id:
        raise MpuError(f"{copy.source}: is a copy of another publication than these keys")
    layout = layout_of(base.checkpoint.tensors, base.config, base.source)
    if [t.name for t in layout.parameters] != [
        t.name for t in layout_of(copy.checkpoint.tensors, copy.config, copy.source).parameters
    ]:
        raise MpuError(f"{copy.source}: has other tensors than {base.source}")
    randomness = Randomness(bytes.fromhex(keys.seed))
    undo = _Undo(
        base.checkpoint,
        copy.checkpoint,
        keys,
        Noise(randomness, keys.round, keys.alphas),
        make_transform(randomness, keys.round, manifest.copy, layout, keys.symmetries),
        manifest.copy,
    )
    blocks = []
    for block, tensors in layout.blocks.items():
        if not tensors[0].constant:
            blocks.append(undo.block(block, tensors))
        progress(sum(base.checkpoint.tensors[t.name].nbytes for t in tensors))
    bound = max(1e-4, 32 * max(block.bound for block in blocks))
    return Verification(manifest.copy, blocks, _logits_difference(base, copy, layout, undo) if logits else None, bound)


@dataclass
class _Undo:
    base: Checkpoint
    copy: Checkpoint
    keys: Keys
    noise: Noise
    transform: Transform
    number: int

    def slices(self, tensor: TensorLayout) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """By slices of rows, in float64: first row, base, noise, and the copy in the base's coordinates."""
        clean, published = as_matrix(self.base.tensor(tensor.name)), as_matrix(self.copy.tensor(tensor.name))
        if clean.shape != published.shape:
            raise MpuError(f"{self.copy.path}: {tensor.name!r} has another shape than in the base")
        sigma = self.keys.sigma[tensor.block]
        keys = self.noise.keys(tensor.name) if sigma else []
        mapping = self.transform.of(tensor)
        columns = clean.shape[1]
        for start, stop in row_slices([mapping], *clean.shape):
            weights = clean[start:stop].double()
            noise = torch.zeros_like(weights)
            if sigma:
                drawn = self.noise.slice(keys, sigma, start * columns, stop * columns, torch.float64)
                noise = drawn[self.number - 1].view_as(weights)
            yield start, weights, noise, mapping.backward(mapping.take(published, start, stop).double(), start)

    def block(self, block: str, tensors: list[TensorLayout]) -> BlockCheck:
        survived = count = difference = relative = bound = 0.0
        for tensor in tensors:
            error = size = 0.0
            for _, weights, noise, undone in self.slices(tensor):
                off = undone - (weights + noise)
                difference = max(difference, float(off.abs().max()))
                error += float(off.square().sum())
                size += float((weights + noise).square().sum())
                survived += float((undone - weights).square().sum())
                count += weights.numel()
            relative = max(relative, math.sqrt(error / size) if size else (math.inf if error else 0.0))
            # Arithmetic is in float32 or wider, so storage is never better than that.
            stored = TORCH[self.copy.tensors[tensor.name].dtype]
            bound = max(bound, torch.finfo(stored).eps, 4 * torch.finfo(torch.float32).eps)
        asked = self.keys.alphas[self.number - 1] * self.keys.sigma[block]
        return BlockCheck(block, asked, math.sqrt(survived / count), difference, relative, bound)


def _logits_difference(base: Model, copy: Model, layout: Layout, undo: _Undo) -> float:
    """Largest difference of logits on random tokens, copy against base plus noise, relative to the largest."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(layout.sizes["vocab"], TOKENS, generator=generator)

    def noisy(tensor: TensorLayout) -> torch.Tensor:
        return torch.cat([(weights + noise).float() for _, weights, noise, _ in undo.slices(tensor)])

    expected = _logits(base, layout, noisy, tokens)
    found = _logits(copy, layout, lambda tensor: copy.checkpoint.tensor(tensor.name).float(), tokens)
    return float((found - expected).abs().max() / expected.abs().max())


def _logits(
    model: Model, layout: Layout, weights: Callable[[TensorLayout], torch.Tensor], tokens: torch.Tensor
) -> torch.Tensor:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{k: v for k, v in model.config.items() if k not in ("dtype", "torch_dtype")})
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for tensor in layout.parameters:
            name = tensor.name if tensor.name in parameters else layout.family.prefix + tensor.name
            parameters[name].copy_(weights(tensor).view(parameters[name].shape))
        return network(tokens).logits
