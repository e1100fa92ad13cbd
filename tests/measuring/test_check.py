"""`mpu check` and its receipts: what passes, what is signed, and what a change to a receipt does."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mpu_cli
from mpu_cli.commands.receipt import _longer_step
from mpu_cli.demo.model import make_people
from mpu_cli.files.reader import fingerprint, open_checkpoint
from mpu_cli.files.sealing import default_identity_path
from mpu_cli.measuring.receipt import CopyFacts, Signature, as_text, new_receipt, read_receipt, with_signature
from mpu_cli.measuring.verdict import RecordScores, SetScore, Share, Verdict, judge, records_that_stand_out
from mpu_cli.observer import SILENT
from mpu_cli.protocol.updates import Update, write_update
from mpu_cli.records.knowledge import Probabilities, Tail, records_still_known, tail_of
from tests.helpers.attacks import CHECK, check_receipt, edit, publish_copy
from tests.helpers.models import DemoModel, random_model, save


@pytest.fixture
def folder(mpu: Callable, tmp_path: Path, demo: DemoModel) -> Path:
    """Copies of the demo's model, and of one that forgot everything: its weights in the last layer are shuffled."""
    people = make_people(12, 0)[10:]
    (tmp_path / "unseen.jsonl").write_text("".join(json.dumps(row) + "\n" for person in people for row in person))
    forgetful = shutil.copytree(demo.model, tmp_path / "forgetful")
    weights = load_file(forgetful / "model.safetensors")
    torch.manual_seed(0)
    weights |= {name: x + 0.1 * torch.randn_like(x) for name, x in weights.items() if "mlp" in name}
    save_file(weights, forgetful / "model.safetensors", {"format": "pt"})
    for name, model in (("same", demo.model), ("other", forgetful)):
        mpu("publish", model, "--copies", 2, "--kappa", 0.001, "--out", tmp_path / name,
            "--keys", tmp_path / f"{name}.bin")  # fmt: skip
    return tmp_path


def check(mpu: Callable, copy: Path, folder: Path, demo: DemoModel, *options: object, status: int = 1) -> dict:
    records = ("--forget", demo.forget, "--retain", demo.retain, "--unseen", folder / "unseen.jsonl")
    outcome = mpu("check", copy, *records, "--before", folder / "same/copy_2", *options, "--json", check=False)
    assert outcome.status == status, outcome.err
    return json.loads(outcome.out)


def probabilities(mpu: Callable, model: Path, records: Path, out: Path) -> list[float]:
    """Of each record, from `mpu eval`."""
    mpu(
        "eval", model, "--benchmark", "qa", "--forget", records, "--metrics", "forget_Q_A_Prob", "--out", out, "--force"
    )
    return [
        entry["prob"] for entry in json.loads(out.read_text())["metrics"]["forget_Q_A_Prob"]["value_by_index"].values()
    ]


@pytest.mark.slow
def test_shares_follow_from_the_numbers_of_eval(mpu: Callable, folder: Path, demo: DemoModel) -> None:
    """On a copy that forgot nothing, and on one that forgot everything; the interval holds the share."""
    unseen, before, out = folder / "unseen.jsonl", folder / "same/copy_2", folder / "eval.json"
    for name, verdict in (("same", (False, True)), ("other", (True, False))):
        copy = folder / name / "copy_1"
        document = check(mpu, copy, folder, demo)
        assert (document["forgotten"], document["kept_enough"]) == verdict
        known = {
            (model, records): fmean(probabilities(mpu, model, records, out))
            for model in (copy, before) for records in (demo.forget, unseen)
        }  # fmt: skip
        left = (known[copy, demo.forget] - known[copy, unseen]) / (known[before, demo.forget] - known[before, unseen])
        assert document["left"]["estimate"] == pytest.approx(left, abs=0.0101)
        assert document["left"]["low"] <= document["left"]["estimate"] <= document["left"]["high"]
    in_python = mpu_cli.check(
        folder / "other/copy_1", forget=str(demo.forget), retain=str(demo.retain), unseen=str(unseen), before=before,
    ).verdict  # fmt: skip
    assert in_python.left is not None
    assert in_python.left.estimate == document["left"]["estimate"]
    undecided = mpu("check", folder / "same/copy_1", "--forget", demo.forget, "--retain", demo.retain, check=False)
    assert "undecided" in undecided.out
    assert undecided.status == 1


def scores(*probabilities: float) -> RecordScores:
    return RecordScores(list(probabilities), [False] * len(probabilities))


def test_a_stranger_knows_nothing_that_is_left() -> None:
    """A model that gives each record what one gives that never saw it has 0 left, however easy records are to guess;
    one that changed nothing has all left."""
    public = {"forget": scores(*[0.1, 0.3] * 40), "unseen": scores(*[0.1] * 80)}
    before = {"forget": scores(*[0.9] * 80), "unseen": scores(*[0.2] * 80), "retain": scores(*[0.9] * 80)}
    stranger = before | {"forget": scores(*[0.2, 0.6] * 40)}
    verdict = judge(stranger, before, public=public, max_left=0.05, min_kept=0.95)
    assert verdict.left is not None
    assert (verdict.left.estimate, verdict.passes) == (0.0, True)
    assert judge(before, before, public=public, max_left=0.05, min_kept=0.95).left == Share(1.0, 1.0, 1.0)


