"""A publication before anything is written: a value that checks itself."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.boundary import RunName
from mpu_cli.files.manifest import CopyManifest
from mpu_cli.files.randomness import Randomness, new_seed, seed_from_number
from mpu_cli.files.reader import OPTION, TensorInfo
from mpu_cli.files.sealing import default_identity_path, own_secret
from mpu_cli.model.layout import Layout, pieces_of
from mpu_cli.model.source import Model
from mpu_cli.model.transform import Transform
from mpu_cli.options.declare import differing
from mpu_cli.options.publishing import KAPPA, Disguise, Publishing
from mpu_cli.protocol.noise import (
    DEFAULT_COPIES,
    Calibration,
    Extrapolated,
    Noise,
    Scales,
    Scheme,
    ZeroSum,
    calibrate,
    scheme_of,
)

PERMANENT_SHARE = 0.99  # of the noise that --max-noise allows; the noise that cancels gets what it leaves


@dataclass(frozen=True)
class Publication:
    """m copies of one model: which noise, which symmetries, of which run and round, and the seed of all secrets.

    ``transform`` and ``noise`` are the only places that derive secrets from the seed. The same publication of the same
    base has the same bytes. ``kappa`` and ``shared_kappa`` scale the noise to each block's task vector
    (docs/design.md).
    """

    seed: bytes = field(repr=False)
    seed_is_secret: bool = True
    scheme: Scheme = field(default_factory=lambda: Extrapolated.default(DEFAULT_COPIES))
    kappa: float = KAPPA
    shared_kappa: float = 0.0
    # sets σ, the same in every block, in place of ``kappa`` and ``shared_kappa``, which are 0 then
    calibration: Calibration | None = None
    symmetries: str = Disguise().symmetries
    dtype: str | None = None  # safetensors' name of the dtype to store in; None for each tensor's own
    run: str = ""  # by default a name drawn from the seed
    round: int = 1
    # the largest noise of a copy, as a share of the RMS of a block's weights: it lowers permanent noise to
    # ``PERMANENT_SHARE`` of that, and what cancels to what is left
    max_noise: float | None = None
    # the seed of permanent noise, the same in every publication of a base, so that publications cannot be averaged;
    # None for ``seed``
    permanent_seed: bytes | None = field(default=None, repr=False)
    derive_permanent_seed: bool = False  # whether ``publish`` has to derive it from the server's own secret
    # publish although the register says that publications of this base could be averaged, or that its ε is spent
    again: bool = False
    # whether ``publish`` enters it in the register, in which ``aggregate`` looks up its noise
    is_registered: bool = False
    # the size of noise of the publication's own that is the same in all of its copies, as a share of the other noise
    # of the copy that has least
    watermark: float = 0.0

    def __post_init__(self) -> None:
        # raises for numbers that are out of range
        Disguise(kappa=self.kappa, permanent_noise=self.shared_kappa, watermark=self.watermark)
        try:
            msgspec.convert(self.run, RunName)
        except msgspec.ValidationError as error:
            raise UsageError(f"--run {self.run!r}: not a name ({error})") from error
        if not self.run.isprintable():
            raise UsageError(f"--run {self.run!r}: has a character that cannot be printed, or another kind of space")
        if self.round < 1:
            raise UsageError(f"round {self.round} in --run: must be at least 1")
        if not self.run:
            object.__setattr__(self, "run", self.randomness.key("run").hex()[:32])

    def sigmas(self, task: float, weights: float) -> tuple[float, float]:
        """σ of a block's cancelling and of its permanent noise, from the RMS of its task vector and of its weights."""
        if self.calibration:
            return self.calibration.sigma, self.calibration.shared_sigma
        cancelling, permanent = self.kappa * task, self.shared_kappa * task
        if self.max_noise is not None:
            # Permanent noise does not depend on the noise that cancels or on the number of copies: publications of one
            # base with other --copies or --kappa have the same draw; at another scale, it would be another.
            most = self.max_noise * weights
            permanent = min(permanent, PERMANENT_SHARE * most)
            remaining = math.sqrt(max(0.0, most**2 - permanent**2))
            cancelling = min(cancelling, remaining / max(self.scheme.scales))
        if self.permanent_seed or self.derive_permanent_seed:
            permanent = float(f"{permanent:.3g}")  # the same on every processor, whose sums differ in the last bits
        return cancelling, permanent

    def scales(self, sigma: float, permanent: float) -> Scales:
        """All scales of a block, from σ of its cancelling and of its permanent noise."""
        least = math.hypot(permanent, sigma * min(self.scheme.scales))
        return Scales(sigma, permanent, self.watermark * least)

    @cached_property
    def randomness(self) -> Randomness:
        return Randomness(self.seed)

    @property
    def copies(self) -> int:
        return self.scheme.copies

    @property
    def permanent(self) -> bool:
        """Whether its copies have noise in common, which stays."""
        return bool(self.calibration.shared_sigma if self.calibration else self.shared_kappa)

    def transform(self, copy: int, layout: Layout) -> Transform:
        """T_k of copy ``copy``, counted from 1, for a copy with this ``layout``."""
        return Transform(layout, self.symmetries, self.randomness, self.round, copy)

    def noise(self, copies: Sequence[int], full_name: Callable[[str], str]) -> Noise:
        """The noise of ``copies``, counted from 1; ``full_name``: that of the base's layout."""
        return Noise(
            self.randomness,
            self.round,
            self.scheme.mixing[[k - 1 for k in copies]],
            double=self.calibration is not None,
            permanent=Randomness(self.permanent_seed) if self.permanent_seed else None,
            full_name=full_name,
        )

    def with_secrets_of(self, other: Publication) -> Publication:
        """This publication with the secrets, names and noise of ``other``, to make further copies of that."""
        return replace(
            self, seed=other.seed, seed_is_secret=other.seed_is_secret, scheme=other.scheme, run=other.run,
            round=other.round, permanent_seed=other.permanent_seed, derive_permanent_seed=False, is_registered=False,
            watermark=other.watermark,
        )  # fmt: skip

    def manifests(self, tensors: Mapping[str, TensorInfo], reference: str | None) -> list[CopyManifest]:
        """The manifest of each copy of a base with these ``tensors``, scaled to ``reference`` (its address).

        The ids differ between publications that differ in anything, even where they share a seed. They hash the list
        below, whose order and conditions are part of the format.
        """
        header = [[name, info.dtype, list(info.shape)] for name, info in tensors.items()]
        facts: list[object] = [
            self.run, self.round, list(self.scheme.factors), self.kappa, self.symmetries, self.dtype, reference, header,
        ]  # fmt: skip
        if self.shared_kappa:
            facts.append(self.shared_kappa)
        if self.calibration:
            facts.append(asdict(self.calibration))
        if self.max_noise is not None:
            facts.append({"max_noise": self.max_noise})
        if self.watermark:
            facts.append({"mark": self.watermark})
        # The paper's noise, the only one of the first version, is not named.
        if not isinstance(self.scheme, ZeroSum):
            facts.append(self.scheme.kind)
        identity = json.dumps(facts)
        return [
            CopyManifest(
                run=self.run,
                round=self.round,
                copy=k,
                copies=self.copies,
                copy_id=self.randomness.key("copy id", identity, k).hex()[:32],
                symmetries=self.symmetries,
            )
            for k in range(1, self.copies + 1)
        ]


