"""``mpu trace``: find the copy that a model came from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.commands.secrets import opened_keys
from mpu_cli.errors import UsageError
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import BASE_AGAIN, Command, Opening, Report
from mpu_cli.options.declare import group, option

if TYPE_CHECKING:
    from mpu_cli.lab.trace import CopyEvidence, NoiseEvidence
    from mpu_cli.lab.trace import Trace as Findings


@dataclass(frozen=True, kw_only=True)
class Trace(Command):
    """Find the copy, and so the client, that a model came from.

    Tests the weights for the secret coordinates, the noise and the watermark of each publication; with --endpoint,
    tests the log-probabilities for the effect of noise and watermark. The p-values hold for any model. A copy is named
    if its p-value, corrected for the number of tests, is below one in a million. Prints a verdict.
    """

    NAME = "trace"
    EXAMPLE = "mpu trace leaked-model --keys hospital.bin --keys archive.bin"

    suspect: str | None = option(
        None, "The model to trace: a file, directory, sharded index or Hub id.", metavar="SUSPECT", argument=True
    )
    keys: list[Path] | None = option(
        None, "Keys of a publication to look for (default: keys.bin; repeatable).", metavar="FILE"
    )
    base: str | None = option(None, BASE_AGAIN, metavar="MODEL")
    public: str | None = option(
        None,
        "Public model that BASE was fine-tuned from: finds more in a mixture of it with a copy.",
        metavar="MODEL",
    )
    endpoint: str | None = option(
        None,
        "Trace a model that is only served, at the address of an OpenAI-compatible server that returns the "
        "log-probabilities of prompts (vLLM); needs --texts.",
        metavar="URL",
        in_files=False,
    )
    endpoint_model: str | None = option(
        None, "Name of the served model (default: the first that it lists).", metavar="NAME"
    )
    texts: Path | None = option(
        None,
        "For --endpoint: a few hundred varied records to score. Whoever runs the server sees them, so send none that "
        "are confidential.",
        metavar="FILE",
    )
    opening: Opening = group(Opening)

    def run(self, observer: Observer = SILENT) -> Findings:
        """The evidence for each publication; warns of those whose seed can be guessed."""
        if (self.suspect is None) == (self.endpoint is None):
            raise UsageError("name one model to trace", "SUSPECT for its weights, or --endpoint URL for a served one")
        if self.endpoint and not self.texts:
            raise UsageError("--endpoint requires --texts", "give varied records to send, none that are confidential")
        if (self.texts or self.endpoint_model) and not self.endpoint:
            raise UsageError("--texts and --endpoint-model require --endpoint")
        if self.endpoint and self.public:
            raise UsageError("--public is for weights, which --endpoint does not give")

        from mpu_cli.lab.endpoint import endpoint_at
        from mpu_cli.lab.trace import PublicationKeys, check_traceable, trace, trace_endpoint
        from mpu_cli.model.source import open_model
        from mpu_cli.protocol.keys import published_base

        publications = []
        for file in self.keys or [Path("keys.bin")]:
            keys = opened_keys(file, self.opening, observer)
            check_traceable(keys, str(file))
            publications.append(PublicationKeys(str(file), keys, published_base(keys, self.base)))
        if self.endpoint and self.texts:
            served = endpoint_at(self.endpoint, self.endpoint_model)
            result = trace_endpoint(served, publications, self.texts, observer=observer)
        else:
            public = open_model(self.public) if self.public else None
            result = trace(str(self.suspect), publications, public, observer=observer)
        for publication in publications:
            if not publication.keys.publication.seed_is_secret:
                observer.warn(
                    f"{publication.label}: made with --seed; whoever guesses it can make a model with this watermark"
                )
        return result

    def report(self, result: Findings, observer: Observer) -> Report:
        rows = []
        for publication in result.publications:
            if publication.watermark:
                rows.append([publication.label, "all: watermark", "–", *_cells(result, publication.watermark)])
            for copy in publication.copies:
                agreements = "–" if copy.agreements is None else f"{copy.agreements} of {copy.coordinates}"
                log_p = min(copy.log_p_coordinates, copy.noise.log_p if copy.noise else 0.0)
                z, share, _ = _cells(result, copy.noise)
                rows.append(
                    [publication.label, _copy(copy).rstrip(","), agreements, z, share, _p(result.log10_p(log_p))]
                )
        columns = ["keys", "copy", "coordinates", "z of the noise", "share", "p, corrected"]
        observer.table(f"{result.suspect}, {result.tests} tests", columns, rows)
        for publication in result.publications:
            if publication.tensors < publication.total_tensors:
                present = f"{publication.tensors} of {publication.total_tensors} tensors"
                observer.note(f"{publication.label}: the model has {present}")
        verdict = verdict_of(result)
        publications = []
        for publication in result.publications:
            copies = [
                {
                    "copy": copy.copy,
                    "recipient": copy.recipient,
                    "agreements": copy.agreements,
                    "coordinates": copy.coordinates,
                    "log10_p_coordinates": result.log10_p(copy.log_p_coordinates),
                    "noise": _noise(result, copy.noise),
                }
                for copy in publication.copies
            ]
            publications.append(
                {
                    "keys": publication.label,
                    "run": publication.keys.run,
                    "round": publication.keys.round,
                    "named": result.is_named(publication),
                    "copies_named": [copy.copy for copy in result.named_copies(publication)],
                    "unexplained": _noise(result, result.unexplained(publication)),
                    "watermark": _noise(result, publication.watermark),
                    "tensors": [publication.tensors, publication.total_tensors],
                    "copies": copies,
                }
            )
        return Report([verdict], {"verdict": verdict, "tests": result.tests, "publications": publications})


def verdict_of(result: Findings) -> str:
    """One sentence: which copies the model came from, or that none is named, and noise that chance does not explain."""
    parts = []
    for publication in result.publications:
        if not result.is_named(publication):
            continue
        smallest = _p(result.log10_p(min(publication.log_p_values)))
        copies = result.named_copies(publication)
        which = " and ".join(_copy(copy) for copy in copies) or "one or more copies (which ones is unknown)"
        parts.append(f"{which} of {publication.label} (corrected p-value {smallest})")
    if parts:
        sentence = f"{result.suspect}: made from {'; and from '.join(parts)}"
    else:
        p_values = [log_p for publication in result.publications for log_p in publication.log_p_values]
        smallest = _p(result.log10_p(min(p_values, default=0.0)))
        sentence = f"{result.suspect}: no copy is named (smallest corrected p-value {smallest})"
    for publication in result.publications:
        if noise := result.unexplained(publication):
            sentence += f"; noise of {publication.label} is in it that chance does not give {_meaning(noise)}"
    return sentence


def _meaning(noise: NoiseEvidence) -> str:
    """The amount of a noise in a model that is not said to be made from it, and what that may mean, in words."""
    share = "" if math.isnan(noise.share) else f", {noise.share:.2%} of it"
    amount = f"(z = {noise.z:.1f}{share})"
    if noise.z < 0:
        return f"{amount}: it was subtracted, as in a mixture with negative weights"
    return (
        f"{amount}: a copy or a mixture of fifty has more, so it was added to another model, as by a client's delta, "
        "or most of a copy was replaced"
    )


def _copy(copy: CopyEvidence) -> str:
    return f"copy {copy.copy}" + (f", sealed for {copy.recipient}," if copy.recipient else "")


def _p(log10_p: float) -> str:
    """A p-value by its logarithm, which may be far below what a float holds."""
    return f"{10**log10_p:.2g}" if log10_p > -4 else f"1e{log10_p:.0f}"


def _cells(result: Findings, noise: NoiseEvidence | None) -> list[str]:
    if noise is None or math.isnan(noise.z):
        return ["–", "–", _p(0.0)]
    share = "–" if math.isnan(noise.share) else f"{noise.share:.2f}"
    return [f"{noise.z:.1f}", share, _p(result.log10_p(noise.log_p))]


def _noise(result: Findings, noise: NoiseEvidence | None) -> dict[str, object] | None:
    if noise is None:
        return None
    numbers = {"z": noise.z, "share": noise.share, "log10_p": result.log10_p(noise.log_p)}
    return {
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        "blocks": {block: z if math.isfinite(z) else None for block, z in noise.blocks.items()},
    }
