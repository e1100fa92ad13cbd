"""What a second round of attacks found, each on real files and through the command line where a party would."""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
import stat
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pyrage
import pytest
import torch
from safetensors.torch import load_file, save_file

from mpu_cli.errors import MpuError
from mpu_cli.files.manifest import delta_manifest
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.files.sealing import default_identity_path, make_identity, parse_recipients, read_identities
from mpu_cli.model.load import longest_independent_input, tokenizer_of
from mpu_cli.model.source import open_model
from mpu_cli.protocol.keys import seal, unseal
from mpu_cli.records import forms
from mpu_cli.records.encode import Encoding
from mpu_cli.records.read import read_records
from mpu_cli.training.data import Dataset, records_digest
from mpu_cli.training.ledger import LedgerEntry, default_ledger_path, read_ledger, write_down
from mpu_cli.training.private import Mechanism, composed_epsilon
from tests.helpers.attacks import edit, unlearn_copy
from tests.helpers.models import CONFIGS, FAMILY_CONFIGS, load, random_model, save

QA = ("--benchmark", "qa", "--forget", "forget.jsonl", "--out", "eval.json")
WORD = "w9"  # which a hostile template or tokenizer treats in another way


def copies(mpu: Callable, root: Path) -> tuple[Path, Path]:
    mpu("publish", "base", "--copies", 2, "--out", root, "--keys", root / "keys.bin", cwd=root)
    return root / "copy_1", root / "copy_2"


def treat_word_differently(copy: Path) -> None:
    template = copy / "chat_template.jinja"
    text = template.read_text()
    assert "m['content']" in text
    template.write_text(text.replace("m['content']", f"(m['content'] | replace('{WORD}', 'w8'))"))


def tags_of(delta: Path) -> dict[str, str] | None:
    return delta_manifest(open_checkpoint(delta).metadata, delta).trained


def write_records_with(word: str, root: Path) -> None:
    """Six records to forget, of which the first holds ``word``."""
    answers = [f"w6 {word}", *(f"w{i}" for i in range(10, 15))]
    rows = [json.dumps({"question": "w4 w5", "answer": answer}) + "\n" for answer in answers]
    (root / "forget.jsonl").write_text("".join(rows))


class TestTags:
    def test_a_copy_that_reads_a_word_differently_is_refused_before_a_record_is_read(
        self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whether the word is in the records or not: the refusal follows from the files."""
        honest, crafted = copies(mpu, root)
        unlearn_copy(mpu, root, honest, "1")
        treat_word_differently(crafted)

        def read(*_: object) -> None:
            raise AssertionError("a record was read")

        monkeypatch.setattr(Encoding, "encode_each", read)
        unlearn_copy(mpu, root, crafted, "2", fails="is not that of another copy of the round", status=1)

    @pytest.mark.parametrize("word", [WORD, "w7"])
    def test_a_tag_says_nothing_of_a_copys_encoding(self, mpu: Callable, root: Path, word: str) -> None:
        """Trained all the same, both copies have one tag, with the word in the records and without."""
        write_records_with(word, root)
        honest, crafted = copies(mpu, root)
        treat_word_differently(crafted)
        for number, copy in enumerate((honest, crafted), 1):
            unlearn_copy(mpu, root, copy, str(number), "--template", "chat", "--trust-copy")
        honest_tags, crafted_tags = (tags_of(root / f"{number}.safetensors") for number in (1, 2))
        assert honest_tags == crafted_tags is not None

    @pytest.mark.slow
    def test_there_is_none_under_dp(self, mpu: Callable, root: Path) -> None:
        honest, _ = copies(mpu, root)
        unlearn_copy(mpu, root, honest, "1", "--dp-epsilon", 8)
        assert not tags_of(root / "1.safetensors")

    @pytest.mark.parametrize("word", [WORD, "w7"])
    def test_a_reference_file_is_no_oracle_either(self, mpu: Callable, root: Path, word: str) -> None:
        """Probabilities of round 1 are refused for a copy of another template, whatever the records hold."""
        write_records_with(word, root)
        honest, _ = copies(mpu, root)
        options = ("--algo", "npo", "--reference-file", "ref.safetensors", "--trust-copy", "--template", "chat")
        unlearn_copy(mpu, root, honest, "1", *options)
        treat_word_differently(honest)
        facts = json.loads((honest / "mpu.json").read_text())
        assert facts["round"] == 1
        edit(honest / "mpu.json", round=2)
        weights = load_file(honest / "model.safetensors")
        metadata = {"mpu": json.dumps(json.loads((honest / "mpu.json").read_text()))}
        save_file(weights, honest / "model.safetensors", metadata)
        unlearn_copy(mpu, root, honest, "2", *options, fails="tokenizer, template or config", status=1)

    def test_a_special_token_cannot_replace_the_template(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _, tokenizer = load(root / "base", torch.float32, "cpu")
        named = {"chat_template": "w9", "add_generation_prompt": "w8", "messages": "w7"}
        monkeypatch.setattr(type(tokenizer), "special_tokens_map", property(lambda _: named))
        [text] = forms.render(tokenizer, [[{"role": "user", "content": "w4"}]], generation_prompt=False)
        assert "w4" in str(text)

    def test_a_normalizer_is_seen_by_like(self, mpu: Callable, root: Path) -> None:
        """The records need not show it: the files' content is compared."""
        honest, _ = copies(mpu, root)
        normalizer = {"type": "Replace", "pattern": {"String": "w99"}, "content": "w98"}
        edit(honest / "tokenizer.json", normalizer=normalizer)
        unlearn_copy(mpu, root, honest, "1", "--public", "base", fails="'normalizer'", status=1)


NAMES = [*CONFIGS, *FAMILY_CONFIGS]
BATCHED_ROPE = {
    "longrope": {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32, "factor": 8.0,
                 "short_factor": [1.0] * 4, "long_factor": [1e-3] * 4},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1000.0},
}  # fmt: skip


