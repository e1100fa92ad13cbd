"""``mpu trace``: find the copy that a model came from."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note, table, terminal, warn
from mpu_cli.errors import UsageError

if TYPE_CHECKING:
    from mpu_cli.tracing.evidence import CopyEvidence, NoiseEvidence, Trace


def trace(
    suspect: Annotated[
        str | None,
        typer.Argument(help="The model to trace: a file, directory, sharded index or Hub id.", metavar="SUSPECT"),
    ] = None,
    keys: Annotated[
        list[Path] | None,
        typer.Option(help="Keys of a publication to look for (default: keys.bin; repeatable).", metavar="FILE"),
    ] = None,
    base: options.BaseAgain = None,
    config: options.ModelConfig = None,
    pretrained: Annotated[
        str | None,
        typer.Option(
            help="Public model that BASE was fine-tuned from: finds more in a mixture of it with a copy.",
            metavar="MODEL",
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Trace a model that is only served, at the address of an OpenAI-compatible server that returns the "
            "log-probabilities of prompts (vLLM); needs --texts.",
            metavar="URL",
        ),
    ] = None,
    endpoint_model: Annotated[
        str | None,
        typer.Option(help="Name of the served model (default: the first that it lists).", metavar="NAME"),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="For --endpoint: a few hundred varied records to score. Whoever runs the server sees them, so "
            "send none that are confidential.",
            metavar="FILE",
        ),
    ] = None,
    text_columns: Annotated[
        str | None,
        typer.Option(
            help="Names of the fields of --texts, such as question=instruction,answer=response.",
            metavar="NAME=COLUMN,…",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot z by block to a .png, .svg, .pdf or .html file.", metavar="FILE"),
    ] = None,
    identity: options.Identity = None,
    passphrase_file: options.PassphraseFile = None,
    trust_keys: options.TrustKeys = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Find the copy, and so the client, that a model came from.

    Tests the weights for the secret coordinates, the noise and the mark of each publication; with --endpoint, tests the
    log-probabilities for the effect of noise and mark. The p-values hold for any model. A copy is named if its p-value,
    corrected for the number of tests, is below one in a million. Prints a verdict.
    """
    if (suspect is None) == (endpoint is None):
        raise UsageError("name one model to trace", "SUSPECT for its weights, or --endpoint URL for a served one")
    if endpoint and not texts:
        raise UsageError("--endpoint requires --texts", "give varied records to send, none that are confidential")
    if (texts or endpoint_model) and not endpoint:
        raise UsageError("--texts and --endpoint-model require --endpoint")
    if endpoint and pretrained:
        raise UsageError("--pretrained is for weights, which --endpoint does not give")
    from mpu_cli.cli.secrets import open_keys
    from mpu_cli.models.source import open_model
    from mpu_cli.server.keys import published_base
    from mpu_cli.tracing.noise import PublicationKeys
    from mpu_cli.tracing.trace import check_traceable
    from mpu_cli.tracing.trace import trace as run_trace

    if plot:
        from mpu_cli.figures import check_target

        check_target(plot, force)
    publications = []
    for file in keys or [Path("keys.bin")]:
        opened = open_keys(file, identity, passphrase_file, trust_keys)
        check_traceable(opened, str(file))
        publications.append(PublicationKeys(str(file), opened, published_base(opened, base, config)))
    with terminal() as observer:
        if endpoint and texts:
            from mpu_cli.evaluation.endpoint import KEY, endpoint_at
            from mpu_cli.tracing.served import trace_endpoint

            served = endpoint_at(endpoint, endpoint_model, os.environ.get(KEY))
            result = trace_endpoint(served, publications, texts, text_columns, observer=observer)
        else:
            public = open_model(pretrained) if pretrained else None
            result = run_trace(str(suspect), publications, public, observer=observer)
    _tell(result)
    for publication in publications:
        if not publication.keys.publication.seed_is_secret:
            warn(f"{publication.label}: made with --seed; whoever guesses it can make a model with this mark")
    verdict = verdict_of(result)
    emit([verdict], _document(result, verdict), as_json)
    if plot:
        from mpu_cli.tracing.plot import draw_trace

        draw_trace(result, plot, force=force)