@settings(max_examples=20, deadline=None)
@given(
    records=st.sampled_from([20, 40, 200]), share=st.floats(0.06, 0.5), below=st.floats(0.0, 0.3),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_no_record_makes_up_for_another(records: int, share: float, below: float, seed: int) -> None:
    """A model that gives more records word for word than the limit allows does not pass, however little it knows of the
    others; nor does one that lost more of the kept ones, however well it knows the others now."""
    draw = np.random.default_rng(seed)
    known = math.ceil(share * records)
    strangers = draw.beta(4, 10, records)  # about 0.3, and 0.12 around it
    forget = np.concatenate([np.full(known, 0.95), below * draw.random(records - known)])
    before = {name: scores(*[0.97] * records) for name in ("forget", "held_out")} | {"unseen": scores(*strangers)}
    word_for_word = RecordScores(list(forget), [number < known for number in range(records)])
    after = {"forget": word_for_word, "unseen": scores(*strangers), "held_out": before["held_out"]}
    assert not judge(after, before, max_left=0.05, min_kept=0.95).passes
    lost = {"held_out": scores(*[0.0] * known, *[1.0] * (records - known)), "forget": scores(*strangers)}
    verdict = judge(after | lost, before, max_left=0.05, min_kept=0.95)
    assert verdict.kept is not None
    assert verdict.kept.estimate == pytest.approx(1 - known / records, abs=0.0101)
    assert not verdict.passes


@settings(max_examples=20, deadline=None)
@example(records=20, known=0.96875, has_public=False, seed=398)
@given(
    records=st.sampled_from([20, 40, 200]), known=st.floats(0.6, 0.97), has_public=st.booleans(),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_one_record_that_is_still_known_is_too_many(records: int, known: float, has_public: bool, seed: int) -> None:
    """Of hundreds, however little is left in the mean, and as many as chance would let stand out; with ``--show`` it is
    named. Without it, the model passes."""
    draw = np.random.default_rng(seed)
    unseen = scores(*draw.beta(4, 200, 60))  # about 0.02, and 0.01 around it
    before = {name: scores(*[0.97] * records) for name in ("forget", "held_out")} | {"unseen": unseen}
    public = {"forget": scores(*draw.beta(4, 200, records)), "unseen": unseen} if has_public else None
    forgotten = draw.beta(2, 200, records)
    passed = judge(before | {"forget": scores(*forgotten)}, before, public=public, max_left=0.05, min_kept=0.95)
    assert passed.passes
    forgotten[7] = known
    after = before | {"forget": scores(*forgotten)}
    verdict = judge(after, before, public=public, max_left=0.05, min_kept=0.95)
    assert verdict.left
    assert verdict.stands_out
    passes_in_the_mean = verdict.left.estimate <= 0.05  # one of twenty that is known almost as before may not
    which = "some records are not forgotten" if passes_in_the_mean else "not forgotten"
    assert verdict.sentence == f"fail: {which}, the rest is kept"
    assert passes_in_the_mean or (records == 20 and known > 0.9)
    assert 7 in records_that_stand_out(after, before, public, 0.05)
    assert verdict.needs_another_round


def test_few_sets_that_nobody_saw_have_too_many_records_that_stand_out() -> None:
    """At most about one in twenty, which is what is allowed to chance, however the strangers are distributed."""
    draw = np.random.default_rng(0)
    for a, b in ((4, 10), (0.5, 8), (1, 1)):
        failed = 0
        for _ in range(200):
            after, unseen = draw.beta(a, b, 40), list(draw.beta(a, b, 60))
            tail = tail_of(Probabilities.of(after, unseen), Probabilities.of([0.97] * 40, unseen), None, 0.05)
            assert tail
            failed += not tail.is_allowed
        assert failed <= 0.08 * 200


@pytest.mark.parametrize("unseen", [3, 5, 10, 60])
def test_few_unseen_records_do_not_make_chance_look_like_knowledge(unseen: int) -> None:
    """At most about one in twenty sets that nobody saw has a record that is still known, from however few records the
    baseline is."""
    draw = np.random.default_rng(0)
    for a, b in ((4, 10), (2, 6)):
        failed = 0
        for _ in range(200):
            baseline = list(draw.beta(a, b, unseen))
            after, before = (Probabilities.of(forget, baseline) for forget in (draw.beta(a, b, 200), [0.97] * 200))
            failed += bool(records_still_known(after, before, None, 0.05))
        assert failed <= 0.08 * 200


@pytest.mark.parametrize("has_unseen", [False, True])
def test_what_anybody_guesses_hides_no_other_record(has_unseen: bool) -> None:
    """Neither a record to forget that the public model knows, nor an unseen one."""
    draw = np.random.default_rng(0)
    guesses, unseen = draw.beta(4, 200, 40), draw.beta(4, 200, 60)
    guesses[3] = unseen[5] = 0.9
    before = scores(*[0.97] * 40)
    after = np.array(guesses)
    after[7] = 0.95

    def sets(forget: RecordScores) -> dict[str, RecordScores]:
        return {"forget": forget, "held_out": before} | ({"unseen": scores(*unseen)} if has_unseen else {})

    verdict = judge(sets(scores(*after)), sets(before), public=sets(scores(*guesses)), max_left=0.05, min_kept=0.95)
    assert verdict.tail is not None
    assert verdict.tail.still_known == 1
    assert not verdict.passes


def test_a_record_that_was_hardly_known_and_still_is_has_a_name() -> None:
    """It is below what the others would have to have left to stand out."""
    unseen = scores(*[0.001, 0.002] * 30)
    before = {"forget": scores(*[0.97] * 39, 0.04), "unseen": unseen, "held_out": scores(*[0.9] * 40)}
    after = before | {"forget": scores(*[0.001] * 39, 0.04)}
    tail = judge(after, before, max_left=0.05, min_kept=0.95).tail
    assert tail is not None
    assert (tail.above, tail.still_known) == (0, 1)
    assert records_that_stand_out(after, before, None, 0.05) == [39]


def test_turns_of_one_dialogue_do_not_narrow_the_interval() -> None:
    """Seven equal turns of each dialogue say what one says."""
    draw = np.random.default_rng(0)
    dialogues = draw.random(12)
    widths = []
    for clusters in (None, [number for number in range(12) for _ in range(7)]):
        turns = np.repeat(dialogues, 7) if clusters else dialogues
        after = {"forget": RecordScores(list(turns), [False] * len(turns), clusters)}
        before = {"forget": RecordScores([1.0] * len(turns), [False] * len(turns), clusters)}
        left = judge(after, before, max_left=0.05, min_kept=0.95).left
        assert left is not None
        widths.append(left.high - left.low)
    assert widths[1] == pytest.approx(widths[0], rel=0.1)


@pytest.mark.parametrize(("left", "passes"), [(0.02, True), (0.2, False)])
def test_a_single_record_is_all_that_a_request_is_about(left: float, passes: bool) -> None:
    """One of a known probability: no others like it are drawn, only those that nobody saw."""
    before = {"forget": scores(0.9), "unseen": scores(*[0.0, 0.01] * 40), "held_out": scores(*[0.9] * 20)}
    after = before | {"forget": scores(0.005 + left * 0.895)}
    verdict = judge(after, before, max_left=0.05, min_kept=0.95)
    assert verdict.left is not None
    assert verdict.left.estimate == pytest.approx(left, abs=0.01)
    assert (verdict.passes, verdict.needs_another_round) == (passes, not passes)


@pytest.mark.parametrize(
    ("left", "kept", "sentence"),
    [
        (0.05, 0.95, "pass: forgotten, the rest is kept"),
        (0.06, 0.95, "fail: not forgotten, the rest is kept"),
        (0.05, 0.94, "fail: forgotten, the rest is not kept"),
        (-0.11, 0.95, "fail: forgotten beyond the baseline, the rest is kept"),
        (None, 0.94, "fail: forgetting is undecided (needs --before), the rest is not kept"),
    ],
)
def test_the_verdict_follows_from_the_shares(left: float | None, kept: float, sentence: str) -> None:
    verdict = Verdict(None if left is None else Share(left, left, left), Share(kept, kept, kept), None, 0.05, 0.95, {})
    assert verdict.sentence == sentence
    assert verdict.passes == sentence.startswith("pass")
    wide = Verdict(Share(0.05, 0.0, 0.11), Share(kept, kept, kept), None, 0.05, 0.95, {})
    assert "too few records" in wide.sentence
    if verdict.request and left and left > 0.05:
        assert "--step" not in verdict.request


def test_what_a_stranger_may_guess_is_not_decided() -> None:
    """A fifth is left: too much if unseen records have none of it; without them, it may be what anybody guesses."""
    before = {name: scores(*[0.9, 1.0] * 20) for name in ("forget", "held_out", "retain")}
    after = before | {"forget": scores(*[0.19, 0.2] * 20)}
    unseen = {"unseen": scores(*[0.0, 0.01] * 20)}
    undecided = judge(after, before, max_left=0.05, min_kept=0.95)
    assert undecided.sentence == "undecided: forgetting is undecided (needs --unseen or --public), the rest is kept"
    assert (undecided.step, undecided.needs_another_round, undecided.passes) == (None, False, False)
    assert "--unseen" in (undecided.request or "")
    assert judge(after | unseen, before | unseen, max_left=0.05, min_kept=0.95).is_forgotten is False
    nothing_left = after | {"forget": scores(*[0.01, 0.02] * 20)}
    assert judge(nothing_left, before, max_left=0.05, min_kept=0.95).passes


@pytest.mark.parametrize(
    ("left", "shortest", "longest"),
    [(0.229, 1.4, 1.6), (0.085, 1.1, 1.25), (0.156, 1.25, 1.375), (0.257, 1.25, 1.5)],
)
def test_a_longer_step_is_one_that_passed(left: float, shortest: float, longest: float) -> None:
    """Updates that `python -m tests.benchmarks.outcome` went along: what was left at one step, and how many times as
    long the shortest and the longest were that passed. Two of SmolLM2 with permanent noise, of the small model one with
    permanent noise and one of pdu, from 0.8 times the step."""
    verdict = Verdict(Share(left, left, left), Share(0.99, 0.99, 0.99), None, 0.05, 0.95, {})
    assert verdict.step is not None
    assert shortest <= verdict.step <= longest
    assert f"printed by {verdict.step:g}," in (verdict.request or "")


@given(left=st.floats(0.051, 2.0), kept=st.floats(0.95, 1.02))
def test_a_longer_step_asks_for_no_more_than_the_rest_can_lose(left: float, kept: float) -> None:
    """Longer the more is left, never where what is lost would pass its limit if it grew in proportion."""
    verdict = Verdict(Share(left, left, left), Share(kept, kept, kept), None, 0.05, 0.95, {})
    if verdict.step is None:
        assert left > 0.3 or kept < 0.97
    else:
        assert 1 < verdict.step <= 2
        assert verdict.step * (1 - kept) <= 0.05 + 1e-9


@pytest.mark.slow
def test_a_copy_that_reads_records_differently_is_refused(mpu: Callable, folder: Path, demo: DemoModel) -> None:
    """Its weights could have forgotten nothing: a template that shows another question is enough to look as if."""
    copy = folder / "same/copy_1"
    path = copy / "tokenizer_config.json"
    config = json.loads(path.read_text())
    template = copy / "chat_template.jinja"
    text = template.read_text() if template.exists() else config["chat_template"]
    changed = text.replace("m['content']", "m['content'][:9]")
    assert changed != text
    if template.exists():
        template.write_text(changed)
    else:
        path.write_text(json.dumps(config | {"chat_template": changed}))
    records = ("--forget", demo.forget, "--retain", demo.retain, "--before", folder / "same/copy_2")
    mpu("check", copy, *records, refused="is not that of the copy that was trained on")
    receipt = folder / "trusted.json"
    mpu("check", copy, *records, "--allow", "changed-reading", "--receipt", receipt, check=False)
    assert json.loads(receipt.read_text())["verdict"].startswith("undecided")
    assert "reads records otherwise" in mpu("receipt", receipt).err


@pytest.mark.slow
def test_the_next_command_after_what_was_not_forgotten_runs(
    mpu: Callable, folder: Path, demo: DemoModel, tmp_path: Path
) -> None:
    """As printed: on the copy that was checked, with the records and the way of reading them of the check."""
    spaced = shutil.copy(demo.forget, tmp_path / "my records.jsonl")
    failed = mpu("check", folder / "same/copy_1", "--forget", spaced, "--retain", demo.retain, "--goal", "held_out=0.3",
                 "--unseen", folder / "unseen.jsonl", "--before", folder / "same/copy_2", "--goal", "max_left=0.1",
                 "--scoring", "batch_size=7", check=False)  # fmt: skip
    [printed] = re.findall(r"next: `(.+?)`", " ".join(failed.err.split()))
    assert "--goal max_left=0.1,held_out=0.3" in printed
    assert "batch_size" not in printed
    command = shlex.split(printed)
    assert command[:3] == ["mpu", "unlearn", str(folder / "same/copy_1")]
    planned = mpu(*command[1:], "--dry-run", cwd=tmp_path)
    assert "10 records to forget" in planned.err + planned.out


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(given, id=str(given), marks=() if len({*given}) == 1 else pytest.mark.slow)  # all, and none
        for given in itertools.product([True, False], repeat=3)
    ],
)
def test_a_receipt_of_whatever_was_measured_can_be_read(
    mpu: Callable, folder: Path, demo: DemoModel, given: tuple[bool, ...]
) -> None:
    """Its verdict says what was lacking, and follows from what it holds."""
    options = (("--before", folder / "same/copy_2"), ("--retain", demo.retain), ("--unseen", folder / "unseen.jsonl"))
    chosen = [text for pair, is_given in zip(options, given, strict=True) if is_given for text in pair]
    for name in ("same", "other"):
        receipt = folder / f"{name}_receipt.json"
        outcome = mpu(
            "check", folder / name / "copy_1", "--forget", demo.forget, *chosen, "--receipt", receipt, "--json",
            check=False,
        )  # fmt: skip
        assert mpu("receipt", receipt, "--json").json["verdict"] == outcome.json["verdict"]
    entries = json.loads(receipt.read_text())
    assert {"retain", "unseen"} & set(entries["sets"]) == {
        text for text, is_given in zip(("retain", "unseen"), given[1:], strict=True) if is_given
    }
    edit(receipt, sets=["retain"])
    mpu("receipt", receipt, refused="records that it does not name")


