"""The key file: everything needed to undo a publication, sealed with age (age-encryption.org/v1)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pyrage

from mpu_cli.architectures.family import SETS
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.manifest import are_layers
from mpu_cli.models.source import Model, open_model
from mpu_cli.sealing import AGE_HEADER, default_identity_path, make_identity, parse_recipients, read_identities
from mpu_cli.server.noise import EXTRAPOLATE, SCHEMES, ZERO_SUM, Scheme, check_alphas, check_nodes

FORMAT, VERSION = "mpu-keys", 4
SINCE_4 = ("omitted_layers", "permanent_seed")
MAX_KEYS_FILE = 64 << 20  # bytes; a real one has a few thousand


@dataclass(frozen=True)
class BaseIdentity:
    """Which model was published: its location, its fingerprint, and the config that describes it."""

    path: str
    config: str
    fingerprint: str


@dataclass(frozen=True)
class Calibration:
    """Noise for (ε, δ): σ of each copy's own noise, before its factor α, and σ of the noise all copies share."""

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
    seed: str = field(repr=False)  # 32 bytes in hexadecimal
    seed_is_secret: bool
    noise: Scheme
    kappa: float
    symmetries: str
    sigma: dict[str, float]  # block → σ_ℓ, before the copy's factor
    copy_ids: tuple[str, ...]
    base: BaseIdentity
    reference: str | None
    shared_kappa: float = 0.0
    shared_sigma: dict[str, float] = field(default_factory=dict)  # block → scale of the noise all copies share
    calibration: Calibration | None = None  # if set, κ is 0 and σ is the same in every block
    omitted_layers: tuple[int, ...] = ()  # of the base, which no copy has
    permanent_seed: str | None = field(default=None, repr=False)  # of permanent noise, if not ``seed``; in hexadecimal

    @property
    def permanent(self) -> float:
        """The scale of the noise that all copies share, in multiples of that which cancels; infinite if none does."""
        own, shared = self.kappa, self.shared_kappa
        if self.calibration:
            own, shared = self.calibration.sigma, self.calibration.shared_sigma
        return 0.0 if not shared else shared / own if own else math.inf

    @property
    def permanent_randomness_seed(self) -> bytes | None:
        return bytes.fromhex(self.permanent_seed) if self.permanent_seed else None

    @property
    def copies(self) -> int:
        return self.noise.copies


def seal(keys: Keys, recipients: Sequence[pyrage.x25519.Recipient] = (), passphrase: str | None = None) -> bytes:
    """The key file's bytes, sealed for ``recipients`` or with ``passphrase``."""
    facts = asdict(keys)
    since = {name: facts.pop(name) for name in SINCE_4}
    version = VERSION if any(since.values()) else VERSION - 1  # older versions of mpu read what they understand
    facts |= since if version == VERSION else {}
    document = json.dumps({"format": FORMAT, "version": version, **facts}).encode()
    if passphrase is not None:
        return pyrage.passphrase.encrypt(document, passphrase)
    return pyrage.encrypt(document, list(recipients))


def sealer(
    *,
    recipients: Sequence[str] = (),
    passphrase: str | None = None,
    identity: Path | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Callable[[Keys], bytes]:
    """What seals keys: for ``recipients`` (age1…), with a ``passphrase``, or for the identity in a file.

    Without any of them, for the user's own identity, which is made on first use; ``note`` is told so. Raises MpuError
    for a recipient or an identity that cannot be used.
    """
    if recipients:
        parsed = parse_recipients(recipients)
        return lambda keys: seal(keys, parsed)
    if passphrase is not None:
        return lambda keys: seal(keys, passphrase=passphrase)
    path = identity or default_identity_path()
    if identity is not None or path.exists():
        own = [known.to_public() for known in read_identities(path)]
        return lambda keys: seal(keys, own)

    def with_new_identity(keys: Keys) -> bytes:
        try:
            recipient = make_identity(path)
        except MpuError:
            if not path.exists():
                raise
            return seal(keys, [known.to_public() for known in read_identities(path)])  # another process was faster
        note(f"made your identity {path} (public key {recipient}); keep it safe: without it the keys cannot be opened")
        return seal(keys, parse_recipients([recipient]))

    return with_new_identity


def needs_passphrase(path: Path) -> bool:
    """Whether the key file is sealed with a passphrase (else with an identity)."""
    return b"\n-> scrypt " in _read(path)[:200]


def unseal(path: Path, identities: Sequence[pyrage.x25519.Identity] = (), passphrase: str | None = None) -> Keys:
    """Open a key file. Raises MpuError if it is damaged, newer, or sealed for another identity or passphrase."""
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
                f"{path}: sealed for another identity (or damaged)", "specify the right one with --identity"
            ) from error
        if passphrase is not None and "decryption failed" in reason:
            raise MpuError(f"{path}: wrong passphrase (or damaged)") from error
        raise MpuError(f"{path}: key file is damaged ({error})", "restore it from a backup") from error
    return _parse(document, path)


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_KEYS_FILE:
            raise MpuError(f"{path}: too large for a key file")
        sealed = path.read_bytes()
    except OSError as error:
        raise MpuError(f"{path}: cannot read key file: {error.strerror}") from error
    if not sealed.startswith(AGE_HEADER):
        raise MpuError(f"{path}: not an mpu key file (no age header)")
    return sealed


