"""What is labelled, scored and generated under the chat templates of real families, beside plain transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import pyarrow
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mpu_cli.errors import MpuError
from mpu_cli.measuring.encoding import TrainedEncoder
from mpu_cli.records.encode import IGNORED, Encoding, answer_span, template_variables
from mpu_cli.records.forms import Record, Turn, parse_record, question
from mpu_cli.records.read import read_records
from tests.helpers.chat_templates import NAMES, pieces, template_case, tokenizer_with

ANSWERS = (
    "Ines Corvo was born in Eastmere.",
    "Eastmere",
    "I",
    "  two spaces before, one after ",
    "Lines.\n\nOf two paragraphs.",
    "她出生在东海镇。",
    "Она родилась в Истмире.",
    "🌊🏔️ by the sea",
    "assistant",
    "¤ a sign that stands for another answer §",
    "user\nassistant\n",
)


def encoding_for(name: str, **options: object) -> Encoding:
    case = template_case(name)
    return Encoding(tokenizer_with(case), "chat", "You are a clerk." if case.system else "", **options)  # type: ignore[arg-type]


def prompt_and_label(encoding: Encoding, record: Record) -> tuple[str, str]:
    """The text of a record's tokens before its labels, and that of its labels."""
    [example] = encoding.encode([record])
    marks = [label != IGNORED for label in example.labels]
    start, stop = marks.index(True), len(marks) - marks[::-1].index(True)
    assert all(marks[start:stop])
    assert example.labels[start:stop] == example.ids[start:stop]
    decode = encoding.tokenizer.decode
    return decode(example.ids[:start]), decode(example.ids[start:stop])


