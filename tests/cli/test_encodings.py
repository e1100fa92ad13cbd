"""Terminals and files in other encodings than UTF-8, and records from a pipe."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mpu_cli.cli.main import main
from mpu_cli.records.read import read_records


def run_in(encoding: str, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """What ``mpu ARGUMENTS`` prints on a standard output of this encoding."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
    assert not stop.value.code
    stream.seek(0)
    return stream.read()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_cannot_show_everything(root: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """The table is there, its arrows are escapes, and JSON is the same document."""
    monkeypatch.chdir(root)
    command = ["eval", "base", "--forget", "forget.jsonl", "--metrics", "forget_Q_A_Prob", "--force"]
    name = "été 😀.json"
    lines = run_in(encoding, monkeypatch, *command, "--out", name).splitlines()
    assert lines[-2].startswith("forget_Q_A_Prob")
    assert lines[-2].endswith("\\u2193")
    assert lines[-1] == name.encode(encoding, "backslashreplace").decode(encoding)
    documents = [
        json.loads(run_in(each, monkeypatch, *command, "--out", name, "--json")) for each in (encoding, "utf-8")
    ]
    assert documents[0] == documents[1]
    assert documents[0]["result"] == name


@pytest.mark.parametrize("encoding", ["utf-8-sig", pytest.param("utf-16", marks=pytest.mark.slow)])
def test_files_with_a_byte_order_mark(mpu: Callable, root: Path, encoding: str) -> None:
    """Options, identities, public keys, passphrases and answers, as editors on Windows save them."""

    def save_again(name: str) -> None:
        (root / name).write_text((root / name).read_text(), encoding=encoding)

    [public_key] = re.findall("age1[a-z0-9]+", mpu("keygen", "--out", "identity.txt", cwd=root).err)
    (root / "key.txt").write_text(public_key)
    (root / "word.txt").write_text("geheim, süß\n")
    (root / "mpu.toml").write_text("[publish]\ncopies = 2\nkappa = 0.5\n")
    for name in ("identity.txt", "key.txt", "mpu.toml"):
        save_again(name)
    published = mpu("--config", "mpu.toml", "publish", "base", "--recipient", "key.txt", cwd=root)
    assert "κ = 0.5" in published.err
    verify = ("--no-logits", "--keys", "keys.bin", "--trust-keys")
    mpu("verify", "copy_1", *verify, "--identity", "identity.txt", cwd=root)
    mpu("publish", "base", "--copies", 2, "--passphrase-file", "word.txt", "--force", cwd=root)
    save_again("word.txt")
    mpu("verify", "copy_1", *verify, "--passphrase-file", "word.txt", cwd=root)


def test_records_from_a_pipe(mpu: Callable, root: Path) -> None:
    """As ``--forget <(age -d records.age)`` gives them; also where a command reads them twice."""
    reading, writing = os.pipe()
    with open(writing, "wb") as pipe:
        pipe.write((root / "forget.jsonl").read_bytes())
    path = f"/dev/fd/{reading}"
    document = mpu("eval", "base", "--forget", path, "--retain", "retain.jsonl", "--json", cwd=root).json
    from_file = mpu(
        "eval", "base", "--forget", "forget.jsonl", "--retain", "retain.jsonl", "--out", "2.json", "--json", cwd=root
    ).json
    assert document["metrics"] == from_file["metrics"]
    assert [record.identity for record in read_records(path)] == [
        record.identity for record in read_records(root / "forget.jsonl")
    ]
    os.close(reading)
