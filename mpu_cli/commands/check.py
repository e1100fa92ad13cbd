"""``mpu check``: the client's verdict on the server's new model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.commands.unlearn import Unlearn
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.manifest import CopyManifest, read_copy_manifest
from mpu_cli.files.transaction import Transaction
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import ALLOW, FORCE, IDENTITY, Command, Report, Table
from mpu_cli.options.declare import as_arguments, declared_options, differing, from_flat, group, option
from mpu_cli.options.evaluation import Checking, Scoring
from mpu_cli.options.unlearning import Goal
from mpu_cli.subprocesses import process_count
from mpu_cli.version import __version__
from mpu_cli.wording import command_line

if TYPE_CHECKING:
    from mpu_cli.measuring.receipt import CopyFacts, Receipt
    from mpu_cli.measuring.verdict import Scores, Verdict
    from mpu_cli.model.source import Model
    from mpu_cli.records.forms import Record, RecordSets

SETS = {  # as the table calls them
    "forget": "to forget", "held_out": "to keep, held out", "retain": "to keep, trained on", "unseen": "never seen",
}  # fmt: skip


@dataclass(frozen=True)
class Checked:
    """The verdict on a copy, and a receipt of it that the client signed (None if none was asked for); the ``records``
    to forget that stand out, which are for the client alone; ``by``: the command with what it took from the client's
    note."""

    by: Check
    verdict: Verdict
    receipt: Receipt | None
    records: Sequence[Record] = ()


@dataclass(frozen=True, kw_only=True)
class Check(Command):
    """Check on a copy of the server's new model that it forgot your records and kept the others.

    Passes if at most 5 % is left of what was known of --forget records (and the interval over records ends below
    10 %), none is left by more than half, no more stand out than of unseen records, and at least 95 % of --retain
    records is kept, all measured against --before. The baseline, what a model guesses that never saw them, by --unseen
    records or --public, does not count, and no record makes up for another. Prints a table and the verdict; exits with
    status 1 unless it is a pass.
    """

    NAME = "check"
    EXAMPLE = (
        "mpu check round_2/copy_1 --before copy_1 --forget forget.jsonl --retain retain.jsonl --unseen unseen.jsonl"
    )

    copy: str = option(
        ..., "A copy of the server's new model, from `mpu publish` (sealed or not).", metavar="COPY", argument=True
    )
    checking: Checking = group(Checking)
    before: str | None = option(
        None, "The copy that was trained on, or another from before unlearning.", metavar="COPY"
    )
    receipt: Path | None = option(
        None, "Write what was measured, signed and without records, for the server or an auditor.", metavar="FILE"
    )
    outside_dp: bool = option(
        False,
        "Write a receipt although your ledger has a privacy bound for some of the records: no ε covers what it says.",
        in_files=False,
        fold=ALLOW,
    )
    changed_reading: bool = option(
        False,
        "Measure although tokenizer, template or config differ from the copy that was trained on; the verdict is "
        "undecided then.",
        in_files=False,
        fold=ALLOW,
    )
    show: bool = option(False, "Name the records that are still known: for you alone, not for the server.")
    identity: Path | None = option(None, IDENTITY, metavar="FILE")
    force: bool = option(False, FORCE, in_files=False)

    def run(self, observer: Observer = SILENT) -> Checked:
        """Measure the copy on the records, and judge; write the receipt, if there is one."""
        from mpu_cli.files.sealing import opened_copy

        if process_count() > 1:
            raise UsageError("check: does not work in several processes")
        if self.checking.forget is None:
            return self._with_noted(observer).run(observer)
        if self.receipt:
            from mpu_cli.measuring.receipt import check_limits

            check_limits(self.checking.goal.max_left, self.checking.goal.min_kept)
        with Transaction(force=self.force) as transaction:
            written = transaction.add(self.receipt) if self.receipt else None  # fails before anything is read
            sets = _sets(self.checking, observer)  # before the imports below, which take seconds
            from mpu_cli.measuring.receipt import as_text
            from mpu_cli.model.source import open_model

            if self.receipt and not self.outside_dp:
                _check_unbounded(sets)
            with opened_copy(self.copy, self.identity, observer) as source:
                checked = self._check(open_model(source, links=False), sets, observer)
            if written and checked.receipt:
                written.write_text(as_text(checked.receipt), encoding="utf-8")
        return checked

    def _with_noted(self, observer: Observer) -> Check:
        """This command with the records, the way to read them, the goal and the copy of the last request on copies of
        the same run, from the client's note."""
        from mpu_cli.files.reader import fingerprint
        from mpu_cli.files.sealing import opened_copy
        from mpu_cli.model.source import open_model
        from mpu_cli.training.requests import (
            default_requests_path,
            noted_options,
            read_requests,
            request_on,
            requests_alike,
        )

        with opened_copy(self.copy, self.identity, observer) as source_path:
            manifest = read_copy_manifest(Path(source_path))
        requests = read_requests(default_requests_path())
        request = request_on(manifest, requests)
        if request is None:
            raise UsageError(
                f"check {self.copy}: no --forget, and you made no request on copies of its run on this machine",
                "name the records with --forget, --retain and --unseen, and the copy with --before",
            )
        noted, first = noted_options(request), requests_alike(request, requests)[0]
        noted = {name: value for name, value in noted.items() if name in declared_options(Checking)}
        checking = from_flat(Checking, noted | differing(self.checking))
        # Before the first round: after one that did not suffice, later copies know the records less, and lack what it
        # lost of the others.
        if self.before is None:  # a copy that knew more before would make less of what is left
            with opened_copy(first.copy_path, self.identity, observer) as source_path:
                if fingerprint(open_model(source_path, links=False).checkpoint) != first.weights:
                    raise MpuError(
                        f"{first.copy_path}: replaced since you trained on it, by a copy with other weights",
                        f"put back the one of round {first.round}, which its owner sent you, and the copy to check "
                        "into a folder of its own; or name another copy from before with --before if you know why",
                    )
        goal, usual = checking.goal, Goal()
        is_noted = not {"max_left", "min_kept"}.isdisjoint(noted.keys() - differing(self.checking).keys())
        if is_noted and (goal.max_left > usual.max_left or goal.min_kept < usual.min_kept):
            observer.warn(
                f"judged by the limits of your request, max_left={goal.max_left:g} and min_kept={goal.min_kept:g}, "
                f"which are laxer than the usual {usual.max_left:g} and {usual.min_kept:g}; to judge by those, name "
                "the records with --forget and the others with --retain"
            )
        before = self.before or first.copy_path
        shown = command_line(*as_arguments(checking), "--before", before)
        observer.note(f"from your request on copy {request.copy} of run {request.run}: {shown}")
        return replace(self, checking=checking, before=before)

    def _check(self, copy: Model, sets: RecordSets, observer: Observer) -> Checked:
        from mpu_cli.files.reader import fingerprint
        from mpu_cli.files.sealing import opened_copy
        from mpu_cli.measuring.receipt import commit_to, new_receipt, with_signature
        from mpu_cli.measuring.verdict import judge, records_that_stand_out
        from mpu_cli.model.source import open_model
        from mpu_cli.training.ledger import own_client_secret

        options = self.checking
        manifest = read_copy_manifest(copy.folder, copy.checkpoint.metadata)
        if self.receipt and manifest is None:
            raise MpuError(f"{self.copy}: not an mpu copy (no mpu.json), so there is no receipt for it")
        opened = opened_copy(self.before, self.identity, observer) if self.before else None
        with opened or nullcontext() as source:
            earlier_model = open_model(source, links=False) if source else None
            _check_order(self.copy, manifest, earlier_model)
            same_reading_context = _check_reading_context(copy, manifest, earlier_model, self.changed_reading)
            facts = _copy_facts(copy, manifest) if manifest and self.receipt else None
            earlier_facts = _facts_before(earlier_model, facts) if earlier_model and facts else None
            earlier = _scores(earlier_model, sets, options, "before", observer) if earlier_model else {}
        after = _scores(copy, sets, options, "the copy", observer)
        public_model, public = None, None
        if options.public:
            public_model = open_model(options.public)
            public_sets = {name: sets[name] for name in ("forget", "unseen") if name in sets}
            public = _scores(public_model, public_sets, options, "the public model", observer)
        verdict = judge(
            after, earlier, public=public, max_left=options.goal.max_left, min_kept=options.goal.min_kept,
            same_reading_context=same_reading_context,
        )  # fmt: skip
        known = [
            sets["forget"][number] for number in records_that_stand_out(after, earlier, public, options.goal.max_left)
        ]
        if facts is None:
            return Checked(self, verdict, None, known)
        public_weights = fingerprint(public_model.checkpoint) if public_model else None
        records, nonce = commit_to(sets, own_client_secret())
        receipt = new_receipt(
            verdict, copy=facts, before=earlier_facts, public=public_weights,
            records=records, nonce=nonce, version=__version__,
        )  # fmt: skip
        return Checked(self, verdict, with_signature(receipt, "client", own_client_secret()), known)

    def tables(self, checked: Checked) -> list[Table]:
        """The copy's knowledge of each set."""
        rows, scores = [], checked.verdict.scores
        for name, label in SETS.items():
            after, earlier = scores.get(name), scores.get(f"{name} before")
            if after is not None:
                cells = [f"{score.probability:.2f}" if score else "–" for score in (earlier, after)]
                rows.append([label, *cells, f"{after.verbatim:.0%}"])
        columns = ["records", "probability before", "probability", "word for word"]
        return [Table("What the copy knows", columns, rows)]

    def report(self, checked: Checked, observer: Observer) -> Report:
        from mpu_cli.measuring.receipt import MOST_BITS

        verdict = checked.verdict
        _tell_shares(verdict, observer)
        if self.show:
            locations = ", ".join(record.location for record in checked.records)
            observer.note(f"records that stand out: {locations or 'none'}")
        if checked.receipt and checked.receipt.client:
            observer.note(
                f"{self.receipt}: holds no records, only rounded shares, which tell less about them than "
                f"{math.ceil(MOST_BITS)} answers of yes or no (bits)"
            )
            turn = "next: " if verdict.passes else ""
            observer.note(
                f"{turn}send {self.receipt} to the model's owner, who countersigns it with "
                "`mpu receipt FILE --keys KEYS --base MODEL`; tell it by another way that your public key is "
                f"{checked.receipt.client.public_key}"
            )
        if verdict.step is not None or (verdict.request and not verdict.needs_another_round):
            observer.note(f"next: {verdict.request}")
        if verdict.needs_another_round:
            # On the checked copy, with the check's records, goal and way to read them; how the check ran is left out.
            options = as_arguments(checked.by.checking, declared_options(Scoring), of=Unlearn)
            again = command_line("mpu", Unlearn.NAME, *_all_copies(self.copy), *options)
            first = "next:" if verdict.step is None else "or, if the server no longer has the deltas:"
            observer.note(f"{first} `{again}`, and return the delta to the server")
        document = {
            **asdict(verdict),
            "forgotten": verdict.is_forgotten,
            "kept_enough": verdict.is_kept,
            "passed": verdict.passes,
            "verdict": verdict.sentence,
            "receipt": self.receipt,
            "stands_out": [record.location for record in checked.records] if self.show else None,
        }
        return Report([verdict.sentence], document, status=0 if verdict.passes else 1)


