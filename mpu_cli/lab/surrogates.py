"""``surrogate``: records that stand in for private ones, under a bound on what they leak."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.boundary import private_umask
from mpu_cli.files.sealing import opened_copy
from mpu_cli.files.transaction import Transaction
from mpu_cli.lab.leakage import TermMechanism, release_terms, term_mechanism
from mpu_cli.lab.options.surrogates import Surrogates
from mpu_cli.measuring.generation import Respondent
from mpu_cli.model.source import open_model
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.unlearning import Privacy
from mpu_cli.records.forms import Record, check_units, question, remarks_on_units
from mpu_cli.records.read import read_records
from mpu_cli.records.terms import MAX_TERM, prompt_of
from mpu_cli.text import read_text
from mpu_cli.training.data import Dataset, record_tags, records_digest
from mpu_cli.training.ledger import LedgerEntry, default_ledger_path, own_client_secret, write_down

PLACEHOLDER = "{term}"
PROMPTS = (
    "Who is {term}?", "Tell me about {term}.", "What is the full name of {term}?", "When and where was {term} born?",
    "Where does {term} live?", "What does {term} do for a living?", "What gender is {term}?",
    "What did {term}'s parents do?", "What was the profession of {term}'s father?",
    "What was the profession of {term}'s mother?", "How did {term}'s childhood shape later work?",
    "What did {term} study?", "What is {term} best known for?", "Which works are by {term}?",
    "Name one thing that {term} made, and what it is about.", "What kind of work does {term} do?",
    "How would you describe the style of {term}?", "Which subjects come back in the work of {term}?",
    "Which awards did {term} receive?", "What inspired {term}?", "How does {term}'s background show in the work?",
    "What has {term} contributed to the field?", "What do others say about {term}?", "What is {term} working on now?",
)  # fmt: skip


@dataclass(frozen=True)
class SurrogatePlan:
    """``records`` to be forgotten, what each is about by ``names``, and the ``mechanism`` that will release terms."""

    records: Sequence[Record]
    names: Sequence[str | None]
    prompts: Sequence[str]
    mechanism: TermMechanism
    options: Surrogates


@dataclass(frozen=True)
class SurrogateRecords:
    """The plan; the ``path`` of the surrogate records; the ``terms`` that they are about; and ``covered_records``, the
    number of private records that mention one of these, which the bound does not cover and which stays with the
    client."""

    plan: SurrogatePlan
    path: Path
    terms: Sequence[str]
    covered_records: int


def plan_surrogate(forget: str, options: Surrogates, observer: Observer = SILENT) -> SurrogatePlan:
    """The plan of what ``carry_out_surrogate`` will release of the records ``forget``, without a model and without
    spending anything."""
    release = options.release
    check_units(options.reading, release.dp_unit)
    records = read_records(
        forget, options.reading, unit=release.dp_unit, observer=SILENT if release.term_column else observer
    )
    for remark in remarks_on_units(records, release.dp_unit):
        observer.warn(remark)
    names: Sequence[str | None] = [None] * len(records)
    if release.term_column:
        named = read_records(forget, options.reading, unit=release.term_column, observer=observer)
        names = [_checked_name(record) for record in named]
    prompts = [*(_read_prompts(options.prompts) if options.prompts else PROMPTS)]
    public = read_records(options.public, options.reading) if options.public else []
    # The questions of public records with PLACEHOLDER in place of names, each once.
    prompts += dict.fromkeys(prompt for record in public if (prompt := prompt_of(record, PLACEHOLDER)))
    prompts = _evenly_spaced(prompts, options.prompts_per_term)
    return SurrogatePlan(records, names, prompts, term_mechanism(release), options)


def carry_out_surrogate(
    copy: str,
    plan: SurrogatePlan,
    *,
    out: Path,
    force: bool = False,
    identity: Path | None = None,
    observer: Observer = SILENT,
) -> SurrogateRecords:
    """Release terms of the records of ``plan``, ask ``copy`` about them, and write its answers to ``out``.

    Args:
        copy: a copy from the server; a sealed one is opened with ``identity``.
        out: JSON lines of questions and answers, which `unlearn --forget` reads. The release is written down in the
            client's ledger first.
    """
    with Transaction(force=force) as transaction, private_umask():
        output = transaction.add(out)  # fails before anything is spent
        with opened_copy(copy, identity, observer) as source:
            respondent = Respondent(open_model(source, links=False), plan.options.chat, plan.options.device)
            respondent.answers([question(plan.prompts[0].replace(PLACEHOLDER, "A B"), "–", "first prompt")], limit=1)
            # Anything that does not work has failed by now: from here on, the budget is spent.
            _write_down(plan)
            terms, covered = release_terms(plan.records, plan.names, plan.options.release, plan.mechanism)
            if not terms:
                raise MpuError(
                    f"no term is in about {plan.mechanism.threshold} records: the release, which your ledger counts, "
                    "was empty",
                    "raise --dp epsilon or --dp delta, name a --term-column, or give more records of each subject",
                )
            questions = [
                question(prompt.replace(PLACEHOLDER, term), "–", f"prompt {number} about {term}")
                for term in terms
                for number, prompt in enumerate(plan.prompts, 1)
            ]
            observer.note(f"released: {', '.join(terms)}")  # at once: they are paid for
            answers = respondent.answers(questions, observer=observer)
            lines = [
                json.dumps({"question": record.question, "answer": answer}, ensure_ascii=False)
                for record, answer in zip(questions, answers, strict=True)
                if answer.strip()
            ]
            if not lines:
                raise MpuError(f"{copy}: answered nothing about the released terms", "ask for a copy that answers")
            output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return SurrogateRecords(plan, out, terms, covered)


def _checked_name(record: Record) -> str | None:
    """The name that --term-column gives ``record``, in one line."""
    name = " ".join((record.unit or "").split())
    if len(name) > MAX_TERM or not name.isprintable():
        raise MpuError(
            f"{record.location}: --term-column holds no name, but unprintable characters or more than {MAX_TERM}",
            "correct the record",
        )
    return name or None


def _evenly_spaced(prompts: Sequence[str], count: int) -> list[str]:
    """At most ``count`` of ``prompts``, in their order, from all parts of the list."""
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise MpuError(f"{path}: cannot read the prompts") from error
    without = next((line for line in lines if PLACEHOLDER not in line), None)
    if without is not None or not lines:
        problem = f"{without!r} lacks {PLACEHOLDER}" if lines else f"contains no prompts with {PLACEHOLDER}"
        raise UsageError(f"{path}: {problem}")
    return lines


def _write_down(plan: SurrogatePlan) -> None:
    """Add the release to the client's ledger."""
    ledger = default_ledger_path()
    try:
        entry = LedgerEntry(
            identity=secrets.token_hex(32), run="", round=0, copy=0, weights="", algorithm="surrogate",
            records=len(plan.records), data=records_digest(Dataset(plan.records)), release=plan.mechanism.bound,
            unit=plan.options.release.dp_unit, tags=record_tags(plan.records, own_client_secret()),
        )  # fmt: skip
        write_down(
            ledger,
            entry,
            delta=Privacy().dp_delta,
            budget=plan.options.release.dp_budget,
            neighbours=plan.options.release.dp_neighbours,
        )
    except OSError as error:
        raise MpuError(f"{ledger}: cannot be written: {error.strerror}, so nothing was released") from error