def settings_of(disguise: Disguise) -> dict[str, Any]:
    """The settings of a publication from ``disguise``, whose noise has a scale (``Disguise.with_scale``), except the
    scheme."""
    return {
        "kappa": disguise.kappa,
        "shared_kappa": disguise.permanent_noise,
        "watermark": disguise.watermark or 0.0,
        "max_noise": disguise.max_noise,
        "symmetries": disguise.symmetries,
    }


def publication_of(
    options: Publishing, *, with_pretrained: bool, seed: int | None, run: str, round_: int
) -> Publication:
    """The publication that ``mpu publish`` makes, with or without a public model that scales the noise.

    Without ``seed`` the secrets come from the operating system.
    """
    options = options.with_scale(with_pretrained=with_pretrained)
    disguise, privacy = options.disguise, options.calibration
    if seed is not None and not 0 <= seed < 2**64:
        raise UsageError(f"--seed {seed}: must be at least 0 and below 2^64")
    if privacy.epsilon is None and (given := sorted(differing(privacy))):
        names = ", ".join(name.removeprefix("dp_") for name in given)
        raise UsageError(f"--dp {names}: calibrates noise for --dp epsilon, which is missing")
    if privacy.epsilon is not None and seed is not None:
        raise UsageError("--dp epsilon with --seed: noise that can be guessed protects nothing", "leave out --seed")
    if privacy.epsilon is not None and round_ > privacy.budget_rounds:
        raise UsageError(f"round {round_}: ε and δ cover {privacy.budget_rounds} rounds", "raise --dp budget_rounds")
    master = new_seed() if seed is None else seed_from_number(seed)
    scheme = scheme_of(disguise)
    calibration = None if privacy.epsilon is None else calibrate(privacy, min(scheme.scales))
    return Publication(
        seed=master,
        seed_is_secret=seed is None,
        scheme=scheme,
        calibration=calibration,
        dtype=OPTION[options.stored.dtype] if options.stored.dtype else None,
        run=run,
        round=round_,
        derive_permanent_seed=seed is None and bool(disguise.permanent_noise),
        again=options.publish_again,
        is_registered=seed is None,
        **settings_of(disguise),
    )


