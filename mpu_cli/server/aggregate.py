"""Inverting and aggregating: from the clients' deltas back to the server's model. Streams; holds no model.

Δ̄ = Σ_k w_k T_k⁻¹(Δ_k) and θ_r = θ_{r−1} + η·Δ̄, with the weights w_k of the publication's noise (DESIGN §3): harmonic
ones, w_k ∝ 1/α_k, for the paper's zero-sum noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from mpu_cli.architectures.layout import Layout, TensorLayout, layout_of
from mpu_cli.checkpoint.dtypes import NAME, all_finite, compute_dtype
from mpu_cli.checkpoint.fingerprint import combine, fingerprint, piece_digests
from mpu_cli.checkpoint.header import FLOATS
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.checkpoint.reader import Checkpoint, listed, open_checkpoint
from mpu_cli.checkpoint.source import Model, open_model
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.checkpoint.writer import MAX_SHARD, CheckpointWriter, Plan, plan_bytes
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.manifest import (
    LEFT,
    MANIFEST_NAME,
    RIGHT,
    VERSION,
    DeltaManifest,
    as_metadata,
    delta_facts,
    delta_manifest,
)
from mpu_cli.server.estimate import ErrorEstimate, error_estimate
from mpu_cli.server.keys import Keys
from mpu_cli.server.noise import Scheme
from mpu_cli.server.publish import make_transform, measured_slices, model_plan, write_json, write_small_files
from mpu_cli.server.randomness import Randomness
from mpu_cli.symmetry.transform import TensorMap, as_matrix, row_slices

Progress = Callable[[int], None]

# Over one slice: the deltas' inner products (m, m; the upper half 0), and, where that is measured, the squares of what
# storage lost of the update and of the update (2,). Lists: small tensors that outlive large buffers fragment the heap.
_Sums = tuple[list[list[float]], list[float]]

Begun = TypeVar("Begun")

LOST = 0.3  # share of the update's norm that rounding may take before it is worth a warning
OUTLIER = 10.0  # times another copy's change of the same tensor, from which on it is worth a warning


@dataclass(frozen=True)
class Delta:
    """A client's result: its tensors and what they belong to."""

    path: Path
    checkpoint: Checkpoint
    manifest: DeltaManifest

    @property
    def copy(self) -> int:
        return self.manifest.origin.copy  # open_deltas lets no delta without an origin through


@dataclass(frozen=True)
class Aggregation:
    """What ``aggregate`` made and how the copies agree.

    ``norms``: ‖T_k⁻¹(Δ_k)‖ by copy; ``cosines``: with Δ̄, by copy; ``pairwise``: the smallest cosine between two
    copies; ``norm``: ‖Δ̄‖; ``rounding``: ‖stored − θ − ηΔ̄‖ / ‖ηΔ̄‖, what the dtype of storage lost of the update, read
    off a slice or two of each tensor; ``error``: how far Δ̄ is from the clean update; ``outliers``: tensors of which one
    copy's change is far larger than the others', with the copy and by what factor; ``unlike``: two copies that were
    trained differently, and in what, by the tags in their deltas.
    """

    path: Path
    norms: list[float]
    cosines: list[float]
    pairwise: float
    norm: float
    rounding: float
    error: ErrorEstimate
    outliers: tuple[tuple[str, int, float], ...] = ()
    unlike: tuple[tuple[int, int, str], ...] = ()


def published_base(keys: Keys, source: str | None, config: Path | None) -> Model:
    """The model that was published: ``source`` if given, else where the keys say it was."""
    if source is not None:
        return open_model(source, config)
    try:
        return open_model(keys.base.path, config or Path(keys.base.config))
    except MpuError as error:
        raise MpuError(f"the base that was published is not where it was ({error}); name it with --base") from error


