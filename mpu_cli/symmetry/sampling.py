"""Random symmetries: the map of each axis, drawn uniformly from the group that the architecture allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch

from mpu_cli.architectures.family import HeadPermutation, Permutation, Rotation, Symmetry, Turns
from mpu_cli.architectures.layout import axis_length
from mpu_cli.symmetry.axis import AxisMap


class Draws(Protocol):
    """A source of randomness for one purpose; its output is determined by the purpose and the underlying secret."""

    def permutation(self, n: int) -> torch.Tensor:
        """A uniform permutation of 0 … n−1, int64 (n,)."""

    def uniform(self, n: int) -> torch.Tensor:
        """Uniform in [0, 1), float64 (n,)."""

    def normal(self, n: int) -> torch.Tensor:
        """Standard normal, float64 (n,)."""


def sample(
    symmetries: Iterable[Symmetry], sizes: Mapping[str, int], draws: Callable[[str], Draws]
) -> dict[str, AxisMap]:
    """A random element of the product of ``symmetries``, as one map for each axis that it changes.

    ``draws(name)`` is the source for the symmetry of that name.
    """
    orders: dict[str, torch.Tensor] = {}
    rotations: dict[str, torch.Tensor] = {}
    signs: dict[str, torch.Tensor] = {}
    heads: dict[str, torch.Tensor] = {}  # the order of whole heads
    kv_heads, d = sizes["kv_heads"], sizes["head_dim"]

    def per_kv_head(axis: str) -> int:
        return axis_length(sizes, axis) // d // kv_heads

    for symmetry in symmetries:
        source = draws(symmetry.name)
        if isinstance(symmetry, Permutation):
            n = axis_length(sizes, symmetry.axes[0])
            orders |= dict.fromkeys(symmetry.axes, source.permutation(n))
            if symmetry.signed:
                signs |= dict.fromkeys(symmetry.signed, _signs(source, n))
        elif isinstance(symmetry, Rotation):
            matrices = _plane_rotations(source, kv_heads, d) if symmetry.planes else _orthogonal(source, kv_heads, d)
            for axis in symmetry.axes:
                rotations[axis] = matrices.repeat_interleave(per_kv_head(axis), dim=0)
        elif isinstance(symmetry, Turns):
            within, changed = (
                _quarter_turns(source, kv_heads, d) if symmetry.planes else _any_turns(source, kv_heads, d)
            )
            for axis in symmetry.axes:
                inside = within.repeat_interleave(per_kv_head(axis), dim=0)
                orders[axis] = (inside + d * torch.arange(len(inside))[:, None]).flatten()
                signs[axis] = changed.repeat_interleave(per_kv_head(axis), dim=0).flatten()
        elif isinstance(symmetry, HeadPermutation):
            group = sizes["heads"] // kv_heads
            kv_order = source.permutation(kv_heads)
            among = torch.stack([source.permutation(group) for _ in range(kv_heads)])
            query_order = (kv_order[:, None] * group + among).flatten()
            heads |= {"query": query_order, "mixed": query_order, "key": kv_order, "value": kv_order}
    for axis, order in heads.items():
        moved = whole_heads(order, d)
        orders[axis] = orders[axis][moved] if axis in orders else moved
    return {
        axis: AxisMap(orders.get(axis, torch.arange(axis_length(sizes, axis))), rotations.get(axis), signs.get(axis))
        for axis in orders.keys() | rotations.keys()
    }


def whole_heads(order: torch.Tensor, d: int) -> torch.Tensor:
    """The coordinate order of an axis whose heads, of size ``d``, are put in ``order``."""
    return (order[:, None] * d + torch.arange(d)).flatten()


def _plane_rotations(source: Draws, heads: int, d: int) -> torch.Tensor:
    """Rotations by a uniform angle for each head and plane (i, i + d/2), as matrices (heads, d, d)."""
    return plane_matrices(2 * torch.pi * source.uniform(heads * (d // 2)).view(heads, d // 2))


def plane_matrices(angle: torch.Tensor) -> torch.Tensor:
    """Matrices (heads, d, d) that rotate each plane (i, i + d/2) by its ``angle``, shape (heads, d/2)."""
    cos, sin = torch.diag_embed(angle.cos()), torch.diag_embed(angle.sin())
    return torch.cat([torch.cat([cos, -sin], 2), torch.cat([sin, cos], 2)], 1)


def _signs(source: Draws, n: int) -> torch.Tensor:
    """n independent signs, float32 of ±1."""
    return torch.where(source.uniform(n) < 0.5, -1.0, 1.0).float()


def _quarter_turns(source: Draws, heads: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A multiple of 90° for each head and each plane (i, i + d/2), as order and signs: (heads, d) each."""
    quarters = (4 * source.uniform(heads * (d // 2))).long().view(heads, d // 2)
    odd = quarters % 2 == 1
    i = torch.arange(d // 2).expand(heads, -1)
    order = torch.cat([torch.where(odd, i + d // 2, i), torch.where(odd, i, i + d // 2)], 1)
    # A turn by 90° takes (x, y) to (−y, x), one by 180° to (−x, −y), one by 270° to (y, −x).
    negative = torch.cat([quarters >= 2, (quarters == 1) | (quarters == 2)], 1)
    return order, torch.where(negative, -1.0, 1.0)


def _any_turns(source: Draws, heads: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Any order and signs of the d coordinates of each head: (heads, d) each."""
    return torch.stack([source.permutation(d) for _ in range(heads)]), _signs(source, heads * d).view(heads, d)


def _orthogonal(source: Draws, heads: int, d: int) -> torch.Tensor:
    """Uniform (Haar) in O(d) for each head: QR of a normal matrix with the signs of R's diagonal made positive.

    Mezzadri, "How to generate random matrices from the classical compact groups" (2007).
    """
    q, r = torch.linalg.qr(source.normal(heads * d * d).view(heads, d, d))
    return q * torch.diagonal(r, dim1=-2, dim2=-1).sign()[:, None, :]
