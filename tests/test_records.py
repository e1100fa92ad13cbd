"""Records in all formats, from files, benchmark folders and Hugging Face datasets."""

from __future__ import annotations

import csv
import json

import pytest
import torch

from mpu_cli.client.frozen import forward
from mpu_cli.client.refusals import REFUSALS
from mpu_cli.client.sets import alternates
from mpu_cli.errors import MpuError
from mpu_cli.records.encoding import IGNORED, Encoding, pad
from mpu_cli.records.reading import read_records
from mpu_cli.records.record import question
from tests.models import SHARED, load, needs_shared, random_model, save, write_records

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
    import datasets

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
        {"messages": [{"role": "user", "content": "w4 w5"}, {"role": "assistant", "content": "w6"}]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, forms)))
    one, *others = Encoding(tokenizer, system_prompt="").encode(read_records(tmp_path / "a.jsonl"))
    assert all(other == one for other in others)


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
    shots = Encoding(tokenizer, "chat", "", few_shot=[question("w4", "w5")]).encode([question("w6", "w7")])
    assert shots[0] == chat


def test_texts_are_learned_whole_and_in_pieces(tokenizer):
    from mpu_cli.records.record import Record

    ids = tokenizer("w4 w5 w6 " * 100).input_ids
    examples = Encoding(tokenizer, max_length=64).encode([Record((), "w4 w5 w6 " * 100, "")])
    assert [i for example in examples for i in example.ids] == ids
    assert all(example.labels == example.ids for example in examples)
    assert [len(example.ids) for example in examples] == [64] * 4 + [44]


def test_a_text_counts_every_token_but_its_first(tmp_path):
    from mpu_cli.records.record import Record

    model, tokenizer = load(save(random_model("llama"), tmp_path / "base"), torch.float32, "cpu")
    [example] = Encoding(tokenizer).encode([Record((), "w4 w5 w6 w7", "")])
    assert len(forward(model, pad([example])).log_probs) == len(example.ids) - 1


@needs_shared
def test_tofu_by_name():
    records = read_records("tofu:forget01", SHARED / "data/tofu")
    assert [r.question for r in records] == [r.question for r in read_records(SHARED / "data/tofu/forget01.json")]
    with pytest.raises(MpuError, match="forget05, forget05_perturbed"):
        read_records("tofu:forget02", SHARED / "data/tofu")


def test_muse_by_name(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/forget.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}]))
    assert [r.answer for r in read_records("muse-books:forget", tmp_path)] == ["one", "two"]


def test_the_hub_out_of_reach_is_one_line():
    with pytest.raises(MpuError, match="owner/name") as refused:
        read_records("owner/name@config:split")
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
        ({"question": "w4", "answer": "w5", "alternate": 3}, "'alternate'"),
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


def test_alternates_from_a_file(mpu, tmp_path):
    base = save(random_model("llama"), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 4, 1)
    write_records(tmp_path / "retain.jsonl", 4, 2)
    (tmp_path / "other.txt").write_text("w9 w8\n\nw7\n")
    for out, more in (("a.safetensors", []), ("b.safetensors", ["--alternates", "other.txt"])):
        mpu("unlearn", base, "--algo", "dpo", "--lr", "1e-3", "--out", out, *more, cwd=tmp_path)
    assert (tmp_path / "a.safetensors").read_bytes() != (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "other.txt").write_text("\n")
    told = mpu("unlearn", base, "--algo", "dpo", "--alternates", "other.txt", "--out", "c", check=False, cwd=tmp_path)
    assert "contains no alternates" in told.err


def test_corpora_of_wmdp(tmp_path):
    """From a folder, as it is distributed; texts that RMU's script leaves out are left out."""
    texts = ["a heading", "w" * 50, "x" * 49, "y" * 500]
    for name in ("cyber-forget-corpus.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for source in ("wmdp:cyber-forget-corpus", "wikitext:test"):
        assert [record.answer for record in read_records(source, tmp_path)] == [texts[1], texts[3]]
    with pytest.raises(MpuError, match=r"no split 'bio' of wmdp .available: cyber-forget-corpus, test"):
        read_records("wmdp:bio", tmp_path)
