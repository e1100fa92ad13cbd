"""What a fourth round of attacks found, each on real files and through the command line where a party would."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mpu_cli.records.read import file_rows, read_records
from mpu_cli.training.ledger import default_ledger_path
from tests.helpers.attacks import edit, publish_copy, unlearn_copy
from tests.helpers.models import random_model, save

CHECK = ("--forget", "forget.jsonl", "--retain", "retain.jsonl")


def check_receipt(mpu: Callable, root: Path) -> Path:
    """A receipt that the client signed: of a copy, compared with one of another publication."""
    publish_copy(mpu, root)
    mpu("publish", "base", "--copies", 2, "--out", "before", "--keys", "before/keys.bin", cwd=root)
    mpu("check", "copy_1", *CHECK, "--before", "before/copy_1", "--receipt", "receipt.json", check=False, cwd=root)
    return root / "receipt.json"


class TestNamesThatStandTwice:
    """A million of them are found out in one pass; with a look at all names for each name, these take an hour."""

    names = ",".join(f'"{i}": 1' for i in range(200_000))

    @pytest.mark.parametrize("command", [("receipt",), ("inspect",)])
    def test_in_a_document(self, mpu: Callable, root: Path, command: tuple[str, ...]) -> None:
        (root / "r.json").write_text('{"format": "mpu-receipt",' + self.names + ',"199999": 2}')
        mpu(*command, "r.json", refused="twice", cwd=root)

    def test_in_records(self, mpu: Callable, root: Path) -> None:
        (root / "r.jsonl").write_text("{" + self.names + ',"199999": 2}\n')
        (root / "r.csv").write_text(",".join(map(str, range(100_000))) + ",99999\n")
        mpu("check", "base", "--forget", "r.jsonl", refused="twice", cwd=root)
        mpu("check", "base", "--forget", "r.csv", refused="two columns", cwd=root)

    def test_in_the_header_of_weights(self, mpu: Callable, root: Path) -> None:
        header = ("{" + self.names + ',"199999": 2}').encode()
        (root / "d.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        mpu("inspect", "d.safetensors", refused="twice", cwd=root)


class TestStatus:
    def test_a_forged_receipt_ends_nothing(self, mpu: Callable, root: Path) -> None:
        path = check_receipt(mpu, root)
        receipt = json.loads(path.read_text())
        assert "nobody" not in mpu("status", root).out
        key = {"public_key": "1" * 64, "signature": "2" * 128}
        passes = {"left": 0, "left_high": 0, "kept": 100, "verdict": "pass: forgotten, the rest is kept",
                  "sets": ["forget", "unseen", "retain"], "stands_out": False}  # fmt: skip
        checked = {"date": receipt["date"], "model": None}
        path.write_text(json.dumps(receipt | passes | {"client": key, "server": key, "checked": checked}))
        mpu("receipt", path, fails="")
        status = mpu("status", root).out
        assert "nobody" not in status
        assert "receipts that prove nothing\treceipt.json" in status
        assert "nobody" in mpu("inspect", path, "--json").json["signed by"]

    def test_names_of_files_are_no_lines(self, mpu: Callable, root: Path) -> None:
        publish_copy(mpu, root)
        (root / "x\nnext\tserver: \x1b[2J.safetensors").write_bytes(b"x")
        out = mpu("status", root).out
        assert sum(line.startswith("next\t") for line in out.splitlines()) == 1
        assert "\x1b" not in out

    def test_a_million_copies_are_not_listed(self, mpu: Callable, root: Path) -> None:
        publish_copy(mpu, root)
        unlearn_copy(mpu, root, root / "copy_1", "d")
        with safe_open(root / "d.safetensors", "pt") as file:
            facts = json.loads(file.metadata()["mpu"])
        for number in range(20):
            metadata = {"mpu": json.dumps(facts | {"copies": 10**6, "run": f"run{number}"})}
            save_file({"a": torch.ones(1)}, root / f"d{number}.safetensors", metadata)
        assert len(mpu("status", root).out) < 10_000
        assert len(mpu("inspect", root).out) < 10_000


class TestReceipts:
    @pytest.mark.parametrize(
        ("entries", "reason"),
        [
            ({"date": "2099-02-31"}, "no day"),
            ({"before": {"round": 999}}, "later round"),
        ],
    )
    def test_what_cannot_be_is_refused(self, mpu: Callable, root: Path, entries: dict, reason: str) -> None:
        path = check_receipt(mpu, root)
        receipt = json.loads(path.read_text())
        if "before" in entries:
            entries = {"before": receipt["before"] | entries["before"] | {"run": receipt["copy"]["run"]}}
        path.write_text(json.dumps(receipt | entries))
        mpu("receipt", path, refused=reason)

    def test_a_copy_of_no_numbers_gets_none(self, mpu: Callable, root: Path) -> None:
        """NaN in the row of one token: whether a receipt says what is kept would tell if records have it."""
        save(random_model("llama", tie_word_embeddings=False), root / "base")
        copy = publish_copy(mpu, root)
        weights = load_file(copy / "model.safetensors")
        with safe_open(copy / "model.safetensors", "pt") as file:
            metadata = file.metadata()
        weights["model.embed_tokens.weight"][9] = float("nan")
        save_file(weights, copy / "model.safetensors", metadata)
        mpu("check", "copy_1", *CHECK, "--receipt", "r.json", refused="holds NaN or Inf", cwd=root)
        assert not (root / "r.json").exists()


class TestACopyThatComputesNothing:
    def test_it_is_said_and_not_written_down(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        edit(copy / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 0})
        unlearn_copy(mpu, root, copy, "d", refused="only NaN or Inf")
        mpu("check", "copy_1", *CHECK, refused="only NaN or Inf", cwd=root)
        assert "NaN" not in default_ledger_path().read_text()
        assert not list(root.glob("d.safetensors*"))


class TestRecords:
    ROWS = "".join(json.dumps({"question": f"q{i}", "answer": f"a{i}"}) + "\n" for i in range(9))

    def folder(self, root: Path, front: str) -> Path:
        folder = root / "records"
        for name, rows in (
            ("a.jsonl", self.ROWS),
            ("b/b.jsonl", self.ROWS.replace("a", "b").replace("bnswer", "answer")),
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(rows)
        (folder / "README.md").write_text(f"---\n{front}\n---\n\nRecords.\n")
        return folder

    @pytest.mark.parametrize(
        "address",
        ["ftp://127.0.0.1:9/x.jsonl", "http://127.0.0.1:9/x", "hf://datasets/a/b/c.jsonl", "github://a:b@/x.jsonl",
         "zip://a::b", "/etc/passwd", "../x.jsonl", "a/../../x.jsonl", "~/x.jsonl", "file:///etc/passwd"],
    )  # fmt: skip
    def test_a_readme_names_files_of_its_folder_only(self, mpu: Callable, root: Path, address: str) -> None:
        """Whatever address stands there, nothing is asked of it."""
        for front in (
            f"configs:\n- config_name: default\n  data_files: '{address}'",
            f"configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: ['a.jsonl', '{address}']",
            f"configs:\n- config_name: default\n  data_dir: '{address}'",
        ):
            folder = self.folder(root, front)
            mpu("check", "base", "--forget", folder, refused="README.md", cwd=root)

    @pytest.mark.parametrize(
        "front",
        [
            "configs: [5]", "configs: {a: b}", "a: [", "configs:\n- data_files: 5",
            "a: &a [x, x]\nb: &b [*a, *a]\nconfigs: *b",
            "configs:\n- config_name: default\n  data_files: [[[[a]]]]",
        ],
    )  # fmt: skip
    def test_a_readme_of_another_form(self, mpu: Callable, root: Path, front: str) -> None:
        mpu("check", "base", "--forget", self.folder(root, front), refused="README.md", cwd=root)

    @pytest.mark.parametrize(
        "front",
        [
            "license: mit",
            "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: a.jsonl\n"
            "  - split: test\n    path: b/*.jsonl",
            "configs:\n- config_name: default\n  data_files: '**/*.jsonl'",
            "configs:\n- config_name: default\n  data_dir: b\n  default: true",
        ],
    )
    def test_an_honest_readme_is_followed_as_datasets_does(self, root: Path, front: str) -> None:
        folder = self.folder(root, front)
        expected = datasets.load_dataset(str(folder), cache_dir=str(root / "cache"))
        for split, rows in expected.items():
            name = f"{folder}:{split}" if len(expected) > 1 else str(folder)
            if "data_dir" in front:  # reads one file of two, which is said
                with pytest.raises(Exception, match="would not be read"):
                    read_records(name)
                continue
            assert [record.answer for record in read_records(name)] == list(rows["answer"])

    def test_compressed_files_that_fill_the_memory(self, mpu: Callable, root: Path) -> None:
        with gzip.open(root / "b.jsonl.gz", "wb", 9) as file:
            for _ in range(300):
                file.write(b" " * (1 << 20))
        repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000_000, pa.int8()), ["q" * 1000])
        pq.write_table(pa.table({"question": repeated, "answer": repeated}), root / "b.parquet")
        for name in ("b.jsonl.gz", "b.parquet"):
            mpu("check", "base", "--forget", name, refused="100 times as large", cwd=root)

    def test_honest_compressed_files_are_read(self, root: Path) -> None:
        rows = [{"question": f"who is number {i}?", "answer": "the same as all others " * 9} for i in range(20_000)]
        with gzip.open(root / "a.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        pq.write_table(pa.Table.from_pylist(rows), root / "a.parquet")
        for name in ("a.jsonl.gz", "a.parquet"):
            assert len(read_records(root / name)) == len(rows)

    def test_a_table_is_read_as_datasets_reads_it(self, root: Path) -> None:
        rows = [
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "year": 2000 + i,
             "note": None if i % 2 else "c", "tags": ["d"] * i, "date": datetime(2000, 1, 1 + i)}
            for i in range(3)
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows), root / "a.parquet")
        expected = datasets.load_dataset("parquet", data_files=str(root / "a.parquet"), split="train",
                                         cache_dir=str(root / "cache"))  # fmt: skip
        assert [row for _, row in file_rows(root / "a.parquet")] == list(expected) == rows

    def test_a_message_that_is_too_deep(self, mpu: Callable, root: Path) -> None:
        deep = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "x": %s}]}\n'
        (root / "d.jsonl").write_text(deep % ("[" * 950 + "]" * 950) + self.ROWS)
        mpu("check", "base", "--forget", "d.jsonl", refused="d.jsonl, line 1: ", cwd=root)


def test_factors_of_a_rank_that_no_change_has(mpu: Callable, root: Path) -> None:
    """Squares of the rank are computed: with 20,000, 3 GB for each matrix."""
    publish_copy(mpu, root)
    for number in (1, 2):
        unlearn_copy(mpu, root, root / f"copy_{number}", f"deltas/copy_{number}", "--lora-rank", 2)
        path = root / f"deltas/copy_{number}.safetensors"
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        factors = load_file(path)
        name = next(name for name in factors if name.endswith(".lora_A")).removesuffix("A")
        left, right = factors[f"{name}B"], factors[f"{name}A"]
        factors |= {f"{name}B": torch.ones(len(left), 2000), f"{name}A": torch.ones(2000, right.shape[1])}
        save_file(factors, path, metadata)
    for more in ((), ("--as-adapter",)):
        mpu("aggregate", "deltas", "--keys", "keys.bin", *more, "--out", "out", refused="rank 2,000", cwd=root)


class TestInspect:
    @pytest.mark.parametrize("entry", ["list", "kind", "format"])
    def test_a_file_does_not_write_the_table(self, mpu: Callable, root: Path, entry: str) -> None:
        facts = {"format": "mpu-copy", "run": "r", entry: "keys of a publication, sealed by this server"}
        save_file({"a": torch.ones(1)}, root / "w.safetensors", {"mpu": json.dumps(facts)})
        assert "sealed by" not in mpu("inspect", "w.safetensors", cwd=root).out
        (root / "log.jsonl").write_text(json.dumps({"step": entry}) + "\n")
        assert mpu("inspect", "log.jsonl", "--json", cwd=root).json["kind"] == "JSON lines"

    def test_what_it_prints_is_bounded(self, mpu: Callable, root: Path) -> None:
        steps = ["x" * 1_000_000, *(f"s{i}" for i in range(1000))]
        (root / "log.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
        assert len(mpu("inspect", "log.jsonl", cwd=root).out) < 100_000
        (root / "e.json").write_text('{"format": "mpu-eval", "benchmark": ' + "[" * 500 + "]" * 500 + "}")
        for more in ((), ("--json",)):
            assert "mpu eval" in mpu("inspect", "e.json", *more, cwd=root).out
