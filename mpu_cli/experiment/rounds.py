"""R rounds of publish → unlearn → aggregate, each party in a folder of its own, and two baselines without protection.

*mpu* is the protocol. *clean* hands the client the model itself: one copy, no noise, no transform. *noised* hands it
one copy with noise of scale κ·mean|α_k| (or |c_k|), and the client's result is the next model:
θ_r = θ_{r−1} + ε + η·Δ(θ_{r−1} + ε) (paper, appendix). All three go through the same functions and files; what differs
is what is published.

    DIR/server/identity.txt, round_R/keys.bin, round_R/deltas/…, round_R/model
    DIR/client/round_R/copy_K (removed once it was unlearned on), round_R/deltas/…
    DIR/run.json, log.jsonl   the experimenter's: what was asked for, and what each step did
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import torch

from mpu_cli import __version__
from mpu_cli.checkpoint.fingerprint import fingerprint
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.checkpoint.source import Model, open_model
from mpu_cli.client.losses import ALGORITHMS
from mpu_cli.client.records import Record
from mpu_cli.client.tag import client_secret
from mpu_cli.client.training import Losses
from mpu_cli.client.unlearn import Options, check_options, refers_back, unlearn
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.sealing import make_identity, read_identities
from mpu_cli.server.aggregate import LOST, aggregate, open_deltas
from mpu_cli.server.keys import BaseIdentity, seal, unseal
from mpu_cli.server.noise import ZERO_SUM, Scheme, default_scheme
from mpu_cli.server.publish import Publication, publish, write_json
from mpu_cli.server.randomness import new_seed, seed_from_number

MODES = ("mpu", "clean", "noised")
LOSS_REFERENCES = ("original", "round")
SHOWN = 60  # characters of a difference between two runs that are told


@dataclass(frozen=True)
class Experiment:
    """What to run; names and defaults are those of the command line."""

    base: str
    options: Options
    reference: str | None = None
    mode: str = "mpu"
    kappa: float = 0.01
    shared_noise: float = 0.0  # κ_s, in mode mpu
    noise: Scheme = field(default_factory=default_scheme)
    symmetries: str = "signed"
    rounds: int | None = None  # the paper's for the algorithm
    dtype: str | None = None  # safetensors' name of what copies and models are stored in
    server_lr: float = 1.0
    loss_reference: str = (
        "original"  # of npo, dpo, undial and kl: the model before unlearning, or each round's own copy
    )
    seed: int | None = None  # of the server's secrets; None for the operating system's
    keep: bool = False  # copies, deltas and the models between

    @property
    def all_rounds(self) -> int:
        return ALGORITHMS[self.options.algorithm].rounds if self.rounds is None else self.rounds

    @property
    def published(self) -> tuple[Scheme, float, str]:
        """What the server publishes with: noise, κ, symmetries."""
        noise = self.noise
        if self.mode == "clean":
            return Scheme(ZERO_SUM, (1.0,)), 0.0, "none"
        if self.mode == "noised":
            return Scheme(ZERO_SUM, (math.fsum(noise.scales) / noise.copies,)), self.kappa, "none"
        return noise, self.kappa, self.symmetries


@dataclass(frozen=True)
class Outcome:
    """The last round's model, and the log's lines, one a step."""

    model: Path
    log: list[dict[str, object]]


@dataclass
class _Log:
    """Lines of JSON, written as they come; those of a run that was stopped are read again."""

    path: Path
    lines: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path.exists():
            whole = [line for line in self.path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
            try:
                self.lines = [json.loads(line) for line in whole]
            except ValueError as error:
                raise MpuError(
                    f"{self.path}: is damaged ({error}); choose another --out, or remove the folder"
                ) from error
            self.path.write_text("".join(whole), encoding="utf-8")

    def add(self, step: str, **facts: object) -> None:
        self.lines.append({"step": step, **facts})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.lines[-1]) + "\n")


def run(
    experiment: Experiment,
    forget: Sequence[Record],
    retain: Sequence[Record],
    folder: Path,
    *,
    bar: Callable[[str, float], Callable[..., None]] = lambda *_: lambda *_: None,
    tell: Callable[[str], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Play the rounds in ``folder``; a run with the same facts that was stopped goes on where it was.

    ``bar(label, total)`` gives what is told of progress; ``tell`` gets a line for each round, ``warn`` what is likely
    not as it was meant. Raises MpuError if ``folder`` holds something else, UsageError for numbers that make no
    experiment.
    """
    if experiment.mode not in MODES:
        raise UsageError(f"--mode {experiment.mode}: is one of {', '.join(MODES)}")
    if experiment.all_rounds < 1:
        raise UsageError(f"--rounds {experiment.rounds}: must be at least 1")
    if not math.isfinite(experiment.server_lr):
        raise UsageError(f"--server-lr {experiment.server_lr}: must be a finite number")
    if experiment.seed is not None and not 0 <= experiment.seed < 2**64:
        raise UsageError(f"--secret-seed {experiment.seed}: must be 0 or more, and below 2⁶⁴")
    check_options(experiment.options)
    facts = _facts(experiment, forget, retain)
    _begin(folder, facts)
    with _alone(folder):
        log = _Log(folder / "log.jsonl")
        server, client = folder / "server", folder / "client"
        for place in ("round_*/.*.partial", "round_*/deltas/.*.partial", "round_*/outbox", "references/.*.partial"):
            for unfinished in folder.glob(f"*/{place}"):
                shutil.rmtree(unfinished)  # of a run that was killed
        if not (server / "identity.txt").exists():
            make_identity(server / "identity.txt")
        made = [number for number in range(1, experiment.all_rounds + 1) if _model(server, number).exists()]
        model = str(_model(server, made[-1])) if made else experiment.base
        for number in range(made[-1] if made else 1, experiment.all_rounds + 1):
            if not _model(server, number).exists():
                _round(experiment, number, model, forget, retain, server, client, log, bar, tell, warn)
            model = str(_model(server, number))
            if not experiment.keep:
                if number > 1:
                    shutil.rmtree(_model(server, number - 1), ignore_errors=True)
                shutil.rmtree(_home(server, number) / "deltas", ignore_errors=True)
                shutil.rmtree(_home(client, number), ignore_errors=True)
        (client / "client.key").unlink(missing_ok=True)
        if not experiment.keep:
            shutil.rmtree(_references(client), ignore_errors=True)
    return Outcome(Path(model), log.lines)


