"""How far off a client would be that takes the noise off its copies as well as is known, estimated after publishing.

Noise n of scale σ hides a change v. Without knowing anything of v, the best factor for v + n leaves η/√(1 + η²) of it,
where η is σ over the RMS of v. A few large singular values of v stand out of the noise all the same: one of size s, in
a matrix with n ≥ m columns and rows, is seen if x = s/(σ√n) > (m/n)^¼, and its best estimate leaves s²(1 − c²) of s²,
with c the product of the cosines between its true and its observed singular vectors (Gavish and Donoho 2017, arXiv
1405.7511; Benaych-Georges and Nadakuditi 2012, arXiv 1103.2221). `mpu audit` carries both out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mpu_cli.architectures.depth import without_layers
from mpu_cli.architectures.layout import layout_of
from mpu_cli.checkpoint.dtypes import TORCH
from mpu_cli.checkpoint.reader import Checkpoint
from mpu_cli.models.source import open_model
from mpu_cli.server.pretrained import matching
from mpu_cli.server.publish import Published, PublishPlan
from mpu_cli.server.scheme import Scheme
from mpu_cli.symmetry.transform import as_matrix

SAMPLED = 3  # layers that are looked at; blocks outside layers all are
MAX_SINGULAR_VALUES = 256  # singular values of a matrix that are looked at
FEW_SINGULAR_VALUES = 32  # that are looked at first: if the last of them are in the noise, so are those after them
LAST = 8  # of them, which are taken for TOO_SMALL times what they are: a random projection finds these too small
TOO_SMALL = 1.25
MAX_WEIGHTS = 1 << 22  # weights of a matrix that are looked at
# RMS of the rounding error in units of eps times that of the numbers: ulp/√12, for numbers spread evenly over octaves.
ROUNDING = math.sqrt(math.log(4) / 3 / 12)


@dataclass(frozen=True)
class Hidden:
    """What the best known attack would be off by, relative to what fine-tuning changed: of one copy, and of all."""

    one_copy: float
    all_copies: float


def estimate_attack_error(plan: PublishPlan, published: Published) -> Hidden | None:
    """The estimate for all copies of a publication, from the singular values of what fine-tuning changed in some
    blocks; None if it changed nothing. Of layers that the copies lack an attack knows nothing. Reads those blocks and
    layers."""
    base, layout, publication = plan.base, plan.layout, plan.publication
    unseen = _squares_left_out(plan)
    theirs = matching(base, layout, plan.pretrained) or {}
    blocks = {report.block: report for report in published.blocks if report.copies and report.rms}
    layers = [name for name in blocks if layout.blocks[name][0].layer is not None]
    looked_at = {layers[round(i * (len(layers) - 1) / (SAMPLED - 1))] for i in range(SAMPLED)} if layers else set()
    shared, dtype = published.keys.shared_sigma, publication.dtype

    def shares(name: str) -> torch.Tensor:
        tensors = layout.blocks[name]
        stored = TORCH[dtype or base.checkpoint.tensors[tensors[0].name].dtype]
        copy_noise = min(copy.survived for copy in blocks[name].copies)
        combined_noise = left_of(shared.get(name, 0.0), blocks[name].weights_rms, stored, publication.scheme)
        return _shares(
            (_change(base.checkpoint, theirs, tensor.name) for tensor in tensors), (copy_noise, combined_noise)
        )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the same estimate every time
        block_shares = {name: shares(name) for name in blocks if name in looked_at or name not in layers}
    of_layers = torch.stack([block_shares[name] for name in looked_at]).mean(0) if looked_at else torch.zeros(2, 2)
    residual, together = torch.full((2, 2), unseen, dtype=torch.float64), unseen
    for name, report in blocks.items():
        squares = report.rms**2 * report.weights
        residual += squares * block_shares.get(name, of_layers)
        together += squares
    return Hidden(*(residual.amin(1) / together).sqrt().tolist()) if together else None


def _squares_left_out(plan: PublishPlan) -> float:
    """Σ v² over the tensors of the layers that the copies lack."""
    full_base = plan.full_base
    layout = layout_of(full_base.checkpoint.tensors, full_base.config, full_base.source)
    gone = {t.name for t in layout.parameters} - set(without_layers(layout, plan.publication.omitted).names)
    if not gone or plan.full_pretrained is None:
        return 0.0
    public, total = matching(full_base, layout, plan.full_pretrained) or {}, 0.0
    for name in gone:
        for ours, theirs in zip(full_base.checkpoint.tensor(name), public[name], strict=True):  # a row each
            total += float((ours.double() - theirs.double()).square().sum())
        full_base.checkpoint.forget_pages(name)
    return total


def losses_of_copy(
    probe: Path, plan: PublishPlan, published: Published, columns: str | None = None
) -> dict[str, float]:
    """The loss per answer token on the records in ``probe``, in nats, of the base, of a copy and of the public
    model."""
    from mpu_cli.models.answers import read_answers
    from mpu_cli.models.loading import load

    models = {"the base": plan.full_base, published.copies[0].name: open_model(str(published.copies[0]))}
    models |= {"the public model": plan.full_pretrained} if plan.full_pretrained else {}
    losses = {}
    for name, source in models.items():
        model, tokenizer = load(source, torch.float32, "auto")
        losses[name] = read_answers(probe, tokenizer, columns).loss(model)
    return losses


def left_of(shared: float, size: float, stored: torch.dtype, scheme: Scheme) -> float:
    """The noise that is left in a block once all copies are combined: permanent noise of scale ``shared``, and what
    rounding weights of RMS ``size`` to ``stored`` adds to each copy."""
    rounding = ROUNDING * torch.finfo(stored).eps * size
    return math.hypot(shared, rounding * float(scheme.fitted_weights.norm()))


def _change(base: Checkpoint, public: Mapping[str, torch.Tensor], name: str) -> tuple[torch.Tensor, float]:
    """Some rows of a tensor's change, float32 (rows, columns), and how many times as many there are."""
    ours, theirs = as_matrix(base.tensor(name)), as_matrix(public[name])
    step = -(-ours.numel() // MAX_WEIGHTS)
    rows = ours[::step]
    change = rows.to(torch.float32, copy=True).sub_(theirs[::step])
    base.forget_pages(name)
    return change, len(ours) / max(1, len(rows))


def _shares(changes: Iterable[tuple[torch.Tensor, float]], noises: tuple[float, float]) -> torch.Tensor:
    """The shares of Σ v² that scaling and singular values leave, for each scale of the noise: (2, 2)."""
    residual, total = torch.zeros(2, 2, dtype=torch.float64), 0.0
    for change, times in changes:
        energy = times * float(torch.linalg.vector_norm(change, dtype=torch.float64)) ** 2
        total += energy
        rows, columns = times * change.shape[0], change.shape[1]
        values = _values_above(noises, change, times) if min(change.shape) > 1 else None
        for i, noise in enumerate(noises):
            apart = noise**2 * rows * columns
            scaled = energy * apart / (energy + apart) if energy else 0.0
            residual[i, 0] += scaled
            residual[i, 1] += scaled if values is None else energy - seen_of(values, noise, rows, columns)
    return (residual / total).clamp(0, 1) if total else residual


def _values_above(noises: Sequence[float], change: torch.Tensor, times: float) -> torch.Tensor:
    """The largest singular values of a change of which ``change`` is every ``times``-th row, all that stand out of any
    of the ``noises`` among them, unless these are more than MAX_SINGULAR_VALUES."""
    values = torch.zeros(0)
    for count in (FEW_SINGULAR_VALUES, MAX_SINGULAR_VALUES):
        count = min(count, *change.shape)
        values = torch.svd_lowrank(change, count)[1].double() * math.sqrt(times)
        rest = TOO_SMALL * values[-min(LAST, count) :]
        rows, columns = times * change.shape[0], change.shape[1]
        if count == min(change.shape) or all(noise and not seen_of(rest, noise, rows, columns) for noise in noises):
            break
    return values


def seen_of(values: torch.Tensor, noise: float, rows: float, columns: float) -> float:
    """Σ s²c² over the singular ``values`` that stand out of the noise."""
    if not noise:
        return float(values.square().sum())
    ratio = min(rows, columns) / max(rows, columns)
    x = values / (noise * math.sqrt(max(rows, columns)))
    fourth = x**4
    cosines = (fourth - ratio).clamp(min=0) ** 2 / ((fourth + ratio * x**2) * (fourth + x**2))
    return float((values.square() * torch.where(fourth > ratio, cosines, 0.0)).sum())
