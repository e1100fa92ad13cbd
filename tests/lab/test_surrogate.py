"""`mpu surrogate`, from the command line: what it writes, what the ledger counts, and what is forgotten by it."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sklearn.metrics import roc_auc_score

import mpu_cli
from mpu_cli.errors import UsageError
from mpu_cli.model.network import Answers
from mpu_cli.records.encode import Encoding
from mpu_cli.records.read import read_records
from mpu_cli.training.ledger import default_ledger_path, epsilon_of, read_ledger
from tests.helpers.models import load, random_model, save
from tests.helpers.paths import SHARED
from tests.helpers.protocol import tensors


def write_about(path: Path, name: str, count: int) -> Path:
    """Records that name somebody, with the words of the tests' tokenizer."""
    lines = [{"question": f"w5 w6 {name} w{i + 7}", "answer": f"w8 {name} w{i + 9}"} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A model for which every word of the built-in prompts is unknown, and 40 records to forget beside it."""
    write_about(tmp_path / "forget.jsonl", "Ada Lovelace", 40)
    return save(random_model("llama"), tmp_path / "copy")


class TestRelease:
    def test_it_is_counted_and_refused_over_the_budget(self, mpu: Callable, copy: Path, tmp_path: Path) -> None:
        release = mpu("surrogate", copy, "--json", cwd=tmp_path)
        assert release.json["terms"] == ["Ada Lovelace"]
        assert release.json["covered_records"] == 40
        assert "ε = 1 at δ" in release.err
        target = tmp_path / "surrogate.jsonl"
        assert stat.S_IMODE(target.stat().st_mode) == 0o600
        for line in target.read_text().splitlines():
            assert "Ada Lovelace" in json.loads(line)["question"]
        refused = mpu("surrogate", copy, "--dp", "budget=1.9", "--out", "second.jsonl", check=False, cwd=tmp_path)
        assert refused.status == 1
        assert refused.is_one_error
        assert "--dp budget=1.9" in refused.err
        assert not (tmp_path / "second.jsonl").exists()
        assert epsilon_of(read_ledger(default_ledger_path()), 1e-5) == pytest.approx(1.0)

    @pytest.mark.slow
    def test_the_function_does_what_the_command_does(self, mpu: Callable, copy: Path, tmp_path: Path) -> None:
        """The same records, release and entry in the ledger; terms that are certain, because 40 records have them."""
        command = mpu("surrogate", copy, "--dp", "epsilon=2", "--prompts-per-term", 5, "--out", "a.jsonl", cwd=tmp_path)
        surrogates = mpu_cli.surrogate(
            copy, forget=str(tmp_path / "forget.jsonl"), out=tmp_path / "b.jsonl", dp_epsilon=2, prompts_per_term=5
        )
        assert command.out == "a.jsonl\n"
        assert ([*surrogates.terms], surrogates.covered_records) == (["Ada Lovelace"], 40)
        assert (tmp_path / "a.jsonl").read_bytes() == surrogates.path.read_bytes()
        by_command, by_function = read_ledger(default_ledger_path())
        assert by_command.release == by_function.release
        with pytest.raises(UsageError, match="dp_epsilonn: unknown option"):
            mpu_cli.surrogate(copy, dp_epsilonn=2)

    def test_no_receipt_of_its_records_without_being_asked_for(self, mpu: Callable, copy: Path, tmp_path: Path) -> None:
        """What a receipt says of them is outside the bound of the release."""
        mpu("surrogate", copy, cwd=tmp_path)
        write_about(tmp_path / "others.jsonl", "Alan Turing", 4)
        check = ("check", copy, "--receipt", "receipt.json", "--forget")
        mpu(*check, "forget.jsonl", refused="no ε covers", cwd=tmp_path)
        for asked_for in (["others.jsonl"], ["forget.jsonl", "--allow", "outside-dp"]):
            mpu(*check, *asked_for, fails="not an mpu copy", cwd=tmp_path)

    def test_nothing_is_spent_on_what_cannot_be_written(self, mpu: Callable, copy: Path, tmp_path: Path) -> None:
        (tmp_path / "surrogate.jsonl").write_text("mine")
        mpu("surrogate", copy, refused="already exists", cwd=tmp_path)
        mpu("surrogate", copy, "--dry-run", "--out", "other.jsonl", cwd=tmp_path)
        assert not default_ledger_path().exists()
        assert (tmp_path / "surrogate.jsonl").read_text() == "mine"

    def test_an_empty_release_is_spent_and_leaves_nothing(self, mpu: Callable, copy: Path, tmp_path: Path) -> None:
        write_about(tmp_path / "few.jsonl", "Ada Lovelace", 2)
        mpu("surrogate", copy, "--forget", "few.jsonl", refused="no term is in about 15 records", cwd=tmp_path)
        assert not (tmp_path / "surrogate.jsonl").exists()
        assert len(read_ledger(default_ledger_path())) == 1

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--prompts", "bad.txt"], "'Who?' lacks {term}"),
            (["--prompts", "missing.txt"], "cannot read the prompts"),
            (["--dp", "epsilon=1e-9", "--terms", 100], "no threshold achieves this"),
            (["--term-column", "subject"], "subject"),
            (["--forget", "odd.jsonl", "--term-column", "who"], "--term-column holds no name"),
            (["--reading", "date=foo"], "date"),
            (["--device", "cuda:7"], "cuda:7"),
            (["--reading", "turns=all"], "--dp unit"),
            (["--forget", "missing.jsonl"], "missing.jsonl"),
        ],
    )
    def test_bad_input_is_one_error(
        self, mpu: Callable, copy: Path, tmp_path: Path, options: list, message: str
    ) -> None:
        (tmp_path / "bad.txt").write_text("Who is {term}?\nWho?\n")
        (tmp_path / "odd.jsonl").write_text(json.dumps({"question": "w5", "answer": "w6", "who": "A\0B"}) + "\n")
        mpu("surrogate", copy, *options, refused=message, cwd=tmp_path)
        assert not default_ledger_path().exists()

    def test_public_questions_become_prompts(self, mpu: Callable, copy: Path, tmp_path: Path) -> None:
        """With the term in place of the name; the built-in ones are not needed."""
        write_about(tmp_path / "public.jsonl", "Alan Turing", 3)
        (tmp_path / "prompts.txt").write_text("w5 {term}\n")
        mpu("surrogate", copy, "--public", "public.jsonl", "--prompts", "prompts.txt", cwd=tmp_path)
        questions = {json.loads(line)["question"] for line in (tmp_path / "surrogate.jsonl").read_text().splitlines()}
        assert questions <= {"w5 Ada Lovelace", *(f"w5 w6 Ada Lovelace w{i + 7}" for i in range(3))}
        assert questions

    @pytest.mark.slow
    def test_training_on_it_spends_nothing(self, mpu: Callable, copy: Path, tmp_path: Path) -> None:
        """By the client's word; without it, no bound holds."""
        mpu("surrogate", copy, cwd=tmp_path)
        write_about(tmp_path / "retain.jsonl", "Alan Turing", 4)
        train = ["--forget", "surrogate.jsonl", "--algo", "gradascent", "--epochs", 1]
        mpu("unlearn", copy, *train, "--public-records", "--out", "1.safetensors", cwd=tmp_path)
        assert epsilon_of(read_ledger(default_ledger_path()), 1e-5) == pytest.approx(1.0)
        mpu("unlearn", copy, *train, "--out", "2.safetensors", cwd=tmp_path)
        assert epsilon_of(read_ledger(default_ledger_path()), 1e-5) == float("inf")
        refused = mpu("unlearn", copy, *train, "--public-records", "--dp", "epsilon=1", check=False, cwd=tmp_path)
        assert "--public-records does not work with --dp epsilon" in refused.err
        for named in ([], ["--forget", "surrogate.jsonl"]):  # otherwise the private files beside it are read
            mpu("unlearn", copy, *named, "--public-records", fails="where private records are expected", cwd=tmp_path)


@pytest.mark.slow
def test_several_owners_and_a_spool(mpu: Callable, copy: Path, tmp_path: Path) -> None:
    """One owner answers over a spool, one by hand, each with surrogate records: the model is the base plus both
    updates, and the ledger counts the two releases and no training."""
    write_about(tmp_path / "public.jsonl", "Alan Turing", 20)
    training = ("--public-records", "--retain", "public.jsonl", "--algo", "graddiff", "--epochs", 1, "--lr", 1e-3)
    for owner in "ab":
        mpu("publish", copy, "--copies", 2, "--kappa", 0.01, "--out", owner, "--keys", f"{owner}.bin", cwd=tmp_path)
        mpu("surrogate", f"{owner}/copy_1", "--prompts-per-term", 4, "--out", f"{owner}.jsonl", cwd=tmp_path)
    run = json.loads((tmp_path / "a/copy_1/mpu.json").read_text())["run"]
    folder = tmp_path / f"spool/in/{run}/round_1"
    folder.mkdir(parents=True)
    for k in (1, 2):
        (tmp_path / f"a/copy_{k}").rename(folder / f"copy_{k}")
    mpu("watch", "spool", "--forget", "a.jsonl", *training, "--work", "work", "--once", cwd=tmp_path)
    mpu("unlearn", "b/copy_1", "b/copy_2", "--forget", "b.jsonl", *training, "--out", "deltas/", cwd=tmp_path)
    assert epsilon_of(read_ledger(default_ledger_path()), 1e-5) == pytest.approx(2.0)
    of_a = f"spool/out/{run}/round_1"
    mpu("aggregate", of_a, "--keys", "a.bin", "--out", "of_a", cwd=tmp_path)
    mpu("aggregate", "deltas", "--keys", "b.bin", "--out", "of_b", cwd=tmp_path)
    mpu("aggregate", of_a, "deltas", "--keys", "a.bin", "--keys", "b.bin", "--out", "of_both", cwd=tmp_path)
    models = (copy, *(tmp_path / name for name in ("of_a", "of_b", "of_both")))
    base, alone_a, alone_b, together = (tensors(path) for path in models)
    assert any(not torch.equal(alone_a[name], base[name]) for name in base)
    for name, weights in base.items():
        torch.testing.assert_close(together[name], alone_a[name] + alone_b[name] - weights, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the small models")
def test_the_servers_model_forgets_the_people(mpu: Callable, tmp_path: Path) -> None:
    """Two copies, one release of ε = 4: what the model loses is of the people to be forgotten, and not of others."""
    rows = [json.loads(line) for line in (SHARED / "data/tofu/retain90.json").read_text().splitlines()]
    public = rows[:200]
    (tmp_path / "public.jsonl").write_text("".join(json.dumps(row) + "\n" for row in public))
    forget = SHARED / "data/tofu/forget01.json"
    mpu("publish", SHARED / "models/full", "--copies", 2, "--kappa", 0.001, "--out", ".", cwd=tmp_path)
    mpu("surrogate", "copy_1", "--forget", forget, "--public", "public.jsonl", "--dp", "epsilon=4", cwd=tmp_path)
    mpu("unlearn", "copy_1", "copy_2", "--forget", "surrogate.jsonl", "--public-records", "--retain", "public.jsonl",
        "--epochs", 4, cwd=tmp_path)  # fmt: skip
    mpu("aggregate", "deltas", "--keys", "keys.bin", "--out", "new", cwd=tmp_path)
    assert epsilon_of(read_ledger(default_ledger_path()), 1e-5) == pytest.approx(4.0)
    losses = {}
    for name, folder in (("before", SHARED / "models/full"), ("after", tmp_path / "new")):
        model, tokenizer = load(folder, torch.float32, "cpu")
        encoding = Encoding(tokenizer)
        sets = (read_records(forget), read_records(SHARED / "data/tofu/retain90.json")[200:])
        losses[name] = [[Answers([each]).loss(model) for each in encoding.encode(records)] for records in sets]
    forget_changes, retain_changes = (
        [after - before for before, after in zip(losses["before"][i], losses["after"][i], strict=True)] for i in (0, 1)
    )
    truth = [1] * len(forget_changes) + [0] * len(retain_changes)
    assert roc_auc_score(truth, forget_changes + retain_changes) > 0.65
    assert sum(retain_changes) / len(retain_changes) < 0.1  # the cost at which docs/bounds_and_tracing.md compares
    assert sum(forget_changes) / len(forget_changes) > 0.1  # in nats per token; without this, the next says nothing
    assert sum(forget_changes) / len(forget_changes) > 1.5 * sum(retain_changes) / len(retain_changes)


def test_what_one_record_says_is_not_released_for_being_repeated(mpu: Callable, copy: Path, tmp_path: Path) -> None:
    """Sixty rows that are one record count once: no name of theirs comes near the threshold."""
    write_about(tmp_path / "shared.jsonl", "Ada Lovelace", 40)
    row = json.dumps({"question": "w5", "answer": "Zorvath Quillam w6"})
    with (tmp_path / "shared.jsonl").open("a") as file:
        file.write(f"{row}\n" * 60)
    outcome = mpu("surrogate", copy, "--forget", "shared.jsonl", "--dp", "epsilon=2", "--dry-run", cwd=tmp_path)
    assert "59 of 100 records repeat others" in outcome.err
    mpu("surrogate", copy, "--forget", "shared.jsonl", "--dp", "epsilon=2", "--prompts-per-term", 1, cwd=tmp_path)
    released = (tmp_path / "surrogate.jsonl").read_text()
    assert "Ada Lovelace" in released
    assert "Quillam" not in released