def _home(party: Path, number: int) -> Path:
    """A party's folder of a round."""
    return party / f"round_{number}"


def _references(client: Path) -> Path:
    """Where the client keeps what the model before unlearning said of its records."""
    return client / "references"


def _model(server: Path, number: int) -> Path:
    return _home(server, number) / "model"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep a second run out of ``folder``; MpuError if this is the second one."""
    with (folder / "run.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MpuError(f"{folder}: another mpu is at work in it; wait for it, or choose another --out") from error
        yield


def _round(
    experiment: Experiment,
    number: int,
    base: str,
    forget: Sequence[Record],
    retain: Sequence[Record],
    server: Path,
    client: Path,
    log: _Log,
    bar: Callable[[str, float], Callable[..., None]],
    tell: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    home, away = _home(server, number), _home(client, number)
    copies = experiment.published[0].copies
    label = f"round {number} of {experiment.all_rounds}"
    for k in range(1, copies + 1):
        delta = home / "deltas" / f"copy_{k}.safetensors"
        copy = away / f"copy_{k}"
        if not delta.exists():
            # A copy is made when its turn comes, so that there is only one on the disk.
            if not copy.exists():
                advance = bar(f"{label}: publish copy {k}", open_model(base).checkpoint.nbytes)
                _publish(experiment, number, k, base, home, away, log, advance)
            training = bar(f"{label}: unlearn on copy {k}", 1.0)
            _unlearn(experiment, number, k, copy, away, forget, retain, log, training, warn)
            delta.parent.mkdir(parents=True, exist_ok=True)
            # What goes back: the delta, and nothing else.
            os.replace(away / "deltas" / delta.name, delta)
        if not experiment.keep and experiment.mode != "noised":
            shutil.rmtree(copy, ignore_errors=True)
    keys = unseal(home / "keys.bin", read_identities(server / "identity.txt"))
    source = base
    if experiment.mode == "noised":
        # The client's result is the next model: what was published, noise and all, plus the change.
        source = str(away / "copy_1")
        keys = replace(keys, base=_identity(open_model(source)))
    started = time.monotonic()
    model = open_model(source)
    deltas = open_deltas([home / "deltas"], keys)
    result = aggregate(
        model, deltas, keys, server_lr=experiment.server_lr, dtype=experiment.dtype, out=home / "model",
        force=False, progress=bar(f"{label}: aggregate", model.checkpoint.nbytes),
    )  # fmt: skip
    estimate = None if math.isnan(result.error.relative) else result.error.relative
    log.add(
        "aggregate", round=number, norms=result.norms, cosines=result.cosines, smallest_pairwise_cosine=result.pairwise,
        norm=result.norm, lost_to_rounding=result.rounding, error_estimate=estimate,
        seconds=round(time.monotonic() - started, 3),
        bytes=open_model(str(home / "model")).checkpoint.nbytes,
    )  # fmt: skip
    about = "" if estimate is None else f", estimated error {estimate:.1%}"
    tell(f"{label}: ‖Δ‖ {result.norm:.3g}, smallest cosine between copies {result.pairwise:.3f}{about}")
    if result.error.warning:
        warn(f"{label}: {result.error.warning}")
    if result.rounding > LOST:
        warn(f"{label}: storage rounds away {result.rounding:.0%} of the update; dtype float32 keeps it")


def _publish(
    experiment: Experiment, number: int, k: int, base: str, home: Path, away: Path, log: _Log,
    advance: Callable[..., None],
) -> None:  # fmt: skip
    identities = read_identities(home.parent / "identity.txt")
    noise, kappa, symmetries = experiment.published
    seed = new_seed() if experiment.seed is None else seed_from_number(experiment.seed)
    name = None
    if (home / "keys.bin").exists():  # the round's other copies are of the same publication
        keys = unseal(home / "keys.bin", identities)
        seed, name = bytes.fromhex(keys.seed), keys.run
    elif (first := _home(home.parent, 1) / "keys.bin").exists():
        name = unseal(first, identities).run  # one run is a whole request, of however many rounds
    model = open_model(base)
    started = time.monotonic()
    outbox = home / "outbox"
    publication = publish(
        model,
        open_model(experiment.reference) if experiment.reference else None,
        noise=noise,
        kappa=kappa,
        symmetries=symmetries,
        dtype=experiment.dtype,
        seed=seed,
        seed_is_secret=experiment.seed is None,
        run=name,
        round_=number,
        out=outbox,
        keys_path=home / "keys.bin",
        seal=lambda keys: seal(keys, [known.to_public() for known in identities]),
        force=True,
        progress=advance,
        only=[k],
        shared_kappa=experiment.shared_noise if experiment.mode == "mpu" else 0.0,
    )
    [made] = publication.copies
    away.mkdir(parents=True, exist_ok=True)
    os.replace(made, away / made.name)  # all that goes from the server to the client
    outbox.rmdir()
    log.add(
        "publish", round=number, copy=k, seconds=round(time.monotonic() - started, 3),
        bytes=open_model(str(away / made.name)).checkpoint.nbytes, **_survival(publication),
    )  # fmt: skip


def _survival(publication: Publication) -> dict[str, object]:
    """What storage leaves of the noise: RMS of σ over all weights, asked for and survived; share of weights unmoved."""
    blocks = [block for block in publication.blocks if block.copies]
    weights = sum(block.weights for block in blocks)

    def rms(value: Callable[[object], float]) -> float:
        return math.sqrt(math.fsum(value(block.copies[0]) ** 2 * block.weights for block in blocks) / weights)

    return {
        "noise_asked": rms(lambda copy: copy.asked),
        "noise_survived": rms(lambda copy: copy.survived),
        "weights_unchanged": math.fsum(block.copies[0].unchanged * block.weights for block in blocks) / weights,
    }


def _unlearn(
    experiment: Experiment, number: int, k: int, copy: Path, away: Path, forget: Sequence[Record],
    retain: Sequence[Record], log: _Log, advance: Callable[..., None], warn: Callable[[str], None],
) -> None:  # fmt: skip
    target = away / "deltas" / f"copy_{k}.safetensors"
    loop = experiment.options.loop
    # Another order of the records in each round, the same for every copy of one.
    loop = replace(loop, seed=(loop.seed + number - 1) % 2**32, resume=target.with_name(f"{target.name}.resume"))
    options = replace(experiment.options, loop=loop)
    if experiment.loss_reference == "original" and experiment.all_rounds > 1 and refers_back(options):
        options = replace(options, reference_file=_references(away.parent) / f"copy_{k}.safetensors")
    started = time.monotonic()

    def show(losses: Losses, steps: int) -> None:
        advance(1 / steps, f"loss {losses.loss:.3f}, forget {losses.forget:.3f}")

    result = unlearn(
        open_model(str(copy)), forget, retain, options, target=target, force=True, on_step=show, warn=warn,
        secret=lambda: client_secret(away.parent / "client.key"),
    )  # fmt: skip
    steps = {"first": asdict(result.steps[0]), "last": asdict(result.steps[-1])} if result.steps else {}
    log.add(
        "unlearn", round=number, copy=k, steps=len(result.steps), norm=result.norm, **steps,
        seconds=round(time.monotonic() - started, 3), bytes=target.stat().st_size if target.is_file() else None,
    )  # fmt: skip


def _begin(folder: Path, facts: Mapping[str, object]) -> None:
    """Make ``folder``, or find in it the same experiment, stopped."""
    told = folder / "run.json"
    if folder.exists() and any(folder.iterdir()):
        try:
            before = json.loads(told.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise MpuError(f"{folder}: exists already and holds no experiment; choose another --out") from error
        if not (folder / "log.jsonl").exists():  # nothing was done yet: what was wrong may have been put right
            write_json(told, facts)
            return
        kept, now = _deciding(before), _deciding(json.loads(json.dumps(facts)))
        if other := list(_differences(kept, now)):
            raise MpuError(
                f"{folder}: holds another experiment ({', '.join(other)}); choose another --out, or remove it"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / "run.json.new"
    write_json(fresh, facts)
    os.replace(fresh, told)


def _differences(kept: Mapping[str, object], now: Mapping[str, object], place: str = "") -> Iterator[str]:
    """What differs between two runs' facts, such as ``experiment.kappa 0.01 → 0.02``."""
    for name in sorted({*kept, *now}):
        before, after = kept.get(name), now.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{place}{name}.")
        elif before != after:
            told = f" {before} → {after}"
            yield place + name + (told if len(told) <= SHOWN else "")


