"""What one party sends, made to hurt the other: each attack on real files, through the command line.

The table in SECURITY.md names these tests.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pyrage
import pytest
import torch
from safetensors.torch import load_file, save_file

from mpu_cli.boundary import sandbox
from mpu_cli.boundary.archives import unpack_folder
from mpu_cli.boundary.cleaning import clean_config
from mpu_cli.boundary.folder import Folder
from mpu_cli.checkpoint.header import MAX_HEADER
from mpu_cli.checkpoint.reader import open_checkpoint
from mpu_cli.checkpoint.transaction import Transaction, remove_abandoned, restore
from mpu_cli.client.copycheck import against_others
from mpu_cli.client.leakage import moved_rows
from mpu_cli.client.ledger import LedgerEntry, default_ledger_path
from mpu_cli.client.private import with_noise
from mpu_cli.errors import MpuError
from mpu_cli.federation.spool import Spool
from mpu_cli.manifest import DeltaManifest, as_metadata, delta_facts
from mpu_cli.models.adapters import with_adapter
from mpu_cli.randomness import Randomness
from mpu_cli.records import chat
from mpu_cli.sealing import make_identity
from tests.models import DemoModel, load, random_model, save, write_records

TRAINING = ["--epochs", 1, "--batch-size", 3, "--lr", "1e-3"]


def publish_copy(mpu: Callable, root: Path, *options: object, base: str = "base") -> Path:
    """The first of two copies of a model in ``place``."""
    mpu("publish", base, "--copies", 2, "--seed", 1, "--force", *options, cwd=root)
    return root / "copy_1"


def unlearn_copy(mpu: Callable, root: Path, copy: Path, out: str, *options: object, check: bool = True):
    return mpu("unlearn", copy, *TRAINING, "--out", f"{out}.safetensors", "--force", *options, check=check, cwd=root)


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


class TestACopyThatReadsTheClientsDisk:
    @pytest.fixture
    def private(self, root: Path) -> Path:
        """Another model that the client can read, of the same shapes."""
        return save(random_model("llama", seed=9), root / "private")

    @pytest.mark.parametrize("absolute", [True, False])
    def test_a_config_that_names_other_weights(self, mpu: Callable, root: Path, private: Path, absolute: bool) -> None:
        copy = publish_copy(mpu, root)
        unlearn_copy(mpu, root, copy, "honest")
        measured = ["--benchmark", "qa", "--forget", "forget.jsonl", "--metrics", "forget_Q_A_Prob", "--json"]
        expected = mpu("eval", copy, *measured, "--out", "a.json", cwd=root).json["metrics"]
        file = str(private / "model.safetensors") if absolute else "../private/model.safetensors"
        index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(private / "model.safetensors"), file)}
        (copy / "other.safetensors.index.json").write_text(json.dumps(index))
        edit(copy / "config.json", transformers_weights="other.safetensors.index.json")
        unlearn_copy(mpu, root, copy, "attacked", "--trust-copy")  # it is not the copy of before
        assert (root / "attacked.safetensors").read_bytes() == (root / "honest.safetensors").read_bytes()
        assert mpu("eval", copy, *measured, "--out", "b.json", cwd=root).json["metrics"] == expected

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "mpu.json"])
    def test_a_link_in_place_of_a_file(self, mpu: Callable, root: Path, private: Path, name: str) -> None:
        copy = publish_copy(mpu, root)
        target = private / name
        if name == "mpu.json":
            target.write_text((copy / name).read_text())
        (copy / name).unlink()
        (copy / name).symlink_to(target)
        refused = unlearn_copy(mpu, root, copy, "d", check=False)
        assert refused.status == 1
        assert "is a link" in refused.err
        assert refused.is_one_error
        assert not (root / "d.safetensors").exists()

    def test_links_of_the_hubs_cache_are_files(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        cache = root / "models--owner--name"
        (cache / "blobs").mkdir(parents=True)
        (cache / "snapshots").mkdir()
        snapshot = cache / "snapshots/0123abc"
        snapshot.mkdir()
        for number, path in enumerate(sorted(copy.iterdir())):
            path.rename(cache / f"blobs/{number}")
            (snapshot / path.name).symlink_to(f"../../blobs/{number}")
        unlearn_copy(mpu, root, snapshot, "d")
        (cache / "blobs/0").rename(root / "elsewhere")
        (cache / "blobs/0").symlink_to(root / "elsewhere")
        assert "is a link" in unlearn_copy(mpu, root, snapshot, "d", check=False).err
        (cache / "blobs/0").unlink()
        (root / "elsewhere").rename(cache / "blobs/0")
        (cache / "blobs").rename(root / "private_folder")
        (cache / "blobs").symlink_to(root / "private_folder")
        assert "is a link" in unlearn_copy(mpu, root, snapshot, "d", check=False).err

    def test_a_template_of_any_length(self, mpu: Callable, root: Path) -> None:
        """It would be sent to the process that renders with each record."""
        copy = publish_copy(mpu, root)
        (copy / "chat_template.jinja").write_text("x" * 300_000)
        assert "larger than" in unlearn_copy(mpu, root, copy, "d", check=False).err

    def test_a_tokenizer_that_names_files(self, mpu: Callable, root: Path) -> None:
        """Paths in tokenizer_config.json are not followed, code and unknown names are left out."""
        copy = publish_copy(mpu, root)
        unlearn_copy(mpu, root, copy, "honest")
        shutil.copy(copy / "tokenizer.json", root / "secret.json")
        edit(copy / "tokenizer_config.json", tokenizer_file=str(root / "secret.json"),
             vocab_file="/etc/passwd", auto_map={"AutoTokenizer": ["evil.py--Evil", None]})  # fmt: skip
        (copy / "evil.py").write_text(f"open({str(root / 'ran')!r}, 'w')")
        unlearn_copy(mpu, root, copy, "attacked", "--trust-copy")  # it is not the copy of before
        assert (root / "attacked.safetensors").read_bytes() == (root / "honest.safetensors").read_bytes()
        assert not (root / "ran").exists()

    @pytest.mark.parametrize(
        "value",
        [
            {"transformers_weights": "x"}, {"auto_map": {"AutoModel": "x.y"}}, {"_name_or_path": "/home/a"},
            {"attn_implementation": "owner/kernel"}, {"_attn_implementation": "x"}, {"experts_implementation": "x"},
            {"quantization_config": {"quant_method": "bitsandbytes"}}, {"name_or_path": "../x"},
            {"text_config": {"_name_or_path": "/x", "transformers_weights": "y"}}, {"hidden_act": "/etc/passwd"},
            {"architectures": ["../../x"]}, {"hidden_act": "owner/repo"}, {"unheard_of": 1},
        ],
        ids=str,
    )  # fmt: skip
    def test_nothing_of_a_config_that_libraries_would_obey(self, value: dict) -> None:
        cleaned = clean_config({"model_type": "llama", **value})
        assert json.dumps(cleaned) in (
            '{"model_type": "llama"}', '{"model_type": "llama", "text_config": {}}',
        )  # fmt: skip

    def test_a_quantised_copy(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        edit(copy / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
        assert "quantis" in unlearn_copy(mpu, root, copy, "d", check=False).err

    def test_an_adapter_that_imports_a_module(self, mpu: Callable, root: Path, demo: DemoModel) -> None:
        """peft would import what ``megatron_core`` names, and read other kinds of adapters."""
        records = ["--forget", demo.forget, "--retain", demo.retain]
        mpu("publish", demo.model, "--copies", 2, cwd=root)
        for k in (1, 2):
            mpu("unlearn", f"copy_{k}", *records, "--epochs", 1, "--lora-rank", 2, cwd=root)
        mpu("aggregate", "deltas", "--keys", "keys.bin", "--as-adapter", "--out", "adapter", cwd=root)
        (root / "evil_module.py").write_text(f"open({str(root / 'ran')!r}, 'w')")
        edit(root / "adapter/adapter_config.json", megatron_config={"a": 1}, megatron_core="evil_module")
        options = [
            "--base",
            demo.model,
            "--benchmark",
            "qa",
            "--forget",
            demo.forget,
            "--metrics",
            "forget_Q_A_Prob",
        ]
        sys.path.insert(0, str(root))
        try:
            mpu("eval", "adapter", *options, cwd=root)
        finally:
            sys.path.remove(str(root))
        assert not (root / "ran").exists()
        edit(root / "adapter/adapter_config.json", peft_type="PREFIX_TUNING")
        refused = mpu("eval", "adapter", *options, "--out", "b.json", check=False, cwd=root)
        assert "not a LoRA adapter" in refused.err

    def test_weights_that_change_between_check_and_use(
        self, mpu: Callable, root: Path, private: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another file under the name once its header was read: what was loaded is compared with what was opened."""
        from mpu_cli.models import loading

        copy, read = publish_copy(mpu, root), loading.AutoConfig.from_pretrained

        def swap(*arguments: object, **options: object) -> object:
            os.replace(private / "model.safetensors", copy / "model.safetensors")
            monkeypatch.setattr(loading.AutoConfig, "from_pretrained", read)
            return read(*arguments, **options)

        opened = open_checkpoint(copy / "model.safetensors")
        opened.tensor("model.norm.weight")  # mapped, as it is once its fingerprint was taken
        monkeypatch.setattr(loading.AutoConfig, "from_pretrained", swap)
        from mpu_cli.models.source import Model, open_model

        copy_model = open_model(str(copy))
        model = Model(copy_model.source, opened, copy_model.config, copy_model.config_path, copy_model.folder)
        with pytest.raises(MpuError, match="differs from this file"):
            loading.load(model, torch.float32, "cpu")


