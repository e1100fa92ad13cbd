"""One secret choice of symmetries for a whole model, applied to slices of its tensors.

Everything works on slices of rows, so that no tensor is ever held whole. To make a copy, ``forward`` transforms a slice
and ``put`` writes its rows to their places; to undo it, ``take`` gathers a slice's rows and ``backward`` transforms
them back. A vector is treated as a matrix with one column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from mpu_cli.files.randomness import Randomness, Stream
from mpu_cli.model.family import Symmetry
from mpu_cli.model.layout import Layout, TensorLayout, axis_length
from mpu_cli.model.sampling import AxisMap, Maps, in_blocks, joined_axis_map, map_columns, sample, turn_rows

CHUNK = 262_144  # weights per slice: few enough for caches, enough that threads rarely wait for the GIL

FEW_MAPS = 4  # up to this many maps use slices of that size


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A vector as one column, a stack of matrices as one below the other, a single number as itself."""
    if tensor.ndim == 3:
        return tensor.view(-1, tensor.shape[-1])
    return tensor.view(len(tensor) if tensor.ndim else 1, -1)


def row_slices(maps: Iterable[TensorMap], rows: int, columns: int) -> list[tuple[int, int]]:
    """Bounds of slices of about CHUNK weights (fewer for many maps) that split neither the heads of any map nor the
    rows that share a map of columns."""
    maps = list(maps)
    unit = max(mapping.unit for mapping in maps)
    most = CHUNK * FEW_MAPS // max(FEW_MAPS, len(maps))  # a worker holds a slice for each map
    step = max(unit, most // max(columns, 1) // unit * unit)
    block = min((mapping.block for mapping in maps if mapping.block), default=rows)
    return [
        (start, min(start + step, block_start + block))
        for block_start in range(0, rows, max(1, block))
        for start in range(block_start, block_start + block, step)
    ]


class TensorMap:
    """The effect of a transform on one tensor: a map for its rows and one for its columns, either of which may be None.

    ``block``: the number of rows of each matrix of a stack. ``columns`` are several if each matrix has its own map.
    """

    def __init__(self, rows: AxisMap | None, columns: AxisMap | Sequence[AxisMap] | None, block: int | None = None):
        self._rows, self._columns, self.block = rows, columns, block
        self._places = None if rows is None else rows.places

    def _columns_of(self, start: int) -> AxisMap | None:
        """The map of the columns of the base's rows ``start …``."""
        if self._columns is None or isinstance(self._columns, AxisMap):
            return self._columns
        assert self.block is not None
        return self._columns[start // self.block]

    @property
    def unit(self) -> int:
        """The number of rows that belong together: the bounds of a slice must be multiples of this."""
        return 1 if self._rows is None else self._rows.unit

    @property
    def moves(self) -> bool:
        """Whether the map is anything but the identity."""
        return self._rows is not None or self._columns is not None

    @property
    def turns(self) -> bool:
        """Whether the map does more than reorder rows."""
        return self._columns is not None or (self._rows is not None and self._rows.turns)

    def split(self, rank: int) -> tuple[TensorMap, TensorMap]:
        """The maps of both factors of a change of ``rank``: the rows of the left and the columns of the right one."""
        order = None
        if self.block is not None and self._places is not None:  # the right factors of a stack change places too
            firsts = self._places[:: self.block] // self.block
            order = in_blocks([None] * len(firsts), rank, firsts.argsort())
        right = TensorMap(order, self._columns, None if self.block is None else rank)
        return TensorMap(self._rows, None, self.block), right

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Rows ``start …`` of a base tensor, (rows, columns), in the copy's coordinates but not yet reordered."""
        if self._rows is not None:
            x = turn_rows(x, self._rows, start)
        columns = self._columns_of(start)
        return x if columns is None else map_columns(x, columns)

    def whole(self, matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A base's whole tensor, (rows, columns), in the copy's coordinates and order."""
        target = torch.empty(matrix.shape, dtype=dtype)
        for start, stop in row_slices([self], *matrix.shape):
            self.put(target, self.forward(matrix[start:stop].to(dtype), start), start)
        return target

    def put(self, target: torch.Tensor, x: torch.Tensor, start: int) -> None:
        """Write the result of ``forward`` to its rows in the copy's full tensor."""
        if self._places is None:
            target[start : start + len(x)] = x
            return
        places = self._places[start : start + len(x)]
        if target.dtype == x.dtype and _is_of_words(target) and _is_of_words(x):
            # numpy moves words of eight bytes in a sixth of the time that index_copy_ takes for bfloat16.
            target.view(torch.int64).numpy()[places.numpy()] = x.view(torch.int64).numpy()
        else:
            target.index_copy_(0, places, x)

    def take(self, source: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The rows of a copy's full tensor that come from the base's rows ``start … stop``."""
        return source[start:stop] if self._places is None else source.index_select(0, self._places[start:stop])

    def backward(self, y: torch.Tensor, start: int) -> torch.Tensor:
        """The inverse of ``forward``, for the result of ``take``: back to the base's coordinates."""
        columns = self._columns_of(start)
        if columns is not None:
            y = map_columns(y, columns, inverse=True)
        return y if self._rows is None else turn_rows(y, self._rows, start, inverse=True)


def _is_of_words(matrix: torch.Tensor) -> bool:
    """Whether each row of ``matrix`` is a number of aligned words of eight bytes, one row after the other."""
    row_bytes = matrix.shape[1] * matrix.element_size()
    offset = matrix.storage_offset() * matrix.element_size()
    return matrix.is_contiguous() and row_bytes % 8 == offset % 8 == matrix.data_ptr() % 8 == 0


class Transform:
    """One secret T: of the set ``symmetries`` or, of that, the symmetry ``only``, for a copy of a round."""

    def __init__(
        self,
        layout: Layout,
        symmetries: str,
        randomness: Randomness,
        round_: int = 1,
        copy: int = 1,
        only: str | None = None,
    ):
        self._layout = layout

        def chosen(layer: int | None) -> list[Symmetry]:
            return [symmetry for symmetry in layout.symmetries(symmetries, layer) if only in (None, symmetry.name)]

        def draws(name: str, layer: int) -> Stream:
            return randomness.stream("symmetry", round_, copy, name, layer)

        self._shared = sample(chosen(None), layout.sizes, lambda name: draws(name, -1))  # of no layer

        @lru_cache(maxsize=2)  # tensors come layer by layer; holding every layer's matrices would grow with the model
        def layer_maps(layer: int) -> Maps:
            structure = layout.structures[layer]

            def source(name: str) -> Stream:  # what layers have in common comes from the draws of the first of them
                shared_layer = structure.reads if name in structure.shared_symmetries else None
                return draws(name, layer if shared_layer is None else shared_layer)

            return sample(chosen(layer), layout.sizes_of(layer), source)

        self._layer_maps = layer_maps

    def maps(self, tensor: TensorLayout) -> Maps:
        """The map of every axis, where ``tensor`` is."""
        if tensor.layer is None:
            return self._shared
        return {**self._shared, **self._layer_maps(tensor.layer)}

    def of(self, tensor: TensorLayout) -> TensorMap:
        """The effect of this transform on ``tensor``."""
        return tensor_map(self._layout, tensor, self.maps(tensor))

    def name(self, tensor: TensorLayout) -> str:
        """The name of ``tensor`` in a copy: an expert's matrices take the number of its new place."""
        return name_in_copy(tensor, self.maps(tensor))


def name_in_copy(tensor: TensorLayout, maps: Maps) -> str:
    order = maps.get("expert")
    if tensor.expert is None or not isinstance(order, AxisMap):
        return tensor.name
    before, after = f".{tensor.expert}.", f".{int(order.places[tensor.expert])}."
    head, _, tail = tensor.name.rpartition(before)  # the last number: the layer's comes earlier
    return head + after + tail


def tensor_map(layout: Layout, tensor: TensorLayout, maps: Maps) -> TensorMap:
    """The effect of these axis ``maps`` on ``tensor``."""

    def dimension(i: int, expert: int | None) -> AxisMap | None:
        of_parts = []
        for axis in tensor.axes[i]:
            axis_map = maps.get(axis)
            if isinstance(axis_map, tuple):
                axis_map = None if expert is None else axis_map[expert]
            of_parts.append(axis_map)
        return joined_axis_map(of_parts, [axis_length(sizes, axis) for axis in tensor.axes[i]], tensor.chunks[i])

    sizes = layout.sizes_of(tensor.layer)
    if not any(tensor.axes):  # a mask
        return TensorMap(None, None)
    if tensor.axes[0] != ("expert",) or len(tensor.axes) == 1:
        axes = [dimension(i, tensor.expert) for i in range(len(tensor.axes))]
        return TensorMap(axes[0], axes[1] if len(axes) > 1 else None)
    # A matrix for each expert, (experts, rows, columns), or a vector for each, such as biases: (experts, columns).
    experts, last = range(sizes["experts"]), len(tensor.axes) - 1
    order = maps.get("expert")
    assert not isinstance(order, tuple)
    rows = 1
    row_maps: list[AxisMap | None] = [None for _ in experts]
    if last == 2:
        rows = sum(axis_length(sizes, axis) for axis in tensor.axes[1])
        row_maps = [dimension(1, e) for e in experts]
    column_maps = [dimension(last, e) for e in experts]
    moved = in_blocks(row_maps, rows, order.order if order else None)
    if any(isinstance(maps.get(axis), tuple) for axis in tensor.axes[last]):
        return TensorMap(moved, [axis_map for axis_map in column_maps if axis_map is not None], rows)
    return TensorMap(moved, column_maps[0], rows if last == 2 else None)


def measured_slices(slices: int) -> range:
    """The slices of a tensor to measure: the first and, if there are many, one in the middle. Enough weights for the
    report, at a fraction of the time."""
    return range(0, slices, max(8, -(-slices // 2)))
