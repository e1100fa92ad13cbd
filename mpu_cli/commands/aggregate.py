"""``mpu aggregate``: combine the clients' deltas into the server's next model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.commands.publish import command_to_publish
from mpu_cli.commands.secrets import opened_keys
from mpu_cli.files.boundary import private_umask
from mpu_cli.files.manifest import model_folder
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import BASE_AGAIN, FORCE, Command, Opening, Preview, Report, paths_from
from mpu_cli.options.declare import group, option
from mpu_cli.options.publishing import RESTORE, Aggregating
from mpu_cli.wording import counted, few

if TYPE_CHECKING:
    from mpu_cli.protocol.combine import AggregatePlan, Aggregation, Combined
    from mpu_cli.protocol.deltas import Owner
    from mpu_cli.protocol.noise import ErrorEstimate
    from mpu_cli.protocol.step import ProbedStep


@dataclass(frozen=True, kw_only=True)
class Aggregate(Command):
    """Undo the coordinates of all copies' deltas, average them so that the noise cancels, and add the result to BASE.

    Prints the path of the unlearned model.
    """

    NAME = "aggregate"
    EXAMPLE = "mpu aggregate deltas/ --keys keys.bin"

    deltas: list[str] = option(
        ...,
        "Deltas, raw or inverted, directories of them, or - for standard input.",
        metavar="DELTAS",
        argument=True,
    )
    aggregating: Aggregating = group(Aggregating)
    keys: list[Path] | None = option(
        None,
        "The key file of the publication (default: keys.bin); repeated for several data owners, whose updates are "
        "added.",
        metavar="FILE",
    )
    base: str | None = option(None, BASE_AGAIN, metavar="MODEL")
    out: Path | None = option(
        None, "Directory for the unlearned model (default: unlearned; after round 1, unlearned_R).", metavar="DIR"
    )
    as_adapter: bool = option(False, "Write LoRA deltas as one peft adapter for BASE instead of a model.")
    opening: Opening = group(Opening)
    trust_deltas: bool = option(
        False, "Aggregate although deltas were trained differently, or the update is nothing but noise.",
        in_files=False,
    )  # fmt: skip
    force: bool = option(False, FORCE, in_files=False)

    def plan(self, observer: Observer = SILENT) -> AggregatePlan:
        """The files to read and write, after every check that needs no numbers."""
        from mpu_cli.protocol.combine import plan_aggregate
        from mpu_cli.protocol.deltas import owners_of
        from mpu_cli.protocol.keys import published_base

        # First the paths: at the end of a pipe, the command that writes the keys may still be running.
        paths = paths_from(self.deltas)
        publications = [opened_keys(file, self.opening, observer) for file in self._key_files]
        owners = owners_of(paths, publications)
        if self.aggregating.step == RESTORE:
            owners = _with_rehearsed_steps(owners)
        _warn_of_earlier_deltas(owners, observer)
        return plan_aggregate(
            published_base(publications[0], self.base),
            owners,
            self.aggregating,
            out=self.out or model_folder(publications[0].round),
            as_adapter=self.as_adapter,
            trust_deltas=self.trust_deltas,
            force=self.force,
        )

    def preview(self, observer: Observer) -> Preview:
        """All deltas are checked, except for their numbers."""
        from mpu_cli.protocol.copies import BUFFERS

        plan = self.plan(observer)
        notes = []
        for keys, weights in zip(plan.publications, plan.weights, strict=True):
            shown = ", ".join(f"{weight:.3g}" for weight in weights)
            notes.append(f"run {keys.run}, round {keys.round}; the copies' weights: {shown}")
        for difference in plan.differences():
            observer.warn(difference)
        reads = [(plan.base.source, plan.base.checkpoint.nbytes)]
        reads += [(str(delta.path), delta.checkpoint.nbytes) for delta in plan.deltas]
        return Preview(reads=reads, writes=[(plan.out, plan.nbytes)], memory=BUFFERS, notes=notes, folders=[plan.out])

    def run(self, observer: Observer = SILENT) -> Aggregation | Combined:
        """One data owner's ``Aggregation``, or several ``Combined``; warnings go to ``observer``."""
        with private_umask():  # no noise covers the result
            plan = self.plan(observer)
        result = self.carry_out(plan, observer)
        if not self.as_adapter:
            self._record(plan, result, observer)
        return result

    def carry_out(self, plan: AggregatePlan, observer: Observer) -> Aggregation | Combined:
        """What ``run`` does with its ``plan``, but for the server's note of the update."""
        from mpu_cli.protocol.combine import aggregate, aggregate_adapter, aggregate_owners

        with private_umask():
            result: Aggregation | Combined
            if len(plan.owners) > 1:
                result = aggregate_owners(plan, observer=observer)
            elif self.as_adapter:
                result = aggregate_adapter(plan)
            else:
                result = aggregate(plan, observer=observer)
        for warning in result.warnings():
            observer.warn(warning)
        return result

    def _record(self, plan: AggregatePlan, result: Aggregation | Combined, observer: Observer) -> None:
        """Note the update, for `mpu status`, and for the next step if a check does not pass."""
        from mpu_cli.files.reader import fingerprint
        from mpu_cli.protocol.combine import Combined
        from mpu_cli.protocol.updates import Update, write_update

        updates = result.updates if isinstance(result, Combined) else [result]
        for file, owner, update in zip(self._key_files, plan.owners, updates, strict=True):
            write_update(
                Update(
                    run=owner.keys.run, round=owner.keys.round,
                    deltas=[str(delta.path.absolute()) for delta in owner.deltas],
                    fingerprints=[fingerprint(delta.checkpoint) for delta in owner.deltas],
                    keys=str(file.absolute()), base=owner.keys.base.fingerprint, model=str(result.path.absolute()),
                    rate=update.rate, dtype=self.aggregating.dtype,
                ),
                observer,
            )  # fmt: skip

    @property
    def _key_files(self) -> list[Path]:
        return self.keys or [Path("keys.bin")]

    def report(self, result: Aggregation | Combined, observer: Observer) -> Report:
        from mpu_cli.protocol.combine import Combined

        if isinstance(result, Combined):
            return self._report_owners(result, observer)
        return self._report_one(result, observer)

    def _report_one(self, result: Aggregation, observer: Observer) -> Report:
        """One owner's update."""
        keys = result.keys
        _tell_deltas("Deltas of this round", result, observer)
        if result.probed:
            self._tell_tried(result.probed, self._applied(result), observer)
        else:
            observer.note(self._applied(result))
        if result.probed is None and result.rate == 1 and keys.publication.permanent:
            observer.note(
                "how much of what a noisy copy forgets comes over depends on the model: `mpu rehearse` finds the step "
                "with records of your own, which aggregate then takes"
            )
        observer.note(f"rounding on storage: {result.rounding:.1%} of the update")
        if self.as_adapter:
            observer.note("the client's check needs a copy of the whole model: aggregate to one, too, and publish that")
        elif (calibration := keys.publication.calibration) and keys.round >= calibration.rounds:
            observer.note(
                f"ε and δ cover {counted(calibration.rounds, 'round')}, and a copy for the client's check would be one "
                "more: plan it from the first publication on, with --dp budget_rounds"
            )
        else:
            publish = command_to_publish(result.path, keys)
            observer.note(f"next: `{publish}`; the client runs `mpu check` on a copy of it")
        outliers = [
            {"tensor": name, "copy": copy, "factor": factor if math.isfinite(factor) else None}
            for name, copy, factor in result.outliers
        ]
        document = {
            "model": result.path,
            **_document_of(result),
            "warnings": result.warnings(),
            "trained_differently": result.owner.trained_differently,
            "lost_to_rounding": result.rounding,
            "step": result.rate,
            "probed": asdict(result.probed) if result.probed else None,
            "outliers": outliers,
        }
        return Report([result.path], document)

    def _report_owners(self, result: Combined, observer: Observer) -> Report:
        """Each owner's update, and how far they point in one direction."""
        files = self._key_files
        summaries = []
        for file, update in zip(files, result.updates, strict=True):
            keys = update.keys
            _tell_deltas(f"{file}: run {keys.run}, round {keys.round}", update, observer)
            observer.note(self._applied(update))
            summaries.append({"keys": file, **_document_of(update), "step": update.rate})
        for i, file in enumerate(files):
            for j in range(i):
                cosine = float(result.cosines[i, j])
                observer.note(f"cosine between the updates of {files[j]} and {file}: {cosine:.3f}")
        if result.probed:
            applied = f"applied with {result.probed.chosen:g} times what each owner's step would be alone"
            self._tell_tried(result.probed, applied, observer)
        observer.note("to leave an owner out, leave out its keys and deltas")
        document = {
            "model": result.path,
            "owners": summaries,
            "cosines": result.cosines.tolist(),
            "warnings": result.warnings(),
            "lost_to_rounding": result.rounding,
            "probed": asdict(result.probed) if result.probed else None,
        }
        return Report([result.path], document)

    def _applied(self, update: Aggregation) -> str:
        """An owner's step, and where it came from."""
        why = ""
        if self.aggregating.step == RESTORE and update.probed is None:
            if update.owner.rehearsed_step is not None:
                why = ", that of your rehearsal; --step names another"
            elif update.rate != 1:
                why = ", which restores what the average lost of each copy's change"
        return f"applied with a step of {update.rate:g}{why}"

    def _tell_tried(self, probed: ProbedStep, applied: str, observer: Observer) -> None:
        """What each step costs that was tried on --probe, and why the one was ``applied`` that was."""
        from mpu_cli.protocol.step import MAX_STEP

        rows = [[f"{step:g}", f"{loss:.4f}"] for step, loss in probed.curve]
        observer.table("Steps tried", ["step", f"loss per answer token on {self.aggregating.probe}"], rows)
        which = "the longest found"
        if probed.chosen >= MAX_STEP:
            which = "the longest that is tried"
        elif probed.chosen == max(probed.losses):
            which = "as long as it was to be"
        observer.note(f"{applied}, {which}: it rises by {probed.rise:.2g}; --max-rise is {probed.max_rise:g}")


