"""The server's own record of publications that could be averaged, or whose ε adds up.

    CONFIG/mpu/published.jsonl    a line for each publication, mode 0600

Permanent noise protects a base only as long as every publication of it has the same draw at the same scale, and a
budget of ε only as long as nobody gets more publications than it was calibrated for. Neither can be seen in a single
publication, so this file remembers them: a line is written before the first byte of a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch

from mpu_cli.architectures.layout import Layout
from mpu_cli.boundary.documents import Above0, Finite, parse_document
from mpu_cli.checkpoint.dtypes import TORCH
from mpu_cli.checkpoint.reader import Checkpoint
from mpu_cli.errors import MpuError
from mpu_cli.resumption import alone_with_private, append_line, read_lines
from mpu_cli.sealing import default_identity_path

SAMPLES = 1024  # weights that tell whether a model is another's in another precision
SAME_SCALE = 0.02  # relative difference of σ below which a publication gets the scale of an earlier one
OVERRIDE = "--publish-again, if nobody got the copies of that one"


@dataclass(frozen=True)
class Sample:
    """Some weights of a model, the same places in every model of one architecture: dtypes as safetensors has them."""

    dtypes: tuple[str, ...]
    values: tuple[Finite, ...]

    def rounds_to(self, other: Sample) -> bool:
        """Whether these weights, rounded to the dtypes of ``other``, are its weights."""
        if len(self.values) != len(other.values):
            return False
        pairs = zip(self.values, other.values, other.dtypes, strict=True)
        return all(float(torch.tensor(a, dtype=torch.float64).to(TORCH[dtype])) == b for a, b, dtype in pairs)


@dataclass(frozen=True)
class RegisterEntry:
    """One line of the register.

    ``content``: of the base, see ``BaseScan.content``; ``noise_content``: what its permanent noise is drawn for, the
    content of the base's first publication in any precision; ``permanent_sigma``: σ of permanent noise by the name of a
    block's first tensor in the base; ``calibrated_sigma``: σ that hides the base under ``--epsilon``.
    """

    run: str
    round: int
    content: str
    sample: Sample
    noise_content: str = ""
    permanent_sigma: dict[str, Above0] = field(default_factory=dict)
    calibrated_sigma: Above0 | None = None


def default_register_path() -> Path:
    """``mpu/published.jsonl`` in the user's configuration directory, beside ``server.key``."""
    return default_identity_path().with_name("published.jsonl")


def sample_of(checkpoint: Checkpoint, layout: Layout) -> Sample:
    """The same number of weights from each trained tensor, at even distances."""
    dtypes, values = [], []
    each = max(1, SAMPLES // max(1, len(layout.parameters)))
    for tensor in sorted(layout.parameters, key=lambda tensor: layout.full_name(tensor.name)):
        weights = checkpoint.tensor(tensor.name).view(-1)
        for i in range(each):
            dtypes.append(checkpoint.tensors[tensor.name].dtype)
            values.append(float(weights[(2 * i + 1) * len(weights) // (2 * each)]))
    return Sample(tuple(dtypes), tuple(values))


def read_register(path: Path) -> list[RegisterEntry]:
    """The publications so far. Raises MpuError if the file is damaged."""
    hint = "put a backup in its place: what it lost cannot be checked"
    entries = []
    for line in read_lines(path, hint):
        entry = parse_document(RegisterEntry, line, f"{path}: damaged", hint)
        if not set(entry.sample.dtypes) <= set(TORCH):
            raise MpuError(f"{path}: damaged (a dtype is not known)", hint)
        entries.append(entry)
    return entries


def enter_permanent(path: Path, entry: RegisterEntry, requested: Mapping[str, float], *, again: bool) -> RegisterEntry:
    """Enter a publication with permanent noise of the ``requested`` scales; the entry, with the scales to use.

    Scales within rounding of those of an earlier publication of the same base become the same, as another scale would
    be another draw. Raises MpuError if they differ by more, unless ``again``.
    """
    with alone_with_private(path):
        earlier = [each for each in read_register(path) if each.permanent_sigma]
        base = next((each for each in earlier if _same_base(each, entry)), None)
        noise_content = base.noise_content if base else entry.content
        same = [each.permanent_sigma for each in earlier if each.noise_content == noise_content]
        alike = [scales for scales in same if _alike(scales, requested)]
        if base and not alike and not again:
            raise MpuError(
                f"permanent noise of another scale than in round {base.round} of run {base.run}, which published the "
                "same base: whoever gets both averages the noise away",
                f"use the same --permanent-noise, --max-noise and --pretrained; or {OVERRIDE}",
            )
        earlier_scales = max(alike, key=lambda scales: len(scales.keys() & requested.keys()), default={})
        scales = {block: earlier_scales.get(block, sigma) for block, sigma in requested.items()}
        return _append(path, entry, noise_content=noise_content, permanent_sigma=scales)


def enter_calibrated(path: Path, entry: RegisterEntry, sigma: float, rounds: int, *, again: bool) -> None:
    """Enter a publication whose noise of scale ``sigma`` is calibrated for ``rounds`` publications.

    Gaussian mechanisms compose: Σ 1/σᵢ² over all publications of the base and of the run is what is spent. Raises
    UsageError if that is more than ``rounds``/σ², unless ``again``.
    """
    with alone_with_private(path):
        same = [
            other.calibrated_sigma
            for other in read_register(path)
            if other.calibrated_sigma and (other.run == entry.run or _same_base(other, entry))
        ]
        spent = math.fsum((sigma / other) ** 2 for other in same)
        if spent + 1 > rounds * (1 + 1e-9) and not again:
            raise MpuError(
                f"--epsilon: {len(same)} earlier publication{'s' * (len(same) > 1)} of this base or run spent "
                f"{spent:.2g} of the {rounds} that ε and δ cover",
                "give out the copies of the earlier one: a budget for several publications, --budget-rounds, has to be "
                f"planned from the first on; or {OVERRIDE}",
            )
        _append(path, entry, calibrated_sigma=sigma)


def _alike(scales: Mapping[str, float], requested: Mapping[str, float]) -> bool:
    common = scales.keys() & requested.keys()
    return all(math.isclose(scales[block], requested[block], rel_tol=SAME_SCALE) for block in common)


def _append(path: Path, entry: RegisterEntry, **values: object) -> RegisterEntry:
    updated = RegisterEntry(**{**vars(entry), **values})  # type: ignore[arg-type]
    append_line(path, {"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), **asdict(updated)})
    return updated


def _same_base(entry: RegisterEntry, other: RegisterEntry) -> bool:
    """Whether two publications are of the same weights, perhaps in different precisions."""
    if entry.content == other.content:
        return True
    if entry.sample.dtypes == other.sample.dtypes:
        return False  # the content decides
    return entry.sample.rounds_to(other.sample) or other.sample.rounds_to(entry.sample)
