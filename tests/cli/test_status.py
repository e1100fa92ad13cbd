"""`mpu status`: the commands that it prints, and whose word it takes, where the other party wrote what lies there."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from mpu_cli.commands.status import Account, Round
from mpu_cli.measuring.receipt import ServerCheck, as_text, public_key_of, read_receipt, with_signature
from mpu_cli.protocol.publication import server_secret
from mpu_cli.training.delta import own_client_secret
from mpu_cli.wording import command_line
from tests.helpers.attacks import edit, publish_copy

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


STRANGER = bytes(range(32))  # a secret
CHECK = ("--forget", "forget.jsonl", "--retain", "retain.jsonl")


@pytest.fixture
def passing(mpu: Callable, root: Path) -> Path:
    """A receipt that says that the records are forgotten; its signatures are wrong."""
    publish_copy(mpu, root)
    mpu("publish", "base", "--copies", 2, "--out", "before", "--keys", "before/keys.bin", cwd=root)
    mpu("check", "copy_1", *CHECK, "--before", "before/copy_1", "--receipt", "receipt.json", check=False, cwd=root)
    path = root / "receipt.json"
    edit(path, left=0, left_high=0, kept=100, verdict="pass: forgotten, the rest is kept",
         sets=["forget", "unseen", "retain"], stands_out=False)  # fmt: skip
    return path


@pytest.mark.parametrize(
    ("client", "server", "turn"),
    [
        ("here", None, "server: mpu receipt"),
        ("here", "here", "nobody: the records are forgotten, and the rest is kept; you signed it"),
        ("here", "elsewhere", "nobody: the records are forgotten, and the rest is kept; the server that signed it has"),
        ("elsewhere", "here", "nobody: the records are forgotten, and the rest is kept; you signed it, and a client"),
        ("elsewhere", None, "client: mpu unlearn"),
        ("elsewhere", "elsewhere", "client: mpu unlearn"),
    ],
)
def test_a_verdict_is_one_that_was_signed_here(
    mpu: Callable, root: Path, passing: Path, client: str, server: str | None, turn: str
) -> None:
    """Anybody can sign as somebody: without a signature of this machine, a receipt decides nothing."""
    (root / "keys.bin").unlink()
    (root / "before/keys.bin").unlink()
    secrets = {"client": own_client_secret(), "server": server_secret()}
    receipt = read_receipt(passing)
    for party, place in (("client", client), ("server", server)):
        if party == "server" and place:
            receipt = msgspec.structs.replace(receipt, checked=ServerCheck(date=receipt.date, model=None))
        if place:
            receipt = with_signature(receipt, party, secrets[party] if place == "here" else STRANGER)
    passing.write_text(as_text(receipt))
    lines = mpu("status", cwd=root).out.splitlines()
    next_steps = [line.partition("\t")[2] for line in lines if line.startswith("next")]
    assert any(step.startswith(turn) for step in next_steps), next_steps
    assert any(step.startswith("nobody") for step in next_steps) == turn.startswith("nobody")
    if "elsewhere" in (client, server):
        key = public_key_of("client" if client == "elsewhere" else "server", STRANGER)
        assert key in "\n".join(lines)


def test_a_server_is_asked_whose_receipt_it_countersigns(mpu: Callable, root: Path, passing: Path) -> None:
    passing.write_text(as_text(with_signature(read_receipt(passing), "client", STRANGER)))
    steps = [each["step"] for each in mpu("status", "--json", cwd=root).json["next"]]
    [step] = [step for step in steps if "mpu receipt" in step]
    assert "--client-key" in step
    assert public_key_of("client", STRANGER) in mpu("status", cwd=root).out
