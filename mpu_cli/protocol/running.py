"""A round's deltas one at a time, as they arrive: Σ_k w_k T_k⁻¹(Δ_k) so far, in a file; each delta can then be deleted.

    DIR/sums.safetensors   the sum, float32 (float64 if a delta is)
    DIR/mpu.json           which copies are in it, their norms, how each fits the sum of those before it

The sum is rewritten whole for each delta, so an interruption leaves the one before.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import Count, Document, Finite, Hexadecimal, RunName, Scale, Word, Words, read_document
from mpu_cli.files.manifest import MANIFEST_NAME, VERSION, DeltaManifest
from mpu_cli.files.reader import Checkpoint, open_checkpoint, worker_pool
from mpu_cli.files.resumption import alone_beside
from mpu_cli.files.transaction import Transaction, restore
from mpu_cli.files.writer import CheckpointWriter, TensorSpecs
from mpu_cli.model.layout import Layout, TensorLayout, without_layers
from mpu_cli.model.source import Model, write_json
from mpu_cli.model.transform import TensorMap, as_matrix
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.publishing import Aggregating
from mpu_cli.protocol.combine import CARD, add_up, card, one_ahead, sums_of, write_model
from mpu_cli.protocol.deltas import Change, Delta, Full, Undoing, check_fits, check_norms, names_in_base
from mpu_cli.protocol.keys import Keys
from mpu_cli.protocol.round import Aggregation, agreement, restoring_step, settle_server_lr

SUMS, FACTS = "sums.safetensors", MANIFEST_NAME


@dataclass(frozen=True)
class Part:
    """What is kept of a delta: its copy, a digest of its tensors' names, its norm, and its cosine with the sum of those
    before it (None for the first)."""

    copy: Count
    names: Hexadecimal
    norm: Scale
    cosine: Finite | None
    algorithm: Word
    trained: Words | None
    until_done: bool = False


class SumFacts(Document):
    """What ``mpu.json`` beside a running sum says of it."""

    run: RunName
    round: Count
    copy_ids: list[Word]
    parts: list[Part]
    norm: Scale


@dataclass(frozen=True)
class Running:
    """A weighted sum of undone deltas in ``folder``: ``parts`` says which are in it, ``norm`` is its L2 norm,
    ``total_copies`` how many copies the publication has."""

    folder: Path
    parts: tuple[Part, ...]
    norm: float
    total_copies: int = 0

    @property
    def copies(self) -> list[int]:
        return sorted(part.copy for part in self.parts)

    @property
    def missing(self) -> list[int]:
        return sorted(set(range(1, self.total_copies + 1)) - set(self.copies))


class _WithSum:
    """The changes of deltas, after that of the sum so far if there is one."""

    def __init__(self, sum_checkpoint: Checkpoint | None, undoing: Undoing | None):
        self._sum_checkpoint, self._undoing = sum_checkpoint, undoing
        summed = [Delta(c.path, c, DeltaManifest(None, "", inverted=True)) for c in (sum_checkpoint,) if c]
        self.deltas: Sequence[Delta] = [*summed, *(undoing.deltas if undoing else [])]

    def changes(self, tensor: TensorLayout) -> Sequence[Change | None]:
        changes: list[Change | None] = []
        if self._sum_checkpoint:
            changes.append(Full(TensorMap(None, None), as_matrix(self._sum_checkpoint.tensor(tensor.name))))
        if self._undoing:
            changes += self._undoing.changes(tensor)
        return changes


def read_running(folder: Path, keys: Keys) -> Running:
    """The sum in ``folder``, of no delta yet if there is none. Raises MpuError if it is of another publication."""
    restore(folder)
    path = folder / FACTS
    if not path.exists():
        if folder.exists() and any(folder.iterdir()):
            raise MpuError(f"{folder}: already exists and holds no running sum", "choose another folder")
        return Running(folder, (), 0.0, keys.copies)
    facts = read_document(SumFacts, path, "remove the folder, and ask for the deltas again")
    if (facts.run, facts.round, facts.copy_ids) != (keys.run, keys.round, list(keys.copy_ids)):
        raise MpuError(f"{folder}: holds the sum of another publication or round", "use another folder for each round")
    return Running(folder, tuple(facts.parts), facts.norm, keys.copies)


def add(
    base: Model, delta: Delta, keys: Keys, options: Aggregating, folder: Path, observer: Observer = SILENT
) -> Running:
    """Add a delta to the sum in ``folder``.

    Waits for other commands that add to it. Raises MpuError if it is in it already, does not fit the base, holds NaN or
    Inf, or is above ``--max-norm``.
    """
    with alone_beside(folder, observer):
        return _add(base, delta, keys, options, folder, observer)


def _add(base: Model, delta: Delta, keys: Keys, options: Aggregating, folder: Path, observer: Observer) -> Running:
    before = read_running(folder, keys)
    if delta.copy in before.copies:
        raise MpuError(f"{delta.path}: copy {delta.copy} is already in {folder}", "each copy counts once")
    layout = check_fits(base, [delta], keys, options)
    held_names = names_in_base(delta, without_layers(layout, keys.publication.omitted))
    names = hashlib.sha256("\n".join(sorted(held_names)).encode()).hexdigest()
    if before.parts and names != before.parts[0].names:
        raise MpuError(
            f"{delta.path}: tensors differ from those of copy {before.parts[0].copy}",
            "train all copies of a round with the same options",
        )
    sum_checkpoint = open_checkpoint(folder / SUMS) if before.parts else None
    summed = _WithSum(sum_checkpoint, Undoing([delta], keys, layout))
    weight = float(keys.publication.scheme.weights[delta.copy - 1])
    rates = torch.tensor([1.0, weight] if sum_checkpoint else [weight], dtype=torch.float64)
    with Transaction(force=True) as transaction:
        fresh = transaction.add(folder, directory=True)
        gram = _write_sum(base, layout, summed, rates, fresh, observer)
        check_norms(gram[-1:, -1:], [delta], options.max_norm)
        norm = math.sqrt(max(0.0, float(rates @ gram @ rates)))
        delta_norm = math.sqrt(float(gram[-1, -1]))
        cosine = (
            float(gram[0, -1]) / (before.norm * delta_norm) if sum_checkpoint and before.norm and delta_norm else None
        )
        manifest = delta.manifest
        part = Part(delta.copy, names, delta_norm, cosine, manifest.algorithm, manifest.trained, manifest.until_done)
        after = Running(folder, (*before.parts, part), norm, keys.copies)
        write_json(
            fresh / FACTS,
            {"format": "mpu-sums", "version": VERSION, "run": keys.run, "round": keys.round,
             "copy_ids": list(keys.copy_ids), "norm": norm, "parts": [asdict(each) for each in after.parts]},
        )  # fmt: skip
    return after


def _write_sum(
    base: Model, layout: Layout, summed: _WithSum, rates: torch.Tensor, folder: Path, observer: Observer
) -> torch.Tensor:
    """Write the new sum; the inner products of what is added, float64."""
    dtype = "F64" if any(i.dtype == "F64" for d in summed.deltas for i in d.checkpoint.tensors.values()) else "F32"
    shapes = {tensor.name: base.checkpoint.tensors[tensor.name].shape for tensor in layout.parameters}
    specs: TensorSpecs = {name: (dtype, shape) for name, shape in shapes.items()}
    gram = torch.zeros(len(summed.deltas), len(summed.deltas), dtype=torch.float64)
    observer.stage("add", sum(base.checkpoint.tensors[name].nbytes for name in shapes))
    with ExitStack() as stack:
        writer = stack.enter_context(CheckpointWriter(folder / SUMS, specs, {}))
        pool = stack.enter_context(worker_pool())
        for tensor, adding in one_ahead(lambda t: add_up(pool, t, None, summed, rates, writer), layout.parameters):
            gram += sums_of(adding)[0]
            for checkpoint in (delta.checkpoint for delta in summed.deltas):
                if tensor.name in checkpoint.tensors:
                    checkpoint.forget_pages(tensor.name)
            writer.forget_pages(tensor.name)
            observer.advance(base.checkpoint.tensors[tensor.name].nbytes)
    return gram


def finish(
    base: Model, keys: Keys, options: Aggregating, folder: Path, *, out: Path, force: bool = False,
    observer: Observer = SILENT,
) -> Aggregation:  # fmt: skip
    """Write the model from a sum that holds every copy, and remove the sum.

    Of more than two copies, the angles between any two are not known any more: ``pairwise`` is the smallest cosine of
    a delta with the sum of those before it, and the error cannot be estimated.
    """
    with alone_beside(folder, observer):
        return _finish(base, keys, options, folder, out, force, observer)


def _finish(
    base: Model, keys: Keys, options: Aggregating, folder: Path, out: Path, force: bool, observer: Observer
) -> Aggregation:
    running = read_running(folder, keys)
    if missing := running.missing:
        raise MpuError(f"{folder}: lacks the delta of copy {', '.join(map(str, missing))}")
    layout = check_fits(base, [], keys, options)
    summed = _WithSum(open_checkpoint(folder / SUMS), None)
    with Transaction(force=force) as transaction:
        target = transaction.add(out, directory=True)
        ones = torch.ones(1, dtype=torch.float64)

        def write(into: Path, how: Aggregating) -> tuple[torch.Tensor, dict[str, Any]]:
            return write_model(base, summed, layout, ones, [keys], how, into, observer)

        options, step = settle_server_lr(base, options, write, out, observer, default=lambda: _default_step(running))
        gram, facts = write(target, options)
        check_norms(gram, summed.deltas, options.max_norm, ones * options.rate)
        result = replace(
            _agreement(running, keys, out),
            rounding=facts["rounding"],
            planted=facts["planted"][0],
            step=step,
            rate=options.rate,
        )
        result.check(force)
        (target / CARD).write_text(card(base, keys, result, "model"), encoding="utf-8")
    shutil.rmtree(folder)
    return result


def _default_step(running: Running) -> float:
    """As ``default_step`` of all deltas at once."""
    if not all(part.until_done for part in running.parts):
        return 1.0
    return restoring_step([part.norm**2 for part in running.parts], running.norm**2)


def _agreement(running: Running, keys: Keys, out: Path) -> Aggregation:
    """How the copies agree, as far as it is known."""
    m = keys.copies
    gram = torch.full((m, m), math.nan, dtype=torch.float64)
    by_copy = {part.copy: part for part in running.parts}
    for part in running.parts:
        gram[part.copy - 1, part.copy - 1] = part.norm**2
    cosines = [part.cosine for part in running.parts if part.cosine is not None]
    if m == 2 and cosines:  # the first delta's direction is the sum's
        sign = math.copysign(1.0, float(keys.publication.scheme.weights[running.parts[0].copy - 1]))
        gram[0, 1] = gram[1, 0] = sign * cosines[0] * by_copy[1].norm * by_copy[2].norm
    ordered_parts = sorted(by_copy.items())
    manifests = {copy: DeltaManifest(None, part.algorithm, trained=part.trained) for copy, part in ordered_parts}
    result = agreement(out, gram, keys, manifests, {})
    return result if m == 2 else replace(result, norm=running.norm, pairwise=min(cosines, default=1.0))