class TestAChatTemplateThatNeverEnds:
    @pytest.mark.parametrize(
        "template",
        [
            "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
            "{% endfor %}",
            "{{ 'a' * 10**9 }}",
            "{% set x = namespace(s='aaaa') %}{% for i in range(60) %}{% set x.s = x.s + x.s %}{% endfor %}{{ x.s }}",
            "{{ (10**9000000)|string|length }}{{ 10**(10**9) }}",
        ],
        ids=["loops", "text", "doubling", "number"],
    )
    def test_it_is_stopped(self, mpu: Callable, root: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sandbox, "SECONDS", 2.0)
        copy = publish_copy(mpu, root)
        (copy / "chat_template.jinja").write_text(template)
        started = time.monotonic()
        refused = unlearn_copy(mpu, root, copy, "d", check=False)
        assert refused.status == 1
        assert "chat template" in refused.err
        assert "cannot be used" in refused.err or "rejected" in refused.err  # stopped from outside, or out of memory
        assert refused.is_one_error
        assert time.monotonic() - started < 60

    def test_rendering_is_transformers_own(self, demo: DemoModel) -> None:
        _, tokenizer = load(demo.model, torch.float32, "cpu")
        dialogues = [
            [{"role": "user", "content": text}, {"role": "assistant", "content": "x\u2028</s>"}]
            for text in ("w4", "ünïcode\n{{ 7*7 }}")
        ]
        for end in (dialogues, [dialogue[:1] for dialogue in dialogues]):
            for prompt in (True, False):
                texts = chat.render(tokenizer, end, generation_prompt=prompt)
                assert texts == tokenizer.apply_chat_template(end, add_generation_prompt=prompt, tokenize=False)


