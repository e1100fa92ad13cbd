"""The key file: what undoes a publication, sealed with age (age-encryption.org/v1)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pyrage

from mpu_cli.architectures.family import SETS
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.sealing import AGE_HEADER
from mpu_cli.server.noise import EXTRAPOLATE, SCHEMES, ZERO_SUM, Scheme, check_alphas, check_nodes

FORMAT, VERSION = "mpu-keys", 2
MAX_KEYS_FILE = 64 << 20  # bytes; a real one has a few thousand


@dataclass(frozen=True)
class BaseIdentity:
    """Which model was published: where it was, its fingerprint, and the config that describes it."""

    path: str
    config: str
    fingerprint: str


@dataclass(frozen=True)
class Calibration:
    """Noise for (ε, δ): σ before α of each copy's own noise, and that of the noise that all copies share."""

    epsilon: float
    delta: float
    sensitivity: float
    adversary: str
    bound: str
    rounds: int
    sigma: float
    shared_sigma: float


@dataclass(frozen=True)
class Keys:
    """Everything needed to undo one publication."""

    run: str
    round: int
    seed: str  # 32 bytes in hexadecimal
    seed_is_secret: bool
    noise: Scheme
    kappa: float
    symmetries: str
    sigma: dict[str, float]  # block → σ_ℓ, before the factor of a copy
    copy_ids: tuple[str, ...]
    base: BaseIdentity
    reference: str | None
    shared_kappa: float = 0.0
    shared_sigma: dict[str, float] = field(default_factory=dict)  # block → scale of the noise that all copies share
    calibration: Calibration | None = None  # then κ is 0, and σ the same in every block

    @property
    def copies(self) -> int:
        return self.noise.copies


def seal(keys: Keys, recipients: Sequence[pyrage.x25519.Recipient] = (), passphrase: str | None = None) -> bytes:
    """The key file's bytes: for ``recipients``, or for whoever knows ``passphrase``."""
    document = json.dumps({"format": FORMAT, "version": VERSION, **asdict(keys)}).encode()
    if passphrase is not None:
        return pyrage.passphrase.encrypt(document, passphrase)
    return pyrage.encrypt(document, list(recipients))


def needs_passphrase(path: Path) -> bool:
    """Whether the key file is sealed with a passphrase (else with an identity)."""
    return b"\n-> scrypt " in _read(path)[:200]


def unseal(path: Path, identities: Sequence[pyrage.x25519.Identity] = (), passphrase: str | None = None) -> Keys:
    """Open a key file. Raises MpuError for a wrong identity or passphrase, damage, or a newer version."""
    sealed = _read(path)
    try:
        if passphrase is not None:
            document = pyrage.passphrase.decrypt(sealed, passphrase)
        else:
            document = pyrage.decrypt(sealed, list(identities))
    except pyrage.DecryptError as error:
        reason = str(error).lower()
        if "no matching keys" in reason:
            raise MpuError(
                f"{path}: sealed for another identity (or damaged); name the right one with --identity"
            ) from error
        if passphrase is not None and "decryption failed" in reason:
            raise MpuError(f"{path}: wrong passphrase (or damaged)") from error
        raise MpuError(f"{path}: the key file is damaged ({error}); restore it from a backup") from error
    return _parse(document, path)


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_KEYS_FILE:
            raise MpuError(f"{path}: too large for a key file")
        sealed = path.read_bytes()
    except OSError as error:
        raise MpuError(f"{path}: the key file cannot be read: {error.strerror}") from error
    if not sealed.startswith(AGE_HEADER):
        raise MpuError(f"{path}: is not a key file of mpu (no age header)")
    return sealed


def _parse(document: bytes, path: Path) -> Keys:
    try:
        table = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise MpuError(f"{path}: opened, but it holds no mpu keys") from error
    if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
        raise MpuError(f"{path}: opened, but it holds no mpu keys")
    version = table.pop("version", None)
    if version not in (1, VERSION):
        raise MpuError(
            f"{path}: made by another mpu (keys version {version}, this one reads 1 to {VERSION}); update mpu"
        )
    try:
        if version == 1:  # knew zero-sum noise only
            table["noise"] = {"kind": ZERO_SUM, "factors": table.pop("alphas")}
        told = table.get("calibration")
        calibration = Calibration(**told) if told is not None else None
        noise = Scheme(**table["noise"])
        keys = Keys(**{**table, "noise": noise, "base": BaseIdentity(**table["base"]), "calibration": calibration})
        sound = _sound(keys)
    except (KeyError, TypeError, OverflowError, UsageError) as error:
        raise MpuError(f"{path}: opened, but its keys are not whole") from error
    if not sound:
        raise MpuError(f"{path}: opened, but its keys are not whole")
    noise = Scheme(keys.noise.kind, tuple(keys.noise.factors))
    return replace(keys, noise=noise, copy_ids=tuple(keys.copy_ids))


def _sound(keys: Keys) -> bool:
    """Whether every entry is of its kind: who seals a key file need not be who opens it. Raises UsageError for factors
    of the noise that make no scheme."""
    texts = (keys.run, keys.seed, keys.symmetries, keys.base.path, keys.base.config, keys.base.fingerprint)
    if not all(isinstance(text, str) for text in texts) or not isinstance(keys.sigma, dict):
        return False
    if not isinstance(keys.shared_sigma, dict):
        return False
    if not isinstance(keys.noise.factors, list) or not isinstance(keys.copy_ids, list):
        return False
    factors = keys.noise.factors
    if keys.symmetries not in SETS:
        return False
    if keys.noise.kind not in SCHEMES or not all(isinstance(factor, int | float) for factor in factors):
        return False
    (check_nodes if keys.noise.kind == EXTRAPOLATE else check_alphas)(factors, len(factors))
    numbers = [keys.kappa, *keys.sigma.values(), keys.shared_kappa, *keys.shared_sigma.values()]
    if told := keys.calibration:
        numbers += [told.epsilon, told.delta, told.sensitivity, told.rounds, told.sigma, told.shared_sigma]
        if not isinstance(told.adversary, str) or not isinstance(told.bound, str):
            return False
    return (
        all(isinstance(number, int | float) and math.isfinite(number) and number >= 0 for number in numbers)
        and all(isinstance(copy_id, str) for copy_id in keys.copy_ids)
        and len(factors) == len(keys.copy_ids) >= 1
        and type(keys.round) is int
        and re.fullmatch("[0-9a-f]{64}", keys.seed) is not None
    )
