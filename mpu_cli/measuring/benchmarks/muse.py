"""MUSE: news and books (Shi et al. 2024, arXiv 2407.06460)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from mpu_cli.errors import UsageError
from mpu_cli.measuring import metrics
from mpu_cli.measuring.benchmarks.base import Benchmark, Split, forgetting, question_and_answer, questions, text_of
from mpu_cli.measuring.encoding import Encoder, Item, OpenUnlearningEncoder
from mpu_cli.measuring.retain import RetainLog
from mpu_cli.observer import Observer
from mpu_cli.options.evaluation import Measuring
from mpu_cli.records.forms import Record, Turn
from mpu_cli.records.read import CORPORA, Row, benchmark_rows

KNOWLEDGE_STOPS = ("\n\n", "\nQuestion", "Question:")


def muse(corpus: str, data_dir: Path | None, retain: RetainLog | None) -> Benchmark:
    """MUSE (Shi et al., 2024), as OpenUnlearning measures it; ``corpus`` is news or books."""

    def rows(config: str, split: str) -> Callable[[], list[Row]]:
        return partial(benchmark_rows, CORPORA[f"muse-{corpus}"], split, data_dir, config)

    def knowledge(name: str) -> Split:
        shown = cache(rows("knowmem", f"{name}_qa_icl"))

        @cache
        def shots() -> tuple[Turn, ...]:
            return tuple(turn for row in shown() for turn in question_and_answer(row).dialogue)

        def with_shots(row: Row) -> Record:
            record = question_and_answer(row)
            return replace(record, turns=(*shots(), *record.turns))

        return Split(
            f"{name}_knowmem", f"knowmem/{name}_qa", rows("knowmem", f"{name}_qa"), questions, limit=32,
            stops=KNOWLEDGE_STOPS, shown=shown, record=with_shots,
        )  # fmt: skip

    def verbatim(encoder: Encoder, _: str, split: Split) -> list[Item]:
        assert isinstance(encoder, OpenUnlearningEncoder)
        return encoder.completions([(text_of(row, "prompt"), text_of(row, "gt"), row[0]) for row in split.rows])

    def text(encoder: Encoder, _: str, split: Split) -> list[Item]:
        assert isinstance(encoder, OpenUnlearningEncoder)
        return encoder.texts([(text_of(row, "text"), row[0]) for row in split.rows])

    listed = [
        Split("verbmem", "verbmem/forget", rows("verbmem", "forget"), verbatim, limit=128),
        knowledge("forget"),
        knowledge("retain"),
        Split("forget", "privleak/forget", rows("privleak", "forget"), text),
        Split("holdout", "privleak/holdout", rows("privleak", "holdout"), text),
    ]
    splits = {split.name: split for split in listed}
    table = {
        "forget_verbmem_ROUGE": metrics.rouge("verbmem", "rougeL_f1"),
        "forget_knowmem_ROUGE": metrics.rouge("forget_knowmem", "rougeL_f1"),
        "retain_knowmem_ROUGE": metrics.rouge("retain_knowmem", "rougeL_f1"),
        **forgetting("verbmem", f"muse-{corpus}", splits, retain),
    }
    return Benchmark(f"muse-{corpus}", splits, table)


def of_options(options: Measuring, log: RetainLog | None, _: Observer) -> Benchmark:
    corpus = options.benchmark.part or "news"
    if corpus not in ("news", "books"):
        raise UsageError(f"--benchmark muse:{corpus}: must be one of muse:news, muse:books")
    return muse(corpus, options.benchmark.reading.data_dir, log)
