"""Copies made to read the client's disk, to fill its memory, or to make a delta tell more of the records."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.metrics import roc_auc_score

from mpu_cli.errors import MpuError
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.lab.leakage import moved_rows
from mpu_cli.model import load as loading
from mpu_cli.model.source import Model, open_model
from mpu_cli.records.encode import Encoding, Example
from mpu_cli.records.read import read_records
from mpu_cli.training.copycheck import against_others, ffn_units
from mpu_cli.training.ledger import LedgerEntry, default_ledger_path
from tests.helpers.attacks import (
    CHECK,
    TRAINING,
    edit,
    publish_copies,
    publish_copy,
    treat_word_differently,
    unlearn_copy,
)
from tests.helpers.models import VOCABULARY, DemoModel, load, random_model, save, write_records
from tests.helpers.paths import example


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

    def test_candidates_are_told_by_their_loss(self, mpu: Callable, tmp_path: Path) -> None:
        """A server that guesses the records sees which were forgotten: the reading is the AUC by plain transformers."""
        base = save(random_model("llama"), tmp_path / "base")
        paths = [write_records(tmp_path / f"{name}.jsonl", 12, seed) for name, seed in (("forget", 1), ("retain", 2))]
        mpu("unlearn", "base", "--algo", "gradascent", "--epochs", 5, "--out", "d.safetensors", cwd=tmp_path)
        document = mpu("audit-delta", "base", "d.safetensors", "--json", cwd=tmp_path).json
        [reading] = [each for each in document if each["rule"] == "loss of candidate records"]
        model, tokenizer = load(base, torch.float32, "cpu")
        examples = [example for path in paths for example in Encoding(tokenizer).encode(read_records(path))]

        def losses() -> list[float]:
            ids = [(torch.tensor([each.ids]), torch.tensor([each.labels])) for each in examples]
            return [float(model(input_ids=x, labels=y).loss) for x, y in ids]

        with torch.no_grad():
            before = losses()
            for name, change in load_file(tmp_path / "d.safetensors").items():
                model.get_parameter(name).add_(change)
            changes = [b - a for a, b in zip(before, losses(), strict=True)]
        assert reading["auc"] == pytest.approx(roc_auc_score([1] * 12 + [0] * 12, changes))
        assert reading["auc"] > 0.9
        assert reading["tells"]

    def test_positions_tell_the_longest_record(self, mpu: Callable, tmp_path: Path) -> None:
        save(random_model("gpt2"), tmp_path / "base")
        write_records(tmp_path / "forget.jsonl", 4, 1)
        mpu("unlearn", "base", "--algo", "gradascent", "--epochs", 1, "--train-embeddings", "--out", "d.safetensors",
            cwd=tmp_path)  # fmt: skip
        document = mpu("audit-delta", "base", "d.safetensors", "--json", cwd=tmp_path).json
        assert any("longest record has" in (each["fact"] or "") for each in document)

    @pytest.mark.slow
    def test_a_round_without_embeddings_aggregates(self, mpu: Callable, root: Path) -> None:
        """Their change is zero; a round in which one copy trained them and another did not is refused."""
        publish_copy(mpu, root)
        for k, options in ((1, []), (2, ["--train-embeddings"])):
            mpu("unlearn", f"copy_{k}", *TRAINING, *options, cwd=root)
        mpu("aggregate", "deltas", "--keys", "keys.bin", fails="tensors differ", cwd=root)
        mpu("unlearn", "copy_2", *TRAINING, "--force", cwd=root)
        mpu("aggregate", "deltas", "--keys", "keys.bin", "--out", "after", cwd=root)
        before, after = (load_file(root / name / "model.safetensors") for name in ("base", "after"))
        assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
        assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])


class TestACraftedCopy:
    @pytest.mark.slow
    def test_an_untied_copy_of_a_tied_model(self, mpu: Callable, root: Path) -> None:
        """Leaves the function as it was, and makes a delta list tokens; a public model gives it away."""
        public = save(random_model("llama", seed=5), root / "public")
        copy = publish_copy(mpu, root)
        honest = unlearn_copy(mpu, root, copy, "honest", "--public", public)
        assert f"checked: nothing shows that {copy.name} was built to carry records out" in honest.err
        default_ledger_path().unlink()  # else the ledger tells that this is not the copy of before
        weights = load_file(copy / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, copy / "model.safetensors", open_checkpoint(copy / "model.safetensors").metadata)
        edit(copy / "config.json", tie_word_embeddings=False)
        refused = unlearn_copy(mpu, root, copy, "d", "--public", public, check=False)
        assert refused.status == 1
        assert "tie_word_embeddings" in refused.err
        assert "lm_head.weight" in refused.err
        assert not (root / "d.safetensors").exists()
        outcome = unlearn_copy(mpu, root, copy, "d", "--public", public, "--trust-copy")
        assert "checked: nothing" not in outcome.err
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
        refused = unlearn_copy(mpu, root, copy, "d", "--public", public, check=False)
        assert refused.status == 1
        says = {"tokenizer": "vocabulary", "template": "chat template", "width": "rows of another size"}[change]
        assert says in refused.err

    @pytest.mark.slow
    def test_a_copy_unlike_the_others_of_its_round(self, mpu: Callable, root: Path) -> None:
        publish_copy(mpu, root)
        unlearn_copy(mpu, root, root / "copy_1", "d1")
        weights = load_file(root / "copy_2/model.safetensors")
        weights = {name: tensor * (4 if "embed" in name else 1) for name, tensor in weights.items()}
        save_file(weights, root / "copy_2/model.safetensors",
                  open_checkpoint(root / "copy_2/model.safetensors").metadata)  # fmt: skip
        unlearn_copy(mpu, root, root / "copy_2", "d2", fails="that of copy 1", status=1)
        unlearn_copy(mpu, root, root / "copy_2", "d2", "--trust-copy")

    def test_another_publication_of_the_same_name(self) -> None:
        """What --seed names alike is not compared; copies of one publication are."""

        def entry(copy: int, weights: str) -> LedgerEntry:
            return LedgerEntry(weights, "run", 1, copy, weights, "npo", 4, data="records")

        old = [replace(entry(1, "a"), forget=0.04), replace(entry(2, "b"), forget=0.04)]
        again = replace(entry(1, "c"), forget=5.0)
        assert against_others(again, {"forget": 5.0}, old) == []
        [sign] = against_others(entry(2, "d"), {"forget": 0.04}, [*old, again])
        assert "that of copy 1 5.000" in sign
        assert against_others(entry(2, "d"), {"forget": 5.1}, [*old, again]) == []

    def test_units_are_judged_as_from_all_positions_together(self) -> None:
        """From sums over the records, the shares are those over the activations of all of them."""
        model = random_model("llama", dtype=torch.float64)
        with torch.no_grad():  # units of every kind: some off nearly everywhere, some active almost nowhere
            for layer in model.model.layers:
                layer.mlp.gate_proj.weight[::3] *= 40
                layer.mlp.gate_proj.weight[1::7] = layer.mlp.gate_proj.weight[0]
        rows = torch.randint(3, VOCABULARY, (9, 30), generator=torch.Generator().manual_seed(1))
        inputs: list[torch.Tensor] = []
        gate = model.model.layers[1].mlp.gate_proj
        hook = gate.register_forward_hook(lambda _, __, output: inputs.append(output.flatten(0, -2)))
        judged = {units.layer: units for units in ffn_units(model, [Example(row, row) for row in rows.tolist()])}
        hook.remove()
        received = torch.cat(inputs)
        active = torch.nn.functional.silu(received).abs()
        participation = active.mean(0) ** 2 / (active**2).mean(0)
        units = judged["model.layers.1.mlp.gate_proj"]
        assert units.rare == pytest.approx(float((participation < 0.05).double().mean()))
        assert units.off == pytest.approx(float(((received < -20).double().mean(0) > 0.5).double().mean()))
        assert 0 < units.off < 1

    @pytest.mark.slow
    def test_trap_units(self, mpu: Callable, tmp_path: Path, demo: DemoModel) -> None:
        """They hand hidden states of single tokens over, exactly; the check sees them before anything is trained."""
        records = ["--forget", demo.forget, "--retain", demo.retain]
        training = [
            *records,
            "--epochs",
            1,
            "--optim",
            "sgd",
            "--lr",
            "1e-3",
            "--training",
            "max_grad_norm=1e9",
            "--batch-size",
            64,
        ]
        mpu("publish", demo.model, "--copies", 2, "--kappa", 0, "--symmetries", "none", cwd=tmp_path)
        copy = tmp_path / "copy_1"
        mpu("unlearn", copy, *training, "--out", "honest.safetensors", cwd=tmp_path)
        model, tokenizer = load(copy, torch.float32, "cpu")
        examples = Encoding(tokenizer).encode([*read_records(demo.forget), *read_records(demo.retain)])
        example("imprint").plant_traps(copy, [example.ids for example in examples], units=100)
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
            torch.cat(example("imprint").ffn_inputs(model, [e.ids for e in examples], 1)), dim=1
        )

        def rows_along_states(delta: Path) -> int:
            rows = load_file(delta)["model.layers.1.mlp.up_proj.weight"][:100]
            rows = rows[rows.norm(dim=1) > 0]
            cosines = torch.nn.functional.normalize(rows, dim=1) @ states.T
            return int((cosines.abs().amax(1) > 0.999).sum())

        assert rows_along_states(tmp_path / "d.safetensors") >= 20
        assert rows_along_states(tmp_path / "honest.safetensors") == 0

    def test_a_copy_that_reads_a_word_differently_is_refused_before_a_record_is_read(
        self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whether the word is in the records or not: the refusal follows from the files."""
        honest, crafted = publish_copies(mpu, root)
        unlearn_copy(mpu, root, honest, "1")
        treat_word_differently(crafted)

        def read(*_: object) -> None:
            raise AssertionError("a record was read")

        monkeypatch.setattr(Encoding, "encode_each", read)
        unlearn_copy(mpu, root, crafted, "2", fails="is not that of another copy of the round", status=1)

    def test_a_normalizer_is_seen_by_like(self, mpu: Callable, root: Path) -> None:
        """The records need not show it: the files' content is compared."""
        honest, _ = publish_copies(mpu, root)
        normalizer = {"type": "Replace", "pattern": {"String": "w99"}, "content": "w98"}
        edit(honest / "tokenizer.json", normalizer=normalizer)
        unlearn_copy(mpu, root, honest, "1", "--public", "base", fails="'normalizer'", status=1)


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
        unlearn_copy(mpu, root, copy, "d", refused="'model.embed_tokens.weight' holds NaN or Inf")

    @pytest.mark.slow
    def test_a_template_that_raises(self, mpu: Callable, root: Path, word: str) -> None:
        copy = publish_copy(mpu, root)
        template = (copy / "chat_template.jinja").read_text()
        trap = "{% for m in messages %}{% if 'WORD' in m.content.split() %}{{ raise_exception('x') }}{% endif %}"
        trap = trap.replace("WORD", word) + "{% endfor %}"
        (copy / "chat_template.jinja").write_text(trap + template)
        unlearn_copy(mpu, root, copy, "d", fails="forget.jsonl, line 1: the tokenizer's chat template rejected it (x)")
        ledger = Path(os.environ["XDG_CONFIG_HOME"]) / "mpu/ledger.jsonl"
        assert len(ledger.read_text().splitlines()) == 1  # it counts, because it told something
        outcome = unlearn_copy(mpu, root, copy, "d", "--dp", "epsilon=8")
        assert "1 of 6 records of the forget set are left out" in outcome.err
        assert (root / "d.safetensors").exists()

    @pytest.mark.slow
    def test_a_layer_that_overflows_under_dp(self, mpu: Callable, root: Path, word: str) -> None:
        copy = publish_copy(mpu, root, "--symmetries", "none")
        tokenizer = json.loads((copy / "tokenizer.json").read_text())
        weights = load_file(copy / "model.safetensors")
        weights["model.embed_tokens.weight"][tokenizer["model"]["vocab"][word]] = 3e38
        save_file(weights, copy / "model.safetensors", open_checkpoint(copy / "model.safetensors").metadata)
        unlearn_copy(mpu, root, copy, "d", "--trust-copy", refused="only NaN or Inf")
        unlearn_copy(mpu, root, copy, "d", "--dp", "epsilon=8", "--trust-copy")
        assert all(tensor.isfinite().all() for tensor in load_file(root / "d.safetensors").values())


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
        unlearn_copy(mpu, root, copy, "d", refused="is a link", status=1)
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

    def test_a_quantised_copy(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        edit(copy / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
        assert "quantis" in unlearn_copy(mpu, root, copy, "d", check=False).err

    def test_weights_that_change_between_check_and_use(
        self, mpu: Callable, root: Path, private: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another file under the name once its header was read: what was loaded is compared with what was opened."""
        copy, read = publish_copy(mpu, root), loading.AutoConfig.from_pretrained

        def swap(*arguments: object, **options: object) -> object:
            os.replace(private / "model.safetensors", copy / "model.safetensors")
            monkeypatch.setattr(loading.AutoConfig, "from_pretrained", read)
            return read(*arguments, **options)

        opened = open_checkpoint(copy / "model.safetensors")
        opened.tensor("model.norm.weight")  # mapped, as it is once its fingerprint was taken
        monkeypatch.setattr(loading.AutoConfig, "from_pretrained", swap)
        copy_model = open_model(str(copy))
        model = Model(copy_model.source, opened, copy_model.config, copy_model.config_path, copy_model.folder)
        with pytest.raises(MpuError, match="differs from this file"):
            loading.load(model, torch.float32, "cpu")


class TestWhatFillsTheMachine:
    def test_a_config_larger_than_the_weights(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        edit(copy / "config.json", vocab_size=30_000_000)
        started = time.monotonic()
        unlearn_copy(mpu, root, copy, "d", refused="describes a model of")
        assert time.monotonic() - started < 20

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

    def test_layers_of_nothing(self, mpu: Callable, root: Path) -> None:
        """Empty tensors do not count for the number of layers that a config may ask for."""
        honest, _ = publish_copies(mpu, root)
        weights = load_file(honest / "model.safetensors")
        metadata = open_checkpoint(honest / "model.safetensors").metadata
        save_file(
            {**weights, **{f"x.{i}": torch.zeros(0) for i in range(4000)}}, honest / "model.safetensors", metadata
        )
        edit(honest / "config.json", num_hidden_layers=3000)
        unlearn_copy(mpu, root, honest, "d", fails="num_hidden_layers is 3,000, more than", status=1)


class TestACopyThatIsNotLookedAt:
    @pytest.mark.slow
    def test_fewer_records_than_it_takes(self, mpu: Callable, root: Path) -> None:
        for name, answer in (("forget", "w4"), ("retain", "w5")):
            (root / f"{name}.jsonl").write_text(json.dumps({"question": "w3", "answer": answer}) + "\n")
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


class TestACopyThatComputesNothing:
    def test_it_is_said_and_not_written_down(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        edit(copy / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 0})
        unlearn_copy(mpu, root, copy, "d", refused="only NaN or Inf")
        mpu("check", "copy_1", *CHECK, refused="only NaN or Inf", cwd=root)
        assert "NaN" not in default_ledger_path().read_text()
        assert not list(root.glob("d.safetensors*"))