def test_a_longer_step_is_applied_to_what_was_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is shown the command unless it would leave another owner's update out of the model, or add a delta
    that came in since."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    facts = CopyFacts(run="a", round=2, copy=1, copy_id="c", weights=f"blake3:{0:064}", reading_context=f"{0:064}")
    sets = dict.fromkeys(("forget", "retain", "unseen"), SetScore(16, 0.5, 0.0))
    verdict = Verdict(
        Share(0.2, 0.1, 0.3), Share(1.0, 0.9, 1.0), None, max_left=0.05, min_kept=0.95,
        scores=sets | {f"{name} before": score for name, score in sets.items()}, tail=Tail(16, 3, 2, 0, 0),
    )  # fmt: skip
    receipt = new_receipt(verdict, copy=facts, before=facts, public=None, records="", nonce="", version="")
    deltas = [tmp_path / f"{owner}.safetensors" for owner in "ab"]
    for number, delta in enumerate(deltas):
        save_file({"weight": torch.full((2,), float(number))}, delta)
    applied = [
        Update(owner, 1, [str(delta)], [fingerprint(open_checkpoint(delta))], f"/{owner}.bin", "", "/unlearned", 1.0)
        for owner, delta in zip("ab", deltas, strict=True)
    ]
    write_update(applied[0], SILENT)
    assert f"mpu aggregate {deltas[0]} --keys /a.bin" in (_longer_step(receipt) or "")
    content = deltas[0].read_bytes()
    deltas[0].write_bytes(deltas[1].read_bytes())
    assert _longer_step(receipt) is None
    deltas[0].write_bytes(content)
    write_update(applied[1], SILENT)
    assert _longer_step(receipt) is None


