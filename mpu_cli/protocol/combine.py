"""Aggregating: from the clients' deltas back to the server's model, by a plan. Streams; holds no model.

Δ̄ = Σ_k w_k T_k⁻¹(Δ_k) and θ_r = θ_{r−1} + η·Δ̄, with the weights w_k of its noise (docs/design.md): harmonic
ones, w_k ∝ 1/α_k, for the paper's zero-sum noise.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.manifest import MANIFEST_NAME, VERSION, as_metadata
from mpu_cli.files.reader import (
    LOST_TO_ROUNDING,
    NAME,
    OPTION,
    all_finite,
    compute_dtype,
    fingerprint_of,
    piece_digests,
    quoted_list,
    worker_pool,
)
from mpu_cli.files.transaction import Transaction
from mpu_cli.files.writer import CheckpointWriter, TensorSpecs, nbytes_of
from mpu_cli.model.layout import TensorLayout
from mpu_cli.model.source import Model, carry_small_files, model_specs, open_model, write_json
from mpu_cli.model.transform import TensorMap, as_matrix, measured_slices, row_slices
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.publishing import RESTORE, Aggregating
from mpu_cli.protocol.deltas import (
    Delta,
    InverseMaps,
    LowRank,
    Owner,
    check_base,
    check_finite,
    check_norms,
    check_round,
    outliers_of,
)
from mpu_cli.protocol.keys import Keys
from mpu_cli.protocol.noise import ErrorEstimate, error_estimate
from mpu_cli.protocol.step import MOST_RESTORED, ProbedStep, default_step, measure_written, settle_step
from mpu_cli.protocol.watermarks import PLANTED, Fingerprints, Planted, Products, fingerprints, noise_in
from mpu_cli.version import __version__

# The plan of an aggregation: it reads headers only, and is made after every check that needs no numbers.


@dataclass(frozen=True)
class AggregatePlan:
    """The inputs and outputs of aggregating a round.

    ``trust_deltas``: aggregate what is known not to belong together; ``force``: replace what exists.
    """

    base: Model
    owners: tuple[Owner, ...]
    options: Aggregating
    out: Path
    trust_deltas: bool
    force: bool

    @property
    def deltas(self) -> list[Delta]:
        return [delta for owner in self.owners for delta in owner.deltas]

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights of each owner's deltas, float64 (copies,)."""
        return [owner.keys.publication.scheme.weights for owner in self.owners]

    @property
    def publications(self) -> list[Keys]:
        return [owner.keys for owner in self.owners]

    def differences(self) -> list[str]:
        """A sentence for each way in which an owner's deltas say that their copies were trained differently."""
        return [text for owner in self.owners for text in owner.differences()]

    @property
    def nbytes(self) -> int:
        """The size of the model that is written."""
        dtype = OPTION[self.options.dtype] if self.options.dtype else None
        return nbytes_of(model_specs(self.base.checkpoint, self.base.layout, dtype))


def plan_aggregate(
    base: Model,
    owners: Sequence[Owner],
    options: Aggregating,
    *,
    out: Path,
    as_adapter: bool = False,
    trust_deltas: bool,
    force: bool = False,
) -> AggregatePlan:
    """The plan to write θ + η·Σ_owners Δ̄ to ``out``, unless the deltas do not fit the base or each other;
    ``trust_deltas``: whatever their tags say of how they were trained."""
    if as_adapter:
        _check_adapter(owners, options)
    options.check_step()
    for owner in owners:
        check_round(base, owner.deltas, owner.keys)
    if not trust_deltas:
        for owner in owners:
            owner.check_trained_alike()
    return AggregatePlan(base, tuple(owners), options, out, trust_deltas=trust_deltas, force=force)


