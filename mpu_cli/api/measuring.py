"""What was achieved and what is protected: ``evaluate`` and ``audit``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpu_cli.api.paths import PathLike
from mpu_cli.auditing.belief import Attempt, audit_as_believed
from mpu_cli.errors import UsageError
from mpu_cli.evaluation.benchmarks import benchmark_of
from mpu_cli.evaluation.evaluate import Result as Evaluation
from mpu_cli.evaluation.evaluate import evaluate as _evaluate
from mpu_cli.evaluation.retain import read_retain_log
from mpu_cli.models.loading import adapter_base, is_adapter
from mpu_cli.models.source import open_model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.declare import from_flat
from mpu_cli.options.evaluation import Measuring


def evaluate(
    model: PathLike,
    records: PathLike | None = None,
    *,
    out: PathLike = "eval.json",
    base: PathLike | None = None,
    delta: PathLike | None = None,
    lm_eval: Sequence[str] = (),
    force: bool = False,
    observer: Observer = SILENT,
    **options: Any,
) -> Evaluation:
    """``mpu eval``: forgetting, utility and privacy of ``model``, or of the peft adapter in that folder on ``base``.

    ``records`` is one file for ``benchmark="qa"``. ``options`` are those of ``Measuring``: benchmark, metrics,
    retain_log, forget_split, batch_size, ….
    """
    how = from_flat(Measuring, options)
    log = read_retain_log(how.retain_log) if how.retain_log else None
    adapted = is_adapter(Path(model))
    of = (str(base) if base else adapter_base(Path(model))) if adapted else str(model)
    if base and not adapted:
        raise UsageError("base: only an adapter has one")
    return _evaluate(
        open_model(of, links=False),
        benchmark_of(how, log, Path(records) if records else None),
        how,
        adapter=Path(model) if adapted else None,
        delta=Path(delta) if delta else None,
        lm_eval=lm_eval,
        out=Path(out),
        force=force,
        observer=observer,
    )


def audit(
    copies: Iterable[PathLike],
    base: PathLike,
    reference: PathLike | None = None,
    *,
    noise: str | None = None,
    nodes: str | None = None,
    alphas: str | None = None,
    symmetries: str | None = None,
    fast: bool = False,
    observer: Observer = SILENT,
) -> Attempt:
    """``mpu audit``: what a client that keeps ``copies`` can recover, and under which assumptions.

    What is not given is read from the copies, or tried.
    """
    opened = [open_model(str(copy), links=False) for copy in copies]
    public = open_model(str(reference)) if reference else None
    return audit_as_believed(
        opened, open_model(str(base)), public, noise=noise, nodes=nodes, alphas=alphas, symmetries=symmetries,
        fast=fast, observer=observer,
    )  # fmt: skip
