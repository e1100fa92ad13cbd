"""The server plays the client on its own records: what a step would do is what it then does."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mpu_cli.demo.model import make_people
from mpu_cli.lab.commands.rehearse import Rehearsal, TriedStep
from mpu_cli.measuring.verdict import Share, Verdict
from mpu_cli.observer import Observer
from mpu_cli.options.declare import from_flat
from mpu_cli.options.unlearning import Goal, Unlearning
from mpu_cli.protocol.updates import CheckedUpdate, default_updates_path, read_updates, write_update
from mpu_cli.records.knowledge import Probabilities, Tail, share_kept, share_left
from mpu_cli.training.data import read_dataset
from mpu_cli.training.stopping import hold_out
from tests.helpers.models import DemoModel
from tests.training.test_stopping import probabilities


@pytest.mark.parametrize(
    ("reaches", "keeps", "step"), [(0.8, 1.8, 1.2), (0.5, 0.5, 0.5), (1.0, 1.6, 1.26), (1.4, 1.3, None)]
)
def test_the_step_is_the_middle_of_those_that_pass(reaches: float, keeps: float, step: float | None) -> None:
    """As a ratio: as far, times, from the least that forgets as from the most that keeps; None if no step does both."""
    tried = []
    for number in range(4, 31):
        at = number / 10
        left, kept = (0.01 if at >= reaches else 0.5), (0.99 if at <= keeps else 0.5)
        tried.append(TriedStep(at, left, 2 * left, kept))
    assert Rehearsal(tried, Goal()).step == step


def test_an_uncertain_share_does_not_pass() -> None:
    """What is left may be below the limit and, so few are the records, be above it as well."""
    tried = [TriedStep(1.0, 0.04, 0.2, 1.0)]
    assert Rehearsal(tried, Goal()).step is None


@pytest.mark.parametrize("left", [-0.6, -0.3, -0.15, -0.05, 0.0, 0.04, 0.06, 0.3])
@pytest.mark.parametrize("half", [0.02, 0.08, 0.2])
@pytest.mark.parametrize("known", [1, 3])
def test_a_step_passes_if_check_would_pass_it(left: float, half: float, known: int) -> None:
    """Of what is left: as little as is asked for, of single records as well, and not so little that it shows."""
    tail = Tail(records=40, above=known, above_allowed=2, verbatim=0, verbatim_allowed=2)
    tried = TriedStep(1.0, left, left + half, 1.0, stands_out=not tail.is_allowed)
    verdict = Verdict(left=Share(left, left - half, left + half), kept=Share(1.0, 1.0, 1.0), kept_trained=None,
                      max_left=Goal().max_left, min_kept=Goal().min_kept, scores={}, tail=tail)  # fmt: skip
    assert tried.passes(Goal()) == verdict.passes


def test_a_record_that_cannot_be_written_ends_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of a rehearsal of hours is printed all the same."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    default_updates_path().mkdir(parents=True)  # a folder in the place of the file
    warnings = []
    observer = Observer()
    observer.warn = warnings.append  # type: ignore[method-assign]
    write_update(CheckedUpdate("run", 2, "pass", "receipt.json"), observer)
    assert "not in your record of updates" in warnings[0]
    default_updates_path().rmdir()
    write_update(CheckedUpdate("run", 2, "pass", "receipt.json"), observer)
    assert len(warnings) == len(read_updates()) == 1


@pytest.mark.slow
def test_records_that_the_public_model_knows_as_well_tell_nothing(
    mpu: Callable, tmp_path: Path, demo: DemoModel
) -> None:
    """In place of steps that leave inf %."""
    public = shutil.copytree(demo.model, tmp_path / "public")
    weights = load_file(public / "model.safetensors")
    save_file({name: 1.001 * x for name, x in weights.items()}, public / "model.safetensors", {"format": "pt"})
    mpu("publish", demo.model, "--public", public, "--copies", 2, "--kappa", 0.1, cwd=tmp_path)
    options = ("--forget", demo.forget, "--retain", demo.retain, "--unlearn", "max_steps=1")
    mpu("rehearse", "copy_1", "copy_2", *options, fails="no better than a model that never saw them", cwd=tmp_path)


def test_a_training_of_fixed_length_is_refused(mpu: Callable, tmp_path: Path, demo: DemoModel) -> None:
    """Nothing says when it is enough, and nothing is held out."""
    mpu("publish", demo.model, "--copies", 2, "--kappa", 0.001, cwd=tmp_path)
    records = ("--forget", demo.forget, "--retain", demo.retain)
    mpu("rehearse", "copy_1", "copy_2", *records, "--epochs", 2, refused="--epochs", cwd=tmp_path)


def test_other_copies_are_refused_before_the_work(mpu: Callable, tmp_path: Path, demo: DemoModel) -> None:
    """One of two, or one of another publication."""
    for name in ("a", "b"):
        mpu(
            "publish", demo.model, "--copies", 2, "--kappa", 0.001, "--out", name, "--keys", f"{name}.bin", cwd=tmp_path
        )
    records = ("--forget", demo.forget, "--retain", demo.retain, "--keys", "a.bin")
    for copies in (["a/copy_1"], ["a/copy_1", "b/copy_2"]):
        mpu("rehearse", *copies, *records, refused="name all copies", cwd=tmp_path)


@pytest.mark.slow
def test_a_step_does_what_the_rehearsal_says(mpu: Callable, tmp_path: Path, demo: DemoModel) -> None:
    """Played with the same records, the client's delta and a step give the shares that the rehearsal gave, judged by
    plain transformers; the rehearsal leaves nothing, in the folder or in the ledger."""
    unseen, held_out = tmp_path / "unseen.jsonl", tmp_path / "held_out.jsonl"
    strangers = make_people(16, 0)[10:]
    unseen.write_text("".join(json.dumps(row) + "\n" for person in strangers for row in person))
    files = {"forget": demo.forget, "retain": demo.retain}
    data = read_dataset(from_flat(Unlearning, {name: str(path) for name, path in files.items()}))
    rows = {json.loads(line)["question"]: line for line in demo.retain.read_text().splitlines()}
    chosen = [rows[record.question] for record in hold_out(data, 0.2).held_out]
    held_out.write_text("".join(line + "\n" for line in chosen))
    mpu("publish", demo.model, "--copies", 1, "--permanent-noise", 0.05, "--kappa", 0, cwd=tmp_path)
    options = ("--forget", demo.forget, "--retain", demo.retain, "--unseen", unseen)
    before = {path.name for path in tmp_path.iterdir()}
    played = mpu("rehearse", "copy_1", *options, "--unlearn", "max_steps=8", "--json", cwd=tmp_path, check=False)
    assert {path.name for path in tmp_path.iterdir()} == before
    unlearned = mpu("unlearn", "copy_1", *options, "--max-steps", 8, "--json", cwd=tmp_path)
    assert not any("ledger" in warning for warning in unlearned.json["warnings"])
    known = {path: probabilities(demo.model, path) for path in (demo.forget, held_out, unseen)}
    for row in played.json["steps"]:
        if row["step"] not in (0.7, 1.4):
            continue
        out = tmp_path / f"at_{row['step']}"
        mpu("aggregate", "deltas", "--keys", "keys.bin", "--step", row["step"], "--out", out, "--dtype", "float32",
            cwd=tmp_path)  # fmt: skip
        now = {path: probabilities(out, path) for path in known}
        after, before = (Probabilities.of(of[demo.forget], of[unseen]) for of in (now, known))
        assert math.isclose(row["left"], share_left(after, before), abs_tol=1e-4)
        assert math.isclose(row["kept"], share_kept(now[held_out], known[held_out]), abs_tol=1e-4)