def _check_adapter(owners: Sequence[Owner], options: Aggregating) -> None:
    """Raise UsageError or MpuError where no adapter can hold the update."""
    if len(owners) > 1:
        raise UsageError("--as-adapter: one adapter holds one owner's update", "aggregate each owner's alone")
    if options.probe is not None:
        raise UsageError("--probe: looks at a model", "aggregate to one first, and name its step here")
    for delta in owners[0].deltas:
        if delta.manifest.kind != "lora":
            raise MpuError(
                f"{delta.path}: is a full delta, but --as-adapter needs LoRA deltas",
                "make them with unlearn --lora rank",
            )
        if stacked := [n for n, info in delta.checkpoint.tensors.items() if len(info.shape) > 2 or ".experts." in n]:
            raise MpuError(
                f"{delta.path}: adapts experts ({quoted_list(stacked)}), which --as-adapter cannot write",
                "aggregate to a model, or train with --lora targets other than the experts",
            )


# The outcome of a round: how the copies agree, and what is probably wrong.

# Cosine between two copies' deltas below which something is probably wrong: after a number of epochs, and after a
# training until the records are forgotten, for hundreds of steps in which the copies part (docs/stopping.md). There it
# is the one below which the step does not make up for all that the average lost.
MIN_COSINE, MIN_COSINE_UNTIL_DONE = 0.5, 1 / MOST_RESTORED**2
MAX_NORM_RATIO = 3.0  # times another copy's norm, above which a copy was probably trained differently
MAX_OUTLIERS_SHOWN = 3  # outliers named in warnings
MAX_RELATIVE_ERROR = 1.0  # estimated error, relative to the update, at which the update is nothing but noise


@dataclass(frozen=True)
class Aggregation:
    """The result of ``aggregate``, and how the copies agree."""

    path: Path
    owner: Owner
    norms: list[float]  # ‖T_k⁻¹(Δ_k)‖, by copy
    cosines: list[float]  # with Δ̄, by copy
    pairwise: float  # the smallest cosine between two copies
    norm: float  # ‖Δ̄‖
    # ‖stored − θ − ηΔ̄‖ / ‖ηΔ̄‖: the share of the update lost to the dtype of storage, read off a slice or two of
    # each tensor
    rounding: float
    error: ErrorEstimate  # the distance of Δ̄ from the clean update
    # tensors of which one copy's change is far larger than the others', with the copy and by what factor
    outliers: tuple[tuple[str, int, float], ...] = ()
    probed: ProbedStep | None = None  # the steps that were tried on --probe, if there was one
    planted: Planted = field(default_factory=Planted)  # the noise of copies that was in the update and is taken out
    rate: float = 1.0  # how many times Δ̄ was applied

    @property
    def keys(self) -> Keys:
        return self.owner.keys

    @property
    def deltas(self) -> Mapping[int, Path]:
        """The files, by copy."""
        return {delta.copy: delta.path for delta in self.owner.deltas}

    def warnings(self) -> list[str]:
        """The probable faults of the round, a sentence each; empty if there are none. Of causes only the first one: the
        others follow from it."""
        causes = list(self._causes())[:1]
        # Copies that were trained until they had forgotten differ by their courses, too, and are judged by a check.
        judged_by_error = not (causes or self.owner.until_done)
        error = [self.error.warning] if self.error.warning and judged_by_error else []
        return [*causes, *self._outliers(), *error, *self._problems_of_update()]

    def check(self, trust_deltas: bool) -> None:
        """Raise MpuError, unless ``trust_deltas``, if the update is nothing but noise."""
        if self.error.relative >= MAX_RELATIVE_ERROR and not trust_deltas:
            cause = next(self._causes(), None) or self.error.warning
            raise MpuError(f"nothing was written: {cause}", "--trust-deltas writes the model all the same")

    def _causes(self) -> Iterator[str]:
        yield from self.owner.differences()
        if self.pairwise < (MIN_COSINE_UNTIL_DONE if self.owner.until_done else MIN_COSINE):
            yield (
                f"the copies disagree (cosine {self.pairwise:.2f} between two of them): they were trained with "
                "different options or records or for more than a thousand steps, the noise is too large, or a delta "
                "was tampered with"
            )
        if max(self.norms) > MAX_NORM_RATIO * min(self.norms):
            yield (
                f"one copy's change is {max(self.norms) / max(min(self.norms), 1e-30):.1f} times another's: they were "
                "trained with different options, or a delta was tampered with"
            )

    def _outliers(self) -> Iterator[str]:
        for name, copy, factor in self.outliers[:MAX_OUTLIERS_SHOWN]:
            much = "and no other copy does"
            if math.isfinite(factor):
                much = f"{factor:.0f} times as much as any other copy"
            yield f"copy {copy} changes {name} {much}: it was trained differently or tampered with"
        if len(self.outliers) > MAX_OUTLIERS_SHOWN:
            yield f"and {len(self.outliers) - MAX_OUTLIERS_SHOWN} more tensors"

    def _problems_of_update(self) -> Iterator[str]:
        if self.planted.warning:
            yield self.planted.warning
        if self.norm == 0:
            yield "all deltas are zero: nothing was unlearned"
        if self.rounding > LOST_TO_ROUNDING:
            yield f"storage rounds away {self.rounding:.0%} of the update; --dtype float32 keeps it"


