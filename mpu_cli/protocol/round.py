"""A round as it came back: each data owner's publication with the deltas of its copies, and the plan to aggregate them.

``plan_aggregate`` reads headers only and makes every check that needs no numbers; ``aggregate``, ``aggregate_adapter``
and ``aggregate_owners`` do what a plan says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.manifest import TAGS, VERSIONS, delta_manifest
from mpu_cli.files.reader import LOST_TO_ROUNDING, OPTION, TORCH, open_checkpoint, quoted_list
from mpu_cli.files.transaction import Transaction
from mpu_cli.files.writer import nbytes_of
from mpu_cli.model.source import Model, model_specs, open_model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.publishing import AUTO, RESTORE, Aggregating
from mpu_cli.protocol.deltas import Delta, check_round, delta_paths, open_deltas
from mpu_cli.protocol.keys import Keys
from mpu_cli.protocol.marks import Planted
from mpu_cli.protocol.noise import ErrorEstimate, error_estimate
from mpu_cli.records.read import read_records

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The step along an update: the largest at which the server's own records stay as likely as requested.
#
# An update found on a degraded copy is smaller than one found on the model itself, for the same forgetting
# (docs/protection.md); then a step above 1 is right, and records that must not suffer decide how far above.

MAX_STEP = 8.0  # times the update
BISECTIONS = 5  # halvings of the interval in which the step lies, once it is known


@dataclass(frozen=True)
class ServerStep:
    """The step that was chosen, and the loss per answer token on --probe, in nats, at each that was tried (0: of the
    base)."""

    chosen: float
    max_rise: float
    losses: dict[float, float]

    @property
    def curve(self) -> list[tuple[float, float]]:
        return sorted(self.losses.items())

    @property
    def rise(self) -> float:
        """The rise of the loss at the chosen step."""
        return self.losses[self.chosen] - self.losses[0.0]


def settle_server_lr(
    base: Model,
    options: Aggregating,
    write: Callable[[Path, Aggregating], object],
    beside: Path,
    observer: Observer = SILENT,
) -> tuple[Aggregating, ServerStep | None]:
    """``options`` with a number for ``server_lr``, and how it was found if there are records to look at.

    ``write`` writes the model with the update times what the options say into a folder, which is made beside
    ``beside``. Raises MpuError if the step that was named, or already the smallest, costs too much.
    """
    if options.probe is None:
        return replace(options, server_lr=1.0 if options.server_lr == RESTORE else options.server_lr), None
    read_records(options.probe)  # before the work
    with Transaction() as transaction:
        folder = transaction.scratch(beside.absolute().parent)
        # One whole update in float32, to go along; --max-norm is for what is written in the end.
        write(folder, replace(options, server_lr=1.0, probe=None, dtype="float32", max_norm=None))
        step = choose_step(base, open_model(str(folder)), options, observer)
    return replace(options, server_lr=step.chosen, probe=None), step


def choose_step(base: Model, updated: Model, options: Aggregating, observer: Observer = SILENT) -> ServerStep:
    """The largest step from ``base`` through ``updated``, which is step 1, at which the loss on --probe has risen by
    at most --max-rise: at most the one that --server-lr names, 1 under restore, and MAX_STEP under auto.

    Holds one model in float32. Raises MpuError if none is found, or if a step that --server-lr names costs more.
    """
    from mpu_cli.model.load import load
    from mpu_cli.model.network import read_answers  # with transformers, which aggregate does not need otherwise

    model, tokenizer = load(base, torch.float32, "auto")
    probe, max_rise = options.probe, options.max_rise
    assert probe is not None
    answers = read_answers(probe, tokenizer)
    go_to = steps_between(base, updated, model, options.dtype)
    losses = {0.0: answers.loss(model)}
    observer.stage("step", 4 + BISECTIONS, "tried")  # 1, 2, 4, 8 = MAX_STEP, and what is between

    def costs_too_much(step: float) -> bool:
        go_to(step)
        losses[step] = answers.loss(model)
        observer.advance(1)
        return not losses[step] - losses[0.0] <= max_rise  # NaN too

    named = options.server_lr if isinstance(options.server_lr, float) else None
    least, most = 0.0, 1.0 if named is None else named
    while not costs_too_much(most):
        least, most = most, 2 * most
        if options.server_lr != AUTO or least >= MAX_STEP:
            return ServerStep(least, max_rise, losses)
    for _ in range(BISECTIONS):
        middle = (least + most) / 2
        if costs_too_much(middle):
            most = middle
        else:
            least = middle
    if least == 0:
        raise MpuError(
            f"a step of {most:g} raises the loss on {probe} by {losses[most] - losses[0.0]:.3g}, and --max-rise allows "
            f"{max_rise:g}",
            "allow more with --max-rise, or ask the client for another delta",
        )
    if named is not None:
        raise MpuError(
            f"--server-lr {named:g}: raises the loss on {probe} by {losses[named] - losses[0.0]:.3g}, and --max-rise "
            f"allows {max_rise:g}",
            f"--server-lr {least:g} stays within it",
        )
    return ServerStep(least, max_rise, losses)


def measure_written(written: Model, step: ServerStep, probe: Path) -> ServerStep:
    """``step`` with the loss of the model that was ``written`` at it, in place of the one that was predicted.

    Raises MpuError if that has risen by more than was allowed. Whoever knows the arithmetic can choose changes near the
    middle between two numbers of a dtype, so that what is tried and what is written are rounded apart.
    """
    from mpu_cli.model.load import load
    from mpu_cli.model.network import read_answers

    model, tokenizer = load(written, torch.float32, "auto")
    measured = replace(step, losses=step.losses | {step.chosen: read_answers(probe, tokenizer).loss(model)})
    if not measured.rise <= step.max_rise:  # NaN too
        raise MpuError(
            f"the loss on {probe} rises by {measured.rise:.3g} once the model is stored, and --max-rise allows "
            f"{step.max_rise:g}",
            "use --dtype float32, lower --server-lr, or ask the client for another delta",
        )
    return measured


def steps_between(
    base: Model, updated: Model, model: PreTrainedModel, dtype: str | None = None
) -> Callable[[float], None]:
    """A function that gives ``model``, which was loaded from ``base``, the weights a step from there towards
    ``updated``, which is step 1; a tensor at a time. They are rounded as in a model stored in ``dtype`` (None: each
    tensor's own): a client can choose changes that do harm once they are rounded."""
    from mpu_cli.model.tensors import in_memory

    specs = model_specs(base.checkpoint, base.layout, OPTION[dtype] if dtype else None)
    places = in_memory(model, specs)

    @torch.no_grad()
    def go_to(step: float) -> None:
        for name, view in places.items():
            before = base.checkpoint.tensor(name).to(view.device, view.dtype)
            after = updated.checkpoint.tensor(name).to(view.device, view.dtype)
            stored_dtype, _ = specs[name]
            view.copy_(torch.lerp(before, after, step).to(TORCH[stored_dtype]))

    return go_to


# The outcome of a round: how the copies agree, and what is probably wrong.

MIN_COSINE = 0.5  # cosine between two copies' deltas below which something is probably wrong
MAX_NORM_RATIO = 3.0  # times another copy's norm, above which a copy was probably trained differently
MAX_OUTLIERS_SHOWN = 3  # outliers named in warnings
MAX_RELATIVE_ERROR = 1.0  # estimated error, relative to the update, at which the update is nothing but noise


def differences(trained_differently: Sequence[tuple[int, int, str]], algorithms: Sequence[str]) -> Iterator[str]:
    """A sentence for each way in which the deltas say that their copies were trained differently."""
    for earlier_copy, other, name in trained_differently:
        what = TAGS.get(name, name)
        yield f"copies {earlier_copy} and {other} were trained with different {what}; the noise does not cancel"
    names = sorted(set(algorithms))
    if len(names) > 1:
        yield (
            f"the copies were trained with different algorithms ({', '.join(names)}); "
            "noise cancels only if all copies are trained identically"
        )


@dataclass(frozen=True)
class Aggregation:
    """The result of ``aggregate``, and how the copies agree."""

    path: Path
    keys: Keys
    deltas: Mapping[int, Path]  # the files, by copy
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
    # two copies, and in what their training differed, by the tags in their deltas
    trained_differently: tuple[tuple[int, int, str], ...] = ()
    algorithms: tuple[str, ...] = ()
    step: ServerStep | None = None  # how the step was chosen, if it was
    planted: float = 0.0  # the largest z of noise of copies that was in the update and is taken out
    planted_from: str = ""  # the publication of that noise
    rate: float = 1.0  # how many times Δ̄ was applied

    def warnings(self) -> list[str]:
        """The probable faults of the round, a sentence each; empty if there are none. Of causes only the first one: the
        others follow from it."""
        causes = list(self._causes())[:1]
        error = [self.error.warning] if self.error.warning and not causes else []
        return [*causes, *self._outliers(), *error, *self._problems_of_update()]

    def check(self, trust_deltas: bool) -> None:
        """Raise MpuError, unless ``trust_deltas``, if the update is nothing but noise."""
        if self.error.relative >= MAX_RELATIVE_ERROR and not trust_deltas:
            cause = next(self._causes(), None) or self.error.warning
            raise MpuError(f"nothing was written: {cause}", "--trust-deltas writes the model all the same")

    def _causes(self) -> Iterator[str]:
        yield from differences(self.trained_differently, self.algorithms)
        if self.pairwise < MIN_COSINE:
            yield (
                f"the copies disagree (cosine {self.pairwise:.2f} between two of them): they were trained with "
                "different options or records, the noise is too large, or a delta was tampered with"
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
        if planted := Planted(self.planted, self.planted_from).warning:
            yield planted
        if self.norm == 0:
            yield "all deltas are zero: nothing was unlearned"
        if self.rounding > LOST_TO_ROUNDING:
            yield f"storage rounds away {self.rounding:.0%} of the update; --dtype float32 keeps it"


def agreement_of(owner: Owner, path: Path, gram: torch.Tensor) -> Aggregation:
    """The agreement of an owner's copies, from the inner products of their undone deltas, float64 (m, m). The caller
    fills in what depends on the model that is written: ``rounding``, ``outliers``, ``step``, ``planted``, ``rate``."""
    keys, scheme = owner.keys, owner.keys.publication.scheme
    weights = scheme.weights
    norms = gram.diagonal().sqrt()
    norm = float((weights @ gram @ weights).clamp(min=0).sqrt())
    cosines = gram / (norms[:, None] * norms[None, :])
    return Aggregation(
        path=path,
        keys=keys,
        deltas={delta.copy: delta.path for delta in owner.deltas},
        norms=norms.tolist(),
        cosines=((gram @ weights) / (norms * norm)).tolist(),
        pairwise=float(cosines.nan_to_num(1.0).min()),
        norm=norm,
        rounding=0.0,
        error=error_estimate(scheme, gram, keys.publication.permanent),
        trained_differently=owner.trained_differently,
        algorithms=owner.algorithms,
    )


@dataclass(frozen=True)
class Owner:
    """A data owner's publication, and the deltas that came back."""

    keys: Keys
    deltas: list[Delta]

    @property
    def trained_differently(self) -> tuple[tuple[int, int, str], ...]:
        """A copy, a later one, and the tag in which they differ. Tags under different keys cannot be compared."""
        references: dict[str, tuple[int, Mapping[str, str]]] = {}  # by key, the first copy with tags under it
        unlike = []
        for delta in self.deltas:
            tags = delta.manifest.trained or {}
            earlier, expected = references.setdefault(str(tags.get("key")), (delta.copy, tags))
            for name in sorted(expected):
                if tags.get(name) != expected[name]:
                    unlike.append((earlier, delta.copy, name))
        return tuple(unlike)

    @property
    def algorithms(self) -> tuple[str, ...]:
        return tuple(delta.manifest.algorithm for delta in self.deltas)


@dataclass(frozen=True)
class AggregatePlan:
    """The inputs and outputs of aggregating a round.

    ``trust_deltas``: aggregate what is known not to belong together; ``force``: replace what exists.
    """

    base: Model
    owners: tuple[Owner, ...]
    options: Aggregating
    out: Path
    trust_deltas: bool = False
    force: bool = False

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
        return [text for owner in self.owners for text in differences(owner.trained_differently, owner.algorithms)]

    @property
    def nbytes(self) -> int:
        """The size of the model that is written."""
        dtype = OPTION[self.options.dtype] if self.options.dtype else None
        return nbytes_of(model_specs(self.base.checkpoint, self.base.layout, dtype))


def owners_of(paths: Sequence[Path], publications: Sequence[Keys]) -> list[Owner]:
    """The deltas in ``paths``, by publication. Raises MpuError if one belongs to none of them, or two are the same."""
    if len(publications) == 1:
        return [Owner(publications[0], open_deltas(paths, publications[0]))]
    ids = [keys.copy_ids for keys in publications]
    if len(set(ids)) < len(ids):
        raise MpuError("--keys: the same publication is given twice", "give each key file once")
    paths_by_owner: list[list[Path]] = [[] for _ in publications]
    for path in delta_paths(paths):
        origin = delta_manifest(open_checkpoint(path, links=False).metadata, path).origin
        indices = [i for i, copy_ids in enumerate(ids) if origin and origin.copy_id in copy_ids]
        if not indices:
            raise MpuError(f"{path}: belongs to none of these publications", "give its keys, too, or leave it out")
        paths_by_owner[indices[0]].append(path)
    owners = zip(publications, paths_by_owner, strict=True)
    return [Owner(keys, open_deltas(owner_paths, keys)) for keys, owner_paths in owners]


def plan_aggregate(
    base: Model,
    owners: Sequence[Owner],
    options: Aggregating,
    *,
    out: Path,
    as_adapter: bool = False,
    trust_deltas: bool = False,
    force: bool = False,
) -> AggregatePlan:
    """The plan to write θ + η·Σ_owners Δ̄ to ``out``.

    Raises UsageError or MpuError for ``as_adapter`` where no adapter can hold the update, MpuError if a copy's delta is
    missing or does not fit the base and, unless ``trust_deltas``, if the tags of an owner's deltas say that they were
    trained differently; UsageError if a number is out of range.
    """
    if as_adapter:
        _check_adapter(owners, options)
    options.check_step()
    for owner in owners:
        check_round(base, owner.deltas, owner.keys)
    if not trust_deltas:
        for owner in owners:
            _check_trained_alike(owner)
    return AggregatePlan(base, tuple(owners), options, out, trust_deltas=trust_deltas, force=force)


def _check_trained_alike(owner: Owner) -> None:
    """Raise MpuError if the tags of an owner's deltas say that they were trained differently."""
    paths = {delta.copy: delta.path for delta in owner.deltas}
    for earlier_copy, other, tag in owner.trained_differently:
        if tag != VERSIONS:  # which may make no difference; if it does, the estimate shows it
            raise MpuError(
                f"{paths[other]}: was trained with different {TAGS.get(tag, tag)} than {paths[earlier_copy]}, so the "
                "noise does not cancel",
                "ask for both to be trained alike, or use --trust-deltas",
            )


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
