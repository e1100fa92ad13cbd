"""The key file: everything needed to undo a publication, sealed with age (age-encryption.org/v1)."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pyrage
from msgspec import Meta

from mpu_cli.errors import MpuError, UsageError, first_line
from mpu_cli.files.boundary import (
    AGE_HEADER,
    Count,
    Document,
    Finite,
    RunName,
    Scale,
    Seed,
    Text,
    Word,
    parse_document,
)
from mpu_cli.files.randomness import Randomness
from mpu_cli.files.reader import WORD
from mpu_cli.files.sealing import (
    check_header,
    default_identity_path,
    make_identity,
    parse_recipients,
    read_identities,
)
from mpu_cli.model.family import SETS
from mpu_cli.model.source import Model, cached_snapshot, open_model
from mpu_cli.protocol.noise import MOST_COPIES, SCHEMES, Calibration, Scales
from mpu_cli.protocol.publication import Publication, default_secret_path, server_secret

# The entries of a key file, and their types and bounds.


class NoiseEntries(Document):
    kind: Literal["zero-sum", "extrapolate"]
    factors: Annotated[list[Finite], Meta(min_length=1, max_length=MOST_COPIES)]


@dataclass(frozen=True)
class BaseIdentity:
    """The published model: its location, its fingerprint, and the config that describes it."""

    path: Text
    config: Text
    fingerprint: Text


class KeyEntries(Document, forbid_unknown_fields=True):
    """The entries of a key file, except format and version."""

    run: RunName
    round: Count
    seed: Seed
    seed_is_secret: bool
    noise: NoiseEntries
    kappa: Scale
    symmetries: Word
    sigma: dict[str, Scale]
    copy_ids: Annotated[tuple[Word, ...], Meta(min_length=1, max_length=MOST_COPIES)]
    base: BaseIdentity
    reference: Text | None
    shared_kappa: Scale = 0.0
    shared_sigma: dict[str, Scale] = msgspec.field(default_factory=dict)
    calibration: Calibration | None = None
    permanent_seed: Seed | None = None
    watermark: Scale = 0.0
    max_noise: Scale | None = None
    dtype: Word | None = None
    recipients: dict[Word, Text] = msgspec.field(default_factory=dict)
    authenticator: Text | None = None


FORMAT, VERSION = "mpu-keys", 10
MAX_KEYS_FILE = 64 << 20  # bytes; a real one has a few thousand


@dataclass(frozen=True)
class Keys:
    """Everything needed to undo one publication."""

    publication: Publication
    sigma: dict[str, float]  # by block, the scale of the noise that cancels, before a copy's factor
    copy_ids: tuple[str, ...]
    base: BaseIdentity
    reference: str | None  # the address of the pretrained model that the noise was scaled to
    # by block, the scale of the noise that all copies share
    shared_sigma: dict[str, float] = field(default_factory=dict)
    # whether the file was sealed by who opened it, with a passphrase or under the server's secret; whoever knows
    # the public key can seal others
    authentic: bool = False
    # whom copies were sealed for, as far as that is known: age public keys by the copies' numbers
    recipients: dict[str, str] = field(default_factory=dict)

    def scales(self, block: str) -> Scales:
        """σ of all noise of a block."""
        return self.publication.scales(self.sigma.get(block, 0.0), self.shared_sigma.get(block, 0.0))

    @property
    def run(self) -> str:
        return self.publication.run

    @property
    def round(self) -> int:
        return self.publication.round

    @property
    def copies(self) -> int:
        return self.publication.copies


# The entries that are fields of a publication, and of its keys, by the same name; the seeds are in hexadecimal.
OF_PUBLICATION = sorted(
    {*KeyEntries.__struct_fields__} & {*Publication.__dataclass_fields__} - {"seed", "permanent_seed"}
)
OF_KEYS = sorted({*KeyEntries.__struct_fields__} & {*Keys.__dataclass_fields__})


def seal(
    keys: Keys,
    recipients: Sequence[pyrage.x25519.Recipient] = (),
    passphrase: str | None = None,
    secret: bytes | None = None,
) -> bytes:
    """The key file's bytes, sealed for ``recipients`` and authenticated with ``secret``, or sealed with ``passphrase``,
    which authenticates them, too."""
    publication = keys.publication
    table: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "seed": publication.seed.hex(),
        "permanent_seed": publication.permanent_seed.hex() if publication.permanent_seed else None,
        "noise": {"kind": publication.scheme.kind, "factors": publication.scheme.factors},
        **{name: msgspec.to_builtins(getattr(publication, name)) for name in OF_PUBLICATION},
        **{name: msgspec.to_builtins(getattr(keys, name)) for name in OF_KEYS},
    }
    if secret is not None and passphrase is None:
        table["authenticator"] = _authenticator(table, secret)
    document = json.dumps(table).encode()
    if passphrase is not None:
        return pyrage.passphrase.encrypt(document, passphrase)
    return pyrage.encrypt(document, list(recipients))


def _authenticator(table: dict[str, Any], secret: bytes) -> str:
    """HMAC-SHA256 of all entries but this one, under a key of its own, in hexadecimal."""
    entries = json.dumps({name: value for name, value in table.items() if name != "authenticator"}, sort_keys=True)
    return hmac.new(Randomness(secret).key("keys", "authenticator"), entries.encode(), "sha256").hexdigest()


def sealer(
    *,
    recipients: Sequence[str],
    passphrase: str | None,
    identity: Path | None,
    note: Callable[[str], None],
) -> Callable[[Keys], bytes]:
    """The function that seals keys: for ``recipients`` (age1…), with a ``passphrase``, or for the identity in a file.

    Without any of them, for the user's own identity, which is made on first use; ``note`` reports that.
    """
    check_one_way(recipients, passphrase, identity)
    if passphrase is not None:
        return lambda keys: seal(keys, passphrase=passphrase)
    path, readers = identity or default_identity_path(), parse_recipients(recipients)
    if not readers and (identity is not None or path.exists()):
        readers = [age_identity.to_public() for age_identity in read_identities(path)]

    def seal_for_readers(keys: Keys) -> bytes:
        if readers:
            return seal(keys, readers, secret=server_secret(note))
        try:
            recipient = make_identity(path)
            note(
                f"made your identity {path} (public key {recipient}); keep it safe: "
                "without it the keys cannot be opened"
            )
        except MpuError:
            if not path.exists():  # else another process was faster
                raise
        own = [age_identity.to_public() for age_identity in read_identities(path)]
        return seal(keys, own, secret=server_secret(note))

    return seal_for_readers


def check_one_way(*ways: object) -> None:
    """Raise UsageError for more than one of the recipients, the passphrase and the identity to seal keys with."""
    if sum(map(bool, ways)) > 1:
        raise UsageError(
            "--recipient, --passphrase and --identity are mutually exclusive", "choose one way to seal the keys"
        )


def needs_passphrase(path: Path) -> bool:
    """Whether the key file is sealed with a passphrase (else with an identity)."""
    # The beginning of age's header for a passphrase; the sealed bytes behind it may hold anything.
    return b"\n-> scrypt " in _read(path)[:200]


def unseal(
    path: Path,
    identities: Sequence[pyrage.x25519.Identity] = (),
    passphrase: str | None = None,
    secret: bytes | None = None,
) -> Keys:
    """Open a key file; with the server's ``secret``, find out whether it is the server's own."""
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
        raise MpuError(f"{path}: key file is damaged ({first_line(error)})", "restore it from a backup") from error
    return _parse(document, path, secret, authentic=passphrase is not None)


def open_keys(
    path: Path, *, identity: Path | None = None, passphrase: str | None = None, trust_keys: bool = False
) -> Keys:
    """The keys in a file, opened with a passphrase or an identity (default: your own)."""
    if passphrase is not None:
        return unseal(path, passphrase=passphrase)
    identities = read_identities(identity or default_identity_path())
    secret = server_secret() if default_secret_path().exists() else None
    opened = unseal(path, identities, secret=secret)
    if not (trust_keys or opened.authentic):  # somebody else's would choose what is opened and added to the model
        raise MpuError(
            f"{path}: was not sealed with this server's secret ({default_secret_path()})",
            "--trust-keys uses keys that you know: made on another machine",
        )
    return opened


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise MpuError(f"{path}: a folder, not a key file", "name the file that `mpu publish` wrote, such as keys.bin")
    try:
        if path.stat().st_size > MAX_KEYS_FILE:
            raise MpuError(f"{path}: too large for a key file")
        sealed = path.read_bytes()
    except OSError as error:
        raise MpuError(
            f"{path}: cannot read key file: {error.strerror}",
            "name it with --keys; only the model's owner has it, who published the copies",
        ) from error
    if not sealed.startswith(AGE_HEADER):
        raise MpuError(f"{path}: not an mpu key file (no age header)")
    check_header(sealed, path)
    return sealed


def _parse(document: bytes, path: Path, secret: bytes | None, *, authentic: bool) -> Keys:
    try:
        table = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise MpuError(f"{path}: decrypted, but contains no mpu keys") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise MpuError(f"{path}: decrypted, but contains no mpu keys")
    # From the file, so it can be anything; compare_digest raises for text that is not ASCII.
    written = table.get("authenticator")
    if secret is not None and isinstance(written, str) and written.isascii():
        authentic |= hmac.compare_digest(written, _authenticator(table, secret))
    table.pop("format")
    version = table.pop("version", None)
    if version != VERSION:
        raise MpuError(f"{path}: keys of version {version!r}, and this mpu reads version {VERSION}", "update mpu")
    # Each entry is checked: a key file may have been sealed by someone else.
    damaged, hint = f"{path}: key data is incomplete or invalid", "restore it from a backup"
    entries = parse_document(KeyEntries, table, damaged, hint)
    sound = len(entries.noise.factors) == len(entries.copy_ids)
    if not sound or entries.symmetries not in SETS or entries.dtype not in (None, *WORD):
        raise MpuError(damaged, hint)
    try:
        publication = Publication(
            seed=bytes.fromhex(entries.seed),
            permanent_seed=bytes.fromhex(entries.permanent_seed) if entries.permanent_seed else None,
            scheme=SCHEMES[entries.noise.kind].from_factors(entries.noise.factors),
            **{name: getattr(entries, name) for name in OF_PUBLICATION},
        )
    except UsageError as error:
        raise MpuError(damaged, hint) from error
    return Keys(publication, authentic=authentic, **{name: getattr(entries, name) for name in OF_KEYS})


def published_base(keys: Keys, source: str | None) -> Model:
    """The published model: ``source`` if given, otherwise from the location recorded in the keys, on this machine: what
    keys name is never looked for on the Hub."""
    if source is not None:
        return open_model(source)
    try:
        if not Path(keys.base.path).exists() and cached_snapshot(keys.base.path) is None:
            raise MpuError(f"{keys.base.path}: not on this machine")
        return open_model(keys.base.path, Path(keys.base.config))
    except MpuError as error:
        raise MpuError(f"cannot open the published base ({error})", "specify its location with --base") from error
