"""Receipts: what a client measured of a copy, signed by it and, for the copy's origin, by the server.

A receipt is a JSON document without records, questions or answers. The client signs what it measured; the server signs
the whole, with the client's signature, after checking that the copy is of its publication. Both sign with Ed25519 keys
that are derived from their secrets, so whoever knows a party's public key can check without either of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta

from mpu_cli.boundary.documents import (
    Count,
    Document,
    RunName,
    Text,
    Word,
    as_entries,
    read_document,
)
from mpu_cli.errors import MpuError
from mpu_cli.evaluation.verdict import MARGIN, SetScore, Verdict
from mpu_cli.manifest import CopyManifest
from mpu_cli.server.keys import Keys

FORMAT, VERSION = "mpu-receipt", 1
PARTIES = ("client", "server")
SCORES = ("forget", "retain", "unseen", "before_forget", "before_retain")  # of a verdict

Share = Annotated[float, Meta(ge=0, le=1)]
PublicKey = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Fingerprint = Annotated[str, Meta(pattern=r"\A(blake3:)?[0-9a-f]{64}\Z")]
SignatureText = Annotated[str, Meta(pattern=r"\A[0-9a-f]{128}\Z")]


class Signature(Document, forbid_unknown_fields=True):
    public_key: PublicKey
    signature: SignatureText


class Scores(Document, forbid_unknown_fields=True):
    records: Count
    probability: Share
    verbatim: Share | None


class CopyFacts(Document, forbid_unknown_fields=True):
    """Which copy was measured: as its manifest says, and the fingerprint of its weights."""

    run: RunName
    round: Count
    copy: Count
    copy_id: Word
    weights: Fingerprint


class Receipt(Document, forbid_unknown_fields=True):
    """The entries of a receipt. ``margin``: of a probability, within which the verdict was made."""

    format: Word
    version: Count
    mpu: Word
    date: Word
    copy: CopyFacts
    forget: Scores
    retain: Scores | None
    unseen: Scores | None
    before_forget: Scores | None
    before_retain: Scores | None
    margin: Share
    verdict: Text
    client: Signature | None = None
    server: Signature | None = None


def new_receipt(verdict: Verdict, manifest: CopyManifest, weights: str, *, date: str, version: str) -> Receipt:
    """An unsigned receipt for the copy with this ``manifest`` and fingerprint of its ``weights``."""
    facts = CopyFacts(
        run=manifest.run, round=manifest.round, copy=manifest.copy, copy_id=manifest.copy_id, weights=weights
    )
    scores = {name: score and Scores(**asdict(score)) for name in SCORES for score in [getattr(verdict, name)]}
    return Receipt(
        format=FORMAT, version=VERSION, mpu=version, date=date, copy=facts, margin=MARGIN, verdict=verdict.sentence,
        **scores,  # type: ignore[arg-type]
    )  # fmt: skip


def read_receipt(path: Path) -> Receipt:
    """The receipt in a file. Raises MpuError if it is none, or if its verdict does not follow from its numbers."""
    receipt = read_document(Receipt, path)
    if (receipt.format, receipt.version) != (FORMAT, VERSION):
        raise MpuError(f"{path}: not a receipt that this mpu reads", "update mpu")
    scores = {
        name: score and SetScore(score.records, score.probability, score.verbatim)
        for name in SCORES
        for score in [getattr(receipt, name)]
    }
    if Verdict(**scores).sentence != receipt.verdict or receipt.margin != MARGIN:  # type: ignore[arg-type]
        raise MpuError(f"{path}: its verdict does not follow from its numbers")
    return receipt


def _signing_key(party: str, secret: bytes) -> Ed25519PrivateKey:
    info = f"mpu receipt {party}".encode()
    return Ed25519PrivateKey.from_private_bytes(HKDF(SHA256(), 32, salt=None, info=info).derive(secret))


def public_key_of(party: str, secret: bytes) -> str:
    """The public key, in hexadecimal, of the key that a ``party`` with this ``secret`` signs with."""
    return _signing_key(party, secret).public_key().public_bytes_raw().hex()


def with_signature(receipt: Receipt, party: str, secret: bytes) -> Receipt:
    """``receipt`` with the signature of a ``party``, "client" or "server", under a key derived from its ``secret``."""
    unsigned = msgspec.structs.replace(receipt, **{party: None})
    text = _signing_key(party, secret).sign(_message(unsigned, party)).hex()
    signature = Signature(public_key=public_key_of(party, secret), signature=text)
    return msgspec.structs.replace(receipt, **{party: signature})


def check_signatures(receipt: Receipt, path: Path) -> dict[str, str]:
    """The public keys of those who signed, by party. Raises MpuError if a signature is wrong, or if the client's is
    missing."""
    public_keys = {}
    for party in PARTIES:
        signature: Signature | None = getattr(receipt, party)
        if signature is None:
            continue
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.public_key)).verify(
                bytes.fromhex(signature.signature), _message(receipt, party)
            )
        except InvalidSignature as error:
            raise MpuError(f"{path}: the {party}'s signature is wrong: the receipt was changed") from error
        public_keys[party] = signature.public_key
    if "client" not in public_keys:
        raise MpuError(f"{path}: the client did not sign it")
    return public_keys


def _message(receipt: Receipt, party: str) -> bytes:
    """What a party signs: all entries before its own signature, as JSON with sorted names."""
    entries = as_entries(receipt)
    for later in PARTIES[PARTIES.index(party) :]:
        entries.pop(later, None)
    return f"{FORMAT} {party} ".encode() + json.dumps(entries, sort_keys=True).encode()


def check_origin(receipt: Receipt, keys: Keys, path: Path) -> None:
    """Raise MpuError unless the copy of a receipt is of the publication with these ``keys``."""
    copy = receipt.copy
    if (copy.run, copy.round) != (keys.run, keys.round) or copy.copy_id not in keys.copy_ids:
        raise MpuError(f"{path}: measured a copy of another publication", "use the keys of that publication")
    if keys.copy_ids.index(copy.copy_id) + 1 != copy.copy:
        raise MpuError(f"{path}: measured copy {keys.copy_ids.index(copy.copy_id) + 1}, and says copy {copy.copy}")


def check_weights(receipt: Receipt, weights: str, path: Path) -> None:
    """Raise MpuError unless the copy that was measured has this fingerprint of its ``weights``."""
    if receipt.copy.weights != weights:
        raise MpuError(f"{path}: other weights were measured than those of the copy", "name the copy that was sent")


def as_text(receipt: Receipt) -> str:
    """The document, for its file."""
    entries: Mapping[str, object] = as_entries(receipt)
    return json.dumps(entries, indent=2, ensure_ascii=False) + "\n"