def test_limits_that_a_receipt_cannot_have_are_refused_first(mpu: Callable, tmp_path: Path) -> None:
    """Before anything is read: neither the copy nor the records are there."""
    command = ("check", "copy_1", "--forget", "forget.jsonl", "--receipt", "receipt.json")
    mpu(*command, "--goal", "max_left=0.025", refused="whole percents", cwd=tmp_path)
    mpu(*command, "--goal", "min_kept=11", refused="at most 10", cwd=tmp_path)
    mpu(*command, "--goal", "max_left=0.02", refused="forget.jsonl: no such file", cwd=tmp_path)


def test_a_receipt_is_signed_by_both_and_by_nobody_else(mpu: Callable, folder: Path, demo: DemoModel) -> None:
    """Without records; a number that was changed, another publication's keys and a wrong verdict are refused."""
    path = folder / "receipt.json"
    check(mpu, folder / "same/copy_1", folder, demo, "--receipt", path)
    text = path.read_text()
    rows = [json.loads(line) for file in (demo.forget, demo.retain) for line in file.read_text().splitlines()]
    assert not any(row["answer"] in text or row["question"] in text for row in rows)
    assert "not signed by the server" in mpu("receipt", path).err
    refused = mpu("receipt", path, "--keys", folder / "other.bin", "--copy", folder / "same/copy_1", check=False)
    assert refused.is_one_error
    assert "another publication" in refused.err
    assert path.read_text() == text
    sign = ("receipt", path, "--keys", folder / "same.bin", "--copy")
    unsigned = path.read_text()
    mpu(*sign, folder / "same/copy_1", "--client-key", "0" * 64, fails="not signed by the client")
    assert path.read_text() == unsigned
    assert "other weights" in mpu(*sign, folder / "same/copy_2", check=False).err
    reads_otherwise = shutil.copytree(folder / "same/copy_1", folder / "reads_otherwise")
    edit(reads_otherwise / "tokenizer_config.json", padding_side="left")
    assert "another tokenizer" in mpu(*sign, reads_otherwise, check=False).err
    save(random_model("llama"), folder / "smaller")
    for copy in (("--copy", folder / "same/copy_1"), ()):  # the server's mistakes are not put down to the client
        for wrong in (folder / "same/copy_2", folder / "forgetful", folder / "smaller"):
            refused = f"{wrong}: is not the model that was published"
            mpu("receipt", path, "--keys", folder / "same.bin", *copy, "--base", wrong, refused=refused)
    assert path.read_text() == unsigned
    edit(path, checked={"date": "2026-01-01", "model": None})
    assert "not both there" in mpu("receipt", path, check=False).err
    path.write_text(unsigned)
    mpu("receipt", path, "--copy", folder / "same/copy_1", refused="add --keys FILE", status=2)
    status = folder / "status"  # as the client has it: whose turn it is follows from the verdict
    shutil.copytree(folder / "same/copy_1", status / "copy_1")
    shutil.copy(path, status)
    [step] = mpu("status", status, "--json").json["next"]
    assert step["turn"] == "client"
    assert json.loads(unsigned)["verdict"] in step["step"]
    mpu(*sign, folder / "same/copy_1")
    outcome = mpu("receipt", path, "--json")
    assert "signed as the server" in outcome.err
    assert outcome.err.count("anyone can have signed") == 2
    assert (outcome.json["checked"]["model"], outcome.json["server_pinned"]) == (None, False)
    public = {party: outcome.json[party]["public_key"] for party in ("client", "server")}
    pinned = mpu("receipt", path, "--client-key", public["client"], "--server-key", public["server"], "--json")
    assert (pinned.json["client_pinned"], pinned.json["server_pinned"]) == (True, True)
    assert "anyone" not in pinned.err
    assert "not signed by the server" in mpu("receipt", path, "--server-key", public["client"], check=False).err
    assert "compared with is by the client's word" in outcome.err
    for wrong_copy, reason in ((folder / "other/copy_1", "another copy"), (demo.model, "another copy")):
        mpu(*sign, folder / "same/copy_1", "--before", wrong_copy, refused=reason)
    mpu(*sign, folder / "same/copy_1", "--before", folder / "same/copy_2")
    assert json.loads(path.read_text())["checked"]["before"] is True
    assert "says so, too, of the copy that it was compared with" in mpu("receipt", path).err
    forged = with_signature(with_signature(read_receipt(path), "client", bytes(32)), "server", bytes(32))
    (folder / "forged.json").write_text(as_text(forged))
    mpu("receipt", folder / "forged.json", *sign[2:], folder / "same/copy_1", fails="somebody else")
    signed_receipt = json.loads(path.read_text())
    for change in (
        lambda entries: entries.update(left=1),
        lambda entries: entries.update(left=-0.0),
        lambda entries: entries.update(min_kept=float("nan")),
        lambda entries: entries.update(max_left=99),
        lambda entries: entries.update(public="blake3:" + "0" * 64),
        lambda entries: entries["checked"].update(model=entries["copy"]["weights"]),
        lambda entries: entries.pop("checked"),
        lambda entries: entries.update(nonce="0" * 64),
        lambda entries: entries.update(records="0" * 64),
        lambda entries: entries["copy"].update(round=7),
        lambda entries: entries["copy"].update(run="half a character \ud800"),
        lambda entries: entries.update(client=None),
        lambda entries: entries["client"].update(signature=entries["server"]["signature"]),
        lambda entries: entries.update(verdict="pass: forgotten, the rest is kept"),
        lambda entries: entries.update(more=1),
    ):
        entries = json.loads(json.dumps(signed_receipt))
        change(entries)
        (folder / "changed.json").write_text(json.dumps(entries))
        assert mpu("receipt", folder / "changed.json", check=False).is_one_error