class TestDpSgd:
    @pytest.mark.parametrize("kind", BATCHED_ROPE)
    def test_a_record_that_would_change_others_is_left_out(self, kind: str) -> None:
        """Beside the longest record that is let in, a short one has the logits that it has alone, before and after."""
        config = {"rope_parameters": BATCHED_ROPE[kind], "max_position_embeddings": 32 if kind == "dynamic" else 256}
        model = random_model("llama", **config, head_dim=8).eval()
        limit = longest_independent_input(model)
        assert limit == 32
        short, long = [4, 5, 6, 7], [i % 80 + 3 for i in range(limit)]
        beside = [short + [0] * (limit - 4), long]
        mask = [[1] * 4 + [0] * (limit - 4), [1] * limit]
        with torch.no_grad():
            unbatched_logits = model(torch.tensor([short])).logits[0]
            together = model(torch.tensor(beside), attention_mask=torch.tensor(mask)).logits[0, :4]
            after = model(torch.tensor([short])).logits[0]
            too_long = model(torch.tensor([short + [0] * 40, [*long, *long[:12]]])).logits[0, :4]
        assert torch.allclose(unbatched_logits, together, atol=1e-5)
        assert torch.allclose(unbatched_logits, after, atol=1e-5)
        assert not torch.allclose(unbatched_logits, too_long, atol=1e-3)  # the attack that the limit stops

    @pytest.mark.slow
    def test_a_rejected_record_does_not_change_the_rate(self, mpu: Callable, root: Path) -> None:
        """A template that rejects one word: the same rate and steps with the word and without."""
        reports = []
        template = root / "base/chat_template.jinja"
        template.write_text(
            "{% for m in messages if '" + WORD + "' in m.content %}{{ raise_exception('no') }}{% endfor %}"
            + template.read_text()
        )  # fmt: skip
        for word in (WORD, "w7"):
            write_records_with(word, root)
            options = (
                "--algo",
                "gradascent",
                "--dp-epsilon",
                8,
                "--batch-size",
                1,
                "--epochs",
                2,
                "--template",
                "chat",
            )
            reports.append(mpu("unlearn", "base", *options, "--out", f"{word}.safetensors", "--json", cwd=root).json)
        assert reports[0]["lr"] == reports[1]["lr"]
        assert len(reports[0]["steps"]) == len(reports[1]["steps"])

    def test_a_token_beyond_the_vocabulary(self, mpu: Callable, root: Path) -> None:
        """One error that names the record; under DP the record is left out, and the training goes on."""
        table = json.loads((root / "base/tokenizer.json").read_text())
        added = {"id": 96, "content": "zq", "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False, "special": False}  # fmt: skip
        table["added_tokens"].append(added)
        (root / "base/tokenizer.json").write_text(json.dumps(table))
        write_records_with("zq", root)
        options = ("--algo", "gradascent", "--epochs", 1, "--lr", "1e-3")
        mpu("unlearn", "base", *options, fails="forget.jsonl, line 1: the tokenizer returned token", status=1, cwd=root)
        private = mpu("unlearn", "base", *options, "--dp-epsilon", 8, cwd=root)
        assert "1 of 6 records of the forget set are left out" in private.err

    def test_a_set_of_which_nothing_is_left(self, mpu: Callable, root: Path) -> None:
        """To stop would tell that every record was rejected: noise alone is trained on."""
        (root / "base/chat_template.jinja").write_text("{{ raise_exception('no') }}")
        options = ("--algo", "gradascent", "--epochs", 1, "--lr", "1e-3", "--dp-epsilon", 8, "--template", "chat")
        mpu("unlearn", "base", *options, "--out", "d.safetensors", cwd=root)
        assert any(bool(change.any()) for change in load_file(root / "d.safetensors").values())


class TestACopyThatIsNotLookedAt:
    @pytest.mark.slow
    def test_fewer_records_than_it_takes(self, mpu: Callable, root: Path) -> None:
        for name in ("forget", "retain"):
            (root / f"{name}.jsonl").write_text('{"question": "w3", "answer": "w4"}\n')
        refused = mpu("unlearn", "base", "--algo", "graddiff", check=False, cwd=root)
        assert (refused.status, "cannot be looked at for traps: that takes 4 records" in refused.err) == (1, True)
        mpu("unlearn", "base", "--algo", "graddiff", "--trust-copy", cwd=root)

    def test_a_foreign_architecture(self, mpu: Callable, root: Path) -> None:
        from transformers import BertConfig, BertLMHeadModel

        config = BertConfig(
            vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
            is_decoder=True, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        )  # fmt: skip
        BertLMHeadModel(config).save_pretrained(root / "bert")
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (root / "bert" / file).write_bytes((root / "base" / file).read_bytes())
        mpu("unlearn", "bert", "--algo", "graddiff", fails="is not an architecture of mpu's", status=1, cwd=root)


class TestAPlantedCheckpoint:
    def test_one_that_mpu_did_not_write(self, mpu: Callable, root: Path) -> None:
        """Planted beside the delta, with a seal made with another secret: nothing is trained on it."""
        honest, _ = copies(mpu, root)
        planted = root / "d.safetensors.resume/checkpoint-1"
        planted.mkdir(parents=True)
        for name in ("model.safetensors", "config.json"):
            (planted / name).write_bytes((honest / name).read_bytes())
        (planted / "trainer_state.json").write_text("{}")
        (planted / "mpu-seal.json").write_text(json.dumps({"hmac-sha256": "0" * 64}))
        unlearn_copy(mpu, root, honest, "d", "--resume", fails="not a checkpoint that this mpu wrote", status=1)
        (planted / "mpu-seal.json").unlink()
        unlearn_copy(mpu, root, honest, "d", "--resume")  # it counts as one that was never finished


class TestPrograms:
    @pytest.mark.slow
    def test_a_module_in_the_current_folder_is_not_imported(self, tmp_path: Path) -> None:
        from mpu_cli.subprocesses import python_command, safe_environment

        for module in ("multiprocessing", "torch", "json", "mpu_cli", "tokenizers"):
            (tmp_path / module).mkdir()
            (tmp_path / module / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        for entry in (("mpu_cli.entry", "main", "--version"), ("mpu_cli.flower.watch", "serve", "0")):
            subprocess.run(
                python_command(*entry), cwd=tmp_path, env=safe_environment(), input=b"", capture_output=True,
                check=False, timeout=120,
            )  # fmt: skip
        assert not (tmp_path / "ran").exists()


def _train_within_budget(path: str, number: int, budget: float) -> bool:
    mechanism = Mechanism(20.0, 0.1, 10)
    try:
        entry = LedgerEntry(f"{number}", "r", 1, number, f"w{number}", "npo", 4, mechanism=mechanism)
        write_down(Path(path), entry, delta=1e-5, budget=budget)
    except MpuError:
        return False
    return True


class TestTheLedger:
    @pytest.mark.slow
    def test_parallel_first_trainings_share_a_budget(self, tmp_path: Path) -> None:
        """Of eight at once in four processes, one may begin, and no line is lost."""
        mechanism = Mechanism(20.0, 0.1, 10)
        one_training, two_trainings = (composed_epsilon([mechanism] * count, 1e-5) for count in (1, 2))
        budget = (one_training + two_trainings) / 2
        with get_context("spawn").Pool(4) as pool:
            for trial in range(8):
                path = tmp_path / str(trial) / "ledger.jsonl"
                path.parent.mkdir(mode=0o700)
                if trial % 2:
                    path.write_text('{"unfinished')
                begun = pool.starmap(_train_within_budget, [(str(path), i, budget) for i in range(8)], chunksize=1)
                assert sum(begun) == 1
                assert len(read_ledger(path)) == 1
                assert stat.S_IMODE(path.stat().st_mode) == 0o600


def state_of(folder: Path) -> dict[str, tuple]:
    facts = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        facts[str(path)] = (status.st_mode, status.st_ino, status.st_mtime_ns, content)
    return facts


class TestInspect:
    def test_it_changes_nothing(self, mpu: Callable, root: Path) -> None:
        """Of anything, whole or cut off."""
        honest, _ = copies(mpu, root)
        unlearn_copy(mpu, root, honest, "d")
        (root / "log.jsonl").write_text('{"step": 1}\n{"step": 2')
        (root / "run").mkdir()
        (root / "run/run.json").write_text("{}")
        (root / "run/log.jsonl").symlink_to(root / "log.jsonl")
        before = state_of(root)
        for path in ("copy_1", "d.safetensors", "keys.bin", "log.jsonl", "run", ".", "base", default_ledger_path()):
            mpu("inspect", path, check=False, cwd=root)
        assert state_of(root) == before

    @pytest.mark.parametrize("obstacle", ["fifo", "device", "private"])
    def test_nothing_inside_a_folder_is_followed_or_waited_for(self, mpu: Callable, root: Path, obstacle: str) -> None:
        (root / "secret").write_text("| algorithm | hunter2 |\n")
        model = root / "model"
        model.mkdir()
        for name in ("config.json", "model.safetensors"):
            (model / name).write_bytes((root / "base" / name).read_bytes())
        weights = load_file(model / "model.safetensors")
        save_file(
            weights, model / "model.safetensors", {"mpu": json.dumps({"format": "mpu-model", "run": "x", "round": 1})}
        )
        card = model / "README.md"
        if obstacle == "fifo":
            os.mkfifo(card)
        else:
            card.symlink_to("/dev/zero" if obstacle == "device" else root / "secret")
        outcome = mpu("inspect", "model", cwd=root)
        assert "model, after aggregation" in outcome.out
        assert "hunter2" not in outcome.out

    def test_json_has_no_control_characters(self, mpu: Callable, root: Path) -> None:
        save_file({"w\u009b31m\u202e": torch.zeros(2)}, root / "odd.safetensors")
        outcome = mpu("inspect", "odd.safetensors", "--tensors", "--json", cwd=root)
        assert all(character.isprintable() or character == "\n" for character in outcome.out)
        assert "w\u009b31m\u202e" in outcome.json["list"]


class TestHeaders:
    def test_a_header_that_repeats_its_recipient(self, mpu: Callable, root: Path) -> None:
        """rage needs time that grows with the square of a header's length: longer ones are refused unread."""
        copies(mpu, root)
        [identity] = read_identities(default_identity_path())
        sealed = pyrage.encrypt(b"nothing", [identity.to_public()])
        version_line, rest = sealed.split(b"\n-> ", 1)
        stanza = rest.split(b"\n--- ", 1)[0]
        evil = version_line + (b"\n-> " + stanza) * 20_000 + b"\n--- " + rest.split(b"\n--- ", 1)[1]
        (root / "evil.age").write_bytes(evil)
        (root / "evil.bin").write_bytes(evil)
        for command in (("unlearn", "evil.age"), ("aggregate", "d", "--keys", "evil.bin")):
            mpu(*command, fails="header is longer", status=1, cwd=root)

    def test_as_many_recipients_as_fit(self, tmp_path: Path) -> None:
        from mpu_cli.files.sealing import MAX_RECIPIENTS, check_header

        recipient = make_identity(tmp_path / "id.txt")
        sealed = pyrage.encrypt(b"x", parse_recipients([recipient] * MAX_RECIPIENTS))
        check_header(io.BytesIO(sealed).read(), tmp_path / "k")
        with pytest.raises(MpuError, match="recipients"):
            parse_recipients([recipient] * (MAX_RECIPIENTS + 1))


class TestKeysOfSomebodyElse:
    def test_they_are_refused_and_what_they_name_is_not_fetched(
        self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever knows the public key can seal keys; their base may be any path or name."""
        import huggingface_hub

        copies(mpu, root)
        [identity] = read_identities(default_identity_path())
        genuine = unseal(root / "keys.bin", [identity])
        forged = replace(genuine, base=replace(genuine.base, path="owner/name"))
        (root / "forged.bin").write_bytes(seal(forged, [identity.to_public()]))
        unlearn_copy(mpu, root, root / "copy_1", "1")
        requested_names: list[object] = []

        def download(name: str, local_files_only: bool = False, **_: object) -> str:
            if not local_files_only:
                requested_names.append(name)
            raise huggingface_hub.errors.LocalEntryNotFoundError(name)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        refused = mpu("invert", "1.safetensors", "--keys", "forged.bin", check=False, cwd=root)
        assert "was not sealed with this server's secret" in refused.err
        refused = mpu("invert", "1.safetensors", "--keys", "forged.bin", "--trust-keys", check=False, cwd=root)
        assert "owner/name: not on this machine" in refused.err
        assert requested_names == []
        assert "unknown" in mpu("inspect", "forged.bin", cwd=root).out
        assert "this server" in mpu("inspect", "keys.bin", cwd=root).out

    @pytest.mark.slow
    def test_a_passphrase_authenticates_itself(self, mpu: Callable, root: Path) -> None:
        (root / "word").write_text("correct horse\n")
        mpu("publish", "base", "--copies", 2, "--out", "p", "--keys", "p.bin", "--passphrase-file", "word", cwd=root)
        checked = mpu("verify", "p/copy_1", "--keys", "p.bin", "--passphrase-file", "word", "--no-logits", cwd=root)
        assert "right" in checked.out


class TestResults:
    @pytest.mark.parametrize("existing", [False, True])
    def test_what_holds_records_is_for_its_owner(self, mpu: Callable, root: Path, existing: bool) -> None:
        if existing:
            (root / "eval.json").write_text("{}")
            (root / "eval.json").chmod(0o644)
        mpu("eval", "base", "--benchmark", "qa", "--forget", "forget.jsonl", "--force", cwd=root)
        assert stat.S_IMODE((root / "eval.json").stat().st_mode) == 0o600


class TestResources:
    def test_layers_of_nothing(self, mpu: Callable, root: Path) -> None:
        """Empty tensors do not count for the number of layers that a config may ask for."""
        honest, _ = copies(mpu, root)
        weights = load_file(honest / "model.safetensors")
        metadata = open_checkpoint(honest / "model.safetensors").metadata
        save_file(
            {**weights, **{f"x.{i}": torch.zeros(0) for i in range(4000)}}, honest / "model.safetensors", metadata
        )
        edit(honest / "config.json", num_hidden_layers=3000)
        unlearn_copy(mpu, root, honest, "d", fails="num_hidden_layers is 3,000, more than", status=1)

    def test_added_tokens_without_end(self, mpu: Callable, root: Path) -> None:
        honest, _ = copies(mpu, root)
        (honest / "added_tokens.json").write_text(json.dumps({f"t{i}": 96 + i for i in range(30_000)}))
        unlearn_copy(mpu, root, honest, "d", fails="30,000 added tokens", status=1)

    def test_added_tokens_inside_of_tokenizer_json(self, mpu: Callable, root: Path) -> None:
        honest, _ = copies(mpu, root)
        tokenizer = json.loads((honest / "tokenizer.json").read_text())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"] += [{"id": 96 + i, "content": f"t{i}", **flags} for i in range(30_000)]
        (honest / "tokenizer.json").write_text(json.dumps(tokenizer))
        unlearn_copy(mpu, root, honest, "d", fails="added tokens, and mpu takes 20,000", status=1)

    @pytest.mark.slow
    def test_a_vocabulary_in_an_older_form_is_converted_within_limits(self, mpu: Callable, root: Path) -> None:
        honest, _ = copies(mpu, root)
        (honest / "tokenizer.json").unlink()
        edit(honest / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
        (honest / "vocab.json").write_text(json.dumps({f"{i:x}": i for i in range(3_000_000)}))
        merges = "\n".join(f"{i >> 4:x} {i & 15:x}" for i in range(16, 3_000_000))
        (honest / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
        started, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unlearn_copy(mpu, root, honest, "d", fails="vocab.json: it", status=1)
        assert time.monotonic() - started < 120
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1e6  # kilobytes

    @pytest.mark.slow
    def test_a_decoder_that_grows_is_tried_within_limits(self, mpu: Callable, root: Path) -> None:
        honest, _ = copies(mpu, root)
        decoders = [{"type": "Replace", "pattern": {"String": "w"}, "content": "w" * 60}] * 6
        edit(honest / "tokenizer.json", decoder={"type": "Sequence", "decoders": decoders})
        mpu("eval", honest, *QA, refused="cannot turn tokens into text", status=1, cwd=root)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer", "RobertaTokenizer", "BertTokenizer"])
@pytest.mark.slow
def test_vocabularies_in_older_forms_are_read_as_transformers_reads_them(tmp_path: Path, kind: str) -> None:
    """Without a tokenizer.json, and when an older form lies beside one."""
    from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer
    from transformers import AutoTokenizer

    texts = [path.read_text() for path in sorted(Path(forms.__file__).parent.glob("*.py"))]
    tokenizer = BertWordPieceTokenizer() if kind == "BertTokenizer" else ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=600)
    folder = save(random_model("llama"), tmp_path / "model")
    for name in ("tokenizer.json", "special_tokens_map.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    tokenizer.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    plain = AutoTokenizer.from_pretrained(folder)
    for beside in (False, True):
        if beside:
            plain.save_pretrained(folder)
        ours = tokenizer_of(open_model(str(folder)))
        assert ours(texts).input_ids == plain(texts).input_ids
        assert ours.batch_decode(ours(texts).input_ids) == plain.batch_decode(plain(texts).input_ids)
        assert ours.special_tokens_map == plain.special_tokens_map


class TestTheSpoolOfSomebodyElse:
    @pytest.mark.slow
    @pytest.mark.parametrize("obstacle", ["file", "deep"])
    def test_nothing_in_out_ends_the_worker(self, mpu: Callable, root: Path, obstacle: str) -> None:
        """A copy that cannot even be marked as failed is trained on once, and the one beside it gets its delta."""
        first_copy, second_copy = copies(mpu, root)
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


def test_records_are_digested_as_the_client_has_them(root: Path) -> None:
    """The digest in a tag is of texts, options apart: no tokenizer is involved."""
    records = read_records(root / "forget.jsonl")
    digests = {records_digest(Dataset(part)) for part in (records, records[1:], records[::-1])}
    assert len(digests) == 3
    assert all(len(digest) == len(hashlib.sha256(b"").hexdigest()) for digest in digests)
