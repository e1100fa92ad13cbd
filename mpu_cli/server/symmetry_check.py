"""Whether a family's table holds for a checkpoint: each of its symmetries, alone and together, on the real weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mpu_cli.architectures.layout import Layout, TensorLayout, layout_of
from mpu_cli.architectures.symmetries import EVERY, SETS, Symmetry
from mpu_cli.boundary.cleaning import left_out
from mpu_cli.boundary.files import private_scratch
from mpu_cli.checkpoint.header import TensorInfo
from mpu_cli.checkpoint.reader import WEIGHTS_NAME, open_checkpoint, quoted_list
from mpu_cli.errors import MpuError
from mpu_cli.models.source import Model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.randomness import Randomness, Stream
from mpu_cli.symmetry.transform import Transform, as_matrix, row_slices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = (2, 48)
# Relative difference of logits that rounding may cause; what is no symmetry causes 0.01 and more. Some layers
# compute in float32 whatever the dtype of the weights.
SAME = {torch.float64: 1e-4, torch.float32: 3e-4}
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
        return all(difference <= SAME[dtype] for dtype, difference in self.differences.items())


@dataclass(frozen=True)
class FamilyCheck:
    """``unmoved``: the tensors that no symmetry moves. ``layers``: those that were checked, one of each kind at least.
    ``returned``: by set, how far random changes of a copy's weights are from what undoing gives, relative."""

    checks: list[SymmetryCheck]
    unmoved: list[str]
    layers: list[int]
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
    bare = [tensor.name for tensor in around if not any(tensor.axes)]
    count = sum(tensors[name].elements for name in bare)
    if not count:
        return None
    total = sum(info.elements for info in tensors.values())
    return (
        f"{count:,} of {total:,} weights ({count / total:.1%}) are in every copy as they are, without noise or secret "
        f"coordinates: {quoted_list(bare)}"
    )


def check_family(model: Model, observer: Observer = SILENT) -> FamilyCheck:
    """Apply the symmetries of the model's family to its weights, in memory, and compare logits on random tokens; and
    take random changes of copies back.

    A model whose layers do not depend on their number is checked without most of them: one of each kind is left, and
    two at least. Raises MpuError if the family is not listed, its table does not describe the tensors, or copies would
    lack entries of the config.
    """
    # Importing transformers takes seconds; publishing, which uses ``unmoved``, does without.
    from mpu_cli.models.loading import load
    from mpu_cli.models.staging import fields_of
    from mpu_cli.models.tensor_names import in_memory

    full_layout = layout_of(model.checkpoint.tensors, model.config, model.source)
    if lost := left_out(model.config, fields_of(model.config)):
        raise MpuError(
            f"{model.config_path}: transformers reads {quoted_list(lost)}, which copies would not get",
            "add it to CONFIG in mpu_cli/boundary/names.py",
        )
    with _with_one_of_each_kind(model, full_layout) as (small, layers):
        layout = layout_of(small.checkpoint.tensors, small.config, model.source)
        cases = list(_cases(layout))
        differences: dict[tuple[str, str], dict[torch.dtype, float]] = {case: {} for case in cases}
        observer.stage("check", len(cases) * len(SAME), "checks")
        for dtype in SAME:
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
        returned = {
            name: _round_trip_error(layout, small, name) for name in SETS if name in {each for each, _ in cases}
        }
    return FamilyCheck(
        [SymmetryCheck(*case, differences[case]) for case in cases],
        unmoved_tensor_names(full_layout, EVERY),
        layers,
        returned,
    )


@contextmanager
def _with_one_of_each_kind(model: Model, layout: Layout) -> Iterator[tuple[Model, list[int]]]:
    """``model`` with one layer of each kind, and two at least, and which those are; all of them if what a layer
    computes depends on its number."""
    from safetensors.torch import save_file

    from mpu_cli.models.shallow import shallow

    count = len(layout.structures)
    layer_by_kind: dict[tuple, int] = {}
    for layer, structure in enumerate(layout.structures):
        layer_by_kind.setdefault((structure, tuple(layout.sizes_of(layer).items())), layer)
    layers = sorted({*layer_by_kind.values(), *range(min(2, count))})
    try:
        small = shallow(model, [layer for layer in range(count) if layer not in layers])
    except MpuError:
        small, layers = model, list(range(count))
    with private_scratch() as folder:
        if small is not model:  # transformers reads files, which have the names of the whole model
            tensors = {name: small.checkpoint.tensor(name) for name in small.checkpoint.tensors}
            save_file(tensors, folder / WEIGHTS_NAME, {"format": "pt"})
            small = replace(small, checkpoint=open_checkpoint(folder / WEIGHTS_NAME))
        yield small, layers


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
        names = [s.name for layer in (*range(len(layout.structures)), None) for s in layout.symmetries(set_name, layer)]
        if names:
            yield from ((set_name, name) for name in dict.fromkeys(names))
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
    """Put T of the model's weights into ``views``, in which those ``before`` differ from the model's; returns which do
    then."""
    moves = {t.name for t in layout.tensors.values() if transform.of(t).moves or transform.name(t) != t.name}
    for tensor in layout.tensors.values():
        if any(tensor.axes) and tensor.name in moves | before:
            _write(model, tensor, transform, views[transform.name(tensor)])
    return moves


def _write(model: Model, tensor: TensorLayout, transform: Transform, view: torch.Tensor) -> None:
    mapping, weights = transform.of(tensor), as_matrix(model.checkpoint.tensor(tensor.name))
    target = torch.empty(weights.shape, dtype=view.dtype)
    for start, stop in row_slices([mapping], *weights.shape):
        mapping.put(target, mapping.forward(weights[start:stop].to(view.dtype), start), start)
    view.copy_(target.view(view.shape))


@torch.no_grad()
def _logits(network: PreTrainedModel, layout: Layout) -> torch.Tensor:
    length = min(TOKENS[1], layout.sizes.get("position", TOKENS[1]))
    generator = torch.Generator().manual_seed(0)
    return network(torch.randint(layout.sizes["vocab"], (TOKENS[0], length), generator=generator)).logits