@pytest.mark.slow
def test_a_receipt_does_not_contradict_itself(mpu: Callable, folder: Path, demo: DemoModel) -> None:
    """Whoever signs: what cannot be measured is refused, and a key under which anything has a signature."""
    path = folder / "receipt.json"
    check(mpu, folder / "same/copy_1", folder, demo, "--receipt", path)
    receipt = read_receipt(path)
    assert receipt.before is not None
    assert (receipt.max_left, receipt.min_kept) == (5, 95)
    assert receipt.left == pytest.approx(100, abs=2)
    for changes in (
        {"before": None},
        {"before": receipt.copy},
        {"left": 900},
        {"left_high": None},
        {"records_at_most": 3},
        {"left": 1, "left_high": 1},
    ):
        changed = with_signature(msgspec.structs.replace(receipt, **changes), "client", bytes(32))
        (folder / "changed.json").write_text(as_text(changed))
        assert mpu("receipt", folder / "changed.json", check=False).is_one_error
    # With the point of order one as key and as commitment, 0 signs every message.
    one = "01" + "00" * 31
    for key in (one, one[:62] + "80"):
        forged = msgspec.structs.replace(receipt, client=Signature(public_key=key, signature=one + "00" * 32))
        (folder / "forged.json").write_text(as_text(forged))
        mpu("receipt", folder / "forged.json", refused="vouches for nothing")
    twice = path.read_text().replace('"verdict":', '"verdict": "pass: forgotten, the rest is kept", "verdict":')
    (folder / "changed.json").write_text(twice)
    assert "'verdict' twice" in mpu("receipt", folder / "changed.json", check=False).err