def delta_paths(paths: Iterable[Path]) -> list[Path]:
    """The deltas that ``paths`` name: files, sharded directories, or directories of these."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir() and not list(path.glob("*.index.json")):
            inside = sorted(
                p for p in path.iterdir() if not p.name.startswith(".") and (p.suffix == ".safetensors" or p.is_dir())
            )
            if not inside:
                raise MpuError(f"{path}: no deltas in it (*.safetensors)")
            found += inside
        else:
            found.append(path)
    return found


def open_deltas(paths: Iterable[Path], keys: Keys) -> list[Delta]:
    """Open deltas of the publication of ``keys``, in the order of their copies.

    Raises MpuError for one that is damaged, of another run, round or publication, or given twice.
    """
    deltas: dict[int, Delta] = {}
    for path in delta_paths(paths):
        checkpoint = open_checkpoint(path)
        manifest = delta_manifest(checkpoint.metadata, path)
        origin = manifest.origin
        if origin is None:
            raise MpuError(f"{path}: was made from a model that is no copy of mpu, so it belongs to no run")
        if origin.run != keys.run:
            raise MpuError(f"{path}: belongs to run {origin.run}; these keys are of run {keys.run}")
        if origin.round != keys.round:
            raise MpuError(f"{path}: belongs to round {origin.round}; these keys are of round {keys.round}")
        if origin.copy > keys.copies or keys.copy_ids[origin.copy - 1] != origin.copy_id:
            raise MpuError(f"{path}: is of another publication's copy {origin.copy}; these keys do not undo it")
        if origin.copy in deltas:
            raise MpuError(f"{path}: is of copy {origin.copy}, and so is {deltas[origin.copy].path}; give one")
        deltas[origin.copy] = Delta(path, checkpoint, manifest)
    return [deltas[copy] for copy in sorted(deltas)]


def _check_tensors(delta: Delta, layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """MpuError unless the delta holds what its kind has to hold for a base of these shapes."""
    held = delta.checkpoint.tensors
    if delta.manifest.kind == "lora":
        expected = _factor_shapes(delta, layout, shapes)
    else:
        expected = {tensor.name: shapes[tensor.name] for tensor in layout.parameters}
    if missing := set(expected) - set(held):
        raise MpuError(f"{delta.path}: lacks {listed(missing)}; ask the client for the whole delta")
    if unknown := set(held) - set(expected):
        raise MpuError(f"{delta.path}: holds {listed(unknown)}, which the base does not have")
    for name, shape in expected.items():
        if held[name].shape != shape:
            raise MpuError(f"{delta.path}: {name!r} has shape {list(held[name].shape)}, and should have {list(shape)}")
        if held[name].dtype not in FLOATS:
            raise MpuError(
                f"{delta.path}: {name!r} is stored as {held[name].dtype}; a delta is one of {', '.join(FLOATS)}"
            )


def _check_alike(deltas: Sequence[Delta]) -> None:
    """MpuError for LoRA deltas of a round that adapt different tensors: noise cancels where all of them do."""
    first = deltas[0]
    for delta in deltas[1:]:
        if "lora" not in (first.manifest.kind, delta.manifest.kind):
            continue
        if odd := set(first.checkpoint.tensors) ^ set(delta.checkpoint.tensors):
            raise MpuError(
                f"{delta.path}: holds other tensors than {first.path} ({listed(odd)}); "
                "the copies of a round are trained with the same options"
            )


def trained_differently(deltas: Sequence[Delta]) -> tuple[tuple[int, int, str], ...]:
    """A copy, a later one, and the name of a tag in which they differ. Tags under other keys tell nothing."""
    first: dict[str, tuple[int, dict[str, str]]] = {}  # by key, the first copy that has tags under it
    unlike = []
    for delta in deltas:
        tags = delta.manifest.trained or {}
        one, expected = first.setdefault(str(tags.get("key")), (delta.copy, tags))
        unlike += [(one, delta.copy, name) for name in sorted(expected) if tags.get(name) != expected[name]]
    return tuple(unlike)


def _factor_shapes(delta: Delta, layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The factors that a LoRA delta has to hold: both for each tensor of which it holds one."""
    held = delta.checkpoint.tensors
    expected: dict[str, tuple[int, ...]] = {}
    for tensor in layout.parameters:
        left, right = tensor.name + LEFT, tensor.name + RIGHT
        if len(tensor.axes) == 2 and (left in held or right in held):
            known = held.get(left) or held[right]
            rank = known.shape[-1 if left in held else 0] if len(known.shape) == 2 else 0
            if rank < 1:
                raise MpuError(f"{delta.path}: {tensor.name!r} has a factor of shape {list(known.shape)}, of no rank")
            expected |= {left: (shapes[tensor.name][0], rank), right: (rank, shapes[tensor.name][1])}
    if not expected:
        raise MpuError(f"{delta.path}: is of kind lora and holds no factors of the base's tensors")
    return expected


