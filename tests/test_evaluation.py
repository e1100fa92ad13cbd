"""``mpu eval`` and ``mpu compare``: the field's standard metrics, from one pass per item."""

from __future__ import annotations

import json
import math
import random
import shutil
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from scipy.stats import mannwhitneyu
from transformers import AutoModelForCausalLM, AutoTokenizer

from mpu_cli.errors import MpuError
from mpu_cli.evaluation import generation, membership, metrics
from mpu_cli.evaluation.encoding import Item, OpenUnlearningEncoder, TrainedEncoder
from mpu_cli.evaluation.generation import answer
from mpu_cli.evaluation.readings import reading
from mpu_cli.evaluation.relearning_attacks import with_earlier_turns
from mpu_cli.evaluation.results import best, goal
from mpu_cli.evaluation.scoring import Scorer, TokenScores, passes_at_once
from mpu_cli.options.unlearning import SYSTEM_PROMPT
from mpu_cli.records.encoding import Encoding
from mpu_cli.records.record import question
from tests.models import CONFIGS, FAMILY_CONFIGS, SHARED, VOCABULARY, by_kind, load, needs_shared, random_model, save
from tests.stopping import stop_when

TOFU = SHARED / "data" / "tofu"


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(3, VOCABULARY)}" for _ in range(count))


def tofu_row(rng: random.Random) -> dict:
    return {
        "question": words(rng, rng.randrange(4, 9)),
        "answer": words(rng, rng.randrange(3, 9)),
        "paraphrased_answer": words(rng, rng.randrange(3, 9)),
        "perturbed_answer": [words(rng, rng.randrange(3, 9)) for _ in range(3)],
    }


@pytest.fixture
def tofu(tmp_path: Path) -> Path:
    """A folder with TOFU's splits, filled with made-up words."""
    folder = tmp_path / "tofu"
    folder.mkdir()
    rng = random.Random(0)
    splits = ("forget01_perturbed", "retain_perturbed", "real_authors_perturbed", "world_facts_perturbed", "holdout01")
    for split in splits:
        rows = [json.dumps(tofu_row(rng)) for _ in range(7)]
        (folder / f"{split}.json").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(random_model("llama"), tmp_path / "model")


def items_of(rng: random.Random, prompts: int, answers: int) -> list[Item]:
    items = []
    for number in range(prompts):
        prompt = tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(18, 22)))
        for _ in range(answers):
            ids = prompt + tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 9)))
            items.append(Item(ids, len(prompt), prompt, f"item {number}"))
    return items


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize("name", ["full_forget01"])  # retain99_forget01 holds too, and takes as long
def test_numbers_are_the_suites(mpu: Callable, tmp_path: Path, name: str) -> None:
    golden = json.loads((SHARED / "golden" / f"{name}.json").read_text())
    rows = json.loads((SHARED / "golden" / f"{name}_EVAL.json").read_text())
    command = [part.format(shared=SHARED) for part in golden["command"]]
    mpu(*command[1:], "--out", tmp_path / "eval.json")
    results = json.loads((tmp_path / "eval.json").read_text())["metrics"]
    for metric, value in golden["metrics"].items():
        actual = results[metric]["agg_value"]
        if metric == "forget_quality":
            assert math.log(actual) == pytest.approx(math.log(value), rel=1e-4)
        else:
            assert actual == pytest.approx(value, abs=2e-6), metric
    for metric in golden["metrics"]:
        form = rows[metric]
        assert set(form) == set(results[metric])
        for index, row in form.get("value_by_index", {}).items():
            actual_row = results[metric]["value_by_index"][index]
            assert set(actual_row) == set(row)
            if "prob" in row:
                assert actual_row["prob"] == pytest.approx(row["prob"], abs=2e-6)
            if "generation" in row:
                assert actual_row == row