def archive(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.USTAR_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as out:
        for member, content in members:
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


FOLDER = (member("copy_1", tarfile.DIRTYPE), b"")


ARCHIVES = {
    "link and file through it": [FOLDER, (member("copy_1/x", tarfile.SYMTYPE, "../.."), b""),
                                 (member("copy_1/x/escaped"), b"!")],
    "link of the name of a file": [FOLDER, (member("copy_1/model", tarfile.SYMTYPE, "/tmp/escaped"), b""),
                                   (member("copy_1/model"), b"!")],
    "hard link": [FOLDER, (member("copy_1/x", tarfile.LNKTYPE, "/etc/passwd"), b"")],
    "parent": [(member("../escaped"), b"!")],
    "parent inside": [FOLDER, (member("copy_1/../escaped"), b"!")],
    "absolute": [(member("/tmp/escaped"), b"!")],
    "device": [FOLDER, (member("copy_1/x", tarfile.CHRTYPE), b"")],
    "FIFO": [FOLDER, (member("copy_1/x", tarfile.FIFOTYPE), b"")],
    "two folders": [FOLDER, (member("other", tarfile.DIRTYPE), b"")],
    "a file only": [(member("copy_1"), b"!")],
    "nested": [FOLDER, (member("copy_1/a", tarfile.DIRTYPE), b""), (member("copy_1/a/b"), b"!")],
    "twice": [FOLDER, (member("copy_1/x"), b"1"), (member("copy_1/x"), b"2")],
    "hidden": [FOLDER, (member("copy_1/.bashrc"), b"!")],
}  # fmt: skip


class TestASealedCopyThatWritesElsewhere:
    @pytest.mark.parametrize("attack", ARCHIVES)
    def test_members(self, mpu: Callable, root: Path, attack: str) -> None:
        make_identity(root / "id.txt")
        identity = pyrage.x25519.Identity.from_str((root / "id.txt").read_text().split()[-1])
        (root / "x.age").write_bytes(pyrage.encrypt(archive(*ARCHIVES[attack]), [identity.to_public()]))
        before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
        refused = mpu("unlearn", "x.age", "--identity", "id.txt", "--out", "d.safetensors", check=False, cwd=root)
        assert refused.status == 1
        assert "contains no copy of a model" in refused.err
        assert refused.is_one_error
        assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
        assert not Path("/tmp/escaped").exists()

    @pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    def test_names_that_need_extended_headers(self, tmp_path: Path, form: int) -> None:
        """Whose size tarfile would read into memory."""
        tar_bytes = archive(FOLDER, (member("copy_1/" + "a" * 300), b"!"), form=form)
        with pytest.raises(MpuError, match=r"refused|is not a file"):
            unpack_folder(io.BytesIO(tar_bytes), tmp_path)

    def test_sparse_and_truncated(self, tmp_path: Path) -> None:
        tar_bytes = bytearray(archive(FOLDER, (member("copy_1/x"), b"12345")))
        with pytest.raises(MpuError, match="truncated"):
            unpack_folder(io.BytesIO(bytes(tar_bytes[: 2 * 512 + 3])), tmp_path)
        sparse = member("copy_1/y", tarfile.GNUTYPE_SPARSE)
        with pytest.raises(MpuError, match="is not a file"):
            unpack_folder(io.BytesIO(archive(FOLDER)[:512] + sparse.tobuf()), _new_folder(tmp_path / "sparse"))

    def test_what_a_killed_command_left_is_removed(self, tmp_path: Path) -> None:
        """Plaintext of a sealed copy: a process that is killed cannot remove it, the next one does."""
        program = (
            "import sys, time\nfrom pathlib import Path\nfrom mpu_cli.checkpoint.transaction import Transaction\n"
            f"with Transaction() as t:\n    f = t.scratch(Path({str(tmp_path)!r}))\n    (f / 'plain').write_text('x')\n"
            "    print('ready', flush=True)\n    time.sleep(60)\n"
        )
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        [scratch_folder] = tmp_path.iterdir()
        assert remove_abandoned(tmp_path) == []  # it is at work
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert remove_abandoned(tmp_path) == [scratch_folder]
        assert list(tmp_path.iterdir()) == []


def test_noise_of_dp_sgd_does_not_hang_on_32_bits() -> None:
    """Seeds that agree in all but one of 256 bits give unrelated noise; torch's generator keeps 32 of them."""
    seed = bytes(range(32))
    x = torch.zeros(20_000)
    noise = with_noise(x, 1.0, Randomness(seed).key("dp noise", 0, 0))
    for bit in (0, 31, 32, 64, 200, 255):
        other = bytearray(seed)
        other[bit // 8] ^= 1 << bit % 8
        other_noise = with_noise(x, 1.0, Randomness(bytes(other)).key("dp noise", 0, 0))
        assert abs(float(noise @ other_noise)) / len(x) < 5 / len(x) ** 0.5
    old = [torch.randn(8, generator=torch.Generator().manual_seed(s)) for s in (7, 7 + 2**32)]
    assert torch.equal(*old)  # what was wrong with torch's


class TestADeltaThatListsTheWords:
    def test_rows_of_embeddings(self, mpu: Callable, tmp_path: Path) -> None:
        """Trained, the rows that moved are the records' tokens; as a default, nothing of them leaves."""
        save(random_model("llama-biases", vocab_size=400), tmp_path / "base")  # untied, and most tokens in no record
        write_records(tmp_path / "forget.jsonl", 6, 1)
        write_records(tmp_path / "retain.jsonl", 6, 2)
        for out, options in (("trained", ["--train-embeddings"]), ("default", [])):
            mpu("unlearn", "base", *TRAINING, *options, "--out", f"{out}.safetensors", cwd=tmp_path)
        name = "model.embed_tokens.weight"
        base, delta = load_file(tmp_path / "base/model.safetensors"), load_file(tmp_path / "trained.safetensors")
        rows = moved_rows(delta[name], base[name])
        assert rows is not None
        _, tokenizer = load(tmp_path / "base", torch.float32, "cpu")
        text = (tmp_path / "forget.jsonl").read_text() + (tmp_path / "retain.jsonl").read_text()
        words = {tokenizer.convert_tokens_to_ids(f"w{i}") for i in range(3, 96) if f"w{i} " in text or f'w{i}"' in text}
        listed = set(rows.nonzero()[:, 0].tolist())
        assert len(words & listed) >= 0.9 * len(words)
        assert len(listed - words) <= 8  # the template's own
        default_delta = load_file(tmp_path / "default.safetensors")
        assert not {n for n in default_delta if "embed" in n or "lm_head" in n}
        document = mpu("audit-delta", "base", "trained.safetensors", "--json", cwd=tmp_path).json
        [reading] = [each for each in document if (each["tensor"], each["rule"]) == (name, "rows that moved")]
        assert reading["tells"]
        assert min(reading["precision"], reading["recall"]) > 0.9

    def test_positions_tell_the_longest_record(self, mpu: Callable, tmp_path: Path) -> None:
        save(random_model("gpt2"), tmp_path / "base")
        write_records(tmp_path / "forget.jsonl", 4, 1)
        mpu("unlearn", "base", "--algo", "gradascent", "--epochs", 1, "--train-embeddings", "--out", "d.safetensors",
            cwd=tmp_path)  # fmt: skip
        document = mpu("audit-delta", "base", "d.safetensors", "--json", cwd=tmp_path).json
        assert any("longest record has" in (each["fact"] or "") for each in document)

    def test_a_round_without_embeddings_aggregates(self, mpu: Callable, root: Path) -> None:
        """Their change is zero; a round in which one copy trained them and another did not is refused."""
        publish_copy(mpu, root)
        for k, options in ((1, []), (2, ["--train-embeddings"])):
            mpu("unlearn", f"copy_{k}", *TRAINING, *options, cwd=root)
        refused = mpu("aggregate", "deltas", "--keys", "keys.bin", check=False, cwd=root)
        assert "tensors differ" in refused.err
        mpu("unlearn", "copy_2", *TRAINING, "--force", cwd=root)
        mpu("aggregate", "deltas", "--keys", "keys.bin", "--out", "after", cwd=root)
        before, after = (load_file(root / name / "model.safetensors") for name in ("base", "after"))
        assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
        assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])


