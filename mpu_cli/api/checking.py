"""``check``: whether the model that a copy was made from forgot the client's records and kept the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpu_cli.api.measuring import measure
from mpu_cli.api.paths import PathLike
from mpu_cli.api.sealed import opened_copy
from mpu_cli.boundary.files import private_scratch
from mpu_cli.checkpoint.fingerprint import fingerprint
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.client.tag import own_client_secret
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.evaluation.receipt import Receipt, new_receipt, with_signature
from mpu_cli.evaluation.verdict import VERBATIM, SetScore, Verdict
from mpu_cli.manifest import CopyManifest, read_copy_manifest
from mpu_cli.models.source import Model, open_model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.declare import declared_options, with_keywords
from mpu_cli.options.evaluation import EvaluationPrompts, Measuring, Scoring
from mpu_cli.options.unlearning import RecordFormat
from mpu_cli.version import __version__

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpu_cli.options.keywords import MeasureKeywords


# What of eval's options a check has a use for: the records, how they become text, how the model is run.
USED = {"forget", "retain"}.union(*(declared_options(each) for each in (RecordFormat, EvaluationPrompts, Scoring)))


@dataclass(frozen=True)
class Check:
    """The verdict on a copy, and a receipt of it that the client signed (None if none was asked for)."""

    verdict: Verdict
    receipt: Receipt | None


def check(
    copy: PathLike,
    *,
    options: Measuring | None = None,
    unseen: PathLike | None = None,
    before: PathLike | None = None,
    with_receipt: bool = False,
    identity: PathLike | None = None,
    observer: Observer = SILENT,
    **keywords: Unpack[MeasureKeywords],
) -> Check:
    """``mpu check``: measure ``copy`` on the records ``forget`` and ``retain``, and judge.

    Args:
        copy: a copy of the server's new model; a sealed one is opened with ``identity``.
        options: the records, how they become text, and how the model is run.
        unseen: records of the same kind that the model never saw.
        before: a copy, or any model, from before unlearning, measured on the same records.
        keywords: single options, such as ``forget="forget.jsonl"``, which win over ``options``.
        with_receipt: whether the result has a receipt, signed with the client's secret, which is made on first use.

    Raises MpuError for records or models that cannot be read, UsageError for options that a check has no use for.
    """
    if useless := sorted(declared_options(Measuring).keys() & keywords.keys() - USED):
        raise UsageError(f"{useless[0]}: a check does not use it", "name records that the model never saw as unseen")
    measuring = with_keywords(Measuring, options, {"benchmark": "qa", **keywords})
    records = measuring.benchmark
    if not records.forget:
        raise MpuError("no records to forget", "name them with --forget")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("check: does not work in several processes")
    # Beside the sealed file, where the next command finds what a killed one left.
    beside = Path(copy).parent
    with private_scratch() as scratch, opened_copy(str(copy), beside, _path(identity), observer) as source:
        opened = open_model(source, links=False)
        manifest = read_copy_manifest(opened.folder, opened.checkpoint.metadata)
        if with_receipt and manifest is None:
            raise MpuError(f"{copy}: not an mpu copy (no mpu.json), so there is no receipt for it")
        sets = {"forget": records.forget} | ({"retain": records.retain} if records.retain else {})
        after = _scores(source, sets, measuring, scratch / "after.json", observer)
        unseen_scores = (
            _scores(source, {"forget": str(unseen)}, measuring, scratch / "unseen.json", observer) if unseen else {}
        )
        earlier: Mapping[str, SetScore] = {}
        if before:
            with opened_copy(str(before), Path(before).parent, _path(identity), observer) as earlier_source:
                earlier = _scores(earlier_source, sets, measuring, scratch / "before.json", observer)
        verdict = Verdict(
            after["forget"],
            after.get("retain"),
            unseen_scores.get("forget"),
            earlier.get("forget"),
            earlier.get("retain"),
        )
        signed_receipt = _receipt(verdict, opened, manifest) if with_receipt and manifest else None
        return Check(verdict, signed_receipt)


def _path(path: PathLike | None) -> Path | None:
    return None if path is None else Path(path)


def _scores(
    source: str, sets: Mapping[str, str], measuring: Measuring, out: Path, observer: Observer
) -> dict[str, SetScore]:
    """The scores of a model on sets of records, by the names that `mpu eval` gives them."""
    names = tuple(f"{name}_Q_A_{metric}" for name in sets for metric in ("Prob", "ROUGE"))
    benchmark = replace(
        measuring.benchmark, benchmark="qa", forget=sets.get("forget"), retain=sets.get("retain"), holdout=None
    )
    how = replace(measuring, benchmark=benchmark, metrics=names, retain_log=None)
    forms = measure(source, out=out, texts=False, options=how, observer=observer).result.forms
    return {name: _score(forms[f"{name}_Q_A_Prob"], forms[f"{name}_Q_A_ROUGE"]) for name in sets}


def _score(probability: Mapping[str, Any], rouge: Mapping[str, Any]) -> SetScore:
    recalls = [entry.get("rougeL_recall") for entry in rouge["value_by_index"].values()]
    numbers = [value for value in recalls if isinstance(value, int | float)]
    verbatim = sum(value >= VERBATIM for value in numbers) / len(numbers) if numbers else None
    return SetScore(len(probability["value_by_index"]), float(probability["agg_value"]), verbatim)


def _receipt(verdict: Verdict, copy: Model, manifest: CopyManifest) -> Receipt:
    with worker_pool() as pool:
        weights = fingerprint(copy.checkpoint, pool)
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    receipt = new_receipt(verdict, manifest, weights, date=date, version=__version__)
    return with_signature(receipt, "client", own_client_secret())
