"""R rounds of publish → unlearn → aggregate, each party in a folder of its own, and two unprotected baselines.

*mpu* is the protocol. *clean* gives the client the model itself: one copy, no noise, no transform, and one training for
as many epochs as all rounds have together, which keeps the optimiser's state, as in the paper. *clean-rounds* does that
round by round. *noised* gives it one copy with noise of scale κ·mean|α_k| (or |c_k|), and the client's result is
the next model: θ_r = θ_{r−1} + ε + η·Δ(θ_{r−1} + ε) (paper, appendix). All use the same functions and files and differ
only in what is published.

    DIR/server/identity.txt, round_R/keys.bin, round_R/deltas/…, round_R/model
    DIR/client/round_R/copy_K (removed after unlearning on it), round_R/deltas/…
    DIR/run.json, log.jsonl   for the experimenter: what was requested, and what each step did
    DIR/done.json             once it is finished (mpu_cli.experiment.finished)
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pyrage.x25519 import Identity

from mpu_cli.client.checks import check_options, refers_back
from mpu_cli.client.dataset import Dataset
from mpu_cli.client.tag import client_secret
from mpu_cli.client.unlearn import unlearn
from mpu_cli.errors import MpuError
from mpu_cli.experiment.finished import LOG, Outcome, remember
from mpu_cli.experiment.launching import launch_unlearning
from mpu_cli.experiment.modes import publication_in, rounds_of, with_merged_rounds, with_one_rate
from mpu_cli.experiment.provenance import begin, facts_of, identity_of
from mpu_cli.models.source import open_model
from mpu_cli.observer import SILENT, Observer, WarningsOnce, WarningsOnly, Within
from mpu_cli.options.declare import flat, from_flat
from mpu_cli.options.experiment import Experiment
from mpu_cli.options.publishing import Aggregating
from mpu_cli.options.unlearning import Logging
from mpu_cli.randomness import new_seed, seed_from_number
from mpu_cli.records.forms import parse_columns
from mpu_cli.records.reading import read_records
from mpu_cli.resumption import alone_in, append_line, read_lines
from mpu_cli.sealing import make_identity, read_identities
from mpu_cli.server.aggregate import aggregate
from mpu_cli.server.copying import CopySurvival
from mpu_cli.server.deltas import open_deltas
from mpu_cli.server.keys import Keys, seal, unseal
from mpu_cli.server.publication import Publication
from mpu_cli.server.publish import Published, Target, plan_publish, publish
from mpu_cli.server.round import Owner, plan_aggregate


@dataclass
class _Log:
    """Lines of JSON, written as they come; those of a run that was interrupted are read again."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lines = read_lines(self.path, "choose another --out, or remove the folder")

    def add(self, step: str, **facts: object) -> None:
        self.lines.append({"step": step, **facts})
        append_line(self.path, self.lines[-1])


def run(experiment: Experiment, data: Dataset, folder: Path, observer: Observer = SILENT) -> Outcome:
    """Play the rounds in ``folder``, or resume them if they were interrupted there.

    Raises MpuError if ``folder`` holds something else, UsageError for options that do not go together.
    """
    check_options(experiment.unlearning)
    experiment.server_rate.check_step()
    if experiment.server_rate.probe:
        columns = parse_columns(experiment.server_rate.probe_columns)
        read_records(experiment.server_rate.probe, columns=columns)  # before the work
    played = with_merged_rounds(with_one_rate(experiment, data))
    begin(folder, facts_of(played, data))
    with alone_in(folder, "run", "--out"):
        once = WarningsOnce(observer)
        rounds = _Rounds(played, data, folder / "server", folder / "client", _Log(folder / LOG), once)
        try:
            model = rounds.play()
        finally:
            once.note_repetitions()
        remember(folder, experiment, model)
        return Outcome(model, rounds.log.lines)


