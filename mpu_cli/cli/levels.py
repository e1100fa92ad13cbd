"""Help in two levels: the options that matter, and all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What `--help` shows of commands with many options; `--help-all` shows the rest.
ESSENTIAL = {
    "publish": "--kappa --pretrained --copies --permanent-noise --noise --symmetries --out --keys --recipient --probe",
    "unlearn": "--algo --forget --retain --lr --epochs --batch-size --optim --lora-rank --out --show --resume --device",
    "watch": "--algo --forget --retain --lr --epochs --batch-size --optim --lora-rank --work --device",
    "run": "--algo --forget --retain --mode --rounds --pretrained --kappa --copies --lr --epochs --batch-size --out",
    "tune": "--algo --forget --retain --trials --max-retain-rise --most-epochs --least-lr --batch-size --device",
    "eval": "--benchmark --forget --retain --holdout --forget-split --retain-log --attacks --show --plot --out",
    "finetune": "--data --epochs --lr --batch-size --optim --out --device",
}
ALWAYS = ("--dry-run", "--force", "--json", "--help")
HELP_ALL = "--help-all"


def in_two_levels(commands: Mapping[str, Any], arguments: list[str]) -> list[str]:
    """Hide what ESSENTIAL does not name, unless ``arguments`` ask for all of it; they, with the option that typer
    knows."""
    everything = HELP_ALL in arguments
    for name, flags in ESSENTIAL.items() if not everything else ():
        options = [each for each in commands[name].params if each.param_type_name == "option"]
        hidden = [each for each in options if not {*flags.split(), *ALWAYS} & set(each.opts)]
        for each in hidden:
            each.hidden = True
        commands[name].epilog = f"And {len(hidden)} more options: mpu {name} {HELP_ALL}"
    return ["--help" if each == HELP_ALL else each for each in arguments]
