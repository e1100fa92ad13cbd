"""Reading and writing safetensors, compared with the safetensors library; damaged files; all-or-nothing outputs."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mpu_cli.errors import MpuError
from mpu_cli.files.reader import ITEM_SIZE, MAX_HEADER, TORCH, fingerprint, open_checkpoint
from mpu_cli.files.transaction import Transaction
from mpu_cli.files.writer import CheckpointWriter
from mpu_cli.model.source import locate
from tests.helpers.attacks import publish_copy, unlearn_copy

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

TENSORS = {
    "a.weight": torch.arange(12.0).view(3, 4).to(torch.bfloat16),
    "b": torch.tensor([1.5, -2.5], dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "mask": torch.tensor([True, False, True]),
    "naïve \"name\"": torch.full((1, 2, 3), 7, dtype=torch.uint8),
}  # fmt: skip


def write(path, tensors, metadata=None, **kwargs):
    names = {dtype: name for name, dtype in TORCH.items()}
    plan = {name: (names[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    with CheckpointWriter(path, plan, metadata or {}, **kwargs) as writer:
        for name in reversed(plan):  # any order works
            writer.tensor(name).copy_(tensors[name])


def equal(actual, expected):
    return actual.keys() == expected.keys() and all(
        actual[n].dtype == t.dtype and torch.equal(actual[n], t) for n, t in expected.items()
    )


def test_safetensors_reads_what_is_written(tmp_path):
    write(tmp_path / "x.safetensors", TENSORS, {"note": "ünïcode"})
    assert equal(load_file(tmp_path / "x.safetensors"), TENSORS)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "ünïcode"}


def test_reads_what_safetensors_writes(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors", {"k": "v"})
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    assert equal({name: checkpoint.tensor(name) for name in checkpoint.tensors}, TENSORS)
    assert checkpoint.metadata == {"k": "v"}


def test_a_slice_of_rows_reads_no_more(tmp_path):
    """A 64 GB hole stays a hole: only the pages of the slice are loaded into memory."""
    rows = 1 << 24
    write(tmp_path / "x.safetensors", {"x": torch.zeros(2, 1024)})
    header = {"x": {"dtype": "F32", "shape": [rows, 1024], "data_offsets": [0, rows * 4096]}}
    raw = json.dumps(header).encode()
    with open(tmp_path / "x.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + rows * 4096)
        file.seek(8 + len(raw) + 12345 * 4096)
        file.write(np.arange(1024, dtype="<f4").tobytes())
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    assert torch.equal(checkpoint.tensor("x")[12345:12346][0], torch.arange(1024.0))


@relaxed
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(["F64", "F32", "F16", "BF16", "I64", "U8"]), st.lists(st.integers(0, 5), max_size=3)),
        min_size=1, max_size=6,
    ),
    st.integers(1, 200),
)  # fmt: skip
def test_any_plan_survives_the_round_trip(tmp_path_factory, plan, max_shard):
    folder = tmp_path_factory.mktemp("x")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(0, 2, shape, generator=generator).to(TORCH[dtype]) for name, (dtype, shape) in plan.items()
    }
    write(folder, tensors, max_shard=max_shard)
    checkpoint = open_checkpoint(folder)
    assert equal({name: checkpoint.tensor(name) for name in checkpoint.tensors}, tensors)
    for file in folder.glob("*.safetensors"):
        shard = load_file(file)
        assert equal(shard, {name: tensors[name] for name in shard})
        assert len(shard) == 1 or sum(t.nbytes for t in shard.values()) <= max_shard


def test_fingerprint_is_of_the_model_not_of_its_files(tmp_path):
    tensors = {f"t{i}": torch.randn(300, 1024) for i in range(12)}
    (tmp_path / "sharded").mkdir()
    save_file(tensors, tmp_path / "one.safetensors")
    write(tmp_path / "sharded", dict(reversed(tensors.items())), {"x": "y"}, max_shard=3_000_000)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    single_file, sharded = (fingerprint(open_checkpoint(tmp_path / name)) for name in ("one.safetensors", "sharded"))
    tensors["t3"][299, 1023] += 1
    save_file(tensors, tmp_path / "other.safetensors")
    other = fingerprint(open_checkpoint(tmp_path / "other.safetensors"))
    assert single_file == sharded != other


def file_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(begin: int, end: int, shape: list | None = None, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


DAMAGED = {
    "empty": b"",
    "seven bytes": b"1234567",
    "header longer than the file": file_of(b"{}", length=50),
    "header of 100 GB": file_of(b"{}", length=100 << 30),
    "not JSON": file_of(b"{nonsense"),
    "not an object": file_of(b"[1, 2]"),
    "not UTF-8": file_of(b'{"\xff": 1}'),
    "deep nesting": file_of(b"[" * 100_000),
    "a name twice": file_of(b'{"a": %s, "a": %s}' % ((json.dumps(entry(0, 4)).encode(),) * 2), bytes(4)),
    "overlap": file_of({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
    "gap": file_of({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)),
    "data too short": file_of({"a": entry(0, 8)}, bytes(4)),
    "data too long": file_of({"a": entry(0, 8)}, bytes(12)),
    "shape and bytes differ": file_of({"a": entry(0, 8, [3])}, bytes(8)),
    "negative shape": file_of({"a": entry(0, 8, [-2])}, bytes(8)),
    "boolean shape": file_of({"a": entry(0, 4, [True])}, bytes(4)),
    "backwards": file_of({"a": {"dtype": "F32", "shape": [0], "data_offsets": [8, 4]}}, bytes(8)),
    "unknown dtype": file_of({"a": entry(0, 8, [2], "F31")}, bytes(8)),
    "dtype is a list": file_of({"a": {"dtype": ["F32"], "shape": [], "data_offsets": [0, 4]}}, bytes(4)),
    "entry is no object": file_of({"a": 3}),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}}),
    "huge shape": file_of({"a": entry(0, 4, [2**70, 2**70])}, bytes(4)),
    "huge shape of nothing": file_of({"a": entry(0, 0, [0, 2**61, 2**61])}),
    "shape of huge numbers": file_of({"a": entry(0, 4, [10**4000] * 200)}, bytes(4)),
    "shape of many dimensions": file_of({"a": entry(0, 4, [1] * 100_000)}, bytes(4)),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_damage_is_refused_in_one_line(tmp_path, what):
    path = tmp_path / "x.safetensors"
    path.write_bytes(DAMAGED[what])
    with pytest.raises(MpuError) as refused:
        open_checkpoint(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


@relaxed
@given(st.binary(max_size=300), st.integers(0, 120))
@example(b"\xff" * 8, 0)
def test_no_bytes_break_the_reader(tmp_path, noise, at):
    """Random bytes, alone or written over the start of a valid file, are either read or rejected."""
    sound = tmp_path / "sound.safetensors"
    if not sound.exists():
        save_file(TENSORS, sound)
    good = sound.read_bytes()
    for raw in (noise, good[:at] + noise[:9] + good[at + len(noise[:9]) :], good[: len(good) - at]):
        (tmp_path / "x.safetensors").write_bytes(raw)
        try:
            checkpoint = open_checkpoint(tmp_path / "x.safetensors")
        except MpuError:
            continue
        for name, info in checkpoint.tensors.items():
            assert checkpoint.tensor(name).nbytes == info.elements * ITEM_SIZE[info.dtype]


@pytest.mark.slow
@relaxed
@given(st.recursive(st.none() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)))
def test_no_json_breaks_the_header(tmp_path, value):
    (tmp_path / "x.safetensors").write_bytes(file_of({"a": value, "__metadata__": {}}))
    with pytest.raises(MpuError):
        open_checkpoint(tmp_path / "x.safetensors")


def index_of(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("weight_map", "complaint"),
    [
        ({"a": "gone.safetensors"}, "missing"),
        ({"a": "../x.safetensors"}, "outside"),
        ({"a": "/etc/passwd"}, "outside"),
        ({"a": ".."}, "outside"),
        ({"a": "weights/x.safetensors"}, "in a folder below"),
        ({"a": "x.safetensors", "b": "x.safetensors"}, "'b' is not in x.safetensors"),
        ({"b": "x.safetensors"}, "holds tensor 'a'"),
        ({}, "weight_map"),
        ({"a": 3}, "weight_map"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, weight_map, complaint):
    (tmp_path / "m").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "m/x.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    index_of(tmp_path / "m", weight_map)
    with pytest.raises(MpuError, match=complaint):
        open_checkpoint(tmp_path / "m")


def test_a_pickle_is_never_read(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    (tmp_path / "m").mkdir()
    torch.save({"a": Attack()}, tmp_path / "m/pytorch_model.bin")
    with pytest.raises(MpuError, match="pickle"):
        open_checkpoint(tmp_path / "m")
    with pytest.raises(MpuError, match="never pickles"):
        open_checkpoint(tmp_path / "m/pytorch_model.bin")
    assert not (tmp_path / "owned").exists()


class TestTransaction:
    @pytest.mark.parametrize("stem", ["a" * 239, "a" * 243, "é" * 121])
    def test_names_of_any_length_that_a_file_may_have(self, mpu, root, stem):
        """Without what a file is called while it is written; what a killed process left there is removed."""
        name = f"{stem}.safetensors"
        with pytest.raises(KeyboardInterrupt), Transaction() as transaction:  # noqa: PT012
            staging = transaction.add(root / name).parent
            raise KeyboardInterrupt
        staging.mkdir()  # as if it had been killed
        options = ("--algo", "gradascent", "--epochs", 1)
        for force in ([], ["--force"]):
            mpu("unlearn", "base", *options, "--out", name, *force, cwd=root)
        mpu(
            "eval",
            "base",
            "--forget",
            "forget.jsonl",
            "--metrics",
            "forget_Q_A_Prob",
            "--out",
            f"{stem}.json",
            cwd=root,
        )
        mpu("keygen", "--out", f"{stem}.txt", cwd=root)
        assert not list(root.glob(".*"))

    def test_nothing_stays_of_a_failure(self, tmp_path):
        with pytest.raises(KeyboardInterrupt), Transaction() as transaction:  # noqa: PT012
            (transaction.add(tmp_path / "deep/er/a")).write_text("new")
            (transaction.add(tmp_path / "d", directory=True) / "x").write_text("new")
            raise KeyboardInterrupt
        assert list(tmp_path.iterdir()) == []

    def test_all_appear_together(self, tmp_path):
        with Transaction() as transaction:
            (transaction.add(tmp_path / "a")).write_text("new")
            (transaction.add(tmp_path / "d", directory=True) / "x").write_text("new")
            assert not (tmp_path / "a").exists()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "d"]
        assert (tmp_path / "d/x").read_text() == "new"

    def test_what_exists_stays_without_force(self, tmp_path):
        (tmp_path / "a").write_text("old")
        with pytest.raises(MpuError, match="--force"), Transaction() as transaction:
            transaction.add(tmp_path / "a")
        assert (tmp_path / "a").read_text() == "old"

    def test_a_rival_that_came_first_wins(self, tmp_path):
        with pytest.raises(MpuError, match="--force"), Transaction() as transaction:  # noqa: PT012
            transaction.add(tmp_path / "a").write_text("new")
            transaction.add(tmp_path / "b").write_text("new")
            (tmp_path / "b").write_text("rival")
        assert (tmp_path / "b").read_text() == "rival"
        assert not (tmp_path / "a").exists()

    def test_force_replaces_and_cleans_up(self, tmp_path):
        (tmp_path / "d").mkdir()
        (tmp_path / "d/mpu.json").write_text("old")
        (tmp_path / "a").write_text("old")
        with Transaction(force=True) as transaction:
            (transaction.add(tmp_path / "d", directory=True) / "new").write_text("new")
            transaction.add(tmp_path / "a").write_text("new")
        assert (tmp_path / "a").read_text() == "new"
        assert [p.name for p in (tmp_path / "d").iterdir()] == ["new"]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "d"]

    def test_force_replaces_no_folder_of_others(self, tmp_path):
        (tmp_path / "d").mkdir()
        (tmp_path / "d/precious.txt").write_text("old")
        with pytest.raises(MpuError, match="not written by mpu"), Transaction(force=True) as transaction:
            transaction.add(tmp_path / "d", directory=True)
        assert (tmp_path / "d/precious.txt").read_text() == "old"

    @pytest.mark.parametrize(("earlier", "later"), [("a", "a"), ("a", "a/b"), ("a/b", "a")])
    def test_outputs_may_not_overlap(self, tmp_path, earlier, later):
        with pytest.raises(MpuError, match="choose other names"), Transaction(force=True) as transaction:  # noqa: PT012
            transaction.add(tmp_path / earlier, directory=True)
            transaction.add(tmp_path / later)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("replace", [False, True])
    def test_an_interrupt_at_any_line_leaves_nothing_unfinished(self, tmp_path, replace):
        """SIGINT after each line of the transaction's code: all of the old content is there, or all of the new."""
        import mpu_cli.files.transaction as module

        at, interrupted = 0, True
        while interrupted:
            at, interrupted, line_count = at + 1, False, 0
            folder = tmp_path / str(at)
            folder.mkdir()
            if replace:
                (folder / "a").write_text("old")

            def trace(frame, event, _, at=at):
                nonlocal line_count, interrupted
                if frame.f_code.co_filename != module.__file__:
                    return None
                if event == "line":
                    line_count += 1
                    if line_count == at:
                        interrupted = True
                        signal.raise_signal(signal.SIGINT)
                return trace

            sys.settrace(trace)
            try:
                with Transaction(force=replace) as transaction:
                    transaction.add(folder / "a").write_text("new")
                    (transaction.add(folder / "d", directory=True) / "mpu.json").write_text("new")
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
                for open_transaction in list(Transaction.open_ones):  # as the command does when it ends
                    open_transaction.clean_up()
            names = sorted(path.name for path in folder.iterdir())
            content = (folder / "a").read_text() if "a" in names else None
            assert (names, content) in ((["a", "d"], "new"), (["a"], "old") if replace else ([], None)), at
        assert at > 50

    def test_force_loses_nothing_when_the_commit_fails(self, tmp_path):
        (tmp_path / "a").write_text("old")
        with pytest.raises(FileNotFoundError), Transaction(force=True) as transaction:  # noqa: PT012
            transaction.add(tmp_path / "a").write_text("new")
            transaction.add(tmp_path / "b")  # announced but never written
        assert [p.name for p in tmp_path.iterdir()] == ["a"]
        assert (tmp_path / "a").read_text() == "old"


