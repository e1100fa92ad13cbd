"""``mpu check``: the client's verdict on the server's new model; ``mpu receipt``: what it signed."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import expand_option_groups
from mpu_cli.cli.output import emit, note, table, terminal
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.options.evaluation import BenchmarkOptions, EvaluationPrompts, Measuring, Scoring
from mpu_cli.options.unlearning import RecordFormat

if TYPE_CHECKING:
    from mpu_cli.evaluation.verdict import SetScore, Verdict


@expand_option_groups
def check(
    copy: Annotated[
        str,
        typer.Argument(help="A copy of the server's new model, from `mpu publish` (sealed or not).", metavar="COPY"),
    ],
    forget: Annotated[str, typer.Option(help="The records that were to be forgotten.", metavar="DATA")],
    reading: RecordFormat,
    prompts: EvaluationPrompts,
    scoring: Scoring,
    retain: Annotated[str | None, typer.Option(help="Records that were to be kept.", metavar="DATA")] = None,
    unseen: Annotated[
        str | None,
        typer.Option(
            help="Records of the same kind that the model never saw: those to forget should be no more probable.",
            metavar="DATA",
        ),
    ] = None,
    before: Annotated[
        str | None,
        typer.Option(help="A copy from before unlearning, against which --retain is judged.", metavar="COPY"),
    ] = None,
    receipt: Annotated[
        Path | None,
        typer.Option(
            help="Write what was measured, signed and without records, for the server or an auditor.", metavar="FILE"
        ),
    ] = None,
    identity: options.Identity = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Check on a copy of the server's new model that it forgot your records and kept the others.

    Passes if answers to --forget records are at most 0.05 more probable than answers to --unseen records, and answers
    to --retain records at most 0.05 less probable than under --before. Without these options it cannot pass. Prints
    the verdict; exits with status 1 unless it is a pass.
    """
    from mpu_cli.api.checking import check as run_check
    from mpu_cli.checkpoint.transaction import Transaction
    from mpu_cli.evaluation.receipt import as_text

    benchmark = replace(BenchmarkOptions(), forget=forget, retain=retain, reading=reading)
    measuring = replace(Measuring(), benchmark=benchmark, prompts=prompts, scoring=scoring)
    if receipt and receipt.exists() and not force:
        raise MpuError(f"{receipt}: already exists", "choose another name, or use --force to replace it")
    with terminal() as observer:
        result = run_check(
            copy, options=measuring, unseen=unseen, before=before, with_receipt=receipt is not None, identity=identity,
            observer=observer,
        )  # fmt: skip
    verdict = result.verdict
    _tell(verdict)
    if receipt and result.receipt and result.receipt.client:
        with Transaction(force=force) as transaction:
            transaction.add(receipt).write_text(as_text(result.receipt), encoding="utf-8")
        note(f"{receipt}: holds numbers only, no records; your public key is {result.receipt.client.public_key}")
        note("the server countersigns it with `mpu receipt FILE --keys KEYS --copy COPY`")
    if verdict.is_conspicuous:
        note(
            "the records to forget are much less probable than unseen ones: whoever has the model sees that they were "
            "forgotten; a shorter step shows less"
        )
    if verdict.request:
        note(f"next: {verdict.request}")
    note(
        "measured on a noisy copy, which may know less than the server's model; the server can measure how much less, "
        "on records of its own (`mpu publish --probe`)"
    )
    emit(
        [verdict.sentence],
        {**asdict(verdict), "forgotten": verdict.is_forgotten, "kept": verdict.is_retained, "passed": verdict.passes,
         "verdict": verdict.sentence, "receipt": receipt},
        as_json,
    )  # fmt: skip
    if not verdict.passes:
        raise typer.Exit(1)


