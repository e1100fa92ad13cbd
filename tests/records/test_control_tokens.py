"""Names of control tokens in the text of records: text like any other, unless the option says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mpu_cli.errors import MpuError
from mpu_cli.records.encode import IGNORED, Encoding, Example
from mpu_cli.records.forms import Record, Turn, question, template_date
from mpu_cli.records.tokens import control_tokens
from tests.helpers.chat_templates import NAMES, template_case, tokenizer_with

REMOVED_BY_TEMPLATES = ("</think>", "<|channel>", "<channel|>")


def encoding_for(name: str, **options: object) -> Encoding:
    case = template_case(name)
    return Encoding(tokenizer_with(case), None, "You are a clerk." if case.system else "", **options)  # type: ignore[arg-type]


def controls_in(encoding: Encoding, ids: list[int]) -> list[int]:
    return [token for token in ids if token in control_tokens(encoding.tokenizer)]


def answer_of(encoding: Encoding, example: Example) -> str:
    start = next(i for i, label in enumerate(example.labels) if label != IGNORED)
    return encoding.tokenizer.decode(example.ids[start : example.content_end])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("template", ["chat", "plain"])
def test_a_dialogue_has_the_control_tokens_of_its_template_only(name: str, template: str) -> None:
    """The same ones as a dialogue of other words, while its text is the same, names included."""
    encoding = Encoding(tokenizer_with(template_case(name)), template, "")
    for mark in control_tokens(encoding.tokenizer).values():
        marked = question(f"What is {mark} for?", f"Here {mark} ends it.", "a.jsonl, line 1")
        other = question("What is it for?", "Here it ends.")
        [outcome], [usual] = encoding.encode_each([marked]), encoding.encode([other])
        if isinstance(outcome, MpuError):  # it takes thoughts out of answers by these names
            assert "the template prints its text differently" in outcome.problem
            assert template == "chat"
            assert mark in REMOVED_BY_TEMPLATES
            continue
        [example] = outcome
        assert controls_in(encoding, example.ids) == controls_in(encoding, usual.ids)
        assert answer_of(encoding, example).strip() == f"Here {mark} ends it."
        assert encoding.marked[mark] == ["a.jsonl, line 1"] * 2
    assert "control tokens of the model" in encoding.remarks(1)[0]


@pytest.mark.parametrize("name", NAMES)
def test_as_control_tokens_they_are_what_transformers_makes_of_them(name: str) -> None:
    encoding = encoding_for(name, controls=True)
    mark = next(iter(control_tokens(encoding.tokenizer).values()))
    record = question(f"What is {mark} for?", "It ends a turn.")
    messages = [{"role": "system", "content": encoding.system_prompt}] if encoding.system_prompt else []
    messages += [turn.message for turn in (*record.turns, record.answer_turn)]
    printed = template_date(encoding.tokenizer, encoding.date)
    expected = encoding.tokenizer.apply_chat_template(messages, return_dict=False, **printed)
    assert encoding.encode([record])[0].ids == expected


def test_records_without_names_are_read_as_before() -> None:
    for name in NAMES:
        encoding, as_such = encoding_for(name), encoding_for(name, controls=True)
        records = [question("Who was it?", "Ada, of course."), question("Where?", "In < Eastmere >, at |the| sea.")]
        assert encoding.encode(records) == as_such.encode(records)
        assert encoding.remarks(2) == []


def test_in_tool_calls_and_texts_too() -> None:
    encoding = encoding_for(NAMES[0])
    mark = next(iter(control_tokens(encoding.tokenizer).values()))
    text = Record((), f"The log says {mark} at its end.", "log.txt")
    [example] = encoding.encode([text])
    assert not controls_in(encoding, example.ids[1:])
    assert mark in encoding.tokenizer.decode(example.ids)
    turns = [(Turn("user", f"Say {each}"), Turn("assistant", "No."), Turn("user", "Where?")) for each in (mark, "it")]
    first, second = encoding.encode([Record(conversation, "Here.", "") for conversation in turns])
    assert controls_in(encoding, first.ids) == controls_in(encoding, second.ids)


def test_unlearn_eval_and_check_say_so(mpu: Callable, root: Path) -> None:
    lines = ['{"question": "w5 w6", "answer": "w7 </s> w8"}', *(root / "forget.jsonl").read_text().splitlines()[:4]]
    (root / "marked.jsonl").write_text("\n".join(lines) + "\n")
    said = "1 of 5 records hold control tokens of the model, such as '</s>' in marked.jsonl, line 1"
    training = ("--algo", "gradascent", "--epochs", 1)
    assert said in mpu("unlearn", "base", *training, "--forget", "marked.jsonl", cwd=root).err
    assert said in mpu("check", "base", "--forget", "marked.jsonl", check=False, cwd=root).err
    qa = ("--benchmark", "qa", "--forget", "marked.jsonl", "--metrics", "forget_Q_A_Prob")
    assert said in mpu("eval", "base", *qa, cwd=root).err
    read = mpu("eval", "base", *qa, "--reading", "control_tokens", "--out", "read.json", cwd=root)
    assert "are read as such" in read.err