def test_a_mistyped_path_is_not_looked_for_on_the_hub(monkeypatch, tmp_path):
    """A name whose first part is a folder here is a path; hub:… never is."""
    repo_ids = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: repo_ids.append(name) or str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copies").mkdir()
    with pytest.raises(MpuError, match="copies/cpoy_1: no such file or directory"):
        locate("copies/cpoy_1")
    assert repo_ids == []
    locate("hub:copies/cpoy_1")
    locate("owner/name")
    assert repo_ids == ["copies/cpoy_1", "owner/name"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
        (b"GGUF\x03" + bytes(300), "gguf_file='weights"),
        (b"PK\x03\x04" + bytes(300), "pickle"),
        (b"\x80\x02}q\x00X\x05" + bytes(300), "pickle"),
        (b"<!DOCTYPE html>\n<html><body>Sign in</body></html>" + bytes(100), "web page"),
    ],
    ids=["pointer", "gguf", "torch", "pickle", "page"],
)
def test_other_formats_are_named(tmp_path, content, named):
    (tmp_path / "weights.safetensors").write_bytes(content)
    with pytest.raises(MpuError, match=re.escape(named)):
        open_checkpoint(tmp_path / "weights.safetensors")


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480, 0x0580])
def test_a_header_whose_length_begins_as_a_pickle_is_a_header(tmp_path, length):
    """0x80 and a version: the first bytes of pickles, and of headers of these many bytes."""
    tensor = torch.arange(2.0)
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    size = len((tmp_path / "a.safetensors").read_bytes()) - 16
    save_file({"a": tensor}, tmp_path / "a.safetensors", metadata={"pad": "x" * (length - size - 100)})
    raw = (tmp_path / "a.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    (tmp_path / "a.safetensors").write_bytes(file_of(json.dumps(header).encode().ljust(length), raw[-8:]))
    assert equal({"a": open_checkpoint(tmp_path / "a.safetensors").tensor("a")}, {"a": tensor})


class TestLeftovers:
    """What a killed command leaves: the next one with the same output removes it, unless somebody is at work there."""

    COMMAND = ("publish", "base", "--kappa", 0.1, "--copies", 2, "--out", "c", "--keys", "c/k.bin")

    @pytest.mark.slow
    def test_of_a_publication(self, mpu, root):
        code = (
            "import os, signal, sys\n"
            "from mpu_cli.files import transaction\n"
            "transaction.Transaction._commit = lambda self: os.kill(os.getpid(), signal.SIGKILL)\n"
            "from mpu_cli.cli.main import main\n"
            "main()\n"
        )
        command = [sys.executable, "-c", code, *map(str, self.COMMAND)]
        killed = subprocess.run(command, cwd=root, capture_output=True, check=False)
        assert killed.returncode == -signal.SIGKILL
        left = list((root / "c").glob(".*.partial"))
        assert len(left) == 3  # both copies, and the keys
        mpu(*self.COMMAND, cwd=root)
        assert not list((root / "c").glob(".*"))

    def test_of_one_that_is_at_work(self, tmp_path):
        """Another command that would write the same is refused, and harms nothing."""
        with Transaction() as first:
            working = first.add(tmp_path / "copy", directory=True)
            (working / "part").write_text("half")
            with Transaction() as second, pytest.raises(MpuError, match="another mpu command is writing it"):
                second.add(tmp_path / "copy", directory=True)
            assert (working / "part").read_text() == "half"
        assert (tmp_path / "copy" / "part").read_text() == "half"

    def test_only_what_mpu_named(self, tmp_path):
        names = (
            ".copy.partial",
            ".copy.mine.partial",
            ".copy.12345678.part",
            "copy.12345678.partial",
            ".copyx.12345678.partial",
        )
        for name in names:
            (tmp_path / name).mkdir()
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / ".copy.abcdefgh.partial").symlink_to(tmp_path / "elsewhere")
        (tmp_path / ".copy.abcdefg1.partial").mkdir()
        with Transaction() as transaction:
            transaction.add(tmp_path / "copy", directory=True)
        assert {path.name for path in tmp_path.iterdir()} == {
            *names, "elsewhere", ".copy.abcdefgh.partial", "copy"
        }  # fmt: skip


def test_a_header_that_fills_the_memory(mpu: Callable, root: Path) -> None:
    copy = publish_copy(mpu, root)
    path = copy / "model.safetensors"
    path.write_bytes((MAX_HEADER + 1).to_bytes(8, "little") + b"[" * (MAX_HEADER + 1))
    unlearn_copy(mpu, root, copy, "d", fails="header is longer")
