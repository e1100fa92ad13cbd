"""Verifying a publication: undo a copy and compare it with base plus noise, in weights and in logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import private_scratch
from mpu_cli.files.folder import left_out
from mpu_cli.files.manifest import read_copy_manifest
from mpu_cli.files.randomness import Randomness
from mpu_cli.files.reader import (
    WEIGHTS_NAME,
    Checkpoint,
    TensorInfo,
    compute_dtype,
    open_checkpoint,
    quoted_list,
    worker_pool,
)
from mpu_cli.model.family import SETS, UNION
from mpu_cli.model.layout import Layout, TensorLayout, layout_of
from mpu_cli.model.source import Model
from mpu_cli.model.transform import TensorMap, Transform, as_matrix, row_slices
from mpu_cli.observer import SILENT, Observer
from mpu_cli.protocol.keys import Keys

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
    network = None
    if logits:
        from mpu_cli.model.network import build, config_of

        network = _Network(build(config_of(base.config), dtype=torch.float32), layout)
    comparison = _Comparison(base, copy.checkpoint, keys, manifest.copy, network)
    observer.stage("verify", base.checkpoint.nbytes)
    blocks = []
    with worker_pool() as pool:
        for block, tensors in layout.blocks.items():
            if not tensors[0].constant:
                blocks.append(comparison.block(block, list(pool.map(comparison.tensor, tensors))))
            elif network:  # constants that the coordinates of the copy reorder
                list(pool.map(comparison.tensor, [tensor for tensor in tensors if any(tensor.axes)]))
            observer.advance(sum(base.checkpoint.tensors[t.name].nbytes for t in tensors))
        function, stored = comparison.logits(pool)
    return Verification(manifest.copy, blocks, function, stored)


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """Some rows of one tensor: base, base plus noise, and the copy as stored and regenerated."""

    start: int
    base: torch.Tensor
    noisy: torch.Tensor
    stored: torch.Tensor
    regenerated: torch.Tensor


class _Numbers(NamedTuple):
    """The numbers of ``BlockCheck`` for one slice of ``weights``; ``survived``: its sum of squares."""

    survived: float
    difference: float
    changed: int
    weights: int
    rounding: bool


class _Comparison:
    """One copy, beside the same one regenerated from the base and the keys, slice by slice. ``network``, if there is
    one, gets the regenerated weights."""

    def __init__(self, base: Model, copy: Checkpoint, keys: Keys, number: int, network: _Network | None):
        self._base, self._copy, self._keys, self._network = base.checkpoint, copy, keys, network
        self._layout, self._scale = base.layout, keys.publication.scheme.scales[number - 1]
        self._noise = keys.publication.noise([number], self._layout.full_name)
        self._transform = keys.publication.transform(number, self._layout)

    def _slices(self, tensor: TensorLayout) -> Iterator[_Slice]:
        name, mapping = self._transform.name(tensor), self._transform.of(tensor)
        clean, published = as_matrix(self._base.tensor(tensor.name)), as_matrix(self._copy.tensor(name))
        if clean.shape != published.shape:
            raise MpuError(f"{self._copy.path}: shape of {tensor.name!r} differs from the base")
        dtype = torch.float64  # that publish computed in
        if not self._keys.publication.calibration:
            dtype = compute_dtype(clean.dtype, published.dtype)
        scales = self._keys.scales(tensor.block)
        subkeys = self._noise.subkeys(tensor.name, scales)
        for start, stop in row_slices([mapping], *clean.shape):
            weights = clean[start:stop].to(dtype)
            [noisy] = self._noise.added_to(weights, subkeys, scales, start)
            stored, regenerated = mapping.take(published, start, stop), mapping.forward(noisy, start)
            yield _Slice(start=start, base=weights, noisy=noisy, stored=stored, regenerated=regenerated)

    def tensor(self, tensor: TensorLayout) -> list[_Numbers]:
        """The numbers of each slice of a tensor, none for constants; its regenerated weights go to the network."""
        mapping, numbers = self._transform.of(tensor), []
        target = torch.empty(as_matrix(self._base.tensor(tensor.name)).shape if self._network else 0)
        for part in self._slices(tensor):
            if self._network:
                mapping.put(target, part.regenerated.float(), part.start)
            if not tensor.constant:
                numbers.append(_numbers(part, mapping))
        if self._network:
            self._network.fill(self._transform.name(tensor), target)
        return numbers

    def block(self, block: str, by_tensor: Sequence[Sequence[_Numbers]]) -> BlockCheck:
        numbers = [part for parts in by_tensor for part in parts]
        count = sum(part.weights for part in numbers)
        return BlockCheck(
            block=block,
            requested=self._keys.scales(block).of_copy(self._scale),
            survived=math.sqrt(math.fsum(part.survived for part in numbers) / count),
            difference=max(part.difference for part in numbers),
            changed=sum(part.changed for part in numbers) / count,
            rounding=all(part.rounding for part in numbers),
        )

    def logits(self, pool: Executor) -> tuple[float, float] | tuple[None, None]:
        """Largest logit differences from base plus noise: of T(base + noise), which the network has, and of the
        copy; None without a network."""
        network = self._network
        if network is None:
            return None, None
        filled = [tensor for tensor in self._layout.tensors.values() if any(tensor.axes) or not tensor.constant]

        def fill_noisy(tensor: TensorLayout) -> None:
            network.fill(tensor.name, torch.cat([part.noisy.float() for part in self._slices(tensor)]))

        def fill_stored(tensor: TensorLayout) -> None:
            network.fill(tensor.name, self._copy.tensor(tensor.name).float())

        transformed = network.logits()
        list(pool.map(fill_noisy, filled))
        expected = network.logits()
        list(pool.map(fill_stored, filled))
        return relative_difference(transformed, expected), relative_difference(network.logits(), expected)


def _numbers(part: _Slice, mapping: TensorMap) -> _Numbers:
    clean, undone = part.base.double(), mapping.backward(part.stored.double(), part.start)
    expected = part.regenerated.to(part.stored.dtype)
    sizes, off = expected.double().abs(), (part.stored.double() - expected.double()).abs()
    allowed = 2 * torch.finfo(part.stored.dtype).eps * sizes + 1e-6 * float(sizes.max())
    return _Numbers(
        survived=float((undone - clean).square().sum()),
        difference=float((undone - part.noisy).abs().max().nan_to_num(torch.inf)),
        changed=int((part.stored != expected).sum()),
        weights=clean.numel(),
        rounding=bool((off <= allowed).all()),  # false for NaN too
    )


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).abs().max()) / float(expected.abs().max())


class _Network:
    """A network whose weights are replaced for each comparison, and its logits of the same random tokens."""

    def __init__(self, network: PreTrainedModel, layout: Layout):
        from mpu_cli.model.tensors import in_memory

        self._network = network.eval()
        self._views = in_memory(network, layout.tensors)
        rows, length = TOKENS[0], min(TOKENS[1], layout.sizes.get("position", TOKENS[1]))
        random = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(layout.sizes["vocab"], (rows, length), generator=random)
        self._threads = torch.get_num_threads()

    @torch.no_grad()
    def fill(self, name: str, values: torch.Tensor) -> None:
        view = self._views[name]
        view.copy_(values.view(view.shape))

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        """(batch, length, vocabulary); computed on all cores, even while a pool of workers has them."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return self._network(self._tokens).logits  # type: ignore[no-any-return]
        finally:
            torch.set_num_threads(before)


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
    transform = Transform(layout, symmetries, Randomness(bytes(32)))
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


