"""What a server should know of a publication: what copies lack, what its noise hides from whom, what stays in place.

The command prints it, and a ``Published`` has it, so that nothing is said on a terminal only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mpu_cli.architectures.layout import layout_of
from mpu_cli.boundary.cleaning import left_out
from mpu_cli.heap import return_freed_memory
from mpu_cli.models.files import not_in_copies
from mpu_cli.models.source import TOKENIZER_FILES
from mpu_cli.server.calibration import statement
from mpu_cli.server.leakage_estimate import Hidden, estimate_attack_error
from mpu_cli.server.publish import Published, PublishPlan
from mpu_cli.server.symmetry_check import in_place, published_as_they_are
from mpu_cli.wording import few

HARDLY = 0.5  # relative error of the best known attack below which little is hidden
ROUNDED_AWAY = 0.1  # share of weights that noise leaves unchanged, above which storage is said to lose it
UNSCALED = "no --pretrained: the noise is scaled to the weights themselves, not to what fine-tuning changed"


@dataclass(frozen=True)
class Remark:
    """A sentence for the server; ``is_warning``: whether something is probably wrong."""

    text: str
    is_warning: bool = False


def leakage_of(plan: PublishPlan, published: Published) -> Hidden | None:
    """How far off the best known attack is; None without a pretrained model, or if only some copies were written."""
    complete = len(plan.copies) == plan.publication.copies
    if not (plan.pretrained and complete):
        return None
    return_freed_memory()  # of slices, which the estimate has no use for
    return estimate_attack_error(plan, published)


def remarks_on_plan(plan: PublishPlan) -> Iterator[Remark]:
    """What the copies will lack of the base. Reads no weights."""
    base = plan.full_base
    if not any(path.name in TOKENIZER_FILES for path in base.side_files):
        yield Remark(
            f"{base.folder}: no tokenizer files next to the weights; the client needs them to train on the copies",
            is_warning=True,
        )
    if lost := left_out(base.config):
        from mpu_cli.models.staging import fields_of  # imports transformers, which takes seconds

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


def remarks_on_result(
    plan: PublishPlan, published: Published, leakage: Hidden | None, *, secret_factors: bool
) -> Iterator[Remark]:
    """What the copies hide from whom, and what stays in place; with the noise's factors unless they are secret."""
    if leakage:
        yield from _on_leakage(plan, leakage)
    yield from _without_pretrained(plan, published)
    yield from _on_noise(published)
    yield from _on_publication(plan, secret_factors=secret_factors)


def _on_leakage(plan: PublishPlan, leakage: Hidden) -> Iterator[Remark]:
    """What stays hidden from a client that takes the noise off, in percent of what fine-tuning changed."""
    publication = plan.publication
    several = publication.copies > 1
    with_all_copies = f", with all copies {leakage.all_copies:.0%}" if several else ""
    yield Remark(
        f"hidden from the best known attack with one copy: {leakage.one_copy:.0%} of what fine-tuning changed"
        f"{with_all_copies} (`mpu audit` carries it out). What a copy answers is not hidden: --probe FILE measures it "
        "(docs/protection.md)"
    )
    if publication.max_noise is not None and leakage.one_copy < HARDLY:
        yield Remark(
            "fine-tuning changed so much of these weights that noise which hides it would ruin the copies; "
            "--permanent-noise, without --max-noise, tries it all the same",
            is_warning=True,
        )
    elif several and not publication.shared_kappa and leakage.all_copies < HARDLY and publication.kappa > 0:
        yield Remark(
            "a client that gets all copies takes the noise off; if one does, use --permanent-noise (--copies 1 is then "
            "enough)",
            is_warning=True,
        )


def _without_pretrained(plan: PublishPlan, published: Published) -> Iterator[Remark]:
    """That the copies give the weights away, if the noise is small beside the weights."""
    publication = plan.publication
    blocks = [block for block in published.blocks if block.copies]
    size = math.sqrt(math.fsum(block.weights * block.weights_rms**2 for block in blocks))
    if plan.pretrained or publication.calibration or not size:
        return
    copies = range(len(published.copies))
    noise = [math.fsum(block.weights * block.copies[copy].requested ** 2 for block in blocks) for copy in copies]
    permanent = published.keys.shared_sigma
    shared = math.fsum(block.weights * permanent.get(block.block, 0.0) ** 2 for block in blocks)
    per_copy, combined = math.sqrt(min(noise)) / size, math.sqrt(shared) / size
    if per_copy > HARDLY and (publication.copies == 1 or combined > HARDLY):
        return
    by_copies = f" ({combined:.2g} with all copies)" if publication.copies > 1 else ""
    yield Remark(
        "these copies give the weights away: by aligning one with a public model of the family, a client recovers "
        f"them to within {per_copy:.2g} of their size{by_copies}; `mpu audit` shows it. With --pretrained, the public "
        "model that yours was fine-tuned from, publish chooses noise that hides what fine-tuning changed",
        is_warning=True,
    )


def _on_noise(published: Published) -> Iterator[Remark]:
    """Where storage or equal models leave no noise."""
    publication = published.keys.publication
    if not (publication.kappa or publication.shared_kappa or publication.calibration):
        return
    blocks = [block for block in published.blocks if block.copies]
    silent = [block.block for block in blocks if block.rms == 0]
    if silent and not publication.calibration:
        yield Remark(
            f"no noise in {len(silent)} of {len(blocks)} blocks, where base and pretrained model are equal: "
            f"{', '.join(silent[:3])}{' …' if len(silent) > 3 else ''}",
            is_warning=True,
        )
    noisy = [(copy.unchanged, block.weights) for block in blocks for copy in block.copies if copy.requested]
    lost = sum(unchanged * weights for unchanged, weights in noisy) / max(1, sum(weights for _, weights in noisy))
    if lost > ROUNDED_AWAY:
        yield Remark(
            f"rounding on storage leaves {lost:.0%} of the weights as if there were no noise; --dtype float32 keeps "
            "the noise, and a larger --kappa exceeds the rounding",
            is_warning=True,
        )


def _on_publication(plan: PublishPlan, *, secret_factors: bool) -> Iterator[Remark]:
    """Its noise, its symmetries and what they leave in place; the noise's factors unless they are secret."""
    publication = plan.publication
    scheme = publication.scheme
    if publication.omitted:
        lacking = few([str(layer) for layer in publication.omitted])
        yield Remark(f"layers left out: {lacking}; above, the others are numbered as in the copies")
    factors = "" if secret_factors else f" ({', '.join(f'{factor:g}' for factor in scheme.factors)})"
    order = "" if scheme.copies == 1 else f"{factors}, cancels up to order {scheme.order - 1}"
    yield Remark(f"noise: {scheme.name}{order}; symmetries: {publication.symmetries}")
    if publication.mark:
        yield Remark(
            f"traceable: `mpu trace` finds these copies by their coordinates and a mark of {publication.mark:.0%} of "
            "their noise (docs/tracing.md)"
        )
    tensors = plan.full_base.checkpoint.tensors
    layout = layout_of(tensors, plan.full_base.config, plan.full_base.source)
    if bare := published_as_they_are(layout, tensors):
        yield Remark(bare, is_warning=True)
    unmoved = in_place(layout, tensors, publication.symmetries)
    if unmoved and publication.symmetries != "none":
        yield Remark(unmoved)
    if publication.calibration:
        yield Remark(statement(publication.calibration))