def _all_copies(copy: str) -> list[Path]:
    """``copy``, and those of its publication that lie beside it: deltas of all of them are needed."""
    manifest = read_copy_manifest(Path(copy))
    if manifest is None:
        return [Path(copy)]
    copies = [Path(copy)]
    for path in Path(copy).parent.glob("copy_*"):
        try:
            other = None if path.is_symlink() else read_copy_manifest(path)
        except MpuError:  # something else, or damaged: it is not what was checked
            continue
        if other and (other.run, other.round) == (manifest.run, manifest.round) and other.copy != manifest.copy:
            copies.append(path)
    return sorted(copies)


def _tell_shares(verdict: Verdict, observer: Observer) -> None:
    """The shares that are left and kept, in percent."""
    from mpu_cli.measuring.verdict import INTERVAL_FACTOR

    if verdict.left:
        observer.note(
            f"left of what was known of the records to forget: {verdict.left}; at most {verdict.max_left:.0%} may be, "
            f"and the interval has to end at {INTERVAL_FACTOR * verdict.max_left:.0%}"
        )
    if tail := verdict.tail:
        observer.note(
            f"above 95 % of the baseline: {tail.above} of {tail.records} records, where {tail.above_allowed} may be; "
            f"word for word: {tail.verbatim}, where {tail.verbatim_allowed} may be; more than half of what was known "
            f"left: {tail.still_known}, where none may be"
        )
    if verdict.kept:
        trained = f"; of those trained on, {verdict.kept_trained.estimate:.0%}" if verdict.kept_trained else ""
        observer.note(f"kept of the others: {verdict.kept}{trained}; at least {verdict.min_kept:.0%} has to be")