def _permanent_share(base: Model, keys: Keys) -> float:
    """The size of permanent noise in multiples of that which cancels, as both are in all weights together; infinite if
    none cancels."""
    layout = base.layout
    cancelling = permanent = 0.0
    for block, members in layout.blocks.items():
        weights = sum(base.checkpoint.tensors[tensor.name].elements for tensor in members)
        cancelling += weights * keys.sigma.get(block, 0.0) ** 2
        permanent += weights * keys.shared_sigma.get(block, 0.0) ** 2
    if not permanent:
        return 0.0
    return math.sqrt(permanent / cancelling) if cancelling else math.inf


def agreement_of(base: Model, owner: Owner, path: Path, gram: torch.Tensor) -> Aggregation:
    """The agreement of an owner's copies, from the inner products of their undone deltas, float64 (m, m). The caller
    fills in what depends on the written model: ``rounding``, ``outliers``, ``probed``, ``planted``, ``rate``."""
    scheme = owner.keys.publication.scheme
    weights = scheme.weights
    norms = gram.diagonal().sqrt()
    norm = float((weights @ gram @ weights).clamp(min=0).sqrt())
    cosines = gram / (norms[:, None] * norms[None, :])
    return Aggregation(
        path=path,
        owner=owner,
        norms=norms.tolist(),
        cosines=((gram @ weights) / (norms * norm)).tolist(),
        pairwise=float(cosines.nan_to_num(1.0).min()),
        norm=norm,
        rounding=0.0,
        error=error_estimate(scheme, gram, _permanent_share(base, owner.keys)),
    )


# The model card of an unlearned model: README.md beside the weights, as the Hub shows it.

CARD = "README.md"


def card(base: Model, result: Aggregation, kind: str) -> str:
    """The origin of the model: its base, the round, how the copies agreed. It names no path and no secret.

    ``kind`` is "model" or "adapter".
    """
    keys, error = result.keys, result.error.relative
    hub_id = None if Path(base.source).exists() else base.source
    algorithms = ", ".join(sorted(set(result.owner.algorithms)))
    rows = {
        "base": hub_id or f"a private {base.config.get('model_type')} model",
        "base's fingerprint": keys.base.fingerprint,
        "run, round": f"{keys.run}, {keys.round}",
        "copies": f"{keys.copies}, {keys.publication.scheme.name} noise, symmetries {keys.publication.symmetries}",
        "algorithm": f"{algorithms}, by the owner of the records",
        "norm of the update": f"{result.norm:.4g}",
        "estimated error of the update": "not known" if math.isnan(error) else f"{error:.1%}",
        "smallest cosine between copies": f"{result.pairwise:.3f}",
        "step along the update": f"{result.rate:g}",
        "made by": f"mpu {__version__}",
    }
    front_matter = [f"base_model: {json.dumps(hub_id)}"] if hub_id else []
    front_matter.append("library_name: peft" if kind == "adapter" else "library_name: transformers")
    sections = [
        "\n".join(["---", *front_matter, "tags:", "- unlearning", "- mpu", "---"]),
        "# Unlearned model" if kind == "model" else "# Unlearning, as an adapter",
        "Records were unlearned without leaving their owner, with MPU "
        "([arXiv 2602.23798](https://arxiv.org/abs/2602.23798)): the owner trained disguised copies of the base "
        "and returned weight changes only, which were combined here.",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]),
    ]
    if result.probed:
        curve = [f"| {tried:g} | {loss:.4f} |" for tried, loss in result.probed.curve]
        sections += [
            "The step was chosen for the loss on records of the server's to rise by at most "
            f"{result.probed.max_rise:g} nats per answer token:",
            "\n".join(["| step | loss |", "|---|---|", *curve]),
        ]
    if warnings := result.warnings():
        sections += ["Warnings of `mpu aggregate`:", "\n".join(f"- {text}" for text in warnings)]
    sections.append(
        "Unlearning lowers what a model shows of its records; it is no proof that nothing is left. `mpu eval` "
        "measures what is."
    )
    return "\n\n".join(sections) + "\n"


