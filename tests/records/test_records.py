"""Records in all formats, from files, benchmark folders and Hugging Face datasets."""

from __future__ import annotations

import csv
import gzip
import json
import re
import socket
import zipfile
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import datasets
import openpyxl
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.observer import Observer
from mpu_cli.options.unlearning import RecordFormat
from mpu_cli.records.encode import IGNORED, Encoding, Limits, pad
from mpu_cli.records.forms import Record, Turn, dialogues_of, parse_record, question
from mpu_cli.records.read import read_records
from mpu_cli.training.data import REFUSALS, alternates
from mpu_cli.training.reference import forward
from tests.helpers.chat_templates import template_case, tokenizer_with
from tests.helpers.models import load, needs_shared, random_model, save, write_records
from tests.helpers.paths import SHARED
from tests.helpers.trainings import BRIEF

ROWS = [{"question": f"w{i} w4", "answer": f"w5 w{i}"} for i in range(3, 8)]


@pytest.fixture
def tokenizer(tmp_path):
    return load(save(random_model("llama"), tmp_path / "base"), torch.float32, "cpu")[1]


def test_formats_of_files_hold_the_same(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(ROWS)
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    read = [
        [(r.question, r.answer) for r in read_records(tmp_path / f"a.{end}")]
        for end in ("json", "jsonl", "csv", "parquet")
    ]
    assert read[0] == [(row["question"], row["answer"]) for row in ROWS]
    assert all(other == read[0] for other in read)


def test_forms_of_records_give_the_same_tokens(tmp_path, tokenizer):
    forms = [
        {"question": "w4 w5", "answer": "w6"},
        {"prompt": "w4 w5", "completion": "w6"},
        {"instruction": "w4 w5", "input": "", "output": "w6"},
        {"instruction": "", "input": "w4 w5", "output": "w6"},
        {"messages": [{"role": "user", "content": "w4 w5"}, {"role": "assistant", "content": "w6"}]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, forms)))
    qa_example, *other_examples = Encoding(tokenizer, system_prompt="").encode(read_records(tmp_path / "a.jsonl"))
    assert all(other == qa_example for other in other_examples)


def test_earlier_turns_are_read_and_not_learned(tmp_path, tokenizer):
    row = {
        "messages": [
            {"role": r, "content": c}
            for r, c in (("user", "w4"), ("assistant", "w5"), ("user", "w6"), ("assistant", "w7"))
        ]
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    chat, plain = (
        Encoding(tokenizer, template, "").encode(read_records(tmp_path / "a.jsonl"))[0]
        for template in ("chat", "plain")
    )
    for example in (chat, plain):
        assert tokenizer.decode([i for i in example.labels if i != IGNORED]).split() == ["w7", "</s>"]
        assert 5 in example.ids


def test_texts_are_learned_whole_and_in_pieces(tokenizer):
    ids = tokenizer("w4 w5 w6 " * 100).input_ids
    examples = Encoding(tokenizer, limits=Limits(64)).encode([Record((), "w4 w5 w6 " * 100, "")])
    assert [i for example in examples for i in example.ids] == ids
    assert all(example.labels == example.ids for example in examples)
    assert [len(example.ids) for example in examples] == [64] * 4 + [44]


def test_a_text_counts_every_token_but_its_first(tmp_path):
    model, tokenizer = load(save(random_model("llama"), tmp_path / "base"), torch.float32, "cpu")
    [example] = Encoding(tokenizer).encode([Record((), "w4 w5 w6 w7", "")])
    assert len(forward(model, pad([example])).log_probs) == len(example.ids) - 1


def test_numbers_and_parts_are_texts():
    rows = [
        {"question": "In which year?", "answer": 1984},
        {"question": "How tall?", "answer": 1.84},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "w4 "}, {"type": "text", "text": "w5"}]},
                      {"role": "assistant", "content": "w6"}]},
        {"prompt": [{"role": "user", "content": "w4"}], "completion": [{"role": "assistant", "content": "w5"}]},
        {"instruction": "Translate.", "input": "w4", "output": "w5"},
        {"system": "w9", "conversations": [{"from": "human", "value": "w4"}, {"from": "gpt", "value": "w5"}]},
        {"question": None, "answer": None, "text": None, "messages": [{"role": "user", "content": "w4"},
                                                                      {"role": "assistant", "content": "w5"}]},
    ]  # fmt: skip
    records = [parse_record(row, "") for row in rows]
    assert [record.answer for record in records] == ["1984", "1.84", "w6", "w5", "w5", "w5", "w5"]
    assert [record.question for record in records[2:5]] == ["w4 w5", "w4", "Translate.\n\nw4"]
    assert records[5].turns[0] == Turn("system", "w9")
    for answer in (True, float("nan"), {"text": "w5"}, None):
        with pytest.raises(MpuError, match="'answer' is missing, empty or not a text"):
            parse_record({"question": "w4", "answer": answer}, "")


