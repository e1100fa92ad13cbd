"""Which rows of a copy are which of the target, and by which rotation they were turned."""

from __future__ import annotations

import math

import torch
from scipy.optimize import linear_sum_assignment

from mpu_cli.symmetry.axis import AxisMap
from mpu_cli.symmetry.sampling import plane_matrices, planes_of

FEATURES = 512  # features of a row used in the first search for its partner
MARGIN = 6  # standard deviations of the cosine of FEATURES independent numbers


def match(similarity: torch.Tensor) -> torch.Tensor:
    """The assignment with the largest total, int64: row i is matched with column ``match[i]``.

    If each row's best column has that row as its best, that is the answer; otherwise scipy's linear_sum_assignment.
    """
    columns = similarity.argmax(1)
    if bool((similarity.argmax(0)[columns] == torch.arange(len(similarity))).all()):
        return columns
    return torch.from_numpy(linear_sum_assignment(similarity.numpy(), maximize=True)[1])


def match_rows(copy: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The order in which the rows of ``target``, (n, features), appear in ``copy``, by cosine.

    A subset of the features is enough if each row's best partner stands out from all others by far more than the
    omitted features can make up for; otherwise all of them are used.
    """
    if copy.shape[1] > 2 * FEATURES:
        some = torch.randperm(copy.shape[1], generator=torch.Generator().manual_seed(0))[:FEATURES]
        similarity = cosines(copy[:, some], target[:, some])
        best = similarity.topk(min(2, len(similarity)), 1)
        nearest = best.indices[:, 0]
        margin = best.values[:, 0] - best.values[:, -1]
        if len(nearest.unique()) == len(nearest) and float(margin.min()) > MARGIN / math.sqrt(FEATURES):
            return nearest
    return match(cosines(copy, target))


def cosines(copy: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp(min=1e-30) for x in (copy, target)]
    return (copy / norms[0]) @ (target / norms[1]).T


def match_signed(
    copy: torch.Tensor, target: torch.Tensor, plain: tuple[torch.Tensor, torch.Tensor] | None = None
) -> AxisMap:
    """The order and the signs in which the rows of ``target``, (n, features), appear in ``copy``.

    ``plain``: further features of the same rows in copy and target that signs do not affect.
    """
    similarity = cosines(copy, target)
    order = match(similarity.abs() + (cosines(*plain) if plain else 0))
    signs = torch.ones(len(order))
    signs[order] = torch.where(similarity[torch.arange(len(order)), order] < 0, -1.0, 1.0)
    return AxisMap(order, signs=signs)


def subspace_overlap(copy: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How far two heads span the same space, regardless of rotation: ‖A Bᵀ‖²/(‖A Aᵀ‖·‖B Bᵀ‖), (heads, heads)."""
    cross = torch.einsum("aif,bjf->abij", copy, target).square().sum((2, 3))
    norms = [torch.einsum("aif,ajf->aij", x, x).square().sum((1, 2)).sqrt() for x in (copy, target)]
    return cross / (norms[0][:, None] * norms[1][None, :]).clamp(min=1e-30)


def procrustes(product: torch.Tensor) -> torch.Tensor:
    """The orthogonal R nearest to X = R Y, from X Yᵀ (Schönemann, 1966)."""
    u, _, v = torch.linalg.svd(product.double())
    return u @ v


def plane_angles(product: torch.Tensor, kind: str) -> torch.Tensor:
    """The angles (r/2,) of the rotation R in RoPE's planes nearest to X = R Y, from X Yᵀ, in closed form."""
    real, two = planes_of(kind, len(product))
    p = product.double()
    return torch.atan2(p[two, real] - p[real, two], p[real, real] + p[two, two])


def signed_permutation(product: torch.Tensor) -> torch.Tensor:
    """The signed permutation R nearest to X = R Y, from X Yᵀ."""
    order = match(product.abs())
    i = torch.arange(len(order))
    matrix = torch.zeros(len(order), len(order), dtype=torch.float64)
    matrix[i, order] = torch.where(product[i, order] < 0, -1.0, 1.0).double()
    return matrix


def head_matrices(products: torch.Tensor, planes: str | None, rotary: int | None, *, turns: bool) -> torch.Tensor:
    """The rotation of each head, (heads, d, d), from ``products``, X Yᵀ of copy and target.

    The first ``rotary`` coordinates (None: all of them) turn in ``planes``, the others freely; without ``planes`` all
    turn freely. ``turns``: by multiples of 90° only, so that the matrices are signed permutations.
    """
    d = products.shape[-1]
    in_planes = 0 if planes is None else d if rotary is None else rotary
    matrices = torch.zeros(products.shape, dtype=torch.float64)
    if planes is not None and in_planes:
        angles = torch.stack([plane_angles(product[:in_planes, :in_planes], planes) for product in products])
        matrices[:, :in_planes, :in_planes] = plane_matrices(quarter(angles) if turns else angles, planes)
    if in_planes < d:
        solve = signed_permutation if turns else procrustes
        matrices[:, in_planes:, in_planes:] = torch.stack([solve(each[in_planes:, in_planes:]) for each in products])
    return matrices.round() if turns else matrices


def quarter(angles: torch.Tensor) -> torch.Tensor:
    """``angles``, in radians, rounded to multiples of 90°."""
    return (angles / (torch.pi / 2)).round() * (torch.pi / 2)
