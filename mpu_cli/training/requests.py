"""The client's note of its requests: the records that it unlearned on each copy, and how to read them.

    CONFIG/mpu/requests.jsonl    a line for each delta, mode 0600

It has paths and never leaves. A further request on the same copy takes the records of the earlier ones from it, and
``check`` takes all that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.boundary import parse_document
from mpu_cli.files.manifest import CopyManifest
from mpu_cli.files.resumption import alone_with_private, append_line, read_lines
from mpu_cli.files.sealing import default_identity_path
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.declare import declared_options, differing, from_flat
from mpu_cli.options.unlearning import Checks, Goal, Prompts, RecordFormat, Unlearning
from mpu_cli.records.forms import Record, digest_of_record
from mpu_cli.records.read import from_root, read_records
from mpu_cli.wording import counted

SOURCES = ("retain", "unseen", "public")  # options that name files; all other text stays as it is


@dataclass(frozen=True)
class Source:
    """Records to forget: the files that ``--forget`` named, the options by which they are read, as far as they are not
    the defaults, and digests of the records, in order."""

    forget: str
    reading: dict[str, Any]
    records: list[str]

    def read(self, observer: Observer = SILENT) -> list[Record]:
        """All records that the files have now: none if one of them is gone or cannot be read."""
        try:
            return list(read_records(self.forget, from_flat(RecordFormat, self.reading), observer=observer))
        except MpuError:
            return []


def _digests(records: Sequence[Record]) -> list[str]:
    """Of the distinct records, in whatever order they are."""
    return sorted({digest_of_record(record) for record in records})


@dataclass(frozen=True)
class Request:
    """A training on a copy that stopped when it was done."""

    run: str
    round: int
    copy: int
    copy_id: str
    copy_path: str
    weights: str  # the copy's fingerprint
    change: str  # fingerprint of the delta
    sources: list[Source]  # of all records to forget that are in the change, this request's first
    options: dict[str, Any]  # for reading and judging records, as far as they are not the defaults

    def is_on(self, copy: str, manifest: CopyManifest | None) -> bool:
        """Whether it was on ``copy``, which has this ``manifest`` or is sealed."""
        if manifest is None:
            return self.copy_path == str(Path(copy).absolute())
        # By the run, too: the ledger compares what reads the records within one.
        return (self.run, self.round, self.copy_id) == (manifest.run, manifest.round, manifest.copy_id)


def default_requests_path() -> Path:
    """``mpu/requests.jsonl`` in the user's configuration directory."""
    return default_identity_path().with_name("requests.jsonl")


def read_requests(path: Path) -> list[Request]:
    """All requests, the last one last."""
    hint = "put a backup in its place, or remove it: then earlier requests have to be named again"
    requests = []
    for line in read_lines(path, hint):
        values = {name: value for name, value in line.items() if name != "time"}
        requests.append(parse_document(Request, values, f"{path}: damaged", hint))
    return requests