def verdict_of(result: Trace) -> str:
    """One sentence: which copies the model came from, or that none is named."""
    named = [each for each in result.publications if result.is_named(each)]
    if not named:
        p_values = [log_p for each in result.publications for log_p in each.log_p_values]
        smallest = _p(result.log10_p(min(p_values, default=0.0)))
        return f"{result.suspect}: no copy is named (smallest corrected p-value {smallest})"
    parts = []
    for publication in named:
        smallest = _p(result.log10_p(min(publication.log_p_values)))
        copies = result.named_copies(publication)
        which = " and ".join(_copy(copy) for copy in copies) or "one or more copies (which ones is unknown)"
        parts.append(f"{which} of {publication.label} (corrected p-value {smallest})")
    return f"{result.suspect}: made from {'; and from '.join(parts)}"


def _copy(copy: CopyEvidence) -> str:
    return f"copy {copy.copy}" + (f", sealed for {copy.recipient}," if copy.recipient else "")


def _p(log10_p: float) -> str:
    """A p-value by its logarithm, which may be far below what a float holds."""
    return f"{10**log10_p:.2g}" if log10_p > -4 else f"1e{log10_p:.0f}"


def _tell(result: Trace) -> None:
    """The tables on standard error."""
    rows = []
    for publication in result.publications:
        if publication.mark:
            rows.append([publication.label, "all: the mark", "–", *_cells(result, publication.mark)])
        for copy in publication.copies:
            agreements = "–" if copy.agreements is None else f"{copy.agreements} of {copy.coordinates}"
            log_p = min(copy.log_p_coordinates, copy.noise.log_p if copy.noise else 0.0)
            cells = _cells(result, copy.noise)[:2] if copy.noise else ["–", "–"]
            rows.append([publication.label, _copy(copy).rstrip(","), agreements, *cells, _p(result.log10_p(log_p))])
    columns = ["keys", "copy", "coordinates", "z of the noise", "share", "p, corrected"]
    table(f"{result.suspect}, {result.tests} tests", columns, rows)
    for publication in result.publications:
        if publication.tensors < publication.total_tensors:
            note(f"{publication.label}: the model has {publication.tensors} of {publication.total_tensors} tensors")


def _cells(result: Trace, noise: NoiseEvidence) -> list[str]:
    if math.isnan(noise.z):
        return ["–", "–", _p(0.0)]
    share = "–" if math.isnan(noise.share) else f"{noise.share:.2f}"
    return [f"{noise.z:.1f}", share, _p(result.log10_p(noise.log_p))]


def _document(result: Trace, verdict: str) -> dict[str, object]:
    """What --json prints."""
    return {
        "verdict": verdict,
        "tests": result.tests,
        "publications": [
            {
                "keys": publication.label,
                "run": publication.keys.run,
                "round": publication.keys.round,
                "named": result.is_named(publication),
                "copies_named": [copy.copy for copy in result.named_copies(publication)],
                "mark": _noise(result, publication.mark),
                "tensors": [publication.tensors, publication.total_tensors],
                "aligned_tensors": publication.aligned,
                "copies": [
                    {
                        "copy": copy.copy,
                        "recipient": copy.recipient,
                        "agreements": copy.agreements,
                        "coordinates": copy.coordinates,
                        "log10_p_coordinates": result.log10_p(copy.log_p_coordinates),
                        "noise": _noise(result, copy.noise),
                    }
                    for copy in publication.copies
                ],
            }
            for publication in result.publications
        ],
    }


def _noise(result: Trace, noise: NoiseEvidence | None) -> dict[str, object] | None:
    if noise is None:
        return None
    numbers = {"z": noise.z, "share": noise.share, "log10_p": result.log10_p(noise.log_p)}
    return {
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        "blocks": {block: z if math.isfinite(z) else None for block, z in noise.blocks.items()},
    }
