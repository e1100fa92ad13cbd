"""The server's own record of its publications: which could be averaged, whose ε adds up, and what marks them.

    CONFIG/mpu/published.jsonl    a line for each publication, mode 0600

Permanent noise protects a base only as long as every publication of it has the same draw at the same scale, and a
budget of ε only as long as nobody gets more publications than it was calibrated for. Neither can be seen in a single
publication, so this file remembers them: a line is written before the first byte of a copy.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import Above0, Document, Finite, parse_document
from mpu_cli.files.reader import TORCH, Checkpoint
from mpu_cli.files.resumption import alone_with_private, append_line, read_lines
from mpu_cli.files.sealing import default_identity_path
from mpu_cli.model.layout import Layout
from mpu_cli.wording import counted

SAMPLES = 1024  # weights that show whether two models are the same one in different precisions
SAME_SCALE = 0.02  # relative difference of σ below which a publication gets the scale of an earlier one
SIMILAR_SIGMA = 0.5  # of permanent noise's σ, by which models of one request differ at most
OVERRIDE = "--allow publish-again, if nobody got the copies of that one"


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
        return all(float(torch.tensor(x, dtype=torch.float64).to(TORCH[dtype])) == y for x, y, dtype in pairs)


@dataclass(frozen=True)
class RegisterEntry:
    """One line of the register."""

    run: str
    round: int
    content: str  # of the base, see ``BaseScan.content``
    sample: Sample
    # the content of the base's first publication in any precision, for which permanent noise is drawn
    noise_content: str = ""
    secret: str = ""  # identifies the server's secret that permanent noise is drawn from
    # σ of permanent noise, by the name of a block's first tensor in memory
    permanent_sigma: dict[str, Above0] = field(default_factory=dict)
    # σ that hides the base under ``--dp``, in ``calibrated_rounds`` publications
    calibrated_sigma: Above0 | None = None
    calibrated_rounds: int = 1
    replaces_earlier: bool = False  # whether nobody has copies of those before it
    entry_id: str = ""
    seed: str = field(default="", repr=False)  # of the draws of its copies
    draws: int = 0  # the number of draws of noise that cancels
    watermarked: bool = False  # whether it has a watermark


def default_register_path() -> Path:
    """``mpu/published.jsonl`` in the user's configuration directory, beside ``server.key``."""
    return default_identity_path().with_name("published.jsonl")


