"""The options of an experiment by name, as the command line and the files of a sweep give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from mpu_cli.architectures.family import SETS
from mpu_cli.checkpoint.dtypes import OPTION
from mpu_cli.client.data import TEMPLATES
from mpu_cli.client.dates import DEFAULT_DATE
from mpu_cli.client.losses import ALGORITHMS, RETAIN, Settings
from mpu_cli.client.optimizers import OPTIMIZERS
from mpu_cli.client.records import Record, read_records
from mpu_cli.client.training import Loop
from mpu_cli.client.unlearn import PRECISIONS, Options, check_options
from mpu_cli.errors import UsageError
from mpu_cli.experiment.rounds import LOSS_REFERENCES, MODES, Experiment
from mpu_cli.server.noise import SCHEMES, choose_scheme

CONSTANTS = tuple(field.name for field in fields(Settings))
# name → (type, default); None stands for the algorithm's own, or for not set
OPTIONS: dict[str, tuple[type, object]] = {
    "base": (str, None), "reference": (str, None), "algo": (str, "npo"), "forget": (str, "forget.jsonl"),
    "retain": (str, "retain.jsonl"), "data_dir": (str, None), "mode": (str, "mpu"), "copies": (int, None),
    "kappa": (float, 0.01), "shared_noise": (float, 0.0), "noise": (str, None), "alphas": (str, None),
    "nodes": (str, None),
    "symmetries": (str, "signed"),
    "rounds": (int, None),
    "epochs": (int, None), "server_lr": (float, 1.0), "dtype": (str, None), "precision": (str, "float32"),
    "optim": (str, "adamw"), "lr": (float, 1e-5), "batch_size": (int, 32), "micro_batch_size": (int, None),
    "weight_decay": (float, 0.01), "max_grad_norm": (float, 1.0), "warmup_steps": (int, 0),
    "retain_loss": (str, None), "template": (str, "chat"), "system_prompt": (str, "You are a helpful assistant."),
    "date": (str, DEFAULT_DATE), "loss_reference": (str, "original"),
    "device": (str, "auto"), "deterministic": (bool, True), "seed": (int, 0),
    "secret_seed": (int, None), "keep": (bool, False),
    **dict.fromkeys(CONSTANTS, (float, None)), "layer": (int, None),
}  # fmt: skip
CHOICES = {
    "algo": tuple(ALGORITHMS), "mode": MODES, "symmetries": SETS, "noise": SCHEMES, "dtype": tuple(OPTION),
    "precision": tuple(PRECISIONS), "optim": OPTIMIZERS, "retain_loss": tuple(RETAIN), "template": TEMPLATES,
    "device": ("auto", "cpu", "cuda"), "loss_reference": LOSS_REFERENCES,
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """An experiment and the records that it is about."""

    experiment: Experiment
    forget: list[Record]
    retain: list[Record]


def check(values: Mapping[str, object], where: str = "") -> dict[str, object]:
    """``values`` with the defaults of those that are missing or None; UsageError for a name or value that is none."""
    found = {name: default for name, (_, default) in OPTIONS.items()}
    for name, value in values.items():
        if name not in OPTIONS:
            raise UsageError(f"{where}{name}: is no option of an experiment (there are: {', '.join(OPTIONS)})")
        if value is None:
            continue
        kind = OPTIONS[name][0]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UsageError(f"{where}{name} = {value!r}: must be a {kind.__name__}")
        if name in CHOICES and value not in CHOICES[name]:
            raise UsageError(f"{where}{name} = {value!r}: is one of {', '.join(CHOICES[name])}")
        found[name] = value
    if found["base"] is None:
        raise UsageError(f"{where}base: is missing; name the model that the server owns")
    return found


def plan(values: Mapping[str, object], where: str = "") -> Plan:
    """The experiment that options describe, its records read; UsageError or MpuError where they make none."""
    given = check(values, where)
    data_dir = Path(given["data_dir"]) if given["data_dir"] else None
    constants = {name: given[name] for name in CONSTANTS if given[name] is not None}
    forget = read_records(given["forget"], data_dir)
    needs = constants.get("alpha", ALGORITHMS[given["algo"]].settings.alpha)
    retain = read_records(given["retain"], data_dir) if needs else []
    noise = choose_scheme(given["noise"], given["alphas"], given["nodes"], given["copies"])
    loop = Loop(
        optimizer=given["optim"], seed=given["seed"],
        **{name: given[name] for name in (
            "lr", "weight_decay", "max_grad_norm", "warmup_steps", "batch_size", "micro_batch_size", "deterministic"
        )},
    )  # fmt: skip
    options = Options(
        algorithm=given["algo"], epochs=given["epochs"], constants=constants, retain_loss=given["retain_loss"],
        precision=given["precision"], template=given["template"], system_prompt=given["system_prompt"],
        date=given["date"], device=given["device"], loop=loop,
    )  # fmt: skip
    check_options(options)
    experiment = Experiment(
        base=given["base"], options=options, noise=noise, seed=given["secret_seed"],
        dtype=OPTION[given["dtype"]] if given["dtype"] else None,
        **{name: given[name] for name in (
            "reference", "mode", "kappa", "shared_noise", "symmetries", "rounds", "server_lr", "keep",
            "loss_reference",
        )},
    )  # fmt: skip
    return Plan(experiment, forget, retain)