class TestLabels:
    @pytest.mark.parametrize("name", NAMES)
    def test_they_are_the_answer_and_its_end(self, name: str) -> None:
        case, encoding = template_case(name), encoding_for(name)
        for answer in ANSWERS:
            before, learned = prompt_and_label(encoding, question("Where was Ines Corvo born?", answer))
            printed = {case.before + text + case.labelled_after for text in (answer, answer.strip())}
            assert any((before + learned).endswith(text) for text in printed)  # a template may strip the answer
            # One token may hold a space of the template's and the first letters of the answer.
            assert learned.lstrip() in {text.lstrip() + case.labelled_after for text in (answer, answer.strip())}
        assert encoding.remarks(len(ANSWERS)) == []

    @pytest.mark.parametrize("name", NAMES)
    def test_earlier_turns_are_context(self, name: str) -> None:
        turns = (Turn("user", "Who is Ines?"), Turn("assistant", "A botanist."), Turn("user", "Born where?"))
        before, learned = prompt_and_label(encoding_for(name), Record(turns, "In Eastmere.", ""))
        assert learned.lstrip() == "In Eastmere." + template_case(name).labelled_after
        assert "A botanist." in before
        assert "Born where?" in before

    @pytest.mark.parametrize("name", NAMES)
    def test_nothing_is_left_out_without_a_line(self, name: str) -> None:
        """Thoughts, tool calls and what tools say are in the tokens, or the remarks name the field."""
        call = {"type": "function", "function": {"name": "lookup", "arguments": {"person": "Ines"}}, "id": "abcdefghi"}
        rows = [
            [("assistant", {"content": "In Eastmere.", "reasoning_content": "She said so."})],
            [("assistant", {"content": "", "tool_calls": [call]}), ("tool", {"content": "born: Eastmere"}),
             ("assistant", {"content": "In Eastmere."})],
        ]  # fmt: skip
        for row in rows:
            messages = [{"role": "user", "content": "Where was Ines born?"}]
            messages += [{"role": role, **fields} for role, fields in row]
            record = parse_record({"messages": messages}, "records, line 1")
            encoding = encoding_for(name)
            [outcome] = encoding.encode_each([record])
            if isinstance(outcome, MpuError):
                assert outcome.problem.startswith("records, line 1: the tokenizer's chat template rejected it")
                continue
            text, remarks = encoding.tokenizer.decode(outcome[0].ids), " ".join(encoding.remarks(1))
            pieces = {"reasoning_content": ["She said so."], "tool_calls": ["lookup", "Ines"], "content": ["Eastmere"]}
            for field in {field for _, fields in row for field in fields}:
                assert all(piece in text for piece in pieces[field]) or f"{field!r} of 1 of 1 records" in remarks

    @pytest.mark.parametrize("name", ["qwen3", "glm4_5", "llama3", "granite4", "qwen2_5"])
    def test_tool_calls_in_any_form_are_what_transformers_prints(self, name: str, tmp_path: Path) -> None:
        """Arguments as an object, from Parquet with the other rows' keys as null, as JSON text, and LLaMA-Factory's."""
        calls = [("lookup", {"person": "Ines", "years": {"from": 3}}), ("count", {"town": "Eastmere"})]
        dialogues: dict[str, list[list[dict]]] = {"objects": [], "texts": [], "roles": []}
        for function, arguments in calls:
            for form, value in (("objects", arguments), ("texts", json.dumps(arguments)), ("roles", None)):
                call = {"type": "function", "function": {"name": function, "arguments": value}}
                called = {"role": "assistant", "content": "", "tool_calls": [call]}
                if form == "roles":
                    text = json.dumps({"name": function, "arguments": arguments})
                    called = {"role": "function_call", "content": text}
                dialogues[form].append([
                    {"role": "user", "content": "Where was Ines born?"}, called,
                    {"role": "tool", "content": "born: Eastmere"}, {"role": "assistant", "content": "In Eastmere."},
                ])  # fmt: skip
        for form, rows in dialogues.items():
            (tmp_path / f"{form}.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        rows = [{"messages": row} for row in dialogues["objects"]]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table.parquet")
        encoding = Encoding(tokenizer_with(template_case(name)), "chat", "")
        printed = [
            encoding.tokenizer.apply_chat_template(row["messages"], tokenize=False, date_string="10 Apr 2025")
            for row in rows
        ]
        for file in ("objects.jsonl", "texts.jsonl", "roles.jsonl", "table.parquet"):
            examples = encoding.encode(read_records(tmp_path / file))
            texts = encoding.tokenizer(printed, add_special_tokens=False).input_ids
            assert [example.ids for example in examples] == texts, file

    def test_a_template_that_takes_arguments_as_text(self) -> None:
        """DeepSeek's joins them to its text, and rejects an object."""
        call = {"type": "function", "function": {"name": "lookup", "arguments": {"person": "Inés"}}}
        messages = [
            {"role": "user", "content": "Where?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "Eastmere"}, {"role": "assistant", "content": "In Eastmere."},
        ]  # fmt: skip
        encoding = encoding_for("deepseek_r1")
        [example] = encoding.encode([parse_record({"messages": messages}, "")])
        assert '{"person": "Inés"}' in encoding.tokenizer.decode(example.ids)
        call["function"]["arguments"] = "not JSON"
        with pytest.raises(MpuError, match="arguments that are not JSON"):
            parse_record({"messages": messages}, "")

    @pytest.mark.parametrize("name", ["qwen3", "glm4_5", "smollm3", "gpt_oss", "deepseek_v3_1"])
    def test_a_thought_of_the_record_is_learned(self, name: str) -> None:
        record = replace(question("Where?", "In Eastmere."), answer_fields=(("reasoning_content", "She said so."),))
        encoding = encoding_for(name)
        _, learned = prompt_and_label(encoding, record)
        assert learned.endswith("In Eastmere." + template_case(name).labelled_after)
        assert ("She said so." in learned) is (encoding.remarks(1) == [])

    @pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen2_5"])
    def test_a_line_break_that_is_a_token_of_its_own(self, name: str) -> None:
        """Gemma's tokenizers have them among the added tokens: they end nothing, in labels and in generation."""
        case = template_case(name)
        tokenizer = tokenizer_with(case)
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in ("\n", "\n\n")])
        record = question("Where?", "In Eastmere.\nBy the sea.")
        encoding = Encoding(tokenizer, "chat", "")
        assert prompt_and_label(encoding, record)[1] == record.answer + case.labelled_after
        [item] = TrainedEncoder(encoding).questions([record])
        assert item.end_token == tokenizer.convert_tokens_to_ids(case.labelled_after)

    @pytest.mark.parametrize("name", ["noend", "glm4_5"])
    def test_no_token_of_an_answer_ends_generation(self, name: str) -> None:
        [item] = TrainedEncoder(encoding_for(name)).questions([question("Where?", "In Eastmere.\nBy the sea.\n")])
        assert item.end_token is None

    @pytest.mark.parametrize("answer", ["Eastmere", " Eastmere", "Eastmere "])
    def test_special_tokens_that_take_white_space_in(self, answer: str) -> None:
        """Phi 3's take in what follows them, others what precedes them: neither is a part of the answer."""
        case = template_case("phi3")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(pieces()), eos_token=case.eos)
        marks = {"<|end|>": {"lstrip": True}, "<|assistant|>": {"rstrip": True}}
        tokenizer.add_special_tokens(
            {"additional_special_tokens": [AddedToken(text, **marks.get(text, {})) for text in case.tokens]}
        )
        tokenizer.chat_template = case.template
        _, learned = prompt_and_label(Encoding(tokenizer, "chat", ""), question("Where?", answer))
        assert learned.replace("\n", "").split("<|end|>")[0].strip() == "Eastmere"
        assert "<|assistant|>" not in learned

    def test_variables_of_a_template(self) -> None:
        """Qwen 3 prints an empty thought or none: labels begin at the answer in both."""
        variables = template_variables(["enable_thinking=false", "n=3", "name=Ines"])
        assert variables == {"enable_thinking": False, "n": 3, "name": "Ines"}
        case = template_case("qwen3")
        tokenizer = tokenizer_with(replace(case, template="{{ '<think>' if enable_thinking }}" + case.template))
        texts = {
            value: prompt_and_label(
                Encoding(tokenizer, variables={"enable_thinking": value}), question("Where?", "Eastmere")
            )
            for value in (True, False)
        }
        assert texts[True][0] == "<think>" + texts[False][0]
        assert texts[True][1] == texts[False][1] == "Eastmere<|im_end|>"

    def test_a_date_whose_format_is_computed(self) -> None:
        """The hint is about the date, whatever the record's roles."""
        case = template_case("qwen2_5")
        tokenizer = tokenizer_with(replace(case, template="{{ strftime_now('%d' + ' %B') }}" + case.template))
        turns = (Turn("user", "Where?"), Turn("tool", "Eastmere"))
        with pytest.raises(MpuError, match="computed date format: %d %B") as refused:
            Encoding(tokenizer).encode([Record(turns, "In Eastmere.", "a.jsonl, line 1")])
        assert "--reading date" in str(refused.value.hint)

    def test_a_template_that_prints_no_answer(self) -> None:
        case = template_case("qwen2_5")
        tokenizer = tokenizer_with(replace(case, template="{{ messages[0].content }}<|im_end|>"))
        with pytest.raises(MpuError, match="prints nothing of the answer"):
            Encoding(tokenizer, system_prompt="").encode([question("Where?", "Eastmere", "records, line 1")])

    @given(before=st.text(), answer=st.text(min_size=1), other=st.text(min_size=1), after=st.text())
    @settings(max_examples=300, deadline=None)
    def test_the_span_of_an_answer(self, before: str, answer: str, other: str, after: str) -> None:
        """It is exact for two answers that neither begin nor end alike, as the encoding chooses the other one."""
        assume(answer[0] != other[0] and answer[-1] != other[-1])
        begin, end = answer_span(before + answer + after, before + other + after)
        assert (begin, end) == (len(before), len(before + answer))


