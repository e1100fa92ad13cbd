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
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.publishing import Aggregating
from mpu_cli.server.aggregate import write_model
from mpu_cli.server.agreement import Aggregation, agreement
from mpu_cli.server.deltas import Delta, check_norms
from mpu_cli.server.inverse import Change, Undoing
from mpu_cli.server.keys import Keys
from mpu_cli.server.round import AggregatePlan
from mpu_cli.server.server_lr import ServerStep, settle_server_lr


@dataclass(frozen=True)
class Combined:
    """What ``aggregate_owners`` made: each owner's update, and the cosines between them, float64 (owners, owners)."""

    path: Path
    publications: list[Keys]
    updates: list[Aggregation]
    cosines: torch.Tensor
    rounding: float
    step: ServerStep | None = None

    def warnings(self) -> list[str]:
        """What is probably wrong with each owner's update, a sentence each."""
        return [f"run {keys.run}: {text}" for keys, update in zip(self.publications, self.updates, strict=True)
                for text in update.warnings()]  # fmt: skip


class _Together:
    """The changes of all owners' deltas, one after the other."""

    def __init__(self, undoings: Sequence[Undoing]):
        self._undoings = undoings
        self.deltas: Sequence[Delta] = [delta for undoing in undoings for delta in undoing.deltas]

    def changes(self, tensor: TensorLayout) -> Sequence[Change | None]:
        return [change for undoing in self._undoings for change in undoing.changes(tensor)]


def aggregate_owners(plan: AggregatePlan, *, observer: Observer = SILENT) -> Combined:
    """Write θ + η·Σ_owners Δ̄.

    Raises MpuError as ``aggregate`` does, for whichever owner it is, and if the publications are of different bases.
    """
    owners, options, weights = plan.owners, plan.options, torch.cat(plan.weights)
    together = _Together([Undoing(owner.deltas, owner.keys, plan.layout) for owner in owners])
    with Transaction(force=plan.force) as transaction:
        folder = transaction.add(plan.out, directory=True)

        def write(into: Path, how: Aggregating) -> tuple[torch.Tensor, dict[str, Any]]:
            return write_model(plan.base, together, plan.layout, weights, plan.publications, how, into, observer)

        options, step = settle_server_lr(plan.base, options, write, plan.out, observer)
        gram, facts = write(folder, options)
        # Of all owners together, too: each below the bound, they may still add up to more.
        check_norms(gram, together.deltas, options.max_norm, weights * float(options.server_lr))
        updates, picked, offset = [], torch.zeros(len(owners), len(weights), dtype=torch.float64), 0
        for i, owner in enumerate(owners):
            owner_slice = slice(offset, offset := offset + len(owner.deltas))
            picked[i, owner_slice] = weights[owner_slice]
            check_norms(
                gram[owner_slice, owner_slice],
                owner.deltas,
                options.max_norm,
                weights[owner_slice] * float(options.server_lr),
            )
            manifests = {delta.copy: delta.manifest for delta in owner.deltas}
            result = replace(
                agreement(plan.out, gram[owner_slice, owner_slice], owner.keys, manifests), rounding=facts["rounding"]
            )
            result.check(plan.force)
            updates.append(result)
    between = picked @ gram @ picked.T
    norms = between.diagonal().clamp(min=0).sqrt()
    return Combined(
        plan.out, plan.publications, updates, between / (norms[:, None] * norms[None, :]), facts["rounding"], step
    )
