"""The options for surrogate records: the terms of private records that are released, and the questions about them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpu_cli.options.declare import Options, group, option
from mpu_cli.options.unlearning import DEVICE, DP, DP_UNIT, MOST_EPSILON, ChatTemplate, RecordFormat


@dataclass(frozen=True, kw_only=True)
class TermRelease(Options):
    """The bound on what the released terms leak, and the candidates for terms."""

    PANEL = "Differential privacy of the records"

    dp_epsilon: float = option(
        1.0, "ε of the release; further releases and trainings add to it.", above=0, below=MOST_EPSILON, fold=DP
    )
    dp_delta: float = option(
        1e-6, "δ of the release: at most so likely gets out what a single record says.", above=0, below=1, fold=DP
    )
    dp_unit: str | None = option(None, DP_UNIT, metavar="COLUMN", fold=DP)
    dp_neighbours: Literal["left-out", "replaced"] = option(
        "left-out", "What ε compares: your records with one left out, or with one replaced by another.", fold=DP
    )
    dp_budget: float | None = option(
        None, "Refuse a release after which all that your ledger holds would spend more than this ε at δ = 1e-5.",
        above=0, affects_result=False, fold=DP)  # fmt: skip
    terms: int = option(
        1, "Terms that a record counts for (with --dp unit, all records of a person): more need more records each.",
        above=0, below=101,
    )  # fmt: skip
    term_column: str | None = option(
        None, "Field that names what a record is about (default: capitalised words in its text).",
        metavar="COLUMN",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Surrogates(Options):
    """The options that decide which surrogate records are made."""

    release: TermRelease = group(TermRelease)
    reading: RecordFormat = group(RecordFormat)
    chat: ChatTemplate = group(ChatTemplate)
    prompts: Path | None = option(
        None, "Prompts about a term, one a line with {term} (default: 24 questions about a person).", metavar="FILE"
    )
    public: str | None = option(
        None,
        "Public records of the same kind: their questions are prompts, too, with the term in place of the name that "
        "they are about.",
        metavar="DATA",
    )
    prompts_per_term: int = option(48, "Prompts about each term, at most.", above=0)
    device: str = option("auto", DEVICE, metavar="DEVICE", affects_result=False)
