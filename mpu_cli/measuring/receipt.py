"""Receipts: what a client measured of a copy, signed by it and, for the copy's origin, by the server.

A receipt is a JSON document without records, questions or answers. The client signs what it measured; the server signs
the whole, with the client's signature, once it has found that the copy is the one that it sent. Both sign with Ed25519
keys that are derived from their secrets, so whoever knows a party's public key can check without either of them. The
records are committed to, by an HMAC under a key for this receipt that the client can show to an auditor: whoever has
it can try guesses.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.boundary import Count, Document, RunName, Text, Word, as_entries, read_document
from mpu_cli.files.reader import fingerprint
from mpu_cli.measuring.verdict import WIDEST, SetScore, Share, Verdict
from mpu_cli.protocol.keys import Keys
from mpu_cli.records.forms import RecordSets, digest_of_record
from mpu_cli.records.knowledge import Tail

if TYPE_CHECKING:
    from mpu_cli.model.source import Model


FORMAT, VERSION = "mpu-receipt", 6
PARTIES = ("client", "server")
LARGEST_POWER = 32  # of two, that the number of records may be
WIDEST_PERCENT = round(100 * WIDEST)
# What a receipt tells about the records: as much as three percents, each of which may be missing, a yes or no that may
# be, and a power of two.
MOST_BITS = 3 * math.log2(2 * WIDEST_PERCENT + 2) + math.log2(3) + math.log2(LARGEST_POWER)
# Ed25519 public keys under which one signature holds for every message: points of small order, and other encodings of
# them. The last bit is the sign of x and does not count. Chalkias et al., "Taming the many EdDSAs" (2020), table 1.
SMALL_ORDER = (
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
)

Percent = Annotated[int, Meta(ge=-WIDEST_PERCENT, le=WIDEST_PERCENT)]
Limit = Annotated[int, Meta(ge=0, le=WIDEST_PERCENT)]
Hexadecimal32 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Fingerprint = Annotated[str, Meta(pattern=r"\Ablake3:[0-9a-f]{64}\Z")]
SignatureText = Annotated[str, Meta(pattern=r"\A[0-9a-f]{128}\Z")]
MeasuredSet = Literal["forget", "unseen", "held_out", "retain"]
UNKNOWN = SetScore(0, 0.0, 0.0)  # which a receipt does not tell
Date = Annotated[str, Meta(pattern=r"\A20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])\Z")]


class Signature(Document, forbid_unknown_fields=True):
    public_key: Hexadecimal32
    signature: SignatureText


class CopyFacts(Document, forbid_unknown_fields=True):
    """The copy that was measured: its names, as its manifest says, and digests of its weights and of its tokenizer,
    template and config, by which records are read."""

    run: RunName
    round: Count
    copy: Count
    copy_id: Word
    weights: Fingerprint
    reading_context: Hexadecimal32


class ServerCheck(Document, forbid_unknown_fields=True):
    """The statement that a server signs: that on this ``date`` the names, the weights and the reading context of the
    copy that was measured were those of the copy that it sent, if ``before`` also those of the one that it was compared
    with, and, unless ``model`` is None, that its keys make this copy of the model with that fingerprint."""

    date: Date
    model: Fingerprint | None
    before: bool = False


class Receipt(Document, forbid_unknown_fields=True):
    """The entries of a receipt; shares and their limits are in percent."""

    format: Word
    version: Count
    mpu: Word
    date: Date
    copy: CopyFacts
    before: CopyFacts | None  # of the copy that was trained on, if it was measured
    public: Fingerprint | None  # of the model whose probabilities are the baseline, if there was one
    sets: Annotated[tuple[MeasuredSet, ...], Meta(max_length=4)]  # of which the copy was asked
    records_at_most: Count  # the number of records to forget, up to a power of two
    left: Percent | None
    left_high: Percent | None  # the end of the interval of ``left``
    kept: Percent | None
    stands_out: bool | None  # as in the verdict; None without a baseline
    max_left: Limit  # the limits of the verdict
    min_kept: Limit
    verdict: Text
    # The commitment to the records to forget, to keep and unseen, under a key derived with ``nonce``.
    records: Hexadecimal32
    nonce: Hexadecimal32
    client: Signature | None = None
    checked: ServerCheck | None = None  # present if the server signed
    server: Signature | None = None


def today() -> str:
    """The date in UTC, as receipts have it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


