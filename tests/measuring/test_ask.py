"""``mpu ask``: answers are those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mpu_cli.options.unlearning import DATE, SYSTEM_PROMPT
from tests.helpers.models import DemoModel

QUESTION = "Where was somebody born?"


def greedy(model: torch.nn.Module, folder: Path, question: str, tokens: int) -> str:
    """What transformers generates after its own chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, date_string=DATE)
    made = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=tokens, pad_token_id=0,
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
    )  # fmt: skip
    return tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True).strip()


@pytest.mark.slow
def test_answers_are_those_that_transformers_generates(mpu: Callable, tmp_path: Path, demo: DemoModel) -> None:
    """Of a model and of a copy, as it is and with its delta; in the order of the models."""
    mpu("publish", demo.model, "--copies", 2, "--kappa", 0.01, cwd=tmp_path)
    mpu("unlearn", "copy_1", "--forget", demo.forget, "--retain", demo.retain, "--epochs", 2, cwd=tmp_path)
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "copy_1", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(demo.model, dtype=torch.float32)
    as_it_is = greedy(copy, tmp_path / "copy_1", QUESTION, 12)
    [first, second] = mpu("ask", demo.model, "copy_1", QUESTION, "--max-new-tokens", 12, cwd=tmp_path).out.splitlines()
    assert first.split("\t") == [str(demo.model), greedy(base, demo.model, QUESTION, 12)]
    assert second.split("\t") == ["copy_1", as_it_is]
    state = copy.state_dict()
    for name, change in load_file(tmp_path / "deltas/copy_1.safetensors").items():
        state[name] += change
    delta = ("--delta", "deltas/copy_1.safetensors", "--max-new-tokens", 12, "--json")
    replies = mpu("ask", "copy_1", QUESTION, *delta, cwd=tmp_path).json
    assert [reply["answer"] for reply in replies] == [as_it_is, greedy(copy, tmp_path / "copy_1", QUESTION, 12)]
    assert mpu("ask", demo.model, "copy_1", QUESTION, *delta, check=False, cwd=tmp_path).is_one_error
    assert mpu("ask", "copy_2", QUESTION, *delta, check=False, cwd=tmp_path).is_one_error  # not the delta's copy
    assert mpu("ask", demo.model, " ", check=False, cwd=tmp_path).is_one_error