@dataclass
class _Rounds:
    """Both parties at work, each in a folder of its own."""

    experiment: Experiment
    data: Dataset
    server: Path
    client: Path
    log: _Log
    observer: Observer

    @property
    def count(self) -> int:
        return rounds_of(self.experiment)

    @property
    def references(self) -> Path:
        """Where the client keeps the probabilities of the model before unlearning."""
        return self.client / "references"

    @cached_property
    def identities(self) -> list[Identity]:
        """The server's, made on first use."""
        path = self.server / "identity.txt"
        if not path.exists():
            make_identity(path)
        return read_identities(path)

    def model(self, number: int) -> Path:
        """The result of a round."""
        return self.server / f"round_{number}" / "model"

    def play(self) -> Path:
        """All rounds that are not done yet; the last round's model."""
        unfinished = ("round_*/.*.partial", "round_*/deltas/.*.partial", "round_*/outbox", "references/.*.partial")
        for pattern in unfinished:
            for path in self.server.parent.glob(f"*/{pattern}"):
                shutil.rmtree(path)  # left by a run that was killed
        done = [number for number in range(1, self.count + 1) if self.model(number).exists()]
        model = str(self.model(done[-1])) if done else self.experiment.base
        for number in range(done[-1] if done else 1, self.count + 1):
            if self.log.lines and self.log.lines[-1]["step"] == "stop":
                break
            if not self.model(number).exists():
                _Round(self, number, model).play()
            if self._copies_disagree(number):
                shutil.rmtree(self.model(number))
                break
            model = str(self.model(number))
            if not self.experiment.keep:
                if number > 1:
                    shutil.rmtree(self.model(number - 1), ignore_errors=True)
                shutil.rmtree(self.model(number).with_name("deltas"), ignore_errors=True)
                shutil.rmtree(self.client / f"round_{number}", ignore_errors=True)
        (self.client / "client.key").unlink(missing_ok=True)
        if not self.experiment.keep:
            shutil.rmtree(self.references, ignore_errors=True)
        return Path(model)

    def _copies_disagree(self, number: int) -> bool:
        """Whether the changes of a round's copies differ too much for the round to count.

        Raises MpuError if those of the first one do.
        """
        least = self.experiment.min_cosine
        entry = next(line for line in reversed(self.log.lines) if line["step"] == "aggregate")
        if least is None or entry["round"] != number or not entry["smallest_pairwise_cosine"] < least:
            return False
        reason = f"cosine between copies {entry['smallest_pairwise_cosine']:.3f}, below --min-cosine {least:g}"
        if number == 1:
            raise MpuError(f"round 1: {reason}", "lower --kappa or --lr, or use --optim adamw-blockwise")
        self.log.add("stop", round=number, smallest_pairwise_cosine=entry["smallest_pairwise_cosine"])
        self.observer.note(f"round {number}: {reason}; the result is that of round {number - 1}")
        return True


