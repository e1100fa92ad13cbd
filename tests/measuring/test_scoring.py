"""Scores, encodings and generations, compared with transformers, one record at a time."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mpu_cli.errors import MpuError
from mpu_cli.lab.relearning import with_earlier_turns
from mpu_cli.measuring import generation
from mpu_cli.measuring import metrics as membership
from mpu_cli.measuring.encoding import Item, OpenUnlearningEncoder, TrainedEncoder
from mpu_cli.measuring.generation import answer, reading
from mpu_cli.measuring.scoring import Scorer, passes_at_once
from mpu_cli.options.unlearning import SYSTEM_PROMPT
from mpu_cli.records.encode import Encoding
from mpu_cli.records.forms import question
from tests.helpers.evaluation import items_of
from tests.helpers.models import VOCABULARY, random_model, save


class TestScoring:
    @pytest.mark.slow
    def test_losses_have_the_suites_bias_only_where_it_is_followed(self) -> None:
        """Over a large vocabulary torch's kernel for a strided axis is off by more than rounding explains."""
        config = LlamaConfig(
            vocab_size=60_000, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        rng = random.Random(0)
        items = [Item(tuple(rng.choices(range(60_000), k=40)), 1, (), "") for _ in range(4)]
        errors = {}
        for follows_suite in (False, True):
            scored = Scorer(model, follows_suite=follows_suite).score(items, batch_size=4)
            off = []
            for item, scores in zip(items, scored, strict=True):
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([item.ids])).logits[0, :-1]
                targets = torch.tensor(item.ids[1:])
                off.append(scores.losses.double() - cross_entropy(logits.double(), targets, reduction="none"))
            errors[follows_suite] = abs(float(torch.cat(off).mean()))
        strided = cross_entropy(logits.T[None].contiguous(), targets[None], reduction="none")[0]
        torch.testing.assert_close(scores.losses, strided, rtol=0, atol=1e-6)
        assert errors[False] < 1e-7

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
        monkeypatch.setattr("mpu_cli.measuring.scoring.MASK", 2000)
        scorer = Scorer(model)
        for expected, actual in zip(expected_scores, scorer.score(items, batch_size=50), strict=True):
            torch.testing.assert_close(expected.log_probs, actual.log_probs, rtol=0, atol=1e-5)
        assert scorer._packs  # or each item would be read by itself

    @pytest.mark.slow
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
            monkeypatch.setattr("mpu_cli.measuring.scoring.is_large", lambda _: True)
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


class TestEncoding:
    @pytest.mark.slow
    @pytest.mark.parametrize("template", ["chat", "plain"])
    def test_questions_are_tokenized_together_as_one_by_one(self, tmp_path: Path, template: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(save(random_model("llama"), tmp_path / "model"))
        rng = random.Random(4)
        words = [" ".join(f"w{rng.randrange(80)}" for _ in range(rng.randrange(1, 9))) for _ in range(60)]
        shots = [question("w1 w2", "w3"), question("w4", "w5")]
        records = [with_earlier_turns(question(words[i % 7], words[i], str(i)), shots[: i % 3]) for i in range(60)]
        encoders = [each(Encoding(tokenizer, template)) for each in (OpenUnlearningEncoder, TrainedEncoder)]
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
            OpenUnlearningEncoder(Encoding(tokenizer, "chat")).questions(records)


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

    @pytest.mark.parametrize(
        ("entries", "reported"),
        [({"num_beams": 4, "stop_strings": ["w5"]}, "num_beams and stop_strings"), ({"temperature": 0.5}, None)],
    )
    def test_unused_entries_of_the_generation_config_are_reported(
        self, mpu: Callable, tmp_path: Path, entries: dict, reported: str | None
    ) -> None:
        model = save(random_model("llama"), tmp_path / "model")
        config = json.loads((model / "generation_config.json").read_text())
        (model / "generation_config.json").write_text(json.dumps(config | entries))
        (tmp_path / "a.jsonl").write_text(json.dumps({"question": "w3", "answer": "w4"}))
        common = ("eval", model, "--benchmark", "qa", "--forget", "a.jsonl", "--force", "--metrics")
        outcome = mpu(*common, "forget_Q_A_ROUGE", cwd=tmp_path)
        assert ("generation_config.json: answers are greedy" in outcome.err) is (reported is not None)
        assert f"without its {reported}" in outcome.err or reported is None
        assert "generation_config.json" not in mpu(*common, "forget_Q_A_Prob", cwd=tmp_path).err

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