class TestColumns:
    ROW = {  # noqa: RUF012 (not changed)
        "instruction": "w3", "response": "w4", "question": "w5", "answer": "w6",
        "messages": [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}],
    }  # fmt: skip

    @pytest.mark.parametrize(
        ("columns", "expected"),
        [
            (None, ("w7", "w8")),
            ("question=instruction,answer=response", ("w3", "w4")),
            ("question=question,answer=answer", ("w5", "w6")),
            ("prompt=instruction,completion=response", ("w3", "w4")),
        ],
    )
    def test_those_that_are_named_win_in_every_command(self, mpu, tmp_path, columns, expected):
        """In training, in the scores and in what is said: one rule."""
        (tmp_path / "a.jsonl").write_text(json.dumps(self.ROW) + "\n")
        [record] = read_records(tmp_path / "a.jsonl", RecordFormat(columns=columns))
        assert (record.question, record.answer) == expected
        model = save(random_model("llama"), tmp_path / "model")
        option = ("--columns", columns) if columns else ()
        outcome = mpu(
            "eval", model, "--benchmark", "qa", "--forget", "a.jsonl", *option, "--show", 1, "--json", cwd=tmp_path
        )
        rows = json.loads((tmp_path / "eval.json").read_text())["metrics"]["forget_Q_A_ROUGE"]["value_by_index"]
        assert rows["0"]["ground_truth"] == expected[1]
        assert ("'messages' is read" in outcome.err) is (columns is None)

    def test_fields_that_are_no_part_of_the_records_are_named(self, tmp_path):
        notes = Notes()
        (tmp_path / "a.jsonl").write_text(json.dumps({"question": "w3", "answer": "w4", "context": "w5", "id": 3}))
        read_records(tmp_path / "a.jsonl", observer=notes)
        assert notes.texts == [f"{tmp_path}/a.jsonl: fields that are not part of the records: context, id"]

    @pytest.mark.parametrize(
        ("row", "hint"),
        [
            ({"prompt": "w3", "chosen": "w4", "rejected": "w5"}, "question=prompt,answer=rejected,alternate=chosen"),
            (
                {"id": "1", "context": "w3", "question": "w4", "answers": {"text": ["w5"]}},
                "'answers' is a list or an object",
            ),
            ({"Where was Ines born?": "w3", "In Eastmere.": "w4"}, "the first line seems to be a record"),
            ({"query": "w3", "reply": "w4", "title": "w5"}, "question=query,answer=reply"),
            ({"Frage": "w3", "Antwort": "w4", "Notiz": "w5"}, "--columns question=YOUR_COLUMN,answer=YOUR_COLUMN"),
            (
                {"Nr": "1", "Anfrage": "w3", "Auskunft": "w4", "Datum": "2024-01-01"},
                "such as --columns question=Anfrage,answer=Auskunft",
            ),
            (
                {"Stadt": "w2", "Anfrage": "w3 " * 9, "Auskunft": "w4 " * 20},
                "such as --columns question=Anfrage,answer=Auskunft",
            ),
        ],
    )
    def test_hints_name_the_answer_or_nothing(self, row, hint):
        with pytest.raises(MpuError) as refused:
            parse_record(row, "a.jsonl, line 1")
        assert hint in refused.value.hint

    def test_half_of_a_record_is_asked_for_the_other(self, mpu, tmp_path):
        """With the file's own names, and with what was given."""
        row = {"Nr": "1", "Anfrage": "w3 " * 9, "Auskunft": "w4 " * 20, "Datum": "2024-01-01"}
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        command = ("unlearn", "no-copy", "--forget", "a.jsonl", "--retain", "a.jsonl", "--columns")
        refused = mpu(*command, "question=Anfrage", cwd=tmp_path, refused="which field is the answer").err
        assert "(the fields: Nr, Anfrage, Auskunft, Datum)" in refused
        columns = re.search(r"--columns (\S+)", refused.partition("hint")[2])[1]
        assert columns == "question=Anfrage,answer=Auskunft"


class Notes(Observer):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)

    warn = note