# The update of each data owner is combined from the deltas of its own copies, of a publication of the same base; the
# model is the base plus the sum of the updates. Most rounds have one owner.


@dataclass(frozen=True)
class Combined:
    """The result of ``aggregate_owners``: each owner's update, and their cosines, float64 (owners, owners)."""

    path: Path
    updates: list[Aggregation]
    cosines: torch.Tensor
    rounding: float
    planted: Planted
    probed: ProbedStep | None

    def warnings(self) -> list[str]:
        """The probable faults of each owner's update, and of their sum, a sentence each."""
        of_updates = [f"run {update.keys.run}: {text}" for update in self.updates for text in update.warnings()]
        return of_updates + ([self.planted.warning] if self.planted.warning else [])


@dataclass(frozen=True)
class Written:
    """Facts learned while a model was written: ``gram``, the inner products of the changes, float64 (k, k); entries of
    ``Aggregation``; ``to_take_out``, the draws of which the update has too much."""

    gram: torch.Tensor
    rounding: float
    outliers: tuple[tuple[str, int, float], ...]
    planted: Planted
    to_take_out: frozenset[int]


def aggregate(plan: AggregatePlan, *, observer: Observer = SILENT) -> Aggregation:
    """Write θ + η·Δ̄ of a round with one data owner, as ``aggregate_owners``."""
    [update] = aggregate_owners(plan, observer=observer).updates
    return update


def aggregate_owners(plan: AggregatePlan, *, observer: Observer) -> Combined:
    """Write θ + η·Σ_owners Δ̄."""
    owners, options = plan.owners, plan.options
    noises = fingerprints(plan.base, plan.publications)
    with Transaction(force=plan.force) as transaction:
        folder = transaction.add(plan.out, directory=True)
        steps = [1.0] * len(owners)
        if options.step == RESTORE:
            steps = [default_step(plan.base, owner) for owner in owners]
        weights = torch.cat([w * step for w, step in zip(plan.weights, steps, strict=True)])
        writer = UpdateWriter(plan, weights, noises, observer)
        options, probed = settle_step(plan.base, options, writer.write, plan.out, observer)
        written = writer.write(folder, options)
        if probed and plan.options.probe:
            probed = measure_written(open_model(str(folder)), probed, plan.options.probe)
        if probed and len(owners) == 1:  # in units of the update, not of what restores it
            losses = {steps[0] * step: loss for step, loss in probed.losses.items()}
            probed = replace(probed, chosen=steps[0] * probed.chosen, losses=losses)
        gram = written.gram
        # Of all owners together, too: each below the bound, they may still add up to more.
        check_norms(gram, plan.deltas, options.max_norm, weights * options.rate)
        updates = []
        weights_by_owner = torch.zeros(len(owners), len(weights), dtype=torch.float64)  # 0 for the others' deltas
        parts = torch.arange(len(weights)).split([len(owner.deltas) for owner in owners])
        for i, (owner, part, step) in enumerate(zip(owners, parts, steps, strict=True)):
            weights_by_owner[i, part] = weights[part]
            own_gram = gram[part][:, part]
            check_norms(own_gram, owner.deltas, options.max_norm, weights[part] * options.rate)
            agreement = agreement_of(plan.base, owner, plan.out, own_gram)
            update = replace(agreement, rounding=written.rounding, probed=probed, rate=step * options.rate)
            if len(owners) == 1:
                update = replace(update, planted=written.planted, outliers=written.outliers)
            update.check(plan.trust_deltas)
            updates.append(update)
        if len(owners) == 1:
            (folder / CARD).write_text(card(plan.base, updates[0], "model"), encoding="utf-8")
    products = weights_by_owner @ gram @ weights_by_owner.T  # of the owners' updates
    norms = products.diagonal().clamp(min=0).sqrt()
    cosines = products / (norms[:, None] * norms[None, :])
    planted = written.planted if len(owners) > 1 else Planted()
    return Combined(plan.out, updates, cosines, written.rounding, planted, probed)


