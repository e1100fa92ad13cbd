"""Noise of a server's publications in weights that should have none of it: measuring it, and taking it out.

An honest update has no more of it than chance gives. A client may add a little of a copy to its delta, of this round,
of an earlier one or of another client's, so that the server's new model carries the watermark of that copy and is
traced to this client (``mpu trace``), who can then leak the copy itself. So every update is searched for the watermark,
and the draws of the noise that cancels, of every publication of the base line, as a trace would search the model: in
all slices, each with its tails clipped and weighted by its own size. An update that has too much of a draw loses it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mpu_cli.errors import MpuError
from mpu_cli.files.randomness import Randomness
from mpu_cli.files.reader import worker_pool
from mpu_cli.model.layout import TensorLayout
from mpu_cli.model.source import Model, cached_snapshot, open_model
from mpu_cli.model.transform import as_matrix, row_slices
from mpu_cli.protocol.deltas import Change, InverseMaps
from mpu_cli.protocol.keys import Keys
from mpu_cli.protocol.noise import Noise, Scales
from mpu_cli.protocol.publication import default_secret_path, matching, server_secret
from mpu_cli.protocol.register import Sample, default_register_path, read_register, sample_of

CLIP = 6.0  # times the median size of weights, beyond which they are clipped
SAMPLE = 4096  # weights of a slice whose median stands for all, which would take most of the time of a search
TAKEN_OUT = 4.0  # standard deviations of chance from which noise is taken out: below what a trace would name
PLANTED = 4.5  # standard deviations of chance from which noise counts as planted
SAME_LINE = 0.5  # cosine of weights from which two bases count as one line
PIECE, LEAST_WEIGHTS = 16384, 8  # weights that are fitted together; the fewest for each number that is fitted
PASSES = 4  # Newton steps to the robust fit of what is taken out


def clip(x: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` with its tails clipped, so that a few weights that were changed much do not drown the others. The median is
    of the weights at ``places``, or of all: of a sample that can be foreseen, others could choose it."""
    size = median_size(x[places]) if places is not None else 0.0
    bound = CLIP * (size or median_size(x))
    return x.clamp(-bound, bound) if bound else x


def median_size(x: torch.Tensor) -> float:
    """The median of |x| without zeros; 0 if there is nothing else."""
    sizes = x.abs()
    sizes = sizes[sizes > 0]
    return float(sizes.median()) if len(sizes) else 0.0