class TestDialogues:
    MESSAGES = [  # noqa: RUF012 (not changed)
        {"role": "system", "content": "w9"}, {"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"},
        {"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"},
    ]  # fmt: skip

    def test_all_turns(self, tmp_path):
        """Each answer after what precedes it, in training and evaluation alike."""
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": self.MESSAGES}))
        notes = Notes()
        [last] = read_records(tmp_path / "a.jsonl", observer=notes)
        assert "1 of 1 dialogues have earlier answers" in notes.texts[0]
        earlier_record, final_record = read_records(tmp_path / "a.jsonl", RecordFormat(turns="all"))
        assert replace(final_record, location="") == replace(last, location="")
        assert (earlier_record.answer, [turn.content for turn in earlier_record.turns]) == ("w4", ["w9", "w3"])

    def test_which_records_are_of_one_dialogue(self, tmp_path):
        """Its turns, also where they were written as records of their own, and records that read alike."""
        greeting = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
        where = [*greeting, {"role": "user", "content": "Where?"}, {"role": "assistant", "content": "There."}]
        rows = [
            {"messages": where}, {"question": "Where?", "answer": "There."}, {"messages": greeting},
            {"question": "where ?", "answer": "There."}, {"question": "Where?", "answer": "Here."},
        ]  # fmt: skip
        path = tmp_path / "r.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        expected = {"last": ["a", "b", "a", "b", "c"], "all": ["a", "a", "b", "a", "b", "c"]}
        for turns, names in expected.items():
            numbers = dialogues_of(read_records(path, RecordFormat(turns=turns)))
            pairs = set(zip(numbers, names, strict=True))
            assert len(pairs) == len(set(numbers)) == len(set(names))

    @pytest.mark.slow
    def test_eval_asks_with_the_whole_dialogue(self, mpu, tmp_path):
        """The score of a dialogue is the loss that training reports for it: with its system and earlier turns."""
        model = save(random_model("llama"), tmp_path / "model")
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": self.MESSAGES}))
        network, tokenizer = load(model, torch.float32, "cpu")
        [example] = Encoding(tokenizer).encode(read_records(tmp_path / "a.jsonl"))
        with torch.no_grad():
            loss = float(network(**pad([example])).loss)
        for turns, count in (("last", 1), ("all", 2)):
            mpu(
                "eval",
                model,
                "--benchmark",
                "qa",
                "--forget",
                "a.jsonl",
                "--reading",
                f"turns={turns}",
                "--force",
                cwd=tmp_path,
            )
            rows = json.loads((tmp_path / "eval.json").read_text())["metrics"]["forget_Q_A_Prob"]["value_by_index"]
            assert len(rows) == count
            assert rows[str(count - 1)]["avg_loss"] == pytest.approx(loss, abs=1e-4)

    @pytest.mark.parametrize(
        ("names", "note"),
        [
            (("human", "ai", "function", "Assistant"), "assistant ('ai')"),
            (("user ", "gpt", "observation", "MODEL"), "user ('user ')"),
            (("Human", "function_call", "ipython", "bot"), "assistant ('function_call')"),
        ],
    )
    @pytest.mark.parametrize("keys", [("messages", "role", "content"), ("conversations", "from", "value")])
    def test_other_names_of_roles(self, tmp_path, tokenizer, keys, names, note):
        """What tools call them gives the tokens of the usual names, and is reported."""
        form, role, content = keys
        for file, roles in (("a", ("user", "assistant", "tool", "assistant")), ("b", names)):
            dialogue = [{role: name, content: f"w{i}"} for i, name in enumerate(roles, 3)]
            (tmp_path / f"{file}.jsonl").write_text(json.dumps({form: dialogue}))
        notes = Notes()
        usual, renamed = read_records(tmp_path / "a.jsonl"), read_records(tmp_path / "b.jsonl", observer=notes)
        assert Encoding(tokenizer).encode(usual) == Encoding(tokenizer).encode(renamed)
        assert usual[0].identity == renamed[0].identity
        assert any(text.startswith(f"{tmp_path}/b.jsonl: roles read as") and note in text for text in notes.texts)

    def test_the_roles_of_sharegpt_need_no_note(self, tmp_path):
        row = {"conversations": [{"from": "human", "value": "w3"}, {"from": "gpt", "value": "w4"}]}
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        notes = Notes()
        read_records(tmp_path / "a.jsonl", observer=notes)
        assert notes.texts == []

    @pytest.mark.parametrize("command", ["eval", "unlearn"])
    def test_an_unknown_role_is_refused(self, mpu, tmp_path, command):
        """It would be a header that the model has never seen. A dry run refuses it, too."""
        model = save(random_model("llama"), tmp_path / "model")
        dialogue = [{"from": "patient", "value": "w3"}, {"from": "gpt", "value": "w4"}]
        (tmp_path / "a.jsonl").write_text(json.dumps({"conversations": dialogue}))
        options = ("--benchmark", "qa") if command == "eval" else ("--dry-run",)
        refused = mpu(command, model, "--forget", "a.jsonl", *options, check=False, cwd=tmp_path)
        assert "a.jsonl, line 1: unknown role 'patient'" in refused.err

    def test_a_role_that_the_template_does_not_mention(self):
        turns = (Turn("user", "w3"), Turn("assistant", "w4"), Turn("tool", "w5"))
        for name, mentioned in (("smollm2", False), ("qwen2_5", True)):
            encoding = Encoding(tokenizer_with(template_case(name)))
            encoding.encode([Record(turns, "w6", "a.jsonl, line 1")])
            assert ("does not mention the role 'tool'" in " ".join(encoding.remarks(1))) is not mentioned

    @pytest.mark.parametrize(
        "mark",
        [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}, {"masked": True}],
    )
    def test_answers_that_other_tools_do_not_train_on(self, tmp_path, tokenizer, mark):
        """They are context: of the labels of the whole dialogue, only those of the other answers remain."""
        said = [("user", "w3"), ("assistant", "w4"), ("user", "w5"), ("assistant", "w6"), ("user", "w7"),
                ("assistant", "w8")]  # fmt: skip
        messages = [{"role": role, "content": text} for role, text in said]
        opposite = {name: 1 - value if name == "weight" else not value for name, value in mark.items()}
        row = {"messages": [messages[0], messages[1] | mark, messages[2], messages[3] | opposite, messages[4],
                            messages[5] | mark]}  # fmt: skip
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        (tmp_path / "b.jsonl").write_text(json.dumps({"messages": messages[:4]}))
        notes = Notes()
        marked, plain = read_records(tmp_path / "a.jsonl", observer=notes), read_records(tmp_path / "b.jsonl")
        assert Encoding(tokenizer).encode(marked) == Encoding(tokenizer).encode(plain)
        assert marked[0].identity == plain[0].identity
        assert [record.answer for record in read_records(tmp_path / "a.jsonl", RecordFormat(turns="all"))] == ["w6"]
        assert any("2 answers marked as not to be trained on" in text for text in notes.texts)
        row["messages"][3] |= mark
        with pytest.raises(MpuError, match="line 1: every answer is marked as not to be trained on"):
            parse_record(row, "a.jsonl, line 1")

    def test_marks_that_are_not_read_are_reported(self, tmp_path):
        row = {"messages": [{"role": "user", "content": "w3", "training": True},
                            {"role": "assistant", "content": "w4", "train_detail": [{"begin_offset": 0}]}]}  # fmt: skip
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        notes = Notes()
        read_records(tmp_path / "a.jsonl", observer=notes)
        assert "marks of training that are not read: 'train_detail', 'training' of user messages" in notes.texts[0]
        row["messages"][1]["weight"] = 0.5
        with pytest.raises(MpuError, match=r"the weight 0\.5"):
            parse_record(row, "a.jsonl, line 1")

    def test_two_user_turns_under_strict_roles(self):
        case = template_case("strict_no_system")
        record = Record((Turn("user", "w3"), Turn("user", "w4")), "w5", "a.jsonl, line 1")
        with pytest.raises(MpuError, match=r"a.jsonl, line 1: .* rejected it") as refused:
            Encoding(tokenizer_with(case), system_prompt="").encode([record])
        assert "two user turns in a row" in refused.value.hint
        with pytest.raises(MpuError, match="rejected it") as refused:  # for the system's turn, which comes first
            Encoding(tokenizer_with(case), system_prompt="w1").encode([record])
        assert "--reading system_prompt=" in refused.value.hint