def write_request(path: Path, request: Request) -> None:
    with alone_with_private(path):
        append_line(path, {"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), **asdict(request)})


def options_to_note(unlearning: Unlearning, goal: Goal, checks: Checks) -> dict[str, Any]:
    """The options that a later check needs, as far as they are not the defaults, with paths from the root."""
    names = {*SOURCES, "max_left", "min_kept", "held_out", *declared_options(RecordFormat), *declared_options(Prompts)}
    values = differing(unlearning) | differing(goal) | differing(checks) | {"retain": unlearning.records.named_retain}
    return {name: _noted(name, values[name]) for name in sorted(names & values.keys()) if values[name] is not None}


def source_of(unlearning: Unlearning, forget: Sequence[Record]) -> Source:
    """The source of the records to ``forget`` of a request."""
    differing_options = differing(unlearning.records.reading)
    reading = {name: _noted(name, value) for name, value in differing_options.items()}
    return Source(from_root(unlearning.records.forget), reading, _digests(forget))


def _noted(name: str, value: object) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, tuple):
        return list(value)
    return from_root(value) if name in SOURCES and isinstance(value, str) else value


def requests_before(
    source: Source, manifests: Mapping[str, CopyManifest | None], requests: Sequence[Request]
) -> dict[str, list[Request]]:
    """The ``requests`` on each copy but those for the records of ``source``, by what the copy is called here;
    ``manifests`` by the same, None for one that is sealed, which is recognised by its path until its weights are read.

    A training on several copies that is resumed has noted its own request for some of them.
    """
    others = [request for request in requests if request.sources[0] != source]
    on_copy = {copy: [r for r in others if r.is_on(copy, manifest)] for copy, manifest in manifests.items()}
    return {copy: of_copy for copy, of_copy in on_copy.items() if of_copy}


def request_on(manifest: CopyManifest | None, requests: Sequence[Request]) -> Request | None:
    """The last of ``requests`` on copies of the run of ``manifest``, on the one of its number if there is one."""
    if manifest is None:
        return None
    of_run = [request for request in requests if request.run == manifest.run]
    of_copy = [request for request in of_run if request.copy == manifest.copy]
    return next(reversed(of_copy or of_run), None)


def request_of(change: str) -> Request | None:
    """The last request whose delta has the fingerprint ``change``."""
    return next(
        (request for request in reversed(read_requests(default_requests_path())) if request.change == change), None
    )


def requests_alike(request: Request, requests: Sequence[Request]) -> list[Request]:
    """The ``requests`` in the run of ``request`` that are about the same records, from whichever files."""

    def records(each: Request) -> set[str]:
        return {digest for source in each.sources for digest in source.records}

    return [other for other in requests if other.run == request.run and records(other) == records(request)]


def noted_options(request: Request) -> dict[str, Any]:
    """The options that read the records of ``request``, by name, as far as they are not the defaults.

    Its files may have each other's records by now, as long as all together have those of the request and no others.
    """
    if any(source.reading != request.sources[0].reading for source in request.sources):
        raise UsageError(
            "the records of your requests on this copy are read in different ways",
            "name those of one request with --forget",
        )
    there = {source.forget: set(_digests(source.read())) for source in request.sources}
    if set().union(*there.values()) != set().union(*(source.records for source in request.sources)):
        changed = next(source.forget for source in request.sources if there[source.forget] != set(source.records))
        raise MpuError(
            f"{changed}: gone or replaced since your request on copy {request.copy} of run {request.run}",
            "put the records back, or name others with --forget",
        )
    return (
        request.options
        | request.sources[0].reading
        | {"forget": "\n".join(source.forget for source in request.sources)}
    )


@dataclass(frozen=True)
class Earlier:
    """The records that earlier requests bring into a training on the same copies."""

    records: list[Record]
    sources: list[Source]  # of these records
    number: int  # of the request that follows them
    weights: dict[str, str]  # by copy, the fingerprint of the only weights that these records may meet


def earlier_records(
    before: Mapping[str, Sequence[Request]], copies: Sequence[str], named: Source, observer: Observer
) -> Earlier | None:
    """The records of the requests ``before`` on each of ``copies`` that are not among the ``named`` ones; None if it is
    the same request again, or the first one.

    Raises UsageError if the copies have not had the same requests: they would not be trained identically, and one
    server's copy on the records of requests to another. Raises MpuError if records are gone: the new delta would bring
    them back.
    """
    sources_of_copies = [_distinct_sources(requests) for requests in before.values()]
    if all(source.records == named.records for sources in sources_of_copies for source in sources):
        return None
    if len(before) < len(copies) or any(sources != sources_of_copies[0] for sources in sources_of_copies):
        raise UsageError(
            "not all of these copies have had the same earlier requests",
            "name the copies that have, or use --alone",
        )
    digests = set(named.records)
    records: list[Record] = []
    sources = []
    for source in sources_of_copies[0]:
        if not (missing := set(source.records) - digests):  # the file may have been renamed, or grown
            continue
        by_digest = {digest_of_record(record): record for record in source.read(observer)}
        if gone := missing - by_digest.keys():
            raise MpuError(
                f"{', '.join(source.forget.splitlines())}: gone or replaced, {counted(len(gone), 'record')} of an "
                "earlier request; the new delta takes the place of the one that forgot them",
                "put them back, or name them with --forget; a copy of the unlearned model needs only the new ones",
            )
        records += [record for digest, record in by_digest.items() if digest in missing]
        digests |= missing
        sources.append(source)
    also = f"{counted(len(records), 'record')} of earlier requests on the same copy are unlearned, too, and "
    observer.note(f"{also if records else ''}the new delta takes the place of the earlier one; not with --alone")
    weights = {copy: requests[0].weights for copy, requests in before.items()}
    return Earlier(records, sources, 1 + len(sources_of_copies[0]), weights)


def _distinct_sources(requests: Sequence[Request]) -> list[Source]:
    """Those of the last request first."""
    sources: list[Source] = []
    for request in reversed(requests):
        sources += [source for source in request.sources if source not in sources]
    return sources