def check_family(model: Model, observer: Observer) -> FamilyCheck:
    """Apply the symmetries of the model's family to its weights, in memory, and compare logits on random tokens; and
    take random changes of copies back.

    Of a deep model, the first layers are checked: one of each kind, and two at least.
    """
    # Importing transformers takes seconds; publishing, which uses ``unmoved``, does without.
    from mpu_cli.model.load import load
    from mpu_cli.model.staging import fields_of

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
            network = _Network(load(small, dtype, "cpu")[0], layout)
            expected = network.logits()
            moved: set[str] = set()  # by the case before
            for number, (set_name, symmetry) in enumerate(cases):
                only = None if symmetry == TOGETHER else symmetry
                transform = Transform(layout, set_name, Randomness(number.to_bytes(32, "big")), only=only)
                moved = _apply(small, transform, network, dtype, moved)
                differences[set_name, symmetry][dtype] = relative_difference(network.logits(), expected)
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
    transform = Transform(layout, set_name, Randomness(bytes(32)))
    draw, worst = torch.Generator().manual_seed(0), 0.0
    for tensor in layout.parameters:
        mapping = transform.of(tensor)
        if not mapping.moves:
            continue
        weights = as_matrix(model.checkpoint.tensor(tensor.name))
        change = torch.randn(weights.shape, generator=draw)
        copy = mapping.whole(change, change.dtype)
        for start, stop in row_slices([mapping], *weights.shape):
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


def _apply(model: Model, transform: Transform, network: _Network, dtype: torch.dtype, before: set[str]) -> set[str]:
    """Put T of the model's weights into ``network``, of which those in ``before`` differ from the model's; those that
    differ afterwards."""
    tensors = [tensor for tensor in model.layout.tensors.values() if any(tensor.axes)]
    moved = {tensor.name for tensor in tensors if transform.of(tensor).moves or transform.name(tensor) != tensor.name}
    for tensor in tensors:
        if tensor.name in moved | before:
            weights = as_matrix(model.checkpoint.tensor(tensor.name))
            network.fill(transform.name(tensor), transform.of(tensor).whole(weights, dtype))
    return moved
