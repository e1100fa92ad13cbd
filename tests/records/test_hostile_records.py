"""Records that somebody else wrote: cards that name other files, files that fill the memory."""

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

from mpu_cli.records.read import file_rows, read_records


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
            "configs: [5]", "configs: {a: b}", "a: [", "configs:\n- data_files: a.jsonl",
            "configs:\n- config_name: default\n  data_files: 5",
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
