"""Data, losses, optimisers, schedule and the delta."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from mpu_cli.checkpoint.reader import open_checkpoint
from mpu_cli.client.data import IGNORED, Record, encode, pad, read_records
from mpu_cli.client.losses import ALGORITHMS, Settings, score
from mpu_cli.client.optimizers import BlockwiseAdamW
from mpu_cli.client.training import answers_of, schedule, sequence_log_probs
from mpu_cli.client.unlearn import load
from mpu_cli.manifest import delta_manifest
from tests.models import SHARED, needs_shared, random_model, save, write_records


@pytest.fixture
def base(tmp_path):
    write_records(tmp_path / "forget.jsonl", 6, 1)
    write_records(tmp_path / "retain.jsonl", 9, 2)
    return save(random_model("llama"), tmp_path / "base")


def unlearn(mpu, folder, model, *arguments, out="d.safetensors", check=True):
    return mpu("unlearn", model, "--forget", folder / "forget.jsonl", "--retain", folder / "retain.jsonl",
               "--template", "plain", "--out", folder / out, *arguments, check=check)  # fmt: skip


class TestData:
    @needs_shared
    def test_labels_are_the_answer_and_its_end_of_turn(self):
        tokenizer = AutoTokenizer.from_pretrained(SHARED / "models/full")
        records = read_records(SHARED / "data/tofu/forget01.json")
        examples = encode(
            records, tokenizer, template="chat", system_prompt="You are a helpful assistant.", max_length=2048
        )
        assert len(examples) == 40
        for record, found in zip(records, examples, strict=True):
            learned = [i for i in found.labels if i != IGNORED]
            assert tokenizer.decode(learned) == record.answer + "<|eot_id|>"
            prompt = tokenizer.decode(found.ids[: -len(learned)])
            assert prompt.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
            assert "You are a helpful assistant." in prompt
            assert record.question in prompt

    @needs_shared
    def test_what_follows_the_end_of_turn_is_not_learned(self):
        """Templates such as Qwen's put a line break after it."""
        tokenizer = AutoTokenizer.from_pretrained(SHARED / "models/full")
        tokenizer.chat_template = tokenizer.chat_template.replace("'<|eot_id|>'", "'<|eot_id|>\n'")
        [found] = encode(
            [Record("Why?", "Because.", "")], tokenizer, template="chat", system_prompt="x", max_length=None
        )
        assert found.labels[-1] == IGNORED
        assert tokenizer.decode([i for i in found.labels if i != IGNORED]) == "Because.<|eot_id|>"

    def test_array_and_lines_and_blank_lines(self, tmp_path):
        rows = [{"question": f"q{i}", "answer": "ä", "extra": 1} for i in range(3)]
        (tmp_path / "a.json").write_text(json.dumps(rows))
        (tmp_path / "b.jsonl").write_text("\ufeff" + "\n\n".join(json.dumps(r) for r in rows) + "\n", encoding="utf-8")
        assert [r.question for r in read_records(tmp_path / "a.json")] == ["q0", "q1", "q2"]
        assert [r.answer for r in read_records(tmp_path / "b.jsonl")] == ["ä"] * 3

    def test_padding_changes_no_score(self, base):
        model, tokenizer = load(base, torch.float64, "cpu")
        records = read_records(base.parent / "forget.jsonl")
        records += [Record("w4", "w5", ""), Record("w4 w5 w6 " * 5, "w7", "")]
        examples = encode(records, tokenizer, template="chat", system_prompt="", max_length=None)
        together = sequence_log_probs(model, examples, 8, 2)
        alone = torch.cat([sequence_log_probs(model, [example], 1, 2) for example in examples])
        torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)  # norms and RoPE are in float32


class TestSchedule:
    def test_every_epoch_sees_every_record_once(self):
        steps = schedule(10, 7, epochs=4, batch_size=3, seed=0)
        assert [len(step.forget) for step in steps] == [3, 3, 3, 1] * 4
        for epoch in range(4):
            seen = [i for step in steps[4 * epoch : 4 * epoch + 4] for i in step.forget]
            assert sorted(seen) == list(range(10))
        kept = [i for step in steps for i in step.retain]
        assert len(kept) == 40
        for start in range(0, 35, 7):
            assert sorted(kept[start : start + 7]) == list(range(7))

    def test_the_seed_fixes_it(self):
        one, same, other = (schedule(10, 7, epochs=2, batch_size=3, seed=s) for s in (1, 1, 2))
        assert one == same != other


