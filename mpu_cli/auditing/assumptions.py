"""What an attacker takes for granted of the noise and the symmetries, where nothing says: each in turn, until one
explains the copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from mpu_cli.auditing.attacks import audit
from mpu_cli.auditing.result import ATTACKS, ONE_COPY, Audit
from mpu_cli.errors import UsageError
from mpu_cli.manifest import CopyManifest, read_copy_manifest
from mpu_cli.models.source import Model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.server.scheme import SCHEMES, Scheme, given_factors

_Manifests = Sequence[CopyManifest | None]  # of the copies, None for a model without one

UNDONE = 0.5  # if an attack reduces the error of one copy to this share, the assumed noise explains the copies


@dataclass(frozen=True)
class Attempt:
    """An audit, and what the attacker took for granted in it."""

    audit: Audit
    noise: Scheme
    symmetries: str


def audit_as_believed(
    copies: Sequence[Model],
    base: Model,
    reference: Model | None,
    *,
    noise: str | None = None,
    nodes: str | None = None,
    alphas: str | None = None,
    symmetries: str | None = None,
    fast: bool = False,
    observer: Observer = SILENT,
) -> Attempt:
    """Audit ``copies`` under what is given of noise and symmetries, else under what the copies say of themselves and
    the defaults of `mpu publish`, one after the other; the attempt that explains the copies best.

    Copies may be of several publications of the base. Raises UsageError for a copy given twice, factors of several
    publications, and a reference that is the base.
    """
    models = list(copies)
    manifests = [read_copy_manifest(model.folder, model.checkpoint.metadata) for model in models]
    _check_different(manifests)
    publications = _publications(manifests)
    if len(set(publications)) > 1 and (alphas or nodes):
        raise UsageError("--alphas and --nodes: are those of one publication", "leave them out, or audit one at a time")
    attempts = []
    schemes = _believed_noise(manifests, noise, alphas, nodes)
    for believed, scheme in product(_believed_symmetries(manifests, symmetries), schemes):
        result = audit(models, base, reference, noise=scheme, symmetries=believed, fast=fast,
                      publications=publications, observer=observer)  # fmt: skip
        if reference and not sum(result.task.values()):
            raise UsageError(f"--reference {reference.source}: has the same weights as --base", "leave it out")
        explained = min((result.plain_error(name) for name in result.attacks if ATTACKS[name].believes), default=0.0)
        attempts.append((explained, Attempt(result, scheme, believed)))
        if explained < UNDONE * result.plain_error(ONE_COPY.name):
            break
    return min(attempts, key=lambda attempt: attempt[0])[1]


def _believed_noise(manifests: _Manifests, kind: str | None, alphas: str | None, nodes: str | None) -> list[Scheme]:
    """The schemes that the attacker tries, with a factor for each copy: those given, or the defaults."""
    count = len(manifests)
    if alphas or nodes:
        return [given_factors(kind, alphas, nodes, count)]
    numbers = [(i, count) if m is None else (m.copy - 1, m.copies) for i, m in enumerate(manifests)]
    kinds = [SCHEMES[kind]] if kind else list(SCHEMES.values())[: None if count > 1 else 1]
    return [each(tuple(each.default(copies).factors[i] for i, copies in numbers)) for each in kinds]


def _believed_symmetries(manifests: _Manifests, requested: str | None) -> list[str]:
    """The sets that the attacker tries: the one given, else the one stated in the copies, else each."""
    if requested:
        return [requested]
    tried = ["signed", "paper", "all"]
    named = manifests[0].symmetries if manifests[0] else None
    return [named] if named in tried else tried


def _publications(manifests: _Manifests) -> list[object]:
    """Which publication each copy is of; copies without a manifest are taken for those of one.

    A run and round may have been published more than once: two copies of one number are of two publications.
    """
    counts: Counter[tuple[str, int, int]] = Counter()
    publications: list[object] = []
    for manifest in manifests:
        if manifest is None:
            publications.append(None)
            continue
        copy_key = (manifest.run, manifest.round, manifest.copy)
        publications.append((manifest.run, manifest.round, counts[copy_key]))
        counts[copy_key] += 1
    return publications


def _check_different(manifests: _Manifests) -> None:
    """Raise UsageError if a copy is given twice."""
    copy_manifests = [manifest for manifest in manifests if manifest is not None]
    if len({manifest.copy_id for manifest in copy_manifests}) < len(copy_manifests):
        raise UsageError("the same copy is given twice")