class TestScoring:
    @pytest.mark.parametrize("family", by_kind([*CONFIGS, *FAMILY_CONFIGS]))
    def test_items_that_begin_alike_are_scored_as_alone(self, family: str) -> None:
        """Compared with log-probabilities of each item by itself; Mistral's prompts are longer than its window."""
        model = random_model(family)
        rng = random.Random(1)
        items = items_of(rng, 5, 4) + items_of(rng, 4, 1)
        items += [replace(item, ids=(*item.ids, *item.ids[3:6])) for item in items[::3]]  # begin with all of another
        for batch_size in (3, 64):
            scored = Scorer(model).score(items, batch_size=batch_size, moments=True)
            for item, scores in zip(items, scored, strict=True):
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([item.ids])).logits[0, item.start - 1 : -1].double()
                log_p = logits.log_softmax(-1)
                expected = log_p.gather(1, torch.tensor(item.labels)[:, None])[:, 0]
                torch.testing.assert_close(scores.log_probs.double(), expected, rtol=0, atol=1e-4)
                torch.testing.assert_close(scores.losses.double(), -expected, rtol=0, atol=1e-4)
                assert scores.likeliest.equal(logits.argmax(-1))
                mean = (log_p.exp() * log_p).sum(-1)
                variance = (log_p.exp() * (log_p - mean[:, None]) ** 2).sum(-1)
                torch.testing.assert_close(scores.mean.double(), mean, rtol=0, atol=1e-4)
                torch.testing.assert_close(scores.variance.double(), variance, rtol=0, atol=1e-3)

    @pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "granite"])
    def test_what_items_have_in_common_is_read_once(self, family: str) -> None:
        """Each beginning of an item is one token in one pass, without padding, however many items have it."""
        model = random_model(family)
        items = items_of(random.Random(3), 40, 5)
        shapes = []

        def count(_: object, __: object, arguments: dict) -> None:
            shapes.append(tuple(arguments["input_ids"].shape))

        scorer = Scorer(model)
        scorer.prepare(items)
        model.register_forward_pre_hook(count, with_kwargs=True)
        scorer.score([*items, *items], batch_size=1000)
        beginnings = {item.ids[:end] for item in items for end in range(1, len(item.ids))}
        assert shapes == [(1, len(beginnings))]

    def test_masks_that_are_not_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Long items: attention goes a few rows at a time and makes its masks anew in each layer."""
        model, items = random_model("mistral"), items_of(random.Random(3), 6, 5)
        expected_scores = Scorer(model).score(items, batch_size=50)
        monkeypatch.setattr("mpu_cli.evaluation.packing.MASK", 2000)
        scorer = Scorer(model)
        for expected, actual in zip(expected_scores, scorer.score(items, batch_size=50), strict=True):
            torch.testing.assert_close(expected.log_probs, actual.log_probs, rtol=0, atol=1e-5)
        assert scorer._packs  # or each item would be read by itself

    @pytest.mark.parametrize("family", ["llama", "gpt2", "granite"])
    def test_several_packs_at_once(self, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Packs are read on several threads, with the scores of one, which all packs together are no larger than."""
        model, items = random_model(family), items_of(random.Random(3), 80, 5)
        read = []
        model.register_forward_pre_hook(
            lambda _, __, arguments: read.append((threading.get_ident(), arguments["input_ids"].numel())),
            with_kwargs=True,
        )
        before = torch.get_num_threads()
        scores_by_threads = {}
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                scorer = Scorer(model)
                scorer.score(items, batch_size=24)  # tries on a few items first
                read.clear()
                scores_by_threads[threads] = scorer.score(items, batch_size=24, moments=True)
                most = 24 * max(len(item.ids) for item in items) // threads
                assert len({thread for thread, _ in read}) == threads
                assert max(tokens for _, tokens in read) <= most
                assert torch.get_num_threads() == threads
            for single_thread, three_threads in zip(*scores_by_threads.values(), strict=True):
                assert single_thread.likeliest.equal(three_threads.likeliest)
                for name in ("losses", "log_probs", "mean", "variance"):
                    torch.testing.assert_close(
                        getattr(single_thread, name), getattr(three_threads, name), rtol=0, atol=1e-4
                    )
            monkeypatch.setattr("mpu_cli.evaluation.scoring.is_large", lambda _: True)
            read.clear()
            Scorer(model).score(items, batch_size=24)
            assert max(tokens for _, tokens in read) > most
        finally:
            torch.set_num_threads(before)

    def test_positions_that_keep_a_scale_allow_one_pass_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # tests may run on one thread
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        assert passes_at_once(random_model("llama", rope_parameters=rope)) == 1
        assert passes_at_once(random_model("llama")) == 3

    def test_nothing_but_losses_of_others(self) -> None:
        """They are the same; an item that is also asked for fully is."""
        model, items = random_model("llama"), items_of(random.Random(3), 10, 5)
        full_scores = Scorer(model).score(items, batch_size=8, moments=True)
        parts = Scorer(model).score(items[::3], loss_items=items, batch_size=8, moments=True)
        item_numbers = [*range(0, len(items), 3), *range(len(items))]
        for root, (number, scores) in enumerate(zip(item_numbers, parts, strict=True)):
            torch.testing.assert_close(scores.losses, full_scores[number].losses, rtol=0, atol=1e-5)
            if number % 3:
                assert scores.log_probs is scores.likeliest is scores.mean is scores.variance is None, root
            else:
                assert scores.likeliest.equal(full_scores[number].likeliest)
                for name in ("log_probs", "mean", "variance"):
                    torch.testing.assert_close(
                        getattr(scores, name), getattr(full_scores[number], name), rtol=0, atol=1e-4
                    )

    def test_a_pack_is_limited(self) -> None:
        """No pass reads more tokens than the longest item times the batch size."""
        model = random_model("llama")
        items = items_of(random.Random(3), 40, 5)
        read = []
        model.register_forward_pre_hook(
            lambda _, __, arguments: read.append(arguments["input_ids"].numel()), with_kwargs=True
        )
        Scorer(model).score(items, batch_size=7)
        most = 7 * max(len(item.ids) for item in items)
        assert 0.5 * most < max(read) <= most


def test_memorisation_is_what_its_words_say() -> None:
    rng = random.Random(4)
    for _ in range(200):
        labels = [rng.randrange(3) for _ in range(rng.randrange(2, 9))]
        said = [rng.randrange(3) if rng.random() < 0.5 else label for label in labels]
        log_probs = -torch.rand(len(labels))
        item = Item((0, *labels), 1, (0,), "")
        readings = reading(item, TokenScores(-log_probs, log_probs, torch.tensor(said)), "text")
        right = [a == b for a, b in zip(said, labels, strict=True)][:-1]
        shortest = next((k for k in range(len(right)) if all(right[k:])), len(right) - 1)
        assert readings["extraction_strength"] == pytest.approx(1 - shortest / len(right))
        assert readings["exact_memorization"] == pytest.approx(sum(right) / len(right))
        lowest = np.sort(log_probs[:-1].numpy())[: max(1, int(0.4 * len(right)))]
        assert readings["min_k"] == pytest.approx(-lowest.mean())
        agreed = next((i for i, ok in enumerate([*right, said[-1] == labels[-1]]) if not ok), len(labels))
        assert readings["says"] == said[: agreed + 1]


