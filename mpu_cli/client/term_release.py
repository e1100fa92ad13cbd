"""Terms that many private records share, released with differential privacy by OpenDP.

Each unit, a record or a person, counts for a few terms chosen from it alone. A term is released if its count plus
discrete Laplace noise reaches a threshold (Korolova et al., 2009): the noise hides how many units have it, the
threshold that one unit has what no other does. What is made of the terms afterwards spends nothing more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpu_cli.client.accounting import Release
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.options.surrogates import TermRelease
from mpu_cli.records.record import Record
from mpu_cli.records.terms import join_overlapping, terms_of, texts_of

if TYPE_CHECKING:
    from opendp.mod import Measurement

MAX_THRESHOLD = 1 << 30


@dataclass(frozen=True)
class TermMechanism:
    """The mechanism before it reads records. ``threshold``: units that a term needs, give or take the noise of scale
    ``noise_scale``; ``bound``: what one release spends."""

    measurement: Measurement
    threshold: int
    noise_scale: float
    bound: Release


@dataclass(frozen=True)
class ReleasedTerms:
    """``terms``, joined where they overlap: all that the bound covers. ``covered_records``, how many of the records
    mention one of them, stays with the client."""

    terms: Sequence[str]
    covered_records: int


def term_mechanism(options: TermRelease) -> TermMechanism:
    """The mechanism with the lowest threshold that meets ``options``. Raises UsageError if there is none, MpuError
    without OpenDP."""
    opendp = _opendp()
    domain = opendp.map_domain(opendp.atom_domain(T=str), opendp.atom_domain(T="i32"))
    metric = opendp.l01inf_distance(opendp.absolute_distance(T="i32"))
    # One unit changes the counts of its terms by one each; a replaced one, also those of its replacement.
    changes = options.terms * (2 if options.dp_neighbours == "replaced" else 1)
    distance = (changes, changes, 1)
    scale = changes / options.dp_epsilon * (1 + 1e-9)  # rounding must not exceed ε

    def make(threshold: int) -> Any:
        return opendp.m.make_laplace_threshold(domain, metric, scale=scale, threshold=threshold)

    def meets(threshold: int) -> bool:
        return bool(make(threshold).map(distance)[1] <= options.dp_delta)

    try:
        threshold = 1 if meets(1) else opendp.binary_search(meets, bounds=(1, MAX_THRESHOLD))
    except (ValueError, opendp.OpenDPException) as error:
        raise UsageError(
            f"--dp-epsilon {options.dp_epsilon:g} --dp-delta {options.dp_delta:g}: no threshold achieves this",
            "raise them, or use fewer --terms",
        ) from error
    epsilon, delta = make(threshold).map(distance)
    bound = Release(float(epsilon), float(delta), options.dp_neighbours)
    # OpenDP releases a count that reaches the threshold, and its bound is of counts that exceed it.
    return TermMechanism(make(threshold + 1), threshold + 1, scale, bound)


def release_terms(records: Sequence[Record], names: Sequence[str | None], options: TermRelease,
                  mechanism: TermMechanism) -> ReleasedTerms:  # fmt: skip
    """The terms of ``records`` that enough units share. ``names``: of each record, what --term-column says it is about.

    Each call draws fresh noise of the operating system and spends the bound of ``mechanism`` once more.
    """
    contributions = _contributions(records, names, options)
    counts = Counter(term for terms in contributions.values() for term in terms)
    released = mechanism.measurement({term: min(count, MAX_THRESHOLD) for term, count in counts.items()})
    names_of = [[name] if name else ["\n".join(texts_of(record))] for name, record in zip(names, records, strict=True)]
    mentioning = sum(any(term in text for term in released for text in texts) for texts in names_of)
    ordered = sorted(released, key=lambda term: (-released[term], term))
    # A single term stands for all of a record; of several, neighbouring pairs of words are parts of one name.
    joins = options.terms > 1 and options.term_column is None
    return ReleasedTerms(join_overlapping(ordered) if joins else ordered, mentioning)


def _units(records: Sequence[Record]) -> Iterator[object]:
    """Of each record, the unit that it is protected with: itself, unless a field names a person."""
    for number, record in enumerate(records):
        yield number if record.unit is None else record.unit


def _contributions(
    records: Sequence[Record], names: Sequence[str | None], options: TermRelease
) -> Mapping[object, Sequence[str]]:
    """The terms that each unit counts for, at most ``options.terms``, chosen from its own records."""
    candidates: dict[object, Counter[str]] = {}
    for unit, record, name in zip(_units(records), records, names, strict=True):
        terms = terms_of(record, options.terms) if options.term_column is None else [name] if name else []
        candidates.setdefault(unit, Counter()).update(terms)
    return {unit: [term for term, _ in counts.most_common(options.terms)] for unit, counts in candidates.items()}


def _opendp() -> Any:
    """OpenDP's functions. Raises MpuError without it."""
    try:
        import opendp.prelude as opendp
    except ImportError as error:
        raise MpuError("surrogate records need OpenDP", "install it with pip install opendp") from error
    opendp.enable_features("contrib")
    return opendp
