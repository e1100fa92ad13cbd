"""Aggregating: from the clients' deltas back to the server's model. Streams; holds no model.

Δ̄ = Σ_k w_k T_k⁻¹(Δ_k) and θ_r = θ_{r−1} + η·Δ̄, with the weights w_k of its noise (docs/design.md): harmonic
ones, w_k ∝ 1/α_k, for the paper's zero-sum noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from mpu_cli.architectures.layout import Layout, TensorLayout
from mpu_cli.checkpoint.dtypes import NAME, OPTION, all_finite, compute_dtype
from mpu_cli.checkpoint.fingerprint import combine, hash_of, piece_digests
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.checkpoint.reader import quoted_list
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.checkpoint.writer import CheckpointWriter
from mpu_cli.errors import MpuError
from mpu_cli.manifest import MANIFEST_NAME, VERSION, as_metadata
from mpu_cli.models.files import carry_small_files, model_specs, write_json
from mpu_cli.models.source import Model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.publishing import Aggregating
from mpu_cli.server.agreement import Aggregation, agreement
from mpu_cli.server.card import CARD, card
from mpu_cli.server.deltas import Delta, check_base, check_finite, check_norms, outliers_of
from mpu_cli.server.inverse import Change, Undoing
from mpu_cli.server.keys import Keys
from mpu_cli.server.round import AggregatePlan
from mpu_cli.server.server_lr import settle_server_lr
from mpu_cli.symmetry.transform import TensorMap, as_matrix, measured_slices, row_slices

# For one slice: the deltas' inner products (m, m; upper triangle 0) and, if measured, the squared norms of the update's
# rounding error and of the update (2,). Lists, because small tensors that outlive large buffers fragment the heap.
_Sums = tuple[list[list[float]], list[float]]

Begun = TypeVar("Begun")


class Changes(Protocol):
    """What is added up: for each tensor a change from each of ``deltas``, in the base's coordinates."""

    deltas: Sequence[Delta]

    def changes(self, tensor: TensorLayout) -> Sequence[Change | None]: ...


def aggregate(plan: AggregatePlan, *, observer: Observer = SILENT) -> Aggregation:
    """Write θ + η·Δ̄ of a round with one data owner.

    Raises MpuError if a norm is above ``--max-norm``, if the base is not the one that was published, for NaN and Inf,
    if no step suits ``--max-rise`` and, unless ``plan.force``, if the noise does not cancel.
    """
    [owner], [weights] = plan.owners, plan.weights
    undoing = Undoing(owner.deltas, owner.keys, plan.layout)
    with Transaction(force=plan.force) as transaction:
        folder = transaction.add(plan.out, directory=True)

        def write(into: Path, how: Aggregating) -> tuple[torch.Tensor, dict[str, Any]]:
            return write_model(plan.base, undoing, plan.layout, weights, [owner.keys], how, into, observer)

        options, step = settle_server_lr(plan.base, plan.options, write, plan.out, observer)
        gram, facts = write(folder, options)
        check_norms(gram, owner.deltas, options.max_norm, weights * float(options.server_lr))
        manifests = {delta.copy: delta.manifest for delta in owner.deltas}
        result = replace(agreement(plan.out, gram, owner.keys, manifests), **facts, step=step)
        result.check(plan.force)
        (folder / CARD).write_text(card(plan.base, owner.keys, result, "model"), encoding="utf-8")
    return result


