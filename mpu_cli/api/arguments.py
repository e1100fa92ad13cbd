"""What the functions that plan and carry out in one call take: the plan's arguments, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Sequence

from mpu_cli.api.paths import PathLike
from mpu_cli.observer import Observer
from mpu_cli.options.evaluation import Measuring
from mpu_cli.options.keywords import AggregateKeywords, MeasureKeywords, PublishKeywords
from mpu_cli.options.publishing import Aggregating, Publishing
from mpu_cli.server.keys import Keys


class PublishArguments(PublishKeywords, total=False):
    """Those of ``plan_publish``."""

    config: PathLike | None
    out: PathLike | None
    keys: PathLike | None
    only: Sequence[int] | None
    existing_keys: Keys | None
    copy_recipients: Sequence[str]
    recipients: Sequence[str]
    passphrase: str | None
    identity: PathLike | None
    run: str | None
    round: int | None
    seed: int | None
    force: bool
    options: Publishing | None


class AggregateArguments(AggregateKeywords, total=False):
    """Those of ``plan_aggregate``."""

    base: PathLike | None
    config: PathLike | None
    out: PathLike | None
    as_adapter: bool
    identity: PathLike | None
    passphrase: str | None
    force: bool
    options: Aggregating | None


class MeasureArguments(MeasureKeywords, total=False):
    """Those of ``measure``."""

    out: PathLike
    base: PathLike | None
    delta: PathLike | None
    show: int
    lm_eval: Sequence[str]
    endpoint: str | None
    endpoint_model: str | None
    plot: PathLike | None
    before: PathLike | None
    identity: PathLike | None
    texts: bool
    force: bool
    options: Measuring | None
    observer: Observer
