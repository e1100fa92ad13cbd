"""Verifying a publication: undo a copy and compare it with base plus noise, in weights and in logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import private_scratch
from mpu_cli.files.folder import left_out
from mpu_cli.files.manifest import read_copy_manifest
from mpu_cli.files.randomness import Randomness, Stream
from mpu_cli.files.reader import (
    NAME,
    WEIGHTS_NAME,
    Checkpoint,
    TensorInfo,
    compute_dtype,
    open_checkpoint,
    quoted_list,
    worker_pool,
)
from mpu_cli.model.family import SETS, UNION, Symmetry
from mpu_cli.model.layout import Layout, TensorLayout, layout_of
from mpu_cli.model.source import Model
from mpu_cli.model.transform import TensorMap, Transform, as_matrix, row_slices
from mpu_cli.observer import SILENT, Observer
from mpu_cli.protocol.keys import Keys
from mpu_cli.protocol.noise import Noise

if TYPE_CHECKING:
    from transformers import PreTrainedModel


TOKENS = (2, 64)  # batch and length of the random tokens on which logits are compared
SAME_FUNCTION = 1e-4  # of the largest logit, in float32
# Another processor may round the last bit of the noise differently, which occasionally changes the weight too.
OTHERWISE_ROUNDED = 0.01  # share of weights
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")  # entries of configs


@dataclass(frozen=True, kw_only=True)
class BlockCheck:
    """One block of a copy.

    ``survived`` and ``difference`` are of the copy undone; ``changed`` and ``rounding`` of the copy as stored, compared
    with the one regenerated from the keys.
    """

    block: str
    requested: float
    survived: float  # RMS of T⁻¹(copy) − base
    difference: float  # the largest |T⁻¹(copy) − (base + noise)|
    changed: float  # share of weights that differ
    rounding: bool  # whether all of these differ by no more than rounding

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

    A copy with wrong contents is reported, not raised.
    """
    manifest = read_copy_manifest(copy.folder, copy.checkpoint.metadata)
    if manifest is None:
        raise MpuError(f"{copy.source}: not an mpu copy (mpu.json is missing or foreign)")
    if not 1 <= manifest.copy <= keys.copies or keys.copy_ids[manifest.copy - 1] != manifest.copy_id:
        raise MpuError(f"{copy.source}: belongs to another publication", "use the keys of that publication")
    layout = base.layout
    if [t.name for t in layout.parameters] != [t.name for t in copy.layout.parameters]:
        raise MpuError(f"{copy.source}: tensors differ from {base.source}")
    regenerated = _RegeneratedCopy(
        base=base.checkpoint,
        copy=copy.checkpoint,
        keys=keys,
        noise=keys.publication.noise([manifest.copy], layout.full_name),
        transform=keys.publication.transform(manifest.copy, layout),
        number=manifest.copy,
    )
    network = _Network(base, layout) if logits else None
    observer.stage("verify", base.checkpoint.nbytes)
    blocks = []
    with worker_pool() as pool:
        for block, tensors in layout.blocks.items():
            if not tensors[0].constant:
                checks = list(pool.map(partial(regenerated.check, network), tensors))
                blocks.append(regenerated.summary(block, checks))
            elif network:  # constants that the coordinates of the copy reorder
                reordered = [tensor for tensor in tensors if any(tensor.axes)]
                list(pool.map(partial(regenerated.check, network), reordered))
            observer.advance(sum(base.checkpoint.tensors[t.name].nbytes for t in tensors))
        function, stored = _logits_differences(copy, layout, regenerated, network, pool) if network else (None, None)
    return Verification(manifest.copy, blocks, function, stored)


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """Some rows of one tensor: base, noise, and the copy as stored, regenerated and (on request) undone."""

    start: int
    base: torch.Tensor
    noise: torch.Tensor
    stored: torch.Tensor
    regenerated: torch.Tensor
    mapping: TensorMap