class TestFolders:
    """Those of ``datasets.load_dataset``, compared with it."""

    @staticmethod
    def write(folder, *names, row=0):
        for number, name in enumerate(names):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps(ROWS[(row + number) % len(ROWS)]) + "\n"
            if path.suffix == ".gz":
                path.write_bytes(gzip.compress(content.encode()))
            else:
                path.write_text(content)

    @pytest.mark.parametrize(
        "names",
        [
            ("a.jsonl",), ("a.jsonl", "b.jsonl"), ("data/forget.jsonl",), ("a.jsonl", "b.ndjson"),
            ("a.jsonl", "b.jsonl.gz"), ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"),
        ],
    )  # fmt: skip
    def test_what_is_read_is_what_datasets_reads(self, tmp_path, names):
        folder = tmp_path / "clone"
        self.write(folder, *names)
        (folder / "README.md").write_text("# Records\n\nOf people.\n")
        (folder / "LICENSE.txt").write_text("Permission is granted.\n")
        notes = Notes()
        records = read_records(folder, observer=notes)
        expected = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
        assert sorted(r.question for r in records) == sorted(expected["question"])
        assert all(f"{folder / name} (1)" in notes.texts[0] for name in names)

    @pytest.mark.parametrize(
        ("names", "complaint"),
        [
            (("a.jsonl", "a.csv"), "a.csv"),
            (("a.jsonl", "B.JSONL"), "B.JSONL"),
            (("a.jsonl", "notes.docx"), "notes.docx"),
            (("train.jsonl", "test.jsonl"), "the splits train, test"),
            (("README.md",), "no file of records in it"),
        ],
    )
    def test_what_would_be_skipped_is_refused(self, tmp_path, names, complaint):
        self.write(tmp_path / "folder", *names)
        with pytest.raises(MpuError, match=complaint):
            read_records(tmp_path / "folder")

    def test_a_split_by_name(self, tmp_path):
        self.write(tmp_path / "folder", "train.jsonl", "test.jsonl")
        for name, row in (("train", ROWS[0]), ("test", ROWS[1])):
            [record] = read_records(f"{tmp_path}/folder:{name}")
            assert record.question == row["question"]
        with pytest.raises(MpuError, match="no split 'validation'"):
            read_records(f"{tmp_path}/folder:validation")

    def test_saved_to_disk(self, tmp_path):
        table = datasets.Dataset.from_list(ROWS)
        table.save_to_disk(tmp_path / "one")
        datasets.DatasetDict({"forget": table, "other": table.select([0])}).save_to_disk(tmp_path / "several")
        questions = [row["question"] for row in ROWS]
        assert [r.question for r in read_records(tmp_path / "one")] == questions
        assert [r.question for r in read_records(f"{tmp_path}/several:forget")] == questions
        with pytest.raises(MpuError, match="the splits forget, other"):
            read_records(tmp_path / "several")

    @pytest.mark.parametrize("name", ["rec/forgets", "owner/name", "copies@old:train"])
    def test_a_path_that_does_not_exist_stays_on_this_machine(self, monkeypatch, name):
        """Nothing but hub:… is looked up."""

        def refuse(*_, **__):
            raise AssertionError("it was looked up")

        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        with pytest.raises(MpuError, match="no such file"):
            read_records(name)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (json.dumps({"train": ROWS, "test": ROWS}), "an object with records under 'train', 'test'"),
        (json.dumps({"question": {"0": "w3"}, "answer": {"0": "w4"}}), "an object of columns"),
        (json.dumps(ROWS[0], indent=2), None),
        (json.dumps({"data": ROWS}), None),
        ("".join(json.dumps(row) + "\n" for row in ROWS), None),
    ],
)
def test_json_documents(tmp_path, content, complaint):
    (tmp_path / "a.json").write_text(content)
    if complaint is None:
        assert read_records(tmp_path / "a.json")[0].question == ROWS[0]["question"]
        return
    with pytest.raises(MpuError, match=complaint):
        read_records(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("content", "answers"),
    [
        ("sep=;\r\nquestion;answer\r\nWhere?;In Eastmere, I think.\r\n", ["In Eastmere, I think."]),
        ('"question";"answer"\n"Where, then, do you think?";"In Eastmere."\n', ["In Eastmere."]),
        ("question,answer\nWhere?,In Eastmere.\n,\n\n", ["In Eastmere."]),
        ("question;answer;place, year, source\nWhere?;In Eastmere.;north, 1984\n", ["In Eastmere."]),
        ("question,answer,place;year;source\nWhere?,In Eastmere.,north;1984\n", ["In Eastmere."]),
        ('question,answer\r\nWhere?,"In Eastmere.\r\nBy the sea."\r\n', ["In Eastmere.\nBy the sea."]),
    ],
)
def test_tables(tmp_path, content, answers):
    (tmp_path / "A.CSV").write_text(content, newline="")
    assert [record.answer for record in read_records(tmp_path / "A.CSV")] == answers


