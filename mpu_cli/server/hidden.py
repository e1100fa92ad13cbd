"""How far off a client would be that takes the noise off its copies as well as is known, estimated while publishing.

Noise n of scale σ hides a change v. Without knowing anything of v, the best factor for v + n leaves η/√(1 + η²) of it,
where η is σ over the RMS of v. A few large singular values of v stand out of the noise all the same: one of size s, in
a matrix with n ≥ m columns and rows, is seen if x = s/(σ√n) > (m/n)^¼, and its best estimate leaves s²(1 − c²) of s²,
with c the product of the cosines between its true and its observed singular vectors (Gavish and Donoho 2017, arXiv
1405.7511; Benaych-Georges and Nadakuditi 2012, arXiv 1103.2221). `mpu audit` carries both out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mpu_cli.architectures.layout import TensorLayout
from mpu_cli.checkpoint.reader import Checkpoint
from mpu_cli.server.noise import EXTRAPOLATE, Scheme
from mpu_cli.symmetry.transform import as_matrix

SAMPLED = 3  # layers that are looked at; blocks outside layers all are
LARGEST = 256  # singular values of a matrix that are looked at
MOST = 1 << 24  # weights of a matrix that are looked at
# RMS of the rounding error in units of eps times that of the numbers: ulp/√12, for numbers spread evenly over octaves.
ROUNDING = math.sqrt(math.log(4) / 3 / 12)


@dataclass(frozen=True)
class Seen:
    """One block of a publication: its tensors, Σ v², and the noise of the copy with the least, root mean square.

    ``left``: what remains if the noise that cancels is taken off, permanent noise and rounding.
    """

    tensors: Sequence[TensorLayout]
    squares: float
    one_copy: float
    left: float


@dataclass(frozen=True)
class Hidden:
    """What the best known attack would be off by, relative to what fine-tuning changed: of one copy, and of all."""

    one_copy: float
    all_copies: float


def hidden(base: Checkpoint, public: Mapping[str, torch.Tensor], blocks: Mapping[str, Seen]) -> Hidden | None:
    """The estimate for all ``blocks``, from the singular values of ``base − public`` in some of them; None if the two
    do not differ."""
    layers = [name for name, block in blocks.items() if block.tensors[0].layer is not None and block.squares]
    looked_at = {layers[round(i * (len(layers) - 1) / (SAMPLED - 1))] for i in range(SAMPLED)} if layers else set()
    shares = {
        name: _shares(block, [_change(base, public, tensor.name) for tensor in block.tensors])
        for name, block in blocks.items()
        if block.squares and (name in looked_at or name not in layers)
    }
    of_layers = torch.stack([shares[name] for name in looked_at]).mean(0) if looked_at else torch.zeros(2, 2)
    left, together = torch.zeros(2, 2, dtype=torch.float64), 0.0
    for name, block in blocks.items():
        left += block.squares * shares.get(name, of_layers)
        together += block.squares
    return Hidden(*(left.amin(1) / together).sqrt().tolist()) if together else None


def left_of(shared: float, size: float, stored: torch.dtype, noise: Scheme) -> float:
    """The noise that is left in a block once all copies are combined: permanent noise of scale ``shared``, and what
    rounding weights of RMS ``size`` to ``stored`` adds to each copy."""
    weights = noise.weights
    if noise.kind == EXTRAPOLATE and noise.copies > 1:  # an attacker fits a line, which averages rounding besides
        line = torch.tensor([[1.0] * noise.copies, noise.factors], dtype=torch.float64)
        weights = torch.linalg.pinv(line.T)[0]
    rounding = ROUNDING * torch.finfo(stored).eps * size
    return math.hypot(shared, rounding * float(weights.norm()))


def _change(base: Checkpoint, public: Mapping[str, torch.Tensor], name: str) -> tuple[torch.Tensor, float]:
    """Some rows of a tensor's change, float32 (rows, columns), and how many times as many there are."""
    ours, theirs = as_matrix(base.tensor(name)), as_matrix(public[name])
    step = -(-ours.numel() // MOST)
    rows = ours[::step]
    change = rows.float() - theirs[::step].float()
    base.forget_pages(name)
    return change, len(ours) / max(1, len(rows))


def _shares(block: Seen, changes: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """The shares of Σ v² that scaling and singular values leave, with the noise of one copy and of all: (2, 2)."""
    left, total = torch.zeros(2, 2, dtype=torch.float64), 0.0
    for change, times in changes:
        energy = times * float(change.double().square().sum())
        total += energy
        rows, columns = times * change.shape[0], change.shape[1]
        values = None
        if min(change.shape) > 1:
            values = torch.svd_lowrank(change, min(LARGEST, *change.shape))[1].double() * math.sqrt(times)
        for i, noise in enumerate((block.one_copy, block.left)):
            apart = noise**2 * rows * columns
            scaled = energy * apart / (energy + apart) if energy else 0.0
            left[i, 0] += scaled
            left[i, 1] += scaled if values is None else energy - seen_of(values, noise, rows, columns)
    return (left / total).clamp(0, 1) if total else left


def seen_of(values: torch.Tensor, noise: float, rows: float, columns: float) -> float:
    """Σ s²c² over the singular ``values`` that stand out of the noise."""
    if not noise:
        return float(values.square().sum())
    ratio = min(rows, columns) / max(rows, columns)
    x = values / (noise * math.sqrt(max(rows, columns)))
    fourth = x**4
    cosines = (fourth - ratio).clamp(min=0) ** 2 / ((fourth + ratio * x**2) * (fourth + x**2))
    return float((values.square() * torch.where(fourth > ratio, cosines, 0.0)).sum())