@dataclass(kw_only=True)
class _RegeneratedCopy:
    """One copy, regenerated from the base and the keys, slice by slice."""

    base: Checkpoint
    copy: Checkpoint
    keys: Keys
    noise: Noise
    transform: Transform
    number: int

    def slices(self, tensor: TensorLayout) -> Iterator[_Slice]:
        name = self.transform.name(tensor)
        clean, published = as_matrix(self.base.tensor(tensor.name)), as_matrix(self.copy.tensor(name))
        if clean.shape != published.shape:
            raise MpuError(f"{self.copy.path}: shape of {tensor.name!r} differs from the base")
        dtype = torch.float64  # that publish computed in
        if not self.keys.publication.calibration:
            dtype = compute_dtype(NAME[clean.dtype], NAME[published.dtype])
        scales = self.keys.scales(tensor.block)
        subkeys = self.noise.subkeys(tensor.name, scales)
        mapping = self.transform.of(tensor)
        columns = clean.shape[1]
        for start, stop in row_slices([mapping], *clean.shape):
            weights = clean[start:stop].to(dtype)
            noise, noisy = torch.zeros_like(weights), weights
            if subkeys:
                draws = self.noise.draws(subkeys, start * columns, stop * columns, dtype)
                [noise] = self.noise.of_copies(draws, scales)
                [noisy] = self.noise.of_copies(draws, scales, onto=weights.view(-1))
                noise, noisy = noise.view_as(weights), noisy.view_as(weights)
            stored = mapping.take(published, start, stop)
            regenerated = mapping.forward(noisy, start)
            yield _Slice(
                start=start, base=weights, noise=noise, stored=stored, regenerated=regenerated, mapping=mapping
            )

    def check(self, network: _Network | None, tensor: TensorLayout) -> _TensorCheck:
        """One tensor of the copy, undone and regenerated; ``network`` gets it as it was before storage."""
        result, mapping = _TensorCheck(), self.transform.of(tensor)
        target = torch.empty(as_matrix(self.base.tensor(tensor.name)).shape if network else 0)
        for part in self.slices(tensor):
            if network:
                mapping.put(target, part.regenerated.float(), part.start)
            if not tensor.constant:
                result.add(part)
        if network:
            network.fill(self.transform.name(tensor), target)
        return result

    def summary(self, block: str, parts: Sequence[_TensorCheck]) -> BlockCheck:
        count = sum(part.count for part in parts)
        return BlockCheck(
            block=block,
            requested=self.keys.scales(block).of_copy(self.keys.publication.scheme.scales[self.number - 1]),
            survived=math.sqrt(math.fsum(part.survived for part in parts) / count),
            difference=max(part.difference for part in parts),
            changed=sum(part.changed for part in parts) / count,
            rounding=all(part.rounding for part in parts),
        )


@dataclass
class _TensorCheck:
    """The ``BlockCheck`` of one tensor: sums over its ``count`` weights."""

    survived: float = 0.0
    difference: float = 0.0
    changed: int = 0
    count: int = 0
    rounding: bool = True

    def add(self, part: _Slice) -> None:
        clean, undone = part.base.double(), part.mapping.backward(part.stored.double(), part.start)
        off = (undone - (clean + part.noise)).abs().max()
        self.difference = max(self.difference, float(off.nan_to_num(torch.inf)))
        self.survived += float((undone - clean).square().sum())
        self.count += clean.numel()
        expected = part.regenerated.to(part.stored.dtype)
        self.changed += int((part.stored != expected).sum())
        apart = (part.stored.double() - expected.double()).abs()
        eps = torch.finfo(part.stored.dtype).eps
        allowed = 2 * eps * expected.double().abs() + 1e-6 * float(expected.double().abs().max())
        self.rounding &= bool((apart <= allowed).all())  # false for NaN too


def _random_tokens(layout: Layout) -> torch.Tensor:
    """Tokens on which logits are compared, int64 (batch, length), the same each time."""
    rows, length = TOKENS[0], min(TOKENS[1], layout.sizes.get("position", TOKENS[1]))
    return torch.randint(layout.sizes["vocab"], (rows, length), generator=torch.Generator().manual_seed(0))


