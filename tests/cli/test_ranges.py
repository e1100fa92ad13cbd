"""Each number that an option accepts, at the ends of its range, through the command that has it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpu_cli.cli.main import COMMANDS
from mpu_cli.options.declare import LARGEST, SMALLEST, Declaration, declared_options
from tests.helpers.models import DemoModel, write_records

# A run of each command that has such options.
LINES = {
    "demo": "demo trial --out demo",
    "publish": "publish model --copies 2 --out published --keys published.bin",
    "rehearse": "rehearse copy_1 --keys keys.bin --forget forget.jsonl --retain retain.jsonl --unlearn max_steps=2",
    "aggregate": "aggregate deltas --keys keys.bin --probe retain.jsonl --out aggregated",
    "unlearn": "unlearn copy_1 --max-steps 2 --out trained",
    "surrogate": "surrogate copy_1 --prompts prompts.txt --term-column question --out surrogate.jsonl",
    # Some of the records is left, and enough of the others kept for a longer step to be considered.
    "check": "check new/copy_1 --before copy_1 --forget forget.jsonl --retain retain.jsonl --unseen unseen.jsonl "
    "--goal min_kept=0.5",
    "watch": "watch spool --once --work work",
    "audit-delta": "audit-delta copy_1 deltas/copy_1.safetensors",
    "ask": "ask copy_1 Who?",
    "eval": "eval model --forget forget.jsonl --retain retain.jsonl --attacks sample:1,relearn:1",
    "tune": "tune copy_1 --algo npo --trials 1 --most-epochs 1",
    "plan": "plan model --forget forget.jsonl",
    "run": "run model --copies 2 --unlearn max_steps=1 --rounds 1 --out experiment",
    "sweep": "sweep sweep.toml --out swept",
    "finetune": "finetune model --data forget.jsonl --epochs 1 --out finetuned",
}  # fmt: skip
TRAININGS = ("rehearse", "unlearn", "tune", "run", "watch")
ONE_EPOCH = "--epochs 1 --algo"
# What else an option needs to do something in a training, which goes before it.
NEEDED = {
    "beta": f"{ONE_EPOCH} npo",
    "beta1": f"{ONE_EPOCH} satimp",
    "beta2": f"{ONE_EPOCH} satimp",
    "layer": f"{ONE_EPOCH} rmu",
    "coefficient": f"{ONE_EPOCH} rmu --constants layer=0",
    "retain_limit": f"{ONE_EPOCH} pdu",
    "dual_rate": f"{ONE_EPOCH} pdu",
    "lora_alpha": "--lora rank=2",
    "checkpoint_steps": "--resume",
    **dict.fromkeys(("dp_delta", "dp_max_grad_norm", "dp_budget"), f"{ONE_EPOCH} gradascent --dp epsilon=3"),
    "dp_epsilon": f"{ONE_EPOCH} gradascent",
}
NEEDED_TO_PUBLISH = {
    "epsilon": "--dp sensitivity=1,delta=1e-5",
    "dp_delta": "--dp epsilon=1,sensitivity=1",
    "sensitivity": "--dp epsilon=1,delta=1e-5",
    "budget_rounds": "--dp epsilon=1,sensitivity=1,delta=1e-5",
}
# How long a command works, or how much it holds: there is an end where nobody waits for it.
WORK = {
    "epochs", "rounds", "trials", "most_epochs", "max_steps", "prompts_per_term", "poll",
    "lora_rank", "jobs", "length", "max_new_tokens",
}  # fmt: skip


def ends_of(option: Declaration) -> Iterator[float]:
    """The least number that an option accepts, and the largest."""
    assert option.range is not None
    step: Callable[[float, float], float] = math.nextafter
    if option.kind is int:
        step = lambda bound, towards: bound + (1 if towards > bound else -1)  # noqa: E731
    least, above, below = option.range.least, option.range.above, option.range.below
    if least is not None:
        yield least
    else:
        yield -LARGEST if above is None else step(above, math.inf) if above or option.kind is int else SMALLEST
    if below is not None:
        yield step(below, -math.inf) if below or option.kind is int else -SMALLEST
    elif option.name not in WORK:
        yield 10**9 if option.kind is int else LARGEST


def cases() -> Iterator[Any]:
    """Each option once, which is slow, and again with every further command that has it, which is exhaustive."""
    seen: set[Declaration] = set()
    for command, line in LINES.items():
        for option in declared_options(COMMANDS[command]).values():
            # What a command takes for another one, as a part of an option, is checked there.
            if option.range is None or (option.fold and option.fold.name in COMMANDS):
                continue
            needed = NEEDED_TO_PUBLISH if command == "publish" else NEEDED if command in TRAININGS else {}
            tier = pytest.mark.exhaustive if option in seen else pytest.mark.slow
            seen.add(option)
            for value in ends_of(option):
                number = int(value) if option.kind is int else value
                arguments = [*line.split(), *needed.get(option.name, "").split(), *f"{option.flag}={number}".split()]
                until = "--unlearn" if command in ("rehearse", "run") else "--max-steps"
                if "--epochs" in " ".join(arguments) and until in arguments:
                    place = arguments.index(until)
                    del arguments[place : place + 2]
                yield pytest.param(arguments, marks=tier, id=f"{command} {option.flag}={number:g}")


@pytest.fixture(scope="module")
def workplace(demo: DemoModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, copies, deltas and copies of the next round, with the configuration that they were made with."""
    from mpu_cli.commands.aggregate import Aggregate
    from mpu_cli.commands.publish import Publish
    from mpu_cli.commands.unlearn import Unlearn

    folder = tmp_path_factory.mktemp("ranges")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.chdir(folder)
        shutil.copytree(demo.model, "model")
        shutil.copy(demo.forget, "forget.jsonl")
        shutil.copy(demo.retain, "retain.jsonl")
        write_records(folder / "unseen.jsonl", 4, 3)
        (folder / "prompts.txt").write_text("Who is {term}?\n")
        (folder / "sweep.toml").write_text('base = "model"\nalgo = "npo"\nepochs = 1\nrounds = 1\n')
        Publish.call("model", copies=2, kappa=0.001)
        Unlearn.call(["copy_1", "copy_2"], algo="graddiff", epochs=2, lr=1e-3)
        Aggregate.call("deltas")
        Publish.call("unlearned", copies=2, kappa=0.001, out="new", keys="new.bin")
    return folder


@pytest.mark.parametrize("arguments", list(cases()))
def test_a_number_at_the_end_of_its_range(
    mpu: Callable, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """Accepted numbers work or are refused in a sentence: they are never a fault of the program's."""
    folder = shutil.copytree(workplace, tmp_path / "workplace")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    outcome = mpu(*arguments, check=False, cwd=folder)
    assert "unexpected" not in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.status == 0 or "mpu: error: " in outcome.err or arguments[0] in ("check", "run")
    assert outcome.status in (0, 1, 2)
