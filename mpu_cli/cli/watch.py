"""``mpu watch``: the client's side of rounds that arrive one after another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli.grouped import expand_option_groups
from mpu_cli.cli.output import emit, note, terminal, warn
from mpu_cli.cli.unlearn import document_of
from mpu_cli.errors import MpuError
from mpu_cli.options.unlearning import Checks, Unlearning

if TYPE_CHECKING:
    from mpu_cli.client.outcome import UnlearningResult


@expand_option_groups
def watch(
    spool: Annotated[Path, typer.Argument(help="The folder that the Flower app fills and empties.", metavar="SPOOL")],
    unlearning: Unlearning,
    checks: Checks,
    work: Annotated[
        Path,
        typer.Option(
            help="Private folder for checkpoints and reference files; the Flower app must not read it.", metavar="DIR"
        ),
    ] = Path("mpu-work"),
    spool_group: Annotated[
        str | None,
        typer.Option(
            help="Group of the Flower app's user: SPOOL is made for it if it is missing, and checked otherwise.",
            metavar="GROUP",
        ),
    ] = None,
    poll: Annotated[
        float, typer.Option(help="Seconds between looks at an empty spool.", metavar="SECONDS", min=0.1)
    ] = 5.0,
    max_deltas: Annotated[
        int | None,
        typer.Option(
            help="How many trainings may begin in all; what deltas and failures tell of the records grows with each "
            "(default: any).",
            metavar="N",
            min=1,
        ),
    ] = None,
    copy_timeout: Annotated[
        float,
        typer.Option(help="Seconds after which a copy is given up, and marked as failed.", metavar="SECONDS", min=1),
    ] = 86_400.0,
    once: Annotated[bool, typer.Option("--once", help="Unlearn on what is there, and stop.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each delta instead of its path.")
    ] = False,
) -> None:
    """Unlearn the --forget records on each copy that arrives in SPOOL, and leave its delta there.

    Copies come as SPOOL/in/RUN/round_R/copy_K, deltas go as SPOOL/out/RUN/round_R/copy_K.safetensors; a program, such
    as the Flower app, moves them. What was interrupted is resumed. Each copy is trained on once: a delta that is asked
    for again is handed over as it was. Prints the path of each delta.
    """
    from mpu_cli.client.dataset import read_dataset

    with terminal() as observer:
        data = read_dataset(unlearning, observer)
    for warning in data.warnings():
        warn(warning)

    if unlearning.privacy.dp_epsilon is not None and max_deltas is None:
        warn("--dp-epsilon bounds one delta, and any number may leave: limit them with --max-deltas")

    def report_result(copy: str, delta: Path, result: UnlearningResult | None) -> None:
        if result is None:
            note(f"{copy}: its delta was asked for again")
        else:
            note(result.summary(copy, unlearning.algo))
        for warning in result.warnings() if result else ():
            warn(f"{copy}: {warning}")
        document = {"copy": copy, "delta": delta, **(document_of(unlearning, result) if result else {})}
        emit([json.dumps(document, default=str) if as_json else delta], {}, as_json=False)

    with terminal() as observer:
        from mpu_cli.federation.spool import Spool
        from mpu_cli.federation.watching import Watching

        if work.resolve() == spool.resolve() or spool.resolve() in work.resolve().parents:
            raise MpuError(f"{work}: is in the spool, which the Flower app reads", "choose a --work outside it")
        Spool(spool).prepare(spool_group)
        for copy, expected_path in _misplaced_copies(spool):
            warn(f"{copy}: a copy is expected at {expected_path}")
        if not once:
            note(f"waiting for copies at {spool / 'in' / 'RUN' / 'round_R' / 'copy_K'}; Ctrl-C stops")
        complete = Watching(
            Spool(spool), work, data, unlearning, observer, report_result, max_deltas, copy_timeout, checks
        ).watch(poll, once)
    if not complete:
        raise MpuError("some copies have no delta", "see the warnings above; remove their .failed files to try again")


def _misplaced_copies(spool: Path) -> list[tuple[Path, Path]]:
    """Copies in the spool that lie where nobody looks, and where each belongs."""
    from mpu_cli.manifest import read_copy_manifest

    misplaced = []
    for pattern in ("copy_*", "in/copy_*", "in/*/copy_*"):
        for path in sorted(spool.glob(pattern)):
            try:
                manifest = read_copy_manifest(path) if path.is_dir() else None
            except MpuError:
                continue
            if manifest:
                expected_path = spool / "in" / manifest.run / f"round_{manifest.round}" / f"copy_{manifest.copy}"
                misplaced.append((path, expected_path))
    return misplaced