@pytest.mark.slow
def test_a_receipt_does_not_link_requests(mpu: Callable, folder: Path, demo: DemoModel) -> None:
    """Two of the same records share no entry that tells so, and the key that opens one does not open the other."""
    keys, receipts = [], []
    for name in ("first.json", "second.json"):
        check(mpu, folder / "same/copy_1", folder, demo, "--receipt", folder / name)
        receipts.append(json.loads((folder / name).read_text()))
        records = ("--forget", demo.forget, "--retain", demo.retain, "--unseen", folder / "unseen.jsonl")
        keys += re.findall("--opening ([0-9a-f]{64})", mpu("receipt", folder / name, *records).err)
    assert receipts[0]["records"] != receipts[1]["records"]
    assert keys[0] != keys[1]
    mpu("receipt", folder / "second.json", *records, "--opening", keys[0], fails="other records")
    mpu("receipt", folder / "second.json", *records[:4], fails="other records")


@pytest.mark.slow
def test_records_that_are_equal_are_one_to_check(mpu: Callable, folder: Path, demo: DemoModel) -> None:
    """Neither a share nor its interval knows whether a record stands there once or five times, with other spaces."""
    five = folder / "five.jsonl"
    lines = demo.forget.read_text()
    five.write_text("".join(lines.replace("?", f"?{count * ' '}") for count in range(5)))
    documents = [
        mpu("check", folder / "other/copy_1", "--forget", forget, "--retain", demo.retain, "--before",
            folder / "same/copy_2", "--json", check=False).json
        for forget in (demo.forget, five)
    ]  # fmt: skip
    assert documents[0]["left"] == documents[1]["left"]
    assert documents[0]["scores"]["forget"] == documents[1]["scores"]["forget"]