class UpdateWriter:
    """Writes θ + η·Σ_k w_k·(change k), except for the model card; searches the update for ``noises``."""

    def __init__(self, plan: AggregatePlan, weights: torch.Tensor, noises: Fingerprints, observer: Observer):
        self.plan, self.weights, self.noises, self.observer = plan, weights, noises, observer
        self._inverse_maps = InverseMaps(plan.deltas, plan.base.layout)

    def write(self, folder: Path, options: Aggregating) -> Written:
        """Write the model into ``folder``, with η the rate of ``options``; once more, without the noise of copies, if
        the update has too much of that."""
        written = self._write_once(folder, options, frozenset())
        if not written.to_take_out:
            return written
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        cleaned = self._write_once(folder, options, written.to_take_out)
        if cleaned.planted.z >= PLANTED:
            raise MpuError(
                f"nothing was written: the update has noise of the copies of {cleaned.planted.publication} in "
                f"it (z = {cleaned.planted.z:.1f} of {written.planted.z:.1f}) that cannot be taken out",
                "ask the client for another delta",
            )
        return replace(cleaned, planted=written.planted)

    def _write_once(self, folder: Path, options: Aggregating, without: frozenset[int]) -> Written:
        """Write the model, whose update loses the noises of the numbers ``without``."""
        base, keys_of_owners, deltas = self.plan.base, self.plan.publications, self.plan.deltas
        source, layout = base.checkpoint, base.layout
        dtype = OPTION[options.dtype] if options.dtype else None
        self.observer.stage("aggregate", source.nbytes)
        rounds = [{"run": keys.run, "round": keys.round} for keys in keys_of_owners]
        origin = rounds[0] if len(rounds) == 1 else {"owners": rounds}
        facts: dict[str, object] = {"format": "mpu-model", "version": VERSION, **origin}
        if any(keys.publication.shared_kappa for keys in keys_of_owners):
            facts["permanent"] = True  # or the next round would be published without, unnoticed
        gram = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
        rounding = torch.zeros(2, dtype=torch.float64)
        noise = torch.zeros(self.noises.count, 4, dtype=torch.float64)
        digests: dict[str, list[bytes]] = {}
        outliers: list[tuple[str, int, float]] = []
        specs = model_specs(source, layout, dtype)
        with CheckpointWriter(folder, specs, as_metadata(facts), like=source) as writer, worker_pool() as pool:

            def begin(tensor: TensorLayout) -> _Begun:
                digesting = piece_digests(source, tensor.name, pool)
                if tensor.constant:
                    writer.tensor(tensor.name).copy_(source.tensor(tensor.name))
                    return digesting, []
                return digesting, self._add_up(pool, tensor, writer, self.weights * options.rate, without)

            for tensor, (digesting, adding) in one_ahead(begin, layout.tensors.values()):
                digests[tensor.name] = list(digesting)
                if adding:
                    sums = [future.result() for future in adding]
                    products, squares, noise_here = (
                        torch.tensor(parts, dtype=torch.float64).sum(0) for parts in zip(*sums, strict=True)
                    )
                    gram += products
                    rounding += squares
                    noise += noise_here.view(-1, 4)
                    outliers += outliers_of(tensor.name, products, deltas)
                source.forget_pages(tensor.name)
                self._inverse_maps.forget_pages(tensor)
                writer.forget_pages(tensor.name)
                self.observer.advance(source.tensors[tensor.name].nbytes)
            if layout.alias:
                digests[layout.alias] = list(piece_digests(source, layout.alias, pool))
            digest = fingerprint_of(source.tensors, digests)
            for keys in keys_of_owners:
                check_base(base, keys, digest)
        lost = float((rounding[0] / rounding[1]).sqrt()) if rounding[1] > 0 else 0.0
        if behind := carry_small_files(base, folder, dtype):
            self.observer.note(f"{base.folder}: the result does not get {quoted_list(behind)}")
        write_json(folder / MANIFEST_NAME, facts)
        return Written(gram, lost, tuple(outliers), *self.noises.judge(noise))

    def _add_up(
        self, pool: Executor, tensor: TensorLayout, writer: CheckpointWriter, rates: torch.Tensor,
        without: frozenset[int],
    ) -> list[Future[_Sums]]:  # fmt: skip
        """Start writing one tensor: the base's plus the changes to it times their ``rates``."""
        target, before = as_matrix(writer.tensor(tensor.name)), as_matrix(self.plan.base.checkpoint.tensor(tensor.name))
        changes = self._inverse_maps.changes(tensor)
        dtypes = [before.dtype, target.dtype, *(dtype for change in changes.values() for dtype in change.dtypes)]
        dtype = compute_dtype(*dtypes)
        slices = row_slices([change.mapping for change in changes.values()] or [TensorMap(None, None)], *before.shape)
        measured = measured_slices(len(slices))
        rounded_rates = rates.to(dtype).tolist()
        tensor_noise = self.noises.of(tensor)

        def work(start: int, stop: int, is_measured: bool) -> _Sums:
            clean = before[start:stop].to(dtype)
            update = torch.zeros_like(clean)
            undone: dict[int, torch.Tensor] = {}
            gram = [[0.0] * len(rates) for _ in rates]
            for j, change in changes.items():
                undone[j] = change.rows(start, stop, dtype).to(dtype).reshape(-1)
                for k, other in undone.items():
                    gram[j][k] = gram[k][j] = float(torch.dot(undone[j], other))
                check_finite(undone[j], gram[j][j], self.plan.deltas[j], tensor.name)
                update.view(-1).add_(undone[j], alpha=rounded_rates[j])
            noise: Products = [[0.0] * 4] * self.noises.count
            if changes and without:
                tensor_noise.take_out(update, start, without)
            if changes:
                noise = tensor_noise.products(update, start)
            stored = (clean + update).to(target.dtype)
            if not all_finite(stored):
                raise MpuError(
                    f"{tensor.name!r}: overflows its dtype after the update", "lower --step or choose a wider --dtype"
                )
            target[start:stop] = stored
            if not is_measured:
                return gram, [0.0, 0.0], noise
            lost = stored.to(dtype) - clean - update
            return gram, [float(lost.double().square().sum()), float(update.double().square().sum())], noise

        pool.submit(writer.populate, tensor.name)
        return [pool.submit(work, *bounds, i in measured) for i, bounds in enumerate(slices)]


