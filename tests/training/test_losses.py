"""The losses, against independent computations and finite differences; the frozen model's outputs; logits in chunks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from mpu_cli.measuring.encoding import Item
from mpu_cli.measuring.scoring import Scorer
from mpu_cli.model.network import Answers, Logits, separate_head
from mpu_cli.records.encode import IGNORED, Encoding, pad
from mpu_cli.records.read import read_records
from mpu_cli.training.losses import ALGORITHMS, RETAIN, score
from mpu_cli.training.reference import forward, freeze, steering_direction
from tests.helpers.models import load, random_model, save, write_records


def outputs_of(said, direction):
    """All outputs of a frozen copy that a term may ask for, by their names."""
    return {"log_probs": said.sequence_log_probs, "logits": said.logits, "hidden": said.hidden, "direction": direction}


def asking(part, reference_outputs):
    """``part``, which has all outputs of the frozen copy, with the ones that a term asks for."""
    return replace(part, reference=part.reference.get(reference_outputs))


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
                said = forward(frozen, inputs, layer=0)
            direction = torch.rand(said.hidden.shape[1], dtype=torch.float64)
            parts[name] = replace(forward(model, inputs, layer=0), reference=outputs_of(said, direction))
        return parts

    @staticmethod
    def by_example(part):
        """Log-probabilities of each example's tokens, from the logits and the definition of softmax."""
        rows = [[] for _ in part.weights]
        for logits, token, row in zip(part.logits.whole(), part.targets, part.rows, strict=True):
            rows[row].append((logits[token] - logits.exp().sum().log()).item())
        return rows

    def settings(self, name, **changes):
        return replace(ALGORITHMS[name].constants, layer=0, **changes)

    def loss_of(self, name, batch, **changes):
        asked = ALGORITHMS[name].reference_outputs
        forget, other = asking(batch["forget"], asked), asking(batch["alternate"], asked)
        loss = ALGORITHMS[name].forget(forget, other, self.settings(name, **changes))
        return float(loss.detach())

    def test_scores(self, batch):
        for part in batch.values():
            rows = self.by_example(part)
            assert part.log_probs.tolist() == pytest.approx([x for row in rows for x in row], abs=1e-12)
            assert part.sequence_log_probs.tolist() == pytest.approx([sum(row) for row in rows], abs=1e-12)
            assert part.lengths.tolist() == [len(row) for row in rows]

    @pytest.mark.parametrize("name", ["gradascent", "graddiff"])
    def test_gradient_ascent(self, batch, name):
        tokens = [x for row in self.by_example(batch["forget"]) for x in row]
        assert self.loss_of(name, batch) == pytest.approx(sum(tokens) / len(tokens), abs=1e-10)

    @staticmethod
    def log_sigmoid(x):
        return -math.log1p(math.exp(-x))

    def test_npo(self, batch):
        terms = [
            self.log_sigmoid(-0.3 * (sum(row) - ref))
            for row, ref in zip(
                self.by_example(batch["forget"]), batch["forget"].reference["log_probs"].tolist(), strict=True
            )
        ]
        assert self.loss_of("npo", batch, beta=0.3) == pytest.approx(-2 / 0.3 * sum(terms) / len(terms), abs=1e-10)

    def test_dpo(self, batch):
        ratios = {
            name: [
                sum(row) - ref
                for row, ref in zip(self.by_example(part), part.reference["log_probs"].tolist(), strict=True)
            ]
            for name, part in batch.items()
        }
        terms = [
            self.log_sigmoid(0.2 * (won - lost))
            for won, lost in zip(ratios["alternate"], ratios["forget"], strict=True)
        ]
        assert self.loss_of("dpo", batch, beta=0.2) == pytest.approx(-2 / 0.2 * sum(terms) / len(terms), abs=1e-10)

    def test_simnpo(self, batch):
        terms = [self.log_sigmoid(-4.5 / len(row) * sum(row) - 4.5 * 0.25) for row in self.by_example(batch["forget"])]
        loss = self.loss_of("simnpo", batch, simnpo_delta=0.25)
        assert loss == pytest.approx(-2 / 4.5 * sum(terms) / len(terms), abs=1e-10)

    def test_undial(self, batch):
        part, terms = batch["forget"], []
        logits = part.logits.whole(), part.reference["logits"].whole()
        for z, z_ref, y in zip(*logits, part.targets, strict=True):
            lowered = [float(v) - 10 * (i == int(y)) for i, v in enumerate(z_ref)]
            total = sum(math.exp(v) for v in lowered)
            student = (z - z.exp().sum().log()).tolist()
            terms.append(-sum(math.exp(v) / total * s for v, s in zip(lowered, student, strict=True)))
        assert self.loss_of("undial", batch) == pytest.approx(sum(terms) / len(terms), abs=1e-10)

    def test_pdu(self, batch):
        rows = batch["forget"].logits.whole().tolist()
        expected = sum((max(row) - sum(row) / len(row)) ** 2 for row in rows) / len(rows)
        assert self.loss_of("pdu", batch) == pytest.approx(expected, abs=1e-10)

    def test_satimp(self, batch):
        tokens = [x for row in self.by_example(batch["forget"]) for x in row]
        expected = sum(math.exp(x) ** 0.7 * (1 - math.exp(x)) ** 0.4 * x for x in tokens) / len(tokens)
        assert self.loss_of("satimp", batch, beta1=0.7, beta2=0.4) == pytest.approx(expected, abs=1e-10)

    def test_wga(self, batch):
        tokens = [x for row in self.by_example(batch["forget"]) for x in row]
        expected = sum(math.exp(x) ** 0.5 * x for x in tokens) / len(tokens)
        assert self.loss_of("wga", batch, beta=0.5) == pytest.approx(expected, abs=1e-10)

    def test_rmu(self, batch):
        hidden = batch["forget"].hidden.detach()
        u = batch["forget"].reference["direction"]
        expected = sum(float(((h - 2 * u) ** 2).sum()) / hidden.shape[1] for h in hidden) / len(hidden)
        assert self.loss_of("rmu", batch) == pytest.approx(expected, abs=1e-10)

    def test_retain_terms(self, batch):
        part = batch["retain"]
        tokens = [x for row in self.by_example(part) for x in row]
        assert float(RETAIN["nll"].term(part).detach()) == pytest.approx(-sum(tokens) / len(tokens), abs=1e-10)
        divergence = 0.0
        for z, z_ref in zip(part.logits.whole().detach(), part.reference["logits"].whole(), strict=True):
            p, q = z_ref.exp() / z_ref.exp().sum(), z.exp() / z.exp().sum()
            divergence += float((p * (p / q).log()).sum()) / len(tokens)
        assert float(RETAIN["kl"].term(asking(part, "logits")).detach()) == pytest.approx(divergence, abs=1e-10)
        away = (part.hidden.detach() - part.reference["hidden"]).square()
        expected = float(away.sum()) / len(tokens) / away.shape[1]
        assert float(RETAIN["hidden"].term(asking(part, "hidden")).detach()) == pytest.approx(expected, abs=1e-10)

    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_gradients_by_finite_differences(self, name):
        torch.manual_seed(0)
        logits, hidden = (torch.randn(2, 5, n, dtype=torch.float64, requires_grad=True) for n in (7, 4))
        labels = torch.tensor([[IGNORED, 1, 2, 3, IGNORED], [IGNORED, IGNORED, 4, 0, 6]])
        outputs = {
            "log_probs": torch.tensor([-4.0, -6.0], dtype=torch.float64),
            "logits": Logits(torch.randn(6, 7, dtype=torch.float64)),
            "direction": torch.rand(4, dtype=torch.float64),
        }
        reference = outputs.get(ALGORITHMS[name].reference_outputs)
        other = score(torch.randn(2, 5, 7, dtype=torch.float64), labels, reference=reference)
        detached = {"satimp", "wga"}  # their weights are detached constants, which finite differences cannot see
        if name == "ceu":
            pytest.skip("its target is detached: test_the_target_of_ceu_is_detached")

        def loss(logits, hidden):
            part = score(logits, labels, hidden=hidden, reference=reference)
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
        ALGORITHMS[name].forget(scores, None, s).backward(retain_graph=True)
        gradient, logits.grad = logits.grad, None
        p = scores.log_probs.detach().exp()
        weights = p**s.beta1 * (1 - p) ** s.beta2 if name == "satimp" else p**s.beta
        ((weights * scores.log_probs).sum() / 3).backward()
        torch.testing.assert_close(gradient, logits.grad)

    def test_the_target_of_ceu_is_detached(self):
        """The gradient of its logits is p − q, q the prediction without the answer's token, over the tokens (Yang)."""
        torch.manual_seed(0)
        logits = torch.randn(1, 4, 7, dtype=torch.float64, requires_grad=True)
        labels = torch.tensor([[IGNORED, 1, 2, 3]])
        ALGORITHMS["ceu"].forget(score(logits, labels), None, self.settings("ceu")).backward()
        p = logits.detach()[0, :3].softmax(-1)
        q = p.clone()
        q[range(3), labels[0, 1:]] = 0
        expected = (p - q / q.sum(-1, keepdim=True)) / 3
        torch.testing.assert_close(logits.grad[0, :3], expected)

    def test_a_record_below_the_level_does_not_pull(self):
        """hinge: one above is pulled with the gradient of its mean log-probability, one below with none."""
        torch.manual_seed(0)
        logits = torch.zeros(2, 3, 7, dtype=torch.float64)
        logits[1, :, 0] = 9.0  # the second record's tokens are improbable
        logits.requires_grad_()
        labels = torch.tensor([[IGNORED, 1, 2], [IGNORED, 3, 4]])
        scores = score(logits, labels)
        level = float(scores.log_probs[0].detach()) - 1
        loss = ALGORITHMS["hinge"].forget(scores, None, self.settings("hinge", level=level))
        assert float(loss) == pytest.approx(1 / 2)
        loss.backward()
        assert logits.grad[0].abs().sum() > 0
        assert logits.grad[1].abs().sum() == 0


