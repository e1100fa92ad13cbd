"""A round as it came back: each data owner's publication with the deltas of its copies, and the plan to aggregate them.

``plan_aggregate`` reads headers only and makes every check that needs no numbers; ``aggregate``, ``aggregate_adapter``
and ``aggregate_owners`` do what a plan says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mpu_cli.architectures.layout import Layout
from mpu_cli.checkpoint.dtypes import OPTION
from mpu_cli.checkpoint.reader import open_checkpoint, quoted_list
from mpu_cli.checkpoint.writer import nbytes_of
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.manifest import TAGS, VERSIONS, delta_manifest
from mpu_cli.models.files import model_specs
from mpu_cli.models.source import Model
from mpu_cli.options.publishing import AUTO, Aggregating
from mpu_cli.server.deltas import Delta, check_round, delta_paths, open_deltas, trained_differently
from mpu_cli.server.keys import Keys


@dataclass(frozen=True)
class Owner:
    """A data owner's publication, and the deltas that came back."""

    keys: Keys
    deltas: list[Delta]


@dataclass(frozen=True)
class AggregatePlan:
    """What aggregating a round will read and write.

    ``weights``: of each owner's deltas, float64 (copies,); ``as_adapter``: write a peft adapter, not a model;
    ``force``: replace what exists, and aggregate what is known not to belong together.
    """

    base: Model
    owners: tuple[Owner, ...]
    options: Aggregating
    out: Path
    layout: Layout
    weights: tuple[torch.Tensor, ...]
    as_adapter: bool = False
    force: bool = False

    @property
    def deltas(self) -> list[Delta]:
        return [delta for owner in self.owners for delta in owner.deltas]

    @property
    def publications(self) -> list[Keys]:
        return [owner.keys for owner in self.owners]

    @property
    def nbytes(self) -> int:
        """The size of the model that is written."""
        dtype = OPTION[self.options.dtype] if self.options.dtype else None
        return nbytes_of(model_specs(self.base.checkpoint, self.layout, dtype))


def owners_of(paths: Sequence[Path], publications: Sequence[Keys]) -> list[Owner]:
    """The deltas in ``paths``, by publication. Raises MpuError if one belongs to none of them, or two are the same."""
    if len(publications) == 1:
        return [Owner(publications[0], open_deltas(paths, publications[0]))]
    ids = [keys.copy_ids for keys in publications]
    if len(set(ids)) < len(ids):
        raise MpuError("--keys: the same publication is given twice", "give each key file once")
    mine: list[list[Path]] = [[] for _ in publications]
    for path in delta_paths(paths):
        origin = delta_manifest(open_checkpoint(path, links=False).metadata, path).origin
        indices = [i for i, copy_ids in enumerate(ids) if origin and origin.copy_id in copy_ids]
        if not indices:
            raise MpuError(f"{path}: belongs to none of these publications", "give its keys, too, or leave it out")
        mine[indices[0]].append(path)
    return [Owner(keys, open_deltas(owner_paths, keys)) for keys, owner_paths in zip(publications, mine, strict=True)]


def plan_aggregate(
    base: Model,
    owners: Sequence[Owner],
    options: Aggregating,
    *,
    out: Path,
    as_adapter: bool = False,
    force: bool = False,
) -> AggregatePlan:
    """The plan to write θ + η·Σ_owners Δ̄ to ``out``.

    Raises UsageError or MpuError for ``as_adapter`` where no adapter can hold the update, MpuError if a copy's delta is
    missing or does not fit the base and, unless ``force``, if the tags of an owner's deltas say that they were trained
    differently; UsageError if a number is out of range.
    """
    if as_adapter:
        _check_adapter(owners, options)
    rounds = [check_round(base, owner.deltas, owner.keys, options) for owner in owners]
    for owner in owners if not force else ():
        paths = {delta.copy: delta.path for delta in owner.deltas}
        for earlier_copy, other, tag in trained_differently(
            {delta.copy: delta.manifest.trained for delta in owner.deltas}
        ):
            if tag != VERSIONS:  # which may make no difference: what it makes shows in the estimate
                raise MpuError(
                    f"{paths[other]}: was trained with different {TAGS.get(tag, tag)} than {paths[earlier_copy]}, so "
                    "the noise does not cancel",
                    "ask for both to be trained alike, or use --force",
                )
    return AggregatePlan(
        base, tuple(owners), options, out, rounds[0][0], tuple(weights for _, weights in rounds), as_adapter, force
    )  # fmt: skip


def _check_adapter(owners: Sequence[Owner], options: Aggregating) -> None:
    """Raise UsageError or MpuError where no adapter can hold the update."""
    if len(owners) > 1:
        raise UsageError("--as-adapter: one adapter holds one owner's update", "aggregate each owner's alone")
    if options.server_lr == AUTO:
        raise UsageError(
            "--server-lr auto: finds the step for a model", "aggregate to one first, and name its step here"
        )
    for delta in owners[0].deltas:
        if delta.manifest.kind != "lora":
            raise MpuError(
                f"{delta.path}: is a full delta, but --as-adapter needs LoRA deltas",
                "make them with unlearn --lora-rank",
            )
        if stacked := [n for n, info in delta.checkpoint.tensors.items() if len(info.shape) > 2 or ".experts." in n]:
            raise MpuError(
                f"{delta.path}: adapts experts ({quoted_list(stacked)}), which --as-adapter cannot write",
                "aggregate to a model, or train with --lora-targets other than the experts",
            )
