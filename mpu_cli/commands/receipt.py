"""``mpu receipt``: what a check found, and who signed it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.commands.secrets import opened_keys
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.boundary import as_entries
from mpu_cli.files.manifest import read_copy_manifest
from mpu_cli.files.resumption import write_atomically
from mpu_cli.files.transaction import Transaction
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import Command, Opening, Report
from mpu_cli.options.declare import group, option
from mpu_cli.options.unlearning import Goal, RecordFormat
from mpu_cli.wording import command_line

if TYPE_CHECKING:
    from mpu_cli.measuring.receipt import CopyFacts
    from mpu_cli.measuring.receipt import Receipt as Document


@dataclass(frozen=True)
class CheckedReceipt:
    """A receipt whose signatures match; the ``public_keys`` that signed it and those that were expected, ``pinned``, by
    party; the ``opening`` key of its records, if they were compared, or the ``mismatch``."""

    document: Document
    public_keys: Mapping[str, str]
    pinned: Mapping[str, str | None]
    opening: str | None
    mismatch: MpuError | None = None


@dataclass(frozen=True, kw_only=True)
class Receipt(Command):
    """Check a receipt's signatures and print its verdict; with --keys, countersign FILE in place as the server.

    The client signs that it measured these numbers; the server signs that the copy is the one that it sent, with --base
    that it is a copy of that model, and with --before that it sent the copy that it was compared with, too. Neither
    signature proves that the numbers are true, and anyone can sign as somebody: pass the keys that the parties gave you
    as --client-key and --server-key. --forget shows which records were measured, to the client and to whom it gives the
    key that is printed then.
    """

    NAME = "receipt"
    EXAMPLE = "mpu receipt receipt.json --keys keys_2.bin --base unlearned"

    file: Path = option(..., "A receipt from `mpu check --receipt`.", metavar="FILE", argument=True)
    reading: RecordFormat = group(RecordFormat)
    keys: Path | None = option(
        None,
        "Server: check that the copy that was measured is of this publication, and sign the receipt.",
        metavar="FILE",
    )
    copy: Path | None = option(
        None, "Server: the copy as it was sent, with --keys (default: made again from the model).", metavar="COPY"
    )
    before: Path | None = option(
        None,
        "Server: the copy from before unlearning as it was sent, to check that it is the one that was compared with.",
        metavar="COPY",
    )
    base: str | None = option(
        None,
        "Server: the model in service, to check that the copy is what the keys make of it; the receipt gets its "
        "fingerprint.",
        metavar="MODEL",
    )
    forget: str | None = option(None, "Check that these are the records to forget that were measured.", metavar="DATA")
    retain: str | None = option(None, "The records to keep, with --forget.", metavar="DATA")
    unseen: str | None = option(None, "The unseen records, with --forget.", metavar="DATA")
    opening_key: str | None = option(
        None,
        "Auditor: the key by which the client opens its commitment, with --forget.",
        metavar="HEX",
        flag="--opening",
    )
    client_key: str | None = option(None, "The client's public key: fail if another one signed.", metavar="HEX")
    server_key: str | None = option(None, "The server's public key: fail if another one signed.", metavar="HEX")
    opening: Opening = group(Opening)

    def run(self, observer: Observer = SILENT) -> CheckedReceipt:
        """Check the signatures, countersign, compare the records, as far as each is asked for."""
        from mpu_cli.measuring.receipt import as_text, check_signatures, commitment_to, public_key_of, read_receipt
        from mpu_cli.protocol.publication import server_secret
        from mpu_cli.protocol.updates import CheckedUpdate, write_update
        from mpu_cli.records.read import read_records

        for name in ("copy", "before", "base"):
            if getattr(self, name) and not self.keys:
                raise UsageError(f"--{name}: is for the server, who signs", "add --keys FILE")
        if (self.retain or self.unseen or self.opening_key) and not self.forget:
            raise UsageError("--retain, --unseen and --opening need --forget")
        document = read_receipt(self.file)
        public_keys = check_signatures(document, self.file)
        pinned = {"client": self.client_key, "server": self.server_key}
        self._check_pinned("client", public_keys, pinned)  # before anything is signed
        if self.keys:
            signing_key = public_key_of("server", server_secret(observer.note))
            if public_keys.get("server", signing_key) != signing_key:
                raise MpuError(
                    f"{self.file}: somebody else signed it as the server", "get the one that only the client signed"
                )
            document = self._countersigned(document, self.keys, observer)
            write_atomically(self.file.resolve(), as_text(document))  # the target of a link
            copy, receipt = document.copy, str(self.file.absolute())
            write_update(CheckedUpdate(copy.run, copy.round, document.verdict, receipt), observer)
            public_keys = check_signatures(document, self.file)
            pinned["server"] = pinned["server"] or signing_key
        self._check_pinned("server", public_keys, pinned)
        if not self.forget:
            return CheckedReceipt(document, public_keys, pinned, None)
        key = self._opening_key(document)
        sources = {"forget": self.forget, "retain": self.retain, "unseen": self.unseen}
        sets = {name: read_records(source, self.reading) for name, source in sources.items() if source}
        mismatch = None
        if commitment_to(sets, key) != document.records:
            mismatch = MpuError(
                f"{self.file}: other records were measured, or the key is another's", "name those of `mpu check`"
            )
        return CheckedReceipt(document, public_keys, pinned, key.hex(), mismatch)

    def _check_pinned(self, party: str, public_keys: Mapping[str, str], pinned: Mapping[str, str | None]) -> None:
        expected = pinned[party]
        if expected is not None and public_keys.get(party) != expected.strip().lower():
            raise MpuError(f"{self.file}: not signed by the {party} with that public key")

    def _countersigned(self, document: Document, keys_file: Path, observer: Observer) -> Document:
        """``document`` with the server's signature."""
        import msgspec

        from mpu_cli.measuring.receipt import ServerCheck, check_copy, check_origin, today, with_signature
        from mpu_cli.model.source import open_model
        from mpu_cli.protocol.deltas import check_base
        from mpu_cli.protocol.keys import published_base
        from mpu_cli.protocol.publication import server_secret
        from mpu_cli.protocol.publish import remake_copy
        from mpu_cli.protocol.verify import verify

        keys = opened_keys(keys_file, self.opening, observer)
        check_origin(document, keys, self.file)
        if self.copy is None or self.base is not None:  # first the server's mistakes, which are not the client's
            model = published_base(keys, self.base)
            check_base(model, keys)
        if self.copy is None:
            with Transaction() as transaction:
                folder = transaction.scratch(keys_file.absolute().parent)
                check_copy(document.copy, remake_copy(model, keys, document.copy.copy, folder), self.file)
        else:
            sent = open_model(str(self.copy))
            check_copy(document.copy, sent, self.file)
            if self.base is not None and not verify(model, sent, keys, logits=False).ok:
                raise MpuError(
                    f"{self.copy}: not what the keys make of {self.base}",
                    "publish the model in service, and check that copy",
                )
        if self.before is not None:
            if document.before is None:
                raise MpuError(f"{self.file}: compared with no copy from before", "leave out --before")
            earlier = open_model(str(self.before))
            manifest = read_copy_manifest(earlier.folder, earlier.checkpoint.metadata)
            facts = document.before
            names = (facts.run, facts.round, facts.copy, facts.copy_id)
            if manifest is None or (manifest.run, manifest.round, manifest.copy, manifest.copy_id) != names:
                raise MpuError(
                    f"{self.file}: compared with another copy than {self.before}", "name the copy that was trained on"
                )
            check_copy(facts, earlier, self.file)
        checked = ServerCheck(
            date=today(), model=keys.base.fingerprint if self.base else None, before=self.before is not None
        )
        signed = msgspec.structs.replace(document, checked=checked)
        return with_signature(signed, "server", server_secret(observer.note))

    def _opening_key(self, document: Document) -> bytes:
        """The key that opens the commitment to the records."""
        from mpu_cli.measuring.receipt import opening_key
        from mpu_cli.training.ledger import own_client_secret

        try:
            given = self.opening_key
            return bytes.fromhex(given) if given else opening_key(own_client_secret(), document.nonce)
        except ValueError as error:
            raise UsageError(
                "--opening: not hexadecimal", "use what the client's `mpu receipt --forget` printed"
            ) from error

    def report(self, read: CheckedReceipt, observer: Observer) -> Report:
        _tell_measured(read.document, observer)
        _tell_signatures(read, observer)
        if self.keys:
            if self.base is None:
                observer.warn(f"{self.file}: does not say of which model the copy is; sign it again, with --base MODEL")
            advice = ""
            if not read.document.verdict.startswith("pass"):
                advice = "; what is next, the client's `mpu check` printed: if it names a step, aggregate again with it"
            observer.note(f"next: return {self.file} to the client{advice}")
            if command := _longer_step(read.document):
                observer.note(f"or, first, with the step that would probably pass: `{command}`, and another check")
        if read.opening and not read.mismatch:
            observer.note(
                f"the records are those that were measured; an auditor sees it, too, with --opening {read.opening}"
            )
        known = {
            f"{party}_pinned": party in read.public_keys and pinned is not None for party, pinned in read.pinned.items()
        }
        document = {**as_entries(read.document), "signatures_match": True, **known}
        # Without the verdict: whoever asks about these records is not to take it for theirs.
        return Report([] if read.mismatch else [read.document.verdict], document, failure=read.mismatch)