def check_limits(max_left: float, min_kept: float) -> None:
    """Raise UsageError unless a receipt can have these limits of a verdict: they are whole percents there."""
    if not all(math.isclose(100 * share, _percent(share)) for share in (max_left, min_kept)):
        raise UsageError("--goal max_left and min_kept: a receipt has whole percents, such as 0.05")
    if _percent(min_kept) > WIDEST_PERCENT:
        raise UsageError(f"--goal min_kept: a receipt has at most {WIDEST:g}")


def new_receipt(
    verdict: Verdict,
    *,
    copy: CopyFacts,
    before: CopyFacts | None,
    public: str | None,
    records: str,
    nonce: str,
    version: str,
) -> Receipt:
    """An unsigned receipt for ``copy``; ``records`` and ``nonce`` are what ``commit_to`` gives, and the limits of the
    ``verdict`` are such as ``check_limits`` accepts."""
    left, kept = verdict.left, verdict.kept
    return Receipt(
        format=FORMAT,
        version=VERSION,
        mpu=version,
        date=today(),
        copy=copy,
        before=before,
        public=public,
        sets=tuple(name for name in get_args(MeasuredSet) if name in verdict.scores),
        records_at_most=verdict.scores["forget"].records_at_most,
        left=_percent(left.estimate) if left else None,
        left_high=_percent(left.high) if left else None,
        kept=_percent(kept.estimate) if kept else None,
        stands_out=verdict.stands_out if verdict.tail else None,
        max_left=_percent(verdict.max_left),
        min_kept=_percent(verdict.min_kept),
        verdict=verdict.sentence,
        records=records,
        nonce=nonce,
    )


def _percent(share: float) -> int:
    return round(100 * share)


def same_reading_context(receipt: Receipt) -> bool:
    """Whether the copy that was measured reads records as the one that was trained on does."""
    return receipt.before is None or receipt.before.reading_context == receipt.copy.reading_context


def opening_key(secret: bytes, nonce: str) -> bytes:
    """The key under which a client with this ``secret`` commits to the records of the receipt with this ``nonce``."""
    return HKDF(SHA256(), 32, salt=None, info=f"mpu receipt records {nonce}".encode()).derive(secret)


def commit_to(sets: RecordSets, secret: bytes) -> tuple[str, str]:
    """A commitment to the records of ``sets``, by name, under a key that no other receipt has, and the nonce that gives
    this key."""
    nonce = secrets.token_hex(32)
    return commitment_to(sets, opening_key(secret, nonce)), nonce


def commitment_to(sets: RecordSets, key: bytes) -> str:
    """HMAC-SHA256 of the distinct records to forget, to keep (held out or not) and unseen, in whatever order, in
    hexadecimal: binding, and silent without the key."""
    kept = [*sets.get("retain", ()), *sets.get("held_out", ())]
    of_sets = (sets.get("forget", ()), kept, sets.get("unseen", ()))
    digests = [sorted({digest_of_record(record) for record in records}) for records in of_sets]
    return hmac.new(key, json.dumps(digests).encode(), "sha256").hexdigest()


def verdict_of(receipt: Receipt) -> Verdict:
    """The verdict that follows from the numbers of a receipt."""
    left = None
    # A receipt has no other ends of intervals, and no sentence depends on them.
    if receipt.left is not None and receipt.left_high is not None:
        left = Share(receipt.left / 100, -WIDEST, receipt.left_high / 100)
    kept = None if receipt.kept is None else Share(receipt.kept / 100, -WIDEST, WIDEST)
    measured = [*receipt.sets, *([f"{name} before" for name in receipt.sets] if receipt.before else [])]
    return Verdict(
        left=left, kept=kept, kept_trained=None, max_left=receipt.max_left / 100, min_kept=receipt.min_kept / 100,
        scores=dict.fromkeys(measured, UNKNOWN), same_reading_context=same_reading_context(receipt),
        has_baseline="unseen" in receipt.sets or receipt.public is not None,
        tail=None if receipt.stands_out is None else Tail(1, int(receipt.stands_out), 0, 0, 0),
    )  # fmt: skip


