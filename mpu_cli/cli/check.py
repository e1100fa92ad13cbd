"""``mpu check``: the client's verdict on the server's new model; ``mpu receipt``: what it signed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import expand_option_groups
from mpu_cli.cli.output import emit, note, table, terminal
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.options.evaluation import EvaluationPrompts, Measuring, Scoring
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
            help="Records of the same kind that the model never saw: those to forget should be as improbable.",
            metavar="DATA",
        ),
    ] = None,
    before: Annotated[
        str | None,
        typer.Option(help="A copy from before unlearning, which says how well the rest was known.", metavar="COPY"),
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
    """Say whether the server's new model forgot your records and kept the others: measured on a copy of it, by you.

    Passes if the answers to forget are at most as probable as those to --unseen records, within 0.05, and those to keep
    as probable as --before, within 0.05. Exits with status 1 otherwise. Prints the verdict.
    """
    from dataclasses import replace

    from mpu_cli.api.checking import check as run_check
    from mpu_cli.checkpoint.transaction import Transaction
    from mpu_cli.evaluation.receipt import as_text
    from mpu_cli.options.evaluation import BenchmarkOptions

    benchmark = replace(BenchmarkOptions(), benchmark="qa", forget=forget, retain=retain, reading=reading)
    measuring = replace(Measuring(), benchmark=benchmark, prompts=prompts, scoring=scoring)
    if receipt and receipt.exists() and not force:
        raise MpuError(f"{receipt}: already exists", "choose another name, or use --force to replace it")
    with terminal() as observer:
        result = run_check(copy, measuring, unseen=unseen, before=before, identity=identity, observer=observer)
    verdict = result.verdict
    _tell(verdict)
    if receipt:
        if result.receipt is None:
            raise MpuError(f"{copy}: not a copy of mpu, so there is no receipt for it")
        with Transaction(force=force) as transaction:
            transaction.add(receipt).write_text(as_text(result.receipt), encoding="utf-8")
        note(f"{receipt}: signed with your key; it holds numbers only, no records. The server signs it with "
             "`mpu receipt FILE --keys keys.bin`")  # fmt: skip
    if verdict.request:
        note(f"next: {verdict.request}")
    note(
        "measured on the copy: its noise can make it know less than the server's model does; ask the server how well a "
        "copy knows records (`mpu publish --probe`)"
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
    identity: options.Identity = None,
    passphrase_file: options.PassphraseFile = None,
    trust_keys: options.TrustKeys = False,
    as_json: options.Json = False,
) -> None:
    """Check a receipt's signatures and say what it attests; with --keys, sign it as the server.

    A signature says that whoever holds the key stands by the numbers, not that they are true: the client's, that it
    measured them; the server's, that the copy is of its publication. Compare public keys with what the parties say.
    """
    from mpu_cli.boundary.documents import as_entries
    from mpu_cli.cli.secrets import open_keys
    from mpu_cli.evaluation.receipt import as_text, check_origin, check_signatures, read_receipt, with_signature
    from mpu_cli.resumption import write_atomically
    from mpu_cli.server.publication import server_secret

    document = read_receipt(file)
    public_keys = check_signatures(document, file)
    if keys:
        if "server" in public_keys:
            raise UsageError(f"{file}: the server signed it already")
        check_origin(document, open_keys(keys, identity, passphrase_file, trust_keys), file)
        document = with_signature(document, "server", server_secret(note))
        write_atomically(file, as_text(document))
        public_keys = check_signatures(document, file)
    for party, public_key in public_keys.items():
        note(f"signed by the {party}, public key {public_key}")
    if "server" not in public_keys:
        note("the server did not sign it: that the copy is of its publication is the client's word")
    copy = document.copy
    note(f"copy {copy.copy} of run {copy.run}, round {copy.round}; {document.forget.records} records to forget")
    emit([document.verdict], {**as_entries(document), "valid": True}, as_json)
