"""Copies sealed for one client each: nobody else can open them, and unlearning gives the same as on a plain copy."""

from __future__ import annotations

import io
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyrage
import pytest

from mpu_cli.errors import MpuError
from mpu_cli.files import sealing
from tests.helpers.models import random_model, save, write_records

TRAINING = ("--algo", "npo", "--reading", "template=plain", "--epochs", 1)


@pytest.fixture
def folder(mpu: Callable, tmp_path: Path) -> Path:
    """A base and two clients' identities; copies from the same seed, published plain in plain/, sealed in sealed/."""
    base = save(random_model("llama"), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 4, 1)
    write_records(tmp_path / "retain.jsonl", 4, 2)
    recipients = [mpu("keygen", "--out", tmp_path / f"{name}.txt", "--json").json["recipient"] for name in "ab"]
    (tmp_path / "b.pub").write_text(f"# client b\n{recipients[1]}\n")
    seal = ("--copy-recipients", f"{recipients[0]},{tmp_path / 'b.pub'}")
    for out, options in (("plain", ()), ("sealed", seal)):
        mpu("publish", base, "--copies", 2, "--seed", 3, "--run", "r", "--out", tmp_path / out, "--keys",
            tmp_path / f"keys_{out}" / "keys.bin", *options)  # fmt: skip
    return tmp_path


def unlearn(mpu: Callable, folder: Path, copy: str, out: str, *options: object, **expected: object) -> object:
    return mpu("unlearn", folder / copy, "--forget", folder / "forget.jsonl", "--retain", folder / "retain.jsonl",
               "--out", folder / out, *TRAINING, *options, **expected)  # fmt: skip


