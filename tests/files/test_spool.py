"""A spool that somebody else writes to, and what two processes do to one sum."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mpu_cli.files.folder import Folder
from mpu_cli.files.manifest import as_metadata
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.files.transaction import Transaction, restore
from mpu_cli.flower.spool import Spool
from tests.helpers.attacks import TRAINING, edit, publish_copies
from tests.helpers.models import random_model, save
from tests.helpers.trainings import BRIEF


class TestTheSpool:
    RUN = "r/round_1"

    def arrive(self, mpu: Callable, root: Path) -> Spool:
        """Two copies in a spool."""
        mpu("publish", "base", "--copies", 2, "--run", "r", "--seed", 1, cwd=root)
        spool = Spool(root / "spool")
        (spool.root / "in" / f"{self.RUN}/copy_1").parent.mkdir(parents=True)
        for k in (1, 2):
            shutil.move(root / f"copy_{k}", spool.root / "in" / f"{self.RUN}/copy_{k}")
        return spool

    def watch(self, mpu: Callable, root: Path, *options: object):
        return mpu("watch", "spool", *TRAINING, "--work", "work", "--once", *options, check=False, cwd=root)

    @pytest.mark.slow
    def test_names_that_are_links(self, mpu: Callable, root: Path) -> None:
        """In ``out``: of the delta, of hidden names, of the folder above, of the mark of a failure."""
        spool = self.arrive(mpu, root)
        records = (root / "forget.jsonl").read_bytes()
        out = spool.root / "out/r/round_1"
        out.mkdir(parents=True)
        for name in ("copy_1.safetensors", ".copy_1.safetensors.partial", "copy_2.failed"):
            (out / name).symlink_to(root / "forget.jsonl")
        (out / "copy_2.safetensors").symlink_to(root / "made_elsewhere")
        result = self.watch(mpu, root)
        assert result.status == 0, result.err
        assert (root / "forget.jsonl").read_bytes() == records
        assert not (root / "made_elsewhere").exists()
        for k in (1, 2):
            delta = spool.root / "out" / f"{self.RUN}/copy_{k}.safetensors"
            assert not delta.is_symlink()
            assert open_checkpoint(delta).tensors

    @pytest.mark.slow
    def test_a_folder_that_is_a_link(self, mpu: Callable, root: Path) -> None:
        spool = self.arrive(mpu, root)
        (root / "victim").mkdir()
        (spool.root / "out").mkdir()
        (spool.root / "out/r").symlink_to(root / "victim")
        result = self.watch(mpu, root)
        assert result.status == 1
        assert "Traceback" not in result.err
        assert list((root / "victim").iterdir()) == []

    def test_a_copy_that_is_a_link(self, mpu: Callable, root: Path) -> None:
        """A link in place of its weights, or of the whole folder."""
        spool = self.arrive(mpu, root)
        private = save(random_model("llama", seed=9), root / "private")
        first_copy, second_copy = (spool.root / "in" / f"{self.RUN}/copy_{k}" for k in (1, 2))
        (first_copy / "model.safetensors").unlink()
        (first_copy / "model.safetensors").symlink_to(private / "model.safetensors")
        second_copy.rename(root / "moved")
        second_copy.symlink_to(root / "moved")
        result = self.watch(mpu, root)
        assert result.status == 1
        assert "is a link" in result.err
        assert list((spool.root / "out").rglob("*.safetensors")) == []

    @pytest.mark.slow
    def test_one_bad_copy_does_not_stop_the_next(self, mpu: Callable, root: Path) -> None:
        """Odd names, FIFOs, endless files, too few rows of embeddings, templates that never end."""
        spool = self.arrive(mpu, root)
        good = spool.root / "in" / f"{self.RUN}/copy_2"
        inbox = good.parent
        for name in ("copy_²", "copy_a", "copy_1.x"):
            (inbox / name).mkdir()
        (spool.root / "in/a..b/round_1/copy_1").mkdir(parents=True)
        (inbox / "copy_9").write_text("a file")

        def bad(k: int) -> Path:
            shutil.copytree(good, inbox / f"copy_{k}")
            edit(inbox / f"copy_{k}/mpu.json", copy=k, copies=9)
            return inbox / f"copy_{k}"

        os.mkfifo(_without(bad(3) / "model.safetensors"))
        (_without(bad(4) / "mpu.json")).symlink_to("/dev/zero")
        rows = load_file(bad(5) / "model.safetensors")
        rows["model.embed_tokens.weight"] = rows["model.embed_tokens.weight"][:4].clone()
        facts = json.loads((inbox / "copy_5/mpu.json").read_text())
        save_file(rows, inbox / "copy_5/model.safetensors", {"format": "pt", **as_metadata(facts)})
        edit(inbox / "copy_5/config.json", vocab_size=4)
        loop = "{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3
        (bad(6) / "chat_template.jinja").write_text(loop)
        facts = json.loads((inbox / "copy_6/mpu.json").read_text())
        save_file(load_file(good / "model.safetensors"), inbox / "copy_6/model.safetensors",
                  {"format": "pt", **as_metadata(facts)})  # fmt: skip
        result = self.watch(mpu, root)
        assert result.status == 1
        assert "Traceback" not in result.err
        assert spool.state(f"{self.RUN}/copy_1") == spool.state(f"{self.RUN}/copy_2") == "done"
        for k in (3, 4, 5, 6):
            assert spool.state(f"{self.RUN}/copy_{k}") == "failed", k
            assert f"copy_{k}: " in result.err
        again = self.watch(mpu, root)
        assert again.out == ""

    @pytest.mark.slow
    def test_a_copy_that_takes_too_long(self, mpu: Callable, root: Path) -> None:
        spool = self.arrive(mpu, root)
        result = self.watch(mpu, root, "--copy-timeout", 1)
        assert "not done after 1 s" in result.err
        assert spool.state(f"{self.RUN}/copy_1") == "failed"

    def test_what_is_taken_cannot_be_changed_any_more(self, root: Path) -> None:
        """A file that shrinks while it is mapped ends a process; one in a private copy cannot."""
        spool = Spool(root / "spool")
        copy = spool.root / "in" / "r/round_1/copy_1"
        copy.mkdir(parents=True)
        (copy / "model.safetensors").write_bytes(bytes(5000))
        (copy / "unknown.bin").write_bytes(b"x")
        private_copy = spool.take("r/round_1/copy_1", root / "work/taken")
        os.truncate(copy / "model.safetensors", 10)
        assert {path.name: path.stat().st_size for path in private_copy.iterdir()} == {"model.safetensors": 5000}
        assert (private_copy / "model.safetensors").stat().st_mode & 0o777 == 0o600

    def test_hostile_names_and_pieces_of_the_courier(self, tmp_path: Path) -> None:
        spool = Spool(tmp_path / "spool")
        for offset in (-1, 5, 2**62):
            spool.put("r/round_1/copy_1", "w", offset, b"x")
        assert spool.received_sizes("r/round_1/copy_1") == {}
        for name in ("../w", "a/../../w", "", "a\0b", "/etc/x"):
            with pytest.raises(ValueError, match="not a name"):
                spool.put("r/round_1/copy_1", name, 0, b"x")

    @pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
    def test_what_is_inside_has_the_spools_mode(self, tmp_path: Path, mask: int) -> None:
        """So that two users who share a group can work in it, whatever their umask."""
        (tmp_path / "spool").mkdir()
        (tmp_path / "spool").chmod(0o2770)
        before = os.umask(mask)
        try:
            spool = Spool(tmp_path / "spool")
            spool.put("r/round_1/copy_1", "w", 0, b"x")
            with Folder(tmp_path / "spool").create("out/r/x") as file:
                file.write(b"y")
        finally:
            os.umask(before)
        for path in (tmp_path / "spool").rglob("*"):
            assert path.stat().st_mode & 0o7777 == (0o2770 if path.is_dir() else 0o660), path


def _without(path: Path) -> Path:
    path.unlink()
    return path


@pytest.mark.slow
def test_what_the_client_keeps_is_private_whatever_the_umask(mpu: Callable, root: Path) -> None:
    mpu("publish", "base", "--copies", 2, "--run", "r", cwd=root)
    spool = root / "spool/in/r/round_1"
    spool.mkdir(parents=True)
    shutil.copytree(root / "copy_1", spool / "copy_1")
    before = os.umask(0)
    try:
        mpu("unlearn", "copy_2", *TRAINING, "--resume", "--log", "log.jsonl", "--reference-file", "kept/ref.safetensors"
            if (root / "kept").mkdir(0o700) else "ref.safetensors", cwd=root)  # fmt: skip
        mpu("watch", "spool", *TRAINING, "--work", "work", "--once", cwd=root)
    finally:
        os.umask(before)
    private = [root / "deltas", root / "log.jsonl", root / "ref.safetensors", root / "work",
               Path(os.environ["XDG_CONFIG_HOME"]) / "mpu/ledger.jsonl"]  # fmt: skip
    for top in private:
        for path in (top, *top.rglob("*")):
            assert path.stat().st_mode & 0o077 == 0, path


class TestLostUpdates:
    @pytest.mark.parametrize("directory", [True, False])
    def test_there_is_always_something_under_the_name(self, tmp_path: Path, directory: bool) -> None:
        """A reader that looks all the time never finds nothing while --force replaces."""
        target = tmp_path / "target"
        missing, ends = [], threading.Event()

        def look() -> None:
            while not ends.is_set():
                missing.append(not os.path.lexists(target))

        def write(force: bool) -> None:
            with Transaction(force=force) as transaction:
                staged_path = transaction.add(target, directory=directory)
                (staged_path / "mpu.json" if directory else staged_path).write_text("x")

        write(force=False)
        looking = threading.Thread(target=look)
        looking.start()
        for _ in range(100):
            write(force=True)
        ends.set()
        looking.join()
        assert len(missing) > 1000
        assert not any(missing)
        assert [path.name for path in tmp_path.iterdir()] == ["target"]

    def test_an_exchange_in_two_steps_that_was_cut_off(self, tmp_path: Path) -> None:
        """On systems that cannot exchange names, what lies beside is put back."""
        backup = tmp_path / ".sum.abc.old"
        (backup / "sum").mkdir(parents=True)
        restore(tmp_path / "sum")
        assert (tmp_path / "sum").is_dir()
        assert not backup.exists()


class TestTheSpoolOfSomebodyElse:
    @pytest.mark.slow
    @pytest.mark.parametrize("obstacle", ["file", pytest.param("deep", marks=pytest.mark.exhaustive)])
    def test_nothing_in_out_ends_the_worker(self, mpu: Callable, root: Path, obstacle: str) -> None:
        """A copy that cannot even be marked as failed is trained on once, and the one beside it gets its delta."""
        first_copy, second_copy = publish_copies(mpu, root)
        facts = json.loads((first_copy / "mpu.json").read_text())
        spool, run = root / "spool", facts["run"]
        for number, copy in ((1, first_copy), (2, second_copy)):
            target = spool / f"in/{run}/round_1/copy_{number}"
            target.parent.mkdir(parents=True, exist_ok=True)
            copy.rename(target)
        (spool / f"in/{run}/round_1/copy_1/config.json").write_text("{")
        if obstacle == "file":
            bad = spool / "in/other/round_1/copy_1"
            bad.mkdir(parents=True)
            (spool / "out").mkdir()
            (spool / "out/other").write_text("in the way")
        else:
            (spool / f"out/{run}/round_1/copy_1.failed" / "/".join(["d"] * 60)).mkdir(parents=True)
        options = ("--algo", "graddiff", "--epochs", 1, "--lr", "1e-3", "--work", "work", "--once")
        outcome = mpu("watch", "spool", *options, check=False, cwd=root)
        assert (spool / f"out/{run}/round_1/copy_2.safetensors").is_file(), outcome.err
        begun = [json.loads(line) for line in (root / "work/answered.jsonl").read_text().splitlines()]
        assert sum(line["state"] == "begun" and line["copy"].endswith("copy_1") for line in begun) <= 2


def test_a_copy_in_the_wrong_place_is_named(mpu: Callable, root: Path) -> None:
    """`mpu watch` says where a copy belongs, and what it waits for where it waits."""
    mpu("publish", "base", "--copies", 2, "--run", "r", "--out", "spool/in", "--keys", "keys.bin", cwd=root)
    printed = mpu("watch", "spool", *BRIEF, "--once", check=False, cwd=root).err
    assert "spool/in/copy_1: a copy is expected at spool/in/r/round_1/copy_1" in printed
