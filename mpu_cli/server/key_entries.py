"""The entries of a key file, and their types and bounds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mpu_cli.boundary.documents import (
    Count,
    Document,
    Finite,
    Layers,
    RunName,
    Scale,
    Seed,
    Text,
    Word,
)
from mpu_cli.server.scheme import MOST_COPIES


class NoiseEntries(Document):
    kind: Literal["zero-sum", "extrapolate"]
    factors: Annotated[list[Finite], Meta(min_length=1, max_length=MOST_COPIES)]


class BaseEntries(Document):
    path: Text
    config: Text
    fingerprint: Text


class CalibrationEntries(Document):
    epsilon: Scale
    delta: Scale
    sensitivity: Scale
    adversary: Word
    bound: Word
    rounds: Count
    sigma: Scale
    shared_sigma: Scale


class KeyEntries(Document, forbid_unknown_fields=True):
    """The entries of a key file, but format and version; what has a default came later than version 1."""

    run: RunName
    round: Count
    seed: Seed
    seed_is_secret: bool
    noise: NoiseEntries
    kappa: Scale
    symmetries: Word
    sigma: dict[str, Scale]
    copy_ids: Annotated[list[Word], Meta(min_length=1, max_length=MOST_COPIES)]
    base: BaseEntries
    reference: Text | None
    shared_kappa: Scale = 0.0
    shared_sigma: dict[str, Scale] = msgspec.field(default_factory=dict)
    calibration: CalibrationEntries | None = None
    omitted_layers: Layers = msgspec.field(default_factory=list)
    permanent_seed: Seed | None = None
    grouped: bool = False
    names_in_memory: bool = False
    mark: Scale = 0.0
    recipients: dict[Word, Text] = msgspec.field(default_factory=dict)
    authenticator: Text | None = None
