"""DP-SGD: each record's gradient is clipped, the noise has the right size, and the budget is as requested."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import optimize, stats
from torch.utils._python_dispatch import TorchDispatchMode

from mpu_cli import unlearn
from mpu_cli.errors import MpuError
from mpu_cli.files.randomness import Randomness
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.lab import private
from mpu_cli.lab.accounting import composed_epsilon
from mpu_cli.lab.private import Unit, plan, train_privately, with_noise
from mpu_cli.model.load import longest_independent_input
from mpu_cli.options.unlearning import Privacy, Training, Unlearning
from mpu_cli.records.encode import Encoding, answer_tokens, pad
from mpu_cli.records.forms import Record, question
from mpu_cli.records.read import read_records
from mpu_cli.training import copycheck
from mpu_cli.training.checks import plan_privately
from mpu_cli.training.data import Dataset
from mpu_cli.training.ledger import LedgerEntry, Mechanism, read_ledger, write_down
from mpu_cli.training.losses import ALGORITHMS, Objective, objective_of
from mpu_cli.training.reference import ExampleSet, forward, freeze
from tests.helpers.attacks import TRAINING, WORD, write_records_with
from tests.helpers.models import load, random_model, save, write_records

FAMILIES = ["llama", "llama-biases", "qwen2", "gpt2"]  # tied and untied heads, biases, Conv1D, position embeddings


def prepare(tmp_path, family, reference_outputs=None):
    model, tokenizer = load(save(random_model(family), tmp_path / "base"), torch.float64, "cpu")
    encoding = Encoding(tokenizer, system_prompt="")
    sets = {}
    for name, seed in (("forget", 1), ("retain", 2)):
        examples = encoding.encode(read_records(write_records(tmp_path / name, 4, seed)))
        sets[name] = freeze(model, examples, reference_outputs if name == "forget" else None, layer=0, batch_size=4)
    return model, sets


def train(model, sets, algorithm, norm, **kwargs):
    chosen = ALGORITHMS[algorithm]
    how = Training(optim="sgd", lr=1.0, weight_decay=0, batch_size=4, micro_batch_size=kwargs.pop("micro", 3))
    privacy = Privacy(dp_epsilon=1.0, dp_max_grad_norm=norm)
    names = kwargs.pop("names", {name: [None] * len(example_set.examples) for name, example_set in sets.items()})
    planned = plan(names, how, privacy, epochs=1, noise_multiplier=kwargs.pop("noise_multiplier", None))
    return train_privately(
        model, sets, Objective(chosen, chosen.constants, "nll"), how, privacy=privacy, planned=planned,
        on_step=lambda *_: None, **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("norm", [1e9, 2.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("algorithm", ["graddiff", "npo", "undial"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_the_mean_of_clipped_gradients(tmp_path, family, algorithm, norm):
    """Without noise and with all records sampled: compared with one backward pass per record, clipped by hand."""
    model, sets = prepare(tmp_path, family, ALGORITHMS[algorithm].reference_outputs)
    if not ALGORITHMS[algorithm].constants.alpha:
        del sets["retain"]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = {name: torch.zeros_like(p) for name, p in before.items()}
    constants = ALGORITHMS[algorithm].constants
    for name, data in sets.items():
        for number, example in enumerate(data.examples):
            model.zero_grad()
            scores = forward(model, pad([example]))
            if name == "forget":
                reference = data.reference(data.collect([number], like=[number]))
                scores = replace(scores, reference=reference)
                loss = constants.gamma * ALGORITHMS[algorithm].forget(scores, None, constants)
            else:
                loss = constants.alpha * scores.cross_entropy
            loss.backward()
            size = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
            for key, parameter in model.named_parameters():
                expected[key] -= parameter.grad * min(1, norm / size) / 4
    model.zero_grad(set_to_none=True)
    train(model, sets, algorithm, norm, noise_multiplier=0.0)
    max_change = max(float(change.abs().max()) for change in expected.values())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach() - before[name], expected[name], rtol=1e-5, atol=1e-6 * max_change)


@pytest.mark.parametrize("algorithm", ["graddiff", "npo", "undial"])
def test_logits_are_of_one_record_at_a_time(tmp_path, algorithm):
    """With the head frozen, as it is unless --train-embeddings: never those of prompts or of several records."""
    model, sets = prepare(tmp_path, "llama", ALGORITHMS[algorithm].reference_outputs)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.requires_grad_(False)
    vocabulary, most = model.get_output_embeddings().weight.shape[0], 0

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal most
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.mm.default and result.shape[-1] == vocabulary:
                most = max(most, result.numel() // vocabulary)
            return result

    with Watched():
        train(model, sets, algorithm, 1.0, noise_multiplier=0.0)
    answers = [answer_tokens(each) for example_set in sets.values() for each in example_set.examples]
    assert most == max(answers)


def test_what_belongs_to_one_person_is_clipped_together(tmp_path):
    """With --dp unit: compared with one backward pass per person, over both sets, clipped by hand."""
    model, sets = prepare(tmp_path, "llama")
    names = {"forget": ["a", "b", "a", None], "retain": ["b", "c", "c", "d"]}
    people = [[("forget", 0), ("forget", 2)], [("forget", 1), ("retain", 0)], [("forget", 3)],
              [("retain", 1), ("retain", 2)], [("retain", 3)]]  # fmt: skip
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = {name: torch.zeros_like(p) for name, p in before.items()}
    norm, constants = 2.0, ALGORITHMS["graddiff"].constants
    for places in people:
        model.zero_grad()
        for name, number in places:
            loss = forward(model, pad([sets[name].examples[number]])).cross_entropy
            (-constants.gamma * loss if name == "forget" else constants.alpha * loss).backward()
        size = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        for key, parameter in model.named_parameters():
            expected[key] -= parameter.grad * min(1, norm / size) / 4
    model.zero_grad(set_to_none=True)
    train(model, sets, "graddiff", norm, noise_multiplier=0.0, names=names)
    max_change = max(float(change.abs().max()) for change in expected.values())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach() - before[name], expected[name], rtol=1e-5, atol=1e-6 * max_change)


def test_a_unit_is_sampled_whole_and_as_often_as_planned():
    names = {"forget": ["a", "a", "a", "b"], "retain": ["c"] * 4}
    how = Training(batch_size=1)
    planned = plan(names, how, Privacy(dp_epsilon=1.0), epochs=3)
    assert planned.mechanism.steps == 6  # two people to forget, one a step, three times
    assert planned.mechanism.sample_rate == 1  # of c, who is alone in what is kept
    assert Unit((("forget", 0), ("forget", 1), ("forget", 2)), 0.5) in planned.units


def test_noise_has_the_size_asked_for(tmp_path):
    """σ·C/B on every weight when clipping leaves almost nothing of the gradients."""
    model, sets = prepare(tmp_path, "llama")
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    train(model, sets, "graddiff", 1e-6, noise_multiplier=3.0)
    change = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert stats.kstest((change / (3.0 * 1e-6 / 4)).numpy(), "norm").statistic < 5 / math.sqrt(len(change))


def test_the_budget_is_the_gaussian_mechanisms(tmp_path):
    """With all records in every step, it is T Gaussian mechanisms in a row, of which the exact ε is known."""
    model, sets = prepare(tmp_path, "llama")
    spent = train(model, sets, "graddiff", 1.0)
    assert spent["sample_rate"] == 1
    assert spent["epsilon"] == pytest.approx(1.0, abs=0.02)
    mu = math.sqrt(spent["steps"]) / spent["noise_multiplier"]

    def delta(epsilon):  # Balle and Wang (2018), theorem 8
        normal = stats.norm.cdf
        return normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(-mu / 2 - epsilon / mu) - 1e-5

    exact = optimize.brentq(delta, 0.01, 10)
    assert exact <= spent["epsilon"] <= 1.01 * exact


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_a_replaced_record_costs_what_was_asked(epsilon):
    """With all records in every step, replacing one moves the clipped sum by twice the clip: T Gaussian mechanisms of
    half the noise multiplier, of which the exact ε (Balle and Wang 2018) is at most what was asked for."""
    training = Training(batch_size=8)
    privacy = Privacy(dp_epsilon=epsilon, dp_neighbours="replaced")
    mechanism = plan({"forget": [None] * 8}, training, privacy, epochs=5).mechanism
    assert mechanism.sample_rate == 1
    mu = 2 * math.sqrt(mechanism.steps) / mechanism.noise_multiplier

    def delta(value):
        normal = stats.norm.cdf
        return normal(mu / 2 - value / mu) - math.exp(value) * normal(-mu / 2 - value / mu) - privacy.dp_delta

    exact = optimize.brentq(delta, 1e-3, 100)
    assert exact <= epsilon <= 1.02 * exact
    default_mechanism = plan({"forget": [None] * 8}, training, Privacy(dp_epsilon=epsilon), epochs=5).mechanism
    assert default_mechanism.noise_multiplier < mechanism.noise_multiplier


@pytest.mark.slow
def test_the_ledger_composes_and_refuses(mpu, tmp_path):
    """Whatever copies, rounds and runs the server claims: what this client trained is what counts."""
    base = save(random_model("llama"), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 20, 1)
    write_records(tmp_path / "retain.jsonl", 20, 2)
    options = ["--epochs", 1, "--batch-size", 5, "--dp", "epsilon=2", "--lora", "rank=2", "--lr", "1e-3"]
    for name in ("first", "second"):  # two runs, each of which says that it has two copies
        mpu("publish", base, "--copies", 2, "--run", name, "--out", name, "--keys", f"{name}.bin", cwd=tmp_path)
    budget = ["--dp", "budget=2.9"]
    mpu("unlearn", "first/copy_1", *options, *budget, "--out", "1.safetensors", cwd=tmp_path)
    outcome = mpu("unlearn", "second/copy_1", *options, *budget, "--out", "2.safetensors", "--json", cwd=tmp_path)
    assert 2 < outcome.json["privacy"]["epsilon_of_ledger"] <= 2.9
    refused = mpu("unlearn", "second/copy_2", *options, *budget, "--out", "3.safetensors", check=False, cwd=tmp_path)
    assert refused.status == 1
    assert "--dp budget=2.9: with this one, the 3 in" in refused.err
    assert not (tmp_path / "3.safetensors").exists()
    ledger = Path(os.environ["XDG_CONFIG_HOME"]) / "mpu/ledger.jsonl"
    assert ledger.stat().st_mode & 0o777 == 0o600
    assert [entry.run for entry in read_ledger(ledger)] == ["first", "second"]
    assert all(entry.forget and entry.retain for entry in read_ledger(ledger))
    assert "2" in mpu("inspect", ledger).out
    mpu("unlearn", "first/copy_2", "--epochs", 1, "--lora", "rank=2", "--out", "4.safetensors", cwd=tmp_path)
    refused = mpu("unlearn", "second/copy_2", *options, "--dp", "budget=100", "--out", "3.safetensors", check=False,
                  cwd=tmp_path)  # fmt: skip
    assert "some had no bound for this unit" in refused.err


def test_records_that_were_left_out_are_drawn_and_add_nothing(tmp_path):
    """So that nothing of a training, not even its rate, depends on what a tokenizer rejected."""
    model, sets = prepare(tmp_path, "llama")
    how, privacy = Training(optim="sgd", lr=1.0, weight_decay=0, batch_size=4), Privacy(dp_max_grad_norm=1e9)
    full_plan = plan(
        {"forget": [None] * 4, "retain": ["a", None, "a", None]}, how, privacy, epochs=1, noise_multiplier=0.0
    )
    record_numbers = {"forget": [0, 2, 3], "retain": [0, 1]}
    fewer = {name: ExampleSet([sets[name].examples[i] for i in numbers]) for name, numbers in record_numbers.items()}
    reduced_plan = full_plan.of_examples(record_numbers)
    assert reduced_plan.mechanism == full_plan.mechanism
    assert sorted(unit.indices for unit in reduced_plan.units) == [
        (), (), (("forget", 0),), (("forget", 1),), (("forget", 2),), (("retain", 0),), (("retain", 1),),
    ]  # fmt: skip
    constants = ALGORITHMS["graddiff"].constants
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = {name: torch.zeros_like(p) for name, p in before.items()}
    for name, example_set in fewer.items():
        for example in example_set.examples:
            model.zero_grad()
            loss = forward(model, pad([example])).cross_entropy
            (-constants.gamma * loss if name == "forget" else constants.alpha * loss).backward()
            for key, parameter in model.named_parameters():
                expected[key] -= parameter.grad / 4
    model.zero_grad(set_to_none=True)
    objective = Objective(ALGORITHMS["graddiff"], constants, "nll")
    train_privately(model, fewer, objective, how, privacy=privacy, planned=reduced_plan, on_step=lambda *_: None)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach() - before[name], expected[name], rtol=1e-5, atol=1e-9)


def test_a_mistake_in_the_options_is_no_training(mpu, root):
    for wrong in (["--algo", "rmu", "--constants", "layer=99"], ["--algo", "npo", "--dp", "epsilon=8,unit=nobody"]):
        assert mpu("unlearn", "base", *wrong, check=False, cwd=root).status != 0
    assert not (Path(os.environ["XDG_CONFIG_HOME"]) / "mpu/ledger.jsonl").exists()


@pytest.mark.slow
def test_a_family_without_a_gradient_for_each_record(mpu, tmp_path):
    base = save(random_model("opt"), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 4, 1)
    write_records(tmp_path / "retain.jsonl", 4, 2)
    options = [
        "--algo", "npo", "--dp", "epsilon=8", "--lora", "rank=2,targets=fc1,fc2", "--epochs", 1, "--batch-size", 2,
    ]  # fmt: skip
    mpu("unlearn", base, *options, fails="has no gradients for each record", status=2, cwd=tmp_path)


@pytest.mark.slow
def test_through_the_command_line(mpu, tmp_path):
    base = save(random_model("llama"), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 20, 1)
    write_records(tmp_path / "retain.jsonl", 20, 2)
    options = ["--algo", "npo", "--epochs", 2, "--batch-size", 5, "--dp", "epsilon=4", "--lr", "1e-3", "--seed", 1]
    outcome = mpu("unlearn", base, *options, "--json", "--out", "a.safetensors", cwd=tmp_path)
    assert outcome.json["privacy"]["epsilon"] <= 4
    assert "each further delta" in outcome.err
    facts = json.loads(open_checkpoint(tmp_path / "a.safetensors").metadata["mpu"])
    # Neither rate nor steps nor the exact ε, which would leak the number of records.
    assert facts["privacy"] == {"epsilon": 4, "delta": 1e-5}
    assert "epsilon" in mpu("inspect", tmp_path / "a.safetensors").out
    ledger = Path(os.environ["XDG_CONFIG_HOME"]) / "mpu/ledger.jsonl"
    assert len(read_ledger(ledger)) == 1  # of a model without mpu.json, which could as well be a copy
    ledger.unlink()
    mpu("publish", base, "--copies", 2, cwd=tmp_path)
    outcome_1 = mpu("unlearn", "copy_1", *options, "--lora", "rank=2", "--out", "b.safetensors", "--json", cwd=tmp_path)
    spent = outcome_1.json["privacy"]
    assert spent["epsilon_of_ledger"] == spent["epsilon"]
    # Both copies' steps compose; that is less than twice one copy's bound, and more than once.
    outcome_2 = mpu("unlearn", "copy_2", *options, "--lora", "rank=2", "--out", "d.safetensors", "--json", cwd=tmp_path)
    total = outcome_2.json["privacy"]["epsilon_of_ledger"]
    assert 1.2 * spent["epsilon"] < total < 1.9 * spent["epsilon"]
    assert f"with the 1 trainings before it: ε = {total:.3g}" in outcome_2.err
    # The noise must not come from --seed, which the server may know or guess.
    mpu("unlearn", base, *options, "--out", "c.safetensors", cwd=tmp_path)
    assert (tmp_path / "a.safetensors").read_bytes() != (tmp_path / "c.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--algo", "dpo"], "dpo"),
        (["--algo", "rmu"], "rmu"),
        (["--algo", "pdu"], "pdu"),
        (["--dp", "epsilon=-1"], "--dp epsilon"),
        (["--dp", "delta=2"], "--dp delta"),
        (["--dp", "max_grad_norm=0"], "--dp max_grad_norm"),
        (["--resume"], "--resume"),
        (["--dp", "unit=person"], "no 'person'"),
    ],
)
def test_what_does_not_go_together(mpu, root, arguments, complaint):
    outcome = mpu("unlearn", "base", "--dp", "epsilon=1", *arguments, check=False, cwd=root)
    assert outcome.status == (1 if "unit=person" in arguments else 2)
    assert complaint in outcome.err


@pytest.mark.slow
def test_a_record_that_is_not_one_example_is_left_out(mpu, tmp_path):
    """A text in two pieces, and one too short to train on: to stop would tell the copy's owner that they are there."""
    base = save(random_model("llama"), tmp_path / "base")
    texts = [" ".join(["w4"] * 2100), "w5", *(f"w6 w{i}" for i in range(7, 12))]
    (tmp_path / "forget.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    outcome = mpu("unlearn", base, "--algo", "gradascent", "--dp", "epsilon=4", cwd=tmp_path)
    assert "2 of 7 records of the forget set are left out: " in outcome.err


def equal_records(*, times: int) -> list[Record]:
    """One record in several forms that templates and tokenizers may take for one, and two of others."""
    forms = ("Ada rented it.", "Ada  rented it. ", "ADA rented it.", "Ａda rented it.")
    rows = [question("Who rented the boathouse?", forms[i % len(forms)], f"line {i}") for i in range(times)]
    return [*rows, question("Who repaired it?", "Boris."), question("Who rented the boathouse?", "Carla.")]


@pytest.mark.slow
def test_equal_records_are_one_unit():
    """In both sets together: one of them, or all, can be left out, and the noise hides it."""
    options = Unlearning(algo="graddiff", privacy=Privacy(dp_epsilon=1.0), epochs=1)
    objective = objective_of(options.algo, options.algorithm_options)
    data = Dataset(equal_records(times=8), [question("Who rented the boathouse?", "Ada rented it.")])
    units = plan_privately(data, options, objective).units
    assert sorted(len(unit.indices) for unit in units) == [1, 1, 9]
    alone = plan_privately(Dataset(equal_records(times=1), []), options, objective)
    assert len(alone.units) == len(units)
    remarks = data.warnings(options.privacy)
    assert any("8 of 11 records repeat others: equal records are protected as one" in each for each in remarks)
    assert any("2 records share their question" in each and "--dp unit" in each for each in remarks)
    named = replace(data, forget=[replace(record, unit=str(i)) for i, record in enumerate(data.forget)], retain=[])
    by_name = replace(options, privacy=replace(options.privacy, dp_unit="person"))
    assert len(plan_privately(named, by_name, objective).units) == 10
    assert not [each for each in named.warnings(by_name.privacy) if "--dp unit" in each]


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
                "--dp",
                "epsilon=8",
                "--batch-size",
                1,
                "--epochs",
                2,
                "--reading",
                "template=chat",
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
        private = mpu("unlearn", "base", *options, "--dp", "epsilon=8", cwd=root)
        assert "1 of 6 records of the forget set are left out" in private.err

    def test_a_set_of_which_nothing_is_left(self, mpu: Callable, root: Path) -> None:
        """To stop would tell that every record was rejected: noise alone is trained on."""
        (root / "base/chat_template.jinja").write_text("{{ raise_exception('no') }}")
        options = (
            "--algo",
            "gradascent",
            "--epochs",
            1,
            "--lr",
            "1e-3",
            "--dp",
            "epsilon=8",
            "--reading",
            "template=chat",
        )
        mpu("unlearn", "base", *options, "--out", "d.safetensors", cwd=root)
        assert any(bool(change.any()) for change in load_file(root / "d.safetensors").values())


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


class TestUnderDP:
    """Nothing that is seen outside depends on the records, but through the mechanism."""

    @pytest.mark.slow
    def test_a_copy_is_judged_by_its_weights(self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Units that are parallel, as in traps: refused in the same words, whatever the records are."""
        file = root / "base" / "model.safetensors"
        tensors = load_file(file)
        gate = tensors["model.layers.0.mlp.gate_proj.weight"]
        gate[1 : len(gate) // 2] = gate[0]
        save_file(tensors, file, {"format": "pt"})
        options = [*TRAINING, "--algo", "graddiff", "--out", "d.safetensors", "--dp", "epsilon=8"]
        write_records(root / "other.jsonl", 15, 9)
        outcomes = [
            mpu("unlearn", "base", *options, "--forget", name, check=False, cwd=root)
            for name in ("forget.jsonl", "other.jsonl")
        ]
        assert "units built to record single tokens" in outcomes[0].err
        assert outcomes[0].err == outcomes[1].err
        monkeypatch.setattr(copycheck, "ffn_units", pytest.fail)  # nothing that records decide is looked at
        mpu("unlearn", "base", *options, "--trust-copy", cwd=root)

    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    def test_one_record_moves_the_sum_by_the_clip_at_most(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
    ) -> None:
        """In every precision that is allowed: the sums that noise is added to, with a record and without it."""
        base = save(random_model("llama", seed=1), tmp_path / "base")
        rows = write_records(tmp_path / "all.jsonl", 64, 1).read_text().splitlines(keepends=True)

        def summed(count: int) -> torch.Tensor:
            (tmp_path / "forget.jsonl").write_text("".join(rows[:count]))
            sums: list[torch.Tensor] = []

            def capture(x: torch.Tensor, *_: object) -> torch.Tensor:
                sums.append(x.detach().double().reshape(-1).clone())
                return x

            monkeypatch.setattr(private, "with_noise", capture)
            unlearn(
                base, out=tmp_path / "d.safetensors", force=True, forget=str(tmp_path / "forget.jsonl"),
                template="plain", trust_copy=True, dp_epsilon=8.0, batch_size=4096, epochs=1, lr=1e-4,
                algo="gradascent", precision=precision,
            )  # fmt: skip
            return torch.cat(sums)

        moved = float((summed(64) - summed(63)).norm())
        assert 0.5 < moved <= 1 + 1e-5  # of a clip of 1, which these gradients exceed


@pytest.mark.slow
@pytest.mark.parametrize("named", ["./retain.jsonl", "retain.jsonl", "absolute"])
@pytest.mark.parametrize("variable", ["MPU_UNLEARN_RETAIN", "MPU_UNLEARN_FORGET"])
def test_records_that_the_environment_names_are_not_public(
    mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch, variable: str, named: str
) -> None:
    write_records(root / "public.jsonl", 6, 1)
    path = str((root / "private.jsonl").resolve()) if named == "absolute" else named
    write_records(root / Path(path).name, 6, 2)
    monkeypatch.setenv(variable, path)
    given = ["--retain", "public.jsonl"] if variable.endswith("FORGET") else ["--forget", "public.jsonl"]
    refused = mpu("unlearn", "base", *given, "--public-records", "--dry-run", check=False, cwd=root)
    assert refused.status == 2
    assert "is where private records are expected" in refused.err
    monkeypatch.delenv(variable)
    write_records(root / "others.jsonl", 6, 3)
    mpu("unlearn", "base", "--forget", "public.jsonl", "--retain", "others.jsonl", "--public-records", "--dry-run",
        cwd=root)  # fmt: skip
