"""Data, losses, optimisers, schedule and the delta."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer

from mpu_cli.checkpoint.reader import open_checkpoint
from mpu_cli.client.frozen import freeze, run, steering_direction
from mpu_cli.client.losses import ALGORITHMS, RETAIN, Frozen, Part, score
from mpu_cli.client.optimizers import BlockwiseAdamW, make_optimizer
from mpu_cli.client.precision import as_wide_as
from mpu_cli.client.training import schedule
from mpu_cli.evaluation.encoding import Item
from mpu_cli.evaluation.scoring import Scorer
from mpu_cli.manifest import delta_manifest
from mpu_cli.models.logits import Logits, separate_head
from mpu_cli.records.encoding import IGNORED, Encoding, pad
from mpu_cli.records.reading import question, read_records
from tests.models import SHARED, load, needs_shared, random_model, save, write_records


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
        examples = Encoding(tokenizer, max_length=2048).encode(records)
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
        """Templates such as Qwen's add a line break after it."""
        tokenizer = AutoTokenizer.from_pretrained(SHARED / "models/full")
        tokenizer.chat_template = tokenizer.chat_template.replace("'<|eot_id|>'", "'<|eot_id|>\n'")
        [found] = Encoding(tokenizer).encode([question("Why?", "Because.")])
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
        records += [question("w4", "w5"), question("w4 w5 w6 " * 5, "w7")]
        examples = Encoding(tokenizer, system_prompt="").encode(records)
        with torch.no_grad():
            together = run(model, pad(examples)).sequence_log_probs
            alone = torch.cat([run(model, pad([example])).sequence_log_probs for example in examples])
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
    """Every loss compared with its equation, written out example by example and token by token, in float64."""

    @pytest.fixture
    def batch(self, base):
        """Forget, alternate and retain parts, with a different model as the frozen copy."""
        model, tokenizer = load(base, torch.float64, "cpu")
        frozen, _ = load(save(random_model("llama", seed=8), base.parent / "frozen"), torch.float64, "cpu")
        encoding = Encoding(tokenizer, system_prompt="")
        forget = read_records(base.parent / "forget.jsonl")
        sets = {
            "forget": forget, "retain": read_records(base.parent / "retain.jsonl"),
            "alternate": [replace(r, answer="w9 w8 w7") for r in forget],
        }  # fmt: skip
        parts = {}
        for name, records in sets.items():
            inputs = pad(encoding.encode(records))
            with torch.no_grad():
                said = run(frozen, inputs, layer=1)
            scores = run(model, inputs, layer=1)
            direction = torch.rand(said.hidden.shape[1], dtype=torch.float64)
            parts[name] = Part(scores, Frozen(said.sequence_log_probs, said.logits, said.hidden, direction))
        return parts

    @staticmethod
    def by_example(part):
        """Log-probabilities of each example's tokens, from the logits and the definition of softmax."""
        rows = [[] for _ in part.scores.weights]
        for logits, token, row in zip(part.scores.logits.whole(), part.scores.targets, part.scores.rows, strict=True):
            rows[row].append((logits[token] - logits.exp().sum().log()).item())
        return rows

    def settings(self, name, **changes):
        return replace(ALGORITHMS[name].constants, layer=1, **changes)

    def found(self, name, batch, **changes):
        loss = ALGORITHMS[name].forget(batch["forget"], batch["alternate"], self.settings(name, **changes))
        return float(loss.detach())

    def test_scores(self, batch):
        for part in batch.values():
            rows = self.by_example(part)
            assert part.scores.log_probs.tolist() == pytest.approx([x for row in rows for x in row], abs=1e-12)
            assert part.scores.sequence_log_probs.tolist() == pytest.approx([sum(row) for row in rows], abs=1e-12)
            assert part.scores.lengths.tolist() == [len(row) for row in rows]

    @pytest.mark.parametrize("name", ["gradascent", "graddiff"])
    def test_gradient_ascent(self, batch, name):
        tokens = [x for row in self.by_example(batch["forget"]) for x in row]
        assert self.found(name, batch) == pytest.approx(sum(tokens) / len(tokens), abs=1e-10)

    @staticmethod
    def log_sigmoid(x):
        return -math.log1p(math.exp(-x))

    def test_npo(self, batch):
        terms = [
            self.log_sigmoid(-0.3 * (sum(row) - ref))
            for row, ref in zip(
                self.by_example(batch["forget"]), batch["forget"].frozen.log_probs.tolist(), strict=True
            )
        ]
        assert self.found("npo", batch, beta=0.3) == pytest.approx(-2 / 0.3 * sum(terms) / len(terms), abs=1e-10)

    def test_dpo(self, batch):
        ratios = {
            name: [
                sum(row) - ref for row, ref in zip(self.by_example(part), part.frozen.log_probs.tolist(), strict=True)
            ]
            for name, part in batch.items()
        }
        terms = [
            self.log_sigmoid(0.2 * (won - lost))
            for won, lost in zip(ratios["alternate"], ratios["forget"], strict=True)
        ]
        assert self.found("dpo", batch, beta=0.2) == pytest.approx(-2 / 0.2 * sum(terms) / len(terms), abs=1e-10)

    def test_simnpo(self, batch):
        terms = [self.log_sigmoid(-4.5 / len(row) * sum(row) - 4.5 * 0.25) for row in self.by_example(batch["forget"])]
        found = self.found("simnpo", batch, simnpo_delta=0.25)
        assert found == pytest.approx(-2 / 4.5 * sum(terms) / len(terms), abs=1e-10)

    def test_undial(self, batch):
        part, terms = batch["forget"], []
        logits = part.scores.logits.whole(), part.frozen.logits.whole()
        for z, z_ref, y in zip(*logits, part.scores.targets, strict=True):
            lowered = [float(v) - 10 * (i == int(y)) for i, v in enumerate(z_ref)]
            total = sum(math.exp(v) for v in lowered)
            student = (z - z.exp().sum().log()).tolist()
            terms.append(-sum(math.exp(v) / total * s for v, s in zip(lowered, student, strict=True)))
        assert self.found("undial", batch) == pytest.approx(sum(terms) / len(terms), abs=1e-10)

    def test_satimp(self, batch):
        tokens = [x for row in self.by_example(batch["forget"]) for x in row]
        expected = sum(math.exp(x) ** 0.7 * (1 - math.exp(x)) ** 0.4 * x for x in tokens) / len(tokens)
        assert self.found("satimp", batch, beta1=0.7, beta2=0.4) == pytest.approx(expected, abs=1e-10)

    def test_wga(self, batch):
        tokens = [x for row in self.by_example(batch["forget"]) for x in row]
        expected = sum(math.exp(x) ** 0.5 * x for x in tokens) / len(tokens)
        assert self.found("wga", batch, beta=0.5) == pytest.approx(expected, abs=1e-10)

    def test_rmu(self, batch):
        hidden = batch["forget"].scores.hidden.detach()
        u = batch["forget"].frozen.direction
        expected = sum(float(((h - 2 * u) ** 2).sum()) / hidden.shape[1] for h in hidden) / len(hidden)
        assert self.found("rmu", batch) == pytest.approx(expected, abs=1e-10)

    def test_retain_terms(self, batch):
        part = batch["retain"]
        tokens = [x for row in self.by_example(part) for x in row]
        assert float(RETAIN["nll"][0](part).detach()) == pytest.approx(-sum(tokens) / len(tokens), abs=1e-10)
        divergence = 0.0
        for z, z_ref in zip(part.scores.logits.whole().detach(), part.frozen.logits.whole(), strict=True):
            p, q = z_ref.exp() / z_ref.exp().sum(), z.exp() / z.exp().sum()
            divergence += float((p * (p / q).log()).sum()) / len(tokens)
        assert float(RETAIN["kl"][0](part).detach()) == pytest.approx(divergence, abs=1e-10)
        away = (part.scores.hidden.detach() - part.frozen.hidden).square()
        expected = float(away.sum()) / len(tokens) / away.shape[1]
        assert float(RETAIN["hidden"][0](part).detach()) == pytest.approx(expected, abs=1e-10)

    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_gradients_by_finite_differences(self, name):
        torch.manual_seed(0)
        logits, hidden = (torch.randn(2, 5, n, dtype=torch.float64, requires_grad=True) for n in (7, 4))
        labels = torch.tensor([[IGNORED, 1, 2, 3, IGNORED], [IGNORED, IGNORED, 4, 0, 6]])
        frozen = Frozen(
            torch.tensor([-4.0, -6.0], dtype=torch.float64), Logits(torch.randn(6, 7, dtype=torch.float64)),
            direction=torch.rand(4, dtype=torch.float64),
        )  # fmt: skip
        other = Part(score(torch.randn(2, 5, 7, dtype=torch.float64), labels), frozen)
        detached = {"satimp", "wga"}  # their weights are detached constants, which finite differences cannot see

        def loss(logits, hidden):
            part = Part(score(logits, labels, hidden=hidden), frozen)
            settings = self.settings(name, **({"beta": 0, "beta1": 0, "beta2": 0} if name in detached else {}))
            return ALGORITHMS[name].forget(part, other, settings)

        assert torch.autograd.gradcheck(loss, (logits, hidden))

    @pytest.mark.parametrize("name", ["satimp", "wga"])
    def test_weights_are_detached(self, name):
        """The gradient is that of the weighted sum with fixed weights."""
        torch.manual_seed(0)
        logits = torch.randn(1, 4, 7, dtype=torch.float64, requires_grad=True)
        scores = score(logits, torch.tensor([[IGNORED, 1, 2, 3]]))
        s = self.settings(name)
        ALGORITHMS[name].forget(Part(scores, Frozen()), None, s).backward(retain_graph=True)
        found, logits.grad = logits.grad, None
        p = scores.log_probs.detach().exp()
        weights = p**s.beta1 * (1 - p) ** s.beta2 if name == "satimp" else p**s.beta
        ((weights * scores.log_probs).sum() / 3).backward()
        torch.testing.assert_close(found, logits.grad)


