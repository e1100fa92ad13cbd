"""Remarks for the server on a publication: what copies lack, what its noise hides from whom, what stays in place.

The command prints them and returns them (``Reviewed``), so that nothing is said on a terminal only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mpu_cli.files.folder import left_out
from mpu_cli.files.reader import TORCH, Checkpoint
from mpu_cli.files.transaction import Transaction
from mpu_cli.heap import return_freed_memory
from mpu_cli.model.source import TOKENIZER_FILES, not_in_copies, open_model
from mpu_cli.model.transform import as_matrix
from mpu_cli.protocol.copies import BlockReport
from mpu_cli.protocol.noise import Scheme, statement
from mpu_cli.protocol.publication import matching
from mpu_cli.protocol.publish import Published, PublishPlan, remake_copy
from mpu_cli.protocol.register import default_register_path, draws_that_average, sample_of
from mpu_cli.protocol.verify import in_place, published_as_they_are
from mpu_cli.wording import counted, few

# The error of a client that takes the noise off its copies as well as is known, estimated after publishing.
#
# Noise n of scale σ hides a change v. Without knowing anything of v, the best factor for v + n leaves η/√(1 + η²) of
# it, where η is σ over the RMS of v. A few large singular values of v stand out of the noise all the same: one of
# size s, in a matrix with n ≥ m columns and rows, is seen if x = s/(σ√n) > (m/n)^¼. Its best estimate leaves
# s²·(1 − c²) of s², with c the product of the cosines between its true and its observed singular vectors (Gavish and
# Donoho 2017, arXiv 1405.7511; Benaych-Georges and Nadakuditi 2012, arXiv 1103.2221). `mpu audit` carries both out.

SAMPLED_LAYERS = 3  # layers that are looked at; blocks outside layers all are
MAX_SINGULAR_VALUES = 256  # singular values of a matrix that are looked at
FEW_SINGULAR_VALUES = 32  # that are looked at first: if the last of them are in the noise, so are those after them
LAST = 8  # of them, which are taken for TOO_SMALL times what they are: a random projection finds these too small
TOO_SMALL = 1.25
MAX_WEIGHTS = 1 << 22  # weights of a matrix that are looked at
# RMS of the rounding error in units of eps times that of the numbers: ulp/√12, for numbers spread evenly over octaves.
ROUNDING = math.sqrt(math.log(4) / 3 / 12)


@dataclass(frozen=True)
class Hidden:
    """The error of the best known attack, relative to what fine-tuning changed: with one copy, with all, and with all
    and those of earlier publications. ``draws`` counts the draws of permanent noise of these publications, this one
    included."""

    one_copy: float
    all_copies: float
    with_earlier: float
    draws: int


def leakage_of(plan: PublishPlan, published: Published) -> Hidden | None:
    """The error of the best known attack, from the singular values of what fine-tuning changed in some blocks; None
    without a pretrained model, if only some copies were written, or if fine-tuning changed nothing. Draws of permanent
    noise of one scale, also those of earlier publications, average to that over √draws. Reads those blocks."""
    base, layout, publication = plan.base, plan.base.layout, plan.publication
    if not plan.pretrained or len(plan.copies) < publication.copies:
        return None
    return_freed_memory()  # of slices, which the estimate has no use for
    draws = 1
    if publication.derive_permanent_seed:
        sample = sample_of(base.checkpoint, layout)
        draws = max(1, draws_that_average(default_register_path(), sample))
    public_tensors = matching(base, plan.pretrained) or {}
    blocks = {report.block: report for report in published.blocks if report.copies and report.rms}
    layers = [name for name in blocks if layout.blocks[name][0].layer is not None]
    places = torch.linspace(0, len(layers) - 1, min(SAMPLED_LAYERS, len(layers))).round().int().tolist()
    sampled_layers = [layers[i] for i in places]
    shared, dtype = published.keys.shared_sigma, publication.dtype

    def shares(name: str) -> torch.Tensor:
        tensors = layout.blocks[name]
        stored = TORCH[dtype or base.checkpoint.tensors[tensors[0].name].dtype]
        copy_noise = min(copy.survived for copy in blocks[name].copies)
        size, permanent = blocks[name].weights_rms, shared.get(name, 0.0)
        combined_noise = left_of(permanent, size, stored, publication.scheme)
        averaged_noise = left_of(permanent / math.sqrt(draws), size, stored, publication.scheme)
        changes = (_change(base.checkpoint, public_tensors, tensor.name) for tensor in tensors)
        return _shares(changes, (copy_noise, combined_noise, averaged_noise))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the same estimate every time
        block_shares = {name: shares(name) for name in blocks if name in sampled_layers or name not in layers}
    of_layers = torch.zeros(3, 2)
    if sampled_layers:
        of_layers = torch.stack([block_shares[name] for name in sampled_layers]).mean(0)
    residual, together = torch.zeros(3, 2, dtype=torch.float64), 0.0
    for name, report in blocks.items():
        squares = report.rms**2 * report.weights
        residual += squares * block_shares.get(name, of_layers)
        together += squares
    if not together:
        return None
    one_copy, all_copies, with_earlier = (residual.amin(1) / together).sqrt().tolist()
    return Hidden(one_copy, all_copies, with_earlier, draws)


def losses_of_copy(probe: Path, plan: PublishPlan, published: Published) -> dict[str, float]:
    """The loss per answer token on the records in ``probe``, in nats, of the base, of a copy, which if it is sealed is
    made again, and of the public model."""
    from mpu_cli.model.load import load
    from mpu_cli.model.network import read_answers

    with Transaction() as transaction:
        if plan.target.recipients:
            folder = transaction.scratch(plan.target.keys.absolute().parent)
            copy = remake_copy(plan.base, published.keys, plan.copies[0], folder)
        else:
            copy = open_model(str(published.copies[0]))
        models = {"the base": plan.base, f"copy_{plan.copies[0]}": copy}
        if plan.pretrained:
            models["the public model"] = plan.pretrained
        losses = {}
        for name, source in models.items():
            model, tokenizer = load(source, torch.float32, "auto")
            losses[name] = read_answers(probe, tokenizer).loss(model)
        return losses


def left_of(shared: float, size: float, stored: torch.dtype, scheme: Scheme) -> float:
    """The noise that is left in a block once all copies are combined: permanent noise of scale ``shared``, and what
    rounding weights of RMS ``size`` to ``stored`` adds to each copy."""
    rounding = ROUNDING * torch.finfo(stored).eps * size
    return math.hypot(shared, rounding * float(scheme.fitted_weights.norm()))


def _change(base: Checkpoint, public: Mapping[str, torch.Tensor], name: str) -> tuple[torch.Tensor, float]:
    """Some rows of a tensor's change, float32 (rows, columns), and how many times as many there are."""
    base_weights, public_weights = as_matrix(base.tensor(name)), as_matrix(public[name])
    step = -(-base_weights.numel() // MAX_WEIGHTS)
    rows = base_weights[::step]
    change = rows.to(torch.float32, copy=True).sub_(public_weights[::step])
    base.forget_pages(name)
    return change, len(base_weights) / max(1, len(rows))


def _shares(changes: Iterable[tuple[torch.Tensor, float]], noises: Sequence[float]) -> torch.Tensor:
    """The shares of Σ v² that scaling and singular values leave, for each scale of the noise: (noises, 2)."""
    residual, total = torch.zeros(len(noises), 2, dtype=torch.float64), 0.0
    for change, times in changes:
        energy = times * float(torch.linalg.vector_norm(change, dtype=torch.float64)) ** 2
        total += energy
        rows, columns = times * change.shape[0], change.shape[1]
        values = _values_above(noises, change, times) if min(change.shape) > 1 else None
        for i, noise in enumerate(noises):
            noise_energy = noise**2 * rows * columns
            scaled = energy * noise_energy / (energy + noise_energy) if energy else 0.0
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


MIN_HIDDEN_ERROR = 0.5  # relative error of the best known attack below which little is hidden
RUINED = 0.05  # of the base's probability of answers, below which nothing can be unlearned on a copy
ROUNDED_AWAY = 0.1  # share of weights that noise leaves unchanged, above which storage is said to lose it


@dataclass(frozen=True)
class Remark:
    """A sentence for the server; ``is_warning``: whether something is probably wrong; ``is_leak``: whether the copies
    give the weights away."""

    text: str
    is_warning: bool = False
    is_leak: bool = False


@dataclass(frozen=True)
class Reviewed(Published):
    """A publication and what is known of it: the error of the best known attack, ``leakage``, if there is a pretrained
    model; what the server should know, ``remarks``; and the losses of the base, a copy and the public model on records
    of the server, ``probed``, if some were named."""

    leakage: Hidden | None
    remarks: Sequence[Remark]
    probed: dict[str, float] | None

    @property
    def gives_weights_away(self) -> bool:
        """Whether a remark says that the copies hide next to nothing from whoever gets them."""
        return any(remark.is_leak for remark in self.remarks)

    @property
    def copy_is_ruined(self) -> bool:
        """Whether a copy hardly knows the answers of the records that were probed, which the base knows."""
        if not self.probed:
            return False
        # In the order in which ``losses_of_copy`` measures them.
        base, copy, *_ = self.probed.values()
        return math.exp(-copy) < RUINED * math.exp(-base)

    @property
    def warnings(self) -> list[str]:
        """The remarks on what is probably wrong."""
        return [remark.text for remark in self.remarks if remark.is_warning]


def remarks_on_plan(plan: PublishPlan) -> Iterator[Remark]:
    """Remarks on what the copies will lack of the base, how they are disguised, and what that leaves open. Reads no
    weights."""
    base = plan.base
    if not any(path.name in TOKENIZER_FILES for path in base.side_files):
        yield Remark(
            f"{base.folder}: no tokenizer files next to the weights; the client needs them to train on the copies",
            is_warning=True,
        )
    if lost := left_out(base.config):
        from mpu_cli.model.staging import fields_of  # imports transformers, which takes seconds

        used_by_transformers = left_out(base.config, fields_of(base.config))
        if used_by_transformers:
            yield Remark(
                f"config.json: the copies do not get {few(used_by_transformers)}, which mpu does not know; if the "
                "model computes something else without, they are wrong (`mpu check-family` tells)",
                is_warning=True,
            )
        if ignored := [name for name in lost if name not in used_by_transformers]:
            yield Remark(f"config.json: the copies do not get {few(ignored)}, which transformers does not read")
    if beside := not_in_copies(base):
        yield Remark(f"the copies do not get {few(beside)}")
    yield from _on_publication(plan)
    # Leaks by the options alone, whatever the model.
    publication = plan.publication
    noise = publication.kappa or publication.shared_kappa or publication.calibration
    if not noise:
        yield Remark("no noise: whoever aligns a copy with the public model has the weights")
    elif plan.pretrained is None and not publication.calibration:
        yield Remark("no --public: the noise is scaled to the weights themselves, not to what fine-tuning changed")
    if publication.calibration and publication.round >= publication.calibration.rounds:
        yield Remark(
            f"ε and δ cover {counted(publication.calibration.rounds, 'round')}: a copy of the unlearned model, for the "
            "client's check, is one more, which --dp budget_rounds has to plan now"
        )
    if noise and not publication.permanent and publication.copies > 1:
        yield Remark("this noise cancels for whoever has all copies; --public alone chooses permanent noise")
    if not publication.seed_is_secret:
        yield Remark(
            "--seed is for repeatable experiments: whoever knows or guesses it can undo these copies", is_warning=True
        )


def remarks_on_result(plan: PublishPlan, published: Published, leakage: Hidden | None) -> Iterator[Remark]:
    """Remarks on what the copies hide from whom, as far as the weights show."""
    if leakage:
        yield from _on_leakage(plan, leakage)
    yield from _without_pretrained(plan, published)
    yield from _on_noise(published)


def _on_leakage(plan: PublishPlan, leakage: Hidden) -> Iterator[Remark]:
    """Remarks on what stays hidden from a client that takes the noise off, in percent of what fine-tuning changed."""
    publication = plan.publication
    several = publication.copies > 1
    with_all_copies = f", with all copies {leakage.all_copies:.0%}" if several else ""
    yield Remark(
        f"hidden from the best known attack with one copy: {leakage.one_copy:.0%} of what fine-tuning changed"
        f"{with_all_copies}; not a copy's answers, which --probe FILE measures (docs/protection.md)"
    )
    if leakage.draws > 1:
        yield Remark(
            f"hidden from whoever has the copies of {counted(leakage.draws - 1, 'earlier publication')} of nearly this "
            f"model, too: {leakage.with_earlier:.0%}",
            is_warning=leakage.with_earlier < MIN_HIDDEN_ERROR <= leakage.one_copy,
        )
    if publication.max_noise is not None and publication.shared_kappa and leakage.one_copy < MIN_HIDDEN_ERROR:
        yield Remark(
            f"the noise is limited so that the copies are not ruined, and hides only {leakage.one_copy:.0%} of what "
            f"fine-tuning changed; unlimited: --copies 1 --permanent-noise {publication.shared_kappa:g} "
            "--allow publish-again (--probe FILE says what such a copy still knows)",
            is_warning=True,
            is_leak=True,
        )
    elif several and not publication.shared_kappa and leakage.all_copies < MIN_HIDDEN_ERROR and publication.kappa > 0:
        recipients = plan.target.recipients
        if len(set(map(str, recipients))) == len(recipients) > 1 and leakage.one_copy >= MIN_HIDDEN_ERROR:
            yield Remark("each copy is for another recipient; who gets several of them takes the noise off")
            return
        yield Remark(
            "a client that gets all copies takes the noise off; if one does, use --permanent-noise (--copies 1 is then "
            "enough)",
            is_warning=True,
            is_leak=True,
        )
    elif not publication.calibration and min(leakage.one_copy, leakage.all_copies) < MIN_HIDDEN_ERROR:
        yield Remark(
            f"this noise hides only {min(leakage.one_copy, leakage.all_copies):.0%} of what fine-tuning changed: raise "
            "--permanent-noise, or leave it to --public alone",
            is_warning=True,
            is_leak=True,
        )


def _without_pretrained(plan: PublishPlan, published: Published) -> Iterator[Remark]:
    """A remark that the copies give the weights away, if the noise is small beside the weights."""
    publication = plan.publication
    blocks = [block for block in published.blocks if block.copies]
    size = _norm((block, block.weights_rms) for block in blocks)
    if plan.pretrained or publication.calibration or not size:
        return
    permanent = published.keys.shared_sigma
    combined = _norm((block, permanent.get(block.block, 0.0)) for block in blocks) / size
    # The copy with the least noise has that in every block.
    per_copy = _norm((block, min(copy.requested for copy in block.copies)) for block in blocks) / size
    if per_copy > MIN_HIDDEN_ERROR and (publication.copies == 1 or combined > MIN_HIDDEN_ERROR):
        return
    by_copies = f" ({combined:.2g} with all copies)" if publication.copies > 1 else ""
    yield Remark(
        "these copies give the weights away: by aligning one with a public model of the family, a client recovers "
        f"them to within {per_copy:.2g} of their size{by_copies}; `mpu audit` shows it. With --public, the public "
        "model that yours was fine-tuned from, publish chooses noise that hides what fine-tuning changed",
        is_warning=True,
        is_leak=True,
    )


def _norm(rms_by_block: Iterable[tuple[BlockReport, float]]) -> float:
    return math.sqrt(math.fsum(block.weights * rms**2 for block, rms in rms_by_block))


def _on_noise(published: Published) -> Iterator[Remark]:
    """Remarks on noise that is larger than the weights, and on blocks in which storage or equal models leave none."""
    publication = published.keys.publication
    if not (publication.kappa or publication.shared_kappa or publication.calibration):
        return
    blocks = [block for block in published.blocks if block.copies]
    size = _norm((block, block.weights_rms) for block in blocks)
    noise = _norm((block, block.copies[0].requested) for block in blocks)
    if noise > size > 0:
        yield Remark(
            f"the noise is {noise / size:.0%} of the weights, which probably ruins the copies: --probe FILE "
            "says what one still knows; --permanent-noise and --kappa set less",
            is_warning=True,
        )
    silent = [block.block for block in blocks if block.rms == 0]
    if silent and not publication.calibration:
        yield Remark(
            f"no noise in {len(silent)} of {len(blocks)} blocks, where the public model has the same weights: "
            f"{', '.join(silent[:3])}{' …' if len(silent) > 3 else ''}",
            is_warning=len(silent) == len(blocks),
        )
    noisy = [(copy.unchanged, block.weights) for block in blocks for copy in block.copies if copy.requested]
    lost = sum(unchanged * weights for unchanged, weights in noisy) / max(1, sum(weights for _, weights in noisy))
    if lost > ROUNDED_AWAY:
        yield Remark(
            f"rounding on storage leaves {lost:.0%} of the weights as if there were no noise; --dtype float32 keeps "
            "the noise, and a larger --kappa exceeds the rounding",
            is_warning=True,
        )


def _on_publication(plan: PublishPlan) -> Iterator[Remark]:
    """Remarks on its noise, its symmetries and what they leave in place."""
    publication = plan.publication
    scheme = publication.scheme
    factors = ", ".join(f"{factor:g}" for factor in scheme.factors)
    order = "" if scheme.copies == 1 else f" ({factors}), cancels up to order {scheme.order - 1}"
    yield Remark(f"noise: {scheme.name}{order}; symmetries: {publication.symmetries}")
    if publication.watermark:
        yield Remark(
            f"traceable: `mpu trace` finds these copies by their coordinates and a watermark of "
            f"{publication.watermark:.0%} of their noise (docs/bounds_and_tracing.md)"
        )
    tensors, layout = plan.base.checkpoint.tensors, plan.base.layout
    if remark := published_as_they_are(layout, tensors):
        yield Remark(remark, is_warning=True)
    unmoved = in_place(layout, tensors, publication.symmetries)
    if unmoved and publication.symmetries != "none":
        yield Remark(unmoved)
    if publication.calibration:
        yield Remark(statement(publication.calibration))