def _parse(document: bytes, path: Path) -> Keys:
    try:
        table = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise MpuError(f"{path}: decrypted, but contains no mpu keys") from error
    if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
        raise MpuError(f"{path}: decrypted, but contains no mpu keys")
    version = table.pop("version", None)
    if version not in range(1, VERSION + 1):
        raise MpuError(
            f"{path}: unsupported keys version {version} (this mpu reads versions 1 to {VERSION})", "update mpu"
        )
    try:
        if version == 1:  # version 1 had only zero-sum noise
            table["noise"] = {"kind": ZERO_SUM, "factors": table.pop("alphas")}
        fields = table.get("calibration")
        calibration = Calibration(**fields) if fields is not None else None
        noise = Scheme(**table["noise"])
        keys = Keys(**{**table, "noise": noise, "base": BaseIdentity(**table["base"]), "calibration": calibration})
        sound = _sound(keys)
    except (KeyError, TypeError, OverflowError, UsageError) as error:
        raise MpuError(f"{path}: key data is incomplete or invalid") from error
    if not sound:
        raise MpuError(f"{path}: key data is incomplete or invalid")
    noise = Scheme(keys.noise.kind, tuple(keys.noise.factors))
    return replace(keys, noise=noise, copy_ids=tuple(keys.copy_ids), omitted_layers=tuple(keys.omitted_layers))


def _sound(keys: Keys) -> bool:
    """Whether every entry is valid: a key file may have been sealed by someone else. Raises UsageError if the noise
    factors do not form a scheme."""
    texts = (
        keys.run,
        keys.seed,
        keys.permanent_seed or "",
        keys.symmetries,
        keys.base.path,
        keys.base.config,
        keys.base.fingerprint,
    )
    if not all(isinstance(text, str) for text in texts) or not isinstance(keys.sigma, dict):
        return False
    if not isinstance(keys.shared_sigma, dict):
        return False
    if not isinstance(keys.noise.factors, list) or not isinstance(keys.copy_ids, list):
        return False
    if not are_layers(list(keys.omitted_layers)):
        return False
    factors = keys.noise.factors
    if keys.symmetries not in SETS:
        return False
    if keys.noise.kind not in SCHEMES or not all(isinstance(factor, int | float) for factor in factors):
        return False
    (check_nodes if keys.noise.kind == EXTRAPOLATE else check_alphas)(factors, len(factors))
    numbers = [keys.kappa, *keys.sigma.values(), keys.shared_kappa, *keys.shared_sigma.values()]
    if calibration := keys.calibration:
        numbers += [
            calibration.epsilon,
            calibration.delta,
            calibration.sensitivity,
            calibration.rounds,
            calibration.sigma,
            calibration.shared_sigma,
        ]
        if not isinstance(calibration.adversary, str) or not isinstance(calibration.bound, str):
            return False
    return (
        all(isinstance(number, int | float) and math.isfinite(number) and number >= 0 for number in numbers)
        and all(isinstance(copy_id, str) for copy_id in keys.copy_ids)
        and len(factors) == len(keys.copy_ids) >= 1
        and type(keys.round) is int
        and all(re.fullmatch("[0-9a-f]{64}", seed) for seed in (keys.seed, keys.permanent_seed or keys.seed))
    )


def published_base(keys: Keys, source: str | None, config: Path | None) -> Model:
    """The published model: ``source`` if given, otherwise from the location recorded in the keys."""
    if source is not None:
        return open_model(source, config)
    try:
        return open_model(keys.base.path, config or Path(keys.base.config))
    except MpuError as error:
        raise MpuError(f"cannot open the published base ({error})", "specify its location with --base") from error
