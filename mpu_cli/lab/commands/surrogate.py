"""``mpu surrogate``: records that stand in for private ones, under a bound on what they leak."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.lab.options.surrogates import Surrogates
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import FORCE, IDENTITY, Command, Report
from mpu_cli.options.declare import as_arguments, group, option
from mpu_cli.wording import command_line, counted

if TYPE_CHECKING:
    from mpu_cli.lab.surrogates import SurrogatePlan, SurrogateRecords


@dataclass(frozen=True, kw_only=True)
class Surrogate(Command):
    """Make surrogate records, which tell of the private ones no more than (ε, δ).

    Releases the terms that many records share, such as a person's name, with differential privacy, and writes what
    COPY answers about them. `mpu unlearn COPY --forget surrogate.jsonl --retain PUBLIC --public-records` then forgets
    what the records are about, on any number of copies, epochs and rounds, and spends nothing more. What only a few
    records say stays.
    Prints the path of the surrogate records.
    """

    NAME = "surrogate"
    EXAMPLE = "mpu surrogate copy_1 --forget forget.jsonl --public public.jsonl --dp epsilon=2"
    DRY_RUN = "Check everything, print what the release would protect, and spend nothing."

    copy: str = option(
        ..., "A copy from `mpu publish` (sealed or not), a model directory or Hub id.", metavar="COPY", argument=True
    )
    surrogates: Surrogates = group(Surrogates)
    forget: str = option("forget.jsonl", "The private records to forget.", metavar="DATA")
    out: Path = option(Path("surrogate.jsonl"), "The surrogate records to write.", metavar="FILE")
    identity: Path | None = option(None, IDENTITY, metavar="FILE")
    force: bool = option(False, FORCE, in_files=False)

    def preview(self, observer: Observer) -> Report:
        """The bound, without spending anything."""
        plan = self._plan(observer)
        observer.note(_privacy_line(plan))
        return Report([], {"records": len(plan.records), **_numbers(plan), "prompts": len(plan.prompts)})

    def run(self, observer: Observer = SILENT) -> SurrogateRecords:
        from mpu_cli.lab.surrogates import carry_out_surrogate

        return carry_out_surrogate(
            self.copy, self._plan(observer), out=self.out, force=self.force, identity=self.identity, observer=observer
        )

    def _plan(self, observer: Observer) -> SurrogatePlan:
        from mpu_cli.lab.surrogates import plan_surrogate

        return plan_surrogate(self.forget, self.surrogates, observer)

    def report(self, result: SurrogateRecords, observer: Observer) -> Report:
        plan = result.plan
        observer.note(_privacy_line(plan))
        observer.note(
            f"for you only: {result.covered_records} of {counted(len(plan.records), 'record')} mention a released "
            "term; what the others say is hardly forgotten"
        )
        as_here = [*(("--identity", self.identity) if self.identity else ()), *as_arguments(plan.options.chat)]
        observer.note(
            f"next: {command_line('mpu', 'unlearn', Path(self.copy), '--forget', self.out, *as_here)} --public-records "
            "--retain PUBLIC (the bound does not cover what --retain names: give public records)"
        )
        document = {
            "surrogate": result.path,
            "terms": list(result.terms),
            "covered_records": result.covered_records,
            "records": len(plan.records),
            **_numbers(plan),
        }
        return Report([result.path], document)


def _numbers(plan: SurrogatePlan) -> dict[str, float]:
    mechanism = plan.mechanism
    return {
        "epsilon": mechanism.bound.epsilon, "delta": mechanism.bound.delta, "threshold": mechanism.threshold,
        "noise_scale": mechanism.noise_scale,
    }  # fmt: skip


def _privacy_line(plan: SurrogatePlan) -> str:
    release, mechanism = plan.options.release, plan.mechanism
    unit = "record" if release.dp_unit is None else release.dp_unit
    return (
        f"privacy: this release protects each {unit} with ε = {mechanism.bound.epsilon:.3g} at δ = "
        f"{mechanism.bound.delta:.1e} (neighbours: {release.dp_neighbours}); a term needs about {mechanism.threshold} "
        f"of them, give or take {mechanism.noise_scale:.2g}"
    )