def _longer_step(document: Document) -> str | None:
    """The command by which the server applies the last update again, with the step that the numbers of a receipt ask
    for; None if they ask for none, if this machine did not apply the update or other owners' with it, or if a delta is
    no longer the one that was applied."""
    from mpu_cli.files.reader import fingerprint, open_checkpoint
    from mpu_cli.measuring.receipt import verdict_of
    from mpu_cli.protocol.updates import last_update, read_updates, runs_in

    step, updates = verdict_of(document).step, read_updates()
    update = last_update(updates, document.copy.run, document.copy.round - 1)
    if step is None or update is None or runs_in(update.model, updates) != {update.run}:
        return None
    try:
        deltas = [fingerprint(open_checkpoint(Path(delta))) for delta in update.deltas]
    except MpuError:  # gone, or damaged
        return None
    if deltas != update.fingerprints:
        return None
    return command_line(
        "mpu", "aggregate", *map(Path, update.deltas), "--keys", Path(update.keys), "--step",
        f"{step * update.rate:.3g}", *(("--dtype", update.dtype) if update.dtype else ()), "--out",
        Path(update.model), "--force",
    )  # fmt: skip


def _tell_measured(document: Document, observer: Observer) -> None:
    """The copy, the measurements on it, and their limits."""
    from mpu_cli.measuring.receipt import same_reading_context

    def named(copy: CopyFacts) -> str:
        return f"copy {copy.copy} of run {json.dumps(copy.run, ensure_ascii=False)}, round {copy.round}"

    def share(percent: int | None) -> str:
        return "undecided" if percent is None else f"{percent}%"

    before = f"compared with {named(document.before)}" if document.before else "compared with none from before"
    observer.note(
        f"{named(document.copy)}, {before}, on {document.date}; at most {document.records_at_most} records to forget"
    )
    observer.note(
        f"left: {share(document.left)}, interval up to {share(document.left_high)}, where {document.max_left}% may be; "
        f"kept: {share(document.kept)}, where {document.min_kept}% has to be"
    )
    if document.stands_out:
        observer.note("some records are known better than chance and the limit allow")
    usual = Goal()
    if document.max_left > 100 * usual.max_left or document.min_kept < 100 * usual.min_kept:
        observer.warn(
            f"its limits are laxer than the usual ones, {usual.max_left:.0%} left and {usual.min_kept:.0%} kept"
        )
    if document.public:
        observer.note(f"the baseline is the knowledge of the model {document.public}, by the client's word")
    if not same_reading_context(document):
        observer.warn(
            "the copy reads records otherwise than the one that was trained on: the shares say little of the model"
        )


def _tell_signatures(read: CheckedReceipt, observer: Observer) -> None:
    """The signers, whether each is known to be that party, and the statement of the server."""
    for party, public_key in read.public_keys.items():
        observer.note(f"signed as the {party} with the public key {public_key}")
        if read.pinned[party] is None:
            observer.note(f"anyone can have signed as the {party}: pass the key that it gave you as --{party}-key")
    checked = read.document.checked
    if checked is None:
        observer.note("not signed by the server: only the client says that the copy is from its publication")
        return
    of_model = f", made of its model {checked.model}" if checked.model else ""
    observer.note(f"the server says that the copy is the one that it sent{of_model}; on {checked.date}")
    if read.document.before and not checked.before:
        observer.note(
            "the copy that it was compared with is by the client's word; the server checks it with --before COPY"
        )
    elif read.document.before:
        observer.note("the server says so, too, of the copy that it was compared with")