class TestSealedCopies:
    @pytest.mark.slow
    def test_the_client_gets_the_same_delta(self, mpu: Callable, folder: Path) -> None:
        for k, name in enumerate("ab", 1):
            unlearn(mpu, folder, f"plain/copy_{k}", f"{k}.safetensors")
            unlearn(mpu, folder, f"sealed/copy_{k}.age", f"s{k}.safetensors", "--identity", folder / f"{name}.txt")
            assert (folder / f"{k}.safetensors").read_bytes() == (folder / f"s{k}.safetensors").read_bytes()
        deltas = (folder / "s1.safetensors", folder / "s2.safetensors")
        mpu("aggregate", *deltas, "--keys", folder / "keys_sealed/keys.bin", "--out", folder / "new")
        assert not list(folder.glob("**/.*"))  # nothing decrypted or not yet sealed is left behind

    def test_nothing_else_is_written(self, folder: Path) -> None:
        assert sorted(path.name for path in (folder / "sealed").iterdir()) == ["copy_1.age", "copy_2.age"]
        assert [path.name for path in (folder / "keys_sealed").iterdir()] == ["keys.bin"]

    def test_a_store_in_between_sees_nothing(self, folder: Path) -> None:
        sealed = (folder / "sealed/copy_1.age").read_bytes()
        weights = (folder / "plain/copy_1/model.safetensors").read_bytes()
        for word in (b"mpu.json", b"tokenizer", b"model.layers", weights[-64:]):
            assert word not in sealed[200:]

    def test_age_and_tar_open_it(self, folder: Path) -> None:
        """Runs the two commands; nothing in the archive reveals who made it or when."""
        if age := shutil.which("age"):
            command = [age, "-d", "-i", folder / "a.txt", folder / "sealed/copy_1.age"]
            plain = subprocess.run(command, capture_output=True, check=True).stdout
        else:
            identity = (folder / "a.txt").read_text().split()[-1]
            plain = pyrage.decrypt(
                (folder / "sealed/copy_1.age").read_bytes(), [pyrage.x25519.Identity.from_str(identity)]
            )
        with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
            members = archive.getmembers()
            archive.extractall(folder / "opened")
        assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {(0, 0, "", "", 0)}
        for path in (folder / "plain/copy_1").iterdir():
            if path.name != "mpu.json":
                assert (folder / "opened/copy_1" / path.name).read_bytes() == path.read_bytes()

    @pytest.mark.parametrize(
        ("damage", "says"),
        [
            (lambda data: data[: len(data) // 2], "truncated"),
            (lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:], "damaged"),
        ],
    )
    def test_damage(self, mpu: Callable, folder: Path, damage: Callable, says: str) -> None:
        path = folder / "sealed/copy_1.age"
        path.write_bytes(damage(path.read_bytes()))
        unlearn(mpu, folder, "sealed/copy_1.age", "d", "--identity", folder / "a.txt", refused=says, status=1)
        assert not list(folder.glob("**/.*"))

    @pytest.mark.parametrize(
        "command",
        [
            ("unlearn", "{copy}", "--out", "d.safetensors"),
            ("ask", "{copy}", "Who?"),
            ("check", "{copy}", "--forget", "forget.jsonl"),
            ("check", "plain/copy_1", "--before", "{copy}", "--forget", "forget.jsonl"),
            ("eval", "{copy}", "--benchmark", "qa", "--forget", "forget.jsonl"),
            ("audit-delta", "{copy}", "d.safetensors"),
            ("surrogate", "{copy}"),
        ],
        ids=str,
    )
    def test_it_is_opened_where_nothing_else_is(
        self, mpu: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
    ) -> None:
        """The folders of the sealed file and of what is written may be shares that others read."""
        opened: list[Path] = []

        def stop(_: Path, __: object, into: Path) -> Path:
            opened.append(into)
            raise MpuError("opened")

        monkeypatch.setattr(sealing, "open_folder", stop)
        words = [word.format(copy="sealed/copy_1.age") for word in command]
        mpu(*words, "--identity", folder / "a.txt", fails="opened", cwd=folder)
        [into] = opened
        assert into.parent == Path(os.environ["XDG_CACHE_HOME"]) / "mpu/opened"
        assert stat.S_IMODE(into.parent.stat().st_mode) == 0o700
        assert not list(into.parent.iterdir())

    def test_another_client_does_not_open_it(self, mpu: Callable, folder: Path) -> None:
        unlearn(mpu, folder, "sealed/copy_1.age", "d", "--identity", folder / "b.txt", fails="another identity")

    def test_an_archive_that_would_write_elsewhere(self, mpu: Callable, folder: Path) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("../../escaped"), io.BytesIO())
        identity = pyrage.x25519.Identity.from_str((folder / "a.txt").read_text().split()[-1])
        (folder / "sealed/x.age").write_bytes(pyrage.encrypt(buffer.getvalue(), [identity.to_public()]))
        unlearn(mpu, folder, "sealed/x.age", "deltas/d", "--identity", folder / "a.txt", fails="contains no copy")
        assert not list(folder.glob("**/escaped"))

    @pytest.mark.slow
    def test_inspect(self, mpu: Callable, folder: Path) -> None:
        assert "sealed for its client" in mpu("inspect", folder / "sealed/copy_1.age").out
        mpu("audit", folder / "sealed/copy_1.age", "--base", folder / "base", fails="is sealed")
        records = ("--benchmark", "qa", "--forget", folder / "forget.jsonl", "--out", folder / "eval.json")
        assert "another identity" in mpu("eval", folder / "sealed/copy_1.age", *records, check=False).err
        mpu("eval", folder / "sealed/copy_1.age", *records, "--identity", folder / "a.txt")
        keys = (folder / "keys_sealed/keys.bin").rename(folder / "keys.age")  # the name does not matter
        assert "symmetries" in mpu("inspect", keys).out

    @pytest.mark.parametrize(
        ("recipients", "says"),
        [("age1x", "not an age public key"), ("none.pub,age1y", "nor a file")],
    )
    def test_refuses_recipients(self, mpu: Callable, folder: Path, recipients: str, says: str) -> None:
        mpu(
            "publish", folder / "base", "--copy-recipients", recipients, "--out", folder / "new", "--keys",
            folder / "new/keys.bin", fails=says,
        )  # fmt: skip
        assert not (folder / "new").exists()