def _sets(options: Checking, observer: Observer) -> RecordSets:
    """The records of each set that has some; those to keep that ``unlearn`` holds out of the training are a set.

    Equal records count once: twenty copies of one say no more than one, but would narrow the interval over records.
    """
    from mpu_cli.records.forms import distinct, remarks_on_overlap
    from mpu_cli.records.read import read_records
    from mpu_cli.training.data import Dataset, with_unseen

    goal, reading = options.goal, options.reading
    forget = read_records(options.forget or "", reading, observer=observer)
    retain = read_records(options.retain, reading, observer=observer) if options.retain else []
    for remark in remarks_on_overlap(forget, retain, "so what was forgotten of them counts as not kept"):
        observer.warn(remark)
    from mpu_cli.training.stopping import hold_out

    data = hold_out(Dataset(forget, retain), goal.held_out)
    if goal.unseen:
        data = with_unseen(data, goal.unseen, reading, observer)
    sets = {"forget": data.forget, "held_out": data.held_out, "retain": data.retain, "unseen": data.unseen}
    return {name: distinct(records) for name, records in sets.items() if records}


def _check_unbounded(sets: RecordSets) -> None:
    """Raise MpuError if a training or a release that had a bound read some of these records, whatever it was made from:
    names of runs and copies are the server's."""
    from mpu_cli.training.data import record_tags
    from mpu_cli.training.ledger import default_ledger_path, own_client_secret, read_ledger

    tags = record_tags([record for records in sets.values() for record in records], own_client_secret())
    bounded = [entry for entry in read_ledger(default_ledger_path()) if entry.may_bound(tags)]
    if bounded:
        raise MpuError(
            f"--receipt: your ledger has a privacy bound for some of these records ({bounded[0].algorithm}), and no ε "
            "covers what a receipt says of them",
            "check without --receipt, or use --allow outside-dp if you accept that",
        )