class TestChunksOfLogits:
    """With logits in chunks, losses and gradients are those of all logits at once, and no more than a chunk exists."""

    @staticmethod
    def parts(model, frozen, tokenizer, folder, apart):
        records = read_records(write_records(folder / "records", 5, 1))
        sets = {"forget": records, "alternate": [replace(r, answer="w9 w8 w7") for r in records], "retain": records}
        parts = {}
        for name, set_records in sets.items():
            inputs = pad(Encoding(tokenizer, system_prompt="").encode(set_records))
            with torch.no_grad():
                said = forward(frozen, inputs, layer=0, head=separate_head(frozen) if apart else None)
            scores = forward(model, inputs, layer=0, head=separate_head(model) if apart else None)
            direction = torch.ones(said.hidden.shape[1], dtype=torch.float64)
            parts[name] = replace(scores, reference=outputs_of(said, direction))
        return parts

    @pytest.mark.slow
    @pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.exhaustive)])
    @pytest.mark.parametrize("chunk", [3, 1000])
    @pytest.mark.parametrize("term", [*ALGORITHMS, *RETAIN])
    def test_gradients_are_the_same(self, tmp_path, monkeypatch, term, chunk, family):
        model, tokenizer = load(save(random_model(family), tmp_path / "base"), torch.float64, "cpu")
        frozen, _ = load(save(random_model(family, seed=8), tmp_path / "frozen"), torch.float64, "cpu")

        def gradients(apart):
            part = self.parts(model, frozen, tokenizer, tmp_path, apart)
            if term in RETAIN:
                loss = RETAIN[term].term(asking(part["retain"], RETAIN[term].reference_outputs))
            else:
                # so that none vanishes
                constants = replace(ALGORITHMS[term].constants, layer=0, beta=0.5, beta1=0.5, level=-99.0)
                forget, other = (
                    asking(part[name], ALGORITHMS[term].reference_outputs) for name in ("forget", "alternate")
                )
                loss = ALGORITHMS[term].forget(forget, other, constants)
            grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            return [loss.detach(), *(torch.zeros(()) if gradient is None else gradient for gradient in grads)]

        expected = gradients(apart=False)
        assert expected[1].abs().max() > 1e-6
        monkeypatch.setattr("mpu_cli.model.network.CHUNK", chunk * model.config.vocab_size)
        actual = gradients(apart=True)
        for actual_gradient, expected_gradient in zip(actual, expected, strict=True):
            torch.testing.assert_close(actual_gradient, expected_gradient, rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("chunk", [3, None], ids=["three", "all"])
    @pytest.mark.parametrize("terms", ["npo", "undial", "kl"])
    def test_no_more_than_a_chunk_exists(self, tmp_path, monkeypatch, terms, chunk):
        """In a step and in an evaluation, no tensor of logits has more rows than a chunk, which may be all."""
        model, tokenizer = load(save(random_model("llama"), tmp_path / "base"), torch.float64, "cpu")
        vocabulary = model.config.vocab_size
        rows = []

        class Rows(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor) and result.ndim > 1 and result.shape[-1] == vocabulary:
                    rows.append(result.numel() // vocabulary)
                return result

        if chunk:
            monkeypatch.setattr("mpu_cli.model.network.CHUNK", chunk * vocabulary)
        with Rows():
            part = self.parts(model, model, tokenizer, tmp_path, apart=True)["forget"]
            if terms in RETAIN:
                RETAIN[terms].term(asking(part, RETAIN[terms].reference_outputs)).backward()
            else:
                algorithm = ALGORITHMS[terms]
                algorithm.forget(asking(part, algorithm.reference_outputs), None, algorithm.constants).backward()
            items = [Item(tuple(range(3, 12)), 4, (3, 4, 5, 6), ""), Item(tuple(range(20, 29)), 2, (20, 21), "")]
            Scorer(model).score(items, batch_size=2, moments=True)
        tokens, transposed_head = len(part.targets), model.config.hidden_size
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
    @pytest.mark.parametrize("reference_outputs", ["log_probs", "logits", "hidden"])
    def test_kept_is_asked_again(self, tmp_path, family, reference_outputs):
        model, tokenizer = load(save(random_model(family), tmp_path / "base"), torch.float64, "cpu")
        examples = Encoding(tokenizer, system_prompt="").encode(read_records(write_records(tmp_path / "r", 7, 1)))
        example_set = freeze(model, examples, reference_outputs, layer=0, batch_size=3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3)  # training continues; the stored values must not change
        fresh, _ = load(tmp_path / "base", torch.float64, "cpu")
        numbers = [4, 0, 6]
        with torch.no_grad():
            said = forward(fresh, pad([examples[i] for i in numbers]), layer=0)
        outputs = {"log_probs": said.sequence_log_probs, "logits": said.logits.whole(), "hidden": said.hidden}
        expected = outputs[reference_outputs]
        actual = example_set.reference(example_set.collect(numbers, like=[0]))
        actual = actual.whole() if reference_outputs == "logits" else actual
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        loss = Answers(examples[:5]).loss(fresh)
        says_losses = reference_outputs == "log_probs" or (reference_outputs == "logits" and separate_head(fresh))
        assert example_set.reference_loss(5) == (pytest.approx(loss, rel=1e-6) if says_losses else None)

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