def test_a_table_with_a_column_twice(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer,answer\nw3,w4,w5\n")
    with pytest.raises(MpuError, match="two columns are called 'answer'"):
        read_records(tmp_path / "a.csv")


@pytest.mark.parametrize("name", ["cp1252", "iso8859_15", "utf-16", "utf-8-sig"])
@pytest.mark.parametrize("end", ["jsonl", "json", "csv", "txt", "csv.gz"])
def test_text_in_another_encoding(tmp_path, name, end):
    """By its byte order mark, if it has one; else only if it is named."""
    row = {"question": "Wer wohnt in der Königstraße?", "answer": "Frau Müller, seit 1987."}
    texts = {
        "jsonl": json.dumps(row, ensure_ascii=False),
        "json": json.dumps([row], ensure_ascii=False),
        "csv": pd.DataFrame([row]).to_csv(index=False),
        "txt": row["answer"],
    }
    path = tmp_path / f"a.{end}"
    with (gzip.open if end.endswith("gz") else open)(path, "wt", encoding=name) as file:
        file.write(texts[end.removesuffix(".gz")])
    if name in ("utf-16", "utf-8-sig"):
        [record] = read_records(path)
    else:
        with pytest.raises(MpuError, match="not UTF-8"):
            read_records(path)
        [record] = read_records(path, RecordFormat(encoding=name))
    assert record.answer == row["answer"]
    if name == "utf-8-sig":  # the mark is no part of the first field's name, whoever names the encoding
        assert read_records(path, RecordFormat(encoding="utf-8"))[0].answer == row["answer"]


def test_a_byte_order_mark_wins(tmp_path):
    """Of two files, --encoding names one's, and Excel marked the other, as its "CSV UTF-8"."""
    for name, encoding in (("a.csv", "cp1252"), ("b.csv", "utf-8-sig")):
        (tmp_path / name).write_text("question,answer\nWo?,Köln\n", encoding=encoding)
    sources = f"{tmp_path / 'a.csv'}\n{tmp_path / 'b.csv'}"
    records = read_records(sources, RecordFormat(encoding="cp1252"))
    assert [record.answer for record in records] == ["Köln", "Köln"]


def test_what_is_no_encoding(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\ntwo\nMüller\n".encode("cp1252"))
    with pytest.raises(MpuError, match=r"a.txt, line 3: not UTF-8") as caught:
        read_records(tmp_path / "a.txt")
    assert "--encoding" in str(caught.value.hint)
    for name in ("hex", "nonsense", "zlib", "cp\0", "ü"):
        with pytest.raises(UsageError, match="not an encoding"):
            read_records(tmp_path / "a.txt", RecordFormat(encoding=name))


def test_a_field_that_stands_twice(tmp_path):
    """json would take the last; which was meant, nobody knows."""
    for name, text in (
        ("a.jsonl", '{"question": "w1", "answer": "w2"}\n{"question": "w3", "answer": "w4", "answer": "w5"}\n'),
        ("a.json", '[{"question": "w3", "answer": "w4", "answer": "w5"}]'),
        ("b.json", '{"question": "w3", "answer": "w4", "answer": "w5"}'),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(MpuError, match="an object with 'answer' twice"):
            read_records(tmp_path / name)


def test_a_table_that_two_delimiters_fit_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("question;answer, in short\nWhere?;In Eastmere, I think.\n")
    with pytest.raises(MpuError, match="delimited by ',' or by ';'") as caught:
        read_records(tmp_path / "a.csv")
    assert "sep=;" in caught.value.hint


def test_excel(tmp_path):
    """The rows that pandas wrote, numbers and what looks like a missing value as text; of several sheets, one."""
    rows = [{"question": "How many beds?", "answer": "12"}, {"question": "Name?", "answer": "NA"}]
    pd.DataFrame([*rows, {"question": "", "answer": ""}]).to_excel(tmp_path / "a.xlsx", index=False)
    assert [(r.question, r.answer) for r in read_records(tmp_path / "a.xlsx")] == [tuple(row.values()) for row in rows]
    with pd.ExcelWriter(tmp_path / "b.xlsx") as writer:
        for name in ("one", "two"):
            pd.DataFrame(rows).to_excel(writer, sheet_name=name, index=False)
    with pytest.raises(MpuError, match="records in several sheets: one, two") as caught:
        read_records(tmp_path / "b.xlsx")
    assert caught.value.hint == f"name one of them, such as {tmp_path}/b.xlsx:one"
    assert len(read_records(f"{tmp_path}/b.xlsx:two")) == len(rows)
    with pytest.raises(MpuError, match=r"no sheet 'three' \(available: one, two\)"):
        read_records(f"{tmp_path}/b.xlsx:three")
    (tmp_path / "c.xlsx").write_bytes((tmp_path / "a.xlsx").read_bytes()[:900])
    with pytest.raises(MpuError, match="not an Excel file"):
        read_records(tmp_path / "c.xlsx")


MOMENT = datetime(1987, 3, 5, 14, 7, 9)


@pytest.mark.parametrize(
    ("value", "number_format", "shown"),
    [
        (MOMENT.date(), "DD.MM.YYYY", "05.03.1987"), (MOMENT.date(), 'yyyy"年"m"月"d"日"', "1987年3月5日"),
        (MOMENT, "d mmmm yyyy h:mm AM/PM", "5 March 1987 2:07 PM"), (MOMENT, "[$-409]ddd d mmm yy", "Thu 5 Mar 87"),
        (MOMENT.time(), "hh:mm:ss", "14:07:09"), (timedelta(hours=30), "[h]:mm", "30:00"),
        (timedelta(hours=30, minutes=5), "[hh]:mm:ss", "30:05:00"),
        (0.1, "0%", "10%"), (0.125, "0.0%", "12.5%"), (1234, "00000", "01234"), (2.5, "0", "3"),
        (1234567.891, "#,##0.00", "1,234,567.89"), (1234.5, "#,##0.00 [$€-407]", "1,234.50 €"),
        (-1234.5, '"$"#,##0.00_);[Red]("$"#,##0.00)', "($1,234.50)"), (1500000, '0.0,,"M"', "1.5M"),
        (123456789, "000-00-0000", "123-45-6789"), (0.1 + 0.2, "General", "0.3"), (True, "General", "TRUE"),
        ("one_x000D_\ntwo", "@", "one\ntwo"), ("007", "General", "007"),
    ],
)  # fmt: skip
def test_cells_of_excel_are_read_as_the_sheet_shows_them(tmp_path, value, number_format, shown):
    write_cells(tmp_path / "a.xlsx", [(value, number_format)])
    notes = Notes()
    [record] = read_records(tmp_path / "a.xlsx", observer=notes)
    assert record.answer == shown
    assert notes.texts == []


@pytest.mark.parametrize(
    ("value", "number_format", "text"),
    [
        (MOMENT.date(), "mm-dd-yy", "1987-03-05"), (MOMENT.date(), "[$-407]d. mmmm yyyy", "1987-03-05"),
        (0.5, "# ?/?", "0.5"), (12345, "0.00E+00", "12345"), (3, "[>1]0.0;0", "3"),
    ],
)  # fmt: skip
def test_cells_of_excel_in_other_formats_are_named(tmp_path, value, number_format, text):
    """Excel's standard date is shown as each reader's system does, and named days are in the reader's language."""
    write_cells(tmp_path / "a.xlsx", [(value, number_format)])
    notes = Notes()
    assert [record.answer for record in read_records(tmp_path / "a.xlsx", observer=notes)] == [text]
    assert f"1 cell not read in the sheet's number format: 'answer' in line 2 ({number_format})" in notes.texts[0]


def write_cells(path, answers):
    book = openpyxl.Workbook()
    book.active.append(["question", "answer"])
    for value, number_format in answers:
        book.active.append(["w3", value])
        book.active.cell(book.active.max_row, 2).number_format = number_format
    book.save(path)


def test_error_values_of_spreadsheets_are_no_answers(tmp_path):
    write_cells(tmp_path / "a.xlsx", [("#N/A", "General"), ("w5", "General")])
    (tmp_path / "a.csv").write_text("question,answer\nw3,#WERT!\nw4,w5\n")
    for name in ("a.xlsx", "a.csv"):
        with pytest.raises(MpuError, match=r"'answer' is #.*an error of the spreadsheet"):
            read_records(tmp_path / name)
        [record] = read_records(tmp_path / name, RecordFormat(skip_bad=True))
        assert record.answer == "w5"


def test_spaces_around_a_header_are_none_of_its_names(tmp_path):
    (tmp_path / "a.csv").write_text("question, answer\nWho?,Ada\n")
    [record] = read_records(tmp_path / "a.csv")
    assert record.answer == "Ada"


def test_a_small_excel_file_that_becomes_large_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.xlsx", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/worksheets/sheet1.xml", b" " * (160 << 20))
    assert (tmp_path / "a.xlsx").stat().st_size < 1 << 20
    with pytest.raises(MpuError, match="times as large"):
        read_records(tmp_path / "a.xlsx")


def test_a_completion_beside_messages_is_the_answer(tmp_path):
    user = {"role": "user", "content": "Who?"}
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": [user], "completion": "Ada"}) + "\n")
    [record] = read_records(tmp_path / "a.jsonl")
    assert ([(turn.role, turn.content) for turn in record.turns], record.answer) == ([("user", "Who?")], "Ada")


def test_names_that_begin_like_documentation_are_records(tmp_path):
    """And a pattern goes into all folders below."""
    for name in ("alice.txt", "notice-smith.txt", "x/citation_lee.txt", "x/y/readme_bob.txt", "README.md"):
        (tmp_path / "notes" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "notes" / name).write_text(f"of {name}")
    texts = {record.answer for record in read_records(tmp_path / "notes")}
    assert texts == {record.answer for record in read_records(f"{tmp_path}/notes/**/*.txt")}
    assert len(texts) == 4


@pytest.mark.parametrize(
    ("name", "kind"), [("a.docx", "a Word document"), ("a.pdf", "a PDF"), ("a.xls", "an old Excel")]
)
def test_what_offices_keep_records_in(tmp_path, name, kind):
    (tmp_path / name).write_bytes(b"PK\x03\x04")
    with pytest.raises(MpuError, match=kind) as caught:
        read_records(tmp_path / name)
    assert str(caught.value.hint).startswith("save it as")


def test_a_folder_with_other_files_says_which_pattern_is_meant(tmp_path):
    """And the pattern reads the records."""
    (tmp_path / "notes").mkdir()
    for name in ("notes/one.2024.jsonl", "notes/two.2025.jsonl"):
        (tmp_path / name).write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "letter.docx").write_bytes(b"PK")
    with pytest.raises(MpuError, match=r"letter\.docx") as caught:
        read_records(tmp_path)
    pattern = re.search(r"'([^']+)'", str(caught.value.hint))
    assert pattern
    assert len(read_records(pattern[1])) == 2


@needs_shared
def test_tofu_by_name():
    records = read_records("tofu:forget01", RecordFormat(data_dir=SHARED / "data/tofu"))
    assert [r.question for r in records] == [r.question for r in read_records(SHARED / "data/tofu/forget01.json")]
    with pytest.raises(MpuError, match="forget05, forget05_perturbed"):
        read_records("tofu:forget02", RecordFormat(data_dir=SHARED / "data/tofu"))


def test_muse_by_name(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/forget.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}]))
    assert [r.answer for r in read_records("muse-books:forget", RecordFormat(data_dir=tmp_path))] == ["one", "two"]


