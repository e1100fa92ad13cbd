"""Templates, tokenizers and adapters of somebody else."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from mpu_cli.errors import MpuError
from mpu_cli.files import sandbox
from mpu_cli.model.load import skeleton, tokenizer_of
from mpu_cli.model.source import open_model
from mpu_cli.model.staging import with_adapter
from mpu_cli.options.declare import from_flat
from mpu_cli.options.unlearning import Unlearning
from mpu_cli.records import forms
from mpu_cli.records.read import read_records
from mpu_cli.training.data import Dataset
from mpu_cli.training.examples import encoded_sets
from tests.helpers.attacks import edit, publish_copies, publish_copy, unlearn_copy
from tests.helpers.models import DemoModel, load, random_model, save


class TestAChatTemplateThatNeverEnds:
    @pytest.mark.parametrize(
        "template",
        [
            "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
            "{% endfor %}",
            pytest.param("{{ 'a' * 10**9 }}", marks=pytest.mark.slow),
            pytest.param(
                "{% set x = namespace(s='aaaa') %}{% for i in range(60) %}{% set x.s = x.s + x.s %}{% endfor %}"
                "{{ x.s }}",
                marks=pytest.mark.slow,
            ),
            pytest.param("{{ (10**9000000)|string|length }}{{ 10**(10**9) }}", marks=pytest.mark.slow),
        ],
        ids=["loops", "text", "doubling", "number"],
    )
    def test_it_is_stopped(self, mpu: Callable, root: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sandbox, "REQUEST_SECONDS", 2.0)
        copy = publish_copy(mpu, root)
        (copy / "chat_template.jinja").write_text(template)
        started = time.monotonic()
        refused = unlearn_copy(mpu, root, copy, "d", check=False)
        assert refused.status == 1
        assert "chat template" in refused.err
        assert "cannot be used" in refused.err or "rejected" in refused.err  # stopped from outside, or out of memory
        assert refused.is_one_error
        assert time.monotonic() - started < 60

    @pytest.mark.slow
    def test_rendering_is_transformers_own(self, demo: DemoModel) -> None:
        _, tokenizer = load(demo.model, torch.float32, "cpu")
        dialogues = [
            [{"role": "user", "content": text}, {"role": "assistant", "content": "x\u2028</s>"}]
            for text in ("w4", "ünïcode\n{{ 7*7 }}")
        ]
        for end in (dialogues, [dialogue[:1] for dialogue in dialogues]):
            for prompt in (True, False):
                texts = forms.render(tokenizer, end, generation_prompt=prompt)
                assert texts == tokenizer.apply_chat_template(end, add_generation_prompt=prompt, tokenize=False)

    def test_a_template_of_any_length(self, mpu: Callable, root: Path) -> None:
        """It would be sent to the process that renders with each record."""
        copy = publish_copy(mpu, root)
        (copy / "chat_template.jinja").write_text("x" * 300_000)
        assert "larger than" in unlearn_copy(mpu, root, copy, "d", check=False).err

    def test_a_special_token_cannot_replace_the_template(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _, tokenizer = load(root / "base", torch.float32, "cpu")
        named = {"chat_template": "w9", "add_generation_prompt": "w8", "messages": "w7"}
        monkeypatch.setattr(type(tokenizer), "special_tokens_map", property(lambda _: named))
        [text] = forms.render(tokenizer, [[{"role": "user", "content": "w4"}]], generation_prompt=False)
        assert "w4" in str(text)

    def test_a_special_token_called_as_an_argument_of_ours_is_the_templates_fault(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, tokenizer = load(root / "base", torch.float32, "cpu")
        monkeypatch.setattr(type(tokenizer), "special_tokens_map", property(lambda _: {"self": "w9"}))
        [outcome] = forms.render(tokenizer, [[{"role": "user", "content": "w4"}]], generation_prompt=False)
        assert isinstance(outcome, forms.TemplateError)


class TestAClassByName:
    """transformers takes whatever class it has by the name in tokenizer_config.json or config.json."""

    @pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
    @pytest.mark.parametrize(
        "name",
        ["RagTokenizer", "RagTokenizerFast", "AutoTokenizer", "AutoModelForCausalLM", "LlamaForCausalLM", "Trainer",
         "pipeline", "PreTrainedTokenizerBase", "LukeTokenizer", "LayoutLMv3Tokenizer", "DPRReaderTokenizer",
         "TapasTokenizer"],
    )  # fmt: skip
    def test_what_is_no_tokenizer_of_texts_is_one_error(
        self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str
    ) -> None:
        def load(*_: object, **__: object) -> None:
            pytest.fail("loaded")

        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)
        monkeypatch.setattr("transformers.LlamaForCausalLM.from_pretrained", load)
        edit(root / "base/tokenizer_config.json", "tokenizer_class")
        edit(root / "base" / file, tokenizer_class=name)
        refused = mpu("unlearn", "base", "--algo", "gradascent", "--epochs", 1, "--trust-copy", check=False, cwd=root)
        # Where config.json alone names one, transformers may take another class.
        assert refused.status == 1 or file == "config.json"
        if refused.status:
            assert refused.is_one_error, refused.err
            assert "unexpected" not in refused.err

    @pytest.mark.slow
    def test_every_tokenizer_that_transformers_has(self, root: Path) -> None:
        """Either reads texts or is refused."""
        records = read_records(root / "forget.jsonl")
        model = skeleton(open_model(root / "base"))
        options = from_flat(Unlearning, {"algo": "gradascent", "template": "plain"})
        taken = []
        for name in sorted({*TOKENIZER_MAPPING_NAMES.values()} - {None}):
            edit(root / "base/tokenizer_config.json", tokenizer_class=name)
            try:
                encoded_sets(model, tokenizer_of(open_model(root / "base")), Dataset(records), options)
                taken.append(name)
            except MpuError:
                continue
        assert "TokenizersBackend" in taken


class TestATokenizerThatNeverEnds:
    @pytest.mark.slow
    def test_rules_that_grow_a_word(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        rules = [{"type": "Replace", "pattern": {"String": "w"}, "content": "w" * 300} for _ in range(5)]
        edit(copy / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": rules})
        refused = unlearn_copy(mpu, root, copy, "d", check=False)
        assert "chat template or tokenizer cannot be used" in refused.err
        assert "GiB of memory" in refused.err or "longer than" in refused.err
        assert refused.is_one_error

    @pytest.mark.slow
    def test_rules_that_grow_the_name_of_a_control_token(self, mpu: Callable, root: Path) -> None:
        """It is text in a record, which the rules meet only there."""
        copy = publish_copy(mpu, root)
        tokenizer = json.loads((copy / "tokenizer.json").read_text())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"] += [{"id": 96, "content": "w4", "special": True, **flags}]
        rules = [{"type": "Replace", "pattern": {"String": "w4"}, "content": "v4 " * 300}]
        rules += [{"type": "Replace", "pattern": {"String": "v4"}, "content": "w5 " * 300}]
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": rules}
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
        (root / "forget.jsonl").write_text('{"question": "w7 w4 w8", "answer": "w9"}\n' * 2)
        unlearn_copy(mpu, root, copy, "d", refused="tokens", status=1)

    def test_a_control_token_with_a_long_name(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        tokenizer = json.loads((copy / "tokenizer.json").read_text())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"] += [{"id": 96, "content": "w" * 100_000, "special": True, **flags}]
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
        unlearn_copy(mpu, root, copy, "d", fails="control token of more than", status=1)

    def test_one_that_panics(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        edit(copy / "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
        unlearn_copy(mpu, root, copy, "d", refused="tokenizer", status=1)

    @pytest.mark.slow
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
        unlearn_copy(mpu, root, copy, "d", "--reading", "template=plain", refused="characters become 100,")

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
            "import mpu_cli.files.sandbox as sandbox, threading, time, os\n"
            "sandbox.REQUEST_SECONDS = 8.0\n"
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
        unlearn_copy(mpu, root, copy, "d", refused="template", status=1)

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

    def test_added_tokens_without_end(self, mpu: Callable, root: Path) -> None:
        honest, _ = publish_copies(mpu, root)
        (honest / "added_tokens.json").write_text(json.dumps({f"t{i}": 96 + i for i in range(30_000)}))
        unlearn_copy(mpu, root, honest, "d", fails="30,000 added tokens", status=1)

    def test_added_tokens_inside_of_tokenizer_json(self, mpu: Callable, root: Path) -> None:
        honest, _ = publish_copies(mpu, root)
        tokenizer = json.loads((honest / "tokenizer.json").read_text())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"] += [{"id": 96 + i, "content": f"t{i}", **flags} for i in range(30_000)]
        (honest / "tokenizer.json").write_text(json.dumps(tokenizer))
        unlearn_copy(mpu, root, honest, "d", fails="added tokens, and mpu takes 20,000", status=1)

    @pytest.mark.slow
    def test_a_vocabulary_in_an_older_form_is_converted_within_limits(self, mpu: Callable, root: Path) -> None:
        honest, _ = publish_copies(mpu, root)
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
        honest, _ = publish_copies(mpu, root)
        decoders = [{"type": "Replace", "pattern": {"String": "w"}, "content": "w" * 60}] * 6
        edit(honest / "tokenizer.json", decoder={"type": "Sequence", "decoders": decoders})
        mpu("eval", honest, *QA, refused="cannot turn tokens into text", status=1, cwd=root)


class TestAnAdapter:
    @pytest.fixture
    def adapter(self, mpu: Callable, root: Path) -> Path:
        publish_copy(mpu, root)
        for k in (1, 2):
            unlearn_copy(mpu, root, root / f"copy_{k}", f"deltas/copy_{k}", "--lora", "rank=2")
        mpu("aggregate", "deltas", "--keys", "keys.bin", "--as-adapter", "--out", "adapter", cwd=root)
        return root / "adapter"

    QA_OPTIONS = ("--benchmark", "qa", "--forget", "forget.jsonl", "--metrics", "forget_Q_A_Prob", "--force", "--json")

    def measure(self, mpu: Callable, root: Path, *options: object, check: bool = True):
        return mpu("eval", "adapter", *self.QA_OPTIONS, *options, check=check, cwd=root)

    @pytest.mark.slow
    def test_its_base_is_not_looked_for(self, mpu: Callable, root: Path, adapter: Path) -> None:
        honest = self.measure(mpu, root).json["metrics"]  # beside it
        for base in (str(root / "base"), "somebody/tracking", "../place/base"):
            edit(adapter / "adapter_config.json", base_model_name_or_path=base)
            refused = self.measure(mpu, root, check=False)
            assert "name it with --base" in refused.err
            assert refused.is_one_error
        assert self.measure(mpu, root, "--base", "base").json["metrics"] == honest

    @pytest.mark.slow
    def test_expressions_and_sizes_in_its_config(
        self, mpu: Callable, root: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        honest = self.measure(mpu, root).json["metrics"]
        config = json.loads((adapter / "adapter_config.json").read_text())
        edit(adapter / "adapter_config.json", target_modules="(([a-z_.0-9])*)*X", r=10**6, layers_pattern="(a*)*b",
             rank_pattern={"(a*)*b": 10**6}, exclude_modules="(([a-z_.0-9])*)*X")  # fmt: skip
        assert self.measure(mpu, root).json["metrics"] == honest
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "alpha_pattern": {"(([a-z_.0-9])*)*X": 1}}))
        monkeypatch.setattr(sandbox, "REQUEST_SECONDS", 2.0)
        assert "it took longer" in self.measure(mpu, root, check=False).err

    @pytest.mark.slow
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

    @pytest.mark.slow
    def test_weights_that_are_a_link(self, mpu: Callable, root: Path, adapter: Path) -> None:
        (adapter / "adapter_model.safetensors").rename(root / "elsewhere")
        (adapter / "adapter_model.safetensors").symlink_to(root / "elsewhere")
        refused = self.measure(mpu, root, check=False)
        assert "is a link" in refused.err

    @pytest.mark.slow
    def test_an_adapter_that_imports_a_module(self, mpu: Callable, root: Path, demo: DemoModel) -> None:
        """peft would import what ``megatron_core`` names, and read other kinds of adapters."""
        records = ["--forget", demo.forget, "--retain", demo.retain]
        mpu("publish", demo.model, "--copies", 2, cwd=root)
        training = ("--algo", "npo", "--epochs", 1, "--lora", "rank=2")
        mpu("unlearn", "copy_1", "copy_2", *records, *training, cwd=root)
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
        hints = {"PREFIX_TUNING": "no model of its own", "VERA": "merge_and_unload"}
        for kind, hint in hints.items():
            edit(root / "adapter/adapter_config.json", peft_type=kind)
            refused = mpu("eval", "adapter", *options, "--out", "b.json", fails="not a LoRA adapter", cwd=root)
            assert hint in refused.err


QA = ("--benchmark", "qa", "--forget", "forget.jsonl", "--out", "eval.json")


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