def default_secret_path() -> Path:
    """``mpu/server.key`` in the user's configuration directory: the secret that authenticates keys, and that permanent
    noise is drawn from."""
    return default_identity_path().with_name("server.key")


def server_secret(note: Callable[[str], None] = lambda _: None) -> bytes:
    """The server's own secret, which is made on first use; ``note`` reports that."""
    path = default_secret_path()
    if not path.exists():
        note(
            f"made {path}, which authenticates your keys and seeds permanent noise; back it up: the noise of "
            "publications with different secrets averages out"
        )
    try:
        return own_secret(
            path, "the server's secret", "restore it from a backup: with a new one, publications can be averaged"
        )
    except OSError as error:
        raise MpuError(
            f"{path}: cannot be written: {error.strerror}", "set XDG_CONFIG_HOME to a folder of yours"
        ) from error


# The pretrained model's tensors by the names of the base.


def matching(base: Model, pretrained: Model | None) -> dict[str, torch.Tensor] | None:
    """The pretrained model's tensors by the base's names."""
    if pretrained is None:
        return None
    layout, other = base.layout, pretrained.layout
    names = [tensor.name for tensor in layout.parameters]
    tensors = {tensor.name: pretrained.checkpoint.tensor(tensor.name) for tensor in other.parameters}
    if len(tensors) != len(names):
        for name, weights in list(tensors.items()):  # stacks of experts as the matrices that the Hub's files hold
            stored_parts = pieces_of(other.family, name, weights.shape)
            tensors |= {part.file_name: part.of(weights) for part in stored_parts}
        tensors = {name: tensors[name] for name in names if name in tensors}
    if layout.family.model_types != other.family.model_types or len(names) != len(tensors):
        raise MpuError(
            f"{pretrained.source}: tensors differ from {base.source} (different architecture, different head, or "
            "experts in another arrangement)"
        )
    for name, (match, tensor) in zip(names, tensors.items(), strict=True):
        shape = base.checkpoint.tensors[name].shape
        if tuple(tensor.shape) != shape:
            raise MpuError(
                f"{pretrained.source}: {match!r} has shape {list(tensor.shape)}, but {list(shape)} in the base",
                "use a pretrained model with the base's shapes",
            )
    return dict(zip(names, tensors.values(), strict=True))
