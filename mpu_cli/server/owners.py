"""Several data owners in one round: each unlearned on copies of its own publication of the same base.

Each owner's update is combined from its own copies' deltas; the model is the base plus the sum of the updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mpu_cli.architectures.layout import TensorLayout
from mpu_cli.checkpoint.reader import open_checkpoint
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.errors import MpuError
from mpu_cli.manifest import delta_manifest
from mpu_cli.models.source import Model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.publishing import Aggregating
from mpu_cli.server.aggregate import write_model
from mpu_cli.server.agreement import Aggregation, agreement
from mpu_cli.server.deltas import Delta, check_norms, check_round, delta_paths, open_deltas
from mpu_cli.server.keys import Keys
from mpu_cli.server.step import Step, settled
from mpu_cli.server.undo import Change, Undoing


@dataclass(frozen=True)
class Owner:
    """A data owner's publication, and the deltas that came back."""

    keys: Keys
    deltas: list[Delta]


@dataclass(frozen=True)
class Combined:
    """What ``aggregate_owners`` made: each owner's update, and the cosines between them, float64 (owners, owners)."""

    path: Path
    updates: list[Aggregation]
    cosines: torch.Tensor
    rounding: float
    step: Step | None = None


class _Together:
    """The changes of all owners' deltas, one after the other."""

    def __init__(self, undoings: Sequence[Undoing]):
        self._undoings = undoings
        self.deltas: Sequence[Delta] = [delta for undoing in undoings for delta in undoing.deltas]

    def changes(self, tensor: TensorLayout) -> Sequence[Change | None]:
        return [change for undoing in self._undoings for change in undoing.changes(tensor)]


def owners_of(paths: Sequence[Path], publications: Sequence[Keys]) -> list[Owner]:
    """The deltas in ``paths``, by publication. Raises MpuError if one belongs to none of them, or two are the same."""
    ids = [keys.copy_ids for keys in publications]
    if len(set(ids)) < len(ids):
        raise MpuError("--keys: the same publication is given twice", "give each key file once")
    mine: list[list[Path]] = [[] for _ in publications]
    for path in delta_paths(paths):
        origin = delta_manifest(open_checkpoint(path, links=False).metadata, path).origin
        found = [i for i, known in enumerate(ids) if origin and origin.copy_id in known]
        if not found:
            raise MpuError(f"{path}: belongs to none of these publications", "give its keys, too, or leave it out")
        mine[found[0]].append(path)
    return [Owner(keys, open_deltas(own, keys)) for keys, own in zip(publications, mine, strict=True)]


def aggregate_owners(
    base: Model,
    owners: Sequence[Owner],
    options: Aggregating,
    *,
    out: Path,
    force: bool = False,
    observer: Observer = SILENT,
) -> Combined:
    """Write θ + η·Σ_owners Δ̄ to the model directory ``out``.

    Raises MpuError as ``aggregate`` does, for whichever owner it is, and if the publications are of different bases.
    """
    rounds = [check_round(base, owner.deltas, owner.keys, options) for owner in owners]
    layout = rounds[0][0]
    weights = torch.cat([weights for _, weights in rounds])
    together = _Together([Undoing(owner.deltas, owner.keys, layout) for owner in owners])
    with Transaction(force=force) as transaction:
        folder = transaction.add(out, directory=True)
        publications = [owner.keys for owner in owners]

        def write(into: Path, how: Aggregating) -> tuple[torch.Tensor, dict[str, Any]]:
            return write_model(base, together, layout, weights, publications, how, into, observer)

        options, step = settled(base, options, write, out, observer)
        gram, facts = write(folder, options)
        updates, picked, first = [], torch.zeros(len(owners), len(weights), dtype=torch.float64), 0
        for i, owner in enumerate(owners):
            own = slice(first, first := first + len(owner.deltas))
            picked[i, own] = weights[own]
            check_norms(gram[own, own], owner.deltas, options.max_norm, weights[own] * float(options.server_lr))
            manifests = {delta.copy: delta.manifest for delta in owner.deltas}
            result = agreement(out, gram[own, own], owner.keys, manifests)
            updates.append(replace(result, rounding=facts["rounding"]))
    between = picked @ gram @ picked.T
    norms = between.diagonal().clamp(min=0).sqrt()
    return Combined(out, updates, between / (norms[:, None] * norms[None, :]), facts["rounding"], step)