class TestTheSpool:
    RUN = "r/round_1"

    def arrive(self, mpu: Callable, root: Path) -> Spool:
        """Two copies in a spool."""
        mpu("publish", "base", "--copies", 2, "--run", "r", "--seed", 1, cwd=root)
        spool = Spool(root / "spool")
        spool.inbox_path(f"{self.RUN}/copy_1").parent.mkdir(parents=True)
        for k in (1, 2):
            shutil.move(root / f"copy_{k}", spool.inbox_path(f"{self.RUN}/copy_{k}"))
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
            delta = spool.delta(f"{self.RUN}/copy_{k}")
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
        first_copy, second_copy = (spool.inbox_path(f"{self.RUN}/copy_{k}") for k in (1, 2))
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
        good = spool.inbox_path(f"{self.RUN}/copy_2")
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

    def test_a_copy_that_takes_too_long(self, mpu: Callable, root: Path) -> None:
        spool = self.arrive(mpu, root)
        result = self.watch(mpu, root, "--copy-timeout", 1)
        assert "not done after 1 s" in result.err
        assert spool.state(f"{self.RUN}/copy_1") == "failed"

    def test_what_is_taken_cannot_be_changed_any_more(self, root: Path) -> None:
        """A file that shrinks while it is mapped ends a process; one in a private copy cannot."""
        spool = Spool(root / "spool")
        copy = spool.inbox_path("r/round_1/copy_1")
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


def _new_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


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
    @pytest.mark.slow
    def test_two_deltas_added_at_once(self, mpu: Callable, root: Path, shell: Callable) -> None:
        publish_copy(mpu, root)
        for k in (1, 2):
            mpu("unlearn", f"copy_{k}", *TRAINING, cwd=root)
        add = "mpu aggregate deltas/copy_{}.safetensors --keys keys.bin --running sum"
        done = shell(f"({add.format(1)}) & a=$!; ({add.format(2)}) & b=$!; wait $a && wait $b")
        assert done.returncode == 0, done.stderr
        mpu("aggregate", "deltas", "--keys", "keys.bin", "--out", "at_once", cwd=root)
        running_sum, direct_sum = (load_file(root / name / "model.safetensors") for name in ("unlearned", "at_once"))
        assert all(torch.allclose(running_sum[name], direct_sum[name], atol=1e-6) for name in running_sum)

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