class _Round:
    """One round: ``base`` is what it starts from."""

    def __init__(self, rounds: _Rounds, number: int, base: str):
        self.rounds, self.experiment, self.number, self.base = rounds, rounds.experiment, number, base
        self.server, self.client = rounds.server / f"round_{number}", rounds.client / f"round_{number}"
        self.observer = Within(rounds.observer, f"round {number} of {rounds.count}")

    def play(self) -> None:
        for k in range(1, self._copies + 1):
            delta, copy = self.server / "deltas" / f"copy_{k}.safetensors", self.client / f"copy_{k}"
            if not delta.exists():
                # A copy is made when its turn comes, so that only one is on disk at a time.
                if not copy.exists():
                    self._publish(k)
                self._unlearn(k, copy)
                delta.parent.mkdir(parents=True, exist_ok=True)
                # Only the delta goes back, nothing else.
                os.replace(self.client / "deltas" / delta.name, delta)
            if not self.experiment.keep and self.experiment.mode != "noised":
                shutil.rmtree(copy, ignore_errors=True)
        self._aggregate()

    def _publish(self, k: int) -> None:
        identities = self.rounds.identities
        model, pretrained = open_model(self.base), self.experiment.pretrained
        started = time.monotonic()
        outbox = self.server / "outbox"
        target = Target(
            outbox,
            self.server / "keys.bin",
            lambda keys: seal(keys, [identity.to_public() for identity in identities]),
            force=True,
        )
        public = open_model(pretrained) if pretrained else None
        plan = plan_publish(model, public, self._publication(), target, only=[k])
        published = publish(plan, observer=Within(self.observer, f"copy {k}"))
        [copy] = published.copies
        self.client.mkdir(parents=True, exist_ok=True)
        os.replace(copy, self.client / copy.name)  # all that goes from the server to the client
        outbox.rmdir()
        self.rounds.log.add(
            "publish", round=self.number, copy=k, seconds=round(time.monotonic() - started, 3),
            bytes=open_model(str(self.client / copy.name)).checkpoint.nbytes, **_survival(published),
        )  # fmt: skip

    @property
    def _copies(self) -> int:
        return publication_in(self.experiment, seed=bytes(32)).copies

    def _publication(self) -> Publication:
        """This round's publication, the same for each of its copies."""
        secret_seed = self.experiment.secret_seed
        seed, name = new_seed() if secret_seed is None else seed_from_number(secret_seed), ""
        if (self.server / "keys.bin").exists():  # another copy of this round was published already
            keys = self._keys()
            seed, name = keys.publication.seed, keys.run
        elif (first_keys_path := self.rounds.server / "round_1" / "keys.bin").exists():
            name = unseal(
                first_keys_path, self.rounds.identities
            ).run  # one run is a whole request, however many rounds it has
        return publication_in(self.experiment, seed=seed, run=name, number=self.number)

    def _keys(self) -> Keys:
        return unseal(self.server / "keys.bin", self.rounds.identities)

    def _unlearn(self, k: int, copy: Path) -> None:
        target = self.client / "deltas" / f"copy_{k}.safetensors"
        unlearning = self.experiment.unlearning
        reference_file = None
        if (
            self.experiment.loss_reference == "original"
            and self.rounds.count > 1
            and refers_back(check_options(unlearning))
        ):
            reference_file = self.rounds.references / f"copy_{k}.safetensors"
        started = time.monotonic()
        if self.experiment.launch:
            report = launch_unlearning(self.experiment.launch, unlearning, copy, target, reference_file)
        else:
            result = unlearn(
                open_model(str(copy)),
                self.rounds.data,
                unlearning,
                target=target,
                force=True,
                logging=Logging(resume=unlearning.privacy.dp_epsilon is None),
                reference_file=reference_file,
                secret=lambda: client_secret(self.rounds.client / "client.key"),
                observer=Within(WarningsOnly(self.observer), f"copy {k}"),
            )
            losses = [asdict(step) for step in result.steps]
            report = {"norm": result.norm, "privacy": result.spent, "steps": losses, "warnings": result.warnings()}
        if report["privacy"]:
            self.observer.note(f"copy {k}: privacy spent on each record: ε = {report['privacy']['epsilon']:.3g}")
        for warning in report["warnings"]:
            self.observer.warn(f"copy {k}: {warning}")
        steps = report["steps"]
        self.rounds.log.add(
            "unlearn", round=self.number, copy=k, steps=len(steps), norm=report["norm"],
            **({"first": steps[0], "last": steps[-1]} if steps else {}),
            **({"privacy": report["privacy"]} if report["privacy"] else {}),
            seconds=round(time.monotonic() - started, 3), bytes=target.stat().st_size if target.is_file() else None,
        )  # fmt: skip

    def _aggregate(self) -> None:
        keys, source = self._keys(), self.base
        if self.experiment.mode == "noised":
            # The client's result is the next model: what was published, including the noise, plus the change.
            source = str(self.client / "copy_1")
            keys = replace(keys, base=identity_of(open_model(source)))
        started = time.monotonic()
        options = from_flat(Aggregating, flat(self.experiment.server_rate) | flat(self.experiment.stored))
        owner = Owner(keys, open_deltas([self.server / "deltas"], keys))
        out = self.server / "model"
        # What a round is worth, however little, is what an experiment measures.
        plan = plan_aggregate(open_model(source), [owner], options, out=out, force=True)
        result = aggregate(plan, observer=self.observer)
        estimate = None if math.isnan(result.error.relative) else result.error.relative
        chosen = {"server_lr": result.step.chosen} if result.step else {}
        self.rounds.log.add(
            "aggregate", round=self.number, norms=result.norms, cosines=result.cosines,
            smallest_pairwise_cosine=result.pairwise, norm=result.norm, lost_to_rounding=result.rounding,
            error_estimate=estimate, **chosen, seconds=round(time.monotonic() - started, 3),
            bytes=open_model(str(self.server / "model")).checkpoint.nbytes,
        )  # fmt: skip
        about = "" if estimate is None else f", estimated error {estimate:.1%}"
        self.observer.note(f"‖Δ‖ {result.norm:.3g}, smallest cosine between copies {result.pairwise:.3f}{about}")
        for warning in result.warnings():
            self.observer.warn(warning)


def _survival(published: Published) -> dict[str, object]:
    """Noise that survives storage: RMS of σ over all weights, requested and surviving; share of weights unchanged."""
    blocks = [block for block in published.blocks if block.copies]
    weights = sum(block.weights for block in blocks)

    def mean(value: Callable[[CopySurvival], float]) -> float:
        return math.fsum(value(block.copies[0]) * block.weights for block in blocks) / weights

    return {
        "noise_asked": math.sqrt(mean(lambda copy: copy.requested**2)),
        "noise_survived": math.sqrt(mean(lambda copy: copy.survived**2)),
        "weights_unchanged": mean(lambda copy: copy.unchanged),
    }