def _check_finite(x: torch.Tensor, square: float, delta: Delta, name: str) -> None:
    # A sum of squares that is not finite may only have overflowed: look again before refusing.
    if not math.isfinite(square) and not all_finite(x):
        raise MpuError(f"{delta.path}: {name!r} holds NaN or Inf; nothing of this round was applied")


@dataclass(frozen=True)
class _Full:
    """One delta's change of one tensor, undone slice by slice."""

    mapping: TensorMap
    change: torch.Tensor

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.change.dtype,)

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows ``start … stop`` in the base's coordinates, in ``dtype`` if they had to be turned, else in their own."""
        taken = self.mapping.take(self.change, start, stop)
        return self.mapping.backward(taken.to(dtype), start) if self.mapping.turns else taken


class _LowRank:
    """One delta's change of one tensor as a product of factors; only the slice that is asked for is formed."""

    def __init__(self, mapping: TensorMap, left: torch.Tensor, right: torch.Tensor):
        by_rows, by_columns = mapping.split()
        self.mapping, self.dtypes = by_rows, (left.dtype, right.dtype)
        self._left = _Full(by_rows, left)
        wide = compute_dtype(*(NAME[dtype] for dtype in self.dtypes))
        self._right = by_columns.backward(right.to(wide), 0)

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        return self._left.rows(start, stop, dtype).to(dtype) @ self._right.to(dtype)

    def factors(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both factors whole, in the base's coordinates; ``rows`` is how many the tensor has."""
        return self._left.rows(0, rows, self._right.dtype).to(self._right.dtype), self._right


class _Undoing:
    """T_k⁻¹ of some deltas, slice by slice; deltas that are inverted already are taken as they are."""

    def __init__(self, deltas: Sequence[Delta], keys: Keys, layout: Layout):
        randomness = Randomness(bytes.fromhex(keys.seed))
        self.deltas = deltas
        self._transforms = [
            None if d.manifest.inverted else make_transform(randomness, keys.round, d.copy, layout, keys.symmetries)
            for d in deltas
        ]

    def maps(self, tensor: TensorLayout) -> list[TensorMap]:
        return [TensorMap(None, None) if t is None else t.of(tensor) for t in self._transforms]

    def changes(self, tensor: TensorLayout) -> list[_Full | _LowRank | None]:
        """Each delta's change of ``tensor``; None where it has none (a tensor that LoRA did not adapt)."""
        found: list[_Full | _LowRank | None] = []
        for delta, mapping in zip(self.deltas, self.maps(tensor), strict=True):
            held = delta.checkpoint
            if delta.manifest.kind == "full":
                found.append(_Full(mapping, as_matrix(held.tensor(tensor.name))))
            elif tensor.name + LEFT in held.tensors:
                factors = (held.tensor(tensor.name + end) for end in (LEFT, RIGHT))
                found.append(_LowRank(mapping, *factors))
            else:
                found.append(None)
        return found


def aggregate(
    base: Model,
    deltas: Sequence[Delta],
    keys: Keys,
    *,
    server_lr: float,
    dtype: str | None,
    out: Path,
    force: bool,
    progress: Progress,
    max_norm: float | None = None,
) -> Aggregation:
    """Write θ + η·Δ̄ to the model directory ``out``, unless a delta's norm is above ``max_norm``.

    Raises MpuError if a copy's delta is missing or does not fit the base, if the base is not the one that was
    published, or for NaN and Inf; UsageError for an η that is no rate.
    """
    layout, weights = _ready(base, deltas, keys, server_lr, max_norm)
    source = base.checkpoint
    plan = model_plan(source, layout, dtype)
    facts = {"format": "mpu-model", "version": VERSION, "run": keys.run, "round": keys.round}
    undoing = _Undoing(deltas, keys, layout)
    gram = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
    rounding = torch.zeros(2, dtype=torch.float64)
    digests: dict[str, list[bytes]] = {}
    outliers: list[tuple[str, int, float]] = []
    with Transaction(force=force) as transaction:
        folder = transaction.add(out, directory=True)
        with ExitStack() as stack:
            writer = stack.enter_context(CheckpointWriter(folder, plan, as_metadata(facts)))
            pool = stack.enter_context(worker_pool())

            def begin(tensor: TensorLayout) -> tuple[Iterator[bytes], list[Future[_Sums]]]:
                digesting = piece_digests(source, tensor.name, pool)
                if not tensor.constant:
                    return digesting, _combine(pool, tensor, source, undoing, weights, server_lr, writer)
                writer.tensor(tensor.name).copy_(source.tensor(tensor.name))
                return digesting, []

            for tensor, (digesting, combining) in _one_ahead(begin, layout.tensors.values()):
                name = tensor.name
                digests[name] = list(digesting)
                if combining:
                    parts = zip(*(future.result() for future in combining), strict=True)
                    products, lost = (torch.tensor(part, dtype=torch.float64).sum(0) for part in parts)
                    products += products.tril(-1).T
                    gram += products
                    rounding += lost
                    outliers += _outliers(name, products, deltas)
                for checkpoint in (source, *(delta.checkpoint for delta in deltas)):
                    if name in checkpoint.tensors:
                        checkpoint.forget_pages(name)
                writer.forget_pages(name)
                progress(source.tensors[name].nbytes)
            if layout.alias:
                digests[layout.alias] = list(piece_digests(source, layout.alias, pool))
            _check_base(base, keys, combine(source.tensors, digests))
        _check_norms(gram, deltas, max_norm)
        write_small_files(base, folder, plan)
        write_json(folder / MANIFEST_NAME, facts)
    lost = float((rounding[0] / rounding[1]).sqrt()) if rounding[1] > 0 else 0.0
    return replace(
        _agreement(out, gram, keys.noise, lost), outliers=tuple(outliers), unlike=trained_differently(deltas)
    )


def _one_ahead(
    begin: Callable[[TensorLayout], Begun], tensors: Iterable[TensorLayout]
) -> Iterator[tuple[TensorLayout, Begun]]:
    """What ``begin`` gives for each tensor, once the next one has been begun too, so that no core waits."""
    waiting: list[tuple[TensorLayout, Begun]] = []
    for tensor in tensors:
        waiting.append((tensor, begin(tensor)))
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def _outliers(name: str, products: torch.Tensor, deltas: Sequence[Delta]) -> list[tuple[str, int, float]]:
    """Copies whose change of a tensor is more than OUTLIER times that of any other (inf: the others have none)."""
    norms = products.diagonal().clamp(min=0).sqrt().tolist()
    found = []
    for k, delta in enumerate(deltas):
        others = max((norm for j, norm in enumerate(norms) if j != k), default=0.0)
        if len(deltas) > 1 and others * OUTLIER < norms[k]:
            found.append((name, delta.copy, norms[k] / others if others else math.inf))
    return found


def _check_norms(gram: torch.Tensor, deltas: Sequence[Delta], max_norm: float | None) -> None:
    for delta, square in zip(deltas, gram.diagonal().tolist(), strict=True):
        if not math.isfinite(square):
            raise MpuError(f"{delta.path}: its norm is no finite number; nothing of this round was applied")
        norm = math.sqrt(max(square, 0.0))
        if max_norm is not None and norm > max_norm:
            raise MpuError(
                f"{delta.path}: its norm is {norm:.4g}, above --max-norm {max_norm:g}; "
                "nothing of this round was applied"
            )


def _ready(
    base: Model, deltas: Sequence[Delta], keys: Keys, server_lr: float, max_norm: float | None
) -> tuple[Layout, torch.Tensor]:
    """The base's layout and the weights, float64 (m,), when there is a fitting delta of every copy."""
    if max_norm is not None and not (math.isfinite(max_norm) and max_norm > 0):
        raise UsageError(f"--max-norm {max_norm}: must be a finite number above 0")
    if not math.isfinite(server_lr):
        raise UsageError(f"--server-lr {server_lr}: must be a finite number")
    if missing := set(range(1, keys.copies + 1)) - {delta.copy for delta in deltas}:
        raise MpuError(
            f"no delta of copy {', '.join(map(str, sorted(missing)))}: all {keys.copies} of a round are needed, "
            "without one the noise does not cancel"
        )
    layout = layout_of(base.checkpoint.tensors, base.config, base.source)
    shapes = {name: info.shape for name, info in base.checkpoint.tensors.items()}
    for delta in deltas:
        _check_tensors(delta, layout, shapes)
    _check_alike(deltas)
    return layout, keys.noise.weights


def _agreement(path: Path, gram: torch.Tensor, scheme: Scheme, rounding: float) -> Aggregation:
    """The result, from the inner products of the undone deltas (m, m)."""
    weights = scheme.weights
    norms = gram.diagonal().sqrt()
    norm = float((weights @ gram @ weights).clamp(min=0).sqrt())
    cosines = gram / (norms[:, None] * norms[None, :])
    return Aggregation(
        path=path,
        norms=norms.tolist(),
        cosines=((gram @ weights) / (norms * norm)).tolist(),
        pairwise=float(cosines.nan_to_num(1.0).min()),
        norm=norm,
        rounding=rounding,
        error=error_estimate(scheme, gram),
    )


def aggregate_adapter(
    base: Model, deltas: Sequence[Delta], keys: Keys, *, server_lr: float, out: Path, force: bool,
    max_norm: float | None = None,
) -> Aggregation:  # fmt: skip
    """Write η·Δ̄ of LoRA deltas as one peft adapter for the base, of the sum of their ranks.

    Its factors are the undone factors side by side: B = [η·w₁B₁ … η·w_mB_m], A = [A₁ … A_m], so nothing is lost.
    Raises MpuError as ``aggregate`` does, and for a delta that is not of kind lora.
    """
    for delta in deltas:
        if delta.manifest.kind != "lora":
            raise MpuError(f"{delta.path}: is a full delta; --as-adapter needs LoRA deltas (unlearn --lora-rank)")
    layout, weights = _ready(base, deltas, keys, server_lr, max_norm)
    with worker_pool() as pool:
        _check_base(base, keys, fingerprint(base.checkpoint, pool))
    undoing = _Undoing(deltas, keys, layout)
    gram = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
    tensors: dict[str, torch.Tensor] = {}
    outliers: list[tuple[str, int, float]] = []
    for tensor in layout.parameters:
        changes = undoing.changes(tensor)
        if all(change is None for change in changes):
            continue
        rows = base.checkpoint.tensors[tensor.name].shape[0]
        factors = [None if c is None else c.factors(rows) for c in changes]
        products = torch.zeros_like(gram)
        for j, one in enumerate(factors):
            for k, two in enumerate(factors):
                if one and two:  # ⟨B₁A₁, B₂A₂⟩ = tr(B₁ᵀB₂·A₂A₁ᵀ)
                    left, right = (x.double().T @ y.double() for x, y in ((one[0], two[0]), (one[1].T, two[1].T)))
                    products[j, k] = (left * right).sum()
            if one and not all(all_finite(factor) for factor in one):
                raise MpuError(f"{deltas[j].path}: {tensor.name!r} holds NaN or Inf; nothing of this round was applied")
        gram += products
        outliers += _outliers(tensor.name, products, deltas)
        left = torch.cat([server_lr * float(w) * f[0] for w, f in zip(weights, factors, strict=True) if f], 1)
        right = torch.cat([f[1] for f in factors if f], 0)
        a, b = (left.T, right.T) if layout.family.transposed else (right, left)
        module = "base_model.model." + layout.full_name(tensor.name).removesuffix(".weight")
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    _check_norms(gram, deltas, max_norm)
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name}
    modules = sorted({name.removeprefix("base_model.model.").split(".lora_")[0] for name in tensors})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base.address, "bias": "none",
        "r": max(ranks), "lora_alpha": max(ranks), "lora_dropout": 0.0, "target_modules": modules,
        "rank_pattern": {}, "alpha_pattern": {}, "fan_in_fan_out": layout.family.transposed, "inference_mode": True,
    }  # fmt: skip
    if len(ranks) > 1:
        own = {module: tensors[f"base_model.model.{module}.lora_A.weight"].shape[0] for module in modules}
        config |= {"rank_pattern": own, "alpha_pattern": own}
    plan: Plan = {name: (NAME[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    with Transaction(force=force) as transaction:
        folder = transaction.add(out, directory=True)
        with CheckpointWriter(folder / "adapter_model.safetensors", plan, {}) as writer:
            for name, tensor in tensors.items():
                writer.tensor(name).copy_(tensor)
        write_json(folder / "adapter_config.json", config)
    return replace(_agreement(out, gram, keys.noise, 0.0), outliers=tuple(outliers), unlike=trained_differently(deltas))


def _check_base(base: Model, keys: Keys, found: str) -> None:
    if found != keys.base.fingerprint:
        raise MpuError(
            f"{base.source}: is not the model that was published (its fingerprint differs from the one in the keys); "
            "name the right one with --base"
        )


def _combine(
    pool: Executor,
    tensor: TensorLayout,
    source: Checkpoint,
    undoing: _Undoing,
    weights: torch.Tensor,
    server_lr: float,
    writer: CheckpointWriter,
) -> list[Future[_Sums]]:
    """Begin to write one tensor of the result, in slices that give their ``_Sums``."""
    before, target = as_matrix(source.tensor(tensor.name)), as_matrix(writer.tensor(tensor.name))
    changes = undoing.changes(tensor)
    given = [change for change in changes if change is not None]
    dtype = compute_dtype(*(NAME[d] for d in (before.dtype, target.dtype, *(d for c in given for d in c.dtypes))))
    slices = row_slices([change.mapping for change in given] or [TensorMap(None, None)], *before.shape)
    looked_at = measured_slices(len(slices))
    rates = (weights * server_lr).to(dtype).tolist()

    def work(start: int, stop: int, measured: bool) -> _Sums:
        undone = [None if c is None else c.rows(start, stop, dtype).to(dtype).reshape(-1) for c in changes]
        gram = [[0.0] * len(changes) for _ in changes]  # its lower half
        for j, one in enumerate(undone):
            for k, other in enumerate(undone[: j + 1]):
                if one is not None and other is not None:
                    gram[j][k] = float(torch.dot(one, other))
        clean = before[start:stop].to(dtype)
        update = torch.zeros_like(clean)
        for k, (part, rate) in enumerate(zip(undone, rates, strict=True)):
            if part is not None:
                _check_finite(part, gram[k][k], undoing.deltas[k], tensor.name)
                update.view(-1).add_(part, alpha=rate)
        stored = (clean + update).to(target.dtype)
        if not all_finite(stored):
            raise MpuError(
                f"{tensor.name!r} with its update is too large to store; lower --server-lr, or widen --dtype"
            )
        target[start:stop] = stored
        if not measured:
            return gram, [0.0, 0.0]
        lost = stored.to(dtype) - clean - update
        return gram, [float(lost.double().square().sum()), float(update.double().square().sum())]

    pool.submit(writer.populate, tensor.name)
    return [pool.submit(work, *bounds, i in looked_at) for i, bounds in enumerate(slices)]


def invert(
    base: Model, delta: Delta, keys: Keys, *, target: Path, transaction: Transaction, progress: Progress
) -> None:
    """Write T_k⁻¹(Δ_k) to ``target`` in the delta's own dtypes, as part of ``transaction``.

    Raises MpuError if it is inverted already, does not fit the base, or holds NaN or Inf.
    """
    if delta.manifest.inverted:
        raise MpuError(f"{delta.path}: is inverted already; aggregate takes it as it is")
    layout = layout_of(base.checkpoint.tensors, base.config, base.source)
    _check_tensors(delta, layout, {name: info.shape for name, info in base.checkpoint.tensors.items()})
    undoing = _Undoing([delta], keys, layout)
    plan: Plan = {name: (info.dtype, info.shape) for name, info in delta.checkpoint.tensors.items()}
    output = transaction.add(target, directory=plan_bytes(plan) > MAX_SHARD)
    metadata = as_metadata(delta_facts(replace(delta.manifest, inverted=True)))
    with CheckpointWriter(output, plan, metadata) as writer, worker_pool() as pool:
        for tensor in layout.parameters:
            [mapping] = undoing.maps(tensor)
            by_rows, by_columns = mapping.split()
            for end, part in (("", mapping), (LEFT, by_rows), (RIGHT, by_columns)):
                if (name := tensor.name + end) in delta.checkpoint.tensors:
                    _invert_tensor(pool, name, delta, part, writer)
                    delta.checkpoint.forget_pages(name)
                    writer.forget_pages(name)
                    progress(delta.checkpoint.tensors[name].nbytes)


def _invert_tensor(pool: Executor, name: str, delta: Delta, mapping: TensorMap, writer: CheckpointWriter) -> None:
    change, target = as_matrix(delta.checkpoint.tensor(name)), as_matrix(writer.tensor(name))
    dtype = compute_dtype(delta.checkpoint.tensors[name].dtype)

    def work(bounds: tuple[int, int]) -> None:
        start, stop = bounds
        undone = _Full(mapping, change).rows(start, stop, dtype)
        _check_finite(undone, float(undone.square().sum()), delta, name)
        target[start:stop] = undone.to(target.dtype)

    list(pool.map(work, row_slices([mapping], *change.shape)))