class _Network:
    """The base's network, built once, whose weights are replaced for each comparison."""

    def __init__(self, model: Model, layout: Layout):
        from mpu_cli.model.network import build, config_of
        from mpu_cli.model.tensors import in_memory

        self._network = build(config_of(model.config), dtype=torch.float32).eval()
        self._places = in_memory(self._network, layout.tensors)
        self._tokens = _random_tokens(layout)
        self._threads = torch.get_num_threads()

    @torch.no_grad()
    def fill(self, name: str, values: torch.Tensor) -> None:
        target = self._places[name]
        target.copy_(values.view(target.shape))

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        """The logits of random tokens, (batch, length, vocabulary); on all cores, even while a pool of workers has
        them."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return self._network(self._tokens).logits  # type: ignore[no-any-return]
        finally:
            torch.set_num_threads(before)


def _logits_differences(
    copy: Model, layout: Layout, regenerated: _RegeneratedCopy, network: _Network, pool: Executor
) -> tuple[float, float]:
    """Largest logit differences from base plus noise: of T(base + noise), which ``network`` has, and of the copy."""
    filled = [tensor for tensor in layout.tensors.values() if any(tensor.axes) or not tensor.constant]

    def fill_noisy(tensor: TensorLayout) -> None:
        slices = [(part.base + part.noise).float() for part in regenerated.slices(tensor)]
        network.fill(tensor.name, torch.cat(slices))

    def fill_stored(tensor: TensorLayout) -> None:
        network.fill(tensor.name, copy.checkpoint.tensor(tensor.name).float())

    transformed = network.logits()
    list(pool.map(fill_noisy, filled))
    expected = network.logits()
    list(pool.map(fill_stored, filled))
    largest = float(expected.abs().max())

    def difference(logits: torch.Tensor) -> float:
        return float((logits - expected).abs().max()) / largest

    return difference(transformed), difference(network.logits())


# Whether a family's table holds for a checkpoint: each of its symmetries, alone and together, on the real weights.

# Relative difference of logits that rounding may cause; a map that is not a symmetry causes 0.01 and more. Some
# layers compute in float32 whatever the dtype of the weights.
MAX_LOGIT_DIFFERENCE = {torch.float64: 1e-4, torch.float32: 3e-4}
TOGETHER = "together"
RETURNED = 1e-5  # relative, of changes in float32 that were transformed and undone


@dataclass(frozen=True)
class SymmetryCheck:
    """One symmetry of one set, or all of the set together: relative differences of logits, by dtype."""

    set_name: str
    symmetry: str
    differences: dict[torch.dtype, float]

    @property
    def ok(self) -> bool:
        return all(difference <= MAX_LOGIT_DIFFERENCE[dtype] for dtype, difference in self.differences.items())


@dataclass(frozen=True)
class FamilyCheck:
    """The checks of a family's table. ``unmoved``: the tensors that no symmetry moves. ``layers``: the number of those
    checked, one of each kind at least. ``returned``: by set, the relative distance of random changes of a copy's
    weights from what undoing them gives."""

    checks: list[SymmetryCheck]
    unmoved: list[str]
    layers: int
    returned: dict[str, float]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks) and all(off <= RETURNED for off in self.returned.values())


def unmoved_tensor_names(layout: Layout, symmetries: str) -> list[str]:
    """The tensors that no symmetry of the set moves."""
    transform = _transform(layout, symmetries, None, Randomness(bytes(32)))
    return [tensor.name for tensor in layout.parameters if not transform.of(tensor).moves]


def in_place(layout: Layout, tensors: Mapping[str, TensorInfo], symmetries: str) -> str | None:
    """One line about the weights that no symmetry of the set moves, and their share. None if there are none."""
    names = unmoved_tensor_names(layout, symmetries)
    if not names:
        return None
    share = sum(tensors[name].elements for name in names) / sum(info.elements for info in tensors.values())
    less = "less than 0.01%" if share < 1e-4 else f"{share:.2%}"
    return f"no symmetry of the set {symmetries} moves {less} of the weights: {quoted_list(names)}"


def published_as_they_are(layout: Layout, tensors: Mapping[str, TensorInfo]) -> str | None:
    """One line about the weights that copies hold bit for bit, without noise and coordinates: parts that the client
    does not train, such as a vision tower. None if there are none."""
    prefixes = layout.family.frozen_prefixes
    around = [tensor for tensor in layout.tensors.values() if prefixes and tensor.name.startswith(prefixes)]
    untouched = [tensor.name for tensor in around if not any(tensor.axes)]
    count = sum(tensors[name].elements for name in untouched)
    if not count:
        return None
    total = sum(info.elements for info in tensors.values())
    return (
        f"{count:,} of {total:,} weights ({count / total:.1%}) are in every copy as they are, without noise or secret "
        f"coordinates: {quoted_list(untouched)}"
    )


def check_family(model: Model, observer: Observer = SILENT) -> FamilyCheck:
    """Apply the symmetries of the model's family to its weights, in memory, and compare logits on random tokens; and
    take random changes of copies back.

    Of a deep model, the first layers are checked: one of each kind, and two at least.
    """
    # Importing transformers takes seconds; publishing, which uses ``unmoved``, does without.
    from mpu_cli.model.load import load
    from mpu_cli.model.staging import fields_of
    from mpu_cli.model.tensors import in_memory

    full_layout = model.layout
    if lost := left_out(model.config, fields_of(model.config)):
        raise MpuError(
            f"{model.config_path}: transformers reads {quoted_list(lost)}, which copies would not get",
            "add it to config in mpu_cli/files/names.toml",
        )
    with _first_layers(model) as small:
        layout = small.layout
        cases = list(_cases(layout))
        differences: dict[tuple[str, str], dict[torch.dtype, float]] = {case: {} for case in cases}
        observer.stage("check", len(cases) * len(MAX_LOGIT_DIFFERENCE), "checks")
        for dtype in MAX_LOGIT_DIFFERENCE:
            network, _ = load(small, dtype, "cpu")
            views = in_memory(network.eval(), layout.tensors)
            expected = _logits(network, layout)
            largest = float(expected.abs().max())
            moved: set[str] = set()  # by the case before
            for number, (set_name, symmetry) in enumerate(cases):
                only = None if symmetry == TOGETHER else symmetry
                transform = _transform(layout, set_name, only, Randomness(number.to_bytes(32, "big")))
                moved = _apply(small, layout, transform, views, moved)
                differences[set_name, symmetry][dtype] = (
                    float((_logits(network, layout) - expected).abs().max()) / largest
                )
                observer.advance(1, f"{set_name}: {symmetry}")
        checked_sets = {set_name for set_name, _ in cases}
        returned = {name: _round_trip_error(layout, small, name) for name in SETS if name in checked_sets}
    return FamilyCheck(
        [SymmetryCheck(*case, differences[case]) for case in cases],
        unmoved_tensor_names(full_layout, UNION),
        len(layout.structures),
        returned,
    )


@contextmanager
def _first_layers(model: Model) -> Iterator[Model]:
    """``model`` with its first layers only: one of each kind, and two at least; whole if that is another model."""
    from safetensors.torch import save_file

    layout = model.layout
    kinds = [(structure, tuple(layout.sizes_of(i).items())) for i, structure in enumerate(layout.structures)]
    count = max(2, *(kinds.index(kind) + 1 for kind in kinds))
    config, inner = dict(model.config), layout.family.text_config
    if inner and isinstance(text := config.get(inner), dict):
        config[inner] = _cut(text, len(kinds), count)
    else:
        config = _cut(config, len(kinds), count)
    tensors = {
        name: model.checkpoint.tensors[name]
        for name, tensor in layout.tensors.items()
        if tensor.layer is None or tensor.layer < count
    }
    try:
        fits = layout_of(tensors, config, model.source).structures == layout.structures[:count]
    except MpuError:  # a tensor outside the layers has an axis as long as the model is deep, say
        fits = False
    if not fits:
        yield model
        return
    with private_scratch() as folder:  # transformers reads files
        save_file({name: model.checkpoint.tensor(name) for name in tensors}, folder / WEIGHTS_NAME, {"format": "pt"})
        yield replace(model, checkpoint=open_checkpoint(folder / WEIGHTS_NAME), config=config)


def _cut(config: Mapping[str, Any], layers: int, count: int) -> dict[str, object]:
    """``config``, of a model of as many ``layers``, for its first ``count``: the number, and lists by layer."""
    entries: dict[str, object] = {}
    for name, value in config.items():
        if isinstance(value, list) and len(value) == layers:
            value = value[:count]
        elif isinstance(value, dict):  # by a layer's number
            value = {key: entry for key, entry in value.items() if not key.isdigit() or int(key) < count}
        entries[name] = count if name in LAYER_COUNTS and value == layers else value
    return entries


def _round_trip_error(layout: Layout, model: Model, set_name: str) -> float:
    """The largest error of a random change that went through T and back, relative, over all tensors."""
    transform = _transform(layout, set_name, None, Randomness(bytes(32)))
    draw, worst = torch.Generator().manual_seed(0), 0.0
    for tensor in layout.parameters:
        mapping = transform.of(tensor)
        if not mapping.moves:
            continue
        weights = as_matrix(model.checkpoint.tensor(tensor.name))
        change, copy = torch.randn(weights.shape, generator=draw), torch.empty(weights.shape)
        slices = row_slices([mapping], *weights.shape)
        for start, stop in slices:
            mapping.put(copy, mapping.forward(change[start:stop], start), start)
        for start, stop in slices:
            back = mapping.backward(mapping.take(copy, start, stop), start)
            worst = max(worst, float((back - change[start:stop]).abs().max()))
    return worst


def _cases(layout: Layout) -> Iterator[tuple[str, str]]:
    """Every set's symmetries by name, in the order in which they are listed, and all of a set together."""
    for set_name in SETS:
        names: dict[str, None] = {}  # in order, each once
        for layer in (*range(len(layout.structures)), None):  # None: what belongs to no layer
            names |= dict.fromkeys(symmetry.name for symmetry in layout.symmetries(set_name, layer))
        for name in names:
            yield set_name, name
        if names:
            yield set_name, TOGETHER