def _with_rehearsed_steps(owners: Sequence[Owner]) -> list[Owner]:
    """``owners`` with the steps of the last rehearsals of their publications."""
    from mpu_cli.protocol.updates import read_updates, rehearsed_step

    entries = read_updates()
    steps = [rehearsed_step(entries, owner.keys.run, owner.keys.round, owner.keys.base.fingerprint) for owner in owners]
    return [replace(owner, rehearsed_step=step) for owner, step in zip(owners, steps, strict=True)]


def _warn_of_earlier_deltas(owners: Sequence[Owner], observer: Observer) -> None:
    """Warn of deltas in whose place others were applied, such as those of an earlier request on the same copies."""
    from mpu_cli.files.reader import fingerprint
    from mpu_cli.protocol.updates import last_update, read_updates, update_that_replaced

    entries = read_updates()
    for owner in owners:
        run, round_ = owner.keys.run, owner.keys.round
        if last_update(entries, run, round_) is None:  # nothing to compare with, so nothing is read
            continue
        fingerprints = [fingerprint(delta.checkpoint) for delta in owner.deltas]
        if later := update_that_replaced(entries, run, round_, fingerprints):
            observer.warn(
                f"these deltas of run {run} are earlier ones: on {later.time}, {few(later.deltas)} took their "
                "place, and this model knows again what only those forgot"
            )


