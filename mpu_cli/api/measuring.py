"""What was achieved and what is protected: ``evaluate`` and ``audit``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.api.paths import PathLike
from mpu_cli.api.sealed import opened_copy
from mpu_cli.auditing.assumptions import Attempt, audit_as_believed
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.evaluation.benchmarks import benchmark_of
from mpu_cli.evaluation.endpoint import KEY, endpoint_at
from mpu_cli.evaluation.evaluate import EvalResult as Evaluation
from mpu_cli.evaluation.evaluate import choose
from mpu_cli.evaluation.evaluate import evaluate as _evaluate
from mpu_cli.evaluation.plots import check_drawable, draw
from mpu_cli.evaluation.retain import RetainLog, read_retain_log
from mpu_cli.figures import check_target
from mpu_cli.manifest import read_copy_manifest
from mpu_cli.models.adapters import adapter_base, is_adapter
from mpu_cli.models.source import open_model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.declare import with_keywords
from mpu_cli.options.evaluation import Measuring
from mpu_cli.server.deltas import check_base
from mpu_cli.server.keys import Keys

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpu_cli.api.arguments import MeasureArguments
    from mpu_cli.options.keywords import MeasureKeywords


@dataclass(frozen=True)
class Measurement:
    """A measurement: its ``result``, on the benchmark of that name, and the retain model's log, if there is one."""

    result: Evaluation
    benchmark: str
    log: RetainLog | None


def evaluate(model: PathLike, records: PathLike | None = None, **arguments: Unpack[MeasureArguments]) -> Evaluation:
    """``mpu eval``: forgetting, utility and privacy of ``model``, or of the peft adapter in that folder on ``base``.

    ``arguments`` are those of ``measure``, which describes them: out, base, delta, lm_eval, show, …, and options such
    as benchmark, metrics, retain_log, batch_size.
    """
    return measure(model, records, **arguments).result


def measure(
    model: PathLike,
    records: PathLike | None = None,
    *,
    out: PathLike = "eval.json",
    base: PathLike | None = None,
    delta: PathLike | None = None,
    show: int = 0,
    lm_eval: Sequence[str] = (),
    endpoint: str | None = None,
    endpoint_model: str | None = None,
    plot: PathLike | None = None,
    before: PathLike | None = None,
    identity: PathLike | None = None,
    texts: bool = True,
    force: bool = False,
    options: Measuring | None = None,
    observer: Observer = SILENT,
    **keywords: Unpack[MeasureKeywords],
) -> Measurement:
    """``evaluate`` with what the model was measured on.

    Args:
        model: a model, or a peft adapter, on ``base`` if it is given, else on the model that its configuration names.
        records: one file of records, for ``benchmark="qa"``.
        out: the result file.
        delta: a delta that is added to ``model``, a copy, before it is measured.
        show: how many answers to print.
        lm_eval: tasks of lm-evaluation-harness to run as well.
        endpoint: the address of a served model, which is measured with the tokenizer of ``model``; ``endpoint_model``
            is its name there.
        plot: a figure to draw, beside the result ``before`` unlearning.
        identity: opens a sealed copy (default: your own).
        texts: whether the result holds questions, answers and generations.
        force: replace files that exist.
        options: how to measure; ``keywords`` are single options, which win over it.

    Raises UsageError for options that do not go together, MpuError for a model or records that cannot be read.
    """
    if plot and Path(plot).resolve() == Path(out).resolve():
        raise UsageError(f"--out and --plot: both are {out}", "choose different names")
    if before and not plot:
        raise UsageError("--before requires --plot")
    if endpoint_model and not endpoint:
        raise UsageError("--endpoint-model requires --endpoint")
    how = with_keywords(Measuring, options, keywords)
    log = read_retain_log(how.retain_log) if how.retain_log else None
    benchmark = benchmark_of(how, log, Path(records) if records else None, observer)
    if plot:
        check_target(Path(plot), force)
        check_drawable(choose(benchmark, how, bool(endpoint)), Path(plot))
    earlier = read_retain_log(Path(before)) if before else None
    adapted = is_adapter(Path(model))
    if base and not adapted:
        raise UsageError("--base: only an adapter has one")
    source = (str(base) if base else adapter_base(Path(model))) if adapted else str(model)
    with opened_copy(source, Path(out).parent, Path(identity) if identity else None, observer) as opened:
        result = _evaluate(
            open_model(opened, links=False),
            benchmark,
            how,
            adapter=Path(model) if adapted else None,
            delta=Path(delta) if delta else None,
            show=show,
            lm_eval=lm_eval,
            endpoint=endpoint_at(endpoint, endpoint_model, os.environ.get(KEY)) if endpoint else None,
            out=Path(out),
            texts=texts,
            force=force,
            observer=observer,
        )
    if plot:
        draw(
            result.forms, Path(plot), title=str(model), retain=log.metrics if log else None,
            before=earlier.metrics if earlier else None, force=force,
        )  # fmt: skip
    return Measurement(result, benchmark.name, log)


def audit(
    copies: Iterable[PathLike],
    base: PathLike,
    pretrained: PathLike | None = None,
    *,
    noise: str | None = None,
    nodes: str | None = None,
    alphas: str | None = None,
    symmetries: str | None = None,
    keys: Keys | None = None,
    fast: bool = False,
    observer: Observer = SILENT,
) -> Attempt:
    """``mpu audit``: what a client that keeps ``copies`` can recover, and under which assumptions.

    What is not given is read from the copies, or tried. With ``keys``, which no attack reads, raises MpuError for a
    copy that is not of their publication, or another base.
    """
    opened = [open_model(str(copy), links=False) for copy in copies]
    published = open_model(str(base))
    if keys:
        with worker_pool() as pool:
            check_base(published, keys, pool)
        for copy in opened:
            manifest = read_copy_manifest(copy.folder, copy.checkpoint.metadata)
            if manifest is None or manifest.copy_id not in keys.copy_ids:
                raise MpuError(f"{copy.source}: was not published with these keys")
    public = open_model(str(pretrained)) if pretrained else None
    return audit_as_believed(
        opened, published, public, noise=noise, nodes=nodes, alphas=alphas, symmetries=symmetries, fast=fast,
        observer=observer,
    )  # fmt: skip
