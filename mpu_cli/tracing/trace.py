"""Which copy a model came from: evidence in its coordinates and in the noise that is left in it, with p-values.

A publication's seed is secret, so a model that was not made from its copies is independent of it. Two statistics
follow, whose distributions under that hypothesis do not depend on the model:

- *Coordinates.* The order and the signs in which the model has the base's model dimension, found by alignment, agree
  with a copy's secret ones in at least k places with a probability of at most 1/(2ᵏ·k!) (``suspect.log_chance``).
- *Noise.* r is what is left of the difference between the model and the base, a slice of weights after the other, once
  the base, permanent noise and the public model are regressed out of it and its tails are clipped. The noise n of a
  copy, or the mark of a publication, was drawn from independent standard normals, so z = Σ w⟨r, n⟩ / √(Σ w²‖r‖²‖t‖²) is
  standard normal given r, whatever r is; t is how n is mixed from its draws, and w = 1/mean(r²) gives weights that were
  changed less more say.

All tests together are corrected by Bonferroni's inequality. Models are read in slices, the base once more before, for
its fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor

import torch

from mpu_cli.architectures.layout import Layout, TensorLayout, layout_of
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.errors import MpuError
from mpu_cli.models.shallow import shallow
from mpu_cli.models.source import Model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.server.deltas import check_base
from mpu_cli.server.keys import Keys
from mpu_cli.server.noise import Scales
from mpu_cli.server.pretrained import matching
from mpu_cli.symmetry.axis import AxisMap
from mpu_cli.symmetry.transform import TensorMap, Transform, as_matrix, row_slices
from mpu_cli.tracing.evidence import LEVEL, CopyEvidence, PublicationEvidence, Trace
from mpu_cli.tracing.noise import PublicationKeys, PublishedNoise, Sums, clip, sums_of
from mpu_cli.tracing.suspect import (
    Frames,
    Suspect,
    count_agreements,
    find_residual,
    log_chance,
    match_layers,
    match_suspect,
    open_suspect,
)

HUGE = 100.0  # times the largest weight of the base in a slice, beyond which a weight is clipped


def trace(
    source: str,
    publications: Sequence[PublicationKeys],
    pretrained: Model | None = None,
    *,
    observer: Observer = SILENT,
) -> Trace:
    """Look for every copy of ``publications`` in the model at ``source``.

    ``pretrained``: the public model, which makes models between it and a copy easier to trace. Raises MpuError for a
    model of another architecture or vocabulary, and for a base that is not what was published.
    """
    checkpoint = open_suspect(source)
    observer.stage("trace", sum(each.base.checkpoint.nbytes for each in publications))
    results = []
    residuals: dict[tuple[str, tuple[int, ...]], AxisMap] = {}
    checked: set[tuple[str, str]] = set()
    with worker_pool() as pool:
        for each in publications:
            identity = (each.base.address, each.keys.base.fingerprint)
            if identity not in checked:
                check_base(each.base, each.keys, pool)
                checked.add(identity)
            omitted = each.keys.publication.omitted
            base = shallow(each.base, omitted)
            layout = layout_of(base.checkpoint.tensors, base.config, base.source)
            suspect = match_suspect(source, checkpoint, base.checkpoint, layout)
            which = (each.keys.base.fingerprint, omitted)
            if which not in residuals:
                residuals[which] = find_residual(suspect, base.checkpoint, layout)
            suspect = match_layers(suspect, base.checkpoint, layout, residuals[which])
            public = shallow(pretrained, omitted) if pretrained else None
            tracer = _Tracer(each, base, layout, suspect, residuals[which], matching(base, layout, public), pool)
            results.append(tracer.evidence(observer))
    return Trace(source, tuple(results))


class _Tracer:
    """One publication in one suspect."""

    def __init__(
        self, publication: PublicationKeys, base: Model, layout: Layout, suspect: Suspect, residual: AxisMap,
        public: Mapping[str, torch.Tensor] | None, pool: Executor,
    ):  # fmt: skip
        self._label, self._keys, self._pool = publication.label, publication.keys, pool
        self._base, self._layout, self._suspect, self._public = base.checkpoint, layout, suspect, public
        values = self._keys.publication
        self._copies = range(1, values.copies + 1)
        self._noise = PublishedNoise(publication)
        transforms = [values.transform(copy, layout) for copy in self._copies]
        self._agreements = [_agreements(residual, transform, layout) for transform in transforms]
        drawn = _model_map(transforms[0], layout)
        self._signed = drawn is not None and drawn.signs is not None
        likely = [
            transform
            for transform, count in zip(transforms, self._agreements, strict=True)
            if count is not None and log_chance(count, signed=self._signed) < math.log(LEVEL)
        ]
        self._frames = Frames(suspect, base.checkpoint, layout, residual, likely)
        self._coordinates = len(residual)

    def evidence(self, observer: Observer) -> PublicationEvidence:
        sums = Sums(torch.zeros(len(self._copies) + 1, 3, dtype=torch.float64))
        for block, tensors in self._layout.blocks.items():
            for tensor in tensors:
                observer.advance(self._base.tensors[tensor.name].nbytes)
            scales = self._keys.scales(block)
            frames = self._frames.of_block(tensors) if scales.cancelling or scales.mark else {}
            for tensor in tensors:
                if tensor.name in frames:
                    name, mapping = frames[tensor.name]
                    for part in self._parts(tensor, name, mapping, scales):
                        sums.add(block, part)
                    self._suspect.checkpoint.forget_pages(name)
                self._base.forget_pages(tensor.name)
        publication, parameters = self._keys.publication, self._layout.parameters
        copies = tuple(
            CopyEvidence(
                copy, self._keys.recipients.get(str(copy)), count, self._coordinates, self._signed,
                sums.evidence(copy) if any(self._keys.sigma.values()) else None,
            )
            for copy, count in zip(self._copies, self._agreements, strict=True)
        )  # fmt: skip
        return PublicationEvidence(
            self._label, self._keys, sums.evidence(0) if publication.mark else None, copies,
            len(self._suspect.names), len(parameters), self._frames.aligned,
        )  # fmt: skip

    def _parts(self, tensor: TensorLayout, name: str, mapping: TensorMap, scales: Scales) -> list[torch.Tensor]:
        """The sums of each slice of one tensor."""
        clean, theirs = as_matrix(self._base.tensor(tensor.name)), as_matrix(self._suspect.checkpoint.tensor(name))
        public = None if self._public is None else as_matrix(self._public[tensor.name])
        columns = clean.shape[1]
        keys, templates = self._noise.keys(tensor.name, scales), self._noise.templates(scales)
        cancelling = templates.shape[1] - 1

        def work(start: int, stop: int) -> torch.Tensor:
            reference = clean[start:stop].float().flatten()
            rows = mapping.take(theirs, start, stop).float().nan_to_num(0.0, 0.0, 0.0)
            bound = HUGE * float(reference.abs().max())  # what was made huge would hide the rest
            undone = mapping.backward(rows.clamp(-bound, bound), start).flatten()
            draws = self._noise.draws(keys, start * columns, stop * columns)
            regressors = [reference]
            regressors += [draws[cancelling]] if scales.permanent else []
            regressors += [] if public is None else [public[start:stop].float().flatten()]
            residue = clip(_residual(clip(undone - reference), torch.stack(regressors)))
            square = float(residue.double().square().sum())
            if not square > 0 or not math.isfinite(square):
                return torch.zeros(len(templates), 3, dtype=torch.float64)
            mark = draws[-1] if scales.mark else torch.zeros_like(residue)
            return sums_of(residue, [*draws[:cancelling], mark], templates, residue.numel() / square)

        return list(self._pool.map(lambda bounds: work(*bounds), row_slices([mapping], *clean.shape)))


def _agreements(residual: AxisMap, transform: Transform, layout: Layout) -> int | None:
    axis_map = _model_map(transform, layout)
    return None if axis_map is None else count_agreements(residual, axis_map)


def _model_map(transform: Transform, layout: Layout) -> AxisMap | None:
    axis_map = transform.maps(layout.parameters[0]).get("model")
    return axis_map if isinstance(axis_map, AxisMap) else None


def _residual(difference: torch.Tensor, regressors: torch.Tensor) -> torch.Tensor:
    """``difference``, float32 (n,), without its projection on the ``regressors``, (k, n)."""
    gram = (regressors @ regressors.T).double()
    right = (regressors @ difference).double()
    steadied = gram + 1e-9 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    if not torch.isfinite(steadied).all() or not float(gram.diagonal().mean()) > 0:
        return difference
    coefficients = torch.linalg.lstsq(steadied, right[:, None]).solution[:, 0]
    return difference - (coefficients.float() @ regressors)


def check_traceable(keys: Keys, label: str) -> None:
    """Raise MpuError if nothing tells the copies of a publication from other models."""
    publication = keys.publication
    if not publication.mark and not any(keys.sigma.values()) and publication.symmetries == "none":
        raise MpuError(f"{label}: its copies have no mark, no noise of their own and no secret coordinates")