class TestLosses:
    @pytest.fixture
    def batch(self, base):
        model, tokenizer = load(base, torch.float64, "cpu")
        examples = encode(
            read_records(base.parent / "forget.jsonl"), tokenizer, template="chat", system_prompt="", max_length=None
        )
        return model, pad(examples, 2)

    def by_hand(self, model, batch):
        """log p of every labelled token, example by example, from the definition."""
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        rows = []
        for i, labels in enumerate(batch["labels"].tolist()):
            rows.append([logits[i, t - 1].log_softmax(0)[y] for t, y in enumerate(labels) if y != IGNORED])
        return rows

    def test_scores(self, batch):
        model, inputs = batch
        rows = self.by_hand(model, inputs)
        answers = answers_of(model, inputs)
        torch.testing.assert_close(answers.log_probs, torch.stack([x for row in rows for x in row]), rtol=0, atol=1e-12)
        torch.testing.assert_close(
            answers.sequence_log_probs, torch.stack([sum(row) for row in rows]), rtol=0, atol=1e-12
        )

    def test_gradient_ascent(self, batch):
        rows = self.by_hand(*batch)
        expected = sum(x for row in rows for x in row) / sum(map(len, rows))
        loss = ALGORITHMS["gradascent"].forget(answers_of(*batch), None, Settings())
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)

    def test_npo(self, batch):
        rows = self.by_hand(*batch)
        reference = torch.linspace(-30, -10, len(rows), dtype=torch.float64)
        beta = 0.3
        terms = [
            math.log(1 / (1 + math.exp(beta * (float(sum(row).detach()) - r))))
            for row, r in zip(rows, reference.tolist(), strict=True)
        ]
        loss = ALGORITHMS["npo"].forget(answers_of(*batch), reference, Settings(beta=beta))
        assert float(loss.detach()) == pytest.approx(-2 / beta * sum(terms) / len(terms), abs=1e-10)

    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_gradients_by_finite_differences(self, name):
        torch.manual_seed(0)
        logits = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
        labels = torch.tensor([[IGNORED, 1, 2, 3, IGNORED], [IGNORED, IGNORED, 4, 0, 6]])
        reference = torch.tensor([-4.0, -6.0], dtype=torch.float64)

        def loss(logits):
            return ALGORITHMS[name].forget(score(logits, labels), reference, Settings())

        assert torch.autograd.gradcheck(loss, logits)


class TestBlockwiseAdamW:
    def test_is_adamw_where_all_gradients_have_one_size(self):
        """Where every entry of a gradient has the same square, its mean is each entry's: the two must agree."""
        torch.manual_seed(0)
        start = torch.randn(5, 4, dtype=torch.float64)
        ours, theirs = (start.clone().requires_grad_() for _ in range(2))
        options = {"lr": 0.03, "betas": (0.8, 0.95), "weight_decay": 0.1}
        pairs = [(ours, BlockwiseAdamW([ours], **options)), (theirs, torch.optim.AdamW([theirs], **options))]
        for step in range(6):
            sign = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).sign().double()
            for parameter, optimizer in pairs:
                parameter.grad = sign * (step + 1)
                optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

    def test_commutes_with_rotation(self):
        torch.manual_seed(0)
        rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
        x = torch.randn(6, 3, dtype=torch.float64)
        plain, turned = x.clone().requires_grad_(), (rotation @ x).requires_grad_()
        optimizers = [BlockwiseAdamW([p], lr=0.1, weight_decay=0.2) for p in (plain, turned)]
        for _ in range(5):
            gradient = torch.randn(6, 3, dtype=torch.float64)
            plain.grad, turned.grad = gradient, rotation @ gradient
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(turned.detach(), rotation @ plain.detach(), rtol=1e-12, atol=1e-12)

    def test_state_is_half_of_adamws(self):
        parameter = torch.randn(100, 100, requires_grad=True)
        sizes = []
        for kind in (BlockwiseAdamW, torch.optim.AdamW):
            parameter.grad = torch.ones_like(parameter)
            optimizer = kind([parameter], lr=1e-3)
            optimizer.step()
            sizes.append(sum(v.numel() for v in optimizer.state[parameter].values() if torch.is_tensor(v)))
        assert sizes[0] <= sizes[1] / 2 + 2

    def test_moments_of_bfloat16_parameters_are_float32(self):
        parameter = torch.randn(8, 8).to(torch.bfloat16).requires_grad_()
        parameter.grad = torch.ones_like(parameter)
        optimizer = BlockwiseAdamW([parameter], lr=1e-3)
        optimizer.step()
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32