@contextmanager
def server(reply: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[dict]]]:
    """An HTTP server on this machine, and the headers of what it was asked."""
    request_headers: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            request_headers.append(dict(self.headers))
            reply(self)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(HTTPServer):
        def handle_error(self, *_: object) -> None:
            pass  # a client that has read enough hangs up

    served = Quiet(("127.0.0.1", 0), Handler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{served.server_port}/v1", request_headers
    finally:
        served.shutdown()
        served.server_close()


def answer(body: bytes, status: int = 200, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return reply


class TestAnEndpoint:
    def evaluate(self, mpu: Callable, root: Path, url: str):
        return mpu("eval", "base", "--benchmark", "qa", "--forget", "forget.jsonl", "--endpoint", url, check=False,
                   cwd=root)  # fmt: skip

    def test_its_key_goes_nowhere_else(self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not the key of another service, not over http to another machine, not on to where it redirects."""
        monkeypatch.setenv("OPENAI_API_KEY", "of another service")
        with (
            server(answer(b"{}")) as (other, other_headers),
            server(answer(b"", 302, Location=f"{other}/x")) as (url, headers),
        ):
            result = self.evaluate(mpu, root, url)
            assert result.is_one_error
            assert "redirects to" in result.err
            assert "Authorization" not in headers[0]
            monkeypatch.setenv("MPU_ENDPOINT_KEY", "secret")
            self.evaluate(mpu, root, url)
            assert headers[-1]["Authorization"] == "Bearer secret"
            assert other_headers == []
        result = self.evaluate(mpu, root, "http://192.0.2.1/v1")
        assert "is not sent over http" in result.err

    @pytest.mark.parametrize(
        "body",
        [
            b"[]", b"null", b'{"data": 1}', b'{"data": [{"id": "m"}], "choices": [{"index": "x"}]}', b"\xff\xfe",
            b'{"data": [{"id": "m"}], "choices": 3}', b"[" * 100_000, b" " * (8 << 20),
            b'{"data": [{"id": "m"}], "choices": [' + b",".join([b'{"logprobs": {"token_logprobs": {}}}'] * 6) + b"]}",
            b'{"data": [{"id": "m"}], "choices": [' + b",".join([b'{"logprobs": []}'] * 6) + b"]}",
            b'{"data": [{"id": "m"}], "choices": [' + b",".join([b"null"] * 6) + b"]}",
        ],
        ids=range(11),
    )  # fmt: skip
    def test_malformed_replies_are_one_error(self, mpu: Callable, root: Path, body: bytes) -> None:
        with server(answer(body)) as (url, _):
            result = self.evaluate(mpu, root, url)
        assert result.status == 1
        assert result.is_one_error, result.err
        assert "unexpected" not in result.err


class TestWhatLeavesTheServer:
    def test_no_path_and_no_code(self, mpu: Callable, root: Path) -> None:
        """Whatever JSON beside the weights says: paths, nested or not, repositories and code stay at home."""
        secret = str(root)
        base = root / "base"
        edit(base / "config.json", _name_or_path=secret, auto_map={"AutoModel": f"{secret}/x.py--X"},
             rope_parameters={"rope_type": "default", "rope_theta": 1e4, "_name_or_path": secret},
             internal_notes=f"trained in {secret}")  # fmt: skip
        edit(base / "tokenizer_config.json", tokenizer_file=f"{secret}/t.json", special_tokens_map_file=f"{secret}/s",
             name_or_path=secret, auto_map={"AutoTokenizer": [secret, None]})  # fmt: skip
        (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "_from": secret, "prompt": "hi"}))
        (base / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 2}, "cache_dir": secret}))
        publish_copy(mpu, root)
        for k in (1, 2):
            mpu("unlearn", f"copy_{k}", *TRAINING, "--lora-rank", 2, cwd=root)
        mpu("aggregate", "deltas", "--keys", "keys.bin", "--out", "model", cwd=root)
        mpu("aggregate", "deltas", "--keys", "keys.bin", "--as-adapter", "--out", "adapter", cwd=root)
        for name in ("config.json", "tokenizer_config.json"):  # the result is the server's own
            assert (root / "model" / name).read_bytes() == (base / name).read_bytes()
        for folder in ("copy_1", "adapter"):
            for path in (root / folder).iterdir():
                content = path.read_bytes()
                assert secret.encode() not in content, path
                assert b"auto_map" not in content
                assert b"internal_notes" not in content
        assert json.loads((root / "copy_1/generation_config.json").read_text()) == {"eos_token_id": 1}
        assert json.loads((root / "copy_1/preprocessor_config.json").read_text()) == {"size": {"height": 2}}
        load(root / "copy_1", torch.float32, "cpu")

    def test_what_is_published_as_it_is_is_said(self, mpu: Callable, tmp_path: Path) -> None:
        """A vision tower has neither noise nor coordinates: its share stands in what publish and plan print."""
        save(random_model("gemma3"), tmp_path / "base")
        outcome = mpu("publish", "base", "--copies", 2, cwd=tmp_path)
        bare = [n for n in load_file(tmp_path / "base/model.safetensors") if n.startswith(("vision", "model.vision"))]
        base, copy = (load_file(tmp_path / n / "model.safetensors") for n in ("base", "copy_1"))
        same = sum(base[n].numel() for n in base if n in copy and torch.equal(base[n], copy[n]))
        assert bare
        assert f"{same:,} of" in outcome.err
        assert "without noise or secret coordinates" in outcome.err
        assert f"{same:,} of" in mpu("plan", "base", cwd=tmp_path).out
        assert f"{same:,} of" in mpu("publish", "base", "--dry-run", "--out", "x", "--keys", "y", cwd=tmp_path).out


def imprint():
    """examples/imprint.py, which plants the traps."""
    path = Path(__file__).parents[1] / "examples/imprint.py"
    spec = importlib.util.spec_from_file_location("imprint", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestACraftedCopy:
    def test_an_untied_copy_of_a_tied_model(self, mpu: Callable, root: Path) -> None:
        """Leaves the function as it was, and makes a delta list tokens; a public model gives it away."""
        public = save(random_model("llama", seed=5), root / "public")
        copy = publish_copy(mpu, root)
        unlearn_copy(mpu, root, copy, "honest", "--like", public)
        default_ledger_path().unlink()  # else the ledger tells that this is not the copy of before
        weights = load_file(copy / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, copy / "model.safetensors", open_checkpoint(copy / "model.safetensors").metadata)
        edit(copy / "config.json", tie_word_embeddings=False)
        refused = unlearn_copy(mpu, root, copy, "d", "--like", public, check=False)
        assert refused.status == 1
        assert "tie_word_embeddings" in refused.err
        assert "lm_head.weight" in refused.err
        assert not (root / "d.safetensors").exists()
        outcome = unlearn_copy(mpu, root, copy, "d", "--like", public, "--trust-copy")
        assert "tie_word_embeddings" in outcome.err
        assert "lm_head.weight" not in load_file(root / "d.safetensors")  # not trained unless asked

    @pytest.mark.parametrize("change", ["tokenizer", "template", "width"])
    def test_what_else_a_public_model_shows(self, mpu: Callable, root: Path, change: str) -> None:
        public = save(random_model("llama", seed=5), root / "public")
        copy = publish_copy(mpu, root)
        if change == "tokenizer":
            text = (copy / "tokenizer.json").read_text().replace('"w9"', '"w9x"')
            (copy / "tokenizer.json").write_text(text)
        elif change == "template":
            (copy / "chat_template.jinja").write_text((public / "chat_template.jinja").read_text() + " ")
        else:
            weights = load_file(copy / "model.safetensors")
            weights["model.layers.0.mlp.up_proj.weight"][:9] *= 1e4
            save_file(weights, copy / "model.safetensors", open_checkpoint(copy / "model.safetensors").metadata)
        refused = unlearn_copy(mpu, root, copy, "d", "--like", public, check=False)
        assert refused.status == 1
        says = {"tokenizer": "vocabulary", "template": "chat template", "width": "rows of another size"}[change]
        assert says in refused.err

    def test_a_copy_unlike_the_others_of_its_round(self, mpu: Callable, root: Path) -> None:
        publish_copy(mpu, root)
        unlearn_copy(mpu, root, root / "copy_1", "d1")
        weights = load_file(root / "copy_2/model.safetensors")
        weights = {name: tensor * (4 if "embed" in name else 1) for name, tensor in weights.items()}
        save_file(weights, root / "copy_2/model.safetensors",
                  open_checkpoint(root / "copy_2/model.safetensors").metadata)  # fmt: skip
        refused = unlearn_copy(mpu, root, root / "copy_2", "d2", check=False)
        assert refused.status == 1
        assert "that of copy 1" in refused.err
        unlearn_copy(mpu, root, root / "copy_2", "d2", "--trust-copy")

    def test_another_publication_of_the_same_name(self) -> None:
        """What --seed names alike is not compared; copies of one publication are."""

        def entry(copy: int, weights: str) -> LedgerEntry:
            return LedgerEntry(weights, "run", 1, copy, weights, "npo", 4, data="records")

        old = [replace(entry(1, "a"), forget=0.04), replace(entry(2, "b"), forget=0.04)]
        again = replace(entry(1, "c"), forget=5.0)
        assert against_others(again, {"forget": 5.0}, old) == []
        [sign] = against_others(entry(2, "d"), {"forget": 0.04}, [*old, again])
        assert "that of copy 1 5.000" in sign.what
        assert against_others(entry(2, "d"), {"forget": 5.1}, [*old, again]) == []

    @pytest.mark.slow
    def test_trap_units(self, mpu: Callable, tmp_path: Path, demo: DemoModel) -> None:
        """They hand hidden states of single tokens over, exactly; the check sees them before anything is trained."""
        from mpu_cli.records.encoding import Encoding
        from mpu_cli.records.reading import read_records

        records = ["--forget", demo.forget, "--retain", demo.retain]
        training = [
            *records,
            "--epochs",
            1,
            "--optim",
            "sgd",
            "--lr",
            "1e-3",
            "--max-grad-norm",
            1e9,
            "--batch-size",
            64,
        ]
        mpu("publish", demo.model, "--copies", 2, "--kappa", 0, "--symmetries", "none", cwd=tmp_path)
        copy = tmp_path / "copy_1"
        mpu("unlearn", copy, *training, "--out", "honest.safetensors", cwd=tmp_path)
        model, tokenizer = load(copy, torch.float32, "cpu")
        examples = Encoding(tokenizer).encode([*read_records(demo.forget), *read_records(demo.retain)])
        imprint().plant_traps(copy, [example.ids for example in examples], units=100)
        refused = mpu("unlearn", copy, *training, "--out", "d.safetensors", check=False, cwd=tmp_path)
        assert refused.status == 1
        assert "units built to record single tokens" in refused.err
        shutil.copytree(copy, tmp_path / "nameless", ignore=shutil.ignore_patterns("mpu.json"))
        weights = load_file(tmp_path / "nameless/model.safetensors")
        save_file(weights, tmp_path / "nameless/model.safetensors", {"format": "pt"})
        refused = mpu("unlearn", "nameless", *training, "--out", "d.safetensors", check=False, cwd=tmp_path)
        assert "units built to record single tokens" in refused.err
        mpu("unlearn", copy, *training, "--trust-copy", "--out", "d.safetensors", cwd=tmp_path)
        # What the server would read, had the client not looked: rows that are hidden states of the records.
        model, _ = load(copy, torch.float32, "cpu")
        states = torch.nn.functional.normalize(
            torch.cat(imprint().ffn_inputs(model, [e.ids for e in examples], 1)), dim=1
        )

        def rows_along_states(delta: Path) -> int:
            rows = load_file(delta)["model.layers.1.mlp.up_proj.weight"][:100]
            rows = rows[rows.norm(dim=1) > 0]
            cosines = torch.nn.functional.normalize(rows, dim=1) @ states.T
            return int((cosines.abs().amax(1) > 0.999).sum())

        assert rows_along_states(tmp_path / "d.safetensors") >= 20
        assert rows_along_states(tmp_path / "honest.safetensors") == 0


class TestACopyThatFailsOnAWord:
    """Whether it failed would tell the server what the records say."""

    @pytest.fixture
    def word(self, root: Path) -> str:
        """One that a single record has."""
        lines = (root / "forget.jsonl").read_text().splitlines()
        words = [set(json.loads(line)["answer"].split()) for line in lines]
        return next(word for word in sorted(words[0]) if not any(word in other for other in words[1:]))

    def test_a_row_that_is_not_a_number(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        weights = load_file(copy / "model.safetensors")
        weights["model.embed_tokens.weight"][7] = float("nan")
        save_file(weights, copy / "model.safetensors", open_checkpoint(copy / "model.safetensors").metadata)
        refused = unlearn_copy(mpu, root, copy, "d", check=False)
        assert "'model.embed_tokens.weight' holds NaN or Inf" in refused.err
        assert refused.is_one_error

    def test_a_template_that_raises(self, mpu: Callable, root: Path, word: str) -> None:
        copy = publish_copy(mpu, root)
        template = (copy / "chat_template.jinja").read_text()
        trap = "{% for m in messages %}{% if 'WORD' in m.content.split() %}{{ raise_exception('x') }}{% endif %}"
        trap = trap.replace("WORD", word) + "{% endfor %}"
        (copy / "chat_template.jinja").write_text(trap + template)
        refused = unlearn_copy(mpu, root, copy, "d", check=False)
        assert "forget.jsonl, line 1: the tokenizer's chat template rejected it (x)" in refused.err
        ledger = Path(os.environ["XDG_CONFIG_HOME"]) / "mpu/ledger.jsonl"
        assert len(ledger.read_text().splitlines()) == 1  # it counts, because it told something
        outcome = unlearn_copy(mpu, root, copy, "d", "--dp-epsilon", 8)
        assert "1 of 6 records of the forget set are left out" in outcome.err
        assert (root / "d.safetensors").exists()

    def test_a_layer_that_overflows_under_dp(self, mpu: Callable, root: Path, word: str) -> None:
        copy = publish_copy(mpu, root, "--symmetries", "none")
        tokenizer = json.loads((copy / "tokenizer.json").read_text())
        weights = load_file(copy / "model.safetensors")
        weights["model.embed_tokens.weight"][tokenizer["model"]["vocab"][word]] = 3e38
        save_file(weights, copy / "model.safetensors", open_checkpoint(copy / "model.safetensors").metadata)
        assert "diverged" in unlearn_copy(mpu, root, copy, "d", "--trust-copy", check=False).err
        unlearn_copy(mpu, root, copy, "d", "--dp-epsilon", 8, "--trust-copy")
        assert all(tensor.isfinite().all() for tensor in load_file(root / "d.safetensors").values())


class TestATokenizerThatNeverEnds:
    def test_rules_that_grow_a_word(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        rules = [{"type": "Replace", "pattern": {"String": "w"}, "content": "w" * 300} for _ in range(5)]
        tokenizer = json.loads((copy / "tokenizer.json").read_text())
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": rules}
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
        refused = unlearn_copy(mpu, root, copy, "d", check=False)
        assert "chat template or tokenizer cannot be used" in refused.err
        assert "GiB of memory" in refused.err or "longer than" in refused.err
        assert refused.is_one_error

    def test_one_that_panics(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        tokenizer = json.loads((copy / "tokenizer.json").read_text())
        tokenizer["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
        refused = unlearn_copy(mpu, root, copy, "d", check=False)
        assert refused.status == 1
        assert "tokenizer" in refused.err
        assert refused.is_one_error

    def test_rules_that_add_a_thousand_tokens_to_each_text(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        tokenizer = json.loads((copy / "tokenizer.json").read_text())
        word, number = next(iter(tokenizer["model"]["vocab"].items()))
        many = [{"SpecialToken": {"id": word, "type_id": 0}}] * 100_000
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}, *many],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {word: {"id": word, "ids": [number], "tokens": [word]}},
        }  # fmt: skip
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
        refused = unlearn_copy(mpu, root, copy, "d", "--template", "plain", check=False)
        assert "characters become 100," in refused.err
        assert refused.is_one_error

    def test_a_module_beside_the_copy_is_not_imported(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """By the process that contains templates and tokenizers: a copy's folder may be the current one."""
        for name in ("tokenizers", "json", "transformers"):
            (root / f"{name}.py").write_text(f"open({str(root / 'ran')!r}, 'w')")
        process = sandbox.Process()
        monkeypatch.chdir(root)
        try:
            assert process.load("{}")[0] is False
        finally:
            process.stop()
        assert not (root / "ran").exists()

    @pytest.mark.slow
    def test_it_ends_without_its_parent(self) -> None:
        """Whoever started it may have been killed: then the limit of time ends it."""
        program = (
            "import mpu_cli.boundary.sandbox as sandbox, threading, time, os\n"
            "sandbox.SECONDS = 8.0\n"
            "loops = '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}'\n"
            "ask = lambda: sandbox.PROCESS.render({'chat_template': loops}, [[]], 1000)\n"
            "threading.Thread(target=ask, daemon=True).start()\n"
            "while sandbox.PROCESS._process is None: time.sleep(0.05)\n"
            "print(sandbox.PROCESS._process.pid, flush=True)\n"
            "time.sleep(6)\nos._exit(1)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        child = Path(f"/proc/{int(done.stdout)}")
        time.sleep(1)
        assert child.exists()  # still at it: that nobody writes to it any more does not stop a loop
        ends = time.monotonic() + 60
        while child.exists() and time.monotonic() < ends:
            time.sleep(0.1)
        assert not child.exists()

    @pytest.mark.parametrize("template", [{"a": "x"}, {"default": "\ud800"}])
    def test_templates_that_are_none(self, mpu: Callable, root: Path, template: dict) -> None:
        copy = publish_copy(mpu, root)
        (copy / "chat_template.jinja").unlink()
        listed = [{"name": name, "template": text} for name, text in template.items()]
        edit(copy / "tokenizer_config.json", chat_template=listed)
        refused = unlearn_copy(mpu, root, copy, "d", check=False)
        assert refused.status == 1
        assert "template" in refused.err
        assert refused.is_one_error


class TestAnAdapter:
    @pytest.fixture
    def adapter(self, mpu: Callable, root: Path) -> Path:
        publish_copy(mpu, root)
        for k in (1, 2):
            unlearn_copy(mpu, root, root / f"copy_{k}", f"deltas/copy_{k}", "--lora-rank", 2)
        mpu("aggregate", "deltas", "--keys", "keys.bin", "--as-adapter", "--out", "adapter", cwd=root)
        return root / "adapter"

    ASKED = ("--benchmark", "qa", "--forget", "forget.jsonl", "--metrics", "forget_Q_A_Prob", "--force", "--json")

    def measure(self, mpu: Callable, root: Path, *options: object, check: bool = True):
        return mpu("eval", "adapter", *self.ASKED, *options, check=check, cwd=root)

    def test_its_base_is_not_looked_for(self, mpu: Callable, root: Path, adapter: Path) -> None:
        honest = self.measure(mpu, root).json["metrics"]  # beside it
        for base in (str(root / "base"), "somebody/tracking", "../place/base"):
            edit(adapter / "adapter_config.json", base_model_name_or_path=base)
            refused = self.measure(mpu, root, check=False)
            assert "name it with --base" in refused.err
            assert refused.is_one_error
        assert self.measure(mpu, root, "--base", "base").json["metrics"] == honest

    def test_expressions_and_sizes_in_its_config(
        self, mpu: Callable, root: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        honest = self.measure(mpu, root).json["metrics"]
        config = json.loads((adapter / "adapter_config.json").read_text())
        edit(adapter / "adapter_config.json", target_modules="(([a-z_.0-9])*)*X", r=10**6, layers_pattern="(a*)*b",
             rank_pattern={"(a*)*b": 10**6}, exclude_modules="(([a-z_.0-9])*)*X")  # fmt: skip
        assert self.measure(mpu, root).json["metrics"] == honest
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "alpha_pattern": {"(([a-z_.0-9])*)*X": 1}}))
        monkeypatch.setattr(sandbox, "SECONDS", 2.0)
        assert "it took longer" in self.measure(mpu, root, check=False).err

    def test_tensors_without_a_place(self, mpu: Callable, root: Path, adapter: Path) -> None:
        weights = load_file(adapter / "adapter_model.safetensors")
        save_file({name.replace("layers.1.", "layers.9."): t for name, t in weights.items()},
                  adapter / "adapter_model.safetensors")  # fmt: skip
        refused = self.measure(mpu, root, check=False)
        assert refused.status == 1
        assert "layers.9" in refused.err

    @pytest.mark.parametrize("kind", ["dora", "saved", "biases"])
    def test_honest_adapters_of_other_kinds(self, root: Path, kind: str) -> None:
        from peft import LoraConfig, get_peft_model

        base, _ = load(root / "base", torch.float32, "cpu")
        more = {"dora": {"use_dora": True}, "saved": {"modules_to_save": ["norm"]}, "biases": {"bias": "lora_only"}}
        adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **more[kind]))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(
                        0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                    )
        adapted.save_pretrained(root / "adapter")
        loaded_model = with_adapter(load(root / "base", torch.float32, "cpu")[0], root / "adapter")
        ids = torch.tensor([[3, 5, 7]])
        expected = adapted.eval()(input_ids=ids).logits
        torch.testing.assert_close(loaded_model.eval()(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)

    def test_weights_that_are_a_link(self, mpu: Callable, root: Path, adapter: Path) -> None:
        (adapter / "adapter_model.safetensors").rename(root / "elsewhere")
        (adapter / "adapter_model.safetensors").symlink_to(root / "elsewhere")
        refused = self.measure(mpu, root, check=False)
        assert "is a link" in refused.err


class TestSmallThings:
    def test_a_config_larger_than_the_weights(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        edit(copy / "config.json", vocab_size=30_000_000)
        started = time.monotonic()
        refused = unlearn_copy(mpu, root, copy, "d", check=False)
        assert "describes a model of" in refused.err
        assert refused.is_one_error
        assert time.monotonic() - started < 20

    def test_a_header_that_fills_the_memory(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        path = copy / "model.safetensors"
        path.write_bytes((MAX_HEADER + 1).to_bytes(8, "little") + b"[" * (MAX_HEADER + 1))
        refused = unlearn_copy(mpu, root, copy, "d", check=False)
        assert "header is longer" in refused.err

    def test_an_algorithm_that_is_markup(self, mpu: Callable, root: Path) -> None:
        """The delta's word for it stands in the model card."""
        publish_copy(mpu, root)
        for k in (1, 2):
            mpu("unlearn", f"copy_{k}", *TRAINING, cwd=root)
        path = root / "deltas/copy_1.safetensors"
        facts = json.loads(open_checkpoint(path).metadata["mpu"]) | {"algorithm": "npo |\n# Owned\n![](http://x)"}
        save_file(load_file(path), path, as_metadata(facts))
        refused = mpu("aggregate", "deltas", "--keys", "keys.bin", check=False, cwd=root)
        assert "algorithm: not of the form" in refused.err

    def test_facts_of_a_delta_are_plain(self, tmp_path: Path) -> None:
        from mpu_cli.manifest import delta_manifest

        good = delta_facts(DeltaManifest(None, "npo"))
        for bad in (
            {"privacy": {"epsilon": "<script>"}}, {"privacy": {"a b": 1}}, {"trained": {"key": "x" * 999}},
            {"trained": {"key": 1}}, {"run": "r", "round": 1, "copy": 1, "copies": 2, "copy_id": "| x |"},
            {"run": "r\n", "round": 1, "copy": 1, "copies": 2, "copy_id": "x"}, {"round": True, "run": "r"},
        ):  # fmt: skip
            with pytest.raises(MpuError):
                delta_manifest(as_metadata(good | bad), tmp_path)

    def test_two_first_publications_at_once(self, mpu: Callable, root: Path, shell: Callable) -> None:
        """Both keys open with the one identity that was made."""
        done = shell("for i in 1 2 3; do (mpu publish base --copies 2 --out p$i --keys p$i.bin) & done; wait")
        assert done.returncode == 0, done.stderr
        for i in (1, 2, 3):
            assert "symmetries" in mpu("inspect", f"p{i}.bin", cwd=root).out

    def test_another_reference_for_the_second_copy(self, mpu: Callable, root: Path) -> None:
        """Its noise would have another scale than its keys say."""
        save(random_model("llama", seed=5), root / "reference")
        options = ["--reference", "reference", "--copies", 2, "--seed", 1, "--kappa", 0.1]
        mpu("publish", "base", *options, "--only", 1, cwd=root)
        save(random_model("llama", seed=6), root / "reference")
        refused = mpu("publish", "base", *options, "--only", 2, check=False, cwd=root)
        assert refused.status == 1
        assert "another pretrained model" in refused.err
        assert not (root / "copy_2").exists()

    def test_max_norm_bounds_the_update(self, mpu: Callable, root: Path) -> None:
        """Weights of three copies have opposite signs: deltas below the bound can add up to an update above it."""
        mpu("publish", "base", "--copies", 3, "--seed", 1, "--kappa", 0.2, cwd=root)
        for k in (1, 2, 3):
            mpu("unlearn", f"copy_{k}", *TRAINING, "--trust-copy", cwd=root)
        outcome = mpu("aggregate", "deltas", "--keys", "keys.bin", "--json", "--dry-run", check=False, cwd=root)
        assert outcome.status == 0
        norms = [load_file(root / f"deltas/copy_{k}.safetensors") for k in (1, 2, 3)]
        largest = max(float(sum(t.double().square().sum() for t in delta.values()) ** 0.5) for delta in norms)
        refused = mpu("aggregate", "deltas", "--keys", "keys.bin", "--server-lr", 3, "--max-norm", 1.5 * largest,
                      check=False, cwd=root)  # fmt: skip
        assert "the update's norm is" in refused.err

    def test_a_config_with_more_layers_than_weights(self, mpu: Callable, root: Path) -> None:
        """Libraries build them before they look."""
        copy = publish_copy(mpu, root)
        for name, value in (("num_hidden_layers", 10**9), ("max_position_embeddings", 10**12)):
            edit(copy / "config.json", **{name: value})
            (copy / "mpu.json").unlink(missing_ok=True)  # as a model of the client's own would be
            refused = mpu("eval", copy, "--benchmark", "qa", "--forget", "forget.jsonl", check=False, cwd=root)
            assert refused.status == 1
            assert refused.is_one_error
            edit(copy / "config.json", **{name: 2 if name == "num_hidden_layers" else 256})
