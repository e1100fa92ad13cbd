"""The table of the sets that a training reads, from which checks, digests and the ledger follow."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from mpu_cli.commands.unlearn import Unlearn
from mpu_cli.errors import UsageError
from mpu_cli.options.declare import RECORDS, declared_options, from_flat, option
from mpu_cli.options.unlearning import Unlearning
from mpu_cli.records.forms import Record
from mpu_cli.records.read import read_records
from mpu_cli.training.checks import check_options
from mpu_cli.training.data import SETS_OF_OPTION, Dataset, records_digest
from mpu_cli.training.ledger import default_ledger_path, read_ledger
from tests.helpers.models import random_model, save, write_records


def test_the_table_has_every_set_and_every_option_that_names_records() -> None:
    assert {name for names in SETS_OF_OPTION.values() for name in names} == {field.name for field in fields(Dataset)}
    of_unlearn = {name for name, option in declared_options(Unlearn).items() if option.metavar == RECORDS}
    assert of_unlearn | {"alternates"} == set(SETS_OF_OPTION)


@dataclass(frozen=True)
class WithSet(Dataset):
    paraphrases: Sequence[Record] = ()


@dataclass(frozen=True, kw_only=True)
class WithOption(Unlearning):
    paraphrases: str | None = option(None, "Records in other words.", metavar=RECORDS)


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_set_that_is_added_is_checked_digested_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    forget, added = [
        read_records(write_records(Path(name), 4, seed)) for seed, name in enumerate(("f.jsonl", "p.jsonl"))
    ]
    without, with_set = WithSet(forget), WithSet(forget, paraphrases=added)
    named = {"algo": "gradascent", "forget": "f.jsonl", "public_records": True, "paraphrases": "p.jsonl"}
    if by_variable:
        monkeypatch.setenv("MPU_UNLEARN_PARAPHRASES", "./p.jsonl")
    else:
        Path("p.jsonl").rename("paraphrases.jsonl")
        named["paraphrases"] = "paraphrases.jsonl"
    options = from_flat(WithOption, named)
    assert records_digest(with_set) == records_digest(without)
    check_options(options)

    monkeypatch.setitem(SETS_OF_OPTION, "paraphrases", ("paraphrases",))
    assert records_digest(with_set) != records_digest(without)
    assert with_set.records == [*forget, *added]
    with pytest.raises(UsageError, match="paraphrases"):
        check_options(options)


def test_each_set_changes_the_digest(tmp_path: Path) -> None:
    """Also a record that only moves from one set to another."""
    records = read_records(write_records(tmp_path / "r.jsonl", 2, 0))
    one, other = records[:1], records[1:]
    datasets = [Dataset(one)]
    datasets += [Dataset(one, **{name: other}) for name in ("retain", "held_out", "unseen")]
    datasets.append(Dataset(one, alternates=("none",)))
    assert len({records_digest(data) for data in datasets}) == len(datasets)


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["MPU_UNLEARN_UNSEEN", "MPU_CHECK_UNSEEN", None])
def test_unseen_records_are_asked_about_and_in_the_ledger(
    mpu: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    """--public-records holds for the records that only say when a training is done, too: they decide the delta."""
    save(random_model("llama"), tmp_path / "copy")
    name = "strangers.jsonl" if variable else "unseen.jsonl"
    for seed, file in enumerate(("surrogate.jsonl", "public.jsonl", name, "other.jsonl")):
        write_records(tmp_path / file, 6, seed)
    training = ["--forget", "surrogate.jsonl", "--retain", "public.jsonl", "--max-steps", 1, "--force"]
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / name))
    mpu("unlearn", "copy", *training, "--unseen", name, "--public-records", fails="where private records are expected",
        cwd=tmp_path)  # fmt: skip
    assert not default_ledger_path().exists()
    for unseen in (name, "other.jsonl"):
        mpu("unlearn", "copy", *training, "--unseen", unseen, "--trust-copy", cwd=tmp_path)
    entries = read_ledger(default_ledger_path())
    assert len({entry.data for entry in entries}) == 2
    assert {entry.records for entry in entries} == {18}


def test_records_are_digested_as_the_client_has_them(root: Path) -> None:
    """The digest in a tag is of texts, options apart: no tokenizer is involved."""
    records = read_records(root / "forget.jsonl")
    digests = {records_digest(Dataset(part)) for part in (records, records[1:], records[::-1])}
    assert len(digests) == 3
    assert all(len(digest) == len(hashlib.sha256(b"").hexdigest()) for digest in digests)
