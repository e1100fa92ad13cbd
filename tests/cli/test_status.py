"""`mpu status`: the commands that it prints, and whose word it takes, where the other party wrote what lies there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mpu_cli.commands.status import Account, Round
from mpu_cli.files.manifest import read_copy_manifest
from mpu_cli.files.sealing import make_identity
from mpu_cli.measuring.receipt import ServerCheck, as_text, public_key_of, read_receipt, with_signature
from mpu_cli.protocol.publication import server_secret
from mpu_cli.training.ledger import own_client_secret
from mpu_cli.wording import command_line
from tests.helpers.attacks import CHECK, check_receipt, edit, publish_copy, unlearn_copy
from tests.helpers.models import random_model, save
from tests.helpers.publication import write_delta

PLACEHOLDERS = {"YOUR_RECORDS": "forget.jsonl", "RECORDS_TO_KEEP": "retain.jsonl"}


def with_records(step: str) -> list[str]:
    """The words of a command that `status` printed, with files in place of its placeholders."""
    return [PLACEHOLDERS.get(word, word) for word in shlex.split(step)]


def test_the_keys_are_those_of_the_round(mpu: Callable, tmp_path: Path) -> None:
    """Beside those of another owner, and of an earlier publication of the same round."""
    save(random_model("llama"), tmp_path / "base")
    options = ("publish", "base", "--copies", 2, "--kappa", 0.1)
    mpu(*options, cwd=tmp_path)
    mpu(*options, "--run", "clinic", "--out", "clinic", "--keys", "clinic.bin", cwd=tmp_path)
    (tmp_path / "deltas").mkdir()
    for copy in ("copy_1", "copy_2"):
        write_delta(tmp_path / "clinic" / copy, tmp_path / f"deltas/clinic/{copy}.safetensors")
    steps = mpu("status", "--json", cwd=tmp_path).json["next"]
    [aggregate] = [step["step"] for step in steps if step["turn"] == "server"]
    assert shlex.split(aggregate)[:5] == ["mpu", "aggregate", "deltas/clinic", "--keys", "clinic.bin"]
    mpu(*shlex.split(aggregate)[1:], "--trust-deltas", cwd=tmp_path)


def test_a_client_with_sealed_copies_unlearns(mpu: Callable, tmp_path: Path) -> None:
    save(random_model("llama"), tmp_path / "base")
    recipient = make_identity(tmp_path / "identity")
    mpu("publish", "base", "--copies", 2, "--kappa", 0.1, "--copy-recipients", recipient, cwd=tmp_path)
    (tmp_path / "client").mkdir()
    (tmp_path / "copy_1.age").rename(tmp_path / "client/copy_1.age")
    [step] = mpu("status", "client", "--json", cwd=tmp_path).json["next"]
    assert (step["turn"], shlex.split(step["step"])[:3]) == ("client", ["mpu", "unlearn", "client/copy_1.age"])


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
        assert options <= {"--out", "--keys", "--before", "--forget", "--retain", "--public", "--base"}, step


def test_the_printed_command_trains_the_copies_that_have_odd_names(mpu: Callable, root: Path) -> None:
    publish_copy(mpu, root)
    (root / "copy_2").rename(root / "--trust-copy")
    (root / "keys.bin").unlink()
    [step] = mpu("status", root, "--json").json["next"]
    command = with_records(mpu("status", cwd=root).out.splitlines()[-1].split(": ", 1)[1])
    assert step["turn"] == "client"
    planned = mpu(*command[1:], "--epochs", 1, "--dry-run", "--json", cwd=root).json
    assert len(planned["writes"]) == 2


STRANGER = bytes(range(32))  # a secret


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
        ("here", None, "client: send receipt.json to the model's owner"),
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


def test_the_latest_verdict_counts(mpu: Callable, root: Path, passing: Path) -> None:
    """After a further request on the same copies, a receipt of the model before says nothing of the one now."""
    for keys in ("keys.bin", "before/keys.bin"):
        (root / keys).unlink()
    signed = with_signature(read_receipt(passing), "client", own_client_secret())
    later = msgspec.structs.replace(signed, left=60, left_high=70, verdict="fail: not forgotten, the rest is kept")
    later = with_signature(later, "client", own_client_secret())
    for first, second, turn in ((signed, later, "a.json says fail"), (later, signed, "send a.json")):
        passing.write_text(as_text(first))
        (root / "a.json").unlink(missing_ok=True)
        (root / "a.json").write_text(as_text(second))  # before the other one by its name, and after it by its time
        assert f"next\tclient: {turn}" in mpu("status", cwd=root).out


def test_a_server_is_asked_whose_receipt_it_countersigns(mpu: Callable, root: Path, passing: Path) -> None:
    passing.write_text(as_text(with_signature(read_receipt(passing), "client", STRANGER)))
    steps = [each["step"] for each in mpu("status", "--json", cwd=root).json["next"]]
    [step] = [step for step in steps if "mpu receipt" in step]
    assert "--client-key" in step
    assert public_key_of("client", STRANGER) in mpu("status", cwd=root).out


class TestStatus:
    def test_a_forged_receipt_ends_nothing(self, mpu: Callable, root: Path) -> None:
        path = check_receipt(mpu, root)
        receipt = json.loads(path.read_text())
        assert "nobody" not in mpu("status", root).out
        key = {"public_key": "1" * 64, "signature": "2" * 128}
        passes = {"left": 0, "left_high": 0, "kept": 100, "verdict": "pass: forgotten, the rest is kept",
                  "sets": ["forget", "unseen", "retain"], "stands_out": False}  # fmt: skip
        checked = {"date": receipt["date"], "model": None}
        path.write_text(json.dumps(receipt | passes | {"client": key, "server": key, "checked": checked}))
        mpu("receipt", path, fails="")
        status = mpu("status", root).out
        assert "nobody" not in status
        assert "receipts that prove nothing\treceipt.json" in status
        assert "nobody" in mpu("inspect", path, "--json").json["signed by"]

    def test_names_of_files_are_no_lines(self, mpu: Callable, root: Path) -> None:
        publish_copy(mpu, root)
        (root / "x\nnext\tserver: \x1b[2J.safetensors").write_bytes(b"x")
        out = mpu("status", root).out
        assert sum(line.startswith("next\t") for line in out.splitlines()) == 1
        assert "\x1b" not in out

    def test_a_million_copies_are_not_listed(self, mpu: Callable, root: Path) -> None:
        publish_copy(mpu, root)
        unlearn_copy(mpu, root, root / "copy_1", "d")
        with safe_open(root / "d.safetensors", "pt") as file:
            facts = json.loads(file.metadata()["mpu"])
        for number in range(20):
            metadata = {"mpu": json.dumps(facts | {"copies": 10**6, "run": f"run{number}"})}
            save_file({"a": torch.ones(1)}, root / f"d{number}.safetensors", metadata)
        assert len(mpu("status", root).out) < 10_000
        assert len(mpu("inspect", root).out) < 10_000


def test_a_folder_says_what_is_next(mpu: Callable, root: Path) -> None:
    """`mpu status` names copies, deltas and keys of each round, whose turn it is, and the command that comes next;
    `mpu inspect .` says the same."""
    mpu("publish", "base", "--copies", 2, "--kappa", 0.01, cwd=root)
    training = ("--algo", "gradascent", "--epochs", 1, "--forget", "forget.jsonl")
    steps = {
        "mpu unlearn copy_1 copy_2 --forget YOUR_RECORDS --retain RECORDS_TO_KEEP --out deltas/": ("copy_1",),
        "mpu unlearn copy_2 --forget YOUR_RECORDS --retain RECORDS_TO_KEEP --out deltas/": ("copy_2",),
    }
    for expected, copies in steps.items():
        said = mpu("status", cwd=root).out
        assert said.splitlines()[-1] == f"next\tclient: {expected}"
        assert "keys.bin" in said
        printed = mpu("unlearn", *copies, *training, cwd=root).err
        assert f"send deltas/{copies[0]}.safetensors to the model's owner" in printed
    assert mpu("status", cwd=root).out.endswith("next\tserver: mpu aggregate deltas --keys keys.bin\n")
    assert [each["turn"] for each in mpu("status", "--json", cwd=root).json["next"]] == ["server"]
    assert "server: mpu aggregate deltas --keys keys.bin" in mpu("inspect", ".", cwd=root).out
    (root / "keys.bin").rename(root.parent / "elsewhere.bin")
    assert mpu("status", cwd=root).out.endswith("next\tclient: return the deltas to the model's owner\n")
    (root / "copy_9").mkdir()
    (root / "copy_9/config.json").write_text("{")
    assert "copy_9 (" in mpu("inspect", ".", "--json", cwd=root).json["not readable"][0]


def test_a_folder_for_each_client_is_looked_into(mpu: Callable, root: Path) -> None:
    """`publish --out hospital --keys hospital.bin` leaves copies where `status` finds them; models that lie deeper, as
    the demo's do, are not the request's."""
    mpu("publish", "base", "--copies", 2, "--out", "hospital", "--keys", "hospital.bin", cwd=root)
    save(random_model("llama"), root / "demo/models/target")
    account = mpu("status", "--json", cwd=root).json
    assert (account["other"], account["keys"]) == ({"models": ["base"]}, ["hospital.bin"])
    assert account["rounds"][0]["made"] == {"1": "hospital/copy_1", "2": "hospital/copy_2"}
    assert account["next"][0]["step"].startswith("mpu unlearn hospital/copy_1 hospital/copy_2 --forget ")


def test_what_is_next_can_be_pasted(mpu: Callable, root: Path) -> None:
    """From another folder, with spaces in the path: the commands that `status` prints lead to the new model."""
    folder = root / "my round"
    mpu("publish", "base", "--copies", 2, "--kappa", 0.01, "--out", folder, "--keys", folder / "keys.bin", cwd=root)
    missing = {"unlearn": ("--algo", "gradascent", "--epochs", 1), "aggregate": (), "publish": ("--out", folder / "2")}
    for command, options in missing.items():
        [step] = re.findall(r"next\t\w+: (mpu .+)", mpu("status", "my round", cwd=root).out)
        assert shlex.split(step)[1] == command
        mpu(*with_records(step)[1:], *options, cwd=root)
        if command == "aggregate":  # whose model goes where the command is run
            (root / "unlearned").rename(folder / "unlearned")
    [published] = [read_copy_manifest(path) for path in (folder / "2").glob("copy_1")]
    assert (published.round, published.copies) == (2, 2)


def test_a_further_request_is_followed_to_its_check(mpu: Callable, root: Path) -> None:
    """Its deltas count, not those of an earlier one, whatever the names; then its model, and the copy for its check."""

    def next_step() -> str:
        [step] = mpu("status", "--json", cwd=root).json["next"]
        return step["step"]

    lines = (root / "forget.jsonl").read_text().splitlines(keepends=True)
    mpu("publish", "base", "--copies", 1, "--permanent-noise", 0.05, "--kappa", 0, cwd=root)
    for request, records in enumerate((lines[:2], lines[2:]), 1):
        (root / f"{request}.jsonl").write_text("".join(records))
        mpu("unlearn", "copy_1", "--forget", f"{request}.jsonl", "--retain", "retain.jsonl", "--max-steps", 1, cwd=root)
        if request == 2:  # as if it were the tenth, after the ninth
            (root / "deltas/request_2").rename(root / "deltas/request_9")
            shutil.copytree(root / "deltas/request_9", root / "deltas/request_10", copy_function=shutil.copy)
        aggregate = next_step()
        assert shlex.split(aggregate)[:3] == ["mpu", "aggregate", "deltas" if request == 1 else "deltas/request_10"]
        mpu(*shlex.split(aggregate)[1:], cwd=root)
        model = "unlearned" if request == 1 else "unlearned_2"
        publish = next_step()
        assert shlex.split(publish)[:3] == ["mpu", "publish", model]
        mpu(*shlex.split(publish)[1:], cwd=root)
        copy = "round_2/copy_1" if request == 1 else "check_2/copy_1"
        assert next_step() == f"mpu check {copy} --before copy_1"
        if request == 1:
            mpu("check", copy, "--before", "copy_1", "--receipt", "receipt.json", check=False, cwd=root)
            assert next_step().startswith("receipt.json says ")
    assert mpu("status", "--json", cwd=root).json["other"]["receipts of earlier publications"] == ["receipt.json"]


def test_a_further_request_that_has_one_of_two_deltas_is_completed(mpu: Callable, root: Path) -> None:
    """Not by a delta of the request before."""
    mpu("publish", "base", "--copies", 2, "--kappa", 0.001, cwd=root)
    options = ("--retain", "retain.jsonl", "--max-steps", 1)
    rows = (root / "forget.jsonl").read_text().splitlines(keepends=True)
    (root / "first.jsonl").write_text("".join(rows[:2]))
    (root / "forget.jsonl").write_text("".join(rows[2:]))
    mpu("unlearn", "copy_1", "copy_2", "--forget", "first.jsonl", *options, cwd=root)
    mpu("unlearn", "copy_1", "--forget", "forget.jsonl", *options, cwd=root)
    [step] = mpu("status", "--json", cwd=root).json["next"]
    assert shlex.split(step["step"])[:3] == ["mpu", "unlearn", "copy_2"]
    mpu(*with_records(step["step"])[1:], "--max-steps", 1, cwd=root)
    [step] = mpu("status", "--json", cwd=root).json["next"]
    assert step["step"] == "mpu aggregate deltas/request_2 --keys keys.bin"
    mpu(*shlex.split(step["step"])[1:], cwd=root)


def test_a_folder_of_nothing_and_a_copy(mpu: Callable, root: Path) -> None:
    """Where nothing is, the server begins; in a copy, the folder to ask for is named."""
    (root / "fresh").mkdir()
    assert mpu("status", cwd=root / "fresh").out.endswith("next\tserver: mpu publish MODEL --public PUBLIC_MODEL\n")
    copy = publish_copy(mpu, root)
    hint = mpu("status", copy, refused="a copy or a model").err.split("name that folder: ")[1]
    assert mpu(*shlex.split(hint)[1:]).out == mpu("status", root).out


def test_an_interrupted_training_is_resumed(mpu: Callable, root: Path) -> None:
    publish_copy(mpu, root)
    assert "--resume" not in mpu("status", cwd=root).out
    (root / "deltas/copy_2.safetensors.resume").mkdir(parents=True)
    [step] = [each["step"] for each in mpu("status", "--json", cwd=root).json["next"]]
    options = ("--algo", "gradascent", "--epochs", 1)
    command = with_records(step.partition(", with")[0])
    assert "--resume" in command
    mpu(*command[1:], *options, cwd=root)
    assert not (root / "deltas/copy_2.safetensors.resume").exists()


def test_the_countersigned_receipt_names_the_model(mpu: Callable, root: Path, passing: Path) -> None:
    """The command that `status` prints has the model in service, which the receipt's fingerprint is of."""
    passing.write_text(as_text(with_signature(read_receipt(passing), "client", own_client_secret())))
    steps = [each["step"] for each in mpu("status", "--json", cwd=root).json["next"]]
    [step] = [step for step in steps if "mpu receipt" in step]
    assert "--base" in shlex.split(step)


def test_hints_for_wrong_files(mpu: Callable, root: Path) -> None:
    """Names that are nearly right, copies and records in each other's place, and steps of the other party."""
    publish_copy(mpu, root)
    (root / "keys.bin").rename(root / "elsewhere.bin")
    (root / "deltas").mkdir()
    retain = ("--retain", "retain.jsonl")
    for hint, *command in (
        ("did you mean base?", "publish", "bas"),
        ("did you mean copy_1?", "unlearn", "copy1", *retain),
        ("copy_2: a copy of a model, or a model, not records", "unlearn", "copy_1", "--forget", "copy_2", *retain),
        ("holds the records to forget, and no others", "unlearn", "copy_1", "--retain", "forget.jsonl"),
        ("only the model's owner has it", "aggregate", "deltas"),
        ("name the deltas that the client sent", "aggregate", "gone", "--keys", "elsewhere.bin"),
    ):
        mpu(*command, cwd=root, fails=hint)