def sample_of(checkpoint: Checkpoint, layout: Layout) -> Sample:
    """The same number of weights from each trained tensor, at even distances."""
    dtypes: list[str] = []
    values: list[float] = []
    per_tensor = max(1, SAMPLES // max(1, len(layout.parameters)))
    for tensor in sorted(layout.parameters, key=lambda tensor: layout.full_name(tensor.name)):
        weights = checkpoint.tensor(tensor.name).view(-1)
        # The one in the middle of each of ``per_tensor`` equal parts; publishing refuses what is not finite.
        middles = (2 * torch.arange(per_tensor) + 1) * len(weights) // (2 * per_tensor)
        values += weights[middles].double().nan_to_num(0.0, 0.0, 0.0).tolist()
        dtypes += [checkpoint.tensors[tensor.name].dtype] * per_tensor
    return Sample(tuple(dtypes), tuple(values))


class _Withdrawal(Document):
    """A later line: the publication that was entered as this one failed, and nobody has a copy of it."""

    withdraws: str


def read_register(path: Path) -> list[RegisterEntry]:
    """The publications so far, without those that failed."""
    hint = "put a backup in its place: what it lost cannot be checked"
    entries: list[RegisterEntry] = []
    for line in read_lines(path, hint):
        if "withdraws" in line:
            withdrawn = parse_document(_Withdrawal, line, f"{path}: damaged", hint).withdraws
            entries = [entry for entry in entries if entry.entry_id != withdrawn]
            continue
        entry = parse_document(RegisterEntry, line, f"{path}: damaged", hint)
        if not set(entry.sample.dtypes) <= set(TORCH):
            raise MpuError(f"{path}: damaged (a dtype is not known)", hint)
        entries.append(entry)
    return entries


def enter(path: Path, entry: RegisterEntry) -> RegisterEntry:
    """Enter a publication that no other one forbids; the entry."""
    with alone_with_private(path):
        return _append(path, entry)


def withdraw(path: Path, entry: RegisterEntry) -> None:
    """Note that the publication of ``entry`` failed before anybody could get a copy."""
    with alone_with_private(path):
        append_line(path, {"time": _now(), "withdraws": entry.entry_id})


def enter_permanent(path: Path, new: RegisterEntry, requested: Mapping[str, float], *, again: bool) -> RegisterEntry:
    """Enter a publication with permanent noise of the ``requested`` scales; the entry, with the scales to use.

    Scales within rounding of those of earlier publications of the same base become the same, as another scale would be
    another draw.
    """
    with alone_with_private(path):
        earlier = [entry for entry in read_register(path) if entry.permanent_sigma]
        noise_content = next((entry.noise_content for entry in earlier if _same_base(entry, new)), new.content)
        same = _since_replaced([entry for entry in earlier if entry.noise_content == noise_content])
        scales = {block: sigma for entry in same for block, sigma in entry.permanent_sigma.items()}
        common = scales.keys() & requested.keys()
        differs = None  # what another draw has that this one has not
        if any(entry.secret != new.secret for entry in same):
            differs = "permanent noise of another secret"
            hint = f"put {path.with_name('server.key')} back from your backup"
        elif not all(math.isclose(scales[block], requested[block], rel_tol=SAME_SCALE) for block in common):
            differs = "permanent noise of another scale"
            hint = "use the same --permanent-noise, --max-noise and --public"
        if differs and not again:
            raise MpuError(
                f"{differs} than in round {same[-1].round} of run {same[-1].run}, which "
                "published the same base: whoever gets both averages the noise away",
                f"{hint}; or {OVERRIDE}",
            )
        if differs:
            scales = {}
        scales = {block: scales.get(block, sigma) for block, sigma in requested.items()}
        return _append(
            path, new, noise_content=noise_content, permanent_sigma=scales, replaces_earlier=differs is not None
        )


def draws_that_average(path: Path, sample: Sample) -> int:
    """The number of draws of permanent noise published on weights that differ from those of ``sample`` by less than
    SIMILAR_SIGMA of the noise, as the models of a request do: each update is small beside it. Whoever has all these
    copies and knows the updates averages the noise."""
    draws = set()
    for entry in _since_replaced([entry for entry in read_register(path) if entry.permanent_sigma]):
        if len(entry.sample.values) != len(sample.values):
            continue
        apart = math.dist(entry.sample.values, sample.values) / math.sqrt(len(sample.values))
        if apart <= SIMILAR_SIGMA * math.hypot(*entry.permanent_sigma.values()) / math.sqrt(len(entry.permanent_sigma)):
            draws.add((entry.noise_content, entry.secret))
    return len(draws)


def enter_calibrated(path: Path, new: RegisterEntry, sigma: float, rounds: int, *, again: bool) -> RegisterEntry:
    """Enter a publication whose noise of scale ``sigma`` is calibrated for ``rounds`` publications; the entry.

    Gaussian mechanisms compose: all publications of a base and of a run together spend Σ 1/σᵢ², and each promised that
    this is at most its own rounds/σ².
    """
    with alone_with_private(path):
        calibrated = [entry for entry in read_register(path) if entry.calibrated_sigma]
        earlier = _since_replaced([entry for entry in calibrated if entry.run == new.run or _same_base(entry, new)])
        new = replace(new, calibrated_sigma=sigma, calibrated_rounds=rounds)
        budgets = [(entry.calibrated_sigma or math.inf, entry.calibrated_rounds) for entry in (*earlier, new)]
        holds = True
        for promised_sigma, promised_rounds in budgets:
            spent = math.fsum((promised_sigma / other) ** 2 for other, _ in budgets)  # in publications of its own noise
            holds = holds and spent <= promised_rounds * (1 + 1e-9)
        if not holds and not again:
            raise MpuError(
                f"--dp epsilon: with {counted(len(earlier), 'earlier publication')} of this base or run, "
                "ε and δ of one of them would not hold any more",
                "give out the copies of the earlier one: a budget for several, --dp budget_rounds, has to be "
                f"planned from the first on; or {OVERRIDE}",
            )
        return _append(path, new, replaces_earlier=bool(earlier) and not holds)


def _since_replaced(entries: list[RegisterEntry]) -> list[RegisterEntry]:
    """The entries from the last one on that made those before it void."""
    replacing = [number for number, entry in enumerate(entries) if entry.replaces_earlier]
    return entries[replacing[-1] :] if replacing else entries


def _append(path: Path, entry: RegisterEntry, **values: Any) -> RegisterEntry:
    updated = replace(entry, entry_id=secrets.token_hex(8), **values)
    append_line(path, {"time": _now(), **asdict(updated)})
    return updated


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _same_base(entry: RegisterEntry, other: RegisterEntry) -> bool:
    """Whether two publications are of the same weights, perhaps in different precisions."""
    if entry.content == other.content:
        return True
    if entry.sample.dtypes == other.sample.dtypes:
        return False  # the content decides
    return entry.sample.rounds_to(other.sample) or other.sample.rounds_to(entry.sample)
