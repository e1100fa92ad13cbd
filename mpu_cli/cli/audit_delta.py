"""``mpu audit-delta``: what a delta tells of the records, before it is sent."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.grouped import expand_option_groups
from mpu_cli.cli.output import emit, note, table, terminal, warn
from mpu_cli.options.unlearning import Prompts, Records


@expand_option_groups
def audit_delta(
    copy: Annotated[str, typer.Argument(help="The copy that the delta was made from.", metavar="COPY")],
    delta: Annotated[Path, typer.Argument(help="The delta, before it is sent.", metavar="DELTA")],
    records: Records,
    prompts: Prompts,
    identity: options.Identity = None,
    as_json: options.Json = False,
) -> None:
    """Show what a server reads off DELTA about the --forget and --retain records: tokens, which of a list of candidates
    were forgotten, the longest record, experts.

    Plays the best readings that are known, and says how well each does on your records. That none of them does well is
    no proof that nothing can be read: only `mpu surrogate` and --dp-epsilon bound that. Prints a line for each reading.
    """
    from mpu_cli.records.reading import read_named

    has_retain = records.retain != Records().retain or Path(records.retain).exists()
    with terminal() as observer:
        from mpu_cli.api.sealed import opened_copy
        from mpu_cli.client.audit_delta import audit

        forget = read_named(records.forget, records.reading, observer=observer)
        retain = read_named(records.retain, records.reading, observer=observer) if has_retain else []
        with opened_copy(copy, delta.parent, identity, observer) as opened:
            readings = audit(opened, delta, forget, retain, prompts)
    rows = [
        [each.tensor if len(each.tensor) < 60 else each.tensor[:57] + "…", each.rule, _share(each.told_apart),
         _share(each.precision), _share(each.recall), each.fact or ""]
        for each in readings
    ]  # fmt: skip
    table("What a server reads off this delta", ["tensor", "rule", "forget vs keep", "precision", "recall", ""], rows)
    note(
        "forget vs keep: how often a reading ranks a record to forget above one to keep (AUC; 0.5: it cannot tell); "
        "precision and recall: of the tokens that it lists"
    )
    telling = [each for each in readings if each.tells]
    if telling:
        warn(f"{len(telling)} of {len(readings)} readings tell something about the records")
        note(
            "LoRA without --train-embeddings tells fewest tokens; only `mpu surrogate` and --dp-epsilon give a bound "
            "(docs/attacks.md)"
        )
    else:
        note(f"none of the {len(readings)} readings tells anything about these records")
    note("not tested: a crafted copy, which reads more (`mpu unlearn` looks for one), and several deltas together")
    emit(
        [f"{each.tensor}\t{each.rule}\t{_share(each.told_apart)}\t{each.fact or ''}" for each in readings],
        [{**asdict(each), "tells": each.tells} for each in readings],
        as_json,
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
