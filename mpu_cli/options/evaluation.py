"""The options for measuring a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mpu_cli.errors import UsageError
from mpu_cli.options.declare import Fold, Options, Range, group, option
from mpu_cli.options.names import ATTACKS, BENCHMARKS
from mpu_cli.options.publishing import StoredDtype
from mpu_cli.options.unlearning import DEVICE, READING, Goal, Prompts, Quantization, RecordFormat

SCORING = Fold("scoring", "How the model computes.")
ATTACK_NUMBERS: dict[str, tuple[float, ...]] = {"relearn": (20, 1e-5), "sample": (8,)}  # after a colon each


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(Options):
    """The records to measure on."""

    PANEL = "Records"

    benchmark: str | None = option(
        None,
        "tofu:SPLIT (default: forget10), muse:CORPUS (news or books; default: news), wmdp with MMLU beside it (both by "
        "EleutherAI's harness), or qa, your own questions and answers (default: qa where records are named, else "
        "tofu).",
        metavar="NAME",
    )
    forget: str | None = option(
        None,
        "qa: records to forget, as for unlearn. Fields paraphrased_answer (text) and perturbed_answer (list of wrong "
        "answers) give the truth ratio and, with --retain-log, forget quality.",
        metavar="DATA",
    )
    retain: str | None = option(None, "qa: records to keep.", metavar="DATA")
    unseen: str | None = option(None, "qa: records of the same kind that no model saw.", metavar="DATA")
    reading: RecordFormat = group(RecordFormat)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chosen not in BENCHMARKS:
            raise UsageError(f"--benchmark {self.benchmark}: must be one of {', '.join(BENCHMARKS)}")
        if self.part and self.chosen not in ("tofu", "muse"):
            raise UsageError(f"--benchmark {self.benchmark}: {self.chosen} has no parts", f"write {self.chosen} alone")

    @property
    def names_records(self) -> bool:
        return bool(self.forget or self.retain or self.unseen)

    @property
    def chosen(self) -> str:
        if self.benchmark:
            return self.benchmark.partition(":")[0]
        return "qa" if self.names_records else "tofu"

    @property
    def part(self) -> str | None:
        """TOFU's forget split or MUSE's corpus, if one is named."""
        return (self.benchmark or "").partition(":")[2] or None

    @property
    def names_benchmark(self) -> bool:
        """Whether an option says which benchmark is meant."""
        return bool(self.benchmark or self.names_records or self.reading.data_dir)


@dataclass(frozen=True, kw_only=True)
class Scoring(Options):
    """The options for running the model."""

    PANEL = "Running"

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

    PANEL = "Records"

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
    goal: Goal = group(Goal)
    # The client's note has all of these, so they are rarely typed.
    reading: RecordFormat = group(RecordFormat, fold=READING)
    prompts: Prompts = group(Prompts)
    scoring: Scoring = group(Scoring, fold=SCORING)


@dataclass(frozen=True, kw_only=True)
class Recovery(Options):
    """Attacks that try to bring back what was forgotten."""

    PANEL = "Attacks on forgetting"

    attacks: tuple[str, ...] = option(
        (),
        f"Try to bring back what was forgotten, and measure how far that goes: {', '.join(ATTACKS)} (comma-separated; "
        "for questions, as of tofu and qa). relearn:STEPS:RATE fine-tunes on one half of the forget set (default: 20 "
        "steps at 1e-5); of sample:N answers to a question the best counts (default: 8).",
        metavar="NAMES",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.numbers:
            if name not in ATTACKS:
                raise UsageError(f"--attacks {name}: must be one of {', '.join(ATTACKS)}")

    @cached_property
    def numbers(self) -> dict[str, list[float]]:
        """The numbers after the name of each attack, with the defaults of those that are missing. Raises UsageError."""
        numbers: dict[str, list[float]] = {name: list(defaults) for name, defaults in ATTACK_NUMBERS.items()}
        for attack in self.attacks:
            name, *texts = attack.split(":")
            of_attack = numbers.setdefault(name, [])
            if len(texts) > len(of_attack) and name in ATTACKS:
                raise UsageError(f"--attacks {attack}: too many numbers", "see --attacks in --help")
            for i, text in enumerate(texts[: len(of_attack)]):
                kind = type(ATTACK_NUMBERS[name][i])
                expected = "a whole number of at least 1" if kind is int else "a number above 0"
                try:
                    of_attack[i] = kind(text)
                except ValueError as error:
                    raise UsageError(f"--attacks {attack}: {text}: must be {expected}") from error
                if of_attack[i] not in Range(above=0):
                    raise UsageError(f"--attacks {attack}: {text}: must be {expected}")
        return numbers

    @property
    def names(self) -> list[str]:
        return [attack.partition(":")[0] for attack in self.attacks]

    @property
    def samples(self) -> int:
        return int(self.numbers["sample"][0])

    @property
    def relearn_steps(self) -> int:
        return int(self.numbers["relearn"][0])

    @property
    def relearn_lr(self) -> float:
        return self.numbers["relearn"][1]

    @property
    def document(self) -> dict[str, object]:
        """The attacks and their numbers, as result files have them."""
        return {
            "attacks": self.names,
            "samples": self.samples,
            "relearn_steps": self.relearn_steps,
            "relearn_lr": self.relearn_lr,
        }


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