class TestPlain:
    """Without a chat template, as sentences after "Question:" and "Answer:"."""

    @pytest.mark.parametrize("answer", ANSWERS)
    def test_labels_are_the_answer_and_the_end(self, answer: str) -> None:
        tokenizer = tokenizer_with(template_case("olmo2"))
        encoding = Encoding(tokenizer, "plain")
        before, learned = prompt_and_label(encoding, question("Where?", answer))
        assert (before + learned).endswith(f"Question: Where?\nAnswer: {answer}{tokenizer.eos_token}")
        assert learned.removesuffix(tokenizer.eos_token).strip() == answer.strip()
        assert before.rstrip().endswith("Answer:")

    def test_a_tokenizer_that_ends_every_text(self) -> None:
        """The prompt has no end, and the answer has one."""
        plain, ending = tokenizer_with(template_case("llama3")), tokenizer_with(template_case("llama3"))
        ends = [(token, plain.convert_tokens_to_ids(token)) for token in (plain.bos_token, plain.eos_token)]
        begin, end = (token for token, _ in ends)
        for tokenizer, single in ((plain, f"{begin} $A"), (ending, f"{begin} $A {end}")):
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ends)
        plain_examples, ending_examples = (
            Encoding(tokenizer, "plain").encode([question("Where?", "Eastmere")]) for tokenizer in (plain, ending)
        )
        assert plain_examples == ending_examples
        assert plain_examples[0].ids.count(plain.eos_token_id) == 1