def _deciding(facts: Mapping[str, object]) -> dict[str, object]:
    """What of a run's facts decides its result; a run may go on under others."""
    told = {name: value for name, value in facts.items() if name not in ("hardware", "versions")}
    return told | {"experiment": {k: v for k, v in dict(told.get("experiment") or {}).items() if k != "keep"}}


def _facts(experiment: Experiment, forget: Sequence[Record], retain: Sequence[Record]) -> dict[str, object]:
    """What it takes to repeat the run."""
    noise, kappa, symmetries = experiment.published
    told = asdict(replace(experiment, rounds=experiment.all_rounds))
    epochs = experiment.options.epochs or ALGORITHMS[experiment.options.algorithm].epochs
    told["options"] = asdict(replace(experiment.options, epochs=epochs))

    def digest(records: Sequence[Record]) -> str:
        rows = [asdict(record) | {"place": ""} for record in records]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()

    return json.loads(
        json.dumps(
            {
                "mpu": __version__,
                "experiment": told,
                "published": {"noise": asdict(noise), "kappa": kappa, "symmetries": symmetries},
                "base": _identity(open_model(experiment.base)).fingerprint,
                "reference": _identity(open_model(experiment.reference)).fingerprint if experiment.reference else None,
                "records": {
                    "forget": {"count": len(forget), "sha256": digest(forget)},
                    "retain": {"count": len(retain), "sha256": digest(retain)},
                },
                "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
                "hardware": {
                    "machine": platform.machine(),
                    "threads": torch.get_num_threads(),
                    "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                },
            },
            default=str,
        )
    )


def _identity(model: Model) -> BaseIdentity:
    with worker_pool() as pool:
        found = fingerprint(model.checkpoint, pool)
    return BaseIdentity(model.address, str(model.config_path.resolve()), found)