def test_shares_are_rounded_against_the_model() -> None:
    """What is left up and what is kept down, so that a limit is kept by the unrounded number as well."""
    before = {"forget": scores(*[1.0] * 50), "retain": scores(*[1.0] * 50)}
    for after, kept, passes in ((0.0501, 1.0, False), (0.05, 1.0, True), (0.01, 0.9499, False), (0.01, 0.95, True)):
        verdict = judge(
            {"forget": scores(*[after] * 50), "retain": scores(*[kept] * 50)}, before, max_left=0.05, min_kept=0.95
        )
        assert verdict.passes is passes
        assert not verdict.left or str(verdict.left.low)[0] != "-"


@pytest.mark.slow
def test_a_receipt_of_private_records_is_asked_for_twice(
    mpu: Callable, folder: Path, demo: DemoModel, tmp_path: Path
) -> None:
    """No ε covers what it says, so --receipt alone is refused after a training under DP."""
    records = ("--forget", demo.forget, "--retain", demo.retain)
    mpu("unlearn", folder / "same/copy_2", *records, "--algo", "graddiff", "--epochs", 1, "--dp", "epsilon=8",
        "--out", tmp_path / "deltas/")  # fmt: skip
    receipt = tmp_path / "receipt.json"
    check = ("check", folder / "same/copy_1", "--receipt", receipt)
    ask = (*check, *records, "--before", folder / "same/copy_2")
    mpu(*ask, refused="no ε covers")
    # The records count, and not what the server calls its copies: another publication, and a part of the records.
    mpu(*check, *records, "--before", folder / "other/copy_2", refused="no ε covers")
    first, *_ = demo.forget.read_text().splitlines()
    (tmp_path / "part.jsonl").write_text(json.dumps({name: f" {text} " for name, text in json.loads(first).items()}))
    mpu(*check, "--forget", tmp_path / "part.jsonl", refused="no ε covers")
    assert not receipt.exists()
    mpu(*check, "--forget", folder / "unseen.jsonl", "--before", folder / "same/copy_2", check=False)
    assert receipt.exists()
    receipt.unlink()
    mpu(*ask, "--allow", "outside-dp", check=False)
    assert receipt.exists()