def _check_order(copy: str, manifest: CopyManifest | None, earlier: Model | None) -> None:
    """Raise UsageError if ``copy``, with this ``manifest``, is the one from before, or of an earlier round."""
    before = read_copy_manifest(earlier.folder) if earlier else None
    if earlier is None or before is None or manifest is None or before.run != manifest.run:
        return
    if before.copy_id == manifest.copy_id:
        raise UsageError(
            f"{copy}: the copy that you trained on; check takes a copy of the new model",
            "the model's owner makes one with `mpu publish unlearned`, and sends it to you",
        )
    if before.round > manifest.round:
        raise UsageError(f"--before {earlier.source}: of a later round", "are COPY and --before swapped?")


def _check_reading_context(copy: Model, manifest: CopyManifest | None, earlier: Model | None, allowed: bool) -> bool:
    """Whether ``copy`` reads records as the copy that was trained on did: that is ``earlier``, else what the ledger has
    of the run. A template alone can make a model seem to have forgotten.

    Raises MpuError if it does not, unless ``allowed``.
    """
    from mpu_cli.training.ledger import default_ledger_path, read_ledger

    known: set[str] = set()
    if earlier is not None:
        known = {earlier.reading_context}
    elif manifest is not None:
        known = {entry.reading_context for entry in read_ledger(default_ledger_path()) if entry.run == manifest.run}
    if not known or copy.reading_context in known:
        return True
    if allowed:
        return False
    raise MpuError(
        f"{copy.source}: its tokenizer, template or config is not that of the copy that was trained on, so it reads "
        "your records differently, and the verdict would say nothing of the model",
        "nothing was measured; ask its owner for one that has the same, or use --allow changed-reading if you know why",
    )