def contradiction_in(receipt: Receipt) -> str | None:
    """The contradiction in a receipt, for people; None if there is none."""
    measured = (receipt.left, receipt.left_high, receipt.kept)
    if receipt.before is None and any(number is not None for number in measured):
        return "it has shares of what was known before, and no copy from before"
    if "forget" not in receipt.sets or (receipt.kept is not None and not {"held_out", "retain"} & {*receipt.sets}):
        return "it has shares of records that it does not name"
    before, copy = receipt.before, receipt.copy
    if before and before.weights == copy.weights:
        return "it compares a copy with itself"
    if before and before.run == copy.run and before.round > copy.round:
        return "it compares with a copy of a later round"
    if not _is_a_day(receipt.date) or (receipt.checked and not _is_a_day(receipt.checked.date)):
        return "its date is no day"
    if (receipt.stands_out is None) == ("unseen" in receipt.sets or receipt.public is not None):
        return "it says nothing of records that stand out, or has no baseline for them"
    if (receipt.left is None) != (receipt.left_high is None):
        return "it has one of left and left_high"
    if receipt.left is not None and receipt.left_high is not None and receipt.left_high < receipt.left:
        return "the interval of what is left ends below what is left"
    if receipt.records_at_most.bit_count() != 1:
        return "its number of records is no power of two"
    if receipt.checked and receipt.checked.before and receipt.before is None:
        return "the server compared a copy from before, and there is none"
    if (receipt.checked is None) != (receipt.server is None):
        return "what the server says and its signature are not both there"
    if verdict_of(receipt).sentence != receipt.verdict:
        return "its verdict does not follow from its numbers"
    return None


def _is_a_day(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def read_receipt(path: Path) -> Receipt:
    """The receipt in a file. Raises MpuError if the file is not a receipt, or contradicts itself."""
    receipt = read_document(Receipt, path)
    if (receipt.format, receipt.version) != (FORMAT, VERSION):
        raise MpuError(f"{path}: not a receipt that this mpu reads", "update mpu")
    if reason := contradiction_in(receipt):
        raise MpuError(f"{path}: {reason}", "ask who made it for another")
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
        encoded = bytearray.fromhex(signature.public_key)
        encoded[-1] &= 0x7F  # clear the sign of x
        if encoded.hex() in SMALL_ORDER:
            raise MpuError(f"{path}: the {party}'s public key vouches for nothing: any text has a signature under it")
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
    """The message that a party signs: all entries before its own signature, as JSON with sorted names."""
    entries = as_entries(receipt)
    for later in ("client", "checked", "server") if party == "client" else ("server",):
        entries.pop(later)
    return f"{FORMAT} {party} ".encode() + json.dumps(entries, sort_keys=True).encode()


def check_origin(receipt: Receipt, keys: Keys, path: Path) -> None:
    """Raise MpuError unless the copy that was measured is of the publication with these ``keys``."""
    copy = receipt.copy
    if (copy.run, copy.round) != (keys.run, keys.round) or copy.copy_id not in keys.copy_ids:
        raise MpuError(f"{path}: measured a copy of another publication", "use the keys of that publication")
    number = keys.copy_ids.index(copy.copy_id) + 1
    if number != copy.copy:
        raise MpuError(f"{path}: measured copy {number}, and says copy {copy.copy}")


def check_copy(copy: CopyFacts, sent: Model, path: Path) -> None:
    """Raise MpuError unless a ``copy`` that was measured has the weights of the one that was ``sent``, and its
    tokenizer, template and config."""
    if copy.weights != fingerprint(sent.checkpoint):
        raise MpuError(f"{path}: other weights were measured than those of the copy", "name the copy that was sent")
    if copy.reading_context != sent.reading_context:
        raise MpuError(
            f"{path}: records were read with another tokenizer, template or config than those of the copy",
            "name the copy that was sent",
        )


def as_text(receipt: Receipt) -> str:
    """The document, for its file."""
    return json.dumps(as_entries(receipt), indent=2, ensure_ascii=False) + "\n"