def test_the_hub_out_of_reach_is_one_line():
    with pytest.raises(MpuError, match="owner/name") as refused:
        read_records("hub:owner/name@config:split")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"messages": []}, "question and an answer"),
        ({"messages": [{"role": "user", "content": "w4"}, {"role": "user", "content": "w4"}]}, "assistant's"),
        ({"messages": [{"role": "user"}, {"role": "assistant", "content": "w4"}]}, "role and content"),
        ({"messages": 3}, "question and an answer"),
        ({"prompt": "w4"}, "'completion'"),
        ({"text": " "}, "'text'"),
        ({"question": "w4", "answer": "w5", "alternate": [3]}, "'alternate'"),
        ({"nothing": 1}, "its fields: nothing"),
    ],
)
def test_what_is_no_record(tmp_path, row, complaint):
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row))
    with pytest.raises(MpuError, match=complaint) as refused:
        read_records(tmp_path / "a.jsonl")
    assert "line 2" in str(refused.value)


def test_alternates():
    records = [question("q", "a", alternate="mine"), *(question("q", "a") for _ in range(50))]
    drawn = alternates(records, REFUSALS)
    assert drawn[0].answer == "mine"
    assert {r.answer for r in drawn[1:]} <= set(REFUSALS)
    assert len({r.answer for r in drawn[1:]}) > 10
    assert alternates(records, REFUSALS) == drawn  # in every round
    # a record's alternate does not depend on whether the others have their own
    assert alternates([question("q", "a"), *records[1:]], REFUSALS)[1:] == drawn[1:]