def _tell(verdict: Verdict) -> None:
    """The table of scores."""
    names = {
        "to forget": (verdict.before_forget, verdict.forget),
        "to keep": (verdict.before_retain, verdict.retain),
        "never seen": (None, verdict.unseen),
    }
    rows = [
        [name, str(after.records), *_cells(before), *_cells(after)]
        for name, (before, after) in names.items()
        if after is not None
    ]
    columns = ["records", "number", "probability before", "verbatim before", "probability", "verbatim"]
    table("What the copy knows", columns, rows)


def _cells(score: SetScore | None) -> list[str]:
    if score is None:
        return ["–", "–"]
    return [f"{score.probability:.3f}", "–" if score.verbatim is None else f"{score.verbatim:.0%}"]


def receipt(
    file: Annotated[Path, typer.Argument(help="A receipt from `mpu check --receipt`.", metavar="FILE")],
    keys: Annotated[
        Path | None,
        typer.Option(help="Server: check that the copy is of this publication, and sign the receipt.", metavar="FILE"),
    ] = None,
    copy: Annotated[
        Path | None,
        typer.Option(help="Server: the copy as it was sent, to check that its weights were measured.", metavar="COPY"),
    ] = None,
    client_key: Annotated[
        str | None, typer.Option(help="The client's public key: fail if another one signed.", metavar="HEX")
    ] = None,
    server_key: Annotated[
        str | None, typer.Option(help="The server's public key: fail if another one signed.", metavar="HEX")
    ] = None,
    identity: options.Identity = None,
    passphrase_file: options.PassphraseFile = None,
    trust_keys: options.TrustKeys = False,
    as_json: options.Json = False,
) -> None:
    """Check a receipt's signatures and print its verdict; with --keys, countersign FILE in place as the server.

    The client signs that it measured these numbers; the server, that the copy's id is from its publication, and with
    --copy that its weights were measured. Neither signature proves that the numbers are true, and anyone can sign as
    somebody: pass the keys that the parties gave you as --client-key and --server-key.
    """
    from mpu_cli.boundary.documents import as_entries
    from mpu_cli.checkpoint.fingerprint import fingerprint
    from mpu_cli.checkpoint.pool import worker_pool
    from mpu_cli.checkpoint.reader import open_checkpoint
    from mpu_cli.cli.secrets import open_keys
    from mpu_cli.evaluation.receipt import (
        as_text,
        check_origin,
        check_signatures,
        check_weights,
        public_key_of,
        read_receipt,
        with_signature,
    )
    from mpu_cli.resumption import write_atomically
    from mpu_cli.server.publication import server_secret

    document = read_receipt(file)
    public_keys = check_signatures(document, file)

    def check_pinned(party: str, expected: str | None) -> None:
        if expected is not None and public_keys.get(party) != expected.strip().lower():
            raise MpuError(f"{file}: not signed by the {party} with that public key")

    check_pinned("client", client_key)  # before anything is signed
    if keys:
        signing_key = public_key_of("server", server_secret(note))
        if public_keys.get("server") == signing_key:
            raise UsageError(f"{file}: you signed it already")
        if "server" in public_keys:
            raise MpuError(f"{file}: somebody else signed it as the server", "get the one that only the client signed")
        check_origin(document, open_keys(keys, identity, passphrase_file, trust_keys), file)
        if copy:
            with worker_pool() as pool:
                check_weights(document, fingerprint(open_checkpoint(copy), pool), file)
        document = with_signature(document, "server", server_secret(note))
        write_atomically(file, as_text(document))
        public_keys = check_signatures(document, file)
    check_pinned("server", server_key)
    for party, public_key in public_keys.items():
        note(f"signed as the {party} with the public key {public_key}")
    if "server" not in public_keys:
        note("not signed by the server: only the client says that the copy is from its publication")
    measured, count = document.copy, document.forget.records
    note(f"copy {measured.copy} of run {measured.run}, round {measured.round}; {count} records to forget")
    emit([document.verdict], {**as_entries(document), "signatures_match": True}, as_json)
