"""One secret choice of symmetries for a whole model, applied to slices of its tensors.

Everything works on slices of rows, so that no tensor is ever held whole. To make a copy, ``forward`` transforms a slice
and ``put`` writes its rows to their places; to undo it, ``take`` gathers a slice's rows and ``backward`` transforms
them back. A vector is treated as a matrix with one column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import torch

from mpu_cli.architectures.family import LAYER_AXES, Permutation, Symmetry
from mpu_cli.architectures.layout import Layout, TensorLayout, axis_length
from mpu_cli.symmetry.axis import AxisMap, joined, map_columns, turn_rows
from mpu_cli.symmetry.sampling import Draws, sample

CHUNK = 262_144  # weights per slice: few enough for caches, enough that threads rarely wait for the GIL

FEW = 4  # up to this many maps use slices of that size


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(len(tensor), -1)


def row_slices(maps: Iterable[TensorMap], rows: int, columns: int) -> list[tuple[int, int]]:
    """Bounds of slices of about CHUNK weights (fewer for many maps) that do not split the heads of any map."""
    maps = list(maps)
    unit = max(mapping.unit for mapping in maps)
    most = CHUNK * FEW // max(FEW, len(maps))  # a worker holds a slice for each map
    step = max(unit, most // max(columns, 1) // unit * unit)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


class TensorMap:
    """What a transform does to one tensor: a map for its rows and one for its columns, either of which may be None."""

    def __init__(self, rows: AxisMap | None, columns: AxisMap | None):
        self._rows, self._columns = rows, columns
        self._places = None if rows is None else rows.places

    @property
    def unit(self) -> int:
        """How many rows belong together: the bounds of a slice must be multiples of this."""
        return 1 if self._rows is None else self._rows.unit

    @property
    def turns(self) -> bool:
        """Whether the map does more than reorder rows."""
        return self._columns is not None or (self._rows is not None and self._rows.turns)

    def split(self) -> tuple[TensorMap, TensorMap]:
        """The row map and the column map separately, for the factors of a low-rank change."""
        return TensorMap(self._rows, None), TensorMap(None, self._columns)

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Rows ``start …`` of a base tensor, (rows, columns), in the copy's coordinates but not yet reordered."""
        if self._rows is not None:
            x = turn_rows(x, self._rows, start)
        return x if self._columns is None else map_columns(x, self._columns)

    def put(self, target: torch.Tensor, x: torch.Tensor, start: int) -> None:
        """Write the result of ``forward`` to its rows in the copy's full tensor."""
        if self._places is None:
            target[start : start + len(x)] = x
        else:
            target.index_copy_(0, self._places[start : start + len(x)], x)

    def take(self, source: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The rows of a copy's full tensor that come from the base's rows ``start … stop``."""
        return source[start:stop] if self._places is None else source.index_select(0, self._places[start:stop])

    def backward(self, y: torch.Tensor, start: int) -> torch.Tensor:
        """The inverse of ``forward``, for the result of ``take``: back to the base's coordinates."""
        if self._columns is not None:
            y = map_columns(y, self._columns, inverse=True)
        return y if self._rows is None else turn_rows(y, self._rows, start, inverse=True)


class Transform:
    """One secret T. ``draws(symmetry, layer)`` is a symmetry's source of randomness; layer −1 means the whole model."""

    def __init__(self, layout: Layout, symmetries: Iterable[Symmetry], draws: Callable[[str, int], Draws]):
        self._layout = layout
        symmetries = tuple(symmetries)
        shared = [s for s in symmetries if isinstance(s, Permutation) and s.axes[0] not in LAYER_AXES]
        per_layer = [s for s in symmetries if s not in shared]
        self._shared = sample(shared, layout.sizes, lambda name: draws(name, -1))

        @lru_cache(maxsize=2)  # tensors come layer by layer; holding every layer's matrices would grow with the model
        def layer_maps(layer: int) -> dict[str, AxisMap]:
            return sample(per_layer, layout.sizes, lambda name: draws(name, layer))

        self._layer_maps = layer_maps

    def of(self, tensor: TensorLayout) -> TensorMap:
        """What this transform does to ``tensor``."""
        maps = dict(self._shared)
        if tensor.layer is not None:
            maps |= self._layer_maps(tensor.layer)
        return tensor_map(self._layout, tensor, maps)


def tensor_map(layout: Layout, tensor: TensorLayout, maps: Mapping[str, AxisMap]) -> TensorMap:
    """What these axis ``maps`` do to ``tensor``."""
    axes = [
        joined([maps.get(axis) for axis in group], [axis_length(layout.sizes, axis) for axis in group])
        for group in tensor.axes
    ]
    return TensorMap(*axes, *[None] * (2 - len(axes)))


def measured_slices(slices: int) -> range:
    """Which slices of a tensor to measure: the first and, if there are many, one in the middle. Enough weights for the
    report, at a fraction of the time."""
    return range(0, slices, max(8, -(-slices // 2)))