@pytest.mark.slow
def test_a_receipt_is_of_these_records_and_of_this_model(
    mpu: Callable, folder: Path, demo: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An auditor with the records and the client's key sees that they were measured, in whatever order; without the key
    nobody does. With --base the server signs the fingerprint of its model, as ``mpu inspect`` gives it to others."""
    path = tmp_path / "receipt.json"
    check(mpu, folder / "same/copy_1", folder, demo, "--receipt", path)
    mpu("receipt", path, "--keys", folder / "same.bin", "--copy", folder / "same/copy_1", "--base", demo.model)
    assert json.loads(path.read_text())["checked"]["model"] == fingerprint(open_checkpoint(demo.model))
    reversed_records = tmp_path / "reversed.jsonl"
    reversed_records.write_text("".join(line + "\n" for line in reversed(demo.forget.read_text().splitlines())))
    records = ("--forget", reversed_records, "--retain", demo.retain, "--unseen", folder / "unseen.jsonl")
    [key] = re.findall("--opening ([0-9a-f]{64})", mpu("receipt", path, *records).err)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "auditor"))
    assert "other records" in mpu("receipt", path, *records, check=False).err
    assert "those that were measured" in mpu("receipt", path, *records, "--opening", key).err
    assert "other records" in mpu("receipt", path, "--forget", demo.retain, "--opening", key, check=False).err


@pytest.mark.slow
def test_the_server_countersigns_without_the_copy(mpu: Callable, folder: Path, demo: DemoModel, tmp_path: Path) -> None:
    """One that it sealed for its client it cannot read: it makes it again from the model, and sees another."""
    keys = tmp_path / "keys.bin"
    mpu("publish", demo.model, "--copies", 1, "--kappa", 0, "--permanent-noise", 0.01, "--dtype", "float32",
        "--max-noise", 0.5, "--copy-recipients", default_identity_path(), "--out", tmp_path,
        "--keys", keys)  # fmt: skip
    check(mpu, tmp_path / "copy_1.age", folder, demo, "--receipt", tmp_path / "receipt.json")
    before = sorted(tmp_path.iterdir())
    for base in ((), ("--base", demo.model), ("--base", demo.model)):  # again, as it may be asked to
        assert "return" in mpu("receipt", tmp_path / "receipt.json", "--keys", keys, *base).err
        model = fingerprint(open_checkpoint(demo.model)) if base else None
        assert json.loads((tmp_path / "receipt.json").read_text())["checked"]["model"] == model
    facts = mpu("inspect", tmp_path / "receipt.json", "--json").json
    assert facts.keys() >= {"signed as the client", "signed as the server"}
    assert facts["verdict"].startswith("fail")
    assert sorted(tmp_path.iterdir()) == before
    weights = load_file(folder / "same/copy_1/model.safetensors")
    shutil.copytree(folder / "same/copy_1", tmp_path / "changed")
    metadata = open_checkpoint(folder / "same/copy_1").metadata
    save_file({**weights, "model.norm.weight": 2 * weights["model.norm.weight"]},
              tmp_path / "changed/model.safetensors", metadata)  # fmt: skip
    check(mpu, tmp_path / "changed", folder, demo, "--receipt", tmp_path / "changed.json")
    mpu("receipt", tmp_path / "changed.json", "--keys", folder / "same.bin", refused="other weights were measured")


@pytest.mark.slow
def test_a_sealed_copy_is_opened_and_removed(mpu: Callable, folder: Path, demo: DemoModel) -> None:
    """check, `eval --delta` and audit-delta read a sealed copy as they read a plain one; nothing of it stays."""
    mpu("publish", demo.model, "--copies", 1, "--kappa", 0, "--permanent-noise", 0.01, "--copy-recipients",
        default_identity_path(), "--out", folder / "sealed", "--keys", folder / "sealed.bin")  # fmt: skip
    before = sorted(folder.rglob("*"))
    document = check(mpu, folder / "sealed/copy_1.age", folder, demo)
    assert document["forgotten"] is False
    assert sorted(folder.rglob("*")) == before
    records = ("--forget", demo.forget, "--retain", demo.retain)
    delta, out = folder / "d.safetensors", folder / "sealed.json"
    mpu("unlearn", folder / "sealed/copy_1.age", *records, "--epochs", 1, "--out", delta, "--trust-copy")
    measured = ("--benchmark", "qa", *records, "--delta", delta, "--metrics", "forget_Q_A_ROUGE", "--out", out)
    mpu("eval", folder / "sealed/copy_1.age", *measured, "--no-texts")
    assert "subspace of the inputs" in mpu("audit-delta", folder / "sealed/copy_1.age", delta, *records).out
    assert sorted({*folder.rglob("*")} - {*before}) == [delta, out]
    rows = [json.loads(line) for line in demo.forget.read_text().splitlines()]
    text = out.read_text()
    assert not any(row["answer"] in text or row["question"] in text for row in rows)
    assert json.loads(text)["metrics"]["forget_Q_A_ROUGE"]["value_by_index"]["0"]["rougeL_recall"] is not None


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


@pytest.mark.slow
def test_a_check_against_the_copy_itself_or_a_later_one(mpu: Callable, root: Path) -> None:
    for number in (1, 2):
        options = ("--copies", 2, "--run", f"one:{number}")
        mpu("publish", "base", *options, "--out", f"round_{number}", "--keys", f"{number}.bin", cwd=root)
    for before, complaint in (("round_1/copy_1", "the copy that you trained on"), ("round_2/copy_1", "swapped")):
        mpu("check", "round_1/copy_1", "--forget", "forget.jsonl", "--before", before, refused=complaint, cwd=root)


def test_the_copy_to_check_goes_where_publish_says(mpu: Callable, root: Path) -> None:
    """Beside the copy that was trained on, which has the same name: in its place, it would be compared with itself."""
    training = ("--forget", "forget.jsonl", "--retain", "retain.jsonl", "--max-steps", 1)
    mpu("publish", "base", "--copies", 1, "--kappa", 0, "--out", "sent", cwd=root)
    mpu("unlearn", "sent/copy_1", *training, cwd=root)
    mpu("aggregate", "deltas", "--keys", "keys.bin", cwd=root)
    published = mpu("publish", "unlearned", "--kappa", 0, "--out", "sent_again", cwd=root)
    [folder, beside, command] = re.search(
        r"in a folder (\S+) that it puts beside its (\S+); there it runs `(.+?)`", published.err
    ).groups()
    client = root / "sent"
    assert (client / beside).is_dir()
    (root / "sent_again").rename(client / folder)
    mpu("check", beside, cwd=client, fails="the copy that you trained on")
    assert mpu(*shlex.split(command)[1:], "--json", cwd=client, check=False).json["verdict"]
    shutil.rmtree(client / beside)
    shutil.move(client / folder / beside, client)
    mpu("check", beside, cwd=client, refused="replaced since you trained on it")