def _transform(layout: Layout, set_name: str, only: str | None, randomness: Randomness) -> Transform:
    def symmetries(layer: int | None) -> Iterable[Symmetry]:
        return [s for s in layout.symmetries(set_name, layer) if only in (None, s.name)]

    def draws(symmetry: str, layer: int) -> Stream:
        return randomness.stream("symmetry", 1, 1, symmetry, layer)

    return Transform(layout, symmetries, draws)


@torch.no_grad()
def _apply(
    model: Model, layout: Layout, transform: Transform, views: dict[str, torch.Tensor], before: set[str]
) -> set[str]:
    """Put T of the model's weights into ``views``, of which those in ``before`` differ from the model's; returns those
    that differ afterwards."""
    moves = {t.name for t in layout.tensors.values() if transform.of(t).moves or transform.name(t) != t.name}
    for tensor in layout.tensors.values():
        if not any(tensor.axes) or tensor.name not in moves | before:
            continue
        mapping, view = transform.of(tensor), views[transform.name(tensor)]
        weights = as_matrix(model.checkpoint.tensor(tensor.name))
        target = torch.empty(weights.shape, dtype=view.dtype)
        for start, stop in row_slices([mapping], *weights.shape):
            mapping.put(target, mapping.forward(weights[start:stop].to(view.dtype), start), start)
        view.copy_(target.view(view.shape))
    return moves


@torch.no_grad()
def _logits(network: PreTrainedModel, layout: Layout) -> torch.Tensor:
    return network(_random_tokens(layout)).logits