def _scores(model: Model, sets: RecordSets, options: Checking, label: str, observer: Observer) -> Scores:
    """The probabilities of each set's answers under ``model``, which is loaded once. Nothing is generated: an answer is
    given word for word if each of its tokens is the likeliest after those before it."""
    import torch

    from mpu_cli.files.reader import OPTION, TORCH
    from mpu_cli.measuring.verdict import RecordScores
    from mpu_cli.model.device import device_of
    from mpu_cli.model.load import limits_of, load, releasing_memory
    from mpu_cli.model.network import Answers, AnswerScore
    from mpu_cli.records.encode import encoding_of
    from mpu_cli.records.forms import dialogues_of
    from mpu_cli.training.checks import check_finite, without_numbers

    @releasing_memory  # imported here, with torch, so what it decorates is here, too
    def score() -> Scores:
        scoring, prompts = options.scoring, options.prompts
        if scoring.dtype:
            dtype = TORCH[OPTION[scoring.dtype]]
        elif device_of(scoring.device).type == "cpu":
            dtype = torch.float32
        else:
            largest = max(model.checkpoint.tensors.values(), key=lambda info: info.nbytes)
            dtype = TORCH[largest.dtype]
        loaded, tokenizer = load(model, dtype, scoring.device, quantize=scoring.quantize)
        check_finite(loaded, model)
        encoding = encoding_of(tokenizer, prompts, prompts.template, limits_of(loaded))
        observer.stage(f"score {label}", sum(map(len, sets.values())), "records")
        scores = {}
        for name, records in sets.items():
            examples_of_each = []
            for examples in encoding.encode_each(records):
                if isinstance(examples, MpuError):
                    raise examples
                examples_of_each.append(examples)
            together = [example for examples in examples_of_each for example in examples]
            answers = iter(Answers(together, scoring.batch_size).scores(loaded, likeliest=True))
            probabilities, verbatim = [], []
            for examples in examples_of_each:
                answer = AnswerScore.of_all([next(answers) for _ in examples])  # a text is several examples
                if not math.isfinite(answer.loss):  # a verdict that leaves these out would tell which records they are
                    raise without_numbers(model)
                probabilities.append(answer.probability)
                verbatim.append(answer.is_likeliest)
            scores[name] = RecordScores(probabilities, verbatim, dialogues_of(records))
            observer.advance(len(records))
        for remark in encoding.remarks(sum(map(len, sets.values()))):
            observer.warn(f"{label}: {remark}")
        return scores

    return score()


def _copy_facts(copy: Model, manifest: CopyManifest) -> CopyFacts:
    """The facts about a copy in a receipt: its names, and digests of its weights and of its reading context."""
    from mpu_cli.files.reader import fingerprint
    from mpu_cli.measuring.receipt import CopyFacts

    return CopyFacts(
        run=manifest.run, round=manifest.round, copy=manifest.copy, copy_id=manifest.copy_id,
        weights=fingerprint(copy.checkpoint), reading_context=copy.reading_context,
    )  # fmt: skip


def _facts_before(earlier: Model, measured: CopyFacts) -> CopyFacts:
    """The facts in a receipt about the copy that was trained on.

    Raises MpuError if it is no copy or the one that was ``measured``: a receipt would then compare with a model that
    nobody else knows.
    """
    manifest = read_copy_manifest(earlier.folder, earlier.checkpoint.metadata)
    if manifest is None:
        raise MpuError(
            f"{earlier.source}: not an mpu copy (no mpu.json), so a receipt cannot say what was compared with",
            "name the copy that was trained on",
        )
    facts = _copy_facts(earlier, manifest)
    if facts.weights == measured.weights:
        raise MpuError(f"{earlier.source}: has the weights of the copy to check", "name the copy that was trained on")
    return facts