class TestUnlearn:
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_forgets(self, mpu, tmp_path, base, algorithm):
        told = unlearn(mpu, tmp_path, base, "--algo", algorithm, "--lr", "1e-2", "--optim", "adamw-blockwise", "--json")
        steps = told.json["steps"]
        assert steps[-1]["forget"] > steps[0]["forget"]
        assert (steps[0]["retain"] is None) == (algorithm == "gradascent")
        assert len(steps) == ALGORITHMS[algorithm].epochs

    def test_delta_is_after_minus_before(self, mpu, tmp_path, base):
        """One SGD step of gradient ascent, against autograd by hand."""
        unlearn(mpu, tmp_path, base, "--algo", "gradascent", "--optim", "sgd", "--lr", "0.1", "--epochs", 1,
                "--weight-decay", 0, "--max-grad-norm", 1e9, "--precision", "float64")  # fmt: skip
        model, tokenizer = load(base, torch.float64, "cpu")
        examples = encode(
            read_records(tmp_path / "forget.jsonl"), tokenizer, template="plain", system_prompt="", max_length=None
        )
        answers_of(model, pad(examples, 2)).token_mean_loss.backward()
        delta = load_file(tmp_path / "d.safetensors")
        parameters = dict(model.named_parameters())
        assert delta.keys() == parameters.keys()
        for name, change in delta.items():
            torch.testing.assert_close(change, 0.1 * parameters[name].grad, rtol=1e-6, atol=1e-9)

    def test_gradient_is_clipped(self, mpu, tmp_path, base):
        told = unlearn(mpu, tmp_path, base, "--algo", "gradascent", "--optim", "sgd", "--lr", "0.1", "--epochs", 1,
                       "--weight-decay", 0, "--max-grad-norm", 0.01, "--precision", "float64", "--json")  # fmt: skip
        assert told.json["norm"] == pytest.approx(0.1 * 0.01, rel=1e-4)

    @pytest.mark.parametrize("optimizer", ["adamw", "adamw-blockwise", "sgd"])
    def test_same_seed_same_delta(self, mpu, tmp_path, base, optimizer):
        for out, seed in (("a", 3), ("b", 3), ("c", 4)):
            unlearn(mpu, tmp_path, base, "--optim", optimizer, "--lr", "1e-3", "--batch-size", 2, "--epochs", 2,
                    "--seed", seed, out=out)  # fmt: skip
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()

    @pytest.mark.parametrize(
        ("precision", "stored"), [("float32", torch.float32), ("bfloat16", torch.float32), ("float64", torch.float64)]
    )
    def test_precision(self, mpu, tmp_path, base, precision, stored):
        unlearn(mpu, tmp_path, base, "--precision", precision, "--lr", "1e-2", "--epochs", 2)
        delta = load_file(tmp_path / "d.safetensors")
        assert {t.dtype for t in delta.values()} == {stored}
        before = load_file(base / "model.safetensors")
        for name, change in delta.items():  # the sum is what the trained model held, exactly
            start = before[name].to(getattr(torch, precision)).to(stored)
            assert torch.equal((start + change).to(getattr(torch, precision)).to(stored), start + change)

    def test_dropout_is_off(self, tmp_path):
        """Masks of random zeros would differ between the copies."""
        base = save(random_model("gpt2"), tmp_path / "base")
        assert json.loads((base / "config.json").read_text())["resid_pdrop"] > 0
        model, _ = load(base, torch.float32, "cpu")
        tokens = torch.arange(3, 30)[None]
        model.train()
        assert torch.equal(model(tokens).logits, model(tokens).logits)

    def test_names_are_those_of_the_files(self, mpu, tmp_path):
        base = save(random_model("gpt2"), tmp_path / "base")
        write_records(tmp_path / "forget.jsonl", 2, 1)
        held = {n.removeprefix("transformer."): t for n, t in load_file(base / "model.safetensors").items()}
        save_file(held, base / "model.safetensors", {"format": "pt"})
        unlearn(mpu, tmp_path, base, "--algo", "gradascent", "--epochs", 1)
        assert load_file(tmp_path / "d.safetensors").keys() == held.keys()

    def test_any_model_may_be_the_clean_baseline(self, mpu, tmp_path, base):
        unlearn(mpu, tmp_path, base, "--epochs", 1)
        checkpoint = open_checkpoint(tmp_path / "d.safetensors")
        assert delta_manifest(checkpoint.metadata, tmp_path).origin is None
        (base / "model.safetensors").rename(base / "weights.safetensors")
        for name, source in (("file", base / "weights.safetensors"), ("folder", base)):
            unlearn(mpu, tmp_path, source, "--epochs", 1, out=name)
            assert (tmp_path / name).read_bytes() == (tmp_path / "d.safetensors").read_bytes()

    def test_the_delta_tells_nothing_of_the_records(self, mpu, tmp_path, base):
        """Neither their text nor how many there are nor how long it took stands in the metadata."""
        unlearn(mpu, tmp_path, base, "--epochs", 1)
        assert json.loads(open_checkpoint(tmp_path / "d.safetensors").metadata["mpu"]) == {
            "format": "mpu-delta", "version": 1, "algorithm": "npo", "kind": "full", "inverted": False,
        }  # fmt: skip

    def test_divergence_is_told_and_leaves_nothing(self, mpu, tmp_path, base):
        outcome = unlearn(mpu, tmp_path, base, "--optim", "sgd", "--lr", "1e30", "--max-grad-norm", "1e30", check=False)
        assert outcome.status == 1
        assert "--lr" in outcome.err
        assert not (tmp_path / "d.safetensors").exists()
        assert not list(tmp_path.glob(".*"))