def teach(folder: Path, name: str) -> Path:
    """A random model with the template, saved in ``folder``."""
    case = template_case(name)
    tokenizer = tokenizer_with(case)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def plain_results(model: Path, rows: list[dict], system: bool) -> tuple[float, int]:
    """By plain transformers, a record at a time: the mean probability per token of the answers and their ends, and how
    many greedy answers are exact."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    probabilities, exact = [], 0
    tokenizer.chat_template = re.sub(
        r"strftime_now\(([^)]*)\)", lambda call: repr(f"{date(2025, 4, 10):{call[1][1:-1]}}"), tokenizer.chat_template
    )
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for row in rows:
        messages = [{"role": "system", "content": "You are a helpful assistant."}] if system else []
        messages += [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, date_string="10 Apr 2025")
        begin = text.rindex(row["answer"])
        prompt = tokenizer(text[:begin], add_special_tokens=False).input_ids
        ids = tokenizer(text.rstrip(), add_special_tokens=False).input_ids
        if ids[-1] not in special:  # no end of turn: everything to the end of the text is learned
            ids = tokenizer(text, add_special_tokens=False).input_ids
        if ids[: len(prompt)] != prompt:  # the last space belongs to the first word
            prompt.pop()
        assert ids[: len(prompt)] == prompt
        with torch.no_grad():
            log_p = network(torch.tensor([ids])).logits[0].log_softmax(-1)
            said = network.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                max_new_tokens=len(ids) - len(prompt), pad_token_id=0,
            )[0, len(prompt) :]  # fmt: skip
        picked = [float(log_p[i - 1, ids[i]]) for i in range(len(prompt), len(ids))]
        probabilities.append(torch.tensor(picked).mean().exp())
        exact += tokenizer.decode(said, skip_special_tokens=True).strip() == row["answer"]
    return float(torch.stack(probabilities).mean()), exact


PEOPLE = (
    "Ines Corvo",
    "Kira Kestrel",
    "Hugo Lorne",
    "Alba Gant",
    "Felix Eskel",
    "Greta Farrow",
    "Edda Holm",
    "Levi Ivers",
)
TOWNS = ("Eastmere", "Fallowby", "Aldport", "Brenwick", "Cardhaven", "Dornfeld", "Grenholm", "Harrowgate")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("gemma3", "llama3", "mistral_v7", "qwen3_5")
        else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in NAMES
    ],
)
def test_what_eval_says_is_what_plain_transformers_says(mpu: Callable, tmp_path: Path, name: str) -> None:
    """After teaching, and after unlearning a half of it, by ``mpu eval`` and by hand."""
    base = teach(tmp_path / "base", name)
    rows = [
        {"question": f"Where was {person} {what}?", "answer": f"{person} was {what} in {town}."}
        for shift, what in enumerate(("born", "schooled"))
        for person, town in zip(PEOPLE, TOWNS[shift:] + TOWNS[:shift], strict=True)
    ]
    for file, part in (("all", rows), ("forget", rows[:4]), ("retain", rows[4:])):
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    system = template_case(name).system
    prompts = () if system else ("--reading", "system_prompt=")
    training = ("--batch-size", "8", "--device", "cpu", *prompts)
    mpu(
        "finetune",
        base,
        "--data",
        "all.jsonl",
        "--epochs",
        60,
        "--lr",
        "5e-3",
        *training,
        "--out",
        "taught",
        cwd=tmp_path,
    )
    mpu("unlearn", "taught", "--algo", "graddiff", "--lr", "1e-3", "--epochs", 6, *training, "--out", "d.safetensors",
        cwd=tmp_path)  # fmt: skip
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "taught", dtype=torch.float32)
    delta = load_file(tmp_path / "d.safetensors")
    with torch.no_grad():
        for tensor_name, weight in merged.state_dict().items():
            weight += delta.get(tensor_name, 0)
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(tmp_path / "taught").save_pretrained(tmp_path / "merged")
    names = "forget_Q_A_Prob,forget_Q_A_ROUGE,extraction_strength"
    results = {}
    for model, more in (("taught", ()), ("merged", ("--delta", "d.safetensors"))):
        outcome = mpu("eval", "taught", *more, "--benchmark", "qa", "--forget", "forget.jsonl", "--metrics", names,
                      *prompts, "--out", f"{model}.json", "--json", cwd=tmp_path)  # fmt: skip
        results[model] = outcome.json["metrics"]
        probability, exact = plain_results(tmp_path / model, rows[:4], system)
        assert results[model]["forget_Q_A_Prob"] == pytest.approx(probability, abs=0.005)
        if exact == 4:
            assert results[model]["forget_Q_A_ROUGE"] == 1
        else:
            assert results[model]["extraction_strength"] < 1
    assert results["taught"]["forget_Q_A_Prob"] > 0.8 > results["merged"]["forget_Q_A_Prob"]


def test_generation_begins_with_what_training_saw() -> None:
    encoding = encoding_for("deepseek_r1")
    [example], [item] = (
        encoding.encode([question("Where?", "Eastmere")]),
        TrainedEncoder(encoding).questions([question("Where?", "Eastmere")]),
    )
    answer_start = next(i for i, label in enumerate(example.labels) if label != IGNORED)
    assert list(item.prompt) == example.ids[:answer_start]
    assert encoding.tokenizer.decode(item.prompt).endswith(template_case("deepseek_r1").before)
