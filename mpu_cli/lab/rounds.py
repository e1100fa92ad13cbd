"""R rounds of publish → unlearn → aggregate, each party in a folder of its own, and two unprotected baselines.

*mpu* is the protocol. *clean* gives the client the model itself: one copy, no noise, no transform, and one training for
as many epochs as all rounds have together, which keeps the optimiser's state, as in the paper. *clean-rounds* does that
round by round. *noised* gives it one copy with noise of scale κ·mean|α_k| (or |c_k|), and the client's result is
the next model: θ_r = θ_{r−1} + ε + η·Δ(θ_{r−1} + ε) (paper, appendix). All use the same functions and files and differ
only in what is published.

    DIR/server/identity.txt, round_R/keys.bin, round_R/deltas/…, round_R/model
    DIR/client/round_R/copy_K (removed after unlearning on it), round_R/deltas/…
    DIR/run.json, log.jsonl   for the experimenter: what was requested, and what each step did
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pyrage.x25519 import Identity

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.randomness import new_seed, seed_from_number
from mpu_cli.files.reader import OPTION, fingerprint
from mpu_cli.files.resumption import alone_in, append_line, differences, read_lines, write_atomically
from mpu_cli.files.sealing import make_identity, read_identities
from mpu_cli.lab.options.experiment import Experiment
from mpu_cli.measuring.cost import cost, steps_of
from mpu_cli.model.source import Model, open_model
from mpu_cli.observer import SILENT, Observer, PrefixedObserver
from mpu_cli.options.declare import as_arguments, declared_options, flat
from mpu_cli.options.publishing import Aggregating, Copies
from mpu_cli.options.unlearning import AUTO, Logging, RecordFormat, Unlearning
from mpu_cli.protocol.combine import aggregate, plan_aggregate
from mpu_cli.protocol.copies import CopySurvival
from mpu_cli.protocol.deltas import Owner, open_deltas
from mpu_cli.protocol.keys import BaseIdentity, Keys, seal, unseal
from mpu_cli.protocol.noise import ZeroSum, scheme_of
from mpu_cli.protocol.publication import Publication, settings_of
from mpu_cli.protocol.publish import Published, Target, plan_publish, publish
from mpu_cli.records.read import read_records
from mpu_cli.subprocesses import run_mpu
from mpu_cli.training.checks import check_options, decisive_options, epochs_of, refers_back
from mpu_cli.training.data import Dataset
from mpu_cli.training.delta import delta_specs
from mpu_cli.training.ledger import client_secret
from mpu_cli.training.losses import algorithm_named
from mpu_cli.training.rates import with_rate
from mpu_cli.training.stopping import StoppingRule
from mpu_cli.training.unlearn import UnlearningTask
from mpu_cli.version import __version__

# The modes of an experiment: what the server publishes, the number of rounds, and the learning rate.


def publication_in(experiment: Experiment, *, seed: bytes, run: str = "", number: int = 1) -> Publication:
    """The publication of round ``number``, with the secrets of ``seed``, in the experiment's mode."""
    disguise = experiment.disguise.with_scale(with_pretrained=experiment.public is not None)
    stored = experiment.stored.dtype
    published = Publication(
        seed=seed,
        seed_is_secret=experiment.secret_seed is None,
        dtype=OPTION[stored] if stored else None,
        run=run,
        round=number,
        scheme=scheme_of(disguise),
        **settings_of(disguise),
    )
    if experiment.mode == "mpu":
        return published
    published = replace(published, watermark=0.0, symmetries="none")
    if experiment.mode == "noised":
        return replace(published, scheme=ZeroSum((math.fsum(published.scheme.scales) / published.copies,)))
    return replace(published, scheme=ZeroSum((1.0,)), kappa=0.0, shared_kappa=0.0)


def rounds_of(experiment: Experiment) -> int:
    """The rounds that were requested, or the paper's for the algorithm."""
    return algorithm_named(experiment.unlearning.algo).rounds if experiment.rounds is None else experiment.rounds


