"""Drawing symmetries at random: the map of each axis, uniform over the group that the architecture allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch

from mpu_cli.architectures.family import HeadPermutation, Permutation, Rotation, Symmetry
from mpu_cli.architectures.layout import axis_length
from mpu_cli.symmetry.axis import AxisMap


class Draws(Protocol):
    """A source of randomness for one purpose; what it gives is fixed by the purpose and the secret behind it."""

    def permutation(self, n: int) -> torch.Tensor:
        """A uniform permutation of 0 … n−1, int64 (n,)."""

    def uniform(self, n: int) -> torch.Tensor:
        """Uniform in [0, 1), float64 (n,)."""

    def normal(self, n: int) -> torch.Tensor:
        """Standard normal, float64 (n,)."""


def sample(
    symmetries: Iterable[Symmetry], sizes: Mapping[str, int], draws: Callable[[str], Draws]
) -> dict[str, AxisMap]:
    """One element of the product of ``symmetries``, as a map for each axis that it moves.

    ``draws(name)`` is the source for the symmetry of that name.
    """
    orders: dict[str, torch.Tensor] = {}
    rotations: dict[str, torch.Tensor] = {}
    heads, kv_heads, d = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]
    for symmetry in symmetries:
        source = draws(symmetry.name)
        if isinstance(symmetry, Permutation):
            orders[symmetry.axis] = source.permutation(sizes[symmetry.axis])
        elif isinstance(symmetry, Rotation):
            matrices = _plane_rotations(source, kv_heads, d) if symmetry.planes else _orthogonal(source, kv_heads, d)
            for axis in symmetry.axes:
                per_kv_head = axis_length(sizes, axis) // d // kv_heads
                rotations[axis] = matrices.repeat_interleave(per_kv_head, dim=0)
        elif isinstance(symmetry, HeadPermutation):
            group = heads // kv_heads
            kv_order = source.permutation(kv_heads)
            within = torch.stack([source.permutation(group) for _ in range(kv_heads)])
            query_order = (kv_order[:, None] * group + within).flatten()
            for axis in ("query", "mixed"):
                orders[axis] = whole_heads(query_order, d)
            for axis in ("key", "value"):
                orders[axis] = whole_heads(kv_order, d)
    return {
        axis: AxisMap(orders.get(axis, torch.arange(axis_length(sizes, axis))), rotations.get(axis))
        for axis in orders.keys() | rotations.keys()
    }


def whole_heads(order: torch.Tensor, d: int) -> torch.Tensor:
    """The order of an axis of heads of size ``d`` where the heads take ``order``."""
    return (order[:, None] * d + torch.arange(d)).flatten()


def _plane_rotations(source: Draws, heads: int, d: int) -> torch.Tensor:
    """A uniform angle for each head and each plane (i, i + d/2), as matrices (heads, d, d)."""
    return plane_matrices(2 * torch.pi * source.uniform(heads * (d // 2)).view(heads, d // 2))


def plane_matrices(angle: torch.Tensor) -> torch.Tensor:
    """Matrices (heads, d, d) that turn each plane (i, i + d/2) by its ``angle``, (heads, d/2)."""
    cos, sin = torch.diag_embed(angle.cos()), torch.diag_embed(angle.sin())
    return torch.cat([torch.cat([cos, -sin], 2), torch.cat([sin, cos], 2)], 1)


def _orthogonal(source: Draws, heads: int, d: int) -> torch.Tensor:
    """Uniform (Haar) in O(d) for each head: QR of a normal matrix with the signs of R's diagonal made positive.

    Mezzadri, "How to generate random matrices from the classical compact groups" (2007).
    """
    q, r = torch.linalg.qr(source.normal(heads * d * d).view(heads, d, d))
    return q * torch.diagonal(r, dim1=-2, dim2=-1).sign()[:, None, :]
