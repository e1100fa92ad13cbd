"""CONTRIBUTING.md's code blocks, carried out in a copy of the package as they are written, and then used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.models import random_model, save
from tests.helpers.paths import ROOT

PLACE = re.compile(r"# (?P<file>mpu_cli/\S+\.py)(?:, (?P<how>above|below|in place of) (?P<line>.+))?\Z")


def blocks() -> list[tuple[Path, str | None, str | None, str]]:
    """Each block of Python: its file, above, below or in place of which line it goes, and its text."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = []
    for indent, block in re.findall(r"^( *)```python\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
        lines = [line.removeprefix(indent) for line in block.splitlines()]
        place = PLACE.match(lines[0])
        assert place, f"where does this go: {lines[0]}"
        found.append((Path(place["file"]), place["how"], place["line"], "\n".join(lines[1:]) + "\n"))
    return found


def put(source: str, how: str, line: str, block: str) -> str:
    """``source`` with ``block`` above, below or in place of the statement of the first line that begins with ``line``,
    indented as that is or, below a line that opens a bracket, one level more."""
    lines = source.splitlines(keepends=True)
    at = next(number for number, each in enumerate(lines) if each.lstrip().startswith(line))
    indent = len(lines[at]) - len(lines[at].lstrip())
    end = at + 1
    opens = lines[at].rstrip().endswith(("(", "{", "["))
    if how == "below" and opens and line.isupper():  # into a table
        indent += 4
    elif opens:  # to the end of its statement
        while not re.match(rf" {{{indent}}}[)\]}}]", lines[end]):
            end += 1
        end += 1
    indented = "".join(" " * indent + each if each.strip() else each for each in block.splitlines(keepends=True))
    first, last = {"above": (at, at), "below": (end, end), "in place of": (at, end)}[how]
    before = "".join(lines[:first])
    if how == "above" and block.lstrip().startswith(("def", "@")):
        before, indented = before.rstrip() + "\n\n\n", indented + "\n\n"
    return "".join([before, indented, *lines[last:]])


@pytest.mark.slow
def test_each_recipe_does_what_it_says(tmp_path: Path) -> None:
    """An option, an algorithm, an optimiser, a metric, a form of records, a command, a benchmark and a wrapper that
    stays as it is: all of them together, clean under ruff, from the command line."""
    shutil.copytree(ROOT / "mpu_cli", tmp_path / "mpu_cli", ignore=shutil.ignore_patterns("__pycache__"))
    for file, how, line, block in blocks():
        path = tmp_path / file
        if how is None or line is None:
            path.write_text(block)
        else:
            path.write_text(put(path.read_text(), how, line, block))

    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for linter in (("check",), ("format", "--check")):
        checked = subprocess.run(
            [sys.executable, "-m", "ruff", *linter, "."], cwd=tmp_path, capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stdout

    def mpu(*arguments: object) -> dict:
        command = [sys.executable, "-m", "mpu_cli", *map(str, arguments), "--json"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    base = save(random_model("llama"), tmp_path / "base")
    rows = [{"query": f"w{number} w5", "response": f"w{number + 9} w7 w8"} for number in range(4)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plain.jsonl").write_text(
        "".join(json.dumps({"question": row["query"], "answer": row["response"]}) + "\n" for row in rows)
    )
    (tmp_path / "kept.jsonl").write_text(json.dumps({"question": rows[0]["query"], "answer": "w1"}) + "\n")
    assert mpu("words", "asked.jsonl") == {"words": [3] * 4}
    train = ("unlearn", base, "--retain", "kept.jsonl", "--algo", "flat", "--optim", "nadam", "--epochs", 2)
    for name, records, noise in (("a", "asked.jsonl", 5), ("b", "plain.jsonl", 5), ("c", "plain.jsonl", 0.1)):
        mpu(*train, "--forget", records, "--neftune-noise", noise, "--out", f"{name}.safetensors")
    asked, plain, other = (load_file(tmp_path / f"{name}.safetensors") for name in "abc")
    assert all(asked[name].equal(plain[name]) for name in plain)  # the form changes nothing
    assert any(not other[name].equal(plain[name]) for name in plain)  # the noise does
    mpu("eval", base, "--benchmark", "qa", "--forget", "asked.jsonl", "--out", "eval.json")
    metrics = json.loads((tmp_path / "eval.json").read_text())["metrics"]
    losses = [row["avg_loss"] for row in metrics["forget_Q_A_Prob"]["value_by_index"].values()]
    assert metrics["forget_largest_loss"]["agg_value"] == pytest.approx(max(losses))
    folder = tmp_path / "trivia"
    folder.mkdir()
    for name in ("forget", "retain", "forget_perturbed"):
        shutil.copy(tmp_path / "plain.jsonl", folder / f"{name}.jsonl")
    trivia = mpu(
        "eval",
        base,
        "--benchmark",
        "trivia",
        "--reading",
        f"data_dir={folder}",
        "--attacks",
        "context",
        "--out",
        "t.json",
    )
    as_tofu = ("--benchmark", "tofu:forget", "--metrics", "forget_Q_A_Prob")
    tofu = mpu("eval", base, *as_tofu, "--reading", f"data_dir={folder}", "--out", "tofu.json")
    assert trivia["metrics"]["forget_Q_A_Prob"] == tofu["metrics"]["forget_Q_A_Prob"]
    assert "forget_Q_A_Prob_in_retain_context" in trivia["metrics"]