def with_merged_rounds(experiment: Experiment) -> Experiment:
    """``experiment`` as it is played: a clean one has one round with all epochs."""
    if experiment.mode != "clean":
        return experiment
    epochs = rounds_of(experiment) * epochs_of(experiment.unlearning)
    return replace(experiment, rounds=1, unlearning=replace(experiment.unlearning, epochs=epochs))


def with_one_rate(experiment: Experiment, data: Dataset) -> Experiment:
    """``experiment`` with a number for the learning rate, the same in every mode: from the steps of all rounds."""
    unlearning = experiment.unlearning
    if unlearning.training.lr != AUTO:
        return experiment
    epochs, size = rounds_of(experiment) * epochs_of(unlearning), unlearning.training.batch_size
    specs = delta_specs(open_model(experiment.base), unlearning)
    trained = sum(math.prod(shape) for _, shape in specs.values())
    training = with_rate(unlearning, trained, epochs * -(-len(data.forget) // size))
    return replace(experiment, unlearning=replace(unlearning, training=training))


# The facts in an experiment's folder: enough to repeat the run, and to decide whether it may be resumed.

# facts that do not decide a run's result: it may be resumed under others
INDECISIVE = ("hardware", "versions", "other_options")


def begin(folder: Path, facts: Mapping[str, object]) -> None:
    """Make ``folder``, or find the same experiment, interrupted, in it."""
    document = folder / "run.json"
    text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
    if folder.exists() and any(folder.iterdir()):
        try:
            before = json.loads(document.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise MpuError(f"{folder}: already exists and holds no experiment", "choose another --out") from error
        if not (folder / LOG).exists() and not list(folder.glob("server/round_*")):
            # Nothing was done yet: a mistake may have been corrected.
            write_atomically(document, text)
            return
        then, now = ({name: table[name] for name in table if name not in INDECISIVE} for table in (before, facts))
        if changed := list(differences(then, now)):
            raise MpuError(
                f"{folder}: holds a different experiment ({', '.join(changed)})", "choose another --out, or remove it"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(document, text)


def facts_of(experiment: Experiment, data: Dataset) -> dict[str, object]:
    """The facts that are needed to repeat the run."""
    options = flat(replace(experiment, rounds=rounds_of(experiment)))
    # Of models and records the contents count, below; of the noise what it amounts to, in "published".
    elsewhere = {"base", "public", *declared_options(Copies), *declared_options(Unlearning)}
    decided: dict[str, object] = {}
    for name, declaration in declared_options(Experiment).items():
        if declaration.affects_result and name not in elsewhere:
            decided[name] = options[name]
    decided |= decisive_options(experiment.unlearning)
    decided["micro_batch_size"] = experiment.unlearning.training.micro_batch_size
    publication, pretrained = publication_in(experiment, seed=bytes(32)), experiment.public
    published = {
        "noise": {"kind": publication.scheme.kind, "factors": publication.scheme.factors}, "kappa": publication.kappa,
        "shared_kappa": publication.shared_kappa, "symmetries": publication.symmetries,
    }  # fmt: skip

    def digest(rows: Sequence[object]) -> str:
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()

    digests: dict[str, object] = {"alternates": digest(list(data.alternates))}
    for name, records in data.sets.items():
        digests[name] = {"count": len(records), "sha256": digest([record.content for record in records])}
    facts = {
        "mpu": __version__,
        "experiment": decided,
        "other_options": {name: value for name, value in options.items() if name not in decided},
        "published": published,
        "base": identity_of(open_model(experiment.base)).fingerprint,
        "pretrained": identity_of(open_model(pretrained)).fingerprint if pretrained else None,
        "records": digests,
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "hardware": {
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }
    return json.loads(json.dumps(facts, default=str))


def identity_of(model: Model) -> BaseIdentity:
    return BaseIdentity(model.address, str(model.config_path.resolve()), fingerprint(model.checkpoint))


# One training of a run in processes of its own, started by accelerate's or torch's launcher.


def launch_unlearning(
    command: str, options: Unlearning, copy: Path, target: Path, reference_file: Path | None
) -> dict[str, Any]:
    """Run ``mpu unlearn`` on ``copy`` with ``command`` in front of it; its report with --json."""
    resume = [] if options.privacy.dp_epsilon is not None else ["--resume"]
    reference_arguments = ["--reference-file", str(reference_file)] if reference_file else []
    # Several processes cannot look a copy over for traps; this one is the run's own.
    fixed = replace(options, epochs=epochs_of(options))  # or one process trains until it is done
    arguments = [
        "unlearn", str(copy), *as_arguments(fixed), *resume, *reference_arguments, "--trust-copy", "--out",
        str(target), "--force", "--json",
    ]  # fmt: skip
    try:
        # Its ledger and secret are the run's, and not the user's.
        environment = {"XDG_CONFIG_HOME": str(target.parent.absolute() / "config")}
        ended = run_mpu(arguments, launcher=shlex.split(command), environment=environment)
    except (OSError, ValueError) as error:
        raise UsageError(f"--launch {command!r}: cannot be started ({error})") from error
    start = ended.stdout.find("{")  # after what the launcher prints
    try:
        return json.loads(ended.stdout[start:])
    except ValueError:
        raise MpuError(f"{copy}: {ended.reason}", f"started with --launch {command!r}") from None


LOG = "log.jsonl"


@dataclass(frozen=True)
class Outcome:
    """The last round's model, and the log's lines, one per step."""

    model: Path
    log: list[dict[str, Any]]


def run(experiment: Experiment, data: Dataset, folder: Path, observer: Observer = SILENT) -> Outcome:
    """Play the rounds in ``folder``, or resume them if they were interrupted there."""
    check_options(experiment.unlearning)
    experiment.step_options.check_step()
    if experiment.step_options.probe:
        read_records(experiment.step_options.probe)  # before the work
    for warning in data.warnings(experiment.unlearning.privacy):
        observer.warn(warning)
    played = with_merged_rounds(with_one_rate(experiment, data))
    begin(folder, facts_of(played, data))
    with alone_in(folder, "run", "--out"):
        log = read_lines(folder / LOG, "choose another --out, or remove the folder")  # of a run that was interrupted
        rounds = _Rounds(played, data, server=folder / "server", client=folder / "client", log=log, observer=observer)
        return Outcome(rounds.play(), rounds.log)


@dataclass
class _Rounds:
    """Both parties at work, each in a folder of its own."""

    experiment: Experiment
    data: Dataset
    server: Path
    client: Path
    log: list[dict[str, Any]]
    observer: Observer

    def add_to_log(self, step: str, **facts: object) -> None:
        self.log.append({"step": step, **facts})
        append_line(self.server.parent / LOG, self.log[-1])

    @property
    def count(self) -> int:
        return rounds_of(self.experiment)

    @property
    def references(self) -> Path:
        """The folder in which the client keeps the probabilities of the model before unlearning."""
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
            if not self.model(number).exists():
                _Round(self, number, model).play()
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


class _Round:
    """One round: ``base`` is what it starts from."""

    def __init__(self, rounds: _Rounds, number: int, base: str):
        self.rounds, self.experiment, self.number, self.base = rounds, rounds.experiment, number, base
        self.server, self.client = rounds.server / f"round_{number}", rounds.client / f"round_{number}"
        self.observer = PrefixedObserver(rounds.observer, f"round {number} of {rounds.count}")

    def play(self) -> None:
        # Any seed does: only the number of copies is read.
        copies = publication_in(self.experiment, seed=bytes(32)).copies
        for k in range(1, copies + 1):
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
        model, pretrained = open_model(self.base), self.experiment.public
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
        published = publish(plan, observer=PrefixedObserver(self.observer, f"copy {k}"))
        [copy] = published.copies
        self.client.mkdir(parents=True, exist_ok=True)
        os.replace(copy, self.client / copy.name)  # all that goes from the server to the client
        outbox.rmdir()
        self.rounds.add_to_log(
            "publish", round=self.number, copy=k, seconds=round(time.monotonic() - started, 3),
            bytes=open_model(str(self.client / copy.name)).checkpoint.nbytes, **_survival(published),
        )  # fmt: skip

    def _publication(self) -> Publication:
        """This round's publication, the same for each of its copies."""
        secret_seed = self.experiment.secret_seed
        seed, name = new_seed() if secret_seed is None else seed_from_number(secret_seed), ""
        if (self.server / "keys.bin").exists():  # another copy of this round was published already
            keys = self._keys()
            seed, name = keys.publication.seed, keys.run
        elif (first_keys_path := self.rounds.server / "round_1" / "keys.bin").exists():
            # One run is a whole request, however many rounds it has.
            name = unseal(first_keys_path, self.rounds.identities).run
        return publication_in(self.experiment, seed=seed, run=name, number=self.number)

    def _keys(self) -> Keys:
        return unseal(self.server / "keys.bin", self.rounds.identities)

    def _unlearn(self, k: int, copy: Path) -> None:
        target = self.client / "deltas" / f"copy_{k}.safetensors"
        unlearning = self.experiment.unlearning
        reference_file = None
        keeps_reference = self.experiment.loss_reference == "original" and self.rounds.count > 1
        if keeps_reference and refers_back(check_options(unlearning)):
            reference_file = self.rounds.references / f"copy_{k}.safetensors"
        started = time.monotonic()
        if self.experiment.launch:
            report = launch_unlearning(self.experiment.launch, unlearning, copy, target, reference_file)
        else:
            task = UnlearningTask(
                open_model(str(copy)),
                self.rounds.data,
                unlearning,
                target=target,
                force=True,
                logging=Logging(resume=unlearning.privacy.dp_epsilon is None),
                reference_file=reference_file,
                secret=lambda: client_secret(self.rounds.client / "client.key"),
                observer=PrefixedObserver(self.observer, f"copy {k}", notes=False),
            )
            result = task.run()
            losses = [asdict(step) for step in result.steps]
            report = {"norm": result.norm, "privacy": result.spent, "steps": losses, "warnings": result.warnings()}
        if report["privacy"]:
            self.observer.note(f"copy {k}: privacy spent on each record: ε = {report['privacy']['epsilon']:.3g}")
        for warning in report["warnings"]:
            self.observer.warn(f"copy {k}: {warning}")
        steps = report["steps"]
        self.rounds.add_to_log(
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
        options = Aggregating(**vars(self.experiment.step_options), **vars(self.experiment.stored))
        owner = Owner(keys, open_deltas([self.server / "deltas"], keys))
        out = self.server / "model"
        # An experiment measures what a round is worth, however little: ``trust_deltas``.
        plan = plan_aggregate(open_model(source), [owner], options, out=out, trust_deltas=True, force=True)
        result = aggregate(plan, observer=self.observer)
        estimate = None if math.isnan(result.error.relative) else result.error.relative
        chosen = {"rate": result.rate} if result.probed else {}
        self.rounds.add_to_log(
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


@dataclass(frozen=True)
class ExperimentCost:
    """An experiment with all its rounds: bytes to and from the client, and steps of training on all copies."""

    sent: int
    returned: int
    steps: int


def costs_of(
    experiments: Sequence[Experiment], stopping_rule: StoppingRule | None = None
) -> list[ExperimentCost | None]:
    """The cost of each experiment, at most with a ``stopping_rule``; None if its model or records are not on this
    machine."""
    counts: dict[tuple[str, RecordFormat], int] = {}  # of sources of records, which experiments share

    def cost_of(experiment: Experiment) -> ExperimentCost | None:
        played = with_merged_rounds(experiment)
        published, options = publication_in(played, seed=bytes(32)), played.unlearning
        source = (options.records.forget, options.records.reading)
        if not Path(played.base).exists():
            return None
        try:
            model = open_model(played.base)
            if source not in counts:
                counts[source] = len(read_records(*source))
        except MpuError:
            return None
        of_round = cost(model, copies=published.copies, options=options)
        rounds = rounds_of(played)
        steps = rounds * published.copies * steps_of(options, counts[source], stopping_rule)
        return ExperimentCost(rounds * of_round.published, rounds * of_round.returned, steps)

    return [cost_of(experiment) for experiment in experiments]