class TestChunksOfLogits:
    """With logits in chunks, losses and gradients are those of all logits at once, and no more than a chunk exists."""

    @staticmethod
    def parts(model, frozen, tokenizer, folder, apart):
        records = read_records(write_records(folder / "records", 5, 1))
        sets = {"forget": records, "alternate": [replace(r, answer="w9 w8 w7") for r in records], "retain": records}
        found = {}
        for name, held in sets.items():
            inputs = pad(Encoding(tokenizer, system_prompt="").encode(held))
            with torch.no_grad():
                said = run(frozen, inputs, layer=1, head=separate_head(frozen) if apart else None)
            scores = run(model, inputs, layer=1, head=separate_head(model) if apart else None)
            direction = torch.ones(said.hidden.shape[1], dtype=torch.float64)
            found[name] = Part(scores, Frozen(said.sequence_log_probs, said.logits, said.hidden, direction))
        return found

    @pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.exhaustive)])
    @pytest.mark.parametrize("chunk", [3, 1000])
    @pytest.mark.parametrize("term", [*ALGORITHMS, *RETAIN])
    def test_gradients_are_the_same(self, tmp_path, monkeypatch, term, chunk, family):
        model, tokenizer = load(save(random_model(family), tmp_path / "base"), torch.float64, "cpu")
        frozen, _ = load(save(random_model(family, seed=8), tmp_path / "frozen"), torch.float64, "cpu")

        def gradients(apart):
            part = self.parts(model, frozen, tokenizer, tmp_path, apart)
            if term in RETAIN:
                loss = RETAIN[term][0](part["retain"])
            else:
                constants = replace(ALGORITHMS[term].constants, layer=1, beta=0.5, beta1=0.5)  # so that none vanishes
                loss = ALGORITHMS[term].forget(part["forget"], part["alternate"], constants)
            found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            return [loss.detach(), *(torch.zeros(()) if gradient is None else gradient for gradient in found)]

        expected = gradients(apart=False)
        assert expected[1].abs().max() > 1e-6
        monkeypatch.setattr("mpu_cli.models.logits.CHUNK", chunk * model.config.vocab_size)
        found = gradients(apart=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("chunk", [3, None], ids=["three", "all"])
    @pytest.mark.parametrize("terms", ["npo", "undial", "kl"])
    def test_no_more_than_a_chunk_exists(self, tmp_path, monkeypatch, terms, chunk):
        """In a step and in an evaluation, no tensor of logits has more rows than a chunk, which may be all."""
        model, tokenizer = load(save(random_model("llama"), tmp_path / "base"), torch.float64, "cpu")
        vocabulary = model.config.vocab_size
        rows = []

        class Rows(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                made = func(*args, **(kwargs or {}))
                if isinstance(made, torch.Tensor) and made.ndim > 1 and made.shape[-1] == vocabulary:
                    rows.append(made.numel() // vocabulary)
                return made

        if chunk:
            monkeypatch.setattr("mpu_cli.models.logits.CHUNK", chunk * vocabulary)
        with Rows():
            part = self.parts(model, model, tokenizer, tmp_path, apart=True)["forget"]
            loss = RETAIN[terms][0] if terms in RETAIN else ALGORITHMS[terms].forget
            value = loss(part) if terms in RETAIN else loss(part, None, ALGORITHMS[terms].constants)
            value.backward()
            items = [Item(tuple(range(3, 12)), 4, (3, 4, 5, 6), ""), Item(tuple(range(20, 29)), 2, (20, 21), "")]
            Scorer(model).score(items, batch_size=2, moments=True)
        tokens, transposed_head = len(part.scores.targets), model.config.hidden_size
        assert 10 < tokens < transposed_head
        most = max(count for count in rows if count != transposed_head)
        if chunk:  # or the four of the test for a head, or one of each of the five records
            assert most <= 5
        else:
            assert most == tokens

    @pytest.mark.parametrize(
        ("family", "apart"), [("llama", True), ("gpt2", True), ("gemma2", False), ("granite", False)]
    )
    def test_capped_or_scaled_logits_are_not_taken_apart(self, tmp_path, family, apart):
        model, _ = load(save(random_model(family), tmp_path / "base"), torch.float32, "cpu")
        assert (separate_head(model) is not None) == apart


class TestFrozen:
    """The values stored from the frozen copy give the same results as the copy itself."""

    @pytest.mark.parametrize("family", ["llama", "llama-biases", "gpt2"])
    @pytest.mark.parametrize("asks", ["log_probs", "logits", "hidden"])
    def test_kept_is_asked_again(self, tmp_path, family, asks):
        model, tokenizer = load(save(random_model(family), tmp_path / "base"), torch.float64, "cpu")
        examples = Encoding(tokenizer, system_prompt="").encode(read_records(write_records(tmp_path / "r", 7, 1)))
        kept = freeze(model, examples, asks, layer=0, batch_size=3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3)  # training continues; the stored values must not change
        fresh, _ = load(tmp_path / "base", torch.float64, "cpu")
        numbers = [4, 0, 6]
        with torch.no_grad():
            said = run(fresh, pad([examples[i] for i in numbers]), layer=0)
        expected = {"log_probs": said.sequence_log_probs, "logits": said.logits.whole(), "hidden": said.hidden}[asks]
        found = getattr(kept.frozen(kept.collect(numbers, like=[0])), asks)
        found = found.whole() if asks == "logits" else found
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        if asks == "logits":
            vocabulary, width = fresh.get_output_embeddings().weight.shape
            tokens = sum(len(state) for state in kept.states)
            assert kept.nbytes == 8 * (tokens * width + vocabulary * width)

    def test_direction_is_uniform_and_of_length_one(self, tmp_path):
        """Φ of normal numbers: over many seeds, each entry, scaled by its vector's largest, is evenly distributed."""
        model, _ = load(save(random_model("llama"), tmp_path / "base"), torch.float64, "cpu")
        drawn = torch.stack([steering_direction(model, seed) for seed in range(400)])
        torch.testing.assert_close(drawn.norm(dim=1), torch.ones(400, dtype=torch.float64))
        embedding = model.get_input_embeddings().weight.detach()
        draws = [torch.Generator().manual_seed(seed) for seed in range(400)]
        normal = torch.stack([torch.randn(len(embedding), generator=g, dtype=torch.float64) for g in draws])
        uniform = torch.erf(normal @ embedding / embedding.norm(dim=0) / 2**0.5)  # 2Φ(x) − 1
        torch.testing.assert_close(drawn, uniform / uniform.norm(dim=1, keepdim=True))
        assert stats.kstest(uniform[:, 0].numpy() / 2 + 0.5, "uniform").pvalue > 1e-3
        assert abs(float(uniform.mean())) < 0.04


class TestBlockwiseAdamW:
    def test_is_adamw_where_all_gradients_have_one_size(self):
        """If all entries of a gradient have the same square, their mean equals each of them: the two must agree."""
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


def at_layer(algorithm: str, layer: int) -> list[object]:
    """The layer option, for algorithms that have one; its default is too high for small models."""
    return ["--layer", layer] if "layer" in ALGORITHMS[algorithm].own else []


class TestMuon:
    @staticmethod
    def made(seed: int = 0) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        """An embedding, a matrix and a norm, and their optimiser with two parameter groups."""
        generator = torch.Generator().manual_seed(seed)
        parameters = [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((9, 4), (6, 4), (4,))]
        groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]
        return parameters, make_optimizer("muon", groups, 0.01, outside=parameters[:1])

    @staticmethod
    def step(parameters: list[torch.nn.Parameter], optimizers: list[torch.optim.Optimizer], number: int) -> None:
        generator = torch.Generator().manual_seed(100 + number)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()

    def test_is_torchs_for_matrices_and_blockwise_for_the_rest(self):
        parameters, optimizer = self.made()
        others, _ = self.made()
        apart = [
            torch.optim.Muon([others[1]], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            BlockwiseAdamW([{"params": others[:1], "weight_decay": 0.1}, {"params": others[2:]}], lr=0.01),
        ]
        for number in range(3):
            if number == 2:  # as a schedule does
                for group in [g for o in (optimizer, *apart) for g in o.param_groups]:
                    group["lr"] = 0.003
            self.step(parameters, [optimizer], number)
            self.step(others, apart, number)
        for one, other in zip(parameters, others, strict=True):
            assert torch.equal(one, other)

    def test_a_saved_state_goes_on(self):
        parameters, optimizer = self.made()
        others, fresh = self.made()
        for number in range(2):
            self.step(parameters, [optimizer], number)
        with torch.no_grad():
            for one, other in zip(parameters, others, strict=True):
                other.copy_(one)
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self.step(parameters, [optimizer], 2)
        self.step(others, [fresh], 2)
        for one, other in zip(parameters, others, strict=True):
            assert torch.equal(one, other)


def one_now(names: Iterable[str], *chosen: str) -> list:
    """``names`` as parameters, those that are not ``chosen`` in the exhaustive tier."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


class TestUnlearn:
    @pytest.mark.slow
    @pytest.mark.parametrize("algorithm", one_now(ALGORITHMS, "npo", "rmu", "undial"))
    def test_lowers_its_term_and_forgets(self, mpu, tmp_path, trained, algorithm):
        """On a trained model and records that it has memorised."""
        for path in (trained.forget, trained.retain):
            shutil.copy(path, tmp_path / path.name)
        # satimp's weights vanish where a record is known by heart: as it is, the retain term outweighs them.
        gamma = {"satimp": 10.0}.get(algorithm, ALGORITHMS[algorithm].constants.gamma)
        # With simnpo's rate of an eighth, the retain term is lowered first, and with it the loss on all records.
        epochs = 16 if algorithm == "simnpo" else 6
        told = unlearn(mpu, tmp_path, trained.model, "--algo", algorithm, "--lr", "3e-4", "--optim",
                       "adamw-blockwise", "--json", "--epochs", epochs, "--template", "chat", "--gamma", gamma,
                       *at_layer(algorithm, 1))  # fmt: skip
        steps = told.json["steps"]
        assert len(steps) == epochs
        assert steps[-1]["forget_term"] < steps[0]["forget_term"]
        assert steps[-1]["forget"] > steps[0]["forget"]
        assert (steps[0]["retain"] is None) == (algorithm in ("gradascent", "undial"))
        for step in steps:
            settings = ALGORITHMS[algorithm].constants
            total = gamma * step["forget_term"] + settings.alpha * (step["retain_term"] or 0)
            assert step["loss"] == pytest.approx(total, rel=1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize("algorithm", one_now(ALGORITHMS, "dpo", "satimp", "rmu"))
    def test_parts_of_a_step_add_up(self, mpu, tmp_path, base, algorithm):
        """Micro-batches, even if uneven or empty, give the same delta as the whole batch."""
        options = ["--algo", algorithm, "--precision", "float64", *at_layer(algorithm, 0), "--epochs", 2, "--optim",
                   "sgd", "--lr", "1e-2", "--batch-size", 4, "--max-grad-norm", 1e9]  # fmt: skip
        unlearn(mpu, tmp_path, base, *options, out="whole.safetensors")
        for size in (1, 3):  # 6 records in steps of 4 and 2: with parts of 1, the second step has two empty ones
            unlearn(mpu, tmp_path, base, *options, "--micro-batch-size", size, out=f"parts{size}.safetensors")
            whole, parts = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", f"parts{size}"))
            for name, tensor in whole.items():
                torch.testing.assert_close(parts[name], tensor, rtol=1e-5, atol=1e-9 + 1e-6 * float(tensor.abs().max()))

    def test_delta_is_after_minus_before(self, mpu, tmp_path, base):
        """One SGD step of gradient ascent, compared with manual autograd."""
        unlearn(mpu, tmp_path, base, "--algo", "gradascent", "--optim", "sgd", "--lr", "0.1", "--epochs", 1,
                "--weight-decay", 0, "--max-grad-norm", 1e9, "--precision", "float64",
                "--train-embeddings")  # fmt: skip
        model, tokenizer = load(base, torch.float64, "cpu")
        examples = Encoding(tokenizer, template="plain").encode(read_records(tmp_path / "forget.jsonl"))
        with as_wide_as(torch.float64):
            run(model, pad(examples)).cross_entropy.backward()
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
                    "--seed", seed, out=f"{out}.safetensors")  # fmt: skip
        a, b, c = ((tmp_path / f"{out}.safetensors").read_bytes() for out in "abc")
        assert a == b != c

    @pytest.mark.parametrize(
        ("precision", "stored"), [("float32", torch.float32), ("bfloat16", torch.float32), ("float64", torch.float64)]
    )
    def test_precision(self, mpu, tmp_path, base, precision, stored):
        unlearn(mpu, tmp_path, base, "--precision", precision, "--lr", "1e-2", "--epochs", 2)
        delta = load_file(tmp_path / "d.safetensors")
        assert {t.dtype for t in delta.values()} == {stored}
        before = load_file(base / "model.safetensors")
        for name, change in delta.items():  # the sum is exactly the trained model's weight
            start = before[name].to(getattr(torch, precision)).to(stored)
            assert torch.equal((start + change).to(getattr(torch, precision)).to(stored), start + change)

    def test_dropout_is_off(self, tmp_path):
        """Random dropout masks would differ between the copies."""
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
        unlearn(mpu, tmp_path, base, "--algo", "gradascent", "--epochs", 1, "--train-embeddings")
        assert load_file(tmp_path / "d.safetensors").keys() == held.keys()
        unlearn(mpu, tmp_path, base, "--algo", "gradascent", "--epochs", 1, out="e.safetensors")
        assert load_file(tmp_path / "e.safetensors").keys() == held.keys() - {"wte.weight", "wpe.weight"}

    def test_any_model_may_be_the_clean_baseline(self, mpu, tmp_path, base):
        unlearn(mpu, tmp_path, base, "--epochs", 1)
        checkpoint = open_checkpoint(tmp_path / "d.safetensors")
        assert delta_manifest(checkpoint.metadata, tmp_path).origin is None
        (base / "model.safetensors").rename(base / "weights.safetensors")
        for name, source in (("file", base / "weights.safetensors"), ("folder", base)):
            unlearn(mpu, tmp_path, source, "--epochs", 1, out=f"{name}.safetensors")
            assert (tmp_path / f"{name}.safetensors").read_bytes() == (tmp_path / "d.safetensors").read_bytes()

    def test_the_delta_tells_nothing_of_the_records(self, mpu, tmp_path, base):
        """The metadata contains neither their text nor their number nor the training time."""
        unlearn(mpu, tmp_path, base, "--epochs", 1)
        assert json.loads(open_checkpoint(tmp_path / "d.safetensors").metadata["mpu"]) == {
            "format": "mpu-delta", "version": 2, "algorithm": "npo", "kind": "full", "inverted": False,
        }  # fmt: skip

    def test_divergence_is_told_and_leaves_nothing(self, mpu, tmp_path, base):
        outcome = unlearn(mpu, tmp_path, base, "--optim", "sgd", "--lr", "1e30", "--max-grad-norm", "1e30", check=False)
        assert outcome.status == 1
        assert "--lr" in outcome.err
        assert not (tmp_path / "d.safetensors").exists()
        assert not list(tmp_path.glob(".*"))


class TestSeveralCopies:
    TRAINING = ("--epochs", 2, "--batch-size", 3, "--lr", "1e-3")

    @pytest.fixture
    def copies(self, mpu, place):
        return mpu("publish", "base", "--copies", 3, "--seed", 1, cwd=place).out.split()

    @pytest.mark.parametrize(
        "more",
        [
            (), ("--lora-rank", 2), pytest.param(("--algo", "dpo"), marks=pytest.mark.exhaustive),
            pytest.param(("--optim", "muon"), marks=pytest.mark.exhaustive),
        ],
    )  # fmt: skip
    @pytest.mark.slow
    def test_each_delta_is_what_it_is_alone(self, mpu, place, copies, more):
        for name in copies:
            mpu("unlearn", name, *self.TRAINING, *more, "--out", "alone/", cwd=place)
        told = mpu("unlearn", *copies, *self.TRAINING, *more, "--out", "together", "--json", cwd=place)
        assert [Path(each["delta"]).name for each in told.json["deltas"]] == [f"{name}.safetensors" for name in copies]
        for name in copies:
            one, other = (place / folder / f"{name}.safetensors" for folder in ("alone", "together"))
            assert one.read_bytes() == other.read_bytes()

    def test_resume_passes_over_what_is_done(self, mpu, place, copies):
        mpu("unlearn", copies[1], *self.TRAINING, cwd=place)
        before = (place / "deltas/copy_2.safetensors").stat().st_mtime_ns
        refused = mpu("unlearn", *copies, *self.TRAINING, check=False, cwd=place)
        assert "already exists" in refused.err
        assert (place / "deltas/copy_1.safetensors").exists()  # what came before it is kept
        told = mpu("unlearn", *copies, *self.TRAINING, "--resume", cwd=place)
        assert "copy_2: deltas/copy_2.safetensors is there already" in told.err
        assert told.out.split() == [f"deltas/{name}.safetensors" for name in copies]
        assert (place / "deltas/copy_2.safetensors").stat().st_mtime_ns == before
        mpu("publish", "base", "--copies", 3, "--seed", 2, "--force", cwd=place)
        refused = mpu("unlearn", *copies, *self.TRAINING, "--resume", check=False, cwd=place)
        assert "is not the delta of copy_1" in refused.err

    def test_resume_passes_over_sealed_copies(self, mpu, place):
        mpu("keygen", "--out", "client.txt", cwd=place)
        key = place / "client.txt"
        mpu("publish", "base", "--copies", 2, "--copy-recipients", f"{key},{key}", cwd=place)
        sealed = ["copy_1.age", "copy_2.age", "--identity", key]
        mpu("unlearn", *sealed, *self.TRAINING, cwd=place)
        assert mpu("unlearn", *sealed, *self.TRAINING, "--resume", cwd=place).err.count("is there already") == 2

    def test_reference_files_of_a_round(self, mpu, place, copies):
        mpu("unlearn", *copies, *self.TRAINING, "--reference-file", "references", cwd=place)
        assert {path.name for path in (place / "references").iterdir()} == {f"{name}.safetensors" for name in copies}

    @pytest.mark.parametrize(
        ("options", "complaint"),
        [
            (["--out", "d.safetensors"], "one file for 2 deltas"),
            (["--reference-file", "r.safetensors"], "one file for 2 copies"),
        ],
    )
    def test_one_file_for_two(self, mpu, place, copies, options, complaint):
        refused = mpu("unlearn", *copies[:2], *options, check=False, cwd=place)
        assert refused.status == 2
        assert complaint in refused.err
        refused = mpu("unlearn", copies[0], f"./{copies[0]}", check=False, cwd=place)
        assert "would be the delta of two copies" in refused.err