def without(x: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """``x``, float32 (n,), without its projection on the ``directions``, (k, n)."""
    gram = (directions @ directions.T).double()
    right = (directions @ x).double()
    # A ridge, because directions may be nearly parallel: the base and the public model are.
    steadied = gram + 1e-9 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    if not torch.isfinite(steadied).all() or not float(gram.diagonal().mean()) > 0:
        return x
    coefficients = torch.linalg.lstsq(steadied, right[:, None]).solution[:, 0]
    return x - (coefficients.float() @ directions)


@dataclass(frozen=True)
class Planted:
    """Noise in an update: ``z``, its size in standard deviations, and the publication of its copies."""

    z: float = 0.0
    publication: str = ""

    @property
    def warning(self) -> str | None:
        if self.z < PLANTED:
            return None
        return (
            f"the update had noise of the copies of {self.publication} in it (z = {self.z:.1f}), as if such a copy had "
            "been added to a delta; it was taken out, so that `mpu trace` does not take your model for that copy"
        )


@dataclass(frozen=True)
class _Publication:
    """A publication to look for: the noise of its copies, σ of permanent noise by block, and whether there is noise
    that cancels, and a watermark."""

    name: str
    noise: Noise
    permanent: Mapping[str, float]
    cancels: bool
    watermarked: bool

    def keys(self, tensor: str) -> list[bytes]:
        """The stream keys of the draws to look for: of the noise that cancels, and the watermark's last."""
        # The sizes of these scales do not matter, only which are not 0: those have draws.
        return self.noise.subkeys(tensor, Scales(float(self.cancels), watermark=float(self.watermarked)))

    def permanent_keys(self, tensor: TensorLayout) -> list[bytes]:
        return self.noise.subkeys(tensor.name, Scales(permanent=self.permanent.get(tensor.block, 0.0)))


# Of each draw, summed over slices: its products with what is left of the update once the base, permanent noise and the
# public model are regressed out of it and its tails are clipped, and their variance; both with slices weighted as a
# trace does, by 1/mean(r²), and by 1/√mean(r²), so that slices in which little else was changed hide no others.
Products = list[list[float]]


@dataclass(frozen=True)
class TensorNoise:
    """The draws to look for in one tensor's update. ``known``: the base's weights, and the public model's if it is
    here, (rows, columns) each: what the update has of these is not noise, and stays."""

    tensor: TensorLayout
    publications: Sequence[_Publication]
    known: Sequence[torch.Tensor]

    def products(self, update: torch.Tensor, start: int) -> Products:
        """The products of rows ``start …`` of the update."""
        if not self.publications:
            return []
        bounds, places = self._bounds(update, start), self._places(update.numel())
        x = clip(update.reshape(-1).float(), places)
        known = [matrix[start : start + len(update)].reshape(-1).float() for matrix in self.known]
        products = []
        for publication in self.publications:
            permanent = publication.noise.draws(publication.permanent_keys(self.tensor), *bounds, torch.float32)
            residue = clip(without(x, torch.stack([*known, *permanent])), places)
            square = float(residue.double().square().sum())
            for key in publication.keys(self.tensor.name):
                if not square > 0 or not math.isfinite(square):
                    products.append([0.0] * 4)
                    continue
                [draw] = publication.noise.draws([key], *bounds, torch.float32)
                product, weight = float(torch.dot(residue, draw)), len(residue) / square
                products.append([weight * product, weight**2 * square, weight**0.5 * product, weight * square])
        return products

    def take_out(self, update: torch.Tensor, start: int, numbers: Collection[int]) -> None:
        """Take out of rows ``start …`` of the update, in place, what a robust fit finds of the draws with these
        ``numbers``, and of the permanent noise that came with them.

        Least squares on weights with their tails clipped (Huber), by Newton steps: a weight that was made large would
        otherwise decide how much is taken out, or added.
        """
        flat, bounds = update.view(-1), self._bounds(update, start)
        draws: dict[bytes, torch.Tensor] = {}
        first = 0
        for publication in self.publications:
            keys = publication.keys(self.tensor.name)
            chosen = [key for number, key in enumerate(keys, first) if number in numbers]
            first += len(keys)
            if chosen:
                chosen += publication.permanent_keys(self.tensor)
            for key in chosen:
                [draws[key]] = publication.noise.draws([key], *bounds, flat.dtype)
        known = [matrix[start : start + len(update)].reshape(-1).to(flat.dtype) for matrix in self.known]
        directions = torch.stack([*draws.values(), *known])
        for piece in range(0, len(flat), PIECE):  # each by itself, as there may be noise in some and none in others
            _take_out(flat[piece : piece + PIECE], directions[:, piece : piece + PIECE], len(draws))

    def _places(self, count: int) -> torch.Tensor:
        """SAMPLE of so many weights, which only those who know the noise can foresee."""
        seed = int.from_bytes(self.publications[0].keys(self.tensor.name)[0][:7], "big")
        return torch.randint(count, (SAMPLE,), generator=torch.Generator().manual_seed(seed))

    def _bounds(self, update: torch.Tensor, start: int) -> tuple[int, int]:
        columns = update.shape[1]
        return start * columns, (start + len(update)) * columns


def _take_out(x: torch.Tensor, directions: torch.Tensor, count: int) -> None:
    """Remove the first ``count`` of the ``directions``, (k, n), from ``x``, (n,), in place; the others are fitted along
    with them, and stay."""
    if len(x) < LEAST_WEIGHTS * len(directions):
        return  # so few that a fit would take the update itself, and no trace could rest on them
    residue = x.clone()
    for _ in range(PASSES):
        bound = CLIP * median_size(residue)
        if not bound:
            return
        inside = residue.abs() <= bound
        gram = ((directions * inside) @ directions.T).double()
        right = (directions @ residue.clamp(-bound, bound)).double()
        shares = torch.linalg.lstsq(gram, right[:, None]).solution[:, 0].to(x.dtype)
        if not torch.isfinite(shares).all():
            return
        residue -= shares @ directions
        x -= shares[:count] @ directions[:count]


@dataclass(frozen=True)
class Fingerprints:
    """The draws to look for, publication by publication. ``public``: the public model's tensors by the base's names, if
    it is on this machine."""

    base: Model
    publications: Sequence[_Publication]
    public: Mapping[str, torch.Tensor]

    @property
    def count(self) -> int:
        return sum(len(publication.keys("")) for publication in self.publications)

    def of(self, tensor: TensorLayout) -> TensorNoise:
        """The draws in ``tensor``, of the base, beside the known weights with which they are fitted."""
        known = [self.base.checkpoint.tensor(tensor.name)]
        known += [self.public[tensor.name]] if self.public else []
        return TensorNoise(tensor, self.publications, [as_matrix(weights) for weights in known])

    def judge(self, sums: torch.Tensor) -> tuple[Planted, frozenset[int]]:
        """The publication whose noise is least due to chance, and the numbers of all draws to take out, from its
        ``Products`` with the update, float64 (draws, 4)."""
        worst, numbers, offset = Planted(), set[int](), 0
        both = sums[:, ::2] / sums[:, 1::2].sqrt().clamp(min=1e-300)
        z = both.gather(1, both.abs().argmax(1, keepdim=True))[:, 0].tolist()
        for publication in self.publications:
            last = offset + len(publication.keys(""))
            cancelling = range(offset, last - 1 if publication.watermarked else last)
            tests = []
            if cancelling:  # a copy's own noise is any mixture of these draws
                square = math.fsum(z[i] ** 2 for i in cancelling)
                tests.append((math.sqrt(square), _as_normal(square, len(cancelling)), cancelling))
            if publication.watermarked:  # which a copy that was added brings with its own sign
                tests.append((abs(z[last - 1]), z[last - 1], range(last - 1, last)))
            for size, equivalent, draws in tests:
                numbers |= set(draws) if size > TAKEN_OUT else set()
                if equivalent > worst.z:
                    worst = Planted(equivalent, publication.name)
            offset = last
        return worst, frozenset(numbers)


def _as_normal(square: float, draws: int) -> float:
    """The value of one standard normal that is as rare as this sum of squares of several."""
    if draws == 1:
        return math.sqrt(square)
    from scipy import stats  # takes a second

    log_p = float(stats.chi2.logsf(square, draws))
    # Far out, where the p-value is 0, its logarithm is about −square/2.
    return float(stats.norm.isf(math.exp(log_p) / 2)) if log_p > -700 else math.sqrt(square)


def fingerprints(base: Model, publications: Sequence[Keys], *, watermarks_only: bool = False) -> Fingerprints:
    """The fingerprints of ``publications``, and of all in this server's register whose base is of the line of ``base``;
    ``watermarks_only`` for the delta of one copy, in which training leaves some of the noise that cancels."""
    layout = base.layout
    searched: dict[tuple[bytes, int], _Publication] = {}
    for keys in publications:
        values = keys.publication
        searched[values.seed, values.round] = _Publication(
            f"round {values.round} of run {values.run}",
            values.noise(range(1, values.copies + 1), layout.full_name),
            keys.shared_sigma,
            cancels=any(keys.sigma.values()) and not watermarks_only,
            watermarked=values.watermark > 0,
        )
    entries = [entry for entry in read_register(default_register_path()) if entry.seed]
    sample = sample_of(base.checkpoint, layout) if entries else None
    secret = Randomness(server_secret()) if default_secret_path().exists() else None
    for entry in entries:
        if sample is None or not _is_same_line(entry.sample, sample):
            continue
        seed = bytes.fromhex(entry.seed)
        sigma = entry.permanent_sigma if secret and entry.secret == secret.key("which secret").hex()[:16] else {}
        noise = Noise(
            Randomness(seed), entry.round, torch.ones(1, entry.draws), double=entry.calibrated_sigma is not None,
            permanent=Randomness(secret.key("permanent noise", entry.noise_content)) if secret else None,
            full_name=layout.full_name,
        )  # fmt: skip
        searched[seed, entry.round] = _Publication(
            f"round {entry.round} of run {entry.run}",
            noise,
            {block: sigma.get(layout.full_name(tensors[0].name), 0.0) for block, tensors in layout.blocks.items()},
            cancels=entry.draws > 0 and not watermarks_only,
            watermarked=entry.watermarked,
        )
    noisy = [publication for publication in searched.values() if publication.cancels or publication.watermarked]
    return Fingerprints(base, noisy, _public_of(base, publications) if noisy else {})


def _public_of(base: Model, publications: Sequence[Keys]) -> Mapping[str, torch.Tensor]:
    """The tensors of the public model that the keys name, by the base's names; empty if it is not on this machine."""
    for keys in publications:
        if keys.reference and (Path(keys.reference).exists() or cached_snapshot(keys.reference)):
            try:
                return matching(base, open_model(keys.reference)) or {}
            except MpuError:  # another model lies there by now
                continue
    return {}


def _is_same_line(a: Sample, b: Sample) -> bool:
    """Whether two bases are of one line: the weights of models that have nothing in common are at right angles."""
    if len(a.values) != len(b.values):
        return False
    product = math.fsum(x * y for x, y in zip(a.values, b.values, strict=True))
    return product > SAME_LINE * math.hypot(*a.values) * math.hypot(*b.values)


def noise_in(inverse_maps: InverseMaps, rates: torch.Tensor, noises: Fingerprints) -> Planted:
    """The publication whose noise is most in an update that is written as it came: the sum of the deltas that
    ``inverse_maps`` brings back, times their ``rates``."""
    total, checkpoint = torch.zeros(noises.count, 4, dtype=torch.float64), noises.base.checkpoint
    with worker_pool() as pool:
        for tensor in noises.base.layout.parameters if noises.count else []:
            changes = inverse_maps.changes(tensor)
            noise, shape = noises.of(tensor), as_matrix(checkpoint.tensor(tensor.name)).shape

            def work(
                bounds: tuple[int, int], changes: Mapping[int, Change] = changes, noise: TensorNoise = noise
            ) -> Products:
                rows = [float(rates[i]) * c.rows(*bounds, torch.float32).float() for i, c in changes.items()]
                return noise.products(torch.stack(rows).sum(0), bounds[0])

            if changes:
                slices = row_slices([change.mapping for change in changes.values()], *shape)
                total += torch.tensor(list(pool.map(work, slices)), dtype=torch.float64).sum(0).view(-1, 4)
            checkpoint.forget_pages(tensor.name)
            inverse_maps.forget_pages(tensor)
    return noises.judge(total)[0]
