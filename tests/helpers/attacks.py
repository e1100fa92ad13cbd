"""What tests of hostile files share: a copy, a training on it, and a change to one of its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

TRAINING = ["--algo", "npo", "--epochs", 1, "--batch-size", 3, "--lr", "1e-3"]
CHECK = ("--forget", "forget.jsonl", "--retain", "retain.jsonl")
WORD = "w9"  # which a hostile template or tokenizer treats in another way


def publish_copy(mpu: Callable, root: Path, *options: object, base: str = "base") -> Path:
    """The first of two copies of a model in ``place``."""
    mpu("publish", base, "--copies", 2, "--seed", 1, "--force", *options, cwd=root)
    return root / "copy_1"


def unlearn_copy(mpu: Callable, root: Path, copy: Path, out: str, *options: object, **expected: object):
    return mpu("unlearn", copy, *TRAINING, "--out", f"{out}.safetensors", "--force", *options, **expected, cwd=root)


def edit(path: Path, *without: str, **entries: object) -> None:
    table = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in table.items() if name not in without} | entries))


def publish_copies(mpu: Callable, root: Path) -> tuple[Path, Path]:
    mpu("publish", "base", "--copies", 2, "--out", root, "--keys", root / "keys.bin", cwd=root)
    return root / "copy_1", root / "copy_2"


def treat_word_differently(copy: Path) -> None:
    template = copy / "chat_template.jinja"
    text = template.read_text()
    assert "m['content']" in text
    template.write_text(text.replace("m['content']", f"(m['content'] | replace('{WORD}', 'w8'))"))


def write_records_with(word: str, root: Path) -> None:
    """Six records to forget, of which the first holds ``word``."""
    answers = [f"w6 {word}", *(f"w{i}" for i in range(10, 15))]
    rows = [json.dumps({"question": "w4 w5", "answer": answer}) + "\n" for answer in answers]
    (root / "forget.jsonl").write_text("".join(rows))


def check_receipt(mpu: Callable, root: Path) -> Path:
    """A receipt that the client signed: of a copy, compared with one of another publication."""
    publish_copy(mpu, root)
    mpu("publish", "base", "--copies", 2, "--out", "before", "--keys", "before/keys.bin", cwd=root)
    mpu("check", "copy_1", *CHECK, "--before", "before/copy_1", "--receipt", "receipt.json", check=False, cwd=root)
    return root / "receipt.json"
