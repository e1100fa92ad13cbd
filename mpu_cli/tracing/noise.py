"""The noise of a publication as a trace looks for it, and the sums from which z follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mpu_cli.architectures.layout import layout_of
from mpu_cli.models.shallow import names_in_base
from mpu_cli.models.source import Model
from mpu_cli.server.keys import Keys
from mpu_cli.server.noise import Noise, Scales
from mpu_cli.tracing.evidence import NoiseEvidence

CLIP = 6.0  # times the median size of what is left, beyond which it is clipped
SAMPLE = 4096  # weights of a slice whose median is taken


@dataclass(frozen=True)
class PublicationKeys:
    """A publication to try: the name of its keys' file, the keys, and the model that was published."""

    label: str
    keys: Keys
    base: Model


@dataclass
class Sums:
    """Σ w⟨r, n⟩, Σ w²‖r‖²‖t‖² and Σ w·‖t‖²·(number of weights), for the mark and for each copy, (noises, 3)."""

    total: torch.Tensor
    blocks: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, block: str, part: torch.Tensor) -> None:
        self.total += part
        self.blocks[block] = self.blocks.get(block, torch.zeros_like(part)) + part

    def evidence(self, row: int) -> NoiseEvidence:
        products, variance, gain = self.total[row].tolist()
        by_block = {block: _z(*sums[row, :2].tolist()) for block, sums in self.blocks.items()}
        return NoiseEvidence(_z(products, variance), products / gain if gain else math.nan, by_block)


def _z(products: float, variance: float) -> float:
    return products / math.sqrt(variance) if variance > 0 else math.nan


class PublishedNoise:
    """The draws of a publication's noise, tensor by tensor, and how its copies' and its mark are mixed from them."""

    def __init__(self, publication: PublicationKeys):
        values, base = publication.keys.publication, publication.base
        self._noise: Noise = values.noise(range(1, values.copies + 1))
        self._full_names = names_in_base(base, values.omitted)
        full_layout = layout_of(base.checkpoint.tensors, base.config, base.source)
        self._permanent_names = values.permanent_names(full_layout)

    def keys(self, name: str, scales: Scales) -> list[bytes]:
        """The stream keys for the tensor ``name``: of what cancels, of permanent noise, of the mark."""
        full_name = self._full_names[name]
        return self._noise.subkeys(full_name, scales, self._permanent_names.get(full_name))

    def draws(self, keys: Sequence[bytes], start: int, stop: int) -> list[torch.Tensor]:
        """Standard normals for the elements ``start … stop`` of a tensor, float32, for each of ``keys``."""
        return self._noise.draws(keys, start, stop, torch.float32)

    def templates(self, scales: Scales) -> torch.Tensor:
        """How the mark (row 0) and the noise of each copy that cancels are mixed from their draws, float64 (noises,
        draws): those of what cancels, and the mark's last."""
        cancelling = self._noise.mixing(Scales(scales.cancelling)).double()
        templates = torch.zeros(len(cancelling) + 1, cancelling.shape[1] + 1, dtype=torch.float64)
        templates[1:, :-1], templates[0, -1] = cancelling, scales.mark
        return templates


def sums_of(
    residue: torch.Tensor, draws: Sequence[torch.Tensor], templates: torch.Tensor, weight: float
) -> torch.Tensor:
    """The sums of ``Sums`` for some weights: ``residue``, float32 (n,), ``draws`` as ``templates`` mixes them."""
    products = torch.stack([(residue * draw).double().sum() for draw in draws])
    square, norms = float(residue.double().square().sum()), templates.square().sum(1)
    parts = (weight * (templates @ products), weight**2 * square * norms, weight * residue.numel() * norms)
    return torch.stack(parts, 1)


def clip(residue: torch.Tensor) -> torch.Tensor:
    """``residue`` with its tails clipped, so that a few weights that were changed much do not drown the others."""
    step = max(1, residue.numel() // SAMPLE)
    bound = CLIP * float(residue[::step].abs().median())
    return residue.clamp(-bound, bound) if bound > 0 else residue
