"""The options for measuring a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from mpu_cli.options.declare import Fold, Options, group, option
from mpu_cli.options.names import ATTACKS, BENCHMARKS
from mpu_cli.options.publishing import StoredDtype
from mpu_cli.options.unlearning import DEVICE, Goal, Prompts, Quantization, RecordFormat

SCORING = Fold("scoring", "How the model computes.")


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(Options):
    """The records to measure on."""

    PANEL: ClassVar[str] = "Records"

    benchmark: str | None = option(
        None,
        "TOFU, MUSE, WMDP with MMLU beside it (both by EleutherAI's harness), or your own questions and answers "
        "(default: qa where records are named, muse where a corpus is, else tofu).",
        choices=BENCHMARKS,
    )
    forget_split: str | None = option(None, "TOFU forget split (default: forget10).", metavar="SPLIT")
    corpus: Literal["news", "books"] | None = option(None, "MUSE corpus (default: news).")
    forget: str | None = option(
        None,
        "qa: records to forget, as for unlearn. Fields paraphrased_answer (text) and perturbed_answer (list of wrong "
        "answers) give the truth ratio and, with --retain-log, forget quality.",
        metavar="DATA",
    )
    retain: str | None = option(None, "qa: records to keep.", metavar="DATA")
    unseen: str | None = option(None, "qa: records of the same kind that no model saw.", metavar="DATA")
    reading: RecordFormat = group(RecordFormat)

    @property
    def names_records(self) -> bool:
        return bool(self.forget or self.retain or self.unseen)

    @property
    def chosen(self) -> str:
        if self.benchmark:
            return self.benchmark
        if self.names_records:
            return "qa"
        return "muse" if self.corpus else "tofu"

    @property
    def names_benchmark(self) -> bool:
        """Whether an option says which benchmark is meant."""
        return bool(self.benchmark or self.names_records or self.reading.data_dir or self.forget_split or self.corpus)


@dataclass(frozen=True, kw_only=True)
class Scoring(Options):
    """The options for running the model."""

    PANEL: ClassVar[str] = "Running"

    dtype: StoredDtype | None = option(
        None, "Compute in this dtype (default: float32 on a CPU, the model's own on a GPU).", fold=SCORING
    )
    batch_size: int = option(
        32, "Records per forward pass; answers are generated for four times as many at once.", least=1, fold=SCORING
    )
    max_new_tokens: int | None = option(
        None,
        "Tokens of a generated answer, at most (default: the benchmark's own; qa: as many as the longest answer has, "
        "and 200 at least).",
        above=0,
        fold=SCORING,
    )
    device: str = option("auto", DEVICE, metavar="DEVICE")
    quantize: Quantization | None = option(
        None, "Hold the model in 4 bits, with bitsandbytes: less memory, and other numbers.", fold=SCORING
    )


@dataclass(frozen=True, kw_only=True)
class Checking(Options):
    """The options of `check` besides models: the records, when they count as forgotten, and how to run the model."""

    PANEL: ClassVar[str] = "Records"

    forget: str | None = option(
        None,
        "The records that were to be forgotten (default: those of your last request on copies of the same run, with "
        "all that `unlearn` was told of them).",
        metavar="DATA",
    )
    retain: str | None = option(
        None,
        "Records that were to be kept, the same as for `unlearn`, which held some of them out.",
        metavar="DATA",
    )
    public: str | None = option(
        None,
        "Public model that the server's was fine-tuned from, which never saw the records: how probable their answers "
        "are to it is compared record by record.",
        metavar="MODEL",
    )
    general: str | None = option(
        None,
        "Public text or questions that have nothing to do with the records: says how much of what was known of them is "
        "kept, beside the verdict, and is in no receipt.",
        metavar="DATA",
    )
    goal: Goal = group(Goal)
    reading: RecordFormat = group(RecordFormat)
    prompts: Prompts = group(Prompts)
    scoring: Scoring = group(Scoring)


@dataclass(frozen=True, kw_only=True)
class Recovery(Options):
    """Attacks that try to bring back what was forgotten."""

    PANEL: ClassVar[str] = "Attacks on forgetting"

    attacks: tuple[str, ...] = option(
        (),
        f"Try to bring back what was forgotten, and measure how far that goes: {', '.join(ATTACKS)} (comma-separated; "
        "for questions, as of tofu and qa).",
        metavar="NAMES",
    )
    samples: int = option(8, "sample: answers drawn for each question, of which the best counts.", least=1)
    relearn_steps: int = option(20, "relearn: steps of fine-tuning on one half of the forget set.", least=1)
    relearn_lr: float = option(1e-5, "relearn: their learning rate.", above=0)


@dataclass(frozen=True, kw_only=True)
class Measuring(Options):
    """Everything that decides the numbers of an evaluation, except the model."""

    metrics: tuple[str, ...] = option(
        (),
        "Metrics to compute, comma-separated, also of installed packages or your own as module:function (default: all "
        "of the benchmark's).",
        metavar="NAMES",
        imports=True,
    )
    retain_log: Path | None = option(
        None,
        "Result for a model that never saw the forget set: from mpu eval, or OpenUnlearning's …_EVAL.json.",
        metavar="FILE",
    )
    reference_model: str | None = option(
        None, "Model with the same tokenizer, for the reference attack.", metavar="MODEL"
    )
    benchmark: BenchmarkOptions = group(BenchmarkOptions)
    prompts: Prompts = group(Prompts)
    scoring: Scoring = group(Scoring)
    recovery: Recovery = group(Recovery)
