"""The configuration of a run over Flower, as ``flwr run --run-config`` gives it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from mpu_cli.errors import MpuError

OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Settings:
    """The run's configuration (``flwr run --run-config``).

    ``base``: the model; ``state``: the folder for everything that is kept; ``publish`` and ``aggregate``: more
    arguments of those commands; ``poll``: seconds between questions, ``patience`` until one is sent again, ``limit``
    until an owner is given up; ``leave_out``: then go on without that owner, as long as ``quorum`` are left.
    """

    base: str
    state: Path
    owners: tuple[str, ...]
    rounds: int
    publish: list[str]
    aggregate: list[str]
    poll: float
    patience: float
    limit: float
    leave_out: bool
    quorum: int


def settings_of(config: dict[str, str | int | float | bool]) -> Settings:
    """Raises MpuError for what is missing."""
    owners = tuple(name.strip() for name in str(config["owners"]).split(",") if name.strip())
    if len(owners) > 1 and any(option.split("=")[0] == "--seed" for option in shlex.split(str(config["publish"]))):
        raise MpuError("publish: --seed would give all owners the same noise", "leave it out")
    for name in ("base", "state", "owners"):
        if not config[name]:
            raise MpuError(f"{name}: not set", f"give it with --run-config '{name}=\"…\"'")
    if len(set(owners)) < len(owners) or not all(OWNER.fullmatch(owner) and owner != "model" for owner in owners):
        raise MpuError(f"owners: {config['owners']!r} are not different names", "use the names of supernode register")
    if config["on_missing"] not in ("end", "leave-out"):
        raise MpuError(f"on_missing: {config['on_missing']!r} is neither 'end' nor 'leave-out'")
    return Settings(
        base=str(config["base"]), state=Path(str(config["state"])).resolve(), owners=owners,
        rounds=int(config["rounds"]), publish=shlex.split(str(config["publish"])),
        aggregate=shlex.split(str(config["aggregate"])), poll=float(config["poll"]),
        patience=float(config["patience"]), limit=float(config["limit"]),
        leave_out=config["on_missing"] == "leave-out", quorum=max(1, int(config["quorum"])),
    )  # fmt: skip