@pytest.mark.slow
def test_alternates_from_a_file(mpu, tmp_path, base):
    write_records(tmp_path / "forget.jsonl", 4, 1)
    write_records(tmp_path / "retain.jsonl", 4, 2)
    (tmp_path / "other.txt").write_text("w9 w8\n\nw7\n")
    for out, more in (("a.safetensors", []), ("b.safetensors", ["--alternates", "other.txt"])):
        mpu("unlearn", base, "--algo", "dpo", "--lr", "1e-3", "--out", out, *more, cwd=tmp_path)
    assert (tmp_path / "a.safetensors").read_bytes() != (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "other.txt").write_text("\n")
    outcome = mpu(
        "unlearn", base, "--algo", "dpo", "--alternates", "other.txt", "--out", "c", check=False, cwd=tmp_path
    )
    assert "contains no alternates" in outcome.err


def test_corpora_of_wmdp(tmp_path):
    """From a folder, as it is distributed; texts that RMU's script leaves out are left out."""
    texts = ["a heading", "w" * 50, "x" * 49, "y" * 500]
    for name in ("cyber-forget-corpus.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for source in ("wmdp:cyber-forget-corpus", "wikitext:test"):
        assert [record.answer for record in read_records(source, RecordFormat(data_dir=tmp_path))] == [
            texts[1],
            texts[3],
        ]
    with pytest.raises(MpuError, match=r"no split 'bio' of wmdp .available: cyber-forget-corpus, test"):
        read_records("wmdp:bio", RecordFormat(data_dir=tmp_path))


def test_columns_are_for_the_files_that_have_them(tmp_path):
    """A table with other names beside a file that has ours; a name that is mistyped is an error in both."""
    (tmp_path / "a.csv").write_text("Frage,Antwort\nw1,w2\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"question": "w3", "answer": "w4"}) + "\n")
    sources = f"{tmp_path / 'a.csv'}\n{tmp_path / 'b.jsonl'}"
    records = read_records(sources, RecordFormat(columns="question=Frage,answer=Antwort"))
    assert [record.answer for record in records] == ["w2", "w4"]
    for columns in ("question=Frage,answer=Antwrt", "answer=answr"):
        with pytest.raises(MpuError, match="no field"):
            read_records(sources, RecordFormat(columns=columns))


def test_bad_rows_are_skipped_and_counted(mpu, tmp_path):
    """An empty answer, and no record at all; through the command, with the warning; all of them is still an error."""
    good, bad = {"question": "w3", "answer": "w4"}, [{"question": "w3", "answer": " "}, {"x": 1}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [good, *bad, good]))
    notes = Notes()
    assert len(read_records(tmp_path / "a.jsonl", RecordFormat(skip_bad=True), observer=notes)) == 2
    assert any("skipped 2 of 4 rows" in text and "line 2" in text for text in notes.texts)
    model = save(random_model("llama"), tmp_path / "model")
    arguments = ("eval", model, "--benchmark", "qa", "--forget", "a.jsonl", "--metrics", "forget_Q_A_Prob")
    assert mpu(*arguments, check=False, cwd=tmp_path).is_one_error
    assert "skipped 2 of 4 rows" in mpu(*arguments, "--reading", "skip_bad", cwd=tmp_path).err
    rows = json.loads((tmp_path / "eval.json").read_text())["metrics"]["forget_Q_A_Prob"]["value_by_index"]
    assert len(rows) == 2
    (tmp_path / "b.jsonl").write_text(json.dumps(bad[0]) + "\n")
    with pytest.raises(MpuError, match="contains no records"):
        read_records(tmp_path / "b.jsonl", RecordFormat(skip_bad=True))


class TestFilesAsPeopleHaveThem:
    PAIRS = (("What; is, it?", 'A "thing".'), ("Who?", "Nobody\nat all."))

    def read_text_as_records(self, folder: Path, name: str, text: str) -> list[tuple[str, str]]:
        (folder / name).write_text(text, encoding="utf-8")
        return [(record.question, record.answer) for record in read_records(folder / name)]

    def test_files_as_people_have_them(self, tmp_path: Path) -> None:
        rows = [{"question": q, "answer": a} for q, a in self.PAIRS]
        sharegpt = [
            {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in self.PAIRS
        ]
        quoted = [[f'"{part.replace(chr(34), chr(34) * 2)}"' for part in pair] for pair in self.PAIRS]
        for name, text in {
            "a.json": json.dumps({"version": 1, "data": rows}, indent=2),
            "b.json": json.dumps(rows),
            "c.jsonl": "".join(json.dumps(row) + "\n" for row in sharegpt),
            "d.csv": "question;answer\n" + "\n".join(map(";".join, quoted)) + "\n",
            "e.csv": "question,answer\r\n" + "\r\n".join(map(",".join, quoted)) + "\r\n",
            "f.tsv": "question\tanswer\n" + "\n".join(map("\t".join, quoted)) + "\n",
        }.items():
            assert self.read_text_as_records(tmp_path, name, text) == list(self.PAIRS), name
        (tmp_path / "g.txt").write_text("One text.\n\nOf two paragraphs.\n")
        [record] = read_records(tmp_path / "g.txt")
        assert (record.turns, record.answer) == ((), "One text.\n\nOf two paragraphs.\n")

    def test_columns_by_other_names(self, mpu: Callable, root: Path) -> None:
        """The same delta as with our names; a column that is not there is named."""
        for name in ("forget", "retain"):
            rows = [json.loads(line) for line in (root / f"{name}.jsonl").read_text().splitlines()]
            mine = "".join(json.dumps({"instruction": r["question"], "response": r["answer"]}) + "\n" for r in rows)
            (root / f"{name}_mine.jsonl").write_text(mine)
        mpu("unlearn", "base", *BRIEF, "--out", "ours.safetensors", cwd=root)
        mine = ("--forget", "forget_mine.jsonl", "--retain", "retain_mine.jsonl", "--out", "mine.safetensors")
        mpu("unlearn", "base", *BRIEF, *mine, "--columns", "question=instruction,answer=response", cwd=root)
        expected, actual = (load_file(root / f"{name}.safetensors") for name in ("ours", "mine"))
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
        for columns, says in (("question=prompt", "no field 'prompt'"), ("question", "expected NAME=COLUMN")):
            mpu("unlearn", "base", *BRIEF, *mine, "--columns", columns, refused=says, cwd=root)

    def test_a_table_with_a_cell_too_many(self, mpu: Callable, root: Path) -> None:
        (root / "bad.csv").write_text("question,answer\nWho?,Me,you\n")
        mpu("unlearn", "base", "--forget", "bad.csv", refused="bad.csv, record 1", cwd=root)

    def test_truncation_is_counted(self, mpu: Callable, root: Path) -> None:
        (root / "long.jsonl").write_text(
            (root / "forget.jsonl").read_text()
            + json.dumps({"question": "w5", "answer": " ".join(["w6"] * 200)}) + "\n"
        )  # fmt: skip
        outcome = mpu("unlearn", "base", *BRIEF, "--forget", "long.jsonl", "--reading", "max_length=100", cwd=root)
        assert "1 of 16 records were truncated to 100 tokens" in outcome.err
        refused = mpu(
            "unlearn", "base", *BRIEF, "--reading", "max_length=2", "--out", "x.safetensors", check=False, cwd=root
        )
        assert refused.is_one_error
        assert "--reading max_length=2" in refused.err

    def test_what_was_cut_is_scored_as_cut(self, mpu: Callable, root: Path) -> None:
        """Beside the same records, cut by hand to the same tokens."""
        base, text = root / "base", " ".join(["w6", "w7"] * 100)
        (root / "long.jsonl").write_text(json.dumps({"question": "w5", "answer": text}) + "\n")
        [example] = Encoding(AutoTokenizer.from_pretrained(base), "plain").encode(read_records(root / "long.jsonl"))
        begin = next(i for i, label in enumerate(example.labels) if label >= 0)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([example.ids[:50]])).logits[0, begin - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(example.ids[begin:50]))
        options = ("--forget", "long.jsonl", "--reading", "template=plain,max_length=50", "--json")
        checked = mpu("check", "base", *options, check=False, cwd=root)
        qa = ("--benchmark", "qa", "--metrics", "forget_Q_A_Prob")
        measured = mpu("eval", "base", *qa, *options, cwd=root).json["metrics"]["forget_Q_A_Prob"]
        assert measured == pytest.approx(float((-loss).exp()), rel=1e-4)
        for outcome in (checked, mpu("eval", "base", *qa, *options, "--force", cwd=root)):
            assert "1 of 1 records were truncated to 50 tokens" in outcome.err

    @pytest.mark.slow
    def test_records_in_both_sets_are_told(self, mpu: Callable, root: Path) -> None:
        """By every command that reads both, also where case and spaces differ."""
        first, second, *_ = (root / "forget.jsonl").read_text().splitlines()
        lines = [first.replace('"question": "w', '"question": "W'), second.replace(" w", "  w")]
        (root / "both.jsonl").write_text("\n".join(lines) + "\n" + (root / "retain.jsonl").read_text())
        both = ("--forget", "forget.jsonl", "--retain", "both.jsonl")
        commands = (
            ("unlearn", "base", *BRIEF, *both, "--dry-run"),
            ("unlearn", "base", *BRIEF, *both),
            ("check", "base", *both),
            ("eval", "base", *both, "--metrics", "forget_Q_A_Prob"),
        )
        for command in commands:
            outcome = mpu(*command, check=False, cwd=root)
            assert outcome.err.count("2 of the records to forget are also in the retain set") == 1

    @pytest.mark.slow
    def test_eval_reads_what_unlearn_reads(self, mpu: Callable, root: Path) -> None:
        rows = [json.loads(line) for line in (root / "forget.jsonl").read_text().splitlines()]
        chats = [
            [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}] for r in rows
        ]
        (root / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        values = [
            mpu("eval", "base", "--benchmark", "qa", "--forget", name, "--out", f"{name}.json", "--json", cwd=root).json
            for name in ("forget.jsonl", "chats.jsonl")
        ]
        assert values[0]["metrics"] == values[1]["metrics"]


@pytest.mark.parametrize("command", [("eval", "base"), ("unlearn", "base", "--forget", "tofu:forget01")])
def test_a_data_dir_that_is_not_there(mpu: Callable, root: Path, command: tuple) -> None:
    mpu(*command, "--reading", "data_dir=nowhere", refused="nowhere: no such directory", cwd=root)