def _tell_deltas(title: str, result: Aggregation, observer: Observer) -> None:
    """A round's deltas, and how far their aggregate is from the clean update."""
    rows = []
    for copy, (norm, cosine) in enumerate(zip(result.norms, result.cosines, strict=True), 1):
        rows.append([f"copy {copy}", f"{norm:.4g}", "–" if math.isnan(cosine) else f"{cosine:.4f}"])
    rows.append(["aggregate", f"{result.norm:.4g}", ""])
    observer.table(title, ["", "norm", "cosine with the aggregate"], rows)
    observer.note(_accuracy(result.error, result.owner.until_done))


def _document_of(result: Aggregation) -> dict[str, object]:
    """The JSON document about one owner's update."""
    numbers = zip(result.norms, result.cosines, strict=True)
    copies = [
        {"copy": copy, "delta": result.deltas.get(copy), "norm": norm, "cosine": None if math.isnan(cosine) else cosine}
        for copy, (norm, cosine) in enumerate(numbers, 1)
    ]
    return {
        "run": result.keys.run,
        "round": result.keys.round,
        "copies": copies,
        "smallest_pairwise_cosine": result.pairwise,
        "norm": result.norm,
        "error_estimate": asdict(result.error),
    }


def _accuracy(error: ErrorEstimate, until_done: bool) -> str:
    """The note about the distance from the clean update. Parts that cannot be estimated are NaN."""
    from mpu_cli.protocol.noise import DIVERGED

    relative, permanent = error.relative, error.permanent
    if math.isnan(relative):
        if permanent > 0:
            return f"error of the update: about {permanent:.0%}, from permanent noise"
        return "error of the update: cannot be estimated" + (" from one copy" if math.isnan(permanent) else "")
    judged = "as usual"
    if relative > DIVERGED:
        judged = "too large: too little of the noise cancels"
        if until_done:
            judged = "as the copies' courses part in hundreds of steps; a check tells whether the records are forgotten"
    if math.isnan(permanent):
        return (
            f"error of the update: about {relative:.1%}, {judged}, and what permanent noise adds, which cannot be "
            "estimated without noise that cancels"
        )
    if permanent:
        parts = f"{permanent:.0%} from permanent noise, {relative:.1%} from noise that cancels"
        return f"error of the update: about {math.hypot(relative, permanent):.0%} ({parts}), {judged}"
    return f"error of the update: about {relative:.1%}, {judged}"