# Sums over one slice, as lists, because small tensors that outlive large buffers fragment the heap: the deltas' inner
# products (m, m); if measured, the squared norms of the update's rounding error and of the update (2,); the update's
# products with the noise of copies.
_Sums = tuple[list[list[float]], list[float], Products]

# The work begun on one tensor: digests of its pieces, and the sums of its slices.
_Begun = tuple[Iterator[bytes], list[Future[_Sums]]]


def one_ahead(
    begin: Callable[[TensorLayout], _Begun], tensors: Iterable[TensorLayout]
) -> Iterator[tuple[TensorLayout, _Begun]]:
    """Yield each tensor and its ``begin(tensor)`` once the next one has begun too, so that no core is idle."""
    waiting: list[tuple[TensorLayout, _Begun]] = []
    for tensor in tensors:
        waiting.append((tensor, begin(tensor)))
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


# Aggregating LoRA deltas into one peft adapter for the base.


def aggregate_adapter(plan: AggregatePlan) -> Aggregation:
    """Write η·Δ̄ of one owner's LoRA deltas as one peft adapter for the base, whose rank is the sum of theirs.

    Its factors are the inverted factors side by side: B = [η·w₁B₁ … η·w_mB_m], A = [A₁ … A_m], so nothing is lost.
    """
    base, layout, options = plan.base, plan.base.layout, plan.options
    [owner], [weights] = plan.owners, plan.weights
    deltas, keys = owner.deltas, owner.keys
    check_base(base, keys)
    inverse_maps = InverseMaps(deltas, layout)
    rate = default_step(base, owner) if options.step == RESTORE else options.rate
    gram = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
    tensors: dict[str, torch.Tensor] = {}
    outliers: list[tuple[str, int, float]] = []
    for tensor in layout.parameters:
        # All deltas have one for the same tensors.
        factors = [change.factors() for change in inverse_maps.changes(tensor).values() if isinstance(change, LowRank)]
        if not factors:
            continue
        for delta, pair in zip(deltas, factors, strict=True):
            if not all(all_finite(factor) for factor in pair):
                raise MpuError(
                    f"{delta.path}: {tensor.name!r} contains NaN or Inf, so nothing from this round was applied"
                )
        products = _inner_products(factors)
        gram += products
        outliers += outliers_of(tensor.name, products, deltas)
        left_factor = torch.cat([rate * float(w) * left for w, (left, _) in zip(weights, factors, strict=True)], 1)
        right = torch.cat([right for _, right in factors], 0)
        a, b = (left_factor.T, right.T) if layout.family.transposed else (right, left_factor)
        module = "base_model.model." + layout.full_name(tensor.name).removesuffix(".weight")
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    check_norms(gram, deltas, options.max_norm, weights * rate)
    planted = noise_in(inverse_maps, weights * rate, fingerprints(base, plan.publications))
    if planted.z >= PLANTED:
        raise MpuError(
            f"nothing was written: the update has noise of the copies of {planted.publication} in it "
            f"(z = {planted.z:.1f}), as if such a copy had been added to a delta: `mpu trace` would take a model with "
            "this adapter for that copy",
            "without --as-adapter, aggregate takes it out; factors of low rank cannot lose it",
        )
    config = _peft_config(tensors, base)
    specs: TensorSpecs = {name: (NAME[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    with Transaction(force=plan.force) as transaction:
        folder = transaction.add(plan.out, directory=True)
        with CheckpointWriter(folder / "adapter_model.safetensors", specs, {}) as writer:
            for name, factor in tensors.items():
                writer.tensor(name).copy_(factor)
        write_json(folder / "adapter_config.json", config)
        result = replace(agreement_of(base, owner, plan.out, gram), outliers=tuple(outliers), rate=rate)
        result.check(plan.trust_deltas)
        (folder / CARD).write_text(card(base, result, "adapter"), encoding="utf-8")
    return result


def _inner_products(factors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """⟨B_j A_j, B_k A_k⟩ = tr(B_jᵀB_k·A_kA_jᵀ) of every two deltas, float64 (deltas, deltas)."""
    products = torch.zeros(len(factors), len(factors), dtype=torch.float64)
    for j, (b_j, a_j) in enumerate(factors):
        for k, (b_k, a_k) in enumerate(factors):
            products[j, k] = ((b_j.double().T @ b_k.double()) * (a_j.double() @ a_k.double().T)).sum()
    return products


def _peft_config(tensors: Mapping[str, torch.Tensor], base: Model) -> dict[str, object]:
    """adapter_config.json for these factors."""
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name}
    modules = sorted({name.removeprefix("base_model.model.").split(".lora_")[0] for name in tensors})
    config: dict[str, object] = {
        # For a base on this machine, only its folder's name: the path is private.
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base.public_name, "bias": "none",
        "r": max(ranks), "lora_alpha": max(ranks), "lora_dropout": 0.0, "target_modules": modules,
        "rank_pattern": {}, "alpha_pattern": {}, "fan_in_fan_out": base.layout.family.transposed,
        "inference_mode": True,
    }  # fmt: skip
    if len(ranks) > 1:
        module_ranks = {module: tensors[f"base_model.model.{module}.lora_A.weight"].shape[0] for module in modules}
        config |= {"rank_pattern": module_ranks, "alpha_pattern": module_ranks}
    return config
