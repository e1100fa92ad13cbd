"""`mpu status`: the commands that it prints, and whose word it takes, where the other party wrote what lies there."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from mpu_cli.commands.status import Account, Round
from mpu_cli.wording import command_line
from tests.helpers.attacks import publish_copy

NAMES = ("--trust-copy", "--algo=os:system", "-", "-f", "copy 1; ls", "$(ls)")


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_one_word_and_no_option(name: str) -> None:
    words = shlex.split(command_line("mpu", "unlearn", Path(name), "--out", "deltas/"))
    assert words == ["mpu", "unlearn", words[2], "--out", "deltas/"]
    assert Path(words[2]) == Path(name)
    assert not words[2].startswith("-")


@pytest.mark.parametrize("name", NAMES)
def test_no_name_becomes_an_option_of_a_next_step(name: str) -> None:
    """Whatever has the name: a copy, the folder of the deltas, the model, the keys, the receipt."""
    path = Path(name)
    rounds = [
        [Round("r", 1, 1, made={1: path})],
        [Round("r", 1, 1, made={1: path}, deltas={1: path / "d.safetensors"})],
        [Round("r", 1, 1, model=path)],
        [Round("r", 1, 1, made={1: path}, verdicts={name: "pass"})],
        [Round("r", 1, 1, made={1: path}), Round("r", 2, 1, made={1: path / "copy_1"})],
    ]
    for of_run in rounds:
        [(_, step)] = Account(Path("."), of_run, [f"{name}.bin"], {}).next_steps()
        options = {word for word in shlex.split(step) if word.startswith("-")}
        assert options <= {"--out", "--keys", "--before", "--forget", "--retain"}, step


def test_the_printed_command_trains_the_copies_that_have_odd_names(mpu: Callable, root: Path) -> None:
    publish_copy(mpu, root)
    (root / "copy_2").rename(root / "--trust-copy")
    (root / "keys.bin").unlink()
    [step] = mpu("status", root, "--json").json["next"]
    command = shlex.split(mpu("status", cwd=root).out.splitlines()[-1].split(": ", 1)[1])
    assert step["turn"] == "client"
    planned = mpu(*command[1:], "--epochs", 1, "--dry-run", "--json", cwd=root).json
    assert len(planned["writes"]) == 2