class TestEncoding:
    @pytest.mark.parametrize("template", ["chat", "plain"])
    def test_questions_are_tokenized_together_as_one_by_one(self, tmp_path: Path, template: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(save(random_model("llama"), tmp_path / "model"))
        rng = random.Random(4)
        words = [" ".join(f"w{rng.randrange(80)}" for _ in range(rng.randrange(1, 9))) for _ in range(60)]
        shots = [question("w1 w2", "w3"), question("w4", "w5")]
        records = [with_earlier_turns(question(words[i % 7], words[i], str(i)), shots[: i % 3]) for i in range(60)]
        encoders = [OpenUnlearningEncoder(tokenizer, template), TrainedEncoder(Encoding(tokenizer, template))]
        for encoder in encoders:
            fresh = replace(encoder)
            assert encoder.questions(records) == [item for each in records for item in fresh.questions([each])]
        for record, item in zip(records, encoders[0].questions(records), strict=True):
            texts = [turn.content for turn in (*record.turns, record.answer_turn)]
            dialogue = [*zip(texts[::2], texts[1::2], strict=True)]
            if template == "chat":
                turns = [{"role": "system", "content": SYSTEM_PROMPT}]
                for user_text, assistant_text in dialogue:
                    turns += [{"role": "user", "content": user_text}, {"role": "assistant", "content": assistant_text}]
                ids = tokenizer.apply_chat_template(turns, return_dict=True).input_ids
            else:
                ids = tokenizer("\n\n".join(f"Question: {q}\nAnswer: {a}" for q, a in dialogue)).input_ids
            assert list(item.ids[: len(ids)]) == ids
            assert item.ids[len(ids) :] in ((), (tokenizer.eos_token_id,))

    def test_a_template_that_rejects_one_question_names_it(self, tmp_path: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(save(random_model("llama"), tmp_path / "model"))
        refusal = "{%- if messages[-1].content == 'w7' -%}{{ raise_exception('not this') }}{%- endif -%}"
        tokenizer.chat_template = refusal + tokenizer.chat_template
        records = [question("w3", f"w{i}", f"records, line {i}") for i in range(10)]
        with pytest.raises(MpuError, match=r"^records, line 7: the tokenizer's chat template rejected it .not this"):
            OpenUnlearningEncoder(tokenizer, "chat").questions(records)


def test_norms_of_gradients_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model's are taken as they come, each let go before the next; tied weights have one."""
    model = random_model("llama")
    items = items_of(random.Random(5), 4, 3)
    together = membership.gradient_norms(model, items)
    monkeypatch.setattr(membership, "GRADIENTS", 0)
    gradient_counts: list[int] = []

    def count(_: torch.Tensor) -> None:
        gradient_counts.append(sum(parameter.grad is not None for parameter in model.parameters()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    assert membership.gradient_norms(model, items) == pytest.approx(together, rel=1e-6)
    assert max(gradient_counts) == 1
    scored_items = [item for item in items if len(item.labels) > 1]
    assert len(gradient_counts) == len(scored_items) * len([*model.parameters()])


class TestGeneration:
    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    def test_a_draft_changes_no_answer(self, tmp_path: Path, family: str) -> None:
        """Using the scores to draft how an answer begins does not change the answer."""
        model = random_model(family, eos_token_id=None)
        tokenizer = AutoTokenizer.from_pretrained(save(model, tmp_path / "model"))
        rng = random.Random(5)
        items = items_of(rng, 12, 1)
        plain = answer(model, tokenizer, items, [[]] * len(items), limit=12, batch_size=2)
        # True answers that match the model's own, completely or at the beginning.
        spoken = [tokenizer(said.generation, add_special_tokens=False).input_ids for said in plain]
        ids = [
            (*item.prompt, *said[: rng.randrange(1, 12)], *item.labels)
            for item, said in zip(items, spoken, strict=True)
        ]
        answered_items = [Item(each, item.start, item.prompt, "") for each, item in zip(ids, items, strict=True)]
        drafts = [
            reading(i, s, "")["says"]
            for i, s in zip(answered_items, Scorer(model).score(answered_items, batch_size=5), strict=True)
        ]
        assert sum(map(len, drafts)) > 2 * len(drafts)
        drafted = answer(model, tokenizer, answered_items, drafts, limit=12, batch_size=2)
        assert [said.generation for said in drafted] == [said.generation for said in plain]

    def test_limit_and_stops(self, tmp_path: Path) -> None:
        model = random_model("llama", eos_token_id=None)
        tokenizer = AutoTokenizer.from_pretrained(save(model, tmp_path / "model"))
        items = items_of(random.Random(6), 6, 1)
        full_answers = answer(model, tokenizer, items, [[]] * 6, limit=15, batch_size=2)
        assert {len(said.generation.split()) for said in full_answers} == {15}
        stop = full_answers[0].generation.split()[4]
        cut = answer(model, tokenizer, items, [[]] * 6, limit=15, stops=(stop,), batch_size=2)
        for said, long in zip(cut, full_answers, strict=True):
            assert said.generation == long.generation.split(stop)[0].strip()

    def test_a_long_prompt_takes_no_room_from_others(self, tmp_path: Path) -> None:
        """GPT-2 has 128 positions: each answer is as long as its own prompt leaves room for, in any batch."""
        model = random_model("gpt2")
        model.generation_config.eos_token_id = None
        tokenizer = AutoTokenizer.from_pretrained(save(model, tmp_path / "model"))
        tokenizer.eos_token = None
        rng = random.Random(3)
        prompts = [tuple(rng.randrange(3, VOCABULARY) for _ in range(n)) for n in (108, 5, 120, 9, 5, 127, 128)]
        items = [Item((*prompt, 5), len(prompt), prompt, "") for prompt in prompts]
        answers = {}
        for size in (1, 32):
            with torch.no_grad():
                answers[size] = answer(model, tokenizer, items, [[]] * 7, limit=60, batch_size=size, longest=128)
        assert [each.generation for each in answers[1]] == [each.generation for each in answers[32]]
        assert [len(each.generation.split()) for each in answers[32]] == [20, 60, 8, 60, 60, 1, 0]

    def test_keys_and_values_have_a_bound(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As many rows are generated at once as there is room for, and the answers are the same."""
        model = random_model("llama", eos_token_id=None)
        tokenizer = AutoTokenizer.from_pretrained(save(model, tmp_path / "model"))
        items = items_of(random.Random(5), 12, 1)
        widest: list[int] = []
        generate = model.generate

        def generate_and_record(**kwargs: Any) -> torch.Tensor:
            widest.append(kwargs["input_ids"].shape[0] * (kwargs["input_ids"].shape[1] + kwargs["max_new_tokens"]))
            return generate(**kwargs)

        monkeypatch.setattr(model, "generate", generate_and_record)
        plain = answer(model, tokenizer, items, [[]] * 12, limit=9, batch_size=32)
        config, together = model.config, widest[0]
        a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4  # bytes, in float32
        monkeypatch.setattr(generation, "CACHE", together // 3 * a_token)
        widest.clear()
        again = answer(model, tokenizer, items, [[]] * 12, limit=9, batch_size=32)
        assert again == plain
        assert max(widest) <= together // 3
        assert len(widest) < 12

    def test_the_generation_config_is_honoured(self, tmp_path: Path) -> None:
        """Matches transformers' greedy generation, which OpenUnlearning uses; drafts know only the most likely
        token."""
        model = random_model("llama")
        model.generation_config.repetition_penalty = 1.7
        model.generation_config.stop_strings = "w5"
        tokenizer = AutoTokenizer.from_pretrained(save(random_model("llama"), tmp_path / "model"))
        [item] = items_of(random.Random(4), 1, 1)
        ids = torch.tensor([item.prompt])
        model.generation_config.stop_strings = None
        expected = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                  max_new_tokens=20, pad_token_id=1)[0, ids.shape[1] :]  # fmt: skip
        model.generation_config.stop_strings = "w5"
        [said] = answer(model, tokenizer, [item], [[9]], limit=20, batch_size=2)
        assert said.generation == tokenizer.decode(expected, skip_special_tokens=True)


class TestCommand:
    def test_by_hand(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        """TOFU's metrics on a random model, computed here from their definitions, one record at a time."""
        reference = save(random_model("llama", seed=9), tmp_path / "reference")
        out = mpu(
            "eval", model, "--data-dir", tofu, "--forget-split", "forget01", "--reference-model", reference,
            "--out", tmp_path / "eval.json", "--batch-size", 4, "--json",
        ).json["metrics"]  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(model)
        models = [AutoModelForCausalLM.from_pretrained(path) for path in (model, reference)]

        def chat(*turns: tuple[str, str], prompt: bool) -> list[int]:
            messages = [{"role": role, "content": text} for role, text in turns]
            return tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=True).input_ids

        def logits(question: str, reply: str, which: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
            turns = [("system", "You are a helpful assistant."), ("user", question)]
            prompt = chat(*turns, prompt=True)
            ids = chat(*turns, ("assistant", reply), prompt=False)
            ids += [tokenizer.eos_token_id] * (ids[-1] != tokenizer.eos_token_id)
            answer_logits = models[which](input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
            return answer_logits.log_softmax(-1), torch.tensor(ids[len(prompt) :])

        def loss(question: str, reply: str, which: int = 0) -> float:
            log_p, labels = logits(question, reply, which)
            return float(-log_p.gather(1, labels[:, None]).mean())

        def rows(split: str) -> list[dict]:
            return [json.loads(line) for line in (tofu / f"{split}.json").read_text().splitlines()]

        forget, holdout = rows("forget01_perturbed"), rows("holdout01")
        with torch.no_grad():
            probabilities = [math.exp(-loss(r["question"], r["answer"])) for r in forget]
            assert out["forget_Q_A_Prob"] == pytest.approx(np.mean(probabilities), rel=1e-4)

            def ratio(row: dict, right: str) -> float:
                wrong = np.mean([loss(row["question"], w) for w in row["perturbed_answer"]])
                return math.exp(-wrong) / math.exp(-loss(row["question"], row[right]))

            ratios = [ratio(r, "paraphrased_answer") for r in forget]
            assert out["forget_truth_ratio"] == pytest.approx(np.mean([min(r, 1 / r) for r in ratios]), rel=1e-4)
            facts = rows("world_facts_perturbed")
            ratios = [max(0, 1 - ratio(r, "answer")) for r in facts]
            assert out["wf_Truth_Ratio"] == pytest.approx(np.mean(ratios), rel=1e-4)
            shares = []
            for r in facts:
                p, *wrong = [math.exp(-loss(r["question"], a)) for a in (r["answer"], *r["perturbed_answer"])]
                shares.append(p / (p + sum(wrong)))
            assert out["wf_Q_A_Prob_normalised"] == pytest.approx(np.mean(shares), rel=1e-4)

            def auc(value: Callable[[dict], float]) -> float:
                sides = [[value(r) for r in side] for side in (forget, holdout)]
                return mannwhitneyu(sides[1], sides[0]).statistic / (len(forget) * len(holdout))

            attacks = {
                "mia_loss": lambda r: loss(r["question"], r["answer"]),
                "mia_reference": lambda r: loss(r["question"], r["answer"]) - loss(r["question"], r["answer"], 1),
                "mia_zlib": lambda r: loss(r["question"], r["answer"]) / len(zlib.compress(r["answer"].encode())),
            }
            for name, value in attacks.items():
                assert out[name] == pytest.approx(auc(value)), name

        def gradient_norm(row: dict) -> float:
            log_p, labels = logits(row["question"], row["answer"])
            models[0].zero_grad()
            (-log_p[:-1].gather(1, labels[:-1, None]).mean()).backward()
            return np.mean([float(p.grad.norm()) for p in models[0].parameters()])

        assert out["mia_gradnorm"] == pytest.approx(auc(gradient_norm))
        parts = [out[f"{s}_{m}"] for s in ("ra", "wf") for m in ("Q_A_Prob_normalised", "Q_A_ROUGE", "Truth_Ratio")]
        parts += [out[f"retain_{m}"] for m in ("Q_A_Prob", "Q_A_ROUGE", "Truth_Ratio")]
        harmonic = 0 if 0 in parts else 9 / sum(1 / part for part in parts)
        assert out["model_utility"] == pytest.approx(harmonic)

    @pytest.mark.slow
    def test_batch_size_changes_no_number(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        results = []
        for size in (1, 5, 64):
            path = tmp_path / f"{size}.json"
            mpu("eval", model, "--data-dir", tofu, "--forget-split", "forget01", "--batch-size", size, "--out", path)
            results.append({n: f["agg_value"] for n, f in json.loads(path.read_text())["metrics"].items()})
        assert results[1] == pytest.approx(results[0], abs=1e-5)
        assert results[2] == pytest.approx(results[0], abs=1e-5)

    def test_only_what_is_asked_for(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        for split in ("retain_perturbed", "holdout01", "real_authors_perturbed"):
            (tofu / f"{split}.json").unlink()
        out = tmp_path / "eval.json"
        mpu(
            "eval",
            model,
            "--data-dir",
            tofu,
            "--forget-split",
            "forget01",
            "--metrics",
            "forget_truth_ratio",
            "--out",
            out,
        )
        document = json.loads(out.read_text())
        assert list(document["data"]) == ["forget"]
        assert set(document["metrics"]) == {"forget_truth_ratio", "forget_Q_A_PARA_Prob", "forget_Q_A_PERT_Prob"}

    def test_its_result_is_a_retain_log(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        log, out = tmp_path / "retain.json", tmp_path / "eval.json"
        common = ("--data-dir", tofu, "--forget-split", "forget01")
        mpu("eval", model, *common, "--out", log)
        results = mpu("eval", model, *common, "--retain-log", log, "--out", out, "--json").json["metrics"]
        assert results["forget_quality"] == pytest.approx(1)  # the same model
        assert results["privleak"] == pytest.approx(0)
        lines = (tofu / "forget01_perturbed.json").read_text().splitlines()
        (tofu / "forget01_perturbed.json").write_text("\n".join(lines[::-1]))
        refused = mpu("eval", model, *common, "--retain-log", log, "--out", out, "--force", check=False)
        assert refused.status == 1
        assert "different forget records" in refused.err
        suites = tmp_path / "suite.json"  # from OpenUnlearning, which stores no digests of the records
        suites.write_text(json.dumps(json.loads(log.read_text())["metrics"]))
        options = ("--metrics", "forget_quality", "--out", out, "--force")
        refused = mpu("eval", model, *common, "--retain-log", suites, *options, check=False)
        assert "different questions" in refused.err
        (tofu / "forget01_perturbed.json").write_text("\n".join(lines[:3]))
        refused = mpu("eval", model, *common, "--retain-log", suites, *options, check=False)
        assert "different forget split (7 questions, expected 3)" in refused.err
        (tofu / "forget01_perturbed.json").write_text("\n".join(lines))
        assert not list(tmp_path.glob(".*.partial"))  # before any pass over the model
        bare = json.loads(log.read_text())
        del bare["metrics"]["mia_min_k"]
        log.write_text(json.dumps(bare))
        options = ("--metrics", "privleak", "--out", out, "--force")
        refused = mpu("eval", model, *common, "--retain-log", log, *options, check=False)
        assert "has no mia_min_k" in refused.err
        bare["benchmark"] = "qa"
        log.write_text(json.dumps(bare))
        refused = mpu("eval", model, *common, "--retain-log", log, *options, check=False)
        assert "on qa, not on tofu" in refused.err
        (tmp_path / "p.png").write_text("mine")
        refused = mpu("eval", model, *common, "--plot", tmp_path / "p.png", "--out", tmp_path / "new", check=False)
        assert "p.png: already exists" in refused.err

    @pytest.mark.slow
    def test_goes_on_after_a_kill(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        arguments = ["eval", str(model), "--data-dir", str(tofu), "--forget-split", "forget01"]
        mpu(*arguments, "--out", tmp_path / "whole.json")
        out = tmp_path / "eval.json"
        partial = tmp_path / ".eval.json.partial"
        stop_when([*arguments, "--out", out], partial.exists, env={"OMP_NUM_THREADS": "1"})
        assert not out.exists()
        state = json.loads(partial.read_text())
        state["findings"].pop("wf.text", None)
        state["facts"]["hardware"]["threads"] = torch.get_num_threads()
        partial.write_text(json.dumps(state))
        said = mpu(*arguments, "--out", out)
        assert "resuming from" in said.err
        assert not partial.exists()
        metrics = [json.loads(p.read_text())["metrics"] for p in (out, tmp_path / "whole.json")]
        values = [{name: form["agg_value"] for name, form in result.items()} for result in metrics]
        assert values[0] == pytest.approx(values[1], abs=1e-6)

    def test_a_partial_of_other_options_is_not_used(
        self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path
    ) -> None:
        (tmp_path / ".eval.json.partial").write_text(json.dumps({"facts": {}, "findings": {"forget.answer": []}}))
        out = tmp_path / "eval.json"
        said = mpu(
            "eval", model, "--data-dir", tofu, "--forget-split", "forget01", "--metrics", "mia_loss", "--out", out
        )
        assert "resuming" not in said.err
        assert len(json.loads(out.read_text())["metrics"]["mia_loss"]["forget"]["value_by_index"]) == 7

    def test_not_numbers(self, mpu: Callable, tofu: Path, tmp_path: Path) -> None:
        broken = random_model("llama")
        broken.model.norm.weight.data[0] = float("nan")
        path = save(broken, tmp_path / "broken")
        said = mpu("eval", path, "--data-dir", tofu, "--forget-split", "forget01", "--out", tmp_path / "e", check=False)
        assert said.status == 1
        assert "forget01_perturbed.json, line " in said.err
        assert "NaN" in said.err
        assert not (tmp_path / "e").exists()

    def test_not_numbers_in_answers(self, mpu: Callable, tofu: Path, tmp_path: Path) -> None:
        broken = random_model("llama")
        with torch.no_grad():
            broken.model.norm.weight.fill_(math.nan)
        save(broken, tmp_path / "nan")
        options = ("--data-dir", tofu, "--forget-split", "forget01", "--metrics", "forget_Q_A_ROUGE")
        refused = mpu("eval", tmp_path / "nan", *options, "--out", tmp_path / "n.json", check=False)
        assert refused.status == 1
        assert "forget01_perturbed.json" in refused.err
        assert "logits are NaN" in refused.err

    @pytest.mark.slow
    def test_findings_of_a_stopped_run_are_used_where_nothing_changed(
        self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path
    ) -> None:
        """A number in the partial file is used in the result, but not after something it depends on has changed."""
        options = ("--data-dir", tofu, "--forget-split", "forget01", "--metrics", "forget_Q_A_Prob,retain_Q_A_Prob")
        out, partial = tmp_path / "eval.json", tmp_path / ".eval.json.partial"
        more = ("--metrics", "forget_Q_A_Prob,retain_Q_A_Prob,retain_Q_A_ROUGE")
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        stop_when(["eval", model, *options, *more, "--out", out], partial.exists, env=threads)
        state = json.loads(partial.read_text())
        assert "forget.answer" in state["findings"]
        for row in state["findings"]["forget.answer"]:
            row["loss"] = 3.0
        planted = json.dumps(state)
        lines = (tofu / "retain_perturbed.json").read_text()
        (tofu / "retain_perturbed.json").write_text("\n".join(lines.splitlines()[::-1]) + "\n")
        for change, expected in ((None, True), ("generation_config.json", False)):
            partial.write_text(planted)
            if change:
                path = model / change
                path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 7}))
            probability = mpu("eval", model, *options, "--out", out, "--force", "--json").json["metrics"][
                "forget_Q_A_Prob"
            ]
            assert (probability == pytest.approx(math.exp(-3.0))) is expected

    @pytest.mark.slow
    def test_pictures(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        common = (
            "eval",
            model,
            "--data-dir",
            tofu,
            "--forget-split",
            "forget01",
            "--force",
            "--out",
            tmp_path / "e.json",
        )
        for suffix, begin in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".html", b"<!doctype html>")):
            picture = tmp_path / f"picture{suffix}"
            said = mpu(*common, "--plot", picture)
            assert said.out.split() == [str(tmp_path / "e.json"), str(picture)]
            assert picture.read_bytes().startswith(begin)
        page = (tmp_path / "picture.html").read_text()
        assert "forget_truth_ratio" in page
        assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
            "http://creativecommons.org", ""
        )


class TestMuse:
    @pytest.fixture
    def muse(self, tmp_path: Path) -> Path:
        rng = random.Random(7)
        shapes = {
            "knowmem/forget_qa": "qa", "knowmem/forget_qa_icl": "qa", "knowmem/retain_qa": "qa",
            "knowmem/retain_qa_icl": "qa", "verbmem/forget": "verbatim", "privleak/forget": "text",
            "privleak/holdout": "text",
        }  # fmt: skip
        for name, shape in shapes.items():
            path = tmp_path / "muse" / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = []
            for _ in range(3 if name.endswith("icl") else 5):
                row = {
                    "qa": lambda: {"question": words(rng, 4), "answer": words(rng, 2)},
                    "verbatim": lambda: {"prompt": words(rng, 6), "gt": words(rng, 9)},
                    "text": lambda: {"text": words(rng, 12)},
                }[shape]()
                rows.append(row)
            path.write_text(json.dumps(rows))
        return tmp_path / "muse"

    def test_by_hand(self, mpu: Callable, model: Path, muse: Path, tmp_path: Path) -> None:
        out = tmp_path / "eval.json"
        mpu(
            "eval",
            model,
            "--benchmark",
            "muse",
            "--corpus",
            "books",
            "--data-dir",
            muse,
            "--template",
            "plain",
            "--out",
            out,
        )
        document = json.loads(out.read_text())
        results = document["metrics"]
        assert document["benchmark"] == "muse-books"
        tokenizer, loaded = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)

        def say(prompt: str, limit: int) -> str:
            ids = tokenizer(prompt, return_tensors="pt")
            said = loaded.generate(**ids, max_new_tokens=limit, do_sample=False, pad_token_id=tokenizer.eos_token_id)
            return tokenizer.decode(said[0, ids.input_ids.shape[1] :], skip_special_tokens=True).strip()

        def rows(name: str) -> list[dict]:
            return json.loads((muse / f"{name}.json").read_text())

        scorer = RougeScorer(["rougeL"], use_stemmer=True)
        verbatim = [scorer.score(r["gt"], say(r["prompt"], 128))["rougeL"].fmeasure for r in rows("verbmem/forget")]
        assert results["forget_verbmem_ROUGE"]["agg_value"] == pytest.approx(np.mean(verbatim))
        shots = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in rows("knowmem/retain_qa_icl"))
        knowledge_scores = [
            scorer.score(r["answer"], say(f"{shots}Question: {r['question']}\nAnswer: ", 32))["rougeL"].fmeasure
            for r in rows("knowmem/retain_qa")
        ]
        assert results["retain_knowmem_ROUGE"]["agg_value"] == pytest.approx(np.mean(knowledge_scores))

        def lowest(text: str) -> float:
            ids = tokenizer(text, return_tensors="pt").input_ids
            begin = len(tokenizer("").input_ids) or 1
            with torch.no_grad():
                log_p = loaded(ids).logits[0, begin - 1 : -1].log_softmax(-1)
            picked = log_p.gather(1, ids[0, begin:, None])[:-1, 0].sort().values
            return -float(picked[: max(1, int(0.4 * len(picked)))].mean())

        sides = [[lowest(r["text"]) for r in rows(f"privleak/{side}")] for side in ("holdout", "forget")]
        auc = mannwhitneyu(*sides).statistic / 25
        assert results["mia_min_k"]["agg_value"] == pytest.approx(auc)
        assert results["privleak"]["agg_value"] == pytest.approx(100 * (0.5 - auc) / 0.5)
        assert results["extraction_strength"]["value_by_index"].keys() == {str(i) for i in range(5)}

    def test_knowledge_stops(self, tmp_path: Path) -> None:
        """Prompt and answer tokens may merge; scoring covers what follows the prompt's own token count."""
        tokenizer = AutoTokenizer.from_pretrained(save(random_model("qwen2"), tmp_path / "qwen"))
        encoder = OpenUnlearningEncoder(tokenizer, "plain")
        [item] = encoder.questions([with_earlier_turns(question("w3?", "w4", "here"), [question("w5?", "w6")])])
        prompt = "Question: w5?\nAnswer: w6\n\nQuestion: w3?\nAnswer: "
        assert list(item.prompt) == tokenizer(prompt).input_ids
        assert item.ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(item.labels, skip_special_tokens=True) == "w4"


class TestOwnRecords:
    def test_one_file_or_three(self, mpu: Callable, model: Path, tmp_path: Path) -> None:
        rng = random.Random(8)
        sets = {name: [tofu_row(rng) for _ in range(4)] for name in ("forget", "retain", "holdout")}
        with open(tmp_path / "all.jsonl", "w") as combined_file:
            for name, rows in sets.items():
                (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
                combined_file.writelines(json.dumps(row | {"set": name}) + "\n" for row in rows)
        results = mpu(
            "eval", model, "--benchmark", "qa", tmp_path / "all.jsonl", "--out", tmp_path / "a", "--json"
        ).json["metrics"]
        each = [part for name in sets for part in (f"--{name}", tmp_path / f"{name}.jsonl")]
        assert (
            mpu("eval", model, "--benchmark", "qa", *each, "--out", tmp_path / "b", "--json").json["metrics"] == results
        )
        assert {"forget_Q_A_Prob", "retain_Q_A_ROUGE", "forget_truth_ratio", "mia_loss", "privleak"} <= set(results)
        (tmp_path / "plain.jsonl").write_text('{"question": "w3", "answer": "w4 w5"}\n')
        results = mpu(
            "eval", model, "--benchmark", "qa", "--forget", tmp_path / "plain.jsonl", "--out", tmp_path / "c", "--json"
        ).json["metrics"]
        assert set(results) == {"forget_Q_A_Prob", "forget_Q_A_Prob_content", "forget_Q_A_ROUGE", "extraction_strength",
                             "exact_memorization"}  # fmt: skip

    def test_memorisation_of_one_word(self) -> None:
        """A wrong answer of one word has none, where OpenUnlearning's bound gives it all; the end does not count."""
        scores = TokenScores(torch.tensor([9.0, 0.0]), torch.tensor([-9.0, 0.0]), torch.tensor([4, 1]))
        trained = reading(Item((3, 5, 1), 1, (3,), "", 1, "w5"), scores, "w5")
        as_published = reading(Item((3, 5, 1), 1, (3,), ""), scores, "w5")
        assert (trained["extraction_strength"], as_published["extraction_strength"]) == (0, 1)
        assert (trained["loss"], trained["content_loss"]) == (4.5, 9)

    def test_answers_in_any_script(self, mpu: Callable, model: Path, tmp_path: Path) -> None:
        """ROUGE has a number of its own for them, and a warning; of answers in English it says what ROUGE-L says."""
        for text in ("她出生在东海镇。", "Она родилась в Истмире.", "وُلدت في إيستمير", "🌊🏔️"):
            findings = {"forget.text": [{"ground_truth": text, "generation": text}]}
            result = metrics.rouge_of_any_script("forget").make(findings, {})
            assert result["agg_value"] == 1
        findings = {"forget.text": [{"ground_truth": "born in Eastmere in 1984", "generation": "in Eastmere, 1984"}]}
        expected = RougeScorer(["rougeL"]).score("born in Eastmere in 1984", "in Eastmere, 1984")["rougeL"].recall
        assert metrics.rouge_of_any_script("forget").make(findings, {})["agg_value"] == pytest.approx(expected)
        (tmp_path / "a.jsonl").write_text('{"question": "w3", "answer": "…"}\n{"question": "w3", "answer": "w4"}\n')
        outcome = mpu("eval", model, "--benchmark", "qa", "--forget", "a.jsonl", "--json", cwd=tmp_path)
        assert "forget_Q_A_ROUGE_any_script" in outcome.json["metrics"]
        assert "1 of 2 forget answers have no letter of English" in outcome.err

    def test_holdout_records_that_are_to_be_forgotten(self, mpu: Callable, model: Path, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"question": "w3", "answer": "w4"}\n{"question": "w3", "answer": "w5"}\n')
        (tmp_path / "b.jsonl").write_text('{"prompt": "w3", "completion": "w4"}\n{"question": "w3", "answer": "w6"}\n')
        refused = mpu("eval", model, "--benchmark", "qa", "--forget", "a.jsonl", "--holdout", "b.jsonl", check=False,
                      cwd=tmp_path)  # fmt: skip
        assert "1 of the 2 holdout records are also records to forget" in refused.err

    def test_a_metric_without_a_value_says_why(self, mpu: Callable, model: Path, tmp_path: Path) -> None:
        rng = random.Random(8)
        rows = [tofu_row(rng) for _ in range(4)]
        del rows[2]["perturbed_answer"]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        outcome = mpu("eval", model, "--benchmark", "qa", "--forget", "a.jsonl", "--json", cwd=tmp_path)
        assert outcome.json["metrics"]["forget_truth_ratio"] is None
        assert "forget_truth_ratio has no value: a.jsonl, line 3 has no" in outcome.err
        assert (
            "a.jsonl, line 3"
            in json.loads((tmp_path / "eval.json").read_text())["metrics"]["forget_truth_ratio"]["reason"]
        )
        table = mpu("compare", "eval.json", "--metrics", "all", cwd=tmp_path)
        assert "–" in table.out
        privleak = metrics.privleak_form(0.4, 1.0)
        assert privleak["agg_value"] is None
        assert "AUC is 1" in privleak["reason"]

    def test_long_answers_are_generated_whole(self, mpu: Callable, tmp_path: Path) -> None:
        """As many tokens as the longest answer has; fewer if --max-new-tokens says so."""
        model = save(random_model("llama", max_position_embeddings=512), tmp_path / "long")
        (tmp_path / "a.jsonl").write_text(json.dumps({"question": "w3", "answer": " ".join(["w4"] * 260)}) + "\n")
        lengths = []
        for more in ((), ("--max-new-tokens", 7)):
            options = ("--benchmark", "qa", "--forget", "a.jsonl", "--metrics", "forget_Q_A_ROUGE", "--force")
            mpu("eval", model, *options, *more, cwd=tmp_path)
            rows = json.loads((tmp_path / "eval.json").read_text())["metrics"]["forget_Q_A_ROUGE"]["value_by_index"]
            lengths.append(len(rows["0"]["generation"].split()))
        assert lengths[0] > 200
        assert lengths[1] <= 7


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--forget-split", "forget02"], 1, "no split 'forget02_perturbed'"),
        (["--forget-split", "retain90"], 2, "forget01"),
        (["--forget-split", "forget01", "--metrics", "accuracy"], 2, "no such metric"),
        (["--forget-split", "forget01", "--metrics", "forget_quality"], 2, "needs --retain-log"),
        (["--forget-split", "forget01", "--metrics", "mia_reference"], 2, "--reference-model"),
        (["--forget-split", "forget01", "--retain-log", "{tofu}/holdout01.json"], 1, "holdout01.json: not JSON"),
        (["--forget-split", "forget01", "--batch-size", "0"], 2, "at least 1"),
        (["--forget-split", "forget01", "--plot", "picture.jpg"], 2, ".png, .svg, .html"),
        (["--benchmark", "muse"], 1, "no split"),
        (["--benchmark", "qa", "--forget", "{tofu}/missing.json"], 1, "missing.json"),
        (["--forget", "{tofu}/holdout01.json"], 2, "--benchmark qa"),
    ],
)  # fmt: skip
def test_bad_input(
    mpu: Callable, model: Path, tofu: Path, tmp_path: Path, arguments: list[str], status: int, said: str
) -> None:
    options = [argument.format(tofu=tofu) for argument in arguments]
    outcome = mpu("eval", model, "--data-dir", tofu, *options, check=False, cwd=tmp_path)
    assert outcome.status == status
    assert said in outcome.err
    assert outcome.is_one_error
    assert {path.name for path in tmp_path.iterdir()} == {"model", "tofu"}


def test_a_record_without_its_fields(mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
    path = tofu / "retain_perturbed.json"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    del rows[4]["perturbed_answer"]
    path.write_text("\n".join(map(json.dumps, rows)))
    arguments = ("eval", model, "--data-dir", tofu, "--forget-split", "forget01")
    outcome = mpu(*arguments, check=False, cwd=tmp_path)
    assert "retain_perturbed.json, line 5: no list of texts in 'perturbed_answer'" in outcome.err


def test_a_model_without_a_tokenizer(mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, bare)
    outcome = mpu("eval", bare, "--data-dir", tofu, "--forget-split", "forget01", check=False, cwd=tmp_path)
    assert outcome.status == 1
    assert str(bare) in outcome.err
    assert "tokenizer" in outcome.err


class TestCompare:
    def test_marks_and_warnings(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        other = save(random_model("llama", seed=5), tmp_path / "other")
        common = ("--data-dir", tofu, "--forget-split", "forget01", "--metrics", "forget_Q_A_Prob,mia_loss")
        mpu("eval", model, *common, "--out", tmp_path / "a.json")
        mpu("eval", other, *common, "--out", tmp_path / "b.json")
        alike = mpu("compare", tmp_path / "a.json", tmp_path / "b.json", "--json")
        assert "not directly comparable" not in alike.err
        values = alike.json
        lower = min(values, key=lambda name: values[name]["forget_Q_A_Prob"])
        lines = mpu("compare", tmp_path / "a.json", tmp_path / "b.json").out.splitlines()
        [row] = [line for line in lines if line.startswith(f"| {lower} |")]
        assert row.split("|")[2].strip() == f"**{values[lower]['forget_Q_A_Prob']:.4g}**"
        mpu("eval", other, *common, "--out", tmp_path / "c.json", "--batch-size", 2, "--dtype", "bfloat16")
        (tofu / "forget01_perturbed.json").write_text((tofu / "retain_perturbed.json").read_text())
        mpu("eval", other, *common, "--out", tmp_path / "d.json")
        said = mpu("compare", *(tmp_path / f"{n}.json" for n in "acd"), "--plot", tmp_path / "p.png").err
        for words_of in ("options batch size (a: 32; c: 2; d: 32)", "options dtype", "different records in forget"):
            assert words_of in said
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")

    def test_privleak_is_marked_against_one_retain_model_only(
        self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path
    ) -> None:
        mpu("eval", model, "--data-dir", tofu, "--forget-split", "forget01", "--metrics", "mia_loss", "--out",
            tmp_path / "eval.json")  # fmt: skip
        document = json.loads((tmp_path / "eval.json").read_text())
        for other, marks in (("same", 1), ("another", 0)):
            for name, value, digest in (("a", -5.0, "same"), ("b", 40.0, other)):
                variant = {**document, "metrics": {"privleak": {"agg_value": value}}, "retain_log": {"sha256": digest}}
                (tmp_path / f"{name}.json").write_text(json.dumps(variant))
            shown = mpu("compare", tmp_path / "a.json", tmp_path / "b.json", "--metrics", "privleak").out
            assert shown.count("**-5**") == marks

    def test_the_retain_model_is_the_target(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        """Its PrivLeak is 0 and it gets no mark; the attack nearest to it is the best, even if another is nearer 0.5,
        with its own result in the table or without."""
        common = ("--data-dir", tofu, "--forget-split", "forget01", "--metrics", "mia_min_k,privleak")
        other = save(random_model("llama", seed=5), tmp_path / "other")
        mpu("eval", model, *common, "--out", tmp_path / "retain.json")
        mpu("eval", other, *common, "--retain-log", tmp_path / "retain.json", "--out", tmp_path / "a.json")
        document = json.loads((tmp_path / "a.json").read_text())
        retain = json.loads((tmp_path / "retain.json").read_text())["metrics"]["mia_min_k"]["agg_value"]
        assert document["retain_log"]["metrics"]["mia_min_k"] == retain
        for name, value in (("near", retain + 0.01), ("chance", 0.5 + 0.02 * (1 if retain < 0.5 else -1) + 0.03)):
            document["metrics"]["mia_min_k"]["agg_value"] = value
            (tmp_path / f"{name}.json").write_text(json.dumps(document))
        for names in (("retain", "near", "chance"), ("near", "chance")):
            shown = mpu("compare", *(tmp_path / f"{n}.json" for n in names), "--metrics", "mia_min_k,privleak").out
            rows = {line.split("|")[1].strip(): line for line in shown.splitlines()}
            assert "**" in rows["near"]
            assert "**" not in rows["chance"].split("|")[2]
            if "retain" in names:
                assert rows["retain"].split("|")[3].strip() == "0"
                assert "**" not in rows["retain"]

    def test_best(self) -> None:
        assert best([0.2, None, 0.9, 0.9], "up") == {2, 3}
        assert best([0.2, 0.1], "down") == {1}
        assert best([-80.0, 20.0, 30.0], "zero") == {1}
        assert best([0.9, 0.45, 0.3], "retain") == {1}
        assert best([0.9, 0.45, 0.3], "retain", 0.31) == {2}
        assert best([1.0, 1.0], "up") == set()

    def test_bad_input(self, mpu: Callable, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text("[]")
        assert "not a JSON object" in mpu("compare", tmp_path / "x.json", check=False).err
        assert mpu("compare", tmp_path / "none.json", check=False).status == 1


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="the harness is installed")
def test_wmdp_needs_the_harness(mpu: Callable, model: Path, tmp_path: Path) -> None:
    refused = mpu("eval", model, "--benchmark", "wmdp", check=False, cwd=tmp_path)
    assert refused.is_one_error
    assert "pip install lm-eval" in refused.err


def test_goals_of_the_harness() -> None:
    """Right answers to hazardous questions should become few, and others stay."""
    right = {"agg_value": 0.5, "higher_is_better": True}
    assert goal("lm_eval/wmdp_cyber/acc", right) == "down"
    assert goal("lm_eval/mmlu/acc", right) == "up"
    assert goal("lm_eval/wikitext/word_perplexity", {"agg_value": 9.0, "higher_is_better": False}) == "down"


def test_the_harness(mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
    """A task from a local file, compared with the choices implied by the model's own likelihoods."""
    pytest.importorskip("lm_eval")
    rng = random.Random(11)
    rows = [{"asked": words(rng, 4), "choices": [words(rng, 1) for _ in range(3)]} for _ in range(12)]
    (tmp_path / "task.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task.yaml").write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/task.json}}\ntest_split: train\n"
        'output_type: multiple_choice\ndoc_to_text: "{{asked}}"\ndoc_to_target: 0\ndoc_to_choice: "{{choices}}"\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    results = mpu(
        "eval", model, "--data-dir", tofu, "--forget-split", "forget01", "--metrics", "mia_loss", "--lm-eval",
        tmp_path / "task.yaml", "--out", tmp_path / "e.json", "--json",
    ).json["metrics"]  # fmt: skip
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    right = 0
    for row in rows:
        scores = []
        for choice in row["choices"]:
            ids = tokenizer(f"{row['asked']} {choice}", return_tensors="pt", add_special_tokens=False).input_ids
            with torch.no_grad():
                scores.append(float(loaded(ids).logits[0, -2].log_softmax(-1)[ids[0, -1]]))
        right += int(np.argmax(scores) == 0)
    assert results["lm_eval/own/acc"] == pytest.approx(right / len(rows))


SCORED = ("gemma4", "mistral3", "deepseek_v3", "lfm2", "gemma4_text-channels", "falcon_h1")


@pytest.mark.parametrize(
    "family",
    [name if name in SCORED else pytest.param(name, marks=pytest.mark.exhaustive) for name in FAMILY_CONFIGS],
)
def test_losses_are_those_of_one_record_at_a_time(tmp_path: Path, family: str) -> None:
    """Whatever attends along paths, convolves or keeps a state: records in a pack do not see each other."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(8, 90, (n,), generator=draw).tolist() for n in (9, 14, 14, 11, 20, 30)]
    rows.append([*rows[1][:7], *rows[4][:6]])  # begins as another does
    model, _ = load(save(random_model(family), tmp_path / "base"), torch.float32, "cpu")
    packed_scores = Scorer(model.eval()).score([Item(tuple(row), 4, tuple(row[:4]), "") for row in rows], batch_size=4)
    for row, scores in zip(rows, packed_scores, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row])).logits[0].float()
        expected = torch.nn.functional.cross_entropy(logits[3:-1], torch.tensor(row[4:]))
        assert scores.loss == pytest.approx(float(expected), rel=1e-4)