def write_model(
    base: Model,
    undoing: Changes,
    layout: Layout,
    weights: torch.Tensor,
    publications: Sequence[Keys],
    options: Aggregating,
    folder: Path,
    observer: Observer = SILENT,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Write θ + η·Σ_k w_k·(change k) into ``folder``, except for the model card; θ is what all ``publications`` are of.

    Returns the inner products of the changes, float64 (k, k), and what else became known, by fields of ``Aggregation``.
    """
    source = base.checkpoint
    dtype = OPTION[options.dtype] if options.dtype else None
    specs = model_specs(source, layout, dtype)
    observer.stage("aggregate", source.nbytes)
    rounds = [{"run": keys.run, "round": keys.round} for keys in publications]
    of_one = rounds[0] if len(rounds) == 1 else {"owners": rounds}
    facts: dict[str, object] = {"format": "mpu-model", "version": VERSION, **of_one}
    if any(keys.publication.shared_kappa for keys in publications):
        facts["permanent"] = True  # or the next round would be published without, unnoticed
    deltas = undoing.deltas
    gram = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
    rounding = torch.zeros(2, dtype=torch.float64)
    digests: dict[str, list[bytes]] = {}
    outliers: list[tuple[str, int, float]] = []
    hashed = hash_of(publications[0].base.fingerprint)
    with ExitStack() as stack:
        writer = stack.enter_context(CheckpointWriter(folder, specs, as_metadata(facts), like=source))
        pool = stack.enter_context(worker_pool())

        def begin(tensor: TensorLayout) -> tuple[Iterator[bytes], list[Future[_Sums]]]:
            digesting = piece_digests(source, tensor.name, pool, hashed)
            if not tensor.constant:
                before = source.tensor(tensor.name)
                return digesting, add_up(pool, tensor, before, undoing, weights * float(options.server_lr), writer)
            writer.tensor(tensor.name).copy_(source.tensor(tensor.name))
            return digesting, []

        for tensor, (digesting, adding) in one_ahead(begin, layout.tensors.values()):
            name = tensor.name
            digests[name] = list(digesting)
            if adding:
                products, squares = sums_of(adding)
                gram += products
                rounding += squares
                outliers += outliers_of(name, products, deltas)
            for checkpoint in (source, *(delta.checkpoint for delta in deltas)):
                if name in checkpoint.tensors:
                    checkpoint.forget_pages(name)
            writer.forget_pages(name)
            observer.advance(source.tensors[name].nbytes)
        if layout.alias:
            digests[layout.alias] = list(piece_digests(source, layout.alias, pool, hashed))
        digest = combine(source.tensors, digests, hashed)
        for keys in publications:
            check_base(base, keys, pool, digest if hash_of(keys.base.fingerprint) == hashed else None)
    lost = float((rounding[0] / rounding[1]).sqrt()) if rounding[1] > 0 else 0.0
    if behind := carry_small_files(base, folder, dtype):
        observer.note(f"{base.folder}: the result does not get {quoted_list(behind)}")
    write_json(folder / MANIFEST_NAME, facts)
    return gram, {"rounding": lost, "outliers": tuple(outliers)}


def one_ahead(
    begin: Callable[[TensorLayout], Begun], tensors: Iterable[TensorLayout]
) -> Iterator[tuple[TensorLayout, Begun]]:
    """Yield each tensor and its ``begin(tensor)`` once the next one has begun too, so that no core is idle."""
    waiting: list[tuple[TensorLayout, Begun]] = []
    for tensor in tensors:
        waiting.append((tensor, begin(tensor)))
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def sums_of(adding: Sequence[Future[_Sums]]) -> tuple[torch.Tensor, torch.Tensor]:
    """All slices of a tensor together: inner products, float64 (m, m), and squares of what rounding lost, (2,)."""
    parts = zip(*(future.result() for future in adding), strict=True)
    products, squares = (torch.tensor(part, dtype=torch.float64).sum(0) for part in parts)
    return products + products.tril(-1).T, squares


def add_up(
    pool: Executor,
    tensor: TensorLayout,
    source: torch.Tensor | None,
    undoing: Changes,
    rates: torch.Tensor,
    writer: CheckpointWriter,
) -> list[Future[_Sums]]:
    """Start writing ``source`` (None: zeros) plus the changes to one tensor times their rates; see ``sums_of``."""
    target = as_matrix(writer.tensor(tensor.name))
    before = torch.zeros((), dtype=target.dtype).expand(target.shape) if source is None else as_matrix(source)
    changes = undoing.changes(tensor)
    present_changes = [change for change in changes if change is not None]
    dtype = compute_dtype(
        *(NAME[d] for d in (before.dtype, target.dtype, *(d for c in present_changes for d in c.dtypes)))
    )
    slices = row_slices([change.mapping for change in present_changes] or [TensorMap(None, None)], *before.shape)
    looked_at = measured_slices(len(slices))
    rounded_rates = rates.to(dtype).tolist()

    def work(start: int, stop: int, measured: bool) -> _Sums:
        undone = [None if c is None else c.rows(start, stop, dtype).to(dtype).reshape(-1) for c in changes]
        gram = [[0.0] * len(changes) for _ in changes]  # lower triangle
        for j, undone_j in enumerate(undone):
            for k, other in enumerate(undone[: j + 1]):
                if undone_j is not None and other is not None:
                    gram[j][k] = float(torch.dot(undone_j, other))
        clean = before[start:stop].to(dtype)
        update = torch.zeros_like(clean)
        for k, (part, rate) in enumerate(zip(undone, rounded_rates, strict=True)):
            if part is not None:
                check_finite(part, gram[k][k], undoing.deltas[k], tensor.name)
                update.view(-1).add_(part, alpha=rate)
        stored = (clean + update).to(target.dtype)
        if not all_finite(stored):
            raise MpuError(
                f"{tensor.name!r}: overflows its dtype after the update", "lower --server-lr or choose a wider --dtype"
            )
        target[start:stop] = stored
        if not measured:
            return gram, [0.0, 0.0]
        lost = stored.to(dtype) - clean - update
        return gram, [float(lost.double().square().sum()), float(update.double().square().sum())]

    pool.submit(writer.populate, tensor.name)
    return [pool.submit(work, *bounds, i in looked_at) for i, bounds in enumerate(slices)]
